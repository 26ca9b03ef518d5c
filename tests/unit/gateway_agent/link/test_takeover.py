"""A plane whose next process takes over: the link collects from both, and each I/O is in one cut."""

import pytest

from gateway_agent.errors import PlaneLost
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.plane_marks import rows_by_plane
from tests.support.link import EPOCH, Bench, FakePlane, caps

FORMER = "nbd-0.9"


class Upgrade:
    """A bench whose plane hands over."""

    def __init__(self, folder):
        self.folder = folder
        self.former = FakePlane()
        self.bench = Bench(folder, self.former)
        self.bench.connect_server()
        self.next = FakePlane(clock=self.bench.clock)
        self.next._next_id = 5000

    def hand_over(self):
        self.former.has_handed_over = True
        said = frame.decode(self.former.hello()).header | {"leaving": FORMER}
        with pytest.raises(PlaneLost, match="another process serves now"):
            self.bench.core.plane_data("nbd-0", frame.encode(Kind.DP_HELLO, said))
        self.bench.core.plane_lost("nbd-0", "it handed over")
        self.former.name = FORMER
        self.former.commands.clear()
        self.bench.fakes = {"nbd-0": self.next, FORMER: self.former}

    def connect(self):
        for plane in self.bench.fakes.values():
            self.bench.connect_plane(plane)

    def collects(self, plane):
        return [header["got"] for kind, header in plane.commands if kind is Kind.DP_COLLECT]

    def end_former(self):
        self.bench.core.plane_data(FORMER, self.former.stop())
        self.bench.carry()
        assert self.former.is_emptied
        self.bench.core.plane_lost(FORMER, "it has everything")
        del self.bench.fakes[FORMER]


@pytest.fixture
def change(tmp_path):
    return Upgrade(tmp_path)


def alerts(bench):
    return bench.server.headers.get(Kind.ALERT, [])


def test_both_processes_are_collected_and_nothing_is_counted_twice(change):
    bench = change.bench
    change.former.io(reads=3)
    bench.poll(start=(EPOCH, 1))
    change.former.io(reads=2)
    change.hand_over()
    change.connect()
    change.former.io(reads=1)
    change.next.io(reads=10)
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 2))
    assert bench.server.reads() == 16
    assert change.collects(change.former)[0] == 1001, "what the spool has under the plane's own name"
    newest = bench.server.cuts[bench.server.order[-1]]
    assert newest.extra["dp"] == {"nbd-0": 5001, FORMER: 1002}
    rows = rows_by_plane(newest.extra["of"], newest.rows)
    assert {name: found.tolist() for name, found in rows.items()} == {"nbd-0": [0], FORMER: []}, (
        "its streams stay those of the plane"
    )
    change.former.io(reads=4)
    change.end_former()
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, bench.server.order[-1][1] + 1))
    assert bench.server.reads() == 20
    assert bench.server.cuts[bench.server.order[-1]].extra["dp"].keys() == {"nbd-0"}
    assert alerts(bench) == [], "nothing has died"


def test_caps_reach_both_and_are_confirmed_by_both(change):
    bench = change.bench
    bench.poll(start=(EPOCH, 1))
    change.hand_over()
    change.connect()
    change.former.answers = False
    bench.say(caps(7))
    assert Kind.CAPS_ACK not in bench.server.kinds
    change.former.answers = True
    bench.pass_time(1)
    bench.poll()
    bench.pass_time(1)
    bench.poll()
    assert bench.server.last(Kind.CAPS_ACK)["ok"]
    assert (change.former.cap_gen, change.next.cap_gen) == (7, 7)


def test_both_have_a_part_of_a_group_from_the_first(change):
    bench = change.bench
    bench.poll(start=(EPOCH, 1))
    group = {"group": "night", "volumes": {"vol-1": 1.0}, "ops_per_s": 100.0}
    bench.say(frame.encode(Kind.CAPS, {"gen": 7, "lease_us": 30_000_000, "caps": [], "groups": [group]}))
    change.hand_over()
    change.connect()
    for plane in (change.former, change.next):
        sets = [header["groups"] for kind, header in plane.commands if kind is Kind.DP_CAPS]
        assert [entry["ops_per_s"] for entry in sets[-1]] == [50.0]
        assert all(sets), "at no moment there is none"


def test_the_volumes_are_those_of_the_next_process(change):
    change.bench.poll()
    change.next.volumes = ("vol-1", "vol-2")
    change.hand_over()
    change.connect()
    exports = change.bench.server.last(Kind.REGISTER)["exports"]
    assert [export["volume"] for export in exports] == ["vol-1", "vol-2"]
    registrations = len(change.bench.server.headers[Kind.REGISTER])
    change.end_former()
    assert len(change.bench.server.headers[Kind.REGISTER]) == registrations


@pytest.mark.parametrize("knew_before", [False, True])
def test_a_link_that_dies_then_neither_loses_nor_repeats_a_cut(change, knew_before):
    """``knew_before``: the next link starts before the parent has seen that one process took over."""
    change.former.io(reads=3)
    change.bench.poll(start=(EPOCH, 1))
    change.former.io(reads=2)
    change.former.has_handed_over, change.former.name = True, FORMER
    change.former.commands.clear()
    bench = Bench(change.folder, clock=change.bench.clock, epoch=43)
    if knew_before:
        bench.core.follow_former([], [FORMER])
    bench.core.replan({"nbd-0": ["vol-1"]}, {})
    change.next.clock = change.former.clock = bench.clock
    bench.fakes = {"nbd-0": change.next}
    bench.connect_server()
    bench.connect_plane(change.next)
    if knew_before:  # the next process's ids are the plane's, before the former one is known
        change.next.io(reads=1)
        bench.poll(start=(43, 1))
    bench.core.follow_former([FORMER], [])
    bench.fakes[FORMER] = change.former
    bench.connect_plane(change.former)
    bench.clock.advance(1)
    bench.poll(start=(43, 1))
    bench.poll(start=(43, bench.server.order[-1][1] + 1))
    assert change.collects(change.former)[0] == 1001
    assert bench.server.reads() == 2 + knew_before


def test_a_former_process_that_is_gone_is_named_no_more(change):
    core = change.bench.core
    core.follow_former([FORMER], [])
    assert FORMER in core.planes
    core.follow_former([FORMER], [])
    core.replan({"nbd-0": ["vol-1"]}, {})
    assert FORMER in core.planes, "it is no plane of the file, and stays"
    core.follow_former([], [])
    assert list(core.planes) == ["nbd-0"]


def test_one_reload_is_reported_once_however_often_the_parent_calls(change):
    record = {"number": 3, "state": "applied", "changes": ["exports added: b"]}
    change.bench.poll()
    for _ in range(2):
        change.bench.core.reload_ended(record)
    change.bench.carry()
    assert [alert["kind"] for alert in alerts(change.bench)] == ["reloaded"]


def test_a_former_process_that_dies_is_an_alert(change):
    change.bench.poll()
    change.hand_over()
    change.connect()
    change.bench.core.plane_lost(FORMER, "connection reset")
    del change.bench.fakes[FORMER]
    change.bench.carry()
    died, ended = alerts(change.bench)
    assert (died["kind"], died["severity"], ended["kind"]) == ("plane-died", "critical", "plane-back")
    assert "nbd-0.9, which let its clients go, is gone" in died["text"]
    assert ended["text"] == "nbd-0.9 is served no more: nothing is left to mend"
    assert list(change.bench.core.planes) == ["nbd-0"]
