"""The latency histogram: the one module that owns its bucket layout.

Log-linear, unit 1.024 us (1,024 ns), 4 sub-buckets an octave, 99 buckets from 1 us to 60 s. A bucket is at
most 25 % wide, so its upper edge is too high by that at most and its geometric midpoint is within
11.8 %. Adding neighbours (0+1, 2+3, ...) gives the 50-bucket form with 2 sub-buckets an octave.

A stream has four histograms, addressed on the wire by one running bucket number:

    0..98     total_read    arrival at the gateway to completion, as the client sees it
    99..197   total_write
    198..247  service       sent upstream to completion (50-bucket form)
    248..297  delay         held back by our own throttle (50-bucket form)

Source: DESIGN.md 6.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

BUCKETS: Final = 99
COARSE_BUCKETS: Final = 50
TOTAL_READ: Final = 0
TOTAL_WRITE: Final = BUCKETS
SERVICE: Final = 2 * BUCKETS
DELAY: Final = 2 * BUCKETS + COARSE_BUCKETS
WIRE_BUCKETS: Final = 2 * BUCKETS + 2 * COARSE_BUCKETS


def bucket_of_ns(latency_ns: int) -> int:
    """Bucket (0..98) of a latency in nanoseconds; everything above 60 s falls into the last."""
    unit = latency_ns >> 10
    if unit <= 3:
        return unit if unit >= 0 else 0
    exponent = unit.bit_length() - 3
    bucket = (exponent << 2) + (unit >> exponent)
    return bucket if bucket < BUCKETS else BUCKETS - 1


def coarse_bucket_of_ns(latency_ns: int) -> int:
    """Bucket (0..49) in the 50-bucket form."""
    return bucket_of_ns(latency_ns) >> 1


def _edges_ns() -> npt.NDArray[np.int64]:
    edges = [n << 10 for n in range(5)]
    for bucket in range(5, BUCKETS + 1):
        exponent, sub = (bucket >> 2) - 1, 4 + (bucket & 3)
        edges.append((sub << exponent) << 10)
    return np.array(edges, dtype=np.int64)


EDGES_NS: Final = _edges_ns()
"""Shape (100,): bucket ``b`` holds latencies in [EDGES_NS[b], EDGES_NS[b + 1])."""

COARSE_EDGES_NS: Final = np.append(EDGES_NS[0:BUCKETS:2], EDGES_NS[BUCKETS])
"""Shape (51,): edges of the 50-bucket form. Its last bucket holds fine bucket 98 alone."""


def to_coarse(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Add neighbours: shape (..., 99) to (..., 50)."""
    padded = np.zeros((*counts.shape[:-1], 2 * COARSE_BUCKETS), dtype=np.int64)
    padded[..., :BUCKETS] = counts
    coarse: npt.NDArray[np.int64] = padded[..., 0::2] + padded[..., 1::2]
    return coarse


def edges_for(buckets: int) -> npt.NDArray[np.int64]:
    """Edges in ns of a histogram with 99 or 50 buckets."""
    if buckets == BUCKETS:
        return EDGES_NS
    if buckets == COARSE_BUCKETS:
        return COARSE_EDGES_NS
    raise ValueError(f"a histogram has {BUCKETS} or {COARSE_BUCKETS} buckets, not {buckets}")


def percentile_upper_us(counts: npt.NDArray[np.int64], percentile: float) -> float | None:
    """Upper edge, in microseconds, of the bucket that holds the percentile; None for no I/O.

    For displays: never flatters, at most 25 % (99 buckets) or 50 % (50 buckets) too high.
    """
    return percentiles_upper_us(counts, percentile)[0]


def percentiles_upper_us(counts: npt.NDArray[np.int64], *percentiles: float) -> list[float | None]:
    """``percentile_upper_us`` of several percentiles."""
    up_to = np.cumsum(counts)
    total = int(up_to[-1])
    if total == 0:
        return [None] * len(percentiles)
    at = np.searchsorted(up_to, np.array(percentiles) / 100 * total)
    return [found / 1000 for found in edges_for(len(counts))[at + 1].tolist()]


def highest_upper_us(counts: npt.NDArray[np.int64]) -> float:
    """Upper edge, in microseconds, of the highest bucket that is not empty; 0 for no I/O."""
    used = np.flatnonzero(counts)
    return float(edges_for(len(counts))[int(used[-1]) + 1]) / 1000 if len(used) else 0.0


def percentile_us(counts: npt.NDArray[np.int64], percentile: float) -> float | None:
    """Percentile in microseconds, interpolated within its bucket; None for no I/O. For control only."""
    total = int(counts.sum())
    if total == 0:
        return None
    edges = edges_for(len(counts))
    cumulative = np.cumsum(counts)
    want = percentile / 100 * total
    index = int(np.searchsorted(cumulative, want))
    before = float(cumulative[index - 1]) if index else 0.0
    inside = (want - before) / float(counts[index]) if counts[index] else 1.0
    low, high = float(edges[index]), float(edges[index + 1])
    return (low + (high - low) * min(max(inside, 0.0), 1.0)) / 1000


def missed_upper(counts: npt.NDArray[np.int64], threshold_us: int) -> int:
    """I/Os that may have exceeded ``threshold_us``, counted pessimistically from bucket edges.

    A bucket counts in full unless it lies wholly at or below the threshold.
    """
    whole_buckets = int(np.searchsorted(edges_for(len(counts)), threshold_us * 1000, side="right")) - 1
    return int(counts[max(whole_buckets, 0) :].sum())
