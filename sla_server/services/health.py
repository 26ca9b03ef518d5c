"""Health of the server as ``services`` knows it: fullness, problems, and gateways that have not come back.

``Pressures`` keeps the newest PRESSURE of each process: how full is what data pass through. A mailbox or
queue is *pressed* from HIGH on until it falls below LOW; each time it becomes so, and each time something was
refused for want of room after a quiet minute, one event says so. ``Problems`` is the list on the page and in
/health. ``AwaitedGateways`` are those whose session the server itself ended. Plain state without a clock;
belongs to the main loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pmdaemon.wire.messages.server import Pressure
from sla_server.rows import Row, Rows
from sla_server.services.rows import event_row

HIGH: Final = 0.8
LOW: Final = 0.6
STALE_NS: Final = 10_000_000_000  # five reports missed: the process is away, its figures say nothing
QUIET_NS: Final = 60_000_000_000


class Pressures:
    """The newest report of each process, and which ways are pressed."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Pressure, int]] = {}
        self._pressed: set[tuple[str, str]] = set()
        self._refused_ns: dict[tuple[str, str], int] = {}

    def add(self, report: Pressure, now_ns: int) -> list[tuple[str, Row]]:
        """Take a report; returns events to be raised."""
        before = self._newest.get(report.name)
        self._newest[report.name] = (report, now_ns)
        events = []
        for way, ratio in report.fullness.items():
            key = (report.name, way)
            if ratio >= HIGH and key not in self._pressed:
                self._pressed.add(key)
                text = f"{report.name}: {way} is {ratio:.0%} full; data wait before it"
                events.append(_event(report, way, text))
            elif ratio < LOW:
                self._pressed.discard(key)
        known = before[0].refused if before is not None else {}
        for what, count in report.refused.items():
            # A counter that went back belongs to a new process.
            more = count - known.get(what, 0) if count >= known.get(what, 0) else count
            key = (report.name, what)
            if more > 0:
                if now_ns - self._refused_ns.get(key, -QUIET_NS) >= QUIET_NS:
                    text = f"{report.name}: no room for {what.replace('_', ' ')}, {count} since its start"
                    events.append(_event(report, what, text))
                self._refused_ns[key] = now_ns
        return events

    def of(self, name: str, now_ns: int) -> dict[str, Any] | None:
        """``{fullness, refused}`` of a process for the live snapshot; None without a recent report."""
        found = self._newest.get(name)
        if found is None or now_ns - found[1] > STALE_NS:
            return None
        return {"fullness": found[0].fullness, "refused": found[0].refused}


def _event(report: Pressure, what: str, text: str) -> tuple[str, Row]:
    details = {"fullness": report.fullness, "refused": report.refused}
    subject = f"{report.name}/{what}"
    return event_row("back-pressure", "warning", "server", subject, text, report.at_us, details)


# -- What the server or its agents cannot do at present, since when and why
#
# Four sources:
#
#     PRESSURE of a process      what it says about itself; gone with its next report without it
#     no PRESSURE of dbmanager   it reports every 2 s: silent for SILENT_NS, it is away or hangs. What it said
#                                last (a thread dies of a poisoned queue) stays, because it tells why
#     PRESSURE of supervisor     which parts make no progress, or end again and again; said of the part. If it
#                                falls silent itself it hangs, and what dies is not started again
#     ALERT spool-overflow       an agent drops cuts; sent every 10 s at most, ended after CALM_NS
#
# Not in here: a database that cannot be read, which each reader sees itself.


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
        """The newest report of a process."""
        self._heard[report.name] = _Heard(report, now_ns, now_us)

    def name(self, gateway_id: str, name: str) -> None:
        """What people call a gateway."""
        self._names[gateway_id] = name

    def name_of(self, gateway_id: str) -> str:
        """What people call a gateway; its id as long as the name is not known."""
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


# -- Gateways whose session the server itself ended, or forgot in a restart
#
# A pair that stops says ``detached``, not ``lost``: the fault is ours, and the agent dials in again within
# seconds, so no alarm is raised. One that has not come back after ``LIMIT_S`` is lost after all: that
# is said once and stored, so that the next restart does not await it again.


LIMIT_S: Final = 60.0
"""PMDaemon pauses at most 10 s before its restart, agents at most 5 s between two tries (their default)."""
REASON: Final = f"has not come back within {LIMIT_S:g} s of the server's own restart"


class AwaitedGateways:
    """Who is awaited, by gateway_id: its name and until when (monotonic ns)."""

    def __init__(self, awaited: Mapping[str, str], now_ns: int) -> None:
        self._due: dict[str, tuple[str, int]] = {}
        for gateway_id, name in awaited.items():
            self.await_return(gateway_id, name, now_ns)

    def await_return(self, gateway_id: str, name: str, now_ns: int) -> None:
        """Its session ended by our doing."""
        self._due[gateway_id] = name, now_ns + round(LIMIT_S * 1e9)

    def settled(self, gateway_id: str) -> None:
        """It is back, or its loss was reported."""
        self._due.pop(gateway_id, None)

    def overdue(self, now_ns: int, now_us: int) -> Rows:
        """Of those that did not come back in time, once each: the new state of ``gateways``, and an event.

        The state is stored only if SQL saw nothing of it meanwhile either: a return that is on its way to us
        must not be overwritten.
        """
        late = {gateway_id: name for gateway_id, (name, due_ns) in self._due.items() if now_ns >= due_ns}
        rows: Rows = []
        for gateway_id, name in late.items():
            del self._due[gateway_id]
            unseen_us = now_us - round(LIMIT_S / 2 * 1e6)  # half: what is on its way, and clocks that are set
            state = {"gateway_id": gateway_id, "state": "lost", "reason": REASON, "last_seen_us": unseen_us}
            text, details = f"gateway {name} {REASON}", {"gateway_id": gateway_id}
            rows.append(("gateways", state))
            rows.append(event_row("gateway-lost", "critical", "gateway", name, text, now_us, details))
        return rows
