"""Space: where the next record goes, and the in-use list. Pure; no I/O, no lock of its own.

R is the head entry's offset, W the end of what was written last, both multiples of 256, Q the ring's size.

    R < W:  ....RxxxxxxW....    room: Q - W behind, else R from the beginning (wrap)
    W < R:  xxxW........Rxxx    room: R - W

A request fits only if it is strictly smaller than the room, so W = R always means empty. The in-use list is
in *ring order*: going round from W, its entries come one behind another, head first. Hence R bounds the free
space, and recovery can make the list again from offsets alone.

When an old record at the head is all that blocks, it is moved to the tail (``_skip``): W becomes its end, R
the next entry's offset. It keeps its place in the file, and ring order holds. At most MOST_SKIPS are moved
for a request, so that a full queue refuses quickly.

Invariants: no two live records overlap; ``write`` never lies inside one. Source: Q4.
"""

from __future__ import annotations

from typing import Final

from pmdaemon.diskqueue.format import NONE
from pmdaemon.diskqueue.records import Records

MOST_SKIPS: Final = 16


def fit(write: int, read: int, size: int, ring_bytes: int, reserve: int) -> int:
    """Offset where ``size`` bytes may go while ``reserve`` more stay free, or -1. Not for an empty ring."""
    if read < write:
        behind = ring_bytes - write
        if size < behind and (size + reserve < behind or reserve < read):
            return write
        return 0 if size + reserve < read else -1
    return write if size + reserve < read - write else -1


class Ring:
    """The in-use list with W and lap; records are named by their slots.

    Args:
        ring_bytes: Q.
        reserve_bytes: kept free from ordinary requests.
        records: where they lie, and their neighbours.

    Attributes:
        head, tail: slots, NONE while the list is empty.
    """

    def __init__(self, ring_bytes: int, reserve_bytes: int, records: Records) -> None:
        self.ring_bytes = ring_bytes
        self.reserve_bytes = reserve_bytes
        self.records = records
        self.write = 0
        self.lap = 0
        self.skips = 0
        self.head = NONE
        self.tail = NONE

    def largest_bytes(self) -> int:
        """The largest record that an empty ring takes beside the reserve, and that a span has bits for."""
        return min(self.ring_bytes - self.reserve_bytes, 1 << 32) - 256

    def free_bytes(self) -> int:
        """Bytes outside of [R, W)."""
        if self.head == NONE:
            return self.ring_bytes
        read = self.records.offsets[self.head]
        return self.ring_bytes - (self.write - read) if read < self.write else read - self.write

    def place(self, size: int, *, reserved: bool) -> int:
        """The offset for ``size`` bytes, or -1 when there is no room. Moves W only together with a skip."""
        reserve = 0 if reserved else self.reserve_bytes
        if self.head == NONE:
            if size + reserve < self.ring_bytes - self.write:
                return self.write
            return 0 if size + reserve < self.ring_bytes else -1
        offset = fit(self.write, self.records.offsets[self.head], size, self.ring_bytes, reserve)
        return offset if offset >= 0 else self._skip(size, reserve)

    def _skip(self, size: int, reserve: int) -> int:
        """Move as few old records as needed from the head to the tail; none if that does not help."""
        records, slot = self.records, self.head
        for count in range(1, MOST_SKIPS + 1):
            if slot == NONE or not records.is_durable(slot):
                return -1
            # Behind the last entry the list begins again: all moved once is none moved, only W draws back.
            following = records.behind[slot]
            read = records.offsets[self.head if following == NONE else following]
            write = records.end(slot) % self.ring_bytes
            # read == write: nothing between the two, which fit() takes as no room (read - write = 0).
            offset = fit(write, read, size, self.ring_bytes, reserve)
            if offset >= 0:
                for _ in range(count):
                    moved = self.head
                    self.unlink(moved)
                    self.append(moved)
                self.skips += count
                self._turn(write)
                return offset
            slot = following
        return -1

    def advance(self, offset: int, end: int) -> int:
        """W moves to ``end`` behind a request placed at ``offset``; returns its lap."""
        self._turn(offset)
        self.write = end
        return self.lap

    def _turn(self, write: int) -> None:
        """W moves; to a smaller offset means once round. A record has 32 bits for the lap."""
        self.lap = (self.lap + (write < self.write)) & 0xFFFF_FFFF
        self.write = write

    def mark(self) -> tuple[int, int, int]:
        """What ``undo`` needs."""
        return self.write, self.lap, self.skips

    def undo(self, mark: tuple[int, int, int], added: list[int]) -> None:
        """Back to ``mark``: unlink what was appended since, turn skips back."""
        for slot in reversed(added):
            self.unlink(slot)
        for _ in range(self.skips - mark[2]):
            moved = self.tail
            self.unlink(moved)
            self.records.behind[moved] = self.head
            if self.head != NONE:
                self.records.before[self.head] = moved
            self.head = moved
            self.tail = moved if self.tail == NONE else self.tail
        self.write, self.lap, self.skips = mark

    def append(self, slot: int) -> None:
        """Link at the tail."""
        before, behind, tail = self.records.before, self.records.behind, self.tail
        before[slot], behind[slot] = tail, NONE
        if tail == NONE:
            self.head = slot
        else:
            behind[tail] = slot
        self.tail = slot

    def unlink(self, slot: int) -> None:
        """Take out of the list, wherever it is."""
        prevs, nexts = self.records.before, self.records.behind
        before, behind = prevs[slot], nexts[slot]
        if before == NONE:
            self.head = behind
        else:
            nexts[before] = behind
        if behind == NONE:
            self.tail = before
        else:
            prevs[behind] = before
        prevs[slot] = nexts[slot] = NONE

    def all(self) -> list[int]:
        """The in-use list from head to tail."""
        slots, slot = [], self.head
        while slot != NONE:
            slots.append(slot)
            slot = self.records.behind[slot]
        return slots
