"""Threads: the only place that starts and joins them, and the inbox that one of them has for others.

A thread has a name of at most 15 characters (so that ``top -H`` shows it), an owner (its ``ThreadGroup``)
and a stop path with a deadline. A thread whose target raises is logged and reported through ``failed``;
the owner decides by its stated policy (all our processes stop, and the supervisor restarts them). Each is
watched for progress from its start to its end (``watchdog``), in processes that call ``watch``.

Three threads are not started here, and not watched, since each only waits in one call:

    watch-parent  for the end of the parent's pipe (``stop``); it ends with the process
    apprise       for a library without deadlines; the recipient's thread, which is watched, has one and
                  starts no second thread
    dns-HOST      for the system's resolver, which has no deadline either; those who asked have theirs

Lock ``_lock`` guards ``_threads`` and ``_failure``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from pmdaemon.errors import SlaError
from pmdaemon.runtime import exit_status, watchdog
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.stop import Stop

log = structlog.get_logger("threads")
_LAST_WORDS_S = 5  # for the log line and the note of a process that hangs
_PR_SET_NAME = 15
Item = TypeVar("Item")


class ThreadDidNotStop(SlaError):
    """A thread outlived its stop deadline; the text names it."""

    def __init__(self, names: list[str], limit_s: float) -> None:
        self.names = names
        super().__init__(
            f"threads still running {limit_s:g} s after the stop was requested: {', '.join(names)}"
        )


def set_os_thread_name(name: str) -> None:
    """Show ``name`` in ``top -H`` and ``/proc``. Linux only; silently nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class ThreadGroup:
    """Starts named threads, notices their failures, joins them with a deadline.

    Thread: every method may be called from any thread; ``join`` not from a member.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._failure: tuple[str, BaseException] | None = None
        self._on_failure = on_failure

    @property
    def failed(self) -> tuple[str, BaseException] | None:
        """Name and exception of the first thread that died of one, else None."""
        with self._lock:
            return self._failure

    def start(
        self, name: str, target: Callable[[], None], limit_s: float = watchdog.LIMIT_S
    ) -> threading.Thread:
        """Start ``target`` as a thread called ``name`` (15 characters at most).

        ``limit_s`` is how long its first step may take, as for ``watchdog.beat``.

        Raises:
            RuntimeError, MemoryError: the system has no room for a thread; nothing was started.
        """
        if len(name) > 15:
            raise ValueError(f"thread name {name!r} is longer than 15 characters")

        def outermost() -> None:
            try:
                set_os_thread_name(name)
                watchdog.register(name, limit_s)
                target()
            except BaseException as exc:
                with self._lock:
                    self._failure = self._failure or (name, exc)
                with contextlib.suppress(MemoryError):
                    log.exception("thread-died", thread=name)
                if self._on_failure is not None:
                    self._on_failure(name, exc)
            finally:
                watchdog.unregister()

        thread = threading.Thread(target=outermost, name=name, daemon=True)
        with watchdog.within(watchdog.START_S, f"started the thread {name}"):
            thread.start()
        with self._lock:
            self._threads.append(thread)
        return thread

    def join(self, limit_s: float = 5.0) -> None:
        """Wait for every member.

        Raises:
            ThreadDidNotStop: some did not end in time; names them. The next call waits for them.
        """
        deadline = Deadline(limit_s)
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(deadline.left_s())
        late = [thread for thread in threads if thread.is_alive()]
        if late:
            with self._lock:
                self._threads += late
            raise ThreadDidNotStop([thread.name for thread in late], limit_s)


class ThreadInbox(Generic[Item]):
    """Items between two threads that sleep on descriptors: put here, drained there.

    Appending to and popping from a ``deque`` are atomic, so items need no lock; the eventfd is written
    *after* the item is in the deque and read *before* the deque is emptied, so an item is never left behind
    a sleeping owner: either the drain sees it, or the descriptor is readable again.

    A thread that outlived its stop may ``put`` after ``close``: the number of the descriptor may be another
    file's by then, so it must not be touched. Lock ``_lock`` guards ``_fd``: its use and the closing exclude
    each other. It may be taken twice: a finalizer that runs within ``put`` may log, and logs are put, too.

    Thread: ``put`` from any thread; ``drain`` by the owner only.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._lock = threading.RLock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while items may be waiting."""
        return self._fd

    def put(self, item: Item) -> None:
        """Leave an item and wake the owner; after ``close`` nothing is left that could be woken."""
        self._items.append(item)
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):  # counter full: awake anyway
                    os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Item]:
        """Everything put so far, oldest first."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Give the descriptor back; nothing may wait for it any more."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def watch(
    stop: Stop,
    record: Callable[[str], None] = lambda _text: None,
    on_parent: Callable[[str], None] = lambda _text: None,
) -> None:
    """Start the thread ``watchdog`` of this process, which ends it when a thread hangs, until the stop.

    From the stop on deadlines of its own hold. A check that fails for want of memory is repeated.

    Args:
        stop: of the process.
        record: keeps the reason for those who ask why the process ended (``failures.record_failure``).
        on_parent: called with what is said of a parent that hangs, or goes on, in the thread ``watchdog``.
    """
    pulse = watchdog.pulse_to_parent()

    def run() -> None:
        while not stop.wait(watchdog.CHECK_S):
            with contextlib.suppress(MemoryError, OSError):
                watchdog.beat()
                if pulse is not None and (text := pulse.beat()):
                    log.error("parent-stalled" if pulse.silent_s else "parent-goes-on", problem=text)
                    on_parent(text)
                if text := watchdog.find_hung():
                    _end_hung(text, record)

    ThreadGroup().start("watchdog", run)


def _end_hung(text: str, record: Callable[[str], None]) -> None:
    signal.alarm(_LAST_WORDS_S)  # ends the process all the same if what hangs is the log
    try:
        with contextlib.suppress(Exception):
            log.critical("thread-hangs", problem=text, exit_status=watchdog.HUNG_STATUS)
        record(text)
    finally:
        exit_status.report(watchdog.HUNG_STATUS)
        os._exit(watchdog.HUNG_STATUS)
