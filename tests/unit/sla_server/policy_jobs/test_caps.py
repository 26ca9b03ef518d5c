"""Caps: water-filling against its conditions, the order of promises, changes from hour to hour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.policy_jobs.caps import (
    LEAST_LEFT,
    Demand,
    HourShare,
    LoadLimit,
    limit_change,
    shares_of_hour,
    water_fill,
)

GOLD, SILVER, BRONZE, REST = 8.0, 4.0, 2.0, 1.0
Floats = npt.NDArray[np.float64]


def arrays(*columns: list[float]) -> tuple[Floats, ...]:
    return tuple(np.array(column, dtype=float) for column in columns)


def demand(volume: str, p95: float, weight: float = REST, floor: float = 0, promised: float = 0) -> Demand:
    return Demand(volume, p95 / 2, p95, weight, floor, promised)


def caps(limits: list[LoadLimit], *demands: Demand) -> dict[str, float | None]:
    return {name: share.cost_per_s for name, share in shares_of_hour(limits, demands).items()}


def test_water_fill_gives_idle_share_to_others() -> None:
    assert water_fill(210, *arrays([10, 500, 500], [5, 5, 5], [1, 1, 1])) == pytest.approx([10, 100, 100])


def test_floors_win_over_the_total() -> None:
    assert water_fill(100, *arrays([500, 500], [80, 60], [1, 1])) == pytest.approx([80, 60])


VOLUMES = st.lists(
    st.tuples(st.floats(0.1, 500), st.floats(0, 100), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=8
)


@given(st.floats(1, 1000), VOLUMES)
def test_water_fill_has_one_level(total: float, volumes: list[tuple[float, float, int]]) -> None:
    """Who is neither at demand nor at floor has the level; whose floor is above it the floor."""
    wanted, floor, weight = arrays(*(list(column) for column in zip(*volumes, strict=True)))
    shares = water_fill(total, wanted, floor, weight)
    lowest = np.minimum(wanted, floor)
    assert shares.sum() == pytest.approx(min(max(total, lowest.sum()), wanted.sum()))
    if lowest.sum() < total < wanted.sum():
        between = (shares > lowest * (1 + 1e-6)) & (shares < wanted * (1 - 1e-6))
        levels = (shares / weight)[between]
        if len(levels):
            assert levels == pytest.approx(np.full(len(levels), levels[0]), rel=1e-5)
            at_demand = (shares >= wanted * (1 - 1e-6)) & (shares > lowest * (1 + 1e-6))
            assert ((shares / weight)[at_demand] <= levels[0] * (1 + 1e-5)).all()
            at_floor = (shares <= floor * (1 + 1e-6)) & (shares < wanted * (1 - 1e-6))
            assert ((floor / weight)[at_floor] >= levels[0] * (1 - 1e-5)).all()


def test_a_cap_only_where_demand_does_not_fit() -> None:
    found = caps([LoadLimit(380, GOLD)], demand("erp", 80, GOLD), demand("mail", 20), demand("batch", 420))
    assert found == {"mail": None, "batch": pytest.approx(280)}


def test_bursts_that_alone_ask_for_more_than_is_left_are_capped_at_that() -> None:
    """By minutes all fit: 300 are left, 50 asked for. Bursts of batch get their share and the spare 250."""
    erp, mail = demand("erp", 80, GOLD), replace(demand("mail", 20), peak=40.0)
    for peak, expected in ((0.0, None), (279.0, None), (500.0, 280.0)):
        batch = replace(demand("batch", 30), peak=peak)
        found = caps([LoadLimit(380, GOLD)], erp, mail, batch)
        assert found == {"mail": None, "batch": pytest.approx(expected) if expected else None}
    full = caps([LoadLimit(380, GOLD)], erp, replace(demand("batch", 420), peak=900.0))
    assert full == {"batch": pytest.approx(300)}, "nothing is spare"


def test_a_cap_is_never_below_the_floor() -> None:
    found = caps([LoadLimit(380, GOLD)], demand("erp", 400, GOLD), demand("batch", 420, floor=50))
    assert found == {"batch": 50}


def test_lower_priorities_give_way_also_with_promises_of_their_own_which_come_first() -> None:
    """Of 300 left silver needs 200; it and the rest share what remains by weight, above that."""
    silver = demand("silver", 400, SILVER, promised=200)
    batch = demand("batch", 400)
    found = caps([LoadLimit(380, GOLD)], demand("erp", 80, GOLD), silver, batch)
    assert found == {"silver": pytest.approx(240), "batch": pytest.approx(60)}
    bronze = demand("bronze", 400, BRONZE, promised=200)
    tight = caps([LoadLimit(340, GOLD)], demand("erp", 80, GOLD), bronze, demand("batch", 400, floor=50))
    assert tight["bronze"] == pytest.approx(200), "by weight alone it would have 173"
    assert tight["batch"] == pytest.approx(60)
    assert "erp" not in found


def test_promises_that_do_not_all_fit_are_met_from_the_highest_priority_down() -> None:
    silver = demand("silver", 150, SILVER, floor=10, promised=150)
    bronze = demand("bronze", 200, BRONZE, floor=10, promised=200)
    rest = demand("rest", 200, floor=20)
    found = caps([LoadLimit(300, GOLD)], demand("erp", 80, GOLD), silver, bronze, rest)
    assert found["silver"] is None
    assert found["bronze"] == pytest.approx(50)
    assert found["rest"] == pytest.approx(20)


def test_of_several_promises_each_is_kept() -> None:
    """Gold needs 380 of all, silver 300: silver is not capped for itself, the rest is for both."""
    limits = [LoadLimit(380, GOLD), LoadLimit(300, SILVER)]
    found = caps(
        limits, demand("erp", 80, GOLD), demand("silver", 100, SILVER, promised=100), demand("batch", 420)
    )
    assert found == {"silver": None, "batch": pytest.approx(120)}


ROWS = st.tuples(
    st.floats(1, 500), st.floats(0, 60), st.sampled_from([REST, BRONZE, SILVER, GOLD]), st.booleans()
)


@given(
    st.lists(st.tuples(st.floats(50, 2000), st.sampled_from([GOLD, SILVER])), min_size=1, max_size=3),
    st.lists(ROWS, min_size=1, max_size=8),
)
def test_what_is_planned_fits_every_capacity_but_for_floors(
    limits: list[tuple[float, float]], rows: list[tuple[float, float, float, bool]]
) -> None:
    items = [
        demand(f"v{i}", p95, weight, floor, p95 / 2 if promised else 0)
        for i, (p95, floor, weight, promised) in enumerate(rows)
    ]
    found = caps([LoadLimit(*limit) for limit in limits], *items)
    planned = {}
    for item in items:
        cap = found.get(item.volume)
        planned[item.volume] = item.p95 if cap is None else min(cap, item.p95)
        assert cap is None or cap >= item.floor
        assert cap is None or cap > 0
    for cost, weight in limits:
        protected = sum(item.p95 for item in items if item.weight >= weight)
        others = [item for item in items if item.weight < weight]
        weights = sum(item.weight for item in others)
        floors = [max(item.floor, LEAST_LEFT * cost * item.weight / weights) for item in others]
        used = sum(min(floor, item.p95) for floor, item in zip(floors, others, strict=True))
        most = max(cost - protected, used)
        assert sum(planned[item.volume] for item in others) <= most * (1 + 1e-6)


# -- From hour to hour


def shares(values: dict[int, float | None], least: float = 0) -> dict[int, HourShare]:
    return {hour: HourShare(value, least) for hour, value in values.items()}


def test_caps_change_by_a_quarter_an_hour_in_both_directions_and_are_only_lowered() -> None:
    values: dict[int, float | None] = dict.fromkeys(range(168), 400.0)
    values[10] = 100.0
    limited = limit_change(shares(values))
    assert limited[10] == 100
    assert limited[9] == pytest.approx(100 / 0.75)
    assert limited[8] == pytest.approx(100 / 0.75**2)
    assert limited[11] == pytest.approx(125)
    assert limited[12] == pytest.approx(156.25)
    assert limited[0] == limited[100] == 400


MOST_RISE = [min(1.25**after, (1 / 0.75) ** (-after % 168)) for after in range(168)]
"""Of what is so many hours after another one, along the shorter or longer way round."""


def slow_envelope(values: dict[int, float]) -> dict[int, float]:
    """Of every hour, what each other hour allows."""
    return {
        hour: min(value * MOST_RISE[(hour - other) % 168] for other, value in values.items())
        for hour in values
    }


@given(st.dictionaries(st.integers(0, 167), st.floats(1, 1000), min_size=0, max_size=12), st.floats(1, 2000))
def test_the_week_is_the_largest_that_changes_so_slowly(few: dict[int, float], usual: float) -> None:
    values = dict.fromkeys(range(168), usual) | few
    limited = limit_change(shares(dict(values)))
    assert limited == {hour: pytest.approx(value) for hour, value in slow_envelope(values).items()}


def test_an_hour_in_which_nothing_is_left_stops_no_volume_for_the_week() -> None:
    """Caps change by parts of themselves: from 0 no later hour would come up again."""
    usual = {
        hour: shares_of_hour([LoadLimit(1000, GOLD)], [demand("gold", 300, GOLD), demand("batch", 900)])
        for hour in range(168)
    }
    usual[57] = shares_of_hour([LoadLimit(1000, GOLD)], [demand("gold", 1100, GOLD), demand("batch", 900)])
    found = limit_change({hour: shares["batch"] for hour, shares in usual.items()})
    assert found[57] == pytest.approx(50)
    assert found[57 + 24] == found[57 - 24] == pytest.approx(700)


@pytest.mark.parametrize(
    "others",
    [
        (demand("web", 500, floor=100), demand("batch", 300)),
        (demand("web", 500, SILVER, promised=500), demand("batch", 300)),
    ],
)
def test_who_has_neither_floor_nor_promise_is_left_a_little(others: tuple[Demand, ...]) -> None:
    """Else its cap is 0, and of a policy with such a one none could be published."""
    found = caps([LoadLimit(1000, GOLD)], demand("gold", 950, GOLD), *others)
    weights = sum(each.weight for each in others)
    assert found["batch"] == pytest.approx(LEAST_LEFT * 1000 / weights)


def test_hours_without_a_cap_stay_without_and_lower_none() -> None:
    values: dict[int, float | None] = dict.fromkeys(range(168))
    values |= {10: 100.0, 12: 400.0}
    assert limit_change(shares(values)) == values


def test_a_promise_comes_before_smoothness() -> None:
    values: dict[int, float | None] = dict.fromkeys(range(168), 400.0)
    values[10] = 100.0
    items = shares(values)
    items[11] = HourShare(400.0, 300.0)
    limited = limit_change(items)
    assert limited[11] == 300
    assert limited[10] == 100
