"""Rollups of old hours move from SQL to Parquet: tables ``rollups`` and ``rollup_missed``.

Theory of operation. The rows of one hour, of a large fleet those of a part of it, are read and written to two
files, which count nothing yet. Then one transaction (1) takes the cursors of all ingest queues, as every
ingest transaction does, so that none runs meanwhile, (2) compares count and sums of the rows with those
written, (3) inserts the manifest rows and deletes the SQL rows. Sums only ever grow, so equal sums mean that
nothing came in between; if something did, the rows are left for the next pass and the files are removed.

A cut for an hour that has moved makes new rows, with what came late only; they move to further files. So a
(slot, stream) may have several rows, in SQL and files together; readers add them up, and nothing is
lost or counted twice. What a crash can leave: files without a row, which are swept.

Slices are judged from SQL. So rollups stay there, however old, while they may still be needed: until the
newest judged slice is two hours further (services were away), and while a gateway sends its backlog. Both
only for the seven days that services look back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog
from sqlalchemy import Connection, Engine, Table, cast, delete, func, select
from sqlalchemy.types import BigInteger

from pmdaemon.runtime.clock import Clock
from sla_server.db import schema
from sla_server.db.archive.manifest import MISSED, MOVED_KEY, ROLLUPS, FileRow, add, raise_boundary
from sla_server.db.archive.store import FileStore
from sla_server.db.engine import begin, translated
from sla_server.db.schema import HOUR_US

log = structlog.get_logger("files")
HOURS_A_PASS: Final = 48
JUDGED_WINDOW_US: Final = 168 * HOUR_US  # services judge nothing older
JUDGED_MARGIN_US: Final = 2 * HOUR_US  # longer than a slice, and than slices differ in how far they are
ACTIVE_US: Final = HOUR_US
PART_ROWS: Final = (
    400_000  # deleted in a second or two: ingest waits that long, and gives up after lock_timeout_s
)
_PARTS: Final = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60)  # whole minutes, and so whole slots
_MOVED: Final = ((ROLLUPS, schema.rollups), (MISSED, schema.rollup_missed))
_SUMMED: Final = {
    ROLLUPS: ("arrived", "reads", "writes", "read_bytes", "write_bytes", "others", "errors", "covered_us"),
    MISSED: ("counted", "missed", "overdue", "settled"),
}


class SlotSpan(NamedTuple):
    """Slots that start in [from_us, to_us)."""

    from_us: int
    to_us: int


@dataclass(frozen=True, slots=True)
class _Written:
    """One file, and the sums of its rows in the order of ``_SUMMED``, rows first."""

    row: FileRow
    sums: tuple[int, ...]


class RollupExport:
    """Moves rollups; see the module.

    Args:
        engine: a writing engine.
        files: where they go.
        owner: queue id, first part of file names.
        clock: for creation times.
        probe: called at "export-published", "export-committed"; crash tests die there.
    """

    def __init__(
        self,
        engine: Engine,
        files: FileStore,
        owner: str,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._engine = engine
        self._files = files
        self._owner = owner
        self._clock = clock
        self._probe = probe

    def move(self, before_us: int, is_stopping: Callable[[], bool] = lambda: False) -> int:
        """Move hours that end at or before ``before_us``, oldest first, some a call; returns how many.

        Args:
            before_us: us UTC.
            is_stopping: asked between hours.

        Raises:
            DatabaseUnavailable, ArchiveFailed: come again.
        """
        moved = 0
        for hour_us in self._hours(min(before_us, self._needed_from_us())):
            if is_stopping() or not self._move_hour(hour_us):
                break
            moved += 1
        return moved

    def _needed_from_us(self) -> int:
        """Rollups from here on may still be asked for by services; see the module."""
        now_us = self._clock.unix_us()
        oldest_us = now_us - JUDGED_WINDOW_US
        slices, gateways, progress = schema.slices, schema.gateways, schema.progress
        judged = select(func.max(slices.c.start_us)).where(slices.c.start_us >= oldest_us)
        behind = (
            select(func.min(progress.c.corrected_us))
            .join(gateways, gateways.c.gateway_id == progress.c.gateway_id)
            .where(gateways.c.last_seen_us >= now_us - ACTIVE_US, progress.c.corrected_us >= oldest_us)
        )
        with begin(self._engine) as connection:
            found = [connection.execute(statement).scalar() for statement in (judged, behind)]
        return min([int(us) for us in found if us is not None], default=now_us) - JUDGED_MARGIN_US

    def _hours(self, before_us: int) -> list[int]:
        """Starts of the oldest hours with rows."""
        hours: list[int] = []
        after_us = 0
        with begin(self._engine) as connection:
            while len(hours) < HOURS_A_PASS:
                slot = func.min(schema.rollups.c.slot_us)
                oldest = connection.execute(select(slot).where(schema.rollups.c.slot_us >= after_us)).scalar()
                if oldest is None or (hour_us := oldest // HOUR_US * HOUR_US) + HOUR_US > before_us:
                    break
                hours.append(hour_us)
                after_us = hour_us + HOUR_US
        return hours

    def _move_hour(self, hour_us: int) -> bool:
        """Move an hour in parts that are small enough; False if rows came in between."""
        span = SlotSpan(hour_us, hour_us + HOUR_US)
        rows = sum(self._sums(kind, table, span)[0] for kind, table in _MOVED)
        parts = next((count for count in _PARTS if rows <= count * PART_ROWS), _PARTS[-1])
        step_us = HOUR_US // parts
        return all(
            self._move(SlotSpan(start_us, start_us + step_us))
            for start_us in range(hour_us, hour_us + HOUR_US, step_us)
        )

    def _move(self, span: SlotSpan) -> bool:
        """Write both files and swap them for the rows; False if rows came in between."""
        written = [
            self._write(kind, table, span) for kind, table in _MOVED if self._sums(kind, table, span)[0]
        ]
        self._probe("export-published")
        with begin(self._engine) as connection:
            _hold_ingest(connection)
            kinds = dict(_MOVED)
            now = [_sums(connection, item.row.kind, kinds[item.row.kind], span) for item in written]
            is_unchanged = now == [item.sums for item in written]
            if is_unchanged:
                for item in written:
                    add(connection, item.row)
                    connection.execute(
                        delete(kinds[item.row.kind]).where(*_within(kinds[item.row.kind], span))
                    )
                raise_boundary(connection, MOVED_KEY, span.to_us)
        if not is_unchanged:
            for item in written:
                self._files.remove(item.row.path)
            return False
        self._probe("export-committed")
        log.info("rollups-moved", from_us=span.from_us, rows=[item.row.rows for item in written])
        return True

    def _sums(self, kind: str, table: Table, span: SlotSpan) -> tuple[int, ...]:
        with begin(self._engine) as connection:
            return _sums(connection, kind, table, span)

    def _write(self, kind: str, table: Table, span: SlotSpan) -> _Written:
        import pyarrow as pa
        import pyarrow.compute as pc

        from sla_server.db.archive.files import FileWriter
        from sla_server.db.arrow import arrow_schema, batches

        now_us = self._clock.unix_us()
        start = datetime.fromtimestamp(span.from_us // 1_000_000, UTC)
        name = f"{kind}/{start:%Y-%m-%d}/{self._owner}-{start:%Y%m%dT%H%M}-{now_us}.parquet"
        sums = [0] * (1 + len(_SUMMED[kind]))
        statement = select(table).where(*_within(table, span)).order_by(*table.primary_key.columns)
        with FileWriter(self._files, name, arrow_schema(table)) as writer:
            # Rows are read in one statement: one snapshot on both databases.
            with translated(self._engine), self._engine.connect() as connection:
                for batch in batches(connection, statement, arrow_schema(table)):
                    rows = pa.Table.from_batches([batch])
                    sums[0] += rows.num_rows
                    for index, column in enumerate(_SUMMED[kind], 1):
                        sums[index] += pc.sum(rows[column]).as_py()
                    writer.write(rows)
            # The last slot begins before the end; readers ask by the start of slots.
            row = writer.finish(kind, now_us, span.from_us, span.to_us - 1)
        return _Written(row, tuple(sums))


def _within(table: Table, span: SlotSpan) -> tuple[Any, Any]:
    return table.c.slot_us >= span.from_us, table.c.slot_us < span.to_us


def _sums(connection: Connection, kind: str, table: Table, span: SlotSpan) -> tuple[int, ...]:
    columns = [cast(func.coalesce(func.sum(table.c[name]), 0), BigInteger) for name in _SUMMED[kind]]
    row = connection.execute(select(func.count(), *columns).where(*_within(table, span))).one()
    return tuple(int(value) for value in row)


def _hold_ingest(connection: Connection) -> None:
    """Wait for ingest transactions under way, and keep further ones waiting until this one ends."""
    table = schema.consumed
    statement = select(table.c.queue).where(table.c.queue.like("%/sql")).order_by(table.c.queue)
    connection.execute(statement.with_for_update())
