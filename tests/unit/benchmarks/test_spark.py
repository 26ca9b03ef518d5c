"""What ``make bench-spark`` generates and compares; engines are not started here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import harness, spark, spark_fleet, spark_world
from benchmarks.spark import differences
from benchmarks.spark_engines import groups, models, stored
from sla_server.policy_jobs.compute import Found
from sla_server.policy_jobs.grouped import CAPS
from tests.support.histories import SLOT_US, known_history


def test_results_are_equal_but_for_the_last_digits() -> None:
    one = {"caps": 3, "sums": {"p95": 1.0}, "rows": [{"reason": "a", "cost": None}]}
    assert differences(one, {**one, "sums": {"p95": 1.0 + 1e-12}}) == []
    assert differences(one, {**one, "sums": {"p95": 1.001}}) == [".sums.p95: 1.0 and 1.001"]
    assert len(differences(one, {**one, "caps": 4, "rows": [{"reason": "b", "cost": 0.0}]})) == 3
    assert len(differences(one, {**one, "rows": []})) == 1
    assert len(differences(one, {"caps": 3})) == 1


class Engines:
    """Runs that are not made: so many seconds each, and one result unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = {"spark": 30.0, "duckdb": 10.0, "polars": 20.0}
        self.fails: set[tuple[str, str]] = set()
        self.differs: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str]] = []
        monkeypatch.setattr(spark, "once", self.once)
        monkeypatch.setattr(spark, "check_room", lambda *_: None)
        monkeypatch.setattr(spark_world, "write", lambda _place, rows: rows)
        monkeypatch.setattr(spark, "version", lambda _package: "1")  # peers need not be installed here
        monkeypatch.setattr(harness.ForeignCpu, "__exit__", lambda self, *_: setattr(self, "cores", 0.0))

    def once(self, engine: str, place: Path) -> dict[str, Any]:
        run = (engine, place.name)
        self.asked.append(run)
        if run in self.fails:
            raise spark.EngineFailed(f"{engine} failed (killed by signal 9): ")
        times = {"10m": 1.0, "50m": 5.5}[place.name]
        return {
            **{key: [] for key in spark.RESULTS},
            "caps": 7 + (run in self.differs),
            "wall_s": self.wall_s[engine] * times,
            "start_s": 5.0,
            "memory_mib": {"the driver": 100 * times},
            "all_mib": 900,
        }

    def run(self, *rows: int) -> list[int]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rows", type=int, nargs="+", default=list(LARGE))
        words = ["--rows", *map(str, rows)] if rows else []
        chosen = parser.parse_args(words)
        options = harness.Options.of(parser, chosen, part_option="rows")
        return spark.run_sizes("spark_large", LARGE, chosen.rows, 2, options)


LARGE = (10_000_000, 50_000_000)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "targets.toml").write_text((harness.HERE / "targets.toml").read_text())
    monkeypatch.setattr(harness, "HERE", tmp_path)
    return tmp_path / "results"


def recorded(results: Path) -> dict[str, Any]:
    rows = json.loads((results / "spark_large.json").read_text())["rows"]
    return {row["key"]: row["value"] for row in rows}


def test_each_size_is_stored_when_it_has_ended(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    engines.fails = {("polars", "50m")}
    assert engines.run() == [0, 1]
    assert recorded(results) == {
        "duckdb_10m_ratio": 3.0, "polars_10m_ratio": 1.5, "spark_10m_s": 30.0, "driver_mib": 100.0,
    }  # fmt: skip
    assert engines.asked.count(("polars", "50m")) == 1, "one that has failed is not tried again"
    assert engines.asked.count(("duckdb", "50m")) == 2, "the others go on"
    aside = json.loads((results / "spark_large.json.tmp").read_text())
    values = {row["key"]: row["value"] for row in aside["rows"]}
    assert (values["duckdb_50m_ratio"], values["polars_50m_ratio"]) == (3.0, None)
    assert set(aside["raw"]) == {"10m", "50m"}


def test_sizes_that_are_measured_one_by_one_make_the_record_of_both(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch)
    engines.run(50_000_000)
    assert "growth" not in recorded(results), "of one size nothing is known of it"
    engines.run(10_000_000)
    assert recorded(results).keys() == harness.targets("spark_large").keys()
    assert recorded(results)["growth"] == pytest.approx(1.1)
    assert recorded(results)["driver_mib"] == 550.0
    engines.wall_s["spark"] = 60.0
    engines.run(10_000_000)
    assert recorded(results)["growth"] == pytest.approx(0.55)
    assert recorded(results)["duckdb_50m_ratio"] == 3.0


def test_another_result_is_found_at_once_and_not_recorded(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = Engines(monkeypatch)
    engines.differs = {("duckdb", "10m")}
    assert engines.run(10_000_000) == [1]
    assert engines.asked.count(("duckdb", "10m")) == 1
    assert not (results / "spark_large.json").exists()
    assert "duckdb found another result than spark: .caps: 7 and 8" in capsys.readouterr().out


def test_a_benchmark_that_is_killed_leaves_the_runs_that_it_made(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch)

    def once(engine: str, place: Path) -> dict[str, Any]:
        if engine == "polars":
            raise KeyboardInterrupt
        return engines.once(engine, place)

    monkeypatch.setattr(spark, "once", once)
    with pytest.raises(KeyboardInterrupt):
        engines.run(50_000_000)
    raw = json.loads((results / "spark_large.json.tmp").read_text())["raw"]
    assert [len(raw["50m"][name]) for name in spark.ENGINES] == [1, 1, 0]


def test_a_run_that_ends_without_a_result_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "world").mkdir()
    python = sys.executable
    for code, how in (("os.kill(os.getpid(), 9)", "killed by signal 9"), ("sys.exit('no room')", "status 1")):
        program = tmp_path / "python"
        program.write_text(f"#!{python}\nimport os, sys\n{code}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        with pytest.raises(spark.EngineFailed, match=rf"polars failed \({how}\)"):
            spark.once("polars", tmp_path / "world")


def test_the_fleet_s_policy_is_stored_and_read_back(tmp_path: Path) -> None:
    rows = [
        {"volume": "v", "hour_of_week": hour, "cost_per_s": cap, "demand_p50": 1.0, "demand_p95": 2.0}
        for hour, cap in enumerate((5.0, None, 6.0))
    ]
    table = pa.Table.from_pylist(rows, schema=CAPS).append_column("burst_s", pa.nulls(3, pa.float64()))
    assert stored(tmp_path, Found(table, [], [])).keys() == {"publish_s", "read_s"}


def test_memory_of_the_fleet_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {
        "wall_s": 9.0, "seconds": 8.0, "start_s": 5.0, "caps": 3, "capped": 2, "sums": {}, "stored": {},
        "memory_mib": {"the driver": 900, "Java": 2000}, "all_mib": 3500,
    }  # fmt: skip
    monkeypatch.setattr(spark_world, "write_hours", lambda _place, rows: (rows, 7))
    monkeypatch.setattr(spark, "check_room", lambda *_: None)
    monkeypatch.setattr(spark_fleet, "version", lambda _package: "1")
    monkeypatch.setattr(spark, "once", lambda *_: run)
    found = spark_fleet.measure(64_000)
    assert (found.values["driver_mib"], found.values["all_mib"]) == (900, 3500), "Python workers, too"
    assert set(found.values) >= harness.targets("spark_fleet").keys()

    def failed(*_: Any) -> dict[str, Any]:
        raise spark.EngineFailed("fleet failed (killed by signal 9): ")

    monkeypatch.setattr(spark, "once", failed)
    with pytest.raises(SystemExit, match="killed by signal 9"):
        spark_fleet.measure(64_000)


def test_peers_call_a_model_once_a_group() -> None:
    table = pa.table({"a": ["y", "x", "y", "x"], "b": ["2", "1", "1", "1"], "n": [4, 1, 3, 2]})
    calls: list[list[dict[str, Any]]] = []

    def function(rows: pa.Table) -> pa.Table:
        calls.append(rows.to_pylist())
        return rows.slice(0, 1)

    found = groups(table, ["a", "b"], function)
    assert [sorted(row["n"] for row in rows) for rows in calls] == [[1, 2], [3], [4]]
    assert found.num_rows == 3
    assert groups(table.slice(0, 0), ["a", "b"], function).num_rows == 0


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
    assert [(row["volume"], row["cost_per_s"]) for row in found.capped_rows()] == [("batch", 320.0)]
