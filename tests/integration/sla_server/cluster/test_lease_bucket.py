"""Leases in a bucket of three real nodes."""

from __future__ import annotations

import asyncio
from typing import Final

import nats
import nats.errors

from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server.cluster.leases import BUCKET, BucketStore, ClusterLease, LeaseKeeper, LeaseRecord
from tests.support.cluster import READY_S, LocalCluster

NAME: Final = "gateways"


def _keeper(holder: str) -> tuple[ClusterLease, LeaseKeeper]:
    lease = ClusterLease(holder, READY_S)
    return lease, LeaseKeeper(NAME, lease, SystemClock(), lambda _lease: None)


async def _until_done(keeper: LeaseKeeper, store: BucketStore) -> None:
    """A round, again while the nodes elect."""
    deadline = Deadline(READY_S)
    while True:
        try:
            return await keeper.round(store)
        except (TimeoutError, nats.errors.Error):
            assert not deadline.passed


def test_one_of_two_has_it_also_after_the_death_of_a_node_until_it_gives_it_up(cluster: LocalCluster) -> None:
    async def check() -> None:
        client = await nats.connect(cluster.urls, ping_interval=1, reconnect_time_wait=0.05)
        try:
            store = BucketStore(client, 3, 5)
            (first, first_keeper), (second, second_keeper) = _keeper("n1"), _keeper("n2")
            await _until_done(first_keeper, store)
            await _until_done(second_keeper, BucketStore(client, 3, 5))
            assert (first.until_ns > 0, second.until_ns) == (True, 0)
            assert first.record is not None
            fence, revision = first.record.fence, first.revision
            info = await client.jetstream().stream_info(f"KV_{BUCKET}")
            leader = info.cluster.leader if info.cluster else None
            cluster.kill([node.config.node for node in cluster.nodes].index(str(leader)))
            await _until_done(first_keeper, store)
            assert (first.until_ns > 0, first.record.fence) == (True, fence)
            assert first.revision > revision
            assert await store.write(NAME, LeaseRecord("n2", fence + 1, 1), revision) is None
            await first_keeper.give_up(store)
            await _until_done(second_keeper, store)
            assert (first.until_ns, second.until_ns > 0) == (0, True)
            assert second.record is not None
            assert second.record.fence > fence
            bucket = await client.jetstream(timeout=READY_S).key_value(BUCKET)
            await bucket.delete(NAME)
            record, deleted = await store.read(NAME)
            assert record is None
            assert await store.write(NAME, LeaseRecord("n1", fence + 2, 1), deleted) is not None
        finally:
            await client.close()

    asyncio.run(check())
