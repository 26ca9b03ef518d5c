"""Which records a consumer may take next: smallest sequence number first, of all or of one destination.

Heaps of sequence numbers, cleaned when read: a number whose record is gone or locked is thrown away by the
``is_ready`` that the reader brings. New records have the largest numbers of all, so they are appended, which
keeps a heap a heap. A heap that holds more than twice as many numbers as there are live records is made
anew, so queues that delete without locking do not grow. Pure; guarded by the queue's lock. Source: Q8.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable


class Ready:
    """The heaps: ``_all``, one for each destination, and the delayed ones by time."""

    def __init__(self) -> None:
        self._all: list[int] = []
        self._by_destination: dict[bytes, list[int]] = {}
        self._delayed: list[tuple[int, int, bytes]] = []

    def add_new(self, first_seq: int, count: int, destination: bytes) -> None:
        """Records just made durable; their numbers are larger than all before."""
        numbers = range(first_seq, first_seq + count)
        self._all.extend(numbers)
        if destination:
            self._by_destination.setdefault(destination, []).extend(numbers)

    def add_again(self, seq: int, destination: bytes) -> None:
        """A record that was unlocked."""
        heapq.heappush(self._all, seq)
        if destination:
            heapq.heappush(self._by_destination.setdefault(destination, []), seq)

    def delay(self, seq: int, destination: bytes, until_ns: int) -> None:
        """A record to come back at that monotonic time."""
        heapq.heappush(self._delayed, (until_ns, seq, destination))

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

    def trim(self, live: int, is_live: Callable[[int], bool]) -> None:
        """Throw out numbers of deleted records when they are the larger part."""
        if len(self._all) > 2 * live + 1024:
            self._all = _kept(self._all, is_live)
            for destination in list(self._by_destination):
                heap = _kept(self._by_destination[destination], is_live)
                if heap:
                    self._by_destination[destination] = heap
                else:
                    del self._by_destination[destination]


def _kept(heap: Iterable[int], is_live: Callable[[int], bool]) -> list[int]:
    return sorted({seq for seq in heap if is_live(seq)})  # sorted is a heap
