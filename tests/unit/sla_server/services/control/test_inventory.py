from __future__ import annotations

import pytest

from sla_server.agreements.promise import CurveStep, Priority
from sla_server.services.control.sharing import cost_of
from sla_server.services.control.victims import Need
from tests.support.worlds import KEY, A, B, Feeder, controller, cut, exports, promise, streams, volume_class


def feeder(**over) -> Feeder:
    return Feeder(controller((promise(**over),), (volume_class(),), "observe"), (A, ("gold", "greedy")))


def need(made: Feeder) -> Need:
    (scope,) = made.controller.scopes.on_backend("disk")
    return made.controller.inventory.victim(scope, made.now_ns).need


@pytest.mark.parametrize(
    ("ms", "wanted"), [(30, Need.AT_RISK), (11.8, Need.AT_RISK), (9.2, Need.HOLD), (2, Need.CLEAR)]
)
def test_what_a_promise_asks(ms, wanted):
    made = feeder()
    made.step((A, {"gold": (80, ms)}, 0))
    assert need(made) is Need.UNKNOWN  # one window is no evidence
    made.step((A, {"gold": (80, ms)}, 0))
    made.step((A, {"gold": (80, ms)}, 0))
    assert need(made) is wanted


def test_urgency_lowers_the_entry_threshold():
    made = feeder()
    for _ in range(3):
        made.step((A, {"gold": (80, 10)}, 0))
    assert need(made) is Need.HOLD
    made.controller.set_budget(KEY, 2.0, 1.0)
    assert made.controller.inventory.r_on(KEY) == pytest.approx(0.8)
    assert need(made) is Need.AT_RISK


def test_idle_out_of_curve_and_gone():
    made = feeder(curve=(CurveStep(100, 12_000),))
    for _ in range(3):
        made.step((A, {"gold": (200, 2)}, 0))
    assert need(made) is Need.OUT_OF_CURVE
    for _ in range(6):
        made.step((A, {}, 0))
    assert need(made) is Need.IDLE
    made.second += 31
    assert need(made) is Need.GONE


def test_what_a_few_ios_are_in_a_cut_that_caps_have_ended_at_once_is_not_what_a_neighbour_uses():
    """Else it would be C0, a step beyond the ceiling, and that of which others are less than a twentieth."""
    made = feeder()
    for _ in range(3):
        made.step((A, {"gold": (80, 2), "greedy": (100, 2)}, 0))
    short = cut(A, 4, {"greedy": (5, 2)}, end_s=made.second + 0.005, duration_s=0.005)
    made.controller.add_cut(short, made.unix_us + 5_000, 0, False, made.now_ns + 5_000_000)
    made.controller.tick(made.now_ns + 6_000_000, made.unix_us + 6_000)
    inventory = made.controller.inventory
    assert inventory.uses.of(inventory.carriers_of("greedy")[A], "greedy").last_ops_per_s == 1000
    assert cost_of(inventory.neighbours("disk", (), {})) <= 180 * 1.0625
    assert inventory.neighbours("disk", (), {})["greedy"].cost_per_s <= 100 * 1.0625


def test_neighbours_and_who_is_above_its_curve():
    made = feeder(curve=(CurveStep(100, 12_000),))
    for _ in range(3):
        made.step((A, {"gold": (200, 2), "greedy": (400, 2)}, 0), held=5)
    inventory = made.controller.inventory
    found = inventory.neighbours("disk", made.controller.scopes.on_backend("disk"), {"greedy": 5000.0})
    assert found["gold"].priority is Priority.GOLD
    assert found["gold"].curve_end == pytest.approx(106.25)
    assert found["gold"].queueing
    assert not found["greedy"].queueing  # holds some back, but is far below its cap
    assert found["greedy"].cost_per_s == pytest.approx(425)
    assert found["greedy"].curve_end is None
    assert inventory.neighbours("elsewhere", (), {}) == {}


def lost_victim() -> Feeder:
    """Gold's only gateway is lost after three cuts, and its agreement applied again."""
    made = feeder()
    for _ in range(3):
        made.step((A, {"gold": (80, 30)}, 0))
    made.controller.gateway_lost(A, "connection closed", made.now_ns)
    made.second += 20
    made.controller.set_agreements((promise(version=2),), (volume_class(),))
    return made


def test_a_promise_made_again_while_its_gateway_is_lost_is_gone_a_lease_after_the_last_cut():
    made = lost_victim()
    assert need(made) is Need.UNKNOWN
    made.second += 11
    assert need(made) is Need.GONE


def test_a_promise_that_is_never_fed_is_gone_a_lease_after_the_first_question():
    made = feeder()
    assert need(made) is Need.UNKNOWN  # its gateway has sent no cut yet
    made.second += 30
    assert need(made) is Need.UNKNOWN
    made.second += 1
    assert need(made) is Need.GONE
    made.step((A, {"gold": (80, 30)}, 0))
    assert need(made) is Need.UNKNOWN, "a window is not enough, but it is not gone"


def test_a_volume_that_moves_is_a_neighbour_where_it_is():
    made = feeder()
    inventory = made.controller.inventory
    made.controller.gateway_up(A, "a", exports("gold") + exports("greedy", backend="other"), made.now_ns)
    assert dict(inventory.backends()) == {"disk": {"gold"}, "other": {"greedy"}}
    assert not inventory.is_on("greedy", "disk")
    made.controller.gateway_up(A, "a", exports("gold", "greedy"), made.now_ns)
    assert dict(inventory.backends()) == {"disk": {"gold", "greedy"}}


def test_of_two_gateways_that_disagree_the_one_that_is_lost_does_not_count():
    made = feeder()
    made.controller.gateway_up(B, "b", exports("greedy", backend="other"), made.now_ns)
    inventory = made.controller.inventory
    assert dict(inventory.backends()) == {"disk": {"gold", "greedy"}, "other": {"greedy"}}
    made.controller.gateway_lost(A, "connection closed", made.now_ns)
    assert dict(inventory.backends()) == {"disk": {"gold"}, "other": {"greedy"}}


def test_of_a_volume_on_two_backends_each_counts_its_own_use():
    made = feeder()
    made.controller.gateway_up(B, "b", exports("greedy", backend="other"), made.now_ns)
    made.controller.add_streams(B, streams(B, "greedy", backend="other"))
    for _ in range(3):
        made.step((A, {"greedy": (400, 2)}, 0), (B, {"greedy": (100, 2)}, 0))
    inventory = made.controller.inventory
    assert inventory.neighbours("disk", (), {})["greedy"].cost_per_s == pytest.approx(425)
    assert inventory.neighbours("other", (), {})["greedy"].cost_per_s == pytest.approx(106.25)


def test_a_volume_through_several_gateways_is_as_old_as_what_the_slowest_says_of_its_queue():
    """Without a queue there, the newest cut says all."""
    made = feeder()
    made.controller.gateway_up(B, "b", exports("greedy"), made.now_ns)
    made.controller.add_streams(B, streams(B, "greedy"))
    inventory = made.controller.inventory
    queue = {"greedy": (9, 1.0)}
    made.step((A, {"greedy": (400, 2)}, 0), (B, {"greedy": (400, 2)}, 0), waiting=queue)
    slow_ns = made.now_ns
    made.step((B, {"greedy": (400, 2)}, 0), waiting=queue)
    found = inventory.neighbours("disk", (), {})["greedy"]
    assert (found.under_way, found.seen_ns) == (18, slow_ns)
    made.step((A, {"greedy": (400, 2)}, 0))
    made.step((B, {"greedy": (400, 2)}, 0), waiting=queue)
    assert inventory.neighbours("disk", (), {})["greedy"].seen_ns == made.now_ns
