"""How far a mirror is behind is said while its link to the primary is cut (C2, C3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.admin import META_STEPDOWN, Admin, ClusterState
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.membership import Membership
from sla_server.cluster.messages import Destination, MessageSession
from sla_server.cluster.messages.mirrors import MirrorRow, sweep
from sla_server.cluster.server_conf import SYSTEM_USER
from tests.support.cluster import READY_S, LocalCluster

LIMIT_S = 3 * READY_S
EACH = 25


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Instead of the one of the session: its nodes have links that can be cut."""
    with LocalCluster(has_links=True) as made:
        made.wait_ready()
        yield made


def _ask(cluster: LocalCluster, index: int, lead: str = "") -> ClusterState:
    """As one node sees it; ``lead``: the node that is first asked to lead the cluster."""

    async def ask() -> ClusterState:
        config = cluster.nodes[index].config
        async with Admin(config, Membership("test", cluster.secrets, None), [config.listen]) as asker:
            if lead:
                client = await asker.client(SYSTEM_USER)
                body = json.dumps({"placement": {"preferred": lead}}).encode()
                await client.request(META_STEPDOWN, body, timeout=10)
            return await asker.state()

    return asyncio.run(ask())


def _row(cluster: LocalCluster, index: int) -> MirrorRow | None:
    try:
        return next(iter(_ask(cluster, index).mirrors), None)
    except ClusterError:
        return None


def test_a_mirror_whose_link_is_cut_says_how_many_messages_it_is_behind_and_for_how_long(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    names = [node.config.node for node in cluster.nodes]
    queue = Destination("letters", replicas=1, max_bytes=16 << 20)
    with MessageSession(cluster.urls, "maker", node=1, directory=tmp_path / "1") as session:
        session.create(queue)
        primary = next(row.leader for row in _ask(cluster, 0).streams if row.name == queue.stream)
        mirror, third = (name for name in names if name != primary)
        session.add_mirror("letters", mirror)
        for _ in range(EACH):
            session.producer("letters").send(b"x", limit_s=READY_S)
    # The third one leads, so that the cluster itself does not elect while the other two are apart.
    index, deadline = names.index(third), Deadline(LIMIT_S)
    while _ask(cluster, index).leader != third:
        assert not deadline.passed
        _ask(cluster, index, lead=third)
    while (row := _row(cluster, index)) is None or (row.messages, row.behind_messages) != (EACH, 0):
        assert not deadline.passed, row
    ways = [(primary, mirror), (mirror, primary)]
    cluster.links.hold(ways)
    try:
        url = cluster.urls[names.index(primary)]
        with MessageSession([url], "sender", node=2, directory=tmp_path / "2") as session:
            for _ in range(EACH):
                session.producer("letters").send(b"y", limit_s=READY_S)
        while (row := _row(cluster, index)) is None or not (row.hears_primary and row.behind_messages):
            assert not deadline.passed, row
        assert row.behind_messages == EACH
        before_s = row.behind_s
        assert before_s is not None
        while (row := _row(cluster, index)) is None or (row.behind_s or 0.0) < before_s + 2:
            assert not deadline.passed, row
        assert row.text.startswith(f"asynchronous copy, {EACH} messages / ")
        # A mirror that cannot follow keeps nothing at the primary: what is acknowledged goes there.
        with MessageSession([url], "taker", node=3, directory=tmp_path / "3") as session:
            consumer = session.consumer("letters", "reader")
            for _ in range(EACH + 5):
                received = consumer.receive(LIMIT_S)
                assert received is not None
                received.acknowledge()
            session.link.run(sweep(session.link, queue.stream))  # as the primary's node does
        while (row := _row(cluster, index)) is None or row.behind_messages != EACH - 5:
            assert not deadline.passed, row
    finally:
        cluster.links.let_go(ways)
    # Some of what was acknowledged meanwhile may have been on its way already.
    while (row := _row(cluster, index)) is None or row.behind_messages or row.messages < 2 * EACH - 5:
        assert not deadline.passed, row
