"""What a record costs in memory, and that the file's pages are let go of while a backlog is read."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmdaemon.diskqueue import DiskQueue, QueueSettings, format, reading
from tests.support.diskqueue import open_queue
from tests.support.faulty_disk import FaultDisk, FaultStorage

COUNT = 8192
MOST_BYTES = 80
"""A record's columns, its part of a page of numbers, and its byte among the dirty slots."""
OPENED = 40_000
MOST_OPENING_BYTES = 300
"""The most that a record takes while its queue is opened: header, entry, columns, orders of them."""
CONSTANT_BYTES = 6 << 20
"""What is read at a time: a piece of the ring, a chunk of the index, a chunk that is written again."""


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


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders, each with a queue of ``OPENED`` records: one that was closed, one whose owner died."""
    folder = tmp_path_factory.mktemp("filled")
    for name in ("closed", "killed"):
        (folder / name).mkdir()
    queue = DiskQueue(settings_in(folder / "closed"), helper=False)
    for first in range(0, OPENED, 1000):
        queue.put_many([b"%d" % number for number in range(first, first + 1000)])
    for name in ("q", "q.index"):
        shutil.copy(folder / "closed" / name, folder / "killed" / name)
    queue.close()
    return folder


def settings_in(folder: Path) -> QueueSettings:
    return QueueSettings(data_path=folder / "q", data_bytes=(OPENED + 1000) * 256, entries=2 * OPENED)


@pytest.mark.parametrize("how", ["closed", "killed", "without an index", "made larger"])
def test_opening_takes_some_hundred_bytes_a_record(filled: Path, tmp_path: Path, how: str) -> None:
    source = filled / (how if how == "killed" else "closed")
    for name in ("q", "q.index"):
        shutil.copy(source / name, tmp_path / name)
    settings = settings_in(tmp_path)
    if how == "without an index":
        settings.resolved_index_path.unlink()
    if how == "made larger":
        settings = settings.model_copy(update={"data_bytes": 2 * settings.data_bytes})
    tracemalloc.start()
    try:
        queue = DiskQueue(settings, helper=False)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (queue.oldest_seq, queue.stat()["records"]) == (1, OPENED)
    assert queue.report.restored == (0 if how in ("closed", "made larger") else OPENED)
    last = queue.read(OPENED)
    assert last is not None
    assert last.data == b"%d" % (OPENED - 1)
    queue.close()
    assert peak_bytes < MOST_OPENING_BYTES * OPENED + CONSTANT_BYTES


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
    assert list(reader(queue)) == wanted
    assert data.releases - at_start == 300 * 256 // 8192  # what they take in the file, not what they carry
    queue.close()


def test_pages_are_let_go_of_while_a_queue_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "PIECE_BYTES", 8192)
    disk = FaultDisk()
    open_queue(disk, data_bytes=1 << 20, entries=1000).put_many([b"x"] * 300)
    data = disk.files["data"] = Counting(disk, bytes(disk.files["data"].cached), "data")
    open_queue(disk, data_bytes=1 << 20, entries=1000)
    assert data.releases >= (1 << 20) // 8192
