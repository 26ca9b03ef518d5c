"""The history that compliance is counted from, against plain lists."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements import slice_history as history
from sla_server.agreements.slice_history import SliceHistory

MINUTE_US = 60_000_000
DAY_US = 1440 * MINUTE_US
START_US = 1_798_761_600_000_000  # 2027-01-01 00:00 UTC
CODES = st.lists(st.integers(0, history.EXCLUDED), max_size=300)


def book(codes: list[int], origin_us: int = START_US) -> SliceHistory:
    made = SliceHistory(MINUTE_US, origin_us)
    for index, code in enumerate(codes):
        made.put(origin_us + index * MINUTE_US, code)
    return made


@given(CODES, st.integers(-5, 310), st.integers(0, 310))
def test_counts_agree_with_counting_by_hand(codes: list[int], low: int, length: int) -> None:
    found = book(codes).counts(START_US + low * MINUTE_US, START_US + (low + length) * MINUTE_US)
    part = codes[max(low, 0) : max(low + length, 0)]
    assert found.good == part.count(history.GOOD)
    assert found.bad == part.count(history.BAD)
    assert found.no_data_ours == part.count(history.NO_DATA_OURS)
    assert found.no_data == part.count(history.NO_DATA) + found.no_data_ours
    states = found.states()
    assert sum(states.values()) + found.unjudged == length


def test_ranges_take_the_slices_that_start_in_them() -> None:
    made = book([history.GOOD, history.BAD, history.GOOD])
    assert made.counts(START_US + 1, START_US + MINUTE_US).bad == 0
    assert made.counts(START_US + 1, START_US + MINUTE_US + 1).bad == 1
    assert made.get(START_US + MINUTE_US) == history.BAD
    assert made.get(START_US - MINUTE_US) == history.UNJUDGED


def test_a_slice_off_the_grid_or_before_the_origin_is_refused() -> None:
    made = book([])
    assert not made.put(START_US + 1, history.BAD)
    assert not made.put(START_US - MINUTE_US, history.BAD)


def test_memory_is_given_back_by_the_chunk_and_nothing_else_changes() -> None:
    made = book([history.GOOD] * 5000)
    made.forget_before(START_US + 3000 * MINUTE_US)
    assert made.counts(START_US, START_US + 5000 * MINUTE_US).good == 5000 - 2048
    assert made.counts(START_US + 3000 * MINUTE_US, START_US + 5000 * MINUTE_US).good == 2000
    assert not made.put(START_US, history.BAD)
    assert made.put(START_US + 5000 * MINUTE_US, history.BAD)
    assert made.counts(START_US, START_US + 6000 * MINUTE_US).bad == 1
    made.forget_before(START_US - DAY_US)
    made.forget_before(START_US + 100 * DAY_US)
    assert made.counts(START_US, START_US + 6000 * MINUTE_US).bad == 1  # the newest stay


PUTS = st.lists(st.tuples(st.integers(0, 9000), st.integers(0, history.EXCLUDED)), max_size=40)


@given(PUTS, st.integers(0, 7), st.lists(st.tuples(st.integers(-10, 9100), st.integers(0, 9100)), max_size=8))
def test_sealed_chunks_hold_what_a_plain_list_holds(
    puts: list[tuple[int, int]], fill: int, ranges: list[tuple[int, int]]
) -> None:
    made, plain = book([]), dict[int, int]()
    several = [(index, 1 + index // 700 % 6) for index in range(fill * 1000)]
    for index, code in (*several, *puts):
        assert made.put(START_US + index * MINUTE_US, code)
        plain[index] = code
    end = max(plain, default=-1) + 1
    for low, length in (*ranges, (0, end), (1024, 2048), (1023, 1), (1024, 0)):
        from_us, to_us = START_US + low * MINUTE_US, START_US + (low + length) * MINUTE_US
        expected = [plain.get(index, 0) for index in range(max(low, 0), min(max(low + length, 0), end))]
        assert made.codes(from_us, to_us).tolist() == expected
        found = made.counts(from_us, to_us)
        assert found.good == expected.count(history.GOOD)
        assert found.bad == expected.count(history.BAD)
        assert found.no_data == expected.count(history.NO_DATA) + expected.count(history.NO_DATA_OURS)
        assert sum(found.states().values()) + found.unjudged == max(length, 0)


def test_a_month_of_minutes_is_small_and_a_restless_one_is_bounded() -> None:
    quiet = book([history.GOOD] * 44_640)
    assert quiet.size_bytes < 2_500  # the newest chunk or two, and eight bytes for each of the others
    rng = random.Random(1)
    restless = book([rng.randrange(1, 7) for _ in range(44_640)])
    assert restless.size_bytes < 25_000
    assert restless.counts(START_US, START_US + 31 * DAY_US).unjudged == 0
