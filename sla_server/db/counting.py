"""Rows of a time, counted in slices: a statement over tens of millions would exceed the time limit of one.

A slice is a range of the column by which rows lie in time. It grows until a statement counts some hundred
thousand rows, and shrinks where rows are denser. Thread: the caller's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import Connection, Table, func, select

from sla_server.db import schema

FIRST_US: Final = 3_600_000_000
MOST_US: Final = 6 * FIRST_US  # where a fleet has grown all at once, the next slice is a long one
LEAST_US: Final = 1_000_000
FEW_ROWS: Final = 250_000  # a tenth of a second
MANY_ROWS: Final = 2_000_000
GROWTH: Final = 4


class CountedRows(NamedTuple):
    """First and last key of rows, 0 without any, and how many there are."""

    first: int
    last: int
    rows: int


def count_rows(
    connection: Connection, table: Table, from_us: int, to_us: int, most: int | None = None
) -> CountedRows:
    """Count the rows whose time (``schema.time_of``) is in [from_us, to_us).

    Args:
        connection: in a transaction that sees one moment, if the table changes.
        table: one with a time in its key.
        from_us: us UTC.
        to_us: us UTC.
        most: stop once there are more.
    """
    column = schema.time_of(table)
    within = (column >= from_us) & (column < to_us)
    first = connection.scalar(select(func.min(column)).where(within))
    last = connection.scalar(select(func.max(column)).where(within))
    if first is None or last is None:
        return CountedRows(0, 0, 0)
    rows, begin, length = 0, first, FIRST_US
    while begin <= last and (most is None or rows <= most):
        end = min(begin + length, last + 1)
        counted = select(func.count()).select_from(table).where(column >= begin, column < end)
        found = int(connection.scalar(counted) or 0)
        rows, begin = rows + found, end
        if not found:  # a clock that was wrong may have left a row decades away
            begin = connection.scalar(select(func.min(column)).where(column >= end)) or last + 1
        elif found < FEW_ROWS:
            length = min(length * GROWTH, MOST_US)
        elif found > MANY_ROWS:
            length = max(length // GROWTH, LEAST_US)
    return CountedRows(first, last, rows)
