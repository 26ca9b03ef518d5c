"""The persistent queues of delivery (E3): events with their counts, and notices addressed to one recipient.

A queue is a disk queue with many readers, each of which has a cursor: what is behind all cursors is deleted.
Nothing is locked. Chunks that were read are kept for the other readers, which usually are at the same place.

``LaterQueue`` keeps what comes at a certain time: notices that are held back, reminders, escalations. It is
read whole at the start and in memory from then on; a record is deleted once it is in the queue of events.

Durability: ``append`` and ``add`` return when the records are on disk. A deletion that a crash undoes is
repeated by its sender.

Thread: ``EventQueue.append`` by one (intake) or any, reading by one (main); ``LaterQueue`` by one.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import RecordDamaged
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory
from sla_server.events import catalogue
from sla_server.events.event import Event, EventUnreadable, from_row
from sla_server.events.recipients.base import Status

log = structlog.get_logger("events")
ENTRY_BYTES: Final = 512  # an event is rarely smaller
CHUNK_BYTES: Final = 128 << 10
CHUNKS: Final = 16
LATER_BYTES: Final = 4 << 20


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

    def encode(self) -> bytes:
        """The record."""
        found: dict[str, Any] = {"event": self.event.as_json()}
        for key, name, default in _KEYS:
            if (value := getattr(self, name)) != default:
                found[key] = value
        try:
            text = _ENCODER.encode(found)  # json.dumps would make an encoder for each of thousands of events
        except (TypeError, ValueError, RecursionError):
            text = strict_json.dumps(found, ensure_ascii=False)
        return text.encode("utf-8", "replace")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_KEYS: Final = (
    ("n", "repeats", 1),
    ("to", "recipient", ""),
    ("reminder", "reminder", 0),
    ("remind_s", "remind_s", 0.0),
    ("escalated", "escalated", False),
    ("caught_up", "is_caught_up", False),
    ("due_us", "due_us", 0),
    ("purpose", "purpose", ""),
)


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


class EventQueue:
    """See the module.

    Args:
        directory: made if missing.
        name: of the files.
        data_bytes: room for records.
        storage: the two files, for tests.

    Attributes:
        damaged: records that could not be read back.

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
        settings = QueueSettings(
            data_path=directory / name, data_bytes=data_bytes, entries=max(1024, data_bytes // ENTRY_BYTES)
        )
        self._queue = DiskQueue(settings, data=data, index=index, clock=clock, helper=storage is None)
        self.damaged = sum(max(1, extent.records) for extent in self._queue.report.extents)
        self._chunks: OrderedDict[int, tuple[int, list[QueuedEvent]]] = OrderedDict()

    @property
    def queue_id(self) -> str:
        """Drawn when the queue was made."""
        return self._queue.queue_id

    @property
    def newest_seq(self) -> int:
        """The newest durable record's number."""
        return self._queue.durable_seq

    @property
    def fullness_ratio(self) -> float:
        """Share of the room in use."""
        return self._queue.fullness_ratio

    def append(self, items: Sequence[QueuedEvent]) -> None:
        """Add records under one sync.

        Raises:
            QueueFull: none was added. QueuePoisoned: the disk fails.
        """
        if items:
            self._queue.put_many([item.encode() for item in items])

    def read(self, after_seq: int) -> tuple[list[QueuedEvent], int]:
        """A chunk of the records behind ``after_seq``, and the number that it reaches up to."""
        durable = self._queue.durable_seq
        if after_seq >= durable:
            return [], after_seq
        known = self._chunks.get(after_seq)
        if known is not None:
            self._chunks.move_to_end(after_seq)
            return known[1], known[0]
        items, through = self._read(after_seq)
        if through < durable:  # the last chunk still grows
            self._chunks[after_seq] = through, items
            if len(self._chunks) > CHUNKS:
                self._chunks.popitem(last=False)
        return items, through

    def delete_through(self, seq: int) -> None:
        """No reader needs these any more."""
        for after_seq in [after_seq for after_seq in self._chunks if after_seq < seq]:
            del self._chunks[after_seq]
        self._queue.delete_through(seq)

    def discard(self, seqs: Iterable[int]) -> None:
        """Delete these."""
        self._queue.discard(seqs)

    def close(self) -> None:
        """Sync the index and let go of the files."""
        self._queue.close()

    def _read(self, after_seq: int) -> tuple[list[QueuedEvent], int]:
        while True:
            durable = self._queue.durable_seq
            try:
                messages = self._queue.peek(after_seq, CHUNK_BYTES)
                break
            except RecordDamaged as exc:
                self.damaged += 1
                log.error("event-damaged", queue=self.name, seq=exc.seq)
                self._queue.discard([exc.seq])
        items = []
        for message in messages:
            try:
                items.append(decode(message.seq, message.data))
            except EventUnreadable as exc:
                log.error("event-unreadable", queue=self.name, seq=message.seq, problem=str(exc))
        return items, messages[-1].seq if messages else durable


class LaterQueue:
    """See the module."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._items: dict[int, QueuedEvent] = {}
        self._due: list[tuple[int, int]] = []
        self._identities: set[tuple[str, str, str, int]] = set()
        self._held: dict[tuple[str, ...], dict[int, int]] = {}  # recipient and condition: seq to due_us
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

    def add(self, items: Iterable[QueuedEvent]) -> None:
        """Keep them; what is there already (it was added before a crash) is not added twice.

        Raises:
            QueueFull: none was added.
        """
        new = [item for item in items if _identity(item) not in self._identities]
        if not new:
            return
        before = self._queue.newest_seq
        self._queue.append(new)
        after = before
        while after < self._queue.newest_seq:
            found, after = self._queue.read(after)
            for item in found:
                self._keep(item)

    def due(self, now_us: int) -> list[QueuedEvent]:
        """Those whose time has come, oldest first; they stay until ``remove``."""
        found = []
        while self._due and self._due[0][0] <= now_us:
            _, seq = heapq.heappop(self._due)
            if seq in self._items:
                found.append(self._items[seq])
        return found

    def release(self, is_free: Callable[[QueuedEvent], bool]) -> int:
        """What is held back and need not be any more is due at once; returns how many."""
        found = [seq for seq, item in self._items.items() if item.purpose == "held" and is_free(item)]
        for seq in found:
            heapq.heappush(self._due, (0, seq))  # its own time comes later, when it is here no more
        return len(found)

    @property
    def holds_events(self) -> bool:
        """Whether anything is held back."""
        return bool(self._held)

    def held_for(self, recipient: str) -> list[QueuedEvent]:
        """What is held back for a recipient."""
        found = [item for item in self._items.values() if item.purpose == "held"]
        return [item for item in found if item.recipient == recipient]

    def next_due_us(self) -> int | None:
        """When the next one is due."""
        return self._due[0][0] if self._due else None

    def remove(self, items: Iterable[QueuedEvent]) -> None:
        """They are in the queue of events now."""
        for item in items:
            if self._items.pop(item.seq, None) is not None:
                self._identities.discard(_identity(item))
                if item.purpose == "held":
                    key = (item.recipient, *catalogue.condition_key(item.event))
                    self._held[key].pop(item.seq)
                    if not self._held[key]:
                        del self._held[key]
                self._queue.discard([item.seq])

    def put_back(self, items: Iterable[QueuedEvent]) -> None:
        """There was no room for them in the queue of events: due again."""
        for item in items:
            if item.seq in self._items:
                heapq.heappush(self._due, (item.due_us, item.seq))

    def cancel(self, is_meant: Callable[[QueuedEvent], bool]) -> int:
        """Forget those; returns how many."""
        found = [item for item in self._items.values() if is_meant(item)]
        self.remove(found)
        return len(found)

    def held_until(self, recipient: str, event: Event) -> int | None:
        """When the last event of the same condition that is held for the recipient is due, if any."""
        if not self._held or catalogue.status_of(event) is Status.INFO:
            return None
        return max(self._held.get((recipient, *catalogue.condition_key(event)), {}).values(), default=None)

    def close(self) -> None:
        """Let go of the files."""
        self._queue.close()

    def _keep(self, item: QueuedEvent) -> None:
        self._items[item.seq] = item
        self._identities.add(_identity(item))
        heapq.heappush(self._due, (item.due_us, item.seq))
        if item.purpose == "held":
            key = (item.recipient, *catalogue.condition_key(item.event))
            self._held.setdefault(key, {})[item.seq] = item.due_us


def _identity(item: QueuedEvent) -> tuple[str, str, str, int]:
    return item.event.event_id, item.recipient, item.purpose, item.reminder


def moved(item: QueuedEvent) -> QueuedEvent:
    """An item of the later queue as it enters the queue of events."""
    return replace(item, seq=0, due_us=0, purpose="", is_caught_up=item.purpose == "held")
