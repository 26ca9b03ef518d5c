"""Partitions between real nodes, through proxies: one primary goes on, and there is one again afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.admin import Admin, ClusterState
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.membership import Membership
from sla_server.cluster.messages import Destination, MessageSession
from tests.support.cluster import READY_S, LocalCluster

EACH = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Instead of the one of the session: its nodes have links that can be cut."""
    with LocalCluster(has_links=True) as made:
        made.wait_ready()
        yield made


def _state(cluster: LocalCluster, index: int) -> ClusterState:
    """As one node sees it."""

    async def ask() -> ClusterState:
        config = cluster.nodes[index].config
        member = Membership("test", cluster.secrets, None)
        async with Admin(config, member, [config.listen]) as asker:
            return await asker.state()

    return asyncio.run(ask())


def _leader(cluster: LocalCluster, index: int, stream: str) -> str:
    try:
        return next((row.leader for row in _state(cluster, index).streams if row.name == stream), "")
    except ClusterError:
        return ""


def _until(ready: object, what: str) -> None:
    deadline = Deadline(READY_S)
    while not ready():  # type: ignore[operator]
        assert not deadline.passed, what


@pytest.mark.parametrize("one_way", [False, True])
def test_the_majority_goes_on_and_what_was_cut_off_follows_it_afterwards(
    cluster: LocalCluster, tmp_path: Path, one_way: bool
) -> None:
    destination = Destination(f"parted-{one_way}", max_bytes=16 << 20)
    with MessageSession(cluster.urls, "before", node=1, directory=tmp_path / "1") as session:
        session.create(destination)
        sent = [session.producer(destination.name).send(b"x", limit_s=READY_S) for _ in range(EACH)]
    names = [node.config.node for node in cluster.nodes]
    _until(lambda: _leader(cluster, 0, destination.stream), "it has a primary")
    cut = _leader(cluster, 0, destination.stream)
    others = [index for index, name in enumerate(names) if name != cut]
    # In one direction: the primary hears all the others, and none hears it.
    ways = [way for way in cluster.links.ways if way[0] == cut or (not one_way and way[1] == cut)]
    cluster.links.hold(ways)
    try:
        urls = [cluster.urls[index] for index in others]
        with MessageSession(urls, "meanwhile", node=2, directory=tmp_path / "2") as session:
            producer = session.producer(destination.name)
            sent += [producer.send(b"y", limit_s=READY_S) for _ in range(EACH)]
        assert _leader(cluster, others[0], destination.stream) not in ("", cut)
    finally:
        cluster.links.let_go(ways)

    def is_one() -> bool:
        leaders = {_leader(cluster, index, destination.stream) for index in range(3)}
        state = _state(cluster, names.index(cut))
        current = [row for row in state.streams if row.name == destination.stream and not row.behind]
        return len(leaders) == 1 and leaders <= set(names) and len(current) == 1

    _until(is_one, "all see one primary, and no copy is behind")
    found: Counter[str] = Counter()
    url = cluster.urls[names.index(cut)]
    with MessageSession([url], "after", node=3, directory=tmp_path / "3") as session:
        consumer = session.consumer(destination.name, "reader")
        while len(found) < len(sent) and (received := consumer.receive(READY_S)) is not None:
            found[received.identity] += 1
            received.acknowledge()
        assert consumer.receive(1.0) is None
        consumer.close()
    assert found == Counter(sent)
