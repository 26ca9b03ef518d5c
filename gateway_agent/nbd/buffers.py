"""Memory for large requests, bounded for all connections of a plane together. Accounting only.

A session asks before it allocates. When nothing is free it waits in line and is called when something is;
meanwhile its client's other requests go on, or its client is read no further.

There are two of these, one for payloads of writes and one for replies of reads, because of who waits for
whom: a client may well take no reply before its next write is accepted. With one memory for both, some such
clients could hold all of it as replies and wait for it as payloads, for ever. Payloads wait for nothing but
their own senders.

A client that holds memory and does not move for ``STALL_NS`` loses its connection, but only while another
one waits for memory.
"""

from __future__ import annotations

from typing import Final, Protocol

from gateway_agent.nbd.loop import Loop

LIMIT_BYTES: Final = 128 << 20  # four requests of the largest size, 64 of the 2 MiB that qemu-img uses
STALL_NS: Final = 30 * 10**9  # a guest's own limit for a request that does not move


class Owner(Protocol):
    """A session that asks for memory."""

    def memory_is_free(self) -> None:
        """Ask again: something was given back."""

    def has_stalled(self) -> None:
        """Others wait for memory of yours that has not moved for ``STALL_NS``."""


class Buffers:
    """See the module docstring.

    Invariants: the sum of ``_held`` is at most the limit; an owner that waits is served before one that
    came later.
    """

    def __init__(self, loop: Loop, limit_bytes: int = LIMIT_BYTES) -> None:
        self._loop = loop
        self._free_bytes = limit_bytes
        self._held: dict[Owner, int] = {}
        self._moved_ns: dict[Owner, int] = {}
        self._waiting: dict[Owner, None] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes in use."""
        return sum(self._held.values())

    def take(self, owner: Owner, size_bytes: int) -> bool:
        """Reserve ``size_bytes``, or put ``owner`` in line and return False."""
        is_first = not self._waiting or next(iter(self._waiting)) is owner
        if not is_first or size_bytes > self._free_bytes:
            if not self._waiting:
                self._loop.at((self, "stalled"), self._loop.clock.monotonic_ns() + STALL_NS, self._look)
            self._waiting[owner] = None
            return False
        self._waiting.pop(owner, None)
        self._free_bytes -= size_bytes
        self._held[owner] = self._held.get(owner, 0) + size_bytes
        self.moved(owner)
        return True

    def moved(self, owner: Owner) -> None:
        """A client sent or took something of what is held for it."""
        self._moved_ns[owner] = self._loop.clock.monotonic_ns()

    def give_back(self, owner: Owner, size_bytes: int) -> None:
        """``size_bytes`` of ``owner`` are free again."""
        self._free_bytes += size_bytes
        self._held[owner] -= size_bytes
        if not self._held[owner]:
            del self._held[owner], self._moved_ns[owner]
        self._wake()

    def leave(self, owner: Owner) -> None:
        """``owner`` waits no more."""
        if self._waiting.pop(owner, 0) is None:
            self._wake()

    def _wake(self) -> None:
        if self._waiting:  # later, not now: the caller is in the middle of something
            self._loop.at(self, self._loop.clock.monotonic_ns(), self._call)

    def _call(self, _now_ns: int) -> None:
        for owner in tuple(self._waiting):
            owner.memory_is_free()
            if owner in self._waiting:
                return

    def _look(self, now_ns: int) -> None:
        """Somebody has waited for ``STALL_NS``, or does so again: see who does not move."""
        if not self._waiting:
            return
        self._loop.at((self, "stalled"), now_ns + STALL_NS // 4, self._look)
        for owner in [each for each, moved_ns in self._moved_ns.items() if now_ns - moved_ns >= STALL_NS]:
            owner.has_stalled()
