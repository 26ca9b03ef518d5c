"""Forecasts: against a slow computation, on histories whose future is known, and where none may be made."""

from __future__ import annotations

from itertools import combinations
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sla_server.storage_resources import forecast as forecasts
from sla_server.storage_resources.forecast import (
    DAY_US,
    LEAST_DAYS,
    MOST_AHEAD_DAYS,
    Forecast,
    explained,
    forecast,
    growth_spike,
    theil_sen,
)
from tests.support.pool_histories import SIZE, covered

FIRST = 20_000


def made(used: list[float] | forecasts.Floats, size: int = SIZE, late_days: float = 0.0) -> Forecast:
    """The forecast at the end of the newest day, or so many days after it."""
    days = (FIRST + np.arange(len(used))) * DAY_US
    end_us = (FIRST + len(used)) * DAY_US
    return forecast(days, np.asarray(used, dtype=np.float64), size, end_us + round(late_days * DAY_US))


def ahead_days(history: int, at_us: int | None) -> float:
    assert at_us is not None
    return (at_us - (FIRST + history) * DAY_US) / DAY_US


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**15), min_size=2, max_size=12))
def test_the_line_is_the_one_of_a_slow_computation(used: list[int]) -> None:
    days = np.arange(len(used), dtype=np.float64)
    slopes, levels = theil_sen(days, np.array(used, dtype=np.float64))
    slow = median((used[b] - used[a]) / (b - a) for a, b in combinations(range(len(used)), 2))
    assert float(slopes) == pytest.approx(slow, rel=1e-9, abs=1e-3)
    assert float(levels) == pytest.approx(
        median(each - slow * day for day, each in enumerate(used)), rel=1e-9, abs=1e-1
    )


def test_many_histories_at_once_have_the_lines_of_each() -> None:
    rng = np.random.default_rng(1)
    days, many = np.arange(20.0), rng.normal(size=(5, 20))
    slopes, levels = theil_sen(days, many)
    for row, slope, level in zip(many, slopes, levels, strict=True):
        assert (float(slope), float(level)) == tuple(map(float, theil_sen(days, row)))


def test_a_straight_line_is_full_on_its_day() -> None:
    found = made([100 + 10 * day for day in range(31)])
    assert ahead_days(31, found.full_us) == pytest.approx(60)
    assert ahead_days(31, found.earliest_us) == pytest.approx(60)
    assert ahead_days(31, found.latest_us) == pytest.approx(60)
    assert (found.slope_bytes_per_day, found.r2, found.reason) == (pytest.approx(10), pytest.approx(1), "")


def test_outliers_do_not_move_it() -> None:
    used = [100.0 + 10 * day for day in range(31)]
    for day in (3, 11, 12, 26):
        used[day] += 250
    assert ahead_days(31, made(used).full_us) == pytest.approx(60, rel=0.05)


def test_missing_days_do_no_harm() -> None:
    kept = [0, 1, 2, 9, 10, 11, 12, 20]
    days = (FIRST + np.array(kept)) * DAY_US
    found = forecast(days, 100 + 10.0 * np.array(kept), SIZE, (FIRST + 21) * DAY_US)
    assert ahead_days(21, found.full_us) == pytest.approx(70)


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        ([10.0 * day for day in range(LEAST_DAYS - 1)], "6 days are known, 7 are needed"),
        ([500.0] * 30, "it does not grow"),
        ([500.0 - day for day in range(30)], "it does not grow"),
        ([500 + 300 * (day % 2) + 0.2 * day for day in range(30)], "its use varies too much"),
        ([0.5 * day for day in range(30)], "it has room for more than 2 years"),
        ([], "0 days are known"),
    ],
)
def test_no_day_is_named_where_it_would_be_a_guess(used: list[float], reason: str) -> None:
    found = made(used)
    assert found.full_us is None
    assert found.earliest_us is None
    assert found.reason.startswith(reason)
    assert (MOST_AHEAD_DAYS, LEAST_DAYS) == (730.0, 7)


def test_a_pool_that_is_full_is_so_now() -> None:
    found = made([100.0 * day for day in range(1, 11)], late_days=0.5)
    assert ahead_days(10, found.full_us) == 0.5


def test_one_history_has_one_forecast() -> None:
    used = 100 + 5 * np.arange(40) + np.random.default_rng(3).normal(0, 9, 40)
    assert made(used) == made(used)
    found = made(used)
    assert found.earliest_us is not None
    assert found.full_us is not None
    assert found.latest_us is not None
    assert found.earliest_us < found.full_us < found.latest_us


def test_the_day_is_within_its_interval_in_nine_of_ten_generated_histories() -> None:
    found = covered(200)
    assert found.named >= 180
    assert found.within / found.named >= 0.9, found


def test_the_share_that_a_line_explains() -> None:
    days = np.arange(10.0)
    assert explained(days, 3 * days + 1, 3.0, 1.0) == 1.0
    assert explained(days, np.full(10, 5.0), 0.0, 5.0) == 0.0
    assert explained(days, days, -5.0, 0.0) == 0.0


def spike(used: list[float], days: list[int] | None = None) -> float | None:
    numbers = np.array(days or range(len(used)), dtype=np.int64)
    return growth_spike(numbers * DAY_US, np.array(used), SIZE)


def test_a_day_that_grows_far_more_than_others_is_a_spike() -> None:
    usual = [100.0 + day + 0.3 * (day % 3) for day in range(20)]
    assert spike(usual) is None
    assert spike([*usual, usual[-1] + 80]) == pytest.approx(80)
    assert spike([*usual, usual[-1] + 8]) is None, "less than 1 % of the pool"
    assert spike([*usual, usual[-1] - 80]) is None
    assert spike([0.0, 900.0]) is None, "too few days"


def test_what_has_grown_in_a_gap_is_no_spike_of_the_day_after_it() -> None:
    """A gateway that was away for four weeks: 30 in 29 days, as before."""
    usual = [100.0 + day for day in range(20)]
    assert spike([*usual, usual[-1] + 30], [*range(20), 48]) is None
    assert spike([*usual, usual[-1] + 580], [*range(20), 48]) == pytest.approx(20)
