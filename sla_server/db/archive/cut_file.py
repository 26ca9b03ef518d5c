"""Raw cuts as Parquet: one row a stream and cut, histograms sparse.

A cut without rows (nothing had I/O) is one row with a null ``stream_id``, so that every cut is there. Names
of streams stand in SQL; epochs are text, because Spark reads an unsigned 64-bit integer as decimal.
``start`` is the corrected start; ``raw_start_us`` is by the agent's clock. ``hist_bucket`` and
``hist_count`` are lists of equal length, in the numbering of ``pmdaemon.wire.histogram`` (all four
histograms); likewise the four ``missed_*`` lists. Files of one day lie in one directory; readers take
explicit paths from the manifest, never the directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from pmdaemon.wire.cut import COL, COLUMNS
from sla_server.db.ingest.rollup import CutColumns, Ingested, columns_of

_COUNTERS: Final = COLUMNS[1:]
_MISSED: Final = ("io", "threshold_us", "counted", "missed")
SCHEMA: Final = pa.schema(
    [
        ("gateway_id", pa.string()),
        ("epoch", pa.string()),
        ("seq", pa.int64()),
        ("start", pa.timestamp("us", tz="UTC")),
        ("raw_start_us", pa.int64()),
        ("offset_us", pa.int64()),
        ("duration_us", pa.int64()),
        ("gap", pa.int64()),
        ("throttle_gen", pa.int64()),
        ("threshold_version", pa.int64()),
        ("stream_id", pa.int64()),
        *((name, pa.int64()) for name in _COUNTERS),
        ("hist_bucket", pa.list_(pa.int16())),
        ("hist_count", pa.list_(pa.int64())),
        *((f"missed_{name}", pa.list_(pa.int64())) for name in _MISSED),
    ]
)


def table_of(items: Sequence[Ingested], columns: CutColumns | None = None) -> pa.Table:
    """A table of SCHEMA for these cuts, in order; ``columns`` are theirs, if somebody has joined them."""
    joined = columns or columns_of(items)
    lengths = np.maximum(joined.rows, 1)
    first_row = np.cumsum(lengths) - lengths
    counters = _padded(joined)
    per_cut: dict[str, list[Any]] = {
        "gateway_id": [item.cut.gateway_id for item in items],
        "epoch": [str(item.cut.epoch) for item in items],
        "seq": [item.cut.seq for item in items],
        "start": [item.start_us for item in items],
        "raw_start_us": [item.cut.start_unix_us for item in items],
        "offset_us": [item.offset_us for item in items],
        "duration_us": [item.cut.duration_us for item in items],
        "gap": [item.cut.gap for item in items],
        "throttle_gen": [item.cut.throttle_gen for item in items],
        "threshold_version": [item.cut.threshold_version for item in items],
    }
    repeat = pa.array(np.repeat(np.arange(len(items)), lengths))
    arrays = {
        name: pa.array(values, type=SCHEMA.field(name).type).take(repeat) for name, values in per_cut.items()
    }
    stream_id = counters[COL["stream_id"]]
    arrays["stream_id"] = pa.array(stream_id, mask=stream_id < 0)
    arrays |= {name: pa.array(counters[COL[name]]) for name in _COUNTERS}
    rows = int(lengths.sum())
    names = {"bucket": "hist_bucket", "count": "hist_count"}
    arrays |= _lists(joined.hist, np.repeat(first_row, joined.hist_entries), rows, names)
    names = {name: f"missed_{name}" for name in _MISSED}
    arrays |= _lists(joined.missed, np.repeat(first_row, joined.missed_entries), rows, names)
    return pa.table([arrays[name] for name in SCHEMA.names], schema=SCHEMA)


def _padded(columns: CutColumns) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counters; a cut without rows gets one row of zeros with stream_id -1 (stored as null)."""
    if columns.rows.all():
        return columns.counters
    place = np.cumsum(columns.rows)[columns.rows == 0]
    padding = np.zeros((len(COLUMNS), len(place)), dtype=np.int64)
    padding[COL["stream_id"]] = -1
    return np.insert(columns.counters, place, padding, axis=1)


def _lists(
    entries: np.ndarray[Any, Any], first_row: np.ndarray[Any, Any], rows: int, names: dict[str, str]
) -> dict[str, pa.Array]:
    """List columns from sparse entries; an entry's ``row`` counts from its cut's ``first_row``."""
    row = entries["row"] + first_row
    offsets = pa.array(np.searchsorted(np.sort(row, kind="stable"), np.arange(rows + 1)).astype(np.int32))
    if (row[1:] < row[:-1]).any():  # agents send them in order
        entries = entries[np.argsort(row, kind="stable")]
    lists = {}
    for field, name in names.items():
        values = entries[field]
        kind = SCHEMA.field(name).type.value_type
        lists[name] = pa.ListArray.from_arrays(
            offsets, pa.array(values.astype(kind.to_pandas_dtype()), type=kind)
        )
    return lists
