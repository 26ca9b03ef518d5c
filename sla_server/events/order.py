"""Order of what is about one condition, where a lane reads the queues in another order than events came in.

Two things overtake: the queue of the initialization period comes first although older events may wait in the
main one, and what was held back enters the main queue behind events that came after it. Both are put right
here: a lane reads the main queue up to the older event first, and an end that meets its beginning behind it
is held back for as long as it takes to come after it.

What the main queue holds of conditions is kept in memory; it is read whole at the start.

Thread: the main loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from sla_server.events import catalogue
from sla_server.events.event import Event
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Status

Key = tuple[str, ...]


class ReadOrder:
    """See the module.

    Args:
        main: the queue that is read last.
    """

    def __init__(self, main: EventQueue) -> None:
        self._main = main
        self._cursor = 0
        self._keys: deque[tuple[int, Key]] = deque()
        self._routed: dict[Key, dict[int, int]] = {}  # condition: number in the queue to recorded_us
        self._moved: dict[Key, dict[int, int]] = {}  # recipient and condition: the same of what was held back
        self.read_on()

    def read_on(self) -> None:
        """Take note of what is new in the main queue."""
        while True:
            items, through = self._main.read(self._cursor)
            if through == self._cursor:
                return
            for item in items:
                self._add(item)
            self._cursor = through

    def forget_through(self, seq: int) -> None:
        """These are deleted."""
        while self._keys and self._keys[0][0] <= seq:
            gone, key = self._keys.popleft()
            for known in (self._routed, self._moved):
                if gone in (numbers := known.get(key, {})):
                    del numbers[gone]
                    if not numbers:
                        del known[key]

    def chunk(
        self, queue: EventQueue, cursors: Mapping[str, int], before: int
    ) -> tuple[Sequence[QueuedEvent], int, int]:
        """What a lane may read of a queue now.

        Args:
            queue: the queue.
            cursors: the lane's.
            before: what the call for the queue before returned; 0 at first.

        Returns:
            Events, the number that they reach up to, and up to which number the main queue has to be read
            before the rest of this one; 0 if it need not.
        """
        cursor = cursors[queue.name]
        items, through = queue.read(cursor)
        if queue is self._main:
            if before:
                return (
                    [item for item in items if item.seq <= before],
                    min(through, max(before, cursor)),
                    before,
                )
            return items, through, 0
        for place, item in enumerate(items):
            if first := self._older(item.event, cursors[self._main.name]):
                return items[:place], item.seq - 1, first
        return items, through, before

    def is_ahead(
        self, queue: EventQueue, item: QueuedEvent, cursors: Mapping[str, int], recipient: str
    ) -> bool:
        """Whether an older event of the same condition, which was held back, is behind this one."""
        if not self._moved or item.recipient or catalogue.status_of(item.event) is Status.INFO:
            return False
        numbers = self._moved.get((recipient, *catalogue.condition_key(item.event)), {})
        place = item.seq if queue is self._main else cursors[self._main.name]
        return any(seq > place for seq in numbers)

    def _older(self, event: Event, after_seq: int) -> int:
        if not self._routed or catalogue.status_of(event) is Status.INFO:
            return 0
        numbers = self._routed.get(catalogue.condition_key(event), {})
        found = (seq for seq, at_us in numbers.items() if seq > after_seq and at_us < event.recorded_us)
        return max(found, default=0)

    def _add(self, item: QueuedEvent) -> None:
        if catalogue.status_of(item.event) is Status.INFO or (item.recipient and not item.is_caught_up):
            return
        key = catalogue.condition_key(item.event)
        if item.recipient:
            key = (item.recipient, *key)
        known = self._moved if item.recipient else self._routed
        known.setdefault(key, {})[item.seq] = item.event.recorded_us
        self._keys.append((item.seq, key))
