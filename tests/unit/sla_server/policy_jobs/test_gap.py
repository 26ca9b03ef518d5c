"""Capacities where an idle backend and one at its limit were seen, and nothing between."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sla_server.policy_jobs.capacity import MARGIN, Intervals, capacity
from sla_server.policy_jobs.gap import ROOMY, load_in_gap, share_of_limit
from tests.support.public_curves import CURVES, at_depth, idle_us, knees_of

COUNT = 2000
IOS = 2000


def on_and_off(name: str, limit_us: float, seed: int) -> Intervals:
    """A published curve of which only its two ends are seen."""
    rng = np.random.default_rng(seed)
    first, last = float(CURVES[name][0][0]), float(CURVES[name][-1][0])
    is_on = rng.random(COUNT) < 0.3
    depth = np.where(is_on, last * rng.uniform(0.6, 1.0, COUNT), first * rng.uniform(2.0, 5.0, COUNT))
    load, mu, sigma = at_depth(name, depth)
    x = limit_us / MARGIN
    late = np.array(
        [(1 - math.erf((math.log(x) - m) / s / math.sqrt(2))) / 2 for m, s in zip(mu, sigma, strict=True)]
    )
    return Intervals(
        load=load * rng.normal(1.0, 0.01, COUNT),
        counted=np.full(COUNT, float(IOS)),
        missed=rng.binomial(IOS, late).astype(np.float64),
        allowed_ratio=0.05,
        at_us=np.arange(COUNT, dtype=np.int64) * 1_000_000,
        limit_us=x,
        rate=load,
        service_us=np.exp(mu + sigma**2 / 2),
    )


@pytest.mark.parametrize("times", [3.0, 5.0])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_the_knee_of_a_published_curve_is_met_in_the_dark(name: str, times: float) -> None:
    """Within 15 %, and not above it by more than 5 %; or, where the promise is tight, no answer."""
    limit_us = idle_us(name) * times
    knee = knees_of(name, limit_us)[1]
    for seed in range(3):
        found = capacity(on_and_off(name, limit_us, seed))
        assert found.cost_per_s is not None
        assert found.cost_per_s <= 1.05 * knee, found
        if times == 5.0:
            assert found.between == found.cost_per_s >= 0.85 * knee, found
            assert "queue model" in found.reason


@pytest.mark.parametrize("name", sorted(CURVES))
def test_a_tight_promise_keeps_to_what_was_seen(name: str) -> None:
    limit_us = idle_us(name) * 1.2
    found = capacity(on_and_off(name, limit_us, 0))
    assert found.between is None


def test_one_server_is_a_queue() -> None:
    """Of M/D/1 with a little spread: half of it at twice the time of an I/O, and nearly all at a hundred."""
    assert share_of_limit(0.005, 200.0, 0.034, 0.05) == pytest.approx(0.68, abs=0.03)
    assert share_of_limit(0.005, 200.0, 0.5, 0.05) > 0.97
    assert share_of_limit(0.005, 200.0, 0.004, 0.05) == pytest.approx(0.0, abs=1e-6)
    shares = [share_of_limit(0.005, most, 0.034, 0.05) for most in (200.0, 800.0, 3200.0)]
    assert shares == sorted(shares), "of more servers a larger part can be used"


def test_an_answer_that_is_far_too_high_comes_down_to_the_knee_once_loads_there_are_seen() -> None:
    """Requests in batches, of which the queue model knows nothing: their knee is at 36 of 200, not at 130.

    Each night a policy lets the neighbour go up to what was found, and the loads there break the promise.
    """
    idle, knee, rng = 20.0, 36.0, np.random.default_rng(3)
    cap, found = 200.0, []
    for _ in range(8):
        busy = rng.random(400) < 0.5
        load = np.where(busy, cap, idle) * rng.normal(1.0, 0.01, 400)
        is_broken = load > knee
        seen = Intervals(
            load=load,
            counted=np.full(400, 200.0),
            missed=np.where(is_broken, 100.0, 0.0),
            allowed_ratio=0.05,
            at_us=np.arange(400, dtype=np.int64) * 1_000_000,
            limit_us=40_000.0,
            rate=load,
            service_us=np.where(is_broken, 85_000.0, 5_000.0),
        )
        answer = capacity(seen)
        if answer.cost_per_s is None:
            break  # it was kept at every load that the last answer let pass
        cap = answer.cost_per_s
        found.append(cap)
    assert found[0] > 2 * knee, "the queue model alone"
    assert found == sorted(found, reverse=True)
    assert idle * 0.9 < found[-1] <= knee
    assert len(found) <= 5, "some nights"


def test_nothing_is_said_without_a_gap_or_a_limit() -> None:
    load = np.array([50.0] * 10 + [200.0] * 10)
    is_broken = load > 100
    service_us = np.where(is_broken, 120_000.0, 5_000.0)

    def between(**other: np.ndarray | float) -> float | None:  # type: ignore[type-arg]
        given = {
            "load": load, "is_broken": is_broken, "rate": load, "service_us": service_us,
            "kept": 50.0, "limit_us": 34_000.0, "allowed": 0.05, **other,
        }  # fmt: skip
        return load_in_gap(**given)  # type: ignore[arg-type]

    found = between()
    assert found is not None
    assert 120 < found < 160
    assert between(kept=190.0) is None, "no gap"
    assert between(service_us=np.full(20, 5_000.0)) is None, "broken, but not at its limit"
    assert between(limit_us=ROOMY * 5_000.0 - 1) is None, "tight"
    assert between(is_broken=np.zeros(20, dtype=np.bool_)) is None
    assert between(rate=np.zeros(20)) is None
