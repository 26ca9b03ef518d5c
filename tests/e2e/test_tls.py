"""The whole product over TLS: enrolled agents are polled and renew; a revoked one is out till it enrols."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Driver
from tests.support.stage import Agent, Stage

LIFE_S = 120.0  # agents renew in its second half, which must be long enough for a busy machine


@pytest.fixture(scope="module")
def tls_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Server and two agents with TLS and certificates that live for two minutes."""
    folder = tmp_path_factory.mktemp("tls-stage")
    with Stage(folder, tls=True, extra_toml=f"certificate_days = {LIFE_S / 86_400}\n") as running:
        running.start_server()
        for name in ("gateway-a", "gateway-b"):
            image = folder / f"{name}.img"
            image.write_bytes(bytes(1 << 20))
            running.start_agent(Agent(name, {f"vol-{name}": str(image)}))
        running.wait(running.gateways_up, "both gateways")
        yield running


def renewed(stage: Stage) -> set[str]:
    return {entry.name for entry in stage.authority.entries() if entry.how == "renewal"}


def listed(stage: Stage) -> list[dict[str, Any]]:
    return list(json.loads(stage.sla("ca", "list", "-o", "json").stdout)["certificates"])


def state(stage: Stage, name: str) -> str:
    return next((row["state"] for row in stage.live().get("gateways", []) if row["name"] == name), "")


def test_statistics_arrive_over_tls(tls_stage: Stage, driver: Driver) -> None:
    agent = tls_stage.agents[0]
    load = driver.start(agent.socket(tls_stage), "vol-gateway-a", rate_iops=200)

    def iops() -> float:
        rows = [row for row in tls_stage.snapshot()["volumes"] if row["volume"] == "vol-gateway-a"]
        return float(rows[0]["iops"] or 0) if rows else 0.0

    tls_stage.wait(lambda: iops() > 0, "I/O counted at the server")
    driver.stop(load)
    assert not load.errors


def test_certificates_are_renewed_in_time(tls_stage: Stage) -> None:
    both = {"gateway-a", "gateway-b"}
    tls_stage.wait(lambda: renewed(tls_stage) == both, "both agents' renewals", limit_s=3 * LIFE_S)
    certificates = listed(tls_stage)
    assert {row["name"] for row in certificates if row["by"] == "renewal"} == both
    end_us = max(row["not_after_us"] for row in certificates if row["by"] == "token")
    tls_stage.wait(lambda: time.time_ns() // 1000 > end_us, "the first certificates' end", limit_s=3 * LIFE_S)
    tls_stage.wait(tls_stage.gateways_up, "both gateways with their new certificates")
    kinds = [row["kind"] for row in tls_stage.get("events?limit=200")["items"]]
    assert "gateway-lost" not in kinds, "a renewal ends no session"


def test_a_revoked_gateway_is_out_until_it_is_enrolled_again(tls_stage: Stage) -> None:
    revoked = tls_stage.agents[1]
    tls_stage.sla("ca", "revoke", "gateway-b", "--reason", "test")
    tls_stage.wait(lambda: state(tls_stage, "gateway-b") == "lost", "the revoked gateway gone")

    def told() -> bool:
        kinds = [(row["kind"], row["text"]) for row in tls_stage.get("events?limit=200")["items"]]
        return any(kind == "gateway-refused" and "revoked" in text for kind, text in kinds)

    tls_stage.wait(told, "an event that says why it is refused")
    tls_stage.wait(lambda: state(tls_stage, "gateway-a") == "up", "the other one, up")
    token = tls_stage.enrol(revoked)  # the link takes the new certificate at its next dial
    tls_stage.wait(tls_stage.gateways_up, "the gateway back")
    done = thief(tls_stage, token)
    assert done.returncode == 69
    assert "token-used" in done.stderr


def thief(stage: Stage, token: str) -> subprocess.CompletedProcess[str]:
    """What somebody would try who saw the printed command later."""
    fingerprint = stage.authority.fingerprint()
    port = (stage.sockets / "run" / "pmdaemon.port").read_text().strip()
    command = [sys.executable, "-m", "gateway_agent", "enrol", "--token", token, "--fingerprint", fingerprint]
    command += ["--server", f"127.0.0.1:{port}", "--state-dir", str(stage.folder / "thief")]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
