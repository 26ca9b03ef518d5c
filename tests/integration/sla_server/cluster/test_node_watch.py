"""What running nodes see of each other: parameters that differ."""

from __future__ import annotations

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import EssentialsDiffer
from sla_server.cluster.membership import Membership
from sla_server.cluster.watch import NodeWatch
from tests.support.cluster import READY_S, LocalCluster


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
