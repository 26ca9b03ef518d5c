"""Judging against a slow and obvious reference: single I/Os on a line of time.

Made-up I/Os become cuts (as docs of ``pmdaemon.wire.cut`` define their entries), cuts go through the same
window that ingest uses, and what it stores is judged. The reference looks at the I/Os alone and never at a
cut's counters: when each was first seen beyond the limit, when it completed, and how long nothing did.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pmdaemon.wire import cut as cuts
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COLUMNS, HIST_DTYPE, MISSED_DTYPE, Cut
from sla_server.agreements.document import Applicability
from sla_server.agreements.slices import HUNG_US, SliceVerdict, verdicts_of
from sla_server.agreements.verdicts import DueSlices, judge_slices, rule_of
from sla_server.db import schema
from sla_server.db.histogram_codec import TOTAL_BUCKETS
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.services.judging.inputs import SliceRows
from sla_server.services.judging.track import JudgedStream
from tests.support.agreements import in_force, simple
from tests.support.judged import inputs_of

SECOND_US = 1_000_000
SLICE_US = 10 * SECOND_US
T0 = 1_800_000_000_000_000
LIMIT_US = 12_000
SLICES = 4
FOREVER_US = 1 << 50
GATEWAY = "11111111-2222-3333-4444-555555555555"


@dataclass(frozen=True)
class Io:
    """One I/O; times from T0, ``end_us`` None: it never completes."""

    arrival_us: int
    end_us: int | None
    write: bool = False
    failed: bool = False

    def is_outstanding(self, at_us: int) -> bool:
        return self.arrival_us < at_us and (self.end_us is None or self.end_us > at_us)

    @property
    def is_slow(self) -> bool:
        return self.end_us is None or self.end_us - self.arrival_us > LIMIT_US

    def is_of(self, io: int) -> bool:
        return io == cuts.IO_ANY or self.write == (io == cuts.IO_WRITE)


def completed(ios: list[Io], from_us: int, to_us: int) -> list[Io]:
    return [io for io in ios if io.end_us is not None and from_us < io.end_us <= to_us]


def stalls(ios: list[Io]) -> list[tuple[int, int]]:
    """Times (begin, end) without a completion while some I/O was outstanding."""
    found = []
    ends = sorted({io.end_us for io in ios if io.end_us is not None})
    for since_us, until_us in pairwise((0, *ends, FOREVER_US)):
        # Between two completions: from the first moment on at which something was outstanding.
        arrivals = [io.arrival_us for io in ios if (io.end_us or FOREVER_US) >= until_us]
        began_us = [max(since_us, arrival_us) for arrival_us in arrivals if arrival_us < until_us]
        if began_us:
            found.append((min(began_us), until_us))
    return found


def longest_stall_us(found: list[tuple[int, int]], from_us: int, to_us: int) -> int:
    """The longest of them in (from, to], as far as it has got by then; begun before or not."""
    return max(
        (
            min(end_us, to_us) - began_us
            for began_us, end_us in found
            if began_us < to_us and end_us > from_us
        ),
        default=0,
    )


# -- From I/Os to what is stored


def cut_of(ios: list[Io], stalled: dict[int, list[tuple[int, int]]], second: int, by_kind: bool) -> Cut:
    """The cut of one second, with every entry that wire.cut defines; ``by_kind``: not of an agent of before.

    ``stalled``: ``stalls`` of each kind.
    """
    from_us, to_us = second * SECOND_US, (second + 1) * SECOND_US
    done = completed(ios, from_us, to_us)
    outstanding = [io for io in ios if io.is_outstanding(to_us)]
    values = dict.fromkeys(COLUMNS, 0)
    values |= {
        "stream_id": 1,
        "arrived": sum(from_us < io.arrival_us <= to_us for io in ios),
        "reads": sum(not io.write for io in done),
        "writes": sum(io.write for io in done),
        "errors": sum(io.failed for io in done),
        "lat_sum_us": sum((io.end_us or 0) - io.arrival_us for io in done),
        "inflight": len(outstanding),
    }
    found: list[tuple[int, ...]] = []
    for kind in (cuts.IO_ANY, cuts.IO_READ, cuts.IO_WRITE):
        mine = [io for io in done if io.is_of(kind)]
        waiting = [io for io in outstanding if io.is_of(kind)]
        if mine:
            found.append((0, kind, LIMIT_US, len(mine), sum(io.is_slow for io in mine)))
        overdue = [io for io in waiting if from_us <= io.arrival_us + LIMIT_US < to_us]
        settled = [io for io in mine if io.arrival_us + LIMIT_US < from_us]
        failed = [io for io in mine if io.failed]
        if overdue or settled:
            found.append((0, cuts.OVERDUE + kind, LIMIT_US, len(overdue), len(settled)))
        if failed:
            slow = sum(io.is_slow for io in failed)
            found.append((0, cuts.FAILED + kind, LIMIT_US, len(failed), slow))
            found.append((0, cuts.FAILED + kind, 0, len(failed), 0))
        if waiting and (by_kind or kind == cuts.IO_ANY):
            stalled_us = longest_stall_us(stalled[kind], from_us, to_us)
            oldest_us = max(to_us - io.arrival_us for io in waiting)
            found.append((0, cuts.OUTSTANDING + kind, 0, oldest_us // 1000, stalled_us // 1000))
    buckets = Counter(
        (histogram.TOTAL_WRITE if io.write else histogram.TOTAL_READ)
        + histogram.bucket_of_ns(((io.end_us or 0) - io.arrival_us) * 1000)
        for io in done
    )
    return Cut(
        gateway_id=GATEWAY,
        epoch=1,
        seq=second + 1,
        start_unix_us=T0 + from_us,
        duration_us=SECOND_US,
        throttle_gen=0,
        threshold_version=1,
        counters=cuts.rows_array([[values[name] for name in COLUMNS]]),
        hist=np.array([(0, bucket, n) for bucket, n in sorted(buckets.items())], dtype=HIST_DTYPE),
        missed=np.array(found, dtype=MISSED_DTYPE),
    )


def stored(ios: list[Io], by_kind: bool) -> SliceRows:
    """What ingest makes of the cuts of all slices, as the judge reads it."""
    window = IngestWindow(SLICE_US)
    stalled = {kind: stalls([io for io in ios if io.is_of(kind)]) for kind in cuts.IO_KINDS.values()}
    items = [
        IngestedCut(cut_of(ios, stalled, n, by_kind), 0, T0 + (n + 1) * SECOND_US) for n in range(10 * SLICES)
    ]
    assert cuts.are_sound([item.cut for item in items])
    window.absorb(DecodedBatch(1, 1, cuts=items))
    rows = []
    for slot_us, accumulator in sorted(window.slots.items()):
        numbers, columns = window.slot_columns(slot_us)
        (hist,) = accumulator.hist_of(numbers)
        row = {name: int(column[0]) for name, column in columns.items()}
        half = TOTAL_BUCKETS // 2
        rows.append({**row, "hist_read": hist[:half], "hist_write": hist[half:]})
    columns = window.missed_columns()
    names = ("slot_us", "stream_id", "io", "threshold_us", *schema.LATE_SUMS)
    lists = zip(*(columns[name].tolist() for name in names), strict=True)
    missed = [dict(zip(names, values, strict=True)) for values in lists]
    return SliceRows(inputs_of(rows, missed))


def judged(
    ios: list[Io], promise_keys: str = "", io: str = "any", by_kind: bool = True
) -> list[SliceVerdict]:
    """Each slice's verdict."""
    text = simple(value_ms=LIMIT_US / 1000).replace("clients:", f"io: {io}, clients:")
    text = text.replace("    budgeting:", f"    {promise_keys}\n    budgeting:") if promise_keys else text
    (promise,) = in_force(text).all_promises
    rows, scope = stored(ios, by_kind), (JudgedStream(1, GATEWAY, 0),)
    start_us = np.arange(T0, T0 + SLICES * SLICE_US, SLICE_US)
    whole = np.full(SLICES, SLICE_US)
    due = DueSlices(
        [rule_of(promise, Applicability(min_ios_per_slice=10))] * SLICES,
        whole,
        np.zeros(SLICES, dtype=np.bool_),
        whole,
        whole,
        np.full(SLICES, -1),
        *rows.pairs([scope] * SLICES, start_us, start_us + SLICE_US),
    )
    return verdicts_of(judge_slices(rows.table, due))


# -- The reference


def reference(ios: list[Io], counts_errors: bool, kind: int = cuts.IO_ANY) -> list[tuple[str, int, int]]:
    """(state, n, missed) of each slice, from the I/Os of the promised kind alone."""
    ios = [io for io in ios if io.is_of(kind)]
    found, stalled = [], stalls(ios)
    for index in range(SLICES):
        from_us, to_us = index * SLICE_US, (index + 1) * SLICE_US
        n = missed = failed = new_overdue = 0
        for io in ios:
            # The end of the cut in which it is first seen beyond the limit, or completes.
            seen_us = None
            if io.is_slow:
                beyond_us = io.arrival_us + LIMIT_US
                seen_us = (beyond_us // SECOND_US + 1) * SECOND_US
            done_us = -(-io.end_us // SECOND_US) * SECOND_US if io.end_us is not None else None
            was_overdue = seen_us is not None and (done_us is None or seen_us < done_us)
            counts_us = seen_us if was_overdue else done_us
            is_done_here = done_us is not None and from_us < done_us <= to_us
            failed += io.failed and is_done_here
            if counts_us is not None and from_us < counts_us <= to_us:
                new_overdue += was_overdue
                if was_overdue or counts_errors or not io.failed:
                    n += 1
                    missed += io.is_slow or io.failed
            if was_overdue and is_done_here:
                new_overdue -= 1
        missed = max(missed, 0)
        n = max(n, missed)
        # Cuts tell of a stall only while something is outstanding at their end.
        ends = range(from_us + SECOND_US, to_us + 1, SECOND_US)
        busy = [at for at in ends if any(io.is_outstanding(at) for io in ios)]
        stall_us = max((longest_stall_us(stalled, at - SECOND_US, at) for at in busy), default=0)
        oldest_us = max((at - io.arrival_us for at in busy for io in ios if io.is_outstanding(at)), default=0)
        stuck = max(new_overdue, 1) if oldest_us >= HUNG_US else 0
        lost = (failed if counts_errors else 0) + stuck
        if stall_us >= HUNG_US or lost * 20 > max(n, lost):
            state = "bad"
        elif n < 10:
            state = "not_applicable"
        else:
            state = "bad" if missed * 20 > n else "good"
        found.append((state, n, missed))
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[Io]:
    """Bursts of quick I/O, and some that are slow, late, stuck, or fail; on a grid of 1 ms, off the cuts."""
    ios = []
    for _ in range(draw(st.integers(0, 4))):
        start_ms, count = draw(st.integers(0, 38_000)), draw(st.integers(1, 40))
        latency_ms = draw(st.sampled_from([1, 5, 11, 13, 40]))
        fails = draw(st.sampled_from([0, 0, 0, 1, 5]))
        for number in range(count):
            arrival_us = (start_ms + number) * 1000 + 400
            ios.append(
                Io(arrival_us, arrival_us + latency_ms * 1000 + 100, number % 2 == 1, number % 7 < fails)
            )
    for _ in range(draw(st.integers(0, 5))):
        arrival_us = draw(st.integers(0, 39_000)) * 1000 + 400
        latency_ms = draw(st.sampled_from([None, 900, 1_500, 4_800, 5_200, 12_000, 31_000]))
        end_us = None if latency_ms is None else arrival_us + latency_ms * 1000 + 100
        ios.append(Io(arrival_us, end_us, draw(st.booleans()), draw(st.booleans())))
    return ios


HUNG = [Io(9_500_400 + n, None) for n in range(32)]
READS_HANG = [
    *(Io(n * 100_000 + 400, n * 100_000 + 1_400, write=True) for n in range(390)),
    *(Io(n * 100_000 + 500, n * 100_000 + 1_500) for n in (*range(110), *range(180, 390))),
    *(Io(11_000_450 + n, 18_000_050 + n) for n in range(3)),
]
"""Writes go on; reads stop for 7 s within the second slice, three of them wait."""
EIO = [Io(100_400 + n * 100_000, 100_500 + n * 100_000, failed=True) for n in range(390)]


@pytest.mark.parametrize("io", ["any", "read", "write"])
@pytest.mark.parametrize("errors", ["bad", "exclude"])
@settings(max_examples=25, deadline=None)
@example(ios=HUNG)
@example(ios=EIO)
@example(ios=READS_HANG)
@given(ios=histories())
def test_judging_agrees_with_the_reference(errors: str, io: str, ios: list[Io]) -> None:
    found = judged(ios, f"errors: {errors}", io)
    expected = reference(ios, errors == "bad", cuts.IO_KINDS[io])
    for each, (state, n, missed) in zip(found, expected, strict=True):
        if not each.inexact:
            assert (each.state, each.n, each.missed) == (state, n, missed)
        else:  # a cut does not tell which of its settled completions failed
            assert errors == "exclude"
            assert each.n >= n
            assert each.missed >= missed


@settings(max_examples=25, deadline=None)
@example(io="read", ios=READS_HANG)
@given(io=st.sampled_from(["any", "read", "write"]), ios=histories())
def test_an_agent_of_before_hides_no_hang(io: str, ios: list[Io]) -> None:
    """It does not tell what waits: if some of the kind was overdue, all of a stall is of it."""
    for each, known in zip(judged(ios, "", io, by_kind=False), judged(ios, "", io), strict=True):
        assert (each.n, each.missed) == (known.n, known.missed)
        if known.state in ("bad", "not_applicable") and known.reason != "hung":
            assert each.state in (known.state, "bad")
        assert each.state == known.state or each.inexact or known.reason == "hung"


@settings(max_examples=60, deadline=None)
@given(ios=histories())
def test_every_io_counts_once_over_all_slices(ios: list[Io]) -> None:
    """Those that complete, or are seen beyond the limit, by the end of the last slice."""
    found = judged(ios)
    last_us = SLICES * SLICE_US
    counted = [io for io in ios if (io.end_us or 1 << 60) <= last_us or io.arrival_us + LIMIT_US < last_us]
    assert sum(each.n for each in found) == len(counted)
    assert sum(each.missed for each in found) == sum(io.is_slow or io.failed for io in counted)


def test_the_examples_are_what_they_seem() -> None:
    assert [state for state, _, _ in reference(HUNG, True)] == ["bad"] * SLICES
    assert [state for state, _, _ in reference(EIO, True)] == ["bad"] * SLICES
    states = {
        kind: [state for state, _, _ in reference(READS_HANG, True, kind)] for kind in cuts.IO_KINDS.values()
    }
    good = ["good"] * SLICES
    assert states == {cuts.IO_ANY: good, cuts.IO_READ: ["good", "bad", "good", "good"], cuts.IO_WRITE: good}
