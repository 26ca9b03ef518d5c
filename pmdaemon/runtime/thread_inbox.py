"""A mailbag between two threads that sleep on descriptors: put here, wake there.

Appending to and popping from a ``deque`` are atomic, so no lock is needed; the eventfd is written *after*
the item is in the deque and read *before* the deque is emptied, so an item is never left behind a sleeping
owner: either the drain sees it, or the descriptor is readable again.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ThreadInbox(Generic[Item]):
    """Items for one thread.

    Thread: ``put`` from any thread; ``drain`` by the owner only.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while items may be waiting."""
        return self._fd

    def put(self, item: Item) -> None:
        """Leave an item and wake the owner."""
        self._items.append(item)
        with contextlib.suppress(BlockingIOError, OSError):  # counter full, or already closed: awake anyway
            os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Item]:
        """Everything put so far, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Give the descriptor back; call when both threads are joined."""
        os.close(self._fd)
