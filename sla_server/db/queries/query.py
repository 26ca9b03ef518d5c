"""What all readers share: run a SELECT, hand out plain rows.

A row is a ``dict`` of int, float, str, bool, bytes and None; JSON columns are decoded. No type of SQLAlchemy
leaves this package.

Thread: any; each call takes a connection from the pool and gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    any_,
    bindparam,
    select,
)

from pmdaemon.runtime import strict_json
from sla_server.db import schema
from sla_server.db.engine import translated

Row = dict[str, Any]
Item = TypeVar("Item")
IN_LIST = 500  # items of one IN list; SQLite allows 32,766 parameters, plans stay small far below that


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


class Queries:
    """Holds the engine; subclasses add one method a question."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _rows(self, statement: Executable) -> list[Row]:
        """All rows of a statement.

        Raises:
            DatabaseUnavailable: not reachable, or the dbmanager has not created the schema yet.
        """
        with translated(self._engine), self._engine.connect() as connection:
            return self._fetch(connection, statement)

    @staticmethod
    def _fetch(connection: Connection, statement: Executable) -> list[Row]:
        result = connection.execute(statement)
        keys = tuple(result.keys())
        # A third of the time of mappings.
        return [dict(zip(keys, row, strict=True)) for row in result.all()]

    def _one(self, statement: Executable) -> Row | None:
        rows = self._rows(statement)
        return rows[0] if rows else None

    def meta(self, key: str) -> str | None:
        """A value of table ``meta``."""
        row = self._one(select(schema.meta.c.value).where(schema.meta.c.key == key))
        return None if row is None else str(row["value"])
