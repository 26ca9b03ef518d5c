"""When slowing down cannot help: the loop of one backend gives up, rests, and says so ever more rarely."""

from __future__ import annotations

import itertools
import random

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decisions import Reason
from sla_server.services.control.victims import Need
from tests.support.loop_steps import S, clear, neighbour, resting, settled, victim, world


def test_same_priority_is_infeasible_and_said_once_a_minute(control):
    equal = world(neighbour("gold2", priority=Priority.GOLD))
    assert settled(control, equal).notice == "infeasible"
    assert control.step([victim()], equal, 40 * S).notice == ""
    assert control.step([victim()], equal, 71 * S).notice == "infeasible"
    assert not control.active


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
    control.effect.futile = 1100  # one attempt in sixteen minutes: twelve days of it
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    step = control.step([victim(r=2.95)], world(neighbour(cost=53.0)), 3 * S)
    assert "Restored for 960 s" in step.text
    assert control.effect.futile == 1101


def test_at_its_floor_without_effect_is_unattributed_too(control):
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    assert control.allowed == 53.0
    assert control.step([victim(r=2.95)], world(neighbour(cost=53.0)), 3 * S).reason is Reason.UNATTRIBUTED


def test_at_its_floor_with_effect_it_stays_and_says_infeasible(control):
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    step = control.step([victim(r=1.5)], world(neighbour(cost=53.0)), 3 * S)
    assert (step.notice, control.active) == ("infeasible", True)


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


def test_a_rest_that_began_while_a_gateway_was_away_ends_when_it_is_back(control):
    control.lost("B")
    resting(control)
    control.came_back("B")
    assert control.quiet_until_ns == 0


def _gave_up(control: BackendControl, r: float = 1.2) -> int:
    """Attempts at a promise that slowing down does not help any further; the second in which it rests."""
    found, second = world(neighbour(cost=4000.0)), 100
    while not control.quiet_until_ns:
        control.step([victim(r=r)], found, second * S)
        second += 3
    return second


def test_caps_come_back_at_once_when_r_rises_without_them(control):
    found = world(neighbour(cost=4000.0, queueing=True))
    second = _gave_up(control)
    step = control.step([victim(r=16.0)], found, second * S)
    assert (step.changed, control.allowed, control.ceiling) == (True, 4000.0, 4000.0)
    assert "r rose from 1.20" in step.text
    assert control.quiet_until_ns == second * S
    assert control.effect.r_before == 16.0, "what feed-forward takes for r without caps"


def test_caps_do_not_come_back_for_a_promise_that_is_as_it_was_under_them(control):
    second = _gave_up(control)
    assert not control.step([victim(r=1.7)], world(neighbour(cost=4000.0)), second * S).changed


def test_a_promise_of_which_nothing_was_known_under_the_caps_is_helped_in_the_rest(control):
    """It had no I/O then. The one that no cap could help does not keep it waiting, whatever its weight."""
    second, found = _gave_up(control), world(neighbour(cost=4000.0))
    step = control.step([victim(r=1.2, u=19.0), victim(name="gold3")], found, second * S)
    assert "not known while greedy had caps. Back to 4000" in step.text
    assert (control.lead.key, control.allowed) == (("gold3", "latency"), 4000.0)
    assert control.step([victim(r=1.2, u=19.0), victim(name="gold3")], found, (second + 3) * S).changed
    control.step([victim(r=1.2, u=19.0), clear(name="gold3")], found, (second + 6) * S)
    assert control.allowed == 2000.0, "slowed down for the new one, and no further for the other"


def test_a_promise_that_caps_help_does_not_lose_them_to_one_that_they_do_not_help(control):
    found = world(neighbour(queueing=True), neighbour("lame", 40.0, Priority.GOLD))
    kept = 0
    for second in range(100, 700, 3):
        is_kept = control.active and control.allowed <= 250
        gold = clear(r=0.3) if is_kept else victim(r=2.0)
        control.step([gold, victim(r=9.0, u=19.0, name="lame")], found, second * S)
        kept += is_kept
    assert kept >= 170, "of 200; 12 without"


def test_the_effect_on_one_promise_is_not_measured_by_another(control):
    found = world(neighbour(cost=4000.0))
    control.step([victim(r=1.2), victim(r=6.0, name="gold3", u=2.0)], found, 100 * S)
    for second, r in ((103, 5.0), (106, 4.0), (109, 3.0), (112, 2.0)):
        step = control.step([clear(), victim(r=r, name="gold3", u=2.0)], found, second * S)
        assert step.reason is Reason.PROMISE_VIOLATED, "it helps, though r of the first one was 1.2"


@pytest.mark.parametrize(("risen", "comes_back"), [(1, False), (2, True)])
def test_of_promises_that_were_at_risk_under_the_caps_half_must_rise_without_them(control, risen, comes_back):
    """One of them rises by chance at any time."""
    found, second = world(neighbour(cost=4000.0, queueing=True)), 100
    names = ("gold", "gold3", "gold4")
    while not control.quiet_until_ns:
        control.step([victim(r=1.2, name=name) for name in names], found, second * S)
        second += 3
    free = [victim(r=9.0 if at < risen else 1.2, name=name) for at, name in enumerate(names)]
    assert control.step(free, found, second * S).changed is comes_back


def test_caps_that_came_back_in_vain_do_so_once_only(control):
    """r rose by chance: the cause is elsewhere, and comes and goes."""
    found, second = world(neighbour(cost=4000.0, queueing=True)), _gave_up(control)
    assert control.step([victim(r=3.0)], found, second * S).changed
    while control.active:
        second += 3
        control.step([victim(r=3.0)], found, second * S)
    assert control.quiet_until_ns == (second + 120) * S, "an attempt more without effect"
    for more in range(3, 120, 3):
        others = [victim(r=9.0, name="gold3")] if more < 60 else []
        assert not control.step([victim(r=30.0), *others], found, (second + more) * S).changed
    assert control.step([victim(r=30.0)], found, (second + 120) * S).changed


def test_after_a_minute_another_promise_may_end_a_rest_that_followed_caps_in_vain(control):
    found, second = world(neighbour(cost=4000.0, queueing=True)), _gave_up(control)
    control.step([victim(r=3.0)], found, second * S)
    while control.active:
        second += 3
        control.step([victim(r=3.0)], found, second * S)
    both = [victim(r=3.0), victim(r=9.0, name="gold3")]
    assert not control.step(both, found, (second + 57) * S).changed
    assert control.step(both, found, (second + 60) * S).changed


def test_caps_of_which_one_has_gone_do_not_come_back_but_the_rest_ends(control):
    second = _gave_up(control)
    assert not control.step([victim(r=16.0)], world(), second * S).changed
    assert not control.active
    assert control.step([victim(r=16.0)], world(neighbour("other")), (second + 1) * S).changed


def test_proven_caps_go_no_lower_than_they_help_and_it_is_said(control):
    found = world(neighbour(cost=4000.0, queueing=True))
    second = _gave_up(control)
    control.step([victim(r=16.0)], found, second * S)
    steps = [control.step([victim(r=1.2)], found, (second + n) * S) for n in range(3, 60, 3)]
    assert [step.notice for step in steps if step.notice] == ["infeasible"]
    assert not any(step.changed for step in steps)
    assert control.allowed == 4000.0


def test_whether_proven_caps_help_is_tried_again_and_ever_more_rarely(control):
    found = world(neighbour(cost=4000.0, queueing=True))
    freed, was_active = [], False
    for second in range(100, 3700, 3):
        r = 1.2 if control.active else 16.0  # as it is, whatever C
        was_active = control.active
        control.step([victim(r=r)], found, second * S)
        if was_active and not control.active:
            freed.append(second)
    assert 4 <= len(freed) <= 7
    gaps = [after - before for before, after in itertools.pairwise(freed)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_proven_caps_go_lower_when_it_becomes_worse_and_back_when_that_did_not_help(control):
    found = world(neighbour(cost=4000.0, queueing=True))
    second = _gave_up(control)
    control.step([victim(r=16.0)], found, second * S)
    control.step([victim(r=1.2)], found, (second + 3) * S)
    steps = [control.step([victim(r=2.0)], found, (second + n) * S) for n in range(6, 24, 3)]
    assert [step.changed for step in steps] == [True] * 5 + [False]
    assert control.allowed == 4000.0
    assert "back to 4000" in steps[4].text
    assert control.active


def _proven(control: BackendControl) -> int:
    """Caps of a volume, 4000, below which r of 1.2 does not fall; the second after that was found."""
    second = _gave_up(control)
    for r in (16.0, 1.2):
        control.step([victim(r=r)], world(neighbour(cost=4000.0, queueing=True)), second * S)
        second += 3
    assert (control.allowed, control.effect.proofs) == (4000.0, 1)
    return second


def test_proven_caps_go_lower_for_another_promise_that_is_at_risk(control):
    second = _proven(control)
    found = world(neighbour(cost=4000.0, queueing=True))
    control.step([victim(r=1.2, u=19.0), victim(name="gold3")], found, second * S)
    assert (control.lead.key, control.allowed) == (("gold3", "latency"), 2000.0)


def test_a_class_that_may_give_way_now_does_so_though_caps_are_proven_to_help_no_further(control):
    second = _proven(control)
    silver = neighbour("silver", 3000.0, Priority.SILVER)
    found = world(neighbour(cost=4000.0, queueing=True), silver)
    assert not control.step([victim(r=1.2)], found, second * S).changed
    assert control.step([victim(r=1.2, g=2.0)], found, (second + 3) * S).changed
    assert set(control.managed) == {"greedy", "silver"}
    assert control.allowed == pytest.approx(7000 / 1.2)


def test_a_neighbour_that_begins_while_caps_are_proven_is_slowed_down(control):
    second = _proven(control)
    found = world(neighbour(cost=4000.0, queueing=True), neighbour("new", 3000.0))
    assert control.step([victim(r=1.7)], found, second * S).changed
    assert control.allowed == pytest.approx(7000 / 1.7)
    for n in range(3, 15, 3):
        control.step([victim(r=1.2)], found, (second + n) * S)
    assert control.allowed == 4000.0, "no further than is known to help"


def test_of_caps_that_come_back_those_that_may_not_be_set_any_more_do_not(control):
    both = world(neighbour(cost=3000.0), neighbour("other", 1000.0))
    second = 100
    while not control.quiet_until_ns:
        control.step([victim(r=1.2)], both, second * S)
        second += 3
    promised = world(neighbour(cost=3000.0), neighbour("other", 1000.0, Priority.GOLD))
    assert control.step([victim(r=16.0)], promised, second * S).changed
    assert (set(control.managed), control.allowed) == ({"greedy"}, 3000.0)


def test_a_promise_that_no_cap_helps_does_not_keep_c_down_for_one_that_is_clear(control):
    """Up to where lower caps did not help it, it makes no difference to it; higher, nobody knows."""
    second, found = _gave_up(control), world(neighbour(cost=4000.0, queueing=True))
    lame = victim(r=1.2, u=19.0)
    control.step([lame, victim(name="gold3")], found, second * S)
    control.step([lame, victim(name="gold3")], found, (second + 3) * S)
    control.step([lame, clear(name="gold3")], found, (second + 6) * S)
    assert (control.allowed, control.ceiling) == (2000.0, 4000.0)
    for n in range(7, 60):
        control.step([lame, clear(name="gold3")], found, (second + n) * S)
    assert 3500 < control.allowed <= 4000
    control.ceiling = 9000.0
    for n in range(60, 65):
        control.step([lame, clear(name="gold3")], found, (second + n) * S)
    assert control.allowed == 4000.0


def test_whether_floors_that_do_not_suffice_help_at_all_is_tried_ever_more_rarely(control):
    """r fell when they were reached, maybe by chance."""
    freed, found = [], world(neighbour(cost=60.0))
    control.step([victim(r=3.0)], found, 0)
    for second in range(3, 600, 3):
        step = control.step([victim(r=1.5 if control.active else 3.0)], found, second * S)
        if step.reason is Reason.UNATTRIBUTED:
            assert "at their floors did not suffice: the cause may be elsewhere" in step.text
            freed.append(second)
        assert control.allowed == (0.0 if step.reason is Reason.UNATTRIBUTED else 53.0)
    assert freed == [60, 126, 252, 498]


def test_neighbours_at_floors_that_do_not_matter_are_free_again(control):
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    for second in range(3, 120, 3):
        control.step([victim(r=1.5)], world(neighbour(cost=60.0)), second * S)
        assert control.active is (second < 60)


def test_a_promise_at_risk_that_is_kept_with_neighbours_at_their_floors_does_not_lose_them(control):
    control.step([victim(r=3.0)], world(neighbour(cost=60.0)), 0)
    for second in range(3, 200, 3):
        control.step([victim(r=0.96, u=0.9)], world(neighbour(cost=60.0)), second * S)
    assert control.allowed == 53.0


def test_caps_that_help_one_promise_end_with_it_whatever_becomes_of_one_that_they_do_not_help(control):
    second, found = _gave_up(control), world(neighbour(cost=4000.0, queueing=True))
    lame = victim(r=1.2, u=19.0)
    for more in (0, 3):
        control.step([lame, victim(name="gold3")], found, (second + more) * S)
    assert control.victims == {("gold3", "latency")}
    step = control.step([lame, victim(Need.IDLE, name="gold3")], found, (second + 6) * S)
    assert (step.reason, control.active) == (Reason.VICTIM_IDLE, False)
    assert not control.step([lame], found, (second + 9) * S).changed, "its rest goes on"
    assert control.step([lame, victim(name="gold3")], found, (second + 12) * S).changed


def test_no_promise_leads_the_trial_of_another_that_caps_have_not_helped(control):
    second, found = _gave_up(control), world(neighbour(cost=4000.0, queueing=True))
    control.step([victim(r=1.2, u=19.0), victim(name="gold3")], found, second * S)
    for more in range(3, 30, 3):
        unknown = victim(Need.UNKNOWN, name="gold3")
        assert not control.step([victim(r=1.2, u=19.0), unknown], found, (second + more) * S).changed
    assert control.allowed == 4000.0


@pytest.mark.parametrize("promises", [1, 3, 20])
@pytest.mark.parametrize("seed", [1, 2])
def test_harm_from_elsewhere_that_comes_and_goes_is_an_hour_with_few_caps(control, promises, seed):
    """What C does makes no difference; r wavers by a third, for some 20 s each time."""
    rng, level, active = random.Random(seed), dict.fromkeys(map(str, range(promises)), 1.0), 0
    for second in range(100, 3700, 3):
        for name in level:
            if rng.random() < 0.15:
                level[name] = rng.lognormvariate(0, 0.3)
        found = [victim(r=3 * part, name=name) for name, part in level.items()]
        used = control.allowed if control.active else 400.0
        control.step(found, world(neighbour(cost=used, queueing=control.active)), second * S)
        active += control.active
    assert active <= 0.15 * 1200
