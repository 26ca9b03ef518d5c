"""Single I/Os on a line of time, the cuts an agent makes of them, and what ingest stores of these.

Cuts have every entry as docs of ``pmdaemon.wire.cut`` define it. References look at the I/Os alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pmdaemon.wire import cut as cuts
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COLUMNS, HIST_DTYPE, MISSED_DTYPE, Cut
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import Promise
from sla_server.agreements.rules import rule_of, thresholds_us
from sla_server.agreements.slices import SliceVerdict, verdicts_of
from sla_server.agreements.slot_table import Ints
from sla_server.agreements.verdicts import DueSlices, judge_slices
from sla_server.db import schema
from sla_server.db.histogram_codec import TOTAL_BUCKETS
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.db.ingest.planes import planes_text
from sla_server.services.judging.inputs import SliceRows
from sla_server.services.judging.track import JudgedStream
from tests.support.judged import inputs_of

SECOND_US = 1_000_000
SLICE_US = 10 * SECOND_US
T0 = 1_800_000_000_000_000
FOREVER_US = 1 << 50
GATEWAY = "11111111-2222-3333-4444-555555555555"
KINDS = (cuts.IO_ANY, cuts.IO_READ, cuts.IO_WRITE)
Stalls = dict[int, list[tuple[int, int]]]
"""Kind to times (begin, end) without a completion while something was waited for."""


@dataclass(frozen=True)
class Io:
    """One I/O; times from T0, ``end_us`` None: it never completes."""

    arrival_us: int
    end_us: int | None
    write: bool = False
    failed: bool = False
    stream: int = 1

    def is_outstanding(self, at_us: int) -> bool:
        return self.arrival_us < at_us and (self.end_us is None or self.end_us > at_us)

    def is_beyond(self, limit_us: int) -> bool:
        return self.end_us is None or self.end_us - self.arrival_us > limit_us

    def is_of(self, io: int) -> bool:
        return io == cuts.IO_ANY or self.write == (io == cuts.IO_WRITE)


def completed(ios: Iterable[Io], from_us: int, to_us: int) -> list[Io]:
    return [io for io in ios if io.end_us is not None and from_us < io.end_us <= to_us]


def stalls(ios: Sequence[Io]) -> list[tuple[int, int]]:
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


def stalls_by_kind(ios: Sequence[Io]) -> Stalls:
    return {kind: stalls([io for io in ios if io.is_of(kind)]) for kind in KINDS}


def longest_stall_us(found: Iterable[tuple[int, int]], from_us: int, to_us: int) -> int:
    """The longest of them in (from, to], as far as it has got by then; begun before or not."""
    return max(
        (
            min(end_us, to_us) - began_us
            for began_us, end_us in found
            if began_us < to_us and end_us > from_us
        ),
        default=0,
    )


# -- From I/Os to cuts

Part = tuple[list[int], list[tuple[int, ...]], Counter[int]]
"""Of one stream: values in COLUMNS order, entries without their row, buckets."""


def part_of(
    ios: Sequence[Io],
    stalled: Stalls,
    span: tuple[int, int],
    limits: Sequence[int],
    *,
    by_kind: bool = True,
    refused: int = 0,
) -> Part:
    """What one stream's I/Os make of the time (from, to].

    Args:
        ios: of the stream.
        stalled: of them.
        span: the time.
        limits: that are counted.
        by_kind: False for an agent that does not tell what waits by kind.
        refused: clients that were refused.
    """
    from_us, to_us = span
    done = completed(ios, from_us, to_us)
    outstanding = [io for io in ios if io.is_outstanding(to_us)]
    values = dict.fromkeys(COLUMNS, 0)
    values |= {
        "stream_id": ios[0].stream if ios else 1,
        "arrived": sum(from_us < io.arrival_us <= to_us for io in ios),
        "reads": sum(not io.write for io in done),
        "writes": sum(io.write for io in done),
        "others": refused,
        "errors": refused + sum(io.failed for io in done),
        "lat_sum_us": sum((io.end_us or 0) - io.arrival_us for io in done),
        "inflight": len(outstanding),
    }
    found: list[tuple[int, ...]] = []
    for kind in KINDS:
        mine = [io for io in done if io.is_of(kind)]
        waiting = [io for io in outstanding if io.is_of(kind)]
        failed = [io for io in mine if io.failed]
        for limit_us in limits:
            if done:
                found.append((kind, limit_us, len(mine), sum(io.is_beyond(limit_us) for io in mine)))
            overdue = sum(from_us <= io.arrival_us + limit_us < to_us for io in waiting)
            settled = sum(io.arrival_us + limit_us < from_us for io in mine)
            if overdue or settled:
                found.append((cuts.OVERDUE + kind, limit_us, overdue, settled))
            if failed:
                slow = sum(io.is_beyond(limit_us) for io in failed)
                found.append((cuts.FAILED + kind, limit_us, len(failed), slow))
        number = len(failed) + (refused if kind == cuts.IO_ANY else 0)
        if number:
            found.append((cuts.FAILED + kind, 0, number, 0))
        if waiting and (by_kind or kind == cuts.IO_ANY):
            stalled_us = longest_stall_us(stalled[kind], from_us, to_us)
            oldest_us = max(to_us - io.arrival_us for io in waiting)
            found.append((cuts.OUTSTANDING + kind, 0, oldest_us // 1000, stalled_us // 1000))
    buckets = Counter(
        (histogram.TOTAL_WRITE if io.write else histogram.TOTAL_READ)
        + histogram.bucket_of_ns(((io.end_us or 0) - io.arrival_us) * 1000)
        for io in done
    )
    return [values[name] for name in COLUMNS], found, buckets


def joined(seq: int, span: tuple[int, int], parts: Sequence[Part], **extra: Any) -> Cut:
    """One cut of the parts of some streams."""
    hist = [(row, *each) for row, (_, _, buckets) in enumerate(parts) for each in sorted(buckets.items())]
    missed = [(row, *entry) for row, (_, entries, _) in enumerate(parts) for entry in entries]
    return Cut(
        gateway_id=GATEWAY,
        epoch=1,
        seq=seq,
        start_unix_us=T0 + span[0],
        duration_us=span[1] - span[0],
        throttle_gen=0,
        threshold_version=1,
        counters=cuts.rows_array([values for values, _, _ in parts]),
        hist=np.array(hist, dtype=HIST_DTYPE),
        missed=np.array(missed, dtype=MISSED_DTYPE),
        extra=extra,
    )


def stored(made: Sequence[Cut]) -> SliceRows:
    """What ingest makes of the cuts, as the judge reads it; slots are as long as slices."""
    window = IngestWindow(SLICE_US)
    items = [IngestedCut(cut, 0, cut.start_unix_us + cut.duration_us) for cut in made]
    assert cuts.are_sound([item.cut for item in items])
    window.absorb(DecodedBatch(1, 1, cuts=items))
    rows, half = [], TOTAL_BUCKETS // 2
    for slot_us, accumulator in sorted(window.slots.items()):
        numbers, columns = window.slot_columns(slot_us)
        for place, hist in enumerate(accumulator.hist_of(numbers)):
            row = {name: int(column[place]) for name, column in columns.items()}
            rows.append({**row, "hist_read": hist[:half], "hist_write": hist[half:]})
    columns = window.missed_columns()
    names = ("slot_us", "stream_id", "io", "threshold_us", *schema.LATE_SUMS)
    lists = zip(*(columns[name].tolist() for name in names), strict=True)
    missed = [dict(zip(names, values, strict=True)) for values in lists]
    coverage = [
        {"slot_us": slot_us, "gateway_id": name, "covered_us": sums[0], "gap_cuts": 0, "gap_ios": 0}
        for (slot_us, name), sums in window.coverage.items()
    ]
    gaps = [
        {"slot_us": slot_us, "gateway_id": name, "plane": plane, "missing_us": us}
        for (slot_us, name, plane), us in window.plane_gaps.items()
    ]
    planes = {key: planes_text(found) for key, found in window.stream_planes.items()}
    return SliceRows(inputs_of(rows, missed, coverage, gaps, planes))


def judged(
    rows: SliceRows, promise: Promise, slices: int, streams: Sequence[int] = (1,)
) -> tuple[list[SliceVerdict], Ints]:
    """The verdict of each slice, and the step of the demand curve in force in it."""
    scope = tuple(JudgedStream(stream, GATEWAY, 0) for stream in streams)
    start_us, whole = np.arange(T0, T0 + slices * SLICE_US, SLICE_US), np.full(slices, SLICE_US)
    rules = [rule_of(promise, Applicability(min_ios_per_slice=10))] * slices
    pairs = rows.pairs([scope] * slices, start_us, start_us + SLICE_US)
    steps_us = thresholds_us(rows.table, rules, whole, pairs[0], pairs[1])
    covered_us = [
        min(us for _, us in rows.sources(scope, [GATEWAY], int(start), int(start) + SLICE_US))
        for start in start_us
    ]
    due = DueSlices(
        rules,
        whole,
        np.zeros(slices, dtype=np.bool_),
        np.array(covered_us),
        whole,
        np.concatenate(([-1], steps_us[:-1])),
        *pairs,
        rows.pairs([scope] * slices, start_us - SLICE_US, start_us),
    )
    return verdicts_of(judge_slices(rows.table, due)), steps_us
