"""Rows in SQL as a Spark DataFrame: a Python data source over ``db.statistics``, for both databases alike.

The driver has the snapshot and divides its rows into parts by time; each part is a partition, read by a
Python worker. A part that is read again gives the same rows. Workers need this package, and reach the
database (or the copy of an SQLite one): docs/operations/spark.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from sla_server.db.statistics_parts import Part, Source, read_part

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.db.statistics import StatisticsSnapshot

NAME = "sla-statistics"


class SnapshotSource(DataSource):
    """Options: ``url`` (a ``Source``; Spark hides options of this name), ``columns``, ``parts``."""

    @classmethod
    def name(cls) -> str:
        """What ``spark.read.format`` takes."""
        return NAME

    def reader(self, schema: Any) -> SnapshotReader:
        """See ``DataSource``."""
        return SnapshotReader(self.options["url"], self.options["columns"], self.options["parts"])


class SnapshotReader(DataSourceReader):
    """Lives in the process that plans, and in the workers."""

    def __init__(self, source: str, columns: str, parts: str) -> None:
        self._source, self._columns, self._parts = source, columns, parts

    def partitions(self) -> Sequence[InputPartition]:
        """One for each part."""
        return [InputPartition(part) for part in json.loads(self._parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        return read_part(Source.parse(self._source), Part(**partition.value), self._columns.split(","))


def rows_in_sql(
    spark: SparkSession, snapshot: StatisticsSnapshot, table: str, columns: Sequence[str], ddl: str
) -> DataFrame:
    """The rows of a table that are in SQL; nothing is read yet."""
    parts = snapshot.parts(table)
    if not parts:
        return spark.createDataFrame([], ddl)
    spark.dataSource.register(SnapshotSource)
    options = {
        "url": snapshot.source.encode(),
        "columns": ",".join(columns),
        "parts": json.dumps([asdict(part) for part in parts]),
    }
    return spark.read.format(NAME).schema(ddl).options(**options).load()
