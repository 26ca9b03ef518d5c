"""The rows of many cuts as columns, one cut behind another: what a window adds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from pmdaemon.wire.cut import COL, IO_ANY, IO_READ, IO_WRITE
from sla_server.db.histogram_codec import TOTAL_BUCKETS
from sla_server.db.ingest.accumulator import Int64s
from sla_server.db.ingest.rollup import CutColumns, Ingested
from sla_server.db.schema import COUNTERS

_BUCKET_BITS: Final = 0xFFFF << 16
_COUNTER_ROWS: Final = [COL[name] for name in COUNTERS]


class CutRows:
    """All rows of all cuts, one behind another; ``n`` of them.

    Attributes:
        item: index of each row's cut, shape (n,).
        sums: the columns of SUMS, each of shape (n,).
        maxima: the columns of MAXIMA.
        hist_row: row of each entry of the two total histograms; ``hist_bucket`` and ``hist_count`` alike.
        missed_row: row of each entry of ``missed`` (MISSED_DTYPE).
    """

    def __init__(self, items: Sequence[Ingested], columns: CutColumns) -> None:
        lengths, counters = columns.rows, columns.counters
        self.n = int(lengths.sum())
        offsets = np.cumsum(lengths) - lengths
        self.gateways = [item.cut.gateway_id for item in items]
        self.item: Int64s = np.repeat(np.arange(len(items), dtype=np.int64), lengths)
        self.stream_id: Int64s = counters[COL["stream_id"]]
        start_us = np.array([item.start_us for item in items], dtype=np.int64)
        self.start_us: Int64s = start_us[self.item]
        duration_us = np.array([item.cut.duration_us for item in items], dtype=np.int64)[self.item]
        # As one number each: row, bucket << 16, count << 32.
        entries: Int64s = columns.hist.view("<i8")
        offset = np.repeat(offsets, columns.hist_entries)
        total = np.flatnonzero((entries & _BUCKET_BITS) < TOTAL_BUCKETS << 16)
        entries = entries[total]
        self.hist_row: Int64s = (entries & 0xFFFF) + offset[total]
        self.hist_bucket: Int64s = (entries >> 16) & 0xFFFF
        self.hist_count: Int64s = (entries >> 32) & 0xFFFF_FFFF
        self.missed = columns.missed
        self.missed_row: Int64s = self.missed["row"] + np.repeat(offsets, columns.missed_entries)
        held = counters[COL["held"]]
        was_held = (counters[COL["delay_sum_us"]] > 0) | (held > 0)
        self.sums = [
            *(counters[row_of] for row_of in _COUNTER_ROWS),
            duration_us,
            np.where(was_held, duration_us, 0),
            self._missed_any(),
            np.ones(self.n, dtype=np.int64),
        ]
        self.maxima = [held, counters[COL["inflight"]], self.start_us + duration_us]

    def _missed_any(self) -> Int64s:
        """I/Os of each row above the lowest threshold that applied to them."""
        worst = np.zeros((3, self.n), dtype=np.int64)
        flat = self.missed["io"].astype(np.int64) * self.n + self.missed_row
        np.maximum.at(worst.reshape(-1), flat, self.missed["missed"].astype(np.int64))
        most: Int64s = np.maximum(worst[IO_ANY], worst[IO_READ] + worst[IO_WRITE])
        return most
