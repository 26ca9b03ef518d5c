"""What ``make bench-spark`` generates and compares; engines are not started here."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from benchmarks import spark_world
from benchmarks.spark import differences


def test_results_are_equal_but_for_the_last_digits() -> None:
    one = {"caps": 3, "sums": {"p95": 1.0}, "rows": [{"reason": "a", "cost": None}]}
    assert differences(one, {**one, "sums": {"p95": 1.0 + 1e-12}}) == []
    assert differences(one, {**one, "sums": {"p95": 1.001}}) == [".sums.p95: 1.0 and 1.001"]
    assert len(differences(one, {**one, "caps": 4, "rows": [{"reason": "b", "cost": 0.0}]})) == 3
    assert len(differences(one, {**one, "rows": []})) == 1
    assert len(differences(one, {"caps": 3})) == 1


def test_an_hour_is_the_same_whenever_it_is_made() -> None:
    one, again = spark_world.hour(7, 2), spark_world.hour(7, 2)
    assert one.slots.equals(again.slots)
    assert one.missed.equals(again.missed)
    assert one.slots.num_rows == 2 * spark_world.STREAMS
    assert not one.slots.equals(spark_world.hour(8, 2).slots)


def test_a_world_has_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    rows = spark_world.STREAMS * 62
    assert spark_world.write(tmp_path, rows) == rows
    files = sorted((tmp_path / "rollups").iterdir())
    assert [pq.read_metadata(path).num_rows for path in files] == [spark_world.STREAMS * n for n in (60, 2)]
    streams = spark_world.fleet().streams
    assert set(pq.read_table(files[1])["stream_id"].to_pylist()) == set(streams["stream_id"].to_pylist())
