"""The index in memory, and how it reaches its file.

Slots hold an Entry, the number of the next free slot (NONE at the end), or nothing when never used. Live
entries never change their slot. The file is touched only by ``sync``: a record that comes and goes between
two syncs costs no index write at all.

Order of a sync, and why. (1) note which slots are dirty and which records are durable now; (2) write those
slots, sync; (3) write the header with the noted numbers into the copy that is not in force, sync. Dying in
(2) leaves the old header, whose promise ("every record up to synced_seq is in the index or was deleted")
still holds with any subset of the slots written; dying in (3) leaves the old or the new header, each true.

Guarded by the queue's lock, passed in: everything but the writing. One sync at a time (``_syncing``).
Source: Q2, Q6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from pmdaemon.diskqueue.format import (
    ENTRY_BYTES,
    INDEX_START,
    NONE,
    IndexEntry,
    IndexHeader,
    pack_entry,
    pack_free,
)
from pmdaemon.diskqueue.storage import Storage

CHUNK_SLOTS: Final = 512  # packed at 1 us each while the lock is held: adders wait half a millisecond at most


class Index:
    """Slots, free list and dirty set.

    Args:
        storage: the index file, allocated.
        header: the one in force in the file.
        seed: of the checksums.
        lock: the queue's.
    """

    def __init__(self, storage: Storage, header: IndexHeader, seed: int, lock: threading.Lock) -> None:
        self.header = header
        self.capacity = header.capacity
        self.slots: list[IndexEntry | int | None] = [None] * header.capacity
        self.used = 0
        self.free_head = NONE
        self.in_use = 0
        self.dirty: list[int] = []  # with repetitions; thinned out when it grows
        self._storage = storage
        self._seed = seed
        self._lock = lock
        self._syncing = threading.Lock()

    def take(self) -> int:
        """A slot for a new entry; the caller checked ``in_use`` first. Lock held."""
        slot = self.free_head
        if slot == NONE:
            slot = self.used
            self.used += 1
        else:
            following = self.slots[slot]
            assert isinstance(following, int)  # only free slots are in the free list
            self.free_head = following
        self.in_use += 1
        return slot

    def release(self, slot: int) -> None:
        """The slot goes to the front of the free list. Lock held."""
        self.slots[slot] = self.free_head
        self.free_head = slot
        self.in_use -= 1
        self.dirty.append(slot)
        if (
            len(self.dirty) > 8 * self.capacity
        ):  # a full turn of the queue between two syncs adds about four each
            self.dirty[:] = set(self.dirty)

    def sync(self, note: Callable[[], dict[str, int]], lists: Callable[[], dict[str, int]]) -> int:
        """Write what changed; returns the number of slots written.

        Args:
            note: header fields as of now, read under the lock before any slot is packed.
            lists: head and tail, read under the lock at the end; recovery does not trust them.

        Raises:
            OSError: what the file holds now is still an index of before or after.
        """
        with self._syncing:
            with self._lock:
                noted = note()
                dirty, self.dirty = self.dirty, []
            slots = sorted(set(dirty))
            for first in range(0, len(slots), CHUNK_SLOTS):
                self._write(slots[first : first + CHUNK_SLOTS])
            if slots:
                self._storage.sync()
            with self._lock:
                noted.update(lists(), in_use=self.in_use, free=self.free_head, used=self.used)
            self.write_header(self.header.following(**noted))
            return len(slots)

    def write_header(self, header: IndexHeader) -> None:
        """Put a header in force: durable on return."""
        self._storage.write(header.place, [header.pack()])
        self._storage.sync()
        self.header = header

    def _write(self, slots: list[int]) -> None:
        """Write some slots, a run of neighbours with one call."""
        with self._lock:
            packed = [self._pack(slot) for slot in slots]
        begin = 0
        for place in range(1, len(slots) + 1):
            if place == len(slots) or slots[place] != slots[place - 1] + 1:
                self._storage.write(INDEX_START + slots[begin] * ENTRY_BYTES, packed[begin:place])
                begin = place

    def _pack(self, slot: int) -> bytes:
        entry = self.slots[slot]
        if isinstance(entry, IndexEntry):
            if entry.durable:
                return pack_entry(entry, self._seed)
            # Its record is not on disk yet: the slot reads as free until the next sync.
            self.dirty.append(slot)
            entry = None
        return pack_free(slot, NONE if entry is None else entry, self._seed)
