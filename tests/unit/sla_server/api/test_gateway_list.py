"""The list of gateways to dial: three sources joined by address."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from sla_server.api.context import AppContext
from tests.support import api

CONFIGURED = {
    "name": "own",
    "address": "10.0.0.4:7412",
    "source": "configuration",
    "state": "waiting",
    "reason": "Connection refused",
}
CONNECTED = {
    "name": "host-5",
    "address": "10.0.0.5:7412",
    "source": "list",
    "state": "connected",
    "reason": "",
}
REMOVED = {**CONNECTED, "address": "10.0.0.7:7412"}


def tell(context: AppContext, folder: Path, rows: Any) -> Path:
    context.metrics.folder = folder
    path = folder / "dialled.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


def states(web: FlaskClient) -> dict[str, tuple[str, str, str | None]]:
    answer = web.get("/api/v1/gateway-list").json
    assert answer is not None
    return {row["address"]: (row["source"], row["state"], row["answers_as"]) for row in answer["items"]}


def test_stored_reported_and_seen_are_one_list(web: FlaskClient, context: AppContext, tmp_path: Path) -> None:
    tell(context, tmp_path, [CONFIGURED, CONNECTED, REMOVED])
    assert states(web) == {
        "10.0.0.4:7412": ("configuration", "waiting", None),
        "10.0.0.5:7412": ("list", "connected", "gateway-a"),
        "10.0.0.6:7412": ("list", "pending", None),
    }


@pytest.mark.parametrize("how", ["never", "old", "junk", "deep"])
def test_a_daemon_that_does_not_say_is_unknown(
    web: FlaskClient, context: AppContext, tmp_path: Path, how: str
) -> None:
    if how != "never":
        path = tell(context, tmp_path, "junk" if how == "junk" else [CONNECTED])
        if how == "deep":
            path.write_text("[" * 50_000)
        if how == "old":
            os.utime(path, (0, 0))
    assert set(states(web).values()) == {("list", "unknown", None)}


def test_what_is_not_listed_or_not_here_cannot_be_removed(
    web: FlaskClient, context: AppContext, tmp_path: Path, bearer: dict[str, str]
) -> None:
    tell(context, tmp_path, [CONFIGURED])
    answer = web.delete("/api/v1/gateway-list/10.9.9.9:1", headers=bearer)
    assert answer.status_code == 404
    assert "sla gateways list" in answer.text
    answer = web.delete(f"/api/v1/gateway-list/{CONFIGURED['address']}", headers=bearer)
    assert answer.status_code == 400
    assert "[[pmdaemon.gateway]]" in answer.text


def test_a_listed_name_with_control_characters_can_be_removed(
    web: FlaskClient,
    context: AppContext,
    mailbox: api.AnsweringMailbox,
    bearer: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{**row, "name": "x\x1b[2J"} for row in context.source.gateway_list()]
    monkeypatch.setattr(context.source, "gateway_list", lambda: rows)
    answer = web.delete(f"/api/v1/gateway-list/{rows[0]['address']}", headers=bearer)
    assert answer.status_code == 200, answer.text
    assert mailbox.posted[0]["body"]["name"] == "x\ufffd[2J"


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": 5}, {"name": "x" * 201}, {"name": "x\x1b[2J"}, {"name": "a\nb"}]
)
def test_a_name_is_required(web: FlaskClient, bearer: dict[str, str], body: dict[str, Any]) -> None:
    answer = web.put("/api/v1/gateway-list/10.0.0.9:7412", headers=bearer, json=body)
    assert answer.status_code == 400
    assert "name" in answer.text
