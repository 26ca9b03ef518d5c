"""The one consumer of the ingest queue: SQL about once a second, Parquet files about once a minute.

Theory of operation. Each ``step`` reads the next records, puts their effect into SQL (cursor ``sql``),
hands their cuts to the archive, and, when the file under way is due, finishes it and commits its manifest
row (cursor ``parquet``). Records leave the queue when both cursors have passed them. The archive is usually
fed with what SQL just took; after a start, a full disk or a restored database it lags, and reads the queue
for itself until it has caught up.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.runtime.clock import Clock
from sla_server.db.archive import Archive, FinishedFile
from sla_server.db.batch import Batch, decode_batch
from sla_server.db.errors import ArchiveFailed, DatabaseRefused, DatabaseUnavailable
from sla_server.db.ingest import CursorMovedBack, IngestStore
from sla_server.db.ingest_queue import DurableQueue, QueueReader, Record
from sla_server.db.inventory import event_row

log = structlog.get_logger("db-writer")
STEP_BYTES: Final = 4 << 20  # a transaction of some 10,000 stream rows: a fraction of a second
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_LIMIT_S: Final = 15.0
ARCHIVE_RETRY_NS: Final = 10_000_000_000
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
        probe: called at "sql-committed", "file-committed", "deleted"; crash tests die there.
    """

    def __init__(
        self,
        queue: DurableQueue,
        store: IngestStore,
        archive: Archive,
        clock: Clock,
        flush_interval_s: float,
        refused_dir: Path,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._queue = queue
        self._store = store
        self._archive = archive
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        self._refused_dir = refused_dir
        self._probe = probe
        self._wake = threading.Event()
        self._finish = threading.Event()
        self._reader: QueueReader | None = None
        self._held: list[Record] = []
        self._is_full = False
        self._finished: FinishedFile | None = None
        self._archive_blocked_until_ns = 0
        self._sql_seq = 0
        self._parquet_seq = 0

    @property
    def sql_seq(self) -> int:
        """Every record up to this one is in SQL."""
        return self._sql_seq

    @property
    def parquet_seq(self) -> int:
        """Every record up to this one is in a file of the manifest."""
        return self._parquet_seq

    def start(self, cursors: tuple[int, int]) -> None:
        """Begin behind the committed cursors (sql, parquet)."""
        self._sql_seq, self._parquet_seq = cursors
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
        backoff_s = 0.0
        while True:
            finishing = self._finish.is_set()
            try:
                is_busy = self.step(final=finishing)
            except DatabaseUnavailable as exc:
                if finishing:
                    log.warning(
                        "stopped-while-database-away", error=str(exc), queue_bytes=self._queue.waiting_bytes
                    )
                    return
                backoff_s = min(backoff_s * 2, BACKOFF_LIMIT_S) if backoff_s else BACKOFF_FIRST_S
                log.warning(
                    "database-away", error=str(exc), retry_s=backoff_s, queue_bytes=self._queue.waiting_bytes
                )
                self._finish.wait(backoff_s)
                continue
            if backoff_s:
                log.info("database-back")
                backoff_s = 0.0
            if is_busy:
                continue
            if finishing:
                return
            self._wake.wait(self._flush_interval_s)
            self._wake.clear()
            self._finish.wait(min(SPACING_S, self._flush_interval_s))

    def step(self, *, final: bool = False) -> bool:
        """One pass; returns whether to come again at once (what trickles in waits for the next interval).

        Args:
            final: also close the file under way.

        Raises:
            DatabaseUnavailable: come again; nothing is lost or doubled.
            QueueCorrupt: the queue cannot be read.
        """
        batch = self._to_sql()
        self._to_archive(batch)
        if self._finished is None and (self._archive.is_due or (final and self._archive.last_seq)):
            self._guard_archive(self._finish_file)
        if self._finished is not None:
            self._commit_file(self._finished)
        self._queue.delete_through(min(self._sql_seq, self._parquet_seq))
        self._probe("deleted")
        lags = self._archived_seq < self._sql_seq and self._archive_is_usable
        return lags or self._is_full or (final and self._sql_seq < self._queue.synced_seq)

    # -- SQL

    def _seek(self, after_seq: int) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._queue.reader(after_seq)
        self._held = []

    def _to_sql(self) -> Batch | None:
        """Apply the next records; None if there are none."""
        if self._reader is None:
            raise AssertionError("start() comes first")
        # Held over a failed attempt: the reader has passed them.
        self._held = self._held or self._reader.read(STEP_BYTES)
        self._is_full = sum(len(record.payload) for record in self._held) >= STEP_BYTES
        if not self._held:
            return None
        try:
            batch = self._store.apply(self._held, self._sql_seq, self._queue.oldest_seq)
        except DatabaseRefused as exc:
            batch = self._one_by_one(self._held, exc)
        except CursorMovedBack as exc:
            log.error("database-forgot-commits", error=str(exc), cursor=exc.cursor, had=self._sql_seq)
            self._sql_seq = exc.cursor
            self._seek(exc.cursor)
            return None
        self._sql_seq = batch.last_seq
        self._held = []
        self._probe("sql-committed")
        return batch

    def _one_by_one(self, records: Sequence[Record], error: DatabaseRefused) -> Batch:
        """Find the records the database refuses, put them aside, and apply the others."""
        log.error("batch-refused", error=str(error), first=records[0].queue_seq, last=records[-1].queue_seq)
        for record in records:
            try:
                self._store.apply([record], self._sql_seq, self._queue.oldest_seq)
            except DatabaseRefused as exc:
                self._put_aside(record, exc)
        return decode_batch(records, self._sql_seq)

    def _put_aside(self, record: Record, error: DatabaseRefused) -> None:
        self._refused_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._refused_dir / f"{record.queue_seq:020d}.rec"
        path.write_bytes(record.payload)
        text = f"a record could not be stored and was put aside as {path.name}: {error.reason}"
        log.error("record-refused", queue_seq=record.queue_seq, error=error.reason)
        now_us = self._clock.unix_us()
        identity = (record.queue_seq, error.reason)
        event = event_row(
            identity, now_us, "data-refused", "critical", element="dbmanager", subject="ingest", text=text
        )
        self._store.skip(record.queue_seq, event)

    # -- Parquet

    @property
    def _archived_seq(self) -> int:
        """Newest record that stands in a file, or in the one under way."""
        finished_seq = self._finished.last_seq if self._finished is not None else self._parquet_seq
        return self._archive.last_seq or finished_seq

    @property
    def _archive_is_usable(self) -> bool:
        return self._clock.monotonic_ns() >= self._archive_blocked_until_ns

    def _to_archive(self, batch: Batch | None) -> None:
        """Hand over the batch if it follows directly, else let the archive catch up from the queue."""
        if not self._archive_is_usable or self._archived_seq >= self._sql_seq:
            return
        if batch is None or batch.first_seq != self._archived_seq + 1:
            batch = self._behind()
        if batch is not None:
            taken = batch
            self._guard_archive(lambda: self._archive.add(taken.first_seq, taken.last_seq, taken.cuts))

    def _behind(self) -> Batch | None:
        """The next records the archive lacks, as far as SQL has them."""
        reader = self._queue.reader(self._archived_seq)
        try:
            records = [record for record in reader.read(STEP_BYTES) if record.queue_seq <= self._sql_seq]
        finally:
            reader.close()
        return decode_batch(records, self._archived_seq) if records else None

    def _finish_file(self) -> None:
        self._finished = self._archive.finish()

    def _guard_archive(self, action: Callable[[], None]) -> None:
        """A full or broken disk stops the archive for a while, not the rest."""
        try:
            action()
        except ArchiveFailed as exc:
            log.error("archive-failed", error=str(exc))
            self._archive_blocked_until_ns = self._clock.monotonic_ns() + ARCHIVE_RETRY_NS
            now_us = self._clock.unix_us()
            event = event_row(
                (now_us,),
                now_us,
                "archive-failed",
                "critical",
                element="dbmanager",
                subject="parquet",
                text=str(exc),
            )
            self._store.report(event)

    def _commit_file(self, finished: FinishedFile) -> None:
        if self._store.commit_file(finished, self._queue.oldest_seq):
            self._parquet_seq = finished.last_seq
            self._finished = None
            self._probe("file-committed")
            return
        log.error("file-discarded", first=finished.first_seq, last=finished.last_seq)
        self._archive.abort()
        self._archive.discard(finished)
        self._finished = None
        self._parquet_seq = self._store.cursors()[1]
