"""Caps of whole clients, on a fake clock: one rate over all volumes of a plane; other clients go on."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from gateway_agent.config import ExportConfig
from gateway_agent.nbd.caps import CapsInForce
from gateway_agent.nbd.groups import SERVER, GroupTable
from gateway_agent.nbd.volume import Volume
from pmdaemon.errors import BadCaps
from pmdaemon.wire.messages.plane_sets import PlaneCaps, VolumeGroupCap
from pmdaemon.wire.rates import NO_CAPS, Rates, RateSet
from tests.support.nbd import HOLD_NS, MIB, Rig, admit_within

SECOND = 10**9
TAU_NS = 20_000_000
BURST = 3  # I/Os of the burst depth, and one that is admitted at the last moment


class Connection:
    """Of a client to a volume, with ``depth`` requests outstanding; it is ``idle`` once no cap holds it."""

    is_closed = False

    def __init__(self, stage, client, volume, depth=16, size_bytes=4096):
        self.stage, self.client, self.volume = stage, client, stage.volumes[volume]
        self.size_bytes, self.admitted, self.is_idle = size_bytes, 0, False
        self.queue = deque([stage.now_ns()] * depth)
        self.volume.sessions.add(self)
        self.volume.serve(self, stage.now_ns())

    def head_arrived_ns(self):
        return self.queue[0] if self.queue else None

    def head_charge(self):
        return self.size_bytes, 1.0 + self.size_bytes / 65_536

    def admit_head(self, now_ns):
        self.queue.popleft()
        self.admitted += 1
        self.queue.append(now_ns)

    def admit_all(self, _now_ns):
        self.is_idle = True
        self.admitted += len(self.queue)
        self.queue.clear()

    def admit_within(self, now_ns, allowance):
        admit_within(self, now_ns, allowance)

    def push(self, _now_ns):
        pass

    def unblock(self):
        return False


class Stage:
    """Volumes of a plane, and what holds for its clients."""

    def __init__(self, *names):
        self.rig = Rig()
        self.table = GroupTable(self.rig.loop, TAU_NS)
        self.volumes = {}
        self.caps = CapsInForce({})
        for name in names:
            self.add(name)

    def add(self, name):
        export = ExportConfig(volume=name, backend="disk", upstream="nbd://127.0.0.1/x")
        self.volumes[name] = Volume(export, RateSet(TAU_NS), self.rig.context, HOLD_NS)

    def now_ns(self):
        return self.rig.clock.monotonic_ns()

    def apply(self, clients, groups=None, volumes=None, of_volumes=None):
        found = PlaneCaps(1, 30 * SECOND, volumes or {}, of_volumes or {}, groups or {}, {}, clients)
        self.caps.apply(found, self.now_ns())
        self.enforce()

    def enforce(self):
        for name, volume in self.volumes.items():
            volume.set_caps(self.caps.of(name), self.now_ns(), self.caps.of_clients(name))
        self.table.apply(self.caps.groups, self.volumes, self.now_ns(), self.caps.whole_clients)

    def run(self, seconds):
        self.rig.loop.fire(seconds)


def test_a_client_has_one_rate_over_all_its_volumes_and_each_has_an_equal_share():
    stage = Stage("a", "b", "c")
    stage.apply({"greedy": Rates(ops_per_s=90)})
    one, two, three = (Connection(stage, "greedy", name, depth=2**at) for at, name in enumerate("abc"))
    again = Connection(stage, "greedy", "c")
    stage.run(20)
    counts = [one.admitted, two.admitted, three.admitted + again.admitted]
    assert 1790 <= sum(counts) <= 1800 + BURST
    assert max(counts) - min(counts) <= 2 * BURST
    assert three.admitted == pytest.approx(again.admitted, abs=BURST)


def test_other_clients_of_its_volumes_are_not_held():
    stage = Stage("a", "b")
    stage.apply({"greedy": Rates(ops_per_s=10)})
    greedy = [Connection(stage, "greedy", name) for name in "ab"]
    other = Connection(stage, "other", "a")
    assert other.is_idle, "no rate is asked for it"
    stage.run(10)
    assert sum(each.admitted for each in greedy) == pytest.approx(100, abs=BURST)


def test_connections_of_a_client_share_its_rate_while_another_client_is_served_more_often():
    stage = Stage("a", "b")
    stage.apply({"slow": Rates(ops_per_s=20), "fast": Rates(ops_per_s=200)})
    one, two, there = (Connection(stage, "slow", name) for name in "aab")
    fast = [Connection(stage, "fast", name) for name in "ab"]
    stage.run(20)
    assert one.admitted + two.admitted + there.admitted == pytest.approx(400, abs=BURST)
    assert one.admitted == pytest.approx(two.admitted, abs=2 * BURST)
    assert there.admitted == pytest.approx(200, abs=2 * BURST)
    assert sum(each.admitted for each in fast) == pytest.approx(4000, abs=2 * BURST)


def test_two_clients_have_a_rate_each():
    stage = Stage("a", "b")
    stage.apply({"one": Rates(ops_per_s=100), "two": Rates(ops_per_s=30)})
    ones = [Connection(stage, "one", name) for name in "ab"]
    twos = [Connection(stage, "two", name) for name in "ab"]
    stage.run(10)
    assert sum(each.admitted for each in ones) == pytest.approx(1000, abs=2 * BURST)
    assert sum(each.admitted for each in twos) == pytest.approx(300, abs=2 * BURST)


@pytest.mark.parametrize(("whole", "here"), [(100, 10), (10, 100)])
def test_of_its_rate_here_and_that_over_all_volumes_the_tighter_one_holds(whole, here):
    stage = Stage("a", "b")
    stage.apply({"c": Rates(ops_per_s=whole)}, of_volumes={"a": {"c": Rates(ops_per_s=here)}})
    a, b = Connection(stage, "c", "a"), Connection(stage, "c", "b")
    stage.run(20)
    assert a.admitted + b.admitted == pytest.approx(20 * whole, abs=2 * BURST)
    assert a.admitted <= 20 * here + BURST
    assert b.admitted == pytest.approx(20 * whole - a.admitted, abs=2 * BURST)


def test_what_a_volumes_own_rate_holds_back_the_other_volumes_have():
    stage = Stage("a", "b")
    stage.apply({"c": Rates(ops_per_s=100)}, volumes={"a": Rates(ops_per_s=20)})
    rival = Connection(stage, "rival", "a")
    a, b = Connection(stage, "c", "a"), Connection(stage, "c", "b")
    stage.run(20)
    assert a.admitted + rival.admitted == pytest.approx(400, abs=2 * BURST)
    assert a.admitted == pytest.approx(rival.admitted, abs=2 * BURST), "equal shares of the volume"
    assert a.admitted + b.admitted == pytest.approx(2000, abs=3 * BURST)


def test_a_client_and_a_group_hold_both():
    stage = Stage("a", "b", "c")
    groups = {"g": VolumeGroupCap(Rates(ops_per_s=50), {"a": 1.0, "b": 1.0})}
    stage.apply({"c": Rates(ops_per_s=30)}, groups)
    own = [Connection(stage, "c", name) for name in "abc"]
    rival = Connection(stage, "rival", "a")
    stage.run(20)
    assert sum(each.admitted for each in own) == pytest.approx(600, abs=3 * BURST)
    in_group = own[0].admitted + own[1].admitted + rival.admitted
    assert in_group == pytest.approx(1000, abs=3 * BURST)
    assert min(each.admitted for each in own) >= 100, "none of its volumes starves"
    assert [group.key for group in stage.table.of(stage.volumes["a"])] == [(SERVER, "g")]


def test_a_burst_passes_at_once_over_all_volumes_together_and_the_rate_holds_behind_it():
    stage = Stage("a", "b")
    stage.apply({"c": Rates(ops_per_s=10, burst_s=10.0)})
    a, b = (Connection(stage, "c", name, depth=64) for name in "ab")
    assert a.admitted + b.admitted == pytest.approx(100, abs=BURST)
    stage.run(20)
    assert a.admitted + b.admitted == pytest.approx(300, abs=BURST)
    stage.apply({})
    stage.apply({"c": Rates(ops_per_s=10, burst_s=10.0)})
    again = Connection(stage, "c", "a", depth=64)
    assert again.admitted <= BURST, "a cap that goes and returns gives no second burst"


def test_another_rate_holds_at_once_for_what_is_held_and_its_end_lets_go():
    stage = Stage("a", "b")
    stage.apply({"c": Rates(ops_per_s=1)})
    a, b = (Connection(stage, "c", name) for name in "ab")
    stage.run(3)
    assert a.admitted + b.admitted <= 4
    stage.apply({"c": Rates(ops_per_s=1000)})
    before = a.admitted + b.admitted
    stage.run(1)
    assert a.admitted + b.admitted - before == pytest.approx(1000, abs=25)
    stage.apply({})
    assert not a.queue
    assert not b.queue
    assert stage.rig.loop.timers == {}, "nothing waits for a cap that is not there"


def test_the_lease_ends_it():
    stage = Stage("a", "b")
    stage.apply({"c": Rates(ops_per_s=1)})
    a, b = (Connection(stage, "c", name) for name in "ab")
    stage.run(29)
    assert stage.caps.whole_clients == {"c": Rates(ops_per_s=1)}
    assert a.queue
    assert b.queue
    stage.run(2)
    assert stage.caps.expire(stage.now_ns())
    stage.enforce()
    assert (a.is_idle, b.is_idle, stage.caps.whole_clients) == (True, True, {})


def test_a_volume_that_comes_is_under_the_cap_and_one_that_goes_leaves_its_share():
    stage = Stage("a")
    stage.apply({"c": Rates(ops_per_s=10)})
    a = Connection(stage, "c", "a")
    stage.add("b")
    stage.enforce()
    b = Connection(stage, "c", "b")
    stage.run(20)
    assert a.admitted + b.admitted == pytest.approx(200, abs=BURST)
    gone = stage.volumes.pop("a")
    stage.enforce()
    assert gone.whole_clients == {}
    before = b.admitted
    stage.run(20)
    assert b.admitted - before == pytest.approx(200, abs=BURST)


def test_a_rate_of_bytes_holds_for_requests_that_are_large_against_it():
    stage = Stage("a", "b")
    stage.apply({"c": Rates(bytes_per_s=8 * MIB)})
    a = Connection(stage, "c", "a", depth=2, size_bytes=16 * MIB)
    b = Connection(stage, "c", "b", depth=64, size_bytes=65_536)
    stage.run(60)
    moved = a.admitted * a.size_bytes + b.admitted * b.size_bytes
    assert moved <= (60 * 8 + 16 + 1) * MIB
    assert moved >= 0.95 * 60 * 8 * MIB
    assert a.admitted * a.size_bytes == pytest.approx(b.admitted * b.size_bytes, rel=0.1)


def header(*clients, gen=1):
    return {"gen": gen, "lease_us": 30_000_000, "caps": [], "whole_clients": list(clients)}


def test_a_set_names_clients_and_processes_of_one_plane_have_equal_parts():
    caps = CapsInForce({})
    said = header({"client": "c", "ops_per_s": 90, "burst_s": 2}, {"client": "d", "cost_per_s": 8})
    assert caps.apply(PlaneCaps.parse(said), 0) == 2
    assert caps.whole_clients == {"c": Rates(ops_per_s=90.0, burst_s=2.0), "d": Rates(cost_per_s=8.0)}
    assert (caps.of("v"), caps.of_clients("v"), caps.groups) == (NO_CAPS, {}, {})
    caps.processes = 2
    assert caps.whole_clients["c"].ops_per_s == 45
    heir = CapsInForce({})
    heir.inherit(*caps.in_words, 0)
    assert heir.whole_clients["d"] == Rates(cost_per_s=8.0)
    caps.apply(PlaneCaps.parse({"gen": 2, "lease_us": 30_000_000, "caps": []}), 0)
    assert caps.whole_clients == {}, "a set without clients caps none"


@pytest.mark.parametrize(
    "clients",
    [
        "c",
        [7],
        [{"ops_per_s": 1}],
        [{"client": "c"}],
        [{"client": "c", "ops_per_s": 0}],
        [{"client": "db-*", "ops_per_s": 1}],
        [{"client": "c", "ops_per_s": 1, "burst_s": -1}],
        [{"client": "c", "ops_per_s": 1}, {"client": "c", "ops_per_s": 2}],
    ],
)
def test_a_malformed_list_of_clients_changes_nothing(clients):
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(header({"client": "c", "ops_per_s": 5})), 0)
    with pytest.raises(BadCaps, match="caps 2"):
        caps.apply(PlaneCaps.parse({"gen": 2, "lease_us": 1, "caps": [], "whole_clients": clients}), 0)
    assert (caps.generation, list(caps.whole_clients)) == (1, ["c"])


def any_caps(chance, names, clients):
    """Rates of every kind, some of them, as ``Stage.apply`` takes them."""

    def some(found, ratio):
        return [each for each in found if chance.random() < ratio]

    def ops(*rates):
        return Rates(ops_per_s=float(chance.choice(rates)))

    whole = {client: ops(20, 50, 200) for client in some(clients, 0.6)}
    weights = {name: chance.choice((1.0, 3.0)) for name in some(names, 0.7)}
    groups = {"g": VolumeGroupCap(ops(30, 100), weights)} if weights and chance.random() < 0.5 else {}
    of_volumes = {name: {client: ops(10, 40) for client in some(clients, 0.3)} for name in some(names, 0.3)}
    return whole, groups, {name: ops(10, 60) for name in some(names, 0.4)}, of_volumes


@pytest.mark.parametrize("seed", range(8))
def test_whatever_caps_come_and_go_no_client_has_more_and_no_connection_starves(seed):
    chance = Random(seed)
    names, clients = [f"v{number}" for number in range(1 + seed % 4)], ("x", "y", "z")
    stage = Stage(*names)
    busy = []
    for step in range(6):
        caps = any_caps(chance, names, clients)
        stage.apply(*caps)
        busy = busy or [
            Connection(stage, chance.choice(clients), chance.choice(names), chance.choice((1, 4, 32)))
            for _ in range(6)
        ]
        for each in busy:
            if not each.queue:  # no cap held it; now one may
                each.queue.extend([stage.now_ns()] * 4)
                each.volume.serve(each, stage.now_ns())
        before = [each.admitted for each in busy]
        stage.run(30)
        done = {each: each.admitted - count for each, count in zip(busy, before, strict=True)}
        for client, rates in caps[0].items():
            found = sum(count for each, count in done.items() if each.client == client)
            assert found <= 30 * rates.ops_per_s + BURST + len(names), (step, client, caps)
        assert all(count > 0 for each, count in done.items() if each.queue), (step, caps)
    stage.apply({})
    assert not any(each.queue for each in busy)
    assert stage.rig.loop.timers == {}
