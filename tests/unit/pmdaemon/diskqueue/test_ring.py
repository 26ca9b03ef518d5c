"""Space against a byte map: what is placed never overlaps; strictness, wrap, skip, reserve, undo."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.diskqueue.format import NONE
from pmdaemon.diskqueue.records import Records
from pmdaemon.diskqueue.ring import MOST_SKIPS, Ring, fit

Q = 4096


def make(ring_bytes: int, reserve_bytes: int) -> Ring:
    return Ring(ring_bytes, reserve_bytes, Records())


def add(ring: Ring, size: int, reserved: bool = False) -> int | None:
    """A durable record; its slot, None without room."""
    offset = ring.place(size, reserved=reserved)
    if offset < 0:
        return None
    records = ring.records
    slot = next((slot for slot in range(len(records)) if not records.seqs[slot]), len(records))
    if slot == len(records):
        records.grow()
    records.seqs[slot] = records.durable_seq = records.durable_seq + 1
    records.offsets[slot], records.spans[slot] = offset, size
    ring.advance(offset, offset + size)
    ring.append(slot)
    return slot


def remove(ring: Ring, slot: int) -> None:
    ring.unlink(slot)
    ring.records.seqs[slot] = 0


def test_a_request_fits_only_if_strictly_smaller_than_the_room() -> None:
    assert fit(1024, 512, Q - 1024, Q, 0) == -1
    assert fit(1024, 512, Q - 1024 - 256, Q, 0) == 1024
    assert fit(Q - 256, 512, 256, Q, 0) == 0
    assert fit(Q - 256, 512, 512, Q, 0) == -1
    assert fit(512, 1024, 512, Q, 0) == -1
    assert fit(512, 1024, 256, Q, 0) == 512
    assert fit(512, 512, 256, Q, 0) == -1, "W = R with a live entry is a full ring, not an empty one"


def test_reserve_is_kept_for_reserved_requests() -> None:
    ring = make(Q, 1024)
    while add(ring, 256) is not None:
        pass
    assert ring.free_bytes() >= 1024
    extra = 0
    while add(ring, 256, reserved=True) is not None:
        extra += 1
    assert extra == 4
    assert ring.free_bytes() == 256


def test_old_record_at_the_head_is_moved_when_it_is_all_that_blocks() -> None:
    ring = make(Q, 0)
    entries = [add(ring, 256) for _ in range(15)]
    assert add(ring, 256) is None
    for entry in entries[1:9]:
        assert entry is not None
        remove(ring, entry)
    placed = add(ring, 1024)
    assert placed is not None
    assert ring.records.offsets[placed] == 256
    assert ring.skips == 1
    assert ring.tail == placed
    assert ring.head == entries[9]


def test_at_most_so_many_are_moved() -> None:
    ring = make(Q * 16, 0)
    entries = []
    while (entry := add(ring, 256)) is not None:
        entries.append(entry)
    for entry in entries[MOST_SKIPS + 1 : MOST_SKIPS + 9]:
        remove(ring, entry)
    assert ring.place(1024, reserved=False) == -1
    assert ring.skips == 0
    remove(ring, entries[0])
    assert ring.place(1024, reserved=False) == ring.records.end(entries[MOST_SKIPS])


def test_undo_turns_skips_and_additions_back() -> None:
    ring = make(Q, 0)
    entries = [add(ring, 256) for _ in range(15)]
    for entry in entries[2:5]:
        assert entry is not None
        remove(ring, entry)
    before, mark = ring.all(), ring.mark()
    added = [add(ring, 512)]
    assert added[0] is not None
    assert ring.skips == 2
    ring.undo(mark, [slot for slot in added if slot is not None])
    assert ring.all() == before
    assert ring.mark() == mark
    assert ring.records.before[before[0]] == NONE
    assert ring.records.behind[before[-1]] == NONE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=80), st.randoms())
def test_nothing_overlaps_and_ring_order_holds(
    steps: list[tuple[bool, int, int]], rng: random.Random
) -> None:
    ring, live = make(Q, 0), list[int]()
    for adds, units, which in steps:
        if adds or not live:
            entry = add(ring, units * 256)
            if entry is not None:
                live.append(entry)
            elif not live:
                pytest.fail("an empty ring refused")
        else:
            remove(ring, live.pop(which % len(live)))
        offsets, end = ring.records.offsets, ring.records.end
        taken = [at for slot in live for at in range(offsets[slot], end(slot), 256)]
        assert len(taken) == len(set(taken)), "overlap"
        assert all(0 <= at < Q for at in taken)
        order = ring.all()
        assert sorted(order, key=lambda slot: (offsets[slot] - ring.write) % Q) == order
        assert set(order) == set(live)


def test_a_record_is_never_larger_than_its_span_can_say() -> None:
    assert make(1 << 40, 8192).largest_bytes() == 2**32 - 256
    assert make(Q, 1024).largest_bytes() == Q - 1024 - 256
