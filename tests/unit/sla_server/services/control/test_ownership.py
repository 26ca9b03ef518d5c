"""A volume that is a gateway's no more (``Controller.forget_volumes``), and what a false gateway can do."""

from __future__ import annotations

from typing import Any

from pmdaemon.wire.cut import COL
from sla_server.agreements.promise import Priority
from sla_server.services.control.decisions import SetCaps
from sla_server.services.volume_gate import VolumeGate
from tests.support.worlds import KEY, A, B, Feeder, caps_of, controller, cut, exports, streams, volume_class

C = "c0c0c0c0-2222-3333-4444-555555555555"
QUICK, SLOW = (100, 2.0), (100, 60.0)
BOTH = [volume_class(), volume_class("batch", Priority.BEST_EFFORT)]


def caps(decisions: list[Any]) -> list[SetCaps]:
    return [each for each in decisions if isinstance(each, SetCaps)]


def test_what_it_says_of_the_volume_changes_nothing_any_more() -> None:
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("gold", "batch")), (B, ("gold",)))
    made.forget_volumes(B, {"gold"})
    for _ in range(10):
        decisions = feeder.step((A, {"gold": QUICK, "batch": QUICK}, 0), (B, {"gold": SLOW}, 0))
        assert decisions == []
    assert made.live[KEY].state == "ok"
    assert made.tables[B].unknown_rows == 10
    [row] = [row for row in made.snapshot(feeder.unix_us)["volumes"] if row["volume"] == "gold"]
    assert row["gateways"] == [A]


def test_while_it_carries_the_volume_the_same_cuts_break_the_promise() -> None:
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("gold", "batch")), (B, ("gold",)))
    found = [
        each
        for _ in range(10)
        for each in feeder.step((A, {"gold": QUICK, "batch": (1000, 2.0)}, 0), (B, {"gold": SLOW}, 0))
    ]
    assert made.live[KEY].state == "violating"
    assert caps(found)


def test_a_promise_without_any_stream_left_has_no_data() -> None:
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("gold",)), (B, ("batch",)))
    for _ in range(6):
        feeder.step((A, {"gold": QUICK}, 0), (B, {"batch": QUICK}, 0))
    assert made.live[KEY].state == "ok"
    made.forget_volumes(A, {"gold"})
    for _ in range(2):
        feeder.step((A, {"gold": SLOW}, 0), (B, {"batch": QUICK}, 0))
    assert made.live[KEY].state == "no-data"
    assert "gold" not in made.inventory.volumes()
    made.snapshot(feeder.unix_us)


def test_approved_again_it_counts_again() -> None:
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("gold", "batch")))
    for _ in range(4):
        feeder.step((A, {"gold": QUICK, "batch": QUICK}, 0))
    made.forget_volumes(A, {"gold"})
    feeder.step((A, {"gold": QUICK, "batch": QUICK}, 0))
    made.gateway_up(A, "A", exports("gold", "batch"), feeder.now_ns)
    made.add_streams(A, streams(A, "gold"))
    for _ in range(6):
        feeder.step((A, {"gold": QUICK, "batch": QUICK}, 0))
    assert made.live[KEY].state == "ok"
    rates = {row["volume"]: row["iops"] for row in made.snapshot(feeder.unix_us)["volumes"]}
    assert rates == {"gold": 100, "batch": 100}


def test_its_caps_are_taken_back() -> None:
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("batch", "other")), (B, ("batch",)))
    made.manual_set("t-1", "batch", ops_per_s=100.0)
    decisions = feeder.step((A, {"batch": QUICK, "other": QUICK}, 0), (B, {"batch": QUICK}, 0))
    assert {each.gateway_id for each in caps(decisions)} == {A, B}
    made.forget_volumes(B, {"batch"})
    gen = caps_of(decisions, A).gen
    decisions = feeder.step((A, {"batch": QUICK}, gen))
    assert caps_of(decisions, B).caps == []
    found = [each for _ in range(8) for each in caps(feeder.step((A, {"batch": QUICK}, gen)))]
    assert {each.gateway_id for each in found} == {A}
    assert [(cap["volume"], cap["ops_per_s"]) for cap in found[0].caps] == [("batch", 100.0)]


def test_promises_applied_later_do_not_find_it() -> None:
    made = controller(promises=[], classes=BOTH)
    feeder = Feeder(made, (A, ("gold",)), (B, ("gold",)))
    made.forget_volumes(B, {"gold"})
    again = controller().scopes  # the promise as others have it
    made.set_agreements(list(again._promises.values()), BOTH)
    scope = made.scopes.over_all(KEY)
    assert scope is not None
    assert set(scope.parts) == {A}
    made.forget_volumes(B, {"gold", "never seen"})
    feeder.step((A, {"gold": QUICK}, 0))


def throttled(mode: str) -> set[str]:
    """Volumes that are slowed down while C says that gold is 60 ms slow on the disk of batch."""
    made, gate = controller(classes=BOTH), VolumeGate(mode)  # type: ignore[arg-type]
    feeder = Feeder(made)
    for gateway, volumes in ((A, ("gold",)), (B, ("batch",)), (C, ("gold",))):
        change = gate.up(gateway, gateway[:4], exports(*volumes), None, feeder.unix_us)
        made.gateway_up(gateway, gateway[:4], change.exports or [], feeder.now_ns)
        made.add_streams(gateway, gate.streams(gateway, streams(gateway, *volumes), feeder.unix_us))
    found = [
        each
        for _ in range(12)
        for each in feeder.step(
            (A, {"gold": QUICK}, 0), (B, {"batch": (1000, 2.0)}, 0), (C, {"gold": (400, 60.0)}, 0)
        )
    ]
    return {cap["volume"] for each in caps(found) for cap in each.caps}


def test_a_false_gateway_has_others_throttled_only_while_volumes_are_open() -> None:
    assert throttled("open") == {"batch"}
    assert throttled("first") == set()


def test_a_gateway_without_a_table_has_nothing_to_forget() -> None:
    made = controller()
    made.forget_volumes(A, {"gold"})
    made.add_cut(cut(A, 1, {"gold": QUICK}), 0, 0, False, 1)
    assert made.tick(1, 1) == []


def test_what_it_says_of_late_ios_is_about_its_own_volumes_alone() -> None:
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("batch",)), (B, ("other",)))
    made.manual_set("t-1", "batch", ops_per_s=100.0)
    feeder.step((A, {"batch": QUICK}, 0))
    for gateway in (A, B):
        said = cut(gateway, feeder.second + 1, {})
        said.extra["late"] = {"batch": [3, 9_000_000]}
        made.add_cut(said, feeder.unix_us, 0, False, feeder.now_ns)
    feeder.step()
    [throttle] = made.policy.throttles()
    assert throttle.late_ios == 3


def test_rows_under_numbers_that_it_did_not_announce_count_for_none() -> None:
    """Neither those of another gateway's streams nor those of none, also if these are announced later."""
    made = controller(classes=BOTH)
    feeder = Feeder(made, (A, ("gold",)), (B, ("batch",)))
    for _ in range(6):
        feeder.step((A, {"gold": QUICK}, 0))
        stray = cut(B, feeder.second, {"gold": SLOW, "later": SLOW, "batch": QUICK})
        ids = [streams(A, "gold")[0]["id"], streams(A, "later")[0]["id"], streams(B, "batch")[0]["id"]]
        stray.counters[COL["stream_id"]] = ids
        made.add_cut(stray, feeder.unix_us, 0, False, feeder.now_ns)
        made.tick(feeder.now_ns, feeder.unix_us)
    assert made.live[KEY].state == "ok"
    assert made.tables[B].unknown_rows == 12
    made.add_streams(A, streams(A, "later"))
    rates = {row["volume"]: row["iops"] for row in made.snapshot(feeder.unix_us)["volumes"]}
    assert rates == {"gold": 100, "batch": 100, "later": 0}
