"""Capacities of bursty backends, whose minutes blur what they can take; the knees are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from sla_server.policy_jobs.capacity import MARGIN, Intervals, capacity, combined
from sla_server.policy_jobs.steady import Bins, is_complete, steady

Floats = npt.NDArray[np.float64]
SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
FULL = 1000.0
STEPS = 10  # a second
IDLE_US = 1000.0
QUIET = 0.15
ALLOWED = 0.05


def mm1(ratio: Floats) -> Floats:
    """Of one server."""
    return 1.0 / (1.0 - ratio)


def hockey_stick(ratio: Floats) -> Floats:
    """Of flash: flat, then all at once."""
    return 1.0 + 0.25 * ratio + 0.15 * ratio**20 / (1.0001 - ratio)


def rising(ratio: Floats) -> Floats:
    """Of a disk whose queue is bounded."""
    return 1.0 + 3.0 * ratio**2


CURVES: dict[str, tuple[Callable[[Floats], Floats], float]] = {
    "mm1": (mm1, 5.0),
    "hockey_stick": (hockey_stick, 2.5),
    "rising": (rising, 3.0),
}


def knee_of(name: str) -> float:
    curve, limit = CURVES[name]
    grid = np.linspace(0.001, 0.9999, 200_000)
    return float(FULL * grid[np.searchsorted(curve(grid), limit)])


def limit_us(name: str) -> float:
    return CURVES[name][1] / MARGIN * IDLE_US


def history(name: str, seed: int, *, on_s: float, hours: float = 6.0) -> tuple[Bins, Intervals]:
    """Some hours of a quiet backend with a burst each minute or so, as bins of a second, and as minutes.

    Bursts begin and end within seconds, and each has a height of its own. I/Os are done at random, their
    latencies are exponential about the curve.
    """
    curve, limit = CURVES[name]
    rng = np.random.default_rng(seed)
    steps = int(hours * 3600) * STEPS
    ratio = np.full(steps, QUIET)
    at_s = 0.0
    while at_s < hours * 3600:
        at_s += rng.exponential(50.0)
        length_s = rng.exponential(on_s)
        first, last = int(at_s * STEPS), int((at_s + length_s) * STEPS)
        ratio[first:last] = rng.uniform(0.2, 0.995)
        at_s += length_s
    level = curve(ratio)
    late = np.exp(-limit / MARGIN / level * -math.log(ALLOWED))
    counted = rng.poisson(100.0 / STEPS, steps)
    ios = rng.poisson(ratio * FULL / STEPS).astype(np.float64)
    columns = (ios, counted, rng.binomial(counted, late), ios, ios * level * IDLE_US)

    def binned(seconds: int) -> Bins:
        width = seconds * STEPS
        sums = [np.asarray(each, np.float64).reshape(-1, width).sum(axis=1) for each in columns]
        at_us = np.arange(steps // width, dtype=np.int64) * seconds * SECOND_US
        return Bins(at_us, sums[0] / seconds, *sums[1:])

    minutes = binned(60)
    return binned(1), Intervals(minutes.load, minutes.counted, minutes.missed, ALLOWED, at_us=minutes.at_us)


@pytest.mark.parametrize("on_s", [3.0, 6.0, 12.0])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_the_knee_of_a_bursty_backend_is_found(name: str, on_s: float) -> None:
    """Within 15 %, and not above it by more than 5 %; minutes say less than two thirds of it."""
    knee = knee_of(name)
    for seed in range(3):
        bins, minutes = history(name, seed, on_s=on_s)
        of_minutes = capacity(minutes)
        found = combined(of_minutes, steady(bins, SECOND_US, ALLOWED, limit_us(name)))
        assert found.cost_per_s is not None, found.reason
        assert 0.85 * knee <= found.cost_per_s <= 1.05 * knee, (seed, found)
        assert of_minutes.cost_per_s is None or of_minutes.cost_per_s < 0.75 * knee


def test_bins_within_which_the_load_changed_do_not_count() -> None:
    load = [20.0, 20, 120, 200, 200, 200, 90, 20, 20, 150, 20, 20]
    count = len(load)
    at_us = np.arange(count, dtype=np.int64) * SECOND_US
    bins = Bins(at_us, np.array(load), *(np.full(count, value) for value in (30.0, 1.0, 1000.0, 5000.0)))
    found = steady(bins, SECOND_US, ALLOWED, 1000.0)
    assert found.load.tolist() == [20, 20, 200, 200, 200, 20, 20, 20, 20]
    assert found.rate is not None
    assert found.service_us is not None
    assert (found.rate[0], found.service_us[0], found.limit_us) == (1000.0, 5.0, 1000.0)
    gone = bins.only(np.array(load) != 120)
    gone = replace(gone, at_us=np.where(gone.at_us > 2 * SECOND_US, gone.at_us + SECOND_US, gone.at_us))
    assert steady(gone, SECOND_US, ALLOWED, 0.0).load.tolist() == found.load.tolist(), "a gap joins nothing"


def test_bins_are_joined_until_they_have_enough_ios() -> None:
    count = 25
    at_us = np.arange(count, dtype=np.int64) * SECOND_US
    bins = Bins(at_us, *(np.full(count, value) for value in (100.0, 6.0, 1.0, 100.0, 400.0)))
    found = steady(bins, SECOND_US, ALLOWED, 0.0)
    assert found.counted.tolist() == [24.0] * 6 + [6.0]
    assert found.at_us is not None
    assert found.at_us.tolist() == [each * 4 * SECOND_US for each in range(7)]
    few = replace(bins, counted=np.full(count, 0.5))
    assert steady(few, SECOND_US, ALLOWED, 0.0).counted.tolist() == [5.0, 5.0, 2.5], "10 s at most"


def test_minutes_whose_cuts_are_not_all_there_are_left_out() -> None:
    at_us = np.arange(180, dtype=np.int64) * SECOND_US
    load = np.full(180, 100.0)
    load[60:120] = 80.0  # of a gateway the cuts are missing
    minute_us = np.arange(3, dtype=np.int64) * MINUTE_US
    found = is_complete(at_us, load, SECOND_US, minute_us, np.full(3, 100.0))
    assert np.flatnonzero(~found).tolist() == list(range(60, 120))
    outside = is_complete(at_us + 10 * MINUTE_US, load, SECOND_US, minute_us, np.full(3, 100.0))
    assert not outside.any()
    assert not is_complete(at_us, load, SECOND_US, minute_us[:1], np.full(1, 100.0)).any()


def test_without_enough_of_them_minutes_stay_what_is_known() -> None:
    bins, minutes = history("mm1", 1, on_s=12.0)
    of_minutes = capacity(minutes)
    assert combined(of_minutes, None) is of_minutes
    few = steady(bins.only(bins.at_us < 20 * SECOND_US), SECOND_US, ALLOWED, limit_us("mm1"))
    assert combined(of_minutes, few) is of_minutes
    quiet = steady(bins.only(bins.load < 0.5 * FULL), SECOND_US, ALLOWED, limit_us("mm1"))
    found = combined(of_minutes, quiet)
    assert (found.unlimited, found.cost_per_s) == (True, None)
    assert of_minutes.cost_per_s is not None
    assert found.highest_kept > of_minutes.cost_per_s
