"""Sums under way, one row a stream, as dense arrays that whole batches are added to at once.

A ``StreamIndex`` gives every stream id a small number; an ``Accumulator`` holds one slot's (or one hour's)
columns in that numbering. Adding ten thousand rows is one ``np.add.at`` a column, without sorting and without
Python a row. Sums are int64, so they are exact.

Pure: no clock, no I/O. Not thread-safe: belongs to the writer thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sla_server.db.schema import COUNTERS

Int64s = npt.NDArray[np.int64]
SUMS: Final = (*COUNTERS, "covered_us", "caps_us", "missed_any", "cuts")
"""Summed columns of a sheet; the first ones are those of a cut."""
MAXIMA: Final = ("held_max", "inflight_max", "last_us")
_FIRST_ROWS: Final = 256
MISSED_COMPACT: Final = 1 << 20  # entries that wait to be added up: 24 MB


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
            # In order of appearance, so that a gateway's streams stand together in memory.
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
            sums: a column of shape (rows,) for each of SUMS.
            maxima: the same for MAXIMA.
        """
        for into, column in zip(self.sums, sums, strict=True):
            np.add.at(into, number, column)
        for into, column in zip(self.maxima, maxima, strict=True):
            np.maximum.at(into, number, column)
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
    """Counted and missed I/Os of one slot by (stream number, io, threshold)."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64s, Int64s, Int64s]] = []
        self._entries = 0

    def add(self, number: Int64s, entries: npt.NDArray[Any]) -> None:
        """Add MISSED_DTYPE entries of the streams ``number``."""
        # 29 bits of stream number, 2 of io, 32 of threshold.
        key = (number << 34) | (entries["io"].astype(np.int64) << 32) | entries["threshold_us"]
        self._parts.append((key, entries["counted"].astype(np.int64), entries["missed"].astype(np.int64)))
        self._entries += len(key)
        if self._entries > MISSED_COMPACT:
            self._parts = [self._added_up()]
            self._entries = len(self._parts[0][0])

    def _added_up(self) -> tuple[Int64s, Int64s, Int64s]:
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
        """``number``, ``io``, ``threshold_us``, ``counted``, ``missed``, each of shape (n,)."""
        if not self._parts:
            empty = np.zeros(0, dtype=np.int64)
            return dict.fromkeys(("number", "io", "threshold_us", "counted", "missed"), empty)
        key, counted, missed = self._added_up()
        return {
            "number": key >> 34,
            "io": (key >> 32) & 3,
            "threshold_us": key & 0xFFFF_FFFF,
            "counted": counted,
            "missed": missed,
        }
