"""Confirmed means on disk, for the spool: failed syncs, kills and power losses in any order.

DISKQUEUE_LIVES is the number of random histories (150 for each size).
"""

import contextlib
import errno
import os
import random

import pytest

from gateway_agent.errors import GatewayError, SpoolWriteFailed
from gateway_agent.link.spool import INDEX_SYNC_NS
from pmdaemon.runtime.clock import FakeClock
from tests.support.faulty_disk import Crashed, FaultDisk
from tests.unit.gateway_agent.link.test_spool import keys, on, put


@pytest.fixture(autouse=True)
def no_directory(monkeypatch):
    monkeypatch.setattr("gateway_agent.link.state_files.make_private_directory", lambda _path: None)


@pytest.mark.parametrize("step", [3, 4, 5, 6])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_failed_index_sync_and_a_power_loss_keep_every_cut(step, restarts):
    """Behind write and sync of the record come those of the slots and those of the header."""
    disk, clock = FaultDisk(), FakeClock()
    spool = on(disk, clock=clock)
    for seq in range(1, 6):
        put(spool, 7, seq)
    clock.advance(INDEX_SYNC_NS / 1e9)
    disk.fail_at[disk.operations + step] = errno.EIO
    put(spool, 7, 6)
    assert disk.operations >= max(disk.fail_at), "the failure has happened"
    if restarts:
        disk = disk.after_kill()
        spool = on(disk)
    assert keys(spool) == [(7, seq) for seq in range(1, 7)]
    for seed in range(12):
        again = on(disk.after_crash(random.Random(seed)))
        assert (keys(again), again.dropped) == ([(7, seq) for seq in range(1, 7)], 0)


def test_a_failed_sync_of_a_cut_or_of_a_note_drops_nothing():
    """In a full spool the first sync is that of the note; opening it again must not obey what it gives up."""
    disk = FaultDisk()
    spool = on(disk)
    for seq in range(1, 60):
        before = keys(spool), spool.dropped
        disk.fail_at = {disk.operations + 2: errno.EIO}
        with pytest.raises(SpoolWriteFailed):
            put(spool, 7, seq)
        assert (keys(spool), spool.dropped) == before
        put(spool, 7, seq)
    assert spool.dropped, "it was full"


class SpoolLife:
    """Random cuts, acknowledgements, failures, kills and power losses, one epoch a process.

    ``due``: cuts confirmed, or found by a start (the server may have been told), not acknowledged since.
    """

    def __init__(self, seed, limit_bytes):
        self.rng, self.limit_bytes, self.clock = random.Random(seed), limit_bytes, FakeClock()
        self.disk, self.due, self.tried = FaultDisk(), set(), set()
        self.dropped = self.confirmed = self.deaths = 0

    def run(self):
        for epoch in range(1, self.rng.randint(3, 6)):
            self._arm()
            try:
                self._live(epoch)
            except Crashed:
                self.deaths += 1
            rng, disk = self.rng, self.disk
            self.disk = disk.after_kill() if rng.random() < 0.5 else disk.after_crash(rng)
        self._open()

    def _arm(self):
        rng, disk = self.rng, self.disk
        disk.rng = rng
        if rng.random() < 0.8:
            disk.crash_at = disk.operations + rng.choice([rng.randint(1, 8), rng.randint(1, 80)])
        for _ in range(rng.randint(0, 2)):
            disk.fail_at[disk.operations + rng.choice([rng.randint(1, 8), rng.randint(1, 80)])] = errno.EIO

    def _open(self):
        while True:
            try:
                spool = on(self.disk, self.limit_bytes, self.clock)
                break
            except GatewayError:  # systemd starts it again
                continue
        self._check(spool)
        self.due = set(keys(spool))
        return spool

    def _check(self, spool):
        try:
            held = set(keys(spool))
        except GatewayError:  # it could not be opened again; the next append tries again
            return
        assert held <= self.tried, "invented"
        assert spool.dropped >= self.dropped, "the lifetime count went back"
        self.dropped = spool.dropped
        assert len(self.due - held) <= spool.dropped, "more gone than counted"
        assert spool.dropped <= len(self.tried - held), "what is held was counted"
        if self.limit_bytes == ROOMY:
            assert self.due <= held, "lost"
            assert spool.dropped == 0
        else:
            self.due &= held

    def _live(self, epoch):
        spool, seq = self._open(), 1
        for _ in range(self.rng.randint(1, 14)):
            self.clock.advance(self.rng.choice([1.0, 11.0]))
            if self.due and self.rng.random() < 0.25:
                of_epoch, upto = self.rng.choice(spool.epochs())[:2]
                spool.forget(of_epoch, upto)
                self.due -= {(of_epoch, number) for number in range(upto + 1)}
            self.tried.add((epoch, seq))
            with contextlib.suppress(SpoolWriteFailed):
                put(spool, epoch, seq)
                self.due.add((epoch, seq))
                self.confirmed += 1
                seq += 1
            self._check(spool)


ROOMY = 1 << 16


@pytest.mark.parametrize("limit_bytes", [ROOMY, 4096])
def test_random_lives_of_a_spool_lose_no_cut_uncounted(limit_bytes):
    lives = [SpoolLife(seed, limit_bytes) for seed in range(int(os.environ.get("DISKQUEUE_LIVES", "150")))]
    for seed, life in enumerate(lives):
        try:
            life.run()
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
    assert sum(life.deaths for life in lives) >= len(lives), "they do die"
    assert sum(life.confirmed for life in lives) >= 5 * len(lives), "and live before"
    assert any(life.dropped for life in lives) == (limit_bytes != ROOMY)
