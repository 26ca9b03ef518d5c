"""Refused clients are a stall: of agents that count them and do not report it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pmdaemon.wire import cut as cuts
from pmdaemon.wire.cut import COL, MISSED_DTYPE
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from tests.support.samples import MINUTE_US, T0, make_cut

SECOND_US = 1_000_000


def cut_at(second, reads=0, refused=0, entries=(), rows=True):
    cut = make_cut(second + 1, start_us=T0 + second * SECOND_US, streams=(1,) if rows else (), thresholds=())
    if not rows:
        return cut
    counters = np.zeros_like(cut.counters)
    counters[COL["stream_id"]] = cut.counters[COL["stream_id"]]
    counters[COL["reads"]], counters[COL["errors"]], counters[COL["others"]] = reads, refused, refused
    found = [(0, cuts.FAILED, 0, refused, 0)] if refused else []
    missed = np.array([*found, *((0, *entry) for entry in entries)], dtype=MISSED_DTYPE)
    return dataclasses.replace(cut, counters=counters, missed=missed, hist=cut.hist[:0])


def stalls(*items, batches=1):
    """Minute to the longest stalls (s) of all I/O, reads and writes."""
    window = IngestWindow(MINUTE_US)
    ingested = [IngestedCut(cut, 0, cut.start_unix_us + SECOND_US) for cut in items]
    for number in range(batches):
        part = ingested[number * len(items) // batches : (number + 1) * len(items) // batches]
        window.absorb(DecodedBatch(number + 1, number + 1, cuts=part))
    found = {}
    for slot in sorted(window.slots):
        columns = window.slot_columns(slot)[1]
        names = ("stalled_ms", "stalled_read_ms", "stalled_write_ms")
        found[(slot - T0) // MINUTE_US] = [int(columns[name][0]) // 1000 for name in names]
    return found


@pytest.mark.parametrize("batches", [1, 7])
def test_from_the_first_refusal_to_the_end_of_the_slot(batches):
    """I/O until second 20, two attempts, then silence."""
    items = [cut_at(n, reads=9) for n in range(20)] + [cut_at(20, refused=1), cut_at(31, refused=2)]
    items += [cut_at(n, rows=False) for n in range(32, 70)]
    assert stalls(*items, batches=batches) == {0: [40, 40, 40]}


def test_the_next_completion_ends_it():
    items = [cut_at(5, refused=1), *(cut_at(n, rows=False) for n in range(6, 15)), cut_at(15, reads=1)]
    items += [cut_at(n, rows=False) for n in range(16, 60)]
    assert stalls(*items) == {0: [10, 10, 10]}


def test_it_goes_on_in_the_next_slot_while_attempts_do():
    items = [cut_at(n, refused=int(n % 20 == 10)) for n in range(120)]
    assert stalls(*items) == {0: [50, 50, 50], 1: [110, 110, 110]}


def test_storage_of_which_a_flush_succeeds_is_there():
    flushes = dataclasses.replace(cut_at(5, refused=1))
    flushes.counters[COL["others"]] = 2
    assert stalls(flushes, *(cut_at(n, rows=False) for n in range(6, 60))) == {0: [0, 0, 0]}


def test_failed_io_is_no_refusal():
    with_io = [cut_at(n, reads=3, refused=3) for n in range(30)]
    assert stalls(*with_io) == {0: [0, 0, 0]}
    reads = [(cuts.FAILED + cuts.IO_READ, 0, 1, 0)]
    assert stalls(cut_at(0, refused=1, entries=reads), cut_at(9, rows=False)) == {0: [0, 0, 0]}


def test_an_agent_that_tells_kinds_reports_it_itself():
    """It was let in again after 2 s, which completions do not show."""
    said = [(cuts.OUTSTANDING + io, 0, 0, 2_000) for io in (cuts.IO_ANY, cuts.IO_READ, cuts.IO_WRITE)]
    items = [cut_at(0, refused=1), cut_at(1, entries=said), *(cut_at(n, rows=False) for n in range(2, 60))]
    assert stalls(*items, batches=30)[0] == [2, 2, 2]
