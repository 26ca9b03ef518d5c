"""Histogram blobs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sla_server.db import histogram_codec

SPARSE = st.dictionaries(st.integers(0, 197), st.integers(1, 1 << 40), max_size=20)


@given(st.lists(SPARSE, max_size=5))
def test_round_trip_of_sparse_blobs(histograms):
    blobs = [
        histogram_codec.encode_sparse(
            np.array(list(h), dtype=np.int64), np.array(list(h.values()), dtype=np.int64)
        )
        for h in histograms
    ]
    dense = histogram_codec.decode_many(blobs)
    assert histogram_codec.decode_many(histogram_codec.encode_many(dense)).tolist() == dense.tolist()
    assert dense.shape == (len(histograms), 198)
    for row, histogram in zip(dense, histograms, strict=True):
        assert {int(b): int(row[b]) for b in np.flatnonzero(row)} == histogram


def test_a_bucket_takes_six_bytes():
    assert len(histogram_codec.encode_sparse(np.array([3, 7]), np.array([1, 2]))) == 12


def test_entries_of_one_bucket_add_up():
    blob = histogram_codec.encode_sparse(np.array([3, 3]), np.array([5, 6]))
    assert histogram_codec.decode_many([blob])[0, 3] == 11


@given(st.lists(st.lists(st.integers(0, 1 << 62), min_size=50, max_size=50), max_size=3))
def test_round_trip_of_hours(histograms):
    blobs = histogram_codec.encode_hours(np.array(histograms, dtype=np.int64).reshape(-1, 50))
    assert histogram_codec.decode_hours(blobs).tolist() == histograms
