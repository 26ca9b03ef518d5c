"""The writer's other half: the cuts of the ingest queue into Parquet files, under a cursor of their own.

Theory of operation. ``CutFileWriter`` holds the file under way: written aside, synced, renamed. The name of a
file under way begins with ``_``: readers of directories (Spark) ignore it. A file counts only through its
manifest row. Later the files are merged and given up by ``archive.upkeep``.

``ArchiveWriter`` is usually fed with what the writer just read; after a start, a full disk or a restored
database it lags, and reads the queue for itself until it has caught up. When the file under way is due (its
size, its age, or it holds back half of the queue) it is finished, and its manifest row and the cursor
``parquet`` are committed in one transaction. A disk that is full or broken stops this half for ``RETRY_NS``,
is reported as a problem and as an event ``archive-failed``, and stops nothing else: the file under way is
given up, and its cuts are read from the queue again. The first file after that is event ``archive-written``.

State: the file under way, at most one finished file that waits for its commit, the cursor. What a crash can
leave: an ``_`` file (swept at the next start), or a whole file without a manifest row (swept too: its cuts
are still in the ingest queue, because the cursor that frees them moves in the transaction that writes the
row); ``ingest.writer`` lists the moments.

Thread: the writer's; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.server import Problem
from sla_server.db.archive.manifest import CUTS, FinishedFile
from sla_server.db.archive.store import FileStore, LocalFiles, sweep
from sla_server.db.errors import ArchiveFailed
from sla_server.db.ingest.batch import CutColumns, DecodedBatch, IngestedCut, decode_batch
from sla_server.db.ingest.queue import STEP_BYTES, IngestQueue
from sla_server.db.ingest.records import event_row
from sla_server.db.ingest.transaction import IngestStore

if TYPE_CHECKING:  # imported with the first cut: a server without gateways needs no Arrow, which takes 20 MB
    from sla_server.db.archive.files import FileWriter

FOREIGN_ORPHAN_AGE_S: Final = 86_400  # files of another queue: its manager may be about to commit them
log = structlog.get_logger("db-writer")
FAILED: Final = "archive-failed"
WRITTEN: Final = "archive-written"
RETRY_NS: Final = 10_000_000_000


class CutFileWriter:
    """The file under way.

    Args:
        directory: a store of files, or the path of a local one; manifest paths are relative to it.
        queue_id: part of file names, so that several servers may share the directory.
        max_bytes: close a file at this size.
        max_s: close a file at this age.
        clock: for age and creation time.
        probe: called at "file-written", "renamed"; crash tests die there.
    """

    def __init__(
        self,
        directory: Path | FileStore,
        queue_id: str,
        max_bytes: int,
        max_s: float,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._files: FileStore = LocalFiles(directory) if isinstance(directory, Path) else directory
        self._queue_id = queue_id
        self._max_bytes = max_bytes
        self._max_ns = round(max_s * 1e9)
        self._clock = clock
        self._probe = probe
        self._reset()

    def _reset(self) -> None:
        self._first_seq = self._last_seq = 0
        self._opened_ns = 0
        self._cuts = 0
        self._min_us = self._max_us = 0
        self._day = ""
        self._stack = ExitStack()
        self._writer: FileWriter | None = None

    @property
    def last_seq(self) -> int:
        """queue_seq of the newest record in the file under way, 0 if there is none."""
        return self._last_seq

    @property
    def is_due(self) -> bool:
        """Whether the file under way has reached its size or its age."""
        if not self._first_seq:
            return False
        size_bytes = self._writer.bytes if self._writer is not None else 0
        return size_bytes >= self._max_bytes or self._clock.monotonic_ns() - self._opened_ns >= self._max_ns

    def add(
        self, first_seq: int, last_seq: int, items: Sequence[IngestedCut], columns: CutColumns | None = None
    ) -> None:
        """Take the cuts of the records ``first_seq`` to ``last_seq``, which follow the former ones directly.

        ``columns`` are those of the cuts, if they are joined already.

        Raises:
            ArchiveFailed: disk full or broken; the file under way was given up.
        """
        if not self._first_seq:
            self._first_seq, self._opened_ns = first_seq, self._clock.monotonic_ns()
        self._last_seq = last_seq
        if not items:
            return
        starts = [item.start_us for item in items]
        self._min_us = min(self._min_us, *starts) if self._cuts else min(starts)
        self._max_us = max(self._max_us, *(item.end_us for item in items))
        self._cuts += len(items)
        from sla_server.db.archive.files import cut_table

        try:
            self._open_file().write(cut_table(items, columns))
        except ArchiveFailed:
            self.abort()
            raise

    def finish(self) -> FinishedFile:
        """Close the file under way and give it its name.

        Durability: file and name are on disk on return; it counts once its row is committed.

        Raises:
            ArchiveFailed: the file was given up.
        """
        first_seq, last_seq, writer = self._first_seq, self._last_seq, self._writer
        if writer is None:
            self._reset()
            return FinishedFile(first_seq, last_seq, None)
        name = f"cuts/{self._day}/{self._queue_id}-{first_seq}-{last_seq}.parquet"
        try:
            now_us = self._clock.unix_us()
            row = writer.finish(CUTS, now_us, self._min_us, self._max_us, self._cuts, name=name)
        except ArchiveFailed:
            self.abort()
            raise
        self._probe("renamed")
        self._reset()
        return FinishedFile(first_seq, last_seq, asdict(row))

    def abort(self) -> None:
        """Give up the file under way; nothing is lost, the queue has its cuts."""
        self._stack.close()
        self._reset()

    def discard(self, finished: FinishedFile) -> None:
        """Remove a finished file that will not be committed."""
        if finished.row is not None:
            self._files.remove(finished.row["path"])

    def sweep(self, kept: set[str], now_us: int) -> Sequence[str]:
        """Remove what crashes left: files under way, and files without a manifest row. Returns their paths.

        Args:
            kept: relative paths in the manifest.
            now_us: wall clock; files of other queues are removed only when a day old.
        """
        return sweep(self._files, self._queue_id, kept, now_us / 1e6 - FOREIGN_ORPHAN_AGE_S)

    def _open_file(self) -> FileWriter:
        """The writer, opened at the first cut."""
        from sla_server.db.archive.files import CUT_SCHEMA, FileWriter

        if self._writer is None:
            # The day of writing; the cuts in it may be older (backlog): the manifest has their times.
            self._day = datetime.fromtimestamp(self._clock.unix_us() // 1_000_000, UTC).date().isoformat()
            name = f"cuts/{self._day}/{self._queue_id}-{self._first_seq}.parquet"
            writer = FileWriter(self._files, name, CUT_SCHEMA, self._probe)
            self._writer = self._stack.enter_context(writer)
        return self._writer


class ArchiveWriter:
    """See the module.

    Args:
        queue: durable records.
        store: for manifest rows, the cursor and events.
        archive: the file under way.
        clock: for the pause after a failure.
        await_commit: waits until no other transaction is under way; called before each of ours.
        flush: brings to SQL all that was read. A file counts after its cuts are in SQL, so that files never
            have cuts that SQL lacks (a backup could not know what they are).
        probe: called at "file-committed".

    Attributes:
        parquet_seq: every record up to this one is in a file of the manifest. read_bytes: what the writer has
        read since the last file ended. problem: why the archive makes no progress; None while it works.
        Replaced whole: any thread may read it.
    """

    def __init__(
        self,
        queue: IngestQueue,
        store: IngestStore,
        archive: CutFileWriter,
        clock: Clock,
        await_commit: Callable[[], None],
        flush: Callable[[], int],
        probe: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._store = store
        self._archive = archive
        self._clock = clock
        self._await_commit = await_commit
        self._flush = flush
        self._probe = probe
        self._finished: FinishedFile | None = None
        self._blocked_until_ns = 0
        self._is_announced: bool | None = None  # that no file can be written; None: not read yet
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
        """Newest record that is in a file, or in the one under way."""
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
        return self._store.screened(decode_batch(records, self._archived_seq)) if records else None

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
            self._await_commit()
            self._announce(is_failing=True, text=text)

    def _announce(self, *, is_failing: bool, text: str) -> None:
        """An event when the trouble begins, and one when it ends, also that of a process before."""
        if self._is_announced is None:
            self._is_announced = self._store.newest_event(FAILED, WRITTEN) == FAILED
        if is_failing == self._is_announced:
            return
        kind, severity = (FAILED, "critical") if is_failing else (WRITTEN, "info")
        now_us = self._clock.unix_us()
        self._store.report(
            event_row(
                (now_us, kind), now_us, kind, severity, element="dbmanager", subject="parquet", text=text
            )
        )
        self._is_announced = is_failing

    def _commit(self, finished: FinishedFile) -> None:
        if self._store.commit_file(finished, self._queue.oldest_seq):
            self.parquet_seq = finished.last_seq
            self._finished = None
            if self._is_usable:
                self.problem = None
                self._announce(is_failing=False, text="Parquet files are written again")
            self._probe("file-committed")
            return
        log.error("file-discarded", first=finished.first_seq, last=finished.last_seq)
        self._archive.abort()
        self._archive.discard(finished)
        self._finished = None
        self.parquet_seq = self._store.cursors()[1]
