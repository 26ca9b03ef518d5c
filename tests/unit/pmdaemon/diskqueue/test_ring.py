"""Space against a byte map: what is placed never overlaps; strictness, wrap, skip, reserve, undo."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.diskqueue.format import IndexEntry
from pmdaemon.diskqueue.ring import MOST_SKIPS, Ring, fit

Q = 4096


def add(ring: Ring, size: int, reserved: bool = False) -> IndexEntry | None:
    offset = ring.place(size, reserved=reserved)
    if offset < 0:
        return None
    entry = IndexEntry(0, offset, offset + size, size, 0, b"", 0, 0)
    entry.durable = True
    ring.advance(offset, entry.end)
    ring.append(entry)
    return entry


def test_a_request_fits_only_if_strictly_smaller_than_the_room() -> None:
    assert fit(1024, 512, Q - 1024, Q, 0) == -1
    assert fit(1024, 512, Q - 1024 - 256, Q, 0) == 1024
    assert fit(Q - 256, 512, 256, Q, 0) == 0
    assert fit(Q - 256, 512, 512, Q, 0) == -1
    assert fit(512, 1024, 512, Q, 0) == -1
    assert fit(512, 1024, 256, Q, 0) == 512
    assert fit(512, 512, 256, Q, 0) == -1, "W = R with a live entry is a full ring, not an empty one"


def test_reserve_is_kept_for_reserved_requests() -> None:
    ring = Ring(Q, 1024)
    while add(ring, 256):
        pass
    assert ring.free_bytes() >= 1024
    extra = 0
    while add(ring, 256, reserved=True):
        extra += 1
    assert extra == 4
    assert ring.free_bytes() == 256


def test_old_record_at_the_head_is_moved_when_it_is_all_that_blocks() -> None:
    ring = Ring(Q, 0)
    entries = [add(ring, 256) for _ in range(15)]
    assert add(ring, 256) is None
    for entry in entries[1:9]:
        assert entry is not None
        ring.unlink(entry)
    placed = add(ring, 1024)
    assert placed is not None
    assert placed.offset == 256
    assert ring.skips == 1
    assert ring.tail is placed
    assert ring.head is entries[9]


def test_at_most_so_many_are_moved() -> None:
    ring = Ring(Q * 16, 0)
    entries = []
    while entry := add(ring, 256):
        entries.append(entry)
    for entry in entries[MOST_SKIPS + 1 : MOST_SKIPS + 9]:
        ring.unlink(entry)
    assert ring.place(1024, reserved=False) == -1
    assert ring.skips == 0
    ring.unlink(entries[0])
    assert ring.place(1024, reserved=False) == entries[MOST_SKIPS].end


def test_undo_turns_skips_and_additions_back() -> None:
    ring = Ring(Q, 0)
    entries = [add(ring, 256) for _ in range(15)]
    for entry in entries[2:5]:
        assert entry is not None
        ring.unlink(entry)
    before, mark = ring.all(), ring.mark()
    added = [add(ring, 512)]
    assert added[0] is not None
    assert ring.skips == 2
    ring.undo(mark, [entry for entry in added if entry])
    assert ring.all() == before
    assert ring.mark() == mark
    assert before[0].prev is None
    assert before[-1].next is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=80), st.randoms())
def test_nothing_overlaps_and_ring_order_holds(
    steps: list[tuple[bool, int, int]], rng: random.Random
) -> None:
    ring, live = Ring(Q, 0), list[IndexEntry]()
    for adds, units, which in steps:
        if adds or not live:
            entry = add(ring, units * 256)
            if entry is not None:
                live.append(entry)
            elif not live:
                pytest.fail("an empty ring refused")
        else:
            ring.unlink(live.pop(which % len(live)))
        taken = [at for entry in live for at in range(entry.offset, entry.end, 256)]
        assert len(taken) == len(set(taken)), "overlap"
        assert all(0 <= at < Q for at in taken)
        order = ring.all()
        assert sorted(order, key=lambda e: (e.offset - ring.write) % Q) == order
        assert {id(entry) for entry in order} == {id(entry) for entry in live}
