"""Confirmed means on disk: failed syncs, kills and power losses in any order, also during recovery.

What the kernel shows after a failed sync, or after a kill, is not what the disk holds. So each test opens the
queue in between, lets it hand out what it found, and only then takes the power away.
DISKQUEUE_LIVES is the number of random histories (400).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random

import pytest

from pmdaemon.diskqueue import DiskQueue
from pmdaemon.diskqueue.errors import DiskQueueError, QueueFull, QueuePoisoned
from tests.support.diskqueue import contents, open_queue
from tests.support.faulty_disk import Crashed, FaultDisk

LIVES = int(os.environ.get("DISKQUEUE_LIVES", "400"))
SEEDS = 12
LARGE = {"data_bytes": 8192, "entries": 40}


def filled(disk: FaultDisk, count: int = 5) -> tuple[DiskQueue, dict[int, bytes]]:
    queue = open_queue(disk)
    payloads = [b"confirmed %d" % number for number in range(count)]
    return queue, {queue.put(data): data for data in payloads}


def test_a_failed_index_sync_a_restart_and_a_power_loss_lose_nothing() -> None:
    """Operations of an index sync: write of the slots, sync, write of the header, sync."""
    for step in range(1, 5):
        disk = FaultDisk()
        queue, confirmed = filled(disk)
        disk.fail_at[disk.operations + step] = errno.EIO
        with pytest.raises(QueuePoisoned):
            queue.sync_index()
        later = disk.after_kill()
        assert contents(open_queue(later)) == confirmed
        for seed in range(SEEDS):
            assert contents(open_queue(later.after_crash(random.Random(seed)))) == confirmed


def test_a_record_whose_sync_failed_is_written_again_before_it_is_handed_out() -> None:
    disk = FaultDisk()
    queue, confirmed = filled(disk, 1)
    disk.fail_at[disk.operations + 2] = errno.EIO
    with pytest.raises(QueuePoisoned):
        queue.put(b"unknown" * 100)
    later = disk.after_kill()
    handed_out = {message.seq: message.data for message in open_queue(later).lock(9)}
    assert handed_out == {**confirmed, 2: b"unknown" * 100}
    for seed in range(SEEDS):
        assert contents(open_queue(later.after_crash(random.Random(seed)))) == handed_out


def test_recovery_whose_own_sync_fails_hands_out_nothing() -> None:
    """Each operation of recovery fails once; the next one does not take the first one's leavings for good."""
    disk = FaultDisk()
    queue, confirmed = filled(disk)
    disk.fail_at[disk.operations + 2] = errno.EIO
    with pytest.raises(QueuePoisoned):
        queue.put(b"unknown")
    probe = disk.after_kill()
    open_queue(probe)
    for failing in range(1, probe.operations + 1):
        later = disk.after_kill()
        later.fail_at[failing] = errno.EIO
        with pytest.raises(OSError, match="by the test"):
            open_queue(later)
        again = later.after_kill()
        handed_out = contents(open_queue(again))
        assert confirmed.items() <= handed_out.items()
        for seed in range(SEEDS):
            assert contents(open_queue(again.after_crash(random.Random(seed)))) == handed_out


@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_broken_index_sync_and_a_power_loss_at_any_step_of_recovery_lose_nothing(
    step: int, how: str
) -> None:
    disk = FaultDisk()
    queue, confirmed = filled(disk)
    if how == "dies":
        disk.crash_at = disk.operations + step
    else:
        disk.fail_at[disk.operations + step] = errno.EIO
    with pytest.raises((Crashed, QueuePoisoned)):
        queue.sync_index()
    probe = disk.after_kill()
    open_queue(probe)
    for at in range(1, probe.operations + 1):
        for seed in range(SEEDS):
            later = disk.after_kill()
            later.crash_at = at
            with pytest.raises(Crashed):
                open_queue(later)
            assert contents(open_queue(later.after_crash(random.Random(seed)))) == confirmed


def test_a_queue_whose_making_fails_twice_is_made_at_last_and_keeps_what_it_takes() -> None:
    """At any two operations, of which the second is in the next process."""
    probe = FaultDisk()
    open_queue(probe)
    for first in range(1, probe.operations + 1):
        for second in range(1, probe.operations + 1):
            disk = FaultDisk(fail_at={first: errno.EIO})
            with pytest.raises(OSError, match="by the test"):
                open_queue(disk)
            disk = disk.after_kill()
            disk.fail_at[second] = errno.EIO
            with contextlib.suppress(OSError):
                open_queue(disk)
            disk = disk.after_kill()
            seq = open_queue(disk).put(b"kept")
            found = contents(open_queue(disk.after_crash(random.Random(first * 100 + second))))
            assert found == {seq: b"kept"}


def test_a_queue_whose_making_was_killed_keeps_what_it_takes_later_on_a_disk_that_fails() -> None:
    """Where it was killed in the making of a file, blocks are reserved that were never written."""
    probe = FaultDisk()
    open_queue(probe, **LARGE)
    for died in range(1, probe.operations + 1):
        disk = FaultDisk(crash_at=died)
        with pytest.raises(Crashed):
            open_queue(disk, **LARGE)
        _fails_and_loses_nothing(disk.after_kill())


def test_a_queue_whose_growing_was_killed_keeps_what_it_takes_later_on_a_disk_that_fails() -> None:
    made = FaultDisk()
    queue = open_queue(made, data_bytes=LARGE["data_bytes"], entries=4)
    queue.put_many([b"before %d" % number for number in range(4)])
    queue.close()
    probe = made.after_kill()
    open_queue(probe, **LARGE)
    for died in range(1, probe.operations + 1):
        disk = made.after_kill()
        disk.crash_at = died
        with pytest.raises(Crashed):
            open_queue(disk, **LARGE)
        _fails_and_loses_nothing(disk.after_kill())


def _fails_and_loses_nothing(disk: FaultDisk) -> None:
    """A record and an index sync, each failing at one of its steps, the next opening, and then the power."""
    for step in range(1, 7):
        later = disk.after_kill()
        queue = open_queue(later, **LARGE)
        confirmed = contents(queue)
        confirmed |= {queue.put(data): data for data in (b"confirmed %d" % number for number in range(12))}
        later.fail_at[later.operations + step] = errno.EIO
        with contextlib.suppress(QueuePoisoned):
            queue.put(b"unknown" * 40)
            queue.sync_index()
        with pytest.raises(QueuePoisoned):
            queue.put(b"no more")
        again = later.after_kill()
        queue = open_queue(again, **LARGE)
        handed_out = contents(queue)
        assert confirmed.items() <= handed_out.items()
        handed_out[queue.put(b"later")] = b"later"
        for seed in range(4):
            assert contents(open_queue(again.after_crash(random.Random(seed)), **LARGE)) == handed_out


def test_a_rename_that_is_not_durable_yet_loses_nothing() -> None:
    """A change of size fails or dies at any operation, is opened again, and then power is lost."""

    def made() -> tuple[FaultDisk, dict[int, bytes]]:
        disk = FaultDisk()
        queue, confirmed = filled(disk)
        queue.close()
        return disk.after_kill(), confirmed

    probe, _ = made()
    open_queue(probe, data_bytes=8192)
    for at in range(1, probe.operations + 1):
        for seed in range(SEEDS):
            disk, confirmed = made()
            disk.fail_at[at] = errno.EIO
            with pytest.raises(OSError, match="by the test"):
                open_queue(disk, data_bytes=8192)
            later = disk.after_kill()
            queue = open_queue(later, data_bytes=8192)
            confirmed[queue.put(b"later")] = b"later"
            assert contents(open_queue(later.after_crash(random.Random(seed)), data_bytes=8192)) == confirmed


class Life:
    """One history: adds, deletes, index syncs, closings; what may break, breaks.

    ``due`` must be found at every opening, ``tried`` may be; whatever a recovery hands out is due from then.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = FaultDisk()
        self.due: dict[int, bytes] = {}
        self.tried: set[bytes] = set()
        self.added = self.confirmed = self.deaths = 0

    def run(self) -> None:
        for _ in range(self.rng.randint(2, 6)):
            self._arm()
            try:
                self._live()
            except Crashed:
                self.deaths += 1
            self.disk = self.disk.after_kill() if self.rng.random() < 0.5 else self.disk.after_crash(self.rng)
        found = contents(open_queue(self.disk))
        assert self.due.items() <= found.items(), "lost at the end"

    def _arm(self) -> None:
        rng, disk = self.rng, self.disk
        disk.rng = rng
        if rng.random() < 0.8:
            disk.crash_at = disk.operations + rng.choice([rng.randint(1, 8), rng.randint(1, 50)])
        for _ in range(rng.randint(0, 2)):
            disk.fail_at[disk.operations + rng.choice([rng.randint(1, 8), rng.randint(1, 50)])] = errno.EIO

    def _live(self) -> None:
        queue = self._open()
        for _ in range(self.rng.randint(1, 12)):
            try:
                queue = self._step(queue)
            except QueueFull:
                pass
            except (DiskQueueError, OSError):
                if self.rng.random() < 0.3:
                    return  # the process ends
                queue = self._open()  # as the spool does, in the same process

    def _open(self) -> DiskQueue:
        while True:
            try:
                queue = open_queue(self.disk)
                break
            except OSError:
                continue  # the supervisor starts it again
        found = contents(queue)
        for seq, data in self.due.items():
            assert found.get(seq) == data, f"record {seq} was due"
        assert self.tried >= set(found.values()), "invented"
        self.due = found
        return queue

    def _step(self, queue: DiskQueue) -> DiskQueue:
        kind = self.rng.random()
        if kind < 0.45:
            self._add(queue)
        elif kind < 0.6 and self.due:
            seq = self.rng.choice(sorted(self.due)[:3])
            del self.due[seq]
            queue.discard([seq])
        elif kind < 0.93:
            queue.sync_index()
        else:
            queue.close()
            return self._open()
        return queue

    def _add(self, queue: DiskQueue) -> None:
        payloads = []
        for _ in range(self.rng.randint(1, 3)):
            self.added += 1
            payloads.append(b"%d " % self.added + self.rng.randbytes(self.rng.choice([0, 50, 200, 300, 700])))
        self.tried.update(payloads)
        for seq, data in zip(queue.put_many(payloads), payloads, strict=True):
            assert seq not in self.due, "a number given twice"
            self.due[seq] = data
            self.confirmed += 1


def test_random_lives_lose_nothing_that_was_confirmed_or_handed_out() -> None:
    lives = [Life(seed) for seed in range(LIVES)]
    for seed, life in enumerate(lives):
        try:
            life.run()
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
    assert sum(life.deaths for life in lives) >= len(lives), "they do die"
    assert sum(life.confirmed for life in lives) >= 5 * len(lives), "and live before"
