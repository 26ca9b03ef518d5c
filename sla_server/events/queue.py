"""The persistent queues of delivery (E3): events with their counts, and notices addressed to one recipient.

A queue is a disk queue with many readers, each of which has a cursor: what is behind all cursors is deleted.
Nothing is locked. Chunks that were read are kept for the other readers, which usually are at the same place.

``LaterQueue`` keeps what comes at a certain time: notices that are held back, reminders, escalations. It is
read whole at the start and in memory from then on; a record is deleted once it is in the queue of events.

Durability: ``append`` and ``add`` return when the records are on disk. A deletion that a crash undoes is
repeated by its sender. A move is one record in the queue of events, which says where it was: what is in both
queues after a crash is deleted here (``repeat_moves``), and the deletion here is on disk before that record
may be deleted (``sync_moves``). So nothing is moved twice.

Thread: ``EventQueue.append`` and ``records`` by any, reading by one (main); ``LaterQueue`` by one.
"""

from __future__ import annotations

import heapq
import operator
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic_core import to_json

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import QueueFull, RecordDamaged
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory
from sla_server.events import catalogue
from sla_server.events.event import Event, EventUnreadable, from_row
from sla_server.events.recipients.base import Status, delivery_identity

log = structlog.get_logger("events")
ENTRY_BYTES: Final = 512  # an event is rarely smaller
CHUNK_BYTES: Final = 128 << 10
CHUNKS: Final = 16
LATER_BYTES: Final = 4 << 20
MOVE_ITEMS: Final = 64
MOVE_FEW: Final = 8
MOVE_RATIO: Final = 0.6


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """One record.

    Attributes:
        seq: its number in the queue; 0 before.
        repeats: how many equal events it is for.
        recipient: to whom alone it goes; "" for an event that is routed.
        reminder: which reminder it is; 0 for none.
        remind_s: pause to the next reminder; 0 for none.
        escalated: it comes because nobody acknowledged it.
        is_caught_up: it was held back.
        due_us: in the queue of later events: when it is due. purpose: held, remind or escalate.
        origin: id of the partner's queue that it was taken over from, "" for an event of this server.
        origin_seq: its number there.
        later_seq: the number it had in the queue of later events that it was moved from; 0 for none.
    """

    event: Event
    seq: int = 0
    repeats: int = 1
    recipient: str = ""
    reminder: int = 0
    remind_s: float = 0.0
    escalated: bool = False
    is_caught_up: bool = False
    due_us: int = 0
    purpose: str = ""
    origin: str = ""
    origin_seq: int = 0
    later_seq: int = 0

    def encode(self, recorded_us: int | None = None) -> bytes:
        """The record; with ``recorded_us`` in place of the event's own."""
        event = self.event.as_json()
        if recorded_us is not None:
            event["recorded_us"] = recorded_us
        found: dict[str, Any] = {"event": event}
        if (values := _OPTIONAL(self)) != _DEFAULTS:
            for (key, _name, default), value in zip(_KEYS, values, strict=True):
                if value != default:
                    found[key] = value
        try:
            return to_json(found, inf_nan_mode="null")  # two thirds of the time that json takes
        except (TypeError, ValueError, RecursionError):
            return strict_json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")

    @property
    def identity(self) -> str:
        """Identity of the event, or of a reminder or escalation of it; see ``delivery_identity``."""
        if not self.reminder and not self.escalated:
            return self.event.event_id
        return delivery_identity(self.event, self.reminder, self.escalated)


_KEYS: Final = (
    ("n", "repeats", 1),
    ("to", "recipient", ""),
    ("reminder", "reminder", 0),
    ("remind_s", "remind_s", 0.0),
    ("escalated", "escalated", False),
    ("caught_up", "is_caught_up", False),
    ("due_us", "due_us", 0),
    ("purpose", "purpose", ""),
    ("origin", "origin", ""),
    ("origin_seq", "origin_seq", 0),
    ("later_seq", "later_seq", 0),
)
_OPTIONAL: Final = operator.attrgetter(*(name for _, name, _ in _KEYS))
_DEFAULTS: Final = tuple(default for _, _, default in _KEYS)


def decode(seq: int, data: bytes) -> QueuedEvent:
    """A record.

    Raises:
        EventUnreadable: it is none of ours.
    """
    found = strict_json.loads(data.decode("utf-8", "replace"))
    if not isinstance(found, dict) or not isinstance(found.get("event"), dict):
        raise EventUnreadable(f"record {seq} holds no event")
    values = {name: found.get(key, default) for key, name, default in _KEYS}
    for _key, name, default in _KEYS:
        if type(values[name]) is not type(default) and not (name == "remind_s" and values[name] == 0):
            raise EventUnreadable(f"record {seq}: {name} is {values[name]!r}")
    return QueuedEvent(from_row(found["event"]), seq, **values)


def origin_of(seq: int, data: bytes) -> str:
    """Id of the partner's queue that a record was taken over from; "" for our own, and what is unreadable."""
    if b'"origin":"' not in data:  # quotes within a text are escaped
        return ""
    try:
        return decode(seq, data).origin
    except (ValueError, RecursionError):
        return ""


class EventQueue:
    """See the module.

    Args:
        directory: made if missing.
        name: of the files.
        data_bytes: room for records.
        storage: the two files, for tests.

    Attributes:
        damaged: records that could not be read back, or that hold no event.
        newest_us: the latest ``recorded_us`` of all that was appended or read; any thread.

    Raises:
        DiskQueueError, OSError: it cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        data_bytes: int,
        storage: tuple[Storage, Storage] | None = None,
        clock: Clock | None = None,
    ) -> None:
        make_directory(directory, 0o700)
        self.name = name
        data, index = storage or (None, None)
        entries = max(1024, data_bytes // ENTRY_BYTES)
        settings = QueueSettings(data_path=directory / name, data_bytes=data_bytes, entries=entries)
        self._queue = DiskQueue(settings, data=data, index=index, clock=clock, helper=storage is None)
        self.damaged = sum(max(1, extent.records) for extent in self._queue.report.extents)
        self._opened_seq = self.newest_seq
        self._chunks: OrderedDict[int, tuple[int, list[QueuedEvent]]] = OrderedDict()
        self._shown: int | None = None
        self.newest_us = 0

    @property
    def queue_id(self) -> str:
        """Drawn when the queue was made."""
        return self._queue.queue_id

    @property
    def newest_seq(self) -> int:
        """The newest durable record's number."""
        return self._queue.durable_seq

    @property
    def newest_record(self) -> int:
        """The newest record's number, deleted or not: an opening may leave numbers behind it unused."""
        return self.newest_seq if self.newest_seq > self._opened_seq else self._queue.report.newest_seq

    @property
    def done_seq(self) -> int:
        """No recipient needs an event up to this number."""
        return self._queue.oldest_seq - 1

    @property
    def fullness_ratio(self) -> float:
        """Share of the room in use."""
        return self._queue.fullness_ratio

    def append(self, items: Sequence[QueuedEvent], recorded_us: int | None = None) -> range:
        """Add records under one sync, with ``recorded_us`` in place of their own; returns their numbers.

        Where the clock was set back between two, all from there on have it a microsecond later.

        Raises:
            QueueFull: none was added. QueuePoisoned: the disk fails.
        """
        records, before_us = [], 0
        for item in items:
            if recorded_us is not None:
                recorded_us += item.event.at_us < before_us
            before_us = item.event.at_us
            records.append(item.encode(recorded_us))
            if (at_us := recorded_us or item.event.recorded_us) > self.newest_us:
                self.newest_us = at_us
        return self._queue.put_many(records)

    def show(self) -> None:
        """From the first call on ``read`` gives only what was durable at the newest call."""
        self._shown = self._queue.durable_seq

    @property
    def has_more(self) -> bool:
        """Whether there are records that the next ``show`` would show."""
        return self._shown is not None and self._shown < self._queue.durable_seq

    def read(self, after_seq: int) -> tuple[list[QueuedEvent], int]:
        """A chunk of the records behind ``after_seq``, and the number that it reaches up to."""
        newest = self._readable_seq()
        if after_seq >= newest:
            return [], after_seq
        known = self._chunks.get(after_seq)
        if known is not None:
            self._chunks.move_to_end(after_seq)
            return known[1], known[0]
        items, through = self._read(after_seq)
        if through < newest:  # the last chunk still grows
            self._chunks[after_seq] = through, items
            if len(self._chunks) > CHUNKS:
                self._chunks.popitem(last=False)
        return items, through

    def records(self, after_seq: int, most_bytes: int) -> tuple[list[tuple[int, bytes]], int]:
        """Number and bytes of records behind ``after_seq``, and how far they reach. Any thread."""
        durable = self._queue.durable_seq
        try:
            messages = self._queue.peek(after_seq, most_bytes)
        except RecordDamaged as exc:  # the main loop meets it, too, and reports it
            return self.records(after_seq, 1) if most_bytes > 1 else ([], exc.seq)
        found = [(message.seq, message.data) for message in messages]
        return found, found[-1][0] if found else max(after_seq, durable)

    def delete_through(self, seq: int) -> None:
        """No reader needs these any more."""
        self._chunks = OrderedDict(each for each in self._chunks.items() if each[0] >= seq)
        self._queue.delete_through(seq)

    def discard(self, seqs: Iterable[int]) -> None:
        """Delete these."""
        self._chunks.clear()  # they may be in one
        self._queue.discard(seqs)

    def sync_deletions(self) -> None:
        """No crash undoes what was deleted so far; as ``DiskQueue.sync_index``."""
        self._queue.sync_index()

    def close(self) -> None:
        """Sync the index and let go of the files."""
        self._queue.close()

    def _readable_seq(self) -> int:
        return self._queue.durable_seq if self._shown is None else self._shown

    def _read(self, after_seq: int) -> tuple[list[QueuedEvent], int]:
        while True:
            newest = self._readable_seq()
            try:
                messages = [each for each in self._queue.peek(after_seq, CHUNK_BYTES) if each.seq <= newest]
                break
            except RecordDamaged as exc:
                self.damaged += 1
                log.error("event-damaged", queue=self.name, seq=exc.seq)
                self._queue.discard([exc.seq])
        items = []
        for message in messages:
            try:
                items.append(decode(message.seq, message.data))
                if (at_us := items[-1].event.recorded_us) > self.newest_us:  # at the start
                    self.newest_us = at_us
            except EventUnreadable as exc:
                self.damaged += 1
                log.error("event-unreadable", queue=self.name, seq=message.seq, problem=str(exc))
                self._queue.discard([message.seq])  # so that it is counted once
        return items, messages[-1].seq if messages else newest


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
            self._append(new)

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


def moved(item: QueuedEvent) -> QueuedEvent:
    """An item of the later queue as it enters the queue of events."""
    return replace(item, seq=0, later_seq=item.seq, due_us=0, purpose="", is_caught_up=item.purpose == "held")
