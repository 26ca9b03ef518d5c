"""Records as consumers see them, read from the window on the data file.

A reader that goes through a long backlog would have all of the file in its memory; so the window's pages are
let go of after every ``RELEASE_BYTES`` that records take in it. One that is read again costs a microsecond.

Thread: any, with the queue's lock held.
"""

from __future__ import annotations

from typing import Final

from pmdaemon.diskqueue.consumer import QueueMessage
from pmdaemon.diskqueue.errors import RecordDamaged
from pmdaemon.diskqueue.format import DATA_START, check, content
from pmdaemon.diskqueue.state import QueueState
from pmdaemon.diskqueue.storage import Storage

RELEASE_BYTES: Final = 4 << 20


class RecordReader:
    """See the module.

    Args:
        data: the data file.
        state: which records are live.
    """

    def __init__(self, data: Storage, state: QueueState) -> None:
        self._data = data
        self._state = state
        self._read_bytes = 0  # since the newest release

    def ring(self) -> memoryview:
        """The records' part of the data file; not to be kept beyond the lock."""
        return self._data.view()[DATA_START : DATA_START + self._state.ring.ring_bytes]

    def message(self, slot: int, ring: memoryview) -> QueueMessage:
        """The record of a live slot.

        Raises:
            RecordDamaged: it fails its checksum.
        """
        state = self._state
        records = state.records
        seq, offset = records.seqs[slot], records.offsets[slot]
        found = check(ring, state.seed, offset)
        if found is None or found[2] != seq:
            raise RecordDamaged(state.name, seq, DATA_START + offset, records.spans[slot])
        destination, data = content(ring, found)
        self._count(records.spans[slot])
        work = records.work.get(slot) if records.work else None
        return QueueMessage(seq, found[8], destination, found[5], work.retries if work else 0, data)

    def _count(self, size_bytes: int) -> None:
        """So much of the window was read: its pages may be due to go."""
        self._read_bytes += size_bytes
        if self._read_bytes >= RELEASE_BYTES:
            self._read_bytes = 0
            self._data.release()
