"""DiskQueue: add, take, delete; its files, commits and index syncs.

    add        put (blocks until durable), put_many (a batch, one sync),
               submit (returns at once with a handle)
    consume    lock -> process -> delete, or retry (count raised, perhaps later),
               unlock (as if nothing was), or move_aside (to the secondary queue)
    inspect    read, peek, stat

A queue has a state (``state.QueueState``: the records in memory, and their lock), a commit
(``commit.Commit``: what makes added records durable in groups) and two files. Nothing is written to a file
while the lock is held. A failed write or sync poisons the queue: it refuses everything until it is opened
again.

Locks of records belong to a process (number and start time): ``release_dead`` frees those whose process is
gone; threads of one process share its locks and must agree among themselves. A delivery is at least once:
after a crash, what was deleted within the last index sync period may come back.

Threads: any may add, read, delete. ``dq-sync`` (optional) leads the rounds that no thread waits for and syncs
the index periodically; without it, ``flush`` and ``sync_index`` do so. If it dies, the queue is poisoned.
Source: Q1-Q9.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import structlog

from pmdaemon.diskqueue.commit import Commit, Request, Run
from pmdaemon.diskqueue.consumer import LockOwner, QueueMessage, is_alive, myself
from pmdaemon.diskqueue.errors import (
    DiskQueueError,
    QueueClosed,
    QueuePoisoned,
    RecordDamaged,
    RecordTooLarge,
)
from pmdaemon.diskqueue.format import HEADER_BYTES, NONE, UNIT_BYTES
from pmdaemon.diskqueue.reading import RecordReader
from pmdaemon.diskqueue.recovery import RecoveryReport
from pmdaemon.diskqueue.resize import open_resized
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.state import QueueState
from pmdaemon.diskqueue.storage import FileStorage, Storage, open_data
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, SystemClock
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("diskqueue")
STOP_S: Final = 10.0
MOST_DESTINATION_BYTES: Final = 1024
OnDurable = Callable[[Request], None]


class DiskQueue:
    """A durable queue owned by this process; see the module's text.

    Args:
        settings: paths and limits.
        data, index: the two files; opened from the paths when not given.
        helper: whether to run ``dq-sync``.

    Raises:
        QueueBusy, QueueNoSpace, QueueUnreadable: it cannot be opened; nothing was changed.
        OSError: the disk fails.
    """

    secondary: DiskQueue | None = None
    """Where records go that leave this queue without having been processed."""

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
        self._clock = clock = clock or SystemClock()
        self._data: Storage = data or open_data(settings)
        self._index_storage: Storage | None = index
        try:
            self._index_storage = index or FileStorage(settings.resolved_index_path)
            self._data, self._index_storage, opened = open_resized(
                self._data, self._index_storage, settings, clock.unix_us()
            )
        except BaseException:
            self._close_files()
            raise
        self._state = state = QueueState(settings, opened, self._index_storage, clock)
        self.report: RecoveryReport = opened.report
        self._reader = RecordReader(self._data, state)
        for storage in (self._data, self._index_storage):
            storage.release()  # recovery has read all of it
        self._group = ThreadGroup(self._helper_died)
        self._work = threading.Event()
        self._stopping = False
        self._commit = Commit(
            self._data, settings, state.lock, clock, state.now_durable, state.one_durable,
            self._poisoned, self._work.set if helper else None,
        )  # fmt: skip
        if helper:
            self._group.start("dq-sync", self._help)

    # adding

    def put(self, data: bytes, *, kind: int = 0, destination: bytes = b"", reserved: bool = False) -> int:
        """Add one record; returns its sequence number.

        Durability: on disk on return.

        Raises:
            QueueFull, RecordTooLarge: it was not added. QueuePoisoned, QueueClosed: the queue refuses.
            TypeError, ValueError: not bytes, or ``kind`` outside of 0 to 65535; it was not added.
        """
        self._check((data,), kind, destination)
        return self._put_one(data, kind, destination, reserved)

    def put_many(
        self, payloads: Sequence[bytes], *, kind: int = 0, destination: bytes = b"", reserved: bool = False
    ) -> range:
        """Add a batch under one sync, all or none reserved; returns the sequence numbers.

        Durability: all on disk on return. A crash before may leave any of them.

        Raises:
            As ``put``.
        """
        if not payloads:
            return range(0)
        request = self._submit(payloads, kind, destination, reserved, None, waits=True)
        request.wait()
        return range(request.first_seq, request.first_seq + request.count)

    def submit(
        self,
        payloads: Sequence[bytes],
        *,
        kind: int = 0,
        destination: bytes = b"",
        reserved: bool = False,
        on_durable: OnDurable | None = None,
        wake_helper: bool = True,
    ) -> Request:
        """Add a batch without waiting; the handle's ``wait`` blocks until durable.

        ``on_durable`` is called from the thread that synced, for each request once it is on disk; it must be
        short and must not raise. It is not called when the commit fails: see ``Request.error``.
        ``wake_helper`` False: the caller waits itself, soon; without it the helper starts a round at once.

        Raises:
            As ``put``; ValueError for no payloads.
        """
        if not payloads:
            raise ValueError("nothing to submit")
        return self._submit(payloads, kind, destination, reserved, on_durable, waits=not wake_helper)

    def _submit(
        self,
        payloads: Sequence[bytes],
        kind: int,
        destination: bytes,
        reserved: bool,
        on_durable: OnDurable | None,
        *,
        waits: bool,
    ) -> Request:
        state = self._state
        self._check(payloads, kind, destination)
        slots: list[int] = []
        request: Request | None = None
        with state.lock:
            state.refuse()
            mark = state.mark()
            try:
                first_seq, runs = state.reserve(payloads, kind, destination, reserved, slots)
                request = Request(self._commit, first_seq, len(payloads), destination, runs)
                request.on_done = on_durable
                self._commit.add(request, waits=waits)
            except BaseException:  # no room, or a signal's: records that nobody writes would count as damage
                if not self._commit.holds(request):
                    state.undo(mark, slots)
                raise
        return request

    def _check(self, payloads: Sequence[bytes], kind: int, destination: bytes) -> None:
        """Refuse what cannot be packed, before anything is reserved for it."""
        for number, data in enumerate(payloads):
            if not isinstance(data, bytes):
                raise TypeError(f"payload {number} is {type(data).__name__}; a record is bytes")
        if not 0 <= kind <= 0xFFFF:
            raise ValueError(f"kind = {kind} is outside of 0 to 65535")
        if len(destination) > MOST_DESTINATION_BYTES:
            raise RecordTooLarge(self._state.name, len(destination), MOST_DESTINATION_BYTES)

    def _put_one(self, data: bytes, kind: int, destination: bytes, reserved: bool) -> int:
        """Add one record and wait until it is durable: inline if nothing else is going on, else with others.

        Raises:
            QueueFull, RecordTooLarge: it was not added. QueuePoisoned, QueueClosed.
        """
        state = self._state
        size = HEADER_BYTES + len(destination) + len(data)
        span = size + -size % UNIT_BYTES
        slots: list[int] = []
        seq = 0
        run: Run | None = None
        request: Request | None = None
        try:
            with state.lock:
                state.refuse()
                limit = state.index.capacity - (0 if reserved else self.settings.reserve_entries)
                is_alone, mark = self._commit.lead_alone(), state.mark()
                try:
                    seq, offset = state.next_seq, state.place_one(span, limit, reserved)
                    run = state.fill(offset, (data,), (span,), kind, destination, slots)
                    if not is_alone:
                        request = Request(self._commit, seq, 1, destination, [run])
                        self._commit.add(request, waits=True)
                        self._commit.queue_up(request)
                except BaseException:
                    if run is None or not (is_alone or self._commit.holds(request)):
                        run = None
                        state.undo(mark, slots)
                    raise
            if request is None:
                self._commit.solo(run, seq, destination)
            else:
                self._commit.wait_in_queue(request)
        except BaseException:
            if request is not None:
                self._commit.let_go(request)
            else:
                self._commit.let_go_alone(seq, destination, run)
            raise
        return seq

    def leave_unused(self, through: int) -> int:
        """Give no number up to ``through`` any more; returns how many stay unused. Nothing may be pending.

        Durability: with the next record; until then the caller asks again after each opening.
        """
        state = self._state
        with state.lock:
            state.refuse()
            assert state.records.durable_seq == state.next_seq - 1, "records are under way"
            unused = max(0, through - state.records.durable_seq)
            state.next_seq += unused
            state.records.durable_seq += unused
            return unused

    # consuming

    def lock(
        self,
        limit: int = 1,
        *,
        destination: bytes | None = None,
        most_bytes: int = 1 << 20,
        owner: LockOwner | None = None,
    ) -> list[QueueMessage]:
        """Lock and return the oldest ready records, in order; empty when there is none.

        ``destination`` None means all; one record is returned even if it is larger than ``most_bytes``;
        ``owner`` is on whose behalf, this process when None.

        Raises:
            RecordDamaged: the first of them fails its checksum (it stays locked; ``discard`` it); those
            before a damaged one are returned, and the next call meets it. QueuePoisoned, QueueClosed.
        """
        messages: list[QueueMessage] = []
        self._lock_more(messages, limit, destination, most_bytes, owner or myself())
        return messages

    def _lock_more(
        self,
        messages: list[QueueMessage],
        limit: int,
        destination: bytes | None,
        most_bytes: int,
        owner: LockOwner,
    ) -> None:
        """Lock ready records and append them, up to ``limit`` in all; raises only when there is none."""
        state = self._state
        records = state.records
        with state.lock:
            state.refuse()
            ring = self._reader.ring()
            state.ready.wake(self._clock.monotonic_ns(), state.lower_bound())
            while len(messages) < limit and (most_bytes > 0 or not messages):
                seq = state.ready.next(destination, state.is_ready)
                if seq is None:
                    break
                slot = records.live.get(seq)
                length = records.lengths[slot]
                if messages and length > most_bytes:
                    state.ready.add_again(seq, records.destination(slot))
                    break
                records.working(slot).owner = owner
                state.index.dirty[slot] = 1
                try:
                    messages.append(self._reader.message(slot, ring))
                except RecordDamaged:
                    if not messages:
                        raise
                    state.unlock(slot, 0.0)
                    break
                most_bytes -= length

    def lock_group(self, limit: int = 100, *, owner: LockOwner | None = None) -> list[QueueMessage]:
        """Lock the oldest ready record and others for the same destination, so that they go out together."""
        messages = self.lock(1, owner=owner)
        if messages and messages[0].destination:
            self._lock_more(messages, limit, messages[0].destination, 1 << 20, owner or myself())
        return messages

    def delete(self, seqs: Iterable[int], *, owner: LockOwner | None = None) -> None:
        """Processed: the records leave the queue. Touches memory only; the index file follows.

        Raises:
            DiskQueueError: one of them is not locked by this owner; those before it are deleted.
        """
        state = self._state
        owner = owner or myself()
        with state.lock:
            state.refuse()
            for seq in seqs:
                state.remove(state.held(seq, owner))
            state.ready.trim()

    def unlock(self, seqs: Iterable[int], *, owner: LockOwner | None = None) -> None:
        """Give the locks back; the records are ready again as if nothing had been."""
        state = self._state
        owner = owner or myself()
        with state.lock:
            state.refuse()
            for seq in seqs:
                state.unlock(state.held(seq, owner), 0.0)

    def retry(self, seq: int, *, delay_s: float = 0.0, owner: LockOwner | None = None) -> bool:
        """Not processed: retry count raised, ready again after ``delay_s``; False if it left the queue.

        Past ``retry_limit`` it goes to the secondary queue, or is discarded without one.

        Raises:
            DiskQueueError: not locked by this owner. QueueFull, RecordTooLarge and other errors of the
            secondary: it did not take the record, which stays, ready after the delay.
        """
        state = self._state
        owner = owner or myself()
        with state.lock:
            state.refuse()
            slot = state.held(seq, owner)
            work = state.records.working(slot)
            work.retries += 1
            work.last_retry_us = self._clock.unix_us()
            if work.retries <= self.settings.retry_limit:
                state.unlock(slot, delay_s)
                return True
        try:
            self.move_aside(seq, owner=owner)
        except DiskQueueError:
            with state.lock:
                # Else the secondary has it, and only the deletion here was refused.
                if seq in state.records.live:
                    state.unlock(state.held(seq, owner), delay_s)
            raise
        return False

    def move_aside(self, seq: int, *, owner: LockOwner | None = None) -> None:
        """Move a locked record to the secondary queue (durable there first); without one, discard it."""
        state = self._state
        owner = owner or myself()
        with state.lock:
            state.refuse()
            slot = state.held(seq, owner)
            message = self._reader.message(slot, self._reader.ring()) if self.secondary else None
        if self.secondary is not None and message is not None:
            self.secondary.put(
                message.data, kind=message.kind, destination=message.destination, reserved=True
            )
        self.delete([seq], owner=owner)

    def delete_through(self, seq: int) -> int:
        """Delete every durable record up to ``seq``, locked or not: for a single reader with a cursor."""
        state = self._state
        with state.lock:
            state.refuse()
            last = min(seq, state.records.durable_seq)
            return state.remove_all(
                [slot for _seq, slot in state.records.live.between(state.lower_bound(), last)]
            )

    def discard(self, seqs: Iterable[int]) -> int:
        """Delete these durable records, locked or not; returns how many there were."""
        state = self._state
        with state.lock:
            state.refuse()
            found = dict.fromkeys(slot for seq in seqs if (slot := state.durable_slot(seq)) != NONE)
            return state.remove_all(found)

    def release_dead(self) -> int:
        """Unlock what processes hold that are gone, retry count raised; returns how many."""
        state = self._state
        with state.lock:
            owners = state.owners()
        gone = {owner for owner in owners if not is_alive(owner)}
        with state.lock:
            return state.release(gone)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a record is ready or the time has passed; returns whether one is ready now."""
        state = self._state
        deadline = Deadline(timeout_s)
        with state.lock:
            state.consumers_waiting += 1
            try:
                while True:
                    state.refuse()
                    state.ready.wake(self._clock.monotonic_ns(), state.lower_bound())
                    seq = state.ready.next(None, state.is_ready)
                    if seq is not None:
                        state.ready.add_again(seq, b"")
                        return True
                    if deadline.passed:
                        return False
                    state.durable.wait(deadline.left_s())
            finally:
                state.consumers_waiting -= 1

    # inspecting

    def read(self, seq: int) -> QueueMessage | None:
        """A durable record, or None when it is not there (any more).

        Raises:
            RecordDamaged: it fails its checksum.
        """
        state = self._state
        with state.lock:
            state.refuse()
            slot = state.durable_slot(seq)
            return self._reader.message(slot, self._reader.ring()) if slot != NONE else None

    def peek(self, after_seq: int, most_bytes: int) -> list[QueueMessage]:
        """Durable records behind ``after_seq`` in order, locked or not, at least one if there is any."""
        state = self._state
        messages = []
        with state.lock:
            state.refuse()
            records, ring = state.records, self._reader.ring()
            first = max(after_seq + 1, state.lower_bound())
            for _seq, slot in records.live.between(first, records.durable_seq):
                messages.append(self._reader.message(slot, ring))
                most_bytes -= records.lengths[slot]
                if most_bytes <= 0:
                    break
        return messages

    # gauges

    @property
    def name(self) -> str:
        """The path of its data file."""
        return self._state.name

    @property
    def queue_id(self) -> str:
        """16 hex digits, drawn when the queue was made."""
        return self._state.file.queue_id.hex()

    @property
    def durable_seq(self) -> int:
        """The newest durable record's number; none beyond it can be read."""
        return self._state.records.durable_seq

    @property
    def oldest_seq(self) -> int:
        """The oldest record held; one more than the newest given when there is none."""
        with self._state.lock:
            return self._state.lower_bound()

    @property
    def used_bytes(self) -> int:
        """Bytes from the oldest record to the newest, holes included."""
        with self._state.lock:
            return self._state.ring.ring_bytes - self._state.ring.free_bytes()

    @property
    def ring_bytes(self) -> int:
        """Size of the ring: what was asked for when the queue was made."""
        return self._state.ring.ring_bytes

    @property
    def fullness_ratio(self) -> float:
        """Share of the ring, or of the entries if that is more, in use: 0 to 1."""
        with self._state.lock:
            return self._state.fullness_ratio()

    def has_room(self, size_bytes: int, records: int) -> bool:
        """Whether so many bytes (overhead included) and entries are free beside the reserves.

        Free bytes may lie in two pieces; a caller that needs one piece of n bytes asks for 2 n.
        """
        with self._state.lock:
            return self._state.has_room(size_bytes, records)

    def stat(self) -> dict[str, Any]:
        """Figures for metrics and tools."""
        with self._state.lock:
            return {**self._state.stat(), "rounds": self._commit.rounds}

    # index file, helper, end

    def sync_index(self) -> int:
        """Write the index's changes now; returns the entries written.

        Raises:
            QueuePoisoned: the write or sync failed, now or earlier.
        """
        state = self._state
        state.refuse()
        try:
            return state.index.sync(
                functools.partial(state.fields_before, is_closing=self._stopping), state.fields_after
            )
        except OSError as exc:
            raise self._fail(f"index sync: {exc}") from exc

    def flush(self) -> None:
        """Make everything submitted so far durable, without the helper. Raises QueuePoisoned."""
        while self._commit.lead_pending():
            pass
        self._state.refuse()

    def close(self) -> None:
        """Commit what was submitted, sync the index, stop the helper, let go of the files."""
        state = self._state
        with state.lock:
            if isinstance(state.poison, QueueClosed):
                return
        self._stopping = True
        self._work.set()
        try:
            self._group.join(STOP_S)
            if state.poison is None:
                self.flush()
                self.sync_index()
        finally:
            with state.lock:
                state.poison = QueueClosed(state.name)
                state.durable.notify_all()
            self._commit.fail_pending(state.poison)
            self._close_files()

    def _close_files(self) -> None:
        self._data.close()
        if self._index_storage is not None:
            self._index_storage.close()

    def _help(self) -> None:
        """Thread dq-sync."""
        due_ns = self._clock.monotonic_ns() + round(self.settings.index_sync_s * 1e9)
        while not self._stopping and self._state.poison is None:
            watchdog.rest()
            self._work.wait(max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9))
            watchdog.beat()
            self._work.clear()
            while self._commit.lead_pending():
                pass
            if self._clock.monotonic_ns() >= due_ns and self._state.poison is None:
                self.sync_index()
                due_ns = self._clock.monotonic_ns() + round(self.settings.index_sync_s * 1e9)

    def _helper_died(self, name: str, exc: BaseException) -> None:
        self._fail(f"thread {name} died: {exc}")

    def _poisoned(self, reason: str) -> QueuePoisoned:
        """Refuse everything from now on."""
        state = self._state
        error = QueuePoisoned(state.name, reason)
        with state.lock:
            if state.poison is None:
                state.poison = error
                log.error("queue-poisoned", queue=state.name, reason=reason)
            state.durable.notify_all()
        return error

    def _fail(self, reason: str) -> QueuePoisoned:
        error = self._poisoned(reason)
        self._commit.fail_pending(error)
        return error
