"""A batch whose reservation is interrupted at any line (a signal, no memory) leaves no trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from pmdaemon.diskqueue import DiskQueue, index, records, ring, slots, state
from pmdaemon.diskqueue.slots import PAGE
from tests.support.diskqueue import contents, open_queue
from tests.support.faulty_disk import FaultDisk

OURS = {module.__file__ for module in (index, records, ring, slots, state)}
SIZE = {"data_bytes": 200 * 256, "entries": 180}


def is_interrupted_at(number: int, action: Callable[[], object]) -> bool:
    """Whether there is a line of that number in the queue's state, counted from 1; it raises there."""
    seen, before = [0], sys.gettrace()

    def at_line(_frame: FrameType, event: str, _arg: object) -> object:
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                sys.settrace(before)
                raise MemoryError
        return at_line

    def at_call(frame: FrameType, _event: str, _arg: object) -> object:
        return at_line if frame.f_code.co_filename in OURS else None

    sys.settrace(at_call)
    try:
        action()
    except MemoryError:
        return True
    finally:
        sys.settrace(before)
    return False


def filled() -> tuple[FaultDisk, DiskQueue]:
    """A queue whose next numbers are on two pages, with free slots among those in use."""
    disk = FaultDisk()
    queue = open_queue(disk, **SIZE)
    queue.put_many([b"gone"] * 20)
    queue.put_many([b"kept"] * (2 * PAGE - 22), destination=b"d")
    queue.delete_through(20)
    return disk, queue


def test_a_batch_that_was_interrupted_leaves_nothing_that_counts_as_a_record() -> None:
    number = 0
    while True:
        number += 1
        disk, queue = filled()
        before, live = contents(queue), queue._state.records.live
        pages = {key: page[:] for key, page in live.pages.items()}
        if not is_interrupted_at(number, lambda queue=queue: queue.submit([b"new"] * 4, wake_helper=False)):
            break
        assert live.pages == pages, f"line {number}"
        assert queue.stat()["records"] == len(before), f"line {number}"
        last = queue.put(b"after")
        assert last == max(before) + 1
        assert contents(queue) == {**before, last: b"after"}, f"line {number}"
        assert sorted(queue._state.ring.all()) == sorted(slot for _, slot in live.between(0, last))
        queue.close()
        assert contents(open_queue(disk, **SIZE)) == {**before, last: b"after"}, f"line {number}"
    assert number > 100


def test_a_record_is_not_passed_over_when_a_removal_was_interrupted() -> None:
    """The floor goes into the files: what is below it counts as deleted."""
    number = 0
    while True:
        number += 1
        queue = open_queue(FaultDisk(), **SIZE)
        first, second, third = queue.put_many([b"first", b"second", b"third"])
        live = queue._state.records.live
        is_found = is_interrupted_at(number, lambda live=live, seq=first: live.remove(seq))
        live.remove(first)
        queue.discard([second])
        assert queue.oldest_seq == third, f"line {number}"
        assert contents(queue) == {third: b"third"}, f"line {number}"
        if not is_found:
            break
    assert number > 5
