"""Hourly and daily rollups of a day that has left SQL, on Spark: sums in its engine, files from its workers.

The hours are summed from the day's fine rollups, its parts in several files included, and the days from the
hours. The rows that come into the driver are those of the manifest, one a file. What is done with them, and
what late data do to it, is in ``db.rollups``.

Histograms travel as lists of blobs and are added up by the worker that writes the file: joined end to end
they are a histogram already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sla_server.db import rollups
from sla_server.db.rollups import DueDay, FilesAt, RollupStore
from sla_server.policy_jobs.session import check_connector, for_spark
from sla_server.policy_jobs.transforms import US_A_DAY, US_AN_HOUR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.db.archive.manifest import FileRow

ROWS_A_FILE: Final = 30_000_000  # fine rollups that become one file of hours: at 60 to the hour some 50 MB
HOURS, HOUR_MISSED, DAYS, DAY_MISSED = "hours", "hour_missed", "days", "day_missed"


def summed(rows: DataFrame, column: str, period_us: int, out_time: str) -> DataFrame:
    """Rollups of each stream in each period; ``hist`` becomes a list.

    Args:
        rows: fine rollups, or hours.
        column: the one of theirs that says when.
        period_us: its length.
        out_time: the column of its begin.
    """
    from pyspark.sql import functions as F

    begin = F.expr(f"{column} div {period_us} * {period_us}").alias(out_time)
    return rows.groupBy(begin, "stream_id").agg(
        *(F.sum(name).alias(name) for name in rollups.SUMS),
        *(F.max(name).alias(name) for name in rollups.GAUGES),
        F.collect_list("hist").alias("hist"),
    )


def summed_missed(rows: DataFrame, column: str, period_us: int, out_time: str) -> DataFrame:
    """The same of I/Os that missed a limit."""
    from pyspark.sql import functions as F

    begin = F.expr(f"{column} div {period_us} * {period_us}").alias(out_time)
    sums = (F.sum(name).alias(name) for name in rollups.MISSED_SUMS)
    return rows.groupBy(begin, *rollups.MISSED_KEY).agg(*sums)


def rolled_up(spark: SparkSession, day: DueDay, store: RollupStore) -> list[FileRow]:
    """Write the files of a day; returns their rows, not committed. What fails leaves no file of a whole kind.

    Raises:
        FilesNotForSpark: it has no connector for them.
    """
    check_connector(spark, day.slot_paths)
    parts = max(1, -(-day.rows // ROWS_A_FILE))
    made: list[FileRow] = []

    def made_of(paths: Sequence[str], column: str, period_us: int, kind: str) -> None:
        if not paths:
            return
        rows = spark.read.schema(_ddl(kind, column)).parquet(*map(for_spark, paths))
        sums = (summed_missed if kind in (HOUR_MISSED, DAY_MISSED) else summed)(
            rows, column, period_us, rollups.time_column(kind)
        )
        made.extend(_written(sums, store.files_at, kind, day.day_us, parts))

    try:
        made_of(day.slot_paths, "slot_us", US_AN_HOUR, HOURS)
        made_of(day.missed_paths, "slot_us", US_AN_HOUR, HOUR_MISSED)
        made_of(store.paths(made, HOURS), "hour_us", US_A_DAY, DAYS)
        made_of(store.paths(made, HOUR_MISSED), "hour_us", US_A_DAY, DAY_MISSED)
    except BaseException:
        store.discard(made)
        raise
    return made


def _written(sums: DataFrame, files_at: FilesAt, kind: str, day_us: int, parts: int) -> list[FileRow]:
    """Write rows to so many files, or fewer, each ordered by time and stream."""
    now_us = time.time_ns() // 1000
    columns = rollups.file_schema(kind).names

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        row = rollups.write(files_at.open(), kind, day_us, now_us, batches)
        if row is not None:
            yield pa.record_batch([pa.array([rollups.encode(row)])], names=["row"])

    ordered = (
        sums.select(*columns)
        .repartition(parts, "stream_id")
        .sortWithinPartitions(columns[0], "stream_id")
        .mapInArrow(write, "row string")
    )
    return [rollups.parse(text) for text in ordered.toArrow()["row"].to_pylist()]


def _ddl(kind: str, column: str) -> str:
    """Of the rows that files of this kind are made of."""
    names = {pa.int64(): "bigint", pa.int32(): "int", pa.binary(): "binary"}
    fields = rollups.file_schema(kind)
    return ", ".join(
        f"{column if field.name == rollups.time_column(kind) else field.name} {names[field.type]}"
        for field in fields
    )
