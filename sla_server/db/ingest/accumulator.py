"""What has come since the last ingest transaction, summed: the one thing that transaction writes.

Theory of operation. The writer reads the queue all the time and adds each batch to an ``IngestWindow``; from
time to time the window goes to SQL in one transaction and begins again. The costs of SQL are by (slot,
stream), not by stream row: the longer the window, the less is written. Everything in it can be had again from
the queue, so it may be dropped at any moment (``reset``). A cut belongs wholly to the slot and the hour of
its corrected start.

A ``StreamIndex`` gives every stream id a small number; an ``Accumulator`` holds one slot's (or one hour's)
columns in that numbering, as dense arrays that whole batches are added to at once. Adding ten thousand rows
is one ``np.add.at`` a column, without sorting and without Python a row. Sums are int64, so they are exact.

Pure: no clock, no I/O. Not thread-safe: belongs to the writer thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE, OUTSTANDING_COLUMNS
from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS
from sla_server.db.histogram_codec import TOTAL_BUCKETS, Int64s
from sla_server.db.ingest.batch import CutRows, DecodedBatch, IngestedCut, columns_of
from sla_server.db.ingest.counters import CounterMemory
from sla_server.db.ingest.planes import PlaneMemory
from sla_server.db.ingest.refusals import RefusedClients
from sla_server.db.ingest.spread import overlap_us, shares, spread
from sla_server.db.schema import COUNTERS, FAILED, HOUR_US, LATE_SUMS, PLACED, STREAM_SUMS

SUMS: Final = (
    *COUNTERS,
    "covered_us",
    "caps_us",
    "missed_any",
    "cuts",
    "spread_us",
    "told_us",
    *PLACED,
    *FAILED,
)
"""Summed columns of an accumulator; the first ones are those of a cut, the last ones come as entries."""
MAXIMA: Final = ("held_max", "inflight_max", "last_us", *OUTSTANDING_COLUMNS)
_FIRST_ROWS: Final = 256
MISSED_COMPACT: Final = 1 << 20  # entries that wait to be added up: 24 MB
FULL_BYTES: Final = 512 << 20  # accumulators of 4 slots of 64,000 streams
MOST_BYTES: Final = 4 * FULL_BYTES  # however few slots they are of
FULL_CUTS: Final = 1 << 13  # of one stream: with another batch they stay below 2**16, see cut.MAX_COUNTER
SLOTS_AT_MINUTE_END: Final = 2  # a window has that many whenever a minute ends
_COARSE: Final = (np.arange(TOTAL_BUCKETS, dtype=np.int64) % BUCKETS) >> 1
_CUTS: Final = SUMS.index("cuts")
ROLLUP_SUMS: Final = (*COUNTERS, "covered_us", "spread_us", "told_us", *FAILED, "caps_us", *PLACED)
HOUR_SUMS: Final = (*COUNTERS, "covered_us", "caps_us")
GAUGES: Final = ("held_max", "inflight_max")
ROLLUP_GAUGES: Final = (*GAUGES, *OUTSTANDING_COLUMNS)
_FIRST_FAILED: Final = SUMS.index(FAILED[0])
_FIRST_OUTSTANDING: Final = MAXIMA.index(OUTSTANDING_COLUMNS[0])
_EVERY_KIND: Final = np.array((IO_ANY, IO_READ, IO_WRITE))
_KEY: Final = (1 << 59) - 1  # of a key of MissedSums, without what is counted
OPEN_SLOTS: Final = 15
"""Of an objective at least so many slices are remembered that wait for a gateway (``judging.judge``)."""
BEHIND_SLOTS: Final = 2
"""A gateway that is further behind at a start was catching up before it."""
GatewaySums = dict[tuple[int, str], list[int]]
_KeySums = tuple[Int64s, Int64s, Int64s]
_SETTLED_FAILED: Final = 3


def grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy whose last axis is ``size`` long, zero behind the old end."""
    new = np.zeros((*array.shape[:-1], size), dtype=array.dtype)
    new[..., : array.shape[-1]] = array
    return new


class StreamIndex:
    """Numbers streams 0, 1, 2, ... in order of appearance.

    Attributes:
        ids: stream ids by number, shape (n,).
        first_us: start of the first cut seen of each, shape (n,).
        gateways: gateway_id of that cut.
        order: all numbers, ordered by stream id.
    """

    def __init__(self) -> None:
        self.ids: Int64s = np.zeros(0, dtype=np.int64)
        self.first_us: Int64s = np.zeros(0, dtype=np.int64)
        self.gateways: list[str] = []
        self.order: Int64s = self.ids
        self._sorted: Int64s = self.ids

    def __len__(self) -> int:
        return len(self.ids)

    def numbers(self, ids: Int64s, start_us: Int64s, item: Int64s, gateways: Sequence[str]) -> Int64s:
        """Numbers of streams, new ones included.

        Args:
            ids: shape (rows,).
            start_us: start of each row's cut.
            item: index of each row's cut.
            gateways: gateway_id of each cut.
        """
        if not len(ids):
            return ids
        place, is_known = self._find(ids)
        if not is_known.all():
            missing = np.flatnonzero(~is_known)
            # In order of appearance, so that a gateway's streams lie together in memory.
            _, first = np.unique(ids[missing], return_index=True)
            new = missing[np.sort(first)]
            self.ids = np.concatenate((self.ids, ids[new]))
            self.first_us = np.concatenate((self.first_us, start_us[new]))
            self.gateways += [gateways[number] for number in item[new].tolist()]
            self.order = np.argsort(self.ids, kind="stable")
            self._sorted = self.ids[self.order]
            place, _ = self._find(ids)
        return self.order[place]

    def _find(self, ids: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Place of each id among the sorted ones, and whether it is there."""
        if not len(self._sorted):
            return np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.bool_)
        place = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        return place, self._sorted[place] == ids


class Accumulator:
    """Columns of one slot or hour.

    Args:
        width: histogram buckets of a row.

    Attributes:
        sums: shape (len(SUMS), rows).
        maxima: shape (len(MAXIMA), rows).
        hist: shape (rows * width,).
        is_touched: rows that something was added to, shape (rows,).
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.sums: Int64s = np.zeros((len(SUMS), _FIRST_ROWS), dtype=np.int64)
        self.maxima: Int64s = np.zeros((len(MAXIMA), _FIRST_ROWS), dtype=np.int64)
        self.hist: Int64s = np.zeros(_FIRST_ROWS * width, dtype=np.int64)
        self.is_touched = np.zeros(_FIRST_ROWS, dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.sums.nbytes + self.maxima.nbytes + self.hist.nbytes

    def ensure(self, rows: int) -> None:
        """Make room for stream numbers below ``rows``."""
        have = len(self.is_touched)
        if rows > have:
            size = max(rows, have * 2)
            self.sums, self.maxima = grown(self.sums, size), grown(self.maxima, size)
            self.is_touched = grown(self.is_touched, size)
            self.hist = grown(self.hist, size * self.width)

    def add(self, number: Int64s, sums: Sequence[Int64s], maxima: Sequence[Int64s]) -> None:
        """Add rows; one stream may occur several times.

        Args:
            number: stream of each row, shape (rows,).
            sums: a column of shape (rows,) for each of SUMS, but FAILED.
            maxima: the same for MAXIMA, but OUTSTANDING_COLUMNS.
        """
        for into, column in zip(self.sums[:_FIRST_FAILED], sums, strict=True):
            np.add.at(into, number, column)
        for into, column in zip(self.maxima[:_FIRST_OUTSTANDING], maxima, strict=True):
            np.maximum.at(into, number, column)
        self.is_touched[number] = True

    def add_failed(self, number: Int64s, io: Int64s, count: Int64s) -> None:
        """Add failed I/Os of kinds IO_ANY, IO_READ and IO_WRITE, all of shape (entries,)."""
        np.add.at(self.sums, (_FIRST_FAILED + io, number), count)

    def add_outstanding(self, number: Int64s, io: Int64s, oldest_ms: Int64s, stalled_ms: Int64s) -> None:
        """Raise the ages of outstanding I/O, of shape (entries,); ``io`` as in ``CutRows.outstanding``."""
        column = _FIRST_OUTSTANDING + 2 * io
        np.maximum.at(self.maxima, (column, number), oldest_ms)
        np.maximum.at(self.maxima, (column + 1, number), stalled_ms)
        self.is_touched[number] = True

    def add_hist(self, number: Int64s, bucket: Int64s, count: Int64s) -> None:
        """Add histogram entries, all of shape (entries,)."""
        np.add.at(self.hist, number * self.width + bucket, count)

    def rows(self, order: Int64s) -> Int64s:
        """Numbers of the touched streams, in the given order of all numbers."""
        self.ensure(len(order))
        return order[self.is_touched[order]]

    def hist_of(self, rows: Int64s) -> Int64s:
        """A copy of the histograms of some streams, shape (len(rows), width)."""
        return self.hist.reshape(-1, self.width)[rows]


class MissedSums:
    """I/Os of one slot compared with limits, by (stream number, io, threshold): the columns of LATE_SUMS."""

    def __init__(self) -> None:
        self._parts: list[_KeySums] = []
        self._entries = 0

    def add(self, number: Int64s, entries: npt.NDArray[Any]) -> None:
        """Add MISSED_DTYPE entries of the streams ``number``: comparisons, OVERDUE and FAILED of a limit."""
        # 2 bits of what is counted, 25 of stream number, 2 of io, 32 of threshold.
        io = entries["io"].astype(np.int64)
        key = (io >> 2 << 59) | (number << 34) | ((io & 3) << 32) | entries["threshold_us"]
        self._put((key, entries["counted"].astype(np.int64), entries["missed"].astype(np.int64)))

    def add_settled_failed(
        self, number: Int64s, io: Int64s, threshold_us: Int64s, most: Int64s, least: Int64s
    ) -> None:
        """Add settled completions that failed, as in ``CutRows.settled_failed``."""
        self._put((_SETTLED_FAILED << 59 | (number << 34) | (io << 32) | threshold_us, most, least))

    def _put(self, part: _KeySums) -> None:
        if len(part[0]):
            self._parts.append(part)
            self._entries += len(part[0])
        if self._entries > MISSED_COMPACT:
            self._parts = [self._added_up()]
            self._entries = len(self._parts[0][0])

    def _added_up(self) -> _KeySums:
        keys, counted, missed = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        return (
            ordered[starts],
            np.add.reduceat(counted[order], starts),
            np.add.reduceat(missed[order], starts),
        )

    def columns(self) -> dict[str, Int64s]:
        """``number``, ``io``, ``threshold_us`` and the columns of LATE_SUMS, each of shape (n,)."""
        if not self._parts:
            return dict.fromkeys(("number", "io", "threshold_us", *LATE_SUMS), np.zeros(0, dtype=np.int64))
        keys, first, second = self._added_up()
        base = np.unique(keys & _KEY)
        sums = {name: np.zeros(len(base), dtype=np.int64) for name in LATE_SUMS}
        for kind in range(4):  # comparisons, OVERDUE, FAILED, settled ones that failed
            chosen = keys >> 59 == kind
            place = np.searchsorted(base, keys[chosen] & _KEY)
            sums[LATE_SUMS[2 * kind]][place] = first[chosen]
            sums[LATE_SUMS[2 * kind + 1]][place] = second[chosen]
        return {"number": base >> 34, "io": (base >> 32) & 3, "threshold_us": base & 0xFFFF_FFFF, **sums}


class IngestMemory:
    """What is remembered of cuts from window to window.

    After a start it is what the queue still has of cuts before the cursor (``writer``). A window that is
    dropped takes back what its cuts made of it (``IngestWindow.reset``), so that they say the same again.

    Attributes:
        counters: lifetime counters.
        planes: which planes are in a cut, and whose streams are whose.
        refused: clients that were refused because the storage is not there.
        ends_us: gateway_id to the end of its newest cut.
        unheard: gateways of which no newer cut has come than SQL knew at the start.
        returning: gateway_id to the time that was judged without it, while it catches up.
    """

    def __init__(self, slot_us: int) -> None:
        self._slot_us = slot_us
        self.counters = CounterMemory()
        self.planes = PlaneMemory()
        self.refused = RefusedClients(slot_us)
        self.ends_us: dict[str, int] = {}
        self.unheard: frozenset[str] = frozenset()
        self.returning: dict[str, tuple[int, int]] = {}

    def restore_ends(self, ends_us: Mapping[str, int]) -> None:
        """What SQL says of the newest cuts; before the first cut."""
        self.ends_us, self.unheard = dict(ends_us), frozenset(ends_us)

    def begin_again(self) -> None:
        """Cuts of before may come again: a database was restored."""
        self.counters.begin_again()
        self.planes.begin_again()
        self.refused.begin_again()

    def copy(self) -> tuple[Any, ...]:
        """All of it, for ``go_back``."""
        parts = self.counters.copy(), self.planes.copy(), self.refused.copy()
        return (*parts, dict(self.ends_us), dict(self.returning), self.unheard)

    def go_back(self, state: tuple[Any, ...]) -> None:
        """What ``copy`` returned is remembered again."""
        counters, planes, refused, ends_us, returning, self.unheard = state
        self.counters.go_back(counters)
        self.planes.go_back(planes)
        self.refused.go_back(refused)
        self.ends_us, self.returning = dict(ends_us), dict(returning)

    def late_slots(self, item: IngestedCut, slots: Iterable[int]) -> list[int]:
        """Of the slots of a cut those that may have been judged without it; notes how far its gateway is.

        That is what lies before the end of a cut that came earlier: another data plane was not waited for.
        And what a gateway catches up with that was away for more than OPEN_SLOTS: the judge may have
        forgotten that it waited, or have judged without it. Of one that is behind when it is first heard of
        after a start it is not known for how long it was away.
        """
        name, end_us = item.cut.gateway_id, min(item.end_us, item.recv_us)
        known_us = min(self.ends_us.get(name, 0), item.recv_us)
        self.ends_us[name] = max(end_us, known_us)
        most = BEHIND_SLOTS if name in self.unheard else OPEN_SLOTS
        if known_us and item.recv_us - known_us > most * self._slot_us:
            self.returning.setdefault(name, (known_us, item.recv_us))
        if end_us > known_us:
            self.unheard -= {name}
        from_us, to_us = self.returning.get(name, (0, 0))
        if end_us >= to_us:
            self.returning.pop(name, None)
        return [
            slot
            for slot in slots
            if slot + self._slot_us <= known_us or (slot + self._slot_us > from_us and slot < to_us)
        ]


class IngestWindow:
    """The sums of the records ``first_seq`` to ``last_seq``; both 0 while it is empty.

    Args:
        slot_us: rollup interval.
        memory: of the cuts before; one of its own by default.

    Attributes:
        streams: numbers of all streams.
        slots: by slot_us.
        hours: by hour_us; only ``hist`` and ``is_touched`` are used: sums follow from the slots.
        missed: by slot_us.
        coverage: (slot_us, gateway_id) to [covered_us, cuts, gap_cuts, gap_ios]; time in the slots it was in,
            the rest in that of the cut's start.
        plane_gaps: (slot_us, gateway_id, plane) to how long cuts were without that plane (``planes``).
        late: (slot_us, gateway_id) of slots that may have been judged before this came.
        stream_planes: stream_id to the planes that are newly known to have it, None: not known any more.
        newest: gateway_id to [end_us, recv_us, offset_us] of its newest cut.
        marks: (gateway_id, epoch) to the highest seq.
        left_out: numbers of streams that SQL does not get.
        unowned: (volume, gateway_id) to rows of cuts that are of a volume which is not the gateway's.
    """

    def __init__(self, slot_us: int, memory: IngestMemory | None = None) -> None:
        self._slot_us = slot_us
        self._memory = memory or IngestMemory(slot_us)
        self._before: tuple[Any, ...] | None = None
        self._begin()

    def reset(self) -> None:
        """Drop what it holds, and what that made of the memory: it will be read again, or never counts.

        Of windows with one memory, the newest goes first.
        """
        if self._before is not None:
            self._memory.go_back(self._before)
        self._begin()

    def _begin(self) -> None:
        self._before = None
        self.first_seq = self.last_seq = 0
        self.slots: dict[int, Accumulator] = {}
        self.hours: dict[int, Accumulator] = {}
        self.missed: dict[int, MissedSums] = {}
        self.coverage: GatewaySums = {}
        self.plane_gaps: dict[tuple[int, str, str], int] = {}
        self.late: set[tuple[int, str]] = set()
        self.stream_planes: dict[int, frozenset[str] | None] = {}
        self.newest: dict[str, list[int]] = {}
        self.marks: dict[tuple[str, int], int] = {}
        self.streams = StreamIndex()
        self.left_out: Int64s = np.zeros(0, dtype=np.int64)
        self.unowned = Counter[tuple[str, str]]()

    @property
    def is_full(self) -> bool:
        """Whether it should be committed before more is added."""
        if self._nbytes > (FULL_BYTES if len(self.slots) > SLOTS_AT_MINUTE_END else MOST_BYTES):
            return True
        return sum(int(accumulator.sums[_CUTS].max()) for accumulator in self.slots.values()) > FULL_CUTS

    @property
    def _nbytes(self) -> int:
        return sum(accumulator.nbytes for accumulator in (*self.slots.values(), *self.hours.values()))

    def absorb(self, batch: DecodedBatch) -> None:
        """Add a batch, which follows directly."""
        if self._before is None:
            self._before = self._memory.copy()
        self.first_seq = self.first_seq or batch.first_seq
        self.last_seq = batch.last_seq
        self.unowned.update(batch.left_out)
        for key, seq in batch.marks.items():
            self.marks[key] = max(seq, self.marks.get(key, 0))
        for gateway in batch.gateways:
            for gateway_id, epoch, seq in gateway.floors:
                self.marks[gateway_id, epoch] = max(seq, self.marks.get((gateway_id, epoch), 0))
        if batch.columns is not None:
            idle = self._add_gateways(batch.cuts)
            items = spread(batch.cuts, self._slot_us, idle)
            columns = batch.columns if items is batch.cuts else columns_of(items)
            self._add_rows(CutRows(items, columns))

    def _add_gateways(self, items: Sequence[IngestedCut]) -> dict[int, tuple[int, int]]:
        """A row a cut, not a row a stream; index of cuts to the time in which they served nothing."""
        idle: dict[int, tuple[int, int]] = {}
        for index, item in enumerate(items):
            cut, start_us = item.cut, item.start_us
            said = self._memory.planes.check(cut, item.end_us)
            self.stream_planes.update(said.streams)
            if said.idle is not None:
                idle[index] = said.idle
            parts = list(shares(start_us, cut.duration_us, self._slot_us))
            late = self._memory.late_slots(item, (slot_us for slot_us, _ in parts))
            self.late.update((slot_us, cut.gateway_id) for slot_us in late)
            for slot_us, covered_us in parts:
                self.coverage.setdefault((slot_us, cut.gateway_id), [0, 0, 0, 0])[0] += covered_us
                for plane in said.missing:
                    self._add_gap(slot_us, cut.gateway_id, plane, covered_us)
                for plane, span in said.silent.items():
                    us = overlap_us(max(slot_us, start_us), slot_us + self._slot_us, span)
                    self._add_gap(slot_us, cut.gateway_id, plane, min(us, covered_us))
            sums = self.coverage[parts[0][0], cut.gateway_id]
            sums[1] += 1
            sums[2] += cut.gap
            sums[3] += self._memory.counters.unseen_ios(cut, start_us)
            last = self.newest.setdefault(cut.gateway_id, [0, 0, 0])
            # No cut ends after its receipt: an agent's clock that jumps must not say how far it got.
            end_us = min(start_us + cut.duration_us, item.recv_us)
            last[:] = max(last[0], end_us), max(last[1], item.recv_us), item.offset_us
        return idle

    def _add_gap(self, slot_us: int, gateway_id: str, plane: str, us: int) -> None:
        if us:
            key = slot_us, gateway_id, plane
            self.plane_gaps[key] = self.plane_gaps.get(key, 0) + us

    def _add_rows(self, rows: CutRows) -> None:
        self._add_refusals(rows)
        if not rows.n:
            return
        number = self.streams.numbers(rows.stream_id, rows.start_us, rows.item, rows.gateways)
        slot_us = rows.start_us // self._slot_us * self._slot_us
        slots = np.unique(slot_us).tolist()
        for slot in slots:
            # Nearly always there is one slot: then nothing needs to be picked out.
            mask = slot_us == slot if len(slots) > 1 else None
            accumulator = self._accumulator(self.slots, slot, TOTAL_BUCKETS)
            hour = self._accumulator(self.hours, slot // HOUR_US * HOUR_US, COARSE_BUCKETS)
            chosen = _picked(number, mask)
            accumulator.add(
                chosen, [_picked(c, mask) for c in rows.sums], [_picked(c, mask) for c in rows.maxima]
            )
            hour.is_touched[chosen] = True
            in_hist = None if mask is None else mask[rows.hist_row]
            stream, bucket, count = (
                _picked(column, in_hist)
                for column in (number[rows.hist_row], rows.hist_bucket, rows.hist_count)
            )
            accumulator.add_hist(stream, bucket, count)
            hour.add_hist(stream, _COARSE[bucket], count)
            in_missed = None if mask is None else mask[rows.missed_row]
            missed = _picked(rows.missed, in_missed)
            misses = self.missed.setdefault(slot, MissedSums())
            if len(missed):
                misses.add(_picked(number[rows.missed_row], in_missed), missed)
            for found, row, add in (
                (rows.failed, rows.failed_row, accumulator.add_failed),
                (rows.outstanding, rows.outstanding_row, accumulator.add_outstanding),
                (rows.settled_failed, rows.settled_failed_row, misses.add_settled_failed),
            ):
                if len(row):
                    in_found = None if mask is None else mask[row]
                    add(_picked(number[row], in_found), *(_picked(column, in_found) for column in found))

    def _add_refusals(self, rows: CutRows) -> None:
        """Stalls of clients that were refused: of reads and writes alike, as neither could begin."""
        stalls = self._memory.refused.absorb(rows)
        if not stalls:
            return
        ids = np.array([stall.stream_id for stall in stalls], dtype=np.int64)
        item = np.array([stall.item for stall in stalls], dtype=np.int64)
        start_us = np.array([rows.span_of(stall.item)[0] for stall in stalls], dtype=np.int64)
        number = self.streams.numbers(ids, start_us, item, rows.gateways)
        for place, stall in enumerate(stalls):
            slot = int(start_us[place]) // self._slot_us * self._slot_us
            accumulator = self._accumulator(self.slots, slot, TOTAL_BUCKETS)
            one = number[place : place + 1]
            self._accumulator(self.hours, slot // HOUR_US * HOUR_US, COARSE_BUCKETS).is_touched[one] = True
            stalled_ms = np.full(3, stall.stalled_us // 1000, dtype=np.int64)
            accumulator.add_outstanding(one.repeat(3), _EVERY_KIND, np.zeros(3, dtype=np.int64), stalled_ms)

    def _accumulator(self, accumulators: dict[int, Accumulator], time_us: int, width: int) -> Accumulator:
        accumulator = accumulators.get(time_us)
        if accumulator is None:
            accumulator = accumulators[time_us] = Accumulator(width)
        accumulator.ensure(len(self.streams))
        return accumulator

    # -- What SQL gets: rows ordered by stream id, as its index is.

    @property
    def _order(self) -> Int64s:
        order = self.streams.order
        return order[~np.isin(order, self.left_out)] if len(self.left_out) else order

    def slot_columns(self, slot_us: int) -> tuple[Int64s, dict[str, Int64s]]:
        """(numbers of the touched streams, columns of ``rollups`` without ``hist``)."""
        accumulator = self.slots[slot_us]
        rows = accumulator.rows(self._order)
        columns = {"slot_us": np.full(len(rows), slot_us), "stream_id": self.streams.ids[rows]}
        columns |= {name: accumulator.sums[SUMS.index(name)][rows] for name in ROLLUP_SUMS}
        columns |= {name: accumulator.maxima[MAXIMA.index(name)][rows] for name in ROLLUP_GAUGES}
        return rows, columns

    def hour_columns(self, hour_us: int) -> tuple[Int64s, dict[str, Int64s]]:
        """The same of ``rollup_hours``."""
        rows = self.hours[hour_us].rows(self._order)
        columns = {"hour_us": np.full(len(rows), hour_us), "stream_id": self.streams.ids[rows]}
        slots = [
            accumulator
            for slot_us, accumulator in self.slots.items()
            if slot_us // HOUR_US * HOUR_US == hour_us
        ]
        return rows, columns | _added(slots, rows, HOUR_SUMS, GAUGES)

    def stream_columns(self) -> tuple[Int64s, dict[str, Int64s]]:
        """Numbers and columns of ``streams``: what is added to the lifetime sums."""
        is_touched = np.zeros(len(self.streams), dtype=np.bool_)
        for accumulator in self.hours.values():
            accumulator.ensure(len(is_touched))
            is_touched |= accumulator.is_touched[: len(is_touched)]
        order = self._order
        rows = order[is_touched[order]]
        columns = {"stream_id": self.streams.ids[rows], "first_seen_us": self.streams.first_us[rows]}
        return rows, columns | _added(list(self.slots.values()), rows, STREAM_SUMS, ("last_us",))

    def missed_columns(self) -> dict[str, Int64s]:
        """Columns of ``rollup_missed``."""
        parts = []
        for slot_us, sums in self.missed.items():
            columns = sums.columns()
            if len(self.left_out):
                kept = ~np.isin(columns["number"], self.left_out)
                columns = {name: column[kept] for name, column in columns.items()}
            columns["stream_id"] = self.streams.ids[columns.pop("number")]
            parts.append({"slot_us": np.full(len(columns["io"]), slot_us), **columns})
        names = ("slot_us", "stream_id", "io", "threshold_us", *LATE_SUMS)
        empty: Int64s = np.zeros(0, dtype=np.int64)
        joined = {name: np.concatenate([empty, *(part[name] for part in parts)]) for name in names}
        order = np.lexsort((joined["threshold_us"], joined["io"], joined["stream_id"], joined["slot_us"]))
        return {name: column[order] for name, column in joined.items()}


def _added(
    accumulators: Sequence[Accumulator], rows: Int64s, sums: Sequence[str], maxima: Sequence[str]
) -> dict[str, Int64s]:
    """Columns over several accumulators; one that has no room for a row has nothing of it."""
    size = int(rows.max()) + 1 if len(rows) else 0
    for accumulator in accumulators:
        accumulator.ensure(size)
    columns: dict[str, Int64s] = {}
    zero: Int64s = np.zeros(len(rows), dtype=np.int64)
    for name in sums:
        index = SUMS.index(name)
        columns[name] = sum((accumulator.sums[index][rows] for accumulator in accumulators), start=zero)
    for name in maxima:
        index = MAXIMA.index(name)
        columns[name] = np.maximum.reduce(
            [zero, *(accumulator.maxima[index][rows] for accumulator in accumulators)]
        )
    return columns


def _picked(column: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[Any]:
    return column if mask is None else column[mask]
