"""Alerts: what the link reports to the server unasked, and the same lines in the agent's log.

One (kind, subject) is reported at most every ``EVERY_NS``: a plane that dies in a loop must not fill the
server's event log. I/Os held for too long are reported once in ``LATE_EVERY_NS``, with their sum since the
last time. What begins and ends is reported by ``conditions``.
Alerts raised without a session wait in it (``session.MAX_DEFERRED``). A server drops what is more than its
quota, and does not say so: what must not get lost waits until there ``is_room``.
"""

from __future__ import annotations

from collections.abc import Mapping
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
EACH_NS: Final = 1_000_000_000
MOST_AT_ONCE: Final = 48
"""A server takes 50 alerts of a gateway at once, and one a second behind them; its clock is another one."""
Severity = Literal["info", "warning", "critical"]


class Alerts:
    """What is reported, and when.

    State: when each (kind, subject) was reported last; until when the server's quota is used; the newest
    reload. Thread: the link's loop only.
    """

    def __init__(self, session: AgentSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._told_ns: dict[tuple[str, str], int] = {}
        self._used_ns = 0
        self._late: Late = {}
        self._late_ns: dict[str, int] = {}
        self._reload_number: int | None = None

    def report(self, kind: str, severity: Severity, subject: str, text: str, **details: Any) -> None:
        """Log it, and send or keep an ALERT for the server."""
        if self.may_report(kind, subject, self._clock.monotonic_ns()):
            self.send(self.made(kind, severity, subject, text, **details))

    def may_report(self, kind: str, subject: str, now_ns: int) -> bool:
        """Whether the last report of this kind and subject is ``EVERY_NS`` ago."""
        last_ns = self._told_ns.get((kind, subject))
        return last_ns is None or now_ns - last_ns >= EVERY_NS

    def made(self, kind: str, severity: Severity, subject: str, text: str, **details: Any) -> Alert:
        """An alert of now; it counts as reported, and is in the log."""
        self._told_ns[kind, subject] = self._clock.monotonic_ns()
        write = log.info if severity == "info" else log.warning
        write(kind, subject=subject, text=text, **details)
        shown = printable(text, ALERT_CHARACTERS)
        return Alert(kind, severity, shown, self._clock.unix_us(), {"subject": subject, **details})

    def send(self, alert: Alert) -> None:
        """Send it, or keep it for the next session."""
        now_ns = self._clock.monotonic_ns()
        if self.is_room(now_ns):  # what the server drops uses nothing of its quota
            self._used_ns = max(self._used_ns, now_ns) + EACH_NS
        self._session.send(alert)

    def is_room(self, now_ns: int) -> bool:
        """Whether the server takes another one, as far as is known here."""
        return self._used_ns - now_ns < MOST_AT_ONCE * EACH_NS

    def session_began(self, now_ns: int) -> None:
        """All that waits leaves at once, however slowly it came."""
        self._used_ns = max(self._used_ns, now_ns + self._session.waiting_alerts * EACH_NS)

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
