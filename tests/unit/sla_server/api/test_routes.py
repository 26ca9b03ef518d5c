"""Every route through Flask's test client, over the fakes."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from typing import Any

import pytest
from flask.testing import FlaskClient

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.messages.server import Pressure, Problem
from sla_server.api import openapi
from sla_server.api.app import handler_of
from sla_server.api.context import AppContext
from sla_server.api.route import PREFIX
from sla_server.api.routes import ROUTES
from sla_server.db.queries.backend_load import BackendLoad
from tests.support import api
from tests.support.api import NOW_US, snapshot

READS = [
    route
    for route in ROUTES
    if route.method == "GET" and route.answer == "application/json" and "{" not in route.path
]


def items(web: FlaskClient, path: str) -> list[dict[str, Any]]:
    answer = web.get(f"/api/v1/{path}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json["items"]
    return found


def test_the_url_map_and_the_document_are_the_table(web: FlaskClient) -> None:
    served = {
        (method, rule.rule.replace("<", "{").replace(">", "}"))
        for rule in web.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if rule.rule.startswith(PREFIX)
    }
    described = web.get("/api/v1/openapi.json").json
    documented = {
        (method.upper(), path) for path, methods in described["paths"].items() for method in methods
    }
    assert served == documented
    assert len(served) == len(ROUTES)
    assert described["openapi"].startswith("3.1")


def test_every_route_is_whole() -> None:
    names = [route.operation for route in ROUTES]
    assert len(names) == len(set(names))
    for route in ROUTES:
        assert handler_of(route).__doc__, route.operation
        assert {route.body, route.schema} <= {"", *openapi.SCHEMAS}
        assert route.changes == (route.method != "GET"), "reading is open, changing is not"


@pytest.mark.parametrize("route", READS, ids=lambda route: route.operation)
def test_reads_carry_an_etag_and_answer_304(
    web: FlaskClient, context: AppContext, bearer: dict[str, str], route: Any
) -> None:
    context.live.put(snapshot())
    first = web.get(route.rule, headers=bearer)
    assert first.status_code == 200
    assert first.mimetype == "application/json"
    again = web.get(route.rule, headers={**bearer, "If-None-Match": first.headers["ETag"]})
    assert again.status_code == 304
    assert again.data == b""


@pytest.mark.parametrize(
    "path", ["gateways", "volumes", "slas", "throttles", "events", "policies", "audit", "totals"]
)
def test_a_database_that_is_away_is_said(web: FlaskClient, source: api.FakeSource, path: str) -> None:
    source.away = True
    answer = web.get(f"/api/v1/{path}")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert "connection refused" in answer.json["detail"]
    assert web.get("/api/v1/live").status_code == 200, "the live view needs no database"


def test_the_live_view_says_that_the_database_is_away(
    web: FlaskClient, source: api.FakeSource, context: AppContext, clock: FakeClock
) -> None:
    source.away = True
    context.live.put(snapshot(NOW_US, database="as services found it"))
    fresh = web.get("/api/v1/live").json
    assert (fresh["server"]["database"], fresh["slas"]) == ("as services found it", snapshot()["slas"])
    clock.advance(60)  # services are silent: they wait for the database themselves
    silent = web.get("/api/v1/live").json
    assert silent["server"]["stale"]
    assert "connection refused" in silent["server"]["database"]
    assert silent["slas"] == snapshot()["slas"], "what was last known is kept"


def test_volumes_join_exact_counts_and_the_live_view(web: FlaskClient, context: AppContext) -> None:
    fresh = {**snapshot()["volumes"][0], "volume": "new-one"}
    context.live.put(snapshot(volumes=[*snapshot()["volumes"], fresh]))
    rows = {row["volume"]: row for row in items(web, "volumes")}
    assert rows["erp-db"]["reads"] == 48_211
    assert rows["erp-db"]["live"]["iops"] == 80.4
    new = rows["new-one"]
    assert (new["reads"], new["cuts"], new["last_us"]) == (0, 0, None), "nothing of it is stored yet"
    assert set(rows["erp-db"]) - set(new) <= {"first_us", "size_bytes"}, "rows have one form"


def test_one_volume_and_its_streams(web: FlaskClient, source: api.FakeSource) -> None:
    row = web.get("/api/v1/volumes/erp-db").json
    assert row["live"] is None
    assert row["by_stream"][0]["stream_id"] == str((1 << 62) + 1)
    assert web.get("/api/v1/volumes/none").status_code == 404
    assert web.get("/api/v1/volumes/erp-db?streams=100").json["streams"] == row["streams"], (
        "how many there are"
    )
    asked = [each[1:] for each in source.asked if each[0] == "streams"]
    assert asked == [("erp-db", None), ("erp-db", 100)], "a page does not load thousands"
    assert web.get("/api/v1/volumes/erp-db?streams=0").status_code == 400


def test_a_volume_of_which_nothing_is_stored_yet_is_no_404(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot(volumes=[{**snapshot()["volumes"][0], "volume": "new-one"}]))
    assert web.get("/api/v1/volumes/new-one").json["reads"] == 0


def test_what_is_seen_now_and_not_stored_yet_has_an_empty_history_that_says_so(
    web: FlaskClient, source: api.FakeSource, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = snapshot()
    context.live.put(
        {**seen, "volumes": [*seen["volumes"], {"volume": "new-one", "backend": "new-disk"}],
         "backends": [*seen["backends"], {"backend": "new-disk", "cost_per_s": 5.0}]}
    )  # fmt: skip
    monkeypatch.setattr(source, "rollup_history", lambda *_: [])
    monkeypatch.setattr(source, "backend_of", lambda volume: "disk-0" if volume == "erp-db" else None)
    empty = BackendLoad([], [])
    monkeypatch.setattr(source, "of_backend", lambda *_: empty)
    for path in ("volumes/new-one", "backends/new-disk"):
        answer = web.get(f"/api/v1/{path}/history").json
        assert (answer["items"], "stored of it yet" in answer["note"]) == ([], True)
        assert web.get(f"/api/v1/{path}").status_code == 200
    for path in ("volumes/erp-db", "backends/disk-0"):
        assert web.get(f"/api/v1/{path}/history").json["note"] is None, "it was idle"
    for path in ("volumes/gone", "backends/gone"):
        assert web.get(f"/api/v1/{path}/history").status_code == 404
    listed = {row["backend"]: row["live"]["cost_per_s"] for row in items(web, "backends")}
    assert listed == {"disk-0": 371.0, "new-disk": 5.0}
    assert [row["backend"] for row in items(web, "backends?match=NEW")] == ["new-disk"]


def test_what_goes_on_has_counts_and_no_rates(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a minute's I/Os over the whole minute would look like a drop."""
    minute_us = 60_000_000
    begun_us = [NOW_US - 2 * minute_us - 6_000_000, NOW_US - minute_us - 6_000_000, NOW_US - 6_000_000]
    rows = [
        {"slot_us": at_us, "length_us": minute_us, "reads": 9, "iops": 80.0, "bytes_per_s": 1e6}
        for at_us in begun_us
    ]
    monkeypatch.setattr(source, "rollup_history", lambda *_: [dict(row) for row in rows])
    found = items(web, "volumes/erp-db/history")
    assert [row["iops"] for row in found] == [80.0, 80.0, None]
    assert (found[-1]["bytes_per_s"], found[-1]["reads"]) == (None, 9)


def test_history_takes_the_last_hour_by_default(web: FlaskClient, source: api.FakeSource) -> None:
    rows = items(web, "volumes/erp-db/history")
    assert source.asked[-1] == ("rollup_history", "erp-db", NOW_US - 3_600_000_000, NOW_US)
    assert rows[0]["iops"] == 80.0
    items(web, f"volumes/erp-db/history?from_us={NOW_US - 5}&to_us={NOW_US - 1}")
    assert source.asked[-1][2:] == (NOW_US - 5, NOW_US - 1)


@pytest.mark.parametrize(
    "query", ["from_us=x", "from_us=5&to_us=5", "from_us=9&to_us=1", "from_us=0", "to_us=-1"]
)
def test_spans_that_make_no_sense(web: FlaskClient, query: str) -> None:
    answer = web.get(f"/api/v1/volumes/erp-db/history?{query}")
    assert answer.status_code == 400
    assert "_us" in answer.json["detail"]


def test_a_span_that_is_too_long_says_what_to_do(web: FlaskClient) -> None:
    forty_days_us = 40 * 86_400_000_000
    refused = web.get(f"/api/v1/backends/disk-0/history?from_us={NOW_US - forty_days_us}").json
    assert "more than 31 days before to_us" in refused["detail"]
    assert "in parts" in refused["fix"]


def test_agreements(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    row = items(web, "slas")[0]
    assert "document" not in row
    assert row["live"][0]["state"] == "ok"
    assert web.get("/api/v1/slas/erp-gold").json["document"].startswith("apiVersion")
    missing = web.get("/api/v1/slas/none")
    assert missing.status_code == 404
    assert "sla get slas" in missing.json["fix"]


def test_slices_take_the_first_objective(web: FlaskClient, source: api.FakeSource) -> None:
    answer = web.get("/api/v1/slas/erp-gold/slices").json
    assert answer["objective"] == "latency"
    assert answer["counts"] == {"good": 1}
    assert answer["to_us"] - answer["from_us"] == 24 * 3_600_000_000
    assert web.get("/api/v1/slas/erp-gold/slices?objective=latency").json["objective"] == "latency"


def test_slices_go_on_where_the_page_before_ended(web: FlaskClient, source: api.FakeSource) -> None:
    path = f"/api/v1/slas/erp-gold/slices?limit=2&to_us={NOW_US}&from_us="
    first = web.get(path + str(NOW_US - 3_600_000_000)).json
    second = web.get(path + first["next"]).json
    assert [row["start_us"] - first["from_us"] for row in first["items"]] == [0, 60_000_000]
    assert second["items"][0]["start_us"] == first["items"][-1]["start_us"] + 60_000_000
    assert source.asked[-2][-1] == 3, "one more than the page, to know whether there is a next"
    whole = web.get("/api/v1/slas/erp-gold/slices").json
    assert (len(whole["items"]), whole["next"]) == (3, None)
    assert web.get("/api/v1/slas/erp-gold/slices?limit=5001").status_code == 400


def test_slices_of_an_episode_begin_with_the_one_in_which_it_opened(
    web: FlaskClient, source: api.FakeSource
) -> None:
    episode = items(web, "episodes?name=erp-gold&open=1")[0]
    assert source.asked[-1] == ("episodes", True, 100, "erp-gold", None, None, None)
    answer = web.get(episode["slices"]).json
    assert answer["objective"] == "latency"
    assert answer["to_us"] == episode["closed_us"]
    assert 0 <= episode["opened_us"] - answer["from_us"] < 24 * 3_600_000_000
    other = web.get(f"/api/v1/slas/other/slices?episode={episode['episode_id']}")
    assert (other.status_code, other.json["fix"]) == (404, "GET /api/v1/episodes lists them")


def test_the_period_that_goes_on_has_what_is_left_of_its_budget_now(
    web: FlaskClient, context: AppContext
) -> None:
    def budgets() -> list[float | None]:
        return [row["budget_remaining"] for row in items(web, "slas/erp-gold/periods?limit=2")]

    unknown, past = budgets()
    assert unknown is None
    context.live.put(snapshot())
    assert budgets() == [0.63, past]


def test_past_periods_come_from_the_stored_slices(web: FlaskClient, source: api.FakeSource) -> None:
    answer = web.get("/api/v1/slas/erp-gold/periods?limit=3").json
    row, before = answer["items"]  # the agreement began in the period before this one
    assert before["is_over"]
    assert (row["is_over"], row["no_data_ours"], row["inexact"], row["budget_remaining"]) == (
        False,
        1,
        14,
        None,
    )
    assert row["slices"] == {"good": 985, "bad": 14, "no_data": 1, "not_applicable": 0, "excluded": 60}
    assert row["compliance"] == pytest.approx(985 / 1000)
    assert (row["bad_s"], row["due_s"], row["slice_lengths_s"]) == (15 * 60, 1000 * 60, [60])
    assert ("slice_sums", "erp-gold", "latency", row["from_us"], row["to_us"]) in source.asked
    assert web.get("/api/v1/slas/erp-gold/periods?objective=none").status_code == 404


def test_events_page_through_without_gap_or_double(web: FlaskClient) -> None:
    seen, cursor = [], None
    for _ in range(10):
        page = web.get("/api/v1/events?limit=7" + (f"&before={cursor}" if cursor else "")).json
        seen += [row["event_id"] for row in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == [f"e{number:04}" for number in range(25)]


@pytest.mark.parametrize(
    "query",
    ["before=nonsense", "before=1:", "before=9223372036854775808:e1", "before=%C2%B2:e1", "limit=0",
     "limit=1001", "limit=x"],
)  # fmt: skip
def test_bad_paging(web: FlaskClient, source: api.FakeSource, query: str) -> None:
    assert web.get(f"/api/v1/events?{query}").status_code == 400
    assert source.asked == [], "no database has a number for it"


@pytest.mark.parametrize(
    "path", ["slas/a%00b", "slas/erp-gold/slices?objective=%00", "policies/3/caps?after=%00:1"]
)
def test_text_that_no_database_takes_is_refused_at_the_door(
    web: FlaskClient, source: api.FakeSource, path: str
) -> None:
    answer = web.get(f"/api/v1/{path}")
    assert (answer.status_code, source.asked) == (400, [])
    assert "NUL" in answer.json["detail"]


def test_throttles_in_force(web: FlaskClient, source: api.FakeSource) -> None:
    items(web, "throttles?in_force=1&limit=5")
    assert source.asked[-1] == ("throttles", True, 5, None, None)
    assert web.get("/api/v1/throttles?in_force=maybe").status_code == 400


def test_policy_caps(web: FlaskClient, source: api.FakeSource) -> None:
    assert items(web, "policies/3/caps?hour=0")[0]["volume"] == "batch"
    assert source.asked[-1] == ("policy_caps", 3, 0, 2000, None)
    assert web.get("/api/v1/policies/3/caps?limit=1").json["next"] == "batch:0"
    assert web.get("/api/v1/policies/3/caps?limit=1&after=batch:0").json == {"items": [], "next": None}
    assert source.asked[-1] == ("policy_caps", 3, None, 1, "batch:0")
    asked = len(source.asked)
    for after in ("nonsense", "batch:", "batch:9223372036854775808", "batch:-1"):
        assert web.get(f"/api/v1/policies/3/caps?after={after}").status_code == 400
    assert web.get("/api/v1/policies/%C2%B2/caps").status_code == 400
    assert len(source.asked) == asked
    assert web.get("/api/v1/policies/4/caps").status_code == 404
    assert web.get("/api/v1/policies/x/caps").status_code == 400
    assert web.get("/api/v1/policies/3/caps?hour=168").status_code == 400


def test_live_says_whether_it_is_fresh(web: FlaskClient, context: AppContext, clock: FakeClock) -> None:
    empty = web.get("/api/v1/live?since=-1").json
    assert empty["at_us"] == 0
    assert empty["server"] == {"age_s": None, "stale": True, "database": ""}
    context.live.put(snapshot())
    assert web.get("/api/v1/live").json["server"] == {"age_s": 0.0, "stale": False, "database": ""}
    assert web.get(f"/api/v1/live?since={NOW_US}").status_code == 204
    assert web.get(f"/api/v1/live?since={NOW_US - 1}").status_code == 200
    assert web.get(f"/api/v1/live?since={NOW_US + 9}").status_code == 200, (
        "a clock stepped back is no dead end"
    )
    clock.advance(9.0)
    assert web.get("/api/v1/live").json["server"]["stale"]


def test_a_stream_takes_a_place_and_gives_it_back(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    answer = web.get("/api/v1/live/stream", buffered=False)
    assert answer.mimetype == "text/event-stream"
    assert answer.headers["Cache-Control"] == "no-store"
    assert context.live.streams == 1
    event = next(iter(answer.response))
    payload = event.decode() if isinstance(event, bytes) else event
    assert json.loads(payload.partition("data: ")[2])["mode"] == "enforce"
    answer.close()
    assert context.live.streams == 0


def test_a_stream_beyond_the_limit(web: FlaskClient, context: AppContext) -> None:
    places = [context.live.take_place() for _ in range(context.live.streams_max)]
    answer = web.get("/api/v1/live/stream")
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert "live?since=" in answer.json["fix"]
    assert "sla_api_live_streams_refused_total 1.0" in web.get("/api/v1/metrics").text
    places[0].release()


def test_mode_fullness_and_processes(web: FlaskClient, context: AppContext) -> None:
    policy = {"mode": None, "backends": {}}
    assert web.get("/api/v1/mode").json == {"mode": None, "backends": {}, "policy": policy, "stale": True}
    stage = {"stage": "observe", "stages": {"array-1": "enforce"}, "would_hold": []}
    context.live.put({**snapshot(), "backend_modes": {"array-1": "observe"}, "policy_stage": stage})
    assert web.get("/api/v1/mode").json == {
        "mode": "enforce",
        "backends": {"array-1": "observe"},
        "policy": {"mode": "observe", "backends": {"array-1": "enforce"}},
        "stale": False,
    }
    assert web.get("/api/v1/health").json["fullness"] == {}
    pressed = {"name": "dbmanager", "pressure": {"fullness": {"ingest-queue": 0.5}, "refused": {}}}
    context.live.put({**snapshot(), "processes": [{"name": "services", "pressure": None}, pressed]})
    assert web.get("/api/v1/health").json["fullness"] == {"dbmanager/ingest-queue": 0.5}
    assert items(web, "processes")[0]["name"] == "services"


def health(web: FlaskClient) -> tuple[int, str, list[tuple[str, str]]]:
    answer = web.get("/api/v1/health")
    rows = [(row["process"], row["what"]) for row in answer.json["problems"]]
    return answer.status_code, answer.json["status"], rows


def test_health_is_ok_degraded_or_down(
    web: FlaskClient, context: AppContext, source: api.FakeSource, clock: FakeClock
) -> None:
    assert health(web) == (503, "down", [("services", "services")]), "they have not spoken yet"
    context.live.put(snapshot())
    assert health(web) == (200, "ok", [])
    full = {"process": "dbmanager", "what": "database", "since_us": 7, "reason": "No space left on device"}
    context.live.put({**snapshot(), "problems": [full]})
    assert health(web) == (200, "degraded", [("dbmanager", "database")])
    assert web.get("/api/v1/health").json["problems"] == [full]
    assert web.get("/api/v1/live").json["problems"] == [full]
    metric = 'sla_problem{process="dbmanager",what="database"} 1.0'
    assert metric in web.get("/api/v1/metrics").text
    source.away = True
    assert health(web) == (503, "down", [("appserver", "database"), ("dbmanager", "database")])
    assert "connection refused" in web.get("/api/v1/health").json["database"]
    source.away = False
    clock.advance(context.config.stale_after_s + 1)
    assert health(web) == (503, "down", [("services", "services")]), "old words of services say nothing"
    [silent] = web.get("/api/v1/health").json["problems"]
    assert silent["since_us"] == clock.unix_us() - 6_000_000
    assert metric not in web.get("/api/v1/metrics").text


def test_ready_is_an_answer_of_its_own(
    web: FlaskClient, context: AppContext, source: api.FakeSource, clock: FakeClock
) -> None:
    def asked() -> tuple[int, list[str]]:
        answer = web.get("/api/v1/ready")
        assert answer.json["ready"] == (answer.status_code == 200)
        assert answer.status_code == 200 or answer.headers["Retry-After"]
        return answer.status_code, [row["process"] for row in answer.json["waits_for"]]

    assert asked() == (503, ["services"]), "no snapshot yet"
    troubled = {"process": "dbmanager", "what": "queue", "since_us": 7, "reason": "full"}
    context.live.put({**snapshot(), "problems": [troubled]})
    assert asked() == (200, []), "degraded, but it does its work"
    source.away = True
    assert asked() == (503, ["database"])
    clock.advance(60)
    assert asked() == (503, ["database", "services"])
    alive = web.get("/api/v1/alive")
    assert (alive.status_code, alive.json) == (200, {"alive": True}), "it asks no other part"


def test_health_is_documented_as_it_is_answered(web: FlaskClient, context: AppContext) -> None:
    described = openapi.document()
    answers = described["paths"]["/api/v1/health"]["get"]["responses"]
    schema = {"schema": {"$ref": "#/components/schemas/Health"}}
    assert [answers[status]["content"] for status in ("200", "503")] == 2 * [{"application/json": schema}]
    wanted = described["components"]["schemas"]["Health"]
    for status in (503, 200):
        answer = web.get("/api/v1/health")
        assert answer.status_code == status
        assert set(answer.json) == set(wanted["required"])
        of_several = {"acting", "acting_page", "stands_by", "pages"}
        assert set(wanted["properties"]) == set(answer.json) | of_several
        assert answer.json["status"] in wanted["properties"]["status"]["enum"]
        for row in answer.json["problems"]:
            assert set(row) == set(wanted["properties"]["problems"]["items"]["required"])
        context.live.put(snapshot())


def test_a_damaged_database_is_down_because_it_does_not_heal(web: FlaskClient, context: AppContext) -> None:
    damaged = {"process": "dbmanager", "what": "database-damaged", "since_us": 7, "reason": "restore it"}
    context.live.put({**snapshot(), "problems": [damaged]})
    assert health(web) == (503, "down", [("dbmanager", "database-damaged")])


def test_what_the_supervisor_says_is_shown_while_services_are_silent(
    web: FlaskClient, context: AppContext, clock: FakeClock
) -> None:
    hangs = Problem("services", 7, "services has made no progress for 12 s")
    context.live.put_report(Pressure("supervisor", clock.unix_us(), {}, {}, (hangs,)))
    context.live.put_report(Pressure("dbmanager", clock.unix_us(), {}, {}))
    answer = web.get("/api/v1/health").json
    assert ("services", hangs.reason) in [(row["process"], row["reason"]) for row in answer["problems"]]


@pytest.mark.parametrize(("number", "status"), [(errno.EMFILE, 503), (errno.ENOMEM, 503), (errno.EIO, 500)])
def test_a_server_short_of_descriptors_asks_to_come_again(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def processes() -> list[dict[str, Any]]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(source, "processes", processes)
    assert web.get("/api/v1/health").status_code == status


def test_while_services_wait_dbmanager_says_itself_what_for(
    web: FlaskClient, context: AppContext, clock: FakeClock
) -> None:
    report = Pressure("dbmanager", clock.unix_us(), {}, {}, (Problem("database", 7, "waits: disk full"),))
    context.live.put_report(report)
    assert health(web) == (503, "down", [("services", "services"), ("dbmanager", "database")])
    assert web.get("/api/v1/live").json["server"]["database"] == "waits: disk full"
    metric = 'sla_problem{process="dbmanager",what="database"} 1.0'
    assert metric in web.get("/api/v1/metrics").text
    clock.advance(11)
    assert health(web) == (503, "down", [("services", "services")]), "an old report says nothing"
    assert metric not in web.get("/api/v1/metrics").text
    context.live.put_report(replace(report, at_us=clock.unix_us()))
    context.live.put(snapshot(clock.unix_us()))
    assert health(web) == (200, "ok", []), "services know better"


def test_metrics_count_requests(web: FlaskClient) -> None:
    web.get("/api/v1/totals")
    text = web.get("/api/v1/metrics").text
    assert 'sla_api_requests_total{operation="totals",status="200"} 1.0' in text
    assert "sla_api_snapshot_age_seconds -1.0" in text


def test_unknown_paths_and_methods_are_problems(web: FlaskClient) -> None:
    for answer, status in ((web.get("/api/v1/none"), 404), (web.post("/api/v1/live"), 405)):
        assert answer.status_code == status
        assert answer.mimetype == "application/problem+json"
        assert answer.json["status"] == status
        assert answer.json["fix"]


def test_a_fault_of_ours_tells_no_details(web: FlaskClient, source: api.FakeSource) -> None:
    source.totals = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    answer = web.get("/api/v1/totals")
    assert answer.status_code == 500
    assert "division" not in answer.text


@pytest.mark.parametrize(
    "path", ["events?severity=critical", "slas?size=5", "volumes/erp-db?x=", "mode?mode"]
)
def test_a_parameter_that_is_not_known_is_refused(web: FlaskClient, path: str) -> None:
    answer = web.get(f"/api/v1/{path}")
    assert answer.status_code == 400
    assert "there is no such parameter" in answer.json["detail"]


@pytest.mark.parametrize("query", ["limit=", "before=", "limit=%20", "limit=1_0", "limit=%D9%A1"])
def test_a_parameter_without_a_value_or_with_half_a_number_is_refused(web: FlaskClient, query: str) -> None:
    assert web.get(f"/api/v1/events?{query}").status_code == 400


def test_a_wrong_method_names_those_that_are_allowed(web: FlaskClient) -> None:
    answer = web.post("/api/v1/mode")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD, PUT")


def test_the_limits_of_parameters_are_in_the_document(web: FlaskClient) -> None:
    paths = web.get("/api/v1/openapi.json").json["paths"]
    limit = next(item for item in paths["/api/v1/events"]["get"]["parameters"] if item["name"] == "limit")
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000}
    assert "204" in paths["/api/v1/live"]["get"]["responses"]
