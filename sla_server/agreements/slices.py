"""Judging one slice: a pure function from what was counted to one of five states.

The order of the questions is SLA-MODEL.md 2's: excluded, no_data, not_applicable, bad, good. The judgement
rests on exact ``missed`` counts; only where a gateway did not count the threshold (another threshold set
was in force) are histogram bucket edges used instead, pessimistically, and the slice says ``inexact``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_ANY, IO_KINDS, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import missed_upper
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import Promise

State = Literal["excluded", "no_data", "not_applicable", "bad", "good"]
STATES: Final[tuple[State, ...]] = ("good", "bad", "no_data", "not_applicable", "excluded")
MIN_COVERAGE_RATIO: Final = 0.9
MOST_COVERAGE_RATIO: Final = 1.5
"""Above this the slice was filled twice (a clock went back); one late cut reaches a little over the end."""
KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class StreamSlot:
    """One stream in one rollup slot.

    Attributes:
        hist_read: int64, shape (99,), total latency of reads; ``hist_write`` likewise.
        missed: (io, threshold_us) to (counted, missed).
    """

    arrived: int
    reads: int
    writes: int
    read_bytes: int
    write_bytes: int
    hist_read: npt.NDArray[np.int64]
    hist_write: npt.NDArray[np.int64]
    missed: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def completed(self, io: int) -> int:
        """Completed I/Os of a kind."""
        return (self.reads if io != IO_WRITE else 0) + (self.writes if io != IO_READ else 0)

    def hist(self, io: int) -> npt.NDArray[np.int64]:
        """Latency histogram of a kind."""
        if io == IO_READ:
            return self.hist_read
        return self.hist_write if io == IO_WRITE else self.hist_read + self.hist_write


@dataclass(frozen=True, slots=True)
class SliceVerdict:
    """How a slice was judged, and from what.

    Attributes:
        n: completed I/Os in scope
        missed: of these, slower than the threshold (an upper bound if ``inexact``)
        offered_iops: arrival rate, including I/Os held back by our own throttle
        threshold_us: the demand curve's value at this rate; None above the curve or when not looked up
        coverage_ratio: of the worst covered gateway in scope, 0..1
        inexact: ``missed`` rests on histograms, or the slice holds the cuts of more time than its own
    """

    state: State
    n: int
    missed: int
    offered_iops: float
    threshold_us: int | None
    coverage_ratio: float
    inexact: bool


def judge_slice(
    promise: Promise,
    applicability: Applicability,
    slots: Sequence[StreamSlot],
    covered_us: Mapping[str, int],
    *,
    length_us: int,
    excluded: bool,
    slack_us: float = 0.0,
) -> SliceVerdict:
    """Judge one slice of one promise.

    Args:
        promise: the objective.
        applicability: its clauses.
        slots: every stream in scope in every rollup slot of the slice.
        covered_us: gateway in scope to the sum of its cuts' durations in the slice.
        length_us: of the slice.
        excluded: in maintenance or outside service hours.
        slack_us: duration of one cut. A cut counts wholly where it starts, so one that reaches into this
            slice may be in the one before; that alone must not make a short slice no_data.
    """
    io = IO_KINDS[promise.io]
    n = sum(slot.completed(io) for slot in slots)
    coverage = min((min(value, length_us) for value in covered_us.values()), default=0) / length_us
    # Only the kind promised is counted as demand when I/Os of both kinds share a stream: `arrived` is not
    # split by kind, so held I/Os are shared out as the completed ones are.
    offered = sum(_arrived(slot, io) for slot in slots) * 1e6 / length_us
    threshold_us = promise.threshold_us(offered)
    missed, inexact = (0, False) if threshold_us is None else _missed(slots, io, threshold_us)
    inexact |= any(value > MOST_COVERAGE_RATIO * length_us + slack_us for value in covered_us.values())
    state: State
    if excluded:
        state = "excluded"
    elif coverage + slack_us / length_us < MIN_COVERAGE_RATIO:
        state = "no_data"
    elif threshold_us is None or not _applies(applicability, slots, n, io):
        state = "not_applicable"
    elif exceeds(missed, n, promise.percentile):
        state = "bad"
    else:
        state = "good"
    return SliceVerdict(state, n, missed, offered, threshold_us, coverage, inexact)


def exceeds(missed: int, n: int, percentile: float) -> bool:
    """Whether the percentile of n I/Os lies above the threshold that ``missed`` of them exceeded.

    In integers: percentiles have at most a few decimals, and (1 - 0.9) * n in floating point is above n / 10.
    """
    parts = round(percentile * 10_000)
    return missed * 1_000_000 > (1_000_000 - parts) * n


def _arrived(slot: StreamSlot, io: int) -> float:
    both = slot.reads + slot.writes
    if io == IO_ANY:
        return slot.arrived
    return slot.arrived * slot.completed(io) / both if both else 0.0


def _missed(slots: Sequence[StreamSlot], io: int, threshold_us: int) -> tuple[int, bool]:
    total, inexact = 0, False
    for slot in slots:
        n = slot.completed(io)
        if n == 0:
            continue
        counted, missed = slot.missed.get((io, threshold_us), (0, 0))
        if counted != n:
            missed = min(n, missed_upper(slot.hist(io), threshold_us))
            inexact = True
        total += missed
    return total, inexact


def _applies(clauses: Applicability, slots: Sequence[StreamSlot], n: int, io: int) -> bool:
    if n < clauses.min_ios_per_slice:
        return False
    reads = sum(slot.reads for slot in slots)
    both = reads + sum(slot.writes for slot in slots)
    if clauses.min_read_fraction is not None and reads < clauses.min_read_fraction * both:
        return False
    if clauses.max_mean_io_kib is None:
        return True
    size = sum(
        (slot.read_bytes if io != IO_WRITE else 0) + (slot.write_bytes if io != IO_READ else 0)
        for slot in slots
    )
    return size <= clauses.max_mean_io_kib * KIB * n
