"""Requests that take long, and what does them: the loop, piece by piece (``Turns``), or a ``WorkerPool``.

    session ──submit(job)──► Turns: one piece of one job in each turn of the loop, jobs in rotation
                             WorkerPool: queue ──► nbd-w-N threads ──done list + eventfd──► loop
    session ◄──job.done(job), in the loop's thread, never from within ``submit``

A job belongs to exactly one side at a time: to a thread between ``submit`` and the done list, else to the
loop; so jobs need no lock. ``_done`` is a deque (append and popleft are atomic); the eventfd wakes the
loop. Threads end when they take ``None``, one for each; ``stop`` sends them and joins.

A write that has begun is finished, also when its client has left meanwhile: otherwise its volume would keep
half of it.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.request_buffer import Request
from gateway_agent.nbd.storage import VolumeStorage
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("jobs")
PIECE_BYTES: Final = 1 << 20  # read or written at a time: well below a millisecond from memory
MAX_JOBS: Final = 64  # of one connection with a pool of workers at a time


class Job:
    """One request: ``data`` is a write's payload, or a read's reply with room for its header before it."""

    __slots__ = ("_at", "data", "done", "error", "request", "storage")

    def __init__(
        self, storage: VolumeStorage, request: Request, data: bytearray, done: Callable[[Job], None]
    ) -> None:
        self.storage = storage
        self.request = request
        self.data = data
        self.done = done
        self.error = 0
        self._at = 0

    def step(self) -> bool:
        """Do the next piece; returns whether the request is done, or has failed with ``error``.

        Raises nothing: the request is answered, and what does the jobs goes on, whatever happens in one.
        """
        try:
            return self._piece()
        except MemoryError:
            self._failed(p.ENOMEM, "no memory is left")
        except Exception as exc:  # noqa: BLE001 - see above
            self._failed(p.EIO, repr(exc))
        return True

    def _failed(self, error: int, problem: str) -> None:
        self.error = error
        with contextlib.suppress(MemoryError):
            log.error("request-failed", error=error, problem=problem, request=self.request[2:6])

    def _piece(self) -> bool:
        _, _, command, length, offset, flags, _ = self.request
        fua = bool(flags & p.CMD_FLAG_FUA)
        at, end = self._at, min(self._at + PIECE_BYTES, length)
        if command == p.Cmd.READ:
            head = p.SIMPLE_REPLY_BYTES
            self.error = self.storage.read(memoryview(self.data)[head + at : head + end], offset + at)
        elif command == p.Cmd.WRITE:
            self.error = self.storage.write(memoryview(self.data)[at:end], offset + at, fua=fua)
        elif command == p.Cmd.FLUSH:
            self.error, end = self.storage.flush(), length
        else:
            self.error, done = self._zero(command, offset + at, length - at, flags)
            end = at + done
            if fua and end >= length and not self.error:
                self.error = self.storage.flush()
        self._at = end
        return bool(self.error) or end >= length

    def _zero(self, command: int, offset: int, length: int, flags: int) -> tuple[int, int]:
        if command == p.Cmd.TRIM:
            return self.storage.trim(offset, length)
        return self.storage.write_zeroes(offset, length, may_punch=not flags & p.CMD_FLAG_NO_HOLE)

    def run(self) -> None:
        """Do all that is left of it."""
        while not self.step():
            pass

    @property
    def is_half_written(self) -> bool:
        """Whether its volume holds a part of a write."""
        return self.request[2] == p.Cmd.WRITE and self._at > 0


class Runner(Protocol):
    """Who does a session's jobs.

    Attributes:
        most_jobs: of one session at a time.
        is_loop: requests that are quickly done need no job; the session does them itself.
    """

    most_jobs: int
    is_loop: bool

    def submit(self, job: Job) -> None:
        """Take a job; ``job.done`` is called when it is done."""


class Turns:
    """Jobs done by the loop itself, for files that answer from memory. Thread: the loop's only."""

    most_jobs = 1  # a connection's long requests are done one after another, in their order
    is_loop = True

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._jobs: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        """See ``Runner``."""
        self._jobs.append(job)
        self._loop.at(self, self._loop.clock.monotonic_ns(), self._turn)

    def _turn(self, now_ns: int) -> None:
        job = self._jobs.popleft()
        if self._jobs:  # before anything of this job can go wrong
            self._loop.at(self, now_ns, self._turn)
        if job.step():
            job.done(job)
        else:
            self._jobs.append(job)
            self._loop.at(self, now_ns, self._turn)

    def stop(self) -> None:
        """Finish the writes that have begun; drop the rest, as nothing of it was answered."""
        for job in self._jobs:
            if job.is_half_written:
                job.run()
        self._jobs.clear()
        self._loop.cancel(self)


class WorkerPool:
    """Threads of one export, for files that can block. See the module docstring.

    Thread: every method is called by the loop's thread, except ``_work``.
    """

    most_jobs = MAX_JOBS
    is_loop = False

    def __init__(self, loop: EventLoop, name: str, workers: int) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: deque[Job] = deque()
        self._workers = workers
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group = ThreadGroup()
        for number in range(workers):
            self._group.start(f"{name[:11]}-w{number}", self._work)
        loop.watch(self._wake_fd, IN, self._on_done, lambda _exc: None)

    def submit(self, job: Job) -> None:
        """See ``Runner``."""
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._done.append(job)
            os.eventfd_write(self._wake_fd, 1)

    def _on_done(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)  # before the list: a job that comes later rings again
        while self._done:
            job = self._done.popleft()
            job.done(job)

    def stop(self) -> None:
        """End the threads after the jobs they have.

        Raises:
            ThreadDidNotStop: a file still blocks one.
        """
        for _ in range(self._workers):
            self._jobs.put(None)
        self._loop.forget(self._wake_fd)
        self._group.join()
        os.close(self._wake_fd)
