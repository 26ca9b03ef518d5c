"""Feed-forward on the simulator: bursts that recur, that do not, that stop, and that drift.

The world is that of ``tests.support.bursts``; ``make bench-control`` and ADR 0022 have more of it.
"""

from __future__ import annotations

import random

import pytest

from tests.support.bursts import BURST_S, PERIOD_S, Result, run, square


@pytest.fixture(scope="module")
def eight_bursts() -> Result:
    """They recur eight times, and then no more."""
    return run(square(8), 420)


def test_a_recurring_burst_is_met_with_fewer_bad_seconds(eight_bursts: Result) -> None:
    found = eight_bursts
    assert found.ahead == [False] * 5 + [True, True, False]
    assert found.bad_of(True) <= 0.5 * found.bad_of(False)
    assert max(bad for bad, ahead in zip(found.bad, found.ahead, strict=True) if ahead) <= 2
    assert found.figures["switched_off"] == 0


def test_bursts_without_a_pattern_are_left_to_the_loop() -> None:
    rng, onsets, at = random.Random(3), [], 10.0
    while at < 180:
        onsets.append(at)
        at += BURST_S + rng.uniform(10, 60)
    found = run(onsets, 200)
    assert found.set_at == []
    assert found.figures["looks"] >= 80
    assert (found.figures["clear"], found.figures["expected"]) == (0, 0)


def test_a_pattern_that_stops_sets_one_cap_in_vain(eight_bursts: Result) -> None:
    found = eight_bursts
    assert sum(found.ahead) >= 1
    assert (found.figures["missed"], found.figures["expected"]) == (1, found.figures["came"] + 1)
    assert len([at for at in found.set_at if at > 10 + 7 * PERIOD_S]) == 1


def test_a_pattern_that_drifts_is_followed() -> None:
    onsets, at, gap = [], 10.0, PERIOD_S
    for _ in range(9):
        onsets.append(at)
        at, gap = at + gap, gap + 0.4
    found = run(onsets, at)
    assert sum(found.ahead) >= 3
    assert found.figures["missed"] == 0
    assert found.bad_of(True) <= 0.5 * found.bad_of(False)
