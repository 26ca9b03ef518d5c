"""The one consumer of the ingest queue: SQL about once a second, Parquet files about once a minute.

Theory of operation. Each ``step`` reads the next records, stores their inventory and RECORD rows (cursor
``records``), adds their cuts to the window and hands them to the archive. When it is time the window goes to
SQL (cursor ``sql``); when the file under way is due, it is finished and its manifest row committed (cursor
``parquet``, ``archive.writer``). Records leave the queue when all cursors have passed them.

It is time when the last transaction's duration has passed ``REST`` times, so that SQL takes a fifth of this
thread at most: with little load that is at once, with the largest every 15 s. While a backlog is read it is
every 15 s, too, or after ``BACKLOG_REST`` times its duration, and the transaction runs beside the reading
(``BackgroundCommit``). The longer a window, the fewer rows are written for the same cuts. Rows that are read
meanwhile wait for it (``WaitingRows``). A window, and a file, also end when they hold back half of the
queue, a transaction under way and the next window three quarters: the queue's size is fixed, and it deletes
nothing that one of them still waits for.

What a crash can leave, and what happens then:

    before the SQL commit             nothing in SQL; the records come again
    after it, before deletion         the cursor passes them: skipped
    before the file's rename          an ``_`` file: swept; its records come again
    after it, before the commit       a file without a row: swept; its records come again
    after the commit                  the cursor passes them; the queue deletes late

The database may be away for minutes: ``run`` tries again with backoff, the queue holds, the intake goes on.
A value that the database refuses must not stop the ingest: its record is put aside under ``refused/`` and
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
from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.wire.messages.server import Problem
from sla_server.db.archive.writer import ArchiveWriter, CutFileWriter
from sla_server.db.errors import DatabaseDamaged, DatabaseRefused, DatabaseUnavailable
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, decode_batch, put_aside
from sla_server.db.ingest.outage import DatabaseOutage
from sla_server.db.ingest.queue import STEP_BYTES, CursorReader, IngestQueue, IngestRecord
from sla_server.db.ingest.transaction import CursorMoved, IngestStore, has_rows
from sla_server.db.ingest.waiting import WaitingRows
from sla_server.db.partitions import Retention

COMMIT_S: Final = 600.0  # far above what statement timeouts allow: a transaction has some twenty statements
HANGS_S: Final = watchdog.SLOW_S
"""A database that is stopped refuses nothing, and its own timeouts do not run: silence is the only sign."""
log = structlog.get_logger("db-writer")
REST: Final = 4
BACKLOG_REST: Final = 2  # a transaction beside the reading has a third of the time at most
REST_LIMIT_NS: Final = 15_000_000_000  # slices are judged 30 s after their end at the latest
FINISH_NS: Final = 5_000_000_000  # of process.JOIN_S: the last transaction and file come after it
STEP_S: Final = 2 * COMMIT_S  # waits for the transaction under way, and makes some of its own
REMEMBERED: Final = 512  # records: the cuts of some seconds, from at most 128 MB
SPACING_S: Final = 0.1  # RECORDs are committed at once, but no more than ten times a second


class BackgroundCommit:
    """A window on its way into SQL, beside the writer, which reads on meanwhile.

    A transaction of a whole fleet mostly waits for the database, so it has a thread of its own. One is under
    way at a time, and the writer uses the database for nothing else meanwhile: two transactions that change
    the same rows could lock each other out, and SQLite has one writer at a time.

    Thread: the writer's; ``db-commit`` runs between ``start`` and ``wait`` and alone uses the window then.

    Attributes:
        window: what is under way, or failed because the database was away; None if nothing is.
        size_bytes: of the records it came from.
        duration_ns: of the last transaction.
    """

    def __init__(self, store: IngestStore, clock: Clock, on_hang: Callable[[int], None]) -> None:
        self._store = store
        self._clock = clock
        self._on_hang = on_hang
        self._began_us = 0
        self._threads = ThreadGroup()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # until the commit itself has said that it is done
        self._is_reported = False  # ``wait`` has raised ``_error``
        self._oldest_seq = 0
        self.window: IngestWindow | None = None
        self.size_bytes = 0
        self.duration_ns = 0

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, window: IngestWindow, size_bytes: int, oldest_seq: int) -> None:
        """Begin to commit a window; nothing may be under way.

        Args:
            window: belongs to the other thread until ``wait``.
            size_bytes: of the records it came from.
            oldest_seq: as for ``IngestStore.commit``.
        """
        self.window, self.size_bytes, self._oldest_seq = window, size_bytes, oldest_seq
        self._begin()

    def wait(self) -> IngestWindow:
        """The window, committed; ``clear`` follows. After an error, calling this again tries it again.

        Raises:
            CursorMoved, DatabaseRefused, DatabaseUnavailable: as ``IngestStore.commit``.
            DatabaseUnavailable: also when the thread has not come as far as that.
        """
        assert self.window is not None  # the caller looked
        if self._is_reported:
            self._begin()
        if self._thread is not None:
            self._thread.join(HANGS_S)
            if self._thread.is_alive():
                self._on_hang(self._began_us)
        self._threads.join(COMMIT_S)
        if self._error is not None:
            self._is_reported = True
            raise self._error
        return self.window

    def clear(self) -> None:
        """Committed, or given up: its records will be read again."""
        self.window, self.size_bytes = None, 0
        self._error, self._is_reported = None, False

    def _begin(self) -> None:
        self._thread, self._is_reported, self._began_us = None, False, self._clock.unix_us()
        self._error = self._not_begun("the thread db-commit ended before its transaction did")
        try:
            self._thread = self._threads.start("db-commit", self._run, COMMIT_S)
        except (RuntimeError, MemoryError) as exc:
            self._error = self._not_begun(f"the thread db-commit cannot be started ({exc or 'no memory'})")

    def _not_begun(self, reason: str) -> DatabaseUnavailable:
        return DatabaseUnavailable(self._store.where, reason, "See that this machine has memory to spare")

    def _run(self) -> None:
        """Thread: ``db-commit``."""
        began_ns = self._clock.monotonic_ns()
        try:
            assert self.window is not None  # start() set it
            self._store.commit(self.window, self._oldest_seq)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, ``wait`` raises it
            self._error = exc
        else:
            self._error = None
        self.duration_ns = self._clock.monotonic_ns() - began_ns


class IngestWriter:
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
        outage: of the database; default: one of its own.
    """

    def __init__(
        self,
        queue: IngestQueue,
        store: IngestStore,
        archive: CutFileWriter,
        clock: Clock,
        flush_interval_s: float,
        refused_dir: Path,
        retention: Retention,
        probe: Callable[[str], None] = lambda _point: None,
        outage: DatabaseOutage | None = None,
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
        self._reader: CursorReader | None = None
        self._window = store.window()
        self._background_commit = BackgroundCommit(store, clock, self._on_hang)
        self._archive_writer = ArchiveWriter(
            queue, store, archive, clock, self._await_commit, self._flush, probe
        )
        self._outage = outage or DatabaseOutage()
        self._waiting = WaitingRows()
        self._unstored: list[IngestRecord] = []
        self._is_empty = False  # nothing was left to read when the queue was read last
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
        return self._archive_writer.parquet_seq

    def start(self, cursors: tuple[int, int]) -> None:
        """Begin behind the committed cursors (sql, parquet)."""
        self._sql_seq, self._archive_writer.parquet_seq = cursors
        self._backlog_until_ns = self._clock.monotonic_ns() + REST_LIMIT_NS
        self._remember()
        self._seek(self._sql_seq)

    def _remember(self) -> None:
        """Look at the newest cuts in SQL, if the queue still has them: the next are compared with them.

        Raises:
            DbError: the queue cannot be read.
        """
        window, before_seq = self._store.window(), max(self._sql_seq - REMEMBERED, self._queue.former_seq)
        reader = self._queue.reader(before_seq)
        while records := [record for record in reader.read(STEP_BYTES) if record.queue_seq <= self._sql_seq]:
            watchdog.beat(STEP_S)
            window.absorb(self._store.screened(decode_batch(records, before_seq)))
            before_seq = records[-1].queue_seq
        reader.close()

    def wake(self) -> None:
        """Something urgent is in the queue: step now."""
        self._wake.set()

    def finish(self) -> None:
        """Write what is in the queue, close the file under way, and let ``run`` return."""
        self._finish.set()
        self._wake.set()

    def run(self) -> None:
        """Step until ``finish``; never ends because the database is away."""
        while True:
            watchdog.beat(STEP_S)
            finishing = self._finish.is_set()
            is_late = finishing and self._is_late()
            try:
                is_busy = self.step(final=finishing, more=not is_late)
                self._on_recovery()
            except DatabaseUnavailable as exc:
                self._on_outage(exc)
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
    def outage(self) -> DatabaseOutage:
        """Whether the database works, and since when and why it does not."""
        return self._outage

    def problems(self) -> list[Problem]:
        """What cannot be written to just now. Thread: any."""
        found = (self._outage.problem, self._archive_writer.problem)
        return [problem for problem in found if problem is not None]

    def _on_outage(self, error: DatabaseUnavailable) -> None:
        is_damage = isinstance(error, DatabaseDamaged)
        reason = str(error) if is_damage else error.reason
        self._outage.failed(self._clock.unix_us(), reason, is_damage=is_damage)
        self._outage.announce(self._clock.unix_us())
        self._store.disconnect()
        log.warning(
            "database-away",
            error=str(error),
            tries=self._outage.tries,
            queue_bytes=self._queue.waiting_bytes,
        )

    def _on_hang(self, since_us: int) -> None:
        """The transaction under way gets no answer; it may yet, and is waited for."""
        reason = f"a transaction has had no answer for {HANGS_S:.0f} s"
        self._outage.failed(since_us, reason)
        self._outage.announce(self._clock.unix_us())
        log.warning("database-away", error=reason, queue_bytes=self._queue.waiting_bytes)

    def _on_recovery(self) -> None:
        """After an outage: report it, also as an event in the database, behind the queue's records."""
        if self._outage.is_on:
            self._await_commit()
            event = self._outage.event(self._clock.unix_us(), self._queue.waiting_bytes)
            self._store.report(event)
            if self._outage.is_announced:
                self._outage.raise_end(self._clock.unix_us())
            self._outage.ended()
            log.info("database-back", text=event["text"])

    def step(self, *, final: bool = False, more: bool = True) -> bool:
        """One pass; returns whether to come again at once (what trickles in waits for the next interval).

        Args:
            final: when the queue is empty, commit what was read and close the file under way.
            more: with ``final``: take more from the queue first; else commit and close at once.

        Raises:
            DatabaseUnavailable: come again; nothing is lost or doubled.
            DbError: the queue cannot be read.
        """
        if self._outage.is_on:
            self._to_sql()  # first: the window must not grow while the database is away
            self._await_commit()
        batch = self._take() if more else None
        self._archive_writer.take(batch, self._read_seq)
        done = final and not (more and self._is_full)
        if self._window.last_seq and (done or self._window_is_full or self._is_rested):
            self._to_sql()
        if done or not self._is_full or self._background_commit.is_over:
            self._await_commit()
        if self._background_commit.window is None:
            self._archive_writer.commit_if_stored(self._sql_seq)
        self._archive_writer.finish_if_due(now=done, may_wait=self._is_full and not done)
        self._queue.delete_through(min(self._sql_seq, self.parquet_seq))
        self._probe("deleted")
        has_old = not final and not self._is_full and self._delete_old()
        return (
            self._archive_writer.lags(self._read_seq)
            or has_old
            or self._is_full
            or (final and not self._is_empty)
        )

    def _delete_old(self) -> bool:
        """Remove old rows, if it is time for it; returns whether there is more to do now."""
        if self._retention.is_due:
            self._store.forget_histograms()
        return self._retention.run_if_due()

    # -- SQL

    @property
    def _read_seq(self) -> int:
        """Newest record that is in SQL, on its way there, or in the window."""
        commit = self._background_commit.window
        return self._window.last_seq or (commit.last_seq if commit else self._sql_seq)

    @property
    def _window_is_full(self) -> bool:
        commit, size_bytes = self._background_commit, self._queue.size_bytes
        limit_bytes = size_bytes // 2 if commit.window is None else size_bytes * 3 // 4
        return self._window.is_full or self._window_bytes + commit.size_bytes >= limit_bytes

    @property
    def _is_rested(self) -> bool:
        until_ns = self._backlog_until_ns if self._is_full else self._rest_until_ns
        return self._background_commit.window is None and self._clock.monotonic_ns() >= until_ns

    def _seek(self, after_seq: int) -> None:
        """Read on behind ``after_seq``, the newest record in SQL."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._queue.reader(after_seq)
        self._waiting.clear()
        self._unstored = []
        self._is_empty = False
        self._window.reset()
        self._window_bytes = 0

    def _take(self) -> DecodedBatch | None:
        """Take the next records into the window; None if there are none."""
        if self._reader is None:
            raise AssertionError("start() comes first")
        # Held over a failed attempt: the reader has passed them.
        self._unstored = self._unstored or self._reader.read(STEP_BYTES)
        size_bytes = sum(len(record.payload) for record in self._unstored)
        self._is_full = size_bytes >= STEP_BYTES
        self._is_empty = not self._unstored
        if self._is_empty:
            return None
        batch = decode_batch(self._unstored, self._read_seq)
        if has_rows(batch) and not self._put_rows(batch):
            return None  # the queue is read again
        batch = self._store.screened(batch)
        self._window.absorb(batch)
        self._window_bytes += size_bytes
        self._archive_writer.read_bytes += size_bytes
        self._unstored = []
        return batch

    def _put_rows(self, batch: DecodedBatch) -> bool:
        """Store the rows of the batch just read, or let them wait; returns whether it still counts."""
        may_wait = self._waiting.has_room and self._store.may_wait(batch)
        if may_wait and not self._background_commit.is_over:
            self._waiting.add(self._store.unstored_rows(batch, self._unstored))
            self._probe("rows-waiting")
            return True
        self._await_commit()
        if not self._unstored:
            return False
        try:
            self._store.store_records(batch, self._unstored, self._queue.oldest_seq)
        except DatabaseRefused as exc:
            self._isolate(exc, self._unstored[-1].queue_seq)
            return False
        except CursorMoved as exc:
            self._start_again(exc)
            return False
        return True

    def _to_sql(self) -> None:
        """Begin to commit the window, and another one; between two, a file that waits for this."""
        self._await_commit()
        self._archive_writer.commit_if_stored(self._sql_seq)
        if self._window.last_seq:  # not dropped meanwhile
            self._background_commit.start(self._window, self._window_bytes, self._queue.oldest_seq)
            self._window, self._window_bytes = self._store.window(), 0

    def _flush(self) -> int:
        """All that was read is in SQL on return, unless it was refused or read again; up to where."""
        self._to_sql()
        self._await_commit()
        return self._sql_seq

    def _await_commit(self) -> None:
        """Wait for the transaction under way, if any, go by how it ended, and store what waits for it."""
        if self._background_commit.window is not None:
            self._end_commit(self._background_commit.window)
        if self._waiting:
            self._store_waiting()

    def _end_commit(self, window: IngestWindow) -> None:
        last_seq = window.last_seq
        try:
            self._background_commit.wait()
        except (DatabaseRefused, CursorMoved) as exc:
            self._background_commit.clear()
            self._window.reset()
            window.reset()
            if isinstance(exc, CursorMoved):
                self._start_again(exc)
            else:
                self._isolate(exc, last_seq)
            return
        self._background_commit.clear()
        self._sql_seq = last_seq
        ended_ns, took_ns = self._clock.monotonic_ns(), self._background_commit.duration_ns
        self._rest_until_ns = ended_ns + min(REST * took_ns, REST_LIMIT_NS)
        self._backlog_until_ns = ended_ns + max(BACKLOG_REST * took_ns, REST_LIMIT_NS)
        self._probe("sql-committed")

    def _store_waiting(self) -> None:
        """Store the rows that were read during the transaction before."""
        last_seq = self._waiting.last_seq
        try:
            self._store.store_waiting(self._waiting.parts, self._queue.oldest_seq)
        except DatabaseRefused as exc:
            self._isolate(exc, last_seq)
        except CursorMoved as exc:
            self._start_again(exc)
        else:
            self._waiting.clear()
            self._probe("rows-committed")

    def _start_again(self, error: CursorMoved) -> None:
        log.error("cursor-moved", error=str(error), cursor=error.cursor, had=self._sql_seq)
        self._sql_seq = error.cursor
        self._seek(error.cursor)
        self._store.begin_again()
        self._remember()

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
