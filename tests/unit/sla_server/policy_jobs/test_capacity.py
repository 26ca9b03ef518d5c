"""Capacity: known answers, a slow computation of the isotonic fit, and curves whose knee is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.policy_jobs.capacity import MARGIN, Intervals, capacity, isotonic, queueing_curve

Floats = npt.NDArray[np.float64]
MINUTE_US = 60_000_000


def arrays(*columns: list[float]) -> tuple[Floats, ...]:
    return tuple(np.array(column, dtype=float) for column in columns)


def seen(load: list[float], counted: list[float], missed: list[float]) -> Intervals:
    return Intervals(*arrays(load, counted, missed), 0.05)


def slow_isotonic(values: Floats, weights: Floats) -> list[float]:
    """The max-min formula: the largest of the smallest weighted means of what begins by i and ends after."""
    n = len(values)

    def mean(first: int, last: int) -> float:
        return float(np.average(values[first : last + 1], weights=weights[first : last + 1]))

    return [max(min(mean(j, k) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=12))
def test_isotonic_is_the_max_min_of_means(points: list[tuple[float, float]]) -> None:
    values, weights = arrays([p[0] for p in points], [p[1] for p in points])
    assert isotonic(values, weights) == pytest.approx(slow_isotonic(values, weights), abs=1e-9)


def test_capacity_is_the_largest_load_that_kept_the_promise() -> None:
    found = capacity(seen([100, 200, 300, 400, 480, 490], [100] * 6, [0, 0, 1, 2, 60, 90]))
    assert found.cost_per_s == 400
    assert found.points == 6
    assert found.bound is None
    assert "no bound" in found.reason


def test_the_margin_is_kept_in_misses_too() -> None:
    """Of an exponential tail 3 % miss X where the 95 % are at 0.854 X."""
    found = capacity(seen([100, 200, 300, 400, 480, 490], [100] * 6, [0, 0, 2, 3, 60, 90]))
    assert found.cost_per_s == 300


def test_capacity_forgives_one_bad_interval_at_low_load() -> None:
    found = capacity(seen([100, 200, 210, 220, 300, 480], [100] * 6, [0, 10, 0, 0, 0, 90]))
    assert found.cost_per_s == 300


def test_capacity_is_unknown_where_nothing_was_broken() -> None:
    found = capacity(seen([100, 200, 300, 310, 320], [100] * 5, [0] * 5))
    assert found.cost_per_s is None
    assert found.unlimited
    assert found.highest_kept == 320
    assert "no limit is known" in found.reason


def test_capacity_is_unknown_where_everything_was_broken() -> None:
    found = capacity(seen([100, 200, 300, 310, 320], [100] * 5, [50] * 5))
    assert found.cost_per_s is None
    assert not found.unlimited


def test_what_it_was_read_from_can_be_drawn() -> None:
    """Points rise in load, the fit never falls, and the queueing curve is that of the answer."""
    load = np.linspace(50, 950, 120)
    allowed, mean = 0.05, 0.3 / (1.0 - load / 1000.0)
    missed = np.round(1e6 * np.exp(-1.0 / (mean / -math.log(allowed))))
    found = capacity(Intervals(load, np.full(120, 1e6), missed, allowed))
    assert found.curve is not None
    loads, ratios, fits = (np.array(column) for column in zip(*found.curve.points, strict=True))
    assert len(loads) == 40
    assert (np.diff(loads) > 0).all()
    assert (np.diff(fits) >= 0).all()
    assert loads[0] >= 50
    assert loads[-1] <= 950
    below = ratios < 1.5
    assert ratios[below] == pytest.approx(0.3 / (1 - loads[below] / 1000), rel=0.05)
    base, slope, limit = found.curve.queueing or (0.0, 0.0, 0.0)
    x = 600 / limit
    assert base + slope * x / (1 - x) == pytest.approx(0.3 / 0.4, rel=0.1)
    quiet = capacity(seen([100, 200, 300, 310, 320], [100] * 5, [0] * 5)).curve
    assert quiet is not None
    assert ([point[0] for point in quiet.points], quiet.queueing) == ([100, 200, 300, 310, 320], None)
    assert capacity(seen([100], [100], [0])).curve is None


def test_capacity_needs_enough_intervals_with_enough_ios() -> None:
    found = capacity(seen([100, 200, 300, 310, 320], [100, 100, 100, 100, 5], [0, 0, 0, 0, 5]))
    assert found.cost_per_s is None
    assert "only 4 intervals" in found.reason


# -- Curves whose knee is known: L(U) with L(knee) = 0.85 X
#
# Latencies of an interval are exponential, their mean varies about the curve, and some intervals are 20 times
# slower at whatever load.


def mm1(ratio: Floats) -> Floats:
    """Of one server: 1 / (1 - U / C)."""
    return 1.0 / (1.0 - ratio)


def hockey_stick(ratio: Floats) -> Floats:
    """Of flash: flat, then all at once."""
    return 1.0 + 0.25 * ratio + 0.15 * ratio**20 / (1.0001 - ratio)


def rising(ratio: Floats) -> Floats:
    """Of a disk whose queue is bounded: no asymptote within reach."""
    return 1.0 + 3.0 * ratio**2


CURVES = {"mm1": (mm1, 5.0), "hockey_stick": (hockey_stick, 2.5), "rising": (rising, 3.0)}
FULL = 1000.0


def knee_of(name: str) -> float:
    curve, limit = CURVES[name]
    grid = np.linspace(0.001, 0.9999, 200_000)
    return float(FULL * grid[np.searchsorted(curve(grid), limit)])


def history(name: str, seed: int, *, n: int = 2000, percentile: float = 0.95, latency: bool) -> Intervals:
    curve, limit = CURVES[name]
    rng = np.random.default_rng(seed)
    ratio = np.clip(rng.beta(2, 2, n) * 1.02, 0.02, 0.995)
    level = curve(ratio) * np.exp(0.15 * rng.standard_normal(n))
    level = np.where(rng.random(n) < 0.01, level * 20, level)  # the percentile; X is limit / MARGIN
    counted = rng.integers(200, 5000, n)
    x = limit / MARGIN
    miss = np.exp(-x / level * -math.log(1 - percentile))
    return Intervals(
        load=FULL * ratio,
        counted=counted.astype(float),
        missed=rng.binomial(counted, miss).astype(float),
        allowed_ratio=1 - percentile,
        latency_ratio=level / x if latency else None,
        at_us=np.arange(n, dtype=np.int64) * MINUTE_US,
    )


@pytest.mark.parametrize("latency", [True, False])
@pytest.mark.parametrize("percentile", [0.95, 0.99])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_the_knee_is_found_and_never_passed_by_more_than_a_twentieth(
    name: str, percentile: float, latency: bool
) -> None:
    knee = knee_of(name)
    for seed in range(6):
        found = capacity(history(name, seed, percentile=percentile, latency=latency))
        assert found.cost_per_s is not None, found.reason
        assert 0.85 * knee <= found.cost_per_s <= 1.05 * knee, (seed, found)
        assert found.bound is not None
        assert found.isotonic is not None
        assert found.cost_per_s <= found.bound <= found.isotonic


def test_few_intervals_err_to_the_safe_side() -> None:
    for seed in range(20):
        found = capacity(history("mm1", seed, n=120, latency=False))
        assert found.cost_per_s is None or found.cost_per_s <= 1.05 * knee_of("mm1"), (seed, found)


def test_the_same_data_give_the_same_bound_in_whatever_order() -> None:
    data = history("mm1", 3, latency=True)
    order = np.random.default_rng(1).permutation(len(data.load))
    assert data.latency_ratio is not None
    assert data.at_us is not None
    mixed = replace(
        data,
        load=data.load[order],
        counted=data.counted[order],
        missed=data.missed[order],
        latency_ratio=data.latency_ratio[order],
        at_us=data.at_us[order],
    )
    first, second = capacity(data), capacity(mixed)
    assert first.bound == second.bound
    assert first.cost_per_s == pytest.approx(second.cost_per_s, rel=1e-9)


def test_misses_that_do_not_follow_the_load_give_no_capacity() -> None:
    rng = np.random.default_rng(5)
    n = 1000
    broken = rng.random(n) < 0.3
    data = Intervals(rng.uniform(100, 900, n), np.full(n, 500.0), np.where(broken, 250.0, 0.0), 0.05)
    found = capacity(data)
    assert found.cost_per_s is None, found


def test_where_the_crossing_hangs_on_a_few_intervals_it_is_too_uncertain() -> None:
    """Two thirds of the draws have one of two bad hours at a sixth of the load."""
    n = 240
    load = np.linspace(100, 900, n)
    missed = np.where(load > 850, 400.0, 0.0)
    missed[[15, 16, 17, 18, 19, 20, 21, 22]] = 300.0
    at_us = np.arange(n, dtype=np.int64) // 6 * 3_600_000_000
    found = capacity(Intervals(load, np.full(n, 500.0), missed, 0.05, None, at_us))
    assert found.isotonic is not None
    assert found.cost_per_s is None
    assert "too uncertain" in found.reason


def test_the_queueing_curve_finds_what_made_the_points() -> None:
    load = np.linspace(50, 900, 60)
    ratio = 0.2 + 0.1 * (load / 1000) / (1 - load / 1000)
    ratio[7] = 5.0  # one hang
    found = queueing_curve(load, ratio, np.full(60, 0.1), np.ones(60))
    assert found.limit == pytest.approx(1000, rel=0.02)
    assert found.base == pytest.approx(0.2, rel=0.05)
    assert found.slope == pytest.approx(0.1, rel=0.1)
    knee = found.load_at(0.85)
    assert knee == pytest.approx(1000 * 6.5 / 7.5, rel=0.01)
