"""The job's computation on a history whose answer is known, and a session on a machine without Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sla_server.policy_jobs.inputs import Statistics
from sla_server.policy_jobs.job import Found, compute
from sla_server.policy_jobs.transforms import MISSED_COLUMNS, MISSED_DDL, SLOT_COLUMNS, SLOT_DDL
from tests.support.histories import known_history

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def caps_of(found: Found) -> list[dict[str, Any]]:
    return list(found.cap_rows())


def test_a_policy_from_a_known_history(spark: SparkSession) -> None:
    history = known_history()
    found = compute(spark, history.statistics(spark), history.inputs)
    assert [row["cost_per_s"] for row in found.capacity] == [400.0]
    caps = {row["volume"]: row for row in caps_of(found)}
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


def test_a_row_in_several_parts_counts_once(spark: SparkSession, tmp_path: Path) -> None:
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
    whole = history.statistics(spark)
    parted = Statistics(
        slots=in_sql.unionByName(spark.read.schema(SLOT_DDL).parquet(*files)),
        missed=late.unionByName(spark.read.schema(MISSED_DDL).parquet(str(tmp_path / "m.parquet"))),
        hours=whole.hours,
    )
    expected, found = compute(spark, whole, history.inputs), compute(spark, parted, history.inputs)
    assert found.capacity == expected.capacity
    assert found.costs == expected.costs
    assert caps_of(found) == caps_of(expected)
    assert [row["volume"] for row in found.capped] == ["batch"]
