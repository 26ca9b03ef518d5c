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
from sla_server.db.rollup import Ingested, joined

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


def table_of(items: Sequence[Ingested]) -> pa.Table:
    """A table of SCHEMA for these cuts, in order."""
    lengths = np.array([max(item.cut.rows, 1) for item in items], dtype=np.int64)
    first_row = np.cumsum(lengths) - lengths
    counters = np.concatenate([_padded(item) for item in items], axis=1)
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
    columns = {
        name: pa.array(values, type=SCHEMA.field(name).type).take(repeat) for name, values in per_cut.items()
    }
    stream_id = counters[COL["stream_id"]]
    columns["stream_id"] = pa.array(stream_id, mask=stream_id < 0)
    columns |= {name: pa.array(counters[COL[name]]) for name in _COUNTERS}
    rows = int(lengths.sum())
    columns |= _lists(
        [item.cut.hist for item in items], first_row, rows, {"bucket": "hist_bucket", "count": "hist_count"}
    )
    names = {name: f"missed_{name}" for name in _MISSED}
    columns |= _lists([item.cut.missed for item in items], first_row, rows, names)
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _padded(item: Ingested) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counters of a cut; a cut without rows gives one row of zeros with stream_id -1 (stored as null)."""
    if item.cut.rows:
        return item.cut.counters
    row = np.zeros((len(COLUMNS), 1), dtype=np.int64)
    row[COL["stream_id"]] = -1
    return row


def _lists(
    arrays: Sequence[np.ndarray[Any, Any]], first_row: np.ndarray[Any, Any], rows: int, names: dict[str, str]
) -> dict[str, pa.Array]:
    """List columns from sparse entries; an entry's ``row`` counts from its cut's ``first_row``."""
    entries = joined(arrays)
    row = entries["row"] + np.repeat(first_row, [len(array) for array in arrays])
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
