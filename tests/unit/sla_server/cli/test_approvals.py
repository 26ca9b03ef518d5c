"""``sla approvals`` against the API, and what a command says whose change waits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sla_server.api.approvals import Approvals
from sla_server.cli.client import Client
from sla_server.cli.errors import ApprovalNeeded
from tests.support import api
from tests.support.cli import Terminal


def test_what_waits_is_listed_and_refused(sla: Terminal) -> None:
    shown = sla("approvals", "list").output
    assert all(word in shown for word in ("5c0f", "mode enforce", "zoe"))
    assert "STATE" not in shown
    assert "pending" in sla("approvals", "list", "--all").output
    assert '"approval_id": "5c0f"' in sla("approvals", "list", "--all", "-o", "json").output
    done = sla("approvals", "refuse", "5c", "--note", "not now")
    assert done.output == "refused: mode enforce on the server (now observe), asked for by zoe\n"
    ((op, body),) = sla.asked
    assert (op, body["approves"], body["note"]) == ("approval_decide", False, "not now")
    assert sla("approvals", "list").output == "No change waits for approval.\n"
    assert sla("approvals", "refuse", "5c").exit_code == 2


def test_the_servers_own_token_approves_nothing(sla: Terminal) -> None:
    done = sla("approvals", "approve", "5c0f")
    assert (done.exit_code, "does not say which person" in done.stderr) == (1, True)
    assert sla.asked == []


def test_a_command_whose_change_waits_says_who_can_approve_it(sla: Terminal, monkeypatch: Any) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"approval": api.approval(approval_id="77aa")})
    monkeypatch.setattr(Approvals, "is_needed", lambda *_: True)  # the rig's configuration is fixed
    done = sla("mode", "enforce")
    assert done.exit_code == 75
    assert "waits as 77aa until a second person approves it" in " ".join(done.stderr.split())
    assert "sla approvals approve 77aa" in done.stderr


def test_a_late_answer_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA_TOKEN", api.TOKEN)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            return httpx.Response(
                202, json={"state": "pending"}, headers={"Location": "/api/v1/operations/1"}
            )
        return httpx.Response(200, json={"state": "done", "body": {"approval": api.approval()}})

    client = Client("http://127.0.0.1:8411", transport=httpx.MockTransport(answer))
    with pytest.raises(ApprovalNeeded, match=r"(?s)mode enforce .* waits.*approve 5c0f"):
        client.change("PUT", "/mode", json={"mode": "enforce"})
