"""Helpers of every SELECT: lists of values in pieces, decoded JSON, sums.

A row is a ``dict`` of int, float, str, bool, bytes and None; JSON columns are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Executable,
    any_,
    bindparam,
    cast,
    func,
)

from pmdaemon.runtime import strict_json
from sla_server.rows import Row

Item = TypeVar("Item")
IN_LIST = 500  # items of one IN list; SQLite allows 32,766 parameters, plans stay small far below that


def fetched(connection: Connection, statement: Executable) -> list[Row]:
    """All rows of a statement."""
    result = connection.execute(statement)
    keys = tuple(result.keys())  # a third of the time of mappings
    return [dict(zip(keys, row, strict=True)) for row in result.all()]


def chunks(items: Sequence[Item], size: int = IN_LIST) -> Iterator[Sequence[Item]]:
    """Slices of at most ``size`` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def one_of(connection: Connection, column: Column[Any], items: Sequence[Any]) -> ColumnElement[bool]:
    """Whether the column has one of these values, IN_LIST at most unless it is PostgreSQL.

    There they travel as one array. A list of some hundred parameters takes SQLAlchemy and psycopg longer to
    write out than the rows to read.
    """
    if connection.dialect.name == "postgresql":
        return column == any_(bindparam(None, list(items), type_=ARRAY(column.type)))
    return column.in_(list(items))


def decode_json(rows: list[Row], columns: Iterable[str]) -> list[Row]:
    """Decode text columns that hold JSON, in place; empty text and numbers like NaN are None."""
    for row in rows:
        for name in columns:
            value = row.get(name)
            row[name] = strict_json.loads(value) if value else None
    return rows


def total(column: ColumnElement[int]) -> ColumnElement[int]:
    """SUM as int64: PostgreSQL's sum of bigint is numeric, which would arrive as Decimal."""
    return cast(func.sum(column), BigInteger)
