"""Cuts that cover several slots: what is shared out adds up to the cut, and coverage is exact."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.wire import cut as cuts
from pmdaemon.wire.cut import COL, MISSED_DTYPE, SUMMED
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.db.ingest.spread import MOST_SLOTS, shares, spread
from tests.support.samples import MINUTE_US, T0, gateway, make_cut

SECOND_US = 1_000_000


def ingested(start_s: float, seconds: float, **keys) -> IngestedCut:
    start_us, duration_us = T0 + round(start_s * SECOND_US), round(seconds * SECOND_US)
    item = make_cut(1, start_us=start_us, duration_us=duration_us, hidden=True, **keys)
    return IngestedCut(item, 0, start_us + duration_us)


@given(st.integers(0, 10**9), st.integers(0, MOST_SLOTS * MINUTE_US))
def test_shares_are_the_time_of_the_cut(start_us, duration_us):
    found = list(shares(start_us, duration_us, MINUTE_US))
    assert sum(us for _, us in found) == duration_us
    assert [slot for slot, _ in found] == [found[0][0] + n * MINUTE_US for n in range(len(found))]
    assert found[0][0] <= start_us < found[0][0] + MINUTE_US


def test_a_cut_that_is_too_long_to_be_shared_out_covers_its_first_slot_only():
    found = list(shares(T0 + SECOND_US, (MOST_SLOTS + 1) * MINUTE_US, MINUTE_US))
    assert found == [(T0, 59 * SECOND_US)]


def test_a_usual_cut_stays_in_the_slot_of_its_start():
    items = [ingested(59.5, 1), ingested(0, 66), ingested(0, 60 * (MOST_SLOTS + 2))]
    assert spread(items, MINUTE_US) is items


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 59), st.integers(67, 600), st.integers(0, 9))
def test_the_parts_of_a_long_cut_add_up_to_it(start_s, seconds, seed):
    item = ingested(start_s, seconds, seed=seed, streams=(1, 2))
    said = cuts.sequential_bytes(np.array([seed + 7, -1]))
    item = dataclasses.replace(item, cut=dataclasses.replace(item.cut, extra={"sq": said}))
    parts = spread([item], MINUTE_US)
    if len(parts) == 1:
        return
    whole = item.cut
    assert [part.part for part in parts] == list(range(1, len(parts) + 1))
    assert sum(part.cut.duration_us for part in parts) == whole.duration_us
    assert sum(part.cut.gap for part in parts) == whole.gap
    assert (sum(part.cut.counters[SUMMED] for part in parts)[:-2] == whole.counters[SUMMED][:-2]).all()
    for name in ("inflight", "held"):
        assert all((part.cut.counters[COL[name]] == whole.counters[COL[name]]).all() for part in parts)
    assert sum(int(part.cut.hist["count"].sum()) for part in parts) == int(whole.hist["count"].sum())
    counts = [cuts.sequential_counts(part.cut.sequential) for part in parts]
    assert (sum(one[0] for one in counts), {int(one[1]) for one in counts}) == (seed + 7, {-1})
    is_count = whole.missed["io"] < cuts.OUTSTANDING
    for name in ("counted", "missed"):
        sums = sum(part.cut.missed[name].astype(np.int64) for part in parts)
        assert (sums == whole.missed[name])[is_count].all()
        assert all((part.cut.missed[name] == whole.missed[name])[~is_count].all() for part in parts)


def test_a_late_cut_of_minutes_is_in_every_minute_that_it_covers():
    """A plane hands over 180 s at once; something waited for 100 s in them."""
    entries = [(0, cuts.OUTSTANDING + io, 0, 0, 100_000) for io in (cuts.IO_ANY, cuts.IO_READ)]
    item = ingested(30, 180, streams=(1,))
    counters = item.cut.counters.copy()
    counters[COL["reads"]] = 1800
    missed = np.array(entries, dtype=MISSED_DTYPE)
    item = dataclasses.replace(item, cut=dataclasses.replace(item.cut, counters=counters, missed=missed))
    window = IngestWindow(MINUTE_US)
    window.absorb(DecodedBatch(1, 1, cuts=[item]))
    assert {slot: sums[:2] for (slot, _), sums in window.coverage.items()} == {
        T0: [30 * SECOND_US, 1],
        T0 + MINUTE_US: [60 * SECOND_US, 0],
        T0 + 2 * MINUTE_US: [60 * SECOND_US, 0],
        T0 + 3 * MINUTE_US: [30 * SECOND_US, 0],
    }
    columns = [window.slot_columns(slot)[1] for slot in sorted(window.slots)]
    assert [int(each["stalled_read_ms"][0]) for each in columns] == [100_000] * 4
    assert [int(each["spread_us"][0]) // SECOND_US for each in columns] == [30, 60, 60, 30]
    reads = [int(each["reads"][0]) for each in columns]
    assert sum(reads) == 1800
    assert all(abs(n - expected) <= 1 for n, expected in zip(reads, (300, 600, 600, 300), strict=True))
    assert int(window.stream_columns()[1]["cuts"][0]) == 1


def test_gateways_are_told_apart():
    window = IngestWindow(MINUTE_US)
    items = [ingested(50, 20, gw=gateway(1)), ingested(0, 1, gw=gateway(2))]
    window.absorb(DecodedBatch(1, 1, cuts=items))
    assert {key: sums[0] // SECOND_US for key, sums in window.coverage.items()} == {
        (T0, gateway(1)): 10,
        (T0 + MINUTE_US, gateway(1)): 10,
        (T0, gateway(2)): 1,
    }
