"""INSERT ... ON CONFLICT for both databases: of a few rows as dicts, or of thousands as columns.

Four things may happen to a column when the row exists already: it is *set*, *added* to, raised to the
*max*imum, or kept as it was first written. ``upsert`` sends one statement with a list of rows (executemany);
``upsert_columns`` takes the fastest way each database has. Within one call of it no key may occur twice.

PostgreSQL: the rows go by binary COPY into a temporary table of the session (emptied at each commit), and
from there with one INSERT ... SELECT ... ON CONFLICT. SQLite: executemany of tuples, without SQLAlchemy's
work a row.

A COPY row in binary form (big-endian): i16 number of fields, then for each field i32 length and value. What
has the same length in all rows (integers; mostly gateway ids and hourly histograms, too) is one numpy array;
text and blobs of other lengths come last and are put behind it row by row. The stream is made some rows at a
time: the server takes them while the next are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, Table, case, column, select, text
from sqlalchemy import table as table_clause
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from sla_server.db.schema import natural_key

Params = list[dict[str, Any]]
Columns = dict[str, npt.NDArray[Any] | Sequence[Any]]
"""By name, all of one length; integers as arrays, text (str) and blobs (bytes) as lists."""
Column = npt.NDArray[Any] | Sequence[Any]
DIRECT_ROWS: Final = 20  # from here on SQLAlchemy's work on each row costs more than to compile the statement
COPY_FROM_ROWS: Final = 100  # below, two more round trips cost more than they save
_HEAD: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END: Final = b"\xff\xff"
_WIDTHS: Final = {"BIGINT": 8, "INTEGER": 4}
_CHUNK_ROWS: Final = 8192


class ColumnChanges(TypedDict, total=False):
    """What happens to columns of a row that exists already; columns not named keep their value.

    Attributes:
        set_: overwritten.
        add: summed.
        maximum: kept at the larger value; an old NULL gives way.
    """

    set_: Iterable[str]
    add: Iterable[str]
    maximum: Iterable[str]


def upsert(connection: Connection, table: Table, rows: Params, **changes: Unpack[ColumnChanges]) -> None:
    """Insert ``rows``; where one exists, change the named columns and keep the others.

    Args:
        connection: in a transaction.
        table: with its natural key as primary key.
        rows: all with the same columns.
        changes: see ``ColumnChanges``.
    """
    if not rows:
        return
    statement = conflict_clause(insert_into(connection, table), table, changes)
    if len(rows) < DIRECT_ROWS:
        connection.execute(statement, rows)
        return
    compiled: Any = statement.compile(dialect=connection.dialect, column_keys=list(rows[0]))
    names = compiled.positiontup
    values: Any = rows if names is None else [tuple(map(row.__getitem__, names)) for row in rows]
    connection.exec_driver_sql(compiled.string, values)


def insert_into(connection: Connection, table: Table) -> Any:
    """The database's own INSERT, which knows ON CONFLICT (two classes, alike but unrelated)."""
    module: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    return module.insert(table)


def conflict_clause(insert: Any, table: Table, changes: ColumnChanges) -> Any:
    """``insert`` with what happens to each column when the row exists."""
    values: dict[str, ColumnElement[Any]] = {name: insert.excluded[name] for name in changes.get("set_", ())}
    values |= {name: table.c[name] + insert.excluded[name] for name in changes.get("add", ())}
    for name in changes.get("maximum", ()):
        old, new = table.c[name], insert.excluded[name]
        values[name] = case((old > new, old), else_=new)
    key = list(natural_key(table))
    if values:
        return insert.on_conflict_do_update(index_elements=key, set_=values)
    return insert.on_conflict_do_nothing(index_elements=key)


def params(columns: Mapping[str, npt.NDArray[Any] | Sequence[Any]]) -> Params:
    """Rows from columns of one length; numpy values become Python's."""
    names = list(columns)
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]


def upsert_columns(
    connection: Connection, into: Table, columns: Mapping[str, Column], **changes: Unpack[ColumnChanges]
) -> None:
    """``upsert`` of rows given as columns of one length.

    Args:
        connection: in a transaction.
        into: with its natural key as primary key.
        columns: by name; integers as arrays; text (str) and blobs (bytes) as lists.
        changes: see ``ColumnChanges``.
    """
    count = len(next(iter(columns.values())))
    if not count:
        return
    if connection.dialect.name == "sqlite":
        _execute_tuples(connection, into, columns, changes)
    elif count < COPY_FROM_ROWS:
        upsert(connection, into, params(columns), **changes)
    else:
        _copy(connection, into, columns, changes)


def _execute_tuples(
    connection: Connection, into: Table, columns: Mapping[str, Column], changes: ColumnChanges
) -> None:
    statement = conflict_clause(insert_into(connection, into), into, changes)
    compiled: Any = statement.compile(dialect=connection.dialect, column_keys=list(columns))
    lists = [_listed(columns[name]) for name in compiled.positiontup]
    connection.exec_driver_sql(compiled.string, list(zip(*lists, strict=True)))


def _listed(values: Column) -> Sequence[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _copy(connection: Connection, into: Table, columns: Mapping[str, Column], changes: ColumnChanges) -> None:
    kinds = {name: into.c[name].type.compile(connection.dialect) for name in columns}
    names = sorted(columns, key=lambda name: kinds[name] not in _WIDTHS)  # fixed ones first
    stage = f"stage_{into.name}"
    declared = ", ".join(f"{name} {kinds[name]}" for name in names)
    connection.execute(
        text(f"CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ({declared}) ON COMMIT DELETE ROWS")
    )
    command = f"COPY {stage} ({', '.join(names)}) FROM STDIN (FORMAT BINARY)"
    driver: Any = connection.connection.driver_connection
    errors: Any = connection.dialect.loaded_dbapi
    try:
        with driver.cursor() as cursor, cursor.copy(command) as copy:
            for piece in copy_stream([columns[name] for name in names], [kinds[name] for name in names]):
                copy.write(piece)
    except errors.Error as exc:  # as SQLAlchemy raises it, which cannot see this
        raise DBAPIError.instance(command, None, exc, errors.Error, dialect=connection.dialect) from exc
    source: Any = select(*(column(name) for name in names)).select_from(table_clause(stage))
    insert = insert_into(connection, into).from_select(names, source)
    connection.execute(conflict_clause(insert, into, changes))


def copy_stream(columns: Sequence[Column], kinds: Sequence[str]) -> Iterator[bytes]:
    """A binary COPY stream of at least one row, in pieces; columns of BIGINT and INTEGER must come first."""
    yield _HEAD
    for first in range(0, len(columns[0]), _CHUNK_ROWS):
        yield _rows([values[first : first + _CHUNK_ROWS] for values in columns], kinds)
    yield _END


def _rows(columns: Sequence[Column], kinds: Sequence[str]) -> bytes:
    fixed: list[tuple[str, npt.NDArray[Any]]] = []  # (type, values)
    blobs: list[list[bytes]] = []
    for values, kind in zip(columns, kinds, strict=True):
        if kind in _WIDTHS:
            fixed.append((f">i{_WIDTHS[kind]}", np.asarray(values)))
            continue
        packed = [value.encode() if isinstance(value, str) else value for value in values]
        size = len(packed[0])
        if not blobs and size and all(len(value) == size for value in packed):
            fixed.append((f"V{size}", np.frombuffer(b"".join(packed), dtype=f"V{size}")))
        else:
            blobs.append(packed)
    fields = [("fields", ">i2")]
    for number, (kind, _values) in enumerate(fixed):
        fields += [(f"length{number}", ">i4"), (f"value{number}", kind)]
    head: npt.NDArray[Any] = np.empty(len(columns[0]), dtype=fields)
    head["fields"] = len(columns)
    for number, (_kind, values) in enumerate(fixed):
        head[f"length{number}"] = (
            values.dtype.itemsize if values.dtype.kind == "V" else _WIDTHS[kinds[number]]
        )
        head[f"value{number}"] = values
    packed_heads = head.tobytes()
    if not blobs:
        return packed_heads
    size = head.dtype.itemsize
    parts = [[packed_heads[at : at + size] for at in range(0, len(packed_heads), size)]]
    for values in blobs:
        parts += [_lengths(values), values]
    return b"".join(piece for row in zip(*parts, strict=True) for piece in row)


def _lengths(blobs: Sequence[bytes]) -> list[bytes]:
    packed = np.array([len(blob) for blob in blobs], dtype=">i4").tobytes()
    return [packed[at : at + 4] for at in range(0, len(packed), 4)]
