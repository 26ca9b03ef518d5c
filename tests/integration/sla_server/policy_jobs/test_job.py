"""The job's computation on a history whose answer is known, and a session on a machine without Java."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sla_server.agreements.promise import CurveStep, Priority, Promise
from sla_server.policy_jobs.inputs import JobInputs
from sla_server.policy_jobs.job import compute
from sla_server.policy_jobs.transforms import MISSED_COLUMNS, SLOT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOT = 60_000_000
ERP, BATCH = 1, 2


def history() -> JobInputs:
    """Ten minutes: batch at rising rates beside an ERP at 80 I/O/s, which misses its promise above 400."""
    slots: list[dict[str, Any]] = []
    missed: list[dict[str, Any]] = []
    for minute, batch_rate in enumerate((0, 100, 200, 250, 300, 320, 350, 380, 420, 420)):
        at_us = minute * SLOT
        for stream, rate in ((ERP, 80), (BATCH, batch_rate)):
            ios = rate * 60
            slots.append(
                {
                    "slot_us": at_us,
                    "stream_id": stream,
                    "arrived": ios,
                    "reads": ios,
                    "writes": 0,
                    "read_bytes": ios * 4096,
                    "write_bytes": 0,
                    "svc_sum_us": ios * 100,
                    "cost_milli": ios * 1000,
                    "covered_us": SLOT,
                }
            )
        late = 4000 if 80 + batch_rate > 400 else 20
        missed.append(
            {
                "slot_us": at_us,
                "stream_id": ERP,
                "io": 0,
                "threshold_us": 12_000,
                "counted": 4800,
                "missed": late,
            }
        )
    hours = pa.table(
        {
            name: pa.array([], type=pa.int64())
            for name in ("hour_us", "stream_id", "arrived", "reads", "writes", "cost_milli", "covered_us")
        }
    )
    streams = [
        {"stream_id": ERP, "volume": "erp", "client": "host-a", "backend": "disk"},
        {"stream_id": BATCH, "volume": "batch", "client": "host-b", "backend": "disk"},
    ]
    promise = Promise(
        "gold",
        1,
        "latency",
        Priority.GOLD,
        ("erp",),
        ("*",),
        "any",
        95.0,
        (CurveStep(150, 12_000),),
        0.95,
        60,
        0,
        0,
    )
    return JobInputs(
        pa.Table.from_pylist(slots),
        hours,
        pa.Table.from_pylist(missed),
        pa.Table.from_pylist(streams),
        [promise],
        [],
        {},
    )


def test_a_policy_from_a_known_history(spark: SparkSession) -> None:
    found = compute(spark, history())
    assert [row["cost_per_s"] for row in found.capacity] == [400.0]
    caps = {row["volume"]: row for row in found.caps}
    assert caps["erp"]["cost_per_s"] is None, "a protected volume is never capped"
    assert caps["erp"]["demand_p95"] == 80.0
    assert caps["batch"]["cost_per_s"] == 320.0, "capacity less what the promise needs"
    assert caps["batch"]["hour_of_week"] == 72
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
        "s = build_session('local[1]', Path(sys.argv[1]), '512m')\n"
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


def test_rows_in_files_count_like_rows_in_sql(spark: SparkSession, tmp_path: Path) -> None:
    """The same history, its older part in files, one minute split between file and SQL."""
    whole = history()
    slots, missed = whole.slots.to_pylist(), whole.missed.to_pylist()
    split = slots[12]
    half = {name: split[name] // 2 for name in ("arrived", "reads", "writes", "cost_milli", "covered_us")}
    rest = {**split, **{name: split[name] - value for name, value in half.items()}}
    columns = list(SLOT_COLUMNS)
    pq.write_table(pa.Table.from_pylist(slots[:12]).select(columns), tmp_path / "a.parquet")
    more = pa.Table.from_pylist([{**split, **half}]).append_column("hist", pa.array([b""]))
    pq.write_table(more, tmp_path / "b.parquet")
    kind = pa.schema([(name, pa.int32() if name == "io" else pa.int64()) for name in MISSED_COLUMNS])
    pq.write_table(pa.Table.from_pylist(missed[:6], schema=kind), tmp_path / "m.parquet")
    parted = dataclasses.replace(
        whole,
        slots=pa.Table.from_pylist([rest, *slots[13:]]).select(columns),
        missed=pa.Table.from_pylist(missed[6:], schema=kind),
        slot_files=[str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")],
        missed_files=[str(tmp_path / "m.parquet")],
    )
    expected, found = compute(spark, whole), compute(spark, parted)
    assert found.capacity == expected.capacity
    assert found.caps == expected.caps
