from __future__ import annotations

import pytest

from sla_server.agreements.promise import CurveStep, Priority
from sla_server.services.control.backend_loop import Need
from tests.support.worlds import KEY, A, Feeder, controller, promise, volume_class


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
