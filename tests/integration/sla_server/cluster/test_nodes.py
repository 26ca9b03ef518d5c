"""Nodes as the product runs them: made, joined, started, moved, killed, drained and left by its commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import nats.errors
import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server import config as configuration
from sla_server.cluster import account_file, membership
from sla_server.cluster.messages import Destination, DestinationKind, MessageSession
from tests.support.cluster import READY_S, configurations
from tests.support.node_processes import Nodes, done, make_members, sla, status


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    paths = configurations(tmp_path_factory.mktemp("nodes"))
    make_members(paths)
    nodes = Nodes(paths)
    for path in paths:
        nodes.start(path.parent.name)
    nodes.wait_well()
    yield nodes
    nodes.close()


def _cluster_of(path: Path) -> configuration.ClusterConfig:
    config = configuration.load(path).cluster
    assert config is not None
    return config


async def _make_stream(path: Path, name: str) -> None:
    from nats.js.api import StreamConfig

    from sla_server.cluster.admin import connect

    config = configuration.load(path)
    assert config.cluster is not None
    member = membership.load(config.cluster, config.cluster.directory(config.data_dir))
    client = await connect(config.cluster, member, [config.cluster.listen])
    deadline = Deadline(READY_S)
    try:
        while True:
            try:
                await client.jetstream(timeout=30).add_stream(
                    StreamConfig(name=name, subjects=[f"{name}.>"], num_replicas=3)
                )
                return
            except (TimeoutError, nats.errors.Error):  # not all nodes are there yet
                if deadline.passed:
                    raise
                await asyncio.sleep(0.1)
    finally:
        await client.close()


def test_all_nodes_show_the_same_digest_and_one_leads(three: Nodes) -> None:
    state = three.wait_well(1)
    assert [node["name"] for node in state["nodes"]] == ["n1", "n2", "n3"]
    assert [node["site"] for node in state["nodes"]] == ["site-n1", "site-n2", "site-n3"]
    assert len({node["digest"] for node in state["nodes"]}) == 1
    assert state["leader"] in ("n1", "n2", "n3")
    deadline = Deadline(READY_S)
    while "3 nodes answered" not in (text := done(three.paths[2], "config")):
        assert not deadline.passed, text
    assert "digest" in text


def _until_done(path: Path, *words: str) -> str:
    """What a command says once it has succeeded: a machine that does other things may lack an answer."""
    deadline = Deadline(READY_S)
    while (result := sla(path, *words)).exit_code != 0:
        assert not deadline.passed, result.output
    return result.output


def test_what_the_nodes_share_is_changed_on_all_by_a_command(three: Nodes) -> None:
    assert "3 of 3 nodes answered" in _until_done(three.paths[1], "command")
    assert "3 of 3 nodes answered" in _until_done(three.paths[1], "config", "set", "max_connections=700")
    confs = [path.parent / "data/cluster/engine.conf" for path in three.paths]
    assert all("max_connections: 700\n" in conf.read_text() for conf in confs)
    shown = json.loads(_until_done(three.paths[2], "config", "-o", "json"))
    assert (shown["acquirable"]["max_connections"], shown["behind"]) == (700, [])
    refused = sla(three.paths[0], "config", "set", "max_connections=1")
    assert (refused.exit_code, "it must be from 16 to 1000000" in refused.output) == (2, True)
    deadline, nodes = Deadline(READY_S), set[str]()
    while nodes != {"n1", "n2", "n3"}:  # each node has taken the parameters, and its log says so
        assert not deadline.passed, nodes
        rows = [json.loads(line) for line in sla(three.paths[0], "log", "-o", "json").stdout.splitlines()]
        assert rows == sorted(rows, key=lambda row: (row["at_unix_us"], row["node"], row["counter"]))
        nodes = {row["node"] for row in rows if "event=cluster-document-taken" in row["line"]}
    assert json.loads(_until_done(three.paths[0], "dmq", "list", "-o", "json"))["messages"] == []


def test_accounts_are_made_changed_and_removed_by_commands(three: Nodes, tmp_path: Path) -> None:
    secret = tmp_path / "shop.json"
    homes = [path.parent / "data/cluster" for path in three.paths]

    def change(path: Path, *words: str) -> None:
        """Status 1: the change holds, and a slow node has not answered in time; it takes it later."""
        result = sla(path, "account", *words)
        assert result.exit_code in (0, 1), result.output

    def wait_for(count: int, text: str) -> None:
        deadline = Deadline(READY_S)
        while sum(text in (home / "engine.conf").read_text() for home in homes) != count:
            assert not deadline.passed

    change(three.paths[0], "add", "shop", str(secret), "--role", "producer:orders.*")
    assert secret.stat().st_mode & 0o777 == 0o600
    password = json.loads(secret.read_text())["secret"]
    wait_for(3, password)
    for home in homes:
        files = [found for found in home.iterdir() if found.is_file() and password in found.read_text()]
        assert [(found.name, found.stat().st_mode & 0o777) for found in files] == [("engine.conf", 0o600)]
    change(three.paths[1], "role", "shop", "--add", "monitor")
    wait_for(3, "$JS.API.STREAM.LIST")
    rows = json.loads(_until_done(three.paths[2], "account", "list", "-o", "json"))["accounts"]
    assert rows == [{"name": "shop", "roles": ["producer:orders.*", "monitor"]}]
    change(three.paths[2], "remove", "shop")
    wait_for(0, password)
    unknown = sla(three.paths[2], "account", "remove", "shop")
    assert "there is no account shop; there are none" in unknown.output


def test_a_subscriber_is_listed_and_ended_by_commands(three: Nodes, tmp_path: Path) -> None:
    secret = tmp_path / "papers.json"
    assert sla(three.paths[0], "account", "add", "papers", str(secret), "--role", "admin").exit_code in (0, 1)
    deadline = Deadline(READY_S)
    while not all("papers" in (path.parent / "data/cluster/engine.conf").read_text() for path in three.paths):
        assert not deadline.passed
    connection = account_file.connection(secret)
    topic = Destination("papers", DestinationKind.TOPIC, max_bytes=1 << 20)
    with MessageSession(connection.urls, "papers", node=70, directory=tmp_path / "session") as session:
        session.create(topic)
        consumer = session.consumer("papers", "gone")
        assert consumer.wait_ready(1, READY_S)
        session.producer("papers").send(b"1")
        consumer.close()
    row: dict[str, object] = {}
    while row.get("is_receiving", True):  # its last request is open for some seconds
        assert not deadline.passed
        [row] = json.loads(_until_done(three.paths[1], "subscriber", "list", "papers", "-o", "json"))[
            "subscribers"
        ]
    assert (row["topic"], row["name"]) == ("papers", "gone")
    said = _until_done(three.paths[1], "subscriber", "end", "papers", "gone", "--yes")
    assert "gone subscribes to papers no more; 1 message waited for it" in said
    empty = _until_done(three.paths[2], "subscriber", "list", "papers", "-o", "json")
    assert json.loads(empty)["subscribers"] == []


def test_a_stream_is_moved_to_a_node_and_a_drained_node_leads_nothing(three: Nodes) -> None:
    asyncio.run(_make_stream(three.paths[0], "moved"))
    deadline, current = Deadline(READY_S), []
    while not current:
        assert not deadline.passed
        rows = three.wait_well()["streams"]
        current = [name for row in rows if row["name"] == "moved" for name in row["current"]]
    target = current[0]
    assert done(three.paths[0], "stepdown", "moved", "--to", target) == f"stream moved is led by {target}\n"
    text = done(three.paths[0], "drain", target)
    assert "stream moved" in text
    state = three.wait_well()
    assert target not in [row["leader"] for row in state["streams"]]
    assert state["leader"] != target
    refused = sla(three.paths[0], "stepdown", "unknown")
    assert refused.exit_code == 75
    assert "stream not found" in refused.output


def test_a_killed_node_is_missed_leaves_no_engine_and_comes_back(three: Nodes) -> None:
    three.end("n3", signal.SIGKILL)
    deadline = Deadline(READY_S)
    while (state := status(three.paths[0])).get("missing") != ["n3"]:
        assert not deadline.passed, state
    while "n3 does not run" not in (result := sla(three.paths[0], "status")).output:
        assert not deadline.passed, result.output
    assert result.exit_code == 1
    three.start("n3")  # its ports and its store are free: the engine has ended with its parent
    three.wait_well()


def test_other_essential_parameters_are_refused_by_name(three: Nodes) -> None:
    assert three.end("n2") == 0
    path = three.paths[1]
    text = path.read_text()
    path.write_text(text.replace("[cluster]", "[cluster]\nmax_payload_bytes = 2000000"))
    command = [sys.executable, "-m", "sla_server", "node", "--config", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    path.write_text(text)
    assert ended.returncode == 78
    assert "max_payload_bytes is 2000000 here and 1048576 there" in ended.stderr
    three.start("n2")
    three.wait_well()


def test_an_engine_that_dies_is_started_again(three: Nodes) -> None:
    parent = three.processes["n1"].pid
    [child] = (Path(f"/proc/{parent}/task/{parent}/children")).read_text().split()
    os.kill(int(child), signal.SIGKILL)
    log = three.paths[0].parent / "log"
    deadline = Deadline(READY_S)
    while log.read_text().count("engine-started") < 2:
        assert not deadline.passed
    three.wait_well()


def test_a_node_leaves_after_it_was_stopped(three: Nodes) -> None:
    assert "still runs" in sla(three.paths[0], "leave", "n3").output
    assert three.end("n3") == 0
    done(three.paths[2], "leave", "--yes")
    assert not (three.paths[2].parent / "data/cluster/credentials.json").exists()
    state = three.wait_well()
    assert [node["name"] for node in state["nodes"]] == ["n1", "n2"]
    assert state["missing"] == []
