"""Whom the loop of one backend slows down, and in which order."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.decisions import Reason
from sla_server.services.control.sharing import Neighbour
from sla_server.services.control.unneeded import unneeded
from sla_server.services.control.victims import Need, Victim
from tests.support.loop_steps import S, clear, neighbour, settled, victim, world


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


def test_same_priority_above_its_own_curve_is_cut_to_the_curves_end(control):
    greedy_gold = world(neighbour("gold2", priority=Priority.GOLD, curve_end=300.0))
    assert control.step([victim(r=9)], greedy_gold, 0).changed
    assert control.allowed == 300.0


def test_for_a_lesser_victim_more_important_volumes_are_not_cut(control):
    control.step([victim(g=2.0)], world(neighbour("silver", priority=Priority.SILVER)), 0)
    assert set(control.managed) == {"silver"}
    bronze = victim(priority=Priority.BRONZE, name="bronze")
    step = control.step([bronze, clear()], world(neighbour("silver", priority=Priority.SILVER)), 9 * S)
    assert (step.changed, step.notice) == (False, "infeasible")


def test_a_volume_out_of_reach_leaves_c_to_the_others(control):
    control.step([victim()], world(neighbour(), neighbour("other", 100.0)), 100 * S)
    assert control.allowed == 250.0
    control.leave_out(["greedy"])
    assert (control.allowed, set(control.managed)) == (50.0, {"other"})
    control.leave_out(["other"])
    assert not control.active


def test_of_a_volume_that_pauses_while_another_leaves_something_of_c_stays(control):
    control.step([victim()], world(neighbour(), neighbour("other", 100.0)), 100 * S)
    control.step([clear()], world(neighbour(), neighbour("other", 0.0)), 101 * S)
    control.leave_out(["greedy"])
    assert control.allowed == pytest.approx(250 * 53 / 453)
    assert control.start > 0


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
        assert unneeded(control, lambda: shares, [clear()], second * S) == wanted
    control.leave_out(["gold2"], shares)
    assert (control.allowed, set(control.managed)) == (53.0, {"greedy"})


def test_a_class_is_let_go_when_those_below_it_have_more_than_their_floors(control):
    control.step([pressing()], world(neighbour(cost=70.0), silver(400.0)), 100 * S)
    for second in (101, 107):
        control.step([clear(g=2.0)], world(neighbour(cost=53.0), silver(50.0)), second * S)
    at_floor, plenty = {"greedy": 53.0, "silver": 182.0}, {"greedy": 100.0, "silver": 135.0}
    assert unneeded(control, lambda: at_floor, [clear()], 107 * S) == []
    assert unneeded(control, lambda: plenty, [clear()], 107 * S) == ["silver"]
    assert unneeded(control, lambda: plenty, [victim(Need.IDLE)], 107 * S) == [], "it is released anyhow"


def test_a_volume_that_no_victim_of_now_may_slow_down_is_let_go(control):
    control.step([pressing()], world(neighbour(cost=70.0), silver(400.0)), 100 * S)
    control.victims.add(("other", "latency"))
    lesser = victim(Need.HOLD, r=0.8, priority=Priority.SILVER, name="other")
    found = world(neighbour(cost=53.0, queueing=True), silver(180.0, queueing=True))
    control.step([victim(Need.GONE), lesser], found, 111 * S)
    shares = {"greedy": 53.0, "silver": 182.0}
    assert unneeded(control, lambda: shares, [victim(Need.GONE), lesser], 111 * S) == ["silver"]
