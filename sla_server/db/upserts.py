"""INSERT ... ON CONFLICT, built once a form, for both databases.

Four things may happen to a column when the row exists already: it is *set*, *added* to, raised to the
*max*imum, or kept as it was first written. ``upsert`` sends one statement with a list of rows
(executemany), for the tables that get a few; ``bulk`` is for those that get thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, Table, case
from sqlalchemy.dialects import postgresql, sqlite

from sla_server.db.schema import natural_key

Params = list[dict[str, Any]]


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
    connection.execute(conflict_clause(insert_into(connection, table), table, changes), rows)


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
