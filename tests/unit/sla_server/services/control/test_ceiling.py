"""What the loop knows of how much the storage can give: the ceiling, and when it is left (ADR 2, 62, 63).

The first part walks the loop step by step, the second is on the simulator.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import Reason
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbours
from sla_server.services.control.simulation import SimClient, Simulation
from sla_server.services.control.victims import Need
from tests.support.loop_steps import BUSY, S, ahead, clear, neighbour, start, victim, world

LIMIT_S = 0.012
GIVES_IOPS = 330  # of a disk of 2 ms with gold's 80 a second, a fifth left for its latency
MODEST_IOPS = 60.0


@pytest.mark.parametrize(
    ("queueing", "last", "ceiling"), [(False, 190.0, 190.0), (False, 20.0, 125.0), (True, 190.0, 250.0)]
)
def test_the_ceiling_is_what_the_storage_gave_at_the_last_where_the_cap_is_not_felt(
    control, queueing, last, ceiling
):
    """Storage became slower a cut ago: what is smoothed is between before and now."""
    ahead(control)
    found = world(neighbour(cost=230.0, queueing=queueing, last_cost_per_s=last))
    control.step([victim(r=1.25)], found, S)
    assert control.step([victim(r=1.25)], found, 3 * S).changed
    assert (control.allowed, control.ceiling) == (pytest.approx(200.0), pytest.approx(ceiling))


def test_a_use_that_broke_the_promise_without_caps_is_approached_faster_than_one_under_caps(control):
    found = world(neighbour(cost=400.0, queueing=True))
    start(control)
    moves = []
    for ceiling in (control.start, 0.99 * control.start):
        control.ceiling, control.allowed, control.clear_since_ns = ceiling, 200.0, 0
        assert control.step([clear(r=0.2)], found, 120 * S).reason is Reason.RECOVERY
        moves.append((control.allowed - 200.0) / (control.settings.park_ratio * ceiling - 200.0))
    assert moves == [pytest.approx(0.7), pytest.approx(0.5)]


def test_it_parks_below_the_ceiling_and_near_saturation(control):
    start(control)
    biting = world(neighbour(cost=400.0, queueing=True))
    for second in range(25):  # before any probe
        control.step([clear(r=0.3)], biting, (103 + second) * S)
    assert control.allowed <= control.settings.park_ratio * 400
    before = control.allowed
    for second in range(25, 60):
        control.step([clear(r=0.62)], biting, (103 + second) * S)
    assert control.allowed == before  # clear, but too close to the bend


def test_it_probes_beyond_the_ceiling_when_long_calm(control):
    start(control)
    biting = world(neighbour(cost=400.0, queueing=True))
    for second in range(200):
        control.step([clear(r=0.3)], biting, (103 + second) * S)
    assert control.allowed > 400


def test_risk_lowers_the_ceiling(control):
    start(control)
    biting = world(neighbour(cost=400.0, queueing=True))
    for second in range(10):
        control.step([clear(r=0.3)], biting, (103 + second) * S)
    reached = control.allowed
    control.step([victim(r=1.0, u=0.8)], biting, 120 * S)
    assert control.ceiling == reached
    for second in range(20):
        control.step([clear(r=0.3)], biting, (123 + second) * S)
    assert control.allowed < reached


def test_the_ceiling_learned_while_a_gateway_was_away_is_forgotten(control):
    start(control)
    learned = control.ceiling
    control.lost("B")
    for second in (103, 106):
        control.step([victim(r=3.0 - second / 100)], world(neighbour(cost=190.0)), second * S)
    assert control.ceiling < learned
    control.came_back("B")
    assert control.ceiling == learned


def test_what_a_gateway_uses_that_was_away_at_the_start_counts_when_it_is_back(control):
    control.lost("B")
    start(control)
    both = {"greedy": replace(neighbour(cost=250.0), peak=700.0)}
    control.step([victim(Need.HOLD, r=0.8, u=0.5)], world(*both.values()), 103 * S)
    control.came_back("B")
    assert (control.start, control.ceiling, control.allowed) == (700.0, 700.0, 200.0)


# Learned too early: until the first cut holds, what neighbours use is what they want.


def begun(control: BackendControl) -> None:
    """A neighbour that was seen with 160 when the first cut was made, which no gateway has confirmed yet."""
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    control.gate.wait_for("B", 7, 100 * S)
    assert (control.allowed, control.start, control.ceiling) == (80.0, 160.0, 160.0)


def test_what_a_neighbour_used_until_the_first_cut_held_is_what_it_wants(control):
    begun(control)
    control.step([victim()], world(neighbour(cost=80.0, peak=195.0)), 101 * S)
    assert control.start == 160.0, "no clearly more"
    control.gate.confirm("B", 7, 7, 101 * S)  # the cut of before the caps came with the one that shows them
    control.step([victim(Need.UNKNOWN)], world(neighbour(cost=80.0, peak=360.0)), 102 * S)
    assert (control.allowed, control.start, control.ceiling) == (80.0, 360.0, 360.0)


@pytest.mark.parametrize(("count", "learned"), [(1, 1.6 * 600), (2, 1.6 * 600), (3, 600), (4, 600)])
def test_peaks_of_several_are_of_several_moments_and_their_sum_is_too_high(control, count, learned):
    names, each = [f"batch-{n}" for n in range(count)], 600.0 / count
    control.step([victim()], world(*(neighbour(name, each) for name in names)), 100 * S)
    control.gate.wait_for("B", 7, 100 * S)
    peaks = [neighbour(name, each / 2, peak=1.6 * each) for name in names]
    control.step([victim(Need.UNKNOWN)], world(*peaks), 101 * S)
    assert control.start == pytest.approx(learned)


def test_of_several_one_that_has_just_begun_and_uses_most_is_learned_as_if_alone(control):
    modest = [neighbour(name, 60.0, peak=65.0) for name in ("modest", "other")]
    control.step([victim()], world(neighbour(cost=180.0), *modest), 100 * S)
    control.gate.wait_for("B", 7, 100 * S)
    control.step([victim(Need.UNKNOWN)], world(neighbour(cost=90.0, peak=360.0), *modest), 101 * S)
    assert control.start == pytest.approx(360.0 + 2 * 65.0)


def test_once_the_first_cut_holds_more_than_it_lets_through_is_no_use_to_learn_from(control):
    begun(control)
    control.gate.confirm("B", 7, 7, 101 * S)
    for second in range(102, 110):
        control.step([victim(Need.UNKNOWN)], world(neighbour(cost=80.0, peak=160.0)), second * S)
        control.step([victim(Need.UNKNOWN)], world(neighbour(cost=80.0, peak=900.0)), second * S)
    assert (control.start, control.ceiling) == (160.0, 160.0)


def test_what_was_used_before_the_first_cut_is_not_use_since(control):
    found = world(neighbour(cost=160.0, peak=800.0))  # a burst some seconds ago
    control.step([victim()], found, 100 * S)
    control.gate.wait_for("B", 7, 100 * S)
    control.step([victim()], world(neighbour(cost=80.0, peak=720.0)), 101 * S)
    assert control.start == 160.0


def test_a_client_that_comes_under_another_name_does_not_raise_what_is_allowed(control):
    begun(control)
    control.replace([], [neighbour("other", 300.0)])
    control.step([victim()], world(neighbour(cost=160.0), neighbour("other", 300.0)), 101 * S)
    assert (control.start, control.ceiling) == (160.0, 160.0)


def learned(control: BackendControl) -> dict[str, object]:
    begun(control)
    control.gate.confirm("B", 7, 7, 101 * S)
    found = world(neighbour(cost=80.0, peak=360.0, queueing=True))
    control.step([victim(Need.UNKNOWN)], found, 102 * S)
    assert control.ceiling == 360.0
    return found


def test_what_is_late_after_the_first_cut_is_of_before_it_but_only_once(control):
    found = learned(control)
    assert control.step([victim(r=1.9)], found, 104 * S).changed
    assert (control.allowed, control.ceiling) == (53.0, 360.0)
    control.allowed = 200.0
    assert control.step([victim(r=1.0)], found, 108 * S).changed
    assert control.ceiling == 200.0


@pytest.mark.parametrize("seen", [victim(Need.HOLD, r=0.8, u=0.5), clear(r=0.52)], ids=["near", "clear"])
def test_what_is_late_once_windows_were_in_time_is_of_the_caps_in_force(control, seen):
    found = learned(control)
    control.step([seen], found, 104 * S)
    assert control.step([victim(r=1.0)], found, 110 * S).changed
    assert control.ceiling == 80.0


# Left ever faster, while nothing happens.


def probing(control: BackendControl, until: float) -> int:
    """From C0 of 160 up beyond the ceiling until C is ``until``; the second."""
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    second = 102
    while control.allowed < until:
        found = world(neighbour(cost=control.allowed, queueing=True))
        control.step([clear(r=0.2)], found, second * S)
        second += 1
        assert second < 1000
    return second


def test_from_the_third_step_beyond_the_ceiling_on_each_is_twice_as_long_after_half_the_time(control):
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    steps, before = [], control.ceiling
    for second in range(101, 250):
        found = world(neighbour(cost=control.allowed, queueing=True))
        control.step([clear(r=0.2)], found, second * S)
        if control.ceiling != before:
            carried = sum(n.cost_per_s for n in found.values())
            steps.append((second - 100, (control.ceiling - before) / (carried / 16)))
            before = control.ceiling
    assert [rate for _, rate in steps[:4]] == [pytest.approx(rate) for rate in (1, 1, 2, 4)]
    assert steps[4][1] < 8, "half of the ceiling at most"
    at = [second for second, _ in steps]
    assert [later - earlier for earlier, later in itertools.pairwise(at)] == [
        30,
        *[15] * (len(at) - 2),
    ]


def test_steps_are_shares_of_all_that_the_storage_carries_and_at_least_of_c0(control):
    """Of a little beside much, a sixteenth would take hours."""
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    before, found = control.ceiling, Neighbours(world(neighbour(cost=100.0, queueing=True)))
    found.rest_cost_per_s = 1000.0  # of the many that use too little to count
    for second in range(101, 132):
        control.step([clear(r=0.2)], found, second * S)
    assert control.ceiling == before + (85.0 + 100.0 + 1000.0) / 16
    alone = world(neighbour(cost=10.0, queueing=True))
    for second in range(132, 162):
        control.step([clear(r=0.2)], alone, second * S)
    assert control.ceiling == before + (85.0 + 100.0 + 1000.0) / 16 + 160.0 / 16


def test_steps_are_shares_of_c0_once_one_of_what_the_storage_carries_was_too_long(control):
    """What is cheap for the storage, as the large sequential I/Os of a victim, makes such steps too long."""
    gold = neighbour("gold", 2400.0, Priority.GOLD)
    control.step([victim()], world(neighbour(cost=160.0), gold), 100 * S)
    steps, before, second = list[float](), control.ceiling, 100
    for r in (0.2, 2.0, 0.2, 0.2, 0.2):
        control.calm_since_ns = second * S
        while control.ceiling == before:
            second += 3
            found = world(neighbour(cost=control.allowed, queueing=True), gold)
            control.step([clear(r=0.2) if r < 1 else victim(r=1.05, u=1.0)], found, second * S)
            assert second < 1000
        steps.append(control.ceiling - before)
        before = control.ceiling
    long = (2400.0 + 160.0) / 16
    assert steps[0] == pytest.approx(long, rel=0.1)
    assert steps[1] < 0, "risk"
    assert steps[2:4] == [160.0 / 16, 160.0 / 16]
    assert steps[4] > 160.0 / 8, "two in a row brought no promise near its threshold"


@pytest.mark.parametrize(("r", "hurries"), [(0.58, True), (0.64, False)])
def test_of_storage_that_takes_half_of_what_is_promised_anyway_more_is_far(control, r, hurries):
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    for second in range(101, 300):
        found = world(neighbour(cost=control.allowed, queueing=True))
        control.step([clear(r=0.5 if second < 130 else r)], found, second * S)
    assert (control.probes > 2) is hurries


def beside_slow(control: BackendControl, r: float) -> float:
    """C after 200 s: of one promise the storage takes 0.66 anyway, of the other 0.2, and ``r`` later."""
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    for second in range(101, 300):
        found = world(neighbour(cost=control.allowed, queueing=True))
        others = [clear(r=0.66), clear(r=0.2 if second < 130 else r, name="fast")]
        control.step(others, found, second * S)
    return control.allowed


def test_what_was_late_while_the_queue_drained_says_nothing_of_storage_without_neighbours(control):
    """Smoothed from there on, r would be above the threshold for some forty steps, and C not park."""
    start(control)
    control.step([victim(Need.HOLD, r=20.0)], BUSY, 101 * S)
    control.step([clear(r=0.3)], BUSY, 102 * S)
    before = control.allowed
    for second in range(103, 130):
        control.step([clear(r=0.62)], BUSY, second * S)
    assert control.allowed == before, "near saturation"
    assert not control.near.are_far([clear(r=0.52)])


def test_of_several_promises_each_is_far_by_what_the_storage_takes_of_itself(control):
    beside_slow(control, 0.2)
    assert control.probes > 2
    other = BackendControl(control.settings, "disk")
    assert beside_slow(other, 0.64) < control.allowed
    assert other.probes == 0, "near its threshold, though its storage takes little of it"
    held = other.allowed
    beside = [clear(r=0.66), clear(r=0.64, name="fast")]
    for second in range(300, 400):
        other.step(beside, world(neighbour(cost=held, queueing=True)), second * S)
    assert other.allowed == held, "it parks"


def test_a_promise_seen_for_the_first_time_when_it_is_near_is_not_far(control):
    """Of many each step sees some, those with the least room."""
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    for second in range(101, 500):
        near = [clear(r=0.64, name=f"gold-{second}")] if second > 105 else []
        control.step([clear(r=0.2), *near], world(neighbour(cost=control.allowed, queueing=True)), second * S)
    assert control.probes == 0
    assert len(control.near.each) <= 257


@pytest.mark.parametrize("near", [victim(Need.HOLD, r=0.8, u=0.5), clear(r=0.6), clear(r=0.3, u=0.2)])
def test_a_promise_near_its_threshold_between_two_steps_has_them_begin_again(control, near):
    second = probing(control, 250.0)
    assert control.probes > 2
    found, before = world(neighbour(cost=control.allowed, queueing=True)), control.ceiling
    control.step([near], found, second * S)
    for more in range(1, 29):
        control.step([clear(r=0.2)], found, (second + more) * S)
    single = sum(n.cost_per_s for n in found.values()) / 16
    assert control.ceiling <= before + single, "a single step, and not after half the time"


def test_no_step_is_made_for_time_in_which_the_cap_was_not_felt(control):
    control.step([victim()], world(neighbour(cost=160.0)), 100 * S)
    for second in range(101, 401):  # 5 s of 25 are a burst
        is_burst = second % 25 < 5
        found = world(neighbour(cost=80.0 if is_burst else 0.0, queueing=is_burst))
        control.step([clear(r=0.55)], found, second * S)
    assert control.active
    assert control.ceiling <= 160.0 + 2 * (160.0 + 85.0) / 16, "60 s of 300"


def test_a_first_cut_after_a_recovery_is_not_the_first_one(control):
    """C is far beyond C0: what is used then was allowed, and says nothing of the use without caps."""
    second = probing(control, 300.0)
    reached = control.allowed
    used = world(neighbour(cost=reached, queueing=True, last_cost_per_s=reached))
    assert control.step([victim(r=1.0)], used, (second + 3) * S).changed
    control.step([victim(Need.UNKNOWN)], used, (second + 4) * S)
    assert (control.start, control.ceiling) == (160.0, reached)
    below = control.allowed
    assert control.step([victim(r=1.0)], used, (second + 7) * S).changed
    assert control.ceiling == below, "met under these caps"


def test_a_step_too_small_to_be_sent_is_not_made(control):
    """Else C would go on without the gate, that is without evidence of the step before."""
    second = probing(control, 1000.0)
    control.ceiling = control.allowed * 1.01 / control.settings.park_ratio
    found, before = world(neighbour(cost=control.allowed, queueing=True)), control.allowed
    for more in range(10):
        control.step([clear(r=0.3)], found, (second + more) * S)
    assert control.allowed == before


def test_what_is_left_of_c_far_beyond_c0_can_still_rise(control):
    second = probing(control, 500.0)
    control.managed["other"] = neighbour("other", 100.0)
    control.leave_out(["greedy"], {"greedy": control.allowed - 100.0})
    assert control.allowed == 100.0
    assert control.start > 0
    ceiling, found = control.ceiling, world(neighbour("other", 100.0, queueing=True))
    for more in range(40):
        control.step([clear(r=0.3)], found, (second + more) * S)
    assert control.ceiling > ceiling


# On the simulator.


def simulation(seed: int) -> Simulation:
    controller = Controller(ControlSettings())
    latency = Promise("gold", 1, "latency", Priority.GOLD, ("gold",), ("*",), "any", 95.0,
                      (CurveStep(math.inf, round(LIMIT_S * 1e6)),), 0.995, 60, 50.0, 0.0)  # fmt: skip
    controller.set_agreements([latency], [VolumeClass("gold", Priority.GOLD, ("gold",))])
    controller.set_mode("enforce")
    return Simulation(controller, seed)


def with_neighbour(
    sim: Simulation, joins_s: float, phase_s: float | None = None
) -> tuple[SimClient, SimClient]:
    """Gold, and a neighbour that asks for little until it becomes greedy."""
    front = sim.gateway("A", ["gold"], {"gold": [round(LIMIT_S * 1e6)]})
    back = sim.gateway("B", ["greedy"], phase_s=phase_s)
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
    for seed in range(5):
        sim = simulation(seed)
        joins_s = 20.1 + seed / 4  # wherever a cut ends, and whenever its gateway is polled
        gold, greedy = with_neighbour(sim, joins_s, (0.02 + 0.2 * seed) % 1)
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
