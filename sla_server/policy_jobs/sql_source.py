"""Rows in SQL as a Spark DataFrame: read by Spark's Python workers, for both databases alike.

The driver has the snapshot and divides its rows into parts by time (``db.statistics_parts``). Each part is a
partition, which a worker reads as Arrow. A part that is read again gives the same rows. Workers need this
package, and reach the database (or the copy of an SQLite one): docs/operations/spark.md.

It is no class of Spark's ``DataSource``: to find, make and plan one, Spark starts three kinds of Python
processes besides those that read (3 s of processor time and 4 s of a run on little data, measured).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sla_server.db.statistics_parts import read_part

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.db.statistics import StatisticsSnapshot


def no_rows(spark: SparkSession, ddl: str) -> DataFrame:
    """An empty table, of which Spark knows that it is: what would be made of its rows is not planned."""
    return spark.createDataFrame([], ddl).limit(0)


def rows_in_sql(
    spark: SparkSession, snapshot: StatisticsSnapshot, table: str, columns: Sequence[str], ddl: str
) -> DataFrame:
    """The rows of a table that are in SQL; nothing is read yet."""
    parts, source, wanted = snapshot.parts(table), snapshot.source, tuple(columns)
    if not parts:
        return no_rows(spark, ddl)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from read_part(source, parts[number], wanted)

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(read, ddl)
