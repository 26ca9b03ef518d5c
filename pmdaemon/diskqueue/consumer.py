"""Consumers: which process holds a record, and which record may be taken next.

A lock is held by a process, known by its number *and* start time, because numbers are used again. A zombie
executes nothing any more and counts as gone. All processes live in one PID namespace.

The next record is the one with the smallest sequence number, of all or of one destination. Of all, those that
were never taken are simply the ones from a number on, ``_new_seq``; what comes back is in a heap. Heaps of
sequence numbers are cleaned when read: a number whose record is gone or locked is thrown away by the
``is_ready`` that the reader brings. New records have the largest numbers of all, so they are appended to the
heap of their destination, which keeps a heap a heap. Numbers stay behind in a heap when their records are
deleted, or locked by way of another heap: so once more numbers were filed than four times the live records,
all heaps are made again. The heaps are pure, and guarded by the queue's lock.

Source: Q7, Q8; proc(5), /proc/PID/stat, fields 3 (state) and 22 (starttime).
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from pmdaemon.diskqueue.slots import SlotMap

SLACK: Final = 2048  # numbers filed before cleaning a small queue is worth it


class QueueMessage(NamedTuple):
    """One record as a consumer sees it.

    Attributes:
        kind: the user's type, 0 to 65535.
        date_us: when it was added, UTC.
        retries: how often it was retried.
    """

    seq: int
    kind: int
    destination: bytes
    date_us: int
    retries: int
    data: bytes


class LockOwner(NamedTuple):
    """A process: number, and start in clock ticks since boot."""

    pid: int
    start_ticks: int


def owner_of(pid: int) -> LockOwner | None:
    """The living process of that number, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command name before may hold blanks and brackets
    return None if fields[0] in "ZXx" else LockOwner(pid, int(fields[19]))


def myself() -> LockOwner:
    """This process."""
    owner = owner_of(os.getpid())
    assert owner is not None  # we are running
    return owner


def is_alive(owner: LockOwner) -> bool:
    """Whether that very process still runs."""
    return owner_of(owner.pid) == owner


class Ready:
    """The heaps: ``_again``, one for each destination, and the delayed ones by time.

    Args:
        live: the queue's records by number.
    """

    def __init__(self, live: SlotMap) -> None:
        self._live = live
        self._filed = 0  # numbers put into heaps since they were made
        self._new_seq = 1  # from here on, up to _durable_seq: never taken
        self._durable_seq = 0
        self._again: list[int] = []
        self._by_destination: dict[bytes, list[int]] = {}
        self._delayed: list[tuple[int, int, bytes]] = []

    def add_new(self, first_seq: int, count: int, destination: bytes) -> None:
        """Records just made durable; their numbers are larger than all before."""
        self._durable_seq = first_seq + count - 1
        if destination:
            numbers = range(first_seq, first_seq + count)
            self._by_destination.setdefault(destination, []).extend(numbers)
            self._filed += count

    def add_again(self, seq: int, destination: bytes) -> None:
        """A record that was unlocked."""
        heapq.heappush(self._again, seq)
        self._filed += 1
        if destination:
            heapq.heappush(self._by_destination.setdefault(destination, []), seq)
            self._filed += 1
        self.trim()

    def delay(self, seq: int, destination: bytes, until_ns: int) -> None:
        """A record to come back at that monotonic time."""
        heapq.heappush(self._delayed, (until_ns, seq, destination))
        self._filed += 1
        self.trim()

    def wake(self, now_ns: int, oldest_seq: int) -> None:
        """Bring back those whose time has come; nothing below ``oldest_seq`` is there any more."""
        self._new_seq = max(self._new_seq, oldest_seq)
        while self._delayed and self._delayed[0][0] <= now_ns:
            _until_ns, seq, destination = heapq.heappop(self._delayed)
            self.add_again(seq, destination)

    def next(self, destination: bytes | None, is_ready: Callable[[int], bool]) -> int | None:
        """The smallest ready number, taken out; None if there is none."""
        if destination is None:
            return self._next_of_all(is_ready)
        heap = self._by_destination.get(destination, [])
        while heap:
            seq = heapq.heappop(heap)
            if is_ready(seq):
                return seq
        self._by_destination.pop(destination, None)
        return None

    def _next_of_all(self, is_ready: Callable[[int], bool]) -> int | None:
        limit = self._durable_seq + 1
        while True:
            self._new_seq = new = self._live.first(self._new_seq, limit)
            if self._again and self._again[0] < new:
                seq = heapq.heappop(self._again)
            elif new < limit:
                seq = new
                self._new_seq += 1
            else:
                return None
            if is_ready(seq):
                return seq

    def trim(self) -> None:
        """Throw out numbers of deleted records, and repeated ones, when many were filed."""
        if self._filed <= 4 * len(self._live) + SLACK:
            return
        self._again = _kept(self._again, self._live)
        kept = {name: _kept(heap, self._live) for name, heap in self._by_destination.items()}
        self._by_destination = {name: heap for name, heap in kept.items() if heap}
        self._delayed = sorted(item for item in set(self._delayed) if item[1] in self._live)
        self._filed = len(self._again) + sum(map(len, self._by_destination.values())) + len(self._delayed)


def _kept(heap: Iterable[int], live: Container[int]) -> list[int]:
    return sorted({seq for seq in heap if seq in live})  # sorted is a heap
