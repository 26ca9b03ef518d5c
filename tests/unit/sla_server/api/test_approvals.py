"""Changes that wait for a second person over the API: which wait, who may approve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from sla_server.api.accounts import digest_of as secret_digest
from sla_server.api.approvals import OF_ONE_MAX
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.requests import ApprovalRequest, ModeSet
from sla_server.services import approvals
from tests.support import api
from tests.unit.sla_server.api.conftest import Browser

PAGE = {"Origin": "http://127.0.0.1:8411"}
ENFORCE = {"mode": "enforce"}


class Rig:
    """A server whose modes and policies need two people; ``services`` answer as they do."""

    def __init__(self, clock: FakeClock, source: api.FakeSource) -> None:
        self.clock = clock
        self.access = source.access
        rows = self.access.rows["accounts"]
        rows["bob"] = api.account(name="bob")
        rows["zoe"] = api.account(name="zoe", identity="https://id.example.org 7")
        rows["eve"] = api.account(name="eve", role="viewer")
        self.access.rows["approvals"].clear()
        self.mailbox = api.AnsweringMailbox(answer=self.answer)
        settings = {"approval": ["mode", "policies"], "approval_hours": 2.0, "max_body_bytes": 100_000}
        context = api.make_context(self.mailbox, clock, source, **settings)
        self.mailbox.thread = MailboxThread(self.mailbox, context.live, context.operations, Stop())
        self.app = dashboard.create_app(context)
        self.app.test_client_class = Browser
        self.decide_code = 200
        self.decided: dict[str, Any] = {}

    def answer(self, header: dict[str, Any]) -> tuple[bool, int, dict[str, Any]]:
        if header["op"] == "approval_request":
            asked = ApprovalRequest.model_validate(header["body"])
            wanted = approvals.MODELS[asked.op].model_validate(asked.body)
            basis = {"mode": "observe", "own": None} if isinstance(wanted, ModeSet) else {"version": 3}
            basis |= {} if isinstance(wanted, ModeSet) else {"pinned": None}
            row, _rows = approvals.requested(asked, header["who"], wanted, basis, self.clock.unix_us())
            self.access.rows["approvals"][row["approval_id"]] = row
            return True, 200, {"approval": row}
        if header["op"] == "approval_decide":
            return self.decide_code == 200, self.decide_code, self.decided
        return True, 200, {"op": header["op"]}

    def browser(self, name: str) -> FlaskClient:
        web = self.app.test_client()
        assert web.post("/login", data={"name": name, "password": api.PASSWORD}).status_code == 303
        return web

    def asked(self) -> list[str]:
        return [header["op"] for header in self.mailbox.posted]


@pytest.fixture
def rig(clock: FakeClock, source: api.FakeSource) -> Any:
    made = Rig(clock, source)
    yield made
    made.mailbox.close()


def wait(web: FlaskClient, path: str = "mode", method: str = "PUT", body: Any = None, **how: Any) -> str:
    """Id of a change that waits."""
    headers = how.get("headers", PAGE)
    answer = web.open(f"/api/v1/{path}", method=method, json=body or ENFORCE, headers=headers)
    assert (answer.status_code, answer.json["state"]) == (202, "waits-for-approval"), answer.text
    return str(answer.json["approval"])


def decide(web: FlaskClient, name: str, verb: str = "approve", headers: Any = PAGE, **more: str) -> Any:
    rows = web.get("/api/v1/approvals?all=1", headers=headers).json["items"]
    digest = next((row["digest"] for row in rows if row["approval_id"] == name), "0" * 64)
    body = {"digest": digest, "note": "seen", **more}
    return web.post(f"/api/v1/approvals/{name}/{verb}", json=body, headers=headers)


def test_a_second_person_approves_what_the_first_asked_for(rig: Rig) -> None:
    ann, bob = rig.browser("ann"), rig.browser("bob")
    name = wait(ann)
    (row,) = bob.get("/api/v1/approvals").json["items"]
    stored = rig.access.rows["approvals"][name]
    assert row == {key: value for key, value in stored.items() if key != "requested_as"}
    assert (row["requested_by"], row["state"], row["body"]) == ("ann", "pending", '{"mode":"enforce"}')
    assert row["expires_us"] - row["requested_us"] == 2 * 3600 * 1_000_000
    assert decide(bob, name).status_code == 200
    assert rig.asked() == ["approval_request", "approval_decide"]
    sent = rig.mailbox.posted[-1]
    assert (sent["who"], sent["body"]["row"], sent["body"]["approves"]) == ("bob", stored, True)
    assert bob.get("/api/v1/approvals").json["items"] == []
    assert decide(bob, name).status_code == 404


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        ("mode", "PUT", {"mode": "enforce", "backend": "disk-0"}),
        ("mode", "PUT", {"mode": "inherit", "backend": "disk-0"}),
        ("mode", "PUT", {"mode": "enforce", "of": "policy"}),
        ("policies/pin", "PUT", {"version": 3}),
        ("policies/pin", "DELETE", {}),
        ("policies/rollback", "POST", {"version": 3}),
    ],
)
def test_what_waits(rig: Rig, path: str, method: str, body: Any) -> None:
    name = wait(rig.browser("ann"), path, method, body)
    stored = json.loads(rig.access.rows["approvals"][name]["body"])
    assert stored == ({"version": None} if method == "DELETE" else body)


def test_observe_and_all_else_wait_for_nobody(rig: Rig) -> None:
    ann = rig.browser("ann")
    for body in ({"mode": "observe"}, {"mode": "observe", "backend": "disk-0"}):
        assert ann.put("/api/v1/mode", json=body, headers=PAGE).status_code == 200
    assert ann.post("/api/v1/policies/announce", headers=PAGE).status_code == 200
    assert ann.delete("/api/v1/slas/erp-gold", headers=PAGE).status_code == 200
    assert rig.asked() == ["mode", "mode", "policies_changed", "delete"]


def test_services_are_told_that_no_agreement_may_enforce(
    rig: Rig, web: FlaskClient, bearer: dict[str, str]
) -> None:
    rig.browser("ann").post("/api/v1/slas", data="kind: SLA", headers=PAGE)
    assert rig.mailbox.posted[-1]["body"]["may_enforce"] is False
    assert web.post("/api/v1/slas", data="kind: SLA", headers=bearer).status_code == 200


def token_of(rig: Rig, maker: str, name: str, role: str = "operator") -> dict[str, str]:
    secret = f"sla_{name}"
    row = api.api_token(token_id=name, name=name, role=role, created_by=maker)
    row["digest"] = secret_digest(secret)
    rig.access.rows["api_tokens"][name] = row
    return {"Authorization": f"Bearer {secret}"}


def test_nobody_approves_what_they_asked_for_themselves(rig: Rig, bearer: dict[str, str]) -> None:
    of_ann, of_its = token_of(rig, "ann", "deploy"), token_of(rig, "token deploy", "deployed")
    of_local, of_bob = token_of(rig, "local (root)", "cron"), token_of(rig, "bob", "robot")
    ann, web = rig.browser("ann"), rig.app.test_client()
    name = wait(ann)
    for who, headers in ((ann, PAGE), (web, of_ann), (web, of_its)):
        refused = decide(who, name, headers=headers)
        assert (refused.status_code, "is the person who asked" in refused.text) == (403, True), refused.text
    for headers in (of_local, bearer):
        refused = decide(web, name, headers=headers)
        assert (refused.status_code, "does not say which person" in refused.text) == (403, True)
    other = wait(web, headers=of_its)
    assert decide(ann, other).status_code == 403, "a token's request is that of the person who made it"
    assert "approval_decide" not in rig.asked()
    assert decide(web, name, headers=of_bob).status_code == 200
    assert decide(ann, wait(web, headers=bearer)).status_code == 200, "the local administrator may ask"


def test_an_account_of_a_provider_is_its_person_under_any_name(rig: Rig) -> None:
    name = wait(rig.browser("zoe"))
    rig.access.rows["accounts"]["zoe"]["state"] = "deleted"
    rig.access.rows["accounts"]["zoe2"] = api.account(name="zoe2", identity="https://id.example.org 7")
    rig.clock.advance(11)
    assert decide(rig.browser("zoe2"), name).status_code == 403
    assert decide(rig.browser("bob"), name).status_code == 200


def test_one_may_withdraw_and_viewers_only_see(rig: Rig) -> None:
    ann, eve = rig.browser("ann"), rig.browser("eve")
    name = wait(ann)
    assert [row["approval_id"] for row in eve.get("/api/v1/approvals").json["items"]] == [name]
    assert eve.post(f"/api/v1/approvals/{name}/approve", json={}, headers=PAGE).status_code == 403
    assert decide(ann, name, "refuse").status_code == 200
    assert rig.mailbox.posted[-1]["body"]["approves"] is False


def test_nobody_takes_the_places_of_all(rig: Rig) -> None:
    of_ann, ann = token_of(rig, "ann", "deploy"), rig.browser("ann")
    names = [wait(ann) for _ in range(OF_ONE_MAX)]
    for who, headers in ((ann, PAGE), (rig.app.test_client(), of_ann)):
        refused = who.put("/api/v1/mode", json=ENFORCE, headers=headers)
        assert (refused.status_code, "that you asked for" in refused.text) == (409, True), refused.text
    wait(rig.browser("bob"))
    assert decide(ann, names[0], "refuse").status_code == 200
    wait(ann)


def test_no_answer_names_the_person_at_the_provider(rig: Rig) -> None:
    name = wait(rig.browser("zoe"))
    rig.decided = {"approval": rig.access.rows["approvals"][name]}
    answer = decide(rig.browser("bob"), name, "refuse")
    assert (answer.status_code, answer.json["approval"]["approval_id"]) == (200, name)
    assert "id.example.org" not in answer.text
    for sent in rig.mailbox.posted:
        found = rig.browser("eve").get(f"/api/v1/operations/{sent['req']}")
        assert found.json["body"]["approval"]["requested_by"] == "zoe"
        assert "id.example.org" not in found.text, sent["op"]


def test_only_the_change_that_was_seen_is_approved(rig: Rig) -> None:
    ann, bob = rig.browser("ann"), rig.browser("bob")
    name = wait(ann)
    refused = decide(bob, name, digest="a" * 64)
    assert (refused.status_code, "not the change that you saw" in refused.text) == (409, True)
    assert decide(bob, name, digest="x").status_code == 400
    rig.decide_code = 409  # ``services``: what it was based on has changed
    assert decide(bob, name).status_code == 409


def test_a_change_expires(rig: Rig) -> None:
    ann, bob = rig.browser("ann"), rig.browser("bob")
    name = wait(ann)
    rig.clock.advance(2 * 3600)
    assert bob.get("/api/v1/approvals").json["items"] == []
    (row,) = bob.get("/api/v1/approvals?all=1").json["items"]
    assert row["state"] == "expired"
    assert decide(bob, name).status_code == 404


def test_changes_that_wait_survive_a_restart(rig: Rig, clock: FakeClock, source: api.FakeSource) -> None:
    name = wait(rig.browser("ann"))
    row = rig.access.rows["approvals"][name]
    again = Rig(clock, source)
    again.access.rows["approvals"][name] = row
    assert decide(again.browser("ann"), name).status_code == 403
    assert decide(again.browser("bob"), name).status_code == 200
    again.mailbox.close()


def test_without_the_setting_nothing_waits(web: FlaskClient, bearer: dict[str, str]) -> None:
    assert web.put("/api/v1/mode", json=ENFORCE, headers=bearer).status_code == 200
    assert web.delete("/api/v1/policies/pin", headers=bearer).status_code == 200
