"""Clock offset: the smallest of the last 16 round trips decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.cycle.offset import SAMPLES, OffsetEstimator


def test_unknown_is_zero() -> None:
    estimator = OffsetEstimator()
    assert not estimator.known
    assert estimator.offset_us == 0


def test_symmetric_trip_is_exact_and_the_sign_is_what_to_add() -> None:
    estimator = OffsetEstimator()
    # the agent is 5 s behind; its stamp is made 400 us before our receipt
    estimator.add(agent_unix_us=1_000_000, server_unix_us=6_000_400, round_trip_us=800)
    assert estimator.offset_us == 5_000_000


def test_smallest_round_trip_counts_until_it_is_16_samples_old() -> None:
    estimator = OffsetEstimator()
    estimator.add(0, 1_000, 0)
    for _ in range(SAMPLES - 1):
        estimator.add(0, 9_000, 2_000)
    assert estimator.offset_us == 1_000
    estimator.add(0, 9_000, 2_000)
    assert estimator.offset_us == 8_000


@given(
    true_us=st.integers(-(10**9), 10**9),
    trips=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1)), min_size=1, max_size=40),
)
def test_error_is_at_most_half_the_smallest_round_trip(true_us: int, trips: list[tuple[int, float]]) -> None:
    estimator = OffsetEstimator()
    for trip_us, share in trips:
        stamped_us = 10**12
        estimator.add(stamped_us - true_us, stamped_us + round(trip_us * share), trip_us)
    smallest = min(trip_us for trip_us, _ in trips[-SAMPLES:])
    assert abs(estimator.offset_us - true_us) <= smallest / 2 + 1
