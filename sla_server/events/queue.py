"""A persistent queue of delivery (E3): events with their counts, and notices addressed to one recipient.

A queue is a disk queue with many readers, each of which has a cursor: what is behind all cursors is deleted.
Nothing is locked. Chunks that were read are kept for the other readers, which usually are at the same place.

Durability: ``append`` returns when the records are on disk. A deletion that a crash undoes is repeated by its
sender.

Thread: ``append`` and ``records`` by any, reading by one (main).
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic_core import to_json

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import RecordDamaged
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory
from sla_server.events.event import Event, EventUnreadable, from_row
from sla_server.events.recipients.base import delivery_identity

log = structlog.get_logger("events")
ENTRY_BYTES: Final = 512  # an event is rarely smaller
CHUNK_BYTES: Final = 128 << 10
CHUNKS: Final = 16


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
        origin_us: when the partner had accepted it; 0 for an event of this server.
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
    origin_us: int = 0

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
    ("origin_us", "origin_us", 0),
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
