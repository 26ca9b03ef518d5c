"""Periods, service hours and maintenance in local time, over changes of summer time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements import periods
from sla_server.agreements.document import Agreement
from sla_server.agreements.periods import CalendarWindow, Maintenance, RollingWindow, ServiceHours
from tests.support.agreements import agreement, simple

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
DAY_S = 86_400
BERLIN = "Europe/Berlin"


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


def calendar(period: str, tz: str = BERLIN) -> CalendarWindow:
    return CalendarWindow.model_validate({"type": "calendar", "period": period, "tz": tz})


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        ("day", "2026-03-28T23:00", "2026-03-29T22:00"),  # 23 hours long: summer time begins
        ("week", "2026-03-22T23:00", "2026-03-29T22:00"),
        ("month", "2026-02-28T23:00", "2026-03-31T22:00"),
        ("quarter", "2025-12-31T23:00", "2026-03-31T22:00"),
        ("year", "2025-12-31T23:00", "2026-12-31T23:00"),
    ],
)
def test_calendar_periods_follow_the_wall_clock(period: str, start: str, end: str) -> None:
    assert periods.period_bounds(calendar(period), us("2026-03-29T12:00")) == (us(start), us(end))


def test_a_rolling_window_ends_now() -> None:
    window = RollingWindow.model_validate({"type": "rolling", "duration": "30d"})
    assert periods.period_bounds(window, us("2026-03-29T12:00")) == (
        us("2026-02-27T12:00"),
        us("2026-03-29T12:00"),
    )


@given(
    st.integers(us("1999-01-01"), us("2050-01-01")),
    st.sampled_from(["day", "week", "month", "quarter", "year"]),
    st.sampled_from(["UTC", BERLIN, "America/Santiago", "Asia/Kathmandu", "Pacific/Apia"]),
)
def test_periods_hold_their_instant_and_meet_without_gap(at_us: int, period: str, tz: str) -> None:
    start, end = periods.period_bounds(calendar(period, tz), at_us)
    assert start <= at_us < end
    assert periods.period_bounds(calendar(period, tz), end)[0] == end
    assert periods.period_bounds(calendar(period, tz), start - 1)[1] == start


BUSINESS = ServiceHours.model_validate({"calendar": "business"})


@pytest.mark.parametrize(
    ("at", "inside"),
    [
        ("2026-02-02T06:59:59", False),
        ("2026-02-02T07:00", True),  # Monday 08:00 in Berlin, winter
        ("2026-02-02T16:59:59", True),
        ("2026-02-02T17:00", False),
        ("2026-02-01T10:00", False),  # Sunday
        ("2026-07-06T06:00", True),  # Monday 08:00 in Berlin, summer
    ],
)
def test_business_hours(at: str, inside: bool) -> None:
    assert periods.in_service(BUSINESS, us(at), BERLIN) is inside


def test_own_days_and_hours() -> None:
    late = ServiceHours.model_validate(
        {"calendar": "business", "days": ["sat"], "from": "22:00", "to": "24:00"}
    )
    assert periods.in_service(late, us("2026-02-07T23:59"), "UTC")
    assert not periods.in_service(late, us("2026-02-08T00:00"), "UTC")
    assert periods.service_us(late, us("2026-02-01"), us("2026-03-01"), "UTC") == 4 * 2 * HOUR_US


def test_service_time_of_a_week() -> None:
    assert periods.service_us(BUSINESS, us("2026-02-02"), us("2026-02-09"), BERLIN) == 50 * HOUR_US
    assert periods.service_us(None, 0, DAY_US, "UTC") == DAY_US
    assert periods.service_us(BUSINESS, DAY_US, 0, "UTC") == 0


@given(st.integers(us("2026-01-01"), us("2027-01-01")), st.integers(0, 40), st.integers(0, 40))
def test_service_time_adds_up(start: int, first_h: int, second_h: int) -> None:
    middle = start + first_h * HOUR_US
    end = middle + second_h * HOUR_US
    parts = periods.service_us(BUSINESS, start, middle, BERLIN) + periods.service_us(
        BUSINESS, middle, end, BERLIN
    )
    assert parts == periods.service_us(BUSINESS, start, end, BERLIN)
    assert 0 <= parts <= end - start


def maintenance(*entries: str, limit: str = "") -> Maintenance:
    listed = ", ".join(f"{{{entry}, reason: disks, author: ann}}" for entry in entries)
    text = f"  maintenance: {{{limit}windows: [{listed}]}}\n"
    return agreement(simple(extra=text)).spec.maintenance


def agreed(work: Maintenance, tz: str = BERLIN) -> Agreement:
    spec = agreement(simple()).spec.model_copy(update={"maintenance": work, "window": calendar("month", tz)})
    return agreement(simple()).model_copy(update={"spec": spec})


def excluded(work: Maintenance, start: str, minutes: int = 1, tz: str = BERLIN) -> bool:
    found = agreed(work, tz)
    return periods.is_excluded(found, (), us(start), end_us=us(start) + minutes * 60_000_000) is not None


def test_a_slice_that_touches_work_is_excluded() -> None:
    work = maintenance('start: "2026-02-03T22:00", duration: 2h')
    assert not excluded(work, "2026-02-03T20:59")
    assert excluded(work, "2026-02-03T20:59", minutes=2)
    assert excluded(work, "2026-02-03T22:59")
    assert not excluded(work, "2026-02-03T23:00")


def test_repeated_work_keeps_its_local_time() -> None:
    work = maintenance('start: "2026-03-01T02:00", duration: 1h, rrule: "FREQ=WEEKLY;BYDAY=SU"')
    assert excluded(work, "2026-03-22T01:30")
    assert excluded(work, "2026-04-05T00:30")  # 02:30 in summer time
    assert not excluded(work, "2026-04-05T01:30")
    assert not excluded(work, "2026-02-22T01:30")  # before its start


def test_work_over_midnight_and_overlapping_work_counts_once() -> None:
    work = maintenance(
        'start: "2026-02-03T23:00", duration: 2h', 'start: "2026-02-04T00:00", end: "2026-02-04T02:00"'
    )
    assert periods.planned_us(agreed(work, "UTC"), (), us("2026-02-03"), us("2026-02-05")) == 3 * HOUR_US


def test_work_beyond_the_limit_of_a_period_is_not_excused() -> None:
    work = maintenance('start: "2026-02-03T00:00", duration: 5h', limit="max_per_period: 2h, ")
    assert excluded(work, "2026-02-03T01:59", tz="UTC")
    assert not excluded(work, "2026-02-03T02:00", tz="UTC")


def test_outside_service_hours_everything_is_excluded() -> None:
    zone = f"  window: {{type: calendar, period: month, tz: {BERLIN}}}\n"
    found = agreement(simple(extra=zone + "  service_hours: {calendar: business}\n"))
    at = us("2026-02-01T10:00")
    assert periods.is_excluded(found, (), at) == "outside service hours"
    assert periods.is_excluded(found, (), at + 2 * DAY_US) is None


SPRING, AUTUMN = "2027-03-28", "2027-10-31"
"""In Berlin 02:00 to 03:00 does not exist on the one, and is there twice on the other."""


def window(when: str) -> periods.PlannedWindow:
    (found,) = maintenance(when).windows
    return found


@pytest.mark.parametrize(
    ("when", "begin", "end"),
    [
        (f'start: "{SPRING}T02:00", duration: 1h', f"{SPRING}T01:00", f"{SPRING}T02:00"),
        (f'start: "{SPRING}T02:30", duration: 30m', f"{SPRING}T01:00", f"{SPRING}T01:30"),
        (f'start: "{SPRING}T01:30", duration: 2h', f"{SPRING}T00:30", f"{SPRING}T02:30"),
        (f'start: "{SPRING}T02:30", end: "{SPRING}T04:00"', f"{SPRING}T01:00", f"{SPRING}T02:00"),
        (f'start: "{SPRING}T01:00", end: "{SPRING}T02:30"', f"{SPRING}T00:00", f"{SPRING}T01:00"),
        (f'start: "{AUTUMN}T02:00", duration: 1h', f"{AUTUMN}T00:00", f"{AUTUMN}T01:00"),
        (f'start: "{AUTUMN}T02:30", duration: 30m', f"{AUTUMN}T00:30", f"{AUTUMN}T01:00"),
        (f'start: "{AUTUMN}T01:30", duration: 2h', "2027-10-30T23:30", f"{AUTUMN}T01:30"),
        (f'start: "{AUTUMN}T02:30", end: "{AUTUMN}T03:00"', f"{AUTUMN}T00:30", f"{AUTUMN}T02:00"),
        (f'start: "{AUTUMN}T01:00", end: "{AUTUMN}T02:30"', "2027-10-30T23:00", f"{AUTUMN}T00:30"),
    ],
)
def test_a_duration_is_elapsed_time_and_an_end_is_the_wall_clocks(when: str, begin: str, end: str) -> None:
    year = us("2027-01-01"), us("2028-01-01")
    assert list(periods.occurrences(window(when), *year, BERLIN)) == [(us(begin), us(end))]
    assert periods.planned_us(agreed(maintenance(when)), (), *year) == us(end) - us(begin)


def test_weekly_work_lasts_as_long_on_the_days_on_which_the_clock_changes() -> None:
    rule = 'start: "2027-01-03T02:00", duration: 1h, rrule: "FREQ=WEEKLY;BYDAY=SU"'
    found = list(periods.occurrences(window(rule), us("2027-01-01"), us("2028-01-01"), BERLIN))
    assert len(found) == 52
    assert {end - begin for begin, end in found} == {HOUR_US}
    assert (us(f"{SPRING}T01:00"), us(f"{SPRING}T02:00")) in found
    assert (us(f"{AUTUMN}T00:00"), us(f"{AUTUMN}T01:00")) in found


def test_an_hour_that_a_day_does_not_have_excuses_nothing() -> None:
    work = maintenance(f'start: "{SPRING}T02:00", end: "{SPRING}T03:00"')
    assert not excluded(work, f"{SPRING}T00:59", minutes=2)
    assert excluded(maintenance(f'start: "{SPRING}T02:00", duration: 1h'), f"{SPRING}T01:59")


ZONES = ["UTC", BERLIN, "America/Santiago", "America/St_Johns", "Asia/Beirut", "Pacific/Apia"]


@given(
    st.datetimes(datetime(2004, 1, 1), datetime(2036, 1, 1)), st.sampled_from(ZONES), st.integers(1, 200_000)
)
def test_a_local_time_is_the_first_instant_at_which_a_clock_shows_it_or_more(
    local: datetime, tz: str, lasting_s: int
) -> None:
    at_us = periods.from_local(local, tz)
    assert periods.to_local(at_us, tz) >= local
    assert periods.to_local(at_us - 1, tz) < local
    lasting = timedelta(seconds=lasting_s)
    assert periods.span_of(local, lasting, tz) == (at_us, at_us + lasting_s * 1_000_000)
    begin_us, end_us = periods.span_of(local, local + lasting, tz)
    assert begin_us <= end_us


HOURS = [
    {"calendar": "business", "days": list(periods.DAYS), "from": "02:30", "to": "08:00"},
    {"calendar": "business", "days": list(periods.DAYS), "from": "00:00", "to": "02:30"},
    {"calendar": "business", "days": ["sat"], "from": "22:00", "to": "24:00"},
    {"calendar": "business", "days": ["sun"], "from": "00:00", "to": "24:00"},
]


@pytest.mark.parametrize("hours", HOURS)
@pytest.mark.parametrize(
    ("tz", "day"),
    [
        (BERLIN, SPRING),
        (BERLIN, AUTUMN),
        ("America/St_Johns", "2010-11-07"),  # set back from 00:01 to 23:01 of the day before
        ("Asia/Beirut", "2021-10-31"),  # from 00:00 to 23:00
        ("America/Santiago", "2026-09-06"),  # forward at midnight
        ("Pacific/Apia", "2011-12-30"),  # a day that was left out
    ],
)
def test_the_hours_of_a_slice_and_those_of_a_period_are_the_same_hours(
    hours: dict[str, object], tz: str, day: str
) -> None:
    found = ServiceHours.model_validate(hours)
    start, end, step = us(day) - DAY_US, us(day) + 2 * DAY_US, 60_000_000
    by_slices = sum(periods.in_service(found, at, tz) for at in range(start, end, step)) * step
    assert by_slices == periods.service_us(found, start, end, tz)


@pytest.mark.parametrize(
    ("hours", "slice_s", "tz", "fits"),
    [
        ({"calendar": "always"}, DAY_S, BERLIN, True),
        ({"calendar": "business"}, DAY_S, BERLIN, False),
        ({"calendar": "business"}, DAY_S, "America/New_York", False),
        ({"calendar": "business"}, DAY_S, "Asia/Tokyo", True),  # 00:00 UTC is 09:00 there
        ({"calendar": "business"}, DAY_S // 2, BERLIN, True),
        ({"calendar": "business", "from": "08:00", "to": "09:00"}, 3600, BERLIN, True),
        ({"calendar": "business", "from": "08:00", "to": "09:00"}, 7200, BERLIN, False),  # in summer alone
        ({"calendar": "business", "from": "08:20", "to": "08:50"}, 3600, BERLIN, False),
        ({"calendar": "business", "from": "08:20", "to": "08:50"}, 3600, "Asia/Kolkata", True),  # 03:00 UTC
        ({"calendar": "business", "from": "08:20", "to": "08:21"}, 60, BERLIN, True),
    ],
)
def test_slices_are_judged_if_some_begin_in_the_hours(
    hours: dict[str, object], slice_s: int, tz: str, fits: bool
) -> None:
    found = ServiceHours.model_validate(hours)
    assert periods.begins_in_service(found, slice_s, us("2026-01-01"), tz) is fits
