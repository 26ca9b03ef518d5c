"""What the driver does with small results."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sla_server.policy_jobs import grouped, job
from sla_server.policy_jobs.errors import FilesNotForSpark
from sla_server.policy_jobs.session import check_files, for_spark


def test_caps_come_some_at_a_time_and_those_that_limit_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ROWS_AT_A_TIME", 2)
    columns: list[list[Any]] = [["a", "b", "c"], [0, 1, 2], [None, 5.0, None], [1.0] * 3, [2.0] * 3]
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, grouped.CAPS, strict=True)],
        schema=grouped.CAPS,
    )
    found = job.Found(table, [], [])
    assert [row["volume"] for row in found.cap_rows()] == ["a", "b", "c"]
    assert [(row["volume"], row["cost_per_s"]) for row in found.capped] == [("b", 5.0)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/x.parquet", "/data/x.parquet"),
        ("s3://bucket/x", "s3a://bucket/x"),
        ("gcs://bucket/x", "gs://bucket/x"),
        ("file:///data/x", "/data/x"),
        ("hdfs://name:9000/x", "hdfs://name:9000/x"),
    ],
)
def test_urls_are_as_connectors_call_them(path: str, expected: str) -> None:
    assert for_spark(path) == expected
    check_files(path if "://" in path else "")


@pytest.mark.parametrize("url", ["memory://cuts", "sftp://user:secret@host/cuts", "github://a:b@c"])
def test_a_store_that_spark_has_no_connector_for_is_refused_at_once(url: str) -> None:
    with pytest.raises(FilesNotForSpark, match="there is no connector for") as caught:
        check_files(url)
    assert job.status_of(caught.value) == 69
    assert "secret" not in str(caught.value)
