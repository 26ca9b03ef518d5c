"""Stored slots as loads: rates, which slots are replayed, and the device that explains them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pmdaemon.wire.cut import IO_ANY
from sla_server.agreements.promise import CurveStep
from sla_server.simulate import stored as stored_module
from sla_server.simulate.device import DeviceModel
from sla_server.simulate.errors import NothingStored, SimulationError
from sla_server.simulate.run import Plan, run_mode
from sla_server.simulate.setup import Contract, Stream
from sla_server.simulate.stored import fit, mean_latency, service_time, stored_plan
from tests.support.worlds import promise, volume_class

FROM_US = 1_800_000_000_000_000
CONTRACT = Contract([promise()], [volume_class()])
NAMES = {
    1: {"volume": "gold", "client": "c", "backend": "disk", "gateway": "g-1"},
    2: {"volume": "big", "client": "d", "backend": "disk", "gateway": "g-2"},
}


def stored(slots: int, *rows: dict, missed: tuple[tuple[int, int, int], ...] = ()) -> SimpleNamespace:
    """Slots of a minute; ``rows``: columns that differ; ``missed``: (slot, counted, missed) of gold."""
    usual = {
        "arrived": 600, "reads": 600, "writes": 0, "read_bytes": 600 * 4096, "write_bytes": 0,
        "lat_sum_us": 600 * 2_500, "svc_sum_us": 600 * 2_500, "delay_sum_us": 0, "held_max": 0,
        "inflight_max": 2,
    }  # fmt: skip
    made = [
        {"slot_us": FROM_US + slot * 60_000_000, "stream_id": number, **usual}
        for slot in range(slots)
        for number in NAMES
    ]
    for row in rows:
        index = row.pop("slot") * 2 + row.pop("stream") - 1
        made[index] |= row
    keys = ("slot_us", "stream_id", "io", "threshold_us", "counted", "missed")
    late = [(FROM_US + slot * 60_000_000, 1, IO_ANY, 12_000, counted, n) for slot, counted, n in missed]
    return SimpleNamespace(
        slot_s=60,
        slots={name: np.array([row[name] for row in made], dtype=np.int64) for name in made[0]},
        missed={k: np.array([row[i] for row in late], dtype=np.int64) for i, k in enumerate(keys)},
        streams=NAMES,
    )


def planned(found: SimpleNamespace, most_ios: int = 10**6, **over) -> Plan:
    return stored_plan(found, CONTRACT, FROM_US, most_ios, **over)


def test_only_restless_slots_are_replayed_with_those_around_them():
    found = stored(
        60, {"slot": 40, "stream": 1, "lat_sum_us": 600 * 5_000}, missed=((10, 600, 16), (20, 600, 14))
    )
    made = planned(found)
    assert list(made.spans) == [(8 * 60.0, 13 * 60.0), (38 * 60.0, 43 * 60.0)]
    assert any("Simulated are 10 slots of 60" in note for note in made.notes)
    assert planned(found, every=True).spans == [(0.0, 3600.0)]


RATE = {"metric": "iops", "curve": (), "promised": 9.9}
BYTES = {"metric": "throughput", "curve": (), "promised": 40_000.0}
OUTAGE = {"metric": "availability", "curve": (CurveStep(math.inf, 5_000_000),)}


@pytest.mark.parametrize(
    ("terms", "row"),
    [
        ({"metric": "mean_latency"}, {"lat_sum_us": 600 * 7_000}),
        (RATE, {"reads": 540}),
        ({**RATE, "io": "read"}, {"reads": 300, "writes": 200}),
        (BYTES, {"reads": 540, "read_bytes": 540 * 4096}),
        (OUTAGE, {"reads": 0, "lat_sum_us": 0}),
    ],
)
def test_slots_in_which_another_indicator_was_not_at_ease_are_replayed(terms, row):
    contract = Contract([promise(percentile=99.0, **terms)], [volume_class()])
    quiet = stored(60)
    assert any(
        "control had nothing to do" in note for note in stored_plan(quiet, contract, FROM_US, 10**6).notes
    )
    made = stored_plan(stored(60, {"slot": 40, "stream": 1, **row}), contract, FROM_US, 10**6)
    assert list(made.spans) == [(38 * 60.0, 43 * 60.0)]


def test_without_any_the_busiest_are_and_the_notes_say_so():
    made = planned(stored(30, {"slot": 5, "stream": 2, "arrived": 900}))
    assert made.spans[0][0] <= 300 < made.spans[0][1]
    assert any("control had nothing to do" in note for note in made.notes)


def test_rates_kinds_and_sizes_are_those_of_the_slot():
    row = {
        "slot": 0,
        "stream": 2,
        "arrived": 3000,
        "reads": 1000,
        "writes": 2000,
        "write_bytes": 2000 * 65_536,
    }
    made = planned(stored(2, row), every=True)
    run = run_mode(made, "off")
    big = run.logs[Stream("big", "d", "g-2", "disk")].arrays()
    first = big["at"] < 60
    assert first.sum() == pytest.approx(3000, rel=0.06)
    assert (~first).sum() == pytest.approx(600, rel=0.12)
    assert big["is_write"][first].mean() == pytest.approx(2 / 3, abs=0.03)
    assert set(big["size"][big["is_write"]].tolist()) == {65_536}
    assert not big["is_write"][~first].any()


def test_nothing_and_too_much_are_said():
    empty = stored(1)
    empty.slots["arrived"][:] = 0
    with pytest.raises(NothingStored, match="no I/O is stored"):
        planned(empty)
    with pytest.raises(SimulationError, match="--most-ios: 2,400 I/Os are more than 2,000"):
        planned(stored(2), 2_000)


def test_a_sample_of_too_much_is_spread_evenly_and_says_what_it_is():
    found = stored(60, missed=((10, 600, 16), (30, 600, 16), (50, 600, 16)))
    with pytest.raises(SimulationError, match="--sample"):
        planned(found, most_ios=10_000)
    made = planned(found, most_ios=10_000, sample=True)
    assert list(made.spans) == [(8 * 60.0, 13 * 60.0)]
    assert any("Simulated are 15 slots of 60" in note for note in made.notes)
    assert any("A sample: 33% of that time" in note and "18000 I/Os" in note for note in made.notes)
    assert planned(found, sample=True).notes == planned(found).notes, "nothing has to be left out"


def test_the_service_time_comes_out_of_the_latency_it_causes():
    rate = np.array([50.0, 200.0, 400.0])
    for servers in (1, 4):
        latency = mean_latency(rate, 0.002, servers)
        assert service_time(rate, latency, servers) == pytest.approx(0.002, rel=1e-3)
    assert np.isinf(mean_latency(np.array([600.0]), 0.002, 1)).all()


@pytest.mark.parametrize("servers", [1, 8])
def test_number_of_servers_and_service_time_are_found_where_load_varies(servers):
    rate = np.linspace(20, 480, 40) * servers
    latency = mean_latency(rate, 0.002, servers)
    found = fit(rate, latency, np.full(40, 64.0), 4.0, None)
    assert found.model.servers == servers
    assert found.model.read[0].ms == pytest.approx(2.0, rel=0.02)
    assert found.error_ratio < 0.01


def test_the_notes_name_the_fit_and_throttles_in_force_then():
    made = planned(stored(10, {"slot": 3, "stream": 2, "delay_sum_us": 10**8, "lat_sum_us": 10**8}))
    assert made.devices["disk"].read[0].ms == pytest.approx(2.5, rel=0.1)
    assert any(note.startswith("Device disk is fitted to 10 slots") for note in made.notes)
    assert any("throttles that were in force then" in note for note in made.notes)
    given = planned(stored(10), device=DeviceModel(servers=9))
    assert given.devices["disk"].servers == 9
    assert not any("fitted" in note for note in given.notes)


def test_a_feed_has_the_slots_that_are_replayed_and_no_others():
    """Of a day of a fleet there is room for those alone: at most as many as I/Os may be simulated."""
    found = stored(60, missed=((10, 600, 16), (40, 600, 16)))
    feeds = planned(found).feeds
    starts = [*range(8 * 60, 13 * 60, 60), *range(38 * 60, 43 * 60, 60)]
    assert [sorted(feed.rates) for feed in feeds] == [starts, starts]


def test_promises_of_thousands_of_volumes_each_look_at_their_own_rows_alone(monkeypatch):
    """A fleet's hour has millions of rows and as many promises as streams: each of all would take days."""
    volumes, slots = 3_000, 4
    names = [{**NAMES[1], "volume": f"v-{number}"} for number in range(volumes)]
    one = stored(slots, {"slot": 2, "stream": 1, "lat_sum_us": 600 * 9_000})
    rows = one.slots["stream_id"] == 1
    found = SimpleNamespace(
        slot_s=60,
        slots={name: np.tile(column[rows], volumes) for name, column in one.slots.items()},
        missed=one.missed,
        streams=dict(enumerate(names)),
    )
    found.slots["stream_id"] = np.repeat(np.arange(volumes), slots)
    found.slots["lat_sum_us"][slots:] = 600 * 100  # only the first is near its limit
    looked = list[int]()
    of = stored_module._RowsOf.of

    def counted(self, numbers):
        mine = of(self, numbers)
        looked.append(len(mine))
        return mine

    monkeypatch.setattr(stored_module._RowsOf, "of", counted)  # what is bounded is how much it looks at
    contract = Contract([promise(f"v-{number}") for number in range(volumes)], [])
    made = stored_plan(found, contract, FROM_US, 10**7)
    assert made.spans == [(0.0, 240.0)]
    assert sum(looked) == 3 * volumes * slots, "once for each promise, each feed, and the device"
