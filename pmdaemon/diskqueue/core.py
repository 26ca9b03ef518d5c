"""The queue's core: reserve, commit, delete, index sync, poison. ``queue`` adds the consumers' side.

State, all guarded by ``_lock``: the ring with its in-use list, the index with its slots, ``_live`` (sequence
number -> entry), ``_ready``, ``_next_seq``, ``_floor`` (below it everything was deleted), ``_durable_seq``,
the drop counters, ``_poison``. Nothing is written to a file while the lock is held.

Life of a record: reserved (entry and space taken, not durable, nobody sees it) -> durable (readable) ->
deleted (entry and space free at once; the index file learns of it at its next sync, so a crash may bring it
back).

Threads: any may add, read, delete. ``dq-sync`` (optional) leads the rounds that nobody waits for and syncs
the index periodically; without it, ``flush`` and ``sync_index`` do so. If it dies, the queue is poisoned.
Source: Q1-Q6.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final

import structlog

from pmdaemon.diskqueue.collector import collector_rests
from pmdaemon.diskqueue.commit import Commit, Request, Run
from pmdaemon.diskqueue.entry import NONE, Entry
from pmdaemon.diskqueue.errors import (
    DiskQueueError,
    QueueClosed,
    QueueFull,
    QueuePoisoned,
    RecordTooLarge,
)
from pmdaemon.diskqueue.index import Index
from pmdaemon.diskqueue.ready import Ready
from pmdaemon.diskqueue.record import BODY, FRONT, HEADER_BYTES, PADDING, SIGNATURE, UNIT_BYTES
from pmdaemon.diskqueue.recovery import Recovered, Report
from pmdaemon.diskqueue.resize import open_resized
from pmdaemon.diskqueue.ring import Ring
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.span import open_data
from pmdaemon.diskqueue.storage import FileStorage, Storage
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("diskqueue")
STOP_S: Final = 10.0
MOST_DESTINATION_BYTES: Final = 1024


class Core:
    """See the module's text.

    Args:
        settings: paths and limits.
        data, index: the two files; opened from the paths when not given.
        helper: whether to run ``dq-sync``.

    Raises:
        QueueBusy, QueueNoSpace, QueueUnreadable: it cannot be opened; nothing was changed.
        OSError: the disk fails.
    """

    def __init__(
        self,
        settings: QueueSettings,
        *,
        data: Storage | None = None,
        index: Storage | None = None,
        helper: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.name = str(settings.data_path)
        self._clock = clock or SystemClock()
        self._data: Storage = data or open_data(settings)
        self._index_storage: Storage | None = index
        try:
            self._index_storage = index or FileStorage(settings.resolved_index_path)
            self._data, self._index_storage, opened = open_resized(
                self._data, self._index_storage, settings, self._clock.unix_us()
            )
        except BaseException:
            self._close_files()
            raise
        self._lock = threading.Lock()
        self._durable = threading.Condition(self._lock)
        self._consumers_waiting = 0
        self._file = opened.file
        self._seed = opened.file.seed
        self._ring = Ring(opened.file.ring_bytes, settings.reserve_bytes)
        self._index = Index(self._index_storage, opened.header, self._seed, self._lock)
        self._poison: DiskQueueError | None = None
        self._live: dict[int, Entry] = {}
        self._ready = Ready()
        self.report: Report = opened.recovered.report
        self._adopt(opened.recovered)
        self._group = ThreadGroup(self._helper_died)
        self._work = threading.Event()
        self._stopping = False
        self._commit = Commit(
            self._data, settings, self._lock, self._clock, self._now_durable, self._one_durable,
            self._poisoned, self._work.set if helper else None,
        )  # fmt: skip
        if helper:
            self._group.start("dq-sync", self._help)

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
        self.dropped_records = header.dropped_records
        self.dropped_bytes = header.dropped_bytes

    # adding

    def _put_one(self, data: bytes, kind: int, destination: bytes, reserved: bool) -> int:
        """Add one record and wait until it is durable: inline if nothing else is going on, else with others.

        Raises:
            QueueFull, RecordTooLarge: it was not added. QueuePoisoned, QueueClosed.
        """
        size = HEADER_BYTES + len(destination) + len(data)
        span = size + -size % UNIT_BYTES
        with self._lock:
            self._refuse()
            limit = self._index.capacity - (0 if reserved else self.settings.reserve_entries)
            is_alone = self._commit.lead_alone()
            try:
                offset = self._place_one(span, limit, reserved)
                entries: list[Entry] = []
                run = self._fill(offset, (data,), (span,), kind, destination, entries)
            except BaseException:
                if is_alone:
                    self._commit.give_up()
                raise
            seq = entries[0].seq
            if not is_alone:
                request = Request(self._commit, seq, entries, [run])
                self._commit.add(request, waits=True)
                self._commit.queue_up(request)
        if is_alone:
            self._commit.solo(run, entries[0])
        else:
            self._commit.wait_in_queue(request)
        return seq

    def _reserve(self, payloads: Sequence[bytes], kind: int, destination: bytes, reserved: bool) -> Request:
        """Entries, space and packed bytes for all payloads, or nothing. Lock held.

        Raises:
            QueueFull, RecordTooLarge: nothing was added.
        """
        fixed = HEADER_BYTES + len(destination)
        spans = [fixed + len(data) + -(fixed + len(data)) % UNIT_BYTES for data in payloads]
        mark = self._ring.mark()
        entries: list[Entry] = []
        runs: list[Run] = []
        try:
            for first, last, offset in self._places(spans, reserved):
                some = payloads[first:last]
                runs.append(self._fill(offset, some, spans[first:last], kind, destination, entries))
        except DiskQueueError:
            self._ring.undo(mark, entries)
            for entry in entries:
                self._index.release(entry.slot)
                del self._live[entry.seq]
            self._next_seq -= len(entries)
            raise
        return Request(self._commit, entries[0].seq, entries, runs)

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
        """The offset for one record, perhaps after dropping old ones."""
        index, ring = self._index, self._ring
        if size > ring.largest_bytes():
            raise RecordTooLarge(self.name, size, ring.largest_bytes())
        while True:
            offset = ring.place(size, reserved=reserved) if index.in_use < limit else -1
            if offset >= 0:
                return offset
            if self.settings.when_full != "drop-oldest" or not self._drop_oldest():
                if index.in_use >= limit:
                    raise QueueFull(self.name, "entries", 1, max(0, limit - index.in_use))
                raise QueueFull(self.name, "bytes in one piece", size, ring.free_bytes())

    def _fill(
        self, begin: int, payloads: Sequence[bytes], spans: Sequence[int], kind: int, destination: bytes,
        entries: list[Entry],
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
            entry = Entry(seq, offset, end, length, kind, destination, crc, slot, tail)
            buffers += (seal(SIGNATURE, crc), sealed, PADDING[span - 8 - len(sealed)])
            slots[slot] = live[seq] = entry
            dirty.append(slot)
            if tail is None:
                self._ring.head = entry
            else:
                tail.next = entry
            tail = entry
            entries.append(entry)
            offset = end
            seq += 1
        self._ring.tail = tail
        self._next_seq = seq
        return begin, offset, buffers

    def _drop_oldest(self) -> bool:
        """Delete the head to make room, counted; False if it is not durable or somebody works on it."""
        entry = self._ring.head
        if entry is None or not entry.durable or (entry.work is not None and entry.work.owner is not None):
            return False
        self._remove(entry)
        self.dropped_records += 1
        self.dropped_bytes += entry.length
        return True

    def _now_durable(self, batch: list[Request]) -> None:
        """The batch is on disk: its records may be read. Lock held."""
        for request in batch:
            for entry in request.entries:
                entry.durable = True
            self._ready.add_new(request.first_seq, request.count, request.entries[0].destination)
        self._durable_seq = batch[-1].last_seq
        if self._consumers_waiting:
            self._durable.notify_all()

    def _one_durable(self, entry: Entry) -> None:
        """The same for the record of a single waiter. Lock held."""
        entry.durable = True
        self._ready.add_new(entry.seq, 1, entry.destination)
        self._durable_seq = entry.seq
        if self._consumers_waiting:
            self._durable.notify_all()

    # deleting

    def _remove(self, entry: Entry) -> None:
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

    # index, helper, end

    def sync_index(self) -> int:
        """Write the index's changes now; returns the entries written.

        Raises:
            QueuePoisoned: the write or sync failed, now or earlier.
        """
        self._refuse()
        try:
            return self._index.sync(self._note, self._lists)
        except OSError as exc:
            raise self._fail(f"index sync: {exc}") from exc

    def flush(self) -> None:
        """Make everything submitted so far durable, without the helper. Raises QueuePoisoned."""
        while self._commit.lead_pending():
            pass
        self._refuse()

    def close(self) -> None:
        """Commit what was submitted, sync the index, stop the helper, let go of the files."""
        with self._lock:
            if isinstance(self._poison, QueueClosed):
                return
        self._stopping = True
        self._work.set()
        try:
            self._group.join(STOP_S)
            if self._poison is None:
                self.flush()
                self.sync_index()
        finally:
            with self._lock:
                self._poison = QueueClosed(self.name)
                self._durable.notify_all()
            self._commit.fail_pending(self._poison)
            self._close_files()

    def _close_files(self) -> None:
        self._data.close()
        if self._index_storage is not None:
            self._index_storage.close()

    def _help(self) -> None:
        """Thread dq-sync."""
        due_ns = self._clock.monotonic_ns() + round(self.settings.index_sync_s * 1e9)
        while not self._stopping and self._poison is None:
            self._work.wait(max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9))
            self._work.clear()
            while self._commit.lead_pending():
                pass
            if self._clock.monotonic_ns() >= due_ns and self._poison is None:
                self.sync_index()
                due_ns = self._clock.monotonic_ns() + round(self.settings.index_sync_s * 1e9)

    def _helper_died(self, name: str, exc: BaseException) -> None:
        self._fail(f"thread {name} died: {exc}")

    def _note(self) -> dict[str, int]:
        """Header fields that must be read before slots are packed. Lock held."""
        everything = self._durable_seq >= self._next_seq - 1
        return {
            "synced_us": self._clock.unix_us(),
            "synced_seq": self._durable_seq,
            # One more than needed while open, so that only a closed queue counts as cleanly closed.
            "next_seq": self._next_seq + (0 if everything and self._stopping else 1),
            "floor": self._lower_bound(),
            "dropped_records": self.dropped_records,
            "dropped_bytes": self.dropped_bytes,
        }

    def _lists(self) -> dict[str, int]:
        head, tail = self._ring.head, self._ring.tail
        return {"head": head.slot if head else NONE, "tail": tail.slot if tail else NONE}

    def _refuse(self) -> None:
        """Raise if the queue is poisoned or closed."""
        if self._poison is not None:
            raise self._poison

    def _poisoned(self, reason: str) -> QueuePoisoned:
        """Refuse everything from now on."""
        error = QueuePoisoned(self.name, reason)
        with self._lock:
            if self._poison is None:
                self._poison = error
                log.error("queue-poisoned", queue=self.name, reason=reason)
            self._durable.notify_all()
        return error

    def _fail(self, reason: str) -> QueuePoisoned:
        error = self._poisoned(reason)
        self._commit.fail_pending(error)
        return error


OnDurable = Callable[[Request], None]
