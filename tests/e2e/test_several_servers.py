"""Two servers over one PostgreSQL and one archive: one acts, and when it dies the other one takes over."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Driver
from tests.support.postgres import PostgresServer
from tests.support.servers import NODES, SERVERS, Servers
from tests.support.stage import LIMIT_S, Agent, Stage


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as ends:
        postgres = ends.enter_context(PostgresServer())
        yield Servers(tmp_path, postgres.create("sla"), ends)


def _stored_ios(stage: Stage) -> int:
    return sum(row["reads"] + row["writes"] for row in stage.get("volumes")["items"])


def _node_states(stage: Stage) -> dict[str, str]:
    return {row["name"]: row["state"] for row in stage.get("nodes")["items"]}


def test_a_gateway_goes_on_at_the_other_server_and_every_io_counts_once(
    servers: Servers, driver: Driver
) -> None:
    first = servers.stages["n1"]
    for name in NODES:
        servers.start(name)
    first.wait(lambda: servers.acts("n1") or servers.acts("n2"), "a server that acts")
    acting, other = ("n1", "n2") if servers.acts("n1") else ("n2", "n1")
    image = first.folder / "disk.img"
    image.write_bytes(bytes(8 << 20))
    agent = Agent("gateway-1", {"erp-db": str(image)})
    first.start_agent(agent)
    load = driver.start(agent.socket(first), "erp-db", rate_iops=100)

    for dying, next_one in ((acting, other), (other, acting)):
        stage = servers.stages[dying]
        stage.wait(lambda stage=stage: _stored_ios(stage) > 100, "counts of the gateway in SQL")
        with servers.held_up():
            before = len(load.done)
            stage.wait(lambda n=before: len(load.done) > n + 300, "cuts that are in the queue alone")
            servers.power_off(dying)
        taking = servers.stages[next_one]
        taking.wait(lambda name=next_one: servers.acts(name), f"{next_one} to take over")
        taking.wait(lambda stage=taking, n=before: _stored_ios(stage) > n, "newer counts in SQL")
        servers.start(dying)  # it stands by, with what its queue has held
        states = {dying: "stands-by", next_one: "acts", "n3": "runs"}
        taking.wait(lambda stage=taking, wanted=states: _node_states(stage) == wanted, f"{states}")
    command = [
        sys.executable,
        "-m",
        "sla_server",
        "status",
        "--config",
        str(servers.stages[other].config_path),
    ]

    def stands_by() -> bool:  # once it runs: the node of the cluster is there before its server
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return f"stands by: the server of node {acting} acts" in done.stdout

    servers.stages[other].wait(stands_by, "the server that stands by to say so")
    refused = servers.stages[other].sla("mode", "enforce", check=False)
    assert refused.returncode != 0
    assert f"the server of node {acting} acts" in refused.stderr
    pages = {name: f"http://127.0.0.1:{servers.stages[name].api_port}" for name in SERVERS}

    def shows_all() -> bool:  # a node that was slow to answer is in the next round
        rows = {row["name"]: row for row in servers.stages[other].get("nodes")["items"]}
        found = {name: rows[name]["page"] for name in NODES}
        return found == {**pages, "n3": None} and all(row["release"] for row in rows.values())

    servers.stages[other].wait(shows_all, "pages and releases of all nodes")
    assert f"the server of {acting}, {pages[acting]}" in refused.stderr
    driver.stop(load)
    assert not load.errors
    stage = servers.stages[acting]
    stage.wait(lambda: _stored_ios(stage) >= len(load.done), "all I/Os in SQL")
    assert _stored_ios(stage) == len(load.done)
    assert not [row["text"] for row in stage.get("events")["items"] if row["kind"] == "cuts-lost"]
