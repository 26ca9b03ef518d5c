"""Rows of a snapshot of the statistics, read a part at a time by any process that can reach it.

``statistics.StatisticsSnapshot`` says where its rows are (``Source``); the readers, Spark's Python workers,
get that with a ``Part`` and nothing else. PostgreSQL: every reader imports the same exported snapshot, so all
parts, and a part that is read twice, are of one moment. SQLite has no such thing: ``path`` is a copy of the
rows.

This module imports no SQLAlchemy: it is loaded by every worker, for every read.

Thread: any; a call has a connection of its own.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import pyarrow as pa
from pyarrow import csv

from sla_server.db.errors import DatabaseUnavailable, SnapshotGone

ROWS_A_BATCH: Final = 20_000  # rows held as Python objects at a time
BYTES_A_BATCH: Final = 4 << 20  # of CSV: some 60,000 rows
CONNECT_TIMEOUT_S: Final = 5
_KINDS: Final = {
    "io": pa.int32(),
    **dict.fromkeys(("name", "objective", "state"), pa.string()),
    **dict.fromkeys(("ours", "inexact"), pa.bool_()),
}
"""Of columns; all others are integers of 64 bits."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the rows of a snapshot are.

    Attributes:
        address: of PostgreSQL a libpq URL, of SQLite the path of the copy.
        snapshot: PostgreSQL's name of the exported snapshot, valid while its owner keeps it open.
    """

    kind: Literal["postgresql", "sqlite"]
    address: str
    snapshot: str = ""

    def encode(self) -> str:
        """As text, for Spark's options; the address may hold a password."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Source:
        """What ``encode`` made."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a table whose key (``slot_us``, ``hour_us``; of a copy the row's number) is in [from_, to)."""

    table: str
    key: str
    from_: int
    to: int


def arrow_kind(columns: Sequence[str]) -> pa.Schema:
    """The columns as Arrow has them."""
    return pa.schema([(name, _KINDS.get(name, pa.int64())) for name in columns])


def read_part(source: Source, part: Part, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a part, some thousand at a time.

    Raises:
        SnapshotGone: its owner has ended, or the copy is not on this machine.
        DatabaseUnavailable: retryable.
    """
    names = ", ".join(f'"{name}"' for name in columns)
    where = f'WHERE "{part.key}" >= {part.from_:d} AND "{part.key}" < {part.to:d}'
    statement = f'SELECT {names} FROM "{part.table}" {where}'  # noqa: S608 - names and numbers of ours
    kind = arrow_kind(columns)
    yield from (_from_sqlite if source.kind == "sqlite" else _from_postgresql)(source, statement, kind)


def _from_sqlite(source: Source, statement: str, kind: pa.Schema) -> Iterator[pa.RecordBatch]:
    import sqlite3
    from contextlib import closing
    from urllib.parse import quote

    try:
        address = f"file:{quote(source.address)}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            cursor = connection.execute(statement)
            while rows := cursor.fetchmany(ROWS_A_BATCH):
                yield _batch(rows, kind)
    except sqlite3.Error as exc:
        raise SnapshotGone(source.address, str(exc)) from exc


def _batch(rows: Sequence[Sequence[Any]], kind: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [_array(column, field.type) for column, field in zip(columns, kind, strict=True)]
    return pa.record_batch(arrays, schema=kind)


def _array(column: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """SQLite's booleans are integers."""
    return pa.array(map(bool, column) if kind == pa.bool_() else column, type=kind)


def _from_postgresql(source: Source, statement: str, kind: pa.Schema) -> Iterator[pa.RecordBatch]:
    import psycopg
    from psycopg import errors, sql

    options = "-c default_transaction_read_only=on -c timezone=UTC -c statement_timeout=0"
    try:
        with (
            psycopg.connect(
                source.address, options=options, connect_timeout=CONNECT_TIMEOUT_S, autocommit=True
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(source.snapshot)))
            with cursor.copy(f"COPY ({statement}) TO STDOUT (FORMAT csv)".encode()) as rows:
                yield from _batches(rows, kind)
            cursor.execute("COMMIT")
    except (errors.InvalidParameterValue, errors.UndefinedObject) as exc:
        raise SnapshotGone(f"snapshot {source.snapshot}", _first_line(exc)) from exc
    except psycopg.Error as exc:
        host = psycopg.conninfo.conninfo_to_dict(source.address).get("host", "")
        raise DatabaseUnavailable(f"on {host or 'this machine'}", _first_line(exc)) from exc


def _batches(rows: Any, kind: pa.Schema) -> Iterator[pa.RecordBatch]:
    """What COPY sends, some megabytes at a time: it never divides a row."""
    held = io.BytesIO()
    for piece in rows:
        held.write(piece)
        if held.tell() >= BYTES_A_BATCH:
            yield from _parsed(held, kind)
            held = io.BytesIO()
    if held.tell():
        yield from _parsed(held, kind)


def _parsed(held: io.BytesIO, kind: pa.Schema) -> Iterator[pa.RecordBatch]:
    held.seek(0)
    table = csv.read_csv(
        held,
        csv.ReadOptions(column_names=kind.names, use_threads=False),
        convert_options=csv.ConvertOptions(column_types=kind, true_values=["t"], false_values=["f"]),
    )
    yield from table.to_batches()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
