r"""The buffer of one client's requests: bytes in, parsed requests and contiguous outgoing bytes out. Sans-IO.

All positions count bytes since the connection's transmission phase began, so moving the buffer's content
changes only ``_base``, the position of its first byte:

    _base        sent_pos         admit_pos        end_pos              parse_pos
      ▼             ▼                 ▼               ▼                     ▼
      ┌─────────────┬─────────────────┬───────────────┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┐
      │ gone        │ admitted, to go │ held          │ payload to come    │
      └─────────────┴─────────────────┴───────────────┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┘

``parse_pos`` is where the next header begins; it runs ahead of ``end_pos`` while a write's payload is on its
way. ``admit_pos`` is the end of the last admitted request, payload included, so a large payload
streams through as it arrives. ``sent_pos`` runs ahead of ``end_pos`` only after ``skip``: the rest of a
refused write is dropped on arrival. Held requests stay where they are; a full buffer stops reading, which
is back-pressure.

Invariants: sent_pos <= admit_pos except while skipping; admit_pos <= parse_pos; ``room`` is never 0 for ever
while something can leave (a header always fits behind what is held, or the holder drains first).
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p

CAPACITY_BYTES: Final = 1 << 20  # depth 8 at 128 KiB in one receive; touched pages only, thanks to mmap
MAX_QUEUED: Final = 8_192  # parsed requests of one connection; beyond it we stop reading
_MOVE_BELOW: Final = 4  # content is moved to the front when less than a quarter of the buffer is free

Request = tuple[int, int, int, int, int, int, int]
"""(arrived_ns, cookie, command, length, offset, flags, end_pos); plain, because one is made per I/O."""
ARRIVED, COOKIE, COMMAND, LENGTH, OFFSET, FLAGS, END = range(7)


class RequestBuffer:
    """See the module docstring.

    Args:
        peer: for error texts.
        capacity_bytes: size of the buffer, at least a few headers.
    """

    def __init__(self, peer: str, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._peer = peer
        self._capacity = capacity_bytes
        self._view = memoryview(mmap.mmap(-1, capacity_bytes))
        self._base = 0
        self.end_pos = 0
        self.parse_pos = 0
        self.admit_pos = 0
        self.sent_pos = 0
        self.queue: deque[Request] = deque()
        self.disconnecting = False

    def room(self) -> memoryview:
        """Free space to receive into; empty when the buffer is full or nothing more is wanted."""
        if self.disconnecting or len(self.queue) >= MAX_QUEUED:
            return self._view[:0]
        if self.sent_pos >= self.end_pos:
            self._base = self.end_pos
        elif (self._base + self._capacity - self.end_pos) * _MOVE_BELOW < self._capacity:
            self._move_to_front()
        return self._view[self.end_pos - self._base :]

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
        append, unpack = self.queue.append, p.REQUEST.unpack_from
        transfers = 0
        while end - position >= 28:
            magic, flags, command, cookie, offset, length = unpack(view, position - base)
            if magic != 0x25609513:
                raise NbdProtocolError(self._peer, f"request magic {magic:#x}")
            position += 28
            if command == 1:
                if length > p.MAX_PAYLOAD_BYTES:
                    raise NbdProtocolError(self._peer, f"a write of {length} bytes; the limit is 32 MiB")
                position += length
                transfers += 1
            elif command == 0:
                transfers += 1
            elif command == 2:
                self.disconnecting = True
                break
            append((now_ns, cookie, command, length, offset, flags, position))
        self.parse_pos = position
        return transfers

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

        Only when ``is_drained``: what stands before it must have gone.
        """
        assert self.is_drained, "a refused request must not overtake admitted ones"  # callers ask first
        self.admit_pos = self.sent_pos = request[END]

    def span(self, start_pos: int, end_pos: int) -> memoryview:
        """Bytes between two positions that are in the buffer. Valid until the next ``room()``."""
        return self._view[start_pos - self._base : end_pos - self._base]
