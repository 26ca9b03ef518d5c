"""Upserts of many rows from columns, by the fastest way each database has.

PostgreSQL: the rows go by binary COPY into a temporary table of the session (emptied at each commit), and
from there with one INSERT ... SELECT ... ON CONFLICT. SQLite: executemany of tuples, without SQLAlchemy's
work a row. Within one call no key may occur twice.

A COPY row in binary form (big-endian): i16 number of fields, then for each field i32 length and value. The
fixed part of all rows is one numpy array; text and blobs stand last and are put behind it row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Table, column, select, text
from sqlalchemy import table as table_clause

from sla_server.db.upserts import conflict_clause, insert_into, params, upsert

Columns = dict[str, npt.NDArray[Any] | Sequence[Any]]
"""By name, all of one length; integers as arrays, text (str) and blobs (bytes) as lists."""
Column = npt.NDArray[Any] | Sequence[Any]
COPY_FROM_ROWS: Final = 100  # below, two more round trips cost more than they save
_HEAD: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END: Final = b"\xff\xff"
_WIDTHS: Final = {"BIGINT": 8, "INTEGER": 4}


def upsert_columns(
    connection: Connection,
    into: Table,
    columns: Mapping[str, Column],
    *,
    set_: Iterable[str] = (),
    add: Iterable[str] = (),
    maximum: Iterable[str] = (),
) -> None:
    """``upserts.upsert`` of rows given as columns of one length.

    Args:
        connection: in a transaction.
        into: with its natural key as primary key.
        columns: by name; integers as arrays; text (str) and blobs (bytes) as lists.
        set_: overwritten.
        add: summed.
        maximum: kept at the larger value.
    """
    count = len(next(iter(columns.values())))
    if not count:
        return
    if connection.dialect.name == "sqlite":
        _execute_tuples(connection, into, columns, (set_, add, maximum))
    elif count < COPY_FROM_ROWS:
        upsert(connection, into, params(columns), set_=set_, add=add, maximum=maximum)
    else:
        _copy(connection, into, columns, (set_, add, maximum))


def _execute_tuples(
    connection: Connection, into: Table, columns: Mapping[str, Column], how: tuple[Iterable[str], ...]
) -> None:
    statement = conflict_clause(insert_into(connection, into), into, *how)
    compiled: Any = statement.compile(dialect=connection.dialect, column_keys=list(columns))
    lists = [_listed(columns[name]) for name in compiled.positiontup]
    connection.exec_driver_sql(compiled.string, list(zip(*lists, strict=True)))


def _listed(values: Column) -> Sequence[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _copy(
    connection: Connection, into: Table, columns: Mapping[str, Column], how: tuple[Iterable[str], ...]
) -> None:
    kinds = {name: into.c[name].type.compile(connection.dialect) for name in columns}
    names = sorted(columns, key=lambda name: kinds[name] not in _WIDTHS)  # fixed ones first
    stage = f"stage_{into.name}"
    declared = ", ".join(f"{name} {kinds[name]}" for name in names)
    connection.execute(
        text(f"CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ({declared}) ON COMMIT DELETE ROWS")
    )
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor:
        listed = ", ".join(names)
        with cursor.copy(f"COPY {stage} ({listed}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(copy_bytes([columns[name] for name in names], [kinds[name] for name in names]))
    source: Any = select(*(column(name) for name in names)).select_from(table_clause(stage))
    insert = insert_into(connection, into).from_select(names, source)
    connection.execute(conflict_clause(insert, into, *how))


def copy_bytes(columns: Sequence[Column], kinds: Sequence[str]) -> bytes:
    """A whole binary COPY stream of at least one row; columns of BIGINT and INTEGER must come first."""
    fields: list[tuple[str, str]] = [("fields", ">i2")]
    fixed = [number for number, kind in enumerate(kinds) if kind in _WIDTHS]
    for number in fixed:
        fields += [(f"length{number}", ">i4"), (f"value{number}", f">i{_WIDTHS[kinds[number]]}")]
    head: npt.NDArray[Any] = np.empty(len(columns[0]), dtype=fields)
    head["fields"] = len(columns)
    for number in fixed:
        head[f"length{number}"] = _WIDTHS[kinds[number]]
        head[f"value{number}"] = columns[number]
    if len(fixed) == len(columns):
        return b"".join((_HEAD, head.tobytes(), _END))
    size = head.dtype.itemsize
    packed = head.tobytes()
    parts: list[Sequence[bytes]] = [[packed[at : at + size] for at in range(0, len(packed), size)]]
    for values in columns[len(fixed) :]:
        blobs = [value.encode() if isinstance(value, str) else value for value in values]
        parts.append(_lengths(blobs))
        parts.append(blobs)
    return b"".join((_HEAD, *(piece for row in zip(*parts, strict=True) for piece in row), _END))


def _lengths(blobs: Sequence[bytes]) -> list[bytes]:
    packed = np.array([len(blob) for blob in blobs], dtype=">i4").tobytes()
    return [packed[at : at + 4] for at in range(0, len(packed), 4)]
