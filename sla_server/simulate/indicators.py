"""Promises of mean latencies, rates and availability, on what became of simulated requests.

As at a gateway a request is asked for when it arrives, and counts as completed when it ends; one that storage
never answers is outstanding to the end. A second is judged by the rules of live windows, as a cut of that
second (``services.control.indicators``), a slice by those of stored slices (``agreements.slices``):

- More than 1 % of the completions failed, or nothing completed for ``HUNG_US`` (of availability for its
  ``outage``) while some request was outstanding: bad, whatever is promised.
- Mean latency: bad if that of the completions is above the threshold of its demand curve.
- IOPS, throughput: bad if less was delivered than was asked for, as far as it was promised. What is under way
  counts as delivered until the oldest request has waited for ``HUNG_US``.

Pure. Times are seconds unless a name says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_KINDS, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import BUCKETS, EDGES_NS
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import MEGABYTE, NO_PERCENTILE, Promise
from sla_server.agreements.slices import StreamSlot, judge_slice
from sla_server.agreements.verdicts import DELIVERED_RATIO
from sla_server.services.control.indicators import LineUse, mean_counts, rate_counts
from sla_server.services.control.promise_terms import hung_us

Found = Mapping[str, npt.NDArray[Any]]
"""Requests in order of arrival, as ``IoLog.arrays`` has them, and ``done``: which were answered."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
AT_ONCE: Final = 4096  # seconds: their histograms are 3 MB
UNITS: Final[Mapping[str, tuple[float, str]]] = {
    "latency": (1.0, "ms"),
    "mean_latency": (1.0, "ms"),
    "iops": (1.0, "IOPS"),
    "throughput": (1 / MEGABYTE, "MB/s"),
    "availability": (1.0, "s"),
}
"""Metric to what makes its figure of I/Os, bytes, ms or s, and to the unit that is shown."""


class Waits:
    """How long the requests of a promise waited, and none of them completed."""

    def __init__(self, found: Found) -> None:
        self._at = found["at"]
        ends = np.where(found["done"], found["at"] + found["latency"], np.inf)
        self._ended_by = np.maximum.accumulate(ends)  # the first that exceeds a time waits then
        order = np.argsort(ends, kind="stable")[: int(found["done"].sum())]
        self._ends = ends[order]
        self._quiet = self._ends - np.maximum(np.append(-np.inf, self._ends[:-1]), self._at[order])

    def within(self, first: float, last: float) -> tuple[int, int]:
        """Ms: age of the oldest that is outstanding at the end, and the longest time without completion."""
        oldest, stalled = self.between(np.array([first]), np.array([last]))
        return int(oldest[0] * 1e3), int(stalled[0] * 1e3)

    def between(self, firsts: Floats, lasts: Floats) -> tuple[Floats, Floats]:
        """The same in seconds, of times that follow one another, each of shape (times,)."""
        low, high = np.searchsorted(self._ends, (firsts[0], lasts[-1]))
        ends, stalled = self._ends[low:high], np.zeros(len(firsts))
        of = np.searchsorted(firsts, ends, side="right") - 1
        inside = ends < lasts[of]
        np.maximum.at(stalled, of[inside], self._quiet[low:high][inside])
        place = np.searchsorted(self._ended_by, lasts)
        arrived = np.append(self._at, np.inf)[place]
        waits = arrived < lasts
        age = np.where(waits, lasts - arrived, 0.0)
        ended = np.append(-np.inf, self._ends)[np.searchsorted(self._ends, lasts)]
        quiet = np.where(waits, np.minimum(age, lasts - ended), 0.0)
        return age, np.maximum(stalled, quiet)


@dataclass(frozen=True)
class Seconds:
    """How the seconds of a promise were.

    Attributes:
        judged, above: numbers of seconds with I/O inside and beyond the curve.
        bad: seconds, rising.
    """

    judged: int
    bad: list[int]
    above: int


class Served:
    """Requests of one promise by when they end; made once, as sorting is most of it."""

    def __init__(self, promise: Promise, found: Found) -> None:
        self._promise, self._at = promise, found["at"]
        self.waits = Waits(found)
        done = found["done"]
        ends = found["at"][done] + found["latency"][done]
        order = np.argsort(ends, kind="stable")
        self._ends = ends[order]
        self._failed = found["failed"][done][order].astype(np.int64)
        self._size = np.where(self._failed > 0, 0, found["size"][done][order])
        self._is_write = found["is_write"][done][order]
        self._latency_us = found["latency"][done][order] * 1e6
        self._bucket = np.clip(
            np.searchsorted(EDGES_NS, self._latency_us * 1e3, side="right") - 1, 0, BUCKETS - 1
        )

    def slot(self, first: float, last: float) -> StreamSlot:
        """What gateways would have stored of a slice."""
        low, high = np.searchsorted(self._ends, (first, last))
        arrived = np.diff(np.searchsorted(self._at, (first, last)))[0]
        outstanding = int(np.searchsorted(self._at, last)) - high
        oldest_ms, stalled_ms = self.waits.within(first, last)
        is_write, failed = self._is_write[low:high], self._failed[low:high]
        size, bucket, io = self._size[low:high], self._bucket[low:high], IO_KINDS[self._promise.io]
        length_us = round((last - first) * 1e6)
        return StreamSlot(
            arrived=int(arrived),
            reads=int((~is_write).sum()),
            writes=int(is_write.sum()),
            read_bytes=int(size[~is_write].sum()),
            write_bytes=int(size[is_write].sum()),
            hist_read=np.bincount(bucket[~is_write], minlength=BUCKETS).astype(np.int64),
            hist_write=np.bincount(bucket[is_write], minlength=BUCKETS).astype(np.int64),
            lat_sum_us=round(float(self._latency_us[low:high].sum())),
            errors=int(failed.sum()),
            failed=int(failed.sum()),
            failed_reads=int(failed[~is_write].sum()),
            failed_writes=int(failed[is_write].sum()),
            oldest_ms=oldest_ms,
            stalled_ms=stalled_ms,
            oldest_read_ms=oldest_ms if io == IO_READ else 0,
            stalled_read_ms=stalled_ms if io == IO_READ else 0,
            oldest_write_ms=oldest_ms if io == IO_WRITE else 0,
            stalled_write_ms=stalled_ms if io == IO_WRITE else 0,
            covered_us=length_us,
            told_us=length_us,
            outstanding=outstanding,
        )

    def seconds(self, spans: Sequence[tuple[float, float]], excluded: Bools | None = None) -> Seconds:
        """See the module.

        Args:
            spans: the times that were simulated.
            excluded: of all their seconds, those in which nothing is promised.
        """
        starts = whole_seconds(spans)
        judged, above, bad = 0, 0, list[int]()
        for place in range(0, len(starts), AT_ONCE):
            chosen = starts[place : place + AT_ONCE]
            held = np.ones(len(chosen), np.bool_) if excluded is None else ~excluded[place : place + AT_ONCE]
            if not held.any():
                continue
            has_io, inside, is_bad = self._judged(chosen[held])
            judged += int((has_io & inside).sum())
            above += int((has_io & ~inside).sum())
            bad += chosen[held][has_io & inside & is_bad].tolist()
        return Seconds(judged, bad, above)

    def _judged(self, starts: Ints) -> tuple[Bools, Bools, Bools]:
        """Of some seconds, which may have gaps between them: those with I/O, inside the curve, and bad."""
        promise, firsts = self._promise, starts.astype(np.float64)
        low, high = np.searchsorted(self._ends, firsts), np.searchsorted(self._ends, firsts + 1)
        offered = (np.searchsorted(self._at, firsts + 1) - np.searchsorted(self._at, firsts)).astype(float)
        outstanding = np.searchsorted(self._at, firsts + 1) - high
        oldest_us, stalled_us = (each * 1e6 for each in self.waits.between(firsts, firsts + 1))
        done, failed = (high - low).astype(np.float64), _summed(self._failed, low, high)
        limit_us = hung_us(promise)
        is_bad = stalled_us >= limit_us
        if promise.counts_errors:
            is_bad |= failed > (1 - NO_PERCENTILE / 100) * done
        inside = np.ones(len(starts), np.bool_)
        if promise.metric != "availability":
            size = _summed(self._size, low, high)
            use = LineUse(
                done=done,
                offered=offered,
                failed=failed,
                excludes=np.full(len(starts), not promise.counts_errors),
                both=done,
                lat_sum_us=_summed(self._latency_us, low, high),
                size_bytes=size,
                oldest_us=oldest_us,
                stuck=outstanding.astype(np.float64) * (oldest_us >= limit_us),
                covered_us=np.full(len(starts), 1_000_000),
                abandoned=np.zeros(len(starts)),
                abandoned_us=np.zeros(len(starts)),
                hist=self._hist(low, high),
            )
            over, inside = self._over(use)
            is_bad |= over
        return (offered > 0) | (done > 0) | (outstanding > 0), inside, is_bad

    def _over(self, use: LineUse) -> tuple[Bools, Bools]:
        """Whether more was missed than may be, and whether demand was inside the curve."""
        promise = self._promise
        if promise.metric != "mean_latency":
            is_bytes = np.full(len(use.done), promise.metric == "throughput")
            counted, missed = rate_counts(use, np.full(len(use.done), promise.promised), is_bytes)
            return missed > (1 - DELIVERED_RATIO) * counted + 1e-9, np.ones(len(counted), np.bool_)
        up_to = np.array([step.up_to_iops for step in promise.curve])
        limits_us = np.array([float(step.threshold_us) for step in promise.curve])
        step = ((use.offered - use.left_out)[:, None] > up_to).sum(axis=1)
        inside: Bools = step < len(up_to)
        every = np.broadcast_to(limits_us, (len(step), len(limits_us)))
        counted, missed = mean_counts(use, every)
        at = np.arange(len(step)), np.minimum(step, len(up_to) - 1)
        return missed[at] > counted[at] + 1e-9, inside

    def _hist(self, low: Ints, high: Ints) -> Floats:
        """Latencies of the completions of some seconds, shape (seconds, BUCKETS)."""
        row = np.repeat(np.arange(len(low)), high - low)
        at = np.concatenate([np.arange(*each) for each in zip(low, high, strict=True)] or [low])
        cell = row * BUCKETS + self._bucket[at.astype(np.int64)]
        return np.bincount(cell, minlength=len(low) * BUCKETS).reshape(len(low), BUCKETS).astype(np.float64)

    def measured_in(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """The figure of its indicator over all spans, in its unit; None: there was nothing to measure."""
        found = [
            (each, last - first) for first, last in spans if (each := self.measured(first, last)) is not None
        ]
        if not found:
            return None
        if self._promise.metric == "availability":
            return max(each for each, _ in found)
        if self._promise.metric == "mean_latency":
            parts = [self._kept_us(first, last) for first, last in spans]
            return float(np.concatenate(parts).mean()) / 1e3
        return sum(each * length for each, length in found) / sum(last - first for first, last in spans)

    def measured(self, first: float, last: float) -> float | None:
        """The same of one time."""
        low, high = np.searchsorted(self._ends, (first, last))
        asked = np.diff(np.searchsorted(self._at, (first, last)))[0]
        metric = self._promise.metric
        if metric == "availability":
            return self.waits.within(first, last)[1] / 1e3 if asked or high > low else None
        if metric == "mean_latency":
            kept = self._kept_us(first, last)
            return float(kept.mean()) / 1e3 if len(kept) else None
        served = float((self._failed[low:high] == 0).sum())
        amount = float(self._size[low:high].sum()) if metric == "throughput" else served
        return amount / max(last - first, 1e-9) * UNITS[metric][0] if asked or served else None

    def _kept_us(self, first: float, last: float) -> Floats:
        """Latencies of completions that count."""
        low, high = np.searchsorted(self._ends, (first, last))
        found: Floats = self._latency_us[low:high]
        return found if self._promise.counts_errors else found[self._failed[low:high] == 0]


def state_of(promise: Promise, clauses: Applicability, slot: StreamSlot) -> str:
    """The verdict of the server's own rule on a slice that was seen whole."""
    length_us = promise.slice_s * 1_000_000
    found = judge_slice(
        promise, clauses, [slot], {"simulated": length_us}, length_us=length_us, excluded=False
    )
    return found.state


def whole_seconds(spans: Sequence[tuple[float, float]]) -> Ints:
    """The seconds that begin within the spans."""
    parts = [np.arange(np.floor(first), np.ceil(last)) for first, last in spans]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _summed(values: npt.NDArray[Any], low: Ints, high: Ints) -> Floats:
    """Sums of values[low:high], of each."""
    sums = np.append(0.0, np.cumsum(values, dtype=np.float64))
    found: Floats = sums[high] - sums[low]
    return found


def series_of(
    served: Served, spans: Sequence[tuple[float, float]], width: float
) -> list[tuple[float, float | None]]:
    """(second, figure of its indicator) in steps of that many seconds."""
    found = []
    for first, last in spans:
        edges = np.append(np.arange(first, last, width), last)
        for start, end in itertools.pairwise(edges.tolist()):
            found.append((start, served.measured(start, end)))
    return found
