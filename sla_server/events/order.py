"""Order of what is about one condition, where a lane reads the queues in another order than events came in.

Two things overtake: the queue of the initialization period comes first although older events may wait in the
main one, and what was held back enters the main queue behind events that came after it. Both are put right
here: a lane reads the main queue up to the older event first, and an end that meets its beginning behind it
is held back for as long as it takes to come after it.

What the main queue holds of conditions is kept in memory, 24 bytes an event; it is read whole at the start
(``first_reading``).

Thread: the main loop.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from sla_server.events import catalogue
from sla_server.events.event import Event
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Status

Key = tuple[str, ...]
LATEST_US: Final = 2**63 - 1
FORGOTTEN: Final = 4096
"""So many events are forgotten before their memory is given back."""
MOST_ABSENT: Final = 10_000
"""Conditions that are known not to be there, for which nothing is searched again."""


def in_runs(items: Iterable[QueuedEvent]) -> Iterator[list[QueuedEvent]]:
    """Cut so that no two events of a run are about one condition.

    Of records under one sync a power cut may keep any: if it kept an end alone, its beginning, which is
    raised again, would come behind it. So the next run is written when the one before is on disk.
    """
    run, keys = list[QueuedEvent](), set[Key]()
    for item in items:
        if catalogue.status_of(item.event) is not Status.INFO:
            key = catalogue.condition_key(item.event)
            if key in keys:
                yield run
                run, keys = [], set()
            keys.add(key)
        run.append(item)
    if run:
        yield run


class RoutedConditions:
    """Conditions of routed events in the main queue, as columns: a backlog has hundreds of thousands.

    A condition is its hash: for one of 2**64 pairs of conditions, some events are read earlier than need be.
    """

    def __init__(self) -> None:
        self._columns = self._seqs, self._hashes, self._times_us = array("q"), array("q"), array("q")
        self._begin = 0  # what is before is forgotten
        self._absent: set[int] = set()

    def __len__(self) -> int:
        """How many events are known."""
        return len(self._seqs) - self._begin

    def add(self, seq: int, key: Key, recorded_us: int) -> None:
        """An event with a number greater than all before."""
        at_us = min(max(recorded_us, 0), LATEST_US)  # a partner's may be any number
        self._absent.discard(hash(key))
        for column, value in zip(self._columns, (seq, hash(key), at_us), strict=True):
            column.append(value)

    def forget_through(self, seq: int) -> None:
        """Events up to that number."""
        self._begin = bisect_right(self._seqs, seq, self._begin)
        if self._begin > max(FORGOTTEN, len(self)):
            for column in self._columns:
                del column[: self._begin]
            self._begin = 0

    def newest(self, key: Key, after_seq: int, before_us: int) -> int:
        """The greatest number behind ``after_seq`` of a condition, recorded before that time; 0: none."""
        wanted = hash(key)
        if wanted in self._absent:
            return 0
        begin = bisect_right(self._seqs, after_seq, self._begin)
        hashes, times_us = (np.frombuffer(column, np.int64) for column in self._columns[1:])
        found = begin + np.flatnonzero(hashes[begin:] == wanted)
        if not len(found) and not np.any(hashes[self._begin : begin] == wanted):
            self._add_absent(wanted)
        older = found[times_us[found] < before_us]
        return self._seqs[int(older[-1])] if len(older) else 0

    def _add_absent(self, wanted: int) -> None:
        """Each lane asks again for each event of a chunk, and a search looks at the whole backlog."""
        if len(self._absent) >= MOST_ABSENT:
            self._absent.clear()
        self._absent.add(wanted)


class ReadOrder:
    """See the module.

    Args:
        main: the queue that is read last.
    """

    def __init__(self, main: EventQueue) -> None:
        self._main = main
        self._cursor = 0
        self._keys: deque[tuple[int, Key]] = deque()
        self._routed = RoutedConditions()
        self._moved: dict[Key, set[int]] = {}  # recipient and condition: numbers of what was held back

    def read_on(self, saw: Callable[[QueuedEvent], None] = lambda _item: None) -> None:
        """Take note of what is new in the main queue; ``saw`` is called with each event."""
        while True:
            items, through = self._main.read(self._cursor)
            if through == self._cursor:
                return
            for item in items:
                self._add(item)
                saw(item)
            self._cursor = through

    def leave_out(self, seqs: Collection[int]) -> None:
        """These, which were held back, are not there any more."""
        for seq, key in [each for each in self._keys if each[0] in seqs]:
            self._keys.remove((seq, key))
            self._forget(seq, key)

    def forget_through(self, seq: int) -> None:
        """These are deleted."""
        self._routed.forget_through(seq)
        while self._keys and self._keys[0][0] <= seq:
            self._forget(*self._keys.popleft())

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
        numbers = self._moved.get((recipient, *catalogue.condition_key(item.event)), ())
        place = item.seq if queue is self._main else cursors[self._main.name]
        return any(seq > place for seq in numbers)

    def _forget(self, seq: int, key: Key) -> None:
        self._moved[key].discard(seq)
        if not self._moved[key]:
            del self._moved[key]

    def _older(self, event: Event, after_seq: int) -> int:
        if not self._routed or catalogue.status_of(event) is Status.INFO:
            return 0
        return self._routed.newest(catalogue.condition_key(event), after_seq, event.recorded_us)

    def _add(self, item: QueuedEvent) -> None:
        if catalogue.status_of(item.event) is Status.INFO or (item.recipient and not item.is_caught_up):
            return
        key = catalogue.condition_key(item.event)
        if not item.recipient:
            self._routed.add(item.seq, key, item.event.recorded_us)
            return
        key = (item.recipient, *key)
        self._moved.setdefault(key, set()).add(item.seq)
        self._keys.append((item.seq, key))
