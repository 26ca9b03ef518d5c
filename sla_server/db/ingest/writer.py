"""The one consumer of the ingest queue: SQL about once a second, Parquet files about once a minute.

Theory of operation. Each ``step`` reads the next records, stores their inventory and RECORD rows (cursor
``records``), adds their cuts to the window and hands them to the archive. When it is time the window goes to
SQL (cursor ``sql``); when the file under way is due, it is finished and its manifest row committed (cursor
``parquet``, ``filing``). Records leave the queue when all cursors have passed them.

It is time when the last transaction's duration has passed ``REST`` times, so that SQL takes a fifth of this
thread at most: with little load that is at once, with the largest every 15 s. While a backlog is read it is
every 15 s, too, and the transaction runs beside the reading (``under_way``). The longer a window, the fewer
rows are written for the same cuts. A window, and a file, also end when they hold back half of the queue, a
transaction under way and the next window three quarters: the queue's size is fixed, and it deletes nothing
that one of them still waits for.

What a crash can leave, and what happens then:

    before the SQL commit             nothing in SQL; the records come again
    after it, before deletion         the cursor passes them: skipped
    before the file's rename          an ``_`` file: swept; its records come again
    after it, before the commit       a file without a row: swept; its records come again
    after the commit                  the cursor passes them; the queue deletes late

The database may be away for minutes: ``run`` tries again with backoff, the queue holds, the intake goes on.
A value that the database refuses must not stop everybody: its record is put aside under ``refused/`` and
reported.

Thread: ``db-writer`` alone; ``wake`` and ``finish`` from any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.server import Problem
from sla_server.db.archive.filing import ArchiveWriter
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.errors import DatabaseDamaged, DatabaseRefused, DatabaseUnavailable
from sla_server.db.ingest.background_commit import COMMIT_S, BackgroundCommit
from sla_server.db.ingest.batch import DecodedBatch, decode_batch
from sla_server.db.ingest.dead_letter import put_aside
from sla_server.db.ingest.outage import Outage
from sla_server.db.ingest.queue import STEP_BYTES, DurableQueue, IngestRecord, QueueReader
from sla_server.db.ingest.transaction import CursorMoved, IngestStore, has_rows
from sla_server.db.retention import Retention

log = structlog.get_logger("db-writer")
REST: Final = 4
REST_LIMIT_NS: Final = 15_000_000_000  # slices are judged 30 s after their end at the latest
FINISH_NS: Final = 5_000_000_000  # of process.JOIN_S: the last transaction and file come after it
STEP_S: Final = 2 * COMMIT_S  # waits for the transaction under way, and makes some of its own
SPACING_S: Final = 0.1  # RECORDs are committed at once, but no more than ten times a second


class Writer:
    """The consumer; see the module.

    Args:
        queue: durable records.
        store: SQL.
        archive: Parquet.
        clock: for retry times.
        flush_interval_s: pause between steps.
        refused_dir: where records go that the database refuses.
        retention: removes old rows between transactions.
        probe: called at "sql-committed", "file-committed", "deleted"; crash tests die there.
    """

    def __init__(
        self,
        queue: DurableQueue,
        store: IngestStore,
        archive: CutFileWriter,
        clock: Clock,
        flush_interval_s: float,
        refused_dir: Path,
        retention: Retention,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._queue = queue
        self._store = store
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        self._refused_dir = refused_dir
        self._retention = retention
        self._probe = probe
        self._wake = threading.Event()
        self._finish = threading.Event()
        self._reader: QueueReader | None = None
        self._window = store.window()
        self._under_way = BackgroundCommit(store, clock)
        self._filing = ArchiveWriter(queue, store, archive, clock, self._settle, self._flush, probe)
        self._outage = Outage()
        self._held: list[IngestRecord] = []
        self._is_full = False
        self._rest_until_ns = self._backlog_until_ns = 0
        self._finish_by_ns = 0
        self._sql_seq = 0
        self._window_bytes = 0

    @property
    def sql_seq(self) -> int:
        """Every record up to this one is in SQL."""
        return self._sql_seq

    @property
    def parquet_seq(self) -> int:
        """Every record up to this one is in a file of the manifest."""
        return self._filing.parquet_seq

    def start(self, cursors: tuple[int, int]) -> None:
        """Begin behind the committed cursors (sql, parquet)."""
        self._sql_seq, self._filing.parquet_seq = cursors
        self._backlog_until_ns = self._clock.monotonic_ns() + REST_LIMIT_NS
        self._seek(self._sql_seq)

    def wake(self) -> None:
        """Something urgent is in the queue: step now."""
        self._wake.set()

    def finish(self) -> None:
        """Write what is in the queue, close the file under way, and let ``run`` return."""
        self._finish.set()
        self._wake.set()

    def run(self) -> None:
        """Step until told to finish; never ends because the database is away."""
        while True:
            watchdog.beat(STEP_S)
            finishing = self._finish.is_set()
            is_late = finishing and self._is_late()
            try:
                is_busy = self.step(final=finishing, more=not is_late)
                self._database_works()
            except DatabaseUnavailable as exc:
                self._database_away(exc)
                if finishing:
                    return
                self._finish.wait(self._outage.wait_s())
                continue
            if is_late:
                log.info("stopped-with-backlog", queue_bytes=self._queue.waiting_bytes)
                return
            if is_busy:
                continue
            if finishing:
                return
            self._wake.wait(self._flush_interval_s)
            self._wake.clear()
            self._finish.wait(min(SPACING_S, self._flush_interval_s))

    def _is_late(self) -> bool:
        """Whether finishing has taken ``FINISH_NS``: what the queue still holds waits for the next start."""
        now_ns = self._clock.monotonic_ns()
        self._finish_by_ns = self._finish_by_ns or now_ns + FINISH_NS
        return now_ns >= self._finish_by_ns

    @property
    def outage(self) -> Outage:
        """Whether the database works, and since when and why it does not."""
        return self._outage

    def problems(self) -> list[Problem]:
        """What cannot be written to just now. Thread: any."""
        return [problem for problem in (self._outage.problem, self._filing.problem) if problem is not None]

    def _database_away(self, error: DatabaseUnavailable) -> None:
        is_damage = isinstance(error, DatabaseDamaged)
        reason = str(error) if is_damage else error.reason
        self._outage.failed(self._clock.unix_us(), reason, is_damage=is_damage)
        self._store.disconnect()
        log.warning(
            "database-away",
            error=str(error),
            tries=self._outage.tries,
            queue_bytes=self._queue.waiting_bytes,
        )

    def _database_works(self) -> None:
        """After an outage: tell of it, in the database, where the queue's records now are, too."""
        if self._outage.is_on:
            self._settle()
            event = self._outage.event(self._clock.unix_us(), self._queue.waiting_bytes)
            self._store.report(event)
            self._outage.ended()
            log.info("database-back", text=event["text"])

    def step(self, *, final: bool = False, more: bool = True) -> bool:
        """One pass; returns whether to come again at once (what trickles in waits for the next interval).

        Args:
            final: when the queue is empty, commit what was read and close the file under way.
            more: with ``final``: take more from the queue first; else commit and close at once.

        Raises:
            DatabaseUnavailable: come again; nothing is lost or doubled.
            QueueCorrupt: the queue cannot be read.
        """
        if self._outage.is_on:
            self._to_sql()  # first: the window must not grow while the database is away
            self._settle()
        batch = self._take() if more else None
        self._filing.take(batch, self._read_seq)
        done = final and not (more and self._is_full)
        if self._window.last_seq and (done or self._window_is_full or self._is_rested):
            self._to_sql()
        if done or not self._is_full or self._under_way.is_over:
            self._settle()
        if self._under_way.window is None:
            self._filing.commit_if_stored(self._sql_seq)
        self._filing.finish_if_due(now=done, may_wait=self._is_full and not done)
        self._queue.delete_through(min(self._sql_seq, self.parquet_seq))
        self._probe("deleted")
        has_old = not final and not self._is_full and self._retention.run_if_due()
        return (
            self._filing.lags(self._read_seq)
            or has_old
            or self._is_full
            or (final and self._sql_seq < self._queue.synced_seq)
        )

    # -- SQL

    @property
    def _read_seq(self) -> int:
        """Newest record that is in SQL, on its way there, or in the window."""
        under_way = self._under_way.window
        return self._window.last_seq or (under_way.last_seq if under_way else self._sql_seq)

    @property
    def _window_is_full(self) -> bool:
        under_way, size_bytes = self._under_way, self._queue.size_bytes
        held_bytes = size_bytes // 2 if under_way.window is None else size_bytes * 3 // 4
        return self._window.is_full or self._window_bytes + under_way.size_bytes >= held_bytes

    @property
    def _is_rested(self) -> bool:
        until_ns = self._backlog_until_ns if self._is_full else self._rest_until_ns
        return self._under_way.window is None and self._clock.monotonic_ns() >= until_ns

    def _seek(self, after_seq: int) -> None:
        """Read on behind ``after_seq``, which is where SQL stands."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._queue.reader(after_seq)
        self._held = []
        self._window.reset()
        self._window_bytes = 0

    def _take(self) -> DecodedBatch | None:
        """Take the next records into the window; None if there are none."""
        if self._reader is None:
            raise AssertionError("start() comes first")
        # Held over a failed attempt: the reader has passed them.
        self._held = self._held or self._reader.read(STEP_BYTES)
        size_bytes = sum(len(record.payload) for record in self._held)
        self._is_full = size_bytes >= STEP_BYTES
        if not self._held:
            return None
        batch = decode_batch(self._held, self._read_seq)
        if has_rows(batch):
            self._settle()
            if not self._held:
                return None  # the queue is read again
        try:
            self._store.store_records(batch, self._held, self._queue.oldest_seq)
        except DatabaseRefused as exc:
            self._isolate(exc, self._held[-1].queue_seq)
            return None
        except CursorMoved as exc:
            self._start_again(exc)
            return None
        self._window.absorb(batch)
        self._window_bytes += size_bytes
        self._filing.read_bytes += size_bytes
        self._held = []
        return batch

    def _to_sql(self) -> None:
        """Begin to commit the window, and another one; between two, a file that waits for this."""
        self._settle()
        self._filing.commit_if_stored(self._sql_seq)
        if self._window.last_seq:  # not dropped meanwhile
            self._under_way.start(self._window, self._window_bytes, self._queue.oldest_seq)
            self._window, self._window_bytes = self._store.window(), 0

    def _flush(self) -> int:
        """All that was read is in SQL on return, unless it was refused or read again; up to where."""
        self._to_sql()
        self._settle()
        return self._sql_seq

    def _settle(self) -> None:
        """Wait for the transaction under way, if any, and go by how it ended."""
        if self._under_way.window is None:
            return
        last_seq = self._under_way.window.last_seq
        try:
            self._under_way.wait()
        except DatabaseRefused as exc:
            self._under_way.clear()
            self._isolate(exc, last_seq)
            return
        except CursorMoved as exc:
            self._under_way.clear()
            self._start_again(exc)
            return
        self._under_way.clear()
        self._sql_seq = last_seq
        ended_ns, took_ns = self._clock.monotonic_ns(), self._under_way.duration_ns
        self._rest_until_ns = ended_ns + min(REST * took_ns, REST_LIMIT_NS)
        self._backlog_until_ns = ended_ns + REST_LIMIT_NS
        self._probe("sql-committed")

    def _start_again(self, error: CursorMoved) -> None:
        log.error("cursor-moved", error=str(error), cursor=error.cursor, had=self._sql_seq)
        self._sql_seq = error.cursor
        self._seek(error.cursor)

    def _isolate(self, error: DatabaseRefused, last_seq: int) -> None:
        """Apply the records up to ``last_seq`` one by one; put those aside that the database refuses."""
        log.error("batch-refused", error=str(error), first=self._sql_seq + 1, last=last_seq)
        self._seek(self._sql_seq)
        reader = self._queue.reader(self._sql_seq)
        try:
            while self._sql_seq < last_seq:
                for record in reader.read(STEP_BYTES):
                    watchdog.beat(STEP_S)
                    try:
                        self._store.apply([record], self._sql_seq, self._queue.oldest_seq)
                    except DatabaseRefused as exc:
                        event = put_aside(self._refused_dir, record, exc.reason, self._clock.unix_us())
                        self._store.skip(record.queue_seq, event)
                    self._sql_seq = record.queue_seq
                    self._seek(self._sql_seq)
        except CursorMoved as exc:
            self._start_again(exc)
        finally:
            reader.close()
