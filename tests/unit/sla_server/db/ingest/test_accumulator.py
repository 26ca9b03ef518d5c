"""Rolling up: the vectorised sums equal sums made one number at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.wire import cut as cuts
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COL, MAX_COUNTER, MISSED_DTYPE, sequential_bytes
from sla_server.db import schema
from sla_server.db.ingest import accumulator
from sla_server.db.ingest.accumulator import FULL_CUTS, IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.db.schema import HOUR_US
from tests.support.samples import MINUTE_US, T0, Model, gateway, make_cut, stream

MISSED_NAMES = ("slot_us", "stream_id", "io", "threshold_us", *schema.LATE_SUMS)


def ingested(item, offset_us=0):
    return IngestedCut(item, offset_us, item.start_unix_us + 5)


def window_of(items, offset_us=0, batch_cuts=99):
    """A window that has absorbed these cuts, ``batch_cuts`` at a time."""
    window = IngestWindow(MINUTE_US)
    for start in range(0, len(items), batch_cuts):
        part = [ingested(item, offset_us) for item in items[start : start + batch_cuts]]
        window.absorb(DecodedBatch(start + 1, start + len(part), cuts=part))
    return window


def slots_of(window):
    """(slot_us, stream_id) to (values, histogram)."""
    found = {}
    for slot_us, sheet in window.slots.items():
        rows, columns = window.slot_columns(slot_us)
        assert columns["stream_id"].tolist() == sorted(columns["stream_id"].tolist())
        for index, hist in enumerate(sheet.hist_of(rows).tolist()):
            values = {name: int(column[index]) for name, column in columns.items()}
            found[values.pop("slot_us"), values.pop("stream_id")] = (values, hist)
    return found


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
            hidden=draw(st.booleans()),
        )
        for seq in range(1, count + 1)
    ]


@settings(max_examples=60, deadline=None)
@given(some_cuts(), st.sampled_from([-90_000_000, 0, 1, 2_500_000]), st.integers(1, 4))
def test_sums_equal_the_plain_model(items, offset_us, batch_cuts):
    window = window_of(items, offset_us, batch_cuts)
    model = Model.of(items, offset_us)
    found = slots_of(window)
    assert {key: values for key, (values, _) in found.items()} == {k: dict(v) for k, v in model.slots.items()}
    assert {key: hist for key, (_, hist) in found.items() if any(hist)} == {
        key: hist for key, hist in model.hists.items() if any(hist)
    }
    columns = window.missed_columns()
    rows = zip(*(columns[name].tolist() for name in MISSED_NAMES), strict=True)
    assert {row[:4]: list(row[4:]) for row in rows} == dict(model.missed)
    hours = sum(int(sheet.hist.sum()) for sheet in window.hours.values())
    assert hours == sum(map(sum, model.hists.values()))
    for hour_us in window.hours:
        _, values = window.hour_columns(hour_us)
        expected = sum(
            v["reads"] for (slot, _), v in model.slots.items() if slot // HOUR_US * HOUR_US == hour_us
        )
        assert int(values["reads"].sum()) == expected
    _, streams = window.stream_columns()
    for name in ("reads", "writes", "read_bytes", "write_bytes", "errors"):
        assert int(streams[name].sum()) == model.total(name)
    assert {key: sums[:3] for key, sums in window.coverage.items()} == dict(model.coverage)


def test_after_a_reset_nothing_is_left():
    items = [make_cut(1), make_cut(2)]
    window = window_of(items[:1])
    window.reset()
    assert window.first_seq == window.last_seq == len(window.streams) == 0
    window.absorb(DecodedBatch(2, 2, cuts=[ingested(items[1])]))
    second = Model.of(items[1:])
    assert slots_of(window) == {key: (dict(second.slots[key]), second.hists[key]) for key in second.slots}
    assert {key: sums[:3] for key, sums in window.coverage.items()} == dict(second.coverage)
    assert (window.first_seq, window.last_seq) == (2, 2)


def test_a_window_is_full_before_sums_can_overflow():
    item = ingested(make_cut(1, streams=(1,)))
    window = IngestWindow(MINUTE_US)
    window.absorb(DecodedBatch(1, 1, cuts=[item] * FULL_CUTS))
    assert not window.is_full
    window.absorb(DecodedBatch(2, 2, cuts=[item]))
    assert window.is_full
    assert (FULL_CUTS + (5 << 20) // (8 * len(COL))) * MAX_COUNTER < 1 << 63


def test_a_window_of_one_slot_is_full_at_some_size(monkeypatch):
    monkeypatch.setattr(accumulator, "MOST_BYTES", window_of([make_cut(1)])._nbytes)
    assert not window_of([make_cut(1), make_cut(2)]).is_full
    assert window_of([make_cut(1), make_cut(2, streams=range(1, 1000))]).is_full


def test_many_streams_keep_their_numbers_as_they_come():
    rng = np.random.default_rng(1)
    numbers = rng.permutation(2000).tolist()
    items = [make_cut(seq, streams=numbers[seq * 90 : seq * 90 + 100], thresholds=()) for seq in range(20)]
    window = window_of(items, batch_cuts=3)
    assert {key: values for key, (values, _) in slots_of(window).items()} == {
        key: dict(values) for key, values in Model.of(items).slots.items()
    }


def test_a_cut_belongs_wholly_to_the_slot_of_its_corrected_start():
    item = make_cut(1, start_us=T0 + MINUTE_US - 1, duration_us=5_000_000, streams=(1,))
    assert list(window_of([item]).slots) == [T0]
    assert list(window_of([item], 1).slots) == [T0 + MINUTE_US]
    assert window_of([item]).slot_columns(T0)[1]["covered_us"].tolist() == [5_000_000]


def test_hours_keep_reads_and_writes_together_in_fifty_buckets():
    item = make_cut(1, streams=(1,))
    window = window_of([item])
    [(hour_us, sheet)] = window.hours.items()
    assert hour_us == T0 // HOUR_US * HOUR_US
    both = item.dense_hist(histogram.TOTAL_READ, 99)[0] + item.dense_hist(histogram.TOTAL_WRITE, 99)[0]
    assert sheet.hist_of(np.array([0]))[0].tolist() == histogram.to_coarse(both).tolist()


@pytest.mark.parametrize(("delay", "held", "expected"), [(0, 0, 0), (1, 0, 1_000_000), (0, 1, 1_000_000)])
def test_time_under_a_cap_counts_cuts_in_which_io_was_held(delay, held, expected):
    item = make_cut(1, streams=(1,))
    counters = item.counters.copy()
    counters[COL["delay_sum_us"]], counters[COL["held"]] = delay, held
    changed = dataclasses.replace(item, counters=counters)
    window = window_of([changed])
    assert window.hour_columns(min(window.hours))[1]["caps_us"].tolist() == [expected]


def test_missed_any_is_the_lowest_threshold_and_adds_reads_to_writes():
    entries = [
        (0, cuts.IO_ANY, 5000, 20, 7),
        (0, cuts.IO_ANY, 9000, 20, 3),
        (1, cuts.IO_READ, 5000, 12, 4),
        (1, cuts.IO_WRITE, 5000, 8, 5),
        (1, cuts.IO_ANY, 20000, 20, 6),
    ]
    item = dataclasses.replace(make_cut(1), missed=np.array(entries, dtype=MISSED_DTYPE))
    _, streams = window_of([item]).stream_columns()
    by_id = dict(zip(streams["stream_id"].tolist(), streams["missed_any"].tolist(), strict=True))
    assert by_id == {stream(1): 7, stream(2): 9}


def screen(item: IngestedCut) -> str | None:
    return cuts.time_fault_of(item.cut, item.offset_us) or cuts.fault_of(item.cut)


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
    window = window_of([make_cut(1, streams=())])
    assert window.slots == window.hours == {}
    assert window.coverage == {(T0, gateway(1)): [1_000_000, 1, 0, 0]}
    assert [len(column) for column in window.missed_columns().values()] == [0] * len(MISSED_NAMES)
    rows, streams = window.stream_columns()
    assert len(rows) == 0
    assert set(streams) >= set(schema.STREAM_SUMS)


def test_what_is_sequential_is_summed_of_the_rows_that_say_it():
    """An agent of before says nothing, a source beside the I/O path not of its rows: what is placed tells."""
    items = [make_cut(seq, streams=(1, 2)) for seq in (1, 2, 3)]
    said = (np.array([3, -1]), np.array([1, 0]), None)
    items = [
        dataclasses.replace(item, extra={} if counts is None else {"sq": sequential_bytes(counts)})
        for item, counts in zip(items, said, strict=True)
    ]
    counters = np.ones_like(items[0].counters)
    counters[COL["arrived"]] = 10
    counters[COL["stream_id"]] = items[0].column("stream_id")
    window = window_of([dataclasses.replace(item, counters=counters) for item in items])
    _, columns = window.slot_columns(T0)
    found = zip(*(columns[name].tolist() for name in ("stream_id", "sequential", "placed")), strict=True)
    assert {number: rest for number, *rest in found} == {
        stream(1): [4, 20],
        stream(2): [0, 10],
    }
    broken = dataclasses.replace(items[0], extra={"sq": b"123"})
    assert window_of([broken]).slot_columns(T0)[1]["placed"].tolist() == [0, 0]
