"""What a record costs in memory, and that the file's pages are let go of while a backlog is read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from pmdaemon.diskqueue import DiskQueue, reading
from tests.support.diskqueue import open_queue
from tests.support.faulty_disk import FaultDisk, FaultStorage

COUNT = 8192
MOST_BYTES = 80
"""A record's columns, its part of a page of numbers, and its byte among the dirty slots."""


def grown(add: int, *, keep: bool) -> float:
    """Bytes of memory a record that the queue takes more after so many were added (and deleted)."""
    queue = open_queue(FaultDisk(), data_bytes=4 * COUNT * 256, entries=2 * COUNT)
    queue.put(b"x")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(add // 256):
            last = queue.put_many([b"x"] * 256)[-1]
            if not keep:
                queue.delete_through(last)
        queue.sync_index()
        return (tracemalloc.get_traced_memory()[0] - before) / add
    finally:
        tracemalloc.stop()


def test_a_record_that_waits_takes_some_tens_of_bytes() -> None:
    assert grown(COUNT, keep=True) < MOST_BYTES


def test_what_is_gone_takes_none() -> None:
    assert grown(COUNT, keep=False) < 8


class Counting(FaultStorage):
    """Counts how often its pages are let go of."""

    releases = 0

    def release(self) -> None:
        self.releases += 1


def peeked(queue: DiskQueue) -> Iterator[bytes]:
    after = 0
    while messages := queue.peek(after, 2000):
        yield from (message.data for message in messages)
        after = messages[-1].seq


def locked(queue: DiskQueue) -> Iterator[bytes]:
    while messages := queue.lock(10):
        yield from (message.data for message in messages)


def read_singly(queue: DiskQueue) -> Iterator[bytes]:
    for seq in range(1, queue.durable_seq + 1):
        message = queue.read(seq)
        assert message is not None
        yield message.data


@pytest.mark.parametrize("reader", [peeked, locked, read_singly])
@pytest.mark.parametrize("size", [4, 200], ids=["small", "filling"])
def test_pages_are_let_go_of_while_a_backlog_is_read(
    monkeypatch: pytest.MonkeyPatch, reader: Callable[[DiskQueue], Iterator[bytes]], size: int
) -> None:
    monkeypatch.setattr(reading, "RELEASE_BYTES", 8192)  # a file of megabytes would show nothing more
    disk = FaultDisk()
    data = disk.files["data"] = Counting(disk, b"", "data")
    queue = open_queue(disk, data_bytes=1 << 20, entries=1000)
    wanted = [b"%d" % number + bytes(size - 3) for number in range(100, 400)]
    queue.put_many(wanted)
    at_start = data.releases
    assert at_start == 1
    assert list(reader(queue)) == wanted
    assert data.releases - at_start == 300 * 256 // 8192  # what they take in the file, not what they carry
    queue.close()
