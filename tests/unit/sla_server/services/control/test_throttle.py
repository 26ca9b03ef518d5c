from __future__ import annotations

import numpy as np
import pytest

from pmdaemon.wire.rates import Rates
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.throttle import LEAST, Throttle, exceeds
from sla_server.services.control.usage import Usage, UsageTable

S = 1_000_000_000
SETTINGS = ControlSettings()


@pytest.fixture
def throttle() -> Throttle:
    return Throttle("t", "v", "disk", "control", Rates(cost_per_s=100.0), "promise-violated", "text")


def use_of(cost: float, ops: float, size: float = 0.0) -> Usage:
    """A place whose newest cut lasted a second."""
    board = UsageTable()
    place = board.allot("v", "disk")
    board.update(np.array([place]), np.array([[cost * 1000], [ops], [size], [0.0], [0.0]]), np.ones(1))
    return Usage(board, place)


def used(cost: float) -> Usage:
    return use_of(cost, cost)


def measure(throttle: Throttle, gateway: str, cost: float) -> bool:
    return throttle.measured(gateway, Rates(cost_per_s=100.0), used(cost), 1.0, SETTINGS, 9)


def test_its_life(throttle):
    throttle.issued("A", 5, 0)
    throttle.issued("B", 5, 0)
    assert (throttle.state, throttle.gen) == ("requested", 5)
    assert not throttle.confirmed("A", 4, 1)
    assert not throttle.confirmed("A", 5, 1)  # B is still missing
    assert throttle.confirmed("B", 5, 2)
    assert (throttle.state, throttle.confirmed_us) == ("confirmed", 2)
    assert not measure(throttle, "A", 90)
    assert measure(throttle, "B", 100)
    assert throttle.row()["state"] == "seen"
    assert throttle.row()["seen_us"] == 9


def test_a_change_must_be_proved_again(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    measure(throttle, "A", 90)
    throttle.issued("A", 6, 0)
    assert (throttle.state, throttle.confirmed_us, throttle.seen_us) == ("requested", None, None)


def test_three_cuts_above_the_cap_are_said_once(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for _ in range(2):
        measure(throttle, "A", 200)
        assert throttle.failure(SETTINGS, S) == ""
    measure(throttle, "A", 200)
    assert "gateway A" in throttle.failure(SETTINGS, S)
    measure(throttle, "A", 200)
    assert throttle.failure(SETTINGS, S) == ""
    assert throttle.state == "confirmed"


def test_a_cut_within_the_cap_ends_the_count(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for cost in (200, 200, 100, 200, 200):
        measure(throttle, "A", cost)
    assert throttle.failure(SETTINGS, S) == ""


def test_not_confirmed_in_time(throttle):
    throttle.issued("A", 5, 0)
    assert throttle.failure(SETTINGS, 5 * S) == ""
    assert "not confirmed" in throttle.failure(SETTINGS, 6 * S)


def test_a_lost_gateway_has_nothing_to_prove(throttle):
    throttle.issued("A", 5, 0)
    throttle.forget("A")
    assert throttle.failure(SETTINGS, 60 * S) == ""


@pytest.mark.parametrize(("cost", "is_above"), [(100, False), (117, False), (120, True)])
def test_tolerance(cost, is_above):
    assert exceeds(Rates(cost_per_s=100.0), used(cost), 1.0, 0.15) is is_above


def test_ops_and_bytes_are_measured_too():
    use = use_of(0, 50, 50 * 4096)
    assert exceeds(Rates(ops_per_s=10.0), use, 1.0, 0.15)
    assert exceeds(Rates(bytes_per_s=4096.0 * 10), use, 1.0, 0.15)
    assert not exceeds(Rates(bytes_per_s=4096.0 * 50, ops_per_s=50.0), use, 1.0, 0.15)


def test_rates():
    assert Rates(cost_per_s=5, ops_per_s=1).tighter(Rates(cost_per_s=4, bytes_per_s=9)) == Rates(1, 9, 4)
    assert Rates().is_open
    assert Rates(cost_per_s=10).scaled(0.01).at_least(LEAST) == Rates(cost_per_s=1.0)
    assert Rates(cost_per_s=100).differs(Rates(cost_per_s=98), 0.01)
    assert not Rates(cost_per_s=100).differs(Rates(cost_per_s=99.5), 0.01)
    assert Rates(cost_per_s=1).differs(Rates(ops_per_s=1), 0.5)
