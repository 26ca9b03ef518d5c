"""File mode: one client of a file that this plane serves itself.

    admitted ──► small ones: done here, in batches; one send for a batch's replies   (files without workers)
             └─► the others: Job ──► LoopRunner or WorkerPool ──► replies ──piece by piece──► ReplyBuffer

Theory of operation:

- A write is received whole before any of it is written, as with nbdkit: a client that goes away leaves
  none of it. Up to ``SMALL_BYTES`` it waits in the request buffer and is written from there, without a copy.
- Reads wait aside (``_later``) while the client does not take replies, or no memory is free for one; what is
  behind them goes on. So a client that sends a great deal before it reads is never waited for in vain, and
  what it has not read costs bounded memory. NBD leaves the order of requests under way to the server.
- Nothing here takes long: large requests are jobs (``storage_jobs``), and a turn of the loop ends after
  ``TURN_BYTES``.

Without workers a file that blocks stalls every volume of the plane; such files get workers. Of a file with
workers what is in memory is read by the loop all the same, where the file system says what is
(``RWF_NOWAIT``). In such a try the kernel may begin to read ahead, which could wait for a device that takes
no more. So there is none while a request of this file is with the workers: one that hangs is the last.

What makes data stable (a flush, FUA) waits for a disk, and block status looks for where data end, whatever
the file: a thread of the export does these (``SyncedRunner``).
"""

from __future__ import annotations

import math
import os
from collections import deque
from typing import Final

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, LENGTH_SHIFT, StreamAccount
from gateway_agent.nbd.buffers import FINISHED_INTS, MAX_QUEUED, Finished, MemoryBudget, Request
from gateway_agent.nbd.session import MAX_UNSENT_BYTES, NbdSession
from gateway_agent.nbd.sockets import Connection
from gateway_agent.nbd.storage import HOLE_BYTES, VolumeStorage
from gateway_agent.nbd.storage_jobs import PIECE_BYTES, JobRunner, StorageJob, may_wait, problem_of
from gateway_agent.nbd.volume import PlaneContext, Volume
from pmdaemon.wire.rates import Allowance, io_cost

SMALL_BYTES: Final = (
    1 << 20
)  # fits the request buffer and the reply buffer; larger ones ask the plane for memory
SMALL_RANGE_BYTES: Final = 64 << 10  # of a trim or write-zeroes that is done at once
SMALL_LIMIT_BYTES: Final = 4 << 20  # of one connection's small jobs, reads and writes each; always one
TURN_BYTES: Final = 2 << 20  # work of one turn: well below a millisecond from memory
_REQUEST_WORK: Final = 4 << 10  # what a request counts at least, in bytes
_PLAIN_INTS: Final = TURN_BYTES // _REQUEST_WORK * FINISHED_INTS  # so many requests are a turn, however small
_MAX_PIECES: Final = 4  # of a large reply in one turn, when the client takes them at once

_ERROR_BYTES: Final = 256  # room for an error chunk; the texts of ``problem_of`` are below half of that
_DATA_CHUNK: Final = p.CHUNK_MAGIC, p.CHUNK_DONE, int(p.Chunk.OFFSET_DATA)
_WITH_PAYLOAD: Final = frozenset((p.Cmd.READ, p.Cmd.BLOCK_STATUS))  # in the answer

_Reply = tuple[memoryview, int]
"""Bytes, and memory to give back."""


class FileSession(NbdSession):
    """See the module docstring.

    Attributes:
        storage: what it has open.

    Invariants: ``requests.sent_pos`` is the end of what was taken from the request buffer, in order. Memory
    is given back exactly once: with the last piece of a reply, with the end of a write's job, or at the end.
    """

    only_reads_pause = True

    def __init__(
        self, context: PlaneContext, sock: Connection, volume: Volume, stream: StreamAccount, storage:
        VolumeStorage, facts: p.ExportFacts, runner: JobRunner, mode: p.ReplyMode = p.SIMPLE_REPLIES,
    ) -> None:  # fmt: skip
        super().__init__(context, sock, volume, stream, facts, mode)
        self.admitted = self._ready = deque[Request]()
        self._later: deque[Request] = deque()
        self._replies: deque[_Reply] = deque()
        self._payload: bytearray | None = None  # of the write that is arriving
        self.storage = storage
        self._runner = runner
        self._jobs = 0
        self._small = {context.payload_memory: 0, context.reply_memory: 0}
        self._reads_wait = False  # for memory
        storage.hold()

    # -- turns ----------------------------------------------------------------------------------------------

    def push(self, now_ns: int) -> None:
        """Begin what can begin, for one turn."""
        if not (self._ready or self._later or self._replies):  # as a rule: ``_do_plain`` has done it all
            return self._watch_or_end()
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
            self._context.loop.at((self, "turn"), now_ns, lambda _now_ns: self._serve_on(), self.failed)

    def _next(self) -> deque[Request]:
        """The queue whose head is next: reads that waited aside, or what was admitted."""
        may_read = self._may_read
        if may_read and self._later:
            return self._later
        while not may_read and self._ready and self._ready[0][2] in _WITH_PAYLOAD:
            self.requests.sent_pos = self._ready[0][6]
            self._later.append(self._ready.popleft())
        return self._ready

    @property
    def _may_read(self) -> bool:
        return self._out.is_empty and not self._replies and not self._reads_wait

    @property
    def _may_receive(self) -> bool:
        waiting = len(self._later) + len(self._replies)
        return self._out.unsent_bytes < MAX_UNSENT_BYTES and waiting < MAX_QUEUED

    # -- small requests that need no worker -----------------------------------------------------------------

    def admit_all(self, now_ns: int) -> None:
        """See ``volume.ThrottledSession``; what can be done at once is never under way."""
        self._do_plain(now_ns, None)
        if self.requests.queue:
            super().admit_all(now_ns)

    def admit_within(self, now_ns: int, allowance: Allowance) -> None:
        """See ``volume.ThrottledSession``."""
        self._do_plain(now_ns, allowance)
        super().admit_within(now_ns, allowance)

    def _do_plain(self, now_ns: int, allowance: Allowance | None) -> None:
        """Small reads and writes from the head of the queue, while nothing is special about them.

        The same as to admit them and ``_do_small``, at less cost: this is the hot path of file mode.
        """
        if self.inflight or self._later or self._replies or self._jobs or self._blocked or self.is_closed:
            return
        if not (self._out.is_empty and self._drain_ns is None and self._may_read_at_once):
            return
        if self._pause.total_ns(now_ns):
            return
        facts, requests, queue, storage = self._facts, self.requests, self.requests.queue, self.storage
        scratch, filled, done_pos, time_ns = self._context.scratch, 0, -1, self._context.clock.monotonic_ns
        pack, magic, preadv = p.SIMPLE_REPLY.pack_into, p.SIMPLE_REPLY_MAGIC, storage.preadv
        how = 0 if self._runner.is_loop else os.RWF_NOWAIT
        last_plain = 0 if facts.flags & p.TX_READ_ONLY or how else 1
        size_bytes, fraction = facts.size_bytes, facts.blocks.minimum - 1
        room, limit = min(len(scratch) - _ERROR_BYTES, TURN_BYTES), min(facts.blocks.maximum, SMALL_BYTES)
        is_structured, head_bytes = self._mode.structured, p.SIMPLE_REPLY_BYTES
        if is_structured:
            head_bytes = p.DATA_HEAD_BYTES
            limit = min(limit, HOLE_BYTES - 1) if storage.may_have_holes else limit
        if allowance is not None:
            limit = min(limit, allowance.largest_bytes)
            oldest_ns, (most_ops, most_bytes, most_cost) = allowance.oldest_ns, allowance.most
            ops, size, cost = allowance.passed
            export = self._volume.export if most_cost < math.inf else None
        finished: Finished = []
        while queue and len(finished) < _PLAIN_INTS:
            arrived_ns, cookie, command, length, offset, flags, end_pos = queue[0]
            begin = filled + head_bytes
            if (
                command > last_plain
                or flags
                or length > limit
                or not length
                or offset + length > size_bytes
                or (offset | length) & fraction
                or begin + length > room
                or (command and end_pos > requests.end_pos)
            ):
                break
            if allowance is not None and (
                ops > most_ops or size > most_bytes or cost > most_cost or arrived_ns <= oldest_ns
            ):
                break
            if not command:
                into = scratch[begin : begin + length]
                try:
                    count = preadv((into,), offset, how)
                except OSError:
                    count = -1
                if count == length:
                    error = 0
                elif how:
                    break  # not all of it is in memory: it is a worker's, as is what is wrong with it
                else:
                    error = storage.read(into, offset)  # the rest, or why it does not pass
            else:
                error = storage.write(requests.span(end_pos - length, end_pos), offset, fua=False)
                room -= length
            queue.popleft()
            if allowance is not None:
                ops += 1
                size += length
                if export is not None:
                    base = export.cost_write if command else export.cost_read
                    cost += io_cost(base, length, export.cost_bytes)
            if error:
                chunk = self._error_reply(cookie, error, problem_of(command, error), offset)
                scratch[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            elif is_structured and not command:
                p.DATA_CHUNK.pack_into(scratch, filled, *_DATA_CHUNK, cookie, length + 8, offset)
                filled = begin + length
            else:
                pack(scratch, filled, magic, 0, cookie)
                filled += p.SIMPLE_REPLY_BYTES if command else head_bytes + length
            done_pos = end_pos
            word = length << LENGTH_SHIFT | command
            finished += (0, word | FAILED_BIT if error else word, arrived_ns, now_ns, time_ns())
        if allowance is not None:
            allowance.passed = ops, size, cost
        if finished:
            requests.admit_pos = requests.sent_pos = done_pos
            self._record(finished)
            self._reply(scratch[:filled])

    @property
    def _may_read_at_once(self) -> bool:
        storage = self.storage
        return self._runner.is_loop or (storage.tells_cached and not storage.jobs_waiting)

    def _do_small(self) -> int:
        """Do as many small requests as one reply buffer holds; returns the work done, 0 for none."""
        if not self._runner.is_loop or self._jobs:
            return 0
        queue, scratch, filled, work = self._next(), self._context.scratch, 0, 0
        may_read, clock, requests = self._may_read, self._context.clock, self.requests
        finished: Finished = []
        is_structured = self._mode.structured
        head_bytes = p.DATA_HEAD_BYTES + _ERROR_BYTES if is_structured else p.SIMPLE_REPLY_BYTES
        reads_ns, others_ns = self._paused_ns(clock.monotonic_ns())
        while queue and work < TURN_BYTES:
            request = queue[0]
            _, cookie, command, length, _, _, end_pos = request
            is_read = command == p.Cmd.READ
            reply_bytes = head_bytes + (length if is_read else 0)
            if filled + reply_bytes > len(scratch) or not self._is_here(request, may_read):
                break
            queue.popleft()
            if is_structured:
                error, reply_bytes = self._do_structured(request, scratch[filled : filled + reply_bytes])
                filled += reply_bytes
            else:
                error = self._do(request, scratch[filled + 16 : filled + reply_bytes])
                p.SIMPLE_REPLY.pack_into(scratch, filled, p.SIMPLE_REPLY_MAGIC, error, cookie)
                filled += 16 if error else reply_bytes
            requests.sent_pos = max(requests.sent_pos, end_pos)
            arrived_ns, sent_ns, word, _ = self.inflight.pop(cookie)
            word |= FAILED_BIT if error else 0
            paused_ns = reads_ns if is_read else others_ns
            finished += (paused_ns, word, arrived_ns, sent_ns, clock.monotonic_ns())
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
        if may_wait(request):
            return False
        if command in (p.Cmd.READ, p.Cmd.WRITE):
            return request[3] <= SMALL_BYTES
        return request[3] <= SMALL_RANGE_BYTES

    def _do(self, request: Request, into: memoryview) -> int:
        """Error number of one small request, done now."""
        _, _, command, length, offset, _, end_pos = request
        if command == p.Cmd.READ:
            return self.storage.read(into, offset)
        if command == p.Cmd.WRITE:
            payload = self.requests.span(end_pos - length, end_pos)
            return self.storage.write(payload, offset, fua=False)
        job = StorageJob(self.storage, request, bytearray(), self._on_jobs)
        job.run()
        return job.error

    def _do_structured(self, request: Request, room: memoryview) -> tuple[int, int]:
        """The same for a client with structured replies; returns error number and bytes of the reply."""
        _, cookie, command, length, offset, _, _ = request
        if command != p.Cmd.READ:
            error = self._do(request, room[:0])
        elif not length or (length >= HOLE_BYTES and self.storage.may_have_holes):
            return self._read_with_holes(request, room)
        else:
            head = p.DATA_HEAD_BYTES
            error = self.storage.read(room[head : head + length], offset)
            if not error:
                p.DATA_CHUNK.pack_into(
                    room, 0, p.CHUNK_MAGIC, p.CHUNK_DONE, p.Chunk.OFFSET_DATA, cookie, length + 8, offset
                )
                return 0, head + length
        if not error:
            p.SIMPLE_REPLY.pack_into(room, 0, p.SIMPLE_REPLY_MAGIC, 0, cookie)
            return 0, p.SIMPLE_REPLY_BYTES
        place = offset if length else None
        chunk = self._error_reply(cookie, error, problem_of(command, error), place)
        room[: len(chunk)] = chunk
        return error, len(chunk)

    def _read_with_holes(self, request: Request, room: memoryview) -> tuple[int, int]:
        job = StorageJob(self.storage, request, room, self._on_jobs, is_structured=True)
        job.run()
        reply = self._reply_of(job)
        size = len(reply)
        if job.error or not request[3]:
            room[:size] = reply
        return job.error, size  # else it was laid out there

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
        self.storage.jobs_waiting += 1
        job = StorageJob(self.storage, request, data, self._on_jobs, is_structured=self._mode.structured)
        self._runner.submit(job)
        return _REQUEST_WORK

    def _reply_buffer(self, request: Request) -> bytearray | None:
        size = request[3] + (p.DATA_HEAD_BYTES if self._mode.structured else p.SIMPLE_REPLY_BYTES)
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

    def _on_jobs(self, jobs: list[StorageJob]) -> None:
        left = deque(jobs)
        try:
            self._take_back(left)
        except Exception as exc:  # noqa: BLE001 - logged; the client does not wait for what is left of them
            self._context.loop.report(exc, self.failed)
            if left:
                self._take_back(left)

    def _take_back(self, jobs: deque[StorageJob]) -> None:
        """Answer jobs that are done, or once the session is closed only give back what they hold."""
        context, finished = self._context, Finished()
        now_ns = context.clock.monotonic_ns()
        reads_ns, others_ns = self._paused_ns(now_ns)
        replies = deque(() if self.is_closed else [self._reply_of(job) for job in jobs])  # which may raise
        while jobs:
            job = jobs.popleft()
            self._jobs -= 1
            size, is_read, is_reply = len(job.data), job.request[2] == p.Cmd.READ, False
            self.storage.jobs_waiting -= 1
            if not self.is_closed:
                arrived_ns, sent_ns, word, _ = self.inflight.pop(job.request[1])
                word |= FAILED_BIT if job.error else 0
                is_reply = is_read and not job.error
                finished += (reads_ns if is_read else others_ns, word, arrived_ns, sent_ns, now_ns)
                self._replies.append((replies.popleft(), size if is_reply else 0))
                if is_reply and size > SMALL_BYTES:
                    context.reply_memory.expect(self, size)
            if not is_reply:
                self._release(context.reply_memory if is_read else context.payload_memory, size)
        self._record(finished)
        if self.is_closed:
            self._let_go_of_file()
        else:
            self._serve_on()

    def _reply_of(self, job: StorageJob) -> memoryview:
        if not job.error:
            return job.reply()
        return memoryview(self._error_reply(job.request[1], job.error, job.problem, job.place))

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
            self._reply(self._with_more(data))
        if self._replies and self._out.is_empty:
            self._go_on_later()

    def _with_more(self, data: memoryview) -> memoryview | bytes:
        """A reply and small ones behind it, to go in one send."""
        room, more, replies = PIECE_BYTES - len(data), [data], self._replies
        while replies and len(replies[0][0]) <= room:
            data, size = replies.popleft()
            room -= len(data)
            more.append(data)
            if size:
                self._release_reply(size)
        return b"".join(more) if len(more) > 1 else data

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
        try:
            self._serve_on()
        except Exception as exc:  # noqa: BLE001 - logged; the others of the line get their room
            self._context.loop.report(exc, self.failed)

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
            self.storage.release()
