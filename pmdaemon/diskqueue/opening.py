"""Opening a queue: make it, or recover it, and write what recovery decided.

What a crash while a queue is made can leave, in the order of the steps:

1. data file without a header (all zero)            given up and made again: it never held a record
2. data file with header, no index header           recovered from the data file alone: nothing there
3. both                                             a queue; of the index what its header does not count, as
                                                    when a larger one was being made, is given up, too

After a failed sync, or after the death of a process, the kernel shows pages that are not on the disk; after a
failed sync it even counts them as clean, so that another sync leaves them out and succeeds. What recovery
reads is therefore no proof of what is on the disk, and unless the queue was closed it writes again what it
relies on. Which parts those are follows from the order of all writing: an index header, even one that is only
in the cache, was written after the records and slots that it speaks of were synced.

What recovery writes, in order, each step durable before the next: sizes and names of the files; both copies
of the data file's header, if one is not intact; the live records newer than the ``synced_seq`` of the index's
header; if the index is not whole, a header that says so (synced_seq 0: if we die in the next step, everything
is restored once more); all slots, as they were read or as decided; the header of the new state. After a clean
close: sizes and names, the slots that change, the header. Dying or failing anywhere, the next recovery finds
the same records.
"""

from __future__ import annotations

import os
import secrets
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

from pmdaemon.diskqueue.errors import QueueUnreadable
from pmdaemon.diskqueue.format import (
    CHUNK_SLOTS,
    COPY_STEP,
    DATA_START,
    ENTRY_BYTES,
    FREE,
    IN_USE,
    INDEX_START,
    NONE,
    SIGNATURE,
    SLOT_FIELDS,
    UNIT_BYTES,
    FileHeader,
    IndexHeader,
    Rows,
    pack_slot,
    read_file_header,
    read_index_header,
)
from pmdaemon.diskqueue.index import write_runs
from pmdaemon.diskqueue.records import COLUMNS, GROWTH_SLOTS, Records
from pmdaemon.diskqueue.recovery import Recovered, RecoveryReport, recover
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime.gc_tuning import collector_rests

log = structlog.get_logger("diskqueue")
CHUNK_BYTES: Final = 1 << 20


@dataclass
class Opened:
    """An open queue's parts, as the files have them.

    Attributes:
        records: the live ones; what is free below ``header.used`` is linked from ``header.free``.
        write, lap: where the next record goes.
    """

    file: FileHeader
    header: IndexHeader
    report: RecoveryReport
    records: Records
    write: int
    lap: int
    next_seq: int


def identify(data: memoryview, index: memoryview, name: str) -> tuple[FileHeader | None, int]:
    """(the data file's header, its intact copies); None for a queue that was never finished.

    A header whose copies are both gone is taken from the index, which carries the same facts.

    Raises:
        QueueUnreadable: neither has it, though the file has records, or it is a different file.
    """
    file, copies = read_file_header(data)
    if file is not None:
        return file, copies
    header = read_index_header(index)
    if header is not None and len(data) >= DATA_START:
        return FileHeader(header.ring_bytes, header.salt, header.queue_id, 0), 0
    blocks = range(DATA_START, len(data) - 3, UNIT_BYTES)
    holds_records = any(bytes(data[at : at + 4]) == SIGNATURE for at in blocks)
    if any(data[:DATA_START]) or holds_records or header is not None:
        raise QueueUnreadable(
            name,
            "its header is damaged, or it is not a disk queue of this version",
            "Keep the file, restore it from a backup, or move it away: an empty queue is made then",
        )
    return None, 0


@collector_rests()
def open_files(data: Storage, index: Storage, settings: QueueSettings, now_us: int) -> Opened:
    """Make or recover the queue in these two files.

    Durability: the state returned is on disk.

    Raises:
        QueueUnreadable: not a queue. QueueNoSpace: the files cannot be reserved. OSError: the disk fails.
    """
    name = str(settings.data_path)
    file, copies = identify(data.view(), index.view(), name)
    is_new = file is None
    if file is None:
        file = _make(data, settings, now_us)

    def release() -> None:
        data.release()
        index.release()

    recovered = recover(data.view(), index.view(), file, release)
    report = recovered.report
    data.allocate(DATA_START + file.ring_bytes)
    if not is_new and copies < 2:
        _put_file_header(data, file)
    if not report.clean:
        _put_again(data, recovered)
    header, records = _write_index(index, file, recovered, settings, now_us)
    for extent in report.extents:
        log.warning("queue-damage", queue=name, **extent._asdict())
    if is_new:
        log.info("queue-made", queue=name, ring_bytes=file.ring_bytes)
    elif not report.clean:
        log.info("queue-recovered", queue=name, live=report.live, restored=report.restored,
                 index=report.index_problem or "whole")  # fmt: skip
    return Opened(file, header, report, records, recovered.write, recovered.lap, recovered.next_seq)


def _make(data: Storage, settings: QueueSettings, now_us: int) -> FileHeader:
    file = FileHeader(settings.data_bytes, secrets.token_bytes(16), os.urandom(8), now_us)
    data.allocate(DATA_START + settings.data_bytes, 0)
    _put_file_header(data, file)
    return file


def _put_file_header(data: Storage, file: FileHeader) -> None:
    """Write both copies, the second when the first is durable: a reader of two knows that one is on disk."""
    for start in (0, COPY_STEP):
        data.write(start, [file.pack()])
        data.sync()


def _put_again(data: Storage, recovered: Recovered) -> None:
    """Write the live records that no index header vouches for, as they were read; durable on return."""
    synced_seq = recovered.header.synced_seq if recovered.header else 0
    live = recovered.live[recovered.live["seq"] > synced_seq]
    live = live[np.argsort(live["offset"])]
    begin = end = 0
    for offset, span in [*zip(live["offset"].tolist(), live["span"].tolist(), strict=True), (-1, 0)]:
        if offset != end or end - begin >= CHUNK_BYTES:
            for first in range(begin, end, CHUNK_BYTES):
                piece = data.view()[DATA_START + first : DATA_START + min(first + CHUNK_BYTES, end)]
                data.write(DATA_START + first, [bytes(piece)])
                data.release()
            begin = offset
        end = offset + span
    data.sync()


def _write_index(
    index: Storage, file: FileHeader, recovered: Recovered, settings: QueueSettings, now_us: int
) -> tuple[IndexHeader, Records]:
    """Give restored records their slots and write everything that differs from the file."""
    header = recovered.header or IndexHeader(0, file.salt, file.queue_id, file.ring_bytes, settings.entries)
    capacity = max(header.capacity, settings.entries, len(recovered.live), len(recovered.slots))
    vouched = INDEX_START + recovered.header.capacity * ENTRY_BYTES if recovered.header else 0
    index.allocate(INDEX_START + capacity * ENTRY_BYTES, vouched)
    if not recovered.report.index_whole:
        header = header.following(
            capacity=capacity, synced_seq=0, floor=recovered.floor, next_seq=recovered.next_seq
        )
        _put_header(index, header)
    used, free = _assign(recovered)
    records = _columns(recovered, used, free)
    has_written = _write_slots(
        index, records, recovered.slots, used, file.seed, is_clean=recovered.report.clean
    )
    if has_written or not recovered.report.clean:
        index.sync()
    slots = recovered.live["slot"]
    header = header.following(
        capacity=capacity,
        in_use=len(slots),
        head=int(slots[0]) if len(slots) else NONE,
        tail=int(slots[-1]) if len(slots) else NONE,
        free=int(free[0]) if len(free) else NONE,
        used=used,
        synced_us=now_us,
        synced_seq=recovered.next_seq - 1,
        next_seq=recovered.next_seq + 1,  # not equal to synced_seq + 1: says that it is open
        floor=recovered.floor,
    )
    _put_header(index, header)
    return header, records


def _put_header(index: Storage, header: IndexHeader) -> None:
    index.write(header.place, [header.pack()])
    index.sync()


def _assign(recovered: Recovered) -> tuple[int, npt.NDArray[np.int64]]:
    """Slots for restored records; returns how many are used then, and those that are free, in order."""
    slots, count = recovered.live["slot"], len(recovered.slots)
    is_free = np.ones(count, np.bool_)
    is_free[slots[slots != NONE]] = False
    free = np.flatnonzero(is_free)
    without = np.flatnonzero(slots == NONE)
    used = count + max(0, len(without) - len(free))
    slots[without] = np.concatenate([free[: len(without)], np.arange(count, used)])
    return used, free[len(without) :]


def _columns(recovered: Recovered, used: int, free: npt.NDArray[np.int64]) -> Records:
    """The live records by their slots, linked in ring order, and the free slots, linked as they come."""
    live, records, none = recovered.live, Records(), np.full(1, NONE, np.uint32)
    slots = live["slot"].copy()
    before, behind = np.concatenate([none, slots])[:-1], np.concatenate([slots, none])[1:]
    of_file = (live[name] for name in ("seq", "offset", "span", "length", "crc", "kind"))
    records.grow(used + -used % GROWTH_SLOTS)
    for column, values in zip(records.columns, (*of_file, before, behind), strict=True):
        np.frombuffer(column, column.typecode)[slots] = values
    np.frombuffer(records.behind, np.uint32)[free] = np.concatenate([free, none])[1:]
    in_order = np.argsort(live["seq"], kind="stable")
    seqs, numbers = live["seq"][in_order], array("I", slots[in_order].tobytes())
    borders = np.flatnonzero(np.diff(seqs) != 1) + 1  # between runs of numbers
    for begin, end in pairwise([0, *borders, len(seqs)]):
        records.live.add(int(seqs[begin]) if end else 1, numbers[begin:end])
    for seq, destination in recovered.destinations.items():
        records.destinations[records.live.get(seq)] = destination
    for seq, work in recovered.work.items():
        records.work[records.live.get(seq)] = work
    records.durable_seq = recovered.next_seq - 1
    return records


def _write_slots(
    index: Storage, records: Records, found: Rows, used: int, seed: int, *, is_clean: bool
) -> bool:
    """Write the entries that the file has otherwise, and if it was not closed all others too; any written?"""
    has_written = False
    for first in range(0, used, CHUNK_SLOTS):
        rows = _rows(records, first, min(first + CHUNK_SLOTS, used))
        there = found[first : first + len(rows)]
        begin = INDEX_START + first * ENTRY_BYTES
        if len(there) and not is_clean:
            index.write(begin, [bytes(index.view()[begin : begin + len(there) * ENTRY_BYTES])])
        differs = np.ones(len(rows), np.bool_)
        differs[: len(there)] = rows[: len(there)] != there
        changed = np.flatnonzero(differs)
        slots = (changed + first).tolist()
        packed = [pack_slot(slot, row, seed) for slot, row in zip(slots, rows[changed].tolist(), strict=True)]
        write_runs(index, slots, packed)
        has_written = has_written or bool(slots)
    return has_written


def _rows(records: Records, first: int, behind: int) -> Rows:
    """What entries from ``first`` on are to hold, rows of ``SLOT_FIELDS``."""
    rows = np.zeros(behind - first, SLOT_FIELDS)
    for name, column in zip(COLUMNS, records.columns, strict=True):
        rows[name] = np.frombuffer(column, column.typecode)[first:behind]
    is_live = rows["seq"] != 0
    rows["status"] = np.where(is_live, IN_USE, FREE)
    rows["prev"][~is_live] = NONE
    for slot in records.work and range(first, behind):
        if (work := records.work.get(slot)) is not None:
            rows["retries"][slot - first], rows["last_retry_us"][slot - first] = (
                work.retries,
                work.last_retry_us,
            )
    return rows
