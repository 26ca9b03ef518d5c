"""Texts of periods, and their bounds where the clock is changed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sla_server.reports.errors import NoSuchPeriod
from sla_server.reports.period import parse_period, period_at
from tests.support.reports import DAY_US, HOUR_US, at_us


@pytest.mark.parametrize(
    ("text", "kind", "first", "end"),
    [
        ("2026", "year", "2026-01-01", "2027-01-01"),
        ("2026-Q4", "quarter", "2026-10-01", "2027-01-01"),
        ("2026-10", "month", "2026-10-01", "2026-11-01"),
        ("2026-W40", "week", "2026-09-28", "2026-10-05"),
        ("2026-W53", "week", "2026-12-28", "2027-01-04"),
        ("2026-10-03", "day", "2026-10-03", "2026-10-04"),
    ],
)
@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "America/New_York", "Pacific/Auckland"])
def test_a_text_names_a_period(text: str, kind: str, first: str, end: str, tz: str) -> None:
    found = parse_period(text, tz)
    assert (found.kind, found.from_us, found.to_us) == (kind, at_us(first, tz), at_us(end, tz))
    assert found.text == text
    assert period_at(found.kind, tz, found.from_us) == period_at(found.kind, tz, found.to_us - 1) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-13",
        "2026-W54",
        "2026-W00",
        "2026-02-29",
        "2026-Q5",
        "26-10",
        "2026-10-03T00:00",
        "1900",
        "9999-01",
    ],
)
def test_what_is_no_period_is_refused(text: str) -> None:
    with pytest.raises(NoSuchPeriod, match="Give a month"):
        parse_period(text, "UTC")


def test_days_are_local_and_may_have_23_or_25_hours() -> None:
    lengths = {
        day: end_us - start_us for day, start_us, end_us in parse_period("2026-10", "Europe/Berlin").days()
    }
    assert len(lengths) == 31
    assert lengths.pop("2026-10-25") == 25 * HOUR_US
    assert set(lengths.values()) == {DAY_US}
    march = [end_us - start_us for _, start_us, end_us in parse_period("2026-03", "Europe/Berlin").days()]
    assert sorted(set(march)) == [23 * HOUR_US, DAY_US]


def test_days_join_each_other_also_where_a_day_was_left_out() -> None:
    found = parse_period("2011-12", "Pacific/Apia")  # it has no 30 December
    days = list(found.days())
    assert len(days) == 30
    assert days[0][1] == found.from_us
    assert days[-1][2] == found.to_us
    assert all(before[2] == after[1] for before, after in pairwise(days))
