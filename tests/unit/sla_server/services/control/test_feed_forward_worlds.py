"""Feed-forward on the simulator: bursts that recur, that do not, that stop, and that drift.

The world is that of ``tests.support.bursts``; ``make bench-control`` and ADR 0022 have more of it.
"""

from __future__ import annotations

import random

import pytest

from tests.support.bursts import BURST_S, PERIOD_S, Result, run, square


@pytest.fixture(scope="module")
def eight_bursts() -> Result:
    """They recur eight times, and then no more. By the seed the ninth is not one that is left alone."""
    return run(square(8), 420, seed=3)


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


def test_a_disk_that_becomes_slower_for_a_while_is_learned_and_again_when_it_recovers() -> None:
    """A burst with C of before it is as bad as without; it is no evidence, and nobody is held by an old C."""
    slow_from, slow_until = 10 + 8 * PERIOD_S - 10, 10 + 12 * PERIOD_S - 10
    found = run(square(16), 650, service_s=[(slow_from, 0.0075), (slow_until, 0.005)])
    set_ahead = list(zip(found.set_at, found.allowed, strict=True))
    before = [c for at, c in set_ahead if at < slow_from]
    slow = [c for at, c in set_ahead if slow_from + PERIOD_S < at < slow_until]
    after = [c for at, c in set_ahead if at > slow_until + PERIOD_S]
    assert min(len(before), len(slow), len(after)) >= 2
    assert max(slow) <= 0.6 * min(before), "two thirds of it, less what gold needs"
    assert min(after) >= 0.85 * max(before)
    assert found.bad[8] <= 4
    assert sum(found.bad[8:12]) <= 7, "12 with the loop alone"
    assert sum(found.bad[13:16]) <= 4
    assert (found.figures["switched_off"], found.figures["discarded"]) == (0, 2)
