"""A queue that exists gets another size: nothing lost, no number given twice, whatever dies when."""

from __future__ import annotations

import errno
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.diskqueue import DiskQueue, QueueSettings, storage
from pmdaemon.diskqueue.errors import QueueBusy, QueueFull
from pmdaemon.diskqueue.storage import FileStorage
from pmdaemon.runtime.clock import FakeClock
from tests.support import diskqueue
from tests.support.diskqueue import contents
from tests.support.faulty_disk import Crashed, FaultDisk

OLD, LARGER, SMALLER = 8192, 6 * 4096, 4096


def open_queue(disk: FaultDisk, clock: FakeClock | None = None, **changes: Any) -> DiskQueue:
    return diskqueue.open_queue(disk, clock, **({"data_bytes": OLD} | changes))


class Past:
    """A disk with a used queue: wrapped, deleted here and there, the newest record gone, one retried."""

    def __init__(self) -> None:
        disk, self.clock = FaultDisk(), FakeClock(unix_us=1000)
        queue = open_queue(disk, self.clock)
        for number in range(12):
            queue.put(bytes([65 + number]) * (100 + 80 * number), kind=number, destination=b"d%d" % number)
            self.clock.advance(1)
            if number in (3, 5, 8, 9):
                queue.discard([number - 2, number - 1, number])
        queue.discard([7, 12])
        queue.retry(queue.lock()[0].seq)
        self.live = contents(queue)
        self.messages = queue.peek(0, 1 << 30)
        self.next_seq = 13
        self.queue_id = queue.queue_id
        queue.close()
        self.files = {name: bytes(file.durable) for name, file in disk.files.items()}

    def disk(self, **faults: Any) -> FaultDisk:
        return FaultDisk(self.files, **faults)


@pytest.fixture(scope="module")
def past() -> Past:
    made = Past()
    assert sorted(made.live) == [10, 11]
    assert [message.retries for message in made.messages] == [1, 0]
    return made


@pytest.mark.parametrize("size", [LARGER, SMALLER])
def test_everything_a_reader_can_see_stays(past: Past, size: int) -> None:
    disk = past.disk()
    queue = open_queue(disk, data_bytes=size)
    assert queue.ring_bytes == size
    assert queue.peek(0, 1 << 30) == past.messages, "numbers, kinds, destinations, dates, retries, data"
    assert queue.queue_id == past.queue_id
    assert queue.put(b"goes on") == past.next_seq
    assert sorted(disk.files) == ["data", "index"]
    queue.close()
    again = open_queue(disk, data_bytes=size)
    assert again.report.clean
    assert {**past.live, queue.durable_seq: b"goes on"} == contents(again)


def test_a_larger_ring_holds_more_and_goes_round(past: Past) -> None:
    disk = past.disk()
    queue = open_queue(disk, data_bytes=LARGER, entries=40)
    queue.put_many([b"x" * 200] * 30)
    for number in range(100):
        queue.delete_through(queue.put(b"y" * (number * 7)) - 20)
    expected = contents(queue)
    assert len(expected) == 20
    queue.sync_index()  # what is deleted since may come back
    assert contents(open_queue(disk.after_kill(), data_bytes=LARGER, entries=40)) == expected


def test_an_empty_queue_does_not_begin_its_numbers_anew(past: Past) -> None:
    disk = past.disk()
    queue = open_queue(disk)
    queue.delete_through(12)
    queue.close()
    for size in (LARGER, SMALLER):
        queue = open_queue(disk, data_bytes=size)
        assert contents(queue) == {}
        assert queue.oldest_seq >= past.next_seq
        queue.close()
    assert open_queue(disk, data_bytes=SMALLER).put(b"new") >= past.next_seq


@pytest.mark.parametrize(
    "changes",
    [{"data_bytes": 4096, "reserve_bytes": 2048}, {"data_bytes": LARGER, "entries": 4, "reserve_entries": 3}],
)
def test_what_does_not_fit_keeps_its_size_until_it_fits(past: Past, changes: dict[str, Any]) -> None:
    disk = past.disk()
    for _ in range(2):
        queue = open_queue(disk, **changes)
        assert queue.ring_bytes == OLD
        assert contents(queue) == past.live
        queue.close()
    queue = open_queue(disk)
    queue.delete_through(10)
    queue.close()
    queue = open_queue(disk, **changes)
    assert (queue.ring_bytes, sorted(contents(queue))) == (changes["data_bytes"], [11])


@pytest.mark.parametrize("room", [OLD, LARGER])
def test_without_room_on_the_disk_it_keeps_its_size_and_leaves_nothing_aside(past: Past, room: int) -> None:
    disk = past.disk(limit_bytes=room)
    queue = open_queue(disk, data_bytes=LARGER)
    assert queue.ring_bytes == OLD
    assert contents(queue) == past.live
    assert sorted(disk.files) == ["data", "index"]


def holds(disk: FaultDisk, past: Past, size: int) -> None:
    """Everything live is there, nothing invented, numbers go on."""
    queue = open_queue(disk, data_bytes=size)
    assert queue.ring_bytes == size
    found = contents(queue)
    assert past.live.items() <= found.items()
    for seq, data in found.items():
        assert data == bytes([64 + seq]) * (100 + 80 * (seq - 1)), "deleted ones may be back, as they were"
    assert queue.put(b"goes on") >= past.next_seq


@pytest.mark.parametrize("size", [LARGER, SMALLER])
def test_death_at_every_storage_operation(past: Past, size: int) -> None:
    whole = past.disk()
    open_queue(whole, data_bytes=size)
    assert whole.operations > 15
    for at in range(1, whole.operations + 1):
        died = past.disk(crash_at=at)
        with pytest.raises(Crashed):
            open_queue(died, data_bytes=size)
        for seed in range(3):
            # Opened with the new size again, or with the old one: somebody has thought better of it.
            holds(died.after_crash(random.Random(seed)), past, size)
            holds(died.after_crash(random.Random(seed)), past, OLD)
        holds(died.after_kill(), past, size)
        again = died.after_crash(random.Random(at))
        again.crash_at = at  # and dies once more
        with suppress(Crashed):  # or it was there already, and opening it takes fewer operations
            open_queue(again, data_bytes=size)
        holds(again.after_crash(random.Random(at)), past, OLD if at % 2 else size)


def test_after_a_death_between_the_names_nothing_deleted_is_left_in_the_index(past: Past) -> None:
    """The old data file beside the new index: opened at the old size it is whole again at once."""
    whole = past.disk()
    open_queue(whole, data_bytes=LARGER, entries=100)
    seen = set()
    for at in range(1, whole.operations + 1):
        disk = past.disk(crash_at=at)
        with pytest.raises(Crashed):
            open_queue(disk, data_bytes=LARGER, entries=100)
        disk = disk.after_crash(random.Random(0))
        queue = open_queue(disk)
        seen.add(queue.report.index_problem)
        queue.close()
        assert open_queue(disk).report.clean
    assert "belongs to another data file" in seen


@pytest.mark.parametrize("size", [LARGER, SMALLER])
def test_an_error_of_the_disk_at_every_operation_loses_nothing(past: Past, size: int) -> None:
    whole = past.disk()
    open_queue(whole, data_bytes=size)
    told = 0
    for at in range(1, whole.operations + 1):
        disk = past.disk(fail_at={at: errno.EIO})
        try:
            open_queue(disk, data_bytes=size)
        except OSError:
            told += 1  # else it struck what is only tidied up
        disk.fail_at = {}
        holds(disk.after_crash(random.Random(at)), past, size)
    assert told > 10


def test_real_files_are_exchanged_and_stay_locked(tmp_path: Path) -> None:
    def opened(data_bytes: int, entries: int) -> DiskQueue:
        settings = QueueSettings(
            data_path=tmp_path / "q", index_path=tmp_path / "i", data_bytes=data_bytes, entries=entries
        )
        return DiskQueue(settings, helper=False)

    (tmp_path / "q.new").write_bytes(b"left by an earlier try")
    queue = opened(64 << 10, 64)
    queue.put_many([b"%d" % number * 1000 for number in range(20)])
    expected = contents(queue)
    queue.close()
    for data_bytes, entries in ((4 << 20, 4096), (128 << 10, 64)):
        queue = opened(data_bytes, entries)
        with pytest.raises(QueueBusy):
            opened(data_bytes, entries)
        assert (queue.ring_bytes, contents(queue)) == (data_bytes, expected)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "q"]
        assert (tmp_path / "q").stat().st_size == 8192 + data_bytes
        assert (tmp_path / "i").stat().st_size == 8192 + 128 * entries
        queue.close()
    assert contents(opened(128 << 10, 64)) == expected


def test_who_opens_a_file_that_is_just_being_replaced_does_not_get_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = FileStorage(tmp_path / "q")
    real = storage.fcntl.flock

    def replaced_meanwhile(fd: int, how: int) -> None:
        monkeypatch.setattr(storage.fcntl, "flock", real)
        owner.replace(owner.aside())
        real(fd, how)

    monkeypatch.setattr(storage.fcntl, "flock", replaced_meanwhile)
    with pytest.raises(QueueBusy):
        FileStorage(tmp_path / "q")


def test_a_queue_over_several_files_keeps_its_size(tmp_path: Path) -> None:
    def opened(data_bytes: int) -> DiskQueue:
        settings = QueueSettings(
            data_path=tmp_path / "a", more_paths=(tmp_path / "b",), data_bytes=data_bytes, entries=64
        )
        return DiskQueue(settings, helper=False)

    queue = opened(64 << 10)
    queue.put(b"stays")
    queue.close()
    queue = opened(128 << 10)
    assert (queue.ring_bytes, list(contents(queue).values())) == (64 << 10, [b"stays"])
    queue.close()


def test_a_ring_that_keeps_its_size_keeps_room_beside_a_larger_reserve() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"old")
    queue.close()
    disk.limit_bytes = len(disk.open("data").cached)
    queue = open_queue(disk, data_bytes=1 << 20, reserve_bytes=1 << 16)
    assert queue.ring_bytes == OLD
    assert not queue.has_room(OLD // 2, 1)
    with pytest.raises(QueueFull, match="bytes in one piece"):
        [queue.put(b"x" * 900) for _ in range(OLD // 1024)]
    assert 1024 < queue.used_bytes <= OLD // 2
    queue.put(b"x" * (OLD // 4), reserved=True)
