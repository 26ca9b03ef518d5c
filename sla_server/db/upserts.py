"""INSERT ... ON CONFLICT, built once a form, for both databases.

Four things may happen to a column when the row exists already: it is *set*, *added* to, raised to the
*max*imum, or kept as it was first written. One statement goes out with a list of rows (executemany); within
such a list no key may occur twice unless the database takes the rows one by one, which both do here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, Table, case
from sqlalchemy.dialects import postgresql, sqlite

from sla_server.db.schema import natural_key

Params = list[dict[str, Any]]


def upsert(
    connection: Connection,
    table: Table,
    rows: Params,
    *,
    set_: Iterable[str] = (),
    add: Iterable[str] = (),
    maximum: Iterable[str] = (),
) -> None:
    """Insert ``rows``; where one exists, change the named columns and keep the others.

    Args:
        connection: in a transaction.
        table: with its natural key as primary key.
        rows: all with the same columns.
        set_: overwritten.
        add: summed.
        maximum: kept at the larger value; an old NULL gives way.
    """
    if not rows:
        return
    # The two classes are alike but unrelated; both are INSERT with ON CONFLICT.
    module: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = module.insert(table)
    changes: dict[str, ColumnElement[Any]] = {name: insert.excluded[name] for name in set_}
    changes |= {name: table.c[name] + insert.excluded[name] for name in add}
    for name in maximum:
        old, new = table.c[name], insert.excluded[name]
        changes[name] = case((old > new, old), else_=new)
    key = list(natural_key(table))
    if changes:
        statement = insert.on_conflict_do_update(index_elements=key, set_=changes)
    else:
        statement = insert.on_conflict_do_nothing(index_elements=key)
    connection.execute(statement, rows)


def params(columns: Mapping[str, npt.NDArray[Any] | Sequence[Any]]) -> Params:
    """Rows from columns of one length; numpy values become Python's."""
    names = list(columns)
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
