"""Routes about documents: versions, credits, maintenance, calendars, schema, admission, labels."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from pmdaemon.runtime.clock import FakeClock
from sla_server.api.context import AppContext
from tests.support import api
from tests.support.agreements import FULL, agreement, simple

HOUR_US = 3_600_000_000


def test_agreements_by_label_with_and_without_their_documents(web: FlaskClient) -> None:
    (row,) = web.get("/api/v1/slas?labels=customer=acme").json["items"]
    assert (row["labels"], "document" in row) == ({"customer": "acme"}, False)
    assert web.get("/api/v1/slas?labels=customer").json["items"]
    assert web.get("/api/v1/slas?labels=customer=x").json["items"] == []
    assert web.get("/api/v1/slas?documents=1").json["items"][0]["document"].startswith("apiVersion")
    refused = web.get("/api/v1/slas?labels=%3Dx")
    assert (refused.status_code, "labels" in refused.json["detail"]) == (400, True)


def test_agreements_page_by_page_and_by_a_part_of_their_name(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**source._agreement("erp-gold"), "name": name} for name in ("a-1", "a-2", "b-1", "b-2")]
    monkeypatch.setattr(source, "agreements", lambda *_: rows)

    def names(query: str) -> tuple[list[str], str | None]:
        answer = web.get(f"/api/v1/slas?{query}").json
        return [row["name"] for row in answer["items"]], answer["next"]

    assert names("") == (["a-1", "a-2", "b-1", "b-2"], None)
    answer = web.get("/api/v1/slas?limit=1&after=b-1&match=b-").json
    assert (answer["count"], answer["before"]) == (2, 1)
    assert names("limit=3") == (["a-1", "a-2", "b-1"], "b-1")
    assert names("limit=3&after=b-1") == (["b-2"], None)
    assert names("match=-2&limit=1") == (["a-2"], "a-2")
    assert web.get("/api/v1/slas?limit=0").status_code == 400


def test_a_promise_that_the_live_feed_has_no_row_of_says_its_state(
    web: FlaskClient, context: AppContext, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "agreements", lambda *_: [{**source._agreement("erp-gold"), "name": "quiet"}])
    context.live.put({**api.snapshot(), "others": [["quiet", "latency", "at-risk", 0.99, 1.0, 0.25]]})
    (row,) = web.get("/api/v1/slas").json["items"]
    (live,) = row["live"]
    assert (live["state"], live["compliance"], live["brief"]) == ("at-risk", 0.99, True)
    assert (live["metric"], live["percentile"], live["threshold_us"]) == ("latency", 95, 5000)


def test_any_version_is_returned(web: FlaskClient, source: api.FakeSource) -> None:
    assert web.get("/api/v1/slas/erp-gold").json["version"] == 2
    assert "target: 0.99}" in web.get("/api/v1/slas/erp-gold?version=1").json["document"]
    missing = web.get("/api/v1/slas/erp-gold?version=3")
    assert (missing.status_code, "has no version 3" in missing.json["detail"]) == (404, True)
    assert "no agreement" in web.get("/api/v1/slas/none?version=3").json["detail"]
    assert web.get("/api/v1/slas/erp-gold?version=0").status_code == 400


def test_versions_say_what_changed(web: FlaskClient) -> None:
    newest, first = web.get("/api/v1/slas/erp-gold/versions").json["items"]
    assert (newest["version"], first["version"], first["changes"], "spec" in first) == (2, 1, [], False)
    assert [change["field"] for change in newest["changes"]] == ["spec.objectives[latency].budgeting.target"]
    assert web.get("/api/v1/slas/none/versions").status_code == 404


def test_credits_go_back_as_far_as_the_agreement(web: FlaskClient, source: api.FakeSource) -> None:
    answer = web.get("/api/v1/slas/erp-gold/credits?periods=6").json
    assert [(row["version"], row["so_far"], row["credit"]) for row in answer["items"]] == [
        (2, True, 0.25),
        (1, False, 0.25),
    ]
    assert (answer["credit_cap"], answer["tz"]) == (0.5, "Europe/Berlin")
    asked = [call for call in source.asked if call[0] == "slice_sums"]
    assert asked[0][3:] == (answer["items"][0]["start_us"], answer["items"][0]["end_us"])
    assert web.get("/api/v1/slas/none/credits").status_code == 404
    assert web.get("/api/v1/slas/erp-gold/credits?periods=15").status_code == 400


def versions_of(*slices_and_targets: tuple[str, float]) -> list[dict[str, Any]]:
    """Rows of ``agreements``: of erp-gold, an hour each, the last in force."""
    rows = []
    for number, (length, target) in enumerate(slices_and_targets, start=1):
        text = FULL.replace("slice: 1m, target: 0.995", f"slice: {length}, target: {target}")
        text = text.replace("business", "always")  # in which no slice of a day begins
        left = len(slices_and_targets) - number
        row = {"name": "erp-gold", "version": number, "spec": agreement(text).spec_json(), "document": text}
        row |= {"applied_us": api.NOW_US - (left + 1) * HOUR_US, "priority": "gold", "applied_by": "ann"}
        rows.append({**row, "ended_us": api.NOW_US - left * HOUR_US if left else None})
    return rows


def test_an_edit_of_the_slice_length_erases_nothing(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = versions_of(("5m", 0.9), ("1m", 0.995))
    sums = [
        api.slice_sum("good", 9, minutes=5, version=1),
        api.slice_sum("bad", 1, minutes=5, version=1),
        api.slice_sum("good", 50, minutes=1, version=2),
    ]
    monkeypatch.setattr(source, "slice_sums", lambda *_: sums)
    monkeypatch.setattr(source, "agreement_versions", lambda _name: versions)
    monkeypatch.setattr(source, "agreement", lambda *_: versions[-1])
    credit = web.get("/api/v1/slas/erp-gold/credits?periods=1").json["items"][0]
    (one,) = credit["objectives"]
    assert (one["compliance"], one["credit"]) == (0.95, 0.25), "5 bad minutes of 100, not 1 slice of 60"
    assert (one["bad_s"], one["due_s"], one["slice_lengths_s"]) == (300, 6000, [60, 300])
    period = web.get("/api/v1/slas/erp-gold/periods?limit=1").json["items"][0]
    assert (period["compliance"], period["bad_s"], period["due_s"]) == (0.95, 300, 6000)
    assert period["slices"]["bad"] == 1


def test_what_an_objective_owed_until_it_was_removed_is_credited(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = versions_of(("1m", 0.995), ("1m", 0.995))
    (objective,) = versions[1]["spec"]["spec"]["objectives"]
    versions[1]["spec"]["spec"]["objectives"] = [{**objective, "name": "renamed"}]
    sums = {
        "latency": [api.slice_sum("bad", 1, version=1), api.slice_sum("good", 9, version=1)],
        "renamed": [api.slice_sum("good", 10, version=2)],
    }
    monkeypatch.setattr(source, "slice_sums", lambda _name, objective, *_: sums[objective])
    monkeypatch.setattr(source, "agreement_versions", lambda _name: versions)
    monkeypatch.setattr(source, "agreement", lambda *_: versions[-1])
    credit = web.get("/api/v1/slas/erp-gold/credits?periods=1").json["items"][0]
    assert [(one["objective"], one["is_agreed"], one["credit"]) for one in credit["objectives"]] == [
        ("renamed", True, 0.0),
        ("latency", False, 0.5),
    ]
    assert web.get("/api/v1/slas/erp-gold/periods?objective=latency").status_code == 200
    assert web.get("/api/v1/slas/erp-gold/slices?objective=latency").status_code == 200


def test_penalties_edited_away_are_those_of_the_periods_before(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = versions_of(("1m", 0.995), ("1m", 0.995))
    versions[1]["spec"]["spec"]["penalties"] = []
    versions[0]["applied_us"] -= 60 * 24 * HOUR_US
    versions[1]["applied_us"] -= 20 * 24 * HOUR_US  # in the month before
    versions[0]["ended_us"] = versions[1]["applied_us"]
    monkeypatch.setattr(source, "slice_sums", lambda *_: [api.slice_sum("bad", 1, version=1)])
    monkeypatch.setattr(source, "agreement_versions", lambda _name: versions)
    answer = web.get("/api/v1/slas/erp-gold/credits").json
    assert answer["penalties"] == []
    found = [(row["version"], row["has_penalties"], row["credit"]) for row in answer["items"]]
    assert found == [(2, False, 0.0), (2, False, 0.0), (1, True, 0.5)]


def test_an_edit_of_the_window_keeps_the_periods_that_ended_before_it(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = versions_of(("1m", 0.995), ("1m", 0.995))
    versions[1]["spec"]["spec"]["window"] = {"type": "rolling", "duration": "7d"}
    versions[0]["applied_us"] -= 60 * 24 * HOUR_US
    monkeypatch.setattr(source, "slice_sums", lambda *_: [api.slice_sum("bad", 1, version=1)])
    monkeypatch.setattr(source, "agreement_versions", lambda _name: versions)
    monkeypatch.setattr(source, "agreement", lambda _name, version=None: versions[(version or 2) - 1])
    items = web.get("/api/v1/slas/erp-gold/credits").json["items"]
    assert [(row["version"], row["so_far"], row["credit"]) for row in items] == [
        (2, True, 0.5),
        (1, False, 0.5),
        (1, False, 0.5),
    ]
    assert items[1]["end_us"] - items[1]["start_us"] == 31 * 24 * HOUR_US
    shown = web.get("/api/v1/slas/erp-gold/periods?limit=20").json["items"]
    assert len(shown) == len({(row["from_us"], row["to_us"]) for row in shown}) > 1


@pytest.mark.parametrize("window", ["month", "rolling"])
def test_of_an_agreement_that_has_ended_the_periods_end_with_it(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    """After a year there were fourteen empty ones, and what it cost in its last was nowhere."""
    (version,) = versions_of(("1m", 0.995))
    ended_us = api.NOW_US - 200 * 24 * HOUR_US
    version |= {"applied_us": ended_us - 20 * 24 * HOUR_US, "ended_us": ended_us}
    if window == "rolling":
        version["spec"]["spec"]["window"] = {"type": "rolling", "duration": "7d"}

    def slice_sums(_name: str, _objective: str, from_us: int, to_us: int) -> list[dict[str, Any]]:
        return [api.slice_sum("bad", 1, version=1)] if from_us < ended_us <= to_us + HOUR_US else []

    monkeypatch.setattr(source, "slice_sums", slice_sums)
    monkeypatch.setattr(source, "agreement_versions", lambda _name: [version])
    monkeypatch.setattr(source, "agreement", lambda *_: version)
    credit = web.get("/api/v1/slas/erp-gold/credits").json["items"][0]
    assert (credit["start_us"] < ended_us <= credit["end_us"] + 1, credit["credit"]) == (True, 0.5)
    assert credit["so_far"] is False
    period = web.get("/api/v1/slas/erp-gold/periods").json["items"][0]
    assert (period["from_us"] < ended_us <= period["to_us"] + 1, period["slices"]["bad"]) == (True, 1)
    assert period["is_over"] is True


def test_periods_without_slices_have_no_credit(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "slice_sums", lambda *_: [])
    assert len(web.get("/api/v1/slas/erp-gold/credits").json["items"]) == 1


def test_a_rolling_window_has_the_budget_that_the_live_view_has(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = versions_of(("1m", 0.9))
    row["spec"]["spec"]["window"] = {"type": "rolling", "duration": "1d"}
    row["spec"]["spec"]["service_hours"] = None
    sums = [api.slice_sum("bad", 2, version=1), api.slice_sum("not_applicable", 1, version=1)]
    monkeypatch.setattr(source, "slice_sums", lambda *_: sums)
    monkeypatch.setattr(source, "agreement_versions", lambda _name: [row])
    monkeypatch.setattr(source, "agreement", lambda *_: row)
    (period,) = web.get("/api/v1/slas/erp-gold/periods?limit=1").json["items"]
    assert period["budget_remaining"] == pytest.approx(1 - 2 / ((1440 - 1) * 0.1))
    assert not period["is_over"], "a rolling window goes on"


@pytest.mark.parametrize("what", ["slices", "periods"])
def test_an_objective_that_no_version_has_is_refused(web: FlaskClient, what: str) -> None:
    answer = web.get(f"/api/v1/slas/erp-gold/{what}?objective=nope")
    assert (answer.status_code, answer.json["fix"]) == (404, "It has latency")
    assert "no objective 'nope'" in answer.json["detail"]


def test_a_slice_of_a_day_is_within_the_span_that_is_listed(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = versions_of(("1d", 0.9))
    monkeypatch.setattr(source, "agreement_versions", lambda _name: [row])
    monkeypatch.setattr(source, "agreement", lambda *_: row)
    answer = web.get("/api/v1/slas/erp-gold/slices").json
    assert answer["to_us"] - answer["from_us"] == 21 * 24 * HOUR_US


@pytest.mark.parametrize("path", ["slas", "volumes", "gateways", "backends", "throttles", "slas/erp-gold"])
def test_what_services_said_long_ago_is_not_shown_as_what_is_so_now(
    web: FlaskClient, context: AppContext, clock: FakeClock, path: str
) -> None:
    others = [["erp-gold", "second", "ok", 0.99, 1.0, 0.25]]
    context.live.put({**api.snapshot(), "others": others})
    fresh = web.get(f"/api/v1/{path}").json
    assert not fresh["server"]["stale"]
    clock.advance(12)
    old = web.get(f"/api/v1/{path}").json
    assert (old["server"]["stale"], old["server"]["age_s"]) == (True, 12)
    rows = old.get("items", [old])
    assert rows
    assert not any(row["live"] for row in rows)
    assert any(row["live"] for row in fresh.get("items", [fresh]))


def test_a_version_of_another_release_is_reported(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = source.agreement_versions("erp-gold")
    rows[-1]["spec"]["spec"]["new_key"] = 1
    monkeypatch.setattr(source, "agreement_versions", lambda _name: rows)
    answer = web.get("/api/v1/slas/erp-gold/credits")
    assert (answer.status_code, "another release" in answer.json["detail"]) == (400, True)
    assert web.get("/api/v1/slas/erp-gold/versions").status_code == 200


def test_maintenance_runs_is_planned_or_has_passed(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (running,) = web.get("/api/v1/maintenance").json["items"]
    assert (running["name"], running["state"], running["scope"]) == ("disks", "running", "gold")
    assert running["to_us"] - running["from_us"] == 4 * HOUR_US
    states = {row["name"]: row["state"] for row in web.get("/api/v1/maintenance?past=1").json["items"]}
    assert states == {"disks": "running", "past": "past"}
    rows = source.documents("Maintenance")
    rows[0]["spec"]["spec"]["new_key"] = 1
    rows[1]["spec"]["spec"]["start"] = "2028-03-05T00:00"  # more than a year ahead
    monkeypatch.setattr(source, "documents", lambda *_: rows)
    found = web.get("/api/v1/maintenance").json["items"]
    assert [(row["name"], row["state"]) for row in found] == [("past", "planned"), ("disks", "unreadable")]


def test_calendars_and_the_schema(web: FlaskClient) -> None:
    (bank,) = web.get("/api/v1/calendars").json["items"]
    assert (bank["name"], bank["spec"]["spec"]["tz"]) == ("bank", "Europe/Berlin")
    assert len(web.get("/api/v1/schema").json["oneOf"]) == 7


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("maintenance", "Maintenance"),
        ("calendars", "Calendar"),
        ("recipients", "Recipient"),
        ("routes", "Route"),
        ("silences", "Silence"),
    ],
)
def test_documents_are_ended_by_services(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str], path: str, kind: str
) -> None:
    assert web.delete(f"/api/v1/{path}/x").status_code == 401
    assert web.delete(f"/api/v1/{path}/x", headers=bearer).status_code == 200
    (asked,) = mailbox.posted
    assert (asked["op"], asked["body"]) == ("end_document", {"kind": kind, "name": "x"})


def test_admission_asks_nothing_of_services(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    wanted = simple("new", volumes="batch", value_ms=20)
    assert web.post("/api/v1/admission", data=wanted).status_code == 401
    answer = web.post("/api/v1/admission", data=wanted, headers=bearer).json
    assert (answer["answer"], answer["policy_version"]) == ("yes", 3)
    assert answer["backends"][0]["capacity"] == 700.0
    refused = web.post("/api/v1/admission", data=wanted.replace("gold", "tin"), headers=bearer)
    assert (refused.status_code, refused.json["errors"][0]["field"]) == (422, "spec.priority")
    assert web.post("/api/v1/admission", data="", headers=bearer).status_code == 400
    assert mailbox.posted == []


def test_admission_goes_by_what_was_promised_when_the_capacity_was_found(
    web: FlaskClient, source: api.FakeSource, bearer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def agreements_at(at_us: int, _name: str | None = None) -> Any:
        asked.append(at_us)
        return iter([{**source._agreement("erp-gold"), "spec": agreement(FULL).spec_json()}])

    edited = FULL.replace("value_ms: 5", "value_ms: 0.5")
    now = [{**source._agreement("erp-gold"), "spec": agreement(edited).spec_json()}]
    monkeypatch.setattr(source, "agreements_at", agreements_at)
    monkeypatch.setattr(source, "agreements", lambda *_: now)
    strict = simple("new", volumes="batch", value_ms=0.5).replace("up_to_iops: 500", "up_to_iops: 1")
    answer = web.post("/api/v1/admission", data=strict, headers=bearer).json
    assert asked == [source.policies(1)[0]["created_us"]]
    assert (answer["answer"], "stricter" in answer["backends"][0]["reasons"][0]) == ("unknown", True)


def test_admission_before_the_first_policy_is_unknown(
    web: FlaskClient, source: api.FakeSource, bearer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "policies", lambda *_: [])
    answer = web.post("/api/v1/admission", data=simple("new", volumes="batch"), headers=bearer).json
    assert (answer["answer"], answer["policy_version"]) == ("unknown", None)
    assert "sla policy run" in answer["backends"][0]["reasons"][0]
