"""A decrease of neighbours with a deep queue waits until that has left the storage (ADR 75).

The first part walks the gate and the loop, the second is on the simulator.
"""

from __future__ import annotations

import pytest

from benchmarks import sla
from benchmarks.sla_scenarios import SCENARIOS
from benchmarks.sla_simulated import Runs
from sla_server.services.control.cap_gate import CapGate
from sla_server.services.control.decisions import SetCaps
from sla_server.services.control.nearness import MOST_KEPT, Nearness
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour
from sla_server.services.control.simulation import Simulation
from sla_server.services.control.victims import Victim
from sla_server.simulate.run import run_mode
from tests.support.loop_steps import S, clear, neighbour, victim, world

CAPPED_S, HELD_S = 10, 11
LIMIT_S = 8.0


def deep(under_way: int, seen_s: float, volume: str = "greedy") -> Neighbour:
    return neighbour(volume, cost=300.0, queueing=True, under_way=under_way, seen_ns=round(seen_s * S))


def draining(under_way: int) -> CapGate:
    """Caps of a neighbour with so many I/Os at the storage hold from HELD_S on."""
    gate = CapGate()
    gate.drain.begin([deep(under_way, CAPPED_S)], 83.0)
    gate.wait_for("B", 7, CAPPED_S * S)
    gate.confirm("B", 7, 7, began_ns=HELD_S * S)
    return gate


def looked(gate: CapGate, under_way: int, at_s: float, most: float = 3.0) -> CapGate:
    gate.follow_drain([deep(under_way, at_s)], most, LIMIT_S, round(at_s * S))
    return gate


def test_it_is_shut_until_no_more_is_at_the_storage_than_the_caps_let_be():
    gate = draining(256)
    assert gate.is_confirmed
    assert not gate.is_open
    for under_way, at_s in ((180, 12), (100, 13), (4, 14)):
        assert not looked(gate, under_way, at_s).is_open
    assert looked(gate, 3, 15).is_open
    assert not gate.is_evidence(15 * S - 1), "what began before is of the drain, too"
    assert gate.is_evidence(15 * S)


def test_a_short_queue_is_not_waited_for():
    assert draining(83).is_open


@pytest.mark.parametrize("under_way", [256, 250, 300], ids=["stays", "hardly falls", "grows"])
def test_what_does_not_get_less_is_no_drain(under_way):
    """C does not bite, or the storage serves no more than C: that is evidence."""
    gate = looked(draining(256), under_way, 12)
    assert gate.is_open
    assert gate.is_evidence(HELD_S * S)


def test_two_looks_at_the_same_cut_or_at_a_short_one_say_nothing():
    gate = draining(256)
    assert not looked(gate, 250, HELD_S + 0.1).is_open, "a tenth of a second after the caps"
    assert not looked(gate, 180, 12).is_open
    assert not looked(gate, 180, 12).is_open, "the same cut"
    assert not looked(gate, 120, 13).is_open


def test_it_ends_with_the_limit_also_if_nothing_is_heard_of_the_neighbour():
    gate = draining(4000)
    assert not looked(gate, 2000, 12).is_open
    gate.follow_drain([], 3.0, LIMIT_S, round((CAPPED_S + LIMIT_S) * S))
    assert not gate.is_open
    gate.follow_drain([], 3.0, LIMIT_S, round((CAPPED_S + LIMIT_S) * S) + 1)
    assert gate.is_open


def test_a_neighbour_at_the_floor_has_two_under_way_whatever_its_caps_let_be():
    assert looked(draining(256), 2, 12, most=0.5).is_open


def test_neighbours_whose_gateways_speak_in_turn_are_looked_at_when_each_has_spoken():
    """A cut of one without a queue says nothing of the queue of the other."""
    gate = CapGate()
    gate.drain.begin([deep(64, CAPPED_S, "a"), deep(200, CAPPED_S, "b")], 83.0)
    gate.wait_for("A", 7, CAPPED_S * S)
    gate.confirm("A", 7, 7, began_ns=HELD_S * S)

    def look(a: tuple[int, float], b: tuple[int, float], at_s: float) -> bool:
        gate.follow_drain([deep(*a, "a"), deep(*b, "b")], 3.0, LIMIT_S, round(at_s * S))
        return gate.is_open

    assert not look((2, 11.5), (180, 11.25), 11.5)
    assert not look((2, 11.5), (140, 12.0), 12.0)
    assert not look((2, 12.5), (140, 12.0), 12.5), "b has said nothing since"
    assert not look((2, 12.5), (80, 13.0), 13.0)
    assert look((2, 13.5), (1, 14.0), 14.0)


def test_one_that_joins_with_a_queue_does_not_end_the_wait_for_the_others():
    gate = looked(draining(256), 180, 12)
    both = [deep(120, 13.0), deep(90, 13.0, "late")]
    gate.follow_drain(both, 3.0, LIMIT_S, 13 * S)
    assert not gate.is_open
    gate.follow_drain([deep(120, 14.0), deep(90, 14.0, "late")], 3.0, LIMIT_S, 14 * S)
    assert gate.is_open, "neither of them gets less"


def test_the_loop_whose_lead_is_only_observed_by_now_goes_on_after_the_drain(control):
    """``mode_changed`` takes the lead from a loop that goes on for other promises."""
    assert control.step([victim(r=3.0)], world(deep(256, 1.0)), S).changed
    control.gate.wait_for("B", 7, S)
    control.gate.confirm("B", 7, 7, began_ns=2 * S)
    control.lead = None
    assert not control.step([victim(r=3.0)], world(deep(150, 4)), 4 * S).changed
    assert control.step([victim(r=3.0)], world(deep(1, 5)), 5 * S).changed


def test_the_loop_lowers_c_once_for_one_queue(control):
    """Late windows of the drain are of before; the same windows after it are of C."""
    full = world(deep(256, 1.0))
    assert control.step([victim(r=3.0)], full, S).changed
    first = control.allowed
    control.gate.wait_for("B", 7, S)
    control.gate.confirm("B", 7, 7, began_ns=2 * S)
    for second, under_way in ((4, 150), (5, 60)):
        assert not control.step([victim(r=3.0)], world(deep(under_way, second)), second * S).changed
    assert not control.gate.is_open
    assert control.step([victim(r=3.0)], world(deep(1, 6)), 6 * S).changed, (
        "the controller asks with new windows"
    )
    assert control.allowed < first


def test_nothing_drains_when_the_loop_has_ended(control):
    assert control.step([victim(r=3.0)], world(deep(256, 1.0)), S).changed
    control.reset()
    assert control.gate.is_open


def test_a_step_up_asks_for_what_is_usual_at_this_c_not_for_one_good_window(control):
    control.step([victim(r=1.5)], world(neighbour(cost=400.0, queueing=True)), S)
    biting = world(neighbour(cost=control.allowed, queueing=True))
    low = control.allowed
    control.step([clear(r=0.25)], biting, 9 * S)  # what the storage takes anyway
    for quarter in range(80):
        r = 0.45 if quarter % 40 == 39 else 0.8
        control.step([clear(r=r)], biting, (10 + quarter // 4) * S)
    assert control.allowed == low
    for quarter in range(40):
        control.step([clear(r=0.3)], biting, (40 + quarter // 4) * S)
    assert control.allowed > low


def test_of_very_many_promises_one_good_window_is_not_what_is_usual_and_those_of_before_are_forgotten():
    near = Nearness(ControlSettings())

    def all_at(r: float) -> list[Victim]:
        return [clear(r=r, name=f"gold-{number}") for number in range(2 * MOST_KEPT)]

    near.see([clear(r=0.9, name="before")])
    for _ in range(30):
        near.see(all_at(0.8))
    near.see(found := all_at(0.3))
    assert near.margin(found) < 1, "0.3 alone would be far from where C parks"
    assert len(near.usual) == len(near.each) == len(found)


# On the simulator: an nbdkit that gives each connection its turn.

SCENARIO = next(each for each in SCENARIOS if each.name == "nbdkit")


def test_a_queue_of_hundreds_at_an_nbd_server_costs_the_neighbours_one_decrease():
    made = Runs(SCENARIO, sla.agreements(SCENARIO))
    worlds = list[Simulation]()
    run_mode(made.plan(40), "enforce", worlds.append)
    caps = [
        sum(cap["cost_per_s"] for cap in decision.caps)
        for at, decision in worlds[0].log
        if isinstance(decision, SetCaps) and decision.caps and at < 12
    ]
    assert len(caps) >= 2
    assert caps == sorted(caps), "C has only risen after the first cut"
