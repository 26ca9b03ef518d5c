"""The period of a report: its text, and its bounds in the agreement's own time zone. Pure.

2026        a year
2026-Q4     a quarter
2026-10     a month
2026-W40    a week of ISO 8601, Monday to Sunday
2026-10-03  a day
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Final, Literal

from sla_server.agreements.document import Window
from sla_server.agreements.periods import CalendarWindow, Span, from_local, period_bounds, to_local
from sla_server.reports.errors import NoSuchPeriod

PeriodKind = Literal["day", "week", "month", "quarter", "year"]
_FORMS: Final = re.compile(
    r"(?P<year>[0-9]{4})(?:-(?:Q(?P<quarter>[1-4])|W(?P<week>[0-9]{2})|(?P<month>[0-9]{2})(?:-(?P<day>[0-9]{2}))?))?"
)
YEARS: Final = (1971, 2200)
"""A day of slack to the epoch, and no farther than any clock."""


@dataclass(frozen=True, slots=True)
class ReportPeriod:
    """A calendar period of a time zone: [from_us, to_us)."""

    text: str
    kind: PeriodKind
    tz: str
    from_us: int
    to_us: int

    @property
    def bounds(self) -> Span:
        """[from_us, to_us)."""
        return self.from_us, self.to_us

    @property
    def window(self) -> CalendarWindow:
        """The window of an agreement that has such periods."""
        return CalendarWindow(type="calendar", period=self.kind, tz=self.tz)

    def days(self) -> Iterator[tuple[str, int, int]]:
        """Each local day: its date and [start, end); one of 23 or 25 hours where the clock is changed."""
        day = to_local(self.from_us, self.tz).date()
        start_us = self.from_us
        while start_us < self.to_us:
            following = day + timedelta(days=1)
            end_us = min(_midnight_us(following, self.tz), self.to_us)
            if end_us > start_us:  # a zone has left out a whole day: it crossed the date line
                yield day.isoformat(), start_us, end_us
            day, start_us = following, max(end_us, start_us)


def parse_period(text: str, tz: str) -> ReportPeriod:
    """The period that a text names, in a time zone.

    Raises:
        NoSuchPeriod: it names none.
    """
    found = _FORMS.fullmatch(text)
    if found is None:
        raise NoSuchPeriod(text)
    year = int(found["year"])
    if not YEARS[0] <= year <= YEARS[1]:
        raise NoSuchPeriod(text, f"lies outside the years {YEARS[0]} to {YEARS[1]}")
    kind: PeriodKind = "year"
    month, day = 1, 1
    try:
        if found["quarter"]:
            kind, month = "quarter", int(found["quarter"]) * 3 - 2
        elif found["week"]:
            first = date.fromisocalendar(year, int(found["week"]), 1)
            kind, year, month, day = "week", first.year, first.month, first.day
        elif found["month"]:
            kind, month = "month", int(found["month"])
            if found["day"]:
                kind, day = "day", int(found["day"])
        first_us = _midnight_us(date(year, month, day), tz)
    except ValueError as exc:
        raise NoSuchPeriod(text, f"does not exist ({exc})") from exc
    return period_at(kind, tz, first_us)


def period_at(kind: PeriodKind, tz: str, at_us: int) -> ReportPeriod:
    """The period of this kind that an instant lies in."""
    bounds = period_bounds(CalendarWindow(type="calendar", period=kind, tz=tz), at_us)
    return ReportPeriod(_text(kind, to_local(bounds[0], tz).date()), kind, tz, *bounds)


def usual_kind(window: Window) -> PeriodKind:
    """The kind of period that an agreement is reported by: its own; of a rolling window the month."""
    return window.period if isinstance(window, CalendarWindow) else "month"


def _text(kind: PeriodKind, first: date) -> str:
    if kind == "week":
        year, week, _ = first.isocalendar()
        return f"{year:04}-W{week:02}"
    if kind == "quarter":
        return f"{first.year:04}-Q{(first.month + 2) // 3}"
    return first.isoformat()[: {"year": 4, "month": 7, "day": 10}[kind]]


def _midnight_us(day: date, tz: str) -> int:
    return from_local(datetime.combine(day, time.min), tz)
