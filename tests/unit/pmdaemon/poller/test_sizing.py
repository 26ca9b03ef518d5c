"""P11: the Roundup formula and its measured T_ptmax."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.poller.sizing import (
    HALF_LIFE_NS,
    T_PTMAX_US,
    DecayingMax,
    pairs_by_formula,
    pairs_needed,
)


@pytest.mark.parametrize(
    ("n", "t_thr_ms", "t_ptmax_us", "pairs"),
    [
        (0, 10, 200, 0),
        (1, 10, 200, 1),
        (50, 10, 200, 1),
        (51, 10, 200, 2),
        (150, 10, 200, 3),
        (1000, 10, 200, 20),
        (4000, 10, 20, 8),
        (30, 10, 300, 1),
        (34, 10, 300, 2),
        (7, 1, 2000, 14),
    ],
)
def test_stated_cases(n: int, t_thr_ms: float, t_ptmax_us: float, pairs: int) -> None:
    assert pairs_by_formula(n, t_thr_ms, t_ptmax_us) == pairs


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(20, 2000))
def test_enough_and_not_one_too_many(n: int, t_thr_ms: int, t_ptmax_us: int) -> None:
    pairs = pairs_by_formula(n, t_thr_ms, t_ptmax_us)
    assert pairs * t_thr_ms * 1000 >= n * t_ptmax_us
    assert pairs == 0 or (pairs - 1) * t_thr_ms * 1000 < n * t_ptmax_us


def test_clamp_and_fixed() -> None:
    assert pairs_needed(0, 10, 200, 8) == 1
    assert pairs_needed(10_000, 10, 200, 8) == 8
    assert pairs_needed(120, 10, 200, 8) == 3
    assert pairs_needed(10_000, 10, 200, 8, fixed=5) == 5
    assert pairs_needed(1, 10, 200, 0) == 1


@pytest.mark.parametrize("bad", [(-1, 10, 200), (1, 0, 200), (1, 10, 0)])
def test_nonsense_is_refused(bad: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError):
        pairs_by_formula(*bad)


def test_decaying_maximum() -> None:
    peak = DecayingMax()
    assert peak.value_us == T_PTMAX_US
    peak.add(800, 0)
    peak.add(100, 0)
    assert peak.value_us == 800
    peak.add(100, HALF_LIFE_NS)
    assert peak.value_us == pytest.approx(400)
    peak.add(100, 3 * HALF_LIFE_NS)
    assert peak.value_us == 100
    peak.add(1, 20 * HALF_LIFE_NS)
    assert peak.value_us == 20
    peak.add(9e9, 20 * HALF_LIFE_NS)
    assert peak.value_us == 2000
