"""An account with labels sees its own agreements, on every route of the table."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from dashboard.views import VIEWS
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from sla_server.agreements.volume_labels import LabelBook
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.api.route import PREFIX, ApiRoute
from sla_server.api.routes import ROUTES
from sla_server.api.scope import LabelScope
from sla_server.db.errors import DatabaseUnavailable
from tests.support import api
from tests.unit.sla_server.api.conftest import Browser

OTHERS = ("erp", "gold", "batch", "disk-0", "gateway-", "mail", "scratch", "reports", "ann")
"""Names of what belongs to others, in the fakes' rows."""
KNOWN = {"name": "erp-gold", "volume": "erp-db", "version": "2", "kind": "Route", "event_id": "e0001"}
KNOWN |= {"owner": "gateway-a", "pool": "data", "other": "3", "operation_id": "x", "which": "x"}
KNOWN |= {"address": "10.0.0.5:7412", "throttle_id": "t-1", "session_id": "5e55"}
KNOWN |= {"report_id": "erp-gold-2026-12", "backend": "disk-0", "approval_id": "5c0f"}


class Customers(api.FakeSource):
    """One agreement of globex's beside the one of the fakes, and an event and an episode of it."""

    def agreements(self, in_force: bool = True) -> list[dict[str, Any]]:
        spec = {"metadata": {"labels": {"customer": "globex"}}, "spec": {"scope": {"volumes": ["glo-*"]}}}
        own = {"name": "globex-silver", "version": 1, "priority": "silver", "ended_us": None, "spec": spec}
        own["applied_by"] = "staff"
        return [*super().agreements(in_force), own]

    def agreement(self, name: str, version: int | None = None) -> dict[str, Any] | None:
        if name != "globex-silver":
            return super().agreement(name, version)
        return next(row for row in self.agreements() if row["name"] == name)

    def volumes(self) -> list[dict[str, Any]]:
        rows = super().volumes()
        return [*rows, {**rows[0], "volume": "glo-1", "backend": "glo-disk"}]

    def volume_owner_names(self, volumes: Any = None) -> dict[str, list[str]]:
        return {}

    def episodes(self, *wanted: Any, **more: Any) -> list[dict[str, Any]]:
        return [*super().episodes(*wanted, **more), {**api.EPISODE, "name": "globex-silver"}]

    def events(self, limit: int = 100, before: str | None = None, since_us: int | None = None) -> Any:
        rows = super().events(limit, before, since_us)
        own = {"element": "sla", "subject": "globex-silver/latency", "text": "batch is in its way"}
        return [*rows, {**rows[0], **own, "event_id": "x1", "cursor": "1:x1"}]


@pytest.fixture
def globex(mailbox: api.AnsweringMailbox, clock: FakeClock) -> FlaskClient:
    """The browser of a customer, signed in."""
    source = Customers()
    account = api.account(name="glo", role="viewer", labels="customer=globex")
    source.access.rows["accounts"] = {"glo": account}
    source.access.rows["sessions"] = {}
    source.access.rows["api_tokens"] = {}
    context = api.make_context(mailbox, clock, source, reading="login")
    mailbox.thread = MailboxThread(mailbox, context.live, context.operations, Stop())
    shown = api.snapshot()
    own = {"name": "globex-silver", "priority": "silver", "why": "batch"}
    slas = [*shown["slas"], {**shown["slas"][0], **own}]
    own = {"volume": "glo-1", "backend": "glo-disk", "gateways": ["glo-gw"], "cap_group": "acme-and-globex"}
    volumes = [*shown["volumes"], {**shown["volumes"][0], **own}]
    context.live.put(api.snapshot(slas=slas, volumes=volumes))
    app = dashboard.create_app(context)
    app.test_client_class = Browser
    app.config["SOURCE"], app.config["LIVE"] = source, context.live
    web = app.test_client()
    assert web.post("/login", data={"name": "glo", "password": api.PASSWORD}).status_code == 303
    return web


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation)
def test_no_route_shows_what_is_of_others(
    globex: FlaskClient, mailbox: api.AnsweringMailbox, route: ApiRoute
) -> None:
    if route.scope == "stream":
        return  # it has no end: see below
    path = (PREFIX + route.path).format(**{name: KNOWN[name] for name in route.parameters})
    headers = {"Origin": "http://127.0.0.1:8411"}
    answer = globex.open(path, method=route.method, headers=headers, json={})
    allowed = {"free": (200, 400, 404, 503), "sla": (404,), "volume": (404,), "report": (404,), "": (403,)}
    assert answer.status_code in allowed.get(route.scope, (200,)), answer.text
    if route.operation not in ("openapi", "schema"):  # the same for everybody; examples have names
        shown = answer.text.replace(KNOWN.get("name", ""), "") if answer.status_code >= 400 else answer.text
        shown = shown.replace(KNOWN["volume"], "") if answer.status_code >= 400 else shown
        shown = shown.replace("reports", "") if route.scope == "report" else shown
        assert [name for name in OTHERS if name in shown.replace("annotated", "")] == []
    assert mailbox.posted == []


def test_what_is_its_own_is_shown(globex: FlaskClient) -> None:
    def items(path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = globex.get(f"/api/v1/{path}").json["items"]
        return found

    assert [row["name"] for row in items("slas")] == ["globex-silver"]
    assert [row["volume"] for row in items("volumes")] == ["glo-1"]
    assert [row["name"] for row in items("episodes")] == ["globex-silver"]
    (event,) = items("events")
    assert event["subject"] == "globex-silver/latency"
    assert "text" not in event, "it names a neighbour"
    live = globex.get("/api/v1/live").json
    assert [row["name"] for row in live["slas"]] == ["globex-silver"]
    assert [row["volume"] for row in live["volumes"]] == ["glo-1"]
    assert (live["gateways"], live["events"], live["throttles"], live["totals"]) == ([], [], [], {})
    assert globex.get("/api/v1/slas/erp-gold").status_code == 404
    assert globex.get("/api/v1/episodes?name=erp-gold").status_code == 404
    assert globex.get("/api/v1/volumes/glo-1").status_code == 200
    assert globex.get("/").status_code == 200
    assert globex.get("/policies/3/harms.svg").status_code == 403, "it is about all agreements"


def test_the_page_draws_no_link_that_refuses_them(globex: FlaskClient) -> None:
    views = ["/", "/agreements", "/agreements/globex-silver", "/volumes", "/volumes/glo-1"]
    for path in views:
        shown = globex.get(path)
        assert shown.status_code == 200
        assert "data-own" in shown.text
        links = set(re.findall(r'href="(/[^"]*)"', shown.text)) - {"/apply", "/static/page.css"}
        assert {"/", "/agreements", "/volumes", "/reports"} <= links
        # What the style sheet hides from them is in sections of its own.
        hidden = "".join(re.findall(r"<section data-all.*?</section>", shown.text, re.DOTALL))
        for link in links - set(re.findall(r'href="(/[^"]*)"', hidden)):
            assert globex.get(link).status_code == 200, f"{link} on {path}"
    shown = globex.get("/runbook").text
    assert set(re.findall(r'href="(/\w*)"', shown)) == {v.path for v in VIEWS if v.own and not v.above}
    for view in VIEWS:
        path = view.path.replace("<name>", "glo-1")
        assert globex.get(path).status_code == (200 if view.own else 403), path


def test_its_own_promises_are_listed_and_counted(globex: FlaskClient) -> None:
    for query in ("", "?match=g", "?limit=1", "?sort=name"):
        answer = globex.get(f"/api/v1/promises{query}").json
        assert [row["name"] for row in answer["items"]] == ["globex-silver"]
        assert (answer["count"], answer["before"], answer["next"]) == (1, 0, None)
        assert sum(answer["states"].values()) == 1
    assert globex.get("/api/v1/promises?match=erp").json["count"] == 0
    assert globex.get("/api/v1/volumes?limit=5").json["count"] == 1


@pytest.mark.parametrize("query", ["limit=1", "limit=1&match=b", "limit=1&backend=disk-0"])
def test_pages_of_volumes_count_none_of_others(globex: FlaskClient, query: str) -> None:
    """With ``match`` and ``next`` the names of others could be guessed letter by letter."""
    answer = globex.get(f"/api/v1/volumes?{query}").json
    assert answer["next"] is None
    assert {row["volume"] for row in answer["items"]} <= {"glo-1"}


def test_cursors_are_of_their_own_rows() -> None:
    scope = LabelScope("customer=a", [{"name": "a", "spec": {"metadata": {"labels": {"customer": "a"}}}}])
    rows = [{"name": "a" if at % 1500 == 7 else "b", "cursor": f"{at}:x"} for at in range(9_000, 0, -1)]

    def read(limit: int, before: str | None) -> list[dict[str, Any]]:
        first = 0 if before is None else 1 + [row["cursor"] for row in rows].index(before)
        return rows[first : first + limit]

    page, cursor = scope.page("episodes", read, 4, None)
    assert [row["cursor"] for row in page] == ["7507:x", "6007:x", "4507:x", "3007:x"]
    assert cursor == "3007:x"
    assert scope.page("episodes", read, 4, cursor) == ([rows[-1507], rows[-7]], None)


def test_a_volume_that_clients_share_is_nobodys_alone() -> None:
    labels = {"customer": "acme"}
    rows = [
        {"name": name, "spec": {"metadata": {"labels": labels}, "spec": {"scope": scope}}}
        for name, scope in (
            ("one", {"volumes": ["a-*"], "clients": ["*"]}),
            ("two", {"volumes": ["shared"], "clients": ["10.0.0.1"]}),
        )
    ]
    scope = LabelScope("customer=acme", rows)
    assert scope.agreements == {"one", "two"}
    assert (scope.has_volume("a-1"), scope.has_volume("shared"), scope.has_volume(None)) == (
        True,
        False,
        False,
    )
    assert not LabelScope("customer=globex", rows).has_volume("a-1")


def test_no_column_of_a_throttle_is_about_its_group_or_the_backend_s_others(
    globex: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = globex.application.config["SOURCE"]
    figures = {"loop_start": 5810.0, "loop_ceiling": 9000.0, "gen": 4711, "cursor": "9:t-9"}
    row = api.throttle(throttle_id="t-9", volume="glo-1", group_name="acme-and-globex", **figures)
    monkeypatch.setattr(source, "throttles", lambda *_asked: [{**row, "column_of_tomorrow": "acme"}])
    (shown,) = globex.get("/api/v1/throttles").json["items"]
    assert (shown["volume"], shown["cost_per_s"], shown["live"]) == ("glo-1", 290.0, None)
    hidden = {"group_name", "loop_start", "loop_ceiling", "gen", "victim", "text", "column_of_tomorrow"}
    assert hidden & shown.keys() == set()


def test_what_is_shown_of_their_own_has_no_staff_and_no_group(globex: FlaskClient) -> None:
    (row,) = globex.get("/api/v1/slas").json["items"]
    assert "applied_by" not in row
    live = globex.get("/api/v1/live").json
    assert [set(each) & {"cap_group", "why", "text"} for each in (*live["slas"], *live["volumes"])] == [
        set(),
        set(),
    ]
    assert "applied_by" not in globex.get("/api/v1/slas/globex-silver").json


def test_the_live_stream_has_rows_of_their_own_alone(globex: FlaskClient) -> None:
    view = globex.application.config["LIVE"]
    answer = globex.get("/api/v1/live/stream", buffered=False)
    events = iter(answer.response)
    for at_us in (1, 2):
        event: Any = next(events)
        text = event.decode()
        shown = json.loads(text.partition("data: ")[2])
        assert [row["name"] for row in shown["slas"]] == ["globex-silver"]
        assert [row["volume"] for row in shown["volumes"]] == ["glo-1"]
        assert (shown["gateways"], shown["events"], shown["throttles"], shown["totals"]) == ([], [], [], {})
        assert [name for name in OTHERS if name in text] == []
        view.put({**view.newest().snapshot, "at_us": api.NOW_US + at_us})
    answer.close()


def test_the_live_stream_is_json_whatever_a_snapshot_has(globex: FlaskClient) -> None:
    view = globex.application.config["LIVE"]
    slas = [{**row, "u": float("nan"), "raw": b"\xff"} for row in view.newest().snapshot["slas"]]
    view.put({**view.newest().snapshot, "slas": slas})
    answer = globex.get("/api/v1/live/stream", buffered=False)
    event: Any = next(iter(answer.response))
    (row,) = json.loads(event.decode().partition("data: ")[2], parse_constant=pytest.fail)["slas"]
    assert row["name"] == "globex-silver"
    answer.close()


def test_the_live_stream_follows_agreements_and_ends_while_they_are_not_known(
    globex: FlaskClient, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    view, source = globex.application.config["LIVE"], globex.application.config["SOURCE"]
    answer = globex.get("/api/v1/live/stream", buffered=False)
    events = iter(answer.response)
    assert "globex-silver" in str(next(events))
    monkeypatch.setattr(source, "agreements", lambda *_asked: [])
    clock.advance(60)
    view.put({**view.newest().snapshot, "at_us": api.NOW_US + 1})
    assert "globex-silver" not in str(next(events)), "it is theirs no more"

    def away(*_asked: Any) -> Any:
        raise DatabaseUnavailable("sqlite", "away")

    monkeypatch.setattr(source, "agreements", away)
    clock.advance(60)
    view.put({**view.newest().snapshot, "at_us": api.NOW_US + 2})
    assert list(events) == []
    answer.close()


def test_nobody_with_labels_is_told_where_the_database_is(
    globex: FlaskClient, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    view, source = globex.application.config["LIVE"], globex.application.config["SOURCE"]
    where = "postgresql://sla@10.0.0.7/sla"
    view.put({**view.newest().snapshot, "database": f"the database {where} cannot be used"})
    for path in ("live", "slas", "volumes", "volumes/glo-1", "slas/globex-silver"):
        assert globex.get(f"/api/v1/{path}").json["server"]["database"] == "it cannot be read"

    def away(*_asked: Any) -> Any:
        raise DatabaseUnavailable(where, "no route")

    monkeypatch.setattr(source, "agreements", away)
    clock.advance(60)
    answer = globex.get("/api/v1/slas")
    assert (answer.status_code, where in answer.text) == (503, False)


@pytest.fixture
def issued(globex: FlaskClient) -> Any:
    """Reports: of acme's erp-gold, then of globex's agreement by names of now and of before."""
    stored = globex.application.config["SOURCE"].stored_reports
    (first,) = stored.issued_rows
    for name, labels in (
        ("globex-silver", {"customer": "globex"}),
        ("globex-silver", {"customer": "acme"}),  # an agreement of that name was another customer's
        ("glo-old", {"customer": "globex"}),  # it has ended since
        ("globex-silver", None),  # an older release does not say it in the row, and the body says acme
    ):
        number = len(stored.issued_rows) + 1
        body = json.loads(first["body"])
        body["content"]["agreement"] |= {"name": name, "labels": labels or {"customer": "acme"}}
        body["report_id"] = f"{name}-{number}"
        summary = {**first["summary"], "labels": labels}
        if labels is None:
            del summary["labels"]
        stored.issued_rows.append(
            {**first, "number": number, "name": name, "report_id": f"{name}-{number}", "summary": summary}
            | {"body": json.dumps(body), "digest": f"{number:064}", "issued_by": "ann"}
        )
    spec = {"metadata": {"labels": {"customer": "globex"}}, "spec": {}}
    stored.versions.append({"name": "glo-old", "version": 1, "ended_us": 5, "spec": spec})
    return stored


def test_the_reports_of_its_own_agreements_are_listed_and_fetched(globex: FlaskClient, issued: Any) -> None:
    answer = globex.get("/api/v1/reports").json
    assert [row["report_id"] for row in answer["items"]] == ["glo-old-4", "globex-silver-2"]
    assert answer["next"] is None
    assert {"issued_by", "previous", "labels", "cursor"} & answer["items"][0].keys() == set()
    first = globex.get("/api/v1/reports?limit=1").json
    assert ([row["number"] for row in first["items"]], first["next"]) == ([4], "4")
    second = globex.get("/api/v1/reports?limit=1&before=4").json
    assert ([row["number"] for row in second["items"]], second["next"]) == ([2], None)
    assert globex.get("/api/v1/reports?name=erp-gold").json["items"] == []
    for report_id, status in (("globex-silver-2", 200), ("4", 200), ("1", 404), ("3", 404), ("5", 404)):
        for path in (
            "/api/v1/reports/{}",
            "/api/v1/reports/{}/verification",
            "/reports/{}",
            "/reports/{}.csv",
        ):
            assert globex.get(path.format(report_id)).status_code == status, (path, report_id)
    fetched = globex.get("/api/v1/reports/2")
    assert (fetched.json["is_copy"], fetched.json["digest"]) == (True, f"{2:064}")
    page = globex.get("/reports")
    assert "glo-old-4" in page.text
    for shown in (fetched.text, page.text, globex.get("/reports/2").text, globex.get("/reports/2.json").text):
        assert [name for name in ("erp-gold", "batch", "ann") if re.search(rf"\b{name}\b", shown)] == []
    (link,) = {each for each in re.findall(r'href="(/[^"]*)"', page.text) if each.endswith("glo-old-4.json")}
    assert json.loads(globex.get(link).data)["issued_by"] == "storage-team"
    for view in ("/gateways", "/audit"):
        assert f'href="{view}"' not in page.text


def test_a_report_of_now_is_of_its_own_agreements(
    globex: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = globex.application.config["SOURCE"]
    own = [{**row, "name": "globex-silver"} for row in source.agreement_versions("erp-gold")]
    monkeypatch.setattr(source, "agreement_versions", lambda name: own if name == "globex-silver" else [])
    for path in ("/api/v1/slas/erp-gold/report?period=2026-12", "/reports/now?name=erp-gold&period=2026-12"):
        assert globex.get(path).status_code == 404
    # The name is theirs now; in that period the agreement of this name was acme's.
    for path in (
        "/api/v1/slas/globex-silver/report?period=2026-12",
        "/reports/now?name=globex-silver&period=2026-12",
    ):
        assert globex.get(path).status_code == 404
    for row in own:
        row["spec"] = {**row["spec"], "metadata": {"name": "globex-silver", "labels": {"customer": "globex"}}}
    answer = globex.get("/api/v1/slas/globex-silver/report?period=2026-12")
    assert answer.status_code == 200, answer.text
    assert answer.json["agreement"]["labels"] == {"customer": "globex"}
    assert globex.get("/reports/now?name=globex-silver&period=2026-12").status_code == 200


def test_a_report_of_another_release_is_not_copied(globex: FlaskClient, issued: Any) -> None:
    issued.issued_rows[1]["body"] = '{"form": 99}'
    for path in ("/api/v1/reports/2", "/reports/2", "/reports/2.json"):
        answer = globex.get(path)
        assert (answer.status_code, "99" in answer.text) == (404, False)


def test_an_agreement_that_chooses_by_labels_shows_the_volumes_with_them_and_no_others() -> None:
    spec = {"volumes": ["*"], "clients": ["*"], "volume_labels": "tier=gold"}
    row = {"name": "a", "spec": {"metadata": {"labels": {"c": "x"}}, "spec": {"scope": spec}}}
    book = LabelBook({"gold-1": {"tier": "gold"}}, (), frozenset(("gold-1", "other")))
    scope = LabelScope("c=x", [row], lambda: book)
    assert [scope.has_volume(name) for name in ("gold-1", "other")] == [True, False]
    assert not LabelScope("c=x", [row]).has_volume("gold-1"), "of which no labels are known: none"
