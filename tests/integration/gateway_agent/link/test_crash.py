"""kill -9 of the link at every point between asking a plane and saying "got": nothing lost, nothing doubled.

A kill is modelled by throwing the core away (its sockets with it) while the plane and the files stay.
"""

import os

import pytest

from gateway_agent.link.collection import CutSpooler, StreamNames
from gateway_agent.link.spool import Spool
from gateway_agent.sources.nbd import NbdSource
from pmdaemon.diskqueue.storage import FileStorage
from pmdaemon.wire import cut
from tests.support.link import Bench, FakePlane, abandon


class Killed(BaseException):
    """The process is no more."""


def kill(*_args, **_kwargs):
    raise Killed


def collect(bench):
    bench.core.collect_now()
    bench.carry()


def torn_write(self, offset, buffers):
    """Half of the record reaches the file, then the process dies."""
    data = b"".join(buffers)
    os.pwrite(self._fd, data[: len(data) // 2], offset)
    raise Killed


def synced_and_killed(self):
    os.fdatasync(self._fd)
    raise Killed


def spooled_reads(bench, tmp_path) -> int:
    abandon(bench.spool)
    spool = Spool(tmp_path / "spool", 1 << 20)
    total = sum(int(cut.decode(item.raw).column("reads").sum()) for item in spool.read_from(None))
    spool.close()
    return total


POINTS = {
    "before the question leaves": (NbdSource, "ask", kill),
    "answer received, not decoded": (NbdSource, "answered", kill),
    "answer decoded, nothing written": (CutSpooler, "spool", kill),
    "before the book of streams is saved": (StreamNames, "save", kill),
    "before the append": (Spool, "append", kill),
    "within the append": (FileStorage, "write", torn_write),
    "written, not synced": (FileStorage, "sync", kill),
    "synced, not heard": (FileStorage, "sync", synced_and_killed),
    "appended, got not moved": (NbdSource, "spooled", kill),
    "got moved, not yet told": (CutSpooler, "_spool_cut", None),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("cuts_before", [0, 2])
def test_a_killed_link_loses_nothing_and_doubles_nothing(tmp_path, monkeypatch, point, cuts_before):
    plane = FakePlane()
    bench = Bench(tmp_path, plane)
    for _ in range(cuts_before):
        plane.io(reads=1)
        collect(bench)
    plane.io(reads=10)
    owner, name, replacement = POINTS[point]
    if replacement is None:  # the append and the move succeed, then the process dies
        real = getattr(owner, name)

        def replacement(self, group):
            real(self, group)
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, replacement)
        with pytest.raises(Killed):
            collect(bench)
    plane.io(reads=100)
    for epoch in (43, 44):  # the next link, and one more that is killed while idle
        bench = Bench(tmp_path, plane, epoch=epoch)
        collect(bench)
    assert spooled_reads(bench, tmp_path) == cuts_before + 110 == plane.lifetime["vol-1"]


def test_a_link_killed_with_a_question_under_way_loses_nothing(tmp_path):
    plane = FakePlane()
    bench = Bench(tmp_path, plane)
    plane.io(reads=10)
    plane.answers = False
    collect(bench)  # the plane has cut, its answer never arrives
    plane.answers = True
    plane.io(reads=5)
    bench = Bench(tmp_path, plane, epoch=43)
    collect(bench)
    collect(bench)
    assert spooled_reads(bench, tmp_path) == 15


def test_two_planes_killed_between_their_two_cuts(tmp_path, monkeypatch):
    """Different intervals make two cuts; the first is spooled with its mark, the second is repeated."""
    one, two = FakePlane("nbd-0"), FakePlane("nbd-1", volumes=("vol-2",))
    two.clock = one.clock
    bench = Bench(tmp_path, one, two)
    collect(bench)
    two.answers = False
    one.io("vol-1", 3)
    two.io("vol-2", 4)
    one.clock.advance(1)
    collect(bench)
    bench.pass_time(0.2)
    two.answers = True
    bench.carry()
    one.io("vol-1", 30)
    one.clock.advance(1)
    real, calls = CutSpooler._spool_cut, []

    def second_dies(self, group):
        calls.append(group)
        if len(calls) == 2:
            raise Killed
        return real(self, group)

    monkeypatch.setattr(CutSpooler, "_spool_cut", second_dies)
    with pytest.raises(Killed):
        collect(bench)
    monkeypatch.undo()
    bench = Bench(tmp_path, one, two, epoch=43)
    collect(bench)
    assert spooled_reads(bench, tmp_path) == 37


def test_an_acknowledged_spool_still_knows_what_the_plane_need_not_repeat(tmp_path):
    plane = FakePlane()
    bench = Bench(tmp_path, plane)
    bench.connect_server()
    plane.io(reads=8)
    bench.poll(start=(42, 1))
    bench.spool.forget(42, 1)
    restarted = Bench(tmp_path, plane, epoch=43)
    restarted.connect_server()
    restarted.poll(ack=[(42, 1)], start=(43, 1))
    assert restarted.server.reads() == 0
