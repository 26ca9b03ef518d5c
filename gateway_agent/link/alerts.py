"""Alerts: what the link tells the server unasked, and the same lines in the agent's log.

One (kind, subject) is told at most every ``EVERY_NS``: a plane that dies in a loop must not fill the server's
event log. Alerts raised without a session wait in it (``session.MAX_DEFERRED``).
"""

from __future__ import annotations

from typing import Any, Final, Literal

import structlog

from gateway_agent.link.session import AgentSession
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.kinds import Kind

log = structlog.get_logger("alerts")

EVERY_NS: Final = 10_000_000_000
Severity = Literal["info", "warning", "critical"]


class Alerts:
    """State: when each (kind, subject) was told last. Thread: the link's loop only."""

    def __init__(self, session: AgentSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._told_ns: dict[tuple[str, str], int] = {}

    def tell(self, kind: str, severity: Severity, subject: str, text: str, **details: Any) -> None:
        """Log it, and send or keep an ALERT for the server."""
        now_ns = self._clock.monotonic_ns()
        last_ns = self._told_ns.get((kind, subject))
        if last_ns is not None and now_ns - last_ns < EVERY_NS:
            return
        self._told_ns[kind, subject] = now_ns
        write = log.info if severity == "info" else log.warning
        write(kind, subject=subject, text=text, **details)
        header = {
            "kind": kind,
            "severity": severity,
            "text": text,
            "at_us": self._clock.unix_us(),
            "details": {"subject": subject, **details},
        }
        self._session.send(Kind.ALERT, header)
