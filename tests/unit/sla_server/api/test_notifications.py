"""Routes about recipients, routes, silences, the inbox and the preview of routing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from markupsafe import escape

import dashboard
from dashboard.views import VIEWS
from sla_server.api.context import AppContext
from sla_server.events import catalogue
from sla_server.events.delivery_state import write_delivery_state
from tests.support import api

EVENT = {
    "kind": "violation-opened",
    "severity": "critical",
    "element": "sla",
    "subject": "erp-gold/latency",
    "text": "broken",
    "details": {},
}


def test_recipients_without_a_report_of_delivery_are_not_known_to_be_well(web: FlaskClient) -> None:
    (mail,) = web.get("/api/v1/recipients").json["items"]
    assert (mail["name"], mail["recipient_kind"], mail["delivery"]) == ("mail", "inbox", None)
    (route,) = web.get("/api/v1/routes").json["items"]
    assert route["spec"]["spec"]["recipients"] == ["mail"]


def test_what_delivery_reports_is_shown(web: FlaskClient, context: AppContext, tmp_path: Path) -> None:
    folder = context.metrics.folder = tmp_path
    failing = {"name": "mail", "state": "failing", "waiting": 3, "last_answer": "HTTP 503"}
    waiting = {"event_id": "e0001", "recipient": "mail", "attempt": 4, "reason": "HTTP 503"}
    write_delivery_state(folder, [failing], [waiting])
    (mail,) = web.get("/api/v1/recipients").json["items"]
    assert mail["delivery"] == failing
    found = web.get("/api/v1/undelivered").json
    assert (found["is_known"], found["waiting"]) == (True, 3)
    assert [(row["event_id"], row["recipient"], row["kind"]) for row in found["items"]] == [
        ("e0001", "mail", "throttle-set")
    ]
    found = web.get("/api/v1/events/e0001").json
    assert found["undelivered"] == [waiting]
    assert [(row["recipient"], row["state"], row["attempts"]) for row in found["deliveries"]] == [
        ("oncall", "confirmed", 3)
    ]
    assert web.get("/api/v1/events/e0002").json["undelivered"] == []
    assert found["unanswered"] == []
    write_delivery_state(folder, [failing], [])
    assert web.get("/api/v1/events/e0001").json["unanswered"] == [{"recipient": "mail", "waiting": 3}]
    write_delivery_state(folder, [{**failing, "waiting_since_us": api.NOW_US + 60_000_000}], [])
    assert web.get("/api/v1/events/e0001").json["unanswered"] == [{"recipient": "mail", "waiting": 0}]
    assert web.get("/api/v1/events/e0002").json["unanswered"] == []


def test_a_dead_letter_names_the_event_by_which_others_were_notified(
    web: FlaskClient, source: api.FakeSource
) -> None:
    assert web.get("/api/v1/events/e0002").json["deliveries"][0]["reported_by"] is None
    failed = {"event_id": "t1", "at_us": api.NOW_US, "kind": "delivery-failed", "subject": "oncall"}
    source.ended = [{**failed, "details": {}}, {**failed, "event_id": "t2", "details": {"events": ["e0002"]}}]
    (dead,) = web.get("/api/v1/events/e0002").json["deliveries"]
    assert (dead["state"], dead["reported_by"]) == ("dead-letter", "t2")
    (confirmed,) = web.get("/api/v1/events/e0001").json["deliveries"]
    assert confirmed["reported_by"] is None


def test_a_dead_letter_is_undelivered_until_a_person_acknowledges_it(
    web: FlaskClient,
    source: api.FakeSource,
    context: AppContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context.metrics.folder = tmp_path
    write_delivery_state(tmp_path, [], [])
    failed = {"event_id": "t1", "at_us": api.NOW_US, "kind": "delivery-failed", "subject": "oncall"}
    source.ended = [{**failed, "details": {"events": ["e0001", "e0002"]}}]
    found = web.get("/api/v1/undelivered").json
    (dead,) = found["items"]
    assert (dead["event_id"], dead["recipient"], dead["state"]) == ("e0002", "oncall", "dead-letter")
    assert (dead["reason"], dead["attempt"], dead["reported_by"]) == ("HTTP 400", 3, "t1")
    assert (found["is_known"], found["waiting"]) == (True, 1)
    for known in ("e0002", "t1"):
        monkeypatch.setattr(source, "acknowledgements", lambda _ids, known=known: [{"event_id": known}])
        assert web.get("/api/v1/undelivered").json["items"] == []


def test_dead_letters_that_an_event_only_counts_are_counted_and_any_details_are_read(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"event_id": "t1", "at_us": api.NOW_US, "kind": "delivery-failed", "subject": "oncall"}
    many = {"events": ["e0002"], "count": 10_000}
    odd = ({"events": 7, "count": "many"}, {"events": [{"a": 1}], "count": None}, {})
    others = [{**failed, "event_id": f"o{number}", "details": each} for number, each in enumerate(odd)]
    source.ended = [{**failed, "details": many}, *others]
    found = web.get("/api/v1/undelivered").json
    assert ([row["event_id"] for row in found["items"]], found["unnamed"]) == (["e0002"], 9999)
    assert web.get("/api/v1/events/e0002").json["deliveries"][0]["reported_by"] == "t1"
    monkeypatch.setattr(source, "acknowledgements", lambda _ids: [{"event_id": "t1"}])
    assert web.get("/api/v1/undelivered").json["unnamed"] == 0


def test_without_a_report_nothing_is_said_to_be_delivered(web: FlaskClient) -> None:
    found = web.get("/api/v1/undelivered").json
    assert (found["items"], found["is_known"]) == ([], False)
    assert web.get("/api/v1/events/e0001").json["undelivered"] is None


def test_silences_run_or_are_past(web: FlaskClient) -> None:
    (now,) = web.get("/api/v1/silences").json["items"]
    assert (now["name"], now["state"], now["match"], now["catch_up"]) == (
        "now",
        "running",
        "every event",
        True,
    )
    states = {row["name"]: row["state"] for row in web.get("/api/v1/silences?past=1").json["items"]}
    assert states == {"now": "running", "over": "past"}


def test_the_inbox_has_who_acknowledged_and_asks_for_what_is_wanted(
    web: FlaskClient, source: api.FakeSource
) -> None:
    first, second = web.get("/api/v1/inbox?limit=2").json["items"]
    assert (first["acknowledged"], second["event_id"]) == ([], "e0001")
    assert second["acknowledged"] == [{"at_us": api.NOW_US, "who": "ann", "note": "disk ordered"}]
    found = web.get(
        "/api/v1/inbox?severity=warning,critical&kind=throttle-*&element=volume&subject=b&open=1"
    ).json
    assert {row["severity"] for row in found["items"]} == {"warning", "critical"}
    refused = web.get("/api/v1/inbox?severity=fatal")
    assert refused.status_code == 400
    assert "Use info, warning, critical" in refused.json["fix"]


def test_what_has_ended_is_marked_and_is_not_open(web: FlaskClient, source: api.FakeSource) -> None:
    begun = {**api.events(2)[1], "details": {}}
    same = [
        {**row, **{key: begun[key] for key in ("kind", "element", "subject", "details")}}
        for row in api.events(25)
    ]
    source.__dict__["happened"] = lambda count: same[:count]
    end = {**begun, "event_id": "end", "kind": "throttle-released", "at_us": api.NOW_US - 5_500_000}
    source.ended = [end]
    rows = web.get("/api/v1/inbox?limit=25").json["items"]
    assert [row["ended_us"] for row in rows] == [None] * 6 + [end["at_us"]] * 19
    first = web.get("/api/v1/inbox?limit=4&open=1").json
    assert [row["event_id"] for row in first["items"]] == ["e0000", "e0001", "e0002", "e0003"]
    rest = web.get(f"/api/v1/inbox?limit=4&open=1&before={first['next']}").json
    assert ([row["event_id"] for row in rest["items"]], rest["next"]) == (["e0004", "e0005"], None)
    assert web.get("/api/v1/events/e0006").json["ended_us"] == end["at_us"]
    source.ended = [{**end, "subject": "another"}, {**end, "details": {"throttle_id": "t-9"}}]
    assert {row["ended_us"] for row in web.get("/api/v1/inbox?limit=25").json["items"]} == {None}


def test_what_ends_a_condition_is_not_open(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**row, "kind": "throttle-released"} for row in api.events(2)]
    monkeypatch.setattr(source, "inbox", lambda *_args, **_wanted: rows)
    assert len(web.get("/api/v1/inbox").json["items"]) == 2
    assert web.get("/api/v1/inbox?open=1").json["items"] == []


def test_one_event_says_who_gets_it(web: FlaskClient) -> None:
    found = web.get("/api/v1/events/e0001").json
    assert found["kind"] == "throttle-set"
    (mail,) = found["routing"]["recipients"]
    assert (mail["recipient"], mail["reason"]) == ("mail", "route all: severities warning, critical")
    assert mail["held"].startswith("silence now until 2027-01-15 08:30:00Z")
    assert web.get("/api/v1/events/e0002").json["routing"] == {
        "recipients": [],
        "not_matching": [{"route": "all", "reason": "severity is info"}],
    }
    assert web.get("/api/v1/events/gone").status_code == 404


def test_the_preview_is_what_delivery_would_do(web: FlaskClient, bearer: dict[str, str]) -> None:
    assert web.post("/api/v1/preview", json=EVENT).status_code == 401
    found = web.post("/api/v1/preview", json=EVENT, headers=bearer).json
    assert [each["recipient"] for each in found["recipients"]] == ["mail"]
    refused = web.post("/api/v1/preview", json={**EVENT, "severity": "fatal"}, headers=bearer)
    assert refused.status_code == 400
    assert "'severity' is 'fatal', expected one of info, warning, critical" in refused.json["detail"]


@pytest.mark.parametrize(
    ("changed", "severity_said"),
    [
        ({"severity": None}, None),
        ({"kind": "gateway-enrolled", "severity": None, "element": "gateway"}, "severity is info"),
        ({"kind": "agent-of-later", "severity": None}, None),
    ],
)
def test_a_severity_that_is_left_out_is_the_usual_one_of_the_kind(
    web: FlaskClient, bearer: dict[str, str], changed: dict[str, Any], severity_said: str | None
) -> None:
    found = web.post("/api/v1/preview", json={**EVENT, **changed}, headers=bearer).json
    assert [row["reason"] for row in found["not_matching"]] == ([severity_said] if severity_said else [])


def test_an_event_of_a_kind_that_is_none_is_refused(web: FlaskClient, bearer: dict[str, str]) -> None:
    for kind, fix in (
        ("violation-open", "Did you mean violation-opened"),
        ("xyzzy", "docs/formats/events.md"),
    ):
        refused = web.post("/api/v1/preview", json={**EVENT, "kind": kind}, headers=bearer)
        assert refused.status_code == 400
        assert f"no event is of kind '{kind}'" in refused.json["detail"]
        assert refused.json["fix"].startswith(fix)
    missing = web.post("/api/v1/preview", json={"element": "sla"}, headers=bearer)
    assert missing.status_code == 400


@pytest.mark.parametrize(
    ("subject", "notes"),
    [
        ("erp-gold/latency", []),
        ("erp-gold", []),
        ("", []),
        ("erp-golf/latency", ["no agreement 'erp-golf' is in force; did you mean erp-gold?"]),
        ("other", ["no agreement 'other' is in force"]),
        ("erp-gold/latncy", ["agreement erp-gold has no objective 'latncy'; it has latency"]),
    ],
)
def test_names_that_nothing_in_force_has_are_noted(
    web: FlaskClient, bearer: dict[str, str], subject: str, notes: list[str]
) -> None:
    found = web.post("/api/v1/preview", json={**EVENT, "subject": subject}, headers=bearer).json
    assert [note.partition(", ")[0] for note in found["notes"]] == notes


def test_a_secret_that_an_earlier_release_took_is_not_shown(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://a.example/hook?token=geheim"
    spec = {"spec": {"webhook": {"url": url}}}
    row = {"kind": "Recipient", "name": "old", "version": 1, "ended_us": None, "document": f"url: '{url}'\n"}
    newer = {**row, "version": 2, "spec": {"spec": {"webhook": {"url": f"{url}2"}}}}
    monkeypatch.setattr(source, "documents", lambda *_: [{**row, "spec": spec}, newer])
    changed = {"audit_id": "a", "at_us": 1, "after": {"changes": [{"before": url}]}}
    monkeypatch.setattr(source, "audit", lambda *_: [changed])
    for path in ("recipients", "documents/Recipient/old/versions", "audit"):
        answer = web.get(f"/api/v1/{path}")
        assert answer.status_code == 200
        assert "geheim" not in answer.text
        assert "token=***" in answer.text


@pytest.mark.parametrize(
    ("path", "how", "op", "body"),
    [
        ("/recipients/mail/test", {}, "notify_test", {"name": "mail"}),
        (
            "/recipients/mail/events",
            {"json": {"event_id": "e0001"}},
            "event_again",
            {"name": "mail", "event_id": "e0001", "kind": "throttle-set", "subject": "s1"},
        ),
        (
            "/events/e0001/acknowledge",
            {"json": {"note": " disk ordered "}},
            "acknowledge",
            {"event_id": "e0001", "note": "disk ordered", "kind": "throttle-set", "subject": "s1"},
        ),
    ],
)
def test_tests_and_acknowledgements_are_asked_of_services(
    web: FlaskClient,
    mailbox: api.AnsweringMailbox,
    bearer: dict[str, str],
    path: str,
    how: Any,
    op: str,
    body: dict[str, Any],
) -> None:
    assert web.post(f"/api/v1{path}", **how).status_code == 401
    assert web.post(f"/api/v1{path}", **how, headers=bearer).status_code == 200
    (asked,) = mailbox.posted
    assert (asked["op"], asked["body"]["event_id" if "event_id" in body else "name"]) == (
        op, body.get("event_id", body.get("name")),
    )  # fmt: skip
    assert asked["body"].get("note") == body.get("note")


def test_versions_of_a_route_say_what_changed(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = source.documents("Route")
    spec = {**first["spec"], "spec": {**first["spec"]["spec"], "remind": "4h"}}
    second = {**first, "version": 2, "spec": spec}
    monkeypatch.setattr(source, "documents", lambda *_: [{**first, "ended_us": 5}, second])
    newest, oldest = web.get("/api/v1/documents/Route/all/versions").json["items"]
    assert [change["field"] for change in newest["changes"]] == ["spec.remind"]
    assert (newest["version"], oldest["changes"], "spec" in oldest) == (2, [], False)
    assert web.get("/api/v1/documents/Route/gone/versions").status_code == 404
    assert web.get("/api/v1/documents/SLA/all/versions").status_code == 400


def test_an_acknowledgement_needs_a_note_and_an_event(web: FlaskClient, bearer: dict[str, str]) -> None:
    path = "/api/v1/events/e0001/acknowledge"
    assert web.post(path, json={"note": " "}, headers=bearer).status_code == 400
    assert web.post(path, json={}, headers=bearer).status_code == 400
    gone = web.post("/api/v1/events/gone/acknowledge", json={"note": "a"}, headers=bearer)
    assert gone.status_code == 404


def test_an_event_is_found_by_a_beginning_that_no_other_id_has(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    assert web.get("/api/v1/events/e002").status_code == 400, "five have it"
    found = web.get("/api/v1/events/e0009").json
    assert found["event_id"] == "e0009"
    refused = web.get("/api/v1/events/e00").json
    listed = ", ".join(f"{row['event_id']} ({row['kind']}, {row['subject']})" for row in api.events(5))
    assert refused["detail"] == f"event: several ids begin with 'e00': {listed} and more"
    path = "/api/v1/events/e00/acknowledge"
    assert web.post(path, json={"note": "a"}, headers=bearer).status_code == 400
    assert mailbox.posted == []


def test_the_runbook_has_an_entry_for_each_kind_and_needs_no_login(web: FlaskClient) -> None:
    page = web.get("/runbook")
    assert page.status_code == 200
    for name, kind in catalogue.KINDS.items():
        assert f'id="{name}"' in page.text
        pieces = kind.action.split("`")
        assert all(str(escape(piece)) in page.text for piece in pieces)


def test_the_runbook_leads_back_to_the_page(web: FlaskClient) -> None:
    text = web.get("/runbook").text
    assert '<a href="/events" aria-current="true">Events</a>' in text
    assert text.count("aria-current") == 1
    assert all(f'href="{view.path}"' in text for view in VIEWS if not view.above)


def test_the_runbook_shows_commands_as_such_and_what_ends_what(web: FlaskClient) -> None:
    text = web.get("/runbook").text
    assert "<code>sla why AGREEMENT</code>" in text
    assert "`" not in text
    assert "<small>until violation-closed</small>" in text
    assert "<small>ends violation-opened</small>" in text
    assert "begins violation" not in text, "conditions have no name for people"


def test_events_of_the_page_lead_to_the_runbook_that_notices_lead_to(
    context: AppContext, web: FlaskClient
) -> None:
    assert 'data-runbook="/runbook"' in web.get("/events").text
    own = replace(context, other_runbook="https://wiki.example/sla")
    page = dashboard.create_app(own).test_client().get("/events", base_url="http://127.0.0.1:8411")
    assert 'data-runbook="https://wiki.example/sla"' in page.text
