"""Which descriptors are ready: epoll itself, with the owner of each found by its number.

``selectors.EpollSelector`` builds a key object for every event and looks it up twice; measured, that is
1.5 us a poll. Here a round is one list of (descriptor, events) from the kernel, and ``owners`` says whose.
Level-triggered: what was not read comes up in the next round.

Thread: one at a time.
"""

from __future__ import annotations

import select
import selectors
from typing import Final, Protocol

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
EVENTS_A_ROUND: Final = 256  # some 5 ms of work: hints, posts and sweeps are looked at between rounds
_INTEREST: Final = {
    selectors.EVENT_READ: READ,
    selectors.EVENT_WRITE: WRITE,
    selectors.EVENT_READ | selectors.EVENT_WRITE: READ | WRITE,
}


class Readable(Protocol):
    """Something with a descriptor."""

    def fileno(self) -> int:
        """The descriptor; the same while it is registered."""


class Readiness:
    """Sources and what is awaited of them (``selectors.EVENT_READ``, ``EVENT_WRITE``).

    Attributes:
        owners: source by descriptor.
        wait: (seconds or -1, most events) -> (descriptor, events) of those that are ready.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.owners: dict[int, Readable] = {}
        self.wait = self._epoll.poll

    def register(self, source: Readable, interest: int) -> None:
        """Begin to wait for it."""
        descriptor = source.fileno()
        self._epoll.register(descriptor, _INTEREST[interest])
        self.owners[descriptor] = source

    def modify(self, source: Readable, interest: int) -> None:
        """Wait for something else of it."""
        self._epoll.modify(source.fileno(), _INTEREST[interest])

    def unregister(self, source: Readable) -> None:
        """Wait for it no more; its descriptor is still open."""
        descriptor = source.fileno()
        del self.owners[descriptor]
        self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()
        self.owners.clear()
