"""What can be asked of a queue without touching a record: identity, numbers, fullness. Any thread."""

from __future__ import annotations

from typing import Any

from pmdaemon.diskqueue.core import QueueCore


class QueueGauges(QueueCore):
    """See ``State`` for the state these read and its lock."""

    @property
    def queue_id(self) -> str:
        """16 hex digits, drawn when the queue was made."""
        return self._file.queue_id.hex()

    @property
    def durable_seq(self) -> int:
        """The newest durable record's number; none beyond it can be read."""
        return self._durable_seq

    @property
    def oldest_seq(self) -> int:
        """The oldest record held; one more than the newest given when there is none."""
        with self._lock:
            return self._lower_bound()

    @property
    def used_bytes(self) -> int:
        """Bytes from the oldest record to the newest, holes included."""
        with self._lock:
            return self._ring.ring_bytes - self._ring.free_bytes()

    @property
    def ring_bytes(self) -> int:
        """Size of the ring: what was asked for when the queue was made."""
        return self._ring.ring_bytes

    @property
    def fullness_ratio(self) -> float:
        """Share of the ring, or of the entries if that is more, in use: 0 to 1."""
        with self._lock:
            ring, index = self._ring, self._index
            return max(1 - ring.free_bytes() / ring.ring_bytes, index.in_use / index.capacity)

    def has_room(self, size_bytes: int, records: int) -> bool:
        """Whether so many bytes (overhead included) and entries are free beside the reserves.

        Free bytes may lie in two pieces; who needs one piece of n bytes for certain asks for 2 n.
        """
        settings = self.settings
        with self._lock:
            return (
                self._ring.free_bytes() > size_bytes + self._ring.reserve_bytes
                and self._index.in_use + records <= self._index.capacity - settings.reserve_entries
            )

    def stat(self) -> dict[str, Any]:
        """Figures for meters and tools."""
        with self._lock:
            return {
                "queue_id": self._file.queue_id.hex(),
                "records": len(self._live),
                "capacity": self._index.capacity,
                "ring_bytes": self._ring.ring_bytes,
                "free_bytes": self._ring.free_bytes(),
                "oldest_seq": self._lower_bound(),
                "durable_seq": self._durable_seq,
                "next_seq": self._next_seq,
                "rounds": self._commit.rounds,
                "skips": self._ring.skips,
                "poisoned": str(self._poison) if self._poison else "",
            }
