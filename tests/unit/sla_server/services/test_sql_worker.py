"""The SQL worker and the start: what is read from SQL, when, and what happens while it is away."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.services import sql_worker
from sla_server.services.catalog import apply
from sla_server.services.config import ServicesConfig
from sla_server.services.judging import judge
from sla_server.services.sql_worker import MORE_S, PolicyOrders, SqlState, SqlWorker, hour_of_week
from sla_server.services.startup import Start, marker_event, read_start
from sla_server.services.store import SqlReads
from tests.support.agreements import simple
from tests.support.services import GATEWAY, MINUTE_US, START_US, Away, Bench, FakeStore
from tests.unit.sla_server.services.test_catalog import docs

HOUR_US = 60 * MINUTE_US


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock(unix_us=START_US)
        self.store = FakeStore()
        self.sql_worker = SqlWorker(self.store, ServicesConfig(), self.clock)

    def look(self, seconds: float = 0.0) -> list[SqlState]:
        self.clock.advance(seconds)
        self.sql_worker.poll()
        found = []
        while not self.sql_worker.found.empty():
            found.append(self.sql_worker.found.get_nowait())
        return found


def test_hours_of_the_week_begin_on_monday_in_utc() -> None:
    assert hour_of_week(START_US) == 4 * 24
    monday_us = START_US + 3 * 24 * HOUR_US
    assert (hour_of_week(monday_us - 1), hour_of_week(monday_us)) == (167, 0)


def test_policies_are_looked_at_now_and_then_on_demand_and_each_hour() -> None:
    scene = Scene()
    scene.store.tables["policies"] = [
        {"version": 2, "state": "in-force"},
        {"version": 4, "state": "published"},
        {"version": 1, "state": "superseded"},
        {"version": 9, "state": "rejected"},
    ]
    scene.store.caps = {(4, 96): {"vol-1": 5.0}, (4, 97): {"vol-1": None}}
    (first,) = scene.look()
    assert first.policy is not None
    assert (first.policy.version, first.policy.published, first.policy.caps) == (4, True, {"vol-1": 5.0})
    hour_begins_us = (START_US // HOUR_US + 1) * HOUR_US
    assert (first.policy.coming, first.policy.coming_us) == ({"vol-1": None}, hour_begins_us)
    assert [found.policy_looked for found in scene.look(1)] == [False]
    assert [found.policy_looked for found in scene.look(9)] == [True]
    scene.sql_worker.request_policy()
    assert [found.policy_looked for found in scene.look(1)] == [True]
    assert [found.policy_looked for found in scene.look(1)] == [False]
    scene.clock.step_wall(3600)
    (found,) = scene.look()
    assert found.policy is not None
    assert (found.policy.hour_of_week, found.policy.caps) == (97, {"vol-1": None})


def test_an_issued_report_is_handed_over_once() -> None:
    scene = Scene()
    scene.look()
    scene.store.tables["reports"] = [
        {"number": number, "issued_us": START_US - number * HOUR_US} for number in (1, 2)
    ]
    assert [found.reports for found in scene.look(1)] == [[]], "not looked for each second"
    (found,) = scene.look(9)
    assert [row["number"] for row in found.reports] == [1, 2]
    assert [again.reports for again in scene.look(10)] == [[]]
    old = {"number": 3, "issued_us": START_US - 31 * 24 * HOUR_US}
    scene.store.tables["reports"].append(old)
    assert [again.reports for again in scene.look(10)] == [[]], "no news"


def test_caps_by_another_hand_that_are_no_rates_are_no_caps() -> None:
    rates = {"a": 5.0, "b": None, "c": math.nan, "d": math.inf, "e": -1.0, "f": 0.0}
    bursts = {"a": 2.5, "b": None, "c": math.nan, "d": 301.0, "e": 0.0}
    rows = [{"volume": name, "cost_per_s": rate, "burst_s": bursts.get(name)} for name, rate in rates.items()]
    reader: Any = SimpleNamespace(policy_caps=lambda _version, _hour: rows)
    assert SqlReads(reader).policy_caps(3, 96) == ({"a": 5.0, **dict.fromkeys("bcdef")}, {"a": 2.5})


def test_operators_choose_the_policy_until_they_let_it_go() -> None:
    scene = Scene()
    states = {1: "superseded", 2: "superseded", 3: "in-force", 4: "published", 5: "rejected"}
    scene.store.tables["policies"] = [{"version": v, "state": state} for v, state in states.items()]

    def chosen(orders: PolicyOrders) -> tuple[int, bool, int]:
        scene.sql_worker.order_policy(orders)
        (found,) = scene.look(1)
        assert found.policy is not None
        return found.policy.version, found.policy.published, found.policy.orders

    assert chosen(PolicyOrders(1, pinned=2)) == (2, True, 1)
    assert chosen(PolicyOrders(2, pinned=5)) == (5, True, 2), "an operator may choose a rejected one"
    assert chosen(PolicyOrders(3)) == (4, True, 3)
    assert chosen(PolicyOrders(4, withdrawn=frozenset({4}))) == (3, False, 4)
    assert chosen(PolicyOrders(5, withdrawn=frozenset({1, 2, 3, 4}))) == (0, False, 5)
    assert chosen(PolicyOrders(6, pinned=77)) == (4, True, 6), "a database that was restored lacks it"
    assert [found.policy_looked for found in scene.look(1)] == [False]


def test_agreements_are_judged_from_the_look_after_they_are_handed_in() -> None:
    scene = Scene()
    scene.store.add_stream()
    scene.store.add_slot(START_US)
    scene.sql_worker.set_catalog(apply(Start().catalog, docs(simple()), "ann", START_US).catalog)
    (found,) = scene.look(61)
    assert [table for table, _ in found.judgement.rows] == ["slices"]
    assert found.judgement.standings.keys() == {("gold", "latency")}


def test_the_judge_knows_how_far_storing_is_behind_what_comes() -> None:
    scene = Scene()
    scene.store.add_stream()
    scene.store.progress_us[GATEWAY] = START_US + 30 * 1_000_000
    scene.sql_worker.set_catalog(apply(Start().catalog, docs(simple()), "ann", START_US).catalog)
    scene.sql_worker.live_us = START_US + 95 * 1_000_000
    assert [found.judgement.rows for found in scene.look(95)] == [[]]
    scene.sql_worker.live_us = 0
    (found,) = scene.look(61)
    assert [row["state"] for table, row in found.judgement.rows if table == "slices"] == ["no_data"] * 2


def test_services_that_were_started_again_before_the_queue_was_stored_judge_nothing_too_early() -> None:
    scene = Scene()
    scene.store.add_stream()
    scene.store.progress_us[GATEWAY] = START_US + 30 * 1_000_000
    scene.sql_worker.set_catalog(apply(Start().catalog, docs(simple()), "ann", START_US).catalog)
    assert [found.judgement.rows for found in scene.look(180)] == [[]], "no cut has come to this process yet"
    (found,) = scene.look(ServicesConfig().judge_late_s)
    assert {row["state"] for table, row in found.judgement.rows if table == "slices"} == {"no_data"}


@pytest.mark.parametrize("method", ["*", "slices", "progress", "slice_inputs", "processes", "policies"])
def test_a_database_that_goes_away_loses_neither_agreements_nor_slices(method: str) -> None:
    scene = Scene()
    scene.store.add_stream()
    scene.store.add_slot(START_US)
    scene.sql_worker.set_catalog(apply(Start().catalog, docs(simple()), "ann", START_US).catalog)
    scene.store.away = {method}
    before = [found for found in scene.look(61) if found.judgement.rows]
    scene.store.away = set()
    (found,) = scene.look(1)
    assert before == []
    assert [row["state"] for table, row in found.judgement.rows if table == "slices"] == ["good"]


@pytest.mark.parametrize("method", ["*", "slices"])
def test_it_says_why_the_database_cannot_be_read_until_it_can(method: str) -> None:
    scene = Scene()
    scene.store.add_stream()
    scene.store.add_slot(START_US)
    scene.sql_worker.set_catalog(apply(Start().catalog, docs(simple()), "ann", START_US).catalog)
    assert scene.sql_worker.trouble == ""
    scene.store.away = {method}
    scene.look(61)
    assert scene.sql_worker.trouble
    scene.look(1)
    assert scene.sql_worker.trouble
    scene.store.away = set()
    scene.look(1)
    assert scene.sql_worker.trouble == ""


def test_an_error_that_is_not_the_databases_stops_the_thread() -> None:
    scene = Scene()
    scene.store.away = {"*"}
    Away.retryable = False
    try:
        with pytest.raises(Away):
            scene.look()
    finally:
        Away.retryable = True


def test_the_start_reads_what_the_process_before_left() -> None:
    store = FakeStore()
    store.add_stream(7, volume="vol-1", gateway=GATEWAY)
    store.add_stream(8, volume="vol-1", client="d", gateway=GATEWAY)
    store.tables["gateways"] = [{"gateway_id": GATEWAY, "name": "host-1", "state": "up"},
                                {"gateway_id": "other", "name": "host-2", "state": "lost"}]  # fmt: skip
    store.tables["volumes"] = [{"volume": "vol-1", "backend": "b", "size_bytes": 5, "read_only": True}]
    store.tables["throttles"] = [{"throttle_id": "t"}]
    store.tables["episodes"] = [
        {"name": "a", "objective": "b", "closed_us": None},
        {"name": "c", "closed_us": 1},
    ]
    store.tables["audit"] = [{"action": "mode", "at_us": at, "after": {"mode": mode}}
                             for at, mode in ((1, "observe"), (3, "enforce"), (2, "observe"))]  # fmt: skip
    store.tables["audit"].append({"action": "policy-applied", "at_us": 77, "after": {"version": 4}})
    stage = {"mode": "observe", "backends": {"b": "enforce", "c": "?"}}
    store.tables["audit"].append({"action": "policy-mode", "at_us": 78, "after": stage})
    store.tables["policies"] = [{"version": 4, "state": "pinned"}]
    store.keep(apply(Start().catalog, docs(simple()), "ann", START_US).rows)
    start = read_start(store, "observe", START_US)
    assert [item.name for item in start.catalog.items] == ["gold"]
    assert start.catalog.volumes == {"vol-1"}
    assert (start.mode, start.policy_version, start.policy_applied_us) == ("enforce", 4, 77)
    assert start.policy_pinned == 4
    assert (start.policy_mode, start.policy_modes) == ("observe", {"b": "enforce"})
    assert [row["name"] for row in start.episodes] == ["a"]
    (gateway,) = start.gateways
    assert gateway.exports == [
        {"volume": "vol-1", "backend": "b", "size_bytes": 5, "read_only": True, "labels": {}, "source": "nbd"}
    ]
    assert [stream["id"] for stream in gateway.streams] == [7, 8]


def test_an_empty_database_gives_the_configured_mode() -> None:
    assert read_start(FakeStore(), "enforce", START_US) == Start(mode="enforce")


def test_a_fault_of_storage_that_goes_on_as_events_say_is_known_at_the_start() -> None:
    store = FakeStore()
    rows = (("storage-fault", "a", 1), ("storage-recovered", "a", 2), ("storage-fault", "b", 3))
    store.tables["events"] = [
        {"kind": kind, "subject": backend, "at_us": START_US + number, "details": {"fault": "fails"}}
        for kind, backend, number in rows
    ]
    start = read_start(store, "observe", START_US)
    assert start.storage_faults == {"b": "fails"}
    assert Bench(start).controller.faults.restored == {"b": "fails"}


def test_every_gateway_that_was_not_lost_is_awaited() -> None:
    store = FakeStore()
    states = ("up", "stalled", "detached", "lost")
    store.tables["gateways"] = [{"gateway_id": s, "name": f"host-{s}", "state": s} for s in states]
    start = read_start(store, "observe", START_US)
    assert start.awaited == {s: f"host-{s}" for s in states[:3]}
    assert [known.name for known in start.gateways] == ["host-up"]


def test_a_gateway_that_was_lost_within_a_day_is_known_by_its_streams() -> None:
    store = FakeStore()
    store.tables["gateways"] = [
        {"gateway_id": name, "name": name, "state": "lost", "last_cut_us": START_US - hours * 3_600_000_000}
        for name, hours in (("a", 23), ("b", 25))
    ]
    store.add_stream(7, volume="vol-1", gateway="a")
    store.add_stream(8, volume="vol-1", gateway="b")
    (known,) = read_start(store, "observe", START_US).gateways
    assert (known.name, known.is_away, [stream["id"] for stream in known.streams]) == ("a", True, [7])


def test_the_marker_is_each_processs_own() -> None:
    clock = FakeClock()
    assert marker_event("a", clock) == marker_event("a", clock)
    assert marker_event("a", clock)[1]["event_id"] != marker_event("b", clock)[1]["event_id"]


def test_while_more_is_due_than_one_look_judges_the_next_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MOST_DUES", 1)
    scene = Scene()
    names = [f"a{number}" for number in range(3)]
    catalog = Start().catalog
    for number, name in enumerate(names):
        scene.store.add_stream(number, volume=name)
        scene.store.add_slot(START_US, stream_id=number, covered_us=MINUTE_US // 3)
        catalog = apply(catalog, docs(simple(name, volumes=name)), "ann", START_US).catalog
    scene.sql_worker.set_catalog(catalog)
    assert scene.sql_worker.pause_s == 1.0
    judged, pauses = [], []
    for number in range(4):
        (found,) = scene.look(MORE_S if number else 61)
        judged += [row["name"] for table, row in found.judgement.rows if table == "slices"]
        pauses.append(scene.sql_worker.pause_s)
    assert sorted(judged) == names
    assert pauses == [MORE_S, MORE_S, MORE_S, 1.0]  # the fourth finds that nothing is left
    assert scene.store.reads.count("progress") == 1  # that of the first look serves them all
    scene.look(1)
    assert scene.store.reads.count("progress") == 2


def test_judging_waits_while_mail_waits_and_goes_on_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_worker, "WAY_S", 60.0)
    scene, read = Scene(), threading.Event()
    scene.store.add_stream()
    scene.store.add_slot(START_US)
    scene.sql_worker.set_catalog(apply(Start().catalog, docs(simple()), "ann", START_US).catalog)
    whole = scene.store.late_cuts

    def seen(*args: Any) -> Any:
        read.set()
        return whole(*args)

    monkeypatch.setattr(scene.store, "late_cuts", seen)
    scene.sql_worker.yield_to_main_loop(to_mail=True)
    found: list[SqlState] = []
    thread = threading.Thread(target=lambda: found.extend(scene.look(61)), name="look-test")
    thread.start()
    assert read.wait(60)
    assert scene.sql_worker.found.empty()
    scene.sql_worker.yield_to_main_loop(to_mail=False)
    thread.join(60)
    assert [table for table, _ in found[0].judgement.rows] == ["slices"]
