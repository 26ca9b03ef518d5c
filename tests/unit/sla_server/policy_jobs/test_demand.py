"""Hours of the week by local clocks, holidays, and percentiles of weighted values."""

from __future__ import annotations

from datetime import UTC, date, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.policy_jobs.demand import (
    WEIGHT_SCALE,
    expected,
    hour_tables,
    learned_of,
    local_hour,
    recency_weights,
    weighted_percentile,
)
from sla_server.policy_jobs.transforms import hour_of_week

BERLIN, KOLKATA = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata")
UTC_ZONE = ZoneInfo("UTC")
DAY_US = 86_400_000_000


def us(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp()) * 1_000_000


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9)), min_size=1, max_size=30).filter(
        lambda rows: any(weight for _, weight in rows)
    ),
    st.floats(0, 1),
)
def test_a_weighted_percentile_is_that_of_the_repeated_values(
    rows: list[tuple[float, int]], share: float
) -> None:
    values, weights = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    slow = np.percentile(np.repeat(values, weights), share * 100)
    assert weighted_percentile(values, weights, share) == pytest.approx(slow, rel=1e-9, abs=1e-6)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no value has a weight"):
        weighted_percentile(np.array([1.0]), np.array([0]), 0.5)


def test_what_was_a_half_life_ago_counts_half() -> None:
    now = 100 * DAY_US
    weights = recency_weights(np.array([now, now - 14 * DAY_US, now - 28 * DAY_US, 0, now + 5]), now, 14)
    assert weights.tolist()[:3] == [WEIGHT_SCALE, WEIGHT_SCALE // 2, WEIGHT_SCALE // 4]
    assert weights[4] == WEIGHT_SCALE
    assert recency_weights(np.array([0]), 4000 * DAY_US, 14).tolist() == [1], "old, but all there is"


def test_hour_of_week_starts_on_monday_utc() -> None:
    assert hour_of_week(0) == 72
    assert hour_of_week(4 * DAY_US) == 0


@given(st.integers(0, 4_000_000_000))
def test_in_utc_local_hours_are_those_of_the_store(at_s: int) -> None:
    assert local_hour(at_s * 1_000_000, UTC_ZONE) == hour_of_week(at_s * 1_000_000)


def test_an_hour_is_that_of_the_local_clock_over_the_year() -> None:
    """Monday 08:00 in Berlin is 07:00 UTC in winter and 06:00 in summer."""
    assert local_hour(us(2026, 1, 12, 7), BERLIN) == 8
    assert local_hour(us(2026, 7, 13, 6), BERLIN) == 8
    assert local_hour(us(2026, 1, 11, 23), BERLIN) == 0, "Sunday 23 UTC is Monday there"


def test_a_holiday_is_a_sunday() -> None:
    friday = date(2026, 12, 25)
    assert local_hour(us(2026, 12, 25, 9), BERLIN, {friday}) == 6 * 24 + 10
    assert local_hour(us(2026, 12, 24, 23), BERLIN, {friday}) == 6 * 24, "it begins at local midnight"
    assert local_hour(us(2026, 12, 25, 9), BERLIN) == 4 * 24 + 10


def test_the_table_of_hours_covers_the_window_by_quarters() -> None:
    rows = learned_of(us(2026, 1, 12, 6, 50), us(2026, 1, 12, 7, 1), KOLKATA)
    assert rows == [(us(2026, 1, 12, 6, 45), 12), (us(2026, 1, 12, 7, 0), 12)]
    (before, after) = learned_of(us(2026, 1, 12, 7, 15), us(2026, 1, 12, 7, 45), KOLKATA)
    assert (before[1], after[1]) == (12, 13), "half past, as clocks there are"


def test_each_hour_of_utc_is_expected_to_be_like_the_local_one() -> None:
    found = expected(us(2026, 1, 14, 15, 20), BERLIN)
    assert found[7] == 8
    assert sorted(found) == list(range(168))
    assert expected(us(2026, 1, 14, 15, 20), UTC_ZONE).tolist() == list(range(168))


def test_the_week_with_the_change_of_clocks_follows_it() -> None:
    """On Sunday 2026-03-29 at 01:00 UTC summer time begins."""
    found = expected(us(2026, 3, 26, 0), BERLIN)
    assert found[5 * 24 + 12] == 5 * 24 + 13, "Saturday, winter"
    assert found[6 * 24 + 12] == 6 * 24 + 14, "Sunday, summer"
    assert found[0 * 24 + 12] == 0 * 24 + 14, "Monday, summer"
    assert 6 * 24 + 2 not in found, "this hour is left out"


def test_a_coming_holiday_is_expected_to_be_a_sunday() -> None:
    found = expected(us(2026, 12, 22, 0), BERLIN, {date(2026, 12, 25)})
    assert found[4 * 24 + 9] == 6 * 24 + 10
    assert found[3 * 24 + 9] == 3 * 24 + 10


def test_tables_have_each_zone_once() -> None:
    window = us(2026, 12, 1), us(2026, 12, 22)
    found = hour_tables(
        {"here": "Europe/Berlin", "there": "UTC", "too": "UTC"}, window, 7, {date(2026, 12, 25)}
    )
    assert found.zones.to_pylist()[0] == {"backend": "here", "zone": "Europe/Berlin"}
    assert found.holidays == (date(2026, 12, 25),)
    assert found.learned.num_rows == 2 * 21 * 96
    assert found.coming.num_rows == 2 * 168
    first, last = found.learned.to_pylist()[0], found.learned.to_pylist()[-1]
    assert first == {
        "zone": "Europe/Berlin",
        "begin_us": window[0],
        "hour_of_week": 25,
        "weight": WEIGHT_SCALE // 8,
    }
    assert last["begin_us"] == window[1] - 900_000_000
    coming = {(row["zone"], row["hour_of_week"]): row["like_hour"] for row in found.coming.to_pylist()}
    assert coming["Europe/Berlin", 4 * 24 + 9] == 6 * 24 + 10
    assert coming["UTC", 4 * 24 + 9] == 6 * 24 + 9
