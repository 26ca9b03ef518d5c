"""Cuts: round trips, and sizes or references that contradict each other are refused."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.errors import BadCut, FrameTooLarge, WireError
from pmdaemon.wire import cut, frame
from pmdaemon.wire.cut import COLUMNS, HIST_DTYPE, MAX_TIME_US, MISSED_DTYPE, Cut
from pmdaemon.wire.histogram import BUCKETS, TOTAL_WRITE, WIRE_BUCKETS
from pmdaemon.wire.kinds import Kind

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    rows = draw(st.integers(0, 4))
    big = st.integers(0, 2**63 - 1)
    hist = (
        draw(
            st.lists(
                st.tuples(
                    st.integers(0, rows - 1), st.integers(0, WIRE_BUCKETS - 1), st.integers(1, 2**32 - 1)
                ),
                max_size=8,
            )
        )
        if rows
        else []
    )
    missed = []
    if rows:
        for row, io, threshold, counted in draw(
            st.lists(
                st.tuples(
                    st.integers(0, rows - 1), st.integers(0, 2), st.integers(1, 10**6), st.integers(0, 1000)
                ),
                max_size=4,
            )
        ):
            missed.append((row, io, threshold, counted, draw(st.integers(0, counted))))
    return Cut(
        gateway_id=str(draw(st.uuids())),
        epoch=draw(st.integers(1, 2**64 - 1)),
        seq=draw(st.integers(1, 2**63 - 1)),
        start_unix_us=draw(st.integers(0, MAX_TIME_US - 1)),
        duration_us=draw(st.integers(0, MAX_TIME_US - 1)),
        throttle_gen=draw(st.integers(-1, 2**62)),
        threshold_version=draw(st.integers(0, 2**62)),
        counters=np.array(
            draw(
                st.lists(
                    st.lists(big, min_size=rows, max_size=rows), min_size=len(COLUMNS), max_size=len(COLUMNS)
                )
            ),
            dtype=np.int64,
        ).reshape(len(COLUMNS), rows),
        hist=np.array(hist, dtype=HIST_DTYPE),
        missed=np.array(missed, dtype=MISSED_DTYPE),
        gap=draw(st.integers(0, 1000)),
        starved_us=draw(st.integers(0, 1000)),
        extra=draw(st.dictionaries(st.sampled_from(["dp", "x", "later"]), st.integers(0, 9))),
    )


@given(cuts())
def test_round_trip(made: Cut) -> None:
    encoded = cut.encode(made)
    got = cut.decode(encoded)
    for name in (
        "gateway_id",
        "epoch",
        "seq",
        "start_unix_us",
        "duration_us",
        "throttle_gen",
        "gap",
        "extra",
    ):
        assert getattr(got, name) == getattr(made, name)
    assert got.starved_us == min(made.starved_us, made.duration_us), "no longer than the cut"
    assert got.threshold_version == made.threshold_version
    assert (got.counters == made.counters).all()
    assert (got.hist == made.hist).all()
    assert (got.missed == made.missed).all()
    parsed = frame.decode(encoded)
    assert cut.identity(parsed.header) == (made.gateway_id, made.epoch, made.seq)
    assert cut.check(parsed) == (uuid.UUID(made.gateway_id).bytes, made.epoch, made.seq)


@given(made=cuts(), at=st.integers(0), value=st.integers(0, 255))
@settings(max_examples=300)
def test_a_changed_byte_is_a_cut_or_a_wire_error(made: Cut, at: int, value: int) -> None:
    damaged = bytearray(cut.encode(made))
    damaged[at % len(damaged)] = value
    try:
        got = cut.decode(bytes(damaged))
    except WireError:
        return
    assert got.counters.shape[0] == len(COLUMNS)
    got.dense_hist(0, BUCKETS)


def base(**over: Any) -> bytes:
    """A small valid cut with header keys replaced, removed (None) or added."""
    counters = np.ones((len(COLUMNS), 2), dtype=np.int64)
    blob = counters.tobytes() + np.array([(1, 99, 3)], dtype=HIST_DTYPE).tobytes()
    blob += np.array([(0, 1, 5000, 10, 2)], dtype=MISSED_DTYPE).tobytes()
    header: dict[str, Any] = {"gw": uuid.UUID(GATEWAY).bytes, "ep": 1, "seq": 1, "t": 5, "d": 6}
    header |= {"n": 2, "h": 1, "m": 1, "tg": 0, "ts": 0}
    extra = over.pop("blob", blob)
    header = {key: value for key, value in (header | over).items() if value is not None}
    return frame.encode(Kind.CUT, header, extra)


def test_base_is_valid() -> None:
    assert cut.decode(base()).dense_hist(TOTAL_WRITE, BUCKETS)[1, 0] == 3


@pytest.mark.parametrize(
    "over",
    [
        {"gw": None},
        {"gw": b"short"},
        {"gw": GATEWAY},
        {"ep": 0},
        {"ep": True},
        {"seq": 0},
        {"seq": -1},
        {"seq": 1.5},
        {"t": None},
        {"t": -1},
        {"t": 2**63},
        {"d": "x"},
        {"n": 3},
        {"n": 1},
        {"n": 5000},
        {"h": 2},
        {"h": None},
        {"m": 0},
        {"m": 2**62},
        {"tg": "x"},
        {"ts": None, "tg": -2},
        {"gap": 1.0},
        {"sch": 99},
        {"blob": b""},
        {"blob": bytes(2 * 8 * len(COLUMNS) + 8 + 16 + 8)},
    ],
)
def test_header_that_contradicts_the_columns(over: dict[str, Any]) -> None:
    data = base(**over)
    with pytest.raises(BadCut):
        cut.decode(data)
    with pytest.raises(BadCut):
        cut.check(frame.decode(data))


@pytest.mark.parametrize(
    ("hist", "missed", "counter"),
    [
        ((2, 0, 1), (0, 0, 1, 1, 1), 1),
        ((0, WIRE_BUCKETS, 1), (0, 0, 1, 1, 1), 1),
        ((0, 0, 1), (2, 0, 1, 1, 1), 1),
        ((0, 0, 1), (0, 3, 1, 1, 1), 1),
        ((0, 0, 1), (0, 0, 1, 1, 2), 1),
        ((0, 0, 1), (0, 7, 1, 1, 1), 1),
        ((0, 0, 1), (0, cut.OUTSTANDING + 3, 1, 1, 1), 1),
        ((0, 0, 1), (0, cut.OUTSTANDING + 4, 1, 1, 1), 1),
        ((0, 0, 1), (0, 65_535, 1, 1, 1), 1),
        ((0, 0, 1), (0, cut.FAILED, 1, 1, 2), 1),
        ((0, 0, 1), (2, cut.OVERDUE, 1, 1, 1), 1),
        ((0, 0, 1), (0, 0, 1, 1, 1), -1),
    ],
)
def test_columns_that_cannot_be(hist: tuple[int, ...], missed: tuple[int, ...], counter: int) -> None:
    counters = np.ones((len(COLUMNS), 2), dtype=np.int64)
    counters[3, 1] = counter
    blob = counters.tobytes() + np.array([hist], dtype=HIST_DTYPE).tobytes()
    blob += np.array([missed], dtype=MISSED_DTYPE).tobytes()
    with pytest.raises(BadCut):
        cut.decode(base(blob=blob))


def test_what_is_overdue_failed_or_outstanding_is_kept_apart_from_what_completed() -> None:
    entries = [
        (0, cut.IO_READ, 5_000, 10, 3),
        (0, cut.OVERDUE + cut.IO_READ, 5_000, 2, 9),  # more of the past are settled than are newly overdue
        (1, cut.FAILED + cut.IO_WRITE, 0, 4, 0),
        (1, cut.OUTSTANDING, 0, 182_000, 182_000),
        (1, cut.OUTSTANDING + cut.IO_WRITE, 0, 182_000, 9_000),
        (1, cut.OVERDUE + cut.IO_WRITE, 0, 3, 12_000),
    ]
    made = cut.decode(base())
    fields = {name: getattr(made, name) for name in Cut.__dataclass_fields__}
    got = cut.decode(cut.encode(Cut(**(fields | {"missed": np.array(entries, dtype=MISSED_DTYPE)}))))
    assert got.entries(0).tolist() == [(0, cut.IO_READ, 5_000, 10, 3)]
    abandoned = (1, cut.IO_WRITE, 0, 3, 12_000)
    assert got.entries(cut.OVERDUE).tolist() == [(0, cut.IO_READ, 5_000, 2, 9), abandoned]
    assert got.entries(cut.FAILED).tolist() == [(1, cut.IO_WRITE, 0, 4, 0)]
    both, writes = (1, 0, 0, 182_000, 182_000), (1, cut.IO_WRITE, 0, 182_000, 9_000)
    assert got.entries(cut.OUTSTANDING).tolist() == [both, writes]
    assert got.missed["io"].tolist() == [entry[1] for entry in entries], "entries() hands out copies"


def test_counts_that_no_u32_holds_are_in_several_entries_that_add_up() -> None:
    big = (1 << 32) + 7
    found = cut.missed_array(
        [(0, cut.IO_ANY, 5000, 2 * big, big), (0, cut.OVERDUE, 0, 3, big), (1, 0, 1, 2, 1)]
    )
    assert not (found["missed"] > found["counted"])[found["io"] == 0].any()
    sums = {}
    for row, io, threshold_us, counted, missed in found.tolist():
        before = sums.get((row, io, threshold_us), (0, 0))
        sums[row, io, threshold_us] = before[0] + counted, before[1] + missed
    assert sums == {(0, 0, 5000): (2 * big, big), (0, cut.OVERDUE, 0): (3, big), (1, 0, 1): (2, 1)}
    made = cut.hist_array(np.array([0, 1]), np.array([5, 6]), np.array([2 * big, 9]))
    assert sorted({each[:2] for each in made.tolist()}) == [(0, 5), (1, 6)]
    assert int(made["count"][made["row"] == 0].astype(np.int64).sum()) == 2 * big
    assert len(cut.missed_array([])) == len(cut.hist_array(*[np.zeros(0, dtype=np.int64)] * 3)) == 0


def test_other_kind_is_no_cut() -> None:
    with pytest.raises(BadCut, match="not CUT"):
        cut.decode(frame.encode(Kind.POLL, {}))


def test_encoder_refuses_too_many_rows_and_bytes() -> None:
    made = cut.decode(base())
    rows = cut.MAX_ROWS + 1
    wide = np.ones((len(COLUMNS), rows), dtype=np.int64)
    fields = {name: getattr(made, name) for name in Cut.__dataclass_fields__}
    with pytest.raises(BadCut):
        cut.encode(Cut(**(fields | {"counters": wide})))
    with pytest.raises(FrameTooLarge):
        cut.encode(Cut(**(fields | {"counters": wide[:, :4000], "hist": np.zeros(60_000, dtype=HIST_DTYPE)})))


def test_rows_array_is_column_major() -> None:
    made = cut.rows_array([[10 * row + column for column in range(len(COLUMNS))] for row in range(2)])
    assert made.shape == (len(COLUMNS), 2)
    assert list(made[1]) == [1, 11]
    assert cut.rows_array([]).shape == (len(COLUMNS), 0)


@pytest.mark.parametrize(
    ("header", "gap"),
    [({}, 0), ({"gap": 3}, 3), ({"gap": -1}, 0), ({"gap": "x"}, 0), ({"gap": True}, 0), ({"gap": 1.5}, 0)],
)
def test_a_gap_is_a_number_of_cuts_or_none(header, gap):
    assert cut.gap_of(header) == gap
