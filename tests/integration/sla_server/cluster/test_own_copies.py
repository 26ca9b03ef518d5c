"""Streams of the cluster itself get the copies that they lack, on three real nodes; their content stays."""

from __future__ import annotations

import asyncio

import nats
import nats.errors
import nats.js.api

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster import leases
from sla_server.cluster.messages.link import BorrowedLink
from sla_server.cluster.own_copies import OwnCopies
from tests.support.cluster import READY_S, LocalCluster

STREAM = f"KV_{leases.BUCKET}"


def test_a_bucket_that_was_made_by_two_nodes_gets_a_third_copy() -> None:
    async def grown(cluster: LocalCluster) -> None:
        client = await nats.connect(cluster.urls)
        link, deadline = BorrowedLink(client, "test"), Deadline(READY_S)
        stream = client.jetstream(timeout=30)

        async def made() -> nats.js.kv.KeyValue:
            config = nats.js.api.KeyValueConfig(bucket=leases.BUCKET, history=1, replicas=2)
            return await stream.create_key_value(config)

        bucket = await link.retry(made, "the bucket", READY_S)
        await link.retry(lambda: bucket.put("gateways", b"of n1"), "a lease", READY_S)
        leader = ""
        while not leader:
            assert not deadline.passed
            info = await stream.stream_info(STREAM)
            leader = str((info.cluster and info.cluster.leader) or "")
        others = [node.config.node for node in cluster.nodes if node.config.node != leader]
        for name in others:
            assert await OwnCopies(name, 3).round(link) == []  # it leads none of them
        assert await OwnCopies(leader, 2).round(link) == []
        keeper, raised = OwnCopies(leader, 3), list[str]()
        while not raised:
            assert not deadline.passed
            raised = await keeper.round(link)
        assert raised == [STREAM]
        assert await keeper.round(link) == []
        copies: list[nats.js.api.PeerInfo] = []
        while len([copy for copy in copies if copy.current]) < 2:  # beside the leader's
            assert not deadline.passed
            info = await link.retry(lambda: stream.stream_info(STREAM), "its copies", READY_S)
            copies = list((info.cluster and info.cluster.replicas) or ())
        assert (await bucket.get("gateways")).value == b"of n1"
        await client.close()

    with LocalCluster() as cluster:
        cluster.wait_ready()
        asyncio.run(grown(cluster))
