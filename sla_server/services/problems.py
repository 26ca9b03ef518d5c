"""What the server or its agents cannot do just now, since when and why: the list of the page and of /health.

Four sources:

    PRESSURE of a process      what it says about itself; gone with its next report without it
    no PRESSURE of dbmanager   it reports every 2 s: silent for SILENT_NS, it is away or hangs. What it said
                               last (a thread dies of a poisoned queue) stays, because it tells why
    PRESSURE of supervisor     which parts make no progress, or end again and again; said of the part. Silent
                               itself, once it has been heard: it hangs, and what dies is not started again
    ALERT spool-overflow       an agent drops cuts, told at most every 10 s while it lasts; over after CALM_NS

Pure; belongs to the main loop. Not in here: a database that cannot be read, which each reader sees itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pmdaemon.wire.messages.server import Pressure
from sla_server.services.rows import Row

KEEPER: Final = "dbmanager"
SUPERVISOR: Final = "supervisor"
SILENT_NS: Final = 10_000_000_000  # five reports missed
CALM_NS: Final = 30_000_000_000  # two repeats of an alert missed, and a reconnect between them
SPOOL_ALERT: Final = "spool-overflow"
MOST_AGENTS: Final = 10  # named one by one; of the others only the number


MISSED: Final = {
    KEEPER: "it does not run, or hangs; the log says more. Agents keep their cuts meanwhile",
    SUPERVISOR: "it hangs or is stopped. All else goes on, but what dies is not started again",
}


class _Heard(NamedTuple):
    """The newest report of a process, and when it came."""

    report: Pressure
    at_ns: int
    at_us: int


class _Overflow(NamedTuple):
    """An agent that drops cuts."""

    since_us: int
    newest_ns: int
    text: str


def supervised(report: Pressure) -> list[Row]:
    """What the supervisor says of its parts, as rows of those parts."""
    return [{"process": problem.what, **problem._asdict()} for problem in report.problems]


class Problems:
    """See the module."""

    def __init__(self, now_ns: int, now_us: int) -> None:
        nothing = Pressure(KEEPER, now_us, {}, {})
        self._heard = {KEEPER: _Heard(nothing, now_ns, now_us)}
        self._overflows: dict[str, _Overflow] = {}
        self._names: dict[str, str] = {}

    def report(self, report: Pressure, now_ns: int, now_us: int) -> None:
        """A process has told of itself."""
        self._heard[report.name] = _Heard(report, now_ns, now_us)

    def name(self, gateway_id: str, name: str) -> None:
        """What people call a gateway."""
        self._names[gateway_id] = name

    def name_of(self, gateway_id: str) -> str:
        """What people call a gateway; its id while nobody has told."""
        return self._names.get(gateway_id, gateway_id)

    def alert(self, gateway_id: str, kind: str, text: str, at_us: int, now_ns: int) -> None:
        """An agent's alert; only those of its spool are looked at."""
        if kind == SPOOL_ALERT:
            before = self._overflows.get(gateway_id)
            since_us = before.since_us if before is not None else at_us
            self._overflows[gateway_id] = _Overflow(since_us, now_ns, text)

    def now(self, now_ns: int) -> list[Row]:
        """``[{process, what, since_us, reason}]``, the server's own first."""
        rows = []
        for name, heard in list(self._heard.items()):
            is_silent = now_ns - heard.at_ns > SILENT_NS
            if is_silent and name not in MISSED:  # pairs come and go; a lost gateway is reported by itself
                del self._heard[name]
                continue
            if name == SUPERVISOR:
                rows += supervised(heard.report) if not is_silent else []
            else:
                rows += [{"process": name, **problem._asdict()} for problem in heard.report.problems]
            if is_silent:
                silent_s = (now_ns - heard.at_ns) // 1_000_000_000
                reason = f"{name} has not reported for {silent_s} s: {MISSED[name]}"
                rows.append({"process": name, "what": name, "since_us": heard.at_us, "reason": reason})
        return rows + self._of_agents(now_ns)

    def _of_agents(self, now_ns: int) -> list[Row]:
        self._overflows = {
            gateway_id: item
            for gateway_id, item in self._overflows.items()
            if now_ns - item.newest_ns <= CALM_NS
        }
        rows = [
            {
                "process": self.name_of(gateway_id),
                "what": "spool",
                "since_us": item.since_us,
                "reason": item.text,
            }
            for gateway_id, item in self._overflows.items()
        ]
        rows.sort(key=lambda row: (row["since_us"], row["process"]))
        if more := rows[MOST_AGENTS:]:
            reason = f"{len(more)} more gateways drop cuts: their spools are full"
            rows[MOST_AGENTS:] = [
                {"process": "agents", "what": "spool", "since_us": more[0]["since_us"], "reason": reason}
            ]
        return rows
