"""What is left out of cuts, without a database."""

from __future__ import annotations

import numpy as np

from pmdaemon.wire.cut import COL, Cut, decode, encode, sequential_bytes, sequential_counts
from pmdaemon.wire.plane_marks import rows_by_plane
from sla_server.db.ingest.ownership import StreamHolders, without_rows
from tests.support.samples import make_cut


def test_a_cut_without_some_rows_is_that_of_the_others() -> None:
    whole = make_cut(3, streams=(1, 2, 3), hidden=True)
    left = without_rows(whole, np.array([True, False, True]))
    assert left.column("stream_id").tolist() == [whole.column("stream_id")[row] for row in (0, 2)]
    for row, was in enumerate((0, 2)):
        assert left.counters[:, row].tolist() == whole.counters[:, was].tolist()
        for name in ("hist", "missed"):
            entries, before = getattr(left, name), getattr(whole, name)
            mine = [entry[1:] for entry in entries.tolist() if entry[0] == row]
            assert mine == [entry[1:] for entry in before.tolist() if entry[0] == was]
    assert (left.seq, left.duration_us, left.gap) == (whole.seq, whole.duration_us, whole.gap)
    assert _equal(decode(encode(left)), left), "a cut like any other"


def _equal(one: Cut, other: Cut) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("counters", "hist", "missed")
    )


def test_none_may_be_left() -> None:
    left = without_rows(make_cut(1, streams=(1, 2)), np.zeros(2, dtype=np.bool_))
    assert (left.rows, len(left.hist), len(left.missed)) == (0, 0, 0)


def test_whose_rows_they_are_is_kept() -> None:
    whole = make_cut(1, streams=range(1, 11))
    said = {"nbd-0": np.packbits([1, 0, 1, 0, 1, 0, 1, 0, 1, 0], bitorder="little").tobytes()}
    whole.extra["of"] = said
    whole.extra["sq"] = sequential_bytes(np.arange(10) - 1)
    left = without_rows(whole, np.array([True, True, False, True, True, False, False, False, True, True]))
    assert {name: rows.tolist() for name, rows in rows_by_plane(left.extra["of"], left.rows).items()} == {
        "nbd-0": [0, 3, 4]
    }
    assert sequential_counts(left.sequential).tolist() == [-1, 0, 2, 3, 7, 8]
    assert whole.extra["of"] == said, "the cut of the queue is as it was"


def test_holders_are_those_of_the_start_and_those_since() -> None:
    holders = StreamHolders([(5, "g-1"), (9, "g-2"), (1, "g-1")])
    holders.add(7, "g-3")
    assert holders.of([1, 5, 6, 7, 9, 10]) == ["g-1", "g-1", None, "g-3", "g-2", None]
    assert StreamHolders().of([1]) == [None]
    assert COL["stream_id"] == 0
