"""How notices read for people: a line, and a text of several notices. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from pmdaemon.runtime.excerpt import printable
from sla_server.events.recipients.base import Notice, Status

LINE_CHARACTERS: Final = 160
DETAIL_CHARACTERS: Final = 200
MOST_DETAILS: Final = 20
LATEST_US: Final = 253_402_300_799_000_000
"""The last second of the year 9999."""


def utc(at_us: int) -> datetime:
    """A time; one before 1970 or after the year 9999 (a broken clock) is the nearest that is not."""
    return datetime.fromtimestamp(min(max(at_us, 0), LATEST_US) / 1e6, UTC)


def rfc3339(at_us: int) -> str:
    """A time as ``2026-02-01T22:00:00.123456Z``; see ``utc``."""
    return utc(at_us).isoformat(timespec="microseconds").replace("+00:00", "Z")


def line(notice: Notice) -> str:
    """One line: severity, what happened, and what is special about this notice."""
    event = notice.event
    word = "RESOLVED" if notice.status is Status.RESOLVED else event.severity.upper()
    text = event.text or f"{event.kind} {event.subject}"
    notes = [
        f"{notice.repeats} times" if notice.repeats > 1 else "",
        f"reminder {notice.reminder}" if notice.reminder else "",
        "not acknowledged in time" if notice.escalated else "",
        "held back until now" if notice.is_caught_up else "",
    ]
    said = ", ".join(filter(None, notes))
    return printable(f"{word}: {text}" + (f" ({said})" if said else ""), LINE_CHARACTERS)


def title(notices: Sequence[Notice]) -> str:
    """One line for several notices: the last of them, and how many there are."""
    more = len(notices) - 1
    return line(notices[-1]) + (f" (and {more} more)" if more else "")


def text(notices: Sequence[Notice]) -> str:
    """All notices with their figures, the oldest first."""
    return "\n".join("\n".join(_lines(notice)) for notice in notices)


def _lines(notice: Notice) -> list[str]:
    event = notice.event
    lines = [line(notice), f"  time:     {rfc3339(event.at_us)}", f"  kind:     {event.kind}"]
    lines += [f"  about:    {event.element} {event.subject}"]
    if notice.action and notice.status is not Status.RESOLVED:
        lines += [f"  to do:    {notice.action} ({notice.runbook})"]
    details = list(event.details.items())
    lines += [
        f"  {printable(key, 40)}: {printable(value, DETAIL_CHARACTERS)}"
        for key, value in details[:MOST_DETAILS]
    ]
    if len(details) > MOST_DETAILS:
        lines.append(f"  and {len(details) - MOST_DETAILS} more: sla describe event {event.event_id}")
    return [*lines, f"  identity: {notice.delivery_id}", ""]
