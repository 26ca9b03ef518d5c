from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.services.control.sharing import Claim, split, spread, water_fill

claim = st.builds(
    Claim,
    demand=st.one_of(st.floats(0, 1e5), st.just(math.inf)),
    floor=st.floats(0, 1e3),
    weight=st.sampled_from([1.0, 2.0, 4.0, 8.0]),
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
    for name, share in shares.items():
        assert share >= claims[name].floor - 1e-6
        assert share <= max(claims[name].demand, claims[name].floor) + 1e-6
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
