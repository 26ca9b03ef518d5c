"""How full the ways are that data take through the server: the newest PRESSURE of each process.

A way is *pressed* from HIGH on until it falls below LOW; each time it becomes so, and each time something was
refused for want of room after a quiet minute, one event says so. Pure; belongs to the main loop.
"""

from __future__ import annotations

from typing import Any, Final

from pmdaemon.wire.messages.server import Pressure
from sla_server.services.rows import Row, event_row

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
