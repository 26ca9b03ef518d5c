"""What the driver does with small results."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sla_server.jobs import status_of
from sla_server.policy_jobs import compute, grouped, spark_run
from sla_server.policy_jobs.errors import FilesNotForSpark
from sla_server.policy_jobs.session import check_files, for_spark


def test_caps_come_some_at_a_time_and_those_that_limit_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "ROWS_AT_A_TIME", 2)
    columns: list[list[Any]] = [["a", "b", "c"], [0, 1, 2], [None, 5.0, None], [1.0] * 3, [2.0] * 3]
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, grouped.CAPS, strict=True)],
        schema=grouped.CAPS,
    )
    found = compute.Found(table, [], [])
    assert [row["volume"] for row in found.cap_rows()] == ["a", "b", "c"]
    assert [(row["volume"], row["cost_per_s"]) for row in found.capped_rows()] == [("b", 5.0)]
    assert found.capped_hours == 1


def test_a_step_of_which_nothing_was_counted_yet_has_a_row_that_says_so() -> None:
    keys = ("backend", "sla", "objective", "step")
    promises = pa.table(
        {"backend": ["a", "a", "b"], "sla": ["gold"] * 3, "objective": ["latency"] * 3, "step": [0, 1, 0]}
    )
    rows = compute.unseen(promises, [{"backend": "a", "sla": "gold", "objective": "latency", "step": 0}])
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("a", "gold", "latency", 1),
        ("b", "gold", "latency", 0),
    ]
    assert all(row["cost_per_s"] is None and row["points"] == 0 for row in rows)
    assert pa.Table.from_pylist(rows, schema=grouped.CAPACITY).to_pylist() == rows, "as it is stored"


def test_curves_are_kept_apart_and_of_the_most_loaded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"backend": "disk", "sla": "gold", "objective": "latency", "reason": ""}
    rows = [
        {**keys, "step": step, "cost_per_s": cost, "highest_load": 100.0, "curve": curve}
        for step, (cost, curve) in enumerate(
            [(None, '{"points": [[1, 2, 3]], "queueing": null}'), (90.0, ""), (80.0, '{"points": []}'),
             (50.0, '{"points": [[5, 6, 7]], "queueing": [0.1, 0.2, 9.0]}')]
        )
    ]  # fmt: skip
    plain, curves = compute.split_curves(rows)
    assert plain == [{key: value for key, value in row.items() if key != "curve"} for row in rows]
    assert [row["step"] for row in curves] == [3, 2, 0]
    assert curves[0] == {
        "backend": "disk", "sla": "gold", "objective": "latency", "step": 3,
        "points": [[5, 6, 7]], "queueing": [0.1, 0.2, 9.0],
    }  # fmt: skip
    monkeypatch.setattr(compute, "MOST_CURVES", 1)
    assert [row["step"] for row in compute.split_curves(rows)[1]] == [3]


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
    assert status_of(caught.value) == 69
    assert "secret" not in str(caught.value)


def test_what_a_worker_raised_is_the_reason() -> None:
    text = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "x.py", line 1, in read_part
sla_server.db.errors.SnapshotGone: the statistics in x cannot be read: gone. Run the job again.
"""
    assert spark_run.reason_of(RuntimeError(text)) == (
        "the statistics in x cannot be read: gone. Run the job again"
    )
    assert spark_run.reason_of(RuntimeError("no memory.\nat java")) == "no memory"
    assert spark_run.reason_of(KeyError()) == "KeyError"
