"""What is acknowledged stays: a node is killed, the others go on, and it comes back."""

from __future__ import annotations

import asyncio

import nats
import nats.errors
from nats.js.api import StreamConfig

from pmdaemon.runtime.clock import Deadline
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
    stream = client.jetstream(timeout=30)
    try:
        count = (await stream.stream_info(name)).state.messages
        found = [await stream.get_msg(name, seq=seq + 1) for seq in range(count)]
        return [int(message.data or b"") for message in found]
    finally:
        await client.close()


async def _make(cluster: LocalCluster, name: str, subject: str) -> str:
    """Make a stream with three copies; returns the name of its leader."""
    client = await nats.connect(cluster.urls)
    try:
        info = await client.jetstream(timeout=30).add_stream(
            StreamConfig(name=name, subjects=[subject], num_replicas=3)
        )
        return str(info.cluster.leader if info.cluster else "")
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
