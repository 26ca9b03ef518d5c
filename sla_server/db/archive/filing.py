"""The writer's other half: the cuts of the ingest queue into Parquet files, under a cursor of their own.

Theory of operation. The archive is usually fed with what the writer just read; after a start, a full disk or
a restored database it lags, and reads the queue for itself until it has caught up. When the file under way is
due (its size, its age, or it holds back half of the queue) it is finished, and its manifest row and the
cursor ``parquet`` are committed in one transaction. A disk that is full or broken stops this half for
``RETRY_NS``, is told as a problem and as an event ``archive-failed``, and stops nothing else.

State: the file under way (``archive``), at most one finished file that waits for its commit, the cursor.
What a crash can leave stands in ``writer.py``. Thread: the writer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.server import Problem
from sla_server.db.archive.writer import CutFileWriter, FinishedFile
from sla_server.db.errors import ArchiveFailed
from sla_server.db.ingest.batch import DecodedBatch, decode_batch
from sla_server.db.ingest.inventory import event_row
from sla_server.db.ingest.queue import STEP_BYTES, DurableQueue
from sla_server.db.ingest.transaction import IngestStore

log = structlog.get_logger("db-writer")
RETRY_NS: Final = 10_000_000_000


class ArchiveWriter:
    """See the module.

    Args:
        queue: durable records.
        store: for manifest rows, the cursor and events.
        archive: the file under way.
        clock: for the pause after a failure.
        settle: waits until no other transaction is under way; called before each of ours.
        flush: brings to SQL all that was read. A file counts after its cuts are in SQL, so that files never
            have cuts that SQL lacks (a backup could not tell what they are).
        probe: called at "file-committed".

    Attributes:
        parquet_seq: every record up to this one is in a file of the manifest.
        read_bytes: what the writer has read since the last file ended.
        problem: why the archive stands still; None while it works. Replaced whole: any thread may read it.
    """

    def __init__(
        self,
        queue: DurableQueue,
        store: IngestStore,
        archive: CutFileWriter,
        clock: Clock,
        settle: Callable[[], None],
        flush: Callable[[], int],
        probe: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._store = store
        self._archive = archive
        self._clock = clock
        self._settle = settle
        self._flush = flush
        self._probe = probe
        self._finished: FinishedFile | None = None
        self._blocked_until_ns = 0
        self._finished_bytes = 0
        self.parquet_seq = 0
        self.read_bytes = 0
        self.problem: Problem | None = None

    def lags(self, read_seq: int) -> bool:
        """Whether there is something to catch up with, up to ``read_seq``, and a disk to write it to."""
        return self._archived_seq < read_seq and self._is_usable

    def take(self, batch: DecodedBatch | None, read_seq: int) -> None:
        """Hand over the batch if it follows directly, else let the archive catch up from the queue.

        Args:
            batch: what was just read, if anything.
            read_seq: the newest record read; the archive goes no further.
        """
        if not self.lags(read_seq):
            return
        if batch is None or batch.first_seq != self._archived_seq + 1:
            batch = self._behind(read_seq)
        if batch is not None:
            taken = batch
            self._guard(lambda: self._archive.add(taken.first_seq, taken.last_seq, taken.cuts, taken.columns))

    def finish_if_due(self, *, now: bool, may_wait: bool) -> None:
        """Finish the file under way when it is due, or ``now``, and commit it.

        ``may_wait``: there is a backlog; ``commit_if_stored`` commits it, unless another one is due before.

        Raises:
            DatabaseUnavailable: it is finished; the next call commits it.
        """
        is_due = now or self._archive.is_due or self.read_bytes >= self._queue.size_bytes // 2
        may_wait = may_wait and self._finished_bytes + self.read_bytes < self._queue.size_bytes * 5 // 8
        if self._finished is not None and (is_due or not may_wait):
            self._flush_and_commit(self._finished)  # two files never wait
        if self._finished is None and self._archive.last_seq and is_due:
            self._guard(self._finish)
        if self._finished is not None and not may_wait:
            self._flush_and_commit(self._finished)

    def commit_if_stored(self, sql_seq: int) -> None:
        """Commit the finished file once SQL has all of its cuts; no transaction may be under way.

        Bringing them to SQL for the file's sake would commit half a window and wait for it: with 64,000
        streams a quarter of what the writer can store.

        Raises:
            DatabaseUnavailable: it is finished; the next call commits it.
        """
        if self._finished is not None and self._finished.last_seq <= sql_seq:
            self._commit(self._finished)

    def _flush_and_commit(self, finished: FinishedFile) -> None:
        sql_seq = self._flush()
        if self._finished is finished and finished.last_seq <= sql_seq:
            self._commit(finished)

    @property
    def _archived_seq(self) -> int:
        """Newest record that stands in a file, or in the one under way."""
        finished_seq = self._finished.last_seq if self._finished is not None else self.parquet_seq
        return self._archive.last_seq or finished_seq

    @property
    def _is_usable(self) -> bool:
        return self._clock.monotonic_ns() >= self._blocked_until_ns

    def _behind(self, read_seq: int) -> DecodedBatch | None:
        """The next records the archive lacks, as far as they were read."""
        reader = self._queue.reader(self._archived_seq)
        try:
            records = [record for record in reader.read(STEP_BYTES) if record.queue_seq <= read_seq]
        finally:
            reader.close()
        return decode_batch(records, self._archived_seq) if records else None

    def _finish(self) -> None:
        self._finished = self._archive.finish()
        self._finished_bytes, self.read_bytes = self.read_bytes, 0

    def _guard(self, action: Callable[[], None]) -> None:
        """A full or broken disk stops the archive for a while, not the rest."""
        try:
            action()
        except ArchiveFailed as exc:
            now_us, text = self._clock.unix_us(), str(exc)
            self.problem = self.problem or Problem("parquet", now_us, text)
            log.error("archive-failed", error=text)
            self._blocked_until_ns = self._clock.monotonic_ns() + RETRY_NS
            event = event_row(
                (now_us,), now_us, "archive-failed", "critical",
                element="dbmanager", subject="parquet", text=text,
            )  # fmt: skip
            self._settle()
            self._store.report(event)

    def _commit(self, finished: FinishedFile) -> None:
        if self._store.commit_file(finished, self._queue.oldest_seq):
            self.parquet_seq = finished.last_seq
            self._finished = None
            if self._is_usable:
                self.problem = None
            self._probe("file-committed")
            return
        log.error("file-discarded", first=finished.first_seq, last=finished.last_seq)
        self._archive.abort()
        self._archive.discard(finished)
        self._finished = None
        self.parquet_seq = self._store.cursors()[1]
