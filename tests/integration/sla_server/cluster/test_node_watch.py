"""What running nodes see of each other and of themselves: parameters that differ, a disk that is full."""

from __future__ import annotations

import asyncio
import shutil

import nats
import nats.errors
from nats.js.api import StreamConfig

from pmdaemon.runtime.clock import Deadline
from sla_server.cli.cluster import troubles
from sla_server.cluster.admin import Admin
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import EssentialsDiffer
from sla_server.cluster.membership import Membership
from sla_server.cluster.watch import NodeWatch
from tests.support.cluster import READY_S, LocalCluster
from tests.support.small_disk import SmallDisk


def _watch(cluster: LocalCluster, config: ClusterConfig, events: list[str]) -> NodeWatch:
    member = Membership("test", cluster.secrets, None)
    return NodeWatch(config, member, lambda kind, _severity, _text: events.append(kind))


def test_a_node_that_differs_is_seen_while_it_runs(cluster: LocalCluster) -> None:
    """As when it was started together with the others, and found none to compare itself with."""
    node = cluster.nodes[2]
    usual, events = node.config, list[str]()
    other = usual.model_copy(update={"replicas": 5})
    cluster.kill(2)
    node.config = other
    try:
        cluster.restore()
        watch, deadline, problem = _watch(cluster, other, events), Deadline(READY_S), ""
        while not problem:
            assert not deadline.passed
            try:
                watch.check()
            except EssentialsDiffer as exc:
                problem = str(exc)
        assert "those of n1: replicas is 5 here and 3 there" in problem
        _watch(cluster, cluster.nodes[0].config, events).check()
    finally:
        cluster.kill(2)
        node.config = usual
    assert events == []


def test_a_full_disk_is_seen() -> None:
    with SmallDisk(8 << 20) as disk, LocalCluster() as cluster:
        cluster.wait_ready()
        cluster.kill(0)
        home = cluster.directory / "n1"
        shutil.copytree(home, disk.path / "n1")
        shutil.rmtree(home)
        home.symlink_to(disk.path / "n1")
        cluster.start(0)
        cluster.wait_ready()
        events: list[str] = []
        watch = _watch(cluster, cluster.nodes[0].config, events)
        text = asyncio.run(_fill(cluster, disk))
        deadline = Deadline(3 * READY_S)
        while not events:  # a round without an answer says nothing
            assert not deadline.passed
            watch.check()
        watch.check()
    assert "n1 stores nothing: its engine has turned storage off" in text
    assert events == ["cluster-store-off"]


async def _fill(cluster: LocalCluster, disk: SmallDisk) -> str:
    """Fill the first node's disk, and store until it cannot; what the status says then.

    For minutes the others count the engine that was killed as one more node, whose answer is waited for: so
    each question has a limit of its own, far below that of the test. So has each message: one whose leader is
    the node with the full disk has no answer.
    """
    client = await nats.connect(cluster.urls[1:])
    stream, deadline = client.jetstream(timeout=2), Deadline(3 * READY_S)
    async with Admin(cluster.nodes[1].config, Membership("test", cluster.secrets, None)) as asker:
        # An engine that meets a full disk while it starts ends; this is about one that runs.
        while not any(row.name == "n1" and row.is_storing for row in await asker.nodes(1.0)):
            assert not deadline.passed
        while True:
            try:
                await stream.add_stream(StreamConfig(name="much", subjects=["much"], num_replicas=3))
                break
            except (TimeoutError, nats.errors.Error):  # one that was just started is not known yet
                assert not deadline.passed
                await asyncio.sleep(0.05)
        disk.fill()
        while all(row.is_storing for row in await asker.nodes(1.0)):
            assert not deadline.passed
            try:
                await stream.publish("much", bytes(64 << 10))
            except (TimeoutError, nats.errors.Error):  # another one leads soon
                await asyncio.sleep(0.05)
        state = await asker.state()
    await client.close()
    assert state.not_storing == ("n1",)
    assert not state.is_well
    return "\n".join(troubles(state))
