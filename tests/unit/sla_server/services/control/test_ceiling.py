"""What the loop knows of how much the storage can give, when it was learned at the wrong moment (ADR 63)."""

from __future__ import annotations

import math

from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.services.control.controller import Controller
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import SimClient, Simulation

LIMIT_S = 0.012
GIVES_IOPS = 330  # of a disk of 2 ms with gold's 80 a second, a fifth left for its latency
MODEST_IOPS = 60.0


def simulation(seed: int) -> Simulation:
    controller = Controller(ControlSettings())
    latency = Promise("gold", 1, "latency", Priority.GOLD, ("gold",), ("*",), "any", 95.0,
                      (CurveStep(math.inf, round(LIMIT_S * 1e6)),), 0.995, 60, 50.0, 0.0)  # fmt: skip
    controller.set_agreements([latency], [VolumeClass("gold", Priority.GOLD, ("gold",))])
    controller.set_mode("enforce")
    return Simulation(controller, seed)


def with_neighbour(sim: Simulation, joins_s: float) -> tuple[SimClient, SimClient]:
    """Gold, and a neighbour that asks for little until it becomes greedy."""
    front = sim.gateway("A", ["gold"], {"gold": [round(LIMIT_S * 1e6)]})
    back = sim.gateway("B", ["greedy"])
    gold = SimClient(front, "gold", rate=80)
    SimClient(back, "greedy", rate=MODEST_IOPS, active=lambda now: now < joins_s)
    return gold, SimClient(back, "greedy", depth=32, active=lambda now: now >= joins_s)


def stand_still(sim: Simulation, at_s: float, seconds: float) -> None:
    """The disk does nothing for so long."""

    def stop() -> None:
        sim.backend.service_s, before = seconds, sim.backend.service_s
        sim.backend.submit(None, lambda: None)  # one request that takes so long
        sim.backend.service_s = before

    sim.world.at(at_s, stop)


def test_a_neighbour_that_has_just_begun_is_not_kept_to_its_first_second() -> None:
    kept = []
    for seed in range(4):
        sim = simulation(seed)
        joins_s = 20.1 + seed / 4  # wherever a cut ends
        gold, greedy = with_neighbour(sim, joins_s)
        stand_still(sim, joins_s - 0.9, 0.15)  # so one window was bad before it came
        sim.run(joins_s + 60)
        kept.append(greedy.rate_between(joins_s, joins_s + 60))
        assert len(gold.bad_seconds(int(joins_s) + 3, int(joins_s) + 60, LIMIT_S)) <= 5
    assert min(kept) >= 0.6 * GIVES_IOPS, "a fifth, when kept to its first second"
    assert sum(kept) / len(kept) >= 0.8 * GIVES_IOPS


def test_a_ceiling_that_a_hiccup_of_the_storage_has_left_rises_ever_faster_while_nothing_happens() -> None:
    sim = simulation(1)
    gold, greedy = with_neighbour(sim, 20.0)
    for at_s in (10.2, 11.1, 12.0):
        stand_still(sim, at_s, 0.15)
    sim.run(200)
    assert greedy.rate_between(22, 40) < 0.5 * GIVES_IOPS, "else the hiccup has left no ceiling"
    assert greedy.rate_between(160, 200) >= 0.8 * GIVES_IOPS
    assert len(gold.bad_seconds(23, 200, LIMIT_S)) <= 9


def test_probes_do_not_hurry_beside_a_ceiling_that_is_right() -> None:
    sim = simulation(2)
    gold, greedy = with_neighbour(sim, 5.0)
    sim.run(200)
    assert greedy.rate_between(20, 200) >= 0.8 * GIVES_IOPS
    assert len(gold.bad_seconds(20, 200, LIMIT_S)) <= 0.06 * 180
