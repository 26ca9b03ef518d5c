"""One cluster of three real nodes for all tests here; each leaves it with three nodes that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.support import garbage
from tests.support.cluster import LocalCluster

NATS_SOCKET: Final = tuple(
    f"ignore:unclosed {what}:ResourceWarning" for what in ("<StreamWriter", "transport <", "<socket")
)
"""nats-py leaves the socket of a node that has died to the collector of garbage, whenever that comes.
Which of the three warns depends on the release of Python, and on the order in which they are collected."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration/sla_server/cluster" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings(*NATS_SOCKET))


@pytest.fixture(scope="module", autouse=True)
def _no_sockets_afterwards() -> Iterator[None]:
    """Files of other folders, which this worker runs next, forgive none."""
    yield
    garbage.collect()


@pytest.fixture(scope="session")
def cluster_of_session() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def cluster(cluster_of_session: LocalCluster) -> Iterator[LocalCluster]:
    """Three nodes that run. A test may kill and stop some; streams of a test have names of their own."""
    yield cluster_of_session
    for index in range(len(cluster_of_session.nodes)):
        cluster_of_session.resume(index)  # which does nothing to one that was not paused
    cluster_of_session.restore()
