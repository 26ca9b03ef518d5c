"""Rolling up: the vectorised sums equal sums made one number at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from db_samples import MINUTE_US, T0, Model, gateway, make_cut, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.wire import cut as cuts
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COL, MISSED_DTYPE
from sla_server.db import histcodec, schema
from sla_server.db.rollup import HOUR_US, MAX_COUNTER, Ingested, dense_hours, roll_up, screen


def ingested(item, offset_us=0):
    return Ingested(item, offset_us, item.start_unix_us + 5)


@st.composite
def some_cuts(draw):
    count = draw(st.integers(0, 6))
    return [
        make_cut(
            seq,
            gw=gateway(draw(st.integers(1, 2))),
            start_us=T0 + draw(st.integers(-3, 200)) * 1_000_000,
            duration_us=draw(st.integers(0, 3_000_000)),
            streams=draw(st.lists(st.integers(1, 4), unique=True, max_size=4)),
            seed=draw(st.integers(0, 99)),
        )
        for seq in range(1, count + 1)
    ]


@settings(max_examples=60, deadline=None)
@given(some_cuts(), st.sampled_from([-90_000_000, 0, 1, 2_500_000]))
def test_sums_equal_the_plain_model(items, offset_us):
    sums = roll_up([ingested(item, offset_us) for item in items], MINUTE_US)
    model = Model.of(items, offset_us)
    keys = list(zip(sums.slots.keys["slot_us"].tolist(), sums.slots.keys["stream_id"].tolist(), strict=True))
    assert keys == sorted(model.slots)
    for index, key in enumerate(keys):
        expected = model.slots[key]
        assert {name: int(values[index]) for name, values in sums.slots.values.items()} == dict(expected)
        chosen = sums.slots.hist_row == index
        blob = histcodec.encode_sparse(sums.slots.hist_bucket[chosen], sums.slots.hist_count[chosen])
        assert histcodec.decode_many([blob])[0].tolist() == model.hists[key]
    missed = sums.missed
    got = {
        key: [counted, misses]
        for *key_parts, counted, misses in zip(
            *(column.tolist() for column in (*missed.keys.values(), *missed.values.values())), strict=True
        )
        for key in [tuple(key_parts)]
    }
    assert got == dict(model.missed)
    assert int(dense_hours(sums.hours).sum()) == sum(map(sum, model.hists.values()))
    for name in ("reads", "writes", "read_bytes", "write_bytes", "errors"):
        assert int(sums.streams.values[name].sum()) == model.total(name)


def test_a_cut_belongs_wholly_to_the_slot_of_its_corrected_start():
    item = make_cut(1, start_us=T0 + MINUTE_US - 1, duration_us=5_000_000, streams=(1,))
    assert roll_up([ingested(item)], MINUTE_US).slots.keys["slot_us"].tolist() == [T0]
    assert roll_up([ingested(item, 1)], MINUTE_US).slots.keys["slot_us"].tolist() == [T0 + MINUTE_US]
    assert roll_up([ingested(item)], MINUTE_US).slots.values["covered_us"].tolist() == [5_000_000]


def test_hours_keep_reads_and_writes_together_in_fifty_buckets():
    item = make_cut(1, streams=(1,))
    hours = roll_up([ingested(item)], MINUTE_US).hours
    assert hours.keys["hour_us"].tolist() == [T0 // HOUR_US * HOUR_US]
    both = item.dense_hist(histogram.TOTAL_READ, 99)[0] + item.dense_hist(histogram.TOTAL_WRITE, 99)[0]
    assert dense_hours(hours)[0].tolist() == histogram.to_coarse(both).tolist()


@pytest.mark.parametrize(("delay", "held", "expected"), [(0, 0, 0), (1, 0, 1_000_000), (0, 1, 1_000_000)])
def test_time_under_a_cap_counts_cuts_in_which_io_was_held(delay, held, expected):
    item = make_cut(1, streams=(1,))
    counters = item.counters.copy()
    counters[COL["delay_sum_us"]], counters[COL["held"]] = delay, held
    changed = dataclasses.replace(item, counters=counters)
    assert roll_up([ingested(changed)], MINUTE_US).hours.values["caps_us"].tolist() == [expected]


def test_missed_any_is_the_lowest_threshold_and_adds_reads_to_writes():
    entries = [
        (0, cuts.IO_ANY, 5000, 20, 7),
        (0, cuts.IO_ANY, 9000, 20, 3),
        (1, cuts.IO_READ, 5000, 12, 4),
        (1, cuts.IO_WRITE, 5000, 8, 5),
        (1, cuts.IO_ANY, 20000, 20, 6),
    ]
    item = dataclasses.replace(make_cut(1), missed=np.array(entries, dtype=MISSED_DTYPE))
    streams = roll_up([ingested(item)], MINUTE_US).streams
    by_id = dict(zip(streams.keys["stream_id"].tolist(), streams.values["missed_any"].tolist(), strict=True))
    assert by_id == {stream(1): 7, stream(2): 9}


def test_a_true_cut_passes_the_screen():
    assert screen(ingested(make_cut(1))) is None


@pytest.mark.parametrize(
    ("change", "offset_us", "problem"),
    [
        ({"duration_us": 86_400_000_001}, 0, "more than a day"),
        ({"start_unix_us": 1}, -2, "before 1970"),
        ({"start_unix_us": 1 << 61}, 0, "behind 2100"),
        ({"seq": 1 << 63}, 0, "63 bits"),
    ],
)
def test_what_cannot_be_true_is_refused(change, offset_us, problem):
    item = dataclasses.replace(make_cut(1), **change)
    assert problem in screen(ingested(item, offset_us))


def test_a_counter_that_would_overflow_sums_is_refused_but_not_a_large_id_or_lifetime_count():
    item = make_cut(1)
    for name in ("cum_read_bytes", "stream_id"):
        counters = item.counters.copy()
        counters[COL[name]] = (1 << 63) - 1
        assert screen(ingested(dataclasses.replace(item, counters=counters))) is None
    counters = item.counters.copy()
    counters[COL["lat_sum_us"]] = MAX_COUNTER + 1
    assert "counter" in screen(ingested(dataclasses.replace(item, counters=counters)))


def test_no_rows_at_all():
    empty = make_cut(1, streams=())
    sums = roll_up([ingested(empty)], MINUTE_US)
    assert len(sums.slots) == len(sums.hours) == len(sums.streams) == len(sums.missed) == 0
    assert set(sums.slots.values) >= set(schema.COUNTERS)
