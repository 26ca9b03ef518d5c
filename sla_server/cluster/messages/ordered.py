"""Tasks in order within a key, concurrently across keys, in a bounded pool of threads (C6).

A key is a destination of a session. ``post`` only enqueues, so a dispatcher never runs what it hands out. A
key is with one thread at a time: it becomes ready again only when its task has ended, behind the other keys,
so that a busy one does not keep the threads from the rest.

Lock ``_changed`` guards ``_queue`` and ``_is_closing``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

import structlog

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.cluster.messages.errors import BadSettings

log = structlog.get_logger("messages")
Task = Callable[[], None]


class KeyedQueue:
    """Which task may run next. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, deque[Task]] = {}
        self._ready: deque[Hashable] = deque()

    def add(self, key: Hashable, task: Task) -> None:
        """Put ``task`` behind those of its key."""
        if key in self._tasks:
            self._tasks[key].append(task)
        else:
            self._tasks[key] = deque([task])
            self._ready.append(key)

    def next(self) -> tuple[Hashable, Task] | None:
        """A task whose key runs none now; ``done`` must follow."""
        if not self._ready:
            return None
        key = self._ready.popleft()
        return key, self._tasks[key].popleft()

    def done(self, key: Hashable) -> None:
        """The task of ``key`` has ended."""
        if self._tasks[key]:
            self._ready.append(key)
        else:
            del self._tasks[key]


class OrderedPool:
    """``workers`` threads that run posted tasks; ``close`` lets running ones end and forgets the rest."""

    def __init__(self, workers: int, name: str = "cl-work") -> None:
        if workers < 1:
            raise BadSettings("workers", workers, "a pool has at least 1 thread")
        self._changed = threading.Condition()
        self._queue = KeyedQueue()
        self._is_closing = False
        self._threads = ThreadGroup()
        for number in range(workers):
            self._threads.start(f"{name}-{number}"[:15], self._run)

    def post(self, key: Hashable, task: Task) -> None:
        """Run ``task`` after those posted before it for ``key``. Any thread; returns at once."""
        with self._changed:
            self._queue.add(key, task)
            self._changed.notify()

    def close(self, limit_s: float = 10.0) -> None:
        """End the threads.

        Raises:
            ThreadDidNotStop: a task runs on.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._threads.join(limit_s)

    def _run(self) -> None:
        while True:
            watchdog.rest()  # a handler is not ours: it may take as long as it needs
            with self._changed:
                if self._is_closing:
                    return
                found = self._queue.next()
                if found is None:
                    self._changed.wait()
                    continue
            key, task = found
            try:
                task()
            except Exception:
                log.exception(
                    "message-task-failed", key=str(key)
                )  # its handler decides what becomes of a message
            finally:
                with self._changed:
                    self._queue.done(key)
                    self._changed.notify()
