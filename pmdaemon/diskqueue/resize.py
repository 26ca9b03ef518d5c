"""Another size for a queue that exists: its live records are copied to new files, which take the old names.

Done while the queue is opened, when ``data_bytes`` is not what the file has. The steps, each durable before
the next, and what a crash behind it leaves:

1. the old files are opened: recovered, settled      the old queue
2. the data file aside (NAME.new): live records in   the old queue; the next try removes what lies aside
   order of their numbers from offset 0, headers
3. the index aside: their entries, the counters      the same
4. the new index takes the old one's name            the old data file with an index that belongs to another:
                                                     recovered as if the index were lost; then step 1 again
5. the new data file takes the old one's name        the new queue

In this order, because the index says which number comes next: a data file that lacks its newest (deleted)
records, beside an index that is not believed, would give numbers twice.

Queue id, numbers, dates, retry counts and lifetime counters stay; offsets, checksums and salt are new. Both
queues need room at once. What does not work leaves the old size in force, with a warning that says why, and
is tried again at the next open: no room on the disk, more records than fit, several data files
(``more_paths``: they cannot be exchanged in one step). Source: Q1, Q4.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import numpy as np
import structlog
from isal.isal_zlib import crc32

from pmdaemon.diskqueue.errors import QueueNoSpace, QueueUnreadable, RecordDamaged
from pmdaemon.diskqueue.format import (
    BODY,
    CHUNK_SLOTS,
    COPY_STEP,
    DATA_START,
    ENTRY_BYTES,
    FRONT,
    IN_USE,
    INDEX_START,
    NONE,
    PADDING,
    SIGNATURE,
    SLOT_FIELDS,
    FileHeader,
    Work,
    check,
    content,
    pack_slot,
)
from pmdaemon.diskqueue.opening import Opened, open_files
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import Replaceable, Storage

log = structlog.get_logger("diskqueue")
CHUNK_BYTES: Final = 1 << 20


def open_resized(
    data: Storage, index: Storage, settings: QueueSettings, now_us: int
) -> tuple[Storage, Storage, Opened]:
    """Open the queue in these files and give it the configured size; returns the files that hold it then.

    Durability: the state returned is on disk. The files given are closed if others have taken their place.

    Raises:
        As ``open_files``; RecordDamaged: a record that was just found intact cannot be read again.
    """
    opened = open_files(data, index, settings, now_us)
    if opened.file.ring_bytes == settings.data_bytes:
        return data, index, opened
    facts = {
        "queue": str(settings.data_path),
        "bytes": opened.file.ring_bytes,
        "data_bytes": settings.data_bytes,
    }
    if problem := obstacle(data, index, opened, settings):
        log.warning("queue-not-resized", problem=problem, **facts)
        return data, index, opened
    assert isinstance(data, Replaceable)  # obstacle() checked it
    assert isinstance(index, Replaceable)
    with ExitStack() as undo:
        asides: list[Replaceable] = []
        try:
            for file in (data, index):
                asides.append(file.aside())
                undo.callback(asides[-1].close)
            new_data, new_index = asides
            _write(new_data, new_index, data, opened, settings)
        except (QueueNoSpace, QueueUnreadable, PermissionError) as exc:
            for aside in asides:
                aside.remove()
            log.warning("queue-not-resized", problem=str(exc), **facts)
            return data, index, opened
        index.replace(new_index)
        data.replace(new_data)
        again = open_files(new_data, new_index, settings, now_us)
        undo.pop_all()
    again.report = opened.report  # what was found is to be known, not that the copy is whole
    log.info("queue-resized", live=again.header.in_use, **facts)
    return new_data, new_index, again


def obstacle(data: Storage, index: Storage, opened: Opened, settings: QueueSettings) -> str:
    """Why the queue cannot have the configured size now; "" if it can."""
    if not isinstance(data, Replaceable) or not isinstance(index, Replaceable):
        return "it has several data files: drain it, move them away, and it is made again"
    used, count = sum(opened.records.spans), opened.header.in_use
    if used + settings.reserve_bytes >= settings.data_bytes:
        needed = used + settings.reserve_bytes
        return f"data_bytes = {settings.data_bytes} is too small: records and reserve take {needed} bytes"
    if count + settings.reserve_entries > settings.entries:
        needed = count + settings.reserve_entries
        return f"entries = {settings.entries} is too small: records and reserve take {needed}"
    return ""


def _write(
    new_data: Storage, new_index: Storage, data: Storage, opened: Opened, settings: QueueSettings
) -> None:
    """Steps 2 and 3."""
    file = FileHeader(
        settings.data_bytes, secrets.token_bytes(16), opened.file.queue_id, opened.file.created_us
    )
    new_data.allocate(DATA_START + file.ring_bytes)
    new_index.allocate(INDEX_START + settings.entries * ENTRY_BYTES)
    count = opened.header.in_use
    entries = np.zeros(count, SLOT_FIELDS)
    at, end, buffers = 0, 0, list[bytes]()
    for slot, (fields, packed) in enumerate(_moved(data, opened, file)):
        entries[slot] = fields
        buffers.append(packed)
        end += len(packed)
        if end - at >= CHUNK_BYTES:
            new_data.write(DATA_START + at, buffers)
            data.release()
            at, buffers = end, []
    if buffers:
        new_data.write(DATA_START + at, buffers)
    for start in (0, COPY_STEP):
        new_data.write(start, [file.pack()])
    new_data.sync()
    for first in range(0, count, CHUNK_SLOTS):
        rows = entries[first : first + CHUNK_SLOTS].tolist()
        new_index.write(
            INDEX_START + first * ENTRY_BYTES,
            [pack_slot(slot, row, file.seed) for slot, row in enumerate(rows, first)],
        )
    new_index.sync()
    header = replace(
        opened.header,
        generation=1,
        salt=file.salt,
        ring_bytes=file.ring_bytes,
        capacity=settings.entries,
        in_use=count,
        head=0 if count else NONE,
        tail=count - 1 if count else NONE,
        free=NONE,
        used=count,
        next_seq=opened.header.synced_seq + 1,  # as a queue that was closed: no number is left unused
    )
    new_index.write(header.place, [header.pack()])
    new_index.sync()


def _moved(data: Storage, opened: Opened, file: FileHeader) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Each live record in order of its number: its new entry, linked behind the one before, and its bytes."""
    ring = data.view()[DATA_START : DATA_START + opened.file.ring_bytes]
    records, last = opened.records, opened.header.in_use - 1
    offset = 0
    for slot, (seq, old) in enumerate(records.live.between(0, records.durable_seq)):
        found = check(ring, opened.file.seed, records.offsets[old])
        if found is None or found[2] != seq:
            at, span = DATA_START + records.offsets[old], records.spans[old]
            raise RecordDamaged("being resized", seq, at, span)
        destination, payload = content(ring, found)
        _, _, seq, _, _, date_us, length, _, kind, named, flags = found
        sealed = BODY.pack(seq, offset, opened.header.floor, date_us, length, 0, kind, named, flags)
        sealed += destination + payload
        crc = crc32(sealed, file.seed)
        span = records.spans[old]
        work = records.work.get(old, Work())
        before, behind = slot - 1 if slot else NONE, slot + 1 if slot < last else NONE
        fields = (
            IN_USE,
            kind,
            seq,
            offset,
            span,
            length,
            crc,
            0,
            0,
            work.retries,
            before,
            behind,
            work.last_retry_us,
        )
        yield fields, FRONT.pack(SIGNATURE, crc) + sealed + PADDING[span - 8 - len(sealed)]
        offset += span
