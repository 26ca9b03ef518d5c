"""Caps of whole clients, through the controller: issued, divided, proved, followed to new volumes, ended."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pmdaemon.wire.cut import COL, hist_array
from pmdaemon.wire.histogram import DELAY
from pmdaemon.wire.messages.agent import CLIENT_CAPS, GROUP_CAPS, WHOLE_CLIENT_CAPS
from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import CurveStep
from sla_server.explanation.words import capped
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import RecordDecision, SetCaps
from sla_server.services.control.targets import (
    client_of,
    group_of,
    target_of,
    volume_of,
    whole_client_of,
)
from sla_server.services.control.throttle_index import MOST_SHOWN
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

CAN = (CLIENT_CAPS, GROUP_CAPS, WHOLE_CLIENT_CAPS)
USED = ("v/greedy", "w/greedy", "v/other", "x/other")


def feeder(made: Controller | None = None, *gateways, features=CAN) -> Feeder:
    return Feeder(made or controller((), (), "observe"), *(gateways or ((A, USED),)), features=features)


def busy(fed: Feeder, gen: int = 0, gateway: str = A, **iops: int):
    """I/Os by stream; ``v_greedy`` is client greedy of volume v."""
    return fed.step((gateway, {name.replace("_", "/"): (count, 1) for name, count in iops.items()}, gen))


def cap(fed: Feeder, throttle_id: str = "t1", client: str = "greedy", **rates) -> None:
    rates = rates or {"ops_per_s": 100.0}
    fed.controller.manual_set(throttle_id, "", **rates, who="ann", reason="copy", client=client)


def sets(decisions) -> list[SetCaps]:
    return [each for each in decisions if isinstance(each, SetCaps)]


def test_a_whole_client_is_a_target_without_volume_and_counts_as_a_group():
    target = target_of("", "greedy")
    assert (whole_client_of(target), volume_of(target), client_of(target)) == ("greedy", "", "")
    assert group_of(target) == "/greedy", "no group has such a name"
    assert not any(whole_client_of(each) for each in ("v", "v/greedy", "/night"))


def test_it_is_issued_recorded_and_said_in_mode_observe_too():
    fed = feeder()
    busy(fed, v_greedy=10)
    cap(fed, ops_per_s=100.0, burst_s=2.0)
    found = busy(fed, v_greedy=10)
    caps = caps_of(found, A)
    rates = {"ops_per_s": 100.0, "bytes_per_s": None, "cost_per_s": None, "burst_s": 2.0}
    assert caps.whole_clients == [{"client": "greedy", **rates}]
    assert (caps.caps, caps.clients, caps.groups) == ([], [], [])
    (row,) = rows_of(found)
    assert (row["volume"], row["client"], row["group_name"]) == ("", "greedy", "")
    assert json.loads(row["members"]) == {"v": 1.0, "w": 1.0}, "what it uses, and nothing of others"
    (event,) = events_of(found)
    assert (event.kind, event.element, event.subject) == ("throttle-set", "client", "greedy")
    (decision,) = [each.row for each in found if isinstance(each, RecordDecision)]
    assert decision["volume"] == "client greedy"
    assert decision["figures"]["client"] == "greedy"
    assert capped(decision) == capped(row) == "client greedy over all its volumes"


def test_its_life_until_release_and_what_proves_it_is_the_sum_over_its_volumes():
    fed = feeder()
    cap(fed)
    gen = caps_of(busy(fed, v_greedy=100), A).gen
    (row,) = rows_of(busy(fed, gen, v_greedy=90, w_greedy=90, v_other=500))
    assert row["state"] == "confirmed", "180 together are more than 100"
    (row,) = rows_of(busy(fed, gen, v_greedy=60, w_greedy=40, v_other=500))
    assert row["state"] == "seen", "other clients do not count"
    assert fed.controller.manual_release(volume="v") == [], "it is not a throttle of its volume"
    assert fed.controller.manual_release(client="greedy", who="ann") == ["t1"]
    found = busy(fed, gen, v_greedy=10)
    assert caps_of(found, A).whole_clients == []
    assert rows_of(found)[0]["state"] == "released"
    assert fed.controller.policy.groups.weights("/greedy") == {}


def test_one_that_is_exceeded_together_is_not_effective():
    fed = feeder()
    cap(fed)
    gen = caps_of(busy(fed, v_greedy=1), A).gen
    found = [d for _ in range(6) for d in busy(fed, gen, v_greedy=80, w_greedy=80)]
    (event,) = events_of(found, "throttle-not-effective")
    assert (event.element, event.subject) == ("client", "greedy")


def test_it_ends_by_itself():
    fed = feeder()
    fed.controller.manual_set(
        "t1", "", ops_per_s=5.0, client="greedy", until_unix_us=fed.unix_us + 3_000_000, reason="x"
    )
    gen = caps_of(busy(fed, v_greedy=1), A).gen
    found = [d for _ in range(4) for d in busy(fed, gen, v_greedy=1)]
    assert sets(found)[-1].whole_clients == []
    assert rows_of(found)[-1]["state"] == "expired"


def test_a_second_one_replaces_the_first_and_is_confirmed_for_itself():
    fed = feeder()
    cap(fed)
    gen = caps_of(busy(fed, v_greedy=1), A).gen
    busy(fed, gen, v_greedy=1)
    cap(fed, "t2", ops_per_s=50.0)
    found = busy(fed, gen, v_greedy=1)
    assert caps_of(found, A).whole_clients[0]["ops_per_s"] == 50.0
    states = {row["throttle_id"]: row["state"] for row in rows_of(found)}
    assert states == {"t1": "released", "t2": "requested"}
    rows = rows_of(busy(fed, caps_of(found, A).gen, v_greedy=1))
    assert [row["state"] for row in rows] == ["seen"]


def test_it_stands_beside_a_group_of_its_volumes_and_a_cap_of_it_on_one():
    fed = feeder()
    cap(fed)
    fed.controller.manual_set("t2", "v", ops_per_s=10.0, client="greedy", reason="x")
    weights = {"v": 1.0, "w": 1.0}
    fed.controller.manual_set("t3", "", ops_per_s=70.0, group="night", weights=weights, reason="x")
    caps = caps_of(busy(fed, v_greedy=1), A)
    assert [each["ops_per_s"] for each in (*caps.whole_clients, *caps.clients, *caps.groups)] == [100, 10, 70]
    assert fed.controller.policy.groups.names() == ["night"]
    assert fed.controller.policy.groups.of_volume("v") == "night"
    assert fed.controller.manual_release(client="greedy") == ["t1"]


def test_it_is_divided_between_the_gateways_that_it_uses():
    fed = feeder(None, (A, ("v/greedy",)), (B, ("w/greedy",)), ("gw-c", ("v/other", "z/other")))
    cap(fed, ops_per_s=400.0)
    found = fed.step(
        (A, {"v/greedy": (0, 1)}, 0), (B, {"w/greedy": (0, 1)}, 0), ("gw-c", {"z/other": (9, 1)}, 0)
    )
    assert {each.gateway_id for each in sets(found)} == {A, B}, "not where it was never seen"
    assert [caps_of(found, g).whole_clients[0]["ops_per_s"] for g in (A, B)] == [200, 200]
    gens, sent = {g: caps_of(found, g).gen for g in (A, B)}, dict[str, float]()
    for _ in range(20):
        found = fed.step((A, {"v/greedy": (300, 1)}, gens[A]), (B, {"w/greedy": (100, 1)}, gens[B]))
        for each in sets(found):
            gens[each.gateway_id] = each.gen
            sent[each.gateway_id] = each.whole_clients[0]["ops_per_s"]
    assert sent[A] == pytest.approx(400 * (0.8 * 0.75 + 0.2 * 0.5), rel=0.05)
    assert sum(sent.values()) == pytest.approx(400, rel=0.05)


def test_it_follows_the_client_to_a_new_volume_and_a_new_gateway():
    fed = feeder(None, (A, ("v/greedy",)), (B, ("z/other",)))
    cap(fed)
    gen = caps_of(busy(fed, v_greedy=10), A).gen
    busy(fed, gen, v_greedy=10)
    fed.controller.add_streams(A, streams(A, "x/greedy"))
    found = busy(fed, gen, v_greedy=10, x_greedy=10)
    (row,) = rows_of(found)
    assert json.loads(row["members"]) == {"v": 1.0, "x": 1.0}
    assert sets(found) == [], "the gateway holds it for any volume"
    fed.controller.add_streams(B, streams(B, "z/greedy"))
    found = fed.step((A, {"v/greedy": (10, 1)}, gen), (B, {"z/greedy": (10, 1)}, 0))
    assert caps_of(found, B).whole_clients[0]["client"] == "greedy"


def test_one_that_uses_more_volumes_than_its_row_names_is_capped_at_a_new_gateway_too():
    used = tuple(f"v{number}/greedy" for number in range(MOST_SHOWN))
    fed = feeder(None, (A, used))
    busy(fed, v0_greedy=100)
    cap(fed)
    assert len(json.loads(rows_of(busy(fed, v0_greedy=100))[0]["members"])) == MOST_SHOWN
    fed.controller.set_features(B, CAN)
    fed.controller.gateway_up(B, "b", exports("y", "z"), fed.now_ns)
    fed.controller.add_streams(B, streams(B, "y/greedy", "z/greedy"))
    found = busy(fed, gateway=B, y_greedy=10)
    assert [each["client"] for each in caps_of(found, B).whole_clients] == ["greedy"]
    (row,) = rows_of(found)
    assert len(json.loads(row["members"])) == MOST_SHOWN + 1, "one more finds the gateway"


def test_after_a_restart_it_is_believed_and_nothing_is_sent_again():
    fed = feeder()
    cap(fed)
    gen = caps_of(busy(fed, v_greedy=10), A).gen
    (row,) = rows_of(busy(fed, gen, v_greedy=10))
    again = controller((), (), "observe")
    again.restore([{**row, "members": json.loads(row["members"])}])
    new = feeder(again)
    new.second = fed.second
    found = [d for _ in range(8) for d in busy(new, gen, v_greedy=10, w_greedy=10)]
    assert sets(found) == []
    (throttle,) = again.policy.throttles()
    assert (throttle.state, throttle.waiting, throttle.unseen) == ("seen", {}, set())
    new.controller.manual_release(client="greedy")
    assert caps_of(busy(new, gen, v_greedy=10), A).whole_clients == []


def test_floors_that_are_promised_to_it_hold_together():
    gold = promise("v", curve=(CurveStep(400, 12_000),), clients=("greedy",))
    classes = (volume_class("v", floor_iops=300.0, clients=("greedy",)),)
    fed = feeder(controller((gold,), classes, "observe"))
    found = fed.controller.whole_clients.effect("greedy", Rates(ops_per_s=100.0))
    assert (found.held.ops_per_s, found.is_lifted) == (300.0, True)
    (broken,) = found.broken
    assert broken.endswith("for v")
    cap(fed)
    assert caps_of(busy(fed, v_greedy=10), A).whole_clients[0]["ops_per_s"] == 300.0
    fine = fed.controller.whole_clients.effect("greedy", Rates(ops_per_s=1000.0))
    assert (fine.broken, fine.is_lifted) == ((), False)
    assert fed.controller.whole_clients.effect("other", Rates(ops_per_s=5.0)).broken == ()


def test_what_cannot_be_held_is_said_with_what_to_do():
    fed = feeder(None, (A, ("v/greedy",)), (B, ("w/greedy",)))
    why = fed.controller.whole_clients.why_no_cap
    assert why("greedy") is None
    code, problem, _ = why("nobody") or (0, "", "")
    assert (code, problem) == (404, "no client 'nobody' is known")
    fed.controller.set_features(B, (CLIENT_CAPS, GROUP_CAPS))
    code, problem, fix = why("greedy") or (0, "", "")
    assert code == 422
    assert problem == f"the agent of {B[:4]}, which client 'greedy' uses, caps no clients over all volumes"
    assert "sla throttle set VOLUME --client greedy" in fix
    fed.controller.set_features(B, CAN)
    for source in ("cgroup", "qemu", "host"):
        fed.controller.gateway_up(B, "host", [{**exports("w")[0], "source": source}], fed.now_ns)
        code, problem, _ = why("greedy") or (0, "", "")
        assert (code, "volume w, where no data plane" in problem) == (422, True)
    fed.controller.gateway_lost(B, "gone", fed.now_ns)
    assert why("greedy") is None, "what does not answer refuses nothing"


def test_an_agent_of_before_is_sent_none_of_it():
    fed = feeder(None, (A, ("v/greedy",)), (B, ("w/greedy",)))
    cap(fed)
    found = fed.step((A, {"v/greedy": (1, 1)}, 0), (B, {"w/greedy": (1, 1)}, 0))
    gens = {g: caps_of(found, g).gen for g in (A, B)}
    fed.controller.set_features(B, (CLIENT_CAPS, GROUP_CAPS))
    fed.controller.gateway_up(B, "old", exports("w"), fed.now_ns)
    found = fed.step((A, {"v/greedy": (1, 1)}, gens[A]), (B, {"w/greedy": (1, 1)}, gens[B]))
    assert caps_of(found, B).whole_clients == []
    assert fed.controller.policy.shares.at(A)["//greedy"].ops_per_s == 100.0, "all of it is there"


def test_how_long_it_held_ios_is_in_the_live_view():
    fed = feeder()
    cap(fed)
    gen = caps_of(busy(fed, v_greedy=10), A).gen
    fed.second += 1
    made = cut(A, fed.second, {"v/greedy": (10, 1), "w/greedy": (30, 1), "v/other": (50, 1)}, gen=gen)
    made.counters[COL["delay_sum_us"]] = (100_000, 60_000, 9_000_000)
    hist = hist_array(np.array([0, 2]), np.array([DELAY + 30, DELAY + 60]), np.array([10, 50]))
    fed.controller.add_cut(replace(made, hist=hist), fed.unix_us, 0, False, fed.now_ns)
    fed.controller.policy.held_late({"w": (3, 900)})
    fed.controller.tick(fed.now_ns, fed.unix_us)
    (row,) = fed.controller.snapshot(fed.unix_us, 10)["throttles"]
    assert (row["volume"], row["client"], row["members"]) == ("", "greedy", {"v": 1.0, "w": 1.0})
    assert (row["late_ios"], row["longest_hold_us"]) == (3, 900)
    assert row["mean_hold_us"] == pytest.approx(160_000 / 50, abs=1), (
        "of both volumes, not of the other client"
    )
    assert row["worst_hold_us"] > 0
