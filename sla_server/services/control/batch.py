"""Many cuts at once: the use of every volume and the pieces of every promise, summed in whole arrays.

A *line* is one promise and the streams it covers at one gateway; it yields one piece a cut, which up to two
rows of the bank (over all backends, and on one) and trackers of their own are fed with. Which rows of a cut
belong to which lines and places does not change while a gateway reports the same streams in the same order:
that is its ``RowPlan``, made by ``scopes``. A batch is concatenated plans and cuts, and a few sums over them.

Pure functions. A batch holds at most one cut of a gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import COL, IO_KINDS, IO_READ, IO_WRITE, Cut
from pmdaemon.wire.histogram import BUCKETS, EDGES_NS, TOTAL_WRITE
from sla_server.services.control.signal import Bools, Floats, Ints, Pieces, percentiles_us
from sla_server.services.control.usage import GatewayTable, UsageTable

_TOTALS: Final = TOTAL_WRITE + BUCKETS
_PIECE: Final = np.array([COL[name] for name in ("reads", "writes", "arrived", "held", "inflight")])
_EVERY: Final = np.arange(BUCKETS)
NO_ROW: Final = -1


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where the rows of a gateway's cuts belong.

    Attributes:
        ids: the stream_id column it was made for, as bytes.
        rows: table row of each cut row, -1 for a stranger; shape (n,).
        known: cut rows that are no strangers; ``place``: index of their volume at the gateway; shape (k,).
        pair_row, pair_line: cut row and line of each pair of the two, by row; shape (pairs,).
        io, percentile: of each line (wire.cut.IO_KINDS); shape (lines,).
        threshold_us: of each step, 0 where a curve has fewer; shape (lines, steps).
        whole, back: the bank's rows to feed, NO_ROW for none; shape (lines,).
        backends: of ``back``, by line.
        plain: every stream is known and in at most one line.
    """

    ids: bytes
    rows: Ints
    known: Ints
    place: Ints
    pair_row: Ints
    pair_line: Ints
    io: Ints
    percentile: Floats
    threshold_us: Floats
    whole: Ints
    back: Ints
    backends: tuple[str, ...]
    plain: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """One accepted cut and its gateway's plan; ``excused_ratio``: see ``windows``."""

    cut: Cut
    table: GatewayTable
    plan: RowPlan
    now_ns: int
    excused_ratio: float = 0.0


class CutBatch:
    """Accepted cuts of distinct gateways, at least one, side by side: counters of shape (columns, rows)."""

    def __init__(self, taken: Sequence[Taken]) -> None:
        self.taken = taken
        self.plans = [t.plan for t in taken]
        self.counters: Ints = _joined([t.cut.counters for t in taken], axis=1)
        self.lines = np.array([len(plan.io) for plan in self.plans])
        self._rows = np.array([t.cut.rows for t in taken])
        self._row_start = _starts(self._rows)
        self._line_start = _starts(self.lines)

    def measure(self, board: UsageTable) -> None:
        """Enter the use of every volume of these gateways; one not named in a cut had none."""
        sizes = np.array([len(t.table.places) for t in self.taken])
        total = int(sizes.sum())
        if not total:
            return
        counts = np.array([len(plan.known) for plan in self.plans])
        place = _joined([plan.place for plan in self.plans]) + np.repeat(_starts(sizes), counts)
        c = self.counters
        parts = np.stack(
            (
                c[COL["cost_milli"]],
                c[COL["reads"]] + c[COL["writes"]],
                c[COL["read_bytes"]] + c[COL["write_bytes"]],
                c[COL["held"]],
                c[COL["inflight"]],
            )
        )
        if len(place) != parts.shape[1]:  # strangers among them
            known = _joined([plan.known for plan in self.plans]) + np.repeat(self._row_start, counts)
            parts = parts[:, known]
        sums = _sums(parts, place, total)
        seconds = np.repeat([t.cut.duration_us / 1e6 for t in self.taken], sizes)
        board.update(_joined([t.table.places for t in self.taken]), sums, seconds)

    def pieces(self) -> Pieces | None:
        """The piece of every line, in order of cuts and their plans' lines; None if there is no line."""
        total = int(self.lines.sum())
        if not total:
            return None
        pairs = np.array([len(plan.pair_row) for plan in self.plans])
        row = _joined([plan.pair_row for plan in self.plans]) + np.repeat(self._row_start, pairs)
        line = _joined([plan.pair_line for plan in self.plans]) + np.repeat(self._line_start, pairs)
        finder = _Lines(row, line, self.counters.shape[1], all(plan.plain for plan in self.plans))
        io = _joined([plan.io for plan in self.plans])
        reads, writes, arrived, held, inflight = _sums(self.counters[_PIECE][:, row], line, total)
        done = reads + writes
        offered = arrived
        if io.any():  # not all of them are about reads and writes alike
            every, done = done, np.choose(io, (done, reads, writes))
            # Arrivals are not counted by kind: assume the mix of what completed.
            mix = (io > 0) & (every > 0)
            offered = np.where(mix, arrived * done / np.maximum(every, 1), arrived)
        hist = self._hist(finder, io, total)
        threshold_us = _joined([plan.threshold_us for plan in self.plans])
        missed, inexact = self._missed(finder, io, threshold_us, done, hist)
        return Pieces(
            now_ns=np.repeat([t.now_ns for t in self.taken], self.lines),
            covered_us=np.repeat([t.cut.duration_us for t in self.taken], self.lines),
            offered=offered,
            done=done,
            waiting=held + inflight,
            missed=missed,
            hist=hist,
            inexact=inexact,
            latency_us=percentiles_us(hist, _joined([plan.percentile for plan in self.plans])),
            excused=done * np.repeat([t.excused_ratio for t in self.taken], self.lines),
        )

    def _hist(self, finder: _Lines, io: Ints, total: int) -> npt.NDArray[np.int32]:
        lens = np.array([len(t.cut.hist) for t in self.taken])
        # An entry is {u16 row, u16 bucket, u32 count}; as one integer it is taken apart faster.
        entries = _joined([t.cut.hist.view("<u8") for t in self.taken])
        bucket = (entries >> 16).astype(np.uint16)
        start = np.repeat(self._row_start, lens)
        keep = np.flatnonzero(bucket < _TOTALS)
        entries, bucket = entries[keep], bucket[keep].astype(np.int64)
        row = (entries & 0xFFFF).astype(np.int64) + start[keep]
        chosen, line = finder.of(row)
        if chosen is not None:
            entries, bucket = entries[chosen], bucket[chosen]
        count = (entries >> 32).astype(np.float64)
        if io.any():
            kind = io[line]
            count[
                ((kind == IO_READ) & (bucket >= TOTAL_WRITE)) | ((kind == IO_WRITE) & (bucket < TOTAL_WRITE))
            ] = 0
        cell = line * BUCKETS + bucket - BUCKETS * (bucket >= TOTAL_WRITE)
        dense = np.bincount(cell, weights=count, minlength=total * BUCKETS)
        return dense.astype(np.int32).reshape(total, BUCKETS)

    def _missed(
        self, finder: _Lines, io: Ints, threshold_us: Floats, done: Floats, hist: npt.NDArray[np.int32]
    ) -> tuple[Floats, Bools]:
        total, steps = threshold_us.shape
        lens = np.array([len(t.cut.missed) for t in self.taken])
        # {u16 row, u16 io, u32 threshold_us, u32 counted, u32 missed}
        entries = _joined([t.cut.missed.view("<u4") for t in self.taken]).reshape(-1, 4).astype(np.int64)
        chosen, line = finder.of((entries[:, 0] & 0xFFFF) + np.repeat(self._row_start, lens))
        if chosen is not None:
            entries = entries[chosen]
        about = (entries[:, 0] >> 16) == io[line]
        missed, counted = np.zeros((total, steps)), np.zeros((total, steps))
        for step in range(steps):
            found = np.flatnonzero(about & (entries[:, 1] == threshold_us[line, step]))
            of = line[found]
            counted[:, step] = np.bincount(of, weights=entries[found, 2], minlength=total)
            missed[:, step] = np.bincount(of, weights=entries[found, 3], minlength=total)
        guessed = (counted != done[:, None]) & (threshold_us > 0)
        if guessed.any():
            # Not counted for this threshold: pessimistic, a bucket counts unless it lies wholly below.
            at, which = np.nonzero(guessed)
            whole = np.searchsorted(EDGES_NS, threshold_us[at, which] * 1000, side="right") - 1
            missed[at, which] = (hist[at] * (np.maximum(whole, 0)[:, None] <= _EVERY)).sum(axis=1)
        return missed, guessed.any(axis=1)

    def targets(self) -> tuple[Ints, Ints]:
        """Rows of the bank that each line feeds, over all backends and on one, NO_ROW for none."""
        return _joined([plan.whole for plan in self.plans]), _joined([plan.back for plan in self.plans])


class _Lines:
    """From rows of a batch to lines; a row may be in none or several."""

    def __init__(self, row: Ints, line: Ints, rows: int, plain: bool) -> None:
        self._line, self._plain = line, plain
        if plain:
            self._of_row = np.full(rows, NO_ROW)
            self._of_row[row] = line
        else:
            self._count = np.bincount(row, minlength=rows)
            self._first = _starts(self._count)

    def of(self, row: Ints) -> tuple[Ints | None, Ints]:
        """(which of the rows, None for all of them once and in order; the line of each of those)."""
        if self._plain:
            line = self._of_row[row]
            if not len(line) or line.min() >= 0:
                return None, line
            chosen = np.flatnonzero(line >= 0)
            return chosen, line[chosen]
        count = self._count[row]
        chosen = np.repeat(np.arange(len(row)), count)
        within = np.arange(len(chosen)) - np.repeat(_starts(count), count)
        return chosen, self._line[self._first[row][chosen] + within]


def kind_of(io: str) -> int:
    """The number of a promise's kind of I/O on the wire."""
    return IO_KINDS[io]


def _joined(arrays: Sequence[npt.NDArray[Any]], axis: int = 0) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)


def _starts(sizes: Ints) -> Ints:
    """Where each part begins in the concatenation."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts


def _sums(parts: Ints, index: Ints, total: int) -> Floats:
    """Sums of each of ``parts``, shape (m, n), by ``index``, shape (n,): shape (m, total)."""
    cells = (np.arange(len(parts))[:, None] * total + index).ravel()
    sums = np.bincount(cells, weights=parts.ravel(), minlength=len(parts) * total)
    return sums.astype(np.float64, copy=False).reshape(len(parts), total)
