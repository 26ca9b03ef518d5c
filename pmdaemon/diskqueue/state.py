"""The queue in memory: which records there are, where they lie, what may be read. Pure: no file is touched.

State, all guarded by ``_lock``: the ring with its in-use list, the index with its slots, ``_live`` (sequence
number -> entry), ``_ready``, ``_next_seq``, ``_floor`` (below it everything was deleted), ``_durable_seq``.
Every method is called with the lock held, except at the start.

Life of a record: reserved (entry and space taken, not durable, nobody sees it) -> durable (readable) ->
deleted (entry and space free at once; the index file learns of it at its next sync, so a crash may bring it
back).

Invariants: an entry stands in the ring's list, the index and ``_live``, or in none of them; what does not fit
leaves nothing behind. Source: Q3, Q4, Q6.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from operator import attrgetter

from pmdaemon.diskqueue.collector import collector_rests
from pmdaemon.diskqueue.commit import Request, Run
from pmdaemon.diskqueue.entry import IndexEntry
from pmdaemon.diskqueue.errors import QueueFull, RecordTooLarge
from pmdaemon.diskqueue.index import Index
from pmdaemon.diskqueue.opening import Opened
from pmdaemon.diskqueue.ready import Ready
from pmdaemon.diskqueue.record import BODY, FRONT, HEADER_BYTES, PADDING, SIGNATURE, UNIT_BYTES
from pmdaemon.diskqueue.recovery import Recovered
from pmdaemon.diskqueue.ring import Ring
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime.clock import Clock


class QueueState:
    """See the module's text.

    Args:
        settings: limits.
        opened: what recovery found in the files.
        index: the index file; only ``Index.sync`` writes it.
        clock: for the records' dates.
    """

    def __init__(self, settings: QueueSettings, opened: Opened, index: Storage, clock: Clock) -> None:
        self.settings = settings
        self.name = str(settings.data_path)
        self._clock = clock
        self._lock = threading.Lock()
        self._durable = threading.Condition(self._lock)
        self._consumers_waiting = 0
        self._file = opened.file
        self._seed = opened.file.seed
        # A ring that kept its former size may be too small for the configured reserve.
        reserve_bytes = min(settings.reserve_bytes, opened.file.ring_bytes // 2)
        self._ring = Ring(opened.file.ring_bytes, reserve_bytes)
        self._index = Index(index, opened.header, self._seed, self._lock)
        self._live: dict[int, IndexEntry] = {}
        self._ready = Ready(self._live)
        self._adopt(opened.recovered)

    @collector_rests()
    def _adopt(self, recovered: Recovered) -> None:
        """Take over what recovery found."""
        header = self._index.header
        self._ring.write, self._ring.lap = recovered.write, recovered.lap
        entries = recovered.entries  # linked, in ring order
        if entries:
            self._ring.head, self._ring.tail = entries[0], entries[-1]
        for entry in sorted(entries, key=attrgetter("seq")):
            self._index.slots[entry.slot] = self._live[entry.seq] = entry
            self._ready.add_new(entry.seq, 1, entry.destination)
        taken = {entry.slot for entry in entries}
        self._index.used, self._index.in_use = header.used, len(taken)
        for slot in reversed([number for number in range(header.used) if number not in taken]):
            self._index.slots[slot] = self._index.free_head
            self._index.free_head = slot
        self._next_seq = recovered.next_seq
        self._floor = recovered.floor
        self._durable_seq = recovered.next_seq - 1

    # adding

    def _reserve(
        self, payloads: Sequence[bytes], kind: int, destination: bytes, reserved: bool
    ) -> tuple[list[IndexEntry], list[Run]]:
        """Entries, space and packed bytes for all payloads, or nothing. Lock held.

        Raises:
            QueueFull, RecordTooLarge: nothing was added.
        """
        fixed = HEADER_BYTES + len(destination)
        spans = [fixed + len(data) + -(fixed + len(data)) % UNIT_BYTES for data in payloads]
        mark = self._mark()
        entries: list[IndexEntry] = []
        runs: list[Run] = []
        try:
            for first, last, offset in self._places(spans, reserved):
                some = payloads[first:last]
                runs.append(self._fill(offset, some, spans[first:last], kind, destination, entries))
        except BaseException:  # no room, or a signal's
            self._undo(mark, entries)
            raise
        return entries, runs

    def _mark(self) -> tuple[int, tuple[int, int, int]]:
        """What ``_undo`` needs. Lock held."""
        return self._next_seq, self._ring.mark()

    def _undo(self, mark: tuple[int, tuple[int, int, int]], entries: list[IndexEntry]) -> None:
        """Back to ``mark``; nobody has seen these entries. Lock held."""
        self._next_seq = mark[0]
        self._ring.undo(mark[1], entries)
        for entry in entries:
            self._index.release(entry.slot)
            self._live.pop(entry.seq, None)

    def _places(self, spans: list[int], reserved: bool) -> Iterator[tuple[int, int, int]]:
        """(first, last, offset) of the pieces: all in one if that fits, else record by record."""
        index, size = self._index, sum(spans)
        keep = 0 if reserved else self.settings.reserve_entries
        if size <= self._ring.largest_bytes() and index.in_use + len(spans) <= index.capacity - keep:
            offset = self._ring.place(size, reserved=reserved)
            if offset >= 0:
                yield 0, len(spans), offset
                return
        for number, span in enumerate(spans):
            yield number, number + 1, self._place_one(span, index.capacity - keep, reserved)

    def _place_one(self, size: int, limit: int, reserved: bool) -> int:
        """The offset for one record."""
        index, ring = self._index, self._ring
        if size > ring.largest_bytes():
            raise RecordTooLarge(self.name, size, ring.largest_bytes())
        if index.in_use >= limit:
            raise QueueFull(self.name, "entries", 1, max(0, limit - index.in_use))
        offset = ring.place(size, reserved=reserved)
        if offset < 0:
            raise QueueFull(self.name, "bytes in one piece", size, ring.free_bytes())
        return offset

    def _fill(
        self, begin: int, payloads: Sequence[bytes], spans: Sequence[int], kind: int, destination: bytes,
        entries: list[IndexEntry],
    ) -> Run:  # fmt: skip
        """Pack records one behind another from ``begin`` on; append their entries. Lock held.

        The hot loop: one crc, one concatenation and no call of ours a record.
        """
        index, live, seed = self._index, self._live, self._seed
        pack, seal, crc32 = BODY.pack, FRONT.pack, zlib.crc32
        slots, dirty, tail = index.slots, index.dirty, self._ring.tail
        now_us, floor = self._clock.unix_us(), self._lower_bound()
        seq, named = self._next_seq, len(destination)
        lap = self._ring.advance(begin, begin + sum(spans))
        if tail is not None:
            dirty.append(tail.slot)
        buffers: list[bytes] = []
        offset = begin
        for data, span in zip(payloads, spans, strict=True):
            length, end = len(data), offset + span
            sealed = pack(seq, offset, floor, now_us, length, lap, kind, named, 0) + destination + data
            crc = crc32(sealed, seed)
            slot = index.take()
            entry = IndexEntry(seq, offset, end, length, kind, destination, crc, slot, tail)
            entries.append(entry)
            buffers += (seal(SIGNATURE, crc), sealed, PADDING[span - 8 - len(sealed)])
            slots[slot] = live[seq] = entry
            dirty.append(slot)
            if tail is None:
                self._ring.head = entry
            else:
                tail.next = entry
            tail = entry
            offset = end
            seq += 1
        self._ring.tail = tail
        self._next_seq = seq
        return begin, offset, buffers

    def _now_durable(self, batch: list[Request]) -> None:
        """The batch is on disk: its records may be read. Lock held."""
        for request in batch:
            for entry in request.entries:
                entry.durable = True
            self._ready.add_new(request.first_seq, request.count, request.entries[0].destination)
        self._durable_seq = batch[-1].last_seq
        if self._consumers_waiting:
            self._durable.notify_all()

    def _one_durable(self, entry: IndexEntry) -> None:
        """The same for the record of a single waiter. Lock held."""
        entry.durable = True
        self._ready.add_new(entry.seq, 1, entry.destination)
        self._durable_seq = entry.seq
        if self._consumers_waiting:
            self._durable.notify_all()

    # deleting

    def _remove(self, entry: IndexEntry) -> None:
        """Free its entry and space. Lock held."""
        dirty = self._index.dirty
        if entry.prev is not None:
            dirty.append(entry.prev.slot)
        if entry.next is not None:
            dirty.append(entry.next.slot)
        self._ring.unlink(entry)
        self._index.release(entry.slot)
        del self._live[entry.seq]

    def _lower_bound(self) -> int:
        """The smallest live sequence number, or the next one to be given. Lock held."""
        floor, live, limit = self._floor, self._live, self._next_seq
        if not live:
            floor = limit
        while floor < limit and floor not in live:
            floor += 1
        self._floor = floor
        return floor
