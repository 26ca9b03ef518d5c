"""A snapshot of the statistics for the policy job: rows in SQL and files with the others, of one moment.

Rollups move from SQL to Parquet files all the time, in transactions that delete the rows and make the file
count (``archive.export``). One transaction here reads the manifest, the streams and where the rows begin and
end; whatever reads rows later, in whichever process, sees what this transaction saw. So a row is in SQL or in
a file, never in both and never in neither.

PostgreSQL: a transaction that touches no table, and so holds no lock that retention or a migration would wait
for, exports a snapshot and stays open; this one and the readers import it. SQLite: its readers in
other processes would each see another moment; so this transaction copies the wanted columns to a file of its
own, which readers open. Ingest goes on meanwhile in both. The files of the manifest stay for
``files.grace_s``.

A partition that retention drops meanwhile is gone for readers, too: its rows were given up for their age.

State: one connection, and SQLite's copy, which the owner's directory is to be removed with.

Thread: one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
from sqlalchemy import Connection, Table, select

from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.store import open_files
from sla_server.db.arrow import arrow_schema, batches
from sla_server.db.config import DatabaseConfig
from sla_server.db.counting import count_rows
from sla_server.db.engine import make_engine, translated
from sla_server.db.statistics_parts import Part, Source

ROWS_A_PART: Final = 250_000  # a second or two of one reader
MOST_PARTS: Final = 512
COPY_NAME: Final = "statistics.db"


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where the rows of a table lie: first and last key, and how many there are."""

    key: str
    first: int
    last: int
    rows: int


@dataclass(frozen=True, slots=True)
class Files:
    """Parquet files that may hold rows of the window.

    Attributes:
        paths: paths or URLs, as Spark opens them.
        rows: in all of them.
    """

    paths: list[str] = field(default_factory=list)
    rows: int = 0


class StatisticsSnapshot:
    """See the module. Rows of [from_us, to_us) of some columns of the tables of statistics.

    Attributes:
        slot_files, missed_files: files with further rows of ``rollups`` and ``rollup_missed``; a key may be
            in several and in SQL: add them up.
        hour_files: files of hourly rollups.
        cut_files: rows of the manifest with raw cuts, oldest first.
        hour_days: begins of the days (us UTC) of which they have every hour; SQL may have the same hours.
        streams, volumes: the whole tables.

    Raises:
        DatabaseUnavailable: retryable.
    """

    def __init__(
        self,
        config: DatabaseConfig,
        data_dir: Path,
        window_us: tuple[int, int],
        columns: Mapping[str, Sequence[str]],
        copy_dir: Path,
    ) -> None:
        """Take it.

        Args:
            config: the ``[database]`` table; ``policy_url`` is used if there is one.
            data_dir: where an SQLite file lies when no URL is given.
            window_us: us UTC.
            columns: table to wanted columns.
            copy_dir: where SQLite's copy is made; an older copy there is replaced.
        """
        self.window_us = window_us
        if config.policy_url:
            config = config.model_copy(update={"url": config.policy_url, "reader_url": ""})
        elif config.url:
            config = config.model_copy(update={"reader_url": ""})
        self._engine = make_engine(config, data_dir, read_only=True)
        self._files = open_files(config, data_dir)
        self._columns = columns
        self._extents: dict[str, _Extent] = {}
        self._open = ExitStack()
        try:
            with translated(self._engine):
                connection = self._open.enter_context(self._engine.connect())
                if connection.dialect.name == "postgresql":
                    self._take_postgresql(connection)
                else:
                    self._take_sqlite(connection, copy_dir / COPY_NAME)
        except BaseException:
            self.close()
            raise

    def _take_postgresql(self, exporter: Connection) -> None:
        exporter.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        exporter.exec_driver_sql(
            "SET LOCAL idle_in_transaction_session_timeout = 0"
        )  # Spark computes meanwhile
        exported = str(exporter.exec_driver_sql("SELECT pg_export_snapshot()").scalar())
        url = self._engine.url.set(drivername="postgresql")
        self.source = Source("postgresql", url.render_as_string(hide_password=False), exported)
        with self._engine.connect() as connection:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{exported}'")
            for name in self._columns:
                self._extents[name] = self._extent(connection, schema.metadata.tables[name])
            self._take_small(connection)

    def _take_sqlite(self, connection: Connection, copy: Path) -> None:
        copy.unlink(missing_ok=True)
        raw = cast(Any, connection.connection.driver_connection)
        raw.execute("PRAGMA query_only=OFF")  # for the copy; the statements below change nothing else
        raw.execute("ATTACH DATABASE ? AS copy", (str(copy),))
        raw.execute("PRAGMA copy.journal_mode=OFF")
        raw.execute("PRAGMA copy.synchronous=OFF")
        self.source = Source("sqlite", str(copy))
        for name, wanted in self._columns.items():
            self._extents[name] = self._copied(connection, schema.metadata.tables[name], wanted)
        self._take_small(connection)
        connection.commit()  # the copy is whole; the database's own rows are of no interest any more
        connection.close()

    def _take_small(self, connection: Connection) -> None:
        self.slot_files = self._found(connection, manifest.ROLLUPS)
        self.missed_files = self._found(connection, manifest.MISSED)
        self.hour_files = self._found(connection, manifest.HOURS)
        self.cut_files = manifest.snapshot(connection, manifest.CUTS, *self.window_us)
        in_hours = manifest.snapshot(connection, manifest.HOURS, *self.window_us)
        self.hour_days = sorted({row.min_us // schema.DAY_US * schema.DAY_US for row in in_hours})
        self.streams = whole_table(connection, schema.streams)
        self.volumes = whole_table(connection, schema.volumes)

    def _extent(self, connection: Connection, table: Table) -> _Extent:
        column = schema.time_of(table)
        return _Extent(column.name, *count_rows(connection, table, *self.window_us))

    def _copied(self, connection: Connection, table: Table, wanted: Sequence[str]) -> _Extent:
        """The rows in the order of time, so that rows of near numbers are of near times."""
        names = ", ".join(f'"{name}"' for name in wanted)
        key = schema.time_of(table).name
        begin_us, end_us = self.window_us
        made = connection.exec_driver_sql(
            f'CREATE TABLE copy."{table.name}" AS SELECT {names} FROM main."{table.name}" '  # noqa: S608
            f'WHERE "{key}" >= {begin_us:d} AND "{key}" < {end_us:d} ORDER BY "{key}"'
        )
        made.close()
        count = f'SELECT coalesce(max(rowid), 0) FROM copy."{table.name}"'  # noqa: S608 - a name of ours
        rows = int(connection.exec_driver_sql(count).scalar() or 0)
        return _Extent("rowid", 1, rows, rows)

    def _found(self, connection: Connection, kind: str) -> Files:
        found = manifest.snapshot(connection, kind, *self.window_us)
        return Files(
            [self._files.path_for_readers(row.path) for row in found], sum(row.rows for row in found)
        )

    def cut_path(self, row: manifest.FileRow) -> str:
        """A file of cuts as Spark opens it."""
        return self._files.path_for_readers(row.path)

    def rows(self, table: str) -> int:
        """Rows of the table in SQL."""
        return self._extents[table].rows

    def parts(self, table: str) -> list[Part]:
        """The rows in SQL, in parts by time; none if there are no rows."""
        extent = self._extents[table]
        if not extent.rows:
            return []
        span = extent.last - extent.first + 1
        count = min(-(-extent.rows // ROWS_A_PART), MOST_PARTS, span)
        bounds = [extent.first + span * number // count for number in range(count + 1)]
        return [Part(table, extent.key, *pair) for pair in pairwise(bounds)]

    def close(self) -> None:
        """End it; nothing can be read any more on PostgreSQL."""
        self._open.close()
        self._engine.dispose()


def whole_table(connection: Connection, table: Table) -> pa.Table:
    """All rows of a table, by key."""
    kind = arrow_schema(table)
    statement = select(table).order_by(*table.primary_key.columns)
    return pa.Table.from_batches(batches(connection, statement, kind), schema=kind)
