"""The queue's core: files, commits, index syncs, poison. The records are in ``state``, taking in ``queue``.

State beside that of ``state.py``, under the same lock: ``_poison``, why the queue refuses everything (also
when it is closed). Nothing is written to a file while the lock is held.

Threads: any may add, read, delete. ``dq-sync`` (optional) leads the rounds that nobody waits for and syncs
the index periodically; without it, ``flush`` and ``sync_index`` do so. If it dies, the queue is poisoned.
Source: Q1-Q6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from pmdaemon.diskqueue.commit import Commit, Request, Run
from pmdaemon.diskqueue.entry import NONE, IndexEntry
from pmdaemon.diskqueue.errors import DiskQueueError, QueueClosed, QueuePoisoned
from pmdaemon.diskqueue.record import HEADER_BYTES, UNIT_BYTES
from pmdaemon.diskqueue.recovery import RecoveryReport
from pmdaemon.diskqueue.resize import open_resized
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.span import open_data
from pmdaemon.diskqueue.state import QueueState
from pmdaemon.diskqueue.storage import FileStorage, Storage
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("diskqueue")
STOP_S: Final = 10.0
MOST_DESTINATION_BYTES: Final = 1024


class QueueCore(QueueState):
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
        clock = clock or SystemClock()
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
        super().__init__(settings, opened, self._index_storage, clock)
        self.report: RecoveryReport = opened.recovered.report
        self._poison: DiskQueueError | None = None
        self._group = ThreadGroup(self._helper_died)
        self._work = threading.Event()
        self._stopping = False
        self._commit = Commit(
            self._data, settings, self._lock, clock, self._now_durable, self._one_durable,
            self._poisoned, self._work.set if helper else None,
        )  # fmt: skip
        if helper:
            self._group.start("dq-sync", self._help)

    # adding

    def _put_one(self, data: bytes, kind: int, destination: bytes, reserved: bool) -> int:
        """Add one record and wait until it is durable: inline if nothing else is going on, else with others.

        Raises:
            QueueFull, RecordTooLarge: it was not added. QueuePoisoned, QueueClosed.
        """
        size = HEADER_BYTES + len(destination) + len(data)
        span = size + -size % UNIT_BYTES
        entries: list[IndexEntry] = []
        run: Run | None = None
        request: Request | None = None
        try:
            with self._lock:
                self._refuse()
                limit = self._index.capacity - (0 if reserved else self.settings.reserve_entries)
                is_alone, mark = self._commit.lead_alone(), self._mark()
                try:
                    offset = self._place_one(span, limit, reserved)
                    run = self._fill(offset, (data,), (span,), kind, destination, entries)
                    if not is_alone:
                        request = Request(self._commit, entries[0].seq, entries, [run])
                        self._commit.add(request, waits=True)
                        self._commit.queue_up(request)
                except BaseException:
                    if run is None or not (is_alone or self._commit.holds(request)):
                        run = None
                        self._undo(mark, entries)
                    raise
            if request is None:
                self._commit.solo(run, entries[0])
            else:
                self._commit.wait_in_queue(request)
        except BaseException:
            if request is not None:
                self._commit.let_go(request)
            else:
                self._commit.let_go_alone(entries, run)
            raise
        return entries[0].seq

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
            watchdog.rest()
            self._work.wait(max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9))
            watchdog.beat()
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
