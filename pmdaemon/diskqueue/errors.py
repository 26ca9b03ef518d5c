"""Errors of the disk queue.

SlaError (pmdaemon.errors)
└── DiskQueueError       1
    ├── QueueFull       75  no index entry or no data space just now (retryable); nothing was added
    ├── RecordTooLarge   1  it can never fit this queue
    ├── QueuePoisoned   74  a write or sync failed; everything is refused until the queue is opened again
    ├── QueueClosed      1  used after ``close``
    ├── QueueBusy       75  another process owns this queue (retryable)
    ├── QueueNoSpace    74  the file system cannot reserve the files
    ├── QueueUnreadable 65  not a disk queue, or made with other settings or by another version
    └── RecordDamaged   65  a record that was durable cannot be read back
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class DiskQueueError(SlaError):
    """Root of the disk queue's errors, and that a record is not there or not locked by this owner."""


class QueueFull(DiskQueueError):
    """There is no room now; nothing was added. Room comes back as consumers delete."""

    retryable = True
    exit_status = 75  # EX_TEMPFAIL of sysexits

    def __init__(self, queue: str, what: str, needed: int, free: int) -> None:
        self.queue = queue
        self.what = what
        self.needed = needed
        self.free = free
        super().__init__(
            f"disk queue {queue} is full: {needed} {what} needed, {free} free. "
            "Nothing was added; try again when consumers have deleted, or make the queue larger"
        )


class RecordTooLarge(DiskQueueError):
    """The record can never fit."""

    def __init__(self, queue: str, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"disk queue {queue}: a record of {size_bytes} bytes exceeds {limit_bytes} bytes")


class QueuePoisoned(DiskQueueError):
    """What reached the disk is unknown (the kernel may have dropped the pages of a failed sync)."""

    exit_status = 74  # EX_IOERR

    def __init__(self, queue: str, reason: str) -> None:
        self.queue = queue
        self.reason = reason
        super().__init__(
            f"disk queue {queue} refuses everything since a write or sync failed: {reason}. "
            "Check the disk, then restart this process: opening the queue recovers what was confirmed"
        )


class QueueClosed(DiskQueueError):
    """The queue is closed."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"disk queue {queue} is closed")


class QueueBusy(DiskQueueError):
    """One process owns a queue; others add through its mailbox."""

    retryable = True
    exit_status = 75

    def __init__(self, queue: str) -> None:
        super().__init__(f"disk queue {queue} is owned by another process. Stop that process first")


class QueueNoSpace(DiskQueueError):
    """The files are reserved at full size when the queue is made; there is no room for that."""

    exit_status = 74

    def __init__(self, queue: str, size_bytes: int, reason: str) -> None:
        super().__init__(
            f"disk queue {queue}: cannot reserve {size_bytes} bytes: {reason}. "
            "Free space on that file system, or configure a smaller queue or another path"
        )


class QueueUnreadable(DiskQueueError):
    """The file is not a queue that this release can open; it was not changed."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, queue: str, problem: str, fix: str) -> None:
        self.problem = problem
        super().__init__(f"disk queue {queue}: {problem}. {fix}")


class RecordDamaged(DiskQueueError):
    """A durable record fails its checksum."""

    exit_status = 65

    def __init__(self, queue: str, seq: int, offset: int, size_bytes: int) -> None:
        self.seq = seq
        self.offset = offset
        self.size_bytes = size_bytes
        super().__init__(
            f"disk queue {queue}: record {seq} at byte {offset} ({size_bytes} bytes) fails its checksum. "
            "Keep a copy of the files, then run: sla queue recover --dry-run"
        )
