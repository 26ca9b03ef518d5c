"""Locks, order, destinations, retries, the secondary queue, reserved room, damage.

Some tests read private state: how far a round is, and how much memory is held, is no part of the interface.
"""

from __future__ import annotations

import random

import pytest

from pmdaemon.diskqueue import DiskQueue, LockOwner
from pmdaemon.diskqueue.consumer import SLACK
from pmdaemon.diskqueue.errors import DiskQueueError, QueueClosed, QueueFull, RecordDamaged, RecordTooLarge
from pmdaemon.diskqueue.format import DATA_START
from pmdaemon.runtime.clock import FakeClock
from tests.support.diskqueue import contents, drain, open_queue
from tests.support.faulty_disk import FaultDisk

OTHER = LockOwner(1, 1)


@pytest.fixture
def disk() -> FaultDisk:
    return FaultDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(disk: FaultDisk, clock: FakeClock) -> DiskQueue:
    return open_queue(disk, clock)


def test_records_come_in_order_with_what_was_said_about_them(queue: DiskQueue, clock: FakeClock) -> None:
    added_us = clock.unix_us()
    queue.put(b"one", kind=7, destination=b"mail")
    queue.put_many([b"two", b"three"])
    first, second, third = queue.lock(10)
    assert (first.kind, first.destination, first.date_us, first.retries) == (7, b"mail", added_us, 0)
    assert [first.data, second.data, third.data] == [b"one", b"two", b"three"]
    assert queue.lock(10) == []


def test_a_lock_is_its_owners(queue: DiskQueue) -> None:
    seq = queue.put(b"x")
    queue.lock(1, owner=OTHER)
    for act in (queue.delete, queue.unlock):
        with pytest.raises(DiskQueueError, match="is not locked by this owner"):
            act([seq])
    queue.delete([seq], owner=OTHER)
    with pytest.raises(DiskQueueError, match="is not locked by this owner"):
        queue.delete([seq], owner=OTHER)


def test_unlocked_comes_back_at_its_place(queue: DiskQueue) -> None:
    queue.put_many([b"1", b"2", b"3"])
    first = queue.lock(1)[0]
    assert first.data == b"1"
    queue.unlock([first.seq])
    assert drain(queue) == [b"1", b"2", b"3"]


def test_most_bytes_bounds_a_batch_but_one_record_always_comes(queue: DiskQueue) -> None:
    queue.put_many([b"a" * 100, b"b" * 100, b"c" * 100])
    assert len(queue.lock(10, most_bytes=10)) == 1
    assert len(queue.lock(10, most_bytes=150)) == 1
    assert len(queue.lock(10, most_bytes=150)) == 1


def test_retry_waits_and_holds_up_nobody(queue: DiskQueue, clock: FakeClock) -> None:
    queue.put_many([b"later", b"now"])
    assert queue.retry(queue.lock(1)[0].seq, delay_s=5)
    assert drain(queue) == [b"now"]
    assert queue.lock(1) == []
    clock.advance(5)
    again = queue.lock(1)[0]
    assert (again.data, again.retries) == (b"later", 1)


def test_past_the_limit_it_goes_to_the_secondary_queue(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock, retry_limit=2)
    queue.secondary = aside = open_queue(FaultDisk(), clock)
    seq = queue.put(b"poison", kind=3, destination=b"d")
    for kept in (True, True, False):
        assert queue.retry(queue.lock(1)[0].seq) is kept
    assert queue.read(seq) is None
    moved = aside.lock(1)[0]
    assert (moved.data, moved.kind, moved.destination) == (b"poison", 3, b"d")


def test_without_a_secondary_it_is_discarded(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock, retry_limit=0)
    queue.put(b"x")
    assert queue.retry(queue.lock(1)[0].seq) is False
    assert queue.stat()["records"] == 0


def test_a_full_secondary_keeps_the_record_here(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock, retry_limit=0)
    queue.secondary = open_queue(FaultDisk(), clock, entries=4)
    queue.secondary.put_many([b"."] * 4)
    queue.put(b"x")
    with pytest.raises(QueueFull):
        queue.retry(queue.lock(1)[0].seq, delay_s=1)
    clock.advance(1)
    assert queue.lock(1)[0].retries == 1


def test_move_aside_may_use_reserved_room(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock)
    queue.secondary = open_queue(FaultDisk(), clock, entries=6, reserve_entries=2)
    queue.secondary.put_many([b"."] * 4)
    with pytest.raises(QueueFull, match="entries"):
        queue.secondary.put(b".")
    queue.put(b"x")
    queue.move_aside(queue.lock(1)[0].seq)
    assert b"x" in contents(queue.secondary).values()


def test_groups_by_destination(queue: DiskQueue) -> None:
    for number, name in enumerate([b"a", b"b", b"a", b"", b"a"]):
        queue.put(b"%d" % number, destination=name)
    assert [m.data for m in queue.lock_group()] == [b"0", b"2", b"4"]
    assert [m.data for m in queue.lock_group()] == [b"1"]
    assert [m.data for m in queue.lock_group()] == [b"3"]
    assert queue.lock_group() == []


def test_grouping_survives_a_crash(queue: DiskQueue, disk: FaultDisk) -> None:
    for name in (b"a", b"b", b"a"):
        queue.put(name, destination=name)
    again = open_queue(disk.after_crash(random.Random(1)))
    assert [m.data for m in again.lock_group()] == [b"a", b"a"]


def test_locks_and_retries_over_a_restart(queue: DiskQueue, disk: FaultDisk) -> None:
    queue.put_many([b"1", b"2"])
    queue.retry(queue.lock(1)[0].seq)
    queue.lock(1)
    queue.sync_index()
    again = open_queue(disk.after_kill())
    assert again.report.locks_released == 1
    assert [(m.data, m.retries) for m in again.lock(5)] == [(b"1", 1), (b"2", 0)]


def test_locks_of_a_dead_process_are_released(queue: DiskQueue) -> None:
    queue.put_many([b"1", b"2"])
    queue.lock(1, owner=LockOwner(2**22 + 5, 1))  # above the largest process number of Linux
    mine = queue.lock(1)
    assert queue.release_dead() == 1
    freed = queue.lock(5)
    assert [(m.data, m.retries) for m in freed] == [(b"1", 1)]
    queue.delete([mine[0].seq])


def test_full_says_so_and_drains(queue: DiskQueue) -> None:
    added = 7  # two units each of sixteen: the eighth would make W meet R
    for _ in range(added):
        queue.put(b"x" * 400)
    with pytest.raises(QueueFull, match="Nothing was added") as caught:
        queue.put(b"x" * 400)
    assert caught.value.retryable
    assert len(drain(queue)) == added
    queue.put(b"x" * 400)


def test_index_can_be_full_before_the_data(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock, entries=4)
    queue.put_many([b""] * 4)
    with pytest.raises(QueueFull) as caught:
        queue.put(b"")
    assert caught.value.what == "entries"


def test_too_large_is_not_full(queue: DiskQueue) -> None:
    with pytest.raises(RecordTooLarge):
        queue.put(bytes(17 * 256))
    with pytest.raises(RecordTooLarge):
        queue.put(b"", destination=bytes(2000))
    queue.put(bytes(15 * 256 - 56))


def test_delete_through_for_a_reader_with_a_cursor(queue: DiskQueue) -> None:
    queue.put_many([b"1", b"2", b"3"])
    assert queue.delete_through(2) == 2
    assert contents(queue) == {3: b"3"}
    assert [m.data for m in queue.peek(0, 1)] == [b"3"]
    assert queue.delete_through(99) == 1
    assert queue.stat()["oldest_seq"] == 4


def test_ready_list_does_not_grow_without_lockers(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock)
    for _ in range(4000):
        queue.delete_through(queue.put(b"x", destination=b"d"))
    assert filed(queue) <= SLACK + 4


def test_a_closed_queue_says_so(queue: DiskQueue) -> None:
    queue.close()
    queue.close()
    for act in (lambda: queue.put(b""), queue.lock, lambda: queue.read(1), queue.sync_index):
        with pytest.raises(QueueClosed):
            act()


def damaged(disk: FaultDisk, at: int) -> None:
    disk.open("data").cached[DATA_START + at * 256 + 56] ^= 1


def test_a_damaged_record_keeps_no_other_locked(disk: FaultDisk, queue: DiskQueue) -> None:
    queue.put_many([b"0", b"1", b"2", b"3"])
    damaged(disk, 2)
    assert [message.data for message in queue.lock(10)] == [b"0", b"1"]
    with pytest.raises(RecordDamaged) as caught:
        queue.lock(10)
    assert [message.data for message in queue.lock(10)] == [b"3"]
    assert queue.discard([caught.value.seq]) == 1
    assert queue.lock(10) == []
    queue.unlock([1, 2, 4])
    assert drain(queue) == [b"0", b"1", b"3"]


def test_a_damaged_record_keeps_no_other_of_its_group_locked(disk: FaultDisk, queue: DiskQueue) -> None:
    queue.put_many([b"0", b"1", b"2"], destination=b"d")
    damaged(disk, 1)
    assert [message.data for message in queue.lock_group()] == [b"0"]
    with pytest.raises(RecordDamaged):
        queue.lock_group()
    assert [message.data for message in queue.lock_group()] == [b"2"]


def test_what_the_secondary_can_never_take_is_not_locked_for_ever(clock: FakeClock) -> None:
    queue = open_queue(FaultDisk(), clock, data_bytes=64 * 256, retry_limit=0)
    queue.secondary = open_queue(FaultDisk(), clock)
    seq = queue.put(b"x" * 8000)
    with pytest.raises(RecordTooLarge):
        queue.retry(queue.lock(1)[0].seq, delay_s=1)
    clock.advance(1)
    assert [message.seq for message in queue.lock(1)] == [seq]


def filed(queue: DiskQueue) -> int:
    ready = queue._state.ready
    return len(ready._again) + len(ready._delayed) + sum(map(len, ready._by_destination.values()))


def test_numbers_of_records_that_are_gone_do_not_pile_up(disk: FaultDisk, clock: FakeClock) -> None:
    queue = open_queue(disk, clock, data_bytes=1 << 20, entries=1000)
    for _ in range(5000):
        queue.put(b"x", destination=b"d")
        queue.delete([message.seq for message in queue.lock(1)])
    assert filed(queue) <= SLACK
    kept = queue.put_many([b"x"] * 100, destination=b"d")
    for _ in range(500):
        queue.unlock([message.seq for message in queue.lock_group(100)])
    assert filed(queue) <= 4 * 100 + SLACK
    for _ in range(60):
        for message in queue.lock(100):
            queue.retry(message.seq, delay_s=1000)
            queue.discard([message.seq])
        kept = queue.put_many([b"x"] * 100, destination=b"d")
    assert filed(queue) <= 4 * 100 + SLACK
    assert [message.seq for message in queue.lock_group(1000)] == list(kept)
