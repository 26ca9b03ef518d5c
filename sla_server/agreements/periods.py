"""Periods, service hours, maintenance: their models, and which instants belong to them. Microseconds UTC.

Local rules are evaluated on naive wall-clock time and converted instant by instant, so that "08:00 in
Berlin" is 08:00 on both sides of a change of summer time. A slice belongs to the period of its start, and
is excluded if any part of it is in maintenance or if it starts outside service hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal
from zoneinfo import ZoneInfo

from dateutil.rrule import rrulestr
from pydantic import Field, model_validator

from sla_server.agreements.calendars import BUILT_IN, DAYS, CalendarInForce, Day, Opening, version_at
from sla_server.agreements.fields import ClockTime, Duration, LocalTime, Name, Strict, TimeZone, refuse

if TYPE_CHECKING:  # both import this module for the models of time
    from sla_server.agreements.document import Agreement
    from sla_server.agreements.maintenance import AnnouncedWork

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


def in_service(
    hours: ServiceHours | None, at_us: int, default_tz: str, calendar: Sequence[CalendarInForce] = ()
) -> bool:
    """Whether the promise holds at this instant, as far as service hours go.

    Args:
        hours: of the agreement.
        at_us: us UTC.
        default_tz: of the agreement.
        calendar: versions of the calendar that ``hours`` names; without any the promise always holds.
    """
    if hours is None or hours.calendar == "always":
        return True
    if hours.calendar != "business":
        spec = version_at(calendar, at_us)
        if spec is None:
            return True
        local = to_local(at_us, spec.tz)
        return any(opens <= local.time() < closes for opens, closes in spec.openings(local.date()))
    local = to_local(at_us, hours.tz or default_tz)
    return local.weekday() in hours.weekdays and hours.from_time <= local.time() < hours.to_time


def service_us(
    hours: ServiceHours | None,
    from_us: int,
    to_us: int,
    default_tz: str,
    calendar: Sequence[CalendarInForce] = (),
) -> int:
    """How much of [from_us, to_us) lies in service hours; a calendar's version of each day's midnight."""
    if to_us <= from_us:
        return 0
    is_named = hours is not None and hours.calendar not in BUILT_IN
    if hours is None or hours.calendar == "always" or (is_named and not calendar):
        return to_us - from_us
    newest = version_at(calendar, to_us) if is_named else None
    tz = newest.tz if newest is not None else hours.tz or default_tz
    day = to_local(from_us, tz).date() - timedelta(days=1)
    last = to_local(to_us, tz).date()
    total = 0
    while day <= last:
        for opens_us, closes_us in _openings_of(hours, calendar if is_named else (), day, tz):
            total += max(0, min(closes_us, to_us) - max(opens_us, from_us))
        day += timedelta(days=1)
    return total


def _openings_of(
    hours: ServiceHours, calendar: Sequence[CalendarInForce], day: date, tz: str
) -> Iterator[tuple[int, int]]:
    midnight = datetime.combine(day, time.min)
    openings: list[Opening] = []
    if calendar:
        spec = version_at(calendar, from_local(midnight, tz))
        if spec is not None:
            openings, tz = spec.openings(day), spec.tz
    elif day.weekday() in hours.weekdays:
        openings = [(hours.from_time, hours.to_time)]
    for opens, closes in openings:
        yield from_local(datetime.combine(day, opens), tz), from_local(_closing(midnight, closes), tz)


def _closing(midnight: datetime, closes: time) -> datetime:
    return midnight + timedelta(days=1) if closes == time.max else datetime.combine(midnight.date(), closes)


def occurrences(
    window: PlannedWindow, from_us: int, to_us: int, default_tz: str
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
    return _union_us(
        (span for window in maintenance.windows for span in occurrences(window, from_us, to_us, default_tz)),
        from_us,
        to_us,
    )


def _union_us(spans: Iterable[tuple[int, int]], from_us: int, to_us: int) -> int:
    """How much of [from_us, to_us) the spans cover together."""
    total, reached = 0, from_us
    for begin, end in sorted((max(begin, from_us), min(end, to_us)) for begin, end in spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def planned_us(agreement: Agreement, maintenance: Sequence[AnnouncedWork], from_us: int, to_us: int) -> int:
    """How much of [from_us, to_us) is work that was announced to an agreement, in it or beside it."""
    spec = agreement.spec
    spans = [
        span
        for window in spec.maintenance.windows
        for span in occurrences(window, from_us, to_us, spec.time_zone)
    ]
    spans += [span for work in maintenance for span in work.spans(from_us, to_us)]
    return _union_us(spans, from_us, to_us)


def is_excluded(
    agreement: Agreement,
    maintenance: Sequence[AnnouncedWork],
    at_us: int,
    *,
    end_us: int | None = None,
    calendar: Sequence[CalendarInForce] = (),
) -> str | None:
    """Why nothing is promised at an instant, or in a slice; None: the promise holds.

    Outside service hours, or while work is done that was announced, within the agreement or by a Maintenance
    document. Work that exceeds ``max_per_period`` within the slice's period is not excused; for a rolling
    window the period is the duration before the slice.

    Args:
        agreement: the version in force.
        maintenance: Maintenance documents in whose scope it is, ended ones included.
        at_us: the instant, or the slice's start.
        end_us: the slice's end; work that touches the slice excludes it.
        calendar: versions of the calendar that its service hours name.
    """
    spec, end_us = agreement.spec, at_us + 1 if end_us is None else end_us
    if not in_service(spec.service_hours, at_us, spec.time_zone, calendar):
        return "outside service hours"
    reason = _work_at(agreement, maintenance, at_us, end_us)
    if reason is None or spec.maintenance.max_per_period is None:
        return reason
    period_start, _ = period_bounds(spec.window, at_us)
    used_us = planned_us(agreement, maintenance, period_start, at_us)
    return reason if used_us < spec.maintenance.max_per_period * SECOND_US else None


def _work_at(
    agreement: Agreement, maintenance: Sequence[AnnouncedWork], from_us: int, to_us: int
) -> str | None:
    """Reason of the first work that touches [from_us, to_us)."""
    spec = agreement.spec
    for window in spec.maintenance.windows:
        if any(occurrences(window, from_us, to_us, spec.time_zone)):
            return f"maintenance: {window.reason}"
    return next((work.reason for work in maintenance if any(work.spans(from_us, to_us))), None)


# -- Models of time in the document: the window of the target, service hours, maintenance


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
    """When the promise holds: ``business`` is Monday to Friday, 08:00 to 18:00, unless it says otherwise.

    Any other name is that of a Calendar document, which has its own hours and zone.
    """

    calendar: Name
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
        if self.is_named and (self.days or self.opens or self.closes or self.tz):
            raise refuse(
                f"the calendar {self.calendar!r} has its own days, hours and zone",
                "Remove days, from, to and tz here, or use calendar: business",
            )
        if self.from_time >= self.to_time:
            raise refuse(
                "'from' is not before 'to'",
                'For hours over midnight, give two agreements, or use to: "24:00"',
            )
        return self

    @property
    def is_named(self) -> bool:
        """Whether a Calendar document says when."""
        return self.calendar not in BUILT_IN

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


class PlannedWindow(Strict):
    """When work is done: once, or repeated by an RFC 5545 rule."""

    start: LocalTime
    end: LocalTime | None = None
    duration: Duration | None = None
    rrule: str | None = Field(default=None, max_length=512)
    """For example ``FREQ=MONTHLY;BYDAY=1SU``; ``start`` is its DTSTART."""
    tz: TimeZone | None = None
    """Default: the window's time zone."""
    reason: str = Field(min_length=1, max_length=500)

    @model_validator(mode="after")
    def _complete(self) -> PlannedWindow:
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


class MaintenanceWindow(PlannedWindow):
    """Announced work within an agreement: slices that touch it are excluded."""

    author: str = Field(min_length=1, max_length=100)


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
