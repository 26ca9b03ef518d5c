"""File mode with workers, for files that can block: threads do the I/O, the loop stays free.

    loop: admitted requests ──Job──► queue of the pool ──► nbd-w-N threads
    loop: replies           ◄──done list + eventfd──────────────┘

A job belongs to exactly one side at a time: to a thread between ``submit`` and the done list, else to the
loop; so jobs need no lock. ``_done`` is a deque (append and popleft are atomic); the eventfd wakes the
loop. Threads end when they take ``None``, one for each; ``stop`` sends them and joins.
"""

from __future__ import annotations

import os
import queue
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.account import FAILED_BIT, Stream
from gateway_agent.nbd.intake import Request
from gateway_agent.nbd.loop import IN, Loop
from gateway_agent.nbd.session import Session
from gateway_agent.nbd.storage import Storage
from gateway_agent.nbd.volume import Context, Volume
from pmdaemon.runtime.threads import ThreadGroup

MAX_JOBS: Final = 64  # of one connection with the pool at a time
MAX_JOB_BYTES: Final = 64 << 20  # payload of those; one largest payload (32 MiB) may come on top


class Job:
    """One request with a worker: data of a write going in, reply bytes of a read coming out."""

    __slots__ = ("data", "done", "error", "request", "storage")

    def __init__(
        self, storage: Storage, request: Request, data: bytearray, done: Callable[[Job], None]
    ) -> None:
        self.storage = storage
        self.request = request
        self.data = data
        self.done = done
        self.error = 0

    def run(self) -> None:
        """Do it, in a worker's thread."""
        _, _, command, length, offset, flags, _ = self.request
        if command == p.Cmd.READ:
            self.error = self.storage.read(memoryview(self.data)[p.SIMPLE_REPLY_BYTES :], offset)
        elif command == p.Cmd.WRITE:
            self.error = self.storage.write(memoryview(self.data), offset, fua=bool(flags & p.CMD_FLAG_FUA))
        else:
            self.error = self.storage.run(command, offset, length, flags)


class WorkerPool:
    """Threads of one export. See the module docstring.

    Thread: every method is called by the loop's thread, except ``_work``.
    """

    def __init__(self, loop: Loop, name: str, workers: int) -> None:
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
        """Hand a job to the threads."""
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


class WorkerSession(Session):
    """One client of a file served by workers."""

    def __init__(
        self, context: Context, sock: socket.socket, volume: Volume, stream: Stream, storage: Storage,
        facts: p.ExportFacts, pool: WorkerPool,
    ) -> None:  # fmt: skip
        super().__init__(context, sock, volume, stream, facts)
        self.admitted = self._requests = type(self.intake.queue)()
        self._storage = storage
        self._pool = pool
        self._jobs_out = 0
        self._bytes_out = 0
        self._payload: bytearray | None = None  # of the write that is arriving

    def push(self, now_ns: int) -> None:
        """Hand admitted requests to the workers."""
        while self._requests and self._may_submit():
            request = self._requests[0]
            data = self._data_for(request)
            if data is None:
                break
            self._requests.popleft()
            self._jobs_out += 1
            self._bytes_out += len(data)
            self._pool.submit(Job(self._storage, request, data, self._on_job))
        self._settle()

    def _may_submit(self) -> bool:
        has_room = self._jobs_out < MAX_JOBS and self._bytes_out < MAX_JOB_BYTES
        return has_room and self._out.is_empty and not self.is_closed

    def _data_for(self, request: Request) -> bytearray | None:
        """Buffer of a request's job, or None while a write's payload has not arrived whole."""
        _, _, command, length, _, _, end_pos = request
        intake = self.intake
        if command != p.Cmd.WRITE:
            intake.sent_pos = end_pos
            return bytearray(p.SIMPLE_REPLY_BYTES + length) if command == p.Cmd.READ else bytearray()
        payload = self._payload if self._payload is not None else bytearray(length)
        begin_pos = end_pos - length
        piece_pos = max(intake.sent_pos, begin_pos)
        piece_end = min(intake.end_pos, end_pos)
        if piece_pos < piece_end:
            payload[piece_pos - begin_pos : piece_end - begin_pos] = intake.span(piece_pos, piece_end)
        intake.sent_pos = max(piece_end, piece_pos)
        self._payload = payload if piece_end < end_pos else None
        return None if self._payload is not None else payload

    def _on_job(self, job: Job) -> None:
        self._jobs_out -= 1
        self._bytes_out -= len(job.data)
        if self.is_closed:
            return
        cookie = job.request[1]
        arrived_ns, sent_ns, word, payload_bytes = self.inflight.pop(cookie)
        header = p.simple_reply(cookie, job.error)
        data = job.data if payload_bytes and not job.error else bytearray(len(header))
        data[: len(header)] = header
        word |= FAILED_BIT if job.error else 0
        finished = (
            self._out.queued_pos + len(data),
            word,
            arrived_ns,
            sent_ns,
            self._context.clock.monotonic_ns(),
        )
        self._reply(memoryview(data), [finished])
        self._serve_on()

    def _reply_error(self, cookie: int, error: int, word: int, arrived_ns: int, now_ns: int) -> None:
        end_pos = self._out.queued_pos + p.SIMPLE_REPLY_BYTES
        self._reply(p.simple_reply(cookie, error), [(end_pos, word, arrived_ns, now_ns, now_ns)])

    def _release_storage(self) -> None:
        self._requests.clear()
