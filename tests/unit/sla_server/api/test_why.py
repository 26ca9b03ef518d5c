"""``GET /why/NAME``: which facts are gathered for which question, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from pmdaemon.runtime.clock import FakeClock
from sla_server.agreements.load import load_documents
from sla_server.api.context import AppContext
from sla_server.services.control.decisions import RecordDecision
from tests.support import api
from tests.support.agreements import simple
from tests.support.api import NOW_US, snapshot
from tests.support.worlds import A, Feeder, controller, promise, rows_of, volume_class


def asked(source: api.FakeSource, name: str) -> list[tuple[Any, ...]]:
    return [call[1:] for call in source.asked if call[0] == name]


def test_a_throttled_volume_now(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    answer = web.get("/api/v1/why/batch").json
    assert (answer["kind"], answer["status"], answer["is_now"]) == ("volume", "throttled", True)
    assert answer["headline"] == "batch is throttled to 290 weighted IOPS, to keep erp-gold/latency."
    titles = [section["title"] for section in answer["sections"]]
    assert titles == ["Why", "It protects", "Windows", "Who used it", "Decided", "Volume", "Own promise",
                      "Decisions", "Units"]  # fmt: skip
    facts = answer["facts"]
    assert facts["measured"] == {"iops": 291.0, "p95_us": 131_000, "delay_us": 81_000}
    assert facts["protected"]["state"] == "ok", "as the live snapshot has it"
    assert (facts["loop"]["decision_id"], facts["finding"]) == ("d-1", None)


def test_a_volume_that_nothing_happens_to(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    answer = web.get("/api/v1/why/erp-db").json
    assert (answer["status"], answer["headline"]) == ("free", "erp-db is not throttled.")
    assert [row["sla"] for row in answer["facts"]["promises"]] == ["erp-gold"]
    assert "loop" not in answer["facts"]


def test_an_agreement_and_those_throttled_for_it(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    answer = web.get("/api/v1/why/erp-gold?objective=latency").json
    assert answer["headline"] == "erp-gold/latency is kept. batch is throttled for it."
    assert answer["facts"]["volumes"] == ["erp-db"]
    missing = web.get("/api/v1/why/erp-gold?objective=other")
    assert (missing.status_code, missing.json["fix"]) == (404, "It has latency")


def test_then_is_asked_of_sql_alone(web: FlaskClient, source: api.FakeSource, context: AppContext) -> None:
    context.live.put(snapshot())
    at_us = NOW_US - 41_500_000
    answer = web.get(f"/api/v1/why/batch?at_us={at_us}&tz=Europe/Berlin").json
    assert "was throttled to 290 weighted IOPS at 2027-01-15 08:59:18 CET" in answer["headline"]
    assert asked(source, "rollup_history") == [("batch", at_us, at_us + 1)]
    assert asked(source, "mode_at") == [(at_us,)]
    before = web.get(f"/api/v1/why/batch?at_us={NOW_US - 60_000_000}").json
    assert (before["status"], before["facts"]["later_more"]) == ("free", 0)
    assert before["facts"]["later"][0]["decision_id"] == "d-2"
    promise = web.get(f"/api/v1/why/erp-gold?at_us={at_us}").json["facts"]["promises"][0]
    assert (promise["state"], promise["live"], promise["slice"]["n"]) == ("good", None, 4_820)


def test_then_an_agreement_is_about_the_volumes_that_had_its_labels_then(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was about those that have them now: one that lost its label had no promise then."""
    row = source._agreement("erp-gold")
    spec = {
        **row["spec"]["spec"],
        "scope": {"volumes": ["*"], "clients": ["*"], "volume_labels": "tier=gold"},
    }
    row = {**row, "spec": {**row["spec"], "spec": spec}}
    hour_us = 3_600_000_000
    text = "apiVersion: storage-sla/v1\nkind: VolumeLabels\nmetadata: {name: tiers}\n"
    documents = []
    for version, volume, from_us, ended_us in (
        (1, "batch", NOW_US - 5 * hour_us, NOW_US - 4 * hour_us),
        (2, "erp-db", NOW_US - 4 * hour_us, NOW_US - hour_us),
        (3, "batch", NOW_US - hour_us, None),
    ):
        (loaded,) = load_documents(f"{text}spec: {{volumes: [{volume}], labels: {{tier: gold}}}}\n", 60)
        documents.append(
            {"kind": "VolumeLabels", "name": "tiers", "version": version, "spec": loaded.document.spec_json(),
             "applied_us": from_us, "ended_us": ended_us}
        )  # fmt: skip
    source.labels = documents[-1:]
    monkeypatch.setattr(source, "agreements_at", lambda *_about: iter([row]))
    monkeypatch.setattr(source, "agreement", lambda *_about: row)
    monkeypatch.setattr(
        source, "documents", lambda kind=None, *_: documents if kind == "VolumeLabels" else []
    )

    def promised(volume: str, hours: float) -> bool:
        at = f"?at_us={NOW_US - round(hours * hour_us)}" if hours else ""
        return bool(web.get(f"/api/v1/why/{volume}{at}").json["facts"]["promises"])

    def covered(hours: float) -> list[str]:
        found: list[str] = web.get(f"/api/v1/why/erp-gold?at_us={NOW_US - round(hours * hour_us)}").json[
            "facts"
        ]["volumes"]
        return found

    assert [promised("erp-db", hours) for hours in (0, 0.5, 2, 4.5)] == [False, False, True, False]
    assert [promised("batch", hours) for hours in (0, 0.5, 2, 4.5)] == [True, True, False, True]
    assert [covered(hours) for hours in (0.5, 2, 4.5)] == [["batch"], ["erp-db"], ["batch"]]


def test_a_slice_that_had_ended_by_then_does_not_say_how_it_was(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the minute asked for may not be judged yet, or never was; the one before it was taken."""
    at_us = NOW_US - 41_500_000
    judged = source.slice_at("erp-gold", "latency", at_us - 3_600_000_000)
    monkeypatch.setattr(source, "slice_at", lambda *_about: judged)
    answer = web.get(f"/api/v1/why/erp-gold?at_us={at_us}").json
    assert (answer["status"], answer["facts"]["promises"][0]["slice"]) == ("unknown", None)
    assert "was in a state that is not stored" in answer["headline"]
    assert "latency: no slice of that time is stored." in str(answer["sections"])
    episode = {"opened_us": at_us - 1, "closed_us": None, "worst_u": 3.0}
    monkeypatch.setattr(source, "episodes_until", lambda *_about: [episode])
    answer = web.get(f"/api/v1/why/erp-gold?at_us={at_us}").json
    assert (answer["status"], answer["facts"]["promises"][0]["state"]) == ("violated", "violating")


def test_a_live_view_that_is_old_is_not_taken_for_now(
    web: FlaskClient, context: AppContext, clock: FakeClock
) -> None:
    context.live.put(snapshot())
    clock.advance(60)
    answer = web.get("/api/v1/why/batch").json
    facts = answer["facts"]
    assert answer["sections"][0]["title"] == "Stored"
    assert "services part is silent" in answer["sections"][0]["lines"][0]
    assert facts["measured"] is None
    assert facts["protected"]["state"] is None
    promise = web.get("/api/v1/why/erp-gold").json["facts"]["promises"][0]
    assert (promise["state"], promise["live"], promise["slice"]["n"]) == (None, None, 4_820)


def test_an_unknown_name_is_answered_with_near_ones(web: FlaskClient) -> None:
    answer = web.get("/api/v1/why/ERP-gld")
    assert answer.status_code == 404
    assert answer.json["fix"] == "Near it: erp-gold, erp-db"
    far = web.get("/api/v1/why/zzz").json
    assert "sla get volumes" in far["fix"]
    of_kind = web.get("/api/v1/why/erp-gold?kind=volume")
    assert (of_kind.status_code, of_kind.json["detail"]) == (404, "no volume 'erp-gold' is known")


def test_a_name_of_two_things(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "known_names", lambda: [("erp-gold", "volume"), ("erp-gold", "sla")])
    answer = web.get("/api/v1/why/erp-gold")
    assert (answer.status_code, "kind=volume or kind=sla" in answer.json["fix"]) == (400, True)
    assert web.get("/api/v1/why/erp-gold?kind=sla").json["kind"] == "sla"


def test_a_volume_that_is_only_live_yet(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot(volumes=[{**snapshot()["volumes"][0], "volume": "new-one"}]))
    assert web.get("/api/v1/why/new-one").json["status"] == "free"


def test_an_agreement_that_has_ended(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "agreements_at", lambda *_args: iter(()))
    assert web.get("/api/v1/why/erp-gold").json["headline"] == "erp-gold is not in force."


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (f"at_us={NOW_US + 1}", "ahead of the server's clock"),
        ("at_us=x", "not an integer"),
        ("tz=Nowhere/City", "no time zone"),
        ("tz=../etc", "no time zone"),
        ("kind=x", "neither volume nor sla"),
        ("at=5", "no such parameter"),
    ],
)
def test_bad_questions(web: FlaskClient, query: str, words: str) -> None:
    answer = web.get(f"/api/v1/why/batch?{query}")
    assert answer.status_code == 400
    assert words in answer.json["detail"]


def test_a_database_that_is_away(web: FlaskClient, source: api.FakeSource) -> None:
    source.away = True
    assert web.get("/api/v1/why/batch").status_code == 503


def test_objectives_without_a_live_row_are_as_their_newest_slice(
    web: FlaskClient, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixed agreement has one objective: here it gets two more."""
    row = api.gold()
    row["spec"]["spec"]["objectives"] += [
        {"name": "rate", "indicator": {"metric": "iops"}, "promised_iops": 500.0},
        {"name": "up", "indicator": {"metric": "availability"}, "outage": "5s"},
    ]
    monkeypatch.setattr(api, "gold", lambda: row)
    context.live.put(snapshot())
    answer = web.get("/api/v1/why/erp-gold").json
    latency, rate, up = answer["facts"]["promises"]
    assert (latency["state"], latency["slice"]) == ("ok", None)
    assert (rate["state"], rate["promised_iops"], rate["slice"]["n"]) == ("good", 500.0, 4_820)
    assert (up["state"], up["slice"]["n"], up["outage"]) == ("good", 4_820, "5s")


def test_a_promise_that_the_snapshot_has_no_room_for_says_its_state(
    web: FlaskClient, context: AppContext
) -> None:
    full = {**snapshot(), "slas": [], "others": [["erp-gold", "latency", "at-risk", 0.99, 1.0, 0.25]]}
    context.live.put(full)
    (promise,) = web.get("/api/v1/why/erp-gold").json["facts"]["promises"]
    assert promise["state"] == "at-risk"


def test_the_mode_is_that_of_the_agreement_else_of_the_backend(
    web: FlaskClient, source: api.FakeSource, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts(name: str, at: str = "") -> dict[str, Any]:
        found: dict[str, Any] = web.get(f"/api/v1/why/{name}{at}").json["facts"]
        return found

    context.live.put({**snapshot(), "backend_modes": {"disk-0": "observe"}})
    on_disk = {"mode": "observe", "of": "backend", "name": "disk-0"}
    assert facts("erp-db")["mode_here"] == on_disk
    assert facts("erp-gold")["modes"] == [{"backend": "disk-0", **on_disk}]
    assert facts("batch")["mode_for"] == on_disk
    row = api.gold()
    row["spec"]["spec"]["control"] = "enforce"
    monkeypatch.setattr(api, "gold", lambda: row)
    own = {"mode": "enforce", "of": "agreement", "name": "erp-gold"}
    assert facts("erp-gold")["modes"] == [{"backend": "disk-0", **own}]
    assert facts("batch")["mode_for"] == own
    assert facts("erp-db")["own_modes"] == [{"name": "erp-gold", "mode": "enforce"}]
    monkeypatch.setattr(source, "backend_modes_at", lambda _at_us: {"disk-0": "observe"})
    at_us = NOW_US - 41_500_000
    assert facts("erp-db", f"?at_us={at_us}")["mode_here"] == on_disk


def test_a_throttle_set_for_another_promise_of_the_same_loop_is_for_this_one_too(
    web: FlaskClient, source: api.FakeSource, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.live.put(snapshot())
    cap, step = api.decisions()
    mine = {**step, "figures": {**step["figures"], "victims": ["crm/latency", "erp-gold/latency"]}}
    rows = [{**cap, "victim": "crm/latency"}, {**mine, "victim": "crm/latency"}]
    monkeypatch.setattr(api, "decisions", lambda: rows)
    row = api.throttle(victim="crm/latency")
    monkeypatch.setattr(api, "throttle", lambda: row)
    answer = web.get("/api/v1/why/erp-gold").json
    assert answer["headline"] == "erp-gold/latency is kept. batch is throttled for it."
    assert web.get("/api/v1/why/batch").json["facts"]["protects"] == ["erp-gold/latency"]
    released = {**step, "kind": "release", "at_us": NOW_US - 41_000_000, "victim": "crm/latency"}
    monkeypatch.setattr(api, "decisions", lambda: [released, *rows])
    assert web.get("/api/v1/why/erp-gold").json["facts"]["throttles"] == [], "of a loop that has ended"
    monkeypatch.setattr(api, "decisions", lambda: [{**mine, "figures": {}, "victim": "crm/latency"}])
    assert web.get("/api/v1/why/erp-gold").json["headline"] == "erp-gold/latency is kept."


def test_of_two_promises_at_risk_at_once_the_loops_throttle_is_for_both(
    web: FlaskClient, source: api.FakeSource, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a controller decides is what is asked: the promise that does not lead is helped all the same."""
    names = ("aaa", "erp-gold")
    made = Feeder(
        controller([promise(n) for n in names], [volume_class(n) for n in names]), (A, (*names, "batch"))
    )
    late = {"aaa": (60, 40.0), "erp-gold": (60, 30.0), "batch": (400, 30.0)}
    decided: list[Any] = []
    for _ in range(4):
        decided += made.step((A, late, made.controller.policy.gateways[A].gen))
    moved = NOW_US - made.unix_us
    rows = [{**d.row, "at_us": d.row["at_us"] + moved} for d in decided if isinstance(d, RecordDecision)]
    (caps,) = [{**row, "requested_us": row["requested_us"] + moved} for row in rows_of(decided)[-1:]]
    assert caps["victim"] == "aaa/latency"
    monkeypatch.setattr(api, "decisions", lambda: rows[::-1])
    monkeypatch.setattr(api, "throttle", lambda: caps)
    monkeypatch.setattr(source, "backends_of", lambda _volumes: {"disk"})
    context.live.put(snapshot())
    answer = web.get("/api/v1/why/erp-gold").json
    assert answer["headline"] == "erp-gold/latency is kept. batch is throttled for it."
    (helping,) = [each["lines"] for each in answer["sections"] if each["title"] == "For it"]
    assert "It was set for aaa/latency; the loop helps this promise by it, too." in helping[0]


def test_a_time_that_lies_ahead_is_refused_in_the_askers_words(web: FlaskClient) -> None:
    answer = web.get(f"/api/v1/why/batch?at_us={NOW_US + 60_000_000}&tz=Europe/Berlin").json
    assert answer["detail"] == (
        "time asked for (at_us): 2027-01-15 09:01:00 CET lies ahead of the server's clock, which says "
        "2027-01-15 09:00:00 CET"
    )
    assert answer["fix"] == "Give a time that has passed, or none for now"
    assert "the year 9999 lies ahead" in web.get(f"/api/v1/why/batch?at_us={1 << 62}").json["detail"]


def test_a_throttle_that_is_not_in_sql_yet_is_known_from_the_live_view(
    web: FlaskClient, context: AppContext
) -> None:
    row = {**snapshot()["throttles"][0], "throttle_id": "t-9", "volume": "erp-db", "source": "manual"}
    row |= {"victim": "", "who": "ann", "cost_per_s": None, "ops_per_s": 20.0, "state": "requested"}
    row |= {"lifted_to": {"ops_per_s": 50.0}, "floor": "its floor", "text": "nightly copy"}
    slas = [{**snapshot()["slas"][0], "state": "at-risk"}]
    context.live.put(snapshot(throttles=[row], slas=slas))
    of_volume = web.get("/api/v1/why/erp-db").json
    assert of_volume["headline"].startswith("erp-db is throttled to 50 IOPS, set by hand by ann at 07:59:18.")
    of_agreement = web.get("/api/v1/why/erp-gold").json
    assert "Its own erp-db is throttled by hand to 50 IOPS" in of_agreement["headline"]
    (line,) = [each["lines"][0] for each in of_agreement["sections"] if each["title"] == "Its volumes"]
    assert line.startswith("erp-db is throttled itself since 07:59:18, set by hand by ann")
    observed = {**row, "state": "observed"}
    context.live.put(snapshot(throttles=[observed], slas=slas))
    assert web.get("/api/v1/why/erp-db").json["status"] == "free", "it only would be throttled"


def test_maintenance_that_came_with_too_little_notice(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gold,) = load_documents(simple("erp-gold", volumes="erp-db", extra="  maintenance: {notice: 90d}\n"), 60)
    row = {**api.gold(), "spec": gold.document.spec_json()}
    (work,) = source.documents("Maintenance")[:1]
    work["spec"]["spec"]["scope"]["agreements"] = ["erp-*"]
    monkeypatch.setattr(source, "agreements_at", lambda _at_us, _name=None: iter([row]))
    monkeypatch.setattr(source, "documents", lambda _kind: [work])
    for name in ("erp-gold", "erp-db"):
        answer = web.get(f"/api/v1/why/{name}").json
        (found,) = answer["facts"]["unexcused"]
        assert (found["maintenance"], found["sla"], found["notice_s"]) == ("disks", "erp-gold", 90 * 86_400)
        assert "Maintenance" in [section["title"] for section in answer["sections"]]
