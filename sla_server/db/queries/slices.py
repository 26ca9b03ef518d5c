"""Statements about judged slices: the newest revision of each, and how many there are of which state."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, exists, func, select, tuple_

from sla_server.db import schema


def is_newer_revision(newer: Any, table: Any) -> tuple[ColumnElement[bool], ...]:
    """Whether a row of ``newer`` is of the same slice, judged later.

    A slice's first row is revision 0. That is said, too, so that the database looks for newer ones among the
    few slices that were judged again, and not among all.
    """
    is_same = newer.c.start_us == table.c.start_us
    return is_same, newer.c.revision > table.c.revision, newer.c.revision > 0


def newest(name: str, objective: str, from_us: int, to_us: int) -> Select[Any]:
    """Slices that start in [from_us, to_us), newest revision of each, oldest first."""

    def wanted(slices: Any) -> list[ColumnElement[bool]]:
        # As one range of the primary key: with start_us alone PostgreSQL prefers the index of all slices
        # by time (there for retention) and reads the slices of all agreements in the range.
        place = tuple_(slices.c.name, slices.c.objective, slices.c.start_us)
        bounds = place >= (name, objective, from_us), place < (name, objective, to_us)
        return [slices.c.name == name, slices.c.objective == objective, *bounds]

    table = schema.slices
    newer = table.alias("newer")
    # The condition is in both: PostgreSQL does not conclude a range from the equality of start_us.
    is_old = exists().where(*wanted(newer), *is_newer_revision(newer, table))
    return select(table).where(*wanted(table), ~is_old).order_by(table.c.start_us)


def counted(columns: tuple[str, ...], name: str, objective: str, from_us: int, to_us: int) -> Select[Any]:
    """``columns`` and n: how many of those slices there are of each combination of their values."""
    found = newest(name, objective, from_us, to_us).order_by(None).subquery()
    group = [found.c[column] for column in columns]
    return select(*group, func.count().label("n")).group_by(*group)
