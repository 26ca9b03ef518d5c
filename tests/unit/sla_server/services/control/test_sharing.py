from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements.promise import Priority
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import (
    Claim,
    Neighbour,
    allot,
    by_class,
    claims,
    floor_for,
    gives_way,
    highest_touched,
    may_slow,
    share,
    split,
    spread,
    terms,
    urgency,
    water_fill,
    why_none,
)
from tests.support.worlds import volume_class

SETTINGS = ControlSettings()
claim = st.builds(
    Claim,
    demand=st.one_of(st.floats(0, 1e5), st.just(math.inf)),
    floor=st.floats(0, 1e3),
    weight=st.sampled_from([1.0, 2.0, 4.0, 8.0]),
    known=st.floats(0, 1e4),
)
many = st.dictionaries(st.sampled_from("abcdefgh"), claim, min_size=1)


def test_weights_share_what_all_want():
    claims = {"g": Claim(math.inf, 0, 2), "b": Claim(math.inf, 0, 1)}
    assert water_fill(300, claims) == pytest.approx({"g": 200, "b": 100})


def test_what_one_leaves_goes_to_the_others():
    claims = {"a": Claim(10, 0, 8), "b": Claim(math.inf, 0, 1), "c": Claim(math.inf, 0, 1)}
    assert water_fill(110, claims) == pytest.approx({"a": 10, "b": 50, "c": 50})


def test_floors_are_kept_even_when_they_exceed_what_is_shared():
    claims = {"a": Claim(math.inf, 60, 1), "b": Claim(5, 50, 1)}
    assert water_fill(20, claims) == pytest.approx({"a": 60, "b": 50})


def test_nobody_claims():
    assert water_fill(10, {}) == {}


@given(st.floats(0, 1e6), many)
def test_properties(allowed, claims):
    shares = water_fill(allowed, claims)
    floors = sum(c.floor for c in claims.values())
    wants = sum(max(c.demand, c.floor) for c in claims.values())
    for name, rate in shares.items():
        assert rate >= claims[name].floor - 1e-6
        assert rate <= max(claims[name].demand, claims[name].floor) + 1e-6
    assert sum(shares.values()) == pytest.approx(max(min(allowed, wants), floors), rel=1e-6, abs=1e-3)


@given(st.floats(0, 1e6), many)
def test_spread_hands_out_everything_and_takes_from_nobody(allowed, claims):
    shares = water_fill(allowed, claims)
    spread_out = spread(allowed, shares, claims)
    assert all(spread_out[name] >= shares[name] for name in shares)
    assert sum(spread_out.values()) == pytest.approx(max(allowed, sum(shares.values())), rel=1e-6, abs=1e-3)


def test_split_by_use_and_equally():
    assert split(100, {"A": 30, "B": 10}, 0.8) == pytest.approx({"A": 70, "B": 30})
    assert split(100, {"A": 0, "B": 0}, 0.8) == pytest.approx({"A": 50, "B": 50})
    for use in range(1, 1000):
        assert split(40, {"A": use / 7}, 0.8) == {"A": 40}, "whole, to the last bit, where it is not divided"


@pytest.mark.parametrize(
    ("burn", "remaining", "g"),
    [(0, 1, 0), (0.5, 1, 0.5), (9, 1, 2), (0, 0.125, 0.5), (0, -5, 2), (0.2, 0, 1)],
)
def test_urgency_follows_burn_and_what_remains(burn, remaining, g):
    assert urgency(burn, remaining) == pytest.approx(g)


@pytest.mark.parametrize(
    ("victim", "g", "highest"),
    [
        (Priority.GOLD, 0.0, Priority.BEST_EFFORT),
        (Priority.GOLD, 0.5, Priority.BRONZE),
        (Priority.GOLD, 1.0, Priority.SILVER),
        (Priority.GOLD, 2.0, Priority.SILVER),
        (Priority.BRONZE, 2.0, Priority.BEST_EFFORT),
        (Priority.BEST_EFFORT, 2.0, None),
    ],
)
def test_how_far_down_the_classes(victim, g, highest):
    assert highest_touched(victim, g) == highest


def test_a_volume_without_agreement_is_best_effort_with_a_floor():
    place = terms("x", [volume_class("gold")], SETTINGS)
    assert (place.priority, place.floor_iops, place.agreed) == (Priority.BEST_EFFORT, 50.0, False)
    assert place.floor_cost(1.0625) == pytest.approx(53.125)


def test_of_several_agreements_the_kindest_floor_and_the_tightest_cap():
    classes = [
        volume_class("v*", Priority.BRONZE, floor_iops=100.0, cap_iops=900.0),
        volume_class("v1", Priority.SILVER, floor_iops=20.0, cap_iops=500.0),
    ]
    place = terms("v1", classes, SETTINGS)
    assert (place.priority, place.floor_iops) == (Priority.SILVER, 100.0)
    assert [each.cap_iops for each in place.caps] == [900.0, 500.0]


def test_a_floor_in_bytes_becomes_cost():
    place = terms("v", [volume_class("v", floor_iops=10.0, floor_bytes_per_s=65_536.0 * 100)], SETTINGS)
    # 64 KiB an I/O costs 2: 100 of them a second
    assert place.floor_cost(2.0) == pytest.approx(200)


def test_equals_are_touched_above_their_curve_only():
    equal = Neighbour("g2", Priority.GOLD, 300, 300, 50, False)
    assert not may_slow(Priority.GOLD, 2.0, equal)
    above = Neighbour("g2", Priority.GOLD, 300, 300, 50, False, curve_end=200.0)
    assert may_slow(Priority.GOLD, 0.0, above)
    assert floor_for(Priority.GOLD, above) == 200.0
    assert not may_slow(Priority.SILVER, 2.0, above)


def test_claims_hide_no_demand_of_a_queueing_volume():
    managed = {
        "q": Neighbour("q", Priority.BEST_EFFORT, 100, 100, 50, True),
        "n": Neighbour("n", Priority.BRONZE, 80, 100, 50, False),
    }
    found = claims(managed, Priority.GOLD, 1000.0, SETTINGS)
    assert found["q"].demand == math.inf
    assert found["n"].demand == pytest.approx(125 + 20)
    assert found["n"].weight == 2.0


def test_what_a_more_important_class_is_known_to_want_comes_first():
    claims = {
        "silver": Claim(math.inf, 50, 4, known=125),
        "bronze": Claim(40, 50, 2, known=40),
        "greedy": Claim(math.inf, 50, 1, known=800),
    }
    assert share(225, claims) == pytest.approx({"silver": 125, "bronze": 50, "greedy": 50})
    assert share(180, claims) == pytest.approx({"silver": 80, "bronze": 50, "greedy": 50})
    assert share(100, claims) == pytest.approx({"silver": 50, "bronze": 50, "greedy": 50})
    # What is left is shared by weight: 4 to 1, and silver has what it is known to want already.
    assert share(325, claims) == pytest.approx({"silver": 220, "bronze": 50, "greedy": 55})


def test_within_a_class_nothing_changes():
    claims = {"a": Claim(math.inf, 50, 1, known=300), "b": Claim(math.inf, 50, 1, known=60)}
    assert share(200, claims) == water_fill(200, claims)


@given(st.floats(0, 1e6), many)
def test_shares_in_order_keep_floors_and_the_sum(allowed, claims):
    shares, floors = share(allowed, claims), sum(c.floor for c in claims.values())
    wants = sum(max(c.demand, c.floor) for c in claims.values())
    assert all(rate >= claims[name].floor - 1e-6 for name, rate in shares.items())
    assert sum(shares.values()) == pytest.approx(max(min(allowed, wants), floors), rel=1e-6, abs=1e-3)


def test_classes_give_way_from_below():
    found = [
        Neighbour("be", Priority.BEST_EFFORT, 100, 100, 50, False),
        Neighbour("tiny", Priority.BEST_EFFORT, 5, 5, 5, False),
        Neighbour("bronze", Priority.BRONZE, 100, 100, 50, False),
        Neighbour("silver", Priority.SILVER, 100, 100, 50, False),
        Neighbour("above", Priority.GOLD, 100, 100, 50, False, curve_end=80.0),
        Neighbour("inside", Priority.GOLD, 100, 100, 50, False),
    ]
    volumes = {n.volume: n for n in found}

    def names(g: float, *spared: str) -> list[list[str]]:
        return [[n.volume for n in each] for _, each in by_class(Priority.GOLD, g, spared, volumes, SETTINGS)]

    assert names(0.0) == [["be", "above"]]
    assert names(2.0, "bronze") == [["be", "above"], ["silver"]]


def test_one_slowed_down_for_a_more_important_promise_keeps_what_it_uses():
    gold = Neighbour("g", Priority.GOLD, 120, 120, 50, False, curve_end=80.0)
    assert not gives_way(Priority.SILVER, gold)
    assert floor_for(Priority.SILVER, gold) == 120
    assert gives_way(Priority.GOLD, gold)
    assert floor_for(Priority.GOLD, gold) == 80


def clients(volume: str, count: int, cost: float, **over) -> dict[str, Neighbour]:
    names = [f"{volume}/c{number}" for number in range(count)]
    values = {"floor": 1.0, "queueing": True, **over}
    return {name: Neighbour(name, Priority.BEST_EFFORT, cost, cost, **values) for name in names}


def test_small_clients_of_a_volume_count_together_and_the_smallest_are_left_alone():
    found = {
        **clients("v", 50, 10.0),
        **clients("w", 2, 5.0),
        "v/tiny": Neighbour("v/tiny", Priority.BEST_EFFORT, 1.0, 1.0, 1.0, False),
    }
    ((rank, members),) = by_class(Priority.GOLD, 0.0, (), found, SETTINGS)
    assert rank == Priority.BEST_EFFORT
    assert {n.volume.partition("/")[0] for n in members} == {"v"}, "w is 2 % of the backend"
    assert 47 <= len(members) <= 49, "those left out make up less than 5 %"
    assert "v/tiny" not in {n.volume for n in members}


def test_a_volume_has_no_more_of_what_is_shared_because_it_is_divided():
    whole = Neighbour("w", Priority.BEST_EFFORT, 400, 400, 1.0, True)
    managed = {**clients("v", 9, 100.0), "w": whole}
    found = allot(300.0, managed, claims(managed, Priority.GOLD, 1300.0, SETTINGS))
    assert sum(found.values()) == pytest.approx(300)
    assert found["w"] == pytest.approx(150)
    assert found["v/c0"] == pytest.approx(150 / 9)


def test_of_a_divided_volume_a_client_that_wants_little_has_it_and_the_others_the_rest():
    managed = clients("v", 3, 100.0)
    managed["v/c0"] = Neighbour("v/c0", Priority.BEST_EFFORT, 8.0, 8.0, 1.0, False)
    found = allot(210.0, managed, claims(managed, Priority.GOLD, 0.0, SETTINGS))
    assert found == pytest.approx({"v/c0": 10, "v/c1": 100, "v/c2": 100})


def test_why_no_neighbour_is_slowed_down_says_of_each_what_is_so():
    def why(*found: tuple[str, Priority, float], g: float = 0.2) -> tuple[str, str]:
        rows = {name: Neighbour(name, place, cost, cost, 1.0, False) for name, place, cost in found}
        return why_none({"gold"}, Priority.GOLD, g, rows, ControlSettings())

    gold, equal = ("gold", Priority.GOLD, 100.0), ("other", Priority.GOLD, 300.0)
    small, spared = ("small", Priority.BEST_EFFORT, 5.0), ("middle", Priority.SILVER, 200.0)
    assert why(gold) == ("unattributed", "nobody to slow down: no other volume uses this backend")
    assert why(gold, equal) == (
        "infeasible",
        "all others that use the backend (other) are of the same or a higher priority: none is slowed down "
        "for it",
    )
    kind, text = why(gold, equal, small, spared)
    assert kind == "unattributed"
    assert text.removeprefix("nobody to slow down: ").split("; ") == [
        "other: of the same or a higher priority",
        "small: less than 5% of the backend's cost",
        "middle: not slowed down while so much error budget is left (urgency 0.20)",
    ]
