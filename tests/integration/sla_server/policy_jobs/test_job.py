"""The job's computation on a history whose answer is known, and a session on a machine without Java."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import insert

from sla_server.config import PolicyJobConfig
from sla_server.db import migrate, schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.queries.reader import SqlReader
from sla_server.db.schema import HOUR_US
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.policy_jobs import report_inputs_job
from sla_server.policy_jobs.compute import STEPS, Found, Frames, compute
from sla_server.policy_jobs.inputs import CAPACITY, WAS, Statistics, lowest_known
from sla_server.policy_jobs.sql_source import no_rows, rows_in_sql
from sla_server.policy_jobs.step_job import Turns, stored_steps
from sla_server.policy_jobs.stored_results import fresh
from sla_server.policy_jobs.transforms import (
    HOUR_DDL,
    MISSED_COLUMNS,
    MISSED_DDL,
    SLICE_COLUMNS,
    SLICE_DDL,
    SLOT_COLUMNS,
    SLOT_DDL,
)
from tests.support.histories import BATCH, SLOT_US, known_history
from tests.support.job_results import ResultsInMemory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def caps_of(found: Found) -> list[dict[str, Any]]:
    return list(found.cap_rows())


@pytest.fixture(scope="module")
def known(spark: SparkSession) -> Found:
    """The policy of the known history."""
    history = known_history()
    return compute(spark, history.statistics(spark), history.inputs)


def test_a_policy_from_a_known_history(known: Found) -> None:
    found = known
    assert [row["cost_per_s"] for row in found.capacity] == [400.0]
    caps = {row["volume"]: row for row in caps_of(found)}
    assert caps["erp"]["cost_per_s"] is None, "a protected volume is never capped"
    assert caps["erp"]["demand_p95"] == 80.0
    assert caps["batch"]["cost_per_s"] == 320.0, "capacity less what the promise needs"
    assert caps["batch"]["hour_of_week"] == 72
    (harm,) = found.harms
    assert (harm["volume"], harm["bad"], harm["avoided_bad"]) == ("batch", 4, 4)
    assert harm["reason"] == "only 10 intervals, 30 needed"
    assert found.bursts == [], "ten minutes show none"
    (cost,) = found.costs
    assert (cost["backend"], cost["cost_bytes"], cost["slots"]) == ("disk", None, 10)
    assert "only 10 slots" in cost["reason"]


def test_a_machine_without_java_runs_spark_all_the_same(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for program in Path(folder).iterdir():
            link = tools / program.name
            if not program.name.startswith("java") and not link.exists():
                link.symlink_to(program)
    script = (
        "import sys; from pathlib import Path; from sla_server.policy_jobs.session import build_session\n"
        "s = build_session('local[1]', Path(sys.argv[1]), '512m', rows=0)\n"
        "print('sum', s.range(10).groupBy().sum().first()[0])\n"
        "import tempfile; print(tempfile.gettempdir())\n"
        "print(s._jvm.java.lang.System.getProperty('java.io.tmpdir'))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    environment["PATH"] = str(tools)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "policy job")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scratch = str(tmp_path / "policy job" / "scratch")
    assert done.stdout.splitlines() == ["sum 45", scratch, scratch], "nothing goes to /tmp"
    assert (tmp_path / "policy job" / "java-home" / "bin" / "java").exists(), "the stand-in was used"


def test_a_row_in_several_parts_counts_once(spark: SparkSession, known: Found, tmp_path: Path) -> None:
    """The same history, its older part in files, one minute of a stream split between two rows."""
    history = known_history()
    slots, missed = history.slots.to_pylist(), history.missed.to_pylist()
    split = slots[12]
    half = {name: split[name] // 2 for name in SLOT_COLUMNS[2:]}
    rest = {**split, **{name: split[name] - value for name, value in half.items()}}
    columns = list(SLOT_COLUMNS)
    pq.write_table(pa.Table.from_pylist(slots[:12]).select(columns), tmp_path / "a.parquet")
    more = pa.Table.from_pylist([{**split, **half}]).append_column("hist", pa.array([b""]))
    pq.write_table(more, tmp_path / "b.parquet")
    kind = pa.schema([(name, pa.int32() if name == "io" else pa.int64()) for name in MISSED_COLUMNS])
    pq.write_table(pa.Table.from_pylist(missed[:6], schema=kind), tmp_path / "m.parquet")
    in_sql = spark.createDataFrame(pa.Table.from_pylist([rest, *slots[13:]]).select(columns))
    late = spark.createDataFrame(pa.Table.from_pylist(missed[6:], schema=kind))
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    parted = Statistics(
        slots=in_sql.unionByName(spark.read.schema(SLOT_DDL).parquet(*files)),
        missed=late.unionByName(spark.read.schema(MISSED_DDL).parquet(str(tmp_path / "m.parquet"))),
        hours=no_rows(spark, HOUR_DDL),
    )
    expected, found = known, compute(spark, parted, history.inputs)
    assert found.capacity == expected.capacity
    assert found.costs == expected.costs
    assert found.harms == expected.harms
    assert caps_of(found) == caps_of(expected)
    assert [row["volume"] for row in found.capped_rows()] == ["batch"]


def test_an_interval_that_has_not_ended_says_nothing_of_a_capacity(spark: SparkSession) -> None:
    """Half a minute of batch at its most: over a minute that is half of the load, and all of the misses."""
    history = known_history()
    under_way = [
        {**row, "slot_us": 10 * SLOT_US} | {name: row[name] // 2 for name in SLOT_COLUMNS[2:]}
        for row in history.slots.to_pylist()[-2:]
    ]
    (late,) = history.missed.to_pylist()[-1:]
    late |= {"slot_us": 10 * SLOT_US, "counted": late["counted"] // 2, "missed": late["missed"] // 2}
    more = replace(
        history,
        slots=pa.Table.from_pylist([*history.slots.to_pylist(), *under_way]),
        missed=pa.Table.from_pylist([*history.missed.to_pylist(), late], schema=history.missed.schema),
    )

    def capacity(end_us: int) -> dict[str, Any]:
        hours = replace(history.inputs.hours, end_us=end_us)
        frames = Frames(spark, more.statistics(spark), replace(history.inputs, hours=hours))
        try:
            (row,) = STEPS[CAPACITY](frames).to_pylist()
        finally:
            frames.release()
        return dict(row)

    found = capacity(10 * SLOT_US + SLOT_US // 2)
    assert (found["cost_per_s"], found["points"]) == (400.0, 10)
    found = capacity(11 * SLOT_US)
    assert found["points"] == 11
    assert found["cost_per_s"] < 400.0, "once it has ended it counts"


def test_a_volume_that_its_cap_holds_back_keeps_a_cap(spark: SparkSession, known: Found) -> None:
    """The week after: batch gets through what its cap of 320 lets it, which would fit."""
    history = known_history()
    throttled = []
    for row in history.slots.to_pylist():
        if row["stream_id"] == BATCH:
            ios = min(row["reads"], 320 * 60)
            names = ("arrived", "reads")
            row = {**row, **dict.fromkeys(names, ios), "cost_milli": ios * 1000, "caps_us": SLOT_US}
        throttled.append(row)
    missed = [{**row, "missed": 20} for row in history.missed.to_pylist()]
    later = replace(
        history,
        slots=pa.Table.from_pylist(throttled),
        missed=pa.Table.from_pylist(missed, schema=history.missed.schema),
        inputs=replace(history.inputs, former_capacity={"disk": 400.0}),
    )
    rows = later.statistics(spark)
    assert compute(spark, rows, later.inputs).capped_hours == 0, "what it got through fits"
    in_force = pa.Table.from_pylist(
        [
            {"volume": row["volume"], "hour_of_week": row["hour_of_week"], "was_p95": row["demand_p95"]}
            for row in known.capped_rows()
        ],
        schema=WAS,
    )
    (cap,) = compute(spark, rows, later.inputs, in_force=in_force).capped_rows()
    (before,) = known.capped_rows()
    assert (cap["volume"], cap["cost_per_s"]) == ("batch", 320.0)
    assert cap["demand_p95"] == before["demand_p95"] > 320.0


def test_what_is_known_of_a_backend_outlives_a_change_of_its_only_agreement(
    spark: SparkSession, known: Found
) -> None:
    """Under the new limit nothing was counted yet; neither caps nor the last valid capacity are given up."""
    history = known_history()
    rows = replace(history.statistics(spark), missed=no_rows(spark, MISSED_DDL))
    read = replace(history.inputs, former_capacity={"disk": 400.0})
    found = compute(spark, rows, read)
    (row,) = found.capacity
    assert (row["backend"], row["cost_per_s"], row["points"]) == ("disk", 400.0, 0)
    assert row["reason"] == "nothing was counted under it yet; the last valid value is kept"
    assert lowest_known(found.capacity) == {"disk": 400.0}, "so the next run has it, too"
    assert caps_of(found) == caps_of(known)
    (row,) = compute(spark, rows, history.inputs).capacity
    assert (row["cost_per_s"], row["reason"]) == (None, "nothing was counted under it yet")


def test_steps_by_themselves_are_stored_and_make_the_same_policy(spark: SparkSession, known: Found) -> None:
    """One session, one snapshot, a turn each; the policy of what they stored is that of all computed."""
    history = known_history()
    rows, results, turns = history.statistics(spark), ResultsInMemory(), Turned()
    store: Any = SimpleNamespace(results=results)
    turns.store = store
    config: Any = SimpleNamespace(policy=PolicyJobConfig())
    said = stored_steps(spark, rows, history.inputs, turns, list(STEPS), config, 600_000_000)
    assert turns.said == [
        "1 backends' costs of an I/O stored", "begin capacity", "1 capacities for promises stored",
        "begin demand", "2 hours of volumes' demand stored",
        "begin attribution", "1 causes of broken promises stored",
    ]  # fmt: skip
    assert [row["cost_per_s"] for row in said["capacity"]] == [400.0]
    assert [(row["volume"], row["p95"]) for row in said["demand"]] == [("batch", 420.0), ("erp", 80.0)]
    stored = fresh(results, STEPS, history.inputs, config.policy, 600_000_000)  # type: ignore[arg-type]
    assert list(stored) == list(STEPS)
    nothing: Any = None  # of all that the steps read; slots are read for bursts
    assert compute(spark, Statistics(rows.slots, nothing, nothing), history.inputs, stored) == known


class Turned(Turns):
    """Turns without rows in SQL."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, name: str) -> None:
        self.said.append(f"begin {name}")

    def report(self, text: str) -> None:
        self.said.append(text)


def test_period_sums_are_those_of_the_reports(spark: SparkSession, tmp_path: Path) -> None:
    """Slices in SQL, some judged again: what Spark adds up at once is what SQL adds up for each report."""
    config = DatabaseConfig()
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    states = ("good", "good", "bad", "no_data", "excluded")
    rows = [
        {
            "name": name, "objective": objective, "start_us": hour * HOUR_US, "revision": revision,
            "version": 1 + hour // 6, "length_us": HOUR_US, "state": states[(hour + revision) % 5],
            "inexact": hour % 4 == 0, "ours": hour % 3 == 0,
        }
        for name in ("gold", "silver")
        for objective in ("latency", "iops")
        for hour in range(12)
        for revision in range(1 + hour % 2)
    ]  # fmt: skip
    with begin(engine) as connection:
        connection.execute(insert(schema.slices), rows)
    spans = [("gold", "a", 0, 8), ("gold", "b", 4, 12), ("silver", "a", 0, 24), ("none", "a", 0, 24)]
    table = pa.Table.from_pylist(
        [
            {"name": name, "period": period, "from_us": first * HOUR_US, "to_us": last * HOUR_US}
            for name, period, first, last in spans
        ],
        schema=report_inputs_job.SPANS,
    )
    columns = {"slices": SLICE_COLUMNS}
    with closing(StatisticsSnapshot(config, tmp_path, (0, 24 * HOUR_US), columns, tmp_path)) as snapshot:
        assert snapshot.rows("slices") == len(rows)
        slices = rows_in_sql(spark, snapshot, "slices", SLICE_COLUMNS, SLICE_DDL)
        found = report_inputs_job.sums_of(spark, slices, table)
    assert found.schema.equals(report_inputs_job.SUMS)
    reader = SqlReader(engine)
    expected = [
        {"name": name, "objective": objective, "period": period, **row}
        for name, period, first, last in spans
        for objective in ("latency", "iops")
        for row in reader.slice_sums(name, objective, first * HOUR_US, last * HOUR_US)
    ]
    engine.dispose()

    def order(row: dict[str, Any]) -> list[str]:
        return [str(row[name]) for name in report_inputs_job.SUMS.names]

    assert sorted(found.to_pylist(), key=order) == sorted(expected, key=order)
    assert sum(row["n"] for row in expected) == 2 * (8 + 8 + 12)
