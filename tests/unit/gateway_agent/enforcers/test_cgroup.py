"""Caps of control groups, on a fake group that holds what it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_agent.cgroups import Group, IoCounts, IoLimits
from gateway_agent.enforcers.cgroup import CgroupEnforcer, LimitedGroup, Mix
from gateway_agent.errors import GroupUnusable
from gateway_agent.link.caps import LeasedCaps
from gateway_agent.sources.cgroup import CgroupSource
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import cut
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.rates import NO_CAPS, Rates, whole_rate

VOLUME = "cgroup:host-1:batch"
NOTHING = IoCounts()
NONE = {"ops_per_s": None, "bytes_per_s": None, "cost_per_s": None}


class FakeGroup(Group):
    def __init__(self) -> None:
        super().__init__(Path("/fake/batch.slice"), "8:0", is_v2=True)
        self.did = IoCounts()
        self.written: list[IoLimits] = []
        self.kept = IoLimits(7, 7, 7, 7)  # of a link that was killed
        self.is_there = True
        self.is_one_of_several = False
        self.is_stubborn = False
        self.can_limit = True

    def find(self) -> Group:
        if not self.is_there:
            raise GroupUnusable("batch.slice", "no group of this name", is_absent=True)
        if self.is_one_of_several:
            raise GroupUnusable("batch.slice", "2 groups have this name")
        return self

    def counts(self) -> IoCounts:
        self.find()
        return self.did

    def limits(self) -> IoLimits:
        return self.kept

    def set_limits(self, limits: IoLimits) -> None:
        self.find()
        if not self.can_limit:
            raise GroupUnusable("batch.slice", "it has groups within")
        self.written.append(limits)
        if not self.is_stubborn:
            self.kept = limits


class Host:
    def __init__(self, static: Rates | None = None) -> None:
        self.clock = FakeClock()
        self.group = FakeGroup()
        self.groups = [LimitedGroup(VOLUME, self.group.find, static or NO_CAPS)]
        self.enforcer = CgroupEnforcer(self.groups)
        self.source = CgroupSource(self.clock, self.groups, {VOLUME: "pool-1"}, self.enforcer)
        self.caps = LeasedCaps([self.enforcer])

    def set(self, gen: int, lease_s: float = 30.0, **rates: float) -> None:
        entries = ({"volume": VOLUME, **NONE, **rates},) if rates else ()
        self.caps.replace(CapSet(gen, int(lease_s * 1e6), entries), self.clock.monotonic_ns())

    def second(self, step: IoCounts = NOTHING) -> dict[str, int]:
        """A collection a second later, in which the group did so much; its row."""
        self.clock.advance(1.0)
        self.group.did = IoCounts(*(a + b for a, b in zip(self.group.did, step, strict=True)))
        self.source.ask()
        sample = self.source.sample
        assert sample is not None
        self.source.spooled()
        self.gen = sample.throttle_gen
        if not sample.streams:
            return {}
        return dict(zip(cut.COLUMNS, (int(value) for value in sample.counters[:, 0]), strict=True))


@pytest.fixture
def host() -> Host:
    return Host()


def test_limits_of_a_link_that_was_killed_are_taken_away(host: Host) -> None:
    assert host.group.kept == IoLimits()


def test_counts_are_exact_and_nothing_is_timed(host: Host) -> None:
    row = host.second(IoCounts(3, 1, 3 * 4096, 65_536))
    assert (row["reads"], row["writes"], row["read_bytes"], row["write_bytes"]) == (3, 1, 12_288, 65_536)
    assert (row["arrived"], row["cum_reads"], row["lat_sum_us"], row["held"]) == (4, 3, 0, 0)
    assert row["cost_milli"] == 4000 + 1000 * (12_288 + 65_536) // 65_536
    row = host.second(IoCounts(reads=2, read_bytes=8192))
    assert (row["reads"], row["cum_reads"], row["cum_writes"]) == (2, 5, 1)


def test_a_cap_is_divided_by_what_is_done_and_never_exceeded(host: Host) -> None:
    host.second(IoCounts(reads=90, writes=30, read_bytes=90 * 4096, write_bytes=30 * 4096))
    host.set(5, ops_per_s=100.0)
    assert host.group.kept == IoLimits(75, 25, None, None)
    assert (host.enforcer.took, host.enforcer.refused) == (5, None)
    row = host.second(IoCounts(reads=20, writes=25, read_bytes=20 * 4096, write_bytes=25 * 4096))
    assert row["held"] == 1  # writes used their limit in full
    limits = host.group.kept
    assert (limits.read_iops, limits.write_iops) == (44, 56)


def test_a_cap_that_lost_its_last_bit_when_it_was_divided_is_whole(host: Host) -> None:
    host.second(IoCounts(reads=90, writes=0, read_bytes=90 * 4096))
    host.set(5, ops_per_s=39.99999999999999)
    assert host.group.kept == IoLimits(38, 2, None, None)
    host.set(6, ops_per_s=39.9)
    assert host.group.kept == IoLimits(37, 2, None, None), "never more than the cap"


def test_cost_is_limited_by_operations_and_by_bytes(host: Host) -> None:
    host.second(IoCounts(reads=50, writes=50, read_bytes=50 * 65_536, write_bytes=50 * 65_536))
    host.set(1, cost_per_s=100.0)  # an I/O of 64 KiB costs 2
    assert host.group.kept == IoLimits(25, 25, 50 * 65_536, 50 * 65_536)


def test_of_a_cap_with_a_burst_the_rate_holds_alone_and_is_confirmed(host: Host) -> None:
    """As policies give it; the kernel knows no bursts, so what exceeds the rate waits."""
    host.second(IoCounts(reads=50, writes=50, read_bytes=50 * 65_536, write_bytes=50 * 65_536))
    host.set(1, cost_per_s=100.0, burst_s=4.0)
    assert host.group.kept == IoLimits(25, 25, 50 * 65_536, 50 * 65_536)
    assert (host.enforcer.took, host.enforcer.refused) == (1, None)
    host.set(2, cost_per_s=100.0, burst_s=2.0)
    assert (host.enforcer.took, len(host.group.written)) == (2, 2), "another burst is no other limit"


def test_the_generation_of_a_sample(host: Host) -> None:
    host.second()
    assert host.gen == 0
    host.set(5, ops_per_s=100.0)
    host.second()
    assert host.gen == -1  # it changed within
    host.second()
    assert host.gen == 5


def test_the_acknowledgement_needs_the_limits_read_back(host: Host) -> None:
    host.group.is_stubborn = True
    host.set(5, ops_per_s=100.0)
    refused = host.caps.due_ack()
    assert refused is not None
    assert (refused.ok, host.enforcer.took) == (False, None)
    assert "refused by cgroup" in refused.reason
    host.group.is_stubborn = False
    host.set(6, ops_per_s=100.0)
    accepted = host.caps.due_ack()
    assert accepted is not None
    assert (accepted.ok, accepted.gen) == (True, 6)


def test_static_caps_hold_with_and_without_a_server() -> None:
    host = Host(Rates(ops_per_s=40.0))
    assert host.group.kept == IoLimits(20, 20, None, None)
    host.set(1, ops_per_s=100.0, bytes_per_s=1000.0)
    assert host.group.kept == IoLimits(20, 20, 500, 500)
    host.clock.advance(31.0)
    assert host.caps.expire(host.clock.monotonic_ns()) is not None
    assert host.group.kept == IoLimits(20, 20, None, None)


def test_a_group_that_comes_later_gets_its_limits(host: Host) -> None:
    host.group.is_there = False
    assert host.second() == {}
    host.set(5, ops_per_s=10.0)
    assert host.enforcer.took == 5  # it does no I/O
    host.group.is_there, host.group.did, host.group.kept = True, IoCounts(reads=1000), IoLimits()
    row = host.second()
    assert host.group.kept == IoLimits(5, 5, None, None)
    assert (row["reads"], row["cum_reads"]) == (0, 0)  # of no known interval
    assert host.second(IoCounts(reads=4))["reads"] == 4


def test_a_group_that_was_made_again_counts_from_its_first_sight(host: Host) -> None:
    host.second(IoCounts(reads=100, read_bytes=409_600))
    host.group.did = IoCounts()
    assert host.second(IoCounts(reads=3))["reads"] == 0
    assert host.second(IoCounts(reads=2))["reads"] == 2


def test_small_changes_are_not_written(host: Host) -> None:
    host.second(IoCounts(reads=50, writes=50, read_bytes=204_800, write_bytes=204_800))
    host.set(1, ops_per_s=1000.0)
    written = len(host.group.written)
    host.second(IoCounts(reads=51, writes=49, read_bytes=204_800, write_bytes=204_800))
    assert len(host.group.written) == written


def test_a_group_that_uses_both_limits_in_full_comes_to_halves() -> None:
    host = Host()
    host.second(IoCounts(reads=95, writes=5, read_bytes=380_000, write_bytes=20_000))
    host.set(1, ops_per_s=100.0)
    for _ in range(60):
        limits = host.group.kept
        host.second(IoCounts(limits.read_iops or 0, limits.write_iops or 0, 400_000, 400_000))
    assert host.group.kept.read_iops in range(45, 56)


@given(
    cap=st.builds(
        Rates,
        st.none() | st.floats(2, 1e6),
        st.none() | st.floats(2, 1e9),
        st.none() | st.floats(2, 1e6),
    ),
    steps=st.lists(
        st.builds(IoCounts, *(st.integers(0, 10_000) for _ in range(2)), *(st.integers(0, 1 << 30),) * 2),
        max_size=5,
    ),
)
def test_limits_never_allow_more_than_the_cap(cap: Rates, steps: list[IoCounts]) -> None:
    mix, limits = Mix(), IoLimits()
    for step in steps:
        mix.counted(step, 1.0, limits)
        limits = mix.limits(cap)
        ops = [value for value in limits[:2] if value is not None]
        size = [value for value in limits[2:] if value is not None]
        assert all(value >= 1 for value in (*ops, *size))
        if cap.ops_per_s is not None:
            assert sum(ops) <= max(2, whole_rate(cap.ops_per_s))
        if cap.bytes_per_s is not None:
            assert sum(size) <= max(2, whole_rate(cap.bytes_per_s))
        if cap.cost_per_s is not None:
            assert sum(ops) <= max(2, whole_rate(cap.cost_per_s))
            assert sum(size) <= max(2, whole_rate(cap.cost_per_s * 65_536))


def test_a_unit_that_is_started_again_gets_its_limits_again(host: Host) -> None:
    host.second(IoCounts(reads=50, writes=50, read_bytes=204_800, write_bytes=204_800))
    host.set(5, ops_per_s=100.0)
    host.group.kept, host.group.did = IoLimits(), IoCounts()  # another group of the same name
    host.second(IoCounts(reads=3))
    assert host.group.kept == IoLimits(50, 50, None, None)


def test_a_group_that_cannot_be_limited_is_counted_all_the_same(host: Host) -> None:
    host.group.can_limit = False
    host.set(5, ops_per_s=100.0)
    assert host.enforcer.refused == 5
    host.caps.replace(CapSet(6, 30_000_000, ()), host.clock.monotonic_ns())
    host.second(NOTHING)
    assert host.second(IoCounts(reads=3))["reads"] == 3


def test_a_cap_of_a_group_that_cannot_be_limited_is_refused_each_time(host: Host) -> None:
    host.group.can_limit = False
    for gen in (5, 6, 7):
        host.set(gen, ops_per_s=100.0)
        assert (host.enforcer.took, host.enforcer.refused) == (None, gen)


def test_limits_that_cannot_be_taken_away_are_no_release(host: Host) -> None:
    host.set(5, ops_per_s=100.0)
    host.group.can_limit = False
    for gen in (6, 7):
        host.set(gen)
        assert (host.enforcer.took, host.enforcer.refused) == (None, gen)


def test_of_a_group_whose_name_several_have_no_cap_is_confirmed(host: Host) -> None:
    host.group.is_one_of_several = True
    assert host.second() == {}
    host.set(5, ops_per_s=100.0)
    assert (host.enforcer.took, host.enforcer.refused) == (None, 5)
    host.set(6)
    assert host.enforcer.took == 6, "it keeps no cap from other groups"


def test_one_group_is_one_volume() -> None:
    clock, group = FakeClock(), FakeGroup()
    taken: dict[tuple[str, str], str] = {}
    first, second = (LimitedGroup(name, group.find, Rates(ops_per_s=40.0), taken) for name in ("a", "b"))
    source = CgroupSource(clock, [first, second], {"a": "p", "b": "p"}, CgroupEnforcer([first, second]))
    clock.advance(1.0)
    source.ask()
    assert source.sample is not None
    assert [key.volume for key in source.sample.streams] == ["a"]
    assert group.kept == IoLimits(20, 20, None, None)


def test_what_status_shows_of_a_group(host: Host, tmp_path: Path) -> None:
    (tmp_path / "io.pressure").write_text("some avg10=12.00 avg60=3.00 avg300=1.00 total=5\n")
    host.group.path = tmp_path
    host.set(5, ops_per_s=100.0)
    found = host.groups[0].record()
    assert (found["group"], found["limits"]["read_iops"], found["problem"]) == (str(tmp_path), 50, "")
    assert found["pressure"]["some_10s"] == 12.0


def test_a_cap_of_its_only_client_is_one_of_the_group(host: Host) -> None:
    client = {"volume": VOLUME, "client": "cgroup", **NONE, "ops_per_s": 60.0}
    other = {"volume": VOLUME, "client": "host-a", **NONE, "ops_per_s": 6.0}
    whole = {"volume": VOLUME, **NONE, "ops_per_s": 100.0, "bytes_per_s": 1000.0}
    host.caps.replace(CapSet(5, 30_000_000, (whole,), (client, other)), host.clock.monotonic_ns())
    assert host.group.kept == IoLimits(30, 30, 500, 500)
    others = {"volume": VOLUME, "client": "*", "except": ["db"], **NONE, "ops_per_s": 40.0}
    named = {**others, "except": ["cg*"], "ops_per_s": 4.0}
    host.caps.replace(CapSet(6, 30_000_000, (whole,), (others, named)), host.clock.monotonic_ns())
    assert host.group.kept == IoLimits(20, 20, 500, 500)
