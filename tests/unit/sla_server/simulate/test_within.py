"""Bursts within a slot: arrivals and device as cuts have them, and what a back-test makes of that."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pmdaemon.wire.cut import IO_KINDS
from sla_server.db.queries.replay import StoredSlots
from sla_server.policy_jobs.back_test import ReplaySums, backend_plans, by_hour, compare, verdict
from sla_server.simulate.device import CostPoint, DeviceModel
from sla_server.simulate.loads import Application, Load
from sla_server.simulate.run import GeneratedFeed, Plan, run_mode
from sla_server.simulate.setup import Contract, contract_of
from sla_server.simulate.stored import SlotParts, StoredFeed
from sla_server.simulate.within import slots_of, with_cuts
from tests.support.agreements import ERP, agreement

START_US = 1_795_996_800 * 1_000_000  # a Monday, 00 UTC
THRESHOLD_US = 20_000
SLOT_S = 60
MINUTES = 5
BURST_S = 4
SUMS = ("arrived", "reads", "read_bytes", "svc_sum_us")
DISK = DeviceModel(servers=1, spread=0.2, read=[CostPoint(kib=4, ms=5.0)])
"""Some 200 I/Os a second."""


def contract() -> Contract:
    return contract_of([agreement(ERP)])


def history() -> dict[str, dict[str, Any]]:
    """Five minutes without control: ERP does 20 I/Os a second, batch 1,200 in four seconds of each minute."""
    return replayed(
        Load(volume="erp", client="a", gateway="A", backend="disk", iops=20),
        Load(volume="batch", client="b", gateway="B", backend="disk", iops=300, shape="square",
             period_s=SLOT_S, duty=BURST_S / SLOT_S),
    )  # fmt: skip


def replayed(*loads: Load) -> dict[str, dict[str, Any]]:
    """Five minutes of these without control."""
    feeds = [GeneratedFeed(load) for load in loads]
    plan = Plan(contract(), feeds, {"disk": DISK}, [(0.0, MINUTES * SLOT_S)], start_unix_us=START_US)
    return {stream.volume: log.arrays() for stream, log in run_mode(plan, "off").logs.items()}


def counted(found: dict[str, Any], length_s: int) -> dict[str, Any]:
    """What a gateway counts of a stream in intervals of this length; all I/Os are reads of 4 KiB."""
    count = MINUTES * SLOT_S // length_s
    at = found["at"]
    done = np.minimum(at + found["latency"], MINUTES * SLOT_S - 1e-6)
    begin, end = (at // length_s).astype(int), (done // length_s).astype(int)
    latency_us = np.minimum(found["latency"], 60) * 1e6
    ios = np.bincount(end, minlength=count)
    return {
        "arrived": np.bincount(begin, minlength=count),
        "reads": ios,
        "read_bytes": ios * 4096,
        "svc_sum_us": np.bincount(end, latency_us, count).astype(np.int64),
        "missed": np.bincount(end, latency_us > THRESHOLD_US, count).astype(np.int64),
        "inflight": np.cumsum(np.bincount(begin, minlength=count)) - np.cumsum(ios),
    }


def stored(logs: dict[str, dict[str, Any]]) -> tuple[StoredSlots, dict[str, Any]]:
    """The same as slots, and as cuts of a second."""
    slots: dict[str, list[Any]] = {}
    missed: dict[str, list[Any]] = {}
    cuts: dict[str, list[Any]] = {}

    def put(columns: dict[str, list[Any]], count: int, **values: Any) -> None:
        for name, value in values.items():
            columns.setdefault(name, []).append(np.broadcast_to(np.asarray(value, np.int64), count))

    for number, (_, log) in enumerate(logs.items(), 1):
        minute, second = counted(log, SLOT_S), counted(log, 1)
        most = second["inflight"].reshape(MINUTES, SLOT_S).max(axis=1) + 1
        begins = START_US + np.arange(MINUTES) * SLOT_S * 1_000_000
        put(slots, MINUTES, slot_us=begins, stream_id=number, writes=0, write_bytes=0,
            lat_sum_us=minute["svc_sum_us"], delay_sum_us=0, held_max=0, inflight_max=most,
            **{name: minute[name] for name in SUMS})  # fmt: skip
        if number == 1:
            put(missed, MINUTES, slot_us=begins, stream_id=1, io=IO_KINDS["any"], threshold_us=THRESHOLD_US,
                counted=minute["reads"], missed=minute["missed"])  # fmt: skip
        seconds = MINUTES * SLOT_S
        put(cuts, seconds, start_us=START_US + np.arange(seconds) * 1_000_000, duration_us=1_000_000,
            stream_id=number, writes=0, write_bytes=0,
            **{name: second[name] for name in (*SUMS, "inflight")})  # fmt: skip
    names = {
        number: {"volume": volume, "client": "c", "backend": "disk", "gateway": f"gw-{number}"}
        for number, volume in enumerate(logs, 1)
    }

    def joined(columns: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: np.concatenate(parts) for name, parts in columns.items()}

    return StoredSlots(SLOT_S, joined(slots), joined(missed), names), joined(cuts)


@pytest.fixture(scope="module")
def world() -> tuple[StoredSlots, dict[str, Any]]:
    return stored(history())


def planned(found: StoredSlots) -> Plan:
    ((_, plan),), _ = backend_plans(found, contract(), {"batch"}, START_US, 1_000_000)
    return plan


def test_arrivals_are_spread_as_those_of_the_cuts(world: tuple[StoredSlots, dict[str, Any]]) -> None:
    found, cuts = world
    plan = planned(found)
    assert slots_of(plan) == ({1, 2}, [START_US + n * 60_000_000 for n in range(MINUTES)])
    batch = next(feed for feed in with_cuts(plan, cuts, fits=True).feeds if feed.stream.volume == "batch")
    assert isinstance(batch, StoredFeed)
    taken: list[float] = []

    class Recorder(Application):
        def replay(self, found: Any) -> None:
            taken.extend(arrival.at_s for arrival in found)

    batch.begin(object.__new__(Recorder), (0.0, MINUTES * SLOT_S), random.Random(1))
    of_second = np.bincount(np.array(taken).astype(int), minlength=MINUTES * SLOT_S)
    assert abs(len(taken) - int(found.slots["arrived"][found.slots["stream_id"] == 2].sum())) < 300
    in_burst = np.arange(MINUTES * SLOT_S) % SLOT_S <= BURST_S
    assert of_second[~in_burst].sum() == 0
    assert of_second.max() > 200


def test_the_device_is_that_of_the_cuts_and_not_one_that_is_always_slow(
    world: tuple[StoredSlots, dict[str, Any]],
) -> None:
    found, cuts = world
    plan = planned(found)
    of_slots, of_cuts = (
        each.devices["disk"].read[0].ms / each.devices["disk"].servers  # what an I/O keeps all of it busy
        for each in (plan, with_cuts(plan, cuts, fits=True))
    )
    assert of_cuts == pytest.approx(5.0, rel=0.15)
    assert abs(of_slots - 5.0) > abs(of_cuts - 5.0)
    assert with_cuts(plan, cuts, fits=False).devices == plan.devices
    notes = with_cuts(plan, cuts, fits=True).notes
    assert notes[0].startswith("Resolution: 1.0 s in 5 of 5 slots")
    assert sum(note.startswith("Device disk") for note in notes) == 1


def test_slots_in_which_a_stream_has_no_cuts_say_nothing_of_the_device() -> None:
    """Half of the rate at the latency of all of it is another device, of eight servers or so."""
    erp = Load(volume="erp", client="a", gateway="A", backend="disk", iops=85)
    batch = Load(volume="batch", client="b", gateway="B", backend="disk", iops=85)
    found, cuts = stored(replayed(erp, batch))
    plan = planned(found)
    gone = (cuts["stream_id"] == 2) & (cuts["start_us"] < START_US + 60_000_000)
    some = with_cuts(plan, {name: column[~gone] for name, column in cuts.items()}, fits=True)
    device = some.devices["disk"]
    assert (device.servers, device.read[0].ms) == (1, pytest.approx(5.0, rel=0.15))
    assert any(note.startswith("Device disk is fitted to cuts, 240 times") for note in some.notes)


def test_slots_whose_cuts_are_missing_stay_as_they_are(world: tuple[StoredSlots, dict[str, Any]]) -> None:
    found, cuts = world
    plan = planned(found)
    none = {name: column[:0] for name, column in cuts.items()}
    assert with_cuts(plan, none, fits=True) is plan
    late = cuts["start_us"] >= START_US + 90_000_000  # half of the second minute is gone, and all before
    some = with_cuts(plan, {name: column[late] for name, column in cuts.items()}, fits=False)
    (batch,) = (feed for feed in some.feeds if feed.stream.volume == "batch")
    (erp,) = (feed for feed in some.feeds if feed.stream.volume == "erp")
    assert isinstance(batch, StoredFeed)
    assert isinstance(erp, StoredFeed)
    assert sorted(erp.within) == sorted(batch.within) == [120, 180, 240]
    assert "in 3 of 5 slots" in some.notes[0]
    assert "drawn at random" in some.notes[0]


def test_what_is_known_of_slots_takes_little_memory_and_is_a_mapping(
    world: tuple[StoredSlots, dict[str, Any]],
) -> None:
    """At most 40 bytes a cut; as tuples it was 150."""
    found, cuts = world
    (batch,) = (
        feed for feed in with_cuts(planned(found), cuts, fits=False).feeds if feed.stream.volume == "batch"
    )
    assert isinstance(batch, StoredFeed)
    within = batch.within
    assert isinstance(within, SlotParts)
    rows = sum(map(len, within.values()))
    assert rows == MINUTES * SLOT_S
    assert within.nbytes <= 40 * rows
    assert list(within) == [0, 60, 120, 180, 240]
    assert 61 not in within
    assert "60" not in within
    assert within.get(600) is None
    with pytest.raises(KeyError):
        within[61]
    begins, lengths, shares = zip(*within[60], strict=True)
    assert begins == tuple(float(second) for second in range(60, 120))
    assert set(lengths) == {1.0}
    of_second = cuts["arrived"][(cuts["stream_id"] == 2) & (cuts["start_us"] >= START_US + 60_000_000)][:60]
    assert list(shares) == (of_second / of_second.sum()).tolist()


def test_a_policy_that_is_good_for_bursts_within_a_slot_is_published(
    world: tuple[StoredSlots, dict[str, Any]],
) -> None:
    """Spread over the minute the burst breaks nothing, so there would be nothing to avoid."""
    found, cuts = world
    policy = by_hour([{"volume": "batch", "hour_of_week": 0, "cost_per_s": 60.0}])
    advice = {}
    for name, plan in (("slots", planned(found)), ("cuts", with_cuts(planned(found), cuts, fits=True))):
        runs = compare([("disk", plan)], policy, None)
        none, new = ReplaySums(**runs["none"]), ReplaySums(**runs["new"])
        advice[name] = verdict(none, new, None, is_empty=False)
    assert not advice["slots"].publish, advice
    assert advice["cuts"].publish, advice
    assert "it helps" in advice["cuts"].reason
