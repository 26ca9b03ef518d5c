"""What a cut says of data planes: what cannot be is left out."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.wire.plane_marks import MOST_NAME, MOST_PLANES, marks_of, rows_by_plane


@pytest.mark.parametrize("value", [None, 7, [], "nbd-0", {}, {7: 1}, {"": 1}, {"a b": 1}, {"nbd-0": "1"}])
def test_what_is_no_mark_is_left_out(value: Any) -> None:
    assert marks_of(value) == {}


def test_marks_are_bounded_in_number_and_length() -> None:
    many = {f"nbd-{number}": number for number in range(MOST_PLANES + 1)}
    assert marks_of(many) == dict(list(many.items())[:MOST_PLANES])
    assert marks_of({"x" * MOST_NAME: 1, "x" * (MOST_NAME + 1): 2}) == {"x" * MOST_NAME: 1}


def test_rows_follow_from_bitmaps_lowest_bit_first() -> None:
    found = rows_by_plane({"nbd-0": b"\x05\xff", "nbd-1": b"\x02", 3: b"\x01", "nbd-2": "x"}, 9)
    assert {name: rows.tolist() for name, rows in found.items()} == {"nbd-0": [0, 2, 8], "nbd-1": [1]}
