"""Recovery: from the bytes of both files to the live records. Pure; writes nothing.

1. Read the index header: the newest intact copy. None: the index does not count as whole.
2. Read every slot. One damaged slot, another salt or size, or a file too short: not whole.
3. Walk both lists, break loops, count entries that are filed wrongly. (The lists are only counted: both are
   made again from the entries, so no damage to a link can lose or double a record.)
4. Scan the ring for intact records.
5. floor = the largest of the header's and those in the records: below it everything was deleted.
6. An intact record at or above the floor is live if the index holds it; else *restored* if it is newer than
   the last index sync, or if the index is not whole; else it was deleted and stays so.
7. An entry in use without its intact record: free, if a newer record lies over its place; else damage.
8. Damage is reported with offset and size: from 7, from broken headers at or above the floor, from holes
   between neighbours of one lap whose sequence numbers are missing, and from a file that is too short.
9. W is the end of the newest record; the in-use list is the live records in ring order from W.
10. All locks are released: a queue has one owner process, and it is only starting.

What the owner does with the result is in ``opening.py`` and ``state.py``. Source: Q7.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pmdaemon.diskqueue.format import (
    DATA_START,
    ENTRY_BYTES,
    FREE,
    HEADER_BYTES,
    IN_USE,
    INDEX_START,
    NONE,
    UNUSED,
    WHOLE,
    FileHeader,
    Found,
    IndexEntry,
    IndexHeader,
    Scan,
    Slot,
    read_index_header,
    read_slots,
    scan,
    span_bytes,
)


class Extent(NamedTuple):
    """A damaged part of the data file.

    Attributes:
        offset, size_bytes: in the file.
        records: how many records it held, 0 if unknown.
        reason: how it was noticed.
    """

    offset: int
    size_bytes: int
    records: int
    reason: str


@dataclass
class RecoveryReport:
    """What recovery found, for logs and ``sla queue recover --dry-run``."""

    index_whole: bool = False
    index_problem: str = ""
    intact: int = 0
    live: int = 0
    restored: int = 0
    deleted: int = 0
    locks_released: int = 0
    list_faults: int = 0
    clean: bool = False
    extents: list[Extent] = field(default_factory=list)


@dataclass
class Recovered:
    """Everything an owner needs to go on.

    Attributes:
        entries: live ones in ring order; ``slot`` is NONE for restored ones, which have none yet.
        write, lap: where the next record goes.
        slots: the index file's, damaged ones as None.
    """

    report: RecoveryReport
    entries: list[IndexEntry]
    write: int
    lap: int
    next_seq: int
    floor: int
    header: IndexHeader | None
    slots: list[Slot | None]


def recover(data: memoryview, index: memoryview, file: FileHeader) -> Recovered:
    """Carry out steps 1 to 10 on read-only views of both files."""
    report = RecoveryReport()
    header, slots = _read_index(index, file, report)
    ring = data[DATA_START : DATA_START + file.ring_bytes]
    found = scan(ring, file.seed)
    report.intact = len(found.intact)
    floors = [record[4] for record in found.intact]
    floor = max(floors, default=1)
    if header is not None:
        floor = max(floor, header.floor)
    held = {slot.seq: (number, slot) for number, slot in enumerate(slots) if slot and slot.status == IN_USE}
    entries = _live(ring, found, floor, header, held, report)
    newest = max(found.intact, key=lambda record: record[2], default=None)
    write = (newest[3] + span_bytes(newest[6] + newest[9])) % file.ring_bytes if newest else 0
    next_seq = max(newest[2] + 1 if newest else 1, header.next_seq if header else 1, floor)
    report.clean = bool(
        report.index_whole and header and header.synced_seq + 1 == header.next_seq == next_seq
    )
    _damage(found, ring, file, floor, header, held, report)
    if not report.clean and (header or found.intact or found.broken):
        # A record so damaged that nothing shows it may have borne the next numbers: leave them unused.
        next_seq += 1 + len(found.broken)
    entries.sort(key=lambda entry: (entry.offset - write) % file.ring_bytes)
    report.live = len(entries)
    return Recovered(report, entries, write, newest[7] if newest else 0, next_seq, floor, header, slots)


def _read_index(
    view: memoryview, file: FileHeader, report: RecoveryReport
) -> tuple[IndexHeader | None, list[Slot | None]]:
    """Steps 1 to 3: header and slots, as far as they can be believed."""
    header = read_index_header(view)
    if header is None:
        report.index_problem = "no intact header" if len(view) else "missing"
        return None, []
    if header.salt != file.salt or header.ring_bytes != file.ring_bytes:
        report.index_problem = "belongs to another data file"
        foreign = max(0, len(view) - INDEX_START) // ENTRY_BYTES
        return None, [None] * foreign  # none is believed, all are written again
    entries = view[INDEX_START : INDEX_START + header.capacity * ENTRY_BYTES]
    whole = len(entries) // ENTRY_BYTES
    touched = (
        np.frombuffer(entries[: whole * ENTRY_BYTES], dtype="<u8").reshape(-1, ENTRY_BYTES // 8).any(axis=1)
    )
    used = int(np.flatnonzero(touched)[-1]) + 1 if touched.any() else 0
    slots = read_slots(view, used, file.seed)
    damaged = slots.count(None)
    if whole < header.capacity:
        report.index_problem = f"{header.capacity - whole} entries are cut off"
    elif damaged:
        report.index_problem = f"{damaged} damaged entries"
    else:
        report.index_whole = True
    report.locks_released = sum(1 for slot in slots if slot and slot.status == IN_USE and slot.owner_pid)
    report.list_faults = count_list_faults(header, slots)
    return header, slots


def count_list_faults(header: IndexHeader, slots: list[Slot | None]) -> int:
    """Walk both lists; how many entries are unreachable, reached twice (a loop), or in the wrong list."""
    faults = 0
    reached: set[int] = set()
    for number, status in ((header.head, IN_USE), (header.free, FREE)):
        while number != NONE:
            slot = slots[number] if number < len(slots) else None
            if slot is None or slot.status != status or number in reached:
                faults += 1
                break
            reached.add(number)
            number = slot.next
    return faults + sum(
        1
        for number, slot in enumerate(slots)
        if number not in reached and (slot is None or slot.status != UNUSED)
    )


def _live(
    ring: memoryview,
    found: Scan,
    floor: int,
    header: IndexHeader | None,
    held: dict[int, tuple[int, Slot]],
    report: RecoveryReport,
) -> list[IndexEntry]:
    """Step 6: entries for the records that live."""
    entries = []
    synced_seq = header.synced_seq if header and report.index_whole else 0
    for record in found.intact:
        _sig, crc, seq, offset, _floor, _date, length, _lap, kind, destination_bytes, _flags = record
        if seq < floor:
            continue
        number, slot = held.get(seq, (NONE, None))
        known = slot is not None and slot.offset == offset and slot.crc == crc
        if not known and seq <= synced_seq:
            report.deleted += 1
            continue
        start = offset + HEADER_BYTES
        destination = bytes(ring[start : start + destination_bytes]) if destination_bytes else b""
        end = offset + span_bytes(length + destination_bytes)
        entry = IndexEntry(seq, offset, end, length, kind, destination, crc, number if known else NONE)
        if slot is not None and known and slot.retries:
            entry.working().retries = slot.retries
            entry.working().last_retry_us = slot.last_retry_us
        report.restored += not known
        entries.append(entry)
    return entries


def _damage(
    found: Scan,
    ring: memoryview,
    file: FileHeader,
    floor: int,
    header: IndexHeader | None,
    held: dict[int, tuple[int, Slot]],
    report: RecoveryReport,
) -> None:
    """Steps 7 and 8: fill ``report.extents``, in file offsets, none within another."""
    extents: list[Extent] = []
    spans = Spans(found.intact)
    intact = {record[2]: record for record in found.intact}
    for seq, (_number, slot) in held.items():
        if seq < floor or (seq in intact and intact[seq][3] == slot.offset):
            continue
        end = slot.offset + slot.span
        if not spans.overlaps(slot.offset, end, seq):
            extents.append(
                Extent(slot.offset, slot.span, 1, f"record {seq} of the index: lost, or deleted just before")
            )
    for offset in found.broken:
        extents += _broken(ring, offset, floor)
    synced_seq = header.synced_seq if header and report.index_whole else 0
    extents += _holes(found, spans, max(floor, synced_seq + 1))
    report.extents = _distinct(extents)
    report.extents = [extent._replace(offset=extent.offset + DATA_START) for extent in report.extents]
    if len(ring) < file.ring_bytes:
        missing = file.ring_bytes - len(ring)
        report.extents.append(Extent(DATA_START + len(ring), missing, 0, "the file ends too early"))


class Spans:
    """The places of intact records, which are disjoint and come in the order of their offsets."""

    def __init__(self, intact: list[Found]) -> None:
        self._begins = [record[3] for record in intact]
        self._intact = intact

    def overlaps(self, begin: int, end: int, seq: int) -> bool:
        """Whether an intact record newer than ``seq`` lies over a part of [begin, end)."""
        number = max(0, bisect_right(self._begins, begin) - 1)
        while number < len(self._begins) and self._begins[number] < end:
            record = self._intact[number]
            if record[2] > seq and begin < record[3] + span_bytes(record[6] + record[9]):
                return True
            number += 1
        return False


def _broken(ring: memoryview, offset: int, floor: int) -> list[Extent]:
    """A signature without an intact record: damage or a torn write, unless it is old and deleted."""
    if offset + HEADER_BYTES > len(ring):
        return [Extent(offset, len(ring) - offset, 1, "a record is cut off at the end of the file")]
    fields: Found = WHOLE.unpack_from(ring, offset)
    if fields[3] == offset and fields[2] < floor:
        return []
    size = span_bytes(fields[6] + fields[9])
    size = size if offset + size <= len(ring) else span_bytes(0)
    return [Extent(offset, size, 1, f"record {fields[2]}: wrong checksum, or torn by a crash")]


def _holes(found: Scan, spans: Spans, from_seq: int) -> list[Extent]:
    """Gaps between neighbours of one lap whose sequence numbers are missing."""
    holes = []
    end, seq, lap = 0, 0, 0
    for record in sorted(found.intact, key=lambda each: each[2]):
        begin = record[3]
        missing = record[2] - max(seq + 1, from_seq)
        if missing > 0 and record[7] == lap and begin > end and not spans.overlaps(end, begin, record[2]):
            holes.append(Extent(end, begin - end, missing, f"{missing} records before {record[2]} are gone"))
        end, seq, lap = begin + span_bytes(record[6] + record[9]), record[2], record[7]
    return holes


def _distinct(extents: list[Extent]) -> list[Extent]:
    """Sorted by offset; one that lies within another is left out."""
    kept: list[Extent] = []
    for extent in sorted(extents, key=lambda each: (each.offset, -each.size_bytes)):
        if kept and extent.offset + extent.size_bytes <= kept[-1].offset + kept[-1].size_bytes:
            continue
        kept.append(extent)
    return kept
