"""Rollup slots of many streams as columns: what slices are judged from (``verdicts``).

A row is one stream in one slot. What was counted against limits, and latencies, are sparse: entries that name
their row. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE, OUTSTANDING_COLUMNS
from pmdaemon.wire.histogram import BUCKETS, EDGES_NS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
SLOT_COLUMNS: Final = (
    "arrived",
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "lat_sum_us",
    "errors",
    "failed",
    "failed_reads",
    "failed_writes",
    *OUTSTANDING_COLUMNS,
    "covered_us",
    "spread_us",
    "told_us",
    "outstanding",
)
LIMIT_COLUMNS: Final = (
    "counted",
    "missed",
    "overdue",
    "settled",
    "failed",
    "failed_missed",
    "settled_failed",
    "settled_failed_sure",
)


@dataclass(frozen=True)
class SlotTable:
    """Rollup slots, as columns.

    Attributes:
        columns: SLOT_COLUMNS, each of shape (rows,).
        hist: (row, bucket, count) of latencies, ordered by row; buckets 0..98 reads, 99..197 writes.
        limits: LIMIT_COLUMNS, each of shape (entries,).
        limit_key: (row, io, threshold_us) of each entry, as ``limit_key`` packs it.
    """

    columns: Mapping[str, Ints]
    hist: tuple[Ints, Ints, Ints]
    limits: Mapping[str, Ints]
    limit_key: Ints

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.limit_key, kind="stable")
        return self.limit_key[order], order

    @cached_property
    def overdue_of(self) -> tuple[Bools, Bools]:
        """Of each row and io, index row * 4 + io: whether limits were counted, and whether any was passed."""
        place, size = self.limit_key >> 32, 4 * (len(self.columns["arrived"]) + 1)
        counted, passed = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
        is_limit = (self.limit_key & 0xFFFF_FFFF) > 0
        counted[place[is_limit]] = True
        passed[place[is_limit & (self.limits["overdue"] > 0)]] = True
        return counted, passed

    @cached_property
    def in_hist(self) -> tuple[Ints, Ints]:
        """I/Os in the histograms of reads and writes, each of shape (rows,)."""
        row, bucket, count = self.hist
        found: Ints = np.zeros((2, len(self.columns["arrived"])), dtype=np.int64)
        np.add.at(found, ((bucket >= BUCKETS).astype(np.int64), row), count)
        return found[0], found[1]

    def counts(self, row: Ints, io: Ints, threshold_us: Ints) -> tuple[dict[str, Ints], Bools]:
        """LIMIT_COLUMNS of rows at limits, 0 where there is no entry, and where there is one."""
        keys, order = self._sorted
        wanted = limit_key(row, io, np.maximum(threshold_us, 0))
        if not len(keys):
            nothing = np.zeros(len(row), dtype=np.int64)
            return dict.fromkeys(LIMIT_COLUMNS, nothing), nothing.astype(np.bool_)
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        is_there: Bools = (keys[place] == wanted) & (threshold_us >= 0)
        entry = order[place]
        return {name: self.limits[name][entry] * is_there for name in LIMIT_COLUMNS}, is_there

    def abandoned(self, row: Ints, io: Ints) -> tuple[Ints, Ints]:
        """I/Os that ended without a completion, and the sum of their ages in us (``wire.cut``), by row."""
        found, _ = self.counts(row, io, np.zeros(len(row), dtype=np.int64))
        return found["overdue"], found["settled"] * 1000

    def arrivals(self, row: Ints, io: Ints) -> Floats:
        """I/Os of a kind that arrived, by row.

        Arrivals are not counted by kind; completions and what was given up are. What is left waits. It is
        shared out by how long the kinds do: many gather of one that hangs, and few of one that is served.
        Where nothing says what waits, all arrivals are shared out as what ended.
        """
        c = self.columns
        arrived, reads, writes = (c[name][row] for name in ("arrived", "reads", "writes"))
        read_ms, write_ms = (
            np.maximum(c[f"oldest_{kind}_ms"][row], c[f"stalled_{kind}_ms"][row])
            for kind in ("read", "write")
        )
        ended = of_kind(io, reads, writes) + self.abandoned(row, io)[0]
        all_ended = reads + writes + self.abandoned(row, np.full_like(io, IO_ANY))[0]
        left, waits_ms = arrived - all_ended, read_ms + write_ms
        waiting = ended + left * (of_kind(io, read_ms, write_ms) / np.maximum(waits_ms, 1))
        shared = arrived * (ended / np.maximum(all_ended, 1))
        found: Floats = np.where((left >= 0) & (waits_ms > 0), waiting, shared)
        return np.where(io == IO_ANY, arrived.astype(np.float64), found)

    def slower(self, row: Ints, io: Ints, than_us: Ints) -> Ints:
        """I/Os that may have taken longer than a time, by upper bucket edges, by row."""
        first = np.clip(np.searchsorted(EDGES_NS, than_us * 1000, side="right") - 1, 0, BUCKETS - 1)
        at, bucket, count = self._entries(row, io)
        return added(at, count * (bucket >= first[at]), len(row))

    def upper_sum_us(self, row: Ints, io: Ints) -> Floats:
        """Sum of latencies by upper bucket edges, by row."""
        at, bucket, count = self._entries(row, io)
        edges = EDGES_NS[1:].astype(np.float64) / 1000
        return float_sums(at, count * edges[bucket], len(row))

    def least_us(self, row: Ints, io: Ints, number: Ints) -> Floats:
        """What that many I/Os took together at least, by lower bucket edges, by row."""
        at, bucket, count = self._ordered(row, io)
        picked = _first(at, count, number[at])
        return float_sums(at, picked * (EDGES_NS[bucket] / 1000), len(row))

    def most_us(self, row: Ints, io: Ints, number: Ints, others: Ints, limit_us: Ints) -> Floats:
        """What that many I/Os, all but some ``others``, took together at most, by row.

        By upper bucket edges, and by what was counted against a limit: those of them that took longer are no
        more than its counts say, and the rest took no longer than the limit. The limit is -1 for none.
        """
        counts, is_there = self.counts(row, io, limit_us)
        is_exact = is_there & (counts["counted"] == number + others) & (counts["failed"] == others)
        slow = np.where(is_exact, np.maximum(counts["missed"] - counts["failed_missed"], 0), number)
        at, bucket, count = (column[::-1] for column in self._ordered(row, io))
        upper_us: Floats = EDGES_NS[bucket + 1] / 1000
        beyond = _first(at, count, np.minimum(slow, number)[at])
        found: Floats = float_sums(at, beyond * upper_us, len(row))
        is_below = EDGES_NS[bucket] < limit_us[at] * 1000
        at, count, upper_us = at[is_below], count[is_below], upper_us[is_below]
        rest = _first(at, count, np.maximum(number - slow, 0)[at])
        most_us: Floats = np.minimum(upper_us, limit_us[at].astype(np.float64))
        found += float_sums(at, rest * most_us, len(row))
        return found

    def _ordered(self, row: Ints, io: Ints) -> tuple[Ints, Ints, Ints]:
        """``_entries``, ordered by row and bucket."""
        at, bucket, count = self._entries(row, io)
        order = np.lexsort((bucket, at))
        return at[order], bucket[order], count[order]

    def _entries(self, row: Ints, io: Ints) -> tuple[Ints, Ints, Ints]:
        """(index of ``row``, bucket 0..98, count) of the histogram entries of the io kind."""
        of_row, bucket, count = self.hist
        low, high = np.searchsorted(of_row, row), np.searchsorted(of_row, row, side="right")
        at, entry = expanded(low, high)
        is_write = bucket[entry] >= BUCKETS
        wanted = (io[at] == IO_ANY) | (is_write == (io[at] == IO_WRITE))
        at, entry = at[wanted], entry[wanted]
        return at, bucket[entry] % BUCKETS, count[entry]


def limit_key(row: Ints, io: Ints, threshold_us: Ints) -> Ints:
    """2 bits of io and 32 of threshold below the row; so ``key >> 32`` is row * 4 + io."""
    found: Ints = (row << 34) | (io << 32) | threshold_us
    return found


def expanded(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """(index of the range, each number in it) of half-open ranges."""
    lengths = np.maximum(high - low, 0)
    at = np.repeat(np.arange(len(low), dtype=np.int64), lengths)
    first = np.cumsum(lengths) - lengths
    return at, np.arange(len(at), dtype=np.int64) - first[at] + low[at]


def _first(at: Ints, count: Ints, most: Ints) -> Ints:
    """Of counts, those of one row side by side: the first ``most`` of each row, in their order."""
    before = np.cumsum(count) - count
    starts = np.flatnonzero(np.append(True, at[1:] != at[:-1])[: len(at)])
    lengths = np.diff(np.append(starts, len(at)))
    found: Ints = np.clip(most - (before - np.repeat(before[starts], lengths)), 0, count)
    return found


def of_kind(io: Ints, reads: Ints, writes: Ints) -> Ints:
    found: Ints = np.where(io != IO_WRITE, reads, 0) + np.where(io != IO_READ, writes, 0)
    return found


def added(index: Ints, values: Ints, size: int) -> Ints:
    """Whole-number sums by index."""
    found = np.zeros(size, dtype=np.int64)
    np.add.at(found, index, values)
    return found


def float_sums(index: Ints, values: Floats, size: int) -> Floats:
    return np.bincount(index, weights=values, minlength=size).astype(np.float64)
