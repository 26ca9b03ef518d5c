"""Table ``manifest``: a Parquet file is part of the data if and only if its row is here and not replaced.

A row's life: inserted in the transaction that makes the file count; ``replaced_us`` set in the transaction
that puts a merged file in its place, or gives it up; deleted once the file is deleted, after a grace time.
A reader of the rows before keeps a valid list of files for that long: that is the readers' snapshot.

All functions work in the caller's transaction. Thread: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select, update

from sla_server.db import schema
from sla_server.db.errors import DbError
from sla_server.db.queries.rows import chunks
from sla_server.db.upsert import upsert

CUTS: Final = "cuts"
ROLLUPS: Final = "rollups"
MISSED: Final = "missed"
HOURS: Final = "hours"
HOUR_MISSED: Final = "hour_missed"
DAYS: Final = "days"
DAY_MISSED: Final = "day_missed"
KINDS: Final = (CUTS, ROLLUPS, MISSED, HOURS, HOUR_MISSED, DAYS, DAY_MISSED)
BY_HOUR: Final = (HOURS, HOUR_MISSED)
BY_DAY: Final = (DAYS, DAY_MISSED)
"""What the rollup job makes of ``ROLLUPS`` and ``MISSED`` (``db.rollups``)."""
COMPLETE_FROM_KEY: Final = "cuts_complete_from_us"
"""Key of ``meta``: cuts that ended before it may have been given up with their files."""
MOVED_KEY: Final = "rollups_moved_until_us"
"""Key of ``meta``: rollups of slots before it have moved to files."""
ROLLED_KEY: Final = "rolled_up_us"
"""Key of ``meta``: when a day was rolled up last; who writes it holds the others (``db.rollups``)."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """One row; docs/formats/sql.md says what the columns mean."""

    path: str
    kind: str
    created_us: int
    min_us: int
    max_us: int
    rows: int
    cuts: int
    bytes: int
    sha256: str
    replaced_us: int | None = None

    @property
    def name(self) -> str:
        """File name without its directories."""
        return self.path.rpartition("/")[2]

    @property
    def directory(self) -> str:
        """KIND/DAY."""
        return self.path.rpartition("/")[0]

    @property
    def owner(self) -> str:
        """Queue id of the server that wrote it: the first part of the name."""
        return self.name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file ready for the manifest; ``row`` is None when the records held no cut, and there is no file.

    Attributes:
        first_seq: queue_seq of the first record in it.
        last_seq: queue_seq of the last.
    """

    first_seq: int
    last_seq: int
    row: dict[str, Any] | None


class ManifestChanged(DbError):
    """Some file was replaced meanwhile; nothing was changed. Plan again."""

    retryable = True

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(f"{expected - found} of {expected} files were replaced meanwhile; look again")


def rows(connection: Connection, *, in_use: bool = False) -> list[FileRow]:
    """All rows, oldest data first."""
    table = schema.manifest
    statement = select(table).order_by(table.c.min_us, table.c.path)
    if in_use:
        statement = statement.where(table.c.replaced_us.is_(None))
    return [FileRow(**row) for row in connection.execute(statement).mappings()]


def snapshot(connection: Connection, kind: str, from_us: int, to_us: int) -> list[FileRow]:
    """Files that may hold data of [from_us, to_us), oldest first."""
    table = schema.manifest
    statement = (
        select(table)
        .where(table.c.kind == kind, table.c.replaced_us.is_(None))
        .where(table.c.min_us < to_us, table.c.max_us >= from_us)
        .order_by(table.c.min_us, table.c.path)
    )
    return [FileRow(**row) for row in connection.execute(statement).mappings()]


def add(connection: Connection, row: FileRow | dict[str, Any]) -> None:
    """Make a file count."""
    connection.execute(insert(schema.manifest), asdict(row) if isinstance(row, FileRow) else row)


def replace(connection: Connection, old: Sequence[FileRow], new: FileRow | None, now_us: int) -> None:
    """Put ``new`` in the place of ``old``, or give ``old`` up.

    Raises:
        ManifestChanged: not all of ``old`` were in use; the caller's transaction must end without a commit.
    """
    table = schema.manifest
    changed = 0
    for paths in chunks([row.path for row in old]):
        statement = update(table).where(table.c.path.in_(paths), table.c.replaced_us.is_(None))
        changed += connection.execute(statement.values(replaced_us=now_us)).rowcount
    if changed != len(old):
        raise ManifestChanged(len(old), changed)
    if new is not None:
        add(connection, new)


def forget(connection: Connection, paths: Iterable[str]) -> None:
    """Delete the rows of files that are deleted; only replaced ones."""
    table = schema.manifest
    for chunk in chunks(list(paths)):
        statement = delete(table).where(table.c.path.in_(chunk), table.c.replaced_us.is_not(None))
        connection.execute(statement)


def boundary_us(connection: Connection, key: str) -> int:
    """A moment (us UTC) kept in ``meta``, 0 if it was never set."""
    table = schema.meta
    value = connection.execute(select(table.c.value).where(table.c.key == key)).scalar()
    return int(value or 0)


def raise_boundary(connection: Connection, key: str, until_us: int) -> None:
    """Move it forward; it never goes back."""
    value = max(until_us, boundary_us(connection, key))
    upsert(connection, schema.meta, [{"key": key, "value": str(value)}], set_=("value",))
