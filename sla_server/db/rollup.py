"""From decoded cuts to the sums that the ingest transaction adds to SQL. Pure: no clock, no I/O.

A cut belongs wholly to the slot and the hour of its corrected start. Everything is vectorised over all rows
of all cuts of a batch: rows are sorted by their key and summed by ``np.add.reduceat`` in int64, so sums are
exact.

``screen`` refuses cuts whose numbers cannot be true; otherwise one of them could overflow a sum in SQL and
stop the ingest for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import COL, IO_ANY, IO_READ, IO_WRITE, Cut
from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS
from sla_server.db.histcodec import TOTAL_BUCKETS
from sla_server.db.schema import COUNTERS

Int64s = npt.NDArray[np.int64]
HOUR_US: Final = 3_600_000_000
MAX_COUNTER: Final = 1 << 50  # per cut: 1 PB read or 35 years of summed latency; 2**13 such still fit int64
MAX_UNIX_US: Final = 4_102_444_800_000_000  # the year 2100
MAX_DURATION_US: Final = 86_400_000_000  # a day
_CUMULATIVE: Final = ("cum_reads", "cum_writes", "cum_read_bytes", "cum_write_bytes")
_SUMMED: Final = np.array(
    [index for name, index in COL.items() if name != "stream_id" and name not in _CUMULATIVE]
)


@dataclass(frozen=True, slots=True)
class Ingested:
    """One cut with what was learned at receipt.

    Attributes:
        start_us: corrected start, us UTC.
        offset_us: what was added to the agent's clock.
        recv_us: server's wall clock at receipt.
    """

    cut: Cut
    offset_us: int
    recv_us: int

    @property
    def start_us(self) -> int:
        """Corrected start."""
        return self.cut.start_unix_us + self.offset_us

    @property
    def end_us(self) -> int:
        """Corrected end."""
        return self.start_us + self.cut.duration_us


def screen(item: Ingested) -> str | None:
    """Why this cut cannot be true, or None."""
    cut = item.cut
    if cut.duration_us > MAX_DURATION_US:
        return f"it lasts {cut.duration_us} us, more than a day"
    if not 0 <= item.start_us <= MAX_UNIX_US:
        return f"its corrected start {item.start_us} us lies before 1970 or behind 2100"
    if cut.seq >= 1 << 63 or cut.gap >= 1 << 63:
        return f"its sequence number {cut.seq} or gap {cut.gap} exceeds 63 bits"
    if cut.rows and int(cut.counters[_SUMMED].max()) > MAX_COUNTER:
        return "a counter exceeds 2**50"
    return None


@dataclass(frozen=True, slots=True)
class Sums:
    """Rows to add to one table: columns by name, all of shape (n,).

    Attributes:
        keys: the natural key.
        values: what is added, set or raised.
        hist_row: index into the n rows, for each histogram entry; sorted.
        hist_bucket: bucket of each entry.
        hist_count: its count.
    """

    keys: dict[str, Int64s]
    values: dict[str, Int64s]
    hist_row: Int64s
    hist_bucket: Int64s
    hist_count: Int64s

    def __len__(self) -> int:
        return len(next(iter(self.keys.values())))


@dataclass(frozen=True, slots=True)
class Rollup:
    """Everything a batch of cuts adds to the statistics tables."""

    slots: Sums
    hours: Sums
    streams: Sums
    missed: Sums
    first_seen_us: Int64s
    stream_gateway: list[str]


_NONE: Final = np.zeros(0, dtype=np.int64)


def roll_up(items: Sequence[Ingested], slot_us: int) -> Rollup:
    """Sum a batch.

    Args:
        items: screened cuts, in order.
        slot_us: rollup interval.
    """
    rows = _Rows(items, slot_us)
    counters = {name: rows.counters[COL[name]] for name in COUNTERS}
    covered = {**counters, "covered_us": rows.duration_us}
    gauges = {"held_max": rows.counters[COL["held"]], "inflight_max": rows.counters[COL["inflight"]]}
    was_held = (rows.counters[COL["delay_sum_us"]] > 0) | (rows.counters[COL["held"]] > 0)
    caps = {"caps_us": np.where(was_held, rows.duration_us, 0)}
    entries = rows.histogram_entries()
    slots = _group({"slot_us": rows.slot_us, "stream_id": rows.stream_id}, covered, gauges, entries)
    row, bucket, count = entries
    coarse = (row, (bucket % BUCKETS) >> 1, count)
    hours = _group(
        {"hour_us": rows.hour_us, "stream_id": rows.stream_id}, {**covered, **caps}, gauges, coarse
    )
    lifetime = {name: counters[name] for name in ("reads", "writes", "read_bytes", "write_bytes", "errors")}
    lifetime |= {"missed_any": rows.missed_any(), "cuts": np.ones(rows.n, dtype=np.int64)}
    streams = _group({"stream_id": rows.stream_id}, lifetime, {"last_us": rows.end_us}, (_NONE, _NONE, _NONE))
    _, first = np.unique(rows.stream_id, return_index=True)
    gateways = [items[int(rows.item[index])].cut.gateway_id for index in first]
    return Rollup(slots, hours, streams, rows.missed_sums(), rows.start_us[first], gateways)


class _Rows:
    """All rows of all cuts, one behind another; ``n`` of them."""

    def __init__(self, items: Sequence[Ingested], slot_us: int) -> None:
        self._items = items
        lengths = np.array([item.cut.rows for item in items], dtype=np.int64)
        self._offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        self.n = int(self._offsets[-1])
        self.item = np.repeat(np.arange(len(items), dtype=np.int64), lengths)
        self.counters: Int64s = np.concatenate(
            [item.cut.counters for item in items] or [np.zeros((len(COL), 0), dtype=np.int64)], axis=1
        )
        self.stream_id = self.counters[COL["stream_id"]]
        start = np.array([item.start_us for item in items], dtype=np.int64)
        duration = np.array([item.cut.duration_us for item in items], dtype=np.int64)
        self.start_us = np.repeat(start, lengths)
        self.duration_us = np.repeat(duration, lengths)
        self.end_us = self.start_us + self.duration_us
        self.slot_us = self.start_us // slot_us * slot_us
        self.hour_us = self.start_us // HOUR_US * HOUR_US

    def histogram_entries(self) -> tuple[Int64s, Int64s, Int64s]:
        """(row, bucket, count) of the two total histograms."""
        if not self._items:
            return _NONE, _NONE, _NONE
        row = np.concatenate(
            [item.cut.hist["row"] + offset for item, offset in zip(self._items, self._offsets, strict=False)]
        )
        bucket = np.concatenate([item.cut.hist["bucket"] for item in self._items]).astype(np.int64)
        count = np.concatenate([item.cut.hist["count"] for item in self._items]).astype(np.int64)
        total = (bucket < TOTAL_BUCKETS) & (count > 0)
        return row[total].astype(np.int64), bucket[total], count[total]

    def _missed_entries(self) -> tuple[Int64s, npt.NDArray[Any]]:
        """(row, entries) of all cuts."""
        pairs = [(item.cut.missed, o) for item, o in zip(self._items, self._offsets, strict=False)]
        pairs = [pair for pair in pairs if len(pair[0])]
        if not pairs:
            return _NONE, np.zeros(
                0, dtype=[("io", "i8"), ("threshold_us", "i8"), ("counted", "i8"), ("missed", "i8")]
            )
        row = np.concatenate([missed["row"].astype(np.int64) + offset for missed, offset in pairs])
        return row, np.concatenate([missed for missed, _ in pairs])

    def missed_sums(self) -> Sums:
        """Counted and missed I/Os by (slot, stream, io, threshold)."""
        row, entries = self._missed_entries()
        keys = {
            "slot_us": self.slot_us[row],
            "stream_id": self.stream_id[row],
            "io": entries["io"].astype(np.int64),
            "threshold_us": entries["threshold_us"].astype(np.int64),
        }
        values = {name: entries[name].astype(np.int64) for name in ("counted", "missed")}
        return _group(keys, values, {}, (_NONE, _NONE, _NONE))

    def missed_any(self) -> Int64s:
        """Shape (n,): I/Os of each row above the lowest threshold that applied to them."""
        row, entries = self._missed_entries()
        worst = np.zeros((3, self.n), dtype=np.int64)
        for io in (IO_ANY, IO_READ, IO_WRITE):
            chosen = entries["io"] == io
            np.maximum.at(worst[io], row[chosen], entries["missed"][chosen].astype(np.int64))
        most: Int64s = np.maximum(worst[IO_ANY], worst[IO_READ] + worst[IO_WRITE])
        return most


def _group(
    keys: Mapping[str, Int64s],
    add: Mapping[str, Int64s],
    maximum: Mapping[str, Int64s],
    hist: tuple[Int64s, Int64s, Int64s],
) -> Sums:
    """Group rows by their keys: sums, maxima, and histogram entries summed by (group, bucket)."""
    columns = list(keys.values())
    n = len(columns[0])
    if n == 0:
        names = (*add, *maximum)
        return Sums(dict.fromkeys(keys, _NONE), dict.fromkeys(names, _NONE), _NONE, _NONE, _NONE)
    order = np.lexsort(columns[::-1])
    changes = np.zeros(n, dtype=bool)
    changes[0] = True
    for column in columns:
        ordered = column[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(changes)
    values = {name: np.add.reduceat(column[order], starts) for name, column in add.items()}
    values |= {name: np.maximum.reduceat(column[order], starts) for name, column in maximum.items()}
    group_of = np.empty(n, dtype=np.int64)
    group_of[order] = np.cumsum(changes) - 1
    row, bucket, count = sum_entries(group_of[hist[0]], hist[1], hist[2])
    return Sums({name: keys[name][order][starts] for name in keys}, values, row, bucket, count)


def sum_entries(row: Int64s, bucket: Int64s, count: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Add the counts of entries with the same (row, bucket); the result is sorted by them."""
    if not len(row):
        return _NONE, _NONE, _NONE
    combined = row * TOTAL_BUCKETS + bucket
    order = np.argsort(combined, kind="stable")
    ordered = combined[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sums = np.add.reduceat(count[order], starts)
    return ordered[starts] // TOTAL_BUCKETS, ordered[starts] % TOTAL_BUCKETS, sums


def dense_hours(sums: Sums) -> Int64s:
    """Histograms of hourly sums, shape (n, 50)."""
    dense = np.zeros((len(sums), COARSE_BUCKETS), dtype=np.int64)
    dense[sums.hist_row, sums.hist_bucket] = sums.hist_count
    return dense
