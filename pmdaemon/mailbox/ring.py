"""Payload ring of one route: where the bytes lie, and who has room.

Positions count bytes since the segment was made and never wrap; the place in the ring is the position
modulo its size, and a payload that meets the ring's end goes on at its beginning. The sender alone moves
both ends: ``written`` when it posts, ``freed`` when it sees that a slot was TAKEN. Neither stands in shared
memory: after a crash both follow from the slots still linked.

Invariant: 0 <= written - freed <= size; every payload of a READY slot lies within [freed, written).

Thread: ``Ring`` is stateless; ``Outlet`` belongs to the posting thread.
"""

from __future__ import annotations

import mmap
from collections import deque


class Ring:
    """Copies payloads into and out of one ring. ``size`` in bytes, a multiple of 64."""

    __slots__ = ("_end", "_map", "_start", "size")

    def __init__(self, memory: mmap.mmap, at_bytes: int, size: int) -> None:
        self._map = memory
        self._start = at_bytes
        self._end = at_bytes + size
        self.size = size

    def write(self, position: int, payload: bytes | memoryview, length: int) -> None:
        """Copy ``payload`` (``length`` bytes, at most ``size``) to ``position``."""
        start = self._start + position % self.size
        end = start + length
        if end <= self._end:
            self._map[start:end] = payload
        else:
            first = self._end - start
            self._map[start : self._end] = payload[:first]
            self._map[self._start : end - self.size] = payload[first:]

    def read(self, position: int, length: int) -> bytes:
        """Copy out ``length`` bytes (at most ``size``, checked by the caller)."""
        start = self._start + position % self.size
        end = start + length
        if end <= self._end:
            return self._map[start:end]
        return self._map[start : self._end] + self._map[self._start : end - self.size]


class Outlet:
    """The sender's side of one route.

    Attributes:
        address: sender << 16 | recipient, as in a slot's ADDRESS word.
        sleep_word: index of the recipient's SLEEP word.
        quota: slots this route may hold at once.
        written, freed: ring positions, see the module.
        pending: slots of this route not freed yet, in the order of their payloads.
        size: of the ring, in bytes.
        reclaim_at: number of pending slots at which to look for taken ones.
    """

    __slots__ = (
        "address",
        "freed",
        "pending",
        "quota",
        "recipient",
        "reclaim_at",
        "ring",
        "size",
        "sleep_word",
        "written",
    )

    def __init__(self, recipient: str, address: int, ring: Ring, sleep_word: int, quota: int) -> None:
        self.recipient = recipient
        self.address = address
        self.ring = ring
        self.size = ring.size
        self.sleep_word = sleep_word
        self.quota = quota
        self.written = 0
        self.freed = 0
        self.pending: deque[int] = deque()
        self.reclaim_at = 0
