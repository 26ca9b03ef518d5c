"""Clock offset: the smallest of the last round trips decides, of 16 at least and 32 at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.poller.clock_offset import BLOCK, OffsetEstimator


def test_unknown_is_zero() -> None:
    estimator = OffsetEstimator()
    assert estimator.best is None
    assert estimator.offset_us == 0


def test_symmetric_trip_is_exact_and_the_sign_is_what_to_add() -> None:
    estimator = OffsetEstimator()
    # the agent is 5 s behind; its stamp is made 400 us before our receipt
    estimator.add(agent_unix_us=1_000_000, server_unix_us=6_000_400, round_trip_us=800)
    assert estimator.offset_us == 5_000_000


@pytest.mark.parametrize("place", range(BLOCK))
def test_smallest_round_trip_counts_for_16_answers_at_least_and_32_at_most(place: int) -> None:
    estimator = OffsetEstimator()
    for _ in range(place):
        estimator.add(0, 9_000, 2_000)
    estimator.add(0, 1_000, 0)
    followers = 0
    while estimator.offset_us == 1_000:
        estimator.add(0, 9_000, 2_000)
        followers += 1
    assert estimator.offset_us == 8_000
    assert BLOCK <= followers < 2 * BLOCK


def test_of_equal_round_trips_the_newest_counts() -> None:
    estimator = OffsetEstimator()
    for server_us in range(1_000, 41_000, 1_000):
        estimator.add(0, server_us, 0)
        assert estimator.offset_us == server_us


@pytest.mark.parametrize("step_us", [180_000_000, -3_600_000_000])
def test_a_stepped_clock_is_followed_with_the_next_answer(step_us: int) -> None:
    estimator = OffsetEstimator()
    for _ in range(5):
        estimator.add(0, 1_000, 0)
    estimator.add(0, 1_000 + step_us + 2_000, 4_000)  # a longer way than any before
    assert estimator.offset_us == 1_000 + step_us
    estimator.add(0, 1_000, 0)
    assert estimator.offset_us == 1_000


def test_an_answer_that_was_long_under_way_is_no_step() -> None:
    estimator = OffsetEstimator()
    estimator.add(0, 1_000, 0)
    estimator.add(0, 30_001_000, 30_000_000)  # all of it on one way
    assert estimator.offset_us == 1_000


@given(
    true_us=st.integers(-(10**9), 10**9),
    trips=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1)), min_size=1, max_size=40),
)
def test_error_is_at_most_half_the_smallest_round_trip(true_us: int, trips: list[tuple[int, float]]) -> None:
    estimator = OffsetEstimator()
    for trip_us, share in trips:
        stamped_us = 10**12
        estimator.add(stamped_us - true_us, stamped_us + round(trip_us * share), trip_us)
    smallest = min(trip_us for trip_us, _ in trips[-BLOCK:])
    assert abs(estimator.offset_us - true_us) <= smallest / 2 + 1
