"""What is acknowledged stays: a node is killed, the others go on, and it comes back."""

from __future__ import annotations

import asyncio
import time

import nats
import nats.errors
import pytest
from nats.js.api import StreamConfig

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster import admin
from sla_server.cluster.admin import Admin
from sla_server.cluster.errors import ClusterRefused, StoredAlone
from sla_server.cluster.membership import Membership
from sla_server.cluster.node import STORE, check_store
from tests.support.cluster import READY_S, LocalCluster


async def _publish(cluster: LocalCluster, subject: str, numbers: range) -> None:
    """Publish each number until it is acknowledged; repeats have the same identity."""
    client = await nats.connect(cluster.urls, ping_interval=1, reconnect_time_wait=0.05)
    stream = client.jetstream(timeout=2)
    deadline = Deadline(READY_S)
    try:
        for number in numbers:
            while True:
                try:
                    await stream.publish(
                        subject, str(number).encode(), headers={"Nats-Msg-Id": f"{subject}:{number}"}
                    )
                    break
                except (TimeoutError, nats.errors.Error):
                    assert not deadline.passed
                    await asyncio.sleep(0.05)
    finally:
        await client.close()


async def _stored(cluster: LocalCluster, name: str) -> list[int]:
    client = await nats.connect(cluster.urls)
    stream, deadline = client.jetstream(timeout=5), Deadline(READY_S)
    try:
        while True:
            try:
                count = (await stream.stream_info(name)).state.messages
                found = [await stream.get_msg(name, seq=seq + 1) for seq in range(count)]
                return [int(message.data or b"") for message in found]
            except (TimeoutError, nats.errors.Error):  # a request without a leader is answered by nobody
                if deadline.passed:
                    raise
    finally:
        await client.close()


async def _make(cluster: LocalCluster, name: str, subject: str, copies: int = 3) -> str:
    """Make a stream with so many copies, once so many nodes are there; returns the name of its leader."""
    client = await nats.connect(cluster.urls)
    deadline = Deadline(READY_S)
    try:
        while True:
            try:
                info = await client.jetstream(timeout=30).add_stream(
                    StreamConfig(name=name, subjects=[subject], num_replicas=copies)
                )
            except (TimeoutError, nats.errors.Error):
                if deadline.passed:
                    raise
                await asyncio.sleep(0.1)
            else:
                if info.cluster and info.cluster.leader:
                    return str(info.cluster.leader)
                assert not deadline.passed, "it has no leader"
    finally:
        await client.close()


def test_a_killed_leader_loses_nothing(cluster: LocalCluster) -> None:
    leader = asyncio.run(_make(cluster, "killed", "killed.>"))
    index = [node.config.node for node in cluster.nodes].index(leader)
    asyncio.run(_publish(cluster, "killed.a", range(20)))
    cluster.kill(index)
    asyncio.run(_publish(cluster, "killed.a", range(20, 40)))
    assert asyncio.run(_stored(cluster, "killed")) == list(range(40))
    cluster.restore()
    asyncio.run(_publish(cluster, "killed.a", range(40, 50)))
    assert asyncio.run(_stored(cluster, "killed")) == list(range(50))


def test_what_an_engine_has_stored_alone_is_told_from_what_is_of_a_cluster(cluster: LocalCluster) -> None:
    """By files of the engine: another layout of a later one has to be noticed here."""

    async def add(url: str) -> None:
        client = await nats.connect(url)
        await client.jetstream(timeout=30).add_stream(StreamConfig(name="kept", subjects=["kept.>"]))
        await client.close()

    asyncio.run(_make(cluster, "of-all", "of-all.>"))
    deadline = Deadline(READY_S)
    for node in cluster.nodes:  # that it leads, the leader says before the last follower has begun
        while not (node.directory / STORE / "jetstream" / "SLA" / "streams" / "of-all").is_dir():
            assert not deadline.passed, node.config.node
            time.sleep(0.05)
        check_store(node.config, node.directory)
    with LocalCluster(size=1) as one:
        one.wait_ready()
        asyncio.run(add(one.url))
        [node] = one.nodes
        several = node.config.model_copy(update={"peers": cluster.nodes[0].config.peers})
        with pytest.raises(StoredAlone, match="kept"):
            check_store(several, node.directory)


def _member(cluster: LocalCluster) -> Membership:
    return Membership("test", cluster.secrets, None)


def test_the_only_copy_of_a_stream_is_neither_handed_over_nor_forgotten(cluster: LocalCluster) -> None:
    leader = asyncio.run(_make(cluster, "alone", "alone.>", copies=1))
    index = [node.config.node for node in cluster.nodes].index(leader)
    other = cluster.nodes[index - 1].config
    asyncio.run(_publish(cluster, "alone.a", range(3)))

    async def asked() -> str:
        async with Admin(other, _member(cluster)) as asker:
            assert await admin.until_answered(lambda: asker.only_on(leader), Deadline(READY_S)) == ["alone"]
            cluster.kill(index)
            deadline = Deadline(3 * READY_S)
            while True:  # the cluster may have to elect first, and the killed node be missed
                try:
                    await asker.forget(leader)
                except ClusterRefused as exc:
                    if "only copy" in str(exc):
                        text = str(exc)
                        break
                    if deadline.passed:
                        raise
                    await asyncio.sleep(0.1)
                else:
                    raise AssertionError("it was forgotten with the only copy")
            while "no node answers for alone" not in (trouble := (await asker.state()).trouble):
                assert not deadline.passed, trouble
                await asyncio.sleep(0.1)
            return text

    text = asyncio.run(asked())
    assert f"{leader} may have the only copy" in text
    cluster.restore()

    async def is_back() -> None:
        async with Admin(other, _member(cluster)) as asker:
            deadline = Deadline(READY_S)
            while await admin.until_answered(asker.silent_streams, Deadline(READY_S)):
                assert not deadline.passed
                await asyncio.sleep(0.1)

    asyncio.run(is_back())
    assert asyncio.run(_stored(cluster, "alone")) == [0, 1, 2]


def test_a_copy_of_a_machine_that_runs_is_refused(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, member = cluster.nodes[0].config, _member(cluster)
    monkeypatch.setattr(admin, "LEFT_OVER_S", 0.0)  # nothing is left over of another process

    async def check_again() -> None:
        """One that stands still for a moment misses a question."""
        deadline = Deadline(READY_S)
        while not deadline.passed:
            await admin.check_essentials(config, member)

    with pytest.raises(ClusterRefused, match="a node n1 runs already"):
        asyncio.run(check_again())
    cluster.kill(0)
    assert "n1" not in asyncio.run(admin.check_essentials(config, member))
