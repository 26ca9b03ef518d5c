"""Groups of volumes under one cap, on a fake clock: shares, weights, what is left unused, changes."""

from __future__ import annotations

from collections import deque

import pytest

from gateway_agent.config import ExportConfig
from gateway_agent.nbd.caps import NO_GROUPS, CapsInForce
from gateway_agent.nbd.groups import CONFIGURED, SERVER, GroupTable
from gateway_agent.nbd.volume import Volume
from pmdaemon.errors import BadCaps
from pmdaemon.wire.messages.plane_sets import PlaneCaps, VolumeGroupCap
from pmdaemon.wire.rates import NO_CAPS, Rates, RateSet
from tests.support.nbd import HOLD_NS, MIB, Rig, admit_within

SECOND = 10**9
TAU_NS = 20_000_000
BURST = 3  # I/Os of the burst depth, and one that is admitted at the last moment


class Connection:
    """``depth`` requests outstanding; one that is let through is followed by another after ``pause_s``."""

    client = "host-a"
    is_closed = False

    def __init__(self, stage, depth=64, size_bytes=4096, pause_s=0.0):
        self.stage, self.size_bytes, self.pause_ns = stage, size_bytes, round(pause_s * SECOND)
        self.admitted, self.waits, self.volume = 0, [], None
        self.queue = deque([stage.now_ns()] * depth)

    def head_arrived_ns(self):
        return self.queue[0] if self.queue else None

    def head_charge(self):
        return self.size_bytes, 1.0 + self.size_bytes / 65_536

    def admit_head(self, now_ns):
        self.waits.append(now_ns - self.queue.popleft())
        self.admitted += 1
        if self.pause_ns:
            self.stage.rig.loop.at(self, now_ns + self.pause_ns, self.again)
        else:
            self.queue.append(now_ns)

    def again(self, now_ns):
        self.queue.append(now_ns)
        self.volume.serve(self, now_ns)

    def admit_all(self, now_ns):
        while self.queue and len(self.waits) < 100_000:
            self.admit_head(now_ns)
            if not self.pause_ns:
                self.queue.pop()

    def admit_within(self, now_ns, allowance):
        admit_within(self, now_ns, allowance)

    def push(self, _now_ns):
        pass

    def unblock(self):
        return False

    @property
    def bytes(self):
        return self.admitted * self.size_bytes


class Stage:
    """Volumes of a plane, and its groups."""

    def __init__(self, *names):
        self.rig = Rig()
        self.table = GroupTable(self.rig.loop, TAU_NS)
        self.volumes = {name: self.volume(name) for name in names}

    def volume(self, name):
        export = ExportConfig(volume=name, backend="disk", upstream="nbd://127.0.0.1/x")
        return Volume(export, RateSet(TAU_NS), self.rig.context, HOLD_NS)

    def now_ns(self):
        return self.rig.clock.monotonic_ns()

    def cap(self, rates, weights=None, group="night"):
        weights = weights or dict.fromkeys(self.volumes, 1.0)
        caps = {} if rates is None else {group: VolumeGroupCap(rates, weights)}
        self.apply(caps)

    def apply(self, server, configured=NO_GROUPS):
        caps = CapsInForce({}, configured)
        caps.apply(PlaneCaps(1, 10**9, {}, {}, server, {}), 0)
        self.table.apply(caps.groups, self.volumes, self.now_ns())

    def serve(self, name, **what):
        made = Connection(self, **what)
        made.volume = self.volumes[name]
        made.volume.serve(made, self.now_ns())
        return made

    def run(self, seconds):
        self.rig.loop.fire(seconds)


def test_volumes_of_a_group_share_its_rate_equally_whatever_their_depth():
    stage = Stage("a", "b", "c")
    stage.cap(Rates(ops_per_s=100))
    busy = [stage.serve(name, depth=depth) for name, depth in (("a", 1), ("b", 512), ("c", 8))]
    stage.run(20)
    counts = [each.admitted for each in busy]
    assert 1990 <= sum(counts) <= 2000 + BURST
    assert max(counts) - min(counts) <= BURST


def test_weights_divide_what_all_of_them_wait_for():
    stage = Stage("a", "b", "c")
    stage.cap(Rates(ops_per_s=120), {"a": 3.0, "b": 2.0, "c": 1.0})
    a, b, c = (stage.serve(name) for name in "abc")
    stage.run(20)
    assert a.admitted == pytest.approx(1200, abs=5)
    assert b.admitted == pytest.approx(800, abs=5)
    assert c.admitted == pytest.approx(400, abs=5)


def test_what_a_volume_does_not_use_the_others_have_by_weight():
    stage = Stage("a", "b", "c")
    stage.cap(Rates(ops_per_s=120), {"a": 3.0, "b": 2.0, "c": 1.0})
    light = stage.serve("a", depth=1, pause_s=0.1)  # 10 a second, of 60 that are its share
    b, c = stage.serve("b"), stage.serve("c")
    stage.run(20)
    assert light.admitted == pytest.approx(200, rel=0.1)
    assert b.admitted + c.admitted == pytest.approx(2400 - light.admitted, abs=BURST + 5)
    assert b.admitted == pytest.approx(2 * c.admitted, rel=0.02)
    assert max(light.waits) <= SECOND // 20, "whoever asks for less than its share is hardly held"


def test_a_group_of_bytes_is_shared_by_bytes_and_not_by_requests():
    stage = Stage("large", "small")
    stage.cap(Rates(bytes_per_s=10e6))
    large = stage.serve("large", depth=4, size_bytes=4 * MIB)
    small = stage.serve("small", depth=64, size_bytes=64 * 1024)
    stage.run(60)
    assert large.bytes + small.bytes == pytest.approx(600e6, rel=0.02)
    assert large.bytes == pytest.approx(small.bytes, rel=0.05)


def test_a_large_request_of_one_volume_does_not_take_the_second_of_another():
    stage = Stage("large", "small")
    stage.cap(Rates(bytes_per_s=32e6))
    small = stage.serve("small", depth=1, pause_s=0.01)
    stage.run(1)
    stage.serve("large", depth=4, size_bytes=32 * MIB)
    small.waits.clear()
    stage.run(30)
    assert max(small.waits) <= SECOND // 10, "of a second that each large request takes"
    assert len(small.waits) > 1500


def test_a_members_own_cap_holds_beside_that_of_its_group():
    stage = Stage("a", "b")
    stage.cap(Rates(ops_per_s=100))
    stage.volumes["a"].set_caps(Rates(ops_per_s=10), stage.now_ns())
    a, b = stage.serve("a"), stage.serve("b")
    stage.run(20)
    assert a.admitted == pytest.approx(200, abs=BURST)
    assert b.admitted == pytest.approx(1800, abs=10)


def test_another_rate_holds_at_once_for_what_is_held_and_its_end_lets_go():
    stage = Stage("a", "b")
    stage.cap(Rates(ops_per_s=1))
    a, b = stage.serve("a", depth=8), stage.serve("b", depth=8)
    stage.run(3)
    assert a.admitted + b.admitted <= 4
    stage.cap(Rates(ops_per_s=1000))
    before = a.admitted + b.admitted
    stage.run(0.5)
    assert a.admitted + b.admitted - before == pytest.approx(500, abs=25)
    stage.cap(None)
    assert not a.queue
    assert not b.queue
    assert stage.rig.loop.timers == {}, "nothing waits for a group that is not there"


def test_a_volume_that_leaves_its_group_is_free_and_the_other_has_its_share():
    stage = Stage("a", "b")
    stage.cap(Rates(ops_per_s=10))
    a, b = stage.serve("a", depth=4), stage.serve("b", depth=4)
    stage.run(2)
    stage.cap(Rates(ops_per_s=10), {"b": 1.0})
    assert not a.queue
    before = b.admitted
    stage.run(10)
    assert b.admitted - before == pytest.approx(100, abs=BURST)


def test_a_volume_of_the_group_that_is_not_here_takes_nothing():
    stage = Stage("a")
    stage.cap(Rates(ops_per_s=10), {"a": 1.0, "elsewhere": 9.0})
    a = stage.serve("a")
    stage.run(10)
    assert a.admitted == pytest.approx(100, abs=BURST)
    assert [group.key for group in stage.table.of(stage.volumes["a"])] == [(SERVER, "night")]


def test_what_a_group_holds_for_too_long_is_said_of_each_volume():
    stage = Stage("a", "b")
    stage.cap(Rates(ops_per_s=1))
    stage.serve("a"), stage.serve("b")
    stage.run(20)
    for volume in stage.volumes.values():
        late = volume.take_late(stage.now_ns())
        assert late is not None
        assert late[1] > 5_000_000


def test_a_burst_lets_so_much_pass_at_once_after_a_pause_and_the_rate_holds_behind_it():
    stage = Stage("a")
    stage.cap(Rates(ops_per_s=10, burst_s=3.0))
    a = stage.serve("a")
    assert a.admitted == pytest.approx(30, abs=1)
    stage.run(60)
    assert a.admitted == pytest.approx(630, abs=2)


def entry(group="g", volumes=None, **rates):
    return {"group": group, "volumes": volumes or {"v": 1}, **(rates or {"ops_per_s": 5})}


def header(*groups, gen=1):
    return {"gen": gen, "lease_us": 30_000_000, "caps": [], "groups": list(groups)}


def test_a_set_names_groups_and_its_lease_ends_them():
    caps = CapsInForce({})
    said = header(entry(volumes={"v": 2, "w": 1.5}, bytes_per_s=1e6, burst_s=2))
    assert caps.apply(PlaneCaps.parse(said), 0) == 1
    expected = VolumeGroupCap(Rates(bytes_per_s=1e6, burst_s=2.0), {"v": 2.0, "w": 1.5})
    assert caps.groups == {(SERVER, "g"): expected}
    assert caps.of("v") == NO_CAPS
    assert caps.expire(30 * SECOND)
    assert caps.groups == {}
    caps.apply(PlaneCaps.parse(header(entry())), 0)
    caps.apply(PlaneCaps.parse({"gen": 2, "lease_us": 30_000_000, "caps": []}), 0)
    assert caps.groups == {}, "a set without groups caps none"


def test_processes_of_one_plane_have_equal_parts_of_every_cap():
    caps = CapsInForce({"v": Rates(ops_per_s=100.0)}, {"g": VolumeGroupCap(Rates(cost_per_s=8), {"v": 1.0})})
    said = header(entry(ops_per_s=90, burst_s=2)) | {
        "caps": [{"volume": "w", "bytes_per_s": 4e6}],
        "clients": [{"volume": "v", "client": "c", "ops_per_s": 30}],
    }
    caps.apply(PlaneCaps.parse(said), 0)

    def in_force():
        groups = [caps.groups[origin, "g"].rates for origin in (SERVER, CONFIGURED)]
        return [caps.of("v"), caps.of("w"), caps.of_clients("v")["c"], *groups]

    whole = in_force()
    caps.processes = 2
    assert [each.scaled(2) for each in in_force()] == whole
    assert caps.groups[SERVER, "g"].weights == {"v": 1.0}


@pytest.mark.parametrize(
    "groups",
    [
        "g",
        [7],
        [{"volumes": {"v": 1}, "ops_per_s": 1}],
        [{"group": "g", "ops_per_s": 1}],
        [{"group": "g", "volumes": {}, "ops_per_s": 1}],
        [{"group": "g", "volumes": {"v": 1}}],
        [entry(volumes={"v": 0})],
        [entry(volumes={"v": "much"})],
        [entry(ops_per_s=0)],
        [entry(ops_per_s=1, burst_s=-1)],
        [entry(), entry()],
        [entry(), entry("h")],
    ],
)
def test_a_malformed_list_of_groups_changes_nothing(groups):
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(header(entry())), 0)
    with pytest.raises(BadCaps, match="caps 2"):
        caps.apply(PlaneCaps.parse({"gen": 2, "lease_us": 1, "caps": [], "groups": groups}), 0)
    assert (caps.generation, list(caps.groups)) == (1, [(SERVER, "g")])


def test_what_a_volume_of_a_group_owes_takes_turns_with_a_volume_that_begins_behind_it():
    stage = Stage("a", "b")
    stage.cap(Rates(bytes_per_s=1e6))
    large = stage.serve("a", depth=2, size_bytes=4096 * MIB)
    assert large.admitted == 1, "alone in its group it passes at once"
    stage.run(1)
    other = stage.serve("b", size_bytes=65_536)
    stage.run(60)
    assert large.admitted == 1
    assert other.bytes == pytest.approx(60e6 / 2, rel=0.05)
    stage.cap(None)
    assert large.admitted > 1, "without the cap nothing is owed"


def test_a_group_that_goes_and_returns_gives_no_second_burst():
    stage = Stage("a")
    stage.cap(Rates(ops_per_s=10, burst_s=10.0))
    assert stage.serve("a").admitted == 101
    stage.cap(None)
    stage.cap(Rates(ops_per_s=10, burst_s=10.0))
    assert stage.serve("a").admitted == 1


def test_a_volume_that_comes_while_another_is_served_in_batches_waits_for_no_batch_and_overtakes_none():
    stage = Stage("a", "b")
    stage.cap(Rates(ops_per_s=100, burst_s=10.0))
    first = stage.serve("a", depth=8)  # takes the whole burst at once
    second = stage.serve("b", depth=8)
    before = first.admitted
    assert before == 1001
    stage.run(4)
    assert second.admitted == pytest.approx(200, abs=BURST)
    assert first.admitted - before == pytest.approx(200, abs=BURST)


def test_a_volume_in_two_groups_keeps_to_both_and_the_others_have_what_it_leaves():
    stage = Stage("a", "b", "c")
    server = {"night": VolumeGroupCap(Rates(ops_per_s=30), {"a": 1.0, "c": 1.0})}
    configured = {"night": VolumeGroupCap(Rates(ops_per_s=100), {"a": 1.0, "b": 1.0})}
    stage.apply(server, configured)
    a, b, c = (stage.serve(name, depth=16) for name in "abc")
    stage.run(20)
    assert a.admitted == pytest.approx(300, abs=2 * BURST), "half of what the server lets pass"
    assert c.admitted == pytest.approx(300, abs=2 * BURST)
    assert a.admitted + b.admitted == pytest.approx(2000, abs=2 * BURST)
    stage.apply({}, configured)
    before = a.admitted, b.admitted
    stage.run(20)
    assert a.admitted - before[0] == pytest.approx(1000, abs=2 * BURST)
    assert b.admitted - before[1] == pytest.approx(1000, abs=2 * BURST)


def test_a_lease_that_ends_leaves_the_groups_of_the_configuration():
    caps = CapsInForce({}, {"g": VolumeGroupCap(Rates(ops_per_s=5.0), {"v": 1.0})})
    caps.apply(PlaneCaps.parse(header(entry())), 0)
    assert list(caps.groups) == [(SERVER, "g"), (CONFIGURED, "g")]
    assert caps.expire(30 * SECOND)
    assert list(caps.groups) == [(CONFIGURED, "g")]
