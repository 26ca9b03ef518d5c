"""A window on its way into SQL, beside the writer, which reads on meanwhile.

A transaction of a whole fleet mostly waits for the database, so it has a thread of its own. One is under way
at a time, and the writer uses the database for nothing else meanwhile: two transactions that change the same
rows could lock each other out, and SQLite has one writer at a time.

Thread: the writer's; ``db-commit`` runs between ``start`` and ``wait`` and alone uses the window then.
"""

from __future__ import annotations

import threading
from typing import Final

from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest.transaction import IngestStore
from sla_server.db.ingest.window import IngestWindow

COMMIT_S: Final = 600.0  # far above what statement timeouts allow: a transaction has some twenty statements


class BackgroundCommit:
    """See the module.

    Attributes:
        window: what is under way, or failed because the database was away; None if nothing is.
        size_bytes: of the records it came from.
        duration_ns: of the last transaction.
    """

    def __init__(self, store: IngestStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._threads = ThreadGroup()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # until the commit itself has said that it is done
        self._was_told = False  # the caller knows of ``_error``
        self._oldest_seq = 0
        self.window: IngestWindow | None = None
        self.size_bytes = 0
        self.duration_ns = 0

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, window: IngestWindow, size_bytes: int, oldest_seq: int) -> None:
        """Begin to commit a window; nothing may be under way.

        Args:
            window: belongs to the other thread until ``wait``.
            size_bytes: of the records it came from.
            oldest_seq: as for ``IngestStore.commit``.
        """
        self.window, self.size_bytes, self._oldest_seq = window, size_bytes, oldest_seq
        self._begin()

    def wait(self) -> IngestWindow:
        """The window, committed; ``clear`` follows. After an error, calling this again tries it again.

        Raises:
            CursorMoved, DatabaseRefused, DatabaseUnavailable: as ``IngestStore.commit``.
            DatabaseUnavailable: also when the thread has not come as far as that.
        """
        assert self.window is not None  # the caller looked
        if self._was_told:
            self._begin()
        self._threads.join(COMMIT_S)
        if self._error is not None:
            self._was_told = True
            raise self._error
        return self.window

    def clear(self) -> None:
        """Committed, or given up: its records will be read again."""
        self.window, self.size_bytes = None, 0
        self._error, self._was_told = None, False

    def _begin(self) -> None:
        self._thread, self._was_told = None, False
        self._error = self._not_begun("the thread db-commit ended before its transaction did")
        try:
            self._thread = self._threads.start("db-commit", self._run, COMMIT_S)
        except (RuntimeError, MemoryError) as exc:
            self._error = self._not_begun(f"the thread db-commit cannot be started ({exc or 'no memory'})")

    def _not_begun(self, reason: str) -> DatabaseUnavailable:
        return DatabaseUnavailable(self._store.where, reason, "See that this machine has memory to spare")

    def _run(self) -> None:
        """Thread: ``db-commit``."""
        began_ns = self._clock.monotonic_ns()
        try:
            assert self.window is not None  # start() set it
            self._store.commit(self.window, self._oldest_seq)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, ``wait`` raises it
            self._error = exc
        else:
            self._error = None
        self.duration_ns = self._clock.monotonic_ns() - began_ns
