"""Opening a queue: make it, or recover it, and write what recovery decided.

What a crash while a queue is made can leave, in the order of the steps:

1. data file without a header (all zero)            made again: it never held a record
2. data file with header, no index header           recovered from the data file alone: nothing there
3. both                                             a queue

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
from dataclasses import dataclass
from typing import Final

import structlog

from pmdaemon.diskqueue.errors import QueueUnreadable
from pmdaemon.diskqueue.format import (
    COPY_STEP,
    DATA_START,
    ENTRY_BYTES,
    INDEX_START,
    NONE,
    SIGNATURE,
    UNIT_BYTES,
    FileHeader,
    IndexHeader,
    entry_fields,
    free_fields,
    pack_entry,
    pack_free,
    read_file_header,
    read_index_header,
)
from pmdaemon.diskqueue.recovery import Recovered, recover
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime.gc_tuning import collector_rests

log = structlog.get_logger("diskqueue")
CHUNK_BYTES: Final = 1 << 20


@dataclass
class Opened:
    """An open queue's parts, as the files have them."""

    file: FileHeader
    header: IndexHeader
    recovered: Recovered


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
    recovered = recover(data.view(), index.view(), file)
    report = recovered.report
    data.allocate(DATA_START + file.ring_bytes)
    if not is_new and copies < 2:
        _put_file_header(data, file)
    if not report.clean:
        _put_again(data, recovered)
    header = _write_index(index, file, recovered, settings, now_us)
    for extent in report.extents:
        log.warning("queue-damage", queue=name, **extent._asdict())
    if is_new:
        log.info("queue-made", queue=name, ring_bytes=file.ring_bytes)
    elif not report.clean:
        log.info("queue-recovered", queue=name, live=report.live, restored=report.restored,
                 index=report.index_problem or "whole")  # fmt: skip
    return Opened(file, header, recovered)


def _make(data: Storage, settings: QueueSettings, now_us: int) -> FileHeader:
    file = FileHeader(settings.data_bytes, secrets.token_bytes(16), os.urandom(8), now_us)
    data.allocate(DATA_START + settings.data_bytes)
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
    places = sorted((entry.offset, entry.end) for entry in recovered.entries if entry.seq > synced_seq)
    begin = end = 0
    for offset, behind in [*places, (-1, -1)]:
        if offset != end or end - begin >= CHUNK_BYTES:
            if end > begin:
                data.write(DATA_START + begin, [bytes(data.view()[DATA_START + begin : DATA_START + end])])
            begin = offset
        end = behind
    data.sync()


def _write_index(
    index: Storage, file: FileHeader, recovered: Recovered, settings: QueueSettings, now_us: int
) -> IndexHeader:
    """Give restored records their slots and write everything that differs from the file."""
    header = recovered.header or IndexHeader(0, file.salt, file.queue_id, file.ring_bytes, settings.entries)
    capacity = max(header.capacity, settings.entries, len(recovered.entries), len(recovered.slots))
    index.allocate(INDEX_START + capacity * ENTRY_BYTES)
    if not recovered.report.index_whole:
        header = header.following(
            capacity=capacity, synced_seq=0, floor=recovered.floor, next_seq=recovered.next_seq
        )
        _put_header(index, header)
    free, used = _assign(recovered)
    changed = _changed(recovered, free, file.seed)
    is_clean = recovered.report.clean
    end = INDEX_START + (0 if is_clean else len(recovered.slots)) * ENTRY_BYTES
    for first in range(INDEX_START, end, CHUNK_BYTES):
        index.write(first, [bytes(index.view()[first : min(first + CHUNK_BYTES, end)])])
    for slot, packed in changed:
        index.write(INDEX_START + slot * ENTRY_BYTES, [packed])
    if changed or not is_clean:
        index.sync()
    entries = recovered.entries
    header = header.following(
        capacity=capacity,
        in_use=len(entries),
        head=entries[0].slot if entries else NONE,
        tail=entries[-1].slot if entries else NONE,
        free=free[0] if free else NONE,
        used=used,
        synced_us=now_us,
        synced_seq=recovered.next_seq - 1,
        next_seq=recovered.next_seq + 1,  # not equal to synced_seq + 1: says that it is open
        floor=recovered.floor,
    )
    _put_header(index, header)
    return header


def _put_header(index: Storage, header: IndexHeader) -> None:
    index.write(header.place, [header.pack()])
    index.sync()


def _assign(recovered: Recovered) -> tuple[list[int], int]:
    """Slots for restored records; returns (free slots in the order of the new free list, used)."""
    taken = {entry.slot for entry in recovered.entries}
    free = [number for number in range(len(recovered.slots)) if number not in taken]
    used = len(recovered.slots)
    free.reverse()
    previous = None
    for entry in recovered.entries:
        if entry.slot == NONE:
            if free:
                entry.slot = free.pop()
            else:
                entry.slot = used
                used += 1
        entry.prev = previous
        if previous is not None:
            previous.next = entry
        previous = entry
    free.reverse()
    return free, used


def _changed(recovered: Recovered, free: list[int], seed: int) -> list[tuple[int, bytes]]:
    """(slot, new content) of every slot that holds something else in the file; compared field by field."""
    slots, beyond = recovered.slots, len(recovered.slots)
    changed = [
        (entry.slot, pack_entry(entry, seed))
        for entry in recovered.entries
        if entry.slot >= beyond or slots[entry.slot] != entry_fields(entry)
    ]
    for slot, following in zip(free, [*free[1:], NONE], strict=False):
        if slots[slot] != free_fields(following):
            changed.append((slot, pack_free(slot, following, seed)))
    return sorted(changed)
