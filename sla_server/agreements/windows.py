"""Which instants belong to a period, to service hours, to maintenance. Pure; times are microseconds UTC.

Local rules are evaluated on naive wall-clock time and converted instant by instant, so that "08:00 in
Berlin" is 08:00 on both sides of a change of summer time. A slice belongs to the period of its start, and
is excluded if any part of it is in maintenance or if it starts outside service hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from sla_server.agreements.calendars import (
    CalendarWindow,
    Maintenance,
    MaintenanceWindow,
    RollingWindow,
    ServiceHours,
    rule_of,
)

SECOND_US: Final = 1_000_000
QUARTER_US: Final = 900 * SECOND_US
"""Midnights and changes of summer time are on quarters of an hour UTC, in every zone (since 1972)."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MONTHS: Final = {"month": 1, "quarter": 3, "year": 12}


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def to_local(at_us: int, tz: str) -> datetime:
    """Naive wall-clock time in a zone."""
    return (_EPOCH + timedelta(microseconds=at_us)).astimezone(_zone(tz)).replace(tzinfo=None)


def from_local(local: datetime, tz: str) -> int:
    """Microseconds UTC; a time that occurs twice is its first, one that is skipped is moved forward."""
    return round((local.replace(tzinfo=_zone(tz)) - _EPOCH) / timedelta(microseconds=1))


def period_bounds(window: CalendarWindow | RollingWindow, at_us: int) -> tuple[int, int]:
    """[start, end) of the period around ``at_us``; for a rolling window the duration that ends there."""
    if isinstance(window, RollingWindow):
        return at_us - window.duration * SECOND_US, at_us
    return _calendar_bounds(window.period, window.tz, at_us // QUARTER_US)


@lru_cache(maxsize=1024)
def _calendar_bounds(period: str, tz: str, quarter: int) -> tuple[int, int]:
    """Of the period around this quarter of an hour: all agreements of a fleet ask the same."""
    start = to_local(quarter * QUARTER_US, tz).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        end = start + timedelta(days=1)
    elif period == "week":
        start -= timedelta(days=start.weekday())
        end = start + timedelta(days=7)
    else:
        months = _MONTHS[period]
        start = start.replace(day=1, month=(start.month - 1) // months * months + 1)
        carry, month = divmod(start.month - 1 + months, 12)
        end = start.replace(year=start.year + carry, month=month + 1)
    return from_local(start, tz), from_local(end, tz)


def in_service(hours: ServiceHours | None, at_us: int, default_tz: str) -> bool:
    """Whether the promise holds at this instant, as far as service hours go."""
    if hours is None or hours.calendar == "always":
        return True
    local = to_local(at_us, hours.tz or default_tz)
    return local.weekday() in hours.weekdays and hours.from_time <= local.time() < hours.to_time


def service_us(hours: ServiceHours | None, from_us: int, to_us: int, default_tz: str) -> int:
    """How much of [from_us, to_us) lies in service hours."""
    if to_us <= from_us:
        return 0
    if hours is None or hours.calendar == "always":
        return to_us - from_us
    tz = hours.tz or default_tz
    day = to_local(from_us, tz).date() - timedelta(days=1)
    last = to_local(to_us, tz).date()
    total = 0
    while day <= last:
        if day.weekday() in hours.weekdays:
            opens = from_local(datetime.combine(day, hours.from_time), tz)
            closes = from_local(_closing(datetime.combine(day, time.min), hours.to_time), tz)
            total += max(0, min(closes, to_us) - max(opens, from_us))
        day += timedelta(days=1)
    return total


def _closing(midnight: datetime, closes: time) -> datetime:
    return midnight + timedelta(days=1) if closes == time.max else datetime.combine(midnight.date(), closes)


def occurrences(
    window: MaintenanceWindow, from_us: int, to_us: int, default_tz: str
) -> Iterator[tuple[int, int]]:
    """[start, end) of every occurrence that overlaps [from_us, to_us), in order."""
    tz = window.tz or default_tz
    starts: Sequence[datetime] = [window.start]
    if window.rrule is not None:
        # A day of slack on both sides: wall-clock arithmetic may be off by a change of offset.
        earliest = to_local(from_us, tz) - window.length - timedelta(days=1)
        starts = rule_of(window.rrule, window.start).between(
            earliest, to_local(to_us, tz) + timedelta(days=1), inc=True
        )
    for start in starts:
        begin, end = from_local(start, tz), from_local(start + window.length, tz)
        if begin < to_us and end > from_us:
            yield begin, end


def maintenance_us(maintenance: Maintenance, from_us: int, to_us: int, default_tz: str) -> int:
    """How much of [from_us, to_us) is announced work; windows that overlap count once."""
    if to_us <= from_us:
        return 0
    spans = sorted(
        (max(begin, from_us), min(end, to_us))
        for window in maintenance.windows
        for begin, end in occurrences(window, from_us, to_us, default_tz)
    )
    total, reached = 0, from_us
    for begin, end in spans:
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def is_excluded(
    start_us: int,
    end_us: int,
    *,
    window: CalendarWindow | RollingWindow,
    hours: ServiceHours | None,
    maintenance: Maintenance,
    default_tz: str,
) -> bool:
    """Whether a slice is excluded: starts outside service hours, or touches announced work.

    Work that exceeds ``max_per_period`` within the slice's period is not excused; for a rolling window the
    period is the duration before the slice.
    """
    if not in_service(hours, start_us, default_tz):
        return True
    if not maintenance.windows or maintenance_us(maintenance, start_us, end_us, default_tz) == 0:
        return False
    if maintenance.max_per_period is None:
        return True
    period_start, _ = period_bounds(window, start_us)
    used_us = maintenance_us(maintenance, period_start, start_us, default_tz)
    return used_us < maintenance.max_per_period * SECOND_US
