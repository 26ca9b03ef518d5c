"""The ingest transaction, and the two cursors that make it exactly-once.

Table ``consumed`` holds, for each ingest queue, ``<queue_id>/sql`` and ``<queue_id>/parquet``: every record
up to that queue_seq has had its effect on the tables, respectively stands in a file of the manifest. Each
moves in the transaction that carries its effect, and is *read* in that transaction, too. So it does not
matter why a batch comes again (a crash, a retry, a commit whose answer was lost): what the cursor has
passed is skipped.

Thread: the writer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select, update

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import Clock
from sla_server.db import schema
from sla_server.db.archive import FinishedFile
from sla_server.db.batch import Batch, decode_batch
from sla_server.db.engine import begin
from sla_server.db.errors import DbError
from sla_server.db.ingest_queue import Record
from sla_server.db.inventory import store_inventory
from sla_server.db.records import store_rows
from sla_server.db.statistics import store_statistics
from sla_server.db.upserts import upsert


class CursorMovedBack(DbError):
    """The database has forgotten commits (restored, or failed over to a standby that lagged): read again.

    Attributes:
        cursor: what the database says now.
    """

    retryable = True

    def __init__(self, cursor: int, expected: int) -> None:
        self.cursor = cursor
        super().__init__(f"the database's cursor is {cursor}, expected {expected}: it has forgotten commits")


class IngestStore:
    """The writer's side of the database.

    Args:
        engine: a writing engine.
        queue_id: names the cursors.
        rollup_s: length of a slot.
        clock: wall clock for rows.
        probe: called at "in-transaction"; crash tests die there.
    """

    def __init__(
        self,
        engine: Engine,
        queue_id: str,
        rollup_s: int,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._engine = engine
        self._sql_key = f"{queue_id}/sql"
        self._parquet_key = f"{queue_id}/parquet"
        self._rollup_s = rollup_s
        self._clock = clock
        self._probe = probe

    def prepare(self) -> None:
        """Make the rows that must exist, once at start.

        Raises:
            ConfigError: the database was made with another ``rollup_s``.
            DatabaseUnavailable: try again later.
        """
        with begin(self._engine) as connection:
            upsert(connection, schema.meta, [{"key": "rollup_s", "value": str(self._rollup_s)}])
            upsert(connection, schema.meta, [{"key": "created_us", "value": str(self._clock.unix_us())}])
            keys = [{"queue": key, "queue_seq": 0} for key in (self._sql_key, self._parquet_key)]
            upsert(connection, schema.consumed, keys)
            statement = select(schema.meta.c.value).where(schema.meta.c.key == "rollup_s")
            stored = connection.execute(statement).scalar_one()
        if int(stored) != self._rollup_s:
            problem = f"is {self._rollup_s}, but this database was made with {stored}"
            raise ConfigError("database.rollup_s", problem, f"Set it to {stored}, or use a new database")

    def cursors(self) -> tuple[int, int]:
        """(sql, parquet) as committed."""
        with begin(self._engine) as connection:
            return self._cursor(connection, self._sql_key), self._cursor(connection, self._parquet_key)

    def _cursor(self, connection: Connection, key: str) -> int:
        table = schema.consumed
        # FOR UPDATE: should a second manager work on this queue, it waits here and then finds nothing to do.
        statement = select(table.c.queue_seq).where(table.c.queue == key).with_for_update()
        return int(connection.execute(statement).scalar_one())

    def _move(self, connection: Connection, key: str, queue_seq: int) -> None:
        table = schema.consumed
        connection.execute(update(table).where(table.c.queue == key).values(queue_seq=queue_seq))

    def apply(self, records: Sequence[Record], after_seq: int, oldest_seq: int) -> Batch:
        """Put the effect of ``records`` into the tables, unless it is there; returns the records decoded.

        Args:
            records: what follows ``after_seq`` in the queue, at least one.
            after_seq: where the cursor should be, or behind.
            oldest_seq: oldest record the queue still holds.

        Raises:
            CursorMovedBack: read the queue again from behind its ``cursor``; nothing was written.
            DatabaseRefused: some value is refused; nothing was written.
            DatabaseUnavailable: nothing, or everything, was written; come again.
        """
        batch = decode_batch(records, after_seq)
        with begin(self._engine) as connection:
            cursor = self._cursor(connection, self._sql_key)
            if cursor + 1 < batch.first_seq and oldest_seq < batch.first_seq:
                raise CursorMovedBack(cursor, batch.first_seq - 1)
            fresh = [record for record in records if record.queue_seq > cursor]
            if fresh:
                part = batch if len(fresh) == len(records) else decode_batch(fresh, cursor)
                self._store(connection, part)
                self._move(connection, self._sql_key, part.last_seq)
                self._probe("in-transaction")
        return batch

    def _store(self, connection: Connection, batch: Batch) -> None:
        now_us = self._clock.unix_us()
        store_inventory(connection, batch, now_us)
        store_statistics(connection, batch, self._rollup_s * 1_000_000, now_us)
        store_rows(connection, batch.rows)

    def report(self, event: dict[str, Any]) -> None:
        """Store one event now."""
        with begin(self._engine) as connection:
            upsert(connection, schema.events, [event])

    def skip(self, queue_seq: int, event: dict[str, Any]) -> None:
        """Pass a record that the database refuses, and say so in an event."""
        with begin(self._engine) as connection:
            if self._cursor(connection, self._sql_key) < queue_seq:
                upsert(connection, schema.events, [event])
                self._move(connection, self._sql_key, queue_seq)

    def commit_file(self, finished: FinishedFile, oldest_seq: int) -> bool:
        """Make a finished file count and move the parquet cursor; returns False if it must be discarded.

        It must be when the cursor is not where the file begins: the database was restored meanwhile.

        Args:
            finished: the file.
            oldest_seq: oldest record the queue still holds.

        Raises:
            DatabaseUnavailable: come again with the same file.
        """
        with begin(self._engine) as connection:
            cursor = self._cursor(connection, self._parquet_key)
            if cursor == finished.last_seq:
                return True  # committed before; the answer was lost
            before = finished.first_seq - 1
            if cursor > before or (cursor < before and oldest_seq < finished.first_seq):
                return False
            if finished.row is not None:
                # A row of that path can only be left from a former life of a restored database.
                path = finished.row["path"]
                connection.execute(delete(schema.manifest).where(schema.manifest.c.path == path))
                connection.execute(insert(schema.manifest), finished.row)
            self._move(connection, self._parquet_key, finished.last_seq)
        return True
