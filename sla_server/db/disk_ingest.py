"""The ingest queue on a disk queue: what ``ingest_queue.DurableQueue`` asks for, over ``pmdaemon.diskqueue``.

One appends, one reads with a cursor and deletes; nothing is locked. The errors of the disk queue become
those of the database manager at this door. Numbers rise but, after a crash, not without holes: nothing here
or in the writer relies on that. Unlike the plain files the queue has a fixed size, and ``QueueFull`` ends the
thread that appends: ``[database] queue_limit_bytes`` must be below that size by more than one sync's batch.
Source: DESIGN.md 4.3, 4.4; Q3, Q8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue import errors as disk
from sla_server.db.errors import QueueCorrupt, QueuePoisoned
from sla_server.db.ingest_queue import Record


def _no_probe(_point: str) -> None:
    """Production's probe: nothing."""


class DiskIngestQueue:
    """See the module's text.

    Args:
        directory: made if missing, with mode 0700; holds ``ingest`` and ``ingest.index``.
        data_bytes: size of the data file when it is made.
        keep_bytes: deletion waits until more is in use, so that a database restored from a backup finds the
            newest records again; at most half of ``data_bytes``.
        probe: called at "appended" (reserved, not synced) and "synced"; crash tests kill the process there.

    Raises:
        pmdaemon.diskqueue.errors.DiskQueueError: it cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        data_bytes: int = 64 << 20,
        probe: Callable[[str], None] = _no_probe,
        keep_bytes: int = 16 << 20,
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / "ingest"
        self._probe = probe
        self._keep_bytes = min(keep_bytes, data_bytes // 2)
        # A record is one mailbox batch, rarely below 4 KB: so many entries are never the limit.
        entries = max(1024, data_bytes // 4096)
        self._queue = DiskQueue(QueueSettings(data_path=self._path, data_bytes=data_bytes, entries=entries))

    @property
    def queue_id(self) -> str:
        """16 hex digits, drawn when the queue was made."""
        return self._queue.queue_id

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

    def append_many(self, payloads: Sequence[bytes]) -> int:
        """Append all payloads under one sync and return the last queue_seq.

        Durability: everything is on disk on return, or nothing may be assumed.

        Raises:
            QueuePoisoned: this or an earlier write or sync failed.
            pmdaemon.diskqueue.errors.QueueFull: no room; nothing was appended.
        """
        if not payloads:
            return self.synced_seq
        try:
            request = self._queue.submit(payloads, wake_helper=False)
            self._probe("appended")
            request.wait()
        except (disk.QueuePoisoned, disk.QueueClosed) as exc:
            raise QueuePoisoned(self._path, str(exc)) from exc
        self._probe("synced")
        return request.last_seq

    def reader(self, after_seq: int) -> DiskReader:
        """A reader that begins behind ``after_seq``, or at the oldest record if that is newer."""
        return DiskReader(self._queue, self._path, after_seq)

    def delete_through(self, queue_seq: int) -> None:
        """Records up to ``queue_seq`` are not needed any more.

        Durability: a deletion that a crash undoes is done again later; nothing depends on it.
        """
        try:
            if self._keep_bytes == 0 or self._queue.used_bytes > self._keep_bytes:
                self._queue.delete_through(queue_seq)
        except (disk.QueuePoisoned, disk.QueueClosed) as exc:
            raise QueuePoisoned(self._path, str(exc)) from exc

    def close(self) -> None:
        """Sync the index and let go of the files."""
        self._queue.close()


class DiskReader:
    """Reads a DiskIngestQueue in order. One thread; survives deletions behind it."""

    def __init__(self, queue: DiskQueue, path: Path, after_seq: int) -> None:
        self._queue = queue
        self._path = path
        self._after_seq = after_seq

    def read(self, max_bytes: int) -> list[Record]:
        """The next durable records, about ``max_bytes`` of them but at least one if any; empty at the end.

        Raises:
            QueueCorrupt: a durable record cannot be read back. QueuePoisoned: the queue refuses.
        """
        try:
            messages = self._queue.peek(self._after_seq, max_bytes)
        except disk.RecordDamaged as exc:
            raise QueueCorrupt(self._path, exc.offset, f"record {exc.seq} fails its checksum") from exc
        except (disk.QueuePoisoned, disk.QueueClosed) as exc:
            raise QueuePoisoned(self._path, str(exc)) from exc
        if messages:
            self._after_seq = messages[-1].seq
        return [Record(message.seq, message.data) for message in messages]

    def close(self) -> None:
        """Nothing is held."""
