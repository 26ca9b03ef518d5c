"""Of two servers either one takes a change: the one that stands by forwards it to the one that acts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sla_server.lease_file import LeaseFile
from tests.support.postgres import PostgresServer
from tests.support.servers import NODES, SERVERS, Servers
from tests.support.stage import Stage

STANDS_BY = "urn:storage-sla:problem:stands-by"
SILENCE = """
apiVersion: storage-sla/v1
kind: Silence
metadata: {name: disk-swap}
spec: {match: {severities: [info]}, start: 2099-01-01T00:00, duration: 8h, tz: UTC, reason: disk swap}
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as ends:
        postgres = ends.enter_context(PostgresServer())
        made = Servers(tmp_path, postgres.create("sla"), ends, lease_s=6)
        for name in NODES:
            made.start(name)
        yield made


def _ask(stage: Stage, method: str, path: str, token: str, **how: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    address = f"http://127.0.0.1:{stage.api_port}/api/v1{path}"
    return httpx.request(method, address, headers=headers, timeout=60.0, **how)


def _mode(stage: Stage, token: str) -> str | None:
    found: str | None = _ask(stage, "GET", "/mode", token).json()["mode"]
    return found


def _names(stage: Stage, path: str) -> set[str]:
    return {row["name"] for row in stage.get(path)["items"]}


def test_a_change_at_the_server_that_stands_by_is_everywhere_and_rights_are_those_at_the_other(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = servers.stages["n1"]
    stage.wait(servers.acting, "a server that acts")
    acting = servers.acting()
    assert acting is not None
    other = next(name for name in SERVERS if name != acting)
    first, second = servers.stages[acting], servers.stages[other]
    second.wait(lambda: LeaseFile(second.sockets / "run").read().page, "the other one to know its page")
    second.wait(lambda: second.client.get("/api/v1/alive").status_code == 200, "the other one's page")

    tokens = {
        role: first.sla("token", "create", role, "--role", role, "-q").stdout.strip()
        for role in ("operator", "viewer")
    }
    monkeypatch.setenv("SLA_TOKEN", tokens["operator"])
    second.sla("apply", "-f", str(second.folder / "agreements.yaml"))
    silence = second.folder / "silence.yaml"
    silence.write_text(SILENCE)
    second.sla("apply", "-f", str(silence))
    second.sla("mode", "enforce")
    for stage in (first, second):
        stage.wait(lambda s=stage: "erp-gold" in _names(s, "slas"), "the agreement at both")
        stage.wait(lambda s=stage: "disk-swap" in _names(s, "silences?past=true"), "the silence at both")
        stage.wait(lambda s=stage: _mode(s, tokens["operator"]) == "enforce", "the mode at both")
    (audited,) = [row for row in second.get("audit")["items"] if row["action"] == "mode"]
    assert audited["who"] == "token operator"

    assert second.get("mode")["stale"], "the token of its own file is of no use at the other one"
    live = _ask(second, "GET", "/live", tokens["operator"]).json()
    assert (live["server"]["stale"], live["server"]["acting"]) == (False, acting)
    assert "enforce" in second.sla("mode").stdout
    assert second.client.get("/api/v1/ready").status_code == 503, "it stands by, all the same"

    throttle = {"volume": "erp-db", "iops": 100, "reason": "backup"}
    for token, status in (("sla_" + "x" * 43, 401), ("x" * 43, 401), (tokens["viewer"], 403)):
        for method, path, body in (("PUT", "/mode", {"mode": "observe"}), ("POST", "/throttles", throttle)):
            answers = [_ask(each, method, path, token, json=body) for each in (first, second)]
            assert [(one.status_code, one.json()) for one in answers] == [(status, answers[0].json())] * 2
    assert first.get("mode")["mode"] == "enforce"
    monkeypatch.delenv("SLA_TOKEN")
    assert first.sla("token", "revoke", "operator").returncode == 0
    assert _ask(second, "PUT", "/mode", tokens["operator"], json={"mode": "observe"}).status_code == 401

    tokens["second"] = first.sla("token", "create", "second", "--role", "operator", "-q").stdout.strip()
    servers.power_off(acting)
    refusals: list[httpx.Response] = []

    def changed() -> bool:
        answer = _ask(second, "PUT", "/mode", tokens["second"], json={"mode": "observe"})
        if not answer.is_success:
            refusals.append(answer)
        return answer.status_code == 200

    second.wait(changed, "the other one to take the change itself")
    assert refusals
    for answer in refusals:
        assert answer.status_code in (202, 401, 503), answer.text
    named = [each.json() for each in refusals if each.json().get("type") == STANDS_BY]
    assert any(f"the server of node {acting} acts" in each["detail"] for each in named)
    assert servers.acts(other)
