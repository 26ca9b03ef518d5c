"""Rounds: who leads, what a batch holds, and what everybody is told when the disk fails.

Some tests read private state: how far a round is, and how much memory is held, is no part of the interface.
"""

from __future__ import annotations

import errno
import linecache
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from pmdaemon.diskqueue import DiskQueue, commit
from pmdaemon.diskqueue import queue as queue_module
from pmdaemon.diskqueue.errors import QueuePoisoned
from pmdaemon.runtime.clock import FakeClock
from tests.support.diskqueue import contents, open_queue, settings
from tests.support.faulty_disk import FaultDisk, FaultStorage


class GatedStorage:
    """A storage whose syncs wait until the test lets them go; counts writes and syncs."""

    def __init__(self, inner: FaultStorage) -> None:
        self.inner = inner
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.gated = False
        self.syncs = 0
        self.writes: list[tuple[int, int]] = []

    def allocate(self, size_bytes: int, kept_bytes: int | None = None) -> None:
        self.inner.allocate(size_bytes, kept_bytes)

    def view(self) -> memoryview:
        return self.inner.view()

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        self.writes.append((offset, sum(map(len, buffers))))
        self.inner.write(offset, buffers)

    def sync(self) -> None:
        if self.gated:
            self.entered.release()
            assert self.go.acquire(timeout=60)
        self.syncs += 1
        self.inner.sync()

    def release(self) -> None:
        self.inner.release()

    def close(self) -> None:
        self.inner.close()


def gated(**changes: object) -> tuple[DiskQueue, GatedStorage]:
    disk = FaultDisk()
    data = GatedStorage(disk.open("data"))
    queue = DiskQueue(
        settings(data_bytes=1 << 20, entries=1000, **changes),
        data=data,
        index=disk.open("index"),
        helper=False,
        clock=FakeClock(),
    )
    data.writes.clear()
    data.syncs = 0
    return queue, data


def start(count: int, target: object) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, args=(n,), daemon=True) for n in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def until_pending(queue: DiskQueue, count: int) -> None:
    tick = threading.Event()
    for _ in range(20_000):
        with queue._state.lock:
            if sum(1 for request in queue._commit._pending if request.gate is not None) >= count:
                return
        tick.wait(0.001)  # a poll for another thread's progress; no assertion depends on its length
    pytest.fail("the threads did not get there")


def test_one_producer_syncs_itself_each_time() -> None:
    queue, data = gated()
    for number in range(5):
        queue.put(b"%d" % number)
    assert data.syncs == 5
    assert not queue._group._threads


def test_those_who_come_during_a_sync_share_the_next() -> None:
    queue, data = gated()
    data.gated = True
    first = start(1, lambda n: queue.put(b"first"))
    assert data.entered.acquire(timeout=60)
    rest = start(20, lambda n: queue.put(b"%d" % n))
    until_pending(queue, 20)
    data.go.release()
    data.go.release()
    join(first + rest)
    assert data.syncs == 2
    assert len(data.writes) == 2, "one write for the whole batch"
    assert len(contents(queue)) == 21


def test_nothing_is_visible_before_its_sync() -> None:
    queue, data = gated()
    data.gated = True
    threads = start(1, lambda n: queue.put(b"x"))
    assert data.entered.acquire(timeout=60)
    assert queue.lock(1) == []
    assert queue.read(1) is None
    assert contents(queue) == {}
    assert queue.delete_through(99) == 0
    data.go.release()
    join(threads)
    assert contents(queue) == {1: b"x"}


def test_batches_keep_their_limits_and_order() -> None:
    queue, data = gated(batch_requests=3, batch_bytes=2048)
    handles = [queue.submit([b"x" * 100]) for _ in range(7)]
    big = queue.submit([b"y" * 1500])
    queue.flush()
    assert [size for _offset, size in data.writes] == [768, 768, 256 + 1792]
    assert all(handle.done for handle in [*handles, big])


def test_a_jump_larger_than_the_gap_waits_for_the_next_sync() -> None:
    queue, data = gated(gap_bytes=4096)
    queue.put(b"a" * 900_000)
    queue.put(b"b" * 100_000)
    queue.delete_through(1)
    data.writes.clear()
    data.syncs = 0
    queue.submit([b"c" * 20_000])
    queue.submit([b"d" * 60_000])
    queue.flush()
    assert data.syncs == 2, "behind the end and at the beginning"


def test_submit_confirms_through_its_handle_and_callback() -> None:
    queue, _data = gated()
    told = []
    handle = queue.submit([b"1", b"2"], on_durable=lambda request: told.append(request.last_seq))
    assert not handle.done
    handle.wait()
    assert (handle.first_seq, handle.last_seq, told) == (1, 2, [2])
    with pytest.raises(ValueError, match="nothing"):
        queue.submit([])


@pytest.mark.parametrize("operation", [1, 2])
def test_failed_write_or_sync_poisons_until_opened_anew(operation: int) -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"safe")
    disk.fail_at[disk.operations + operation] = errno.EIO
    with pytest.raises(QueuePoisoned, match="restart"):
        queue.put(b"unknown")
    syncs = disk.syncs
    for act in (lambda: queue.put(b"x"), queue.lock, queue.sync_index, queue.flush,
                lambda: queue.read(1), lambda: queue.submit([b"x"])):  # fmt: skip
        with pytest.raises(QueuePoisoned):
            act()
    queue.close()
    assert disk.syncs == syncs, "a failed sync is never repeated"
    assert b"safe" in contents(open_queue(disk.after_kill())).values()


def test_failed_index_sync_poisons() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"safe")
    disk.fail_next()
    with pytest.raises(QueuePoisoned, match="index"):
        queue.sync_index()
    with pytest.raises(QueuePoisoned):
        queue.put(b"x")


def test_every_waiter_hears_of_the_failure() -> None:
    queue, data = gated()
    data.gated = True
    heard: list[str] = []

    def put(number: int) -> None:
        try:
            queue.put(b"%d" % number)
        except QueuePoisoned:
            heard.append("poisoned")

    first = start(1, put)
    assert data.entered.acquire(timeout=60)
    rest = start(9, put)
    until_pending(queue, 9)
    disk = data.inner._disk
    disk.fail_next()
    data.go.release()
    join(first + rest)
    assert heard == ["poisoned"] * 10


def test_a_waiter_gives_a_dead_sync_up() -> None:
    queue, data = gated(confirm_s=0.05)
    data.gated = True
    first = start(1, lambda n: queue.put(b"stuck"))
    assert data.entered.acquire(timeout=60)
    with pytest.raises(QueuePoisoned, match="no confirmation"):
        queue.put(b"waits")
    data.go.release()
    join(first)


def test_an_interrupted_waiter_hands_its_duty_on(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, data = gated()
    data.gated = True
    first = start(1, lambda n: queue.put(b"first"))
    assert data.entered.acquire(timeout=60)

    class Interrupted:
        """A lock whose holder is interrupted while it sleeps, after its confirmation was sent."""

        def __init__(self) -> None:
            self.inner = threading.Lock()

        def acquire(self, timeout: float = -1) -> bool:
            if timeout < 0:
                return self.inner.acquire()
            self.inner.acquire(timeout=60)
            raise KeyboardInterrupt

        def release(self) -> None:
            self.inner.release()

    monkeypatch.setattr("pmdaemon.diskqueue.commit.threading", SimpleNamespace(Lock=Interrupted))

    def interrupted(_number: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            queue.put(b"interrupted")

    second = start(1, interrupted)
    until_pending(queue, 1)
    monkeypatch.undo()
    third = start(3, lambda n: queue.put(b"%d" % n))
    until_pending(queue, 4)
    data.gated = False
    data.go.release()
    join(first + second + third)
    queue.put(b"goes on")


def test_helper_commits_what_nobody_waits_for_and_stops() -> None:
    disk = FaultDisk()
    queue = DiskQueue(settings(), data=disk.open("data"), index=disk.open("index"))
    done = threading.Event()
    queue.submit([b"x"], on_durable=lambda request: done.set())
    assert done.wait(60)
    assert contents(queue) == {1: b"x"}
    queue.close()
    assert not any(thread.name == "dq-sync" for thread in threading.enumerate())


def test_wait_wakes_a_consumer() -> None:
    disk = FaultDisk()
    queue = DiskQueue(settings(), data=disk.open("data"), index=disk.open("index"))
    got = []

    def consume(_number: int) -> None:
        if queue.wait(60):
            got.extend(message.data for message in queue.lock(1))

    threads = start(1, consume)
    queue.put(b"x")
    join(threads)
    assert got == [b"x"]
    assert not queue.wait(0)
    queue.close()


def test_gathering_waits_for_company() -> None:
    queue, data = gated(gather_s=1.0, pause_s=1.0, batch_requests=8)
    join(start(8, lambda n: queue.put(b"%d" % n)))
    assert data.syncs == 1


def test_a_handle_may_be_waited_for_twice() -> None:
    """Also one that stood at a gate behind another thread's round."""
    disk = FaultDisk()
    queue = open_queue(disk)
    handle = queue.submit([b"a"], wake_helper=False)
    handle.wait()
    handle.wait()
    assert contents(queue) == {1: b"a"}


def test_many_threads_each_hand_the_duty_on_exactly_once(tmp_path: Path) -> None:
    """After any number of rounds nobody leads and no duty is left over."""
    queue = DiskQueue(settings(data_path=tmp_path / "q", data_bytes=1 << 20, entries=4000))
    handles = []

    def produce() -> None:
        for number in range(30):
            queue.put(b"%d" % number)
            handle = queue.submit([b"s"], wake_helper=False)
            handle.wait()
            handle.wait()
            handles.append(handle)

    threads = [threading.Thread(target=produce) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(contents(queue)) == 24 * 60
    assert not queue._commit._busy
    queue.close()


HANDING_ON = ("_pass_on", "_next_gate", "let_go", "let_go_alone")  # the last duty: nobody is behind it


def interrupted_at(number: int, queue: DiskQueue, action: Callable[[], object]) -> bool:
    """Whether a KeyboardInterrupt at that line of the queue's code, counted from 1, ended the action.

    Not at the end of a ``with`` nor at a ``try`` in it, which no handler covers: Python does not look for
    signals there, but behind the call that unlocks.
    """
    seen, before = [0], sys.gettrace()
    ours = (queue_module.__file__, commit.__file__)

    def at_line(frame: FrameType, event: str, _arg: object) -> object:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        is_inside = line.startswith(("with ", "try:")) and queue._state.lock.locked()
        is_fixed = line == "self._pass_on()" or is_inside
        if event == "line" and not is_fixed:
            seen[0] += 1
            if seen[0] == number:
                sys.settrace(before)
                raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, _event: str, _arg: object) -> object:
        code = frame.f_code
        return at_line if code.co_filename in ours and code.co_name not in HANDING_ON else None

    sys.settrace(at_call)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("gather_s", [0.0, 1e-9], ids=["alone", "through the queue"])
def test_a_leader_interrupted_at_any_line_does_not_block_the_next(gather_s: float) -> None:
    """It hands its duty on, or, when it was about to write, poisons the queue at once."""
    went_on = poisoned = 0
    for number in range(1, 1000):
        disk = FaultDisk()
        queue = open_queue(disk, confirm_s=0.01, gather_s=gather_s, pause_s=0.0)
        queue.put(b"before")
        ended = interrupted_at(number, queue, lambda queue=queue: queue.put(b"interrupted"))
        try:
            queue.put(b"after")
        except QueuePoisoned:
            poisoned += 1
        else:
            went_on += 1
            assert list(contents(queue).values()) in (
                [b"before", b"after"],
                [b"before", b"interrupted", b"after"],
            )
            assert len(queue._state.ring.all()) == len(queue._state.records.live) == queue._state.index.in_use
        assert "no confirmation" not in queue.stat()["poisoned"], f"line {number}: nobody led"
        assert {b"before"} <= set(contents(open_queue(disk.after_kill())).values())
        if not ended:
            break
    assert went_on > 10
    assert poisoned > 2
    assert not ended, "every line was met"


def test_a_second_thread_may_not_wait_for_the_same_request() -> None:
    queue, data = gated()
    data.gated = True
    first = start(1, lambda n: queue.put(b"first"))
    assert data.entered.acquire(timeout=60)
    request = queue.submit([b"x"], wake_helper=False)
    waiter = start(1, lambda n: request.wait())
    until_pending(queue, 1)
    with pytest.raises(RuntimeError, match="another thread waits for records 2 to 2"):
        request.wait()
    data.go.release()
    data.go.release()
    join(first + waiter)
    assert list(contents(queue).values()) == [b"first", b"x"]
    data.gated = False
    queue.put(b"goes on")


@pytest.mark.parametrize("payloads", [[b"a", "b"], [b"a", None], [b"a", bytearray(b"c")]])
def test_what_is_no_bytes_is_refused_and_leaves_nothing(payloads: list[bytes]) -> None:
    queue = open_queue(FaultDisk())
    before = queue.stat()
    with pytest.raises(TypeError, match="payload 1 is"):
        queue.put_many(payloads)
    with pytest.raises(TypeError, match="payload 0 is"):
        queue.put(payloads[1])
    with pytest.raises(ValueError, match="kind = 70000"):
        queue.put(b"x", kind=70_000)
    assert queue.stat() == before
    assert queue.put(b"x") == 1
    assert (queue._state.index.in_use, queue._state.ring.write) == (1, 256)
