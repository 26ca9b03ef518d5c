"""One Spark session for all tests, built by the product's own builder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from sla_server.policy_jobs.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration/sla_server/policy_jobs" in str(item.path):
            item.add_marker("spark")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = build_session("local[2]", tmp_path_factory.mktemp("spark"), "1g")
    yield session
    session.stop()
