"""Periods, service hours, maintenance: their models, and which instants belong to them. Microseconds UTC.

Local rules are evaluated on naive wall-clock time and converted instant by instant (``span_of``), so that
"08:00 in Berlin" is 08:00 on both sides of a change of summer time. A local time that a day has twice is its
first, one that it does not have the next that it has; a duration is elapsed time. A slice belongs to the
period of its start, and is excluded if a part of it is in maintenance that was announced before it began, or
if it starts outside service hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Literal
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from sla_server.agreements.calendars import (
    BUILT_IN,
    DAYS,
    CalendarInForce,
    CalendarSpec,
    Day,
    Opening,
    version_at,
)
from sla_server.agreements.fields import (
    ClockTime,
    Duration,
    LocalTime,
    Name,
    Strict,
    TimeZone,
    clock_text,
    format_duration,
    refuse,
)
from sla_server.agreements.recurrence import check_rule, recurrence_of

if TYPE_CHECKING:  # both import this module for the models of time
    from sla_server.agreements.document import Agreement, AgreementSpec
    from sla_server.agreements.maintenance import AnnouncedWork

SECOND_US: Final = 1_000_000
QUARTER_US: Final = 900 * SECOND_US
"""Midnights and changes of summer time are on quarters of an hour UTC, in every zone (since 1972)."""
Span = tuple[int, int]
"""[start, end), microseconds UTC."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY: Final = timedelta(days=1)
_MONTHS: Final = {"month": 1, "quarter": 3, "year": 12}
_YEAR_WEEKS: Final = 52
_SOME_WEEKS: Final = 4


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def to_local(at_us: int, tz: str) -> datetime:
    """Naive wall-clock time in a zone."""
    return (_EPOCH + timedelta(microseconds=at_us)).astimezone(_zone(tz)).replace(tzinfo=None)


def from_local(local: datetime, tz: str) -> int:
    """Microseconds UTC: the first of a time that occurs twice; of one that is skipped, the next there is."""
    # Read with the offset before a change of the clock, and with the one after it (PEP 495).
    before_us, after_us = (
        (local.replace(tzinfo=_zone(tz), fold=fold) - _EPOCH) // timedelta(microseconds=1) for fold in (0, 1)
    )
    if after_us >= before_us:
        return before_us
    while before_us - after_us > 1:  # the clock is set forward between the two
        middle_us = (before_us + after_us) // 2
        if to_local(middle_us, tz) < local:
            after_us = middle_us
        else:
            before_us = middle_us
    return before_us


@lru_cache(maxsize=65_536)
def span_of(start: datetime, end: datetime | timedelta, tz: str) -> Span:
    """What begins at a local time and ends at another one, or when some time has elapsed.

    It is empty where the clock is set forward over all of it.
    """
    begin_us = from_local(start, tz)
    if isinstance(end, timedelta):
        return begin_us, begin_us + end // timedelta(microseconds=1)
    return begin_us, from_local(end, tz)


def period_bounds(window: CalendarWindow | RollingWindow, at_us: int) -> Span:
    """[start, end) of the period around ``at_us``; for a rolling window the duration that ends there."""
    if isinstance(window, RollingWindow):
        return at_us - window.duration * SECOND_US, at_us
    return _calendar_bounds(window.period, window.tz, at_us // QUARTER_US)


@lru_cache(maxsize=1024)
def _calendar_bounds(period: str, tz: str, quarter: int) -> Span:
    """Of the period around this quarter of an hour: all agreements of a fleet ask the same."""
    start = to_local(quarter * QUARTER_US, tz).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        end = start + _DAY
    elif period == "week":
        start -= timedelta(days=start.weekday())
        end = start + timedelta(days=7)
    else:
        months = _MONTHS[period]
        start = start.replace(day=1, month=(start.month - 1) // months * months + 1)
        carry, month = divmod(start.month - 1 + months, 12)
        end = start.replace(year=start.year + carry, month=month + 1)
    return span_of(start, end, tz)


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
    if hours is None or _is_always(hours, calendar):
        return True
    spec = version_at(calendar, at_us)
    day = to_local(at_us, _zone_of(hours, spec, default_tz)).date()
    # Where a clock is set back over midnight, a day begins before the one before it has ended.
    return any(
        begin_us <= at_us < end_us
        for each in (day, day + _DAY)
        for begin_us, end_us in _openings(hours, spec, each, default_tz)
    )


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
    if hours is None or _is_always(hours, calendar):
        return to_us - from_us
    tz = _zone_of(hours, version_at(calendar, to_us), default_tz)
    day, last = to_local(from_us, tz).date() - _DAY, to_local(to_us, tz).date() + _DAY
    spans: list[Span] = []
    while day <= last:
        spec = version_at(calendar, from_local(datetime.combine(day, time.min), tz))
        spans += _openings(hours, spec, day, default_tz)
        day += _DAY
    return _union_us(spans, from_us, to_us)


def begins_in_service(
    hours: ServiceHours | None,
    slice_s: int,
    from_us: int,
    default_tz: str,
    calendar: Sequence[CalendarInForce] = (),
) -> bool:
    """Whether some slices of this length begin in service hours, in every four weeks of a year with any.

    Others are excluded, however much of them lies in the hours. Where clocks are changed, slices of some
    hours may fit in summer and not in winter.

    Args:
        hours: of the agreement.
        slice_s: length; slices lie on a grid from 1970-01-01 UTC.
        from_us: begin of the year.
        default_tz: of the agreement.
        calendar: versions of the calendar that ``hours`` names.
    """
    if hours is None or _is_always(hours, calendar):
        return True
    spec, length_us = version_at(calendar, from_us), slice_s * SECOND_US
    first = to_local(from_us, _zone_of(hours, spec, default_tz)).date()
    for number in range(_YEAR_WEEKS // _SOME_WEEKS):
        is_open = False
        days = (first + timedelta(weeks=number * _SOME_WEEKS, days=n) for n in range(7 * _SOME_WEEKS))
        for begin_us, end_us in (span for day in days for span in _openings(hours, spec, day, default_tz)):
            is_open = True
            if -(-begin_us // length_us) * length_us < end_us:
                break  # nearly always the first one
        else:
            if is_open:
                return False
    return True


def _is_always(hours: ServiceHours, calendar: Sequence[CalendarInForce]) -> bool:
    """Whether the promise always holds; also while no version of the calendar that is named is known."""
    return hours.calendar == "always" or (hours.is_named and not calendar)


def _zone_of(hours: ServiceHours, spec: CalendarSpec | None, default_tz: str) -> str:
    return spec.tz if spec is not None and hours.is_named else hours.tz or default_tz


def _openings(hours: ServiceHours, spec: CalendarSpec | None, day: date, default_tz: str) -> tuple[Span, ...]:
    """Service hours of one local day, those of the calendar ``spec`` if one is named."""
    if spec is not None and hours.is_named:
        openings = tuple(spec.openings(day))
    else:
        openings = ((hours.from_time, hours.to_time),) if day.weekday() in hours.weekdays else ()
    return _spans_of(openings, day, _zone_of(hours, spec, default_tz))


@lru_cache(maxsize=4096)
def _spans_of(openings: tuple[Opening, ...], day: date, tz: str) -> tuple[Span, ...]:
    """Openings of one local day; all slices of the day ask the same."""
    return tuple(
        span_of(
            datetime.combine(day, opens),
            datetime.combine(day + _DAY, time.min) if closes == time.max else datetime.combine(day, closes),
            tz,
        )
        for opens, closes in openings
    )


def occurrences(window: PlannedWindow, from_us: int, to_us: int, default_tz: str) -> Iterator[Span]:
    """[start, end) of every occurrence that overlaps [from_us, to_us), in order."""
    tz = window.tz or default_tz
    starts: Sequence[datetime] = [window.start]
    if window.rrule is not None:
        # A day of slack on both sides: wall-clock arithmetic may be off by a change of offset.
        earliest = to_local(from_us, tz) - window.length - _DAY
        starts = recurrence_of(window.rrule, window.start).between(earliest, to_local(to_us, tz) + _DAY)
    for start in starts:
        begin_us, end_us = window.span(start, tz)
        if begin_us < min(end_us, to_us) and end_us > from_us:
            yield begin_us, end_us


def _union_us(spans: Iterable[Span], from_us: int, to_us: int) -> int:
    """How much of [from_us, to_us) the spans cover together."""
    total, reached = 0, from_us
    for begin, end in sorted((max(begin, from_us), min(end, to_us)) for begin, end in spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def planned_us(agreement: Agreement, maintenance: Sequence[AnnouncedWork], from_us: int, to_us: int) -> int:
    """How much of [from_us, to_us) is work announced to one version, in it or beside it; together once."""
    spec = agreement.spec
    spans = [
        span
        for window in spec.maintenance.windows
        for span in occurrences(window, from_us, to_us, spec.time_zone)
    ]
    for work in maintenance:
        spans += work.spans(from_us, to_us, _excused_from_us(spec, work, maintenance))
    return _union_us(spans, from_us, to_us)


def _excused_from_us(spec: AgreementSpec, work: AnnouncedWork, versions: Sequence[AnnouncedWork]) -> int:
    """From when on a document excuses anything: what lies within the agreed notice counts.

    Windows within the agreement have none to keep: both parties have agreed to them.
    """
    notice_s = spec.maintenance.notice
    return 0 if notice_s is None else work.announced_us(versions) + notice_s * SECOND_US


def unannounced_spans(
    agreement: Agreement, maintenance: Sequence[AnnouncedWork], from_us: int, to_us: int
) -> Iterator[tuple[AnnouncedWork, Span]]:
    """Work in [from_us, to_us), and how much of it is not excused for want of notice."""
    for work in maintenance:
        until_us = min(_excused_from_us(agreement.spec, work, maintenance), to_us)
        for begin_us, end_us in work.spans(from_us, until_us):
            yield work, (max(begin_us, from_us), min(end_us, until_us))


def is_excluded(
    agreement: Agreement,
    maintenance: Sequence[AnnouncedWork],
    at_us: int,
    *,
    end_us: int | None = None,
    calendar: Sequence[CalendarInForce] = (),
    used_us: Callable[[int, int], int] | None = None,
) -> str | None:
    """Why nothing is promised at an instant, or in a slice; None: the promise holds.

    Outside service hours, or while work is done that was announced, within the agreement or by a Maintenance
    document with the notice agreed. Work that exceeds ``max_per_period`` within the slice's period is not
    excused; for a rolling window the period is the duration before the slice.

    Args:
        agreement: the version in force.
        maintenance: Maintenance documents in whose scope it is, ended ones included.
        at_us: the instant, or the slice's start.
        end_us: the slice's end; work that touches the slice excludes it, if it was announced before.
        calendar: versions of the calendar that its service hours name.
        used_us: how much work the agreement was given in a span, all its versions together
            (``InForce.planned_us``); by default what this version plans there.
    """
    spec, end_us = agreement.spec, at_us + 1 if end_us is None else end_us
    if not in_service(spec.service_hours, at_us, spec.time_zone, calendar):
        return "outside service hours"
    reason = _work_at(agreement, maintenance, at_us, end_us)
    if reason is None or spec.maintenance.max_per_period is None:
        return reason
    period_start, _ = period_bounds(spec.window, at_us)
    if used_us is None:
        used_us = partial(planned_us, agreement, maintenance)
    return reason if used_us(period_start, at_us) < spec.maintenance.max_per_period * SECOND_US else None


def _work_at(
    agreement: Agreement, maintenance: Sequence[AnnouncedWork], from_us: int, to_us: int
) -> str | None:
    """Reason of the first work that touches [from_us, to_us), and was announced before it began.

    A slice that runs when work is announced, or until its notice is kept, counts as a whole: what is left of
    it could excuse hours that came before.
    """
    spec = agreement.spec
    for window in spec.maintenance.windows:
        if any(occurrences(window, from_us, to_us, spec.time_zone)):
            return f"maintenance: {window.reason}"
    for work in maintenance:
        since_us = _excused_from_us(spec, work, maintenance)
        if since_us > from_us or not any(work.spans(from_us, to_us, since_us)):
            continue
        if work.announced_us(maintenance) <= from_us:
            return work.reason
    return None


# -- Models of time in the document: the window of the target, service hours, maintenance


MAX_WINDOW_S: Final = 400 * 86_400  # slices are kept 13 months


class CalendarWindow(Strict):
    """The target holds over a calendar period of a time zone; every period starts with a full budget."""

    type: Literal["calendar"]
    """Periods of the calendar."""
    period: Literal["day", "week", "month", "quarter", "year"]
    """How long a period is."""
    tz: TimeZone = "UTC"
    """Zone in which periods begin at midnight."""


class RollingWindow(Strict):
    """The target holds over the last ``duration``, at every moment."""

    type: Literal["rolling"]
    """The time up to now."""
    duration: Duration
    """How far it reaches back; at least one slice, at most 400d."""

    @model_validator(mode="after")
    def _bounded(self) -> RollingWindow:
        if self.duration > MAX_WINDOW_S:
            problem = f"{format_duration(self.duration)} is longer than 400d, the longest rolling window"
            raise refuse(problem, "Use 28d or 30d", key="duration")
        return self


class ServiceHours(Strict):
    """When the promise holds: ``business`` is Monday to Friday, 08:00 to 18:00, unless it says otherwise.

    Any other name is that of a Calendar document, which has its own hours and zone.
    """

    calendar: Name
    """always, business, or the name of a Calendar document."""
    days: list[Day] | None = Field(default=None, min_length=1)
    """Days of the week, of business hours."""
    opens: ClockTime | None = Field(default=None, alias="from")
    """When the day begins, local time."""
    closes: ClockTime | None = Field(default=None, alias="to")
    """When it ends; 24:00 is the end of the day."""
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
                f"'from', {clock_text(self.from_time)}, is not before 'to', {clock_text(self.to_time)}",
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
    """Where the clock is set forward over it, work begins at the next instant; of two it is the first."""
    end: LocalTime | None = None
    """Wall-clock time, as ``start``."""
    duration: Duration | None = None
    """Elapsed time, also on a day on which the clock is changed."""
    rrule: str | None = Field(default=None, max_length=512)
    """For example ``FREQ=MONTHLY;BYDAY=1SU``; ``start`` is its DTSTART."""
    tz: TimeZone | None = None
    """Default: the window's time zone."""
    reason: str = Field(min_length=1, max_length=500)
    """Why; customers read it."""

    @model_validator(mode="after")
    def _complete(self) -> PlannedWindow:
        if (self.end is None) == (self.duration is None):
            raise refuse("needs exactly one of 'end' and 'duration'", "Add for example duration: 2h")
        if self.end is not None and self.end <= self.start:
            raise refuse(
                f"{self.end.isoformat()} is not after the start, {self.start.isoformat()}",
                "Give a later end, or a duration instead, for example 2h",
                key="end",
            )
        if self.length > timedelta(seconds=MAX_WINDOW_S):
            raise refuse(
                f"maintenance of {self.length.days} days is longer than 400 days",
                "Announce a shorter window",
                key="end" if self.duration is None else "duration",
            )
        if self.rrule is not None:
            check_rule(self.rrule, self.start, self.length)
        return self

    @property
    def length(self) -> timedelta:
        """How long one occurrence lasts: elapsed, or, of one with an ``end``, by the wall clock."""
        if self.duration is not None:
            return timedelta(seconds=self.duration)
        assert self.end is not None  # cannot happen: _complete asked for one of both
        return self.end - self.start

    def span(self, start: datetime, default_tz: str) -> Span:
        """The occurrence that begins at this local time."""
        end = start + self.length if self.duration is None else self.length
        return span_of(start, end, self.tz or default_tz)


class MaintenanceWindow(PlannedWindow):
    """Announced work within an agreement: slices that touch it are excluded."""

    author: str = Field(min_length=1, max_length=100)
    """Who announced it."""


class Maintenance(Strict):
    """The rules for announced work, and the work announced."""

    notice: Duration | None = None
    """How long before a document of work must be applied; what lies within that time is not excluded."""
    max_per_period: Duration | None = None
    """Work beyond this much in one period of the window is not excluded."""
    windows: list[MaintenanceWindow] = Field(default_factory=list, max_length=100)
    """The work that is announced."""


def periods_back(window: CalendarWindow | RollingWindow, now_us: int, most: int) -> list[Span]:
    """Bounds of the period that now lies in and of those before it, newest first."""
    found = [period_bounds(window, now_us)]
    while len(found) < most:
        start_us = found[-1][0]
        at_us = start_us if isinstance(window, RollingWindow) else start_us - 1
        found.append(period_bounds(window, at_us))
    return found
