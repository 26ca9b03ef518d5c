"""Make the archive of Spark's classes (``class_archive``): start Spark, use it, let Java write them down.

``python -m sla_server.policy_jobs.make_class_archive`` does it for this installation, again after an upgrade
of Java or Spark. It takes as much processor time as some starts of Spark, and 200 MB.

One at a time, by a lock in the folder. What Java has not written to its end is never put in place: a maker
that is killed, or has no room, leaves no archive, and perhaps half of one (``.new``), which the next removes.
Java maps an archive and looks at a part of it: so it has its name when it and the one under it are on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from pmdaemon.errors import SlaError
from pmdaemon.runtime.files import sync_directory, sync_file
from sla_server.jobs import only_one
from sla_server.policy_jobs import class_archive
from sla_server.policy_jobs.errors import SparkFailed
from sla_server.policy_jobs.session import build_session, java_home, settings, stderr_to
from sla_server.policy_jobs.spark_run import reason_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ROWS: Final = 1_000
"""Spark's settings are those for few, whose starts count most."""
LOG: Final = "spark-classes.log"
_LIMIT_S: Final = 600
"""For Java to write its classes down: seconds, even on a loaded machine."""


def make_archive(folder: Path = class_archive.FOLDER) -> Path:
    """Make the archive, or make it again; a job that starts meanwhile goes without one.

    Args:
        folder: for the archive, the one of Java's own classes under it, and what Java said (``LOG``).

    Raises:
        JobRunning: another process makes it.
        NoJava: there is nothing to start.
        SparkFailed: it does not start, or has not written all.
        OSError: the folder cannot be written.
    """
    os.environ.pop("JAVA_TOOL_OPTIONS", None)  # may name an archive itself
    folder.mkdir(parents=True, exist_ok=True)
    archive, base = folder / class_archive.NAME, folder / "java-classes.jsa"
    aside, log = archive.with_suffix(".new"), folder / LOG
    with (
        only_one(folder / "lock", "class archive"),
        tempfile.TemporaryDirectory(prefix="sla-classes-", ignore_cleanup_errors=True) as temporary,
    ):
        for former in (archive, aside):  # it would not fit the new one of Java's classes; one was killed
            former.unlink(missing_ok=True)
        work = Path(temporary)
        with log.open("wb") as said:  # not every Java comes with it
            command = [str(java_home(work) / "bin" / "java"), "-Xshare:dump", f"-XX:SharedArchiveFile={base}"]
            try:
                done = subprocess.run(command, stdout=said, stderr=said, timeout=_LIMIT_S, check=False)
            except subprocess.TimeoutExpired as exc:
                raise SparkFailed(f"Java did not write its classes within {_LIMIT_S} s", log) from exc
        if done.returncode:
            raise SparkFailed("Java wrote no archive of its classes", log)
        with stderr_to(log):
            has_ended = _run(
                work,
                log,
                f'-XX:SharedArchiveFile="{base}" -XX:ArchiveClassesAtExit="{aside}" {class_archive.QUIET}',
            )
        if not has_ended or not aside.exists():
            raise SparkFailed("Java wrote no archive of Spark's classes", log)
        for written in filter(Path.exists, (base, aside)):
            sync_file(written)
        aside.rename(archive)
        sync_directory(folder)
        return archive


def _run(work: Path, log: Path, options: str) -> bool:
    """Start Spark with these options of Java, and use it; whether its Java has ended in order."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    started = settings("local[*]", work, "1g", ROWS)["spark.driver.extraJavaOptions"]
    further = {"spark.driver.extraJavaOptions": f"{started} {options}"}
    try:
        spark = build_session("local[*]", work, "1g", further, ROWS)
        java = [child for child in psutil.Process().children(recursive=True) if child.name() == "java"]
        _use(spark, work)
    except (PySparkException, Py4JError, ConnectionError) as exc:
        raise SparkFailed(reason_of(exc), log) from exc
    with suppress(Py4JError, ConnectionError):  # it does not answer: it ends
        jvm: Any = spark._jvm
        jvm.java.lang.System.exit(0)
    gone, alive = psutil.wait_procs(java, timeout=_LIMIT_S)
    return not alive and all(each.returncode in (0, None) for each in gone)  # None: it was waited for before


def _use(spark: SparkSession, work: Path) -> None:
    """What the jobs do with Spark: files, rows of Python, sums, windows, joins, and functions on Arrow."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def first(table: pa.Table) -> pa.Table:
        return table.slice(0, 1)

    rows = spark.range(0, 100, 1, 2).mapInArrow(same, "id long")
    rows = rows.withColumn("key", F.col("id") % 7).withColumn("counts", F.array(F.lit(1), F.col("id")))
    path = str(work / "rows.parquet")
    rows.write.parquet(path)
    stored: DataFrame = spark.read.schema("id long, key long, counts array<long>").parquet(path)
    keys = spark.createDataFrame([{"key": number, "name": str(number)} for number in range(7)])
    of_key = Window.partitionBy("key")
    joined = (
        stored.unionByName(rows).join(F.broadcast(keys), "key").withColumn("all", F.sum("id").over(of_key))
    )
    sums = joined.groupBy("key", "name").agg(
        F.sum("id"),
        F.max_by("id", "all"),
        F.countDistinct("id"),
        F.expr("percentile(id, 0.95)"),
        F.collect_list("id"),
    )
    sums.orderBy("key").toArrow()
    joined.join(sums.select("key", "name"), ["key", "name"], "left_anti").select(F.explode("counts")).count()
    joined.select("key", "id").groupBy("key").applyInArrow(first, "key long, id long").toArrow()
    spark.createDataFrame([], "id long").toPandas()


def main() -> None:
    """Make it for this installation."""
    try:
        print(make_archive())
    except (SlaError, OSError) as exc:
        sys.exit(f"no archive of Spark's classes: {exc}")


if __name__ == "__main__":
    main()
