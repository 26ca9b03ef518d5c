"""Observe and enforce: for the server, a backend, an agreement; and what is promised at present."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import CurveStep
from sla_server.services.control.controller import Controller
from tests.support.worlds import (
    KEY,
    A,
    Feeder,
    caps_of,
    controller,
    events_of,
    promise,
    rows_of,
    volume_class,
)

LATE, GREEDY = (100, 30.0), (400, 30.0)


def world(mode: str = "observe", *names: str) -> Feeder:
    golds = names or ("gold",)
    made = controller([promise(g) for g in golds], [volume_class(g) for g in golds], mode)
    return Feeder(made, (A, (*golds, "greedy")))


def run(made: Feeder, seconds: int, *late: str) -> list[object]:
    decided: list[object] = []
    for _ in range(seconds):
        ios = dict.fromkeys(late or ("gold",), LATE) | {"greedy": GREEDY}
        decided += made.step((A, ios, made.controller.policy.gateways[A].gen))
    return decided


def states(decided: list[object]) -> set[str]:
    return {row["state"] for row in rows_of(decided)}


def test_a_backend_is_enforced_while_the_server_observes_and_the_other_way() -> None:
    made = world()
    made.controller.set_backend_modes({"disk": "enforce"})
    assert caps_of(run(made, 2), A).caps[0]["volume"] == "greedy"
    made.controller.set_backend_modes({})
    decided = run(made, 1)
    (released,) = events_of(decided, "throttle-released")
    assert released.details["ended"] == "mode-observe"
    made = world("enforce")
    made.controller.set_backend_modes({"disk": "observe"})
    assert states(run(made, 4)) == {"observed"}


def test_an_agreements_own_mode_holds_before_its_backends() -> None:
    made = world("enforce")
    made.controller.set_agreement_modes({"gold": "observe"})
    assert states(run(made, 4)) == {"observed"}
    made.controller.set_agreement_modes({})
    assert "requested" in states(run(made, 4))
    made.controller.set_backend_modes({"disk": "observe"})
    made.controller.set_agreement_modes({"gold": "enforce"})
    assert not events_of(run(made, 1), "throttle-released")


def test_of_two_promises_at_risk_the_enforced_one_is_helped_and_the_other_written_down() -> None:
    made = world("enforce", "gold", "gold2")
    made.controller.set_agreement_modes({"gold2": "observe"})
    found = rows_of(run(made, 3, "gold", "gold2"))
    assert {(row["victim"], row["state"] == "observed") for row in found} == {
        ("gold/latency", False),
        ("gold2/latency", True),
    }


def test_only_an_observed_promise_at_risk_moves_nothing_that_is_in_force() -> None:
    made = world("enforce", "gold", "gold2")
    made.controller.set_agreement_modes({"gold2": "observe"})
    run(made, 2, "gold")
    before = made.controller.loops.controls["disk"].allowed
    for _ in range(8):
        ios = {"gold": (100, 8.6), "gold2": LATE, "greedy": (200, 30.0)}  # gold is neither at risk nor clear
        made.step((A, ios, made.controller.policy.gateways[A].gen))
    assert made.controller.loops.controls["disk"].allowed == before


def test_policy_and_agreed_caps_follow_the_mode_of_their_backend() -> None:
    made = world()
    made.controller.set_policy_caps(1, {"greedy": 100.0})
    assert not any(hasattr(d, "caps") for d in run(made, 1))
    made.controller.set_backend_modes({"disk": "enforce"})
    assert caps_of(run(made, 1), A).caps[0]["cost_per_s"] == 100.0


def excluded(made: Controller, reason: str = "maintenance: disks") -> None:
    made.set_excluded({"gold": reason} if reason else {})


def test_nobody_is_slowed_down_nor_alarmed_in_maintenance() -> None:
    made = world("enforce")
    excluded(made.controller)
    decided = run(made, 10)
    assert decided == []
    (row,) = made.controller.snapshot(0)["slas"]
    assert (row["state"], row["reason"]) == ("excluded", "maintenance: disks")
    excluded(made.controller, "")
    assert {e.kind for e in events_of(run(made, 3))} >= {"violation-opened", "throttle-set"}


def test_what_is_in_force_is_released_when_maintenance_begins() -> None:
    made = world("enforce")
    run(made, 4)
    excluded(made.controller)
    (released,) = events_of(run(made, 1), "throttle-released")
    assert released.details["ended"] == "victim-excluded"
    (closed,) = events_of(run(made, 25), "violation-closed")
    assert "nothing is promised at present: maintenance: disks" in closed.text


@pytest.mark.parametrize(
    "over", [{"least_iops": 200.0}, {"max_mean_bytes": 2048.0}, {"curve": (CurveStep(50, 12_000),)}]
)
def test_ios_that_the_promise_is_not_about_are_no_reason_to_act(over: dict[str, object]) -> None:
    made = Feeder(controller((promise(**over),), (volume_class(),), "enforce"), (A, ("gold", "greedy")))
    assert run(made, 6) == []
    state = made.controller.live[KEY].state
    assert state == ("out-of-curve" if "curve" in over else "not-applicable")


def test_a_hang_is_a_violation_however_few_the_ios() -> None:
    made = Feeder(controller((promise(least_iops=20.0),), mode="observe"), (A, ("gold",)))
    for _ in range(4):
        made.step((A, {"gold": (100, 2.0)}, 0), waiting={"gold": (1, 900.0)})
    kinds = []
    for _ in range(6):
        kinds += [e.kind for e in events_of(made.step((A, {"gold": (0, 1)}, 0), waiting={"gold": (1, 5e3)}))]
    assert "violation-opened" in kinds


def availability(**over: object) -> Feeder:
    made = promise(
        metric="availability", percentile=99.0, curve=(CurveStep(float("inf"), 5_000_000),), **over
    )
    return Feeder(controller((made,), (volume_class(),), "enforce"), (A, ("gold", "greedy")))


def test_availability_is_violated_by_an_outage_and_by_failures_and_not_by_slowness() -> None:
    made = availability()
    assert run(made, 6) == []
    assert made.controller.live[KEY].state == "ok"
    opened = []
    for second in range(9):
        waits = {"gold": (32, 900.0 + 1000 * second)}
        decided = made.step((A, {"gold": (0, 1), "greedy": GREEDY}, 0), waiting=waits)
        opened += [(second, e.text) for e in events_of(decided, "violation-opened")]
    ((second, text),) = opened
    assert second in (5, 6, 7)
    assert "s of 5 s allowed" in text
    made = availability()
    found = [
        e
        for _ in range(4)
        for e in events_of(made.step((A, {"gold": (100, 2.0)}, 0), failed={"gold": 2}), "violation-opened")
    ]
    assert "2.0% of the I/Os failed" in found[0].text
    assert not made.controller.loops.controls  # it asks control for nothing


def test_a_victim_that_is_only_observed_from_now_on_leaves_its_caps_to_the_others() -> None:
    made = world("enforce", "gold", "gold2")
    run(made, 3, "gold", "gold2")
    control = made.controller.loops.controls["disk"]
    control.victims.add(("gold2", "latency"))
    made.controller.set_agreement_modes({"gold": "observe"})
    decided = run(made, 1, "gold2")
    assert not events_of(decided, "throttle-released")
    assert {t.victim for t in made.controller.policy.layers["control"].values()} == {"gold2/latency"}
    assert (control.active, control.victims) == (True, {("gold2", "latency")})
    made.controller.set_agreement_modes({"gold": "observe", "gold2": "observe"})
    assert not control.active, "it believes in no caps that are not in force"
    (released,) = events_of(run(made, 1, "gold2"), "throttle-released")
    assert released.details["ended"] == "mode-observe"
