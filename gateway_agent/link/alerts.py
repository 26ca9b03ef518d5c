"""Alerts: what the link reports to the server unasked, and the same lines in the agent's log.

One (kind, subject) is reported at most every ``EVERY_NS``: a plane that dies in a loop must not fill the
server's event log. Where two kinds take turns (a plane dies, and is back) the newest is reported in the end:
else the server would go on believing the other one. I/Os held for too long are reported once in
``LATE_EVERY_NS``, with their sum since the last time.
Alerts raised without a session wait in it (``session.MAX_DEFERRED``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog

from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import printable
from pmdaemon.wire.cut import Late, joined_late
from pmdaemon.wire.messages.alerts import ALERT_CHARACTERS, Alert
from pmdaemon.wire.session import AgentSession

log = structlog.get_logger("alerts")

EVERY_NS: Final = 10_000_000_000
LATE_EVERY_NS: Final = 600_000_000_000
Severity = Literal["info", "warning", "critical"]


@dataclass(slots=True)
class _ConditionState:
    """Kind, severity and text of what is so; the kind that was reported last, "" before."""

    kind: str
    severity: Severity
    text: str
    reported: str = ""


class Alerts:
    """What is reported, and when.

    State: when each (kind, subject) was reported last; of each condition what is so and what was reported;
    the newest reload. Thread: the link's loop only.
    """

    def __init__(self, session: AgentSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._told_ns: dict[tuple[str, str], int] = {}
        self._states: dict[tuple[str, str], _ConditionState] = {}
        self._late: Late = {}
        self._late_ns: dict[str, int] = {}
        self._reload_number: int | None = None

    def report(self, kind: str, severity: Severity, subject: str, text: str, **details: Any) -> None:
        """Log it, and send or keep an ALERT for the server."""
        now_ns = self._clock.monotonic_ns()
        last_ns = self._told_ns.get((kind, subject))
        if last_ns is not None and now_ns - last_ns < EVERY_NS:
            return
        self._told_ns[kind, subject] = now_ns
        write = log.info if severity == "info" else log.warning
        write(kind, subject=subject, text=text, **details)
        shown = printable(text, ALERT_CHARACTERS)
        at_us = self._clock.unix_us()
        self._session.send(Alert(kind, severity, shown, at_us, {"subject": subject, **details}))

    def begin(self, condition: str, kind: str, severity: Severity, subject: str, text: str) -> None:
        """Something is wrong from now on, until ``end``, or is wrong in another way."""
        state = self._states.setdefault((condition, subject), _ConditionState(kind, severity, text))
        state.kind, state.severity, state.text = kind, severity, text
        self.flush()

    def end(self, condition: str, kind: str, subject: str, text: str) -> None:
        """It is right again; nothing if it never began."""
        if (condition, subject) in self._states:
            self.begin(condition, kind, "info", subject, text)

    def flush(self) -> None:
        """Report what has changed of conditions and may be reported now."""
        now_ns = self._clock.monotonic_ns()
        for (_, subject), state in self._states.items():
            last_ns = self._told_ns.get((state.kind, subject), now_ns - EVERY_NS)
            if state.kind != state.reported and now_ns - last_ns >= EVERY_NS:
                state.reported = state.kind
                self.report(state.kind, state.severity, subject, state.text)

    def report_reload(self, record: Mapping[str, Any]) -> None:
        """Report what came of a reload, once; ``record``: as in the parent's ``agent.json``."""
        number = record.get("number")
        if number is not None and number == self._reload_number:
            return
        self._reload_number = number
        state, text = record.get("state"), str(record.get("text", ""))
        if state == "refused":
            self.report("reload-refused", "warning", "configuration", text)
        elif changes := record.get("changes"):
            self.report("reloaded", "info", "configuration", "; ".join(map(str, changes)))
        if keys := record.get("needs_restart"):
            text = f"not in force before the agent is restarted: {', '.join(map(str, keys))}"
            self.report("reload-incomplete", "warning", "configuration", text)

    def late(self, late: Late) -> None:
        """Caps held I/Os for too long in one sample."""
        now_ns = self._clock.monotonic_ns()
        self._late = joined_late([self._late, late])
        for volume in late.keys() & self._late.keys():
            last_ns = self._late_ns.get(volume)
            if last_ns is not None and now_ns - last_ns < LATE_EVERY_NS:
                continue
            self._late_ns[volume] = now_ns
            ios, longest_us = self._late.pop(volume)
            text = (
                f"the caps of {volume} held I/Os for up to {longest_us / 1e6:.1f} s, longer than max_hold_s: "
                "more is outstanding than they let through. Raise the caps, or lower the client's queue "
                "depth, before the client times out"
            )
            self.report("throttle-bound-hit", "warning", volume, text, ios=ios, longest_us=longest_us)
