r"""The ingest queue: records on disk, synced before they are spoken of, until the database has them.

A directory with one file ``id`` (16 hex digits, drawn when the queue was made; names the cursors in table
``consumed``) and segments ``<first queue_seq, 20 digits>.seg``:

    offset  size  field
    0       8     magic "SLAIQ001"
    8       ...   records, one behind another:
                  u32 length   bytes of the payload
                  u32 crc32    over queue_seq and payload
                  u64 queue_seq  1, 2, 3, ... without holes
                  payload

Theory of operation. ``append_many`` writes its records with one write and returns after one fdatasync: group
commit by the caller's batching. Only records up to ``synced_seq`` can be read. When the newest segment is
large enough, the next append begins another one; so every segment but the newest is wholly synced. Whole
segments are deleted once consumed; the newest stays, because its name carries the numbering on.

What a crash can leave: a torn record at the end of the newest segment (it was never confirmed; recovery cuts
it off), or a newest segment without a whole magic (removed). Recovery syncs the newest segment before its
records count as durable: a kill between write and sync leaves them only in the page cache. Damage anywhere
else is not ours: QueueCorrupt.

After a failed write or sync nobody knows what the disk holds (the kernel may have dropped the dirty pages),
so the queue is poisoned until opened anew.

Downsides: one reader; no preallocation, so every sync also writes the file's new size.

Lock ``_lock`` guards ``_segments``, ``_synced_seq`` and ``_waiting_bytes``. Thread: one appends, one reads
and deletes. Source: Q1-Q5 in the simplest form; DESIGN.md 4.3, 4.4. The disk queue is to replace it behind
``DurableQueue``.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog

from sla_server.db.errors import QueueCorrupt, QueuePoisoned

log = structlog.get_logger("ingest-queue")
MAGIC: Final = b"SLAIQ001"
HEADER: Final = struct.Struct("<IIQ")
_SEQ: Final = struct.Struct("<Q")
MAX_RECORD_BYTES: Final = 16 << 20  # far above any mailbox message; a larger length word is damage


class Record(NamedTuple):
    """One record as read back."""

    queue_seq: int
    payload: bytes


class QueueReader(Protocol):
    """Reads records in order; one thread."""

    def read(self, max_bytes: int) -> list[Record]:
        """The next durable records, at least one if any is there; empty at the end."""

    def close(self) -> None:
        """Let go of files."""


class DurableQueue(Protocol):
    """What intake and writer need of a queue."""

    @property
    def queue_id(self) -> str:
        """Names this queue in table ``consumed``."""

    @property
    def synced_seq(self) -> int:
        """Newest durable record, 0 for none ever."""

    @property
    def oldest_seq(self) -> int:
        """Oldest record still held; synced_seq + 1 when there is none."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes on disk."""

    def append_many(self, payloads: Sequence[bytes]) -> int:
        """Append all, sync once, return the last queue_seq."""

    def reader(self, after_seq: int) -> QueueReader:
        """A reader that begins behind ``after_seq``."""

    def delete_through(self, queue_seq: int) -> None:
        """Records up to ``queue_seq`` are not needed any more."""


class _Segment(NamedTuple):
    path: Path
    first_seq: int


def _no_probe(_point: str) -> None:
    """Production's probe: nothing."""


class IngestQueue:
    """The queue on plain files; see the module's text.

    Args:
        directory: made if missing, with mode 0700.
        segment_bytes: a new segment begins above this size.
        probe: called at the named points "appended" and "synced"; crash tests kill the process there.

    Raises:
        QueueCorrupt: damage that no crash of ours leaves.
        OSError: the directory cannot be used.
    """

    def __init__(
        self, directory: Path, segment_bytes: int = 16 << 20, probe: Callable[[str], None] = _no_probe
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._probe = probe
        self._lock = threading.Lock()
        self._poison: str | None = None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._queue_id = self._own_id()
        self._segments: list[_Segment] = []
        self._synced_seq = 0
        self._waiting_bytes = 0
        self._fd = -1
        self._fd_bytes = 0
        self._recover()

    @property
    def queue_id(self) -> str:
        """16 hex digits, drawn when the queue was made."""
        return self._queue_id

    @property
    def synced_seq(self) -> int:
        """Newest durable record, 0 for none ever."""
        with self._lock:
            return self._synced_seq

    @property
    def oldest_seq(self) -> int:
        """Oldest record still held; synced_seq + 1 when there is none."""
        with self._lock:
            return self._segments[0].first_seq

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return self._waiting_bytes

    def append_many(self, payloads: Sequence[bytes]) -> int:
        """Append all payloads and return the last queue_seq.

        Durability: everything is on disk on return, or nothing may be assumed.

        Raises:
            QueuePoisoned: this or an earlier write or sync failed.
        """
        if self._poison is not None:
            raise QueuePoisoned(self._directory, self._poison)
        if not payloads:
            return self.synced_seq
        next_seq = self.synced_seq + 1
        try:
            if self._fd_bytes >= self._segment_bytes:
                self._begin_segment(next_seq)
            parts: list[bytes] = []
            for queue_seq, payload in enumerate(payloads, next_seq):
                crc = zlib.crc32(payload, zlib.crc32(_SEQ.pack(queue_seq)))
                parts += (HEADER.pack(len(payload), crc, queue_seq), payload)
            data = b"".join(parts)
            _write_all(self._fd, data)
            self._probe("appended")
            os.fdatasync(self._fd)
        except OSError as exc:
            self._poison = str(exc)
            raise QueuePoisoned(self._directory, self._poison) from exc
        self._probe("synced")
        with self._lock:
            self._synced_seq = next_seq + len(payloads) - 1
            self._fd_bytes += len(data)
            self._waiting_bytes += len(data)
            return self._synced_seq

    def reader(self, after_seq: int) -> FileReader:
        """A reader that begins behind ``after_seq``, or at the oldest record if that is newer."""
        return FileReader(self, after_seq)

    def delete_through(self, queue_seq: int) -> None:
        """Delete the segments whose records are all at or below ``queue_seq``; the newest always stays.

        Durability: a deletion that a power loss undoes is done again later; nothing depends on it.
        """
        with self._lock:
            doomed = [
                old
                for old, new in zip(self._segments, self._segments[1:], strict=False)
                if new.first_seq <= queue_seq + 1
            ]
            self._segments = self._segments[len(doomed) :]
        for segment in doomed:
            size_bytes = segment.path.stat().st_size
            segment.path.unlink()
            with self._lock:
                self._waiting_bytes -= size_bytes

    def close(self) -> None:
        """Close the newest segment; everything appended is synced already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._poison = self._poison or "the queue is closed"

    def segment_for(self, queue_seq: int) -> _Segment | None:
        """The segment that holds ``queue_seq``, the oldest if that was deleted; None if not there yet."""
        with self._lock:
            if queue_seq > self._synced_seq:
                return None
            chosen = self._segments[0]
            for segment in self._segments:
                if segment.first_seq <= queue_seq:
                    chosen = segment
            return chosen

    def _own_id(self) -> str:
        path = self._directory / "id"
        if not path.exists():
            aside = self._directory / "id.new"
            aside.write_text(secrets.token_hex(8))
            with aside.open() as file:
                os.fsync(file.fileno())
            aside.rename(path)
            _sync_directory(self._directory)
        return path.read_text().strip()

    def _begin_segment(self, first_seq: int) -> None:
        path = self._directory / f"{first_seq:020d}.seg"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _write_all(fd, MAGIC)
        os.fdatasync(fd)
        _sync_directory(self._directory)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._fd_bytes = fd, len(MAGIC)
        with self._lock:
            self._segments.append(_Segment(path, first_seq))
            self._waiting_bytes += len(MAGIC)

    def _recover(self) -> None:
        """Find the segments, check every record, cut off a torn tail, sync what is left."""
        paths = sorted(self._directory.glob("*.seg"))
        if paths and paths[-1].stat().st_size < len(MAGIC):
            # Died while beginning it: it never held a record, and its name is what comes next anyway.
            paths.pop().unlink()
        expected = None
        for path in paths:
            first_seq = int(path.stem)
            if expected is not None and first_seq != expected:
                raise QueueCorrupt(path, 0, f"begins with record {first_seq}, expected {expected}")
            end, expected = self._check_segment(path, first_seq, is_newest=path == paths[-1])
            self._segments.append(_Segment(path, first_seq))
            self._waiting_bytes += end
            self._fd_bytes = end
        if expected is None:
            self._begin_segment(1)
            return
        self._synced_seq = expected - 1
        self._fd = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, self._fd_bytes)
        os.fsync(self._fd)

    @staticmethod
    def _check_segment(path: Path, first_seq: int, *, is_newest: bool) -> tuple[int, int]:
        """(bytes of intact records with magic, queue_seq behind the last)."""
        data = path.read_bytes()
        if data[: len(MAGIC)] != MAGIC:
            raise QueueCorrupt(path, 0, "does not begin with the magic of an ingest queue of this release")
        end, queue_seq = len(MAGIC), first_seq
        for record, record_end in _scan(data, len(MAGIC)):
            if record.queue_seq != queue_seq:
                break
            end, queue_seq = record_end, queue_seq + 1
        if end < len(data):
            if not is_newest:
                raise QueueCorrupt(path, end, f"record {queue_seq} is not readable")
            log.warning("torn-tail-cut-off", segment=path.name, at_byte=end, bytes=len(data) - end)
        return end, queue_seq


class FileReader:
    """Reads an IngestQueue in order. One thread; survives the deletion of segments behind it."""

    def __init__(self, queue: IngestQueue, after_seq: int) -> None:
        self._queue = queue
        self._next_seq = after_seq + 1
        self._fd = -1
        self._first_seq = -1
        self._offset = 0

    def read(self, max_bytes: int) -> list[Record]:
        """The next durable records, about ``max_bytes`` of them but at least one if any; empty at the end.

        Raises:
            QueueCorrupt: a durable record cannot be read back.
        """
        records: list[Record] = []
        size_bytes = 0
        synced_seq = self._queue.synced_seq
        while size_bytes < max_bytes and self._next_seq <= synced_seq:
            record = self._next()
            if record.queue_seq < self._next_seq:
                continue  # opened in the middle of a segment
            records.append(record)
            self._next_seq = record.queue_seq + 1
            size_bytes += len(record.payload)
        return records

    def close(self) -> None:
        """Let go of the open segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _next(self) -> Record:
        segment = self._queue.segment_for(self._next_seq)
        if segment is None:  # cannot happen: the caller looked at synced_seq
            raise AssertionError(f"record {self._next_seq} is not durable")
        if segment.first_seq != self._first_seq:
            self.close()
            self._fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
            self._first_seq, self._offset = segment.first_seq, len(MAGIC)
            self._next_seq = max(self._next_seq, segment.first_seq)
        head = os.pread(self._fd, HEADER.size, self._offset)
        if len(head) == HEADER.size:
            length, crc, queue_seq = HEADER.unpack(head)
            payload = os.pread(self._fd, min(length, MAX_RECORD_BYTES), self._offset + HEADER.size)
            if len(payload) == length and zlib.crc32(payload, zlib.crc32(_SEQ.pack(queue_seq))) == crc:
                self._offset += HEADER.size + length
                return Record(queue_seq, payload)
        raise QueueCorrupt(
            segment.path, self._offset, f"record {self._next_seq} was synced but cannot be read"
        )


def _scan(data: bytes, offset: int) -> Iterator[tuple[Record, int]]:
    """Intact records from ``offset`` on, each with the offset behind it; ends at the first that is not."""
    while offset + HEADER.size <= len(data):
        length, crc, queue_seq = HEADER.unpack_from(data, offset)
        end = offset + HEADER.size + length
        if length > MAX_RECORD_BYTES or end > len(data):
            return
        payload = data[offset + HEADER.size : end]
        if zlib.crc32(payload, zlib.crc32(_SEQ.pack(queue_seq))) != crc:
            return
        yield Record(queue_seq, payload), end
        offset = end


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
