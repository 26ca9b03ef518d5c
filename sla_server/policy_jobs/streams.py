"""Streams as the jobs count them: on the backend of today, and numbered within their volume.

The driver has as many rows of them as the fleet has streams; no Spark is needed for that.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def streams_now(streams: pa.Table, volumes: pa.Table) -> pa.Table:
    """The streams with the backend their volume lies on now, and ``rank``: 0, 1, ... within the volume.

    A stream of a client that left before its volume was moved still names the former backend; counted there,
    the volume would have two caps for one hour.

    Args:
        streams: columns ``STREAM_COLUMNS``.
        volumes: volume, backend.
    """
    place = pc.index_in(streams["volume"], value_set=volumes["volume"].combine_chunks())
    backend = pc.coalesce(volumes["backend"].take(place), streams["backend"])
    number = streams.column_names.index("backend")
    moved = streams.set_column(number, "backend", backend)
    return moved.append_column("rank", pa.array(_ranks(streams["volume"]), pa.int32()))


def widest(streams: pa.Table) -> int:
    """How many streams the volume has that has most, of ``streams_now``."""
    return (pc.max(streams["rank"]).as_py() or 0) + 1


def _ranks(names: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    codes = names.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    found = np.empty(len(codes), dtype=np.int64)
    found[order] = np.arange(len(codes)) - np.searchsorted(ordered, ordered)
    return found
