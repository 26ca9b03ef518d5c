"""Pieces: what one cut says of one promise, in arrays; and their sums, of which windows are made.

A piece has the sums over the streams in the promise's scope at one gateway. ``cut_batch`` makes the pieces of
a batch of cuts, ``windows`` merges them.

Misses are exact where the cut counted them for the threshold; where it did not (a threshold set of another
version) they are taken from histogram edges, pessimistically, and the piece is ``inexact``. An I/O that is
outstanding for longer than the threshold counts as missed from then on, once, and so does one that failed
(SLA-MODEL.md 2, "Never good without proof"); ``counted`` has both.

Shapes: (pieces,), (pieces, steps); histograms (.., buckets in use) int32: latencies of a second are in some
20 of the 99 buckets. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS, EDGES_NS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]
Pick = Ints | slice
"""Which pieces of a batch: numbers, or all of them in their order, which needs no copy."""
_EDGES: Final = EDGES_NS.astype(np.float64)
ALL_BUCKETS: Final = slice(0, BUCKETS)
_FEW: Final = 64
"""Fewer are not worth the look."""


@dataclass(slots=True)
class Pieces:
    """Pieces of one batch, one a line of its plans (``cut_batch``), in the order of the cuts.

    Attributes:
        now_ns: when the cut came; covered_us: its duration; both of shape (pieces,).
        end_us: when it ended, agent's clock.
        is_present: whether the cut has a stream in scope; says_nothing: it has none, which says nothing.
        lacks: some stream in scope is of a data plane that has stopped: of that nothing is known.
        offered: I/Os of the promise's kind that arrived, also those held back, less those that failed and
            are excluded (which may have arrived in a cut before); done: of them completed.
        carried: as ``offered``, of streams that other cuts of this time are about, by the rates of those.
        completed, reads: reads and writes, also where the promise is about one of them, less what failed and
            is excluded.
        size_bytes, sized: bytes of the promise's kind, and the I/Os that succeeded, which they are of.
        waiting: gauge, I/Os held or under way when the cut ended.
        is_stuck: nothing completed, though something was outstanding when the cut began, and when it ended.
        counted: for each step of the curve, how many were compared with it; shape (pieces, steps).
        missed: how many of them took longer, are overdue, or failed; shape (pieces, steps).
        failed: how many of ``missed`` failed.
        oldest_us: age of the oldest I/O outstanding when the cut ended, 0 if not known.
        silence_us: longest time without completion while an I/O was outstanding, 0 if not known.
        stuck: I/Os outstanding in streams of which some hangs; a mean latency counts each as ``oldest_us``.
        overdue: I/Os that became overdue, less those that were and completed; shape (pieces, steps).
        hist: latency histogram, of the buckets ``used``; shape (pieces, buckets used).
        inexact: whether misses are from histogram edges.
        is_measured: whether the source measures what is promised.
        latency_us: the promise's percentile of ``hist``, 0 if it has none.
        excused: I/Os that may be late because the gateway had to wait for the processor of its host.
        used: buckets of ``hist``; the others are empty. slice(0, 0): all are.
    """

    now_ns: Ints
    covered_us: Ints
    end_us: Ints
    is_present: Bools
    says_nothing: Bools
    lacks: Bools
    offered: Floats
    carried: Floats
    done: Floats
    completed: Floats
    reads: Floats
    size_bytes: Floats
    sized: Floats
    waiting: Floats
    is_stuck: Bools
    counted: Floats
    missed: Floats
    failed: Floats
    oldest_us: Floats
    silence_us: Floats
    stuck: Floats
    overdue: Floats
    hist: Counts
    inexact: Bools
    is_measured: Bools
    latency_us: Floats
    excused: Floats
    used: slice = field(default_factory=lambda: ALL_BUCKETS)


MIX: Final = 4
"""Figures of ``PieceSums.mix``."""


@dataclass(slots=True)
class PieceSums:
    """What goes into a window of each of some rows, which are distinct.

    ``mix``: reads and writes completed, reads, bytes, I/Os that they are of; shape (MIX, rows).
    """

    done: Floats
    mix: Floats
    counted: Floats
    missed: Floats
    failed: Floats
    stall_us: Floats
    hist: Counts
    inexact: Bools
    excused: Floats
    latency_us: Floats

    def at(self, index: Ints | Bools) -> PieceSums:
        """Of some of the rows."""
        return PieceSums(
            self.done[index],
            self.mix[:, index],
            self.counted[index],
            self.missed[index],
            self.failed[index],
            self.stall_us[index],
            self.hist[index],
            self.inexact[index],
            self.excused[index],
            self.latency_us[index],
        )

    def copied(self) -> PieceSums:
        """The same in arrays of its own: of all pieces of a batch it has those of the batch."""
        return PieceSums(*(getattr(self, each.name).copy() for each in fields(self)))


def evenly(index: Ints) -> Pick:
    """``index``, which rises, as a slice if it does so in equal steps, or as it is.

    Numpy reads and writes by a slice in a third of the time; but what it reads then is a view. Gateways that
    were announced one after another, and report together, have such numbers.
    """
    if len(index) < _FEW:
        return index
    step = int(index[1] - index[0])
    if step < 1 or index[-1] - index[0] != step * (len(index) - 1) or (index[1:] - index[:-1] != step).any():
        return index
    return slice(int(index[0]), int(index[-1]) + 1, step)


def join_used(one: slice, other: slice) -> slice:
    """The buckets from the first to the last of both."""
    if not (one.stop and other.stop):
        return one if one.stop else other
    return slice(min(one.start, other.start), max(one.stop, other.stop))


def placed(hist: Counts, used: slice, into: slice) -> Counts:
    """A histogram of the buckets ``used`` as one of the buckets ``into``, which have all of these."""
    if used == into:
        return hist
    found = np.zeros((len(hist), into.stop - into.start), np.int32)
    if used.stop:
        found[:, used.start - into.start : used.stop - into.start] = hist
    return found


def percentiles_us(hist: npt.NDArray[Any], percentile: Floats, used: slice = ALL_BUCKETS) -> Floats:
    """``histogram.percentile_us`` of each row of ``hist``; 0 for a row without I/O.

    ``used``: its buckets, two at least or none.
    """
    if not used.stop:
        return np.zeros(len(hist))
    cumulative = hist.cumsum(axis=1, dtype=np.int32)
    total = cumulative[:, -1]
    want = percentile / 100 * total
    least = np.ceil(want).astype(np.int32)  # of whole numbers the same, and compared in half the time
    index = (cumulative >= least[:, None]).argmax(axis=1)
    cell = np.arange(len(hist)) * hist.shape[1] + index  # one index: with two it takes twice as long
    count = hist.reshape(-1)[cell]
    before = cumulative.reshape(-1)[cell] - count
    inside = np.where(count > 0, (want - before) / np.maximum(count, 1), 1.0)
    low, high = _EDGES[used.start :][index], _EDGES[used.start + 1 :][index]
    latency: Floats = (low + (high - low) * np.minimum(np.maximum(inside, 0.0), 1.0)) / 1000
    latency[total == 0] = 0.0
    return latency


def mix_of(pieces: Pieces, pick: Pick) -> Floats:
    parts = (pieces.completed, pieces.reads, pieces.size_bytes, pieces.sized)
    return np.array([part[pick] for part in parts])


def running_sums(values: npt.NDArray[Any], first: Ints, run: Ints) -> Floats:
    """Sums from the beginning of each run to each of its pieces."""
    total = np.cumsum(values, dtype=np.float64)
    before = np.concatenate((np.zeros(1), total))[first]
    running: Floats = total - before[run]
    return running
