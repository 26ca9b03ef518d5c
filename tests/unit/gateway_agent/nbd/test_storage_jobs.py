"""Jobs of file mode: what does them, and how a structured read is laid out."""

import contextlib
import os
import threading

import pytest
from structlog.testing import capture_logs

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.storage import VolumeStorage
from gateway_agent.nbd.storage_jobs import (
    MAX_EXTENTS,
    PIECE_BYTES,
    LoopRunner,
    StorageJob,
    SyncedRunner,
    WorkerPool,
    problem_of,
)
from gateway_agent.nbd.tls import TlsEngine
from pmdaemon.runtime.clock import Deadline, SystemClock
from tests.support.nbd import MIB, assembled, chunks


def test_a_file_that_hangs_in_a_flush_hangs_no_other_connection(tmp_path, monkeypatch):
    loop, done, hang = EventLoop(SystemClock()), [], threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _fd: hang.wait(60))
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    storage = VolumeStorage("vol-1", str(tmp_path / "disk.img"), read_only=False)
    turns = LoopRunner(loop)
    runner = SyncedRunner(loop, "vol-1", turns)
    for number, command in enumerate((p.Cmd.FLUSH, p.Cmd.READ)):
        runner.submit(StorageJob(storage, (0, number, command, 512, 0, 0, 0), bytearray(528), done.extend))
    while not done:
        loop.step()
    assert [job.request[2] for job in done] == [p.Cmd.READ]
    hang.set()
    while len(done) < 2:
        loop.step()
    turns.stop()
    runner.stop()
    storage.release()
    loop.close()


def test_workers_run_jobs_report_to_the_loop_and_stop():
    loop, done = EventLoop(SystemClock()), []
    pool = WorkerPool(loop, "a-volume-with-a-long-name", 3)

    class StorageJob:
        def run(self):
            self.was_run = True

        def done(self, jobs):
            done.extend(job.was_run for job in jobs)

    for _ in range(2000):
        pool.submit(StorageJob())
    while len(done) < 2000:
        loop.step()
    assert done == [True] * 2000
    pool.stop()
    loop.close()


@pytest.fixture
def without_threads(monkeypatch):
    """The system has no room for a thread, within the block."""

    @contextlib.contextmanager
    def block():
        def full(_self):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", full)
            yield

    return block


def test_a_flush_for_which_there_was_no_thread_keeps_no_later_one_from_its_own(tmp_path, without_threads):
    loop, done = EventLoop(SystemClock()), []
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    storage = VolumeStorage("vol-1", str(tmp_path / "disk.img"), read_only=False)
    turns = LoopRunner(loop)
    runner = SyncedRunner(loop, "vol-1", turns)
    job = StorageJob(storage, (0, 1, p.Cmd.FLUSH, 0, 0, 0, 0), bytearray(16), done.extend)
    before = len(os.listdir("/proc/self/fd"))
    with without_threads(), pytest.raises(RuntimeError, match="can't start"):
        runner.submit(job)
    assert len(os.listdir("/proc/self/fd")) == before
    runner.submit(job)
    while not done:
        loop.step()
    assert job.error == 0
    turns.stop()
    runner.stop()
    storage.release()
    loop.close()


def test_a_handshake_for_which_there_was_no_thread_keeps_no_later_one_from_its_own(without_threads):
    loop, computed = EventLoop(SystemClock()), []

    class Opening:
        def compute(self):
            self.was_computed = True

        def computed(self):
            computed.append(self.was_computed)

    engine = TlsEngine(loop)
    before = len(os.listdir("/proc/self/fd"))
    with without_threads(), pytest.raises(RuntimeError, match="can't start"):
        engine.submit(Opening())
    assert len(os.listdir("/proc/self/fd")) == before
    engine.submit(Opening())
    deadline = Deadline(60)
    while not computed and not deadline.passed:
        loop.at("turn", loop.clock.monotonic_ns() + 10_000_000, lambda _now_ns: None)
        loop.step()
    assert computed == [True]
    engine.stop()
    loop.close()


class FailingStorage:
    """Its first reads end with the exceptions given; later ones succeed."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def read(self, _into, _offset):
        if self.errors:
            raise self.errors.pop()
        return 0


@pytest.mark.parametrize("kind", ["workers", "turns"])
def test_a_request_whose_storage_raises_is_answered_and_the_next_are_done(kind):
    loop, done = EventLoop(SystemClock()), []
    runner = WorkerPool(loop, "v", 1) if kind == "workers" else LoopRunner(loop)
    storage = FailingStorage(ZeroDivisionError(), MemoryError())
    with capture_logs() as logs:
        for number in range(3):
            runner.submit(
                StorageJob(storage, (0, number, p.Cmd.READ, 512, 0, 0, 0), bytearray(528), done.extend)
            )
        loop.at("deadline", loop.clock.monotonic_ns() + 60 * 10**9, lambda _now: done.extend([None] * 3))
        while len(done) < 3:
            loop.step()
        runner.stop()
    assert [job.error for job in done] == [p.ENOMEM, p.EIO, 0]
    assert [entry["event"] for entry in logs] == ["request-failed", "request-failed"]
    loop.close()


def test_a_connection_that_fails_with_its_answers_keeps_those_of_no_other_back():
    loop, done = EventLoop(SystemClock()), []
    pool = WorkerPool(loop, "v", 2)

    def failing(_jobs):
        raise MemoryError

    storage = FailingStorage()
    with capture_logs():
        for number in range(60):
            target = (failing, done.extend, done.extend)[number % 3]
            pool.submit(StorageJob(storage, (0, number, p.Cmd.READ, 512, 0, 0, 0), bytearray(528), target))
        deadline = Deadline(60.0)
        while len(done) < 40 and not deadline.passed:
            loop.step()
    assert sorted(job.request[1] for job in done) == [number for number in range(60) if number % 3]
    assert pool.is_idle
    pool.stop()
    loop.close()


def structured(storage, command, offset, length, flags=0):
    request = (0, 7, command, length, offset, flags, 0)
    return StorageJob(
        storage, request, bytearray(length + p.DATA_HEAD_BYTES), lambda _job: None, is_structured=True
    )


@pytest.fixture
def sparse(tmp_path):
    """8 MiB, with data in [1, 3) MiB and in [5, 6) MiB."""
    with open(tmp_path / "disk.img", "wb") as file:
        file.truncate(8 * MIB)
        for start, size in ((1, 2), (5, 1)):
            file.seek(start * MIB)
            file.write(bytes(range(1, 256)) * (size * MIB // 255) + b"e" * (size * MIB % 255))
    storage = VolumeStorage("vol-1", str(tmp_path / "disk.img"), read_only=False)
    yield storage
    storage.release()


def test_a_read_is_laid_out_in_chunks_of_data_and_holes_a_piece_a_step(sparse, tmp_path):
    job, steps = structured(sparse, p.Cmd.READ, MIB // 2, 7 * MIB), 1
    while not job.step():
        steps += 1
    assert job.error == 0
    assert steps >= 3 * MIB // PIECE_BYTES, "no step is longer than a piece"
    found = chunks(job.reply())
    kinds = [kind for _, kind, _, _ in found]
    assert kinds == [p.Chunk.OFFSET_HOLE, p.Chunk.OFFSET_DATA] * 2 + [p.Chunk.OFFSET_HOLE]
    assert [is_last for _, _, is_last, _ in found] == [False] * 4 + [True]
    expected = (tmp_path / "disk.img").read_bytes()[MIB // 2 :][: 7 * MIB]
    assert assembled(found, MIB // 2, 7 * MIB) == expected
    assert len(job.reply()) <= 3 * MIB + 200


@pytest.mark.parametrize(
    ("offset", "length", "kind"),
    [
        (0, 4 * MIB, p.Chunk.OFFSET_DATA),
        (3 * MIB, 2 * MIB, p.Chunk.OFFSET_HOLE),
        (0, 512, p.Chunk.OFFSET_DATA),
    ],
)
def test_what_must_not_be_fragmented_is_one_chunk(sparse, tmp_path, offset, length, kind):
    job = structured(sparse, p.Cmd.READ, offset, length, p.CMD_FLAG_DF)
    job.run()
    found = chunks(job.reply())
    assert [item[1:3] for item in found] == [(kind, True)]
    assert assembled(found, offset, length) == (tmp_path / "disk.img").read_bytes()[offset : offset + length]


def test_a_read_of_nothing_is_answered_by_its_end_alone(sparse):
    job = structured(sparse, p.Cmd.READ, 4096, 0)
    job.run()
    assert bytes(job.reply()) == p.none_chunk(7)


def test_a_read_that_fails_says_where(sparse, tmp_path):
    os.truncate(tmp_path / "disk.img", 5 * MIB + 512)
    job = structured(sparse, p.Cmd.READ, 4 * MIB, 4 * MIB)
    job.run()
    assert job.error == p.EIO
    assert 4 * MIB <= job.place <= 5 * MIB + 512, "before it nothing has failed"
    assert job.problem == "read: Input/output error"


def test_block_status_is_bounded_and_one_extent_if_so_asked(sparse):
    job = structured(sparse, p.Cmd.BLOCK_STATUS, 0, 8 * MIB)
    job.run()
    hole = p.STATE_HOLE | p.STATE_ZERO
    extents = [(MIB, hole), (2 * MIB, 0), (2 * MIB, hole), (MIB, 0), (2 * MIB, hole)]
    assert bytes(job.reply()) == p.status_chunk(7, p.ALLOCATION_ID, extents, last=True)
    job = structured(sparse, p.Cmd.BLOCK_STATUS, MIB, 512, p.CMD_FLAG_REQ_ONE)
    job.run()
    assert bytes(job.reply()) == p.status_chunk(7, p.ALLOCATION_ID, [(512, 0)], last=True)


class EndlessExtents:
    """A file with an extent for each sector; counts what is asked of it."""

    asked = 0

    def block_status(self, _offset, length, most):
        EndlessExtents.asked = most
        return [(512, number % 2) for number in range(min(most, length // 512))]


@pytest.mark.parametrize(("flags", "most"), [(0, MAX_EXTENTS), (p.CMD_FLAG_REQ_ONE, 1)])
def test_no_more_extents_are_looked_for_than_a_reply_has(flags, most):
    job = structured(EndlessExtents(), p.Cmd.BLOCK_STATUS, 0, 4 * MIB, flags)
    assert job.step()
    assert EndlessExtents.asked == most
    ((_, kind, _, payload),) = chunks(job.reply())
    assert (kind, len(payload)) == (p.Chunk.BLOCK_STATUS, 4 + 8 * most)


def test_a_large_range_is_read_ahead_in_pieces_and_only_its_beginning(sparse, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, *what: asked.append(what))
    job = structured(sparse, p.Cmd.CACHE, 4096, 0)
    job.request = (0, 7, p.Cmd.CACHE, 1 << 31, 4096, 0, 0)
    job.run()
    assert job.error == 0
    assert asked == [(4096 + n * MIB, MIB, os.POSIX_FADV_WILLNEED) for n in range(32)]


def test_the_texts_of_errors_fit_the_room_for_them():
    for command in p.Cmd:
        for error in p.WIRE_ERRORS:
            assert len(p.error_chunk(1, error, problem_of(command, error), 1)) <= 256
