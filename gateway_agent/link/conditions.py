"""Conditions: what is wrong at this gateway from one alert until another, and what the server knows of it.

    begin ──► reported ──a session for SETTLED_NS──► the server has it
    end   ──► reported ──a session for SETTLED_NS──► forgotten

Whoever was notified of a beginning has to be notified of its end, whatever dies in between. So what was
reported is in ``state_dir/conditions.json`` before it is sent: the next link ends what the one before has
reported. And it is sent again, with its time, as long as no session has lasted for SETTLED_NS behind it: the
connection, or a process of the server, may have died with it. To the server it is the same event, unless its
time is half a day off: then it gets one of now. Of a beginning and an end that were both lost the end alone
is sent again.

One kind and subject is reported every ``alerts.EVERY_NS`` at most, and all of them together no faster than
the server takes alerts of a gateway, those that waited for the session among them; whoever was reported last
waits for the others. Where two kinds take turns meanwhile, the newest is reported in the end.

What a crash leaves: the file has an alert that was not sent: the next link sends it. On a full disk the file
is as it was, the log says so, and it is tried again: an end may be missing if the link dies meanwhile. What
the server would not take as an alert is not read: it would end each session.

Thread: the link's loop only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import structlog

from gateway_agent.errors import StateFileBroken
from gateway_agent.link import state_files
from gateway_agent.link.alerts import EACH_NS, Alerts, Severity
from gateway_agent.sources.nbd import NbdSource
from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.alerts import Alert
from pmdaemon.wire.session import AgentSession, SessionState

log = structlog.get_logger("alerts")
FILE: Final = "conditions.json"
SETTLED_NS: Final = 60_000_000_000
"""A process of the server that dies is found and replaced sooner, and mailboxes outlive it."""
AT_ONCE: Final = 30
"""Of those that a server takes at once of a gateway (``alerts.MOST_AT_ONCE``); others need room, too."""
MOST_OFF_US: Final = 43_200_000_000
"""An alert a day off gets a time of the server, another one each time: so it gets one of ours before."""
AGAIN_NS: Final = 1_000_000_000
PAUSE: Final = 10
"""A file that cannot be written is tried for a tenth of the time at most: polls are answered by this loop."""
PLANE: Final = "plane"
STALLED: Final = "plane-stalled"
BACK: Final = "plane-back"
GONE: Final = "is served no more: nothing is left to mend"
STORAGE: Final = "storage"
STORAGE_AWAY: Final = "storage-away"
STORAGE_BACK: Final = "storage-back"
STORAGE_AWAY_NS: Final = 10_000_000_000
"""A machine starts its storage and its agent at once; a question takes 3 s."""
ABSENT_NS: Final = 10_000_000_000
"""An agent starts its planes and its link at once; a plane is there within a second or two."""
_FIX: Final = "A new one is begun: what was reported before may stay open at recipients"


@dataclass(slots=True)
class _Condition:
    """What is so, and what was reported.

    Attributes:
        kind, severity, text: of what is so.
        is_open: it has not ended.
        alert: that was reported last; None before the first.
        sent_ns: when it was sent in the session that goes on; None: it was not.
        is_settled: the server has it.
    """

    kind: str
    severity: Severity
    text: str
    is_open: bool = True
    alert: Alert | None = None
    sent_ns: int | None = None
    is_settled: bool = False


class Conditions:
    """See the module.

    Args:
        session: takes the alerts.
        alerts: logs and sends them.
        path: of the file; None keeps nothing.
    """

    def __init__(self, session: AgentSession, alerts: Alerts, clock: Clock, path: Path | None = None) -> None:
        self._session = session
        self._alerts = alerts
        self._clock = clock
        self._path = path
        self._known: dict[tuple[str, str], _Condition] = {}
        self._paid_ns = 0
        self._is_unwritten = False
        self._write_again_ns = 0
        self._problem = ""
        self._load()

    def begin(self, condition: str, kind: str, severity: Severity, subject: str, text: str) -> None:
        """Something is wrong from now on, until ``end``, or is wrong in another way."""
        found = self._known.setdefault((condition, subject), _Condition(kind, severity, text))
        found.kind, found.severity, found.text, found.is_open = kind, severity, text, True
        self.flush()

    def end(self, condition: str, kind: str, subject: str, text: str) -> None:
        """It is right again; nothing if it never began."""
        found = self._known.get((condition, subject))
        if found is not None and found.is_open:
            found.kind, found.severity, found.text, found.is_open = kind, "info", text, False
            self.flush()

    def open_ones(self, condition: str) -> dict[str, str]:
        """Subjects of which something is wrong: to the kind of it."""
        return {
            subject: found.kind
            for (name, subject), found in self._known.items()
            if name == condition and found.is_open
        }

    def keep_only(self, condition: str, subjects: Collection[str], kind: str, text: str) -> None:
        """Other subjects are there no more: what was wrong with them ends (``text`` is without the name)."""
        for subject in self.open_ones(condition).keys() - subjects:
            self.end(condition, kind, subject, f"{subject} {text}")

    def session_began(self) -> None:
        """What a former session may not have brought to the server is sent again."""
        now_ns = self._clock.monotonic_ns()
        for found in self._known.values():
            # What waits in the session was never sent; it comes by itself.
            waits = found.alert is not None and self._session.keeps(found.alert)
            found.sent_ns = now_ns if waits else None
        self._alerts.session_began(now_ns)

    def flush(self) -> None:
        """Report what has changed and may be reported now; send again what may have been lost."""
        now_ns = self._clock.monotonic_ns()
        due = [key for key, found in self._known.items() if self._is_news(key[1], found, now_ns)]
        for key in due:
            if not self._has_room(now_ns):
                break
            found = self._known[key] = self._known.pop(key)  # behind the others
            found.alert = self._alerts.made(found.kind, found.severity, key[1], found.text)
            found.is_settled, self._is_unwritten = False, True
            self._write()
            found.sent_ns = now_ns
            self._alerts.send(found.alert)
        self._send_again(now_ns)
        self._forget_known(now_ns)
        if self._is_unwritten and now_ns >= self._write_again_ns:
            self._write()

    def _is_news(self, subject: str, found: _Condition, now_ns: int) -> bool:
        # Of an end without a beginning nobody needs to hear.
        is_other = found.is_open if found.alert is None else found.kind != found.alert.kind
        return is_other and self._alerts.may_report(found.kind, subject, now_ns)

    def _has_room(self, now_ns: int) -> bool:
        if self._session.waiting_alerts >= AT_ONCE or not self._alerts.is_room(now_ns):
            return False
        paid_ns = max(self._paid_ns, now_ns)
        if paid_ns - now_ns >= AT_ONCE * EACH_NS:
            return False
        self._paid_ns = paid_ns + EACH_NS
        return True

    def _send_again(self, now_ns: int) -> None:
        if self._session.state is not SessionState.POLLING:
            return
        for found in self._known.values():
            if found.alert is None or found.is_settled or found.sent_ns is not None:
                continue
            if not self._has_room(now_ns):
                return
            now_us = self._clock.unix_us()
            if abs(now_us - found.alert.at_us) > MOST_OFF_US:
                found.alert, self._is_unwritten = replace(found.alert, at_us=now_us), True
                self._write()
            self._alerts.send(found.alert)
            found.sent_ns = now_ns

    def _forget_known(self, now_ns: int) -> None:
        """What the server has: of what has ended nothing is left to know."""
        unheard = [key for key, found in self._known.items() if found.alert is None and not found.is_open]
        for key in unheard:
            del self._known[key]
        if self._session.state is not SessionState.POLLING:
            return
        for key, found in list(self._known.items()):
            is_sent = found.sent_ns is not None and now_ns - found.sent_ns >= SETTLED_NS
            if found.is_settled or not is_sent:
                continue
            found.is_settled = self._is_unwritten = True
            if not found.is_open and found.alert is not None and found.alert.kind == found.kind:
                del self._known[key]

    # -- the file

    def _write(self) -> None:
        if self._path is None:
            self._is_unwritten = False
            return
        rows = [
            {"condition": condition, "is_settled": found.is_settled, **found.alert.header()}
            for (condition, _), found in self._known.items()
            if found.alert is not None
        ]
        begun_ns = self._clock.monotonic_ns()
        try:
            state_files.write_json(self._path, rows, synced=True)
            self._is_unwritten, self._problem = False, ""
        except OSError as exc:
            took_ns = self._clock.monotonic_ns() - begun_ns
            self._write_again_ns = begun_ns + max(AGAIN_NS, PAUSE * took_ns)
            if str(exc) != self._problem:
                log.warning("conditions-not-kept", problem=str(exc))
            self._problem = str(exc)

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            rows = state_files.read_json(self._path, _FIX) or []
        except StateFileBroken as exc:
            log.error("conditions-forgotten", problem=str(exc))
            return
        for row in rows if isinstance(rows, list) else ():
            if (read := _read(row)) is not None:
                condition, subject, found = read
                self._known[condition, subject] = found


class PlaneConditions:
    """Data planes, and monitors of QEMU, that have died, have never come or do not answer.

    State: which do not answer; also one of which the link before has reported so. Which are connected, and
    since when others are absent.

    Attributes:
        pids: of the planes as the link knew them that died before this one, until each is here.
    """

    def __init__(self, conditions: Conditions, clock: Clock) -> None:
        self._conditions = conditions
        self._clock = clock
        self._connected: set[str] = set()
        self._absent_ns: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        begun = conditions.open_ones(PLANE)
        self._stalled = {name for name, kind in begun.items() if kind == STALLED}

    def connected(self, name: str) -> None:
        """A plane is connected; of one that did not answer, an answer is the end."""
        self._connected.add(name)
        if name not in self._stalled:
            self._conditions.end(PLANE, BACK, name, f"data plane {name} is back")

    def introduced(self, name: str, pid: int, former: Collection[str]) -> None:
        """A plane says which process it is; one that died while no link ran is reported as dead and back.

        ``former``: processes that have handed over to another one, by their names NAME.PID.
        """
        known = self.pids.pop(name, 0) if pid else 0
        if known and known != pid and f"{name}.{known}" not in former:
            text = f"plane {name} died while no link ran; what it had counted since its last cut is lost"
            self.lost(name, text)
            self.connected(name)

    def lost(self, name: str, problem: str = "") -> None:
        """Its connection is gone; ``problem``: it has died."""
        self._connected.discard(name)
        self._stalled.discard(name)
        if problem:
            self._conditions.begin(PLANE, "plane-died", "critical", name, problem)

    def gone(self, name: str) -> None:
        """It is served no more."""
        self._stalled.discard(name)
        self._conditions.end(PLANE, BACK, name, f"{name} {GONE}")

    def keep_only(self, names: Collection[str]) -> None:
        """These are there, and no others."""
        for name in self._conditions.open_ones(PLANE).keys() - names:
            self.gone(name)

    def collected(
        self,
        overdue: Collection[str],
        asked: Collection[str],
        monitors: Collection[str],
        planes: Collection[str],
    ) -> None:
        """A collection has ended.

        Args:
            overdue: who has not answered.
            asked: who can be asked; of others it is not known whether they would answer.
            monitors: which of them are monitors.
            planes: data planes that should be there.
        """
        self._find_absent(frozenset(planes).difference(self._connected))
        back = self._stalled.intersection(asked).difference(overdue)
        for name in sorted(back.union(overdue).difference(self._stalled - back)):
            what = "monitor" if name in monitors else "data plane"
            severity: Severity = "warning" if name in monitors else "critical"
            if name in back:
                self._conditions.end(PLANE, BACK, name, f"{what} {name} answers again")
            else:
                text = f"{what} {name} does not answer; it is left out"
                self._conditions.begin(PLANE, STALLED, severity, name, text)
        self._stalled = self._stalled.union(overdue) - back

    def _find_absent(self, absent: Collection[str]) -> None:
        """One that cannot start was never connected, so no connection ended that would say so."""
        now_ns = self._clock.monotonic_ns()
        self._absent_ns = {name: self._absent_ns.get(name, now_ns) for name in absent}
        known = self._conditions.open_ones(PLANE)
        for name, since_ns in self._absent_ns.items():
            if name not in known and now_ns - since_ns >= ABSENT_NS:
                text = f"plane {name} does not run, and its clients are refused; the agent's log says why"
                self._conditions.begin(PLANE, "plane-died", "critical", name, text)


class StorageConditions:
    """Storage that a data plane has asked and that has not answered yet: clients of its volume are refused.

    Storage that answered once is known to be there; whether it hangs or fails later shows in its I/O.

    State: since when the size of which volumes is not known.
    """

    def __init__(self, conditions: Conditions, clock: Clock) -> None:
        self._conditions = conditions
        self._clock = clock
        self._since_ns: dict[str, int] = {}

    def check(self, sources: Collection[NbdSource]) -> None:
        """What the data planes say now of their exports; ``sources``: of all of them."""
        connected = [source for source in sources if source.can_be_asked]
        sizes: dict[str, int] = {}
        for export in (export for source in connected for export in source.exports()):
            sizes[export["volume"]] = max(export["size_bytes"], sizes.get(export["volume"], 0))
        now_ns = self._clock.monotonic_ns()
        away = sorted(volume for volume, size_bytes in sizes.items() if not size_bytes)
        self._since_ns = {volume: self._since_ns.get(volume, now_ns) for volume in away}
        known = self._conditions.open_ones(STORAGE)
        for volume in away:
            if volume not in known and now_ns - self._since_ns[volume] >= STORAGE_AWAY_NS:
                text = f"the storage of {volume} does not answer or cannot be used: its clients are refused"
                self._conditions.begin(STORAGE, STORAGE_AWAY, "warning", volume, text)
        for volume in known:
            if sizes.get(volume):
                self._conditions.end(STORAGE, STORAGE_BACK, volume, f"the storage of {volume} answers")
        if len(connected) == len(sources):
            self._conditions.keep_only(STORAGE, sizes, STORAGE_BACK, GONE)


def _is_beginning(alert: Alert) -> bool:
    return alert.severity != "info"


def _read(row: Any) -> tuple[str, str, _Condition] | None:
    """Of a row of the file: condition, subject and what was reported; None if it is no such row."""
    if not isinstance(row, dict) or not isinstance(condition := row.get("condition"), str):
        return None
    try:
        alert = Alert.parse(row, row.get("at_us", 0))  # as the server will, which ends the session else
    except MalformedFrame:
        return None
    if not isinstance(alert.details.get("subject"), str):
        return None
    known = _Condition(alert.kind, cast("Severity", alert.severity), alert.text, _is_beginning(alert), alert)
    known.is_settled = row.get("is_settled") is True
    return condition, row["details"]["subject"], known
