"""Judging one slice: a pure function from what was counted to one of five states, and why.

The order of the questions is SLA-MODEL.md 2's: excluded, no_data, not_applicable, bad, good; before
not_applicable come I/O that hung or failed, which no clause excuses. A latency percentile rests on exact
counts of I/Os beyond the limit; only where a gateway did not count the limit (another threshold set was in
force) are histogram bucket edges and the oldest outstanding I/O used, pessimistically, and the slice says
``inexact``. The rules are in ``verdicts``, for many slices at once; here is what they mean, and one slice.

Never good without proof:

- An I/O is beyond the limit from the moment it is outstanding for longer, once: in the slice of the cut that
  saw it first (``overdue``), and no more when it completes (``settled``), whatever step of a demand curve is
  in force by then. So n and missed include both.
- A failed I/O counts as missed, or with ``errors: exclude`` not at all. More failures than the percentile
  allows are bad, however few I/Os there are; for indicators without a percentile 1 % is allowed.
- A stream that completes nothing for ``HUNG_US`` (or the limit, if that is longer) while I/O of the promised
  kind is outstanding hangs: bad in each slice that the hang reaches into, whatever else was completed in it.
  So it does while clients are refused because the storage is not there.
- Where some I/O hangs and other I/O completes, a mean counts each that hangs with its age, and the indicators
  without a percentile allow 1 % of it.
- What the source of a stream cannot measure is no_data: statistics from beside the I/O path have no
  histogram, no failures, and nothing outstanding; they know the mean latency of all I/O, bytes and counts.

Reasons (``SliceVerdict.reason``): REASONS says what each means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import Promise
from sla_server.agreements.rules import HUNG_US, rule_of
from sla_server.agreements.slot_table import LIMIT_COLUMNS, SLOT_COLUMNS, Ints, SlotTable, limit_key
from sla_server.agreements.verdicts import DueSlices, Verdicts, judge_slices

__all__ = [
    "HUNG_US",
    "REASONS",
    "STATES",
    "LimitCounts",
    "SliceVerdict",
    "State",
    "StreamSlot",
    "exceeds",
    "judge_slice",
]

State = Literal["excluded", "no_data", "not_applicable", "bad", "good"]
STATES: Final[tuple[State, ...]] = ("good", "bad", "no_data", "not_applicable", "excluded")
REASONS: Final[Mapping[str, str]] = {
    "no-samples": "a gateway in scope reported too little of the slice, and its host may have been gone",
    "cuts-lost": "a gateway counted I/O, but its statistics were lost on their way to the server",
    "server-down": "the server was down, and a gateway did not keep its statistics for so long",
    "not-measurable": "the statistics come from beside the I/O path, where this cannot be measured",
    "not-owned": "the volume does not belong to the gateway that serves it: see sla volumes list",
    "not-told": "the gateway's agent is of a release that does not say what waits or was refused: upgrade it",
    "hung": "no I/O completed for seconds while some were outstanding",
    "failed": "more I/Os failed than the objective allows",
    "slow": "more I/Os than allowed took longer than the limit, or their mean is above it",
    "below": "less was delivered than was promised and asked for",
    "few-ios": "fewer I/Os than applicability.min_ios_per_slice",
    "above-curve": "demand was above the demand curve",
    "io-size": "the mean I/O was larger than applicability.max_mean_io_kib",
    "read-share": "the share of reads was below applicability.min_read_fraction",
}
"""Why a slice is not good. Of an excluded one the reason is a sentence: what excuses it."""


class LimitCounts(NamedTuple):
    """I/Os compared with one limit in a slot; see ``pmdaemon.wire.cut``.

    The last two: settled completions that failed, at most and at least.
    """

    counted: int = 0
    missed: int = 0
    overdue: int = 0
    settled: int = 0
    failed: int = 0
    failed_missed: int = 0
    settled_failed: int = 0
    settled_failed_sure: int = 0


@dataclass(frozen=True, slots=True)
class StreamSlot:
    """One stream in one rollup slot.

    Attributes:
        hist_read: int64, shape (99,), total latency of reads; ``hist_write`` likewise.
        missed: (io, threshold_us) to what was counted.
        errors: failed I/Os of any kind; of agents that report them by kind all are in ``failed``.
        oldest_ms: age of the oldest outstanding I/O at the end of a cut, the largest; ``oldest_read_ms`` and
            ``oldest_write_ms`` of one kind; ``kindless_oldest_ms`` of any request, of agents of before.
        stalled_ms: longest time without a completion while I/O was outstanding; the others likewise.
        covered_us: duration of the cuts that have this stream.
        spread_us: of that, of cuts that were shared out over several slots.
        told_us: of that, of cuts in which the agent reported what waits, or what failed.
        outstanding: I/Os held or in flight at the end of a cut, at most.
        stream: tells the streams of a slice apart.
        is_beside: its source knows completions only, though it may have latencies; see ``DueSlices``.
    """

    arrived: int
    reads: int
    writes: int
    read_bytes: int
    write_bytes: int
    hist_read: npt.NDArray[np.int64]
    hist_write: npt.NDArray[np.int64]
    missed: Mapping[tuple[int, int], LimitCounts] = field(default_factory=dict)
    lat_sum_us: int = 0
    errors: int = 0
    failed: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    oldest_ms: int = 0
    stalled_ms: int = 0
    oldest_read_ms: int = 0
    stalled_read_ms: int = 0
    oldest_write_ms: int = 0
    stalled_write_ms: int = 0
    kindless_oldest_ms: int = 0
    kindless_stalled_ms: int = 0
    covered_us: int = 0
    spread_us: int = 0
    told_us: int = 0
    outstanding: int = 0
    stream: int = 0
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class SliceVerdict:
    """How a slice was judged, and from what.

    Attributes:
        n: I/Os in scope: completed ones, and those that became overdue
        missed: of these, beyond the limit (an upper bound if ``inexact``); without a percentile: failed ones
        offered_iops: arrival rate, including I/Os held back by our own throttle
        threshold_us: the demand curve's value at this rate, or the outage promised; None above the curve,
            and for rates
        coverage_ratio: of the worst covered source in scope, 0..1
        inexact: rests on histograms, on outstanding I/O or failures of unknown kind, or on cuts that cover
            several slots; or the slice holds the cuts of more time than its own
        reason: key of REASONS, empty for good and excluded
        measured: mean latency (us), delivered I/Os or bytes a second, longest stall (us); None for a
            percentile, and where there was nothing to measure
        failed: I/Os of the promised kind that failed, whatever the agreement makes of them; where none
            completed, of any kind
    """

    state: State
    n: int
    missed: int
    offered_iops: float
    threshold_us: int | None
    coverage_ratio: float
    inexact: bool
    reason: str = ""
    measured: float | None = None
    failed: int = 0


def judge_slice(
    promise: Promise,
    applicability: Applicability,
    slots: Sequence[StreamSlot],
    covered_us: Mapping[str, int],
    *,
    length_us: int,
    excluded: bool,
    before_us: int | None = None,
) -> SliceVerdict:
    """Judge one slice of one promise.

    Args:
        promise: the objective.
        applicability: its clauses.
        slots: every stream in scope in every rollup slot of the slice.
        covered_us: source of statistics in scope to how long it was observed in the slice.
        length_us: of the slice.
        excluded: in maintenance or outside service hours.
        before_us: step of the demand curve in force in the slice before; None: the same, or not known.
    """
    ordered = sorted(slots, key=lambda slot: slot.stream)
    due = DueSlices(
        rules=[rule_of(promise, applicability)],
        length_us=np.array([length_us]),
        is_excluded=np.array([excluded]),
        covered_us=np.array([min(covered_us.values(), default=0)]),
        most_covered_us=np.array([max(covered_us.values(), default=0)]),
        before_us=np.array([-1 if before_us is None else before_us]),
        pair_slice=np.zeros(len(ordered), dtype=np.int64),
        pair_row=np.arange(len(ordered)),
        pair_stream=np.array([slot.stream for slot in ordered], dtype=np.int64),
        pair_is_beside=np.array([slot.is_beside for slot in ordered], dtype=np.bool_),
    )
    return verdicts_of(judge_slices(table_of(ordered), due))[0]


def verdicts_of(found: Verdicts) -> list[SliceVerdict]:
    """Columns of verdicts one by one."""
    columns = (
        found.state,
        found.n,
        found.missed,
        found.offered_iops,
        found.coverage_ratio,
        found.inexact,
        found.reason,
    )
    limits_us = [us if us >= 0 else None for us in found.threshold_us.tolist()]
    measured = [None if each != each else each for each in found.measured.tolist()]  # NaN is not itself
    lists = [column.tolist() for column in columns]
    rows = zip(*lists[:4], limits_us, *lists[4:], measured, found.failed.tolist(), strict=True)
    return [SliceVerdict(*values) for values in rows]


def table_of(slots: Sequence[StreamSlot]) -> SlotTable:
    """The slots as columns, in their order."""
    dense: Ints = np.zeros((len(slots), 2 * BUCKETS), dtype=np.int64)
    for row, slot in enumerate(slots):
        dense[row, :BUCKETS], dense[row, BUCKETS:] = slot.hist_read, slot.hist_write
    at, bucket = np.nonzero(dense)
    entries = [(row, *key, *counts) for row, slot in enumerate(slots) for key, counts in slot.missed.items()]
    columns: Ints = np.array(entries, dtype=np.int64).reshape(-1, 3 + len(LIMIT_COLUMNS)).T
    return SlotTable(
        {name: np.array([getattr(slot, name) for slot in slots], dtype=np.int64) for name in SLOT_COLUMNS},
        (at, bucket, dense[at, bucket]),
        dict(zip(LIMIT_COLUMNS, columns[3:], strict=True)),
        limit_key(columns[0], columns[1], columns[2]),
    )


def exceeds(missed: int, n: int, percentile: float) -> bool:
    """Whether the percentile of n I/Os lies above the threshold that ``missed`` of them exceeded.

    In integers: percentiles have at most a few decimals, and (1 - 0.9) * n in floating point is above n / 10.
    """
    parts = round(percentile * 10_000)
    return missed * 1_000_000 > (1_000_000 - parts) * n
