"""A queue on a disk that could not write what it had taken, and could later: as a full thin volume."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import QueuePoisoned
from pmdaemon.diskqueue.format import DATA_START, ENTRY_BYTES, INDEX_START
from tests.support.diskqueue import contents
from tests.support.thin_disk import ThinDisk

DATA_BYTES = 4 << 20
ENTRIES = 256


def opened(folder: Path) -> DiskQueue:
    settings = QueueSettings(
        data_path=folder / "q",
        data_bytes=DATA_BYTES,
        entries=ENTRIES,
        reserve_bytes=0,
        reserve_entries=0,
    )
    return DiskQueue(settings, helper=False)


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [("q", DATA_START + DATA_BYTES), ("q.index", INDEX_START + ENTRIES * ENTRY_BYTES)],
)
def test_what_it_hands_out_is_there_after_a_power_cut_though_its_making_was_killed(
    tmp_path: Path, name: str, size_bytes: int
) -> None:
    """The killed process had reserved the file, and not yet written it."""
    with ThinDisk() as disk:
        fd = os.open(disk.path / name, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, size_bytes)
        os.close(fd)
        queue = opened(disk.path)
        queue.put(b"first")
        disk.fill()
        with contextlib.suppress(QueuePoisoned):
            for number in range(40):
                queue.put(b"%d" % number * 5000)
            queue.sync_index()
        with contextlib.suppress(QueuePoisoned):
            queue.close()
        disk.free()
        queue = opened(disk.path)
        queue.put(b"later")
        queue.sync_index()
        handed_out = contents(queue)
        for file in ("q", "q.index"):
            shutil.copy(disk.after_power_cut() / file, tmp_path / file)
        queue.close()
    again = opened(tmp_path)
    assert contents(again) == handed_out
    again.close()
