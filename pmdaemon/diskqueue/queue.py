"""DiskQueue: add, take, delete.

    add        put (blocks until durable), put_many (a batch, one sync),
               submit (returns at once with a handle)
    consume    lock -> process -> delete, or retry (count raised, perhaps later),
               unlock (as if nothing was), or move_aside (to the secondary queue)
    look       read, peek, stat

Locks belong to a process (number and start time): ``release_dead`` frees those whose process is gone;
threads of one process share its locks and must agree among themselves. All state and its guard are described
in ``state.py``. A delivery is at least once: after a crash, what was deleted within the last index sync
period may come back. Source: Q3, Q8, Q9.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pmdaemon.diskqueue.commit import Request
from pmdaemon.diskqueue.core import MOST_DESTINATION_BYTES, OnDurable
from pmdaemon.diskqueue.entry import IndexEntry
from pmdaemon.diskqueue.errors import DiskQueueError, NotHeld, RecordDamaged, RecordTooLarge
from pmdaemon.diskqueue.gauges import QueueGauges
from pmdaemon.diskqueue.owner import LockOwner, is_alive, myself
from pmdaemon.diskqueue.record import DATA_START, check, content
from pmdaemon.runtime.clock import Deadline


class QueueMessage(NamedTuple):
    """One record as a consumer sees it.

    Attributes:
        kind: the user's type, 0 to 65535.
        date_us: when it was added, UTC.
        retries: how often it was retried.
    """

    seq: int
    kind: int
    destination: bytes
    date_us: int
    retries: int
    data: bytes


class DiskQueue(QueueGauges):
    """A durable queue owned by this process; see the module's text and ``Core`` for arguments and errors."""

    secondary: DiskQueue | None = None
    """Where records go that leave this queue without having been processed."""

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
        short and must not raise. It is not called when the commit fails: look at ``Request.error``.
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
        self._check(payloads, kind, destination)
        with self._lock:
            self._refuse()
            entries, runs = self._reserve(payloads, kind, destination, reserved)
            request = Request(self._commit, entries[0].seq, entries, runs)
            request.on_done = on_durable
            self._commit.add(request, waits=waits)
        return request

    def _check(self, payloads: Sequence[bytes], kind: int, destination: bytes) -> None:
        """Refuse what cannot be packed, before anything is reserved for it."""
        for number, data in enumerate(payloads):
            if not isinstance(data, bytes):
                raise TypeError(f"payload {number} is {type(data).__name__}; a record is bytes")
        if not 0 <= kind <= 0xFFFF:
            raise ValueError(f"kind = {kind} is outside of 0 to 65535")
        if len(destination) > MOST_DESTINATION_BYTES:
            raise RecordTooLarge(self.name, len(destination), MOST_DESTINATION_BYTES)

    def leave_unused(self, through: int) -> int:
        """Give no number up to ``through`` any more; returns how many stay unused. Nothing may be pending.

        Durability: with the next record; until then the caller asks again after each opening.
        """
        with self._lock:
            self._refuse()
            assert self._durable_seq == self._next_seq - 1, "records are under way"
            unused = max(0, through - self._durable_seq)
            self._next_seq += unused
            self._durable_seq += unused
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
        with self._lock:
            self._refuse()
            self._ready.wake(self._clock.monotonic_ns())
            while len(messages) < limit and (most_bytes > 0 or not messages):
                seq = self._ready.next(destination, self._is_ready)
                if seq is None:
                    break
                entry = self._live[seq]
                if messages and entry.length > most_bytes:
                    self._ready.add_again(seq, entry.destination)
                    break
                entry.working().owner = owner
                self._index.dirty.append(entry.slot)
                try:
                    messages.append(self._message(entry))
                except RecordDamaged:
                    if not messages:
                        raise
                    self._unlock(entry, 0.0)
                    break
                most_bytes -= entry.length

    def lock_group(self, limit: int = 100, *, owner: LockOwner | None = None) -> list[QueueMessage]:
        """Lock the oldest ready record and others for the same destination, so that they go out together."""
        messages = self.lock(1, owner=owner)
        if messages and messages[0].destination:
            self._lock_more(messages, limit, messages[0].destination, 1 << 20, owner or myself())
        return messages

    def delete(self, seqs: Iterable[int], *, owner: LockOwner | None = None) -> None:
        """Processed: the records leave the queue. Touches memory only; the index file follows.

        Raises:
            NotHeld: one of them is not locked by this owner; those before it are deleted.
        """
        owner = owner or myself()
        with self._lock:
            self._refuse()
            for seq in seqs:
                self._remove(self._held(seq, owner))
            self._ready.trim()

    def unlock(self, seqs: Iterable[int], *, owner: LockOwner | None = None) -> None:
        """Give the locks back; the records are ready again as if nothing had been."""
        owner = owner or myself()
        with self._lock:
            self._refuse()
            for seq in seqs:
                self._unlock(self._held(seq, owner), 0.0)

    def retry(self, seq: int, *, delay_s: float = 0.0, owner: LockOwner | None = None) -> bool:
        """Not processed: retry count raised, ready again after ``delay_s``; False if it left the queue.

        Past ``retry_limit`` it goes to the secondary queue, or is discarded without one.

        Raises:
            NotHeld: not locked by this owner. QueueFull, RecordTooLarge and other errors of the secondary:
            it did not take the record, which stays, ready after the delay.
        """
        owner = owner or myself()
        with self._lock:
            self._refuse()
            entry = self._held(seq, owner)
            work = entry.working()
            work.retries += 1
            work.last_retry_us = self._clock.unix_us()
            if work.retries <= self.settings.retry_limit:
                self._unlock(entry, delay_s)
                return True
        try:
            self.move_aside(seq, owner=owner)
        except DiskQueueError:
            with self._lock:
                if seq in self._live:  # else the secondary has it, and only the deletion here was refused
                    self._unlock(self._held(seq, owner), delay_s)
            raise
        return False

    def move_aside(self, seq: int, *, owner: LockOwner | None = None) -> None:
        """Move a locked record to the secondary queue (durable there first); without one, discard it."""
        owner = owner or myself()
        with self._lock:
            self._refuse()
            message = self._message(self._held(seq, owner)) if self.secondary else None
        if self.secondary is not None and message is not None:
            self.secondary.put(
                message.data, kind=message.kind, destination=message.destination, reserved=True
            )
        self.delete([seq], owner=owner)

    def delete_through(self, seq: int) -> int:
        """Delete every durable record up to ``seq``, locked or not: for a single reader with a cursor."""
        with self._lock:
            self._refuse()
            seq = min(seq, self._durable_seq)
            first = self._lower_bound()
            doomed = [self._live[number] for number in range(first, seq + 1) if number in self._live]
            for entry in doomed:
                self._remove(entry)
            self._ready.trim()
            return len(doomed)

    def discard(self, seqs: Iterable[int]) -> int:
        """Delete these durable records, locked or not; returns how many there were."""
        with self._lock:
            self._refuse()
            found = [entry for seq in seqs if (entry := self._live.get(seq)) is not None and entry.durable]
            for entry in found:
                self._remove(entry)
            self._ready.trim()
            return len(found)

    def release_dead(self) -> int:
        """Unlock what processes hold that are gone, retry count raised; returns how many."""
        with self._lock:
            locked = [entry for entry in self._live.values() if entry.work and entry.work.owner]
        owners = {entry.work.owner for entry in locked if entry.work and entry.work.owner}
        gone = {owner for owner in owners if not is_alive(owner)}
        released = 0
        with self._lock:
            for entry in locked:
                if entry.work and entry.work.owner in gone and self._live.get(entry.seq) is entry:
                    entry.work.retries += 1
                    self._unlock(entry, 0.0)
                    released += 1
        return released

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a record is ready or the time is over; returns whether one is ready now."""
        deadline = Deadline(timeout_s)
        with self._lock:
            self._consumers_waiting += 1
            try:
                while True:
                    self._refuse()
                    self._ready.wake(self._clock.monotonic_ns())
                    seq = self._ready.next(None, self._is_ready)
                    if seq is not None:
                        self._ready.add_again(seq, b"")
                        return True
                    if deadline.passed:
                        return False
                    self._durable.wait(deadline.left_s())
            finally:
                self._consumers_waiting -= 1

    # looking

    def read(self, seq: int) -> QueueMessage | None:
        """A durable record, or None when it is not there (any more).

        Raises:
            RecordDamaged: it fails its checksum.
        """
        with self._lock:
            self._refuse()
            entry = self._live.get(seq)
            return self._message(entry) if entry is not None and entry.durable else None

    def peek(self, after_seq: int, most_bytes: int) -> list[QueueMessage]:
        """Durable records behind ``after_seq`` in order, locked or not, at least one if there is any."""
        messages = []
        with self._lock:
            self._refuse()
            for seq in range(max(after_seq + 1, self._lower_bound()), self._durable_seq + 1):
                entry = self._live.get(seq)
                if entry is not None:
                    messages.append(self._message(entry))
                    most_bytes -= entry.length
                    if most_bytes <= 0:
                        break
        return messages

    # inside, lock held

    def _is_ready(self, seq: int) -> bool:
        entry = self._live.get(seq)
        if entry is None or not entry.durable:
            return False
        work = entry.work
        return work is None or (work.owner is None and work.not_before_ns <= self._clock.monotonic_ns())

    def _held(self, seq: int, owner: LockOwner) -> IndexEntry:
        entry = self._live.get(seq)
        if entry is None or entry.work is None or entry.work.owner != owner:
            raise NotHeld(self.name, seq)
        return entry

    def _unlock(self, entry: IndexEntry, delay_s: float) -> None:
        work = entry.working()
        work.owner = None
        self._index.dirty.append(entry.slot)
        if delay_s > 0:
            work.not_before_ns = self._clock.monotonic_ns() + round(delay_s * 1e9)
            self._ready.delay(entry.seq, entry.destination, work.not_before_ns)
        else:
            work.not_before_ns = 0
            self._ready.add_again(entry.seq, entry.destination)

    def _message(self, entry: IndexEntry) -> QueueMessage:
        ring = self._data.view()[DATA_START : DATA_START + self._ring.ring_bytes]
        found = check(ring, self._seed, entry.offset)
        if found is None or found[2] != entry.seq:
            raise RecordDamaged(self.name, entry.seq, DATA_START + entry.offset, entry.end - entry.offset)
        destination, data = content(ring, found)
        return QueueMessage(
            entry.seq, found[8], destination, found[5], entry.work.retries if entry.work else 0, data
        )
