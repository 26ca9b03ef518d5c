"""The index in memory, and how it reaches its file.

A slot holds a record, or is free and names the next free one (NONE at the end), or was never used
(``records``). Records never change their slot. The file is touched only by ``sync``: a record that comes and
goes between two syncs costs no index write at all.

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

import numpy as np

from pmdaemon.diskqueue.format import (
    ENTRY_BYTES,
    INDEX_START,
    NONE,
    IndexHeader,
    pack_free,
    pack_slot,
)
from pmdaemon.diskqueue.records import GROWTH_SLOTS, Records
from pmdaemon.diskqueue.storage import Storage

CHUNK_SLOTS: Final = 512  # packed at 1 us each while the lock is held: adders wait half a millisecond at most


class Index:
    """Free list and dirty slots, as the header in force has them at first.

    Args:
        storage: the index file, allocated.
        header: the one in force in the file.
        seed: of the checksums.
        lock: the queue's.
        records: what the slots hold; free ones are linked from ``header.free``.

    Attributes:
        used: slots below were used at least once.
        dirty: a byte for each slot, 1 where the file does not have what is here.
    """

    def __init__(
        self, storage: Storage, header: IndexHeader, seed: int, lock: threading.Lock, records: Records
    ) -> None:
        self.header = header
        self.capacity = header.capacity
        self.records = records
        self.used, self.free_head, self.in_use = header.used, header.free, header.in_use
        self.dirty = bytearray(len(records))
        self._storage = storage
        self._seed = seed
        self._lock = lock
        self._syncing = threading.Lock()

    def take(self) -> int:
        """A slot for a new record; the caller checked ``in_use`` first. Lock held."""
        slot = self.free_head
        if slot == NONE:
            slot = self.used
            if slot == len(self.dirty):
                self.records.grow()
                self.dirty.extend(bytes(GROWTH_SLOTS))
            self.used += 1
        else:
            self.free_head = self.records.behind[slot]
        self.in_use += 1
        return slot

    def release(self, slot: int) -> None:
        """What it holds goes, and it to the front of the free list. Lock held."""
        self.records.drop(slot)
        self.records.behind[slot] = self.free_head
        self.free_head = slot
        self.in_use -= 1
        self.dirty[slot] = 1

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
                dirty, self.dirty = self.dirty, bytearray(len(self.dirty))
            slots = np.flatnonzero(np.frombuffer(dirty, np.uint8))
            for first in range(0, len(slots), CHUNK_SLOTS):
                self._write(slots[first : first + CHUNK_SLOTS].tolist())
            if len(slots):
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
        write_runs(self._storage, slots, packed)

    def _pack(self, slot: int) -> bytes:
        records = self.records
        if not records.seqs[slot]:
            return pack_free(slot, records.behind[slot], self._seed)
        if records.is_durable(slot):
            return pack_slot(slot, records.fields(slot), self._seed)
        # Its record is not on disk yet: the slot reads as free until the next sync.
        self.dirty[slot] = 1
        return pack_free(slot, NONE, self._seed)


def write_runs(storage: Storage, slots: list[int], packed: list[bytes]) -> None:
    """Write these entries, a run of neighbours with one call; ``slots`` come in order."""
    begin = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            storage.write(INDEX_START + slots[begin] * ENTRY_BYTES, packed[begin:place])
            begin = place
