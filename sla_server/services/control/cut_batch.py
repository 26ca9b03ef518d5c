"""A batch of cuts, of distinct gateways, summed in whole arrays: the use of volumes, the pieces of promises.

Which rows of a cut belong to which lines and places does not change while a gateway reports the same streams
in the same order: that is its ``RowPlan`` (``scopes``). A batch is concatenated plans and cuts, and a few
sums over them. What a stream does between its cuts follows the ``StreamStates``: a line none of whose streams
is in the cut, while one of them is apart or waits, is not fed: the cut says nothing of it.

Made and used up within one batch (``cut_intake``), by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import COL, IO_READ, IO_WRITE, OUTSTANDING, Cut
from pmdaemon.wire.histogram import BUCKETS, TOTAL_WRITE
from sla_server.agreements.rules import HUNG_US
from sla_server.services.control.indicators import LineUse, mean_counts, rate_counts
from sla_server.services.control.missed_entries import (
    Compared,
    Lines,
    LineSums,
    MissedEntries,
    Pairs,
    starts_of,
)
from sla_server.services.control.pieces import (
    ALL_BUCKETS,
    Bools,
    Floats,
    Ints,
    Pieces,
    percentiles_us,
    placed,
)
from sla_server.services.control.scopes import RowPlan
from sla_server.services.control.stream_states import Followed, Span
from sla_server.services.control.usage import GatewayTable, UsageTable

_TOTALS: Final = TOTAL_WRITE + BUCKETS
_BUCKET_OF: Final = np.arange(_TOTALS) % BUCKETS
"""Bucket of all I/Os by that of reads or of writes."""
_NO_BUCKETS: Final = slice(0, 0)
MOST_EACH: Final = 4
"""Of more that belong together, sums by their numbers are as fast."""
_PIECE: Final = [
    COL[name] for name in ("reads", "writes", "arrived", "errors", "read_bytes", "write_bytes", "lat_sum_us")
]


class Taken(NamedTuple):
    """One accepted cut and its gateway's plan.

    ``excused_ratio``: see ``verdicts``; ``lacks_planes``: a data plane of the gateway is missing from it;
    ``has_stopped``: for long.
    """

    cut: Cut
    table: GatewayTable
    plan: RowPlan
    now_ns: int
    excused_ratio: float = 0.0
    lacks_planes: bool = False
    has_stopped: bool = False


class CutBatch:
    """Accepted cuts of distinct gateways, at least one, side by side: counters of shape (columns, rows).

    What it finds outstanding is written into the stream states when it is made.
    """

    def __init__(self, taken: Sequence[Taken]) -> None:
        self.taken = taken
        self.plans = [t.plan for t in taken]
        self.counters: Ints = _joined([t.cut.counters for t in taken], axis=1)
        self.lines = np.array([plan.of_lines.shape[1] for plan in self.plans])
        self._rows = np.array([t.cut.rows for t in taken])
        self._row_start = starts_of(self._rows)
        self._line_start = starts_of(self.lines)
        self._entries = MissedEntries([t.cut for t in taken], self._row_start, self.counters.shape[1])
        self._learn_agents()
        self._counts = np.array([plan.of_known.shape[1] for plan in self.plans])
        known, self._place, self._numbers = _joined([plan.of_known for plan in self.plans], axis=1)
        self._known = known + np.repeat(self._row_start, self._counts)
        begins = [t.cut.start_unix_us for t in taken]
        ends = [t.cut.start_unix_us + t.cut.duration_us for t in taken]
        self._times = np.array([begins, ends, [t.now_ns for t in taken]])
        self._followed = self._follow()

    def _learn_agents(self) -> None:
        """What the agents tell follows from the kinds of entries they send."""
        most = self._entries.most
        for each in self.taken if most > IO_WRITE else ():
            table, missed = each.table, each.cut.missed
            if len(missed) and not (table.says_more and (table.tells_kinds or most <= OUTSTANDING)):
                kind = int(missed["io"].max())
                table.says_more |= kind > IO_WRITE
                table.tells_kinds |= kind > OUTSTANDING

    def _span(self, counts: Sequence[int] | Ints) -> Span:
        """The times of the cuts, each repeated."""
        start, end, now_ns = np.repeat(self._times, counts, axis=1)
        return Span(start.astype(np.float64), end.astype(np.float64), now_ns)

    def _follow(self) -> Followed:
        """What is outstanding, by row; zeros for streams not announced."""
        c, known, rows = self.counters, self._known, self.counters.shape[1]
        if len(known) != rows:
            c = c[:, known]
        counts = self._counts
        found = self.taken[0].table.usage_table.streams.follow(
            self._numbers,
            self._span(counts),
            c[COL["arrived"]],
            c[COL["reads"]] + c[COL["writes"]],
            c[COL["held"]] + c[COL["inflight"]],
            self._entries.oldest_us if len(known) == rows else self._entries.oldest_us[:, known],
            np.repeat([t.table.tells_kinds for t in self.taken], counts),
        )
        if len(known) == rows:
            return found
        before, after = np.zeros((3, rows)), np.zeros((3, rows))
        before[:, known], after[:, known] = found
        return Followed(before, after)

    def measure(self, usage_table: UsageTable) -> None:
        """Enter the use of every volume of these gateways; one not named in a cut had none, or is unknown."""
        sizes = np.array([len(t.table.places) for t in self.taken])
        total = int(sizes.sum())
        if not total:
            return
        place = self._place + np.repeat(starts_of(sizes), self._counts)
        c = self.counters
        says_more = np.repeat([t.table.says_more for t in self.taken], self._rows)
        parts = [
            c[COL["cost_milli"]],
            c[COL["reads"]] + c[COL["writes"]],
            c[COL["read_bytes"]] + c[COL["write_bytes"]],
            c[COL["held"]],
            c[COL["inflight"]],
            c[COL["errors"]] * ~says_more + self._entries.failed(says_more),
            self._followed.before[0],
            self._followed.after[0],
        ]
        if len(place) != c.shape[1]:  # some streams are not announced
            parts = [part[self._known] for part in parts]
        sums = sums_by(parts, place, total)
        is_present = np.bincount(place, minlength=total) > 0
        seconds = np.repeat([t.cut.duration_us / 1e6 for t in self.taken], sizes)
        places = _joined([t.table.places for t in self.taken])
        usage_table.update(places, sums, seconds, self._span(sizes), is_present)

    def pieces(self) -> Pieces | None:
        """The piece of every line, in order of cuts and their plans' lines; None if there is no line."""
        total = int(self.lines.sum())
        if not total:
            return None
        pairs = np.array([plan.pairs.shape[1] for plan in self.plans])
        row, line = _joined([plan.pairs for plan in self.plans], axis=1)
        row, line = row + np.repeat(self._row_start, pairs), line + np.repeat(self._line_start, pairs)
        finder = Lines(row, line, self.counters.shape[1], all(plan.plain for plan in self.plans))
        io, c = self._of_lines[0], self.counters
        kind, rows = io[line], c.shape[1]
        cell = kind * rows + row  # one index: with two it takes ten times as long
        before, after = (each.reshape(-1)[cell] for each in self._followed)
        gauge = c[COL["held"]] + c[COL["inflight"]]
        parts = sums_by([*(c[column][row] for column in _PIECE), gauge[row], before, after], line, total)
        reads, writes, arrived, errors, read_bytes, write_bytes, lat_sum_us, *gauges = parts
        waiting, before_sum, after_sum = gauges
        completed = done = reads + writes
        offered = arrived
        tells_kinds = np.repeat([t.table.tells_kinds for t in self.taken], self.lines)
        ended = completed
        if io.any():  # not all of them are about reads and writes alike
            done = np.choose(io, (done, reads, writes))
            by_kind = self._entries.arrivals(c[COL["arrived"]], c[COL["reads"]], c[COL["writes"]])
            offered = np.bincount(line, by_kind.reshape(-1)[cell], total)
            ended = np.where(tells_kinds, done, completed)
        covered_us = np.repeat([t.cut.duration_us for t in self.taken], self.lines)
        elsewhere = self._elsewhere(io, total)
        carried, is_present = np.zeros(total), np.bincount(line, minlength=total) > 0
        says_nothing, lacks = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
        if elsewhere is not None:
            waits, arrives, completes, silent, stopped = elsewhere
            before_sum, after_sum, waiting = before_sum + waits, after_sum + waits, waiting + waits
            carried, ended = arrives * (io == 0) * covered_us / 1e6, ended + completes
            says_nothing, lacks = ~is_present & (silent > 0), stopped > 0
        hist, used = self._hist(finder, io, total)
        sums = LineSums(
            io=io,
            threshold_us=np.where(self._compares[:, None], self._threshold_us, 0.0),
            done=done,
            hist=hist,
            errors=np.minimum(errors, done) * ~np.repeat([t.table.says_more for t in self.taken], self.lines),
            excludes=self._of_lines[4] > 0,
            used=used,
        )
        found = self._entries.compare(finder, sums, Pairs(row, line, after, covered_us[line]))
        size_bytes = read_bytes + write_bytes
        if io.any():
            size_bytes = np.choose(io, (size_bytes, read_bytes, write_bytes))
        stuck = np.zeros(total)
        if (found.oldest_us >= HUNG_US).any():
            hung_us = np.maximum(self._threshold_us.max(axis=1), HUNG_US)
            hangs = gauge[row] * (self._entries.oldest_us.reshape(-1)[cell] >= hung_us[line])
            stuck = np.maximum(np.bincount(line, hangs, total), found.oldest_us >= hung_us)
        if any(plan.has_others for plan in self.plans):
            is_other = self._is_mean | (self._promised > 0)
            use = LineUse(
                done,
                offered,
                found.errors,
                sums.excludes,
                completed,
                lat_sum_us,
                size_bytes,
                found.oldest_us,
                stuck,
                covered_us,
                found.abandoned,
                found.abandoned_us,
                placed(hist, used, ALL_BUCKETS),
            )
            self._count_others(found, finder, io, use, is_other)
        if sums.excludes.any():  # what is in no figure is no demand, and no part of the mix
            offered = offered - np.minimum(found.errors, done) * sums.excludes
            failed_reads, failed_writes = np.minimum(
                (found.failed_reads, found.failed_writes), (reads, writes)
            )
            completed, reads = completed - failed_reads - failed_writes, reads - failed_reads
        latency_us = percentiles_us(hist, self._figures[0], used)
        return Pieces(
            now_ns=np.repeat([t.now_ns for t in self.taken], self.lines),
            covered_us=covered_us,
            end_us=np.repeat(self._times[1], self.lines),
            is_present=is_present,
            says_nothing=says_nothing,
            lacks=lacks,
            offered=offered,
            carried=carried,
            done=done,
            completed=completed,
            reads=reads,
            size_bytes=size_bytes,
            sized=np.maximum(done - found.errors, 0.0),
            waiting=waiting,
            is_stuck=(ended == 0) & (before_sum > 0) & (after_sum > 0),
            counted=found.counted,
            missed=found.missed,
            failed=found.failed,
            oldest_us=found.oldest_us,
            silence_us=found.silence_us,
            stuck=stuck,
            overdue=found.overdue,
            hist=hist,
            inexact=found.inexact,
            # I/Os without any latency are of a source that measures none: nothing follows from them.
            is_measured=(done == 0) | (latency_us > 0) | ~found.inexact,
            latency_us=latency_us * self._compares,
            excused=done * np.repeat([t.excused_ratio for t in self.taken], self.lines),
            used=used,
        )

    def _count_others(self, found: Compared, finder: Lines, io: Ints, use: LineUse, at: Bools) -> None:
        """What counts for lines about a mean latency or a rate, which are ``at`` these places."""
        threshold_us = self._threshold_us
        slow: Floats | None = None
        if (use.left_out * self._is_mean).any():
            slow = self._entries.served_slower(finder, io, threshold_us, use.done, use.errors)[at]
        use, threshold_us = use.at(at), threshold_us[at]
        counted, missed = mean_counts(use, threshold_us, slow)
        promised, is_mean = self._promised[at], self._is_mean[at][:, None]
        rates = rate_counts(use, promised, _joined([plan.is_bytes for plan in self.plans])[at])
        found.counted[at] = np.where(is_mean, counted, rates[0][:, None])
        found.missed[at] = np.where(is_mean, missed, rates[1][:, None])
        found.inexact[at] = self._is_mean[at] & ((use.done != use.both) | (use.left_out > 0))

    @cached_property
    def _is_mean(self) -> npt.NDArray[np.bool_]:
        return _joined([plan.is_mean for plan in self.plans])

    @cached_property
    def _promised(self) -> Floats:
        return _joined([plan.promised for plan in self.plans])

    @cached_property
    def _compares(self) -> npt.NDArray[np.bool_]:
        """Whether I/Os of a line are compared with thresholds."""
        found: Bools = self._of_lines[3] > 0
        return found

    @cached_property
    def _of_lines(self) -> Ints:
        return _joined([plan.of_lines for plan in self.plans], axis=1)

    @cached_property
    def _figures(self) -> Floats:
        return _joined([plan.figures for plan in self.plans], axis=1)

    @property
    def _threshold_us(self) -> Floats:
        return self._figures[1:].T

    def _elsewhere(self, io: Ints, total: int) -> Floats | None:
        """What streams in scope that are not in their gateway's cut say, by line; None if nothing.

        Returns:
            Shape (5, lines): I/Os waiting; of streams that are apart I/Os arrived and completed a second; how
            many of them make that the cut says nothing of them; of how many the data plane has stopped.
        """
        counts = [len(plan.absent) for plan in self.plans]
        if not any(counts):
            return None
        line = _joined([plan.absent_line for plan in self.plans]) + np.repeat(self._line_start, counts)
        streams = _joined([plan.absent for plan in self.plans])
        lacks: Bools | None = None
        stopped: Bools | None = None
        if any(t.lacks_planes for t in self.taken):
            lacks = np.repeat([t.lacks_planes for t in self.taken], counts)
        if any(t.has_stopped for t in self.taken):
            stopped = np.repeat([t.has_stopped for t in self.taken], counts)
        states = self.taken[0].table.usage_table.streams
        found = states.absent(streams, self._span(counts), lacks, stopped)
        if not (found.says_nothing.any() or found.is_stopped.any()):
            return None
        waiting = found.waiting[io[line], np.arange(len(line))]
        return sums_by([waiting, *found.rates, found.says_nothing, found.is_stopped], line, total)

    def _hist(self, finder: Lines, io: Ints, total: int) -> tuple[npt.NDArray[np.int32], slice]:
        """Latencies of each line, shape (lines, buckets used); and those buckets."""
        lens = [len(t.cut.hist) for t in self.taken]
        # An entry is {u16 row, u16 bucket, u32 count}: two words, which are taken apart faster.
        entries = np.frombuffer(b"".join([t.cut.hist.tobytes() for t in self.taken]), "<u4")
        word, counts = entries[::2], entries[1::2]
        keep = np.flatnonzero(word < _TOTALS << 16)
        word, counts = word[keep].astype(np.int64), counts[keep]
        chosen, line = finder.of((word & 0xFFFF) + np.repeat(self._row_start, lens)[keep])
        if chosen is not None:
            word, counts = word[chosen], counts[chosen]
        bucket, count = word >> 16, counts.astype(np.float64)
        if io.any():
            kind = io[line]
            count[
                ((kind == IO_READ) & (bucket >= TOTAL_WRITE)) | ((kind == IO_WRITE) & (bucket < TOTAL_WRITE))
            ] = 0
        if not len(bucket):
            return np.zeros((total, 0), np.int32), _NO_BUCKETS
        bucket = _BUCKET_OF[bucket]
        first = min(int(bucket.min()), BUCKETS - 2)
        width = max(int(bucket.max()) + 1 - first, 2)
        cell = line * width
        cell += bucket - first
        dense = np.bincount(cell, weights=count, minlength=total * width)
        return dense.astype(np.int32).reshape(total, width), slice(first, first + width)

    def targets(self) -> tuple[Ints, Ints]:
        """Members of the signal table that each line feeds, over all backends and on one."""
        return self._of_lines[1], self._of_lines[2]


def _joined(arrays: Sequence[npt.NDArray[Any]], axis: int = 0) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)


def sums_by(parts: Sequence[npt.NDArray[Any]], index: Ints, total: int) -> Floats:
    """Sums of each of ``parts``, shape (n,), by ``index``, likewise: shape (parts, total)."""
    sums = np.empty((len(parts), total))
    each = len(index) // total if total else 0
    if 0 < each <= MOST_EACH and np.array_equal(index, np.repeat(np.arange(total), each)):
        # As many of each, side by side, as of volumes with one client, or with two: a third of the time.
        for into, part in zip(sums, parts, strict=True):
            into[:] = part[::each]
            for at in range(1, each):
                into += part[at::each]
        return sums
    for into, part in zip(sums, parts, strict=True):
        into[:] = np.bincount(index, weights=part, minlength=total)
    return sums
