"""One QEMU process as the link sees it: counted, limited, lost and found, on a scripted QEMU."""

from __future__ import annotations

import numpy as np
import pytest

from gateway_agent.enforcers.qemu import LimitedPlace
from gateway_agent.link.caps import LeasedCaps
from gateway_agent.link.qemu_client import QemuClient
from gateway_agent.qemu import NO_LIMITS, Command, Limits, QmpAnswer, QmpConnected, QmpLost, QmpRequest
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import cut
from pmdaemon.wire.cut import FAILED, IO_ANY, IO_READ
from pmdaemon.wire.histogram import TOTAL_READ, TOTAL_WRITE, bucket_of_ns
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.rates import NO_CAPS, Rates
from tests.support.link import Bench, FakePlane, caps
from tests.support.qemu import Disk, FakeQemu

VOLUME, GROUP = "qemu:gw-a:root", "throttle-group:gw-a:scratch"
NONE = {"ops_per_s": None, "bytes_per_s": None, "cost_per_s": None}
NAME = "qemu:vm-1"


class Rig:
    """A client, and the QEMU that it is connected to by hand."""

    def __init__(self, *places: LimitedPlace, qemu: FakeQemu | None = None, clock: FakeClock | None = None):
        self.clock = clock or FakeClock()
        self.qemu = qemu or FakeQemu(Disk(device="d0", qdev="/machine/peripheral/d0"), groups=("tg0",))
        self.places = list(places) or [place()]
        self.sent: list[QmpRequest] = []
        backends = {each.volume: "pool-1" for each in self.places}
        self.client = QemuClient(NAME, "/run/vm-1.qmp", self.places, backends, self.sent.append, self.clock)
        self.caps = LeasedCaps([self.client.enforcer])

    @property
    def disk(self) -> Disk:
        return self.qemu.disks[0]

    def connect(self, daemon: str = "1 100") -> None:
        self.client.connected(daemon)
        self.answer()

    def answer(self) -> None:
        """QEMU carries out what it was sent, until nothing is left."""
        while self.sent:
            request = self.sent.pop(0)
            results = [self.qemu.execute(command) for command in request.commands]
            answer = QmpAnswer(NAME, request.number, self.clock.monotonic_ns(), results)
            if self.client.answered(answer):
                enforcer, now_ns = self.client.enforcer, self.clock.monotonic_ns()
                if not self.caps.enforcer_connected(enforcer, now_ns):
                    enforcer.lapsed()

    def set(self, gen: int, volume: str = VOLUME, **rates: float) -> None:
        entries = ({"volume": volume, **NONE, **rates},) if rates else ()
        self.caps.replace(CapSet(gen, 30_000_000, entries), self.clock.monotonic_ns())
        self.answer()

    def second(self) -> dict[str, int]:
        """A collection a second later; the row of the only drive."""
        self.clock.advance(1.0)
        self.client.source.ask()
        self.answer()
        self.sample = self.client.source.sample
        assert self.sample is not None
        self.client.source.spooled()
        if not self.sample.streams:
            return {}
        values = (int(value) for value in self.sample.counters[:, 0])
        return dict(zip(cut.COLUMNS, values, strict=True))


def place(static: Rates = NO_CAPS, drive: str = "d0", group: str = "") -> LimitedPlace:
    return LimitedPlace(VOLUME if drive else GROUP, drive, group, static)


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.connect()
    return made


def limits(rig: Rig) -> Limits:
    return Limits(rig.disk.limits["iops"] or None, rig.disk.limits["bps"] or None)


# -- statistics


def test_a_drive_is_counted_and_timed(rig: Rig) -> None:
    rig.disk.io("rd", 3, latency_us=2000)
    rig.disk.io("wr", 1, size=65_536, latency_us=500)
    row = rig.second()
    assert (row["reads"], row["writes"], row["read_bytes"], row["write_bytes"]) == (3, 1, 12_288, 65_536)
    assert (row["arrived"], row["cum_reads"], row["held"], row["errors"]) == (4, 3, 0, 0)
    assert row["lat_sum_us"] == row["svc_sum_us"] == 6500
    rig.disk.io("rd", 2)
    row = rig.second()
    assert (row["reads"], row["cum_reads"]) == (2, 5)


def test_latencies_are_in_our_buckets_once_qemu_was_told(rig: Rig) -> None:
    rig.second()
    rig.disk.io("rd", 5, latency_us=300)
    rig.disk.io("wr", 2, latency_us=7000)
    rig.second()
    found = {int(entry["bucket"]): int(entry["count"]) for entry in rig.sample.hist}
    assert found == {TOTAL_READ + bucket_of_ns(300_000): 5, TOTAL_WRITE + bucket_of_ns(7_000_000): 2}
    told = [command for command in rig.qemu.commands if command.name == "block-latency-histogram-set"]
    assert len(told) == 1


def test_a_qemu_without_histograms_is_timed_all_the_same() -> None:
    rig = Rig()
    rig.qemu.refuses["block-latency-histogram-set"] = "no such command"
    rig.connect()
    rig.second()
    rig.disk.io("rd", 5)
    assert rig.second()["lat_sum_us"] == 5000
    assert len(rig.sample.hist) == 0
    assert "no percentiles" in rig.places[0].record()["problem"]


def test_the_histogram_of_another_program_is_left_alone() -> None:
    edges = {"rd": [10], "wr": [10]}
    rig = Rig(qemu=FakeQemu(Disk(device="d0", boundaries=edges, bins={"rd": [0, 0], "wr": [0, 0]})))
    rig.connect()
    rig.second()
    assert rig.disk.boundaries == edges
    assert "another program has set" in rig.places[0].record()["problem"]


def test_failures_are_entries_and_count_as_completed(rig: Rig) -> None:
    rig.disk.io("rd", 2)
    rig.disk.io("rd", 1, fails=True)
    rig.disk.io("flush", 1, fails=True)
    row = rig.second()
    assert (row["reads"], row["others"], row["errors"]) == (3, 1, 2)
    found = {(int(e["io"]), int(e["threshold_us"])): int(e["counted"]) for e in rig.sample.missed}
    assert found == {(FAILED + IO_ANY, 0): 2, (FAILED + IO_READ, 0): 1}


def test_a_process_that_was_started_again_counts_from_zero(rig: Rig) -> None:
    rig.disk.io("rd", 100)
    assert rig.second()["reads"] == 100
    rig.client.lost("QEMU has closed the connection", is_off=True)
    rig.qemu.disks[0] = Disk(device="d0", qdev="/machine/peripheral/d0")
    rig.disk.io("rd", 150)  # more than before: only its identity tells
    rig.connect("2 200")
    row = rig.second()
    assert (row["reads"], row["cum_reads"]) == (150, 150)


def test_counters_that_ran_backwards_are_no_negative_counts(rig: Rig) -> None:
    rig.disk.io("rd", 100)
    rig.second()
    rig.disk.stats.clear()  # the drive was plugged in again
    rig.disk.io("rd", 3)
    assert rig.second()["reads"] == 0
    rig.disk.io("rd", 4)
    assert rig.second()["reads"] == 4


def test_what_was_done_while_the_monitor_was_away_is_one_long_interval(rig: Rig) -> None:
    rig.second()
    rig.client.lost("no answer within 5 s", is_off=False)
    assert not rig.client.source.can_be_asked
    rig.disk.io("rd", 10)
    rig.clock.advance(9.0)
    rig.connect()
    assert rig.second()["reads"] == 10
    assert rig.sample.end_ns - rig.sample.start_ns == 10 * 10**9


def test_after_hours_the_counting_begins_again(rig: Rig) -> None:
    rig.second()
    rig.client.lost("off", is_off=True)
    rig.disk.io("rd", 10)
    rig.clock.advance(4000.0)
    rig.connect()
    rig.client.source.ask()
    rig.answer()
    assert rig.client.source.sample is None
    rig.disk.io("rd", 2)
    assert rig.second()["reads"] == 2


def test_an_answer_that_is_lost_does_not_hold_up_the_next_question(rig: Rig) -> None:
    rig.client.source.ask()
    assert rig.client.source.awaits_answer
    late = rig.sent.pop()
    rig.client.lost("no answer within 5 s", is_off=False)
    assert not rig.client.source.awaits_answer
    rig.connect()
    assert not rig.client.answered(QmpAnswer(NAME, late.number, 0, []))
    assert rig.second()["reads"] == 0


def test_a_drive_that_comes_later_is_counted_from_its_first_sight(rig: Rig) -> None:
    disk = rig.qemu.disks.pop()
    assert rig.second() == {}
    assert "drive d0: it is not there now" in rig.places[0].record()["problem"]
    disk.io("rd", 100)
    rig.qemu.disks.append(disk)
    assert rig.second()["reads"] == 0
    disk.io("rd", 1)
    assert rig.second()["reads"] == 1
    assert rig.places[0].record()["problem"] == ""


def test_an_answer_of_another_form_is_said_and_tried_again(rig: Rig) -> None:
    rig.qemu.refuses["query-blockstats"] = "out of memory"
    rig.second()
    assert rig.client.problem == "query-blockstats: QEMU says: out of memory"
    rig.qemu.refuses.clear()
    rig.second()
    assert rig.client.problem == ""


# -- caps


def test_limits_of_a_link_that_was_killed_are_taken_away() -> None:
    rig = Rig(place(), place(drive="", group="tg0"))
    rig.disk.limits["iops_rd"] = 7
    rig.qemu.groups["tg0"]["iops-total"] = 7
    rig.connect()
    assert set(rig.disk.limits.values()) == {0}
    assert rig.qemu.groups["tg0"]["iops-total"] == 0
    assert rig.client.enforcer.gen == 0


def test_a_cap_is_confirmed_when_it_was_read_back(rig: Rig) -> None:
    rig.set(5, ops_per_s=500.0)
    assert limits(rig) == Limits(500, None)
    assert (rig.client.enforcer.took, rig.client.enforcer.gen) == (5, 5)
    ack = rig.caps.due_ack()
    assert ack is not None
    assert (ack.ok, ack.gen, ack.refused) == (True, 5, None)


def test_a_cap_that_does_not_hold_is_refused(rig: Rig) -> None:
    rig.qemu.is_stubborn = True
    rig.set(5, ops_per_s=500.0)
    ack = rig.caps.due_ack()
    assert ack is not None
    assert (ack.ok, rig.client.enforcer.took) == (False, None)
    assert f"refused by {NAME}" in ack.reason
    rig.qemu.is_stubborn = False
    rig.set(6, ops_per_s=500.0)
    again = rig.caps.due_ack()
    assert again is not None
    assert again.ok


@pytest.mark.parametrize("is_group", [False, True])
def test_a_cap_whose_limits_cannot_be_read_back_is_refused(is_group: bool) -> None:
    rig = Rig(place(drive="", group="tg0") if is_group else place())
    rig.connect()
    volume, reading = (GROUP, "qom-get") if is_group else (VOLUME, "query-block")
    rig.qemu.refuses[reading] = "it is busy"
    rig.set(5, volume, ops_per_s=500.0)
    assert (rig.client.enforcer.took, rig.client.enforcer.refused) == (None, 5)
    assert "could not be read back" in rig.places[0].record()["problem"]
    rig.qemu.refuses.clear()
    rig.set(6, volume, ops_per_s=500.0)
    assert rig.client.enforcer.took == 6
    assert rig.places[0].record()["problem"] == ""


def test_an_object_that_is_no_throttle_group_takes_no_cap_and_keeps_none_from_others() -> None:
    """Debian's daemon says it so of another object by that name."""
    rig = Rig(place(drive="", group="tg0"))
    rig.qemu.refuses["qom-get"] = "Property 'iothread.limits' not found"
    rig.connect()
    rig.set(5, GROUP, ops_per_s=500.0)
    assert (rig.client.enforcer.took, rig.client.enforcer.refused) == (None, 5)
    rig.set(6)
    assert rig.client.enforcer.took == 6


def test_a_refusal_is_shown(rig: Rig) -> None:
    rig.qemu.refuses["block_set_io_throttle"] = "Device has no medium"
    rig.set(5, ops_per_s=500.0)
    assert rig.client.enforcer.refused == 5
    assert rig.client.record()["volumes"][0]["problem"] == "limits refused: Device has no medium"


def test_no_proof_before_the_answer(rig: Rig) -> None:
    entry = {"volume": VOLUME, **NONE, "ops_per_s": 9.0}
    rig.caps.replace(CapSet(5, 30_000_000, (entry,)), rig.clock.monotonic_ns())
    assert rig.caps.due_ack() is None
    assert rig.client.enforcer.gen == -1
    rig.answer()
    assert rig.caps.due_ack() is not None


def test_the_generation_of_a_sample(rig: Rig) -> None:
    generations = []
    for gen in (0, 0, 5, 5):
        if gen == 5 and rig.client.enforcer.gen == 0:
            rig.set(5, ops_per_s=500.0)
        rig.second()
        generations.append(rig.sample.throttle_gen)
    assert generations == [-1, 0, -1, 5]  # the first begins before anything was set


def test_a_group_is_limited_and_has_no_row() -> None:
    rig = Rig(place(drive="", group="tg0"))
    rig.connect()
    rig.set(5, GROUP, ops_per_s=500.0, bytes_per_s=1e6)
    assert (rig.qemu.groups["tg0"]["iops-total"], rig.qemu.groups["tg0"]["bps-total"]) == (500, 1_000_000)
    assert rig.second() == {}
    assert rig.sample.counters.shape == (len(cut.COLUMNS), 0)
    assert {command.name for command in rig.qemu.commands} == {"qom-get", "qom-set"}
    (export,) = rig.client.source.exports()
    assert (export["volume"], export["source"]) == (GROUP, "qemu")


def test_a_drive_may_be_limited_by_a_group() -> None:
    rig = Rig(place(group="tg0"))
    rig.connect()
    rig.set(5, ops_per_s=500.0)
    assert (rig.qemu.groups["tg0"]["iops-total"], limits(rig)) == (500, NO_LIMITS)
    rig.disk.io("rd", 2)
    assert rig.second()["reads"] == 2


def test_what_another_program_has_changed_is_set_again(rig: Rig) -> None:
    rig.set(5, ops_per_s=500.0)
    rig.second()
    rig.disk.limits["iops"] = 0
    rig.second()
    assert limits(rig) == Limits(500, None)
    rig.second()
    assert rig.sample.throttle_gen == -1, "under which caps that interval was is not known"
    rig.second()
    assert rig.sample.throttle_gen == 5


def test_a_group_that_is_made_later_gets_its_limits() -> None:
    rig = Rig(place(drive="", group="tg0"), qemu=FakeQemu())
    rig.connect()
    rig.set(5, GROUP, ops_per_s=500.0)
    assert rig.client.enforcer.took == 5  # it does no I/O
    rig.qemu.groups |= FakeQemu(groups=("tg0",)).groups
    rig.second()
    assert rig.qemu.groups["tg0"]["iops-total"] == 500


def test_a_process_that_was_started_again_gets_its_limits_again() -> None:
    rig = Rig(place(drive="", group="tg0"))
    rig.connect()
    rig.set(5, GROUP, ops_per_s=500.0)
    rig.client.lost("QEMU has closed the connection", is_off=True)
    rig.qemu.groups = FakeQemu(groups=("tg0",)).groups
    rig.connect("2 200")
    assert rig.qemu.groups["tg0"]["iops-total"] == 500
    assert rig.client.enforcer.took == 5


def test_static_caps_hold_with_and_without_a_server() -> None:
    rig = Rig(place(Rates(40.0)))
    rig.connect()
    assert limits(rig) == Limits(40, None)
    rig.set(1, ops_per_s=100.0, bytes_per_s=1000.0)
    assert limits(rig) == Limits(40, 1000)
    rig.clock.advance(31.0)
    assert rig.caps.expire(rig.clock.monotonic_ns()) is not None
    rig.answer()
    assert limits(rig) == Limits(40, None)


def test_a_cap_of_cost_follows_the_sizes(rig: Rig) -> None:
    rig.set(1, cost_per_s=200.0)
    rig.disk.io("rd", 50, size=65_536)  # costs 2 each
    rig.second()
    assert limits(rig) == Limits(100, 200 * 65_536)
    before = len(rig.qemu.commands)
    rig.disk.io("rd", 50, size=64_000)
    rig.second()
    set_again = [each for each in rig.qemu.commands[before:] if each.name == "block_set_io_throttle"]
    assert set_again == [], "a small change"


def test_a_cap_of_cost_is_never_exceeded_where_sizes_are_not_known() -> None:
    rig = Rig(place(drive="", group="tg0"))
    rig.connect()
    rig.set(1, GROUP, cost_per_s=200.0)
    iops, size = rig.qemu.groups["tg0"]["iops-total"], rig.qemu.groups["tg0"]["bps-total"]
    assert iops + size / 65_536 == 200


def test_a_limit_that_is_used_in_full_holds_and_hides_the_service_time(rig: Rig) -> None:
    rig.set(1, ops_per_s=100.0)
    rig.second()
    rig.disk.io("rd", 95, latency_us=1000)
    row = rig.second()
    assert (row["held"], row["svc_sum_us"], row["lat_sum_us"]) == (1, 0, 95_000)
    rig.disk.io("rd", 5)
    assert rig.second()["held"] == 0


def test_nothing_is_confirmed_of_a_process_that_may_run_and_cannot_be_reached(rig: Rig) -> None:
    rig.client.lost("no answer within 5 s", is_off=False)
    assert rig.client.enforcer.volumes == frozenset()
    rig.client.lost("no QEMU process listens there", is_off=True)
    assert rig.client.enforcer.volumes == {VOLUME}


# -- in the link


def test_a_monitor_and_a_plane_share_a_cut_and_an_acknowledgement(tmp_path) -> None:
    plane = FakePlane()
    rig = Rig(clock=plane.clock)
    bench = Bench(tmp_path, plane, qemu=[rig.client])
    bench.connect_server()
    rig.caps = bench.core._caps  # the core's own, which the rig would make otherwise

    def carry() -> None:
        while rig.sent:
            request = rig.sent.pop(0)
            results = [rig.qemu.execute(command) for command in request.commands]
            bench.core.qemu_event(QmpAnswer(NAME, request.number, rig.clock.monotonic_ns(), results))
            bench.carry()

    bench.core.qemu_event(QmpConnected(NAME, "1 100"))
    carry()
    plane.io(reads=2)
    rig.disk.io("rd", 10)
    bench.clock.advance(1)
    bench.say(bench.server.poll(start=(42, 1)))
    carry()
    assert sorted(bench.server.cuts[42, 1].column("reads").tolist()) == [2, 10]
    bench.say(caps(7, volume=VOLUME))
    assert Kind.CAPS_ACK not in bench.server.kinds, "it is not proved"
    carry()
    assert limits(rig).iops is not None
    assert bench.server.last(Kind.CAPS_ACK)["ok"]
    bench.core.qemu_event(QmpLost(NAME, "QEMU has closed the connection", was_connected=True, is_off=True))
    bench.carry()
    assert bench.server.last(Kind.ALERT)["kind"] == "qemu-lost"


def test_a_monitor_that_does_not_answer_holds_up_a_collection_for_its_deadline_only(tmp_path) -> None:
    plane = FakePlane()
    rig = Rig(clock=plane.clock)
    bench = Bench(tmp_path, plane, qemu=[rig.client])
    bench.connect_server()
    bench.core.qemu_event(QmpConnected(NAME, "1 100"))
    request = rig.sent.pop()
    results = [rig.qemu.execute(command) for command in request.commands]
    bench.core.qemu_event(QmpAnswer(NAME, request.number, rig.clock.monotonic_ns(), results))
    rig.sent.clear()
    plane.io(reads=2)
    bench.say(bench.server.poll(start=(42, 1)))
    assert not bench.server.cuts
    bench.pass_time(0.3)
    assert [int(one.column("reads").sum()) for one in bench.server.cuts.values()] == [2]
    alert = bench.server.last(Kind.ALERT)
    assert (alert["kind"], alert["severity"]) == ("plane-stalled", "warning")
    assert alert["text"] == f"monitor {NAME} does not answer; it is left out"


def test_a_histogram_gains_nothing_when_it_was_emptied(rig: Rig) -> None:
    rig.second()
    rig.disk.io("rd", 5)
    rig.second()
    rig.disk.bins["rd"] = [0] * 99
    rig.disk.io("rd", 1, latency_us=1)
    rig.second()
    assert np.array_equal(rig.sample.hist["count"], [])


# -- a QEMU that its guest has taken over

DEEP: list[object] = []
for _ in range(900):
    DEEP = [DEEP]
ODD = [float("inf"), float("nan"), 1.5, -1, -(10**30), 10**30, 1 << 63, (1 << 62) - 1, "9" * 5000, "x", DEEP]
ODD += [None, True, [], {}, {"a": []}]


def replaced(value: object, at: int, odd: object) -> tuple[object, int]:
    """A copy with the value of one place exchanged, the ``at``-th depth first; what is left of it."""
    if at == 0:
        return odd, -1
    at -= 1
    if isinstance(value, dict | list):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        copy = dict(value) if isinstance(value, dict) else list(value)
        for key, item in items:
            if at < 0:
                break
            copy[key], at = replaced(item, at, odd)
        return copy, at
    return value, at


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__ if odd is DEEP else str(odd)[:12])
@pytest.mark.parametrize("name", ["query-blockstats", "query-block", "qom-get"])
def test_no_answer_of_qemu_ends_the_link(name: str, odd: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value in it is not what it should be; it is said in short, and the next is taken."""
    rig = Rig(place(), place(drive="", group="tg0"))
    rig.connect()
    rig.second()
    real = rig.qemu.execute
    for at in range(60):
        rig.disk.io("rd", 3)
        rig.disk.io("wr", 1, fails=True)
        changed = 0

        def execute(command: Command, at: int = at) -> object:
            nonlocal changed
            if command.name != name:
                return real(command)
            answer, changed = replaced(real(command), at, odd)
            return answer

        monkeypatch.setattr(rig.qemu, "execute", execute)
        rig.second()
        assert rig.sample is not None
        assert int(rig.sample.counters.min(initial=0)) >= 0
        assert len(rig.sample.missed) < 100
        assert len(rig.sample.hist) < 10_000
        assert len(rig.client.problem) < 200
        if changed >= 0:
            break
    else:
        assert name == "query-blockstats"
    monkeypatch.setattr(rig.qemu, "execute", real)
    rig.second()
    rig.disk.io("rd", 3)
    assert rig.second()["reads"] == 3
    assert rig.client.problem == ""
