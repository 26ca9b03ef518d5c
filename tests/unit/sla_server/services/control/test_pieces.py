"""Pieces: what a cut says of a promise. The oracle of batches (``worlds.piece_of``) is tested itself."""

from __future__ import annotations

import numpy as np
import pytest

from pmdaemon.wire.histogram import BUCKETS, bucket_of_ns, percentile_us
from sla_server.services.control.pieces import ALL_BUCKETS, evenly, percentiles_us, placed
from tests.support.worlds import A, Feeder, controller, cut, piece_of, promise, volume_class

ALL = np.array([True])


def test_exact_misses_are_taken_from_the_cut():
    piece = piece_of(cut(A, 1, {"gold": (40, 12.001)}), ALL, promise())
    assert (piece.done, piece.missed, piece.inexact) == (40, {12_000: 40}, False)
    piece = piece_of(cut(A, 1, {"gold": (40, 11.99)}), ALL, promise())
    assert piece.missed == {12_000: 0}


def test_a_threshold_nobody_counted_is_judged_from_edges_and_flagged():
    # the bucket of 12 ms is counted in full: pessimistic
    piece = piece_of(cut(A, 1, {"gold": (40, 11.9)}, thresholds_us=()), ALL, promise())
    assert (piece.missed, piece.inexact) == ({12_000: 40}, True)
    piece = piece_of(cut(A, 1, {"gold": (40, 2)}, thresholds_us=()), ALL, promise())
    assert (piece.missed, piece.inexact) == ({12_000: 0}, True)


def test_only_rows_in_scope_count():
    made = cut(A, 1, {"gold": (40, 1), "other": (500, 99)})
    piece = piece_of(made, np.array([True, False]), promise())
    assert (piece.done, piece.offered, piece.missed[12_000], int(piece.hist.sum())) == (40, 40.0, 0, 40)


def test_io_kind_selects_counters_and_histogram():
    piece = piece_of(cut(A, 1, {"gold": (40, 1)}), ALL, promise(io="write"))
    assert (piece.done, piece.offered, int(piece.hist.sum())) == (0, 0.0, 0)
    piece = piece_of(cut(A, 1, {"gold": (40, 1)}), ALL, promise(io="read"))
    assert (piece.done, int(piece.hist.sum())) == (40, 40)


def test_percentiles_of_many_are_those_of_each():
    rng = np.random.default_rng(3)
    hist = rng.integers(0, 4, (50, 99)) * (rng.random((50, 99)) < 0.2)
    hist[7] = 0
    percentile = rng.choice([50.0, 95.0, 99.9, 100.0], 50)
    wanted = [percentile_us(row, p) or 0.0 for row, p in zip(hist, percentile, strict=True)]
    assert percentiles_us(hist, percentile).tolist() == wanted


@pytest.mark.parametrize("used", [slice(0, 0), slice(0, 2), slice(30, 50), slice(97, 99)])
def test_percentiles_of_the_buckets_in_use_are_those_of_all(used: slice) -> None:
    rng = np.random.default_rng(1)
    hist = np.zeros((50, BUCKETS), np.int32)
    hist[:, used] = rng.integers(0, 4, (50, used.stop - used.start))
    hist[7] = 0
    percentile = rng.uniform(1, 100, 50)
    found = percentiles_us(hist[:, used], percentile, used)
    assert found.tolist() == percentiles_us(hist, percentile).tolist()
    assert found[7] == 0


def test_windows_of_later_and_other_latencies_are_whole_beside_those_of_before() -> None:
    """Buckets that were never in use are not written; each batch may bring others."""
    made = Feeder(controller((promise(),), (volume_class(),)), (A, ("gold",)))
    made.step((A, {"gold": (0, 0.0)}, 0))
    assert made.controller.scopes.table.windows.used == slice(0, 0), "nothing is in no bucket"
    for ms in (8.0, 0.05, 900.0):
        made.step((A, {"gold": (100, ms)}, 0))
    windows = made.controller.scopes.table.windows
    scope = made.controller.scopes.over_all(("gold", "latency"))
    row = scope.row.row
    hist = placed(windows.w_hist[row :: len(windows.pos)], windows.used, ALL_BUCKETS)
    assert hist.sum(axis=1).tolist() == [100, 100, 100]
    at = [bucket_of_ns(round(ms * 1e6)) for ms in (8.0, 0.05, 900.0)]
    assert hist.argmax(axis=1).tolist() == at
    assert windows.used.start == min(at)
    assert max(at) < windows.used.stop < BUCKETS


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (range(5, 105), slice(5, 105, 1)),
        (range(3, 403, 4), slice(3, 400, 4)),
        (range(10), None),
        ([*range(99), 200], None),
        ([*range(50), *range(49, 100)], None),
        (range(99, -1, -1), None),
        ([7] * 100, None),
        ([0, 2, 1, *range(3, 100)], None),
    ],
)
def test_numbers_that_rise_in_equal_steps_are_a_slice_and_no_others(index, wanted) -> None:
    numbers = np.array(index)
    found = evenly(numbers)
    assert found == wanted if wanted is not None else found is numbers
    values = np.arange(500)
    assert values[found].tolist() == values[numbers].tolist()
