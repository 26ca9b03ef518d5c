"""Requests of file mode as jobs, and what does them: turns of the loop, or threads.

    session ──submit(job)──► LoopRunner: one piece of one job in each turn of the loop, jobs in rotation
                             WorkerPool: queue ──► nbd-w-N threads ──done list + eventfd──► loop
    session ◄──job.done([job, ...]), in the loop's thread, never from within ``submit``

A job belongs to exactly one side at a time: to a thread between ``submit`` and the done list, else to the
loop; so jobs need no lock. ``_done`` is a deque (append and popleft are atomic); the eventfd wakes the
loop. A thread that finds that another one has rung (``_has_rung``) does not ring: its job is in the list
before it looks, and the loop takes the flag back before it looks into the list. So the answers of several
requests leave in one send. Threads end when they take ``None``, one for each; ``stop`` sends them and joins.

A write that has begun is finished, also when its client has left meanwhile: otherwise its volume would keep
half of it.

A read with structured replies is laid out as it is read: chunks of data and of holes, one behind the other.
All of it has been read when the first chunk is sent, so its last chunk can end the reply.
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
from gateway_agent.nbd.buffers import Request
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.storage import Extent, VolumeStorage
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("storage_jobs")

PIECE_BYTES: Final = 1 << 20  # read or written at a time: well below a millisecond from memory
MAX_JOBS: Final = 64  # of one connection with a pool of workers at a time
MAX_EXTENTS: Final = 1024  # of one block status: 8 KiB of reply, some milliseconds of looking
_HOLE_WORK: Final = 4 << 10  # what a chunk without data counts, in bytes
_MOST_CACHED: Final = p.MAX_PAYLOAD_BYTES  # of one request: the rest is left to the file, as it is a hint
_WAITING: Final = frozenset((p.Cmd.FLUSH, p.Cmd.CACHE, p.Cmd.BLOCK_STATUS))

_Segment = tuple[int, int, bool]
"""Offsets of begin and end, and whether it is a hole."""


def may_wait(request: Request) -> bool:
    """Whether a request may take long, whatever the file: it makes data stable, or looks for their end."""
    command, flags = request[2], request[5]
    return command in _WAITING or bool(flags & p.CMD_FLAG_FUA and command != p.Cmd.READ)


def problem_of(command: int, error: int) -> str:
    """What to say of a request that the file did not do."""
    if error == p.ENOTSUP:
        return "zeroes would have to be written; write them, or ask without FAST_ZERO"
    return f"{p.Cmd(command).name.lower()}: {os.strerror(error)}"


class StorageJob:
    """One request.

    Attributes:
        data: a write's payload; of a read, room for its reply with ``DATA_HEAD_BYTES`` more than its length
            (structured replies), or with ``SIMPLE_REPLY_BYTES`` more.
        done: called with those that are done.
        error: for the wire; 0 if it was done.
    """

    __slots__ = (
        "_at",
        "_extents",
        "_filled",
        "_is_structured",
        "_segments",
        "data",
        "done",
        "error",
        "request",
        "storage",
    )

    def __init__(
        self,
        storage: VolumeStorage,
        request: Request,
        data: bytearray | memoryview,
        done: Callable[[list[StorageJob]], None],
        *,
        is_structured: bool = False,
    ) -> None:
        self.storage = storage
        self.request = request
        self.data = data
        self.done = done
        self.error = 0
        self._is_structured = is_structured
        self._at = 0  # what is done of its length
        self._segments: deque[_Segment] | None = None  # of a read that are still to be laid out
        self._filled = 0  # of data, with chunks
        self._extents: list[Extent] = []

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
            if self._is_structured:
                return self._lay_out()
            head = p.SIMPLE_REPLY_BYTES
            self.error = self.storage.read(memoryview(self.data)[head + at : head + end], offset + at)
        elif command == p.Cmd.WRITE:
            self.error = self.storage.write(memoryview(self.data)[at:end], offset + at, fua=fua)
        elif command == p.Cmd.FLUSH:
            self.error, end = self.storage.flush(), length
        elif command == p.Cmd.BLOCK_STATUS:
            most = 1 if flags & p.CMD_FLAG_REQ_ONE else MAX_EXTENTS
            self._extents, end = self.storage.block_status(offset, length, most), length
        else:
            self.error, done = self._range(command, offset + at, length - at, flags)
            end = at + done
            if fua and end >= length and not self.error:
                self.error = self.storage.flush()
        self._at = at if self.error else end
        return bool(self.error) or end >= length

    def _range(self, command: int, offset: int, length: int, flags: int) -> tuple[int, int]:
        if command == p.Cmd.TRIM:
            return self.storage.trim(offset, length)
        if command == p.Cmd.CACHE:
            return self.storage.cache(offset, length) if self._at < _MOST_CACHED else (0, length)
        may_punch, fast = not flags & p.CMD_FLAG_NO_HOLE, bool(flags & p.CMD_FLAG_FAST_ZERO)
        return self.storage.write_zeroes(offset, length, may_punch=may_punch, fast=fast)

    # -- structured reads -----------------------------------------------------------------------------------

    def _lay_out(self) -> bool:
        """Read the next piece behind what is laid out already."""
        if self._segments is None:
            self._segments = deque(self._plan())
        work = 0
        while self._segments and work < PIECE_BYTES and not self.error:
            work += self._lay_out_segment(self._segments, PIECE_BYTES - work)
        return bool(self.error) or not self._segments

    def _plan(self) -> list[_Segment]:
        _, _, _, length, offset, flags, _ = self.request
        holes, at, end = self.storage.holes(offset, length), offset, offset + length
        if flags & p.CMD_FLAG_DF and holes != [(offset, end)]:
            holes = []  # one chunk
        found: list[_Segment] = []
        for hole_from, hole_until in holes:
            if hole_from > at:
                found.append((at, hole_from, False))
            found.append((hole_from, hole_until, True))
            at = hole_until
        return [*found, (at, end, False)] if at < end else found

    def _lay_out_segment(self, segments: deque[_Segment], most_bytes: int) -> int:
        """All of a hole, or a piece of data; returns the work."""
        cookie, offset = self.request[1], self.request[4]
        begin, end, is_hole = segments[0]
        view, at, is_last = memoryview(self.data), offset + self._at, len(segments) == 1
        if is_hole:
            chunk, work = p.hole_chunk(cookie, begin, end - begin, is_last), _HOLE_WORK
            view[self._filled : self._filled + len(chunk)] = chunk
            self._filled, self._at = self._filled + len(chunk), end - offset
            segments.popleft()
            return work
        if at == begin:
            head = p.data_chunk_head(cookie, begin, end - begin, is_last)
            view[self._filled : self._filled + len(head)] = head
            self._filled += len(head)
        size = min(most_bytes, end - at)
        self.error = self.storage.read(view[self._filled : self._filled + size], at)
        if not self.error:
            self._filled, self._at = self._filled + size, self._at + size
            if at + size == end:
                segments.popleft()
        return size

    # -- when it is done ------------------------------------------------------------------------------------

    def reply(self) -> memoryview:
        """What the client is sent; of a read it is a part of ``data``. Not for one that failed."""
        _, cookie, command, _, _, _, _ = self.request
        if command == p.Cmd.BLOCK_STATUS:
            return memoryview(p.status_chunk(cookie, p.ALLOCATION_ID, self._extents, last=True))
        if command != p.Cmd.READ:
            return memoryview(p.simple_reply(cookie))
        if not self._is_structured:
            self.data[: p.SIMPLE_REPLY_BYTES] = p.simple_reply(cookie)
            return memoryview(self.data)
        return memoryview(self.data)[: self._filled] if self._filled else memoryview(p.none_chunk(cookie))

    @property
    def problem(self) -> str:
        """A text for people, of one that failed."""
        return problem_of(self.request[2], self.error)

    @property
    def place(self) -> int | None:
        """Offset before which nothing has failed, of one that failed; None if it has no place."""
        _, _, command, length, offset, _, _ = self.request
        return offset + self._at if length and command != p.Cmd.FLUSH else None

    def run(self) -> None:
        """Do all that is left of it."""
        while not self.step():
            pass

    @property
    def is_half_written(self) -> bool:
        """Whether its volume holds a part of a write."""
        return self.request[2] == p.Cmd.WRITE and self._at > 0


class JobRunner(Protocol):
    """What does the jobs of a session.

    Attributes:
        most_jobs: of one session at a time.
        is_loop: what is quickly done needs no job; the session does it itself.
    """

    most_jobs: int
    is_loop: bool

    def submit(self, job: StorageJob) -> None:
        """Take a job; ``job.done`` is called when it is done, perhaps with others that have the same."""


class LoopRunner:
    """Jobs done by the loop itself, for files that answer from memory. Thread: the loop's only."""

    most_jobs = 1  # a connection's long requests are done one after another, in their order
    is_loop = True

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._jobs: deque[StorageJob] = deque()

    def submit(self, job: StorageJob) -> None:
        """See ``JobRunner``."""
        self._jobs.append(job)
        self._loop.at(self, self._loop.clock.monotonic_ns(), self._turn)

    def _turn(self, now_ns: int) -> None:
        job = self._jobs.popleft()
        if self._jobs:  # before anything of this job can go wrong
            self._loop.at(self, now_ns, self._turn)
        if job.step():
            job.done([job])
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
        self._jobs: queue.SimpleQueue[StorageJob | None] = queue.SimpleQueue()
        self._done: deque[StorageJob] = deque()
        self._under_way = 0
        self._has_rung = False
        self._workers = workers
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group = ThreadGroup()
        try:
            for number in range(workers):
                self._group.start(f"{name[:11]}-w{number}", self._work)
        except BaseException:  # no room for a thread: those that were started end, the next pool tries again
            for _ in range(workers):
                self._jobs.put(None)
            os.close(self._wake_fd)
            raise
        loop.watch(self._wake_fd, IN, self._on_done, lambda _exc: None)

    def submit(self, job: StorageJob) -> None:
        """See ``JobRunner``."""
        self._under_way += 1
        self._jobs.put(job)

    @property
    def is_idle(self) -> bool:
        """Whether every job is done: ``stop`` then waits for nothing."""
        return not self._under_way

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._done.append(job)
            if not self._has_rung:
                self._has_rung = True
                os.eventfd_write(self._wake_fd, 1)

    def _on_done(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)
        self._has_rung = False  # before the list: a job that comes later rings again
        found: dict[Callable[[list[StorageJob]], None], list[StorageJob]] = {}
        while self._done:
            job = self._done.popleft()
            found.setdefault(job.done, []).append(job)
        try:
            while found:
                done = next(iter(found))
                jobs = found.pop(done)
                self._under_way -= len(jobs)
                done(jobs)
        finally:
            if found:  # one of them has raised, which the loop logs: the others' turn comes all the same
                self._done.extendleft(job for jobs in found.values() for job in reversed(jobs))
                os.eventfd_write(self._wake_fd, 1)

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


class SyncedRunner:
    """Jobs of one export, done by the loop; those that may wait by a thread. Thread: the loop's only.

    The requests of a connection are still done one after another. The thread is started for the first such
    job. A file system that hangs in a flush so holds up the connections that flush there, or ask for block
    status, and no other.

    Args:
        turns: does the other jobs; the caller stops it.
    """

    most_jobs = 1
    is_loop = True

    def __init__(self, loop: EventLoop, name: str, turns: LoopRunner) -> None:
        self._loop = loop
        self._name = name
        self._turns = turns
        self._thread: WorkerPool | None = None

    def submit(self, job: StorageJob) -> None:
        """See ``JobRunner``."""
        if not may_wait(job.request):
            self._turns.submit(job)
            return
        if self._thread is None:
            self._thread = WorkerPool(self._loop, self._name, 1)
        self._thread.submit(job)

    @property
    def is_idle(self) -> bool:
        """See ``WorkerPool``."""
        return self._thread is None or self._thread.is_idle

    def stop(self) -> None:
        """End the thread after the jobs that it has.

        Raises:
            ThreadDidNotStop: the file still blocks it.
        """
        if self._thread is not None:
            self._thread.stop()
