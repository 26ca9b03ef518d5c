"""The bucket layout: every latency is in the bucket whose edges enclose it, and sums survive coarsening."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire import histogram
from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS, COARSE_EDGES_NS, EDGES_NS

COUNTS = st.lists(st.integers(0, 1000), min_size=BUCKETS, max_size=BUCKETS).map(
    lambda items: np.array(items, dtype=np.int64)
)


@given(st.integers(0, int(EDGES_NS[-1]) - 1))
def test_bucket_encloses_the_latency(latency_ns: int) -> None:
    bucket = histogram.bucket_of_ns(latency_ns)
    assert EDGES_NS[bucket] <= latency_ns < EDGES_NS[bucket + 1]
    coarse = histogram.coarse_bucket_of_ns(latency_ns)
    assert COARSE_EDGES_NS[coarse] <= latency_ns < COARSE_EDGES_NS[coarse + 1]


def test_layout() -> None:
    assert len(EDGES_NS) == BUCKETS + 1
    assert len(COARSE_EDGES_NS) == COARSE_BUCKETS + 1
    assert (np.diff(EDGES_NS) > 0).all()
    assert 59e9 < EDGES_NS[-1] < 65e9
    widths = EDGES_NS[5:] / EDGES_NS[4:-1]
    assert widths.max() <= 1.25
    assert histogram.bucket_of_ns(10**12) == BUCKETS - 1
    assert histogram.bucket_of_ns(-5) == 0
    assert histogram.WIRE_BUCKETS == histogram.DELAY + COARSE_BUCKETS == 298


@given(COUNTS)
def test_coarse_keeps_the_sum_and_the_edges(counts: np.ndarray) -> None:
    coarse = histogram.to_coarse(counts)
    assert coarse.shape == (COARSE_BUCKETS,)
    assert coarse.sum() == counts.sum()
    stacked = histogram.to_coarse(np.stack([counts, counts]))
    assert (stacked[1] == coarse).all()


@given(st.lists(st.integers(0, 60 * 10**9), min_size=1, max_size=200), st.sampled_from([50.0, 95.0, 99.0]))
def test_percentile_encloses_the_exact_one(latencies_ns: list[int], percentile: float) -> None:
    counts = np.zeros(BUCKETS, dtype=np.int64)
    for latency_ns in latencies_ns:
        counts[histogram.bucket_of_ns(latency_ns)] += 1
    rank = int(np.ceil(percentile / 100 * len(latencies_ns)))
    exact_us = sorted(latencies_ns)[max(rank, 1) - 1] / 1000
    upper_us = histogram.percentile_upper_us(counts, percentile)
    inside_us = histogram.percentile_us(counts, percentile)
    assert upper_us is not None
    assert inside_us is not None
    assert exact_us <= upper_us <= max(exact_us * 1.25, exact_us + 1.1)
    assert inside_us <= upper_us


def test_no_io_has_no_percentile() -> None:
    nothing = np.zeros(BUCKETS, dtype=np.int64)
    assert histogram.percentile_upper_us(nothing, 95) is None
    assert histogram.percentile_us(nothing, 95) is None
    with pytest.raises(ValueError, match="99 or 50"):
        histogram.edges_for(7)


@given(st.lists(st.integers(0, 10**8), max_size=100), st.integers(1, 200_000))
def test_missed_upper_is_never_below_the_exact_count(latencies_ns: list[int], threshold_us: int) -> None:
    counts = np.zeros(BUCKETS, dtype=np.int64)
    for latency_ns in latencies_ns:
        counts[histogram.bucket_of_ns(latency_ns)] += 1
    assert histogram.missed_upper(counts, threshold_us) >= sum(
        item > threshold_us * 1000 for item in latencies_ns
    )
