"""Generated loads: how many requests, when, of which kind, and what becomes of them."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from sla_server.services.control.simulation import Simulation
from sla_server.simulate.loads import Application, Arrival, IoLog, Load, arrivals, strength
from tests.support.worlds import controller


def times(load: Load, ends_s: float = 100.0, seed: int = 1) -> list[float]:
    return [found.at_s for found in arrivals(load, ends_s, random.Random(seed))]


def within(found: list[float], first: float, last: float) -> int:
    return sum(first <= at < last for at in found)


def test_steady_is_a_poisson_stream_of_its_rate():
    found = times(Load(volume="v", iops=50, from_s=10, until_s=90))
    assert within(found, 10, 90) == len(found)
    assert len(found) == pytest.approx(80 * 50, rel=0.05)
    assert found == times(Load(volume="v", iops=50, from_s=10, until_s=90))


def test_ramp_square_and_bursts():
    ramp = times(Load(volume="v", iops=100, shape="ramp"))
    assert within(ramp, 0, 10) == pytest.approx(50, abs=30)
    assert within(ramp, 90, 100) == pytest.approx(950, rel=0.12)
    square = times(Load(volume="v", iops=100, low_iops=10, shape="square", period_s=20, duty=0.25))
    assert within(square, 0, 5) == pytest.approx(500, rel=0.15)
    assert within(square, 5, 20) == pytest.approx(150, rel=0.3)
    bursty = Load(volume="v", iops=100, shape="bursty", on_s=2, off_s=5)
    on = strength(bursty, 100.0, random.Random(1))
    assert {on(at / 10) for at in range(1000)} == {0.0, 1.0}
    assert on(101.0) == 0.0


def test_kinds_follow_the_read_fraction():
    load = Load(volume="v", iops=100, read_fraction=0.7, kib=8)
    found = list(arrivals(load, 50.0, random.Random(3)))
    assert sum(each.is_write for each in found) / len(found) == pytest.approx(0.3, abs=0.03)
    assert {each.size_bytes for each in found} == {8192}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "either iops"),
        ({"iops": 1, "depth": 1}, "either iops"),
        ({"depth": 1, "low_iops": 1}, "low_iops goes with iops"),
        ({"iops": 1, "from_s": 5, "until_s": 4}, "must be after from_s"),
    ],
)
def test_contradictions_are_refused(values, problem):
    with pytest.raises(ValidationError, match=problem):
        Load(volume="v", **values)


def world(most: int = 0) -> tuple[Simulation, Application]:
    sim = Simulation(controller(()), 1)
    return sim, Application(sim.gateway("A", ["v"]), "v", "client", IoLog(), most)


def test_a_closed_load_keeps_its_depth_and_ends():
    sim, application = world()
    application.hold(Load(volume="v", depth=4, from_s=1), 3.0, random.Random(1))
    sim.run(2.0)
    assert application.outstanding == 4
    sim.run(4.0)
    log = application.log.arrays()
    assert application.outstanding == 0
    assert len(log["at"]) == pytest.approx(2 * 500, abs=5)
    assert log["at"].min() == pytest.approx(1.0)
    assert log["latency"].max() == pytest.approx(0.008)


def test_an_open_client_leaves_out_what_it_has_no_room_for():
    sim, application = world(most=3)
    application.replay(Arrival(1.0, False, 4096) for _ in range(5))
    sim.run(2.0)
    assert (len(application.log.at), application.left_out) == (3, 2)
