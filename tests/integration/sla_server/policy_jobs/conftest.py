"""One Spark session for all tests, built by the product's own builder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from sla_server.policy_jobs.session import build_session
from tests.support import garbage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PY4J_SOCKET: Final = "ignore:unclosed <socket:ResourceWarning"
"""Spark's Python leaves its connections to Java to the collector of garbage, whenever that comes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration/sla_server/policy_jobs" in str(item.path):
            item.add_marker("spark")
            item.add_marker(pytest.mark.filterwarnings(PY4J_SOCKET))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = build_session("local[2]", tmp_path_factory.mktemp("spark"), "1g", rows=0)
    yield session
    session.stop()
    garbage.collect()


@pytest.fixture(scope="module", autouse=True)
def _no_sockets_afterwards() -> Iterator[None]:
    """The session lives on while this worker runs files of other folders, whose tests forgive no socket."""
    yield
    garbage.collect()
