"""When nothing is promised, against a slow and obvious oracle: a set of minutes.

Service hours, calendars in several versions, windows of an agreement, Maintenance documents that are
announced, changed and ended, notice and ``max_per_period``, versions of the agreement: all drawn at random
around days on which the clock of some zone changes, also at midnight, and by half an hour. The oracle asks a
clock on the wall minute by minute (``wall_clock``), expands rules day by day from their definition, and knows
neither ``periods`` nor ``recurrence``.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sla_server.agreements.calendars import CalendarDocument, CalendarInForce
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.promise import InForce
from tests.support.agreements import agreement, simple
from tests.support.wall_clock import DAY, MINUTE_US, WallClock, wall_clock

BEFORE, BEHIND, HALF = 10 * 1440, 3 * 1440, 960
"""Minutes before and behind the midnight (UTC) of such a day; half of those that are looked at."""
MINUTES = BEFORE + BEHIND
CHANGES = (
    ("Europe/Berlin", "2026-03-29"),
    ("Europe/Berlin", "2026-10-25"),
    ("America/New_York", "2026-11-01"),
    ("America/Havana", "2026-03-08"),  # at midnight
    ("America/Havana", "2026-11-01"),  # to midnight
    ("Asia/Beirut", "2026-03-29"),  # at midnight
    ("Asia/Beirut", "2026-10-25"),  # from midnight into the day before
    ("America/Nuuk", "2026-03-29"),  # over the last hour of the day before
    ("Australia/Lord_Howe", "2026-04-05"),  # by half an hour
    ("Australia/Lord_Howe", "2026-10-04"),
    ("Asia/Kathmandu", "2026-07-01"),  # never
)
ZONES = sorted({zone for zone, _ in CHANGES} | {"UTC"})
WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Minutes = set[int]


# -- Rules: their text, and the days on which they happen


@dataclass(frozen=True)
class Rule:
    """``happens``: whether it does on a day, of one that began on another."""

    text: str
    happens: Callable[[date, date], bool]
    count: int | None = None

    def starts(self, start: datetime, last: date) -> list[datetime]:
        days = (start.date() + number * DAY for number in range((last - start.date()).days + 1))
        found = [datetime.combine(day, start.time()) for day in days if self.happens(start.date(), day)]
        return found[: self.count]

    def counted(self, count: int) -> Rule:
        return Rule(f"{self.text};COUNT={count}", self.happens, count)


def monday(day: date) -> date:
    return day - day.weekday() * DAY


@st.composite
def rules(draw: st.DrawFn, near: date) -> Rule:
    """One that is likely to happen on some day near this one."""
    every = draw(st.integers(1, 3))
    day = near + draw(st.integers(-2, 2)) * DAY
    names = draw(st.sets(st.integers(0, 6), min_size=1, max_size=3))
    nth, is_last = (day.day - 1) // 7 + 1, day.day > monthrange(day.year, day.month)[1] - 7
    found = draw(
        st.sampled_from(
            [
                Rule(f"FREQ=DAILY;INTERVAL={every}", lambda first, at: (at - first).days % every == 0),
                Rule(
                    f"FREQ=WEEKLY;INTERVAL={every};BYDAY={','.join(WEEKDAYS[n] for n in sorted(names))}",
                    lambda first, at: (
                        at.weekday() in names and (monday(at) - monday(first)).days // 7 % every == 0
                    ),
                ),
                Rule(f"FREQ=MONTHLY;BYMONTHDAY={day.day}", lambda _first, at: at.day == day.day),
                Rule("FREQ=MONTHLY;BYMONTHDAY=-1", lambda _first, at: (at + DAY).day == 1),
                Rule(
                    f"FREQ=MONTHLY;BYDAY={nth if nth < 5 else -1}{WEEKDAYS[day.weekday()]}",
                    lambda _first, at: (
                        at.weekday() == day.weekday()
                        and ((at.day - 1) // 7 + 1 == nth if nth < 5 else (at + 7 * DAY).month != at.month)
                    ),
                ),
                Rule(
                    f"FREQ=YEARLY;BYMONTH={day.month};BYMONTHDAY={day.day}",
                    lambda _first, at: (at.month, at.day) == (day.month, day.day),
                ),
            ]
        )
    )
    assert nth < 5 or is_last
    return found.counted(draw(st.integers(1, 400))) if draw(st.booleans()) else found


# -- Planned work: its keys, and its minutes


@dataclass(frozen=True)
class Planned:
    """One window: once, or by a rule."""

    tz: str
    start: datetime
    length: timedelta
    is_elapsed: bool
    rule: Rule | None

    @property
    def keys(self) -> dict[str, Any]:
        end = {"end": (self.start + self.length).isoformat()}
        if self.is_elapsed:
            end = {"duration": f"{round(self.length.total_seconds())}s"}
        rrule = {} if self.rule is None else {"rrule": self.rule.text}
        return {"start": self.start.isoformat(), **end, **rrule, "tz": self.tz, "reason": "work"}

    def minutes(self, from_us: int) -> Minutes:
        clock, found = wall_clock(self.tz, from_us, MINUTES), Minutes()
        last = clock.days[-1]
        for start in [self.start] if self.rule is None else self.rule.starts(self.start, last):
            begin = clock.first(start)
            if 0 < begin < MINUTES:
                length = round(self.length.total_seconds()) // 60
                end = begin + length if self.is_elapsed else clock.first(start + self.length)
                found.update(range(begin, end))
        return found


@st.composite
def planned(draw: st.DrawFn, zone: str, near: datetime) -> Planned:
    tz = draw(st.sampled_from([zone, zone, zone, *ZONES]))
    is_ruled = draw(st.integers(0, 2)) == 0
    ago = draw(st.integers(0, 700)) if is_ruled else draw(st.integers(-1, 1))
    # Often within the hours in which clocks change.
    of_day = draw(st.one_of(st.integers(0, 3 * 60 + 30), st.integers(22 * 60, 1439), st.integers(0, 1439)))
    start = datetime.combine(near.date() - ago * DAY, time.min) + timedelta(minutes=of_day)
    length = timedelta(minutes=draw(st.one_of(st.integers(1, 90), st.integers(60, 12 * 60))))
    rule = draw(rules(near.date())) if is_ruled else None
    return Planned(tz, start, length, draw(st.booleans()), rule)


@dataclass(frozen=True)
class Version:
    """Of a Maintenance document: in force in [applied, ended), announced at ``announced``; in minutes."""

    what: Planned
    number: int
    applied: int
    ended: int | None
    announced: int
    reason: str

    def in_force(self, name: str, from_us: int) -> AnnouncedWork:
        spec = {**self.what.keys, "reason": self.reason, "scope": {"agreements": ["gold"]}}
        document = MaintenanceDocument.from_json(
            {
                "apiVersion": "storage-sla/v1",
                "kind": "Maintenance",
                "metadata": {"name": name},
                "spec": spec,
            }
        )
        ended_us = None if self.ended is None else from_us + self.ended * MINUTE_US
        return AnnouncedWork(document, self.number, from_us + self.applied * MINUTE_US, ended_us)

    def since(self, notice: int | None) -> int:
        """From when on it excuses anything."""
        return self.applied if notice is None else max(self.applied, self.announced + notice)

    def minutes(self, from_us: int, notice: int | None) -> Minutes:
        until = MINUTES if self.ended is None else self.ended
        return {at for at in self.what.minutes(from_us) if self.since(notice) <= at < until}

    def from_minute(self, notice: int | None) -> int:
        """The first minute in which a slice may begin that it excuses: it had been announced by then."""
        return self.announced + (notice or 0)


@st.composite
def documents(draw: st.DrawFn, zone: str, near: datetime, from_us: int) -> list[Version]:
    """The versions of one document: announced, perhaps changed, perhaps ended.

    Often when its work should begin, or within it.
    """
    first = draw(planned(zone, near))
    minutes = first.minutes(from_us)
    inside = (at for at in minutes if abs(at - BEFORE) < HALF and at - 1 not in minutes)
    begins = min(inside, default=BEFORE)
    times = sorted(draw(st.sets(st.integers(begins - 90, begins + 200), min_size=3, max_size=3)))
    applied = draw(st.sampled_from([0, times[0], times[0], begins]))
    changed, ended = max(times[1], applied + 1), draw(st.sampled_from([None, times[2] + 200]))
    if draw(st.booleans()):
        return [Version(first, 1, applied, None if ended is None else changed, applied, "work")]
    other = first if draw(st.booleans()) else draw(planned(zone, near))
    announced = applied if other.keys == first.keys else changed
    return [
        Version(first, 1, applied, changed, applied, "work"),
        Version(other, 2, changed, ended, announced, "more work"),
    ]


# -- Service hours


@dataclass(frozen=True)
class Hours:
    """Openings of some weekdays, in minutes of the day; holidays are days of none."""

    tz: str
    openings: tuple[tuple[int, int], ...]
    days: frozenset[int]
    holidays: frozenset[date] = frozenset()

    def minutes(self, from_us: int) -> Minutes:
        clock, found = wall_clock(self.tz, from_us, MINUTES), Minutes()
        for day in clock.days:
            if day.weekday() in self.days and day not in self.holidays:
                for opens, closes in self.openings:
                    found.update(range(_at(clock, day, opens), _at(clock, day, closes)))
        return found


def _at(clock: WallClock, day: date, minute: int) -> int:
    return clock.first(datetime.combine(day, time.min) + timedelta(minutes=minute))


def clock_text(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@st.composite
def hours(draw: st.DrawFn, zone: str, near: datetime, most: int) -> Hours:
    edges = sorted(draw(st.sets(st.integers(0, 1440), min_size=2, max_size=2 * most)))
    openings = tuple(zip(edges[::2], edges[1::2], strict=False))
    days = frozenset(draw(st.sets(st.integers(0, 6), min_size=4)))
    holidays = draw(st.sets(st.integers(-2, 2), max_size=1)) if most > 1 else set()
    return Hours(zone, openings, days, frozenset(near.date() + number * DAY for number in holidays))


@dataclass(frozen=True)
class Service:
    """Business hours of the agreement, or versions of a named calendar; neither: always."""

    business: Hours | None
    calendars: tuple[tuple[int, Hours], ...]

    def held(self, from_us: int) -> list[tuple[int, Minutes | None]]:
        """Since when (the first always), and in which minutes the promise holds; None: in all."""
        if self.calendars:
            return [(since, each.minutes(from_us)) for since, each in self.calendars]
        return [(0, None if self.business is None else self.business.minutes(from_us))]

    @property
    def text(self) -> str:
        if self.calendars:
            return "  service_hours: {calendar: bank}\n"
        if self.business is None:
            return ""
        ((opens, closes),) = self.business.openings
        days = ", ".join(NAMES[number] for number in sorted(self.business.days))
        return (
            f'  service_hours: {{calendar: business, days: [{days}], from: "{clock_text(opens)}", '
            f'to: "{clock_text(closes)}", tz: {self.business.tz}}}\n'
        )

    def versions(self, from_us: int) -> tuple[CalendarInForce, ...]:
        found = []
        for number, (since, held) in enumerate(self.calendars, 1):
            days = [NAMES[each] for each in sorted(held.days)]
            entries = [
                {"days": days, "from": clock_text(opens), "to": clock_text(closes)}
                for opens, closes in held.openings
            ]
            spec = {"tz": held.tz, "hours": entries, "holidays": [f"{day}" for day in held.holidays]}
            document = CalendarDocument.from_json(
                {
                    "apiVersion": "storage-sla/v1",
                    "kind": "Calendar",
                    "metadata": {"name": "bank"},
                    "spec": spec,
                }
            )
            found.append(CalendarInForce(document, number, from_us + since * MINUTE_US))
        return tuple(found)


@st.composite
def services(draw: st.DrawFn, zone: str, near: datetime) -> Service:
    kind = draw(st.sampled_from(["always", "always", "business", "named"]))
    if kind == "always":
        return Service(None, ())
    if kind == "business":
        return Service(draw(hours(zone, near, 1)), ())
    changed = draw(st.integers(BEFORE - 1440, BEFORE + 1440))
    versions = [(0, draw(hours(zone, near, 2))), (changed, draw(hours(zone, near, 2)))]
    return Service(None, tuple(versions[: draw(st.integers(1, 2))]))


# -- All of it


@dataclass(frozen=True)
class Agreed:
    """One version of the agreement; ``period``: day or week of a calendar, or so many rolling minutes."""

    tz: str
    period: str | int
    service: Service
    windows: tuple[Planned, ...]
    notice: int | None
    most: int | None

    @property
    def text(self) -> str:
        window = f"{{type: rolling, duration: {self.period}m}}"
        if isinstance(self.period, str):
            window = f"{{type: calendar, period: {self.period}, tz: {self.tz}}}"
        parts = [f"{key}: {value}m" for key, value in (("notice", self.notice), ("max_per_period", self.most))
                 if value is not None]  # fmt: skip
        keys = [{**each.keys, "author": "ann"} for each in self.windows]
        listed = ", ".join("{" + ", ".join(f'{k}: "{v}"' for k, v in each.items()) + "}" for each in keys)
        parts.append(f"windows: [{listed}]")
        return simple(
            slice_text="1m",
            extra=f"  window: {window}\n{self.service.text}  maintenance: {{{', '.join(parts)}}}\n",
        )

    def planned(self, works: Sequence[Version], from_us: int) -> Minutes:
        own = (each.minutes(from_us) for each in self.windows)
        return set().union(*own, *(each.minutes(from_us, self.notice) for each in works))

    def period_start(self, at: int, from_us: int) -> int:
        if isinstance(self.period, int):
            return max(at - self.period, 0)
        clock = wall_clock(self.tz, from_us, MINUTES)
        # The newest day that has begun: where a clock is set back over midnight, the day before is over.
        day = max(each for each in clock.days if clock.midnight(each) <= at)
        return clock.midnight(monday(day) if self.period == "week" else day)


@st.composite
def agreed(draw: st.DrawFn, zone: str, near: datetime) -> Agreed:
    return Agreed(
        zone,
        draw(st.sampled_from(["day", "week", 600, 2880])),
        draw(services(zone, near)),
        tuple(draw(st.lists(planned(zone, near), max_size=2))),
        draw(st.sampled_from([None, 60, 1440])),
        draw(st.sampled_from([None, 30, 120])),
    )


@dataclass(frozen=True)
class World:
    """The first version of the agreement, a second one from ``edited`` on, and documents beside them."""

    from_us: int
    versions: tuple[Agreed, Agreed]
    edited: int
    works: tuple[tuple[Version, ...], ...]
    slice_minutes: int

    def items(self) -> tuple[InForce, InForce]:
        work = tuple(
            sorted(
                (one.in_force(f"w{n}", self.from_us) for n, each in enumerate(self.works) for one in each),
                key=lambda one: one.applied_us,
            )
        )
        texts = [agreement(each.text) for each in self.versions]
        edited_us = self.from_us + self.edited * MINUTE_US
        calendars = [each.service.versions(self.from_us) for each in self.versions]
        first = InForce(texts[0], 1, self.from_us, edited_us, work, calendars[0])
        return first, InForce(texts[1], 2, edited_us, None, work, calendars[1], (first,))

    def expected(self) -> list[bool]:
        """Of each slice that is looked at, whether it is excluded."""
        works = [one for each in self.works for one in each]
        per_version = [each.planned(works, self.from_us) for each in self.versions]
        is_planned = [at in per_version[at >= self.edited] for at in range(MINUTES)]
        before = [0, *accumulate(is_planned)]
        rows = [self._excuses_of(each, works) for each in self.versions]
        hours_of = [each.service.held(self.from_us) for each in self.versions]
        found = []
        for begin in self.begins:
            version = int(begin >= self.edited)
            held, inside = self.versions[version], range(begin, begin + self.slice_minutes)
            is_work = any(
                since <= begin and not minutes.isdisjoint(inside) for since, minutes in rows[version]
            )
            if is_work and held.most is not None:
                is_work = before[begin] - before[held.period_start(begin, self.from_us)] < held.most
            open_minutes = [minutes for since, minutes in hours_of[version] if since <= begin][-1]
            found.append(is_work or (open_minutes is not None and begin not in open_minutes))
        return found

    def _excuses_of(self, held: Agreed, works: Sequence[Version]) -> list[tuple[int, Minutes]]:
        """What excuses slices that touch one of these minutes, of those that begin not before a minute."""
        own = [(0, each.minutes(self.from_us)) for each in held.windows]
        return own + [(w.from_minute(held.notice), w.minutes(self.from_us, held.notice)) for w in works]

    @property
    def begins(self) -> range:
        return range(BEFORE - HALF, BEFORE + HALF, self.slice_minutes)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    zone, day = draw(st.sampled_from(CHANGES))
    near = datetime.fromisoformat(day).replace(tzinfo=UTC)
    from_us = round((near - timedelta(minutes=BEFORE)).timestamp() * 1e6)
    near = near.replace(tzinfo=None)
    edited = draw(st.one_of(st.integers(1, 100), st.integers(BEFORE - HALF, BEFORE + HALF)))
    return World(
        from_us,
        (draw(agreed(zone, near)), draw(agreed(zone, near))),
        edited,
        tuple(tuple(draw(documents(zone, near, from_us))) for _ in range(draw(st.integers(0, 2)))),
        draw(st.sampled_from([5, 15, 60, 240])),
    )


@st.composite
def begun(draw: st.DrawFn) -> World:
    """Work that begins when its document is applied, within a slice, or soon behind: all else is open."""
    made = draw(worlds())
    near = datetime.fromtimestamp(made.from_us / 1e6 + BEFORE * 60, UTC).replace(tzinfo=None)
    at = draw(st.integers(-HALF, HALF))
    what = Planned(
        "UTC", near + timedelta(minutes=at), timedelta(minutes=draw(st.integers(1, 400))), True, None
    )
    applied = BEFORE + at - draw(st.sampled_from([0, 0, 30, 200]))
    ended = BEFORE + at + draw(st.integers(1, 200))
    always = replace(made.versions[0], service=Service(None, ()), windows=())
    work = Version(what, 1, applied, ended, applied, "work")
    return replace(made, versions=(always, always), works=((work,),))


@settings(max_examples=80, deadline=None)
@given(st.one_of(worlds(), begun()))
def test_excluded_slices_are_those_of_the_oracle(world: World) -> None:
    first, second = world.items()
    found = []
    for begin in world.begins:
        item = first if begin < world.edited else second
        begin_us = world.from_us + begin * MINUTE_US
        found.append(item.excluded(begin_us, begin_us + world.slice_minutes * MINUTE_US) is not None)
    assert found == world.expected()


@settings(max_examples=80, deadline=None)
@given(worlds())
def test_what_holds_live_is_what_the_oracle_says_of_a_minute(world: World) -> None:
    minute = World(world.from_us, world.versions, world.edited, world.works, 1)
    at = list(minute.begins)[::37]
    expected = dict(zip(minute.begins, minute.expected(), strict=True))
    items = minute.items()
    found = {
        each: items[each >= world.edited].excluded(world.from_us + each * MINUTE_US) is not None
        for each in at
    }
    assert found == {each: expected[each] for each in at}


def test_the_oracle_knows_the_days_on_which_clocks_change() -> None:
    lengths = {}
    for zone, day in CHANGES:
        near = datetime.fromisoformat(day).replace(tzinfo=UTC)
        from_us = round((near - 2 * DAY).timestamp() * 1e6)
        clock = wall_clock(zone, from_us, 5 * 1440)
        lengths[zone, day] = clock.midnight(near.date() + DAY) - clock.midnight(near.date())
    assert lengths["Europe/Berlin", "2026-03-29"] == 23 * 60
    assert lengths["Europe/Berlin", "2026-10-25"] == 25 * 60
    assert lengths["Australia/Lord_Howe", "2026-04-05"] == 24 * 60 + 30
    assert lengths["Asia/Kathmandu", "2026-07-01"] == 24 * 60
