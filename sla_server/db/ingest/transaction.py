"""The ingest transactions, what they write, and the cursors that make them exactly-once.

Table ``consumed`` holds three cursors for each ingest queue: every record up to that queue_seq

    <queue_id>/sql       has its sums in the statistics tables
    <queue_id>/records   has its inventory, events and RECORD rows in theirs; never behind ``sql``
    <queue_id>/parquet   is in a file of the manifest

Each moves in the transaction that carries its effect, and is *read* in that transaction, too. So it does not
matter why something comes again (a crash, a retry, a commit whose answer was lost): what the cursor has
passed is skipped. Records and statistics have a transaction each, because rows that a process waits for
should not wait for the sums of the whole fleet.

What is read of rows while a window is committed waits for it (``waiting``). ``store_waiting`` stores it
before the next window, whose transaction moves the cursor ``records`` beyond it. ``statistics`` says how a
window becomes rows of SQL.

Thread: the writer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import structlog
from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import STEP_US, Clock
from pmdaemon.wire.cut import MAX_ROWS
from sla_server.db import partitions, schema
from sla_server.db.archive.manifest import MOVED_KEY, FinishedFile, boundary_us
from sla_server.db.engine import begin, where
from sla_server.db.errors import DbError
from sla_server.db.histogram_codec import Int64s
from sla_server.db.ingest.accumulator import IngestMemory, IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, decode_batch
from sla_server.db.ingest.intake import CorrectedWatermark
from sla_server.db.ingest.inventory import has_inventory, store_inventory
from sla_server.db.ingest.ownership import TABLE as OWNERS
from sla_server.db.ingest.ownership import IngestOwnership
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.records import add_events, event_row, store_rows
from sla_server.db.ingest.statistics import StoredHistograms, store_statistics
from sla_server.db.queries.rows import chunks
from sla_server.db.schema import ALIVE_KEY, DAY_US
from sla_server.db.upsert import upsert
from sla_server.ownership import FIRST_SIGHT_VOLUMES, Ownership

log = structlog.get_logger("db-writer")
AHEAD_US: Final = 60_000_000
"""More than clocks in order, and ways, can make of a time."""
OUTAGE_US: Final = 15_000_000
"""Shorter ones lose nothing: agents keep their cuts. The mark is as old as REFRESH_S (``process``)."""
MAX_NAMELESS: Final = MAX_ROWS


class CursorMoved(DbError):
    """The cursor is not where it was left: read the queue again from behind it.

    The database was restored, or failed over to a standby that lagged, or a second manager is at work.

    Attributes:
        cursor: what the database says now.
    """

    retryable = True

    def __init__(self, cursor: int, expected: int) -> None:
        self.cursor = cursor
        super().__init__(f"the database's cursor is {cursor}, expected {expected}")


def has_rows(batch: DecodedBatch) -> bool:
    """Whether there is anything in a batch for ``store_records``."""
    return bool(batch.rows) or has_inventory(batch)


def _fresh(batch: DecodedBatch, records: Sequence[IngestRecord], cursor: int) -> list[DecodedBatch]:
    """What of a batch, decoded from ``records``, lies behind the cursor: at most one."""
    fresh = [record for record in records if record.queue_seq > cursor]
    if len(fresh) == len(records):
        return [batch]
    return [decode_batch(fresh, cursor)] if fresh else []


class IngestStore:
    """The writer's side of the database.

    Args:
        engine: a writing engine.
        queue_id: names the cursors.
        rollup_s: length of a slot.
        clock: wall clock for rows.
        probe: called at "in-transaction"; crash tests die there.
        ownership: the setting ``volume_ownership``.
        first_sight_volumes: the setting.
        fence: of the server's term; 0: the database is its own.
    """

    def __init__(
        self,
        engine: Engine,
        queue_id: str,
        rollup_s: int,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
        ownership: Ownership = "open",
        first_sight_volumes: int = FIRST_SIGHT_VOLUMES,
        fence: int = 0,
    ) -> None:
        self._engine = engine
        self._fence = fence
        self._sql_key = f"{queue_id}/sql"
        self._records_key = f"{queue_id}/records"
        self._parquet_key = f"{queue_id}/parquet"
        self._records_seq = self._newest_cursor = 0
        self._nameless = NamelessStreams()
        self._histograms = StoredHistograms()
        self._ownership, self._is_restored = IngestOwnership(ownership, first_sight_volumes), False
        self._unanswered: list[DecodedBatch] = []
        self._memory = IngestMemory(rollup_s * 1_000_000)
        self._now_us = 0
        self._rollup_s = rollup_s
        self._clock = clock
        self._probe = probe

    @property
    def where(self) -> str:
        """The database, for people; without a password."""
        return where(self._engine)

    def prepare(self) -> None:
        """Make the rows and partitions that must exist, once at start.

        Raises:
            ConfigError: the database was made with another ``rollup_s``.
            DatabaseUnavailable: try again later.
        """
        with begin(self._engine) as connection:
            partitions.make_ahead(connection, self._clock.unix_us())
            upsert(connection, schema.meta, [{"key": "rollup_s", "value": str(self._rollup_s)}])
            upsert(connection, schema.meta, [{"key": "created_us", "value": str(self._clock.unix_us())}])
            keys = [{"queue": key, "queue_seq": 0} for key in (self._sql_key, self._parquet_key)]
            upsert(connection, schema.consumed, keys)
            # A database of an older release: its records were stored together with the sums.
            sql_seq = self._cursor(connection, self._sql_key)
            upsert(connection, schema.consumed, [{"queue": self._records_key, "queue_seq": sql_seq}])
            record_outage(connection, self._check_clock(connection))
            streams = schema.streams
            said = select(streams.c.gateway_id, streams.c.stream_id, streams.c.planes)
            known = connection.execute(said.where(streams.c.planes != ""))
            self._memory.planes.restore((row[0], row[1], row[2]) for row in known)
            ends = select(schema.progress.c.gateway_id, schema.progress.c.corrected_us)
            self._memory.restore_ends({row[0]: row[1] for row in connection.execute(ends)})
            self._ownership.load(connection)
            statement = select(schema.meta.c.value).where(schema.meta.c.key == "rollup_s")
            stored = connection.execute(statement).scalar_one()
        if int(stored) != self._rollup_s:
            problem = f"is {self._rollup_s}, but this database was made with {stored}"
            raise ConfigError("database.rollup_s", problem, f"Set it to {stored}, or use a new database")

    def _check_clock(self, connection: Connection) -> int:
        """The time; if it has gone back, or at the start, what lies beyond it is taken back."""
        now_us = self._clock.unix_us()
        if (not self._now_us or now_us < self._now_us - STEP_US) and (
            ahead_us := forget_future(connection, now_us)
        ):
            text = (
                f"the database has times up to {ahead_us / 1e6:.0f} s after the server's own clock: it is "
                "wrong now, or was wrong then. Slices beyond now are judged again in their time"
            )
            event = event_row(
                (now_us,), now_us, "clock-stepped", "warning", element="dbmanager", subject="server",
                text=text, details={"state": "behind-data", "by_us": -ahead_us},
            )  # fmt: skip
            log.warning("clock-stepped", text=text)
            add_events(connection, [event])
        self._now_us = now_us
        return now_us

    def cursors(self) -> tuple[int, int]:
        """(sql, parquet) as committed; also takes note of ``records``."""
        with begin(self._engine) as connection:
            self._records_seq = self._cursor(connection, self._records_key)
            sql_seq = self._cursor(connection, self._sql_key)
            parquet_seq = self._cursor(connection, self._parquet_key)
        self._newest_cursor = max(self._records_seq, sql_seq, parquet_seq)
        return sql_seq, parquet_seq

    @property
    def newest_cursor(self) -> int:
        """The furthest of the three, as of the last ``cursors``."""
        return self._newest_cursor

    def disconnect(self) -> None:
        """Forget all connections: after a failover they lead to what was the primary."""
        self._engine.dispose()

    def window(self) -> IngestWindow:
        """An empty window of this store's interval."""
        return IngestWindow(self._rollup_s * 1_000_000, self._memory)

    def begin_again(self) -> None:
        """Records from before the newest window will be read again."""
        self._memory.begin_again()
        self._is_restored = True

    def screened(self, batch: DecodedBatch) -> DecodedBatch:
        """A batch without the rows of cuts that are of volumes which are not their gateway's.

        Raises:
            DatabaseUnavailable: claims must be read again, and cannot be; come again.
        """
        if self._is_restored:
            with begin(self._engine) as connection:
                self._load_claims(connection, self._cursor(connection, self._records_key))
            self._is_restored = False
        return self._ownership.screened(batch)

    def _load_claims(self, connection: Connection, cursor: int) -> None:
        """Read claims again; ``cursor``: up to where rows are stored, whatever became of the answers."""
        self._ownership.load(connection)
        for part in self._unanswered:
            if part.last_seq <= cursor:
                self._ownership.recall(part)
        self._unanswered = []

    def _cursor(self, connection: Connection, key: str) -> int:
        table = schema.consumed
        # FOR UPDATE: should a second manager work on this queue, it waits here and then finds nothing to do.
        statement = select(table.c.queue_seq).where(table.c.queue == key).with_for_update()
        return int(connection.execute(statement).scalar_one())

    def _raise(self, connection: Connection, key: str, queue_seq: int) -> None:
        """Move a cursor forward; one that is further stays."""
        table = schema.consumed
        behind = (table.c.queue == key) & (table.c.queue_seq < queue_seq)
        connection.execute(update(table).where(behind).values(queue_seq=queue_seq))

    def _moved(self, connection: Connection, expected: int) -> CursorMoved:
        """The error of a cursor that is not where it was left; from now on what the database says counts."""
        self._records_seq = self._cursor(connection, self._records_key)
        return CursorMoved(self._cursor(connection, self._sql_key), expected)

    def store_records(self, batch: DecodedBatch, records: Sequence[IngestRecord], oldest_seq: int) -> None:
        """Store inventory, events and RECORD rows of a batch, unless they are there.

        Args:
            batch: ``records``, decoded.
            records: what the queue holds of that batch, at least one.
            oldest_seq: oldest record the queue still holds.

        Raises:
            CursorMoved: read the queue again from behind its ``cursor``; nothing was written.
            DatabaseRefused: some value is refused; nothing was written.
            DatabaseUnavailable: nothing, or everything, was written; come again.
        """
        if not has_rows(batch):
            return

        def unstored(_connection: Connection, cursor: int) -> list[DecodedBatch]:
            return _fresh(batch, records, cursor)

        self._store_rows(unstored, batch.last_seq, oldest_seq)

    def may_wait(self, batch: DecodedBatch) -> bool:
        """Whether the rows of a batch may be stored after cuts that follow it were screened."""
        return not self._ownership.decides(batch)

    def unstored_rows(self, batch: DecodedBatch, records: Sequence[IngestRecord]) -> list[DecodedBatch]:
        """What of a batch has not been stored yet, for ``store_waiting``; as in ``store_records``."""
        return [part for part in _fresh(batch, records, self._records_seq) if has_rows(part)]

    def store_waiting(self, parts: Sequence[DecodedBatch], oldest_seq: int) -> None:
        """Store the inventory, events and RECORD rows of several batches, in order, unless they are there.

        Args:
            parts: at least one, of ``unstored_rows``.
            oldest_seq: oldest record the queue still holds.

        Raises:
            CursorMoved, DatabaseRefused, DatabaseUnavailable: as ``store_records``.
        """

        def unstored(connection: Connection, cursor: int) -> list[DecodedBatch]:
            left = [part for part in parts if part.last_seq > cursor]
            if left and left[0].first_seq <= cursor and cursor > self._records_seq:
                raise self._moved(connection, self._records_seq)  # another manager is at work
            return left

        self._store_rows(unstored, parts[-1].last_seq, oldest_seq)

    def _store_rows(
        self, unstored: Callable[[Connection, int], list[DecodedBatch]], last_seq: int, oldest_seq: int
    ) -> None:
        """One transaction: what ``unstored`` says of the cursor; it moves to the last of that."""
        try:
            with begin(self._engine) as connection:
                cursor = self._cursor(connection, self._records_key)
                if cursor < self._records_seq and oldest_seq <= self._records_seq:
                    raise self._moved(connection, self._records_seq)
                if self._is_restored:
                    self._load_claims(connection, cursor)
                parts = unstored(connection, cursor)
                for part in parts:
                    self._store_fresh(connection, part)
                    self._raise(connection, self._records_key, part.last_seq)
                self._probe("rows-in-transaction")
                self._unanswered = parts  # if the answer to the commit is lost, these may be stored
        except BaseException:
            self._ownership.finish(is_stored=False)
            self._is_restored = True  # it may have been committed all the same
            raise
        self._ownership.finish(is_stored=True)
        self._is_restored, self._unanswered = False, []
        self._records_seq = max(cursor, last_seq)

    def _store_fresh(self, connection: Connection, batch: DecodedBatch) -> None:
        now_us = self._clock.unix_us()
        store_inventory(connection, self._ownership.take(connection, batch, now_us), now_us)
        store_rows(connection, [row for row in batch.rows if row[0] != OWNERS])

    def commit(self, window: IngestWindow, oldest_seq: int) -> None:
        """Add a window to the statistics, unless it is there.

        Args:
            window: not empty; the caller resets it afterwards.
            oldest_seq: oldest record the queue still holds.

        Raises:
            CursorMoved, DatabaseRefused, DatabaseUnavailable: as ``store_records``.
        """
        try:
            with begin(self._engine) as connection:
                cursor = self._cursor(connection, self._sql_key)
                if cursor == window.last_seq:
                    return  # committed before; the answer was lost
                if cursor >= window.first_seq or (
                    cursor + 1 < window.first_seq and oldest_seq < window.first_seq
                ):
                    raise self._moved(connection, window.first_seq - 1)
                cursors, moved_until_us = self._histogram_state(connection)
                self._histograms.begin((cursors, moved_until_us))
                now_us = self._check_clock(connection)
                self._nameless.screen(connection, window, now_us)
                store_statistics(connection, window, now_us, self._histograms, self._fence)
                for key in (self._sql_key, self._records_key):
                    self._raise(connection, key, window.last_seq)
                self._probe("in-transaction")
        except BaseException:
            self._histograms.forget()
            raise
        self._histograms.commit(({**cursors, self._sql_key: window.last_seq}, moved_until_us), moved_until_us)
        self._records_seq = max(self._records_seq, window.last_seq)

    def forget_histograms(self) -> None:
        """Rows of statistics may have been deleted; no transaction may be under way."""
        self._histograms.forget()

    def _histogram_state(self, connection: Connection) -> tuple[dict[str, int], int]:
        """What moves with whatever changes histograms: cursors ``sql``, and how far rollups have moved."""
        consumed = schema.consumed
        statement = select(consumed.c.queue, consumed.c.queue_seq).where(consumed.c.queue.like("%/sql"))
        cursors = {row[0]: row[1] for row in connection.execute(statement)}
        return cursors, boundary_us(connection, MOVED_KEY)

    def apply(self, records: Sequence[IngestRecord], after_seq: int, oldest_seq: int) -> DecodedBatch:
        """Records and statistics of ``records`` by themselves; returns them decoded.

        Args:
            records: what follows ``after_seq`` in the queue, at least one.
            after_seq: where the cursor should be, or behind.
            oldest_seq: oldest record the queue still holds.

        Raises:
            CursorMoved, DatabaseRefused, DatabaseUnavailable: as ``store_records``.
        """
        batch = decode_batch(records, after_seq)
        self.store_records(batch, records, oldest_seq)
        window = self.window()
        window.absorb(self.screened(batch))
        try:
            self.commit(window, oldest_seq)
        except DbError:
            window.reset()
            raise
        return batch

    def correct_watermarks(self, corrected: Sequence[CorrectedWatermark]) -> None:
        """High waters that were changed while the server was stopped, and an event for each."""
        table = schema.ingest_watermark
        with begin(self._engine) as connection:
            now_us = self._clock.unix_us()
            for gateway_id, epoch, had, seq in corrected:
                is_epoch = (table.c.gateway_id == gateway_id) & (table.c.epoch == str(epoch))
                connection.execute(update(table).where(is_epoch).values(seq=seq))
                text = (
                    f"table ingest_watermark had cut {had} as the newest of epoch {epoch}, the ingest queue "
                    f"has {seq}: the database was changed while the server was stopped. The queue is believed"
                )
                log.warning("watermark-mended", gateway=gateway_id, text=text)
                event = event_row(
                    (gateway_id, epoch, had, seq, now_us), now_us, "watermark-mended", "warning",
                    element="dbmanager", subject=gateway_id, text=text, details={"had": had, "seq": seq},
                )  # fmt: skip
                add_events(connection, [event])

    def report(self, event: dict[str, Any]) -> None:
        """Store one event now."""
        with begin(self._engine) as connection:
            add_events(connection, [event])

    def newest_event(self, *kinds: str) -> str:
        """The kind of the newest event of these kinds; "" if there is none."""
        events = schema.events.c
        wanted = select(events.kind).where(events.kind.in_(kinds)).order_by(events.at_us.desc()).limit(1)
        with begin(self._engine) as connection:
            return str(connection.execute(wanted).scalar() or "")

    def skip(self, queue_seq: int, event: dict[str, Any]) -> None:
        """Pass a record that the database refuses, and say so in an event."""
        with begin(self._engine) as connection:
            if self._cursor(connection, self._sql_key) < queue_seq:
                add_events(connection, [event])
                for key in (self._sql_key, self._records_key):
                    self._raise(connection, key, queue_seq)

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
            self._raise(connection, self._parquet_key, finished.last_seq)
        return True


def mark_alive(engine: Engine, now_us: int) -> None:
    """Note in SQL that the server is up; ``record_outage`` of the next start compares.

    Raises:
        DatabaseUnavailable: retryable; a mark that is missing makes an outage longer by that time.
    """
    with begin(engine) as connection:
        row = {"key": ALIVE_KEY, "value": str(now_us)}
        upsert(connection, schema.meta, [row], set_=("value",))


def record_outage(connection: Connection, now_us: int) -> None:
    """At a start: record in ``outages`` since when the server was down, if it was for long."""
    table = schema.meta
    value = connection.execute(select(table.c.value).where(table.c.key == ALIVE_KEY)).scalar()
    if value is not None and now_us - int(value) > OUTAGE_US:
        upsert(connection, schema.outages, [{"from_us": int(value), "to_us": now_us}])
    upsert(connection, table, [{"key": ALIVE_KEY, "value": str(now_us)}], set_=("value",))


def forget_future(connection: Connection, now_us: int) -> int:
    """Take back what only a clock that was ahead can have written; returns by how many microseconds it was.

    Progress and last-seen times never fall by themselves, so they would say nothing until that time has come.
    How far such a gateway really got is not known; its next cut says it.
    """
    limit_us, ahead_us = now_us + AHEAD_US, 0
    for column, value_us in (
        # A gateway that got no further than a day ago is still in scope of what is judged now.
        (schema.progress.c.corrected_us, now_us - DAY_US),
        (schema.gateways.c.last_cut_us, now_us),
        (schema.gateways.c.last_seen_us, now_us),
        (schema.streams.c.first_seen_us, now_us),
        (schema.streams.c.last_us, now_us),
    ):
        newest_us = connection.execute(select(func.max(column))).scalar_one() or 0
        if newest_us > limit_us:
            ahead_us = max(ahead_us, newest_us - now_us)
            connection.execute(update(column.table).where(column > limit_us).values({column: value_us}))
    return ahead_us


class NamelessStreams:
    """Limits how many streams without names a gateway may have: rows of ids that were never announced.

    With ``volume_ownership = "open"`` their statistics count all the same (else ``ownership`` leaves them
    out). But ids are an agent's to choose. So a gateway has ``MAX_NAMELESS`` such
    rows at most; of more, the statistics stay out of SQL, and an event a day says so.

    Ids that were looked up once are remembered, so a window of known streams costs one search in memory; the
    database is asked about the others only. Not thread-safe: belongs to the thread that commits.

    Attributes:
        left_out: streams of windows that were left out, since the start.
    """

    def __init__(self) -> None:
        self._known: Int64s = np.zeros(0, dtype=np.int64)  # sorted
        self.left_out = 0

    def screen(self, connection: Connection, window: IngestWindow, now_us: int) -> None:
        """Leave those streams out of a window that are too many without a name."""
        ids, gateways = window.streams.ids, window.streams.gateways
        unknown = np.flatnonzero(~np.isin(ids, self._known, assume_unique=True))
        if not len(unknown):
            return
        stored = _known_of(connection, ids[unknown])
        new = unknown[~np.isin(ids[unknown], stored)]
        counts = _nameless_counts(connection) if len(new) else Counter()
        excess, over = [], Counter[str]()
        for number in new.tolist():
            counts[gateways[number]] += 1
            if counts[gateways[number]] > MAX_NAMELESS:
                excess.append(number)
                over[gateways[number]] += 1
        window.left_out = np.array(excess, dtype=np.int64)
        self._known = np.union1d(self._known, ids[np.setdiff1d(unknown, window.left_out)])
        self.left_out += len(excess)
        add_events(connection, [_left_out_event(name, count, now_us) for name, count in over.items()])


def _known_of(connection: Connection, ids: Int64s) -> Int64s:
    column = schema.streams.c.stream_id
    found: list[int] = []
    for chunk in chunks(ids.tolist()):
        found += connection.scalars(select(column).where(column.in_(chunk)))
    return np.array(found, dtype=np.int64)


def _nameless_counts(connection: Connection) -> Counter[str]:
    """Rows without names, by gateway_id."""
    table = schema.streams
    statement = select(table.c.gateway_id, func.count()).where(table.c.volume == "")
    rows = connection.execute(statement.group_by(table.c.gateway_id))
    return Counter({row[0]: row[1] for row in rows})


def _left_out_event(gateway_id: str, count: int, now_us: int) -> dict[str, object]:
    text = (
        f"gateway {gateway_id} sends statistics of streams that it never announced: {count} beyond the "
        f"{MAX_NAMELESS} that are kept were left out. Look at its agent"
    )
    log.warning("streams-left-out", gateway_id=gateway_id, count=count)
    return event_row(
        (gateway_id, "streams", now_us // DAY_US), now_us, "gateway-over-limit", "warning",
        element="gateway", subject=gateway_id, text=text,
        details={"gateway_id": gateway_id, "what": "streams without names", "refused": count},
    )  # fmt: skip
