"""An agent of a release of before is upgraded under load, by TLS, with a cap in force: the whole product.

The release of before is this one as a server sees it without features and under another version: a
``sitecustomize`` in the agent's environment, which looks at each start which release it is.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sla_server.config import load
from sla_server.db.policies import open_policies
from tests.e2e.test_counts import totals_in_sql
from tests.integration.gateway_agent.test_upgrade import REGION, Persistent
from tests.support.stage import Agent, Stage

IOPS = 100
ROOT = Path(__file__).parents[2]
OLD = "gateway-agent 0.0.9"
SHIM = f"""
import os
from pathlib import Path
if Path(os.environ["SLA_TEST_RELEASE"]).read_text() == "old":
    from pmdaemon.wire.messages import agent
    def of(cls, gateway_id, name, epoch, software, of_planes=()):
        return cls(agent.PROTO_MIN, agent.PROTO_MAX, (), {OLD!r}, gateway_id, name, epoch)
    agent.Hello.of = classmethod(of)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    shim, release, image = tmp_path / "shim", tmp_path / "release", tmp_path / "image"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(SHIM)
    release.write_text("old")
    image.write_bytes(bytes(1 << 20))
    environment = {"PYTHONPATH": f"{shim}:{ROOT}", "SLA_TEST_RELEASE": str(release)}
    extra = 'drain_s = 0.0\nclient_rule = "export-suffix"\n'
    with Stage(tmp_path / "stage", tls=True) as running:
        running.start_server()
        running.start_agent(Agent("gateway-a", {"vol-1": str(image)}, "disk", extra, environment))
        running.wait(running.gateways_up, "the gateway")
        yield running


def software(stage: Stage) -> str:
    database = next((stage.folder / "data").glob("*.db"))
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        row = connection.execute("select software from gateways").fetchone()
        return str(row[0]) if row else ""


def said(stage: Stage, name: str) -> dict[str, Any]:
    return dict(json.loads((stage.sockets / "gateway-a" / name).read_text()))


def events(stage: Stage) -> set[str]:
    return {row["kind"] for row in stage.get("events?limit=200")["items"]}


def publish_costs(stage: Stage) -> None:
    """As a policy job does that found what I/Os cost."""
    config = load(stage.config_path)
    fit = {"backend": "disk", "cost_write": 2.0, "cost_bytes": 32_768}
    open_policies(config.database, config.data_dir).publish(
        [], job={}, report={"cost_model": [fit]}, published_by="test"
    )


def holds(stage: Stage) -> bool:
    """Whether the cap is in force by the gateway's cuts; ``seen``: its I/O keeps to it, too."""
    return [each["state"] for each in stage.snapshot()["throttles"]] in (["confirmed"], ["seen"])


def test_caps_hold_every_io_is_counted_once_and_no_client_sees_an_error(stage: Stage, tmp_path: Path) -> None:
    agent, made = stage.agents[0], list[socket.socket]()

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        made.append(sock)  # by both threads: the newest may be the other's
        sock.settimeout(120)
        sock.connect(str(agent.socket(stage)))
        return sock

    stage.sla("throttle", "set", "vol-1", "--iops", str(IOPS), "--for", "30m", "--reason", "test")
    stage.wait(lambda: holds(stage), "the cap")
    publish_costs(stage)
    stage.wait(lambda: "policy-applied" in events(stage), "the policy in force")
    assert stage.wait(lambda: software(stage), "the release") == OLD
    assert "costs-in-force" not in (stage.folder / "gateway-a.log").read_text(), "a release of before"

    clients = [Persistent(connect, f"vol-1@{name}", at * REGION) for at, name in enumerate(("one", "two"))]

    def done() -> int:
        return sum(client.reads + client.writes for client in clients)

    try:
        for client in clients:
            client.goes_on()
        former, began_s, before = said(stage, "link.json"), time.monotonic(), done()
        (tmp_path / "release").write_text("new")
        config = str(stage.folder / "gateway-a.toml")
        command = [sys.executable, "-m", "gateway_agent", "upgrade", "--config", config]
        upgraded = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert upgraded.stdout.startswith("upgrade  done"), upgraded.stdout + upgraded.stderr
        stage.wait(lambda: not said(stage, "agent.json")["leaving"], "the end of the former process")
        for client in clients:
            client.goes_on()
        most = IOPS * (time.monotonic() - began_s)
        assert done() - before <= most + 10, "the two processes together keep to the cap"
        stage.wait(lambda: software(stage) not in ("", OLD), "the new release at the server")
        stage.wait(lambda: holds(stage), "the cap, confirmed by it")
        caps = stage.wait(lambda: said(stage, "link.json")["caps"], "the caps that the next link says it has")
        assert caps["generation"] >= former["caps"]["generation"]
        stage.wait(
            lambda: "costs-in-force" in (stage.folder / "gateway-a.log").read_text(),
            "the costs, which the new release takes",
        )
        counts = [client.stop() for client in clients]
    finally:
        for client in clients:
            client.end()
        for each in made:
            each.close()
    assert [client.connections for client in clients] == [2, 2]
    expected = sum(reads for reads, _ in counts), sum(writes for _, writes in counts)

    def counted() -> bool:
        rows = [row for row in stage.get("volumes")["items"] if row["volume"] == "vol-1"]
        return bool(rows) and (rows[0]["reads"], rows[0]["writes"]) == expected

    stage.wait(counted, f"{expected} reads and writes")
    assert totals_in_sql(stage, "vol-1") == expected
    assert not events(stage) & {"plane-died", "spool-overflow", "cuts-lost", "lease-expired"}
