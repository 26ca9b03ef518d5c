"""Group commit: many requests, one sync, in two phases.

Theory of operation. ``add`` is the receipt: the request is in ``_pending`` in the order of its place in
the file. A *round* takes a batch from the front, writes it, syncs once, marks all its requests done together
and then confirms its waiters in a chain: each that wakes wakes the next and goes on with its own work. So one
thread at a time is on its way, and mostly finds the interpreter lock free when it arrives; when more are
woken at once each sleeps a second time, at that lock. Only when the last waiter has its confirmation does the
next round begin, led by the first waiter of the requests that came meanwhile; by then the threads just
confirmed have added their next requests, and the batch is full.

    _busy  leader                                         becomes
    no     none; the next ``wait`` leads inline           yes
    yes    a thread in ``_round``, or the chain runs      handed to the first waiter; else, to the helper
                                                          if requests without a waiter are pending; else no

A single waiter therefore never changes threads: it writes and syncs itself.

Lock ``_lock`` (the queue's) guards ``_pending``, ``_busy``, ``_alone`` (which thread has taken the
lead for ``solo`` and is not there yet), ``_chain`` and each request's ``gate``, ``waits_at``,
``leads``, ``done``. Invariant: while ``_busy``, one thread has the duty to call ``_pass_on`` (perhaps
``_round`` before it); one that is interrupted (Ctrl-C) while it waits, or before it leads, hands its duty on
(``let_go``). One that is interrupted while it writes or syncs poisons the queue.
Source: Q5. Downside: with a fast disk the chain delays the next sync; it gains more by fuller batches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from pmdaemon.diskqueue.errors import DiskQueueError, QueuePoisoned
from pmdaemon.diskqueue.format import DATA_START
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime.clock import Clock, Deadline

Run = tuple[int, int, list[bytes]]  # begin and end in the ring, buffers one behind another


class Request:
    """Records added together; the handle that ``submit`` returns.

    Attributes:
        first_seq, count: their sequence numbers are consecutive.
        destination: of all of them.
        done: confirmed or failed; ``error`` says which.
    """

    __slots__ = ("_commit", "count", "destination", "done", "end", "error", "first_seq", "gate", "leads",
                 "on_done", "runs", "size_bytes", "waits_at")  # fmt: skip

    def __init__(
        self, commit: Commit, first_seq: int, count: int, destination: bytes, runs: list[Run]
    ) -> None:
        self._commit = commit
        self.first_seq = first_seq
        self.count = count
        self.destination = destination
        self.runs = runs
        self.size_bytes = 0
        for begin, end, _buffers in runs:
            self.size_bytes += end - begin
        self.end = runs[-1][1]
        self.done = False
        self.leads = False
        self.error: DiskQueueError | None = None
        self.gate: Any = None  # a raw lock, held until its waiter may go on; then None again
        self.waits_at: Any = None  # the same, until its waiter went on
        self.on_done: Callable[[Request], None] | None = None

    @property
    def last_seq(self) -> int:
        """Sequence number of its last record."""
        return self.first_seq + self.count - 1

    def wait(self) -> None:
        """Block until durable. One thread may wait for a request.

        Durability: all its records are on disk on return.

        Raises:
            RuntimeError: another thread waits for it.
            QueuePoisoned: the write or sync failed, or no confirmation came in time.
        """
        self._commit.wait(self)


class Commit:
    """The rounds of one queue.

    Args:
        storage: the data file.
        settings: limits of a batch.
        lock: the queue's.
        on_durable: called with the lock held for each batch that is on disk.
        on_one_durable: the same for a record of ``solo``: its number and destination.
        poison: called without the lock when a write or sync failed; returns the error for all.
        wake_helper: asks the helper for a round.
    """

    def __init__(
        self,
        storage: Storage,
        settings: QueueSettings,
        lock: threading.Lock,
        clock: Clock,
        on_durable: Callable[[list[Request]], None],
        on_one_durable: Callable[[int, bytes], None],
        poison: Callable[[str], QueuePoisoned],
        wake_helper: Callable[[], None] | None,
    ) -> None:
        self._storage = storage
        self._settings = settings
        self._lock = lock
        self._clock = clock
        self._on_durable = on_durable
        self._on_one_durable = on_one_durable
        self._poison = poison
        self._wake_helper = wake_helper
        self._pending: deque[Request] = deque()
        self._chain: deque[Request] = deque()
        self._busy = False
        self._alone = 0
        self._gathering = False
        self._arrived = threading.Condition(lock)
        self.rounds = 0
        self.confirm_s: Final = settings.confirm_s

    def add(self, request: Request, *, waits: bool) -> None:
        """Receipt. Lock held. Without a waiter the helper is woken if no thread leads."""
        self._pending.append(request)
        if self._gathering:
            self._arrived.notify()
        if not waits and not self._busy and self._wake_helper is not None:
            self._wake_helper()

    def holds(self, request: Request | None) -> bool:
        """Whether it was added and is not yet under way. Lock held."""
        return request in self._pending

    def wait(self, request: Request) -> None:
        """Block until ``request`` is confirmed, leading rounds as it comes."""
        is_taken = False
        try:
            with self._lock:
                is_taken = request.gate is not None
                if not is_taken and not request.done:
                    self.queue_up(request)
            if not is_taken:
                self.wait_in_queue(request)
        except BaseException:
            self.let_go(request)
            raise
        if is_taken:
            raise RuntimeError(f"another thread waits for records {request.first_seq} to {request.last_seq}")

    def queue_up(self, request: Request) -> None:
        """Take the lead, or a gate to wait at. Lock held; ``wait_in_queue`` must follow without it."""
        if self._busy:
            gate = request.gate = request.waits_at = threading.Lock()
            gate.acquire()
        else:
            self._busy = request.leads = True

    def wait_in_queue(self, request: Request) -> None:
        """Block until ``request`` is confirmed; raises its error."""
        if request.waits_at is not None:
            self._wait_at(request.waits_at, request)
        elif request.leads:
            self._lead(request)
        if request.error is not None:
            raise request.error

    def lead_alone(self) -> bool:
        """Take the lead for one record that no other thread is to see, if no round is going on. Lock held."""
        if self._busy or self._pending or self._settings.gather_s:
            return False
        self._alone = threading.get_ident()
        self._busy = True
        return True

    def let_go_alone(self, seq: int, destination: bytes, run: Run | None) -> None:
        """After ``lead_alone`` whose thread does not come to ``solo``: what is reserved waits for a round."""
        with self._lock:
            if self._alone != threading.get_ident():
                return
            self._alone = 0
            if run is not None:
                self._pending.appendleft(Request(self, seq, 1, destination, [run]))
        self._pass_on()

    def solo(self, run: Run, seq: int, destination: bytes) -> None:
        """The round of a single waiter, without a request: the lead was taken under the same lock.

        Worth its lines: after each sync the caches are cold, and a put costs a third less this way.

        Raises:
            QueuePoisoned: the write or sync failed.
        """
        try:
            self._alone = 0  # from here on a failure is ours
            self._storage.write(DATA_START + run[0], run[2])
            self._storage.sync()
            with self._lock:
                self._on_one_durable(seq, destination)
                self.rounds += 1
                if not self._pending:
                    self._busy = False
                    return
        except BaseException as exc:
            error = self._poison(str(exc) or type(exc).__name__)
            self.fail_pending(error)
            if isinstance(exc, OSError):
                raise error from exc
            raise
        self._pass_on()

    def lead_pending(self) -> bool:
        """The helper's round, if no thread leads and something waits; returns whether there was one."""
        with self._lock:
            if self._busy or not self._pending:
                return False
            self._busy = True
        try:
            self._round()
        finally:
            self._pass_on()
        return True

    def fail_pending(self, error: DiskQueueError) -> None:
        """Nothing more will be written: every request that waits gets ``error``, every waiter wakes."""
        with self._lock:
            failed = [*self._chain, *self._pending]
            self._chain.clear()
            self._pending.clear()
            gates = []
            for request in failed:
                if not request.done:
                    request.done, request.error = True, error
                if request.gate is not None:
                    gates.append(request.gate)
                    request.gate = None
            self._busy = False
        for gate in gates:
            gate.release()

    def _lead(self, request: Request) -> None:
        """Rounds until the own request is done (one, unless limits of a batch left it out)."""
        try:
            request.leads = False  # from here on the duty is done below, whatever happens
            while not request.done:
                self._round()
        finally:
            self._pass_on()

    def _wait_at(self, gate: threading.Lock, request: Request) -> None:
        """Sleep until confirmed or made leader; either way a duty comes with it."""
        in_time = gate.acquire(timeout=self.confirm_s)
        request.waits_at = None
        if not in_time:
            error = self._poison(f"no confirmation within {self.confirm_s:g} s")
            self.fail_pending(error)
            raise error
        if request.leads:
            self._lead(request)
        else:
            self._pass_on()

    def let_go(self, request: Request) -> None:
        """Its waiter was interrupted before it had done its duty; nothing happens if it has none."""
        with self._lock:
            if not request.leads and request.waits_at is None:
                return
            request.waits_at = None
            woken = request.gate is None
            request.gate = None
            leads, request.leads = request.leads, False
        if woken or leads:
            self._pass_on()

    def _pass_on(self) -> None:
        """Confirm the next waiter; behind the last, hand leadership on."""
        with self._lock:
            gate = self._next_gate()
        if gate is not None:
            gate.release()

    def _next_gate(self) -> Any:
        """The gate to open, None if no thread waits (then none leads). Lock held."""
        chain = self._chain
        while chain:
            request = chain.popleft()
            if request.gate is not None:
                gate, request.gate = request.gate, None
                return gate
        for request in self._pending:
            if request.gate is not None:
                gate, request.gate = request.gate, None
                request.leads = True
                return gate
        self._busy = False
        if self._pending and self._wake_helper is not None:
            self._wake_helper()
        return None

    def _round(self) -> None:
        """Take a batch, write it, sync, mark it done. Leadership is held; the chain is empty or fails."""
        if self._settings.gather_s:
            self._gather()
        batch: list[Request] = []
        try:
            with self._lock:
                batch = self._take()
            if not batch:  # the failure of another thread's round emptied the queue
                return
            for offset, _end, buffers in _merged(batch):
                self._storage.write(DATA_START + offset, buffers)
            self._storage.sync()
            with self._lock:
                self._confirm(batch)
        except BaseException as exc:
            # Whatever it is, what the disk holds is unknown now: never sync again.
            error = self._poison(str(exc) or type(exc).__name__)
            with self._lock:
                self._pending.extendleft(request for request in reversed(batch) if not request.done)
            self.fail_pending(error)
            if not isinstance(exc, OSError):
                raise
            return
        for request in batch:
            if request.on_done is not None:
                request.on_done(request)

    def _confirm(self, batch: list[Request]) -> None:
        """It is on disk: its records may be read, its waiters be woken. Lock held."""
        self._on_durable(batch)
        self.rounds += 1
        for request in batch:
            request.done = True
            request.runs = []
            if request.gate is not None:
                self._chain.append(request)

    def _take(self) -> list[Request]:
        """A batch from the front of the pending ones, within the limits. Lock held."""
        if len(self._pending) == 1:
            return [self._pending.popleft()]
        settings, batch, size_bytes, end = self._settings, list[Request](), 0, -1
        while self._pending and len(batch) < settings.batch_requests:
            request = self._pending[0]
            apart = abs(request.runs[0][0] - end) > settings.gap_bytes
            if batch and (size_bytes + request.size_bytes > settings.batch_bytes or apart):
                break
            batch.append(self._pending.popleft())
            size_bytes += request.size_bytes
            end = request.end
        return batch

    def _gather(self) -> None:
        """Wait for more requests: at most ``gather_s``, and at most ``pause_s`` for the next one."""
        settings = self._settings
        deadline = Deadline(settings.gather_s, self._clock)
        with self._lock:
            self._gathering = True
            try:
                while not deadline.passed and len(self._pending) < settings.batch_requests:
                    if not self._arrived.wait(min(settings.pause_s, deadline.left_s())):
                        break
            finally:
                self._gathering = False


def _merged(batch: list[Request]) -> list[Run]:
    """The runs of a batch, neighbours joined: one write each."""
    if len(batch) == 1:
        return batch[0].runs
    merged: list[Run] = []
    for request in batch:
        for begin, end, buffers in request.runs:
            if merged and merged[-1][1] == begin:
                merged[-1][2].extend(buffers)
                merged[-1] = (merged[-1][0], end, merged[-1][2])
            else:
                merged.append((begin, end, buffers))
    return merged
