"""Judging one slice: the order of the questions, exactness, and the arithmetic of the percentile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import BUCKETS, bucket_of_ns
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import promises
from sla_server.agreements.slices import SliceVerdict, StreamSlot, exceeds, judge_slice
from tests.support.agreements import agreement, in_force, simple

MINUTE_US = 60_000_000
TEN = Applicability(min_ios_per_slice=10)


def slot(
    reads: int = 100,
    missed: int | None = 0,
    latency_us: int = 5000,
    counts: dict[tuple[int, int], tuple[int, int]] | None = None,
    **keys: Any,
) -> StreamSlot:
    hist = np.zeros(BUCKETS, dtype=np.int64)
    hist[bucket_of_ns(latency_us * 1000)] = reads
    if counts is None:
        counts = {} if missed is None else {(IO_ANY, 12_000): (reads + keys.get("writes", 0), missed)}
    values: dict[str, Any] = {
        "arrived": reads,
        "reads": reads,
        "writes": 0,
        "read_bytes": reads * 4096,
        "write_bytes": 0,
        "hist_read": hist,
        "hist_write": np.zeros(BUCKETS, dtype=np.int64),
        "missed": counts,
    }
    return StreamSlot(**{**values, **keys})


def judge(
    *slots: StreamSlot, excluded: bool = False, covered: float = 1.0, clauses: Applicability = TEN
) -> SliceVerdict:
    (promise,) = promises([in_force(simple())])
    covered_us = {"gw": round(covered * MINUTE_US)}
    return judge_slice(promise, clauses, slots, covered_us, length_us=MINUTE_US, excluded=excluded)


def test_exactly_the_allowed_share_is_good_and_one_more_is_bad() -> None:
    assert judge(slot(100, missed=5)).state == "good"
    assert judge(slot(100, missed=6)).state == "bad"


def test_streams_are_judged_on_their_sums() -> None:
    assert judge(slot(100, missed=10), slot(100, missed=0)).state == "good"
    assert judge(slot(100, missed=10), slot(100, missed=1)) == judge(slot(200, missed=11))


def test_the_order_of_the_questions() -> None:
    bad, few, above = slot(100, missed=100), slot(9, missed=9), slot(100, missed=100, arrived=30_001)
    assert judge(bad, excluded=True, covered=0.0).state == "excluded"
    assert judge(few, covered=0.89).state == "no_data"
    assert judge(bad, covered=0.9).state == "bad"
    assert judge(few).state == "not_applicable"
    assert judge(above).state == "not_applicable"
    assert judge(slot(100, missed=100, arrived=30_000)).state == "bad"
    assert judge().state == "not_applicable"


def test_without_any_gateway_there_is_no_data() -> None:
    (promise,) = promises([in_force(simple())])
    assert judge_slice(promise, TEN, [slot()], {}, length_us=MINUTE_US, excluded=False).state == "no_data"


def test_the_worst_covered_gateway_decides() -> None:
    (promise,) = promises([in_force(simple())])
    covered = {"a": MINUTE_US, "b": MINUTE_US // 2}
    found = judge_slice(promise, TEN, [slot()], covered, length_us=MINUTE_US, excluded=False)
    assert (found.state, found.coverage_ratio) == ("no_data", 0.5)


def test_overlapping_cuts_do_not_cover_more_than_all() -> None:
    assert judge(slot(), covered=1.2).coverage_ratio == 1.0


def test_applicability_clauses() -> None:
    small = Applicability(min_ios_per_slice=10, max_mean_io_kib=4)
    assert judge(slot(), clauses=small).state == "good"
    assert judge(slot(read_bytes=100 * 4096 + 1), clauses=small).state == "not_applicable"
    reading = Applicability(min_ios_per_slice=10, min_read_fraction=0.5)
    half = slot(50, writes=50, missed=None)
    assert judge(half, clauses=reading).state == "good"
    assert judge(slot(49, writes=50, missed=None), clauses=reading).state == "not_applicable"


def test_a_slice_counted_with_another_set_is_judged_pessimistically_and_says_so() -> None:
    exact = judge(slot(100, missed=0, latency_us=11_900))
    assert (exact.state, exact.inexact) == ("good", False)
    # The bucket of 11.9 ms reaches beyond 12 ms: any of its I/Os may have been too slow.
    rough = judge(slot(100, missed=None, latency_us=11_900))
    assert (rough.state, rough.inexact, rough.missed) == ("bad", True, 100)
    assert judge(slot(100, missed=None, latency_us=5000)).state == "good"


def test_a_partly_counted_stream_is_inexact_alone() -> None:
    partly = slot(100, latency_us=5000, counts={(IO_ANY, 12_000): (60, 60)})
    found = judge(partly, slot(100, missed=3))
    assert (found.missed, found.inexact) == (3, True)


def test_only_the_promised_kind_counts() -> None:
    text = simple().replace("clients:", "io: read, clients:")
    (promise,) = promises([in_force(text)])
    mixed = slot(
        100,
        writes=300,
        arrived=400,
        counts={(IO_READ, 12_000): (100, 2), (IO_WRITE, 12_000): (300, 300)},
    )
    found = judge_slice(promise, TEN, [mixed], {"gw": MINUTE_US}, length_us=MINUTE_US, excluded=False)
    assert (found.state, found.n, found.missed) == ("good", 100, 2)
    assert found.offered_iops == pytest.approx(100 / 60)


def test_held_ios_count_as_demand() -> None:
    assert judge(slot(100, arrived=6000)).offered_iops == pytest.approx(100)


@given(st.integers(1, 10**9), st.sampled_from([50.0, 90.0, 95.0, 99.0, 99.9, 99.99]))
def test_the_percentile_is_counted_in_whole_numbers(n: int, percentile: float) -> None:
    allowed = (1_000_000 - round(percentile * 10_000)) * n // 1_000_000
    assert not exceeds(allowed, n, percentile)
    assert exceeds(allowed + 1, n, percentile)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=5), st.floats(0, 1.5))
def test_a_verdict_is_always_consistent(parts: list[tuple[int, int]], covered: float) -> None:
    found = judge(*(slot(n, missed=min(missed, n)) for n, missed in parts), covered=covered)
    assert 0 <= found.missed <= found.n
    assert 0 <= found.coverage_ratio <= 1
    if found.state in ("good", "bad"):
        assert (found.state == "bad") == (found.missed * 20 > found.n)


def test_documents_default_to_a_hundred_ios() -> None:
    text = simple().replace("    applicability: {min_ios_per_slice: 10}\n", "")
    clauses = agreement(text).judged[0].applicability
    assert judge(slot(99), clauses=clauses).state == "not_applicable"
    assert judge(slot(100), clauses=clauses).state == "good"


def test_one_cut_that_stands_in_the_slice_before_is_not_missed() -> None:
    (promise,) = promises([in_force(simple())])

    def state(covered_s: float, slack_s: float) -> tuple[str, float]:
        covered_us = {"gw": round(covered_s * 1e6)}
        found = judge_slice(
            promise, TEN, [slot()], covered_us, length_us=5_000_000, excluded=False, slack_us=slack_s * 1e6
        )
        return found.state, found.coverage_ratio

    assert state(4, 1) == ("good", 0.8)
    assert state(3, 1) == ("no_data", 0.6)
    assert state(4, 0) == ("no_data", 0.8)
