"""Taking: the side of the process that delivers events.

``take`` returns what is new, ``release`` says that it is durable elsewhere; a death between the two repeats
the records, with the same identities. ``take_more`` returns what was folded into records after they were
taken, ``take_counts`` the events that found no slot; each has its release. A death between ``take_more`` and
its release repeats what was folded as a count.

Thread: one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pmdaemon.reserve.layout import (
    COUNT,
    COUNTER_WORDS,
    COUNTERS,
    COUNTERS_WORD,
    DELIVERED,
    FIRST_US,
    LAST_US,
    NUMBER,
    TAKEN_WORD,
    MappedReserve,
)


class TakenRecord(NamedTuple):
    """One record as read.

    Attributes:
        events: how many events it is for.
        last_us: when the newest of them was noticed.
    """

    number: int
    events: int
    last_us: int
    payload: bytes


class TakenCount(NamedTuple):
    """Events of one kind that found no slot since the count before."""

    kind: str
    events: int
    first_us: int
    last_us: int


class ReserveReader:
    """See the module.

    Attributes:
        damaged: records that were skipped because a power cut had torn them.

    Raises:
        OSError: it cannot be opened. ValueError: it is no reserve.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._inode = os.fstat(fd).st_ino
            self._file = MappedReserve(fd)
        finally:
            os.close(fd)
        self.damaged = 0
        self._damaged_through = 0  # up to here it is counted
        self._published = self._file.newest()  # what is missing before it does not come any more
        self._seen: list[tuple[int, int]] = []  # (number, count) of what the last passes took
        self._skip_torn()
        self._find_more()

    @property
    def name(self) -> str:
        """Name of the file: process and period."""
        return self.path.stem

    @property
    def slots(self) -> int:
        """How many records fit."""
        return self._file.slots

    @property
    def waiting(self) -> int:
        """Records that were not released."""
        return max(0, self._file.newest() - self._file.words[TAKEN_WORD])

    def is_current(self) -> bool:
        """Whether the file is still the one of its name: a damaged one is made again by its writer."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def tail(self) -> int:
        """The number of the last record that ``take`` would return without a limit."""
        number = self._file.words[TAKEN_WORD]
        while self._is_published(number + 1):
            number += 1
        return number

    def take(self, limit: int) -> list[TakenRecord]:
        """Records that are published and not released, oldest first."""
        words, found = self._file.words, list[TakenRecord]()
        number = words[TAKEN_WORD] + 1
        while len(found) < limit and self._is_published(number):
            at, payload = self._file.slot(number), self._file.payload(number)
            if payload is None:
                self._count_damaged(number)
            else:
                found.append(TakenRecord(number, words[at + COUNT], words[at + LAST_US], payload))
            number += 1
        return found

    def release(self, records: list[TakenRecord]) -> None:
        """These, and all before them, are durable elsewhere."""
        words = self._file.words
        for record in records:
            words[self._file.slot(record.number) + DELIVERED] = record.events
            self._seen.append((record.number, record.events))
        if records:
            words[TAKEN_WORD] = records[-1].number
        del self._seen[: -self._file.slots]

    def take_more(self) -> list[TakenRecord]:
        """What was folded into released records, until ``release_more``; ``events`` is the difference."""
        words, found, seen = self._file.words, list[TakenRecord](), self._seen
        self._seen = []
        for number, count in seen:
            at = self._file.slot(number)
            now = words[at + COUNT]
            payload = self._file.payload(number) if now > count else None
            if payload is not None and words[at + NUMBER] == number:
                found.append(TakenRecord(number, now - count, words[at + LAST_US], payload))
                self._seen.append((number, count))
        return found

    def release_more(self, more: list[TakenRecord]) -> None:
        """These are durable elsewhere."""
        words, events = self._file.words, {record.number: record.events for record in more}
        rest = list[tuple[int, int]]()
        for number, count in self._seen:
            at = self._file.slot(number)
            if number not in events:
                rest.append((number, count))
            elif words[at + NUMBER] == number:  # its slot was not used again meanwhile
                words[at + DELIVERED] = count + events[number]
        self._seen = rest

    def take_counts(self) -> list[TakenCount]:
        """Events that found no slot and were not reported yet, until ``release_counts``."""
        words, found = self._file.words, list[TakenCount]()
        for index in range(COUNTERS):
            at = COUNTERS_WORD + COUNTER_WORDS * index
            if (new := words[at + COUNT - 1] - words[at + DELIVERED - 1]) > 0:
                name = self._file.counter_name(index)
                found.append(TakenCount(name, new, words[at + FIRST_US], words[at + LAST_US]))
        return found

    def release_counts(self, counts: list[TakenCount]) -> None:
        """These are durable elsewhere."""
        by_name = {count.kind: count.events for count in counts}
        for index in range(COUNTERS):
            at = COUNTERS_WORD + COUNTER_WORDS * index
            if new := by_name.get(self._file.counter_name(index), 0):
                self._file.words[at + DELIVERED - 1] += new

    def close(self) -> None:
        """Unmap."""
        self._file.close()

    def _is_published(self, number: int) -> bool:
        """Whether a record was published: it is there, or a newer one was there when the file was opened."""
        return self._file.words[self._file.slot(number) + NUMBER] == number or number <= self._published

    def _count_damaged(self, number: int) -> None:
        if number > self._damaged_through:
            self._damaged_through = number
            self.damaged += 1

    def _skip_torn(self) -> None:
        """After a power cut numbers may be missing: go on behind the gap, or nothing would come any more.

        Of pages that were never synced the disk has any. What is further behind than there are slots had been
        taken, or its slot would not have been used again, though the first page does not say so.
        """
        words = self._file.words
        number = max(words[TAKEN_WORD], self._published - self._file.slots) + 1
        while number <= self._published and self._file.payload(number) is None:
            self._count_damaged(number)
            number += 1
        words[TAKEN_WORD] = number - 1
        for index in range(COUNTERS):
            at = COUNTERS_WORD + COUNTER_WORDS * index
            if words[at + DELIVERED - 1] > words[at + COUNT - 1]:
                words[at + DELIVERED - 1] = words[at + COUNT - 1]  # else what is counted next would be unseen

    def _find_more(self) -> None:
        """What was folded into records that a former reader has taken, and that it did not see."""
        words, taken = self._file.words, self._file.words[TAKEN_WORD]
        for number in range(max(1, taken - self._file.slots + 1), taken + 1):
            at = self._file.slot(number)
            if words[at + NUMBER] == number and 0 < words[at + DELIVERED] < words[at + COUNT]:
                self._seen.append((number, words[at + DELIVERED]))
