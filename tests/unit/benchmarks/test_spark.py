"""What ``make bench-spark`` generates and compares; engines are not started here."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import spark_world
from benchmarks.spark import differences
from benchmarks.spark_engines import models
from tests.support.histories import SLOT_US, known_history


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


def test_other_engines_keep_curves_apart_from_capacities_as_the_job_does() -> None:
    """Rows of the one and the other could not be equal."""
    history = known_history()
    slots = history.slots.to_pylist()
    minutes = range(0, 10 * SLOT_US, SLOT_US)
    loads = [sum(row["reads"] for row in slots if row["slot_us"] == at_us) / 60 for at_us in minutes]
    key = {"backend": "disk", "sla": "gold", "objective": "latency", "step": 0, "allowed": 0.05}
    points = [
        {**key, "at_us": row["slot_us"], "load": load, "counted": row["counted"], "missed": row["missed"]}
        for row, load in zip(history.missed.to_pylist(), loads, strict=True)
    ]
    names = ("reads", "writes", "svc_us", "arrived", "sequential", "placed")
    costs = [{"backend": "disk", "at_us": 0, "bytes": 4096, **dict.fromkeys(names, 1)}]
    demand = [
        {"backend": "disk", "volume": name, "hour_of_week": 72, "p50": rate, "p95": rate, "mean_cost": 1.0}
        for name, rate in (("erp", 80.0), ("batch", 420.0))
    ]
    tables = (pa.Table.from_pylist(rows) for rows in (points, costs, demand))
    found = models(*tables, history.inputs)
    assert [row["cost_per_s"] for row in found.capacity] == [400.0]
    assert "curve" not in found.capacity[0]
    assert [row["backend"] for row in found.curves] == ["disk"]
    assert [(row["volume"], row["cost_per_s"]) for row in found.capped] == [("batch", 320.0)]
