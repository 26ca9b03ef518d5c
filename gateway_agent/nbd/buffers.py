"""Memory for large requests, bounded for all connections of a plane together. Accounting only.

A session asks before it allocates. When nothing is free it waits in line and is called when something is;
meanwhile its client's other requests go on, or its client is read no further.

    request ──► common part, 3/4 ──full or its stream's share is used──► reserve, 1/4 (quick requests only)

There are two of these, one for payloads of writes and one for replies of reads, because of who waits for
whom: a client may well take no reply before its next write is accepted. With one memory for both, some such
clients could hold all of it as replies and wait for it as payloads, for ever. Payloads wait for nothing but
their own senders.

Clients that move slowly, or not at all, do not stop the others:

- A stream (one client of one volume) holds a share of each part, a third of the common one and a quarter of
  the reserve, or one request that is larger. Who waits for its own share is passed by.
- Requests of at most ``limit / 32`` bytes have a reserve that larger ones never use.
- A client must send or take its requests at ``LEAST_BYTES_PER_S`` after ``GRACE_S``, however small its
  pieces; while another connection waits for memory, one that is late loses its connection. The largest
  request has 26 s: a guest's own limit, for a request that does not move, is 30 s.
"""

from __future__ import annotations

from typing import Final, Protocol

from gateway_agent.nbd.loop import EventLoop

LIMIT_BYTES: Final = 128 << 20  # three requests of the largest size, and 16 of the 2 MiB that qemu-img uses
GRACE_S: Final = 10
LEAST_BYTES_PER_S: Final = 2 << 20
LOOK_NS: Final = 10**9


class BufferOwner(Protocol):
    """A session that asks for memory; ``stream`` is what it shares its part of it with."""

    @property
    def stream(self) -> object:
        """Its (volume, client)."""

    def memory_is_free(self) -> None:
        """Ask again: there is room now."""

    def has_stalled(self) -> None:
        """Others wait for memory of yours whose time has passed."""


class _Part:
    """Bytes with a limit in all and a share of each stream."""

    def __init__(self, limit_bytes: int, share_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._share_bytes = share_bytes
        self._held: dict[object, int] = {}

    def is_within_share(self, stream: object, size_bytes: int) -> bool:
        held_bytes = self._held.get(stream, 0)
        return not held_bytes or held_bytes + size_bytes <= self._share_bytes

    def has_room(self, stream: object, size_bytes: int) -> bool:
        return size_bytes <= self._free_bytes and self.is_within_share(stream, size_bytes)

    def add(self, stream: object, size_bytes: int) -> None:
        """Negative sizes give back."""
        self._free_bytes -= size_bytes
        self._held[stream] = self._held.get(stream, 0) + size_bytes
        if not self._held[stream]:
            del self._held[stream]


class Buffers:
    """See the module docstring.

    Invariants: what is held of a part is at most its limit; an owner that waits for room, and not for its own
    share, is served before one that came later.
    """

    def __init__(self, loop: EventLoop, limit_bytes: int = LIMIT_BYTES) -> None:
        self._loop = loop
        self._quick_bytes = limit_bytes // 32
        reserve_bytes = limit_bytes // 4
        self._common = _Part(limit_bytes - reserve_bytes, limit_bytes // 4)
        self._reserve = _Part(reserve_bytes, reserve_bytes // 4)
        self._held: dict[BufferOwner, list[tuple[int, _Part]]] = {}
        self._owed: dict[BufferOwner, tuple[int, int]] = {}  # bytes its client has to move, until when
        self._waiting: dict[BufferOwner, int] = {}
        self._called: BufferOwner | None = None
        self._kept: set[_Part] = set()  # for owners that came before the one that is called

    @property
    def held_bytes(self) -> int:
        """Bytes in use."""
        return sum(size for held in self._held.values() for size, _ in held)

    def take(self, owner: BufferOwner, size_bytes: int) -> bool:
        """Reserve ``size_bytes``, or put ``owner`` in line and return False."""
        is_called = self._called is owner
        if is_called:
            self._called = None
        part = self._room_for(owner, size_bytes) if is_called or not self._waiting else None
        if part is None:
            self._wait(owner, size_bytes)
            return False
        part.add(owner.stream, size_bytes)
        self._held.setdefault(owner, []).append((size_bytes, part))
        return True

    def give_back(self, owner: BufferOwner, size_bytes: int) -> None:
        """``size_bytes`` of ``owner``, taken in one, are free again."""
        held = self._held[owner]
        part = next(part for size, part in held if size == size_bytes)
        held.remove((size_bytes, part))
        part.add(owner.stream, -size_bytes)
        if not held:
            del self._held[owner]
        self._wake()

    def leave(self, owner: BufferOwner) -> None:
        """``owner`` waits no more."""
        if self._waiting.pop(owner, None) is not None:
            self._wake()

    # -- the line -------------------------------------------------------------------------------------------

    def _parts_for(self, size_bytes: int) -> tuple[_Part, ...]:
        return (self._common, self._reserve) if size_bytes <= self._quick_bytes else (self._common,)

    def _room_for(self, owner: BufferOwner, size_bytes: int) -> _Part | None:
        for part in self._parts_for(size_bytes):
            if part not in self._kept and part.has_room(owner.stream, size_bytes):
                return part
        return None

    def _wait(self, owner: BufferOwner, size_bytes: int) -> None:
        if not self._waiting:
            self._loop.at((self, "late"), self._loop.clock.monotonic_ns() + LOOK_NS, self._look)
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
                self._called = owner
                owner.memory_is_free()
                self._called = None
                continue
            parts = self._parts_for(size_bytes)
            self._kept.update(part for part in parts if part.is_within_share(owner.stream, size_bytes))
            if len(self._kept) == 2:
                break
        self._kept.clear()

    # -- the least rate -------------------------------------------------------------------------------------

    def expect(self, owner: BufferOwner, size_bytes: int) -> None:
        """From now on the client has to send, or to take, ``size_bytes`` more."""
        now_ns = self._loop.clock.monotonic_ns()
        owed_bytes, due_ns = self._owed.get(owner, (0, now_ns + GRACE_S * 10**9))
        self._owed[owner] = owed_bytes + size_bytes, due_ns + _moving_ns(size_bytes)

    def moved(self, owner: BufferOwner, size_bytes: int) -> None:
        """The client has moved ``size_bytes`` of a request, whole. Being early is no credit for later."""
        owed_bytes, due_ns = self._owed.pop(owner)
        owed_bytes -= size_bytes
        if owed_bytes:
            now_ns = self._loop.clock.monotonic_ns()
            latest_ns = now_ns + GRACE_S * 10**9 + _moving_ns(owed_bytes)
            self._owed[owner] = owed_bytes, min(due_ns, latest_ns)

    def _look(self, now_ns: int) -> None:
        """Once a second while a session waits: name those whose time has passed."""
        if not self._waiting:
            return
        self._loop.at((self, "late"), now_ns + LOOK_NS, self._look)
        for owner in [each for each, (_, due_ns) in self._owed.items() if due_ns <= now_ns]:
            owner.has_stalled()


def _moving_ns(size_bytes: int) -> int:
    return size_bytes * 10**9 // LEAST_BYTES_PER_S
