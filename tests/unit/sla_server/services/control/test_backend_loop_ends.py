"""How the loop of one backend begins without a first cut, and how it ends."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.decisions import Reason
from sla_server.services.control.loop_step import NOTHING as NO_STEP
from sla_server.services.control.loop_step import Phase
from sla_server.services.control.victims import Need
from tests.support.loop_steps import S, ahead, clear, neighbour, start, victim, world


def test_a_cap_ahead_of_a_burst_is_felt_or_released_like_any_other(control):
    ahead(control)
    assert (control.active, control.phase, control.allowed) == (True, Phase.HOLD, 250.0)
    quiet = world(neighbour(cost=10.0))
    for second in range(1, 30):
        assert control.step([clear()], quiet, second * S) == NO_STEP
    step = control.step([clear()], quiet, 30 * S)
    assert (step.reason, control.active) == (Reason.DEMAND_FITS, False)


def test_a_cap_ahead_ends_with_its_victim(control):
    ahead(control)
    assert control.step([victim(Need.IDLE)], world(neighbour()), S).reason is Reason.VICTIM_IDLE


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (Need.IDLE, Reason.VICTIM_IDLE),
        (Need.OUT_OF_CURVE, Reason.VICTIM_OUT_OF_CURVE),
        (Need.NOT_APPLICABLE, Reason.VICTIM_NOT_APPLICABLE),
        (Need.EXCLUDED, Reason.VICTIM_EXCLUDED),
        (Need.GONE, Reason.VICTIM_GONE),
    ],
)
def test_release_when_the_victim_needs_nothing(control, need, reason):
    start(control)
    step = control.step([victim(need)], world(neighbour(cost=200.0)), 101 * S)
    assert (step.changed, step.reason) == (True, reason)
    assert not control.active


def test_a_release_says_of_each_victim_what_it_is(control):
    start(control)
    control.victims |= {("idle", "latency"), ("ended", "latency"), ("silent", "latency")}
    rest = [victim(Need.IDLE, name="idle"), victim(Need.GONE, name="silent")]
    step = control.step([victim(Need.OUT_OF_CURVE), *rest], world(neighbour(cost=200.0)), 101 * S)
    assert step.reason is Reason.VICTIM_OUT_OF_CURVE
    assert step.text == (
        "gold/latency: the demand is above the curve; idle/latency: no I/O for 5 s; "
        "ended/latency, silent/latency: no statistics, or no longer in force"
    )


def test_release_when_the_agreement_is_gone(control):
    start(control)
    assert control.step([], world(neighbour(cost=200.0)), 101 * S).reason is Reason.VICTIM_GONE


def test_release_when_the_cap_has_not_been_felt_for_long(control):
    start(control)
    small = world(neighbour(cost=100.0))
    reasons = [control.step([clear()], small, (101 + second) * S).reason for second in range(40)]
    assert Reason.DEMAND_FITS in reasons
    assert reasons.index(Reason.DEMAND_FITS) >= 29


def test_what_is_used_in_the_first_second_after_a_hang_is_no_release(control):
    """While the storage hangs no step is taken, so what was wanted before is forgotten."""
    start(control)
    for second in range(101, 140):
        control.step([clear(r=0.65)], world(neighbour(cost=200.0, queueing=True)), second * S)
    small = world(neighbour(cost=50.0))
    ended = [second for second in range(200, 240) if control.step([clear()], small, second * S).changed]
    assert ended[:1] == [230]


def test_a_pause_of_a_bursting_neighbour_is_no_release(control):
    start(control)
    for second in range(80):
        busy = second % 20 < 5
        control.step(
            [clear(r=0.65)], world(neighbour(cost=200.0 if busy else 0.0, queueing=busy)), (101 + second) * S
        )
    assert control.active


def test_the_throttled_volumes_own_promise_does_not_keep_it_throttled(control):
    start(control)
    own = victim(Need.HOLD, r=0.9, u=0.6, priority=Priority.BRONZE, name="greedy")
    biting = world(neighbour(cost=200.0, queueing=True))
    changed = [control.step([clear(), own], biting, (103 + s) * S).changed for s in range(3)]
    assert any(changed)


def test_adopted_caps_wait_for_their_victims_to_speak(control):
    control.adopt({"greedy": neighbour(cost=0.0)}, {("gold", "latency")}, 250.0)
    assert not control.step([], world(), 100 * S).changed
    assert not control.step([victim(Need.UNKNOWN)], world(neighbour(cost=0.0)), 101 * S).changed
    assert control.active
    control.step([clear(r=0.52)], world(neighbour(cost=240.0, queueing=True)), 102 * S)
    step = control.step([clear(r=0.5)], world(neighbour(cost=240.0, queueing=True)), 104 * S)
    assert not step.changed  # parked: what it could bear before is not known
    assert control.allowed == 250.0


def test_adopted_caps_whose_victim_never_speaks_are_released_after_a_lease(control):
    control.adopt({"greedy": neighbour()}, {("gold", "latency")}, 250.0)
    control.step([], world(neighbour()), 100 * S)
    assert control.step([], world(neighbour()), 131 * S).reason is Reason.VICTIM_GONE
