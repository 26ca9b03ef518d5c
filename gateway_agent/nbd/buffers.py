r"""Buffers of one client's connection, and the budget of memory for large requests that all share.

``RequestBuffer``: bytes in, parsed requests and contiguous outgoing bytes out. All positions count bytes
since the connection's transmission phase began, so moving the buffer's content changes only ``_base``, the
position of its first byte:

    _base        sent_pos         admit_pos        end_pos              parse_pos
      ▼             ▼                 ▼               ▼                     ▼
      ┌─────────────┬─────────────────┬───────────────┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┐
      │ gone        │ admitted, to go │ held          │ payload to come    │
      └─────────────┴─────────────────┴───────────────┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┘

``parse_pos`` is where the next header begins; it runs ahead of ``end_pos`` while a write's payload is on its
way. ``admit_pos`` is the end of the last admitted request, payload included, so a large payload streams
through as it arrives. ``sent_pos`` runs ahead of ``end_pos`` only after ``skip``: the rest of a refused
write is dropped on arrival. The last request may lack a part of its payload. That is its sender's time
(``awaits_payload``), unless the buffer has been full meanwhile: then it may have waited for us. Held
requests stay where they are; a full buffer stops reading, which is back-pressure.

Invariants: sent_pos <= admit_pos except while skipping; admit_pos <= parse_pos; ``room`` is never 0 for ever
while something can leave (a header always fits behind what is held, or the holder drains first).

``ReplyBuffer``: replies are sent at once when the socket takes them, and kept in order when it does not. An
I/O is complete before its reply is given to it: how fast a client takes its answers is its own affair. Large
payloads may come in a pipe (``payload_pipe``).

``MemoryBudget``: accounting of the memory for large requests, bounded for all connections of a plane
together. A session asks before it allocates. When nothing is free it waits in line and is called when
something is; meanwhile its client's other requests go on, or its client is read no further.

    request ──► common part, 3/4 ──full or its stream's share is used──► reserve, 1/4 (quick requests only)

There are two budgets, one for payloads of writes and one for replies of reads: a client may well take no
reply before its next write is accepted. With one memory for both, some such clients could hold all of it as
replies and wait for it as payloads, for ever. Payloads wait for nothing but their own senders.

Clients that move slowly, or not at all, do not stop the others:

- A stream (one client of one volume) has a share of each part, a third of the common one and a quarter of
  the reserve, or one request that is larger. An owner that waits for its own share is passed by.
- Requests of at most ``limit / 32`` bytes have a reserve that larger ones never use.
- A client must send or take its requests at ``LEAST_BYTES_PER_S`` after ``GRACE_S``, however small its
  pieces; while another connection waits for memory, one that is late loses its connection. The largest
  request has 26 s: a guest's own limit, for a request that does not move, is 30 s.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final, Protocol

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.payload_pipe import PayloadPipe, PipePool
from gateway_agent.nbd.sockets import Connection

CAPACITY_BYTES: Final = 1 << 20  # depth 8 at 128 KiB; touched pages only, thanks to mmap
BATCH_BYTES: Final = 128 << 10  # received at a time behind the payload that is due: 4,681 requests
JOINED_BYTES: Final = 64 << 10  # of small replies that the client did not take, in one send
MAX_QUEUED: Final = 8_192  # parsed requests of one connection; beyond it we stop reading
_MOVE_BELOW: Final = 4  # content is moved to the front when less than a quarter of the buffer is free

Request = tuple[int, int, int, int, int, int, int]
"""(arrived_ns, cookie, command, length, offset, flags, end_pos); plain, because one is made per I/O."""
ARRIVED, COOKIE, COMMAND, LENGTH, OFFSET, FLAGS, END = range(7)
InFlight = dict[int, tuple[int, int, int, int]]
"""cookie -> (arrived_ns, sent_ns, word without outcome, payload bytes of a successful reply).

The first two are as of the last cut: pauses of its client since then are not in them (``session``).
"""
FINISHED_INTS: Final = 5
Finished = list[int]
"""Of each I/O, one behind the other: paused_ns, word, arrived_ns, sent_ns, reply_ns; ``paused_ns`` is still
to be added to the next two. One flat list, because it goes into an array as it is, in half the time."""


class RequestBuffer:
    """See the module docstring.

    Args:
        peer: for error texts.
        capacity_bytes: size of the buffer, at least a few headers.
        extended: whether requests have extended headers.
    """

    def __init__(self, peer: str, capacity_bytes: int = CAPACITY_BYTES, *, extended: bool = False) -> None:
        self._peer = peer
        self._is_extended = extended
        self._capacity = capacity_bytes
        self._view = memoryview(mmap.mmap(-1, capacity_bytes))
        self._base = 0
        self.end_pos = 0
        self.parse_pos = 0
        self.admit_pos = 0
        self.sent_pos = 0
        self.queue: deque[Request] = deque()
        self.disconnecting = False
        self.last_cookie = 0  # of the last request
        self.sequential = 0  # of the reads and writes that the last call of ``received`` has queued
        self._ends = (-1, -1)  # where the last read and the last write end, bytes
        self._was_full = False  # while the last request arrived

    def room(self) -> memoryview:
        """Free space to receive into; empty when the buffer is full or nothing more is wanted.

        Not all of it: all that is received at once is parsed and admitted in one turn, and the other clients
        of the plane wait. A payload that is due makes no work.
        """
        if self.disconnecting or len(self.queue) >= MAX_QUEUED:
            return self._view[:0]
        if self.sent_pos >= self.end_pos:
            self._base = self.end_pos
        elif (self._base + self._capacity - self.end_pos) * _MOVE_BELOW < self._capacity:
            self._move_to_front()
        begin = self.end_pos - self._base
        return self._view[begin : begin + max(self.parse_pos - self.end_pos, 0) + BATCH_BYTES]

    def _move_to_front(self) -> None:
        gone = self.sent_pos - self._base
        if gone > 0:
            live = self.end_pos - self.sent_pos
            self._view[:live] = self._view[gone : gone + live]  # overlapping slices are moved correctly
            self._base = self.sent_pos

    @property
    def wants_input(self) -> bool:
        """Whether there is any use in receiving now."""
        return (
            not self.disconnecting
            and len(self.queue) < MAX_QUEUED
            and self.end_pos - self.sent_pos < self._capacity
        )

    def received(self, count: int, now_ns: int) -> int:
        """``count`` bytes were written into ``room()``: queue the requests whose headers they complete.

        Returns:
            Reads and writes among them.

        Raises:
            NbdProtocolError: not a request, or a payload above the protocol's limit.
        """
        self.end_pos = end = self.end_pos + count
        position, base, view = self.parse_pos, self._base, self._view
        if position <= end:
            self._was_full = False
        if self._is_extended:
            return self._received_extended(now_ns)
        append, unpack, before = self.queue.append, p.REQUEST.unpack_from, len(self.queue)
        transfers, sequential, cookie = 0, 0, self.last_cookie
        read_end, write_end = self._ends
        while end - position >= 28:
            magic, flags, command, cookie, offset, length = unpack(view, position - base)
            if magic != 0x25609513:
                raise self._no_request(before, f"request magic {magic:#x}")
            position += 28
            if command == 1:
                if length > p.MAX_PAYLOAD_BYTES:
                    raise self._no_request(before, f"a write of {length} bytes; the limit is 32 MiB")
                position += length
                transfers += 1
                if offset == write_end:
                    sequential += 1
                write_end = offset + length
            elif command == 0:
                transfers += 1
                if offset == read_end:
                    sequential += 1
                read_end = offset + length
            elif command == 2:
                self.disconnecting = True
                break
            append((now_ns, cookie, command, length, offset, flags, position))
        self.parse_pos, self.last_cookie = position, cookie
        self.sequential, self._ends = sequential, (read_end, write_end)
        if position > end and end - self.sent_pos >= self._capacity:
            self._was_full = True
        return transfers

    def _received_extended(self, now_ns: int) -> int:
        """As ``received`` goes on.

        Whatever has PAYLOAD_LEN has a payload, and so has a write without: QEMU (8.2 to 10) leaves it out. A
        write gets the flag here, for its storage; in the queue it is without.
        """
        view, position, end, transfers = self._view, self.parse_pos, self.end_pos, 0
        ends, self.sequential, before = list(self._ends), 0, len(self.queue)
        while end - position >= p.EXTENDED_REQUEST.size:
            at = position - self._base
            magic, flags, command, cookie, offset, length = p.EXTENDED_REQUEST.unpack_from(view, at)
            if magic != p.EXTENDED_REQUEST_MAGIC:
                raise self._no_request(before, f"request magic {magic:#x}, with extended headers")
            position += p.EXTENDED_REQUEST.size
            if command == p.Cmd.WRITE:
                flags |= p.CMD_FLAG_PAYLOAD_LEN
                p.EXTENDED_REQUEST.pack_into(view, at, magic, flags, command, cookie, offset, length)
            if flags & p.CMD_FLAG_PAYLOAD_LEN:
                if length > p.MAX_PAYLOAD_BYTES:
                    raise self._no_request(before, f"{length} bytes with a request; the limit is 32 MiB")
                position += length
            if command == p.Cmd.DISC:
                self.disconnecting = True
                break
            if command == p.Cmd.WRITE:
                flags &= ~p.CMD_FLAG_PAYLOAD_LEN
            if command in (p.Cmd.READ, p.Cmd.WRITE):
                transfers += 1
                self.sequential += offset == ends[command]
                ends[command] = offset + length
            self.last_cookie = cookie
            self.queue.append((now_ns, cookie, command, length, offset, flags, position))
        self.parse_pos, self._ends = position, (ends[p.Cmd.READ], ends[p.Cmd.WRITE])
        if position > end and end - self.sent_pos >= self._capacity:
            self._was_full = True
        return transfers

    def _no_request(self, before: int, problem: str) -> NbdProtocolError:
        """What came in the same receive goes, too: it was not counted as arrived, and is not begun."""
        while len(self.queue) > before:
            self.queue.pop()
        return NbdProtocolError(self._peer, problem)

    @property
    def awaits_payload(self) -> bool:
        """Whether the last request waits for its sender alone: for the rest of its payload."""
        return self.parse_pos > self.end_pos and not self._was_full

    @property
    def is_whole(self) -> bool:
        """Whether no payload of a request is still to come."""
        return self.parse_pos <= self.end_pos

    @property
    def is_last_held(self) -> bool:
        """Whether the last request is in the queue."""
        return bool(self.queue) and self.queue[-1][END] == self.parse_pos

    def outgoing(self) -> memoryview:
        """Admitted bytes that are here and not yet sent."""
        end = self.admit_pos if self.admit_pos < self.end_pos else self.end_pos
        start = self.sent_pos - self._base
        return self._view[start : max(end - self._base, start)]

    def sent(self, count: int) -> None:
        """The first ``count`` bytes of ``outgoing()`` are gone."""
        self.sent_pos += count

    @property
    def is_drained(self) -> bool:
        """Whether every admitted byte has gone."""
        return self.sent_pos >= self.admit_pos

    def skip(self, request: Request) -> None:
        """Drop the request at the head of what is not admitted, and its payload, also what is still to come.

        Only when ``is_drained``: what is before it must have gone.
        """
        assert self.is_drained, "a refused request must not overtake admitted ones"  # callers ask first
        self.admit_pos = self.sent_pos = request[END]

    def span(self, start_pos: int, end_pos: int) -> memoryview:
        """Bytes between two positions that are in the buffer. Valid until the next ``room()``."""
        return self._view[start_pos - self._base : end_pos - self._base]


class ReplyBuffer:
    """See the module docstring.

    Attributes:
        unsent_bytes: given to ``send``, and not taken by the socket.
    """

    def __init__(self, sock: Connection, pipes: PipePool) -> None:
        self._sock = sock
        self._pipes = pipes
        self._pipe: PayloadPipe | None = None  # its content goes first
        self._backlog = memoryview(b"")
        self._more: deque[bytes] = deque()
        self.unsent_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether the socket has taken everything."""
        return not self.unsent_bytes

    def send(self, data: memoryview | bytes) -> bool:
        """Send or keep ``data`` (copied if kept). Returns whether everything is out.

        Raises:
            OSError: the client is gone.
        """
        size = len(data)
        if self.unsent_bytes:
            self._more.append(bytes(data))
            self.unsent_bytes += size
            return False
        taken = self._send(data)
        if taken < size:
            self._backlog = memoryview(bytes(memoryview(data)[taken:]))
            self.unsent_bytes = size - taken
            return False
        return True

    def send_from(self, pipe: PayloadPipe) -> bool:
        """Send or keep what is in a pipe, which belongs to this object from now on; only when empty.

        Returns:
            Whether everything is out.

        Raises:
            OSError: the client is gone.
        """
        assert not self.unsent_bytes, "a pipe is behind what is kept"  # callers look first
        self._pipe = pipe
        return self._empty_pipe(pipe)

    def _empty_pipe(self, pipe: PayloadPipe) -> bool:
        others_bytes = self.unsent_bytes - pipe.held_bytes if self.unsent_bytes else 0
        is_out = pipe.give(self._sock.fileno())
        self.unsent_bytes = others_bytes + pipe.held_bytes
        if is_out:
            self._pipe = None
            self._pipes.put_back(pipe)
        return is_out

    def close(self) -> None:
        """Drop what is kept."""
        if self._pipe is not None:
            self._pipes.put_back(self._pipe)
            self._pipe = None

    def flush(self) -> bool:
        """Send what is kept, as far as the socket takes it. Returns whether everything is out.

        Raises:
            OSError: the client is gone.
        """
        if self._pipe is not None and not self._empty_pipe(self._pipe):
            return False
        while self.unsent_bytes:
            if not self._backlog:
                self._backlog = memoryview(self._next_pieces())
            taken = self._send(self._backlog)
            self.unsent_bytes -= taken
            self._backlog = self._backlog[taken:]
            if self._backlog:
                return False
        return True

    def _next_pieces(self) -> bytes:
        """What is kept, up to some size: small replies are not sent one by one."""
        pieces, size = [self._more.popleft()], 0
        while self._more and size < JOINED_BYTES:
            pieces.append(self._more.popleft())
            size += len(pieces[-1])
        return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    def _send(self, data: memoryview | bytes) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0


LIMIT_BYTES: Final = 128 << 20  # three requests of the largest size, and 16 of the 2 MiB that qemu-img uses
GRACE_S: Final = 10
LEAST_BYTES_PER_S: Final = 2 << 20
CHECK_NS: Final = 10**9


class MemoryOwner(Protocol):
    """A session that asks for memory; the sessions of one ``stream`` share a part of it.

    Tests of ``MemoryBudget`` bring owners of their own, since a session needs a socket and a volume.
    """

    @property
    def stream(self) -> object:
        """Its (volume, client)."""

    def on_memory_free(self) -> None:
        """Ask again: there is room now."""

    def on_too_slow(self) -> None:
        """Other sessions wait for memory of this one, whose time has passed."""


class _MemoryPart:
    """Bytes with a limit in all and a share of each stream."""

    def __init__(self, limit_bytes: int, share_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._share_bytes = share_bytes
        self._taken: dict[object, int] = {}

    def is_within_share(self, stream: object, size_bytes: int) -> bool:
        used_bytes = self._taken.get(stream, 0)
        return not used_bytes or used_bytes + size_bytes <= self._share_bytes

    def has_room(self, stream: object, size_bytes: int) -> bool:
        return size_bytes <= self._free_bytes and self.is_within_share(stream, size_bytes)

    def add(self, stream: object, size_bytes: int) -> None:
        """A negative size releases."""
        self._free_bytes -= size_bytes
        self._taken[stream] = self._taken.get(stream, 0) + size_bytes
        if not self._taken[stream]:
            del self._taken[stream]


class MemoryBudget:
    """See the module docstring.

    Invariants: what is held of a part is at most its limit; an owner that waits for room, and not for its own
    share, is served before one that came later.
    """

    def __init__(self, loop: EventLoop, limit_bytes: int = LIMIT_BYTES) -> None:
        self._loop = loop
        self._quick_bytes = limit_bytes // 32
        reserve_bytes = limit_bytes // 4
        self._common = _MemoryPart(limit_bytes - reserve_bytes, limit_bytes // 4)
        self._reserve = _MemoryPart(reserve_bytes, reserve_bytes // 4)
        self._taken: dict[MemoryOwner, list[tuple[int, _MemoryPart]]] = {}
        self._owed: dict[MemoryOwner, tuple[int, int]] = {}  # bytes its client has to move, until when
        self._waiting: dict[MemoryOwner, int] = {}
        self._offered_to: MemoryOwner | None = None
        self._kept: set[_MemoryPart] = set()  # for owners that came before the one that is offered room

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return sum(size for taken in self._taken.values() for size, _ in taken)

    def take(self, owner: MemoryOwner, size_bytes: int) -> bool:
        """Reserve ``size_bytes``, or put ``owner`` in line and return False."""
        is_called = self._offered_to is owner
        if is_called:
            self._offered_to = None
        part = self._room_for(owner, size_bytes) if is_called or not self._waiting else None
        if part is None:
            self._wait(owner, size_bytes)
            return False
        part.add(owner.stream, size_bytes)
        self._taken.setdefault(owner, []).append((size_bytes, part))
        return True

    def release(self, owner: MemoryOwner, size_bytes: int) -> None:
        """``size_bytes`` of ``owner``, taken in one, are free again."""
        taken = self._taken[owner]
        part = next(part for size, part in taken if size == size_bytes)
        taken.remove((size_bytes, part))
        part.add(owner.stream, -size_bytes)
        if not taken:
            del self._taken[owner]
        self._wake()

    def stop_waiting(self, owner: MemoryOwner) -> None:
        """``owner`` waits no more."""
        if self._waiting.pop(owner, None) is not None:
            self._wake()

    # -- the line -------------------------------------------------------------------------------------------

    def _parts_for(self, size_bytes: int) -> tuple[_MemoryPart, ...]:
        return (self._common, self._reserve) if size_bytes <= self._quick_bytes else (self._common,)

    def _room_for(self, owner: MemoryOwner, size_bytes: int) -> _MemoryPart | None:
        for part in self._parts_for(size_bytes):
            if part not in self._kept and part.has_room(owner.stream, size_bytes):
                return part
        return None

    def _wait(self, owner: MemoryOwner, size_bytes: int) -> None:
        if not self._waiting:
            self._loop.at((self, "late"), self._loop.clock.monotonic_ns() + CHECK_NS, self._disconnect_late)
        if self._waiting.get(owner) != size_bytes:
            self._waiting[owner] = size_bytes
            self._wake()  # there may be room that those before it cannot use

    def _wake(self) -> None:
        if self._waiting:  # later, not now: the caller is in the middle of something
            self._loop.at(self, self._loop.clock.monotonic_ns(), self._call)

    def _call(self, _now_ns: int) -> None:
        """Call the owners that have room now. One that does not take it leaves the line, and asks again."""
        for owner, size_bytes in tuple(self._waiting.items()):
            if self._waiting.get(owner) != size_bytes:
                continue  # it has left meanwhile, or asks for something else
            if self._room_for(owner, size_bytes) is not None:
                del self._waiting[owner]
                self._offered_to = owner
                owner.on_memory_free()
                self._offered_to = None
                continue
            parts = self._parts_for(size_bytes)
            self._kept.update(part for part in parts if part.is_within_share(owner.stream, size_bytes))
            if len(self._kept) == 2:
                break
        self._kept.clear()

    # -- the least rate -------------------------------------------------------------------------------------

    def expect(self, owner: MemoryOwner, size_bytes: int) -> None:
        """From now on the client has to send, or to take, ``size_bytes`` more."""
        now_ns = self._loop.clock.monotonic_ns()
        owed_bytes, due_ns = self._owed.get(owner, (0, now_ns + GRACE_S * 10**9))
        self._owed[owner] = owed_bytes + size_bytes, due_ns + _moving_ns(size_bytes)

    def moved(self, owner: MemoryOwner, size_bytes: int) -> None:
        """The client has moved ``size_bytes`` of a request, whole. Being early is no credit for later."""
        owed_bytes, due_ns = self._owed.pop(owner)
        owed_bytes -= size_bytes
        if owed_bytes:
            now_ns = self._loop.clock.monotonic_ns()
            latest_ns = now_ns + GRACE_S * 10**9 + _moving_ns(owed_bytes)
            self._owed[owner] = owed_bytes, min(due_ns, latest_ns)

    def _disconnect_late(self, now_ns: int) -> None:
        """Once a second while a session waits: report to those owners whose time has passed."""
        if not self._waiting:
            return
        self._loop.at((self, "late"), now_ns + CHECK_NS, self._disconnect_late)
        for owner in [each for each, (_, due_ns) in self._owed.items() if due_ns <= now_ns]:
            owner.on_too_slow()


def _moving_ns(size_bytes: int) -> int:
    return size_bytes * 10**9 // LEAST_BYTES_PER_S
