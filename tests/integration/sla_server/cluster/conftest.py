"""One cluster of three real nodes for all tests here; each leaves it with three nodes that run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import LocalCluster


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
