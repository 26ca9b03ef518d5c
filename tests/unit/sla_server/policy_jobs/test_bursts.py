"""Burst pairs: the bucket against all windows, the choice between rate and bucket, days."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.policy_jobs.bursts import burst_pair, burst_seconds, excess

SLOT_S = 60
SLOT_US = 60_000_000
DAY_US = 86_400_000_000


def slow_bucket(minutes: list[int], demand: list[float], rate: float) -> float:
    """The most of arrivals(s, t) - rate (t - s) over all pairs of slots."""
    most = 0.0
    for first in range(len(minutes)):
        arrived = 0.0
        for last in range(first, len(minutes)):
            arrived += demand[last] * SLOT_S
            most = max(most, arrived - rate * (minutes[last] + 1 - minutes[first]) * SLOT_S)
    return most


@given(st.dictionaries(st.integers(0, 40), st.floats(0, 1000), min_size=1, max_size=15), st.floats(0.1, 1000))
def test_the_bucket_holds_the_worst_of_all_windows(slots: dict[int, float], rate: float) -> None:
    minutes = sorted(slots)
    demand = [slots[minute] for minute in minutes]
    found = excess(np.array(minutes) * SLOT_US, np.array(demand), SLOT_S, np.array([rate]))
    assert found.max() == pytest.approx(slow_bucket(minutes, demand, rate), rel=1e-9, abs=1e-6)


def days(count: int, busy: dict[int, float], usual: float = 100.0) -> tuple[np.ndarray, np.ndarray]:
    """Of each day 1440 minutes at the usual demand but for some."""
    at_us = np.arange(count * 1440) * SLOT_US
    demand = np.full(count * 1440, usual)
    for minute, value in busy.items():
        demand[minute::1440] = value
    return at_us, demand


def test_a_short_burst_goes_into_the_bucket() -> None:
    at_us, demand = days(7, {600: 500.0, 601: 500.0})
    found = burst_pair(at_us, demand, SLOT_S, 7 * DAY_US, 14)
    assert found is not None
    assert found.cost_per_s == 100, "candidates begin at the median"
    assert found.burst_cost == pytest.approx(2 * 60 * 400)
    assert found.burst_cost / found.cost_per_s == pytest.approx(480)
    assert found.days == 7


def test_what_lasts_goes_into_the_rate() -> None:
    at_us, demand = days(7, dict.fromkeys(range(600, 660), 500.0))
    found = burst_pair(at_us, demand, SLOT_S, 7 * DAY_US, 14)
    assert found is not None
    assert found.cost_per_s == pytest.approx(500)
    assert found.burst_cost == 0


def test_one_wild_day_of_thirty_does_not_make_the_pair() -> None:
    at_us, demand = days(30, {600: 300.0})
    usual = burst_pair(at_us, demand, SLOT_S, 30 * DAY_US, 1000)
    demand[12 * 1440 : 12 * 1440 + 300] = 9000.0
    found = burst_pair(at_us, demand, SLOT_S, 30 * DAY_US, 1000)
    assert usual is not None
    assert found is not None
    assert usual.burst_cost == 60 * 200
    assert (found.cost_per_s, found.burst_cost) == (usual.cost_per_s, usual.burst_cost)


def test_bursts_of_long_ago_fade() -> None:
    at_us, demand = days(60, {})
    demand[: 20 * 1440 : 1440] = 600.0  # a minute of each of the first 20 days
    lasting = burst_pair(at_us, demand, SLOT_S, 60 * DAY_US, 1000)
    faded = burst_pair(at_us, demand, SLOT_S, 60 * DAY_US, 7)
    assert lasting is not None
    assert faded is not None
    assert lasting.burst_cost == pytest.approx(60 * 500)
    assert faded.burst_cost == 0


def test_little_or_nothing_seen_gives_no_pair() -> None:
    at_us, demand = days(1, {})
    assert burst_pair(at_us[:29], demand[:29], SLOT_S, DAY_US, 14) is None
    assert burst_pair(at_us, np.zeros(1440), SLOT_S, DAY_US, 14) is None


def test_a_cap_lets_the_usual_bursts_of_its_volume_pass() -> None:
    found = burst_seconds(
        cap=np.array([100.0, 50.0, 100.0, 1e6, 0.5]),
        bucket=np.array([400.0, 100.0, 100.0, 10.0, 1000.0]),
        group=np.array([0, 0, 1, 2, 3]),
        room=np.array([500.0, 50.0, 1e9, 1e9]),
    )
    assert found[:3] == pytest.approx([4.0, 2.0, 0.5]), "of the second group half: there is no more room"
    assert np.isnan(found[3]), "shorter than what gateways let pass anyway"
    assert found[4] == 300.0, "the longest that gateways take"


def test_where_no_capacity_is_known_there_is_no_room() -> None:
    nothing = burst_seconds(np.array([100.0]), np.array([400.0]), np.array([0]), np.array([0.0]))
    assert np.isnan(nothing).all()
