"""The queue of what comes at a certain time: notices that are held back, reminders, escalations.

It is read whole at the start and in memory from then on; a record is deleted once it is in the queue of
events.

Durability: ``add`` returns when the records are on disk. A move is one record in the queue of events, which
says where it was: what is in both queues after a crash is deleted here (``repeat_moves``), and the deletion
here is on disk before that record may be deleted (``sync_moves``). So nothing is moved twice.

Thread: one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Final

from pmdaemon.diskqueue.errors import QueueFull
from sla_server.events import catalogue
from sla_server.events.event import Event
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Status

LATER_BYTES: Final = 4 << 20
MOVE_ITEMS: Final = 64
MOVE_FEW: Final = 8
MOVE_RATIO: Final = 0.6


class LaterQueue:
    """See the module."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._most = MOVE_ITEMS
        self._items: dict[int, QueuedEvent] = {}
        self._due: list[tuple[int, int, int, int]] = []  # when, and the order in which they were accepted
        self._identities: dict[tuple[str, str, str, int], int] = {}
        self._held: dict[tuple[str, ...], dict[int, int]] = {}  # recipient and condition: seq to due_us
        self._has_moved = self._has_removed = False  # since the newest sync of deletions
        after = 0
        while True:
            items, after = queue.read(after)
            if not items and after >= queue.newest_seq:
                break
            for item in items:
                self._keep(item)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._items)

    @property
    def queue(self) -> EventQueue:
        """Where they are on disk."""
        return self._queue

    def seqs(self) -> tuple[int, ...]:
        """Their numbers in the queue."""
        return tuple(sorted(self._items))

    def add(self, items: Iterable[QueuedEvent]) -> None:
        """Keep them; what is there already (it was added before a crash) is not added twice.

        Raises:
            QueueFull: none was added.
        """
        if new := [item for item in items if _identity(item) not in self._identities]:
            self._append([self._in_order(item) for item in new])

    def _append(self, items: Iterable[QueuedEvent]) -> None:
        after = self._queue.newest_seq
        self._queue.append([replace(item, later_seq=0) for item in items])  # what was moved may be held again
        while after < self._queue.newest_seq:
            found, after = self._queue.read(after)
            for item in found:
                self._keep(item)

    def take_over(self, item: QueuedEvent) -> None:
        """Keep an event of the partner; one that is here already is from this place there from now on.

        With it, what is held back of its condition is written again, so that it stays in its order.

        Raises:
            QueueFull: nothing has changed.
        """
        known = self._known(item)
        if known is None or (known.origin, known.origin_seq) == (item.origin, item.origin_seq):
            self.add([item])
            return
        due_us = {known.seq: known.due_us}
        if known.purpose == "held":
            due_us = self._held[known.recipient, *catalogue.condition_key(known.event)]
        before = sorted((self._items[seq] for seq in due_us), key=_accepted)
        after = [replace(each, due_us=due_us[each.seq]) for each in before]
        place = before.index(known)
        after[place] = replace(after[place], origin=item.origin, origin_seq=item.origin_seq)
        self._append(after)  # each takes the place of the former one

    def _in_order(self, item: QueuedEvent) -> QueuedEvent:
        """Accepted before what is held back of its condition that the partner has accepted after it.

        Of what was taken over at once one may have moved, and come again when the partner is lost again, or
        after a crash, while the other was held back all the time. And what has moved at the partner is behind
        newer events there.
        """
        if item.purpose != "held" or not item.origin_us:
            return item
        held = self._held.get((item.recipient, *catalogue.condition_key(item.event)), ())
        others = [self._items[seq] for seq in held]
        behind = [
            each.event.recorded_us
            for each in others
            if each.origin_us and _of_partner(each) > _of_partner(item)
        ]
        recorded_us = min([item.event.recorded_us, *(each - 1 for each in behind)])
        return replace(item, event=replace(item.event, recorded_us=recorded_us))

    def move_due(self, now_us: int, target: EventQueue) -> bool:
        """Move what is due to the queue of events; False if the rest has to wait for room there.

        From ``MOVE_RATIO`` on ``MOVE_FEW`` move at a time: else lanes that are well would be made to give up.
        """
        while True:
            is_filling = target.fullness_ratio >= MOVE_RATIO
            due = self.due(now_us, min(self._most, MOVE_FEW) if is_filling else self._most)
            if not due:
                return True
            try:
                target.append([moved(item) for item in due])
            except QueueFull:
                self.put_back(due)
                self._most = max(1, len(due) // 2)
                return False
            self.remove(due)
            self._has_moved = True
            self._most = MOVE_ITEMS
            if is_filling:
                return False

    def has_moved(self, item: QueuedEvent) -> bool:
        """Whether an event of the queue of events was moved from here, and is here still."""
        waiting = self._items.get(item.later_seq)
        return waiting is not None and _identity(waiting) == _identity(replace(item, purpose=waiting.purpose))

    def repeat_moves(self, target: EventQueue, found: dict[int, int]) -> list[int]:
        """At the start, before anything is delivered: what a crash left in both queues leaves one of them.

        It was moved, so it leaves this one, unless an event of its condition that comes before it was not:
        then the crash was within the move, nothing of which was read, and all of it comes again.

        Args:
            target: the queue of events.
            found: number here to number there, of what is in both (``first_reading``).

        Returns:
            Numbers of what left the queue of events.
        """
        if not found:
            return []
        undone = [seq for seq in found if self._is_first_left(seq, found)]
        others = [seq for seq in found if seq not in undone]
        target.discard([found[seq] for seq in undone])
        self.remove([self._items[seq] for seq in others])
        target.sync_deletions()
        self._queue.sync_deletions()
        return [found[seq] for seq in undone]

    def _is_first_left(self, seq: int, moved_seqs: Container[int]) -> bool:
        """Whether one that was not moved comes before one that was."""
        item = self._items[seq]
        if item.purpose != "held" or catalogue.status_of(item.event) is Status.INFO:
            return False
        of_condition = self._held[item.recipient, *catalogue.condition_key(item.event)]
        left = (self._items[other] for other in of_condition if other < seq and other not in moved_seqs)
        return any(_accepted(other) < _accepted(item) for other in left)

    def sync_moves(self) -> None:
        """What was moved may be deleted from the queue of events from here on: it does not come again.

        Raises:
            QueuePoisoned: the disk fails.
        """
        if self._has_moved:
            self.sync_removals()

    def sync_removals(self) -> None:
        """No crash brings back what was removed so far.

        Raises:
            QueuePoisoned: the disk fails.
        """
        if self._has_removed:
            self._queue.sync_deletions()
        self._has_removed = self._has_moved = False

    def due(self, now_us: int, most: int) -> list[QueuedEvent]:
        """At most so many of those whose time has come, oldest first; they stay until ``remove``."""
        found = dict[int, QueuedEvent]()  # what was released twice is listed twice
        while self._due and self._due[0][0] <= now_us and len(found) < most:
            due_us, *_, seq = heapq.heappop(self._due)
            item = self._items.get(seq)
            if item is not None and (due_us < 0 or due_us == self._due_us(item)):
                found[seq] = item
        return list(found.values())

    def hold_until(self, until_us: Callable[[QueuedEvent], int]) -> None:
        """What is held back is due no later than this says; 0: at once.

        The end of a condition stays as long as its beginning does.
        """
        due_by_key: dict[tuple[str, ...], int] = {}
        for item in sorted(self._items.values(), key=_accepted):
            if item.purpose != "held":
                continue
            key = (item.recipient, *catalogue.condition_key(item.event))
            known_us = self._held[key][item.seq]
            due_us = max(until_us(item), due_by_key.get(key, 0))
            if due_us < known_us:  # its former time comes later, when it is here no more
                self._held[key][item.seq] = due_us
                heapq.heappush(self._due, (due_us, *_accepted(item)))
            if catalogue.status_of(item.event) is not Status.INFO:
                due_by_key[key] = min(due_us, known_us)

    @property
    def holds_events(self) -> bool:
        """Whether anything is held back."""
        return bool(self._held)

    def held_identities(self) -> set[str]:
        """Identities of all that is held back, for whichever recipient."""
        return {item.identity for item in self._items.values() if item.purpose == "held"}

    def held_for(self, recipient: str) -> list[QueuedEvent]:
        """What is held back for a recipient."""
        held = (item for item in self._items.values() if item.purpose == "held")
        return [item for item in held if item.recipient == recipient]

    def take_held(self, recipient: str, event: Event) -> list[QueuedEvent]:
        """Forget and return what is held back for a recipient of the event's condition, oldest first."""
        key = (recipient, *catalogue.condition_key(event))
        found = sorted((self._items[seq] for seq in self._held.get(key, ())), key=_accepted)
        self.remove(found)
        return found

    def __contains__(self, item: QueuedEvent) -> bool:
        """Whether it was added before and waits."""
        return _identity(item) in self._identities

    @property
    def damaged(self) -> int:
        """Records that could not be read back."""
        return self._queue.damaged

    def next_due_us(self) -> int | None:
        """When the next one is due."""
        return self._due[0][0] if self._due else None

    def remove(self, items: Iterable[QueuedEvent]) -> None:
        """They are in the queue of events now."""
        for item in items:
            if self._items.pop(item.seq, None) is not None:
                del self._identities[_identity(item)]
                if item.purpose == "held":
                    key = (item.recipient, *catalogue.condition_key(item.event))
                    self._held[key].pop(item.seq)
                    if not self._held[key]:
                        del self._held[key]
                self._queue.discard([item.seq])
                self._has_removed = True

    def put_back(self, items: Iterable[QueuedEvent]) -> None:
        """There was no room for them in the queue of events: due again."""
        for place, item in enumerate(listed := list(items)):
            if item.seq in self._items:  # before all others: some were released before their own time
                heapq.heappush(self._due, (place - len(listed), 0, 0, item.seq))

    def cancel(self, is_meant: Callable[[QueuedEvent], bool]) -> int:
        """Forget those; returns how many."""
        self.remove(found := [item for item in self._items.values() if is_meant(item)])
        return len(found)

    def held_until(self, recipient: str, event: Event) -> int | None:
        """When the last event of the same condition that is held for the recipient is due, if any."""
        if not self._held or catalogue.status_of(event) is Status.INFO:
            return None
        return max(self._held.get((recipient, *catalogue.condition_key(event)), {}).values(), default=None)

    def close(self) -> None:
        """Let go of the files."""
        self._queue.close()

    def _known(self, item: QueuedEvent) -> QueuedEvent | None:
        """What waits under the identity of an item."""
        return self._items.get(self._identities.get(_identity(item), 0))

    def _keep(self, item: QueuedEvent) -> None:
        if (former := self._known(item)) is not None:  # it was taken over from another place: see take_over
            self.remove([former])
        self._items[item.seq] = item
        self._identities[_identity(item)] = item.seq
        if item.purpose == "held":
            key = (item.recipient, *catalogue.condition_key(item.event))
            held = self._held.setdefault(key, {})
            held[item.seq] = item.due_us
            if catalogue.status_of(item.event) is not Status.INFO:
                self._put_in_order(held, item)
        heapq.heappush(self._due, (self._due_us(item), *_accepted(item)))

    def _put_in_order(self, held: dict[int, int], item: QueuedEvent) -> None:
        """None of a condition is due before one that was accepted before it, which may be held back again."""
        place, due_us = _accepted(item), item.due_us
        if max(held.values()) > due_us:
            due_us = max(held[seq] for seq in held if _accepted(self._items[seq]) <= place)
            held[item.seq] = due_us
        if min(held.values()) < due_us:
            for other in [self._items[seq] for seq, other_us in held.items() if other_us < due_us]:
                if _accepted(other) > place:
                    held[other.seq] = due_us
                    heapq.heappush(self._due, (due_us, *_accepted(other)))

    def _due_us(self, item: QueuedEvent) -> int:
        """When it is due now."""
        if item.purpose != "held":
            return item.due_us
        return self._held[item.recipient, *catalogue.condition_key(item.event)][item.seq]


def _identity(item: QueuedEvent) -> tuple[str, str, str, int]:
    return item.event.event_id, item.recipient, item.purpose, item.reminder


def _accepted(item: QueuedEvent) -> tuple[int, int, int]:
    """Place in the order of acceptance: what was accepted together came as it was noticed."""
    return item.event.recorded_us, item.event.at_us, item.seq


def _of_partner(item: QueuedEvent) -> tuple[int, int]:
    """Place in the order of acceptance at the partner."""
    return item.origin_us, item.event.at_us


def moved(item: QueuedEvent) -> QueuedEvent:
    """An item of the later queue as it enters the queue of events."""
    return replace(
        item,
        seq=0,
        later_seq=item.seq,
        due_us=0,
        purpose="",
        origin_us=0,
        is_caught_up=item.purpose == "held",
    )
