"""Random histories against a dict: adds, deletes, locks, retries, index syncs, restarts and power losses."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.diskqueue.errors import QueueFull
from tests.support.diskqueue import contents, open_queue
from tests.support.faulty_disk import FaultDisk

sizes = st.one_of(st.integers(0, 300), st.sampled_from([199, 200, 201, 456, 1200, 3000]))
steps = st.one_of(
    st.tuples(st.just("put"), sizes),
    st.tuples(st.just("put_many"), st.lists(sizes, min_size=1, max_size=5)),
    st.tuples(st.just("delete"), st.integers(0, 11)),
    st.tuples(st.just("oldest"), st.just(0)),
    st.tuples(st.just("retry"), st.just(0)),
    st.tuples(st.just("sync"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("power"), st.integers(0, 1000)),
    st.tuples(st.just("kill"), st.just(0)),
)


class Model:
    """The queue beside a dict; ``came_back`` holds what was deleted since the index was last synced."""

    def __init__(self) -> None:
        self.disk = FaultDisk()
        self.queue = open_queue(self.disk)
        self.live: dict[int, bytes] = {}
        self.since: dict[int, bytes] = {}
        self.newest = 0
        self.rejected = 0

    def add(self, lengths: list[int]) -> None:
        payloads = [random.Random(self.newest + n).randbytes(size) for n, size in enumerate(lengths)]
        before = self.queue.stat()
        try:
            seqs = self.queue.put_many(payloads)
        except QueueFull:
            self.rejected += 1
            after = self.queue.stat()
            assert {**before, "rounds": 0} == {**after, "rounds": 0}
            return
        assert seqs[0] > self.newest
        self.newest = seqs[-1]
        self.live.update(zip(seqs, payloads, strict=True))

    def delete(self, place: int) -> None:
        if self.live:
            seq = sorted(self.live)[place % len(self.live)]
            held = self.queue.lock(1000, most_bytes=1 << 30)
            assert [message.seq for message in held] == sorted(self.live)
            self.queue.delete([seq])
            self.queue.unlock([message.seq for message in held if message.seq != seq])
            self.since[seq] = self.live.pop(seq)

    def retry(self) -> None:
        for message in self.queue.lock(1):
            self.queue.retry(message.seq)

    def reopen(self, disk: FaultDisk, clean: bool) -> None:
        self.disk = disk
        self.queue = open_queue(disk)
        found = contents(self.queue)
        for seq, data in found.items():
            assert self.live.get(seq, self.since.get(seq)) == data, "invented or changed"
        assert self.live.keys() <= found.keys(), "lost"
        if clean:
            assert found == self.live
        assert not self.queue.report.extents
        self.live = found
        self.since.clear()

    def step(self, kind: str, value: object) -> None:
        if kind == "put":
            assert isinstance(value, int)
            self.add([value])
        elif kind == "put_many":
            assert isinstance(value, list)
            self.add(value)
        elif kind in ("delete", "oldest"):
            assert isinstance(value, int)
            self.delete(value)
        elif kind == "retry":
            self.retry()
        elif kind == "sync":
            self.queue.sync_index()
            self.since.clear()
        elif kind == "restart":
            self.queue.close()
            self.reopen(self.disk, clean=True)
        elif kind == "power":
            assert isinstance(value, int)
            self.reopen(self.disk.after_crash(random.Random(value)), clean=False)
        else:
            self.reopen(self.disk.after_kill(), clean=False)
        assert contents(self.queue) == self.live
        assert self.queue.stat()["records"] == len(self.live)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_any_history_agrees_with_a_dict(history: list[tuple[str, object]]) -> None:
    model = Model()
    for kind, value in history:
        model.step(kind, value)
    assert contents(model.queue) == model.live


def test_long_run_wraps_skips_and_rejects() -> None:
    rng, model = random.Random(7), Model()
    for _ in range(3000):
        choice = rng.random()
        if choice < 0.5:
            model.step("put_many", [rng.choice([0, 100, 200, 500, 900]) for _ in range(rng.randint(1, 3))])
        elif choice < 0.93:
            model.step("delete", rng.choice([0, 0, 1, 5]))
        else:
            model.step(rng.choice(["sync", "power", "kill", "restart"]), rng.randint(0, 99))
        if model.queue.stat()["skips"]:
            model.skipped = True  # type: ignore[attr-defined]
    assert model.rejected > 20
    assert getattr(model, "skipped", False)
    assert model.newest > 1000
