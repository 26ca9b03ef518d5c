"""Judging one slice: a pure function from what was counted to one of five states, and why.

The order of the questions is SLA-MODEL.md 2's: excluded, no_data, not_applicable, bad, good; before
not_applicable come I/O that hung or failed, which no clause excuses. A latency percentile rests on exact
counts of I/Os beyond the limit; only where a gateway did not count the limit (another threshold set was in
force) are histogram bucket edges and the oldest outstanding I/O used, pessimistically, and the slice says
``inexact``.

Never good without proof:

- An I/O is beyond the limit from the moment it is outstanding for longer, once: in the slice of the cut that
  saw it first (``overdue``), and no more when it completes (``settled``). So n and missed include both.
- A failed I/O counts as missed, or with ``errors: exclude`` not at all. More failures than the percentile
  allows are bad, however few I/Os there are; for indicators without a percentile 1 % is allowed.
- A stream that completes nothing for ``HUNG_US`` (or the limit, if that is longer) while I/O is outstanding
  hangs: bad in each slice that the hang reaches into, whatever else was completed in it.
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

from pmdaemon.wire.cut import IO_ANY, IO_KINDS, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import edges_for, missed_upper
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import Promise

State = Literal["excluded", "no_data", "not_applicable", "bad", "good"]
STATES: Final[tuple[State, ...]] = ("good", "bad", "no_data", "not_applicable", "excluded")
MIN_COVERAGE_RATIO: Final = 0.9
MOST_COVERAGE_RATIO: Final = 1.5
"""Above this the slice was filled twice (a clock went back); one late cut reaches a little over the end."""
KIB: Final = 1024
HUNG_US: Final = 5_000_000
"""No storage that works takes so long for every single I/O; the default ``outage`` of availability, too."""
DELIVERED_RATIO: Final = 0.98
"""Of what was promised or asked for, the smaller: I/Os under way at a slice's ends are not a shortfall."""
REASONS: Final[Mapping[str, str]] = {
    "no-samples": "a gateway in scope reported too little of the slice, and its host may have been gone",
    "cuts-lost": "a gateway counted I/O, but its statistics were lost on their way to the server",
    "server-down": "the server was down, and a gateway did not keep its statistics for so long",
    "not-measurable": "the statistics come from beside the I/O path, where this cannot be measured",
    "hung": "no I/O completed for seconds while some were outstanding",
    "failed": "more I/Os failed than the objective allows",
    "slow": "more I/Os than allowed took longer than the limit, or their mean is above it",
    "below": "less was delivered than was promised and asked for",
    "few-ios": "fewer I/Os than applicability.min_ios_per_slice",
    "above-curve": "demand was above the demand curve",
    "io-size": "the mean I/O was larger than applicability.max_mean_io_kib",
    "read-share": "the share of reads was below applicability.min_read_fraction",
}
"""Why a slice is not good; an excluded one has no reason here, its agreement says it."""


class LimitCounts(NamedTuple):
    """I/Os compared with one limit in a slot; see ``pmdaemon.wire.cut``."""

    counted: int = 0
    missed: int = 0
    overdue: int = 0
    settled: int = 0
    failed: int = 0
    failed_missed: int = 0


NO_COUNTS: Final = LimitCounts()


@dataclass(frozen=True, slots=True)
class StreamSlot:
    """One stream in one rollup slot.

    Attributes:
        hist_read: int64, shape (99,), total latency of reads; ``hist_write`` likewise.
        missed: (io, threshold_us) to what was counted.
        errors: failed I/Os of any kind; of agents that tell them by kind all are in ``failed``.
        oldest_ms: age of the oldest outstanding I/O at the end of a cut, the largest.
        stalled_ms: longest time without a completion while I/O was outstanding.
        covered_us: duration of the cuts that have this stream.
        outstanding: I/Os held or in flight at the end of a cut, at most.
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
    covered_us: int = 0
    outstanding: int = 0

    def completed(self, io: int) -> int:
        """Completed I/Os of a kind, failed ones included."""
        return (self.reads if io != IO_WRITE else 0) + (self.writes if io != IO_READ else 0)

    def size(self, io: int) -> int:
        """Bytes of them."""
        return (self.read_bytes if io != IO_WRITE else 0) + (self.write_bytes if io != IO_READ else 0)

    def failures(self, io: int) -> int:
        """Failed I/Os of a kind; those that an agent does not tell by kind may all be of this one.

        Where nothing completed, failures of other kinds count, too: above all clients that were refused
        because the storage was not there.
        """
        found = (self.failed_reads if io != IO_WRITE else 0) + (self.failed_writes if io != IO_READ else 0)
        if not self.reads and not self.writes:
            found = self.failed
        return found + min(self.failures_of_unknown_kind, max(self.completed(io) - found, 0))

    @property
    def failures_of_unknown_kind(self) -> int:
        """``errors`` of an agent that sends no more; of others the rest are their clients' own mistakes."""
        says_more = self.failed or self.oldest_ms or self.stalled_ms
        return 0 if says_more else self.errors

    def offered(self, io: int) -> float:
        """I/Os of a kind that arrived: ``arrived`` is not split, so held ones are shared out as completed."""
        both = self.reads + self.writes
        if io == IO_ANY or not both:
            return self.arrived if io == IO_ANY else 0.0
        return self.arrived * self.completed(io) / both

    def hist(self, io: int) -> npt.NDArray[np.int64]:
        """Latency histogram of a kind."""
        if io == IO_READ:
            return self.hist_read
        return self.hist_write if io == IO_WRITE else self.hist_read + self.hist_write

    @property
    def is_beside_path(self) -> bool:
        """Whether this was not counted in the I/O path: I/Os, but none in a histogram."""
        return self.reads + self.writes > 0 and not (self.hist_read.any() or self.hist_write.any())

    @property
    def stalled_us(self) -> int:
        """``stalled_ms``; or of an agent that does not send it what is certain without."""
        if not self.arrived and not self.reads and not self.writes and self.outstanding:
            return max(self.stalled_ms * 1000, self.covered_us)
        return self.stalled_ms * 1000


@dataclass(frozen=True, slots=True)
class SliceVerdict:
    """How a slice was judged, and from what.

    Attributes:
        n: I/Os in scope: completed ones, and those that became overdue
        missed: of these, beyond the limit (an upper bound if ``inexact``); without a percentile: failed ones
        offered_iops: arrival rate, including I/Os held back by our own throttle
        threshold_us: the demand curve's value at this rate, or the outage promised; None above the curve,
            and for rates
        coverage_ratio: of the worst covered gateway in scope, 0..1
        inexact: rests on histograms or on failures of unknown kind, or the slice holds the cuts of more time
            than its own
        reason: key of REASONS, empty for good and excluded
        measured: mean latency (us), delivered I/Os or bytes a second, longest stall (us); None for a
            percentile, and where there was nothing to measure
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


@dataclass(slots=True)
class _Finding:
    """What the slots say of a promise, before the questions are asked."""

    n: int
    missed: int = 0
    inexact: bool = False
    fault: str = ""
    measured: float | None = None
    lost: int = 0
    is_measurable: bool = True


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
    coverage = min((min(value, length_us) for value in covered_us.values()), default=0) / length_us
    offered = sum(slot.offered(io) for slot in slots) * 1e6 / length_us
    threshold_us = promise.threshold_us(offered)
    found = _FINDERS[promise.metric](promise, slots, io, threshold_us, length_us)
    inexact = found.inexact or any(
        value > MOST_COVERAGE_RATIO * length_us + slack_us for value in covered_us.values()
    )
    inexact |= promise.counts_errors and any(slot.failures_of_unknown_kind for slot in slots)
    state: State
    reason = ""
    if excluded:
        state = "excluded"
    elif coverage + slack_us / length_us < MIN_COVERAGE_RATIO:
        state, reason = "no_data", "no-samples"
    elif lost := _lost(promise, slots, io, threshold_us, found):
        state, reason = "bad", lost
    elif not found.is_measurable and not found.fault:
        state, reason = "no_data", "not-measurable"
    elif reason := _inapplicable(promise, applicability, slots, found.n, io, threshold_us):
        state = "not_applicable"
    elif found.fault:
        state, reason = "bad", found.fault
    else:
        state = "good"
    return SliceVerdict(
        state, found.n, found.missed, offered, threshold_us, coverage, inexact, reason, found.measured
    )


def exceeds(missed: int, n: int, percentile: float) -> bool:
    """Whether the percentile of n I/Os lies above the threshold that ``missed`` of them exceeded.

    In integers: percentiles have at most a few decimals, and (1 - 0.9) * n in floating point is above n / 10.
    """
    parts = round(percentile * 10_000)
    return missed * 1_000_000 > (1_000_000 - parts) * n


# -- The questions


def _lost(
    promise: Promise, slots: Sequence[StreamSlot], io: int, threshold_us: int | None, found: _Finding
) -> str:
    """Whether I/O hung, or failed more often than allowed: no clause excuses that. A reason, or nothing."""
    if promise.metric == "availability":
        limit_us = promise.outage_us
    else:
        limit_us = max(HUNG_US, threshold_us or 0, promise.curve[-1].threshold_us if promise.curve else 0)
    if any(slot.stalled_us >= limit_us and _concerns(slot, io) for slot in slots):
        return "hung"
    failed = sum(slot.failures(io) for slot in slots) if promise.counts_errors else 0
    is_stuck = promise.metric != "availability" and any(
        slot.oldest_ms * 1000 >= limit_us and _concerns(slot, io) for slot in slots
    )
    stuck = max(found.lost, 1) if is_stuck else 0
    if exceeds(failed + stuck, max(found.n, failed + stuck), promise.percentile):
        return "failed" if failed >= stuck else "hung"
    return ""


def _concerns(slot: StreamSlot, io: int) -> bool:
    """Whether what is outstanding may be of this kind; outstanding I/O is not told by kind.

    It is not if this kind completed all the time and none of it became overdue.
    """
    if io == IO_ANY or not slot.completed(io):
        return True
    return any(kind == io and counts.overdue > counts.settled for (kind, _), counts in slot.missed.items())


def _inapplicable(
    promise: Promise,
    clauses: Applicability,
    slots: Sequence[StreamSlot],
    n: int,
    io: int,
    threshold_us: int | None,
) -> str:
    """The clause that fails, a reason; or nothing."""
    if promise.curve and threshold_us is None:
        return "above-curve"
    if n < clauses.min_ios_per_slice:
        return "few-ios"
    if clauses.min_read_fraction is not None:
        reads = sum(slot.reads for slot in slots)
        if reads < clauses.min_read_fraction * (reads + sum(slot.writes for slot in slots)):
            return "read-share"
    if clauses.max_mean_io_kib is not None:
        done = sum(slot.completed(io) for slot in slots)
        if sum(slot.size(io) for slot in slots) > clauses.max_mean_io_kib * KIB * done:
            return "io-size"
    return ""


# -- What each indicator measures


def _percentile(
    promise: Promise, slots: Sequence[StreamSlot], io: int, threshold_us: int | None, _length_us: int
) -> _Finding:
    found = _Finding(sum(slot.completed(io) for slot in slots))
    if threshold_us is None:
        return found
    for slot in slots:
        _compare(found, promise, slot, io, threshold_us)
    found.missed = max(found.missed, 0)  # an I/O that was overdue before fails here: neither then nor now
    found.n = max(found.n, found.missed)
    found.fault = "slow" if exceeds(found.missed, found.n, promise.percentile) else ""
    return found


def _compare(found: _Finding, promise: Promise, slot: StreamSlot, io: int, threshold_us: int) -> None:
    """Add a slot's I/Os beyond the limit, and those that are not among the completed ones, or not judged."""
    done = slot.completed(io)
    counts = slot.missed.get((io, threshold_us), NO_COUNTS)
    beyond = counts.overdue - counts.settled
    found.lost += max(beyond, 0)
    if counts.counted == done:
        failed, failed_missed = counts.failed, counts.failed_missed
        missed = counts.missed
        if slot.failures_of_unknown_kind and (extra := slot.failures(io) - failed) > 0:
            # Which of them were slow is not known: none of them, so that each adds one.
            extra = min(extra, done - missed) if promise.counts_errors else extra
            failed, found.inexact = failed + extra, True
    else:
        hist = slot.hist(io)
        in_hist = int(hist.sum())
        if not in_hist and not counts.counted:
            found.is_measurable = False
            return
        found.inexact = True
        missed = min(done, missed_upper(hist, threshold_us) + max(done - in_hist, 0))
        failed, failed_missed = slot.failures(io), 0
        failed = min(failed, done - missed) if promise.counts_errors else failed
        if slot.oldest_ms * 1000 > threshold_us:
            beyond = max(beyond, slot.outstanding, 1)
    if promise.counts_errors:
        found.missed += missed + beyond + failed - failed_missed
        found.n += beyond
    else:
        found.missed += missed + beyond - failed_missed
        found.n += beyond - failed


def _mean(
    promise: Promise, slots: Sequence[StreamSlot], io: int, threshold_us: int | None, _length_us: int
) -> _Finding:
    found = _Finding(sum(slot.completed(io) for slot in slots))
    total_us = 0.0
    for slot in slots:
        done = slot.completed(io)
        if done == slot.reads + slot.writes:
            total_us += slot.lat_sum_us  # of both kinds together
        elif done and not slot.is_beside_path:
            found.inexact = True
            total_us += min(slot.lat_sum_us, _upper_sum_us(slot.hist(io)))
        else:
            found.is_measurable = found.is_measurable and not done
    found.missed = sum(slot.failures(io) for slot in slots)
    if found.n and found.is_measurable:
        found.measured = total_us / found.n
        found.fault = "slow" if threshold_us is not None and total_us > threshold_us * found.n else ""
    return found


def _upper_sum_us(hist: npt.NDArray[np.int64]) -> float:
    return float((hist * edges_for(len(hist))[1:].astype(np.float64)).sum()) / 1000


def _rate(
    promise: Promise, slots: Sequence[StreamSlot], io: int, _threshold_us: int | None, length_us: int
) -> _Finding:
    """IOPS and throughput: what was delivered, of what was promised or asked for."""
    done = sum(slot.completed(io) for slot in slots)
    failed = sum(slot.failures(io) for slot in slots)
    arrived = sum(slot.offered(io) for slot in slots)
    served = done - failed
    wanted = arrived if promise.counts_errors else max(arrived - failed, 0)
    unit = 1.0
    if promise.metric == "throughput":
        unit = sum(slot.size(io) for slot in slots) / done if done else 0.0
    delivered, asked = (count * unit * 1e6 / length_us for count in (served, wanted))
    found = _Finding(max(done, round(arrived)), missed=failed, measured=delivered)
    if delivered < DELIVERED_RATIO * min(promise.promised, asked):
        found.fault = "below"
    elif delivered < promise.promised:
        # Beside the I/O path demand is not known: what was not served may have been asked for.
        found.is_measurable = not any(slot.is_beside_path for slot in slots)
    return found


def _availability(
    _promise: Promise, slots: Sequence[StreamSlot], io: int, _threshold_us: int | None, _length_us: int
) -> _Finding:
    return _Finding(
        sum(slot.completed(io) for slot in slots),
        missed=sum(slot.failures(io) for slot in slots),
        measured=max((slot.stalled_us for slot in slots), default=0),
        is_measurable=not any(slot.is_beside_path for slot in slots),
    )


_FINDERS: Final = {
    "latency": _percentile,
    "mean_latency": _mean,
    "iops": _rate,
    "throughput": _rate,
    "availability": _availability,
}
