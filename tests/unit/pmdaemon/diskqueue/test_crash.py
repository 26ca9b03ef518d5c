"""Death at every storage operation of making, adding, wrapping, deleting, index sync, recovery and closing.

A history is run once to count its operations, then again for each of them with the crash there, and the
disk is found with random sectors of what was not synced. Then recovery itself is killed at each of *its*
operations.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.diskqueue import contents, open_queue
from tests.support.faulty_disk import Crashed, FaultDisk


class Witness:
    """What callers were told: ``confirmed`` must be found, ``tried`` may be, ``deleted`` may come back."""

    def __init__(self) -> None:
        self.confirmed: dict[int, bytes] = {}
        self.tried: set[bytes] = set()
        self.deleted: dict[int, bytes] = {}


def adds(disk: FaultDisk, seen: Witness) -> None:
    queue = open_queue(disk)
    for number in range(4):
        _put(queue, seen, [bytes([65 + number]) * (150 + 100 * number)])
    _put(queue, seen, [b"x" * 30, b"y" * 700, b"z" * 10])


def wraps_and_deletes(disk: FaultDisk, seen: Witness) -> None:
    queue = open_queue(disk)
    for number in range(24):
        _put(queue, seen, [bytes([65 + number]) * (50 + 41 * number)])
        if number % 3 == 2:
            for message in queue.lock(3):
                seen.deleted[message.seq] = message.data
                seen.confirmed.pop(message.seq)
                queue.delete([message.seq])
        if number % 7 == 6:
            queue.sync_index()
    queue.close()


def keeps_the_first(disk: FaultDisk, seen: Witness) -> None:
    """The first record stays while the ring goes round: skips."""
    queue = open_queue(disk)
    _put(queue, seen, [b"first" * 10])
    held = queue.lock(1)[0].seq
    for number in range(30):
        _put(queue, seen, [bytes([65 + number]) * (100 + 31 * number)])
        for message in queue.lock(1):
            seen.deleted[message.seq] = message.data
            seen.confirmed.pop(message.seq)
            queue.delete([message.seq])
        if number % 5 == 4:
            queue.sync_index()
    assert held in contents(queue)
    assert queue.stat()["skips"]


def _put(queue: object, seen: Witness, payloads: list[bytes]) -> None:
    seen.tried.update(payloads)
    for seq, data in zip(queue.put_many(payloads), payloads, strict=True):  # type: ignore[attr-defined]
        seen.confirmed[seq] = data


HISTORIES = [adds, wraps_and_deletes, keeps_the_first]


def crashed(history: Callable[[FaultDisk, Witness], None], at: int) -> tuple[FaultDisk, Witness]:
    disk, seen = FaultDisk(crash_at=at), Witness()
    with pytest.raises(Crashed):
        history(disk, seen)
    return disk, seen


def operations(history: Callable[[FaultDisk, Witness], None]) -> int:
    disk = FaultDisk()
    history(disk, Witness())
    return disk.operations


def agrees(found: dict[int, bytes], seen: Witness) -> None:
    assert seen.confirmed.items() <= found.items(), "lost"
    for seq, data in found.items():
        assert data in seen.tried, "invented"
        assert seen.confirmed.get(seq, data) == data
    assert len(set(found.values())) == len(found), "doubled"


@pytest.mark.parametrize("history", HISTORIES)
def test_crash_at_every_operation(history: Callable[[FaultDisk, Witness], None]) -> None:
    total = operations(history)
    assert total > 15
    for at in range(1, total + 1):
        disk, seen = crashed(history, at)
        for seed in range(3):
            queue = open_queue(disk.after_crash(random.Random(seed)))
            agrees(contents(queue), seen)
        queue = open_queue(disk.after_kill())
        agrees(contents(queue), seen)
        fresh = queue.put(b"goes on")
        assert fresh > max(seen.confirmed, default=0)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("index", ["kept", "lost", "bit flipped"])
def test_crash_at_every_operation_of_recovery(
    history: Callable[[FaultDisk, Witness], None], index: str
) -> None:
    """Recovery dies at each of its operations, twice in a row; the third finds everything confirmed."""
    total = operations(history)
    for at in range(max(2, total // 3), total + 1, 7):
        broken, seen = crashed(history, at)
        first = broken.after_crash(random.Random(at))
        damage(first, index)
        files = {name: bytes(file.durable) for name, file in first.files.items()}
        whole = FaultDisk(files)
        expected = contents(open_queue(whole))
        agrees(expected, seen)
        for died in range(1, whole.operations + 1):
            disk = FaultDisk(files, crash_at=died)
            for attempt in range(2):
                with pytest.raises(Crashed):
                    open_queue(disk)
                disk = disk.after_crash(random.Random(died + attempt))
                disk.crash_at = died if attempt == 0 else 0
                if attempt == 0 and _operations_to_open(disk) < died:
                    disk.crash_at = 0
                    break
            found = contents(open_queue(disk))
            agrees(found, seen)
            assert found.items() >= expected.items()


def _operations_to_open(disk: FaultDisk) -> int:
    probe = FaultDisk({name: bytes(file.durable) for name, file in disk.files.items()})
    open_queue(probe)
    return probe.operations


def damage(disk: FaultDisk, index: str) -> None:
    file = disk.open("index")
    if index == "lost":
        file.durable = bytearray()
        file.cached = bytearray()
    elif index == "bit flipped" and len(file.durable) > 8192 + 20:
        file.durable[8192 + 20] ^= 4
        file.cached[8192 + 20] ^= 4
