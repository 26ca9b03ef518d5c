"""The loop of one backend, step by step: up and down. How it ends, whom it slows down and what it gives up as
hopeless have files of their own; what it knows of the storage is in ``test_ceiling``."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.decisions import Reason
from sla_server.services.control.loop_step import NOTHING as NO_STEP
from sla_server.services.control.loop_step import Phase
from sla_server.services.control.victims import Need
from tests.support.loop_steps import BUSY, S, ahead, clear, neighbour, start, victim, world


def test_from_a_cap_ahead_the_loop_goes_down(control):
    ahead(control)
    assert control.step([victim(r=1.25)], BUSY, S) == NO_STEP, "hold_down"
    step = control.step([victim(r=1.25)], BUSY, 3 * S)
    assert (step.reason, control.allowed) == (Reason.PROMISE_VIOLATED, 200.0)
    assert control.ceiling == 250.0


@pytest.mark.parametrize(
    ("queueing", "used", "left"),
    [(False, 180.0, 162.0), (False, 20.0, 112.5), (False, 201.0, 225.0), (True, 180.0, 225.0)],
)
def test_a_step_down_is_from_what_is_used_where_the_cap_is_not_felt(control, queueing, used, left):
    """Storage became slower: a step from C would change nothing. Never from less than half of C."""
    ahead(control)
    found = world(neighbour(cost=used, queueing=queueing))
    control.step([victim(r=1.1)], found, S)
    assert control.step([victim(r=1.1)], found, 3 * S).changed
    assert control.allowed == pytest.approx(left)
    assert control.ceiling == pytest.approx(left / 0.9)


def test_what_a_cap_ahead_has_done_already_counts_as_its_effect(control):
    """From r 8 without caps to 1.2: released for want of effect, the promise would be broken as before."""
    ahead(control)
    steps = [control.step([victim(r=1.2)], BUSY, 3 * n * S) for n in range(1, 9)]
    assert Reason.UNATTRIBUTED not in [step.reason for step in steps[:5]]
    assert sum(step.reason is Reason.PROMISE_VIOLATED for step in steps[:5]) == 5
    control.reset()
    ahead(control, 100 * S)
    steps = [control.step([victim(r=8.0)], BUSY, (100 + 3 * n) * S) for n in range(1, 9)]
    assert Reason.UNATTRIBUTED in [step.reason for step in steps], "the cause is elsewhere"


def test_quiet_before_the_burst_is_no_reason_to_give_back_in_it(control):
    ahead(control)
    quiet = world(neighbour(cost=10.0))
    for second in range(1, 16):
        assert control.step([clear(r=0.2)], quiet, second * S) == NO_STEP
    steps = {second: control.step([clear(r=0.2)], BUSY, second * S) for second in range(16, 22)}
    assert [second for second, step in steps.items() if step.changed] == [20], "kept for five seconds"
    assert steps[20].reason is Reason.RECOVERY
    assert 250 < control.allowed < control.settings.park_ratio * 300


def test_the_first_cut_bites_from_present_use(control):
    step = start(control)
    assert step.changed
    assert step.reason is Reason.PROMISE_VIOLATED
    assert "24.0 ms of 12 ms" in step.text
    assert (control.allowed, control.start, control.phase) == (200.0, 400.0, Phase.DECREASE)
    assert set(control.managed) == {"greedy"}


@pytest.mark.parametrize(("r", "factor"), [(10.0, 0.5), (1.6, 1 / 1.6), (1.0, 0.9), (0.5, 0.9)])
def test_size_of_a_decrease_follows_r(control, r, factor):
    start(control, r=r)
    assert control.allowed == pytest.approx(400 * factor)


def test_at_risk_is_another_reason_than_violated(control):
    assert control.step([victim(u=0.8, r=0.9)], world(neighbour()), 0).reason is Reason.PROMISE_AT_RISK


def test_no_second_decrease_within_hold_down_or_before_confirmation(control):
    start(control, now=100 * S)
    control.gate.wait_for("A", 7, 100 * S)
    assert not control.step([victim()], world(neighbour(cost=200.0)), 104 * S).changed
    control.gate.confirm("A", 6, 8, 101 * S)
    assert not control.gate.is_open
    control.gate.confirm("A", -1, 8, 101 * S)
    assert not control.gate.is_open
    control.gate.confirm("B", 9, 9, 101 * S)
    assert not control.gate.is_open
    control.gate.confirm("A", 1 << 62, 8, 101 * S)
    assert not control.gate.is_open, "it was never issued"
    control.gate.confirm("A", 8, 8, 101 * S)
    assert control.gate.is_open
    assert not control.step([victim()], world(neighbour(cost=200.0)), 102 * S).changed
    assert control.step([victim()], world(neighbour(cost=200.0)), 103 * S).changed
    assert control.allowed == 100.0


def test_never_below_floors(control):
    for second in range(0, 12, 3):
        control.step([victim(r=9 - second / 2)], world(neighbour()), (100 + second) * S)
    assert control.allowed == 53.0


def test_deadband_holds(control):
    start(control)
    for second in range(3, 60):
        step = control.step(
            [victim(Need.HOLD, r=0.8, u=0.5)], world(neighbour(queueing=True)), (100 + second) * S
        )
        assert not step.changed
    assert control.allowed == 200.0
    assert control.phase is Phase.HOLD


def test_increase_waits_for_hold_up_and_is_quicker_when_far(control):
    start(control)
    biting = world(neighbour(cost=200.0, queueing=True))
    assert not control.step([clear(r=0.52)], biting, 103 * S).changed
    assert not control.step([clear(r=0.52)], biting, 107 * S).changed
    step = control.step([clear(r=0.52)], biting, 108 * S)
    assert step.reason is Reason.RECOVERY
    assert 200 < control.allowed <= 275.1
    far = control.allowed
    assert not control.step([clear(r=0.2)], biting, 110 * S).changed
    assert control.step([clear(r=0.2)], biting, 111 * S).changed
    assert control.allowed > far


def test_one_risky_look_starts_hold_up_again(control):
    start(control)
    biting = world(neighbour(cost=200.0, queueing=True))
    control.step([clear(r=0.52)], biting, 103 * S)
    control.step([victim(Need.HOLD, r=0.8, u=0.5)], biting, 106 * S)
    assert not control.step([clear(r=0.52)], biting, 109 * S).changed
    assert control.step([clear(r=0.52)], biting, 114 * S).changed


def test_a_cap_that_nobody_feels_does_not_rise(control):
    start(control)
    for second in range(20):
        control.step([clear()], world(neighbour(cost=100.0)), (103 + second) * S)
    assert control.allowed == 200.0


def test_all_promises_must_be_clear_before_an_increase(control):
    start(control)
    other = victim(Need.HOLD, r=0.9, u=0.6, priority=Priority.SILVER, name="silver")
    biting = world(neighbour(cost=200.0, queueing=True))
    assert not any(control.step([clear(), other], biting, (103 + s) * S).changed for s in range(20))


def test_higher_priority_leads(control):
    silver = victim(priority=Priority.SILVER, name="silver", u=19.0, r=8.0)
    step = control.step([silver, victim(r=1.5, u=2.0)], world(neighbour()), 0)
    assert control.lead.key == ("gold", "latency")
    assert control.allowed == pytest.approx(400 / 1.5)
    assert "gold" in step.text


def test_effect_starts_the_count_anew(control):
    found = world(neighbour(cost=40_000.0))
    for i in range(8):
        step = control.step([victim(r=9.0 * 0.8**i)], found, (100 + 3 * i) * S)
        assert step.reason is Reason.PROMISE_VIOLATED


def test_oscillation_halves_the_step_and_doubles_hold_up(control):
    found = world(neighbour(cost=400.0, queueing=True))
    notices = []
    now = 100
    for _ in range(4):
        now += 3
        notices.append(control.step([victim(r=1.25, u=0.8)], found, now * S).notice)
        control.effect.decreases = 0
        for _ in range(3):
            now += 1
            notices.append(control.step([clear(r=0.2)], found, now * S).notice)
    assert notices.count("control-oscillation") == 1
    assert control.hold_up_factor == 2
    control.reset()
    assert control.hold_up_factor == 1


def test_all_that_are_helped_are_named_and_the_loop_ends_when_none_of_them_asks(control):
    other = victim(r=1.5, u=2.0, name="gold2")
    step = control.step([victim(), other], world(neighbour()), 100 * S)
    assert control.victims == {("gold", "latency"), ("gold2", "latency")}
    assert "; at risk, too: gold2/latency: greedy from 400" in step.text
    assert control.step([victim(Need.IDLE), other], world(neighbour(cost=200.0)), 101 * S) == NO_STEP
    idle = [victim(Need.IDLE), victim(Need.IDLE, name="gold2")]
    assert control.step(idle, world(neighbour(cost=200.0)), 102 * S).reason is Reason.VICTIM_IDLE


def test_a_promise_is_not_helped_by_a_cap_on_its_own_volume(control):
    own = victim(r=1.5, name="greedy", priority=Priority.SILVER)
    step = control.step([victim(), own], world(neighbour(), neighbour("batch")), 100 * S)
    assert (control.victims, "at risk, too" in step.text) == ({("gold", "latency")}, False)
