"""PostgreSQL: partitions of the time-series tables, made ahead, so that old data leaves by dropping a table.

A partition holds one span of time (``SPANS``), aligned to the epoch and named by its first day. Those from
``BEHIND_US`` ago to ``AHEAD_US`` ahead are made before they are needed; whatever fits none (a backlog older
than that, a database whose manager was down for a week) goes to the default partition and is deleted by
range like anything on SQLite. A partition is made apart and then attached, which lets readers and the writer
go on; a span of which the default partition holds rows already is left to it.

On SQLite every function here does nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy import Connection, text

log = structlog.get_logger("partitions")
DAY_US: Final = 86_400_000_000
AHEAD_US: Final = 3 * DAY_US  # a manager that cannot make any (locks, rights) has that long to be helped
BEHIND_US: Final = 2 * DAY_US  # what agents' spools may hold after an outage
SPANS: Final = {
    "rollups": DAY_US,
    "rollup_missed": DAY_US,
    "coverage": DAY_US,
    "rollup_hours": 7 * DAY_US,
}
"""Table to the span of a partition; its first key column is the time."""
TIME_COLUMN: Final = {name: "hour_us" if name == "rollup_hours" else "slot_us" for name in SPANS}
_BOUND: Final = re.compile(r"FROM \((MINVALUE|'?-?\d+'?)\) TO \('?(-?\d+)'?\)")


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition that holds times in [from_us, to_us)."""

    name: str
    from_us: int
    to_us: int


def default_of(table: str) -> str:
    """Name of a table's default partition."""
    return f"{table}_default"


def existing(connection: Connection, table: str) -> list[Partition]:
    """A table's partitions without the default one, oldest first."""
    statement = text(
        "SELECT child.relname, pg_get_expr(child.relpartbound, child.oid) FROM pg_inherits "
        "JOIN pg_class child ON child.oid = inhrelid WHERE inhparent = to_regclass(:name)"
    )
    found = []
    for name, bound in connection.execute(statement, {"name": table}):
        match = _BOUND.search(bound)
        if match:
            low = match[1].strip("'")
            found.append(Partition(name, 0 if low == "MINVALUE" else int(low), int(match[2])))
    return sorted(found, key=lambda partition: partition.from_us)


def make_ahead(connection: Connection, now_us: int) -> list[str]:
    """Make what will be needed, in the caller's transaction; returns the names of new partitions."""
    if connection.dialect.name != "postgresql":
        return []
    made = []
    for table, span_us in SPANS.items():
        default = default_of(table)
        if connection.execute(text("SELECT to_regclass(:name)"), {"name": default}).scalar() is None:
            connection.execute(text(f"CREATE TABLE {default} PARTITION OF {table} DEFAULT"))
            made.append(default)
        have = existing(connection, table)
        first_us = (now_us - BEHIND_US) // span_us * span_us
        for from_us in range(first_us, now_us + AHEAD_US + 1, span_us):
            to_us = from_us + span_us
            overlaps = any(part.from_us < to_us and from_us < part.to_us for part in have)
            if not overlaps and not _default_has(connection, table, from_us, to_us):
                made.append(_make(connection, table, from_us, to_us))
    if made:
        log.info("partitions-made", names=made)
    return made


def _default_has(connection: Connection, table: str, from_us: int, to_us: int) -> bool:
    column = TIME_COLUMN[table]
    statement = (
        f"SELECT EXISTS (SELECT FROM {default_of(table)} WHERE {column} >= {from_us} AND {column} < {to_us})"  # noqa: S608
    )
    return bool(connection.execute(text(statement)).scalar())


def _make(connection: Connection, table: str, from_us: int, to_us: int) -> str:
    name = f"{table}_{datetime.fromtimestamp(from_us // 1_000_000, UTC):%Y%m%d}"
    connection.execute(text(f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)"))
    connection.execute(
        text(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({from_us}) TO ({to_us})")
    )
    return name


def limit_lock_wait(connection: Connection, lock_wait_ms: int) -> None:
    """Let this transaction fail rather than wait longer for a reader.

    Making a partition locks the default one, dropping one the whole table, both exclusively; while either
    waits for a reader, everybody else who reads the table waits behind it.
    """
    connection.execute(text(f"SET LOCAL lock_timeout = {lock_wait_ms}"))


def drop(connection: Connection, name: str) -> None:
    """Drop a partition."""
    connection.execute(text(f"DROP TABLE {name}"))
