"""Recovery: from the bytes of both files to the live records. Pure; writes nothing.

1. Read the index header: the newest intact copy. None: the index does not count as whole, and no entry is
   believed, now or later: all are written again.
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

What the owner does with the result is in ``opening.py`` and ``state.py``.

Records and entries are rows of arrays throughout: some 220 bytes a record at the most, while a queue is
opened. As objects they took ten times as much, and a full queue is opened just when memory is short.
Source: Q7.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.diskqueue.format import (
    DAMAGED,
    DATA_START,
    ENTRY_BYTES,
    FREE,
    HEADER_BYTES,
    IN_USE,
    INDEX_START,
    NONE,
    SLOT_FIELDS,
    UNUSED,
    WHOLE,
    FileHeader,
    Found,
    IndexHeader,
    Rows,
    Scan,
    Work,
    read_index_header,
    read_slots,
    scan,
    span_bytes,
    spans_of,
)

LIVE_FIELDS: Final = np.dtype(
    [
        ("seq", "<u8"), ("offset", "<u8"), ("span", "<u4"), ("length", "<u4"), ("crc", "<u4"),
        ("slot", "<u4"), ("kind", "<u2"), ("destination", "<u2"),
    ]
)  # fmt: skip
"""A live record; ``destination`` is the length of it."""
Column = npt.NDArray[Any]


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
    """What recovery found, for logs and ``sla queue recover --dry-run``.

    ``newest_seq``: number of the newest record in the ring, deleted or not.
    """

    index_whole: bool = False
    index_problem: str = ""
    intact: int = 0
    live: int = 0
    restored: int = 0
    deleted: int = 0
    locks_released: int = 0
    list_faults: int = 0
    clean: bool = False
    newest_seq: int = 0
    extents: list[Extent] = field(default_factory=list)


@dataclass
class Recovered:
    """Everything an owner needs to go on.

    Attributes:
        live: rows of ``LIVE_FIELDS`` in ring order; ``slot`` is NONE for restored ones, which have none yet.
        destinations, work: by sequence number, of those that have one.
        write, lap: where the next record goes.
        slots: the index file's, rows of ``SLOT_FIELDS``.
    """

    report: RecoveryReport
    live: Rows
    destinations: dict[int, bytes]
    work: dict[int, Work]
    write: int
    lap: int
    next_seq: int
    floor: int
    header: IndexHeader | None
    slots: Rows


def recover(
    data: memoryview, index: memoryview, file: FileHeader, release: Callable[[], None] = lambda: None
) -> Recovered:
    """Carry out steps 1 to 10 on read-only views of both files; ``release`` lets go of pages of them."""
    report = RecoveryReport()
    header, slots = _read_index(index, file, report)
    release()
    ring = data[DATA_START : DATA_START + file.ring_bytes]
    found = scan(ring, file.seed, release)
    intact = found.intact
    report.intact = len(intact)
    floor = int(intact["floor"].max()) if len(intact) else 1
    if header is not None:
        floor = max(floor, header.floor)
    newest = intact[int(intact["seq"].argmax())] if len(intact) else None
    newest_seq = report.newest_seq = int(newest["seq"]) if newest is not None else 0
    write = 0
    if newest is not None:
        content_bytes = int(newest["length"]) + int(newest["destination"])
        write = (int(newest["offset"]) + span_bytes(content_bytes)) % file.ring_bytes
    next_seq = max(newest_seq + 1, header.next_seq if header else 1, floor)
    report.clean = bool(
        report.index_whole and header and header.synced_seq + 1 == header.next_seq == next_seq
    )
    if not report.clean and (header or len(intact) or found.broken):
        # A record so damaged that nothing shows it may have borne the next numbers: leave them unused.
        next_seq += 1 + len(found.broken)
    held = _Held(slots)
    _damage(found, ring, file, floor, header, held, report)
    live, work = _live(intact, floor, header, slots, held, report)
    live = _from(live, write)
    report.live = len(live)
    destinations = {}
    for row in live[live["destination"] > 0]:
        start = int(row["offset"]) + HEADER_BYTES
        destinations[int(row["seq"])] = bytes(ring[start : start + int(row["destination"])])
    lap = int(newest["lap"]) if newest is not None else 0
    return Recovered(report, live, destinations, work, write, lap, next_seq, floor, header, slots)


def _from(live: Rows, write: int) -> Rows:
    """The records in ring order: going round from ``write``."""
    in_order = np.argsort(live["offset"], kind="stable")
    before = int(np.count_nonzero(live["offset"] < write))
    in_order = np.concatenate([in_order[before:], in_order[:before]])
    return np.take(live, in_order)


def _read_index(
    view: memoryview, file: FileHeader, report: RecoveryReport
) -> tuple[IndexHeader | None, Rows]:
    """Steps 1 to 3: header and slots, as far as they can be believed."""
    header = read_index_header(view)
    if header is None:
        report.index_problem = "no intact header" if len(view) else "missing"
        return None, _disbelieved(_used(view))
    if header.salt != file.salt or header.ring_bytes != file.ring_bytes:
        report.index_problem = "belongs to another data file"
        return None, _disbelieved(max(0, len(view) - INDEX_START) // ENTRY_BYTES)
    entries = view[: INDEX_START + header.capacity * ENTRY_BYTES]
    whole = max(0, len(entries) - INDEX_START) // ENTRY_BYTES
    slots = read_slots(view, _used(entries), file.seed)
    damaged = int(np.count_nonzero(slots["status"] == DAMAGED))
    if whole < header.capacity:
        report.index_problem = f"{header.capacity - whole} entries are cut off"
    elif damaged:
        report.index_problem = f"{damaged} damaged entries"
    else:
        report.index_whole = True
    report.locks_released = int(np.count_nonzero((slots["status"] == IN_USE) & (slots["owner_pid"] != 0)))
    report.list_faults = count_list_faults(header, slots)
    return header, slots


def _used(view: memoryview) -> int:
    """How many entries there are up to the last one that is not all zero."""
    whole = max(0, len(view) - INDEX_START) // ENTRY_BYTES
    entries = view[INDEX_START : INDEX_START + whole * ENTRY_BYTES]
    touched = np.frombuffer(entries, dtype="<u8").reshape(-1, ENTRY_BYTES // 8).any(axis=1)
    return int(np.flatnonzero(touched)[-1]) + 1 if touched.any() else 0


def _disbelieved(count: int) -> Rows:
    """Entries that are all written again: one that stayed would bring a record back that is deleted later."""
    slots = np.zeros(count, SLOT_FIELDS)
    slots["status"] = DAMAGED
    return slots


def count_list_faults(header: IndexHeader, slots: Rows) -> int:
    """Walk both lists; how many entries are unreachable, reached twice (a loop), or in the wrong list."""
    faults, count = 0, len(slots)
    statuses, following = _column(slots["status"], "H"), _column(slots["next"], "I")
    reached = bytearray(count)
    for number, status in ((header.head, IN_USE), (header.free, FREE)):
        while number != NONE:
            if number >= count or statuses[number] != status or reached[number]:
                faults += 1
                break
            reached[number] = 1
            number = following[number]
    unreached = np.frombuffer(reached, np.uint8) == 0
    return faults + int(np.count_nonzero(unreached & (slots["status"] != UNUSED)))


def _column(values: Column, code: str) -> array[int]:
    """A column whose items are read one by one, which numpy does slowly."""
    column = array(code)
    column.frombytes(values.tobytes())
    return column


class _Held:
    """The entries in use, by the number of their record.

    Args:
        slots: all entries.
    """

    def __init__(self, slots: Rows) -> None:
        in_use = np.flatnonzero(slots["status"] == IN_USE)
        self._slots = slots
        self._numbers = in_use[np.argsort(slots["seq"][in_use], kind="stable")].astype(np.uint32)
        self._seqs = slots["seq"][self._numbers]

    def known(self, intact: Rows) -> tuple[Column, Column]:
        """(whether the index holds it, by which entry) for each record; of two entries for one, the later."""
        if not len(self._seqs):
            return np.zeros(len(intact), np.bool_), np.zeros(len(intact), np.uint32)
        places = _last_not_after(self._seqs, intact["seq"])
        numbers = self._numbers[places]
        found = self._seqs[places] == intact["seq"]
        for name in ("offset", "crc"):
            found &= self._slots[name][numbers] == intact[name]
        return found, numbers

    def without(self, intact: Rows, floor: int) -> Rows:
        """Those from ``floor`` on whose record is not intact where they have it."""
        numbers, seqs = (column[self._seqs >= floor] for column in (self._numbers, self._seqs))
        if len(intact) and len(numbers):
            order = np.argsort(intact["seq"], kind="stable")
            order = order[_last_not_after(intact["seq"][order], seqs)]
            is_there = (intact["seq"][order] == seqs) & (
                intact["offset"][order] == self._slots["offset"][numbers]
            )
            numbers = numbers[~is_there]
        return self._slots[numbers]


def _last_not_after(column: Column, wanted: Column) -> Column:
    """Where in a sorted column the last item stands that is not greater, for each; 0 if there is none."""
    places: Column = np.searchsorted(column, wanted, side="right")
    places[places > 0] -= 1
    return places


def _live(
    intact: Rows, floor: int, header: IndexHeader | None, slots: Rows, held: _Held, report: RecoveryReport
) -> tuple[Rows, dict[int, Work]]:
    """Step 6: the records that live, and what consumers did to them."""
    synced_seq = header.synced_seq if header and report.index_whole else 0
    known, numbers = held.known(intact)
    counts = intact["seq"] >= floor
    lives = counts & (known | (intact["seq"] > synced_seq))
    report.deleted = int(np.count_nonzero(counts & ~lives))
    report.restored = int(np.count_nonzero(lives & ~known))
    live = np.zeros(np.count_nonzero(lives), LIVE_FIELDS)
    for name in ("seq", "offset", "length", "crc", "kind", "destination"):
        live[name] = intact[name][lives]
    live["span"] = spans_of(live)
    live["slot"] = np.where(known, numbers, NONE)[lives]
    work = {}
    was_retried = live["slot"] != NONE
    was_retried[was_retried] = slots["retries"][live["slot"][was_retried]] > 0
    for number in live["slot"][was_retried]:
        done = work[int(slots["seq"][number])] = Work()
        done.retries, done.last_retry_us = (int(slots[name][number]) for name in ("retries", "last_retry_us"))
    return live, work


def _damage(
    found: Scan,
    ring: memoryview,
    file: FileHeader,
    floor: int,
    header: IndexHeader | None,
    held: _Held,
    report: RecoveryReport,
) -> None:
    """Steps 7 and 8: fill ``report.extents``, in file offsets, none within another."""
    synced_seq = header.synced_seq if header and report.index_whole else 0
    extents: list[Extent] = []
    lost, holes = held.without(found.intact, floor), _holes(found.intact, max(floor, synced_seq + 1))
    spans = Spans(found.intact if len(lost) or holes else found.intact[:0])
    for slot in lost:
        seq, begin, span = int(slot["seq"]), int(slot["offset"]), int(slot["span"])
        if not spans.overlaps(begin, begin + span, seq):
            extents.append(Extent(begin, span, 1, f"record {seq} of the index: lost, or deleted just before"))
    for offset in found.broken:
        extents += _broken(ring, offset, floor)
    for begin, end, seq, missing in holes:
        if not spans.overlaps(begin, end, seq):
            extents.append(Extent(begin, end - begin, missing, f"{missing} records before {seq} are gone"))
    report.extents = _distinct(extents)
    report.extents = [extent._replace(offset=extent.offset + DATA_START) for extent in report.extents]
    if len(ring) < file.ring_bytes:
        missing = file.ring_bytes - len(ring)
        report.extents.append(Extent(DATA_START + len(ring), missing, 0, "the file ends too early"))


class Spans:
    """The places of intact records, which are disjoint and come in the order of their offsets."""

    def __init__(self, intact: Rows) -> None:
        self._begins = _column(intact["offset"], "Q")
        self._ends = _column(intact["offset"] + spans_of(intact), "Q")
        self._seqs = _column(intact["seq"], "Q")

    def overlaps(self, begin: int, end: int, seq: int) -> bool:
        """Whether an intact record newer than ``seq`` lies over a part of [begin, end)."""
        number = max(0, bisect_right(self._begins, begin) - 1)
        while number < len(self._begins) and self._begins[number] < end:
            if self._seqs[number] > seq and begin < self._ends[number]:
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


def _holes(intact: Rows, from_seq: int) -> list[tuple[int, int, int, int]]:
    """Gaps between neighbours of one lap: begin, end, number of the record behind, how many are missing."""
    order = np.argsort(intact["seq"], kind="stable")
    seqs, begins, laps = (intact[name][order] for name in ("seq", "offset", "lap"))
    ends = begins + spans_of(intact)[order]
    firsts = np.maximum(_behind(seqs) + 1, np.uint64(from_seq))  # the numbers that are missing begin there
    places = np.flatnonzero((seqs > firsts) & (laps == _behind(laps)) & (begins > _behind(ends)))
    return [
        (int(end), int(begin), int(seq), int(seq - first))
        for end, begin, seq, first in zip(
            _behind(ends)[places], begins[places], seqs[places], firsts[places], strict=True
        )
    ]


def _behind(column: Column) -> Column:
    """The column with a 0 in front and without its last item."""
    return np.concatenate([np.zeros(1, column.dtype), column])[:-1]


def _distinct(extents: list[Extent]) -> list[Extent]:
    """Sorted by offset; one that lies within another is left out."""
    kept: list[Extent] = []
    for extent in sorted(extents, key=lambda each: (each.offset, -each.size_bytes)):
        if kept and extent.offset + extent.size_bytes <= kept[-1].offset + kept[-1].size_bytes:
            continue
        kept.append(extent)
    return kept
