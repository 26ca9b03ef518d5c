from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from pmdaemon.wire.messages.api import ServiceResponse
from sla_server.api.context import AppContext
from tests.support import api

THROTTLE = {"volume": "batch", "iops": 100, "duration_s": 600, "reason": "backup window"}


@pytest.mark.parametrize(
    ("method", "path", "how", "op", "body"),
    [
        ("POST", "/slas", {"data": "kind: SLA"}, "apply", {"documents": "kind: SLA", "dry_run": False}),
        (
            "POST",
            "/slas?dry_run=1",
            {"data": "kind: SLA"},
            "apply",
            {"documents": "kind: SLA", "dry_run": True},
        ),
        (
            "POST",
            "/slas?based_on=erp-gold:2",
            {"data": "kind: SLA"},
            "apply",
            {"documents": "kind: SLA", "dry_run": False, "based_on": {"erp-gold": 2}},
        ),
        ("DELETE", "/slas/erp-gold", {}, "delete", {"name": "erp-gold"}),
        (
            "POST",
            "/throttles",
            {"json": THROTTLE},
            "throttle_set",
            {**THROTTLE, "iops": 100.0, "duration_s": 600.0},
        ),
        ("DELETE", "/throttles/t-1", {}, "throttle_release", {"volume": None, "throttle_id": "t-1"}),
        (
            "DELETE",
            "/throttles?volume=batch",
            {},
            "throttle_release",
            {"volume": "batch", "throttle_id": None},
        ),
        (
            "DELETE",
            "/throttles?volume=batch&client=host-a",
            {},
            "throttle_release",
            {"volume": "batch", "throttle_id": None, "client": "host-a"},
        ),
        ("PUT", "/mode", {"json": {"mode": "observe"}}, "mode", {"mode": "observe"}),
        ("POST", "/policies/announce", {}, "policies_changed", {}),
        (
            "PUT",
            "/gateway-list/10.0.0.9:7412",
            {"json": {"name": "host-9"}},
            "gateway_list",
            {"address": "10.0.0.9:7412", "name": "host-9", "is_listed": True},
        ),
        (
            "DELETE",
            "/gateway-list/10.0.0.5:7412",
            {},
            "gateway_list",
            {"address": "10.0.0.5:7412", "name": "host-5", "is_listed": False},
        ),
    ],
)
def test_each_change_is_one_request_to_services(
    web: FlaskClient,
    mailbox: api.AnsweringMailbox,
    bearer: dict[str, str],
    method: str,
    path: str,
    how: dict[str, Any],
    op: str,
    body: dict[str, Any],
) -> None:
    answer = web.open(f"/api/v1{path}", method=method, headers=bearer, **how)
    assert answer.status_code == 200, answer.text
    assert answer.json == {"op": op}
    assert [(header["op"], header["body"]) for header in mailbox.posted] == [(op, body)]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"iops": None}, "exactly one"),
        ({"bytes_per_s": 5}, "exactly one"),
        ({"iops": 0}, "iops"),
        ({"iops": -5}, "iops"),
        ({"iops": True}, "iops"),
        ({"iops": "many"}, "iops"),
        ({"iops": float("nan")}, "iops"),
        ({"iops": 10**400}, "iops"),
        ({"iops": [5]}, "iops"),
        ({"volume": ""}, "volume"),
        ({"volume": 3}, "volume"),
        ({"reason": "  "}, "reason"),
        ({"reason": "x" * 201}, "reason"),
        ({"duration_s": 0}, "duration_s"),
    ],
)
def test_throttles_that_make_no_sense(
    web: FlaskClient,
    mailbox: api.AnsweringMailbox,
    bearer: dict[str, str],
    changed: dict[str, Any],
    named: str,
) -> None:
    answer = web.post("/api/v1/throttles", json={**THROTTLE, **changed}, headers=bearer)
    assert answer.status_code == 400
    assert named in answer.json["detail"]
    assert mailbox.posted == []


@pytest.mark.parametrize(
    ("method", "path", "data"),
    [
        ("PUT", "/mode", b'{"mode": "off"}'),
        ("PUT", "/mode", b"[]"),
        ("PUT", "/mode", b"{"),
        ("PUT", "/mode", b"[" * 50_000),
        ("POST", "/throttles", b'{"volume": "v", "iops": 1, "reason": "half a pair: \\ud800"}'),
        ("POST", "/slas", b"  "),
        ("POST", "/slas", b"\xff\xfe"),
        ("POST", "/slas?based_on=gold", b"kind: SLA"),
        ("POST", "/slas?based_on=gold:-1", b"kind: SLA"),
        ("POST", f"/slas?based_on=gold:{1 << 64}", b"kind: SLA"),
        ("DELETE", "/throttles", b""),
    ],
)
def test_bodies_that_make_no_sense(
    web: FlaskClient,
    mailbox: api.AnsweringMailbox,
    bearer: dict[str, str],
    method: str,
    path: str,
    data: bytes,
) -> None:
    answer = web.open(f"/api/v1{path}", method=method, data=data, headers=bearer)
    assert answer.status_code == 400
    assert mailbox.posted == []


def test_a_refusal_is_reported_with_its_errors(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    errors = [{"line": 3, "field": "spec.priority", "problem": "unknown"}]
    mailbox.answer = lambda _header: (False, 422, {"errors": errors})
    answer = web.post("/api/v1/slas", data="kind: SLA", headers=bearer)
    assert answer.status_code == 422
    assert answer.mimetype == "application/problem+json"
    assert answer.json["errors"] == errors


def test_no_answer_is_202_and_an_operation(
    web: FlaskClient, mailbox: api.AnsweringMailbox, context: AppContext, bearer: dict[str, str]
) -> None:
    mailbox.answer = None
    answer = web.delete("/api/v1/slas/erp-gold", headers=bearer)
    assert answer.status_code == 202
    where = answer.headers["Location"]
    assert web.get(where).json["state"] == "pending"
    assert "sla_api_operations_pending 1.0" in web.get("/api/v1/metrics").text
    context.operations.answer(
        ServiceResponse.parse({"req": mailbox.posted[0]["req"], "ok": True, "code": 200, "body": {}})
    )
    operation = web.get(where).json
    assert (operation["state"], operation["code"]) == ("done", 200)
    assert web.get("/api/v1/operations/never").status_code == 404


def test_a_full_mailbox_is_503(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    mailbox.full = True
    answer = web.put("/api/v1/mode", json={"mode": "observe"}, headers=bearer)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]


def test_a_new_login_address_works_once(web: FlaskClient, bearer: dict[str, str]) -> None:
    answer = web.post("/api/v1/logins", headers=bearer)
    address = answer.json["address"]
    assert address.startswith("http://127.0.0.1:8411/login?code=")
    assert answer.headers["Cache-Control"] == "no-store"
    code = address.partition("code=")[2]
    assert web.post("/login", data={"code": code}).status_code == 303
    assert web.post("/login", data={"code": code}).status_code == 403
