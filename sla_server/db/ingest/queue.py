"""The ingest queue: records on disk, synced before they are spoken of, until the database has them.

A disk queue (``pmdaemon.diskqueue``) of configured size in a directory of its own: ``ingest`` and
``ingest.index``. One appends, one reads with a cursor and deletes; nothing is locked. Errors of the disk
queue become those of the database manager here. Numbers rise but, after a crash, not without holes:
nothing here or in the writer relies on that.

Back-pressure: ``has_room`` says whether a round's batch would fit wherever the ring's end falls. The intake
asks before it takes anything from a mailbox, so ``append_many`` never meets a full queue.

Deletion is late (``keep_bytes``): a database restored from a backup finds the newest records again.

Thread: one appends, one reads and deletes; ``fullness_ratio`` any. Source: DESIGN.md 4.3, 4.4; Q3, Q8.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import structlog

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue import errors as disk
from pmdaemon.diskqueue.format import (
    DATA_START,
    ENTRY_BYTES,
    INDEX_START,
    RECORD_OVERHEAD_BYTES,
    Found,
    check,
    content,
    read_file_header,
    scan,
)
from pmdaemon.runtime.files import make_directory
from pmdaemon.wire.messages.server import RecordRows
from sla_server.db.errors import (
    DbError,
    IngestQueuePoisoned,
    NoRoomForQueue,
    OldQueueFiles,
)

log = structlog.get_logger("ingest-queue")
BYTES_PER_ENTRY: Final = 2048  # a record is a mailbox batch: rarely smaller
KEEP_BYTES: Final = 16 << 20
NOTHING: Final = RecordRows([], None, "dbmanager").encode()
STEP_BYTES: Final = 4 << 20  # read at a time: some 10,000 stream rows to decode


class IngestRecord(NamedTuple):
    """One record as read back."""

    queue_seq: int
    payload: bytes


def _no_probe(_point: str) -> None:
    """Production's probe: nothing."""


def _entries(data_bytes: int) -> int:
    return max(1024, data_bytes // BYTES_PER_ENTRY)


def check_room(directory: Path, data_bytes: int) -> None:
    """See to it that a queue that is still to be made fits, before processes are started that need it.

    Of one that is there nothing is asked: its room is reserved, and a change of its size waits for room.

    Raises:
        NoRoomForQueue: it does not fit.
    """
    path = directory / "ingest"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.stat().st_size:
            return
    there = next(parent for parent in path.absolute().parents if parent.exists())
    disk_of = os.statvfs(there)
    if not disk_of.f_blocks:  # /proc and the like hold no files: what makes the directory says so
        return
    free_blocks = disk_of.f_bavail if os.geteuid() else disk_of.f_bfree
    needed_bytes = DATA_START + data_bytes + INDEX_START + _entries(data_bytes) * ENTRY_BYTES
    if (free_bytes := free_blocks * disk_of.f_frsize) < needed_bytes:
        raise NoRoomForQueue(path, needed_bytes, free_bytes)


def read_beside(directory: Path, bounds: Callable[[str], tuple[int, int]]) -> list[IngestRecord]:
    """Records of the queue in ``directory``, whether or not another process has it open; changes nothing.

    A record is whole or not there: its checksum covers number, place and data. Deleted ones stay readable
    until they are written over, oldest first.

    Args:
        directory: the queue's; without a queue in it there are no records.
        bounds: from the queue's id to (after_seq, last_seq): wanted are records behind the one up to the
            other.

    Raises:
        DbError: it is no queue, or the first ones wanted were written over meanwhile.
    """
    path = directory / "ingest"
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return []
    with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        header, _copies = read_file_header(view)
        if header is None:
            raise _damaged(path, 0, "its header is damaged")
        after_seq, last_seq = bounds(header.queue_id.hex())
        if after_seq >= last_seq:
            return []
        with view[DATA_START : DATA_START + header.ring_bytes] as ring:
            found = scan(ring, header.seed).intact
            if not len(found) or int(found["seq"].min()) > after_seq + 1:
                raise _written_over(path, after_seq + 1)
            found = found[np.argsort(found["seq"])]
            wanted = found[(found["seq"] > after_seq) & (found["seq"] <= last_seq)]
            records = [_copied(path, ring, header.seed, record) for record in wanted.tolist()]
            # The oldest are written over first: while this one is there, all wanted ones were seen.
            (edge,) = found[found["seq"] <= after_seq + 1][-1:].tolist()
            if check(ring, header.seed, edge[3]) != edge:
                raise _written_over(path, after_seq + 1)
            return records


def _copied(path: Path, ring: memoryview, seed: int, record: Found) -> IngestRecord:
    """A record that was intact, and still is once it has been copied: its owner goes on meanwhile."""
    _destination, payload = content(ring, record)
    if check(ring, seed, record[3]) != record:
        raise _written_over(path, record[2])
    return IngestRecord(record[2], payload)


def _written_over(path: Path, queue_seq: int) -> DbError:
    return DbError(f"record {queue_seq} of {path} was written over. Take another backup")


class IngestQueue:
    """The queue; see the module.

    Args:
        directory: made if missing, with mode 0700.
        data_bytes: size of the data file; an existing one becomes smaller only once its records fit.
        probe: called at "appended" (reserved, not synced) and "synced"; crash tests kill the process there.
        keep_bytes: deletion waits until more is in use; at most a quarter of ``data_bytes``.

    Attributes:
        refused: records that are read as ones without rows or cuts: behind the one, up to the other; see
            ``db.fence``.
        former_seq: what follows this record in the queue follows it nowhere else: another server has written
            in between; 0: none has.

    Raises:
        OldQueueFiles: the directory holds the plain files of an earlier version.
        pmdaemon.diskqueue.errors.DiskQueueError: it cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        data_bytes: int = 256 << 20,
        probe: Callable[[str], None] = _no_probe,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        make_directory(directory, 0o700)
        if old := sorted(directory.glob("*.seg")):
            raise OldQueueFiles(directory, len(old))
        self._path = directory / "ingest"
        self._probe = probe
        self.refused: Sequence[tuple[int, int]] = ()
        self.former_seq = 0
        self._keep_bytes = min(keep_bytes, data_bytes // 4)
        settings = QueueSettings(data_path=self._path, data_bytes=data_bytes, entries=_entries(data_bytes))
        self._queue = DiskQueue(settings)
        if self._queue.ring_bytes != data_bytes:
            log.warning("queue-keeps-its-size", bytes=self._queue.ring_bytes, configured=data_bytes)

    @property
    def queue_id(self) -> str:
        """16 hex digits, drawn when the queue was made."""
        return self._queue.queue_id

    @property
    def damage(self) -> tuple[int, int, int]:
        """What the start found damaged: places, bytes, and records as far as they are known (0 of each)."""
        extents = self._queue.report.extents
        return len(extents), sum(item.size_bytes for item in extents), sum(item.records for item in extents)

    @property
    def synced_seq(self) -> int:
        """Newest durable record, 0 for none ever."""
        return self._queue.durable_seq

    @property
    def oldest_seq(self) -> int:
        """Oldest record still held; synced_seq + 1 when there is none."""
        return self._queue.oldest_seq

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the data file in use."""
        return self._queue.used_bytes

    @property
    def size_bytes(self) -> int:
        """Size of the data file."""
        return self._queue.ring_bytes

    @property
    def fullness_ratio(self) -> float:
        """Share of the space, or of the entries if that is more, in use."""
        return self._queue.fullness_ratio

    def has_room(self, size_bytes: int, records: int) -> bool:
        """Whether so many records of so many bytes together can be appended now.

        Twice the bytes are asked for: the free space may lie in two pieces, one of them then is enough.
        """
        return self._queue.has_room(2 * (size_bytes + records * RECORD_OVERHEAD_BYTES), records)

    def append_many(self, payloads: Sequence[bytes]) -> int:
        """Append all payloads under one sync and return the last queue_seq.

        Durability: everything is on disk on return, or nothing may be assumed.

        Raises:
            QueuePoisoned: this or an earlier write or sync failed.
            pmdaemon.diskqueue.errors.QueueFull: no room (ask ``has_room`` before); nothing was appended.
        """
        if not payloads:
            return self.synced_seq
        try:
            request = self._queue.submit(payloads, wake_helper=False)
            self._probe("appended")
            request.wait()
        except (disk.QueuePoisoned, disk.QueueClosed) as exc:
            raise IngestQueuePoisoned(self._path, str(exc)) from exc
        self._probe("synced")
        return request.last_seq

    def go_on_behind(self, cursor: int) -> None:
        """Number the next records behind ``cursor``, the newest number that the database has consumed.

        A queue cannot lag behind its cursor, unless its files were restored from an older copy. Numbers up
        to the cursor, given again, would be confirmed to the gateways and never read.
        """
        newest = self.synced_seq
        if self._queue.leave_unused(cursor):
            log.error("queue-older-than-database", path=str(self._path), newest=newest, consumed=cursor)

    def reader(self, after_seq: int) -> CursorReader:
        """A reader that begins behind ``after_seq``, or at the oldest record if that is newer."""
        return CursorReader(self._queue, self._path, after_seq, self.refused)

    def delete_through(self, queue_seq: int) -> None:
        """Records up to ``queue_seq`` are not needed any more.

        Durability: a deletion that a crash undoes is done again later; nothing depends on it.
        """
        try:
            if self._keep_bytes == 0 or self._queue.used_bytes > self._keep_bytes:
                self._queue.delete_through(queue_seq)
        except (disk.QueuePoisoned, disk.QueueClosed) as exc:
            raise IngestQueuePoisoned(self._path, str(exc)) from exc

    def close(self) -> None:
        """Sync the index and let go of the files."""
        self._queue.close()


class CursorReader:
    """Reads an IngestQueue in order. One thread; survives deletions behind it."""

    def __init__(
        self, queue: DiskQueue, path: Path, after_seq: int, refused: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._queue = queue
        self._path = path
        self._after_seq = after_seq
        self._refused = refused

    def read(self, max_bytes: int) -> list[IngestRecord]:
        """The next durable records, about ``max_bytes`` of them but at least one if any; empty at the end.

        Raises:
            DbError: a durable record cannot be read back.
            IngestQueuePoisoned: the queue refuses.
        """
        try:
            messages = self._queue.peek(self._after_seq, max_bytes)
        except disk.RecordDamaged as exc:
            raise _damaged(self._path, exc.offset, f"record {exc.seq} fails its checksum") from exc
        except (disk.QueuePoisoned, disk.QueueClosed) as exc:
            raise IngestQueuePoisoned(self._path, str(exc)) from exc
        if messages:
            self._after_seq = messages[-1].seq
        if not self._refused:
            return [IngestRecord(message.seq, message.data) for message in messages]
        return [IngestRecord(message.seq, self._content(message.seq, message.data)) for message in messages]

    def _content(self, seq: int, data: bytes) -> bytes:
        is_refused = any(after_seq < seq <= last_seq for after_seq, last_seq in self._refused)
        return NOTHING if is_refused else data

    def close(self) -> None:
        """Nothing is held."""


def _damaged(path: Path, offset_bytes: int, problem: str) -> DbError:
    return DbError(
        f"{path} is damaged at byte {offset_bytes}: {problem}. Keep a copy of the file, check the disk, "
        f"and see `sla queue recover --dry-run {path}`; after a restart the database manager goes on "
        "without the damaged record"
    )
