"""The queue in memory: which records there are, where they lie, what may be read. Pure: no file is touched.

State, all guarded by ``lock``: ``records`` (what is live, by slot and by number), the ring with its in-use
list, the index with its free list, ``ready``, ``next_seq``, ``floor`` (below it everything was deleted), and
``poison``: why the queue refuses everything (also when it is closed). Every method is called with the lock
held, except at the start; only ``refuse`` may be called without it.

Life of a record: reserved (entry and space taken, not durable, not visible) -> durable (readable) ->
deleted (entry and space free at once; the index file learns of it at its next sync, so a crash may bring it
back).

Invariants: a record is in the ring's list, the index and ``records.live``, or in none of them; what does not
fit leaves nothing behind. Source: Q3, Q4, Q6.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Any

from isal.isal_zlib import crc32

from pmdaemon.diskqueue.commit import Request, Run
from pmdaemon.diskqueue.consumer import LockOwner, Ready
from pmdaemon.diskqueue.errors import DiskQueueError, QueueFull, RecordTooLarge
from pmdaemon.diskqueue.format import (
    BODY,
    FRONT,
    HEADER_BYTES,
    NONE,
    PADDING,
    SIGNATURE,
    UNIT_BYTES,
)
from pmdaemon.diskqueue.index import Index
from pmdaemon.diskqueue.opening import Opened
from pmdaemon.diskqueue.ring import Ring
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.gc_tuning import collector_rests


class QueueState:
    """The records of one queue; see the module's text.

    Args:
        settings: limits.
        opened: what recovery found in the files.
        index: the index file; only ``Index.sync`` writes it.
        clock: for the records' dates.
    """

    def __init__(self, settings: QueueSettings, opened: Opened, index: Storage, clock: Clock) -> None:
        self.settings = settings
        self.name = str(settings.data_path)
        self.clock = clock
        self.lock = threading.Lock()
        self.durable = threading.Condition(self.lock)
        self.consumers_waiting = 0
        self.poison: DiskQueueError | None = None
        self.file = opened.file
        self.seed = opened.file.seed
        # A ring that kept its former size may be too small for the configured reserve.
        reserve_bytes = min(settings.reserve_bytes, opened.file.ring_bytes // 2)
        self.records = records = opened.records
        self.ring = ring = Ring(opened.file.ring_bytes, reserve_bytes, records)
        ring.write, ring.lap = opened.write, opened.lap
        ring.head, ring.tail = opened.header.head, opened.header.tail
        self.index = Index(index, opened.header, self.seed, self.lock, records)
        self.next_seq = opened.next_seq
        self.floor = opened.header.floor
        self.ready = Ready(records.live)
        self._make_ready()

    @collector_rests()
    def _make_ready(self) -> None:
        """All records may be taken."""
        records = self.records
        named = sorted((records.seqs[slot], name) for slot, name in records.destinations.items())
        for seq, name in named:
            self.ready.add_new(seq, 1, name)
        self.ready.add_new(records.durable_seq, 1, b"")

    def refuse(self) -> None:
        """Raise if the queue is poisoned or closed."""
        if self.poison is not None:
            raise self.poison

    # adding

    def reserve(
        self, payloads: Sequence[bytes], kind: int, destination: bytes, reserved: bool, slots: list[int]
    ) -> tuple[int, list[Run]]:
        """Slots, space and packed bytes for all payloads; the first number. Lock held.

        ``slots`` gets them; what raises leaves them to the caller, for ``undo``.

        Raises:
            QueueFull, RecordTooLarge: there is no room for one of them.
        """
        fixed = HEADER_BYTES + len(destination)
        spans = [fixed + len(data) + -(fixed + len(data)) % UNIT_BYTES for data in payloads]
        first_seq = self.next_seq
        runs: list[Run] = []
        for first, last, offset in self._places(spans, reserved):
            piece = payloads[first:last]
            runs.append(self.fill(offset, piece, spans[first:last], kind, destination, slots))
        return first_seq, runs

    def mark(self) -> tuple[int, int, tuple[int, int, int]]:
        """What ``undo`` needs. Lock held."""
        return self.next_seq, len(self.records.live), self.ring.mark()

    def undo(self, mark: tuple[int, int, tuple[int, int, int]], slots: list[int]) -> None:
        """Back to ``mark``; no consumer has seen what these slots hold. Lock held."""
        self.next_seq, count, ring = mark
        self.ring.undo(ring, slots)
        for slot in slots:
            self.index.release(slot)
        self.records.live.take_back(self.next_seq, self.next_seq + len(slots), count)

    def _places(self, spans: list[int], reserved: bool) -> Iterator[tuple[int, int, int]]:
        """(first, last, offset) of the pieces: all in one if that fits, else record by record."""
        index, size = self.index, sum(spans)
        keep = 0 if reserved else self.settings.reserve_entries
        if size <= self.ring.largest_bytes() and index.in_use + len(spans) <= index.capacity - keep:
            offset = self.ring.place(size, reserved=reserved)
            if offset >= 0:
                yield 0, len(spans), offset
                return
        for number, span in enumerate(spans):
            yield number, number + 1, self.place_one(span, index.capacity - keep, reserved)

    def place_one(self, size: int, limit: int, reserved: bool) -> int:
        """The offset for one record."""
        index, ring = self.index, self.ring
        if size > ring.largest_bytes():
            raise RecordTooLarge(self.name, size, ring.largest_bytes())
        if index.in_use >= limit:
            raise QueueFull(self.name, "entries", 1, max(0, limit - index.in_use))
        offset = ring.place(size, reserved=reserved)
        if offset < 0:
            raise QueueFull(self.name, "bytes in one piece", size, ring.free_bytes())
        return offset

    def fill(
        self, begin: int, payloads: Sequence[bytes], spans: Sequence[int], kind: int, destination: bytes,
        slots: list[int],
    ) -> Run:  # fmt: skip
        """Pack records one behind another from ``begin`` on; append their slots. Lock held.

        The hot loop: one crc, one concatenation and one call of ours a record.
        """
        index, records, seed, take = self.index, self.records, self.seed, self.index.take
        seqs, offsets, sizes, lengths, crcs, kinds, before, behind = records.columns
        pack, seal = BODY.pack, FRONT.pack
        dirty, tail, done = index.dirty, self.ring.tail, len(slots)
        now_us, floor = self.clock.unix_us(), self.lower_bound()
        first_seq, named = self.next_seq, len(destination)
        lap = self.ring.advance(begin, begin + sum(spans))
        if tail != NONE:
            dirty[tail] = 1
        buffers: list[bytes] = []
        offset, seq = begin, first_seq
        for data, span in zip(payloads, spans, strict=True):
            length = len(data)
            sealed = pack(seq, offset, floor, now_us, length, lap, kind, named, 0) + destination + data
            crc = crc32(sealed, seed)
            slot = take()
            before[slot], behind[slot] = tail, NONE
            slots.append(slot)
            buffers += (seal(SIGNATURE, crc), sealed, PADDING[span - 8 - len(sealed)])
            seqs[slot] = seq
            offsets[slot] = offset
            sizes[slot] = span
            lengths[slot] = length
            crcs[slot] = crc
            kinds[slot] = kind
            if named:
                records.destinations[slot] = destination
            dirty[slot] = 1
            if tail == NONE:
                self.ring.head = slot
            else:
                behind[tail] = slot
            tail = slot
            offset += span
            seq += 1
        records.live.add(first_seq, slots[done:] if done else slots)
        self.ring.tail = tail
        self.next_seq = seq
        return begin, offset, buffers

    def now_durable(self, batch: list[Request]) -> None:
        """The batch is on disk: its records may be read. Lock held."""
        for request in batch:
            self.ready.add_new(request.first_seq, request.count, request.destination)
        self.records.durable_seq = batch[-1].last_seq
        if self.consumers_waiting:
            self.durable.notify_all()

    def one_durable(self, seq: int, destination: bytes) -> None:
        """The same for the record of a single waiter. Lock held."""
        self.ready.add_new(seq, 1, destination)
        self.records.durable_seq = seq
        if self.consumers_waiting:
            self.durable.notify_all()

    # deleting

    def remove(self, slot: int) -> None:
        """Free it and its space. Lock held.

        ``Ring.unlink`` and ``Index.release`` in one: a record less costs half of the calls.
        """
        records, ring, index, dirty = self.records, self.ring, self.index, self.index.dirty
        prevs, nexts = records.before, records.behind
        before, behind = prevs[slot], nexts[slot]
        if before == NONE:
            ring.head = behind
        else:
            nexts[before] = behind
            dirty[before] = 1
        if behind == NONE:
            ring.tail = before
        else:
            prevs[behind] = before
            dirty[behind] = 1
        records.drop(slot)
        nexts[slot], index.free_head = index.free_head, slot
        index.in_use -= 1
        dirty[slot] = 1

    def remove_all(self, slots: Collection[int]) -> int:
        """``remove`` of each; returns how many. Lock held."""
        for slot in slots:
            self.remove(slot)
        self.ready.trim()
        return len(slots)

    def lower_bound(self) -> int:
        """The smallest live sequence number, or the next one to be given. Lock held."""
        live, limit, floor = self.records.live, self.next_seq, self.floor
        if live.get(floor) == NONE:
            self.floor = floor = live.first(floor, limit) if live else limit
        return floor

    # consuming

    def is_ready(self, seq: int) -> bool:
        """Whether a consumer may lock it now. Lock held."""
        slot = self.durable_slot(seq)
        if slot == NONE:
            return False
        work = self.records.work.get(slot)
        return work is None or (work.owner is None and work.not_before_ns <= self.clock.monotonic_ns())

    def durable_slot(self, seq: int) -> int:
        """The slot of a durable record; NONE if there is none of that number. Lock held."""
        return self.records.live.get(seq) if seq <= self.records.durable_seq else NONE

    def held(self, seq: int, owner: LockOwner) -> int:
        """The record's slot, if this owner has locked it; raises DiskQueueError. Lock held."""
        slot = self.records.live.get(seq)
        work = self.records.work.get(slot)
        if work is None or work.owner != owner:
            raise DiskQueueError(f"disk queue {self.name}: record {seq} is not locked by this owner")
        return slot

    def unlock(self, slot: int, delay_s: float) -> None:
        """Let a locked record be taken again, now or later. Lock held."""
        work, seq = self.records.working(slot), self.records.seqs[slot]
        work.owner = None
        self.index.dirty[slot] = 1
        if delay_s > 0:
            work.not_before_ns = self.clock.monotonic_ns() + round(delay_s * 1e9)
            self.ready.delay(seq, self.records.destination(slot), work.not_before_ns)
        else:
            work.not_before_ns = 0
            self.ready.add_again(seq, self.records.destination(slot))

    def owners(self) -> set[LockOwner]:
        """Processes that have locked records. Lock held."""
        return {work.owner for work in self.records.work.values() if work.owner}

    def release(self, owners: Container[LockOwner]) -> int:
        """Unlock what these hold, retry count raised; returns how many. Lock held."""
        theirs = [slot for slot, work in self.records.work.items() if work.owner in owners]
        for slot in theirs:
            self.records.work[slot].retries += 1
            self.unlock(slot, 0.0)
        return len(theirs)

    # the index file

    def fields_before(self, *, is_closing: bool) -> dict[str, int]:
        """Fields of the index header that must be read before slots are packed. Lock held."""
        everything = self.records.durable_seq >= self.next_seq - 1
        return {
            "synced_us": self.clock.unix_us(),
            "synced_seq": self.records.durable_seq,
            # One more than needed while open, so that only a closed queue counts as cleanly closed.
            "next_seq": self.next_seq + (0 if everything and is_closing else 1),
            "floor": self.lower_bound(),
        }

    def fields_after(self) -> dict[str, int]:
        """Header fields that are read when all slots are written; recovery does not trust them. Lock held."""
        return {"head": self.ring.head, "tail": self.ring.tail}

    # gauges

    def fullness_ratio(self) -> float:
        """Share of the ring, or of the entries if that is more, in use: 0 to 1. Lock held."""
        ring, index = self.ring, self.index
        return max(1 - ring.free_bytes() / ring.ring_bytes, index.in_use / index.capacity)

    def has_room(self, size_bytes: int, records: int) -> bool:
        """See ``DiskQueue.has_room``. Lock held."""
        return (
            self.ring.free_bytes() > size_bytes + self.ring.reserve_bytes
            and self.index.in_use + records <= self.index.capacity - self.settings.reserve_entries
        )

    def stat(self) -> dict[str, Any]:
        """Figures for metrics and tools. Lock held."""
        return {
            "queue_id": self.file.queue_id.hex(),
            "records": len(self.records.live),
            "capacity": self.index.capacity,
            "ring_bytes": self.ring.ring_bytes,
            "free_bytes": self.ring.free_bytes(),
            "oldest_seq": self.lower_bound(),
            "durable_seq": self.records.durable_seq,
            "next_seq": self.next_seq,
            "skips": self.ring.skips,
            "poisoned": str(self.poison) if self.poison else "",
        }
