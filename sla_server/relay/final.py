"""Final confirmation: the answer to a post waits until all recipients have confirmed what it brought.

An event is final when it is deleted from the queue, which is after the state file with all cursors behind it
was written, and nothing of it is held back for a recipient. So what was answered as final stays final after a
crash. What a recipient was given up for (a dead letter) is final, too: nothing more becomes of it, and an
event says so. Reminders and escalations of our own routes do not count.

Thread: ``step`` by the main loop; ``waits_for`` by any. ``_changed`` guards all fields.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from pmdaemon.runtime.clock import Deadline
from sla_server.events.later import LaterQueue
from sla_server.events.queue import EventQueue, QueuedEvent


class FinalConfirmation:
    """See the module.

    Args:
        queue: of events.
        later: what is held back.
        limit_s: how long an answer waits at most.

    State: ``_read`` is how far the queue was read; ``_waiting`` has the numbers of what was read and is not
    deleted, by identity; ``_held`` the identities that are held back.
    """

    def __init__(self, queue: EventQueue, later: LaterQueue, limit_s: float) -> None:
        self._queue = queue
        self._later = later
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._read = 0
        self._order: deque[tuple[int, str]] = deque()
        self._waiting: dict[str, int] = {}
        self._held: set[str] = set()
        self._is_closed = False

    def step(self) -> None:
        """Take note of what is new, and of what is deleted."""
        # What moves between both queues does so in steps of the engine, which this thread makes.
        held = self._later.held_identities() if self._later.holds_events else set[str]()
        new = list[QueuedEvent]()
        through = self._read
        while (found := self._queue.read(through))[1] != through:
            items, through = found
            new += [item for item in items if not item.recipient or item.is_caught_up]
        passed = self._queue.done_seq
        with self._changed:
            is_less = bool(self._held - held)
            self._held = held
            for item in new:
                self._waiting[item.identity] = item.seq
                self._order.append((item.seq, item.identity))
            while self._order and self._order[0][0] <= passed:
                seq, identity = self._order.popleft()
                if self._waiting[identity] == seq:
                    del self._waiting[identity]
                is_less = True
            if is_less or through != self._read:
                self._read = through
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing becomes final any more: no call waits from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def waits_for(self, items: Sequence[QueuedEvent]) -> bool:
        """Wait until all recipients have confirmed these, which are on disk; False after the limit."""
        newest, deadline = self._queue.newest_seq, Deadline(self._limit_s)
        identities = {item.identity for item in items}
        with self._changed:
            while self._read < newest or any(
                identity in self._waiting or identity in self._held for identity in identities
            ):
                if deadline.passed or self._is_closed:
                    return False
                self._changed.wait(deadline.left_s())
            return True
