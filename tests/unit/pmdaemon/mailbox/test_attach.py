"""What attach makes ready, so that the first lap and every batch cost no page faults."""

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.mailbox import Segment, attach
from tests.support.mailbox import drain, make_mesh

RING_BYTES = 1 << 20


def mapped_bytes(path: Path) -> int:
    """How much of a segment this process has in its page tables."""
    found = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_own_rings_are_mapped_at_attach_and_those_of_others_are_not(path: Path) -> None:
    make_mesh(path, "a", "b", "c", ring_bytes=RING_BYTES)
    with attach(path, "a"):
        assert 4 * RING_BYTES <= mapped_bytes(path) < 5 * RING_BYTES  # two to fill, two to take from


def test_a_kernel_that_cannot_map_ahead_is_no_obstacle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "what is 23?")

    monkeypatch.setattr("pmdaemon.mailbox.segment.mmap.mmap", Old)
    make_mesh(path, "a", "b", ring_bytes=RING_BYTES)
    with attach(path, "a") as a, attach(path, "b") as b:
        assert mapped_bytes(path) < RING_BYTES
        a.post("b", b"x")
        assert drain(b) == [b"x"]


def test_pages_are_mapped_from_the_one_in_which_a_ring_begins(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=RING_BYTES)
    segment = Segment(path)
    before = mapped_bytes(path)
    segment.prefault(mmap.PAGESIZE * 100 - 8, 16, to_write=True)
    assert mapped_bytes(path) - before == 2 * mmap.PAGESIZE
    segment.close()
