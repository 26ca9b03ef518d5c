"""Histograms as they are stored in SQL.

``rollups.hist``: sparse, one packed entry ``{u16 bucket, u32 count}`` (little-endian) for each bucket that
is not empty; buckets 0..98 are total_read, 99..197 total_write, as on the wire. A count above 2**32 - 1
takes several entries: readers add entries of the same bucket. ``rollup_hours.hist``: dense, 50
little-endian int64, reads and writes together in the 50-bucket form.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS

ENTRY: Final = np.dtype([("bucket", "<u2"), ("count", "<u4")])
TOTAL_BUCKETS: Final = 2 * BUCKETS
_MAX_COUNT: Final = (1 << 32) - 1

Int64s = npt.NDArray[np.int64]


def encode_sparse(buckets: Int64s, counts: Int64s) -> bytes:
    """Blob of one histogram. Both of shape (entries,); counts above 0."""
    if counts.size and int(counts.max()) > _MAX_COUNT:
        pieces = -(-counts // _MAX_COUNT)
        buckets = np.repeat(buckets, pieces)
        last = np.cumsum(pieces) - 1
        split = np.full(int(pieces.sum()), _MAX_COUNT, dtype=np.int64)
        split[last] = counts - (pieces - 1) * _MAX_COUNT
        counts = split
    entries = np.empty(len(buckets), dtype=ENTRY)
    entries["bucket"], entries["count"] = buckets, counts
    return entries.tobytes()


def encode_many(dense: Int64s) -> list[bytes]:
    """Blobs of dense counts of shape (n, 198)."""
    width = dense.shape[1]
    flat = dense.reshape(-1)
    place = np.flatnonzero(flat)
    counts = flat[place]
    row, bucket = place // width, place % width
    bounds = np.searchsorted(row, np.arange(len(dense) + 1))
    if counts.size and int(counts.max()) > _MAX_COUNT:
        pairs = itertools.pairwise(bounds.tolist())
        return [encode_sparse(bucket[low:high], counts[low:high]) for low, high in pairs]
    entries = np.empty(len(place), dtype=ENTRY)
    entries["bucket"], entries["count"] = bucket, counts
    packed = entries.tobytes()
    return [packed[low:high] for low, high in itertools.pairwise((bounds * ENTRY.itemsize).tolist())]


def entries_of(blobs: list[bytes]) -> tuple[Int64s, Int64s, Int64s]:
    """All entries of several blobs: (index of the blob, bucket, count), each of shape (entries,)."""
    lengths = [len(blob) // ENTRY.itemsize for blob in blobs]
    joined: npt.NDArray[Any] = np.frombuffer(b"".join(blobs), dtype=ENTRY)
    index = np.repeat(np.arange(len(blobs), dtype=np.int64), lengths)
    return index, joined["bucket"].astype(np.int64), joined["count"].astype(np.int64)


def decode_many(blobs: list[bytes]) -> Int64s:
    """Dense counts of shape (len(blobs), 198): 99 buckets of reads, then 99 of writes."""
    dense = np.zeros((len(blobs), TOTAL_BUCKETS), dtype=np.int64)
    if blobs:
        index, bucket, count = entries_of(blobs)
        np.add.at(dense, (index, bucket), count)
    return dense


def encode_hours(dense: Int64s) -> list[bytes]:
    """Blobs of dense histograms of shape (n, 50)."""
    packed = dense.astype("<i8").tobytes()
    size = COARSE_BUCKETS * 8
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def decode_hours(blobs: list[bytes]) -> Int64s:
    """Dense counts of shape (len(blobs), 50); a blob may hold several histograms, each makes a row."""
    return np.frombuffer(b"".join(blobs), dtype="<i8").reshape(-1, COARSE_BUCKETS).astype(np.int64)
