"""Records as people list them: the audit log, runs of jobs, versions of policies; filtered, sorted, paged.

A page begins behind the row that its cursor names, in any order: that row is looked up again for the value
that is sorted by. Rows that arrive meanwhile shift nothing. A cursor whose row was removed since has no page.
Pure: statements only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    Table,
    Text,
    and_,
    cast,
    func,
    or_,
    select,
    true,
    tuple_,
)

from sla_server.db import schema

Value = Callable[[FromClause], ColumnElement[Any]]
NEWEST: Final = "newest"
OLDEST: Final = "oldest"
MOST_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class RecordList:
    """One table as a list.

    Attributes:
        key: column of the primary key.
        time: column of the time by which it is sorted first or next.
        searched: columns in which a text is looked for.
        filters: columns that may be asked for by value.
        orders: other orders than the two of time; each the value that is sorted by.
        falling: those of them that have the largest first.
        left_out: columns that do not come: those that are large.
    """

    table: Table
    key: str
    time: str
    searched: tuple[str, ...]
    filters: tuple[str, ...]
    orders: Mapping[str, Value]
    falling: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def order_names(self) -> tuple[str, ...]:
        """All orders."""
        return (NEWEST, OLDEST, *self.orders)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a list.

    Attributes:
        before: cursor of the last row of the page before.
        match: one of the searched columns has this in it, whatever the case.
        values: column to values of which it has one; ``*`` in one matches anything.
        from_us, to_us: it began in [from_us, to_us).
        sort: one of ``order_names``.
    """

    limit: int = 100
    before: str | None = None
    match: str = ""
    values: Mapping[str, Collection[str]] = field(default_factory=dict)
    from_us: int | None = None
    to_us: int | None = None
    sort: str = NEWEST


def _column(name: str) -> Value:
    return lambda table: table.c[name]


def _took(table: FromClause) -> ColumnElement[Any]:
    took: ColumnElement[Any] = func.coalesce(table.c.ended_us - table.c.started_us, -1)
    return took


def _rows(table: FromClause) -> ColumnElement[Any]:
    rows: ColumnElement[Any] = func.coalesce(table.c.rows, -1)
    return rows


AUDIT: Final = RecordList(
    schema.audit,
    "audit_id",
    "at_us",
    ("who", "action", "subject"),
    ("action", "who"),
    {name: _column(name) for name in ("who", "action", "subject")},
)
JOBS: Final = RecordList(
    schema.jobs,
    "job_id",
    "started_us",
    ("kind", "who", "text"),
    ("kind", "state"),
    {"kind": _column("kind"), "state": _column("state"), "longest": _took, "rows": _rows},
    falling=("longest", "rows"),
)
POLICIES: Final = RecordList(
    schema.policies,
    "version",
    "created_us",
    ("version", "published_by"),
    ("state",),
    {"state": _column("state")},
    left_out=("report",),
)


def listed(records: RecordList, wanted: Wanted) -> Select[Any]:
    """A page.

    Raises:
        ValueError: no such order, or ``before`` is no cursor.
    """
    if wanted.sort not in records.order_names:
        raise ValueError(f"{wanted.sort!r} is no order; there are {', '.join(records.order_names)}")
    table = records.table
    time, key = table.c[records.time], table.c[records.key]
    value = records.orders.get(wanted.sort)
    is_rising = wanted.sort == OLDEST
    order = [time.asc(), key.asc()] if is_rising else [time.desc(), key.desc()]
    if value is not None:
        is_falling = wanted.sort in records.falling
        order.insert(0, value(table).desc() if is_falling else value(table).asc())
    columns = [column for column in table.c if column.name not in records.left_out]
    statement = select(*columns).where(*_conditions(records, wanted)).order_by(*order).limit(wanted.limit)
    if not wanted.before:
        return statement
    place = _place(records, wanted.before)
    # Compared as a pair, which is one range of the index.
    further = tuple_(time, key) > place if is_rising else tuple_(time, key) < place
    if value is not None:
        last = table.alias("last")
        was = select(value(last)).where(last.c[records.key] == place[1]).scalar_subquery()
        beyond = value(table) < was if is_falling else value(table) > was
        further = or_(beyond, and_(value(table) == was, further))
    return statement.where(further)


def cursor_of(records: RecordList, row: Mapping[str, Any]) -> str:
    """What ``before`` is for the page behind this row."""
    return f"{row[records.time]}:{row[records.key]}"


def _place(records: RecordList, cursor: str) -> tuple[int, Any]:
    at_text, _, key_text = cursor.partition(":")
    is_number = records.table.c[records.key].type.python_type is int
    if not _is_number(at_text) or not key_text or (is_number and not _is_number(key_text)):
        raise ValueError(f"{cursor!r} is no cursor; use the `next` of the page before")
    return int(at_text), int(key_text) if is_number else key_text


def _is_number(text: str) -> bool:
    """Digits of one that databases hold; what is larger would be an error of theirs."""
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


def _conditions(records: RecordList, wanted: Wanted) -> list[ColumnElement[bool]]:
    table, found = records.table, []
    if wanted.match:
        columns = (cast(table.c[name], Text) for name in records.searched)
        # Databases differ in what LIKE does with the case.
        found.append(
            or_(*(func.lower(one).contains(wanted.match.lower(), autoescape=True) for one in columns))
        )
    for name, values in wanted.values.items():
        exact = [value for value in values if "*" not in value]
        patterns = [_pattern(value) for value in values if "*" in value]
        if values:
            column = table.c[name]
            found.append(or_(column.in_(exact), *(column.like(one, escape="\\") for one in patterns)))
    if wanted.from_us is not None:
        found.append(table.c[records.time] >= wanted.from_us)
    if wanted.to_us is not None:
        found.append(table.c[records.time] < wanted.to_us)
    return found


def not_ended(ended: ColumnElement[Any], since_us: int | None) -> ColumnElement[bool]:
    """Whether what ends at ``ended``, null while it goes on, had not ended before a time; None: any time."""
    return true() if since_us is None else or_(ended.is_(None), ended >= since_us)


def _pattern(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_").replace("*", "%")
