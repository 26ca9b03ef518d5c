"""File mode: one client of a file that this plane serves itself.

    admitted ──► small ones: done here, in batches; one send for a batch's replies   (files without workers)
             └─► the others: Job ──► LoopRunner or WorkerPool ──► replies ──piece by piece──► ReplyBuffer

Theory of operation:

- A write is received whole before any of it is written, as with nbdkit: a client that goes away leaves
  none of it. Up to ``SMALL_BYTES`` it waits in the request buffer and is written from there, without a copy.
- Reads wait aside (``_later``) while the client does not take replies, or no memory is free for one; what is
  behind them goes on. So a client that sends a great deal before it reads is never waited for in vain, and
  what it has not read costs bounded memory. NBD leaves the order of requests under way to the server.
- Nothing here takes long: large requests are jobs, and a turn of the loop ends after ``TURN_BYTES``.

Without workers a file that blocks stalls every volume of the plane; such files get workers. What makes data
stable (a flush, FUA) waits for a disk, whatever the file: a thread of the export does it (``SyncedRunner``).

    session ──submit(job)──► LoopRunner: one piece of one job in each turn of the loop, jobs in rotation
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
from gateway_agent.nbd.accounting import FAILED_BIT, StreamAccount
from gateway_agent.nbd.buffers import MAX_QUEUED, Finished, MemoryBudget, Request
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.session import NbdSession
from gateway_agent.nbd.sockets import Connection
from gateway_agent.nbd.storage import VolumeStorage
from gateway_agent.nbd.volume import PlaneContext, Volume
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("file_session")

PIECE_BYTES: Final = 1 << 20  # read or written at a time: well below a millisecond from memory
MAX_JOBS: Final = 64  # of one connection with a pool of workers at a time


class StorageJob:
    """One request: ``data`` is a write's payload, or a read's reply with room for its header before it."""

    __slots__ = ("_at", "data", "done", "error", "request", "storage")

    def __init__(
        self, storage: VolumeStorage, request: Request, data: bytearray, done: Callable[[StorageJob], None]
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
    def is_sync(self) -> bool:
        """Whether it makes data stable."""
        return makes_stable(self.request)

    @property
    def is_half_written(self) -> bool:
        """Whether its volume holds a part of a write."""
        return self.request[2] == p.Cmd.WRITE and self._at > 0


def makes_stable(request: Request) -> bool:
    """Whether a request makes data stable: that waits for a disk, whatever the file."""
    command, flags = request[2], request[5]
    return command == p.Cmd.FLUSH or bool(flags & p.CMD_FLAG_FUA and command != p.Cmd.READ)


class JobRunner(Protocol):
    """What does the jobs of a session.

    Attributes:
        most_jobs: of one session at a time.
        is_loop: what is quickly done needs no job; the session does it itself.
    """

    most_jobs: int
    is_loop: bool

    def submit(self, job: StorageJob) -> None:
        """Take a job; ``job.done`` is called when it is done."""


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
        self._jobs: queue.SimpleQueue[StorageJob | None] = queue.SimpleQueue()
        self._done: deque[StorageJob] = deque()
        self._under_way = 0
        self._workers = workers
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group = ThreadGroup()
        for number in range(workers):
            self._group.start(f"{name[:11]}-w{number}", self._work)
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
            os.eventfd_write(self._wake_fd, 1)

    def _on_done(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)  # before the list: a job that comes later rings again
        while self._done:
            job = self._done.popleft()
            self._under_way -= 1
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


class SyncedRunner:
    """Jobs of one export, done by the loop; those that make data stable by a thread. Thread: the loop's only.

    The requests of a connection are still done one after another. The thread is started for the first such
    job. A file system that hangs in a flush so holds up the connections that flush there, and no other.

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
        if not job.is_sync:
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


SMALL_BYTES: Final = (
    1 << 20
)  # fits the request buffer and the reply buffer; larger ones ask the plane for memory
SMALL_RANGE_BYTES: Final = 64 << 10  # of a trim or write-zeroes that is done at once
SMALL_LIMIT_BYTES: Final = 4 << 20  # of one connection's small jobs, reads and writes each; always one
TURN_BYTES: Final = 2 << 20  # work of one turn: well below a millisecond from memory
_REQUEST_WORK: Final = 4 << 10  # what a request counts at least, in bytes
_MAX_PIECES: Final = 4  # of a large reply in one turn, when the client takes them at once

_Reply = tuple[memoryview, int]
"""Bytes, and memory to give back."""


class FileSession(NbdSession):
    """See the module docstring.

    Invariants: ``requests.sent_pos`` is the end of what was taken from the request buffer, in order. Memory
    is given back exactly once: with the last piece of a reply, with the end of a write's job, or at the end.
    """

    only_reads_pause = True

    def __init__(
        self, context: PlaneContext, sock: Connection, volume: Volume, stream: StreamAccount, storage:
        VolumeStorage, facts: p.ExportFacts, runner: JobRunner,
    ) -> None:  # fmt: skip
        super().__init__(context, sock, volume, stream, facts)
        self.admitted = self._ready = deque[Request]()
        self._later: deque[Request] = deque()
        self._replies: deque[_Reply] = deque()
        self._payload: bytearray | None = None  # of the write that is arriving
        self._storage = storage
        self._runner = runner
        self._jobs = 0
        self._small = {context.payload_memory: 0, context.reply_memory: 0}
        self._reads_wait = False  # for memory
        storage.hold()

    # -- turns ----------------------------------------------------------------------------------------------

    def push(self, now_ns: int) -> None:
        """Begin what can begin, for one turn."""
        self._send_on()
        work = 0
        while work < TURN_BYTES and not self.is_closed:
            done = self._do_small() or self._hand_over()
            if not done:
                return self._watch_or_end()
            work += done
        self._go_on_later()
        self._watch_or_end()

    def _go_on_later(self) -> None:
        if not self.is_closed:
            now_ns = self._context.clock.monotonic_ns()
            self._context.loop.at((self, "turn"), now_ns, lambda _now_ns: self._serve_on())

    def _next(self) -> deque[Request]:
        """The queue whose head is next: reads that waited aside, or what was admitted."""
        may_read = self._may_read
        if may_read and self._later:
            return self._later
        while not may_read and self._ready and self._ready[0][2] == p.Cmd.READ:
            self.requests.sent_pos = self._ready[0][6]
            self._later.append(self._ready.popleft())
        return self._ready

    @property
    def _may_read(self) -> bool:
        return self._out.is_empty and not self._replies and not self._reads_wait

    @property
    def _may_receive(self) -> bool:
        return super()._may_receive and len(self._later) + len(self._replies) < MAX_QUEUED

    # -- small requests of a file without workers -----------------------------------------------------------

    def _do_small(self) -> int:
        """Do as many small requests as one reply buffer holds; returns the work done, 0 for none."""
        if not self._runner.is_loop or self._jobs:
            return 0
        queue, scratch, filled, work = self._next(), self._context.scratch, 0, 0
        may_read, clock, requests = self._may_read, self._context.clock, self.requests
        finished: list[Finished] = []
        reads_ns, others_ns = self._paused_ns(clock.monotonic_ns())
        while queue and work < TURN_BYTES:
            request = queue[0]
            _, cookie, command, length, _, _, end_pos = request
            is_read = command == p.Cmd.READ
            reply_bytes = p.SIMPLE_REPLY_BYTES + (length if is_read else 0)
            if filled + reply_bytes > len(scratch) or not self._is_here(request, may_read):
                break
            queue.popleft()
            error = self._do(request, scratch[filled + 16 : filled + reply_bytes])
            requests.sent_pos = max(requests.sent_pos, end_pos)
            p.SIMPLE_REPLY.pack_into(scratch, filled, p.SIMPLE_REPLY_MAGIC, error, cookie)
            filled += 16 if error else reply_bytes
            arrived_ns, sent_ns, word, _ = self.inflight.pop(cookie)
            word |= FAILED_BIT if error else 0
            paused_ns = reads_ns if is_read else others_ns
            finished.append((paused_ns, word, arrived_ns, sent_ns, clock.monotonic_ns()))
            work += length + _REQUEST_WORK
        self._record(finished)
        if finished and self._replies:
            self._replies.append((memoryview(bytes(scratch[:filled])), 0))
        elif finished:
            self._reply(scratch[:filled])
        return work

    def _is_here(self, request: Request, may_read: bool) -> bool:
        """Whether a request is small and can be done now."""
        command, length, end_pos, requests = request[2], request[3], request[6], self.requests
        if not self._is_small(request) or (command == p.Cmd.READ and not may_read):
            return False
        if command != p.Cmd.WRITE or end_pos <= requests.end_pos:
            return True
        requests.sent_pos = max(requests.sent_pos, end_pos - length)  # all of the buffer is for its payload
        return False

    def _is_small(self, request: Request) -> bool:
        command = request[2]
        if makes_stable(request):
            return False
        if command in (p.Cmd.READ, p.Cmd.WRITE):
            return request[3] <= SMALL_BYTES
        return request[3] <= SMALL_RANGE_BYTES

    def _do(self, request: Request, into: memoryview) -> int:
        """Error number of one small request, done now."""
        _, _, command, length, offset, _, end_pos = request
        if command == p.Cmd.READ:
            return self._storage.read(into, offset)
        if command == p.Cmd.WRITE:
            payload = self.requests.span(end_pos - length, end_pos)
            return self._storage.write(payload, offset, fua=False)
        job = StorageJob(self._storage, request, bytearray(), self._on_job)
        job.run()
        return job.error

    # -- jobs -----------------------------------------------------------------------------------------------

    def _hand_over(self) -> int:
        """Give the next request to the runner, if it may begin; returns the work done, 0 for none."""
        if self._jobs >= self._runner.most_jobs or self.is_closed or not (queue := self._next()):
            return 0
        request = queue[0]
        if self._runner.is_loop and self._is_small(request):
            return 0  # its turn comes: the payload of a write, or room for a reply
        is_read = request[2] == p.Cmd.READ
        data = self._reply_buffer(request) if is_read else self._payload_of(request)
        if data is None:
            self._reads_wait |= is_read
            return int(is_read)  # what is behind the read goes on without it
        queue.popleft()
        self.requests.sent_pos = max(self.requests.sent_pos, request[6])
        self._jobs += 1
        self._runner.submit(StorageJob(self._storage, request, data, self._on_job))
        return _REQUEST_WORK

    def _reply_buffer(self, request: Request) -> bytearray | None:
        size = p.SIMPLE_REPLY_BYTES + request[3]
        return bytearray(size) if self._take(self._context.reply_memory, size) else None

    def _payload_of(self, request: Request) -> bytearray | None:
        """Data of a job that is no read; None while a write's payload, or memory for it, is not here."""
        _, _, command, length, _, _, end_pos = request
        if command != p.Cmd.WRITE:
            return bytearray()
        requests, budget = self.requests, self._context.payload_memory
        if self._payload is None:
            if not self._take(budget, length):
                return None
            self._payload = bytearray(length)
            if length > SMALL_BYTES:
                budget.expect(self, length)
        payload, begin_pos = self._payload, end_pos - length
        piece_pos, piece_end = max(requests.sent_pos, begin_pos), min(requests.end_pos, end_pos)
        if piece_pos < piece_end:
            payload[piece_pos - begin_pos : piece_end - begin_pos] = requests.span(piece_pos, piece_end)
        requests.sent_pos = max(piece_end, piece_pos)
        if piece_end < end_pos:
            return None
        self._payload = None
        if length > SMALL_BYTES:
            budget.moved(self, length)
        return payload

    def _take(self, budget: MemoryBudget, size: int) -> bool:
        """Memory for one request: the connection's own for a small one, the plane's for a large one."""
        if size > SMALL_BYTES:
            return budget.take(self, size)
        if self._small[budget] and self._small[budget] + size > SMALL_LIMIT_BYTES:
            return False
        self._small[budget] += size
        return True

    def _release(self, budget: MemoryBudget, size: int) -> None:
        if size > SMALL_BYTES:
            budget.release(self, size)
        else:
            self._small[budget] -= size
        if budget is self._context.reply_memory:
            self._reads_wait = False

    def _release_reply(self, size: int) -> None:
        """The client has taken a reply, or never will."""
        if size > SMALL_BYTES:
            self._context.reply_memory.moved(self, size)
        self._release(self._context.reply_memory, size)

    def _on_job(self, job: StorageJob) -> None:
        self._jobs -= 1
        context, size = self._context, len(job.data)
        is_read, is_reply = job.request[2] == p.Cmd.READ, False
        if not self.is_closed:
            cookie = job.request[1]
            arrived_ns, sent_ns, word, _ = self.inflight.pop(cookie)
            word |= FAILED_BIT if job.error else 0
            is_reply = is_read and not job.error
            data = job.data if is_reply else bytearray(p.SIMPLE_REPLY_BYTES)
            data[: p.SIMPLE_REPLY_BYTES] = p.simple_reply(cookie, job.error)
            now_ns = context.clock.monotonic_ns()
            reads_ns, others_ns = self._paused_ns(now_ns)
            self._record([(reads_ns if is_read else others_ns, word, arrived_ns, sent_ns, now_ns)])
            self._replies.append((memoryview(data), size if is_reply else 0))
            if is_reply and size > SMALL_BYTES:
                context.reply_memory.expect(self, size)
        if not is_reply:
            self._release(context.reply_memory if is_read else context.payload_memory, size)
        if self.is_closed:
            self._let_go_of_file()
        else:
            self._serve_on()

    # -- replies --------------------------------------------------------------------------------------------

    def _send_on(self) -> None:
        """Give replies to the client's socket, a piece at a time, while it takes them."""
        for _ in range(_MAX_PIECES):
            if not self._replies or not self._out.is_empty or self.is_closed:
                return
            data, size = self._replies.popleft()
            if len(data) > PIECE_BYTES:
                self._replies.appendleft((data[PIECE_BYTES:], size))
                self._reply(data[:PIECE_BYTES])
                continue
            if size:
                self._release_reply(size)
            self._reply(data)
        if self._replies and self._out.is_empty:
            self._go_on_later()

    def _reply_error(self, reply: bytes) -> None:
        if self._replies:
            self._replies.append((memoryview(reply), 0))
        else:
            self._reply(reply)

    def _is_finished(self) -> bool:
        return super()._is_finished() and not self._replies

    # -- memory, and the end --------------------------------------------------------------------------------

    @property
    def stream(self) -> StreamAccount:
        """See ``buffers.MemoryOwner``."""
        return self._stream

    def on_memory_free(self) -> None:
        """See ``buffers.MemoryOwner``."""
        self._reads_wait = False
        self._serve_on()

    def on_too_slow(self) -> None:
        """See ``buffers.MemoryOwner``."""
        self.close("others wait for the memory of its large request, which moves below 2 MiB/s")

    def _release_storage(self) -> None:
        context = self._context
        context.loop.cancel((self, "turn"))
        if self._payload is not None:
            if len(self._payload) > SMALL_BYTES:
                context.payload_memory.moved(self, len(self._payload))
            self._release(context.payload_memory, len(self._payload))
            self._payload = None
        for _, size in self._replies:
            if size:
                self._release_reply(size)
        self._replies.clear()
        self._ready.clear()
        self._later.clear()
        context.payload_memory.stop_waiting(self)
        context.reply_memory.stop_waiting(self)
        self._let_go_of_file()

    def _let_go_of_file(self) -> None:
        if not self._jobs:
            self._storage.release()
