"""The arithmetic of policies, without Spark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.policy_jobs.model import (
    Demand,
    capacity,
    caps_for_hour,
    isotonic,
    limit_change,
    water_fill,
)
from sla_server.policy_jobs.transforms import hour_of_week


def arrays(*columns: list[float]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(column, dtype=float) for column in columns)


def test_isotonic_pools_what_falls() -> None:
    values, weights = arrays([0.0, 0.2, 0.1, 0.5], [1, 1, 1, 1])
    assert isotonic(values, weights) == pytest.approx([0.0, 0.15, 0.15, 0.5])


def test_isotonic_weighs_by_ios() -> None:
    values, weights = arrays([0.4, 0.0], [1, 3])
    assert isotonic(values, weights) == pytest.approx([0.1, 0.1])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=30))
def test_isotonic_never_falls_and_keeps_the_weighted_mean(points: list[tuple[float, float]]) -> None:
    values, weights = arrays([p[0] for p in points], [p[1] for p in points])
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= -1e-12).all()
    assert (fitted * weights).sum() == pytest.approx((values * weights).sum())


def test_capacity_is_the_largest_load_that_kept_the_promise() -> None:
    load, counted, missed = arrays([100, 200, 300, 400, 480, 490], [100] * 6, [0, 0, 2, 4, 60, 90])
    found = capacity(load, counted, missed, 0.05)
    assert found.cost_per_s == 400
    assert found.points == 6


def test_capacity_forgives_one_bad_interval_at_low_load() -> None:
    load, counted, missed = arrays(
        [100, 200, 210, 220, 300, 480], [100, 100, 100, 100, 100, 100], [0, 20, 0, 0, 0, 90]
    )
    assert capacity(load, counted, missed, 0.05).cost_per_s == 300


def test_capacity_is_unknown_where_nothing_was_broken() -> None:
    load, counted, missed = arrays([100, 200, 300, 310, 320], [100] * 5, [0] * 5)
    found = capacity(load, counted, missed, 0.05)
    assert found.cost_per_s is None
    assert "no limit is known" in found.reason


def test_capacity_is_unknown_where_everything_was_broken() -> None:
    load, counted, missed = arrays([100, 200, 300, 310, 320], [100] * 5, [50] * 5)
    assert capacity(load, counted, missed, 0.05).cost_per_s is None


def test_capacity_needs_enough_intervals_with_enough_ios() -> None:
    load, counted, missed = arrays([100, 200, 300, 310, 320], [100, 100, 100, 100, 5], [0, 0, 0, 0, 5])
    found = capacity(load, counted, missed, 0.05)
    assert found.cost_per_s is None
    assert "only 4 intervals" in found.reason


def test_water_fill_gives_idle_share_to_others() -> None:
    demand, floor, weight = arrays([10, 500, 500], [5, 5, 5], [1, 1, 1])
    assert water_fill(210, demand, floor, weight) == pytest.approx([10, 100, 100])


def test_water_fill_weighs() -> None:
    demand, floor, weight = arrays([500, 500], [1, 1], [1, 4])
    assert water_fill(100, demand, floor, weight) == pytest.approx([20, 80])


def test_floors_win_over_the_total() -> None:
    demand, floor, weight = arrays([500, 500], [80, 60], [1, 1])
    assert water_fill(100, demand, floor, weight) == pytest.approx([80, 60])


@given(
    st.floats(1, 1000),
    st.lists(
        st.tuples(st.floats(0.1, 500), st.floats(0, 100), st.sampled_from([1, 2, 4, 8])),
        min_size=1,
        max_size=8,
    ),
)
def test_water_fill_bounds(total: float, volumes: list[tuple[float, float, int]]) -> None:
    demand, floor, weight = arrays(*(list(column) for column in zip(*volumes, strict=True)))
    shares = water_fill(total, demand, floor, weight)
    assert (shares <= demand + 1e-9).all()
    assert (shares >= np.minimum(demand, floor) - 1e-9).all()
    assert shares.sum() <= max(total, np.minimum(demand, floor).sum()) + 1e-6


def test_a_cap_only_where_demand_does_not_fit() -> None:
    gold = Demand("erp", 70, 80, 8, 100, protected=True)
    small = Demand("mail", 10, 20, 1, 50, protected=False)
    greedy = Demand("batch", 400, 420, 1, 50, protected=False)
    caps = caps_for_hour(380, [gold, small, greedy])
    assert caps["mail"] is None
    assert caps["batch"] == pytest.approx(280)
    assert "erp" not in caps


def test_no_cap_at_all_where_everything_fits() -> None:
    caps = caps_for_hour(1000, [Demand("a", 1, 10, 1, 50, protected=False)])
    assert caps == {"a": None}


def test_a_cap_is_never_below_the_floor() -> None:
    gold = Demand("erp", 390, 400, 8, 100, protected=True)
    caps = caps_for_hour(380, [gold, Demand("batch", 400, 420, 1, 50, protected=False)])
    assert caps["batch"] == 50


def test_caps_fall_by_a_quarter_an_hour_at_most() -> None:
    caps = dict.fromkeys(range(168), 400.0)
    caps[10] = 100.0
    limited = limit_change(caps)
    assert limited[10] == 300.0
    assert limited[11] == 400.0


def test_hour_of_week_starts_on_monday_utc() -> None:
    thursday_1970 = 0
    assert hour_of_week(thursday_1970) == 72
    monday = 4 * 86_400 * 1_000_000
    assert hour_of_week(monday) == 0
