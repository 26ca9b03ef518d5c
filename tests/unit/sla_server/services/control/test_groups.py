"""Groups of volumes under one cap, through the controller: what is issued, divided, proved and ended."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL, hist_array
from pmdaemon.wire.histogram import DELAY
from pmdaemon.wire.messages.agent import GROUP_CAPS, CapSet
from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import CurveStep
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import RecordDecision, SetCaps
from sla_server.services.control.groups import Groups
from sla_server.services.control.targets import client_of, group_of, target_of, volume_of
from tests.support.worlds import (
    A,
    B,
    Feeder,
    caps_of,
    controller,
    cut,
    events_of,
    exports,
    promise,
    rows_of,
    streams,
    volume_class,
)

CAN = (GROUP_CAPS,)
WEIGHTS = {"v": 1.0, "w": 3.0}


def feeder(made: Controller | None = None, *gateways, features=CAN, mode="observe") -> Feeder:
    places = gateways or ((A, ("v", "w", "x")),)
    return Feeder(made or controller((), (), mode), *places, features=features)


def busy(fed: Feeder, gen: int = 0, gateway: str = A, **iops: int):
    return fed.step((gateway, {volume: (count, 1) for volume, count in iops.items()}, gen))


def set_group(fed: Feeder, name: str = "night", weights=WEIGHTS, throttle_id: str = "t1", **rates) -> None:
    rates = rates or {"ops_per_s": 200.0}
    fed.controller.manual_set(throttle_id, "", **rates, who="ann", reason="copy", group=name, weights=weights)


def sets(decisions) -> list[SetCaps]:
    return [each for each in decisions if isinstance(each, SetCaps)]


def test_a_group_is_a_target_without_volume_and_client():
    target = target_of("", group="night")
    assert (group_of(target), volume_of(target), client_of(target)) == ("night", "", "")
    assert group_of("v") == group_of("v/c") == ""


def test_a_group_is_issued_recorded_and_said_in_mode_observe_too():
    fed = feeder()
    busy(fed, v=100, w=100)
    set_group(fed, burst_s=2.0, bytes_per_s=4e6)
    found = busy(fed, v=100, w=100)
    caps = caps_of(found, A)
    rates = {"ops_per_s": None, "bytes_per_s": 4e6, "cost_per_s": None, "burst_s": 2.0}
    assert (caps.caps, caps.clients) == ([], [])
    assert caps.groups == [{"group": "night", "volumes": WEIGHTS, **rates}]
    sent = frame.decode(CapSet(caps.gen, 1, (), None, tuple(caps.groups)).encode())
    assert CapSet.parse(sent.header).volumes == {"v", "w"}
    (row,) = rows_of(found)
    assert (row["volume"], row["group_name"], json.loads(row["members"])) == ("", "night", WEIGHTS)
    assert (row["bytes_per_s"], row["burst_s"], row["backend"]) == (4e6, 2.0, "disk")
    (event,) = events_of(found)
    assert (event.kind, event.element, event.subject) == ("throttle-set", "group", "night")
    (decision,) = [each.row for each in found if isinstance(each, RecordDecision)]
    assert decision["volume"] == "group night"
    assert decision["figures"]["volumes"] == WEIGHTS


def test_its_life_until_release():
    fed = feeder()
    set_group(fed)
    gen = caps_of(busy(fed, v=100, w=300), A).gen
    fed.controller.caps_state(A, gen, "sent", "", fed.unix_us)
    assert rows_of(busy(fed, v=100, w=300))[0]["state"] == "sent"
    (row,) = rows_of(busy(fed, gen, v=100, w=300))
    assert row["state"] == "confirmed", "400 together are more than 200"
    (row,) = rows_of(busy(fed, gen, v=50, w=150))
    assert row["state"] == "seen", "the sum of both is what counts"
    assert fed.controller.manual_release(group="night", who="ann") == ["t1"]
    found = busy(fed, gen, v=50, w=150)
    assert caps_of(found, A).groups == []
    assert rows_of(found)[0]["state"] == "released"
    assert fed.controller.policy.groups.names() == []


def test_a_group_that_is_exceeded_together_is_not_effective():
    fed = feeder()
    set_group(fed)
    gen = caps_of(busy(fed, v=1, w=1), A).gen
    found = [d for _ in range(6) for d in busy(fed, gen, v=150, w=150)]
    (event,) = events_of(found, "throttle-not-effective")
    assert event.subject == "night"


def test_it_is_divided_between_gateways_by_use_and_by_weight():
    fed = feeder(None, (A, ("v",)), (B, ("w", "x")))
    set_group(fed, weights={"v": 1.0, "w": 2.0, "x": 1.0}, ops_per_s=400.0)
    found = fed.step((A, {"v": (0, 1)}, 0), (B, {"w": (0, 1)}, 0))
    (a,), (b,) = caps_of(found, A).groups, caps_of(found, B).groups
    assert (a["ops_per_s"], b["ops_per_s"]) == (100, 300), "without use by weight"
    assert (a["volumes"], b["volumes"]) == ({"v": 1.0}, {"w": 2.0, "x": 1.0})
    gens, sent = {g: caps_of(found, g).gen for g in (A, B)}, dict[str, float]()
    for _ in range(20):
        found = fed.step((A, {"v": (300, 1)}, gens[A]), (B, {"w": (100, 1)}, gens[B]))
        for each in sets(found):
            gens[each.gateway_id], sent[each.gateway_id] = each.gen, each.groups[0]["ops_per_s"]
    assert sent[A] == pytest.approx(400 * (0.8 * 0.75 + 0.2 * 0.25), rel=0.05)
    assert sum(sent.values()) == pytest.approx(400, rel=0.05)


def test_a_volume_through_two_gateways_counts_once():
    fed = feeder(None, (A, ("v",)), (B, ("v", "w")))
    set_group(fed, weights={"v": 2.0, "w": 1.0}, ops_per_s=300.0)
    found = fed.step((A, {"v": (0, 1)}, 0), (B, {"v": (0, 1)}, 0))
    assert [caps_of(found, g).groups[0]["ops_per_s"] for g in (A, B)] == [100, 200]


def test_a_group_of_the_same_name_is_replaced_also_at_the_same_rate():
    fed = feeder()
    set_group(fed)
    first = caps_of(busy(fed, v=10), A).gen
    busy(fed, first, v=10)
    set_group(fed, weights={"v": 1.0, "x": 1.0}, throttle_id="t2")
    found = busy(fed, first, v=10)
    (entry,) = caps_of(found, A).groups
    assert entry["volumes"] == {"v": 1.0, "x": 1.0}
    states = {row["throttle_id"]: row["state"] for row in rows_of(found)}
    assert states == {"t1": "released", "t2": "requested"}
    set_group(fed, weights={"v": 1.0, "x": 1.0}, throttle_id="t3")
    assert caps_of(busy(fed, first, v=10), A).groups == [entry]
    assert fed.controller.policy.groups.of_volume("w") == ""


def test_after_a_restart_it_is_believed_and_nothing_is_sent_again():
    fed = feeder()
    set_group(fed)
    gen = caps_of(busy(fed, v=10, w=10), A).gen
    (row,) = rows_of(busy(fed, gen, v=10, w=10))
    again = controller((), (), "observe")
    again.restore([{**row, "members": json.loads(row["members"])}])
    new = feeder(again)
    new.second = fed.second
    found = [d for _ in range(8) for d in busy(new, gen, v=10, w=10)]
    assert sets(found) == []
    (throttle,) = again.policy.throttles()
    assert (throttle.state, throttle.waiting, throttle.unseen) == ("seen", {}, set())
    new.controller.manual_release(group="night")
    assert caps_of(busy(new, gen, v=10, w=10), A).groups == []


def test_a_gateway_that_begins_to_carry_a_volume_of_it_is_sent_it():
    fed = feeder(None, (A, ("v",)))
    set_group(fed)
    gen = caps_of(busy(fed, v=10), A).gen
    busy(fed, gen, v=10)
    fed.controller.gateway_up(A, "A", exports("v", "w"), fed.now_ns)
    fed.controller.add_streams(A, streams(A, "v", "w"))
    assert caps_of(busy(fed, gen, v=10), A).groups[0]["volumes"] == WEIGHTS


def test_its_parts_are_worked_out_again_only_where_something_changed():
    fed = feeder(None, (A, ("v",)), (B, ("w",)), ("gw-c", ("z",)))
    set_group(fed)
    found = fed.step((A, {"v": (1, 1)}, 0), (B, {"w": (1, 1)}, 0))
    gens = {g: caps_of(found, g).gen for g in (A, B)}
    shares = fed.controller.policy.shares
    for _ in range(8):
        fed.step((A, {"v": (1, 1)}, gens[A]), (B, {"w": (1, 1)}, gens[B]))
    before = shares.worked_out
    fed.step(("gw-c", {"z": (1, 1)}, 0))
    assert shares.worked_out == before, "a cut of a gateway without a volume of it"
    fed.step((A, {"v": (1, 1)}, gens[A]))
    assert shares.worked_out == before + 1, "a member is used"
    fed.controller.gateway_lost(B, "gone", fed.now_ns)
    fed.step()
    assert shares.worked_out == before + 2, "a gateway of a member has gone"


def test_a_gateway_whose_volumes_leave_the_group_is_sent_none_of_it():
    fed = feeder(None, (A, ("v",)), (B, ("w",)))
    set_group(fed)
    found = fed.step((A, {"v": (1, 1)}, 0), (B, {"w": (1, 1)}, 0))
    gens = {g: caps_of(found, g).gen for g in (A, B)}
    fed.step((A, {"v": (1, 1)}, gens[A]), (B, {"w": (1, 1)}, gens[B]))
    set_group(fed, weights={"v": 1.0}, throttle_id="t2")
    found = fed.step((A, {"v": (1, 1)}, gens[A]), (B, {"w": (1, 1)}, gens[B]))
    assert caps_of(found, B).groups == []
    assert caps_of(found, A).groups[0]["ops_per_s"] == 200.0


def test_a_volume_that_a_gateway_refuses_leaves_its_part_of_the_group():
    fed = feeder()
    set_group(fed)
    gen = caps_of(busy(fed, v=10, w=10), A).gen
    busy(fed, gen, v=10, w=10)
    fed.controller.caps_state(A, gen, "confirmed", "", fed.unix_us, ("w",))
    assert caps_of(busy(fed, gen, v=10, w=10), A).groups[0]["volumes"] == {"v": 1.0}


def test_io_held_late_in_two_volumes_of_it_is_counted_once_each():
    fed = feeder()
    set_group(fed)
    fed.controller.policy.held_late({"v": (3, 900), "w": (4, 700)})
    (throttle,) = fed.controller.policy.throttles()
    assert (throttle.late_ios, throttle.longest_hold_us) == (7, 900)


def test_floors_that_are_promised_to_its_volumes_hold_together():
    gold = promise("v", curve=(CurveStep(400, 12_000),))
    made = controller((gold,), (volume_class("v", floor_iops=300.0),), "observe")
    fed = feeder(made)
    found = made.group_effect({"v": 1.0, "w": 1.0}, Rates(ops_per_s=100.0))
    assert (found.held.ops_per_s, found.is_lifted) == (300.0, True)
    (broken,) = found.broken
    assert broken.endswith("for v")
    set_group(fed, ops_per_s=100.0)
    assert caps_of(busy(fed, v=10), A).groups[0]["ops_per_s"] == 300.0
    fine = made.group_effect({"v": 5.0, "w": 1.0}, Rates(ops_per_s=1000.0))
    assert (fine.broken, fine.is_lifted) == ((), False)


def test_what_cannot_share_a_cap_is_said_with_what_to_do():
    made = controller((), (), "observe")
    fed = feeder(made)
    assert made.why_no_group_cap("night", WEIGHTS) is None
    set_group(fed)
    busy(fed, v=1)
    assert made.why_no_group_cap("night", {"v": 1.0, "x": 1.0}) is None, "it is replaced"
    code, problem, fix = made.why_no_group_cap("day", {"v": 1.0, "x": 1.0}) or (0, "", "")
    assert code == 409
    assert "'v' is in group 'night'" in problem
    assert "sla throttle release --group night" in fix
    made.gateway_up(B, "old", exports("y"), fed.now_ns)
    made.set_features(B, ("client-caps",))
    code, problem, _ = made.why_no_group_cap("day", {"y": 1.0}) or (0, "", "")
    assert (code, problem) == (422, "the agent of old, which has volume 'y', caps no groups")
    made.set_features(B, CAN)
    for source in ("cgroup", "qemu"):
        made.gateway_up(B, "host", [{**exports("z")[0], "source": source}], fed.now_ns)
        code, problem, _ = made.why_no_group_cap("day", {"z": 1.0}) or (0, "", "")
        assert code == 422
        assert "kernel or by QEMU" in problem


def test_how_long_it_held_ios_is_in_the_live_view():
    fed = feeder()
    set_group(fed)
    gen = caps_of(busy(fed, v=10, w=10), A).gen
    fed.second += 1
    made = cut(A, fed.second, {"v": (10, 1), "w": (30, 1)}, gen=gen)
    made.counters[COL["delay_sum_us"]] = (100_000, 0)
    hist = hist_array(np.array([0, 1]), np.array([DELAY + 30, DELAY]), np.array([10, 30]))
    made = replace(made, hist=hist)
    fed.controller.add_cut(made, fed.unix_us, 0, False, fed.now_ns)
    fed.controller.tick(fed.now_ns, fed.unix_us)
    (row,) = fed.controller.snapshot(fed.unix_us, 10)["throttles"]
    assert (row["group_name"], row["members"]) == ("night", WEIGHTS)
    assert row["mean_hold_us"] == pytest.approx(100_000 / 60, abs=1)
    assert row["worst_hold_us"] > 10_000


def test_parts_by_weight_are_shares_of_one():
    groups = Groups()
    assert groups.parts("night", {}) == {}
    groups.set("night", WEIGHTS)
    assert groups.of_volume("w") == "night"
    groups.remove("night")
    assert groups.weights("night") == {}
