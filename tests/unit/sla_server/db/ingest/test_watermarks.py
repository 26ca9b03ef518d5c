"""The rule by which cuts are admitted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sla_server.db.ingest.watermarks import CutAdmission, HighWater, spool_floors

NEW, DUPLICATE, HOLE = CutAdmission.NEW, CutAdmission.DUPLICATE, CutAdmission.HOLE


def test_in_order_again_and_beyond():
    high = HighWater([("g", 7, 3)])
    assert high.admit("g", 7, 3) is DUPLICATE
    assert high.admit("g", 7, 5) is HOLE
    assert high.admit("g", 7, 4) is NEW
    assert high.admit("g", 7, 5) is NEW
    assert high.of("g", 7) == 5


def test_an_unknown_epoch_begins_at_one():
    high = HighWater()
    assert high.admit("g", 7, 2) is HOLE, "the first may have been refused by a full mailbox"
    assert high.admit("g", 7, 1) is NEW
    assert high.of("g", 8) == high.of("h", 7) == 0


def test_gap_bridges_exactly_what_was_dropped():
    high = HighWater([("g", 7, 3)])
    assert high.admit("g", 7, 8, gap=3) is HOLE
    assert high.admit("g", 7, 8, gap=4) is NEW
    assert high.of("g", 7) == 8


def test_spool_raises_the_floor_and_never_lowers_it():
    header = {"gw": "g", "state": "up", "spool": [[7, 500, 520], [9, 1, 3]]}
    assert spool_floors(header) == [("g", 7, 499)]
    high = HighWater([("g", 7, 510)])
    assert not high.raise_to("g", 7, 499)
    assert high.of("g", 7) == 510


def test_malformed_spools_are_ignored():
    for spool in (None, 3, [[7]], [["7", 5, 6]], [[7, True, 6]], [[7, 1 << 63, 6]], [[-7, 5, 6]]):
        assert spool_floors({"gw": "g", "state": "up", "spool": spool}) == []
    assert spool_floors({"gw": "g", "state": "lost", "spool": [[7, 500, 520]]}) == []


def test_rows_name_one_gateway_or_all():
    high = HighWater([("g", 7, 3), ("h", 1, 2), ("g", 9, 4)])
    assert sorted(high.rows()) == [["g", 7, 3], ["g", 9, 4], ["h", 1, 2]]
    assert high.rows("g") == [["g", 7, 3], ["g", 9, 4]]
    assert high.rows("unknown") == []


@given(st.lists(st.integers(1, 12), max_size=60))
def test_whatever_the_order_each_cut_is_new_once_and_in_sequence(order):
    high = HighWater()
    admitted = [seq for seq in order if high.admit("g", 1, seq) is NEW]
    assert admitted == list(range(1, len(admitted) + 1))
