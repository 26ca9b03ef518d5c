"""Which loads recur, and when the next burst comes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sla_server.services.control.feed_forward_pattern import (
    SPANS,
    autocorrelation,
    next_onset,
    recurrence,
)


def bursts(onsets: list[float], length: float, bins: int) -> list[float]:
    """Share of each bin covered by bursts; times in bins."""
    return [
        min(sum(max(min(at + length, n + 1) - max(at, n), 0.0) for at in onsets), 1.0) for n in range(bins)
    ]


def every(period: float, length: float, bins: int, *, jitter: float = 0.0, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    onsets = [n * period + rng.uniform(-jitter, jitter) for n in range(int(bins / period) + 1)]
    return bursts(onsets, length, bins)


@pytest.mark.parametrize("period", [6, 12, 15, 37, 100])
def test_a_square_wave_has_its_period(period: int) -> None:
    found = recurrence(every(period, period / 4, 1024))
    assert found is not None
    assert found.period_bins == period
    assert found.bins == next(span for span in SPANS if span >= 4 * period)


def test_a_period_between_bins_is_found_to_the_bin() -> None:
    found = recurrence(every(12.4, 3, 256))
    assert found is not None
    assert found.period_bins in (12, 13)


def test_bursts_that_come_within_a_bin_of_their_time() -> None:
    found = [recurrence(every(20, 6, 256, jitter=1.0, seed=seed)) for seed in range(25)]
    assert sum(each is not None and abs(each.period_bins - 20) <= 1 for each in found) == 25


def test_several_bursts_a_period_are_one_pattern() -> None:
    onsets = [n * 40.0 + at for n in range(26) for at in (0, 9)]
    found = recurrence(bursts(onsets, 4, 1024))
    assert found is not None
    assert found.period_bins == 40


def test_a_new_pattern_is_found_after_hours_of_another() -> None:
    found = recurrence(every(30, 8, 960) + every(12, 3, 64))
    assert found is not None
    assert (found.period_bins, found.bins) == (12, 64)


@pytest.mark.parametrize(
    "load",
    [
        [0.0] * 1024,
        [1.0] * 1024,
        [0.0] * 500 + [1.0] * 524,
        [n / 1024 for n in range(1024)],
        bursts([100.0], 20, 1024),
        bursts([100.0, 400.0], 20, 1024),
        [1.0, 0.0, 0.0],
        [],
    ],
    ids=["low", "high", "step", "ramp", "one burst", "two bursts", "too short", "nothing"],
)
def test_what_does_not_recur_has_no_pattern(load: list[float]) -> None:
    if load:
        assert recurrence(load) is None
    else:
        assert next_onset([], 10, 1, 0) is None


def at_random(seed: int, bins: int = 1024) -> list[float]:
    rng, onsets, at = random.Random(seed), [], 0.0
    while at < bins:
        at += 4 + rng.expovariate(1 / 12)
        onsets.append(at)
    return bursts(onsets, 3, bins)


def test_bursts_at_random_are_hardly_ever_taken_for_a_pattern() -> None:
    """Each seed is three hours, a look at every 64th bin."""
    looks = found = 0
    for seed in range(8):
        load = at_random(seed)
        for end in range(64, 1025, 64):
            looks += 1
            found += recurrence(load[:end]) is not None
    assert looks == 8 * 16
    assert found <= looks * 0.03


def test_autocorrelation_of_a_wave_is_one_at_its_period_and_zero_without_change() -> None:
    wave = np.tile([1.0, 0.0, 0.0, 0.0], 16)
    assert autocorrelation(wave)[[0, 4, 8]] == pytest.approx([1.0, 1.0, 1.0])
    assert autocorrelation(wave)[2] < 0
    assert not autocorrelation(np.ones(64)).any()


def test_the_next_onset_follows_three_that_are_a_period_apart() -> None:
    assert next_onset([0, 100, 200], 100, 15, 210) == 300
    assert next_onset([100, 200], 100, 15, 210) is None, "two may be chance"
    assert next_onset([0, 100, 200], 100, 15, 300) is None, "it has passed, and did not come"
    assert next_onset([0, 100, 160, 200], 100, 15, 210) == 300, "a burst in between is no matter"
    assert next_onset([0, 100, 170], 100, 15, 180) is None, "the last gap is another one"


def test_the_next_of_several_onsets_a_period_is_the_nearest() -> None:
    onsets = [0, 30, 100, 130, 200, 230]
    assert next_onset(onsets, 100, 10, 240) == 300
    assert next_onset(onsets, 100, 10, 301) == 330


def test_a_drift_within_the_tolerance_is_followed() -> None:
    onsets, gap = [0.0], 100.0
    late = []
    for _ in range(12):
        gap += 4
        onsets.append(onsets[-1] + gap)
        expected = next_onset(onsets, gap, 15, onsets[-1] + 1)
        if len(onsets) >= 3:
            assert expected is not None
            late.append(onsets[-1] + gap + 4 - expected)
    assert all(0 < each <= 15 for each in late)
