"""Groups over several planes of a gateway: divided by weight, then by use, and sent again when use moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gateway_agent.link.caps import LeasedCaps
from gateway_agent.sources.sample import Sample, StreamKey, no_hist, no_missed
from pmdaemon.errors import MalformedFrame
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL, COLUMNS
from pmdaemon.wire.messages.agent import CapSet
from tests.support.link import FakeEnforcer

SECOND = 10**9


def group_cap(volumes, name="night", **rates):
    rates = {"ops_per_s": None, "bytes_per_s": 8e6, "cost_per_s": None} | rates
    return {"group": name, **rates, "volumes": volumes}


def sample(plane, **cost):
    counters = np.zeros((len(COLUMNS), len(cost)), dtype=np.int64)
    counters[COL["cost_milli"]] = [each * 1000 for each in cost.values()]
    keys = tuple(StreamKey(volume, "c", "disk") for volume in cost)
    return Sample(plane, 0, SECOND, 0, 4, 0, keys, counters, no_hist(), no_missed())


def two_planes():
    return FakeEnforcer(frozenset({"a", "b"}), "nbd-0"), FakeEnforcer(frozenset({"c"}), "nbd-1")


def rate(enforcer):
    (entry,) = enforcer.sets[-1].groups
    return entry["bytes_per_s"]


def test_without_use_it_is_divided_by_the_weights_of_each_plane():
    first, second = two_planes()
    caps = LeasedCaps([first, second])
    caps.replace(CapSet(4, 30_000_000, (), None, (group_cap({"a": 1, "b": 2, "c": 1}, burst_s=2.0),)), 0)
    assert (rate(first), rate(second)) == (6e6, 2e6)
    (entry,) = first.sets[0].groups
    assert (entry["volumes"], entry["burst_s"], entry["ops_per_s"]) == ({"a": 1, "b": 2, "c": 1}, 2.0, None)
    ack = caps.due_ack()
    assert (ack.ok, ack.refused) == (True, None)


def test_it_follows_the_use_and_is_sent_again_when_that_moves():
    first, second = two_planes()
    caps = LeasedCaps([first, second])
    caps.replace(CapSet(4, 30_000_000, (), None, (group_cap({"a": 1, "c": 1}),)), 0)
    assert (rate(first), rate(second)) == (4e6, 4e6)
    caps.used([sample("nbd-0", a=90), sample("nbd-1", c=10)], SECOND)
    assert len(first.sets) == 1, "the proof of the set itself comes first"
    caps.due_ack()
    caps.used([sample("nbd-0", a=90), sample("nbd-1", c=10)], SECOND)
    assert rate(first) == pytest.approx(8e6 * (0.8 * 0.9 + 0.2 * 0.5))
    assert rate(first) + rate(second) == pytest.approx(8e6)
    assert first.sets[-1].gen == 4
    caps.used([sample("nbd-0", a=88), sample("nbd-1", c=12)], 2 * SECOND)
    assert len(first.sets) == 2, "a small move is none"
    assert caps.due_ack() is None


def test_a_plane_that_goes_leaves_its_part_to_the_others_and_has_it_again():
    first, second = two_planes()
    caps = LeasedCaps([first, second])
    caps.replace(CapSet(4, 30_000_000, (), None, (group_cap({"a": 1, "c": 1}),)), 0)
    caps.due_ack()
    second.reachable = False
    caps.used([sample("nbd-0", a=50)], SECOND)
    assert rate(first) == 8e6
    second.reachable = True
    caps.enforcer_connected(second, 2 * SECOND)
    assert rate(first) + rate(second) == pytest.approx(8e6)


def test_a_process_that_handed_over_keeps_what_its_clients_use():
    now, former = FakeEnforcer(frozenset("ab"), "nbd-0"), FakeEnforcer(frozenset("ab"), "nbd-0.7")
    enforcers = [now]
    caps = LeasedCaps(enforcers)
    caps.replace(CapSet(4, 30_000_000, (), None, (group_cap({"a": 1, "b": 1}),)), 0)
    caps.due_ack()
    caps.used([sample("nbd-0", a=50)], SECOND)
    enforcers.append(former)
    assert caps.enforcer_connected(former, SECOND)
    assert (rate(now), rate(former)) == (4e6, 4e6)
    for second in range(2, 20):
        caps.used([sample("nbd-0"), sample("nbd-0.7", a=50)], second * SECOND)
    assert rate(former) == pytest.approx(8e6 * 0.9, rel=0.1)
    assert rate(now) + rate(former) == pytest.approx(8e6)


def test_a_plane_without_a_volume_of_the_group_is_sent_none_and_others_are_refused():
    first, second = two_planes()
    caps = LeasedCaps([first, second])
    caps.replace(CapSet(4, 30_000_000, (), None, (group_cap({"a": 1, "elsewhere": 1}),)), 0)
    assert rate(first) == 8e6
    assert second.sets[-1].groups is None
    ack = caps.due_ack()
    assert (ack.ok, ack.refused) == (True, ("elsewhere",))


@pytest.mark.parametrize(
    "entry",
    [
        {"group": "g", "ops_per_s": 1},
        {"group": "g", "volumes": {}, "ops_per_s": 1},
        {"group": "g", "volumes": {"v": 0}, "ops_per_s": 1},
        {"group": "g", "volumes": {"v": True}, "ops_per_s": 1},
        {"volumes": {"v": 1}, "ops_per_s": 1},
        {"group": "g", "volumes": {"v": 1}, "ops_per_s": -1},
        {"group": "g", "volumes": {"v": 1}, "ops_per_s": 1, "burst_s": "long"},
    ],
)
def test_a_malformed_group_is_refused_by_the_link(entry):
    with pytest.raises(MalformedFrame, match="CAPS"):
        CapSet.parse({"gen": 1, "lease_us": 1, "caps": [], "groups": [entry]})


def test_a_set_with_groups_survives_the_wire_and_one_without_has_the_keys_it_always_had():
    made = CapSet(4, 1, (), None, (group_cap({"a": 1.5}, burst_s=1.0),))
    assert CapSet.parse(frame.decode(made.encode()).header) == made
    assert CapSet(4, 1, ()).header().keys() == {"gen", "lease_us", "caps"}


def client_cap(client="greedy", **rates):
    return {"client": client, "ops_per_s": 100.0, "bytes_per_s": None, "cost_per_s": None} | rates


def client_sample(plane, **cost):
    """Cost of clients of one volume."""
    made = sample(plane, **cost)
    return replace(made, streams=tuple(StreamKey("v", client, "disk") for client in cost))


def client_rate(enforcer):
    (entry,) = enforcer.sets[-1].whole_clients
    return entry["ops_per_s"]


def test_a_whole_client_is_divided_equally_until_its_use_is_known_and_then_by_that():
    first, second = two_planes()
    groups = FakeEnforcer(frozenset({"cg"}), "cgroup", tells_clients=False)
    caps = LeasedCaps([first, second, groups])
    caps.replace(CapSet(4, 30_000_000, (), whole_clients=(client_cap(burst_s=2.0),)), 0)
    assert (client_rate(first), client_rate(second)) == (50, 50)
    assert first.sets[0].whole_clients[0]["burst_s"] == 2.0
    assert groups.sets[-1].whole_clients is None, "it knows no clients, and takes no part"
    assert caps.due_ack().ok
    caps.used([client_sample("nbd-0", greedy=10, other=500), client_sample("nbd-1", greedy=90)], SECOND)
    assert client_rate(first) == pytest.approx(100 * (0.8 * 0.1 + 0.2 * 0.5))
    assert client_rate(first) + client_rate(second) == pytest.approx(100)
    second.reachable = False
    caps.used([client_sample("nbd-0", greedy=90)], 2 * SECOND)
    assert client_rate(first) == pytest.approx(100)


def test_the_lease_of_a_set_of_whole_clients_alone_ends_it():
    first, _ = two_planes()
    caps = LeasedCaps([first])
    caps.replace(CapSet(4, 30_000_000, (), whole_clients=(client_cap(),)), 0)
    assert caps.lease_end_ns == 30 * SECOND
    caps.renew(10 * SECOND)
    assert caps.expire(39 * SECOND) is None
    assert caps.expire(40 * SECOND) is not None
    assert (first.lapses, caps.generation) == (1, None)
