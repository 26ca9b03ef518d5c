"""Models of time in the document: the window of the target, service hours, maintenance.

What these *mean* (which instant lies in which period, what is excluded) is in ``windows``.
"""

from __future__ import annotations

from datetime import datetime, time, timedelta
from functools import lru_cache
from typing import Any, Final, Literal

from dateutil.rrule import rrulestr
from pydantic import Field, model_validator

from sla_server.agreements.fields import ClockTime, Duration, LocalTime, Strict, TimeZone, refuse

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
MAX_WINDOW_S: Final = 400 * 86_400  # slices are kept 13 months
LAST_YEAR: Final = 9999
SEARCHED_YEARS: Final = 200  # any date on any weekday comes within 40 years
SHORTEST_REPEAT: Final = timedelta(hours=1)
# A rule of these is searched for a fraction of a second (``_happens``); one of seconds, for very long.
_FREQUENCIES: Final = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY")


class CalendarWindow(Strict):
    """The target holds over a calendar period of a time zone; every period starts with a full budget."""

    type: Literal["calendar"]
    period: Literal["day", "week", "month", "quarter", "year"]
    tz: TimeZone = "UTC"


class RollingWindow(Strict):
    """The target holds over the last ``duration``, at every moment."""

    type: Literal["rolling"]
    duration: Duration

    @model_validator(mode="after")
    def _bounded(self) -> RollingWindow:
        if self.duration > MAX_WINDOW_S:
            raise refuse("a rolling window is at most 400 days", "Use 28d or 30d")
        return self


class ServiceHours(Strict):
    """When the promise holds: ``business`` is Monday to Friday, 08:00 to 18:00, unless it says otherwise."""

    calendar: Literal["always", "business"]
    days: list[Day] | None = Field(default=None, min_length=1)
    opens: ClockTime | None = Field(default=None, alias="from")
    closes: ClockTime | None = Field(default=None, alias="to")
    tz: TimeZone | None = None
    """Default: the window's time zone."""

    @model_validator(mode="after")
    def _ordered(self) -> ServiceHours:
        if self.calendar == "always" and (self.days or self.opens or self.closes):
            raise refuse(
                "days and hours contradict calendar: always", "Use calendar: business with days, from, to"
            )
        if self.from_time >= self.to_time:
            raise refuse(
                "'from' is not before 'to'",
                'For hours over midnight, give two agreements, or use to: "24:00"',
            )
        return self

    @property
    def weekdays(self) -> frozenset[int]:
        """0 = Monday."""
        return frozenset(DAYS.index(day) for day in self.days or DAYS[:5])

    @property
    def from_time(self) -> time:
        """First instant of a day's service, local."""
        return self.opens or (time(8) if self.closes is None or self.closes > time(8) else time.min)

    @property
    def to_time(self) -> time:
        """First instant after a day's service, local; ``time.max`` is midnight."""
        return self.closes or (time(18) if self.from_time < time(18) else time.max)


class MaintenanceWindow(Strict):
    """Announced work: slices that touch it are excluded. Once, or repeated by an RFC 5545 rule."""

    start: LocalTime
    end: LocalTime | None = None
    duration: Duration | None = None
    rrule: str | None = Field(default=None, max_length=512)
    """For example ``FREQ=MONTHLY;BYDAY=1SU``; ``start`` is its DTSTART."""
    tz: TimeZone | None = None
    """Default: the window's time zone."""
    reason: str = Field(min_length=1, max_length=500)
    author: str = Field(min_length=1, max_length=100)

    @model_validator(mode="after")
    def _complete(self) -> MaintenanceWindow:
        if (self.end is None) == (self.duration is None):
            raise refuse("needs exactly one of 'end' and 'duration'", "Add for example duration: 2h")
        if self.length <= timedelta(0):
            raise refuse("'end' is not after 'start'")
        if self.length > timedelta(seconds=MAX_WINDOW_S):
            raise refuse(
                "maintenance is longer than 400 days", "Announce a shorter window, or delete the SLA"
            )
        if self.rrule is not None:
            _check_rule(self.rrule, self.start, self.length)
        return self

    @property
    def length(self) -> timedelta:
        """How long one occurrence lasts (wall-clock time)."""
        if self.duration is not None:
            return timedelta(seconds=self.duration)
        assert self.end is not None  # cannot happen: _complete asked for one of both
        return self.end - self.start


@lru_cache(maxsize=256)
def rule_of(rrule: str, start: datetime) -> Any:
    """The parsed rule over naive local time; it remembers the occurrences it has computed."""
    return rrulestr(rrule, dtstart=start, cache=True)


def _check_rule(rrule: str, start: datetime, length: timedelta) -> None:
    _check_parts(rrule)
    first: datetime | None = None
    second: datetime | None = None
    try:
        if _happens(rrule, start):
            rule = rule_of(rrule, start)
            first = rule.after(start, inc=True)
            second = rule.after(first) if first is not None else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
        raise refuse(
            f"{rrule!r} is not a recurrence rule ({exc})",
            "Use RFC 5545, e.g. FREQ=WEEKLY;BYDAY=SU; give UNTIL as local time, without Z",
        ) from exc
    if first is None:
        raise refuse(f"{rrule!r} never happens", "Check UNTIL and COUNT against start")
    if second is not None and second - first < max(SHORTEST_REPEAT, length):
        raise refuse(
            "occurrences are closer than one hour or than the window is long", "Use a longer interval"
        )


def _happens(rrule: str, start: datetime) -> bool:
    """Whether the rule, whatever its UNTIL and COUNT, has an occurrence within 200 years.

    dateutil gives up a search at the end of year 9999 only, which takes seconds from here. The calendar
    repeats every 400 years, so the same is asked of a start that is late enough to leave 200 to 600 of them.
    """
    parts = [part for part in rrule.split(";") if part.upper().partition("=")[0] not in ("UNTIL", "COUNT")]
    late = start.replace(year=start.year + (LAST_YEAR - start.year - SEARCHED_YEARS) // 400 * 400)
    return rrulestr(";".join(parts), dtstart=late).after(late, inc=True) is not None


def _check_parts(rrule: str) -> None:
    """Refuse what dateutil would take but never come back from, or what brings dates of its own."""
    if not rrule.isprintable() or ":" in rrule:
        raise refuse(f"{rrule!r} is more than one rule", "Give the rule alone, e.g. FREQ=WEEKLY;BYDAY=SU")
    for part in rrule.upper().split(";"):
        key, _, value = part.partition("=")
        if key == "FREQ" and value not in _FREQUENCIES:
            raise refuse(
                f"{value!r} is no frequency for maintenance", f"Use one of {', '.join(_FREQUENCIES)}"
            )
        if key == "INTERVAL" and not (value.isascii() and value.isdigit() and int(value)):
            raise refuse(f"the rule's INTERVAL is {value!r}", "Use a whole number from 1")


class Maintenance(Strict):
    """The rules for announced work, and the work announced."""

    notice: Duration | None = None
    """How long before it starts work must be announced; shorter notice is reported as a warning at apply."""
    max_per_period: Duration | None = None
    """Work beyond this much in one period of the window is not excluded."""
    windows: list[MaintenanceWindow] = Field(default_factory=list, max_length=100)
