"""Recording: the side of the process that raises events.

A record is kept in a slot of its own while there is room. From half full on, an event that follows one of
the same subject, kind and severity, about the same thing, is *folded* into it: its count is raised. With
every slot in use it is *counted* by kind. So a flood is bounded, no event is dropped silently, and the order
within a subject is kept: "opened, closed, opened" is never folded. An event whose identity is in the reserve
already is a repeat and changes nothing.

The last slots can be kept for critical events, of kinds that have fewer than so many slots themselves:
whatever floods the reserve, the first events of another kind that matters find room.

A count that is raised at the moment at which the reader takes the record would be unseen. The reader looks
again in its next pass; and before a slot is used again, what is unseen there is added to the counters.

Thread: any; ``_lock`` guards the fields and all words of the writer. The file has one writer at a time, held
by a lock on it (``flock``), which ends with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import Counter, deque
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from pmdaemon.reserve.layout import (
    CHECK,
    COUNT,
    COUNTER_WORDS,
    COUNTERS,
    COUNTERS_WORD,
    DELIVERED,
    FIRST_US,
    LAST_US,
    MOST_PAYLOAD,
    NAME_BYTES,
    NUMBER,
    PAYLOAD_AT,
    SIZE,
    TAKEN_WORD,
    WORD,
    MappedReserve,
    make_reserve,
)

OTHERS: Final = "others"  # the last counter: of kinds that found none
CRITICAL: Final = "critical"


class RecordOutcome(Enum):
    """What became of an event."""

    KEPT = "kept"
    REPEATED = "repeated"
    FOLDED = "folded"
    COUNTED = "counted"


class _Pending(NamedTuple):
    number: int
    event_id: str
    subject: str
    kind: str
    severity: str
    about: str

    def is_like(self, kind: str, severity: str, about: str) -> bool:
        """Whether an event of the same subject is no news after it."""
        return (self.kind, self.severity, self.about) == (kind, severity, about)


class ReserveWriter:
    """See the module.

    Args:
        path: the file; made if it is missing.
        slots: how many records it holds.
        synced: each record is on disk when ``record`` returns.
        kept_slots: the last of them, for critical events; see the module.

    Raises:
        OSError: no room for it, another process writes it (BlockingIOError), or the disk fails.
    """

    def __init__(self, path: Path, slots: int, *, synced: bool = False, kept_slots: int = 0) -> None:
        self._lock = threading.Lock()
        make_reserve(path, slots)
        try:
            self._fd, self._file = _opened(path)
        except ValueError:  # damaged: nothing in it can be told from chance
            path.unlink()
            make_reserve(path, slots)
            self._fd, self._file = _opened(path)
        self._synced = synced
        self._kept_slots = kept_slots
        self._next = self._file.newest() + 1
        self._pending: deque[_Pending] = deque()
        self._ids: set[str] = set()
        self._newest_of: dict[str, _Pending] = {}
        self._of_kind: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Records that were not taken yet."""
        return self._next - 1 - self._file.words[TAKEN_WORD]

    @property
    def fill_ratio(self) -> float:
        """Share of the slots in use."""
        return self.waiting / self._file.slots

    def record(
        self,
        payload: bytes,
        *,
        event_id: str,
        subject: str,
        kind: str,
        at_us: int,
        severity: str = "",
        about: str = "",
    ) -> RecordOutcome:
        """Keep an event; allocates nothing from the system and never waits for the reader.

        Args:
            payload: the event.
            event_id: its identity.
            subject: what it is about; the order of the events of one subject is kept.
            kind: of the event.
            severity: of the event.
            at_us: when it was noticed.
            about: which thing it is about of several that the subject has.

        Durability: survives the death of this process; with ``synced`` also a power cut.

        Raises:
            ValueError: the payload is longer than ``MOST_PAYLOAD``.
            OSError: with ``synced``, the disk fails; the record is kept.
        """
        if len(payload) > MOST_PAYLOAD:
            raise ValueError(f"an event of {len(payload)} bytes; at most {MOST_PAYLOAD} fit a slot")
        with self._lock:
            waiting = self._forget_taken()
            if event_id in self._ids:
                return RecordOutcome.REPEATED
            before = self._newest_of.get(subject)
            is_repeated = before is not None and before.is_like(kind, severity, about)
            if before is not None and is_repeated and 2 * waiting >= self._file.slots:
                at = self._file.slot(before.number)
                self._file.words[at + COUNT] += 1
                self._file.words[at + LAST_US] = at_us
                return RecordOutcome.FOLDED
            free = self._file.slots - waiting
            may_have_last = severity == CRITICAL and self._of_kind[kind] < self._kept_slots
            if free <= (0 if may_have_last else self._kept_slots):
                self._count(kind, 1, at_us)
                return RecordOutcome.COUNTED
            number = self._store(payload, at_us)
            kept = _Pending(number, event_id, subject, kind, severity, about)
            self._pending.append(kept)
            self._ids.add(event_id)
            self._newest_of[subject] = kept
            self._of_kind[kind] += 1
        if self._synced:
            self._file.sync(number)
        return RecordOutcome.KEPT

    def count(self, kind: str, events: int, at_us: int) -> None:
        """Events of a kind that cannot be kept: they are reported as counted."""
        with self._lock:
            self._count(kind, events, at_us)

    def close(self) -> None:
        """Let go of the file; its records stay."""
        with self._lock:
            self._file.close()
            os.close(self._fd)

    def _forget_taken(self) -> int:
        """Drop what the reader has taken from memory; returns how many records wait."""
        taken = self._file.words[TAKEN_WORD]
        while self._pending and self._pending[0].number <= taken:
            gone = self._pending.popleft()
            self._ids.discard(gone.event_id)
            self._of_kind[gone.kind] -= 1
            if not self._of_kind[gone.kind]:
                del self._of_kind[gone.kind]
            if self._newest_of.get(gone.subject) is gone:
                del self._newest_of[gone.subject]
        return self._next - 1 - taken

    def _store(self, payload: bytes, at_us: int) -> int:
        number, words = self._next, self._file.words
        at = self._file.slot(number)
        self._count_unseen(number - self._file.slots)
        words[at + NUMBER] = 0  # a death from here on leaves a slot without a record
        begin = at * WORD + PAYLOAD_AT
        self._file.bytes[begin : begin + len(payload)] = payload
        words[at + COUNT] = 1
        words[at + DELIVERED] = 0
        words[at + LAST_US] = at_us
        words[at + SIZE] = len(payload)
        words[at + CHECK] = crc32(payload, number & 0xFFFFFFFF)
        words[at + NUMBER] = number
        self._next = number + 1
        return number

    def _count_unseen(self, number: int) -> None:
        """The record in the slot to be used again: was its count raised after it was taken?"""
        if number <= 0:
            return
        words, at = self._file.words, self._file.slot(number)
        unseen = words[at + COUNT] - words[at + DELIVERED]
        if words[at + NUMBER] == number and unseen > 0 and (payload := self._file.payload(number)):
            self._count(_kind_in(payload), unseen, words[at + LAST_US])

    def _count(self, kind: str, by: int, at_us: int) -> None:
        """Add to a kind's counter; a counter is named before it counts."""
        words, name = self._file.words, kind.encode()[:NAME_BYTES].decode("utf-8", "ignore")
        for index in range(COUNTERS):
            at = COUNTERS_WORD + COUNTER_WORDS * index
            held = self._file.counter_name(index)
            if not held:
                held = name if index < COUNTERS - 1 else OTHERS
                begin = (at + 4) * WORD
                self._file.bytes[begin : begin + len(held.encode())] = held.encode()
            if held == name or index == COUNTERS - 1:
                if words[at + COUNT - 1] == words[at + DELIVERED - 1]:  # all before it were reported
                    words[at + FIRST_US] = at_us
                words[at + LAST_US] = at_us
                words[at + COUNT - 1] += by
                return


def _opened(path: Path) -> tuple[int, MappedReserve]:
    """Open, lock and map."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd, MappedReserve(fd)
    except BaseException:
        os.close(fd)
        raise


def _kind_in(payload: bytes) -> str:
    try:
        found = json.loads(payload)["kind"]
    except (ValueError, LookupError, TypeError):
        return OTHERS
    return found if isinstance(found, str) else OTHERS
