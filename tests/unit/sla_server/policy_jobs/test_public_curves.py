"""Capacity on response curves that others have measured and published (``tests.support.public_curves``)."""

from __future__ import annotations

import pytest

from sla_server.policy_jobs.capacity import MARGIN, capacity
from tests.support.public_curves import CURVES, TIMES, found_knee, history, idle_us, knees_of


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", CURVES)
def test_the_knee_of_a_published_curve_is_found(name: str, times: float) -> None:
    """Within 15 %, and not above it by more than 5 %, for promises of so many times the idle latency."""
    found = found_knee(name, times)
    assert found.cost_per_s is not None
    assert found.below_ratio <= 0.15, found
    assert found.above_ratio <= 0.05, found


def test_most_of_these_curves_have_one_knee() -> None:
    """Else the test above would say little."""
    pairs = [knees_of(name, idle_us(name) * times) for name in CURVES for times in TIMES]
    assert sum(last <= 1.02 * first for first, last in pairs) >= 14


@pytest.mark.parametrize("name", CURVES)
def test_a_promise_that_an_idle_device_breaks_has_no_capacity_above_its_knee(name: str) -> None:
    limit_us = idle_us(name) * 0.5
    found = capacity(history(name, limit_us / MARGIN, 0))
    assert found.cost_per_s is None or found.cost_per_s <= 1.05 * knees_of(name, limit_us)[1], found
