"""The loop of one backend, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decisions import Reason
from sla_server.services.control.loop_step import NOTHING as NO_STEP
from sla_server.services.control.loop_step import Phase
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour
from sla_server.services.control.throttle import LoopMemory
from sla_server.services.control.verdicts import NOTHING, Signal
from sla_server.services.control.victims import Need, Victim

S = 1_000_000_000


def victim(need=Need.AT_RISK, r=2.0, u=5.0, priority=Priority.GOLD, g=0.0, name="gold") -> Victim:
    signal = Signal(3, 80.0, 12_000, u, r, r * 12_000, 3, 3, False, at_risk=need is Need.AT_RISK, r_step=r)
    signal = NOTHING if need is Need.UNKNOWN else signal
    return Victim((name, "latency"), priority, g, need, signal, frozenset((name,)))


def clear(r=0.3, u=0.0, **over) -> Victim:
    return victim(Need.CLEAR, r=r, u=u, **over)


def neighbour(
    volume="greedy", cost=400.0, priority=Priority.BEST_EFFORT, queueing=False, **over
) -> Neighbour:
    return Neighbour(volume, priority, cost, cost, 53.0, queueing, **over)


def world(*found: Neighbour) -> dict[str, Neighbour]:
    return {n.volume: n for n in (neighbour("gold", 85.0, Priority.GOLD), *found)}


@pytest.fixture
def control() -> BackendControl:
    return BackendControl(ControlSettings(), "disk")


def start(control, r=2.0, now=100 * S):
    return control.step([victim(r=r)], world(neighbour()), now)


def settled(control, found, at_risk=None):
    """The step ten seconds after the first look at a victim whom nobody harms visibly."""
    assert control.step([at_risk or victim()], found, 0).notice == ""
    return control.step([at_risk or victim()], found, 10 * S)


def ahead(control: BackendControl, now: int = 0) -> None:
    control.pre_position({"greedy": neighbour(cost=10.0)}, clear(), [("gold", "latency")], 250.0,
                         LoopMemory(400.0, 300.0), 8.0, now)  # fmt: skip


def test_a_cap_ahead_of_a_burst_is_felt_or_released_like_any_other(control):
    ahead(control)
    assert (control.active, control.phase, control.allowed) == (True, Phase.HOLD, 250.0)
    quiet = world(neighbour(cost=10.0))
    for second in range(1, 30):
        assert control.step([clear()], quiet, second * S) == NO_STEP
    step = control.step([clear()], quiet, 30 * S)
    assert (step.reason, control.active) == (Reason.DEMAND_FITS, False)


BUSY = world(neighbour(cost=245.0, queueing=True))


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
        moves.append((control.allowed - 200.0) / (0.93 * ceiling - 200.0))
    assert moves == [pytest.approx(0.7), pytest.approx(0.5)]


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
    assert 250 < control.allowed < 0.93 * 300


def test_a_cap_ahead_ends_with_its_victim(control):
    ahead(control)
    assert control.step([victim(Need.IDLE)], world(neighbour()), S).reason is Reason.VICTIM_IDLE


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
    assert 200 < control.allowed < 275
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


def test_it_parks_below_the_ceiling_and_near_saturation(control):
    start(control)
    biting = world(neighbour(cost=400.0, queueing=True))
    for second in range(25):  # before any probe
        control.step([clear(r=0.3)], biting, (103 + second) * S)
    assert control.allowed <= 0.93 * 400
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


def test_a_cap_that_nobody_feels_does_not_rise(control):
    start(control)
    for second in range(20):
        control.step([clear()], world(neighbour(cost=100.0)), (103 + second) * S)
    assert control.allowed == 200.0


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


def test_small_volumes_are_left_alone(control):
    control.step([victim()], world(neighbour(), neighbour("tiny", 10.0)), 0)
    assert set(control.managed) == {"greedy"}


def test_a_volume_that_grows_joins_with_its_use(control):
    control.step([victim()], world(neighbour(), neighbour("tiny", 10.0)), 0)
    control.step([victim()], world(neighbour(cost=200.0), neighbour("tiny", 100.0)), 10 * S)
    assert set(control.managed) == {"greedy", "tiny"}
    assert control.allowed == pytest.approx((200 + 100) / 2)


def test_urgency_opens_higher_classes(control):
    bronze = world(neighbour("bronze", priority=Priority.BRONZE))
    step = settled(control, bronze, victim(g=0.2))
    assert step.notice == "unattributed"
    assert "urgency 0.20" in step.notice_text
    assert control.step([victim(g=0.6)], bronze, 11 * S).changed


def test_same_priority_is_infeasible_and_said_once_a_minute(control):
    equal = world(neighbour("gold2", priority=Priority.GOLD))
    assert settled(control, equal).notice == "infeasible"
    assert control.step([victim()], equal, 40 * S).notice == ""
    assert control.step([victim()], equal, 71 * S).notice == "infeasible"
    assert not control.active


def test_same_priority_above_its_own_curve_is_cut_to_the_curves_end(control):
    greedy_gold = world(neighbour("gold2", priority=Priority.GOLD, curve_end=300.0))
    assert control.step([victim(r=9)], greedy_gold, 0).changed
    assert control.allowed == 300.0


def test_alone_on_the_backend_is_unattributed(control):
    step = settled(control, world())
    assert (step.notice, step.changed) == ("unattributed", False)
    assert "no other volume" in step.notice_text


def test_a_neighbour_that_joins_is_not_preceded_by_unattributed(control):
    for second in range(10):
        assert control.step([victim()], world(), second * S).notice == ""
    step = control.step([victim()], world(neighbour()), 10 * S)  # its first cut came
    assert (step.changed, step.notice) == (True, "")


def test_a_view_that_was_calm_between_has_not_settled(control):
    assert control.step([victim()], world(), 0).notice == ""
    control.step([clear()], world(), 5 * S)
    assert control.step([victim()], world(), 11 * S).notice == ""
    assert control.step([victim()], world(), 21 * S).notice == "unattributed"


@pytest.mark.parametrize(("u", "violated"), [(0.8, False), (1.2, True)])
def test_nobody_to_slow_down_is_critical_only_if_the_promise_is_broken(control, u, violated):
    assert settled(control, world(), victim(u=u)).violated is violated


def test_neighbours_below_their_floors_are_not_blamed(control):
    step = settled(control, world(neighbour(cost=40.0)))
    assert step.notice == "unattributed"
    assert "floors" in step.notice_text
    assert not control.active


def test_without_effect_it_restores_and_backs_off(control):
    found = world(neighbour(cost=4000.0))
    steps = [control.step([victim(r=3.0 - i * 0.01)], found, (100 + 3 * i) * S) for i in range(5)]
    assert [s.changed for s in steps[:4]] == [True] * 4
    assert steps[4].reason is Reason.UNATTRIBUTED
    assert steps[4].notice == "unattributed"
    assert not control.active
    assert not control.step([victim()], found, 150 * S).changed
    assert control.step([victim()], found, (112 + 61) * S).changed


def test_a_cause_that_is_elsewhere_for_weeks_keeps_the_longest_rest(control):
    control.futile = 1100  # one attempt in sixteen minutes: twelve days of it
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    step = control.step([victim(r=2.95)], world(neighbour(cost=53.0)), 3 * S)
    assert "Restored for 960 s" in step.text
    assert control.futile == 1101


def test_at_its_floor_without_effect_is_unattributed_too(control):
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    assert control.allowed == 53.0
    assert control.step([victim(r=2.95)], world(neighbour(cost=53.0)), 3 * S).reason is Reason.UNATTRIBUTED


def test_at_its_floor_with_effect_it_stays_and_says_infeasible(control):
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    step = control.step([victim(r=1.5)], world(neighbour(cost=53.0)), 3 * S)
    assert (step.notice, control.active) == ("infeasible", True)


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
        notices.append(control.step([victim(r=1.0, u=0.8)], found, now * S).notice)
        control.decreases = 0
        for _ in range(3):
            now += 1
            notices.append(control.step([clear(r=0.2)], found, now * S).notice)
    assert notices.count("control-oscillation") == 1
    assert control.hold_up_factor == 2
    control.reset()
    assert control.hold_up_factor == 1


def test_for_a_lesser_victim_more_important_volumes_are_not_cut(control):
    control.step([victim(g=2.0)], world(neighbour("silver", priority=Priority.SILVER)), 0)
    assert set(control.managed) == {"silver"}
    bronze = victim(priority=Priority.BRONZE, name="bronze")
    step = control.step([bronze, clear()], world(neighbour("silver", priority=Priority.SILVER)), 9 * S)
    assert (step.changed, step.notice) == (False, "infeasible")


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


def test_an_hour_of_harm_from_elsewhere_is_few_attempts_and_few_notices(control):
    found, notices, attempts = world(neighbour(cost=4000.0)), [], 0
    for second in range(100, 3700, 3):
        before = control.active
        step = control.step([victim()], found, second * S)
        notices += [step.notice] if step.notice else []
        attempts += control.active and not before
    assert attempts <= 8  # 60, 120, 240, 480 and 960 s apart, not sixty of them
    assert notices == ["unattributed"] * len(notices)
    assert len(notices) <= 8


def test_notices_that_go_on_for_an_hour_come_ever_more_rarely(control):
    equal = world(neighbour("gold2", priority=Priority.GOLD))
    notices = [control.step([victim()], equal, second * S).notice for second in range(3600)]
    assert [second for second, notice in enumerate(notices) if notice] == [10, 70, 190, 430, 910, 1870, 2830]


def test_a_volume_out_of_reach_leaves_c_to_the_others(control):
    control.step([victim()], world(neighbour(), neighbour("other", 100.0)), 100 * S)
    assert control.allowed == 250.0
    control.leave_out(["greedy"])
    assert (control.allowed, set(control.managed)) == (50.0, {"other"})
    control.leave_out(["other"])
    assert not control.active


def silver(cost=64.0, **over) -> Neighbour:
    return neighbour("silver", cost, Priority.SILVER, **over)


def pressing(r=2.0, **over) -> Victim:
    """A gold promise whose budget is spent: it may ask for silver, too."""
    return victim(r=r, g=2.0, **over)


def test_a_more_important_class_gives_way_only_when_the_one_below_is_at_its_floor(control):
    found = world(neighbour(cost=430.0), silver())
    managed = []
    for second in range(0, 12, 3):
        assert control.step([pressing(r=9.0 - second / 2)], found, (100 + second) * S).changed
        managed.append(sorted(control.managed))
    assert managed == [["greedy"], ["greedy"], ["greedy"], ["greedy", "silver"]]


def test_a_first_cut_takes_the_next_class_when_the_lowest_cannot_give_what_it_takes(control):
    control.step([pressing()], world(neighbour(cost=70.0), silver(400.0)), 0)
    assert set(control.managed) == {"greedy", "silver"}
    assert control.allowed == 235.0


def test_without_effect_the_next_class_is_tried_before_anything_is_called_unattributed(control):
    found = world(neighbour(cost=4000.0), silver(300.0))
    steps = [control.step([pressing(r=1.5)], found, (100 + 3 * i) * S) for i in range(9)]
    assert [step.notice for step in steps[:8]] == [""] * 8
    assert set(control.managed) == set(), "restored at last"
    assert steps[8].reason is Reason.UNATTRIBUTED


def above(cost=300.0, end: float | None = 200.0, queueing=False) -> Neighbour:
    """A gold volume above its curve, or inside it with ``end`` None."""
    return neighbour("gold2", cost, Priority.GOLD, queueing, curve_end=end)


def test_an_equal_that_is_inside_its_curve_again_keeps_its_promise_and_blocks_nothing(control):
    control.step([victim(r=9.0)], world(above(), neighbour(cost=200.0)), 100 * S)
    assert control.allowed == 253.0  # its curve's end and the other's floor
    inside = world(above(200.0, None, queueing=True), neighbour(cost=53.0))
    assert control.step([victim(r=8.0)], inside, 104 * S).notice == "infeasible"  # nothing more to take
    assert control.managed["gold2"].curve_end == 200.0
    grown = world(above(200.0, None, queueing=True), neighbour(cost=53.0), neighbour("new", 300.0))
    assert control.step([victim(r=9.0)], grown, 108 * S).changed, "its neighbours can still give"
    assert control.allowed >= 253.0 + 53.0


def test_an_equal_inside_its_curve_that_feels_no_cap_is_let_go(control):
    control.step([victim(r=9.0)], world(above(), neighbour(cost=200.0)), 100 * S)
    shares = {"gold2": 200.0, "greedy": 53.0}
    inside = world(above(120.0, None), neighbour(cost=53.0, queueing=True))
    for second, wanted in ((103, []), (106, []), (109, ["gold2"])):
        control.step([victim(Need.HOLD, r=0.8, u=0.5)], inside, second * S)
        assert control.unneeded(lambda: shares, [clear()], second * S) == wanted
    control.leave_out(["gold2"], shares)
    assert (control.allowed, set(control.managed)) == (53.0, {"greedy"})


def test_a_class_is_let_go_when_those_below_it_have_more_than_their_floors(control):
    control.step([pressing()], world(neighbour(cost=70.0), silver(400.0)), 100 * S)
    for second in (101, 107):
        control.step([clear(g=2.0)], world(neighbour(cost=53.0), silver(50.0)), second * S)
    at_floor, plenty = {"greedy": 53.0, "silver": 182.0}, {"greedy": 100.0, "silver": 135.0}
    assert control.unneeded(lambda: at_floor, [clear()], 107 * S) == []
    assert control.unneeded(lambda: plenty, [clear()], 107 * S) == ["silver"]
    assert control.unneeded(lambda: plenty, [victim(Need.IDLE)], 107 * S) == [], "it is released anyhow"


def test_a_volume_that_no_victim_of_now_may_slow_down_is_let_go(control):
    control.step([pressing()], world(neighbour(cost=70.0), silver(400.0)), 100 * S)
    control.victims.add(("other", "latency"))
    lesser = victim(Need.HOLD, r=0.8, priority=Priority.SILVER, name="other")
    found = world(neighbour(cost=53.0, queueing=True), silver(180.0, queueing=True))
    control.step([victim(Need.GONE), lesser], found, 111 * S)
    shares = {"greedy": 53.0, "silver": 182.0}
    assert control.unneeded(lambda: shares, [victim(Need.GONE), lesser], 111 * S) == ["silver"]


def resting(control) -> int:
    """Attempts without effect until it rests; the second."""
    found, second = world(neighbour(cost=4000.0)), 100
    while not control.quiet_until_ns:
        control.step([victim(r=3.0)], found, second * S)
        second += 3
    return second


def test_a_rest_ends_when_the_promise_has_been_kept_for_as_long_as_a_violation_takes_to_end(control):
    second, found = resting(control), world(neighbour(cost=4000.0))
    for more in range(21):
        control.step([clear()], found, (second + more) * S)
    assert control.step([victim()], found, (second + 21) * S).changed


@pytest.mark.parametrize("need", [Need.UNKNOWN, Need.IDLE, Need.AT_RISK])
def test_a_rest_goes_on_while_nothing_says_that_the_trouble_has_ended(control, need):
    second, found = resting(control), world(neighbour(cost=4000.0))
    for more in range(0, 50, 5):
        control.step([victim(need)], found, (second + more) * S)
    assert not control.step([victim()], found, (second + 50) * S).changed


def test_the_ceiling_learned_while_a_gateway_was_away_is_forgotten(control):
    start(control)
    learned = control.ceiling
    control.lost("B")
    for second in (103, 106):
        control.step([victim(r=3.0 - second / 100)], world(neighbour(cost=190.0)), second * S)
    assert control.ceiling < learned
    control.came_back("B")
    assert control.ceiling == learned


def test_a_rest_that_began_while_a_gateway_was_away_ends_when_it_is_back(control):
    control.lost("B")
    resting(control)
    control.came_back("B")
    assert control.quiet_until_ns == 0


def test_what_a_gateway_uses_that_was_away_at_the_start_counts_when_it_is_back(control):
    control.lost("B")
    start(control)
    both = {"greedy": replace(neighbour(cost=250.0), peak=700.0)}
    control.step([victim(Need.HOLD, r=0.8, u=0.5)], world(*both.values()), 103 * S)
    control.came_back("B")
    assert (control.start, control.ceiling, control.allowed) == (700.0, 700.0, 200.0)


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
