"""The index that an opening writes, and the columns that it makes of it: every field at its limits.

``_write_index`` is called by itself: no test can have a ring of a terabyte.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pmdaemon.diskqueue import QueueSettings
from pmdaemon.diskqueue.format import IN_USE, NONE, SLOT_FIELDS, FileHeader, Work, read_slots
from pmdaemon.diskqueue.opening import _write_index
from pmdaemon.diskqueue.recovery import LIVE_FIELDS, Recovered, RecoveryReport
from tests.support.faulty_disk import FaultDisk

MOST_SPAN = 2**32 - 256
FIRST = 2**63 + 5  # numbers
RING = 1 << 40


def test_numbers_places_and_sizes_keep_all_their_bits() -> None:
    rows = [
        (FIRST + 70, RING - MOST_SPAN, MOST_SPAN, MOST_SPAN - 56, 2**32 - 1, NONE, 2**16 - 1, 0),
        (FIRST, 2**31, 2**31, 2**31 - 60, 2**31, NONE, 0, 4),
        (FIRST + 1, 2**32, 2**31 + 256, 2**31, 7, NONE, 1, 0),
    ]
    live = np.array(rows, LIVE_FIELDS)
    work = Work()
    work.retries, work.last_retry_us = 2**32 - 1, 2**63
    found = Recovered(
        RecoveryReport(), live, {FIRST: b"name"}, {FIRST + 1: work}, RING - MOST_SPAN, 2**32 - 1,
        FIRST + 71, FIRST, None, np.zeros(0, SLOT_FIELDS),
    )  # fmt: skip
    disk, file = FaultDisk(), FileHeader(RING, b"s" * 16, b"q" * 8, 1)
    settings = QueueSettings(data_path=Path("q"), entries=4, reserve_entries=0)
    header, records = _write_index(disk.open("index"), file, found, settings, 9)
    assert (header.head, header.tail, header.used, header.free) == (0, 2, 3, NONE)
    assert (header.synced_seq, header.floor) == (FIRST + 70, FIRST)
    for slot, (seq, offset, span, length, crc, _slot, kind, _destination) in enumerate(rows):
        assert records.live.get(seq) == slot
        assert records.end(slot) == offset + span
        retries, last_us = (2**32 - 1, 2**63) if seq == FIRST + 1 else (0, 0)
        before, behind = slot - 1 if slot else NONE, slot + 1 if slot < 2 else NONE
        fields = (IN_USE, kind, seq, offset, span, length, crc, 0, 0, retries, before, behind, last_us)
        assert records.fields(slot) == fields
        assert read_slots(disk.open("index").view(), 3, file.seed)[slot].item() == fields
    assert records.destinations == {1: b"name"}
    assert list(records.live.between(FIRST, FIRST + 70)) == [(FIRST, 1), (FIRST + 1, 2), (FIRST + 70, 0)]
