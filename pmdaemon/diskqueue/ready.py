"""Which records a consumer may take next: smallest sequence number first, of all or of one destination.

Heaps of sequence numbers, cleaned when read: a number whose record is gone or locked is thrown away by the
``is_ready`` that the reader brings. New records have the largest numbers of all, so they are appended, which
keeps a heap a heap. Numbers stay behind in a heap when their records are deleted, or locked by way of another
heap: so once more numbers were filed than four times the live records, all heaps are made anew. Pure; guarded
by the queue's lock. Source: Q8.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Final

SLACK: Final = 2048  # numbers filed before a small queue is worth looking through


class Ready:
    """The heaps: ``_all``, one for each destination, and the delayed ones by time.

    Args:
        live: the queue's records by number.
    """

    def __init__(self, live: Mapping[int, Any]) -> None:
        self._live = live
        self._filed = 0  # numbers put into heaps since they were made
        self._all: list[int] = []
        self._by_destination: dict[bytes, list[int]] = {}
        self._delayed: list[tuple[int, int, bytes]] = []

    def add_new(self, first_seq: int, count: int, destination: bytes) -> None:
        """Records just made durable; their numbers are larger than all before."""
        numbers = range(first_seq, first_seq + count)
        self._all.extend(numbers)
        self._filed += count
        if destination:
            self._by_destination.setdefault(destination, []).extend(numbers)
            self._filed += count

    def add_again(self, seq: int, destination: bytes) -> None:
        """A record that was unlocked."""
        heapq.heappush(self._all, seq)
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

    def wake(self, now_ns: int) -> None:
        """Bring back those whose time has come."""
        while self._delayed and self._delayed[0][0] <= now_ns:
            _until_ns, seq, destination = heapq.heappop(self._delayed)
            self.add_again(seq, destination)

    def next(self, destination: bytes | None, is_ready: Callable[[int], bool]) -> int | None:
        """The smallest ready number, taken out; None if there is none."""
        heap = self._all if destination is None else self._by_destination.get(destination, [])
        while heap:
            seq = heapq.heappop(heap)
            if is_ready(seq):
                return seq
        if destination is not None:
            self._by_destination.pop(destination, None)
        return None

    def trim(self) -> None:
        """Throw out numbers of deleted records, and repeated ones, when many were filed."""
        if self._filed <= 4 * len(self._live) + SLACK:
            return
        self._all = _kept(self._all, self._live)
        kept = {name: _kept(heap, self._live) for name, heap in self._by_destination.items()}
        self._by_destination = {name: heap for name, heap in kept.items() if heap}
        self._delayed = sorted(item for item in set(self._delayed) if item[1] in self._live)
        self._filed = len(self._all) + sum(map(len, self._by_destination.values())) + len(self._delayed)


def _kept(heap: Iterable[int], live: Container[int]) -> list[int]:
    return sorted({seq for seq in heap if seq in live})  # sorted is a heap
