"""The core: messages in, messages out, with everything around it faked."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from pmdaemon.wire import cut as cuts
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.space import GatewaySpace, Space
from pmdaemon.wire.rates import Rates
from sla_server.events.routing import RoutingFile, RoutingReader
from sla_server.services import core
from sla_server.services.catalog import Catalog
from sla_server.services.control.decisions import RaiseEvent, RecordThrottle, SetCaps
from sla_server.services.judging.judge import Judgement
from sla_server.services.rows import event_row
from sla_server.services.sql_worker import PublishedPolicy, SqlState
from sla_server.services.startup import KnownGateway, Start
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.manager import ServedVolumes, StorageManager
from sla_server.storage_resources.pools import SERVER, StoredPools
from tests.support.agreements import calendar_text, maintenance_text, simple
from tests.support.services import GATEWAY, START_US, Bench

EXPORT = {"volume": "vol-1", "backend": "b", "size_bytes": 1, "read_only": False, "source": "nbd"}
STREAM = {"id": 7, "volume": "vol-2", "client": "c", "backend": "b"}


def gateway(state: str = "up", **keys: Any) -> dict[str, Any]:
    return {
        "gw": GATEWAY, "name": "host-1", "state": state, "reason": "why", "address": "", "software": "",
        "ep": 5, "at_us": START_US, "offset_us": 0, "exports": [EXPORT], "dropped": 0, **keys,
    }  # fmt: skip


def a_cut(seq: int) -> bytes:
    empty_hist, empty_missed = np.zeros(0, cuts.HIST_DTYPE), np.zeros(0, cuts.MISSED_DTYPE)
    return cuts.encode(
        cuts.Cut(GATEWAY, 5, seq, START_US, 1_000_000, 0, 0, cuts.rows_array([]), empty_hist, empty_missed)
    )


def test_gateways_streams_and_cuts_reach_the_brain() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.message(Kind.STREAMS_SEEN, {"gw": GATEWAY, "streams": [STREAM]})
    blob = a_cut(1) + a_cut(2)
    header = {"pair": 0, "n": 2, "recv_us": [10, 20], "offset_us": [1, 2], "live": [False, True]}
    bench.message(Kind.CUTS, header, blob)
    bench.message(Kind.CAPS_STATE, {"gw": GATEWAY, "gen": 3, "state": "sent", "reason": "", "at_us": 77})
    bench.message(Kind.GATEWAY, gateway("lost"))
    now_ns = bench.clock.monotonic_ns()
    assert ("gateway_up", (GATEWAY, "host-1", [EXPORT], now_ns)) in bench.controller.calls
    assert ("add_streams", (GATEWAY, [STREAM])) in bench.controller.calls
    taken = [(args[0].seq, *args[1:4]) for name, args in bench.controller.calls if name == "add_cut"]
    assert taken == [(1, 10, 1, False), (2, 20, 2, True)]
    assert ("caps_state", (GATEWAY, 3, "sent", "", 77, ())) in bench.controller.calls
    assert ("gateway_lost", (GATEWAY, "why", now_ns)) in bench.controller.calls
    assert bench.core.bad_frames == 0


def test_a_listed_gateway_is_a_row_and_an_audit_row_and_answered_when_durable() -> None:
    bench = Bench()
    body = {"address": "10.0.0.5:7412", "name": "host-5", "is_listed": True}
    bench.request("gateway_list", body)
    assert bench.answers() == []
    [listed, audit] = bench.confirm()
    assert listed == (
        "gateway_list",
        {"address": "10.0.0.5:7412", "name": "host-5", "is_enabled": True},
    )
    assert (audit[1]["action"], audit[1]["subject"]) == ("gateway-listed", "10.0.0.5:7412")
    assert [(answer["code"], answer["body"]) for answer in bench.answers()] == [(200, body)]
    bench.request("gateway_list", body | {"is_listed": False})
    assert bench.confirm()[0][1]["is_enabled"] is False


@pytest.mark.parametrize(
    ("kind", "header", "blob"),
    [
        (
            Kind.CUTS,
            {"pair": 0, "n": 2, "recv_us": [1, 1], "offset_us": [1, 1], "live": [False, False]},
            a_cut(1),
        ),
        (Kind.CUTS, {"pair": 0, "n": 1, "recv_us": [], "offset_us": [], "live": []}, a_cut(1)),
        (Kind.CUTS, {"pair": 0, "n": 1, "recv_us": [1], "offset_us": [1], "live": [False]}, b"\0" * 64),
        (Kind.GATEWAY, {"gw": GATEWAY}, b""),
        (Kind.HELLO, {}, b""),
    ],
)
def test_what_cannot_be_read_is_counted_and_harms_nothing(
    kind: Kind, header: dict[str, Any], blob: bytes
) -> None:
    bench = Bench()
    bench.message(kind, header, blob)
    bench.core.on_message("pair-0", b"\1\2\3", 0, 0)
    assert bench.core.bad_frames == 2
    bench.message(Kind.GATEWAY, gateway())
    assert "gateway_up" in bench.controller.names()


def test_a_cut_with_bad_columns_is_left_out_and_those_beside_it_are_not() -> None:
    bench = Bench()
    hist = np.array([(1, 0, 5)], cuts.HIST_DTYPE)  # a row it does not have
    bad = cuts.Cut(
        GATEWAY, 5, 2, START_US, 1_000_000, 0, 0, cuts.rows_array([]), hist, np.zeros(0, cuts.MISSED_DTYPE)
    )
    header = {"pair": 0, "n": 3, "recv_us": [1] * 3, "offset_us": [0] * 3, "live": [False] * 3}
    bench.message(Kind.CUTS, header, a_cut(1) + cuts.encode(bad) + a_cut(3))
    assert [args[0].seq for name, args in bench.controller.calls if name == "add_cut"] == [1, 3]
    assert bench.core.bad_frames == 1


def test_of_a_thousand_bad_cuts_some_are_in_the_log_and_all_are_counted() -> None:
    """An agent gone wrong answers each poll with as many; a line for each would fill the disk."""
    bench = Bench()
    hist = np.array([(1, 0, 5)], cuts.HIST_DTYPE)
    rows, missed = cuts.rows_array([]), np.zeros(0, cuts.MISSED_DTYPE)
    bad = [
        cuts.encode(cuts.Cut(GATEWAY, 5, seq, START_US, 1_000_000, 0, 0, rows, hist, missed))
        for seq in range(1, 1001)
    ]
    each = {"recv_us": [1] * 500, "offset_us": [0] * 500, "live": [False] * 500}
    with capture_logs() as logged:
        for half in (bad[:500], bad[500:]):
            bench.message(Kind.CUTS, {"pair": 0, "n": 500, **each}, b"".join(half))
        bench.clock.advance(1)
        bench.message(
            Kind.CUTS, {"pair": 0, "n": 1, "recv_us": [1], "offset_us": [0], "live": [False]}, bad[0]
        )
    assert bench.core.bad_frames == 1001
    events = [line["event"] for line in logged if line["event"] in ("bad-message", "log-suppressed")]
    assert events == ["bad-message"] * 10 + ["log-suppressed", "bad-message"]


def test_a_lease_goes_out_once_a_second_to_every_pair() -> None:
    bench = Bench()
    for _ in range(8):
        bench.tick(0.25)
    leases = bench.main.take_posted(Kind.LEASE)
    assert [to for to, _ in leases] == ["pair-0"] * 2
    bench.message(Kind.GATEWAY, gateway(), sender="pair-1")
    bench.tick(1)
    assert {to for to, _ in bench.main.take_posted(Kind.LEASE)} == {"pair-0", "pair-1"}


def test_caps_go_to_the_gateways_pair_and_throttles_to_dbmanager() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway(), sender="pair-3")
    cap = {"volume": "vol-1", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 9.0}
    bench.controller.decisions = [
        SetCaps(GATEWAY, 4, 30_000_000, [cap]),
        RecordThrottle({"throttle_id": "t", "volume": "vol-1"}),
        RaiseEvent("throttle-set", "info", "volume", "vol-1", "slowed down", {"c": 9}),
    ]
    bench.tick()
    assert bench.main.take_posted(Kind.SET_CAPS) == [
        ("pair-3", {"gw": GATEWAY, "gen": 4, "lease_us": 30_000_000, "caps": [cap]})
    ]
    rows = bench.records()
    assert ("throttles", {"throttle_id": "t", "volume": "vol-1"}) in rows
    (event,) = [row for table, row in rows if table == "events"]
    assert (event["kind"], event["details"], event["at_us"]) == ("throttle-set", {"c": 9}, START_US)


def test_fitted_costs_are_posted_to_gateways_that_take_them() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway(features=["fitted-costs"]))
    bench.tick()
    assert bench.main.take_posted(Kind.SET_COSTS) == []
    found = policy(4)
    assert found.policy is not None
    costs = {"b": (2.0, 4000.0), "other": (1.0, 1000.0)}
    bench.sql_worker.found.put(replace(found, policy=replace(found.policy, costs=costs)))
    bench.tick()
    ((to, header),) = bench.main.take_posted(Kind.SET_COSTS)
    assert (to, header["gw"], header["version"]) == ("pair-0", GATEWAY, 4)
    assert header["backends"] == [{"backend": "b", "cost_write": 2.0, "cost_bytes": 4000.0}]
    bench.message(Kind.GATEWAY, gateway("lost"))
    bench.message(Kind.GATEWAY, gateway(), sender="pair-2")
    bench.tick()
    assert bench.main.take_posted(Kind.SET_COSTS) == [], "it came back as a release of before"


def test_caps_of_clients_are_posted_beside_those_of_volumes() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway(features=["client-caps"]))
    names = bench.controller.names()
    assert names.index("set_features") < names.index("gateway_up")
    assert bench.controller.last("set_features") == (GATEWAY, ("client-caps",))
    cap = {"volume": "vol-1", "client": "c", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 9.0}
    bench.controller.decisions = [SetCaps(GATEWAY, 4, 30_000_000, [], [cap])]
    bench.tick()
    (_, header), *_ = bench.main.take_posted(Kind.SET_CAPS)
    assert (header["caps"], header["clients"]) == ([], [cap])


def test_hundreds_of_caps_with_long_names_are_one_message_and_what_is_longer_ends_nothing() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway(features=["client-caps"]))
    rates = {"ops_per_s": None, "bytes_per_s": None, "cost_per_s": 53.125}
    for gen in (800, 8000):
        caps = [{"volume": "vol-1", "client": f"c{n}" + "x" * 120, **rates} for n in range(gen)]
        bench.controller.decisions = [SetCaps(GATEWAY, gen, 30_000_000, [], caps)]
        bench.tick()
    ((_, header),) = bench.main.take_posted(Kind.SET_CAPS)
    assert (header["gen"], len(header["clients"])) == (800, 800)


def test_an_answer_that_is_too_long_says_so() -> None:
    bench = Bench()
    for length in (100_000, 600_000):
        bench.core.respond(f"r{length}", 200, {"text": "x" * length})
        bench.tick()
    answers = {header["req"]: header for _, header in bench.app.take_posted(Kind.RESPONSE)}
    assert len(answers["r100000"]["body"]["text"]) == 100_000
    assert answers["r600000"]["code"] == 500
    assert "too long" in answers["r600000"]["body"]["errors"][0]["problem"]


def test_a_gateway_that_comes_is_told_its_thresholds_through_its_pair_each_time() -> None:
    bench = Bench()
    bench.tick()
    assert bench.main.take_posted(Kind.SET_THRESHOLDS) == []
    for sender in ("pair-0", "pair-2"):
        bench.message(Kind.GATEWAY, gateway(), sender=sender)
        bench.tick()
        ((to, header),) = bench.main.take_posted(Kind.SET_THRESHOLDS)
        assert (to, header["gw"], header["entries"]) == (sender, GATEWAY, [])
    bench.tick()
    bench.message(Kind.GATEWAY, gateway("stalled"))
    bench.tick()
    assert bench.main.take_posted(Kind.SET_THRESHOLDS) == []


def test_a_lease_says_which_services_it_is_so_that_gateways_are_announced_to_it() -> None:
    first, second = Bench(), Bench()
    second.clock.advance(5)
    again = Bench()
    for bench in (first, again):
        bench.tick(1)
    assert first.main.take_posted(Kind.LEASE) == [("pair-0", {"inc": START_US})]


def test_thresholds_that_find_no_room_are_an_event() -> None:
    bench = Bench()
    names = [f"volume-{'x' * 100}-{number}" for number in range(200)]
    applied(bench, simple(volumes='"volume-*"') + "---\n" + simple("two", volumes='"volume-*"', value_ms=3))
    bench.confirm()
    bench.message(Kind.GATEWAY, gateway(exports=[{**EXPORT, "volume": name} for name in names]))
    bench.tick()
    bench.tick()
    ((_, header),) = bench.main.take_posted(Kind.SET_THRESHOLDS)
    (event,) = [row for table, row in bench.records() if row.get("kind") == "thresholds-left-out"]
    assert len(header["entries"]) + event["details"]["left_out"] == 400
    assert event["details"]["left_out"] > 0


def test_an_agents_alert_becomes_an_event_once() -> None:
    bench = Bench()
    alert = {
        "gw": GATEWAY,
        "kind": "plane-died",
        "severity": "critical",
        "text": "nbd-0",
        "at_us": 5,
        "details": {},
    }
    bench.message(Kind.GATEWAY_ALERT, alert)
    bench.message(Kind.GATEWAY, gateway())
    bench.message(Kind.GATEWAY_ALERT, alert)
    bench.tick()
    events = [row for table, row in bench.records() if table == "events"]
    assert len({row["event_id"] for row in events}) == 1
    assert [row["subject"] for row in events] == [GATEWAY, "host-1"]
    assert (events[1]["text"], events[1]["details"]) == ("gateway host-1: nbd-0", {"gateway_id": GATEWAY})


def test_an_alert_that_comes_first_after_a_restart_bears_the_stored_name() -> None:
    bench = Bench(Start(awaited={GATEWAY: "host-1"}))
    alert = {"gw": GATEWAY, "kind": "plane-back", "severity": "info", "text": "nbd-0", "at_us": 5}
    bench.message(Kind.GATEWAY_ALERT, alert)
    bench.tick()
    assert [row["subject"] for table, row in bench.records() if table == "events"] == ["host-1"]


def applied(bench: Bench, text: str, req: str = "r1", **keys: Any) -> None:
    bench.request("apply", {"documents": text, **keys}, req)


def test_apply_is_in_force_and_answered_when_it_is_durable() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    bench.main.posted.clear()
    applied(bench, simple())
    assert bench.answers() == []
    assert bench.sql_worker.catalog == Catalog()
    rows = bench.confirm()
    assert {"agreements", "audit", "events"} == {table for table, _ in rows}
    (answer,) = bench.answers()
    assert answer == {
        "req": "r1", "ok": True, "code": 200,
        "body": {"applied": [{"name": "gold", "version": 1, "changed": True, "line": 1}], "warnings": []},
    }  # fmt: skip
    ((_, thresholds),) = bench.main.take_posted(Kind.SET_THRESHOLDS)
    assert thresholds["entries"] == [{"volume": "vol-1", "client": "*", "io": "any", "threshold_us": 12_000}]
    assert [promise.key for promise in bench.controller.last("set_agreements")[0]] == [("gold", "latency")]
    assert bench.sql_worker.catalog == bench.core.changes.catalog


def test_a_text_made_from_a_version_that_others_replaced_is_refused_also_when_it_is_tried() -> None:
    bench = Bench()
    texts = [simple(value_ms=12.0 + at) for at in range(3)]
    applied(bench, texts[0], "r0", based_on={"gold": 0})
    bench.confirm()
    for req in ("first", "second"):  # both were asked for before either was applied
        applied(bench, texts[1 if req == "first" else 2], req, based_on={"gold": 1})
        bench.confirm()
    applied(bench, texts[2], "tried", based_on={"gold": 1}, dry_run=True)
    applied(bench, simple("other"), "other", based_on={"gold": 1}, dry_run=True)
    applied(bench, texts[2], "again", based_on={"gold": 2})
    bench.confirm()
    answers = {answer["req"]: answer for answer in bench.answers()}
    codes = {req: answer["code"] for req, answer in answers.items()}
    assert codes == {"r0": 200, "first": 200, "second": 409, "tried": 409, "other": 200, "again": 200}
    (problem,) = answers["second"]["body"]["errors"]
    said = "gold has changed since: this text was made from version 1, and now version 2 is in force"
    assert problem["problem"] == said
    assert answers["again"]["body"]["applied"][0]["version"] == 3


def test_a_text_of_another_kind_names_its_document_by_kind_and_name() -> None:
    bench = Bench()
    head = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {name: mail}\n"
    texts = [f"{head}spec: {{file: {{path: {name}}}}}\n" for name in ("a", "b", "c")]
    for text, req, version in ((texts[0], "new", 0), (texts[1], "next", 1), (texts[2], "late", 1)):
        applied(bench, text, req, based_on={"Recipient/mail": version})
        bench.confirm()
    applied(bench, simple("mail"), "agreement", based_on={"Recipient/mail": 1}, dry_run=True)
    answers = {answer["req"]: answer for answer in bench.answers()}
    codes = {req: answer["code"] for req, answer in answers.items()}
    assert codes == {"new": 200, "next": 200, "late": 409, "agreement": 200}
    (problem,) = answers["late"]["body"]["errors"]
    assert problem["problem"].startswith("mail has changed since")
    assert "/api/v1/documents/Recipient/mail/versions" in problem["fix"]


def test_apply_that_is_slow_is_answered_202_and_then_finally() -> None:
    bench = Bench()
    applied(bench, simple())
    for _ in range(5):
        bench.tick(1)
    assert [answer["code"] for answer in bench.answers()] == [202]
    bench.confirm()
    assert [answer["code"] for answer in bench.answers()] == [200]


def test_apply_that_dbmanager_refuses_is_not_in_force() -> None:
    bench = Bench()
    applied(bench, simple())
    bench.confirm(ok=False, error="no room")
    (answer,) = bench.answers()
    assert (answer["code"], answer["ok"]) == (503, False)
    assert bench.core.changes.catalog.items == ()


def test_dry_run_checks_and_changes_nothing() -> None:
    bench = Bench()
    applied(bench, simple(), dry_run=True)
    (answer,) = bench.answers()
    assert answer["body"]["applied"][0]["changed"] is True
    assert "agreements" not in [table for table, _ in bench.records()]
    applied(bench, simple("-x"), dry_run=True)
    (answer,) = bench.answers()
    assert answer["code"] == 422
    assert answer["body"]["errors"][0]["line"] == 3


def test_an_agreement_that_a_full_pool_refuses_is_recorded_unless_it_is_only_tried() -> None:
    storage = StorageManager(StorageConfig(refuse_agreements="warn"), StoredPools())
    volume = {"name": "lv", "size_bytes": 5, "used_bytes": 1, "volume": "vol-1", "in_use": True}
    full = Space("data", "lvm", "b", 100, 95, None, 0, 1, (volume,), START_US)
    storage.read(SERVER, SERVER, full, ServedVolumes(), START_US)
    bench = Bench(storage=storage)
    bench.records()
    for req, is_trial in (("r1", True), ("r2", False)):
        applied(bench, simple(), req, dry_run=is_trial)
        (answer,) = bench.answers()
        assert answer["code"] == 422
        assert "takes no new agreements" in answer["body"]["errors"][0]["problem"]
        tables = [table for table, _ in bench.records()]
        assert tables == ([] if is_trial else ["pool_actions", "events"])


def test_changes_follow_one_another() -> None:
    bench = Bench()
    applied(bench, simple(), "r1")
    applied(bench, simple(value_ms=3), "r2")
    bench.request("delete", {"name": "gold"}, "r3")
    bench.request("delete", {"name": "gold"}, "r4")
    for _ in range(4):
        bench.confirm()
    answers = {answer["req"]: answer for answer in bench.answers()}
    assert answers["r2"]["body"]["applied"] == [{"name": "gold", "version": 2, "changed": True, "line": 1}]
    assert [answers[f"r{n}"]["code"] for n in (1, 2, 3, 4)] == [200, 200, 200, 404]
    assert bench.core.changes.catalog.items == ()


def test_a_volume_that_appears_fills_a_pattern() -> None:
    bench = Bench()
    applied(bench, simple(volumes='"vol-*"'))
    bench.confirm()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    (*_, (_, header)) = bench.main.take_posted(Kind.SET_THRESHOLDS)
    assert [entry["volume"] for entry in header["entries"]] == ["vol-1"]
    assert bench.core.changes.catalog.volumes == {"vol-1"}
    # The controller and the judge match patterns by themselves: only agreements reach them.
    assert bench.controller.names().count("set_agreements") == 2


@pytest.mark.parametrize(
    ("op", "body", "code"),
    [
        ("nonsense", {}, 400),
        ("apply", "text", 400),
        ("apply", {"documents": 5}, 422),
        ("apply", {"documents": "a: ["}, 422),
        ("delete", {"name": "nobody"}, 404),
        ("throttle_set", {"volume": "nowhere", "iops": 5, "reason": "noisy"}, 404),
        ("throttle_set", {"volume": "nowhere"}, 422),
        ("throttle_set", {"volume": "nowhere", "iops": -5}, 422),
        ("gateway_list", {"address": "host:7412", "name": "h", "is_listed": True}, 422),
        ("gateway_list", {"address": "10.0.0.5:0", "name": "h", "is_listed": True}, 422),
        ("gateway_list", {"address": "10.0.0.5:1", "name": "h\x1b[2J", "is_listed": True}, 422),
        ("throttle_set", {"volume": "vol-1", "iops": 5, "burst_s": 0, "reason": "noisy"}, 422),
        ("throttle_set", {"group": "g", "iops": 5, "reason": "noisy"}, 422),
        ("throttle_set", {"volumes": {"vol-1": 1.0}, "iops": 5, "reason": "noisy"}, 422),
        ("throttle_set", {"group": "g", "volumes": {}, "iops": 5, "reason": "noisy"}, 422),
        ("throttle_set", {"group": "g", "volumes": {"vol-1": 0.0}, "iops": 5, "reason": "noisy"}, 422),
        ("throttle_set", {"group": "a/b", "volumes": {"vol-1": 1.0}, "iops": 5, "reason": "noisy"}, 422),
        ("throttle_set", {"group": "g", "volumes": {"nowhere": 1.0}, "iops": 5, "reason": "noisy"}, 404),
        ("throttle_release", {"volume": "vol-1", "group": "g"}, 422),
        ("throttle_release", {"group": "g"}, 404),
        ("throttle_release", {}, 422),
        ("throttle_release", {"throttle_id": "t", "client": "c"}, 422),
        ("throttle_release", {"group": "g", "client": "c"}, 422),
        ("throttle_release", {"client": "c"}, 404),
        ("throttle_set", {"group": "g", "volumes": {"v": 1}, "client": "c", "iops": 5, "reason": "x"}, 422),
        ("throttle_set", {"client": "c", "volumes": {"v": 1}, "iops": 5, "reason": "x"}, 422),
        ("throttle_set", {"volume": "nowhere", "client": "", "iops": 5, "reason": "noisy"}, 422),
        ("throttle_release", {"volume": "vol-1"}, 404),
        ("mode", {"mode": "maybe"}, 422),
    ],
)
def test_refusals_say_what_to_do(op: str, body: Any, code: int) -> None:
    bench = Bench()
    bench.request(op, body)
    (answer,) = bench.answers()
    assert (answer["code"], answer["ok"]) == (code, False)
    assert all(error["problem"] for error in answer["body"]["errors"])


def test_a_throttle_by_hand_below_what_is_applied_is_a_note_also_when_it_is_tried() -> None:
    bench = Bench()
    bench.controller.manual_causes.is_below = True
    for request, dry_run in (("r1", True), ("r2", False), ("r3", False)):
        bench.request("apply", {"documents": simple(), "dry_run": dry_run}, request)
        bench.tick()
        bench.confirm()
    said = [answer["body"]["warnings"] for answer in bench.answers()]
    assert said == [["by hand below gold/latency"], ["by hand below gold/latency"], []], "not of what stays"


def test_a_manual_throttle_is_set_and_audited() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    bench.request("throttle_set", {"volume": "vol-1", "iops": 100, "duration_s": 60, "reason": "noisy"})
    rows = bench.confirm()
    (answer,) = bench.answers()
    throttle_id = answer["body"]["throttle_id"]
    assert bench.controller.last("manual_set") == (
        throttle_id, "vol-1", None, 100.0, None, None, START_US + 60_000_000, "ann", "noisy", "", {}, ""
    )  # fmt: skip
    (audit,) = [row for table, row in rows if table == "audit"]
    assert (audit["action"], audit["who"], audit["subject"]) == ("throttle-set", "ann", "vol-1")
    bench.controller.released = [throttle_id]
    bench.request("throttle_release", {"volume": "vol-1", "throttle_id": None}, "r2")
    bench.confirm()
    assert bench.answers()[0]["body"] == {"released": [throttle_id]}
    assert bench.controller.last("manual_release") == ("vol-1", None, "ann", None)


def test_one_client_of_a_volume_is_throttled_and_released() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    bench.request("throttle_set", {"volume": "vol-1", "client": "c", "iops": 100, "reason": "noisy"})
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert (audit["subject"], audit["after"]["client"]) == ("vol-1", "c")
    assert bench.controller.last("manual_set")[-1] == "c"
    (answer,) = bench.answers()
    bench.controller.released = [answer["body"]["throttle_id"]]
    bench.request("throttle_release", {"volume": "vol-1", "client": "c"}, "r2")
    assert bench.controller.last("manual_release") == ("vol-1", None, "ann", "c")
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert audit["subject"] == "vol-1/c"
    bench.answers()
    bench.controller.refusal = ("no such client", "Name another")
    bench.request("throttle_set", {"volume": "vol-1", "client": "d", "iops": 100, "reason": "noisy"}, "r3")
    (answer,) = bench.answers()
    assert answer["code"] == 422
    (error,) = answer["body"]["errors"]
    assert (error["problem"], error["fix"]) == ("no such client", "Name another")


def test_a_client_over_all_its_volumes_is_throttled_and_released() -> None:
    bench = Bench()
    bench.request("throttle_set", {"client": "c", "iops": 100, "burst_s": 2.5, "reason": "noisy"})
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert (audit["subject"], audit["after"]["client"]) == ("client c", "c")
    called = bench.controller.last("manual_set")
    assert (called[1], called[-3:]) == ("", ("", {}, "c"))
    (answer,) = bench.answers()
    bench.controller.released = [answer["body"]["throttle_id"]]
    bench.request("throttle_release", {"client": "c"}, "r2")
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert audit["subject"] == "client c"
    bench.answers()
    bench.controller.group_refusal = (422, "the agent of old caps no clients", "Upgrade it")
    bench.request("throttle_set", {"client": "c", "iops": 100, "reason": "noisy"}, "r3")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["fix"]) == (422, "Upgrade it")
    bench.controller.group_refusal, bench.controller.broken = None, ("gold/latency (p95) for v",)
    bench.request("throttle_set", {"client": "c", "iops": 1, "reason": "noisy"}, "r4")
    (answer,) = bench.answers()
    assert answer["code"] == 409
    assert "what is promised for 'c': gold/latency" in answer["body"]["errors"][0]["problem"]


def test_a_group_of_volumes_is_throttled_and_released() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    asked = {
        "group": "night",
        "volumes": {"vol-1": 2.0},
        "bytes_per_s": 1e7,
        "burst_s": 2.5,
        "reason": "copy",
    }
    bench.request("throttle_set", asked)
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert (audit["subject"], audit["after"]["volumes"]) == ("group night", {"vol-1": 2.0})
    (answer,) = bench.answers()
    called = bench.controller.last("manual_set")
    assert called[1:6] == ("", None, None, 1e7, 2.5)
    assert called[-3:-1] == ("night", {"vol-1": 2.0})
    bench.controller.released = [answer["body"]["throttle_id"]]
    bench.request("throttle_release", {"group": "night"}, "r2")
    assert bench.controller.last("manual_release")[-1] == "night"
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert audit["subject"] == "group night"
    bench.answers()
    bench.controller.group_refusal = (409, "it is in another group", "Leave it out")
    bench.request("throttle_set", asked, "r3")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["fix"]) == (409, "Leave it out")


def test_a_throttle_that_breaks_the_volumes_own_promise_needs_force() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    bench.controller.broken = ("gold/latency (p95 within 12.0 ms up to 150 IOPS)",)
    bench.controller.held = Rates(ops_per_s=50.0)
    asked = {"volume": "vol-1", "iops": 10, "reason": "noisy"}
    bench.request("throttle_set", asked)
    (answer,) = bench.answers()
    assert answer["code"] == 409
    (error,) = answer["body"]["errors"]
    assert "gold/latency (p95 within 12.0 ms up to 150 IOPS)" in error["problem"]
    assert "What would hold is 50 IOPS, its floor" in error["problem"]
    assert "--force" in error["fix"]
    assert "manual_set" not in bench.controller.names()
    bench.request("throttle_set", {**asked, "force": True}, "r2")
    (audit,) = [row for table, row in bench.confirm() if table == "audit"]
    assert (audit["after"]["force"], audit["after"]["breaks"]) == (True, list(bench.controller.broken))
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["holds"]) == (200, "50 IOPS")
    assert answer["body"]["breaks"] == list(bench.controller.broken)


def test_a_volume_beside_the_io_path_cannot_be_throttled_and_the_answer_says_so_at_once() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.tick()
    bench.confirm()
    bench.controller.only_seen.add("vol-1")
    bench.request("throttle_set", {"volume": "vol-1", "iops": 100, "reason": "noisy"})
    (answer,) = bench.answers()
    assert answer["code"] == 422
    assert "beside the I/O path" in answer["body"]["errors"][0]["problem"]
    assert "manual_set" not in bench.controller.names()


def test_the_mode_is_switched_and_recorded() -> None:
    bench = Bench()
    bench.request("mode", {"mode": "enforce"})
    rows = bench.confirm()
    assert bench.controller.last("set_mode") == ("enforce",)
    assert bench.answers()[0]["body"] == {"mode": "enforce"}
    (audit,) = [row for table, row in rows if table == "audit"]
    assert (audit["action"], audit["before"], audit["after"]) == (
        "mode",
        {"mode": "observe"},
        {"mode": "enforce"},
    )
    bench.tick(1)
    assert bench.app.take_posted(Kind.SNAPSHOT)[-1][1]["mode"] == "enforce"


def test_the_live_view_goes_on_and_says_that_the_database_cannot_be_read() -> None:
    bench = Bench()
    bench.tick(1)
    assert bench.app.take_posted(Kind.SNAPSHOT)[-1][1]["database"] == ""
    bench.controller.slas = [{"name": "gold", "objective": "latency", "state": "ok"}]
    bench.sql_worker.trouble = "the database cannot be used"
    bench.tick(1)
    shown = bench.app.take_posted(Kind.SNAPSHOT)[-1][1]
    assert shown["database"] == "the database cannot be used"
    assert [row["name"] for row in shown["slas"]] == ["gold"]


def policy(version: int = 3, hour: int = 96, orders: int = 0, **keys: Any) -> SqlState:
    caps = {"vol-1": 50.0, "vol-2": None}
    coming = {"coming": {"vol-1": 40.0}, "coming_us": START_US}
    look = PublishedPolicy(version, published=True, hour_of_week=hour, caps=caps, orders=orders, **coming)
    return SqlState(policy_looked=True, policy=look, **keys)


def test_a_published_policy_is_put_in_force_once_and_its_caps_each_hour() -> None:
    bench = Bench()
    bench.request("policies_changed", {})
    assert (bench.sql_worker.wanted, bench.answers()) == (1, [])
    bench.sql_worker.found.put(policy())
    bench.sql_worker.found.put(policy())
    bench.tick()
    rows = bench.confirm()
    assert [row for table, row in rows if table == "policies"] == [{"version": 3, "state": "in-force"}]
    assert [row["kind"] for table, row in rows if table == "events"] == ["policy-applied"]
    assert bench.controller.names().count("set_policy_caps") == 1
    assert bench.answers()[0]["body"] == {"version": 3}
    bench.sql_worker.found.put(policy(hour=97))
    bench.sql_worker.found.put(policy(version=2))
    bench.tick(1)
    assert bench.controller.names().count("set_policy_caps") == 2
    assert bench.controller.last("set_policy_caps") == (3, {"vol-1": 50.0, "vol-2": None}, {})
    assert bench.controller.last("set_coming_caps") == ({"vol-1": 40.0}, START_US)
    assert bench.app.take_posted(Kind.SNAPSHOT)[-1][1]["policy"] == {
        "version": 3,
        "applied_us": START_US,
        "pinned": False,
    }


def test_a_pinned_policy_is_kept_and_recorded_and_can_be_let_go() -> None:
    bench = Bench()
    bench.sql_worker.found.put(policy(version=5))
    bench.tick()
    bench.confirm()
    bench.request("policy_pin", {"version": 3})
    rows = bench.confirm()
    orders = bench.sql_worker.orders
    assert (orders.number, orders.pinned) == (1, 3)
    assert ("policies", {"version": 3, "state": "pinned"}) in rows
    assert [row["action"] for table, row in rows if table == "audit"] == ["policy-pin"]
    assert bench.answers()[-1]["body"] == {"pinned": 3}
    bench.sql_worker.found.put(policy(version=6))  # a look from before the order
    bench.tick()
    assert bench.controller.last("set_policy_caps")[0] == 5
    bench.sql_worker.found.put(policy(version=3, orders=1))
    bench.tick()
    assert bench.controller.last("set_policy_caps")[0] == 3
    assert ("policies", {"version": 3, "state": "pinned"}) in bench.confirm()
    bench.request("policy_rollback", {})
    assert bench.answers()[-1]["code"] == 409
    bench.request("policy_pin", {})
    assert ("policies", {"version": 3, "state": "in-force"}) in bench.confirm()
    assert bench.sql_worker.orders.pinned is None
    bench.request("policy_pin", {})
    assert bench.answers()[-1]["code"] == 409


def test_a_policy_rolled_back_gives_way_to_the_one_before_it_and_stays_away() -> None:
    bench = Bench()
    bench.request("policy_rollback", {})
    assert bench.answers()[-1]["code"] == 409
    bench.sql_worker.found.put(policy(version=5))
    bench.tick()
    bench.confirm()
    bench.request("policy_rollback", {"version": 4})
    assert bench.answers()[-1]["code"] == 409
    bench.request("policy_rollback", {"version": 5})
    rows = bench.confirm()
    assert ("policies", {"version": 5, "state": "rolled-back"}) in rows
    assert [row["action"] for table, row in rows if table == "audit"] == ["policy-rollback"]
    assert bench.sql_worker.orders.withdrawn == {5}
    bench.sql_worker.found.put(policy(version=4, orders=1))
    bench.tick()
    assert bench.controller.last("set_policy_caps")[0] == 4
    assert ("policies", {"version": 4, "state": "in-force"}) in bench.confirm()
    bench.request("policy_rollback", {})
    bench.confirm()
    none = PublishedPolicy(0, published=False, hour_of_week=96, caps={}, orders=2)
    bench.sql_worker.found.put(SqlState(policy_looked=True, policy=none))
    bench.tick()
    assert bench.controller.last("set_policy_caps") == (None, {}, {})
    assert [row["kind"] for table, row in bench.confirm() if table == "events"] == ["policy-applied"]


def test_the_stage_of_policies_is_set_for_all_backends_and_for_one() -> None:
    bench = Bench()
    assert bench.controller.last("set_policy_stage") == ("observe", {})
    bench.controller.backends = lambda: ["disk"]  # type: ignore[attr-defined]
    bench.request("mode", {"mode": "enforce", "backend": "disk", "of": "policy"})
    rows = bench.confirm()
    assert bench.controller.last("set_policy_stage") == ("observe", {"disk": "enforce"})
    (audit,) = [row for table, row in rows if table == "audit"]
    assert (audit["action"], audit["subject"]) == ("policy-mode", "disk")
    assert audit["after"] == {"mode": "observe", "backends": {"disk": "enforce"}}
    assert [row["kind"] for table, row in rows if table == "events"] == ["mode-changed"]
    bench.request("mode", {"mode": "enforce", "of": "policy"})
    bench.confirm()
    assert bench.controller.last("set_policy_stage") == ("enforce", {"disk": "enforce"})
    bench.request("mode", {"mode": "inherit", "backend": "disk", "of": "policy"})
    bench.confirm()
    assert bench.controller.last("set_policy_stage") == ("enforce", {})
    bench.request("mode", {"mode": "observe", "backend": "disc", "of": "policy"})
    assert bench.answers()[-1]["code"] == 404
    assert bench.core.mode == "observe", "that of control is another"


def test_a_pin_outlives_the_process() -> None:
    bench = Bench(Start(policy_version=3, policy_pinned=3))
    assert bench.sql_worker.orders.pinned == 3
    bench.sql_worker.found.put(policy(version=3))
    bench.tick(1)
    assert bench.app.take_posted(Kind.SNAPSHOT)[-1][1]["policy"]["pinned"] is True


def test_violations_become_episodes_and_the_snapshot_shows_everything() -> None:
    bench = Bench()
    bench.controller.slas = [{"name": "gold", "objective": "latency", "state": "violating", "u": 2.0}]
    bench.controller.decisions = [
        RaiseEvent("violation-opened", "critical", "sla", "gold/latency", "broken", {"u": 2.0})
    ]
    processes = [
        {"name": "pmdaemon", "state": "running", "pid": 1, "restarts": 0, "since_us": 5, "reason": ""}
    ]
    (_, old) = event_row("k", "info", "", "", "", 1)
    bench.sql_worker.found.put(SqlState(processes=processes, events=[old]))
    bench.tick(1)
    tables = [table for table, _ in bench.records()]
    assert tables.count("episodes") == 1
    ((to, view),) = bench.app.take_posted(Kind.SNAPSHOT)
    assert to == "appserver"
    assert [event["kind"] for event in view["events"]] == ["violation-opened", "k"]
    assert view["processes"] == [
        {"name": "pmdaemon", "state": "running", "restarts": 0, "since_us": 5, "pressure": None}
    ]
    assert view["slas"][0]["compliance"] is None
    assert set(view["slas"][0]["slices"]) == {"good", "bad", "no_data", "not_applicable", "excluded"}


def test_judged_slices_are_recorded() -> None:
    bench = Bench()
    row = ("slices", {"name": "gold", "objective": "latency", "start_us": START_US, "revision": 0})
    bench.sql_worker.found.put(SqlState(Judgement(rows=[row])))
    bench.tick()
    assert row in [(table, dict(found)) for table, found in bench.records()]


@pytest.mark.parametrize(("took_s", "views"), [(0.0, 12), (0.1, 6), (10.0, 4)])
def test_a_live_view_that_is_dear_is_made_less_often_but_never_stale(
    monkeypatch: pytest.MonkeyPatch, took_s: float, views: int
) -> None:
    bench = Bench()
    cpu_ns = count(step=round(took_s * 1e9))  # what the view costs is not this test's to spend
    monkeypatch.setattr(core.time, "thread_time_ns", lambda: next(cpu_ns))
    for _ in range(12):
        bench.tick(1)
    assert len(bench.app.take_posted(Kind.SNAPSHOT)) == views


def test_a_snapshot_too_large_for_a_header_goes_as_json() -> None:
    bench = Bench()
    bench.controller.slas = [
        {"name": f"sla-{i}", "objective": "x" * 100, "state": "ok", "u": 0.0} for i in range(300)
    ]
    bench.tick(1)
    (snapshot,) = [one for _, one in bench.app.posted if one.kind == Kind.SNAPSHOT]
    assert snapshot.header["json"] is True
    view = json.loads(bytes(snapshot.blob[: snapshot.header["bytes"]]))
    assert len(view["slas"]) == 300


def view_of(bench: Bench) -> dict[str, Any]:
    """The newest snapshot, as strict JSON; the header's own where it fits one."""
    snapshot = [one for _, one in bench.app.posted if one.kind == Kind.SNAPSHOT][-1]
    if not snapshot.header.get("json"):
        return snapshot.header
    text = bytes(snapshot.blob[: snapshot.header["bytes"]]).decode()
    return dict(json.loads(text, parse_constant=pytest.fail))


ODD_ALERTS: tuple[dict[str, Any], ...] = (
    {"at_us": "x"},
    {"text": "x" * 65_000},
    {"text": "\x1b]0;pwned"},
    {"details": {"b": b"x"}},
    {"details": {"n": math.nan}},
    {"details": {b"k": 1}},
    {"details": {"deep": {"a": [1]}}},
    {"at_us": 1 << 62},
    {"at_us": (1 << 63) - 1, "kind": "mode-changed"},
    {"severity": ["info"]},
    {"kind": {"a": 1}},
)


@pytest.mark.parametrize("wrong", ODD_ALERTS)
def test_no_alert_stops_services_or_blanks_the_page(wrong: dict[str, Any]) -> None:
    bench = Bench()
    right = {"gw": GATEWAY, "kind": "plane-died", "severity": "info", "text": "t", "at_us": 5, "details": {}}
    bench.message(Kind.GATEWAY_ALERT, right | wrong)
    bench.message(Kind.GATEWAY_ALERT, right | {"at_us": bench.clock.unix_us(), "kind": "plane-back"})
    for second in range(1, 4):
        bench.tick(second)
    shown = [row["kind"] for row in view_of(bench)["events"]]
    assert "plane-back" in shown
    assert "mode-changed" not in shown
    kinds = [row["kind"] for table, row in bench.records() if table == "events"]
    assert "plane-back" in kinds
    assert all(row["at_us"] <= bench.clock.unix_us() for table, row in bench.records() if table == "events")


def stored(**over: Any) -> dict[str, Any]:
    row = {"event_id": "e", "at_us": 5, "kind": "k", "severity": "info", "element": "x", "subject": "s"}
    return {**row, "text": "t", "details": {}, **over}


ODD_STORED: tuple[dict[str, Any], ...] = (
    {"at_us": "x"},
    {"at_us": None},
    {"at_us": 1 << 62},
    {"text": None},
    {"details": {"x": "y" * 70_000}},
)


@pytest.mark.parametrize("wrong", ODD_STORED)
def test_a_stored_event_that_cannot_be_shown_is_left_out_and_said(wrong: dict[str, Any]) -> None:
    events = [stored(**wrong), stored(event_id="good", at_us=START_US)]
    bench = Bench(Start(events=events))
    for second in range(1, 3):
        bench.tick(second)
    view = view_of(bench)
    assert [row["event_id"] for row in view["events"]] == ["good"]
    (problem,) = [row for row in view["problems"] if row["what"] == "events"]
    assert "1 events cannot be shown; the newest of them, 'e'" in problem["reason"]
    bench.tick(120)  # SQL does not hold it any more
    assert [row for row in view_of(bench)["problems"] if row["what"] == "events"] == []


@pytest.mark.parametrize("count", [3, 3000])
def test_values_without_a_form_are_replaced_in_the_snapshot(count: int) -> None:
    bench = Bench()
    odd: list[dict[str, Any]] = [
        {"name": "a", "objective": "b", "state": "ok", "u": math.nan} for _ in range(count)
    ]
    bench.controller.slas = [*odd, {"name": "z", "objective": "b", "big": 1 << 70, "bytes": b"x", "set": {1}}]
    bench.tick(1)
    view = view_of(bench)
    assert len(view["slas"]) == count + 1
    assert (view["slas"][0]["u"], view["slas"][-1]["bytes"]) == (None, "b'x'")


def test_a_snapshot_above_a_frame_loses_rows_and_not_the_page() -> None:
    bench = Bench()
    bench.controller.slas = [
        {"name": f"sla-{i}", "objective": "x" * 2000, "state": "ok"} for i in range(2000)
    ]
    bench.tick(1)
    view = view_of(bench)
    assert 0 < len(view["slas"]) < 2000
    assert view["cut_short"] == {"slas": 2000 - len(view["slas"])}
    assert view["problems"] == []


def test_a_refused_claim_is_no_loss_of_the_gateway_whose_id_it_bears() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    bench.message(Kind.GATEWAY, gateway(state="refused", reason="another protocol"))
    assert not [call for call in bench.controller.calls if call[0] == "gateway_lost"]


def test_a_full_mailbox_delays_and_loses_nothing() -> None:
    bench = Bench()
    bench.main.full = {"dbmanager", "pair-0"}
    bench.app.full = {"appserver"}
    applied(bench, simple())
    for _ in range(3):
        bench.tick(1)
    assert bench.main.posted == []
    bench.main.full = set()
    bench.app.full = set()
    bench.tick(0.25)
    bench.confirm()
    assert [answer["code"] for answer in bench.answers()] == [200]
    assert len(bench.main.take_posted(Kind.LEASE)) == 1
    assert len(bench.app.take_posted(Kind.SNAPSHOT)) == 1


def test_after_a_restart_the_controller_gets_what_sql_knows_in_this_order() -> None:
    throttle = {"throttle_id": "t", "volume": "vol-1", "state": "confirmed", "gen": 4}
    known = KnownGateway(GATEWAY, "host-1", [EXPORT], [STREAM])
    bench = Bench(Start(throttles=[throttle], gateways=[known], mode="enforce"))
    modes = ["set_agreement_modes", "set_excluded", "set_backend_modes", "set_policy_stage"]
    names = ["set_agreements", *modes, "restore", "set_mode", "gateway_up", "add_streams"]
    assert bench.controller.names() == names
    assert bench.controller.last("restore") == ([throttle],)
    assert bench.controller.last("gateway_up")[-1] is False, "its session was not announced yet"
    bench.tick()
    assert bench.main.take_posted(Kind.SET_CAPS) == []
    # What SQL knows of its exports may be less than all: it is told when it is announced.
    assert bench.main.take_posted(Kind.SET_THRESHOLDS) == []


def test_maintenance_is_applied_and_ended_like_an_agreement() -> None:
    bench = Bench()
    bench.request("apply", {"documents": simple() + "---\n" + maintenance_text()}, "r1")
    assert [table for table, _ in bench.confirm()] == [
        "documents",
        "audit",
        "events",
        "agreements",
        "audit",
        "events",
    ]
    (answer,) = bench.answers()
    assert answer["body"]["applied"][1]["agreements"] == 1
    catalog = bench.sql_worker.catalog
    assert catalog is not None
    assert [work.name for work in catalog.items[0].work] == ["move"]
    bench.request("end_document", {"kind": "Maintenance", "name": "move"}, "r2")
    assert bench.answers() == [], "it is answered when it is durable"
    bench.confirm()
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]) == (200, {})
    assert bench.sql_worker.catalog is not None
    assert bench.sql_worker.catalog.items[0].work[0].ended_us is not None


def test_what_is_not_in_force_is_not_ended_and_a_calendar_in_use_neither() -> None:
    bench = Bench()
    bench.request("end_document", {"kind": "Maintenance", "name": "move"})
    (answer,) = bench.answers()
    assert (answer["code"], "sla get maintenance" in answer["body"]["errors"][0]["fix"]) == (404, True)
    text = simple(extra="  service_hours: {calendar: bank}\n") + "---\n" + calendar_text()
    bench.request("apply", {"documents": text}, "r2")
    bench.confirm()
    bench.answers()
    bench.request("end_document", {"kind": "Calendar", "name": "bank"}, "r3")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["problem"]) == (
        422,
        "the calendar 'bank' is used by gold",
    )
    bench.request("end_document", {"kind": "SLA", "name": "gold"}, "r4")
    assert [answer["code"] for answer in bench.answers()] == [422]


RECIPIENT = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {name: mail}\nspec: {inbox: {}}\n"
ROUTE = "apiVersion: storage-sla/v1\nkind: Route\nmetadata: {name: all}\nspec: {recipients: [mail]}\n"


def test_delivery_learns_of_documents_when_they_are_durable_and_of_recipients_that_agreements_name(
    tmp_path: Path,
) -> None:
    bench = Bench(routing=RoutingFile(tmp_path))
    reader = RoutingReader(tmp_path)
    assert reader.poll(), "what is in force at the start replaces what was there before"
    parties = "  parties: {provider: a, customer: b, recipients: [mail]}\n"
    text = "---\n".join((RECIPIENT, ROUTE, simple("gold", extra=parties)))
    bench.request("apply", {"documents": text}, "r1")
    assert not reader.poll()
    bench.confirm()
    assert reader.poll()
    table = reader.router.table
    assert (list(table.recipients), [each.name for each in table.routes]) == (["mail"], ["all"])
    assert dict(table.of_agreements) == {"gold": ["mail"]}
    bench.request("end_document", {"kind": "Route", "name": "all"}, "r2")
    bench.confirm()
    assert reader.poll()
    assert reader.router.table.routes == ()


def test_an_event_that_is_sent_again_is_another_one_with_its_text() -> None:
    bench = Bench()
    body = {
        "name": "mail", "event_id": "e1", "at_us": 5, "kind": "violation-opened", "severity": "critical",
        "element": "sla", "subject": "gold/p99", "text": "broken",
    }  # fmt: skip
    bench.request("event_again", body, "r1")
    (answer,) = bench.answers()
    assert answer["code"] == 404
    bench.request("apply", {"documents": RECIPIENT}, "r2")
    bench.confirm()
    bench.answers()
    bench.request("event_again", body, "r3")
    (table, row), (_, audited) = bench.confirm()
    assert (audited["action"], audited["subject"], audited["after"]) == (
        "event-again",
        "mail",
        {"event_id": "e1"},
    )
    assert (table, row["kind"], row["severity"], row["element"], row["subject"]) == (
        "events",
        "event-sent-again",
        "critical",
        "recipient",
        "mail",
    )
    assert row["text"].startswith("broken (sent again by ")
    assert (row["details"]["event_id"], row["details"]["kind"], row["event_id"] != "e1") == (
        "e1",
        "violation-opened",
        True,
    )
    (answer,) = bench.answers()
    assert answer["body"] == {"event_id": row["event_id"]}


def test_a_test_of_a_recipient_is_an_event_that_names_it() -> None:
    bench = Bench()
    bench.request("notify_test", {"name": "mail"}, "r1")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["fix"]) == (404, "See 'sla get recipients'")
    pulse = RECIPIENT.replace("name: mail", "name: pulse").replace(
        "inbox: {}", "heartbeat: {url: 'http://a.example'}"
    )
    bench.request("apply", {"documents": f"{RECIPIENT}---\n{pulse}"}, "r2")
    bench.confirm()
    bench.answers()
    bench.request("notify_test", {"name": "pulse"}, "r4")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["problem"]) == (
        422,
        "pulse is a heartbeat and takes no events",
    )
    bench.request("notify_test", {"name": "mail"}, "r3")
    assert bench.answers() == [], "it is answered when it is durable"
    (table, row), (other, audited) = bench.confirm()
    assert (other, audited["action"], audited["subject"]) == ("audit", "recipient-test", "mail")
    assert audited["who"]
    assert (table, row["kind"], row["element"], row["subject"]) == (
        "events",
        "notify-test",
        "recipient",
        "mail",
    )
    (answer,) = bench.answers()
    assert answer["body"] == {"event_id": row["event_id"]}


def test_an_acknowledgement_is_audited_and_is_an_event_for_delivery() -> None:
    bench = Bench()
    body = {"event_id": "e-1", "note": "disk ordered", "kind": "violation-opened", "subject": "gold/latency"}
    bench.request("acknowledge", body, "r1")
    (audit_table, audit), (event_table, event) = bench.confirm()
    assert (audit_table, audit["action"], audit["subject"], audit["after"]) == (
        "audit", "acknowledge", "e-1", {"note": "disk ordered"},
    )  # fmt: skip
    assert (event_table, event["kind"], event["details"]["event_id"]) == (
        "events",
        "event-acknowledged",
        "e-1",
    )
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]) == (200, {"event_id": "e-1"})
    bench.request("acknowledge", {"event_id": "e-1", "note": " "}, "r2")
    assert [answer["code"] for answer in bench.answers()] == [422]


def test_space_of_a_gateway_is_stored_and_an_event_and_survives_a_restart() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, gateway())
    space = Space("data", "path", "disk-1", 100, 85, None, 0, 0, (), bench.clock.unix_us())
    bench.message(Kind.GATEWAY_SPACE, GatewaySpace(space, GATEWAY).header())
    bench.tick()
    rows = bench.confirm()
    assert [table for table, _ in rows] == ["pools", "pool_days", "events"]
    assert (rows[0][1]["owner"], rows[0][1]["owner_name"], rows[0][1]["level"]) == (GATEWAY, "host-1", "warn")
    assert (rows[2][1]["kind"], rows[2][1]["subject"]) == ("space-low", "host-1/data")
    again = Bench(Start(pools=StoredPools([rows[0][1]], [rows[1][1]])))
    again.message(Kind.GATEWAY_SPACE, GatewaySpace(space, GATEWAY).header())
    again.tick()
    assert again.confirm() == []
    assert again.core.bad_frames == 0


def test_labels_that_an_owner_announces_choose_the_volume() -> None:
    bench = Bench()
    bench.request("apply", {"documents": simple().replace("volumes: [vol-1]", "volume_labels: tier=gold")})
    bench.confirm()
    bench.message(Kind.GATEWAY, gateway(exports=[{**EXPORT, "labels": {"tier": "gold"}}]))

    def chosen() -> tuple[str, ...]:
        bench.tick()
        bench.confirm()
        return bench.core.changes.catalog.items[0].volumes

    assert chosen() == ("vol-1",)
    bench.message(Kind.GATEWAY, gateway(exports=[{**EXPORT, "labels": {"tier": "lead"}}]))
    assert chosen() == ()
    bench.message(Kind.GATEWAY, gateway(exports=[{**EXPORT, "labels": {"tier": "gold"}}]))
    assert chosen() == ("vol-1",)
    bench.message(Kind.GATEWAY, gateway())
    assert chosen() == (), "an agent of before, or one without: it has no labels"
