"""Feed-forward on the simulator: bursts that recur, that do not, that stop, and that drift.

The world is that of ``tests.support.bursts``; ``make bench-control`` and ADR 0022 have more of it.
"""

from __future__ import annotations

import random

from tests.support.bursts import BURST_S, PERIOD_S, run, square


def test_a_recurring_burst_is_met_with_fewer_bad_seconds() -> None:
    found = run(square(10), 10 + 10 * PERIOD_S)
    assert found.ahead == [False] * 5 + [True, True, False, True, True]
    assert found.bad_of(True) <= 0.5 * found.bad_of(False)
    assert max(bad for bad, ahead in zip(found.bad, found.ahead, strict=True) if ahead) <= 2
    assert (found.figures["missed"], found.figures["switched_off"]) == (0, 0)


def test_bursts_without_a_pattern_are_left_to_the_loop() -> None:
    rng, onsets, at = random.Random(3), [], 10.0
    while at < 280:
        onsets.append(at)
        at += BURST_S + rng.uniform(10, 60)
    found = run(onsets, 300)
    assert found.set_at == []
    assert found.figures["looks"] >= 130
    assert (found.figures["clear"], found.figures["expected"]) == (0, 0)


def test_a_pattern_that_stops_sets_one_cap_in_vain() -> None:
    found = run(square(8), 420)
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
