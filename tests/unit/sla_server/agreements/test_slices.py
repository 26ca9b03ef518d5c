"""Judging one slice: the order of the questions, exactness, and the arithmetic of the percentile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import BUCKETS, bucket_of_ns
from sla_server.agreements import slices
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import promises
from sla_server.agreements.rules import rule_of
from sla_server.agreements.slices import (
    REASONS,
    LimitCounts,
    SliceVerdict,
    StreamSlot,
    exceeds,
    judge_slice,
    table_of,
    verdicts_of,
)
from sla_server.agreements.verdicts import DueSlices, judge_slices
from tests.support.agreements import agreement, in_force, simple

MINUTE_US = 60_000_000
TEN = Applicability(min_ios_per_slice=10)


def slot(
    reads: int = 100,
    missed: int | None = 0,
    latency_us: int = 5000,
    counts: dict[tuple[int, int], tuple[int, ...]] | None = None,
    **keys: Any,
) -> StreamSlot:
    hist = np.zeros(BUCKETS, dtype=np.int64)
    hist[bucket_of_ns(latency_us * 1000)] = reads
    hist_write = np.zeros(BUCKETS, dtype=np.int64)
    hist_write[bucket_of_ns(latency_us * 1000)] = keys.get("writes", 0)
    if counts is None:
        counts = {} if missed is None else {(IO_ANY, 12_000): (reads + keys.get("writes", 0), missed)}
    values: dict[str, Any] = {
        "arrived": reads,
        "reads": reads,
        "writes": 0,
        "read_bytes": reads * 4096,
        "write_bytes": 0,
        "hist_read": hist,
        "hist_write": hist_write,
        "lat_sum_us": (reads + keys.get("writes", 0)) * latency_us,
        "missed": {key: LimitCounts(*values) for key, values in counts.items()},
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


# -- Never good without proof


def judge_as(
    promise_keys: str, *slots: StreamSlot, io: str = "any", min_ios: int = 10, before_us: int | None = None
) -> SliceVerdict:
    """Judge the slots by an objective of these keys."""
    text = simple().replace("clients:", f"io: {io}, clients:")
    objective = f"  - {{name: other, {promise_keys}, budgeting: {{target: 0.99}}}}\n"
    *_, promise = in_force(text + objective).all_promises
    clauses = Applicability(min_ios_per_slice=min_ios)
    covered_us = {"gw": MINUTE_US}
    return judge_slice(
        promise, clauses, slots, covered_us, length_us=MINUTE_US, excluded=False, before_us=before_us
    )


def outcome(found: SliceVerdict) -> tuple[str, str]:
    return found.state, found.reason


CURVE = "demand_curve: [{up_to_iops: 500, value_ms: 12}]"
INDICATORS = {
    "latency": f"indicator: {{metric: latency, percentile: 95}}, {CURVE}",
    "mean_latency": f"indicator: {{metric: mean_latency}}, {CURVE}",
    "iops": "indicator: {metric: iops}, promised_iops: 100",
    "throughput": "indicator: {metric: throughput}, promised_mbps: 1",
    "availability": "indicator: {metric: availability}, outage: 5s",
}
every_indicator = pytest.mark.parametrize("keys", INDICATORS.values(), ids=INDICATORS)


@every_indicator
def test_a_hang_is_bad_in_each_slice_it_reaches_into(keys: str) -> None:
    """182 s with 32 I/Os in flight and no completion: two whole slices, and the ends of two more."""
    began = slot(600, counts={(IO_ANY, 12_000): (600, 0, 32)}, oldest_ms=59_000, stalled_ms=59_000)
    lasts = slot(0, counts={}, oldest_ms=119_000, stalled_ms=119_000, arrived=0)
    ended = slot(32, counts={(IO_ANY, 12_000): (32, 32, 0, 32)}, stalled_ms=182_000)
    for each in (began, lasts, ended):
        assert outcome(judge_as(keys, each)) == ("bad", "hung")
        assert judge_as(keys, slot(5000), each).state == "bad", "a stream of the scope hangs"


@every_indicator
def test_storage_that_fails_everything_is_bad_at_any_rate(keys: str) -> None:
    for n in (3, 600, 10_000_000):
        failing = slot(
            n,
            latency_us=50,
            errors=n,
            failed=n,
            failed_reads=n,
            counts={(IO_ANY, 12_000): (n, 0, 0, 0, n, 0)},
        )
        assert outcome(judge_as(keys, failing)) == ("bad", "failed")


@every_indicator
def test_an_agent_of_before_that_shows_i_o_in_flight_and_nothing_else_hangs(keys: str) -> None:
    silent = slot(0, counts={}, arrived=0, outstanding=4, covered_us=MINUTE_US)
    assert outcome(judge_as(keys, silent)) == ("bad", "hung")
    assert (
        outcome(judge_as(keys, slot(0, counts={}, arrived=4, outstanding=4, covered_us=MINUTE_US)))[0]
        != "good"
    )


@every_indicator
def test_an_idle_stream_is_neither_good_nor_bad(keys: str) -> None:
    assert outcome(judge_as(keys, slot(0, counts={}))) == ("not_applicable", "few-ios")
    assert outcome(judge_as(keys)) == ("not_applicable", "few-ios")


def test_an_overdue_io_counts_once_in_the_slice_that_saw_it_first() -> None:
    then = judge(slot(100, counts={(IO_ANY, 12_000): (100, 0, 6, 0)}))
    assert (then.state, then.n, then.missed) == ("bad", 106, 6)
    later = judge(slot(100, counts={(IO_ANY, 12_000): (100, 6, 0, 6)}))
    assert (later.state, later.n, later.missed) == ("good", 94, 0)


def test_failed_ios_count_as_missed_once() -> None:
    some = {(IO_ANY, 12_000): (100, 4, 0, 0, 4, 2)}
    assert (judge(slot(100, counts=some)).missed, judge(slot(100, counts=some)).state) == (6, "bad")


def test_failed_ios_may_be_excluded() -> None:
    keys = INDICATORS["latency"] + ", errors: exclude"
    some = slot(100, counts={(IO_ANY, 12_000): (100, 6, 0, 0, 50, 2)}, errors=50, failed=50, failed_reads=50)
    found = judge_as(keys, some)
    assert (found.n, found.missed, found.state) == (50, 4, "bad")
    assert found.failed == 50, "a figure of its own"
    fewer = slot(100, counts={(IO_ANY, 12_000): (100, 4, 0, 0, 50, 2)}, errors=50, failed=50, failed_reads=50)
    assert judge_as(keys, fewer).state == "good"
    all_failed = slot(100, counts={(IO_ANY, 12_000): (100, 0, 0, 0, 100, 0)}, errors=100, failed=100)
    assert outcome(judge_as(keys, all_failed)) == ("not_applicable", "few-ios")


def test_failures_of_an_agent_that_does_not_tell_them_by_kind_count_for_each_kind() -> None:
    found = judge_as(INDICATORS["latency"], slot(100, writes=100, errors=11, counts=BOTH), io="read")
    assert (found.missed, found.inexact, found.state) == (11, True, "bad")
    told = slot(100, writes=100, errors=11, failed=11, failed_writes=11, counts=BOTH)
    found = judge_as(INDICATORS["latency"], told, io="read")
    assert (found.state, found.inexact, found.failed) == ("good", False, 0)
    assert judge_as(INDICATORS["latency"], told, io="write").failed == 11
    assert judge_as(INDICATORS["iops"], slot(6000, errors=3)).inexact


BOTH = {(IO_READ, 12_000): (100, 0), (IO_WRITE, 12_000): (100, 0)}


def test_without_exact_counts_the_oldest_outstanding_io_bounds_them() -> None:
    found = judge(slot(100, missed=None, oldest_ms=13, outstanding=7))
    assert (found.n, found.missed, found.inexact, found.state) == (107, 7, True, "bad")
    assert judge(slot(100, missed=None, oldest_ms=12, outstanding=7)).missed == 0


def test_a_stuck_io_is_bad_when_it_is_more_than_the_percentile_allows() -> None:
    few = slot(4, counts={(IO_ANY, 12_000): (4, 0)}, oldest_ms=90_000)
    assert outcome(judge(few)) == ("bad", "hung")
    many = slot(1000, counts={(IO_ANY, 12_000): (1000, 0)}, oldest_ms=90_000)
    assert judge(many).state == "good", "one of a thousand"


def test_a_hang_of_writes_alone_does_not_concern_reads_that_go_on() -> None:
    hanging = slot(100, counts={(IO_READ, 12_000): (100, 0)}, stalled_ms=9_000, oldest_ms=30_000)
    assert judge_as(INDICATORS["latency"], hanging, io="read").state == "good"
    assert judge_as(INDICATORS["latency"], hanging, io="write").state == "bad"


# -- Sources beside the I/O path


def host(reads: int = 600, **keys: Any) -> StreamSlot:
    nothing = np.zeros(BUCKETS, dtype=np.int64)
    return slot(reads, counts={}, hist_read=nothing, hist_write=nothing, **keys)


def test_beside_the_io_path_a_percentile_and_availability_are_not_measurable() -> None:
    for name in ("latency", "availability"):
        assert outcome(judge_as(INDICATORS[name], host())) == ("no_data", "not-measurable")
    assert judge_as(INDICATORS["latency"], host(), slot(100, missed=30)).state == "no_data"
    assert judge_as(INDICATORS["latency"], host(100), slot(900, missed=90)).state == "bad", (
        "whatever the rest"
    )


def test_beside_the_io_path_the_mean_is_measured_of_all_io() -> None:
    assert judge_as(INDICATORS["mean_latency"], host(latency_us=12_000)).state == "good"
    assert outcome(judge_as(INDICATORS["mean_latency"], host(latency_us=12_001))) == ("bad", "slow")
    both = host(writes=10)
    assert outcome(judge_as(INDICATORS["mean_latency"], both, io="read")) == ("no_data", "not-measurable")


def test_beside_the_io_path_a_rate_is_kept_when_it_is_delivered_and_else_not_known() -> None:
    assert judge_as(INDICATORS["iops"], host(6000)).state == "good"
    assert outcome(judge_as(INDICATORS["iops"], host(5999))) == ("no_data", "not-measurable")


def test_a_source_that_knows_completions_only_may_have_latencies_all_the_same() -> None:
    """Drives of QEMU: nothing says what is outstanding."""
    drive = slot(6000, missed=None, is_beside=True)
    found = judge_as(INDICATORS["latency"], drive)
    assert (found.state, found.inexact) == ("good", True)
    slow = slot(6000, missed=None, latency_us=50_000, is_beside=True)
    assert judge_as(INDICATORS["latency"], slow).state == "bad"
    assert judge_as(INDICATORS["mean_latency"], drive).state == "good"
    assert outcome(judge_as(INDICATORS["availability"], drive)) == ("no_data", "not-measurable")
    assert judge_as(INDICATORS["iops"], drive).state == "good"
    fewer = slot(5999, missed=None, is_beside=True)
    assert outcome(judge_as(INDICATORS["iops"], fewer)) == ("no_data", "not-measurable")


# -- The other indicators


def test_the_mean_latency_follows_the_demand_curve() -> None:
    keys = (
        "indicator: {metric: mean_latency}, "
        "demand_curve: [{up_to_iops: 10, value_ms: 5}, {up_to_iops: 20, value_ms: 6}]"
    )
    found = judge_as(keys, slot(600, latency_us=5_001))
    assert (found.state, found.threshold_us, found.measured) == ("bad", 5_000, 5_001)
    assert judge_as(keys, slot(601, latency_us=6_000)).state == "good"
    assert outcome(judge_as(keys, slot(1201, latency_us=9_000))) == ("not_applicable", "above-curve")


def test_the_mean_of_one_kind_rests_on_bucket_edges_when_both_share_a_stream() -> None:
    found = judge_as(INDICATORS["mean_latency"], slot(100, writes=1, latency_us=5_000), io="read")
    assert (found.state, found.inexact) == ("good", True)
    assert found.measured is not None
    assert 5_000 <= found.measured <= 5_100
    assert judge_as(INDICATORS["mean_latency"], slot(100, latency_us=5_000), io="read").measured == 5_000


@pytest.mark.parametrize(("arrived", "done", "state"), [
    (6000, 6000, "good"), (9000, 6000, "good"), (9000, 5879, "bad"), (9000, 5880, "good"),
    (3000, 2940, "good"), (3000, 2939, "bad"), (9, 9, "not_applicable"), (600, 0, "bad"),
])  # fmt: skip
def test_iops_are_promised_up_to_what_is_offered(arrived: int, done: int, state: str) -> None:
    assert judge_as(INDICATORS["iops"], slot(done, counts={}, arrived=arrived)).state == state


def test_throughput_is_promised_up_to_what_is_offered() -> None:
    def state(reads: int, size: int, arrived: int) -> str:
        return judge_as(INDICATORS["throughput"], slot(reads, read_bytes=reads * size, arrived=arrived)).state

    assert state(600, 100_000, 900) == "good"  # 1 MB a second
    assert state(600, 98_000, 900) == "good"
    assert state(600, 97_000, 900) == "bad"
    assert state(600, 50_000, 600) == "good"  # no more was asked for
    assert state(600, 50_000, 700) == "bad"


def test_what_failed_was_not_delivered() -> None:
    assert judge_as(INDICATORS["iops"], slot(6000, errors=59, failed=59, failed_reads=59)).state == "good"
    assert judge_as(INDICATORS["iops"], slot(6000, errors=61, failed=61, failed_reads=61)).state == "bad"


@pytest.mark.parametrize(("failed", "stalled_ms", "expected"), [
    (0, 4_999, ("good", "")), (0, 5_000, ("bad", "hung")), (6, 0, ("good", "")), (7, 0, ("bad", "failed")),
])  # fmt: skip
def test_availability(failed: int, stalled_ms: int, expected: tuple[str, str]) -> None:
    found = judge_as(
        INDICATORS["availability"],
        slot(600, errors=failed, failed=failed, failed_reads=failed, stalled_ms=stalled_ms),
    )
    assert outcome(found) == expected
    assert (found.measured, found.threshold_us) == (stalled_ms * 1000, 5_000_000)


def test_each_reason_is_explained() -> None:
    source = Path(slices.__file__).read_text()
    assert {word for word in REASONS if f'"{word}"' in source} == set(REASONS)
    assert all(text[0].islower() and not text.endswith(".") for text in REASONS.values())


@every_indicator
def test_clients_that_were_refused_because_the_storage_is_gone_are_failures(keys: str) -> None:
    gone = slot(0, counts={}, arrived=0, errors=3, failed=3)
    assert outcome(judge_as(keys, gone)) == ("bad", "failed")


@every_indicator
def test_what_a_gateway_refused_for_what_it_asks_is_its_clients_own_mistake(keys: str) -> None:
    """Of an agent that tells failures by kind, the rest of the errors are no failures of the storage."""
    counts = {(IO_ANY, 12_000): (6000, 0)}
    found = judge_as(keys, slot(6000, counts=counts, errors=600, oldest_ms=3))
    assert (found.state, found.inexact) == ("good", False)


# -- Outstanding I/O by kind


@every_indicator
@pytest.mark.parametrize("io", ["any", "read", "write"])
def test_a_hang_that_ends_within_its_slice_is_bad_for_the_kinds_that_waited(keys: str, io: str) -> None:
    """Reads and writes complete in the slice; in between none did for 30 s, and reads alone for 20 s more."""
    counts = {(kind, 12_000): (6000, 0, 3, 0) for kind in (IO_READ, IO_WRITE)}
    counts[IO_ANY, 12_000] = (12_000, 0, 3, 0)
    both = slot(6000, writes=6000, counts=counts, stalled_ms=30_000, stalled_read_ms=50_000,
                stalled_write_ms=30_000, arrived=12_000, covered_us=MINUTE_US)  # fmt: skip
    assert outcome(judge_as(keys, both, io=io)) == ("bad", "hung")
    assert not judge_as(keys, both, io=io).inexact or keys == INDICATORS["mean_latency"]
    reads = slot(6000, writes=6000, counts=counts, stalled_ms=0, stalled_read_ms=50_000, arrived=12_000)
    found = judge_as(keys, reads, io=io)
    assert (found.reason == "hung") == (io == "read"), "writes went on"


@every_indicator
def test_outstanding_io_of_unknown_kind_counts_for_each_and_says_so(keys: str) -> None:
    """Of agents that do not tell kinds apart, and of rows that were stored before the columns were there."""
    for names in (("stalled_ms", "kindless_stalled_ms"), ("stalled_ms",)):
        hung = slot(6000, writes=6000, counts={}, arrived=12_000, **dict.fromkeys(names, 8_000))
        for io in ("any", "read", "write"):
            found = judge_as(keys, hung, io=io)
            assert (*outcome(found), found.inexact) == ("bad", "hung", True)


def test_a_trim_that_takes_seconds_is_no_hang_of_reads_and_writes() -> None:
    trimmed = slot(200, counts={(IO_ANY, 12_000): (200, 0)}, oldest_read_ms=1, oldest_ms=1, outstanding=2)
    assert outcome(judge(trimmed)) == ("good", "")


@every_indicator
def test_a_trim_of_an_idle_volume_is_no_hang(keys: str) -> None:
    idle = slot(0, counts={}, outstanding=1, covered_us=8_000_000, told_us=8_000_000)
    assert outcome(judge_as(keys, idle)) == ("not_applicable", "few-ios")


# -- Agents that do not tell what waits, or was refused


@pytest.mark.parametrize("name", ["latency", "mean_latency", "availability"])
@pytest.mark.parametrize("keys", [
    {"arrived": 8, "outstanding": 8}, {"arrived": 40, "reads": 3, "outstanding": 8}, {"arrived": 4},
    {"arrived": 0, "errors": 3},
], ids=["hangs", "hangs after three", "given up", "refused"])  # fmt: skip
def test_what_an_agent_does_not_tell_is_no_little_demand(name: str, keys: dict[str, int]) -> None:
    reads = keys.get("reads", 0)
    values = {"counts": {(IO_ANY, 12_000): (reads, 0)} if reads else {}, "covered_us": MINUTE_US, **keys}
    assert outcome(judge_as(INDICATORS[name], slot(**{"reads": 0, **values}))) == ("no_data", "not-told")
    told = slot(**{"reads": 0, **values, "told_us": MINUTE_US})
    assert outcome(judge_as(INDICATORS[name], told)) == ("not_applicable", "few-ios")


def test_reads_that_hang_beside_writes_of_an_agent_that_does_not_tell_are_no_little_demand() -> None:
    hangs = slot(0, writes=600, arrived=600, counts={(IO_WRITE, 12_000): (600, 0)}, outstanding=8)
    assert outcome(judge_as(INDICATORS["latency"], hangs, io="read")) == ("no_data", "not-told")
    assert outcome(judge_as(INDICATORS["latency"], hangs, io="write")) == ("good", "")


@every_indicator
def test_a_client_s_own_mistakes_are_no_failures_of_an_agent_that_tells(keys: str) -> None:
    """Nothing waited at the end of any cut."""
    fast = slot(
        6000, counts={(IO_ANY, 12_000): (6000, 0)}, errors=600, told_us=1_000_000, read_bytes=60_000_000
    )
    assert (outcome(judge_as(keys, fast)), judge_as(keys, fast).inexact) == (("good", ""), False)


# -- Failed I/O that is excluded

EXCLUDE = ", errors: exclude"


def failing(done: int, failed: int, ok_us: int, failed_us: int, **keys: Any) -> StreamSlot:
    """Some succeed in one time, some fail in another."""
    hist = np.zeros(BUCKETS, dtype=np.int64)
    np.add.at(hist, [bucket_of_ns(us * 1000) for us in (ok_us, failed_us)], [done - failed, failed])
    total_us = (done - failed) * ok_us + failed * failed_us
    slow_failed = failed * (failed_us > 12_000)
    missed = (done - failed) * (ok_us > 12_000) + slow_failed
    counts = {(IO_ANY, 12_000): (done, missed, 0, 0, failed, slow_failed)}
    values = {
        "lat_sum_us": total_us,
        "hist_read": hist,
        "failed": failed,
        "failed_reads": failed,
        "errors": failed,
    }
    return slot(done, counts=counts, read_bytes=(done - failed) * 4096, **{**values, **keys})


def test_a_mean_leaves_excluded_ios_out_of_sum_and_number() -> None:
    """300 succeed in 15 ms, 300 fail at once: their mean is 15 ms, not 7.5."""
    quick = failing(600, 300, 15_000, 100)
    found = judge_as(INDICATORS["mean_latency"] + EXCLUDE, quick)
    assert (found.state, found.n, found.missed, found.inexact) == ("bad", 300, 0, True)
    assert found.measured == pytest.approx(15_000, rel=0.01)
    slow = failing(600, 300, 9_000, 5_000_000)
    found = judge_as(INDICATORS["mean_latency"] + EXCLUDE, slow)
    assert (found.state, found.n) == ("good", 300), "none of those above the limit succeeded"
    assert judge_as(INDICATORS["mean_latency"], slow).state == "bad"


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), min_size=1, max_size=40))
def test_the_mean_of_what_succeeded_is_never_understated(ios: list[tuple[int, bool]]) -> None:
    hist = np.zeros(BUCKETS, dtype=np.int64)
    np.add.at(hist, [bucket_of_ns(us * 1000) for us, _ in ios], 1)
    failed = sum(fails for _, fails in ios)
    counts = {(IO_ANY, 12_000): (
        len(ios), sum(us > 12_000 for us, _ in ios), 0, 0, failed, sum(us > 12_000 and f for us, f in ios),
    )}  # fmt: skip
    one = slot(len(ios), counts=counts, hist_read=hist, lat_sum_us=sum(us for us, _ in ios), failed=failed,
               failed_reads=failed, errors=failed)  # fmt: skip
    found = judge_as(INDICATORS["mean_latency"] + EXCLUDE, one, min_ios=1)
    kept = [us for us, fails in ios if not fails]
    assert found.n == len(kept)
    if kept:
        assert found.measured is not None
        assert found.measured >= sum(kept) / len(kept) - 1e-6
        assert found.inexact or found.measured == pytest.approx(sum(kept) / len(kept))


def test_the_size_of_an_io_is_that_of_those_that_succeeded() -> None:
    """300 of 600 fail: 300 * 4096 bytes were delivered, and half of what was asked for."""
    half = failing(600, 300, 1_000, 1_000)
    found = judge_as(INDICATORS["throughput"] + EXCLUDE, half)
    assert (found.state, found.n, found.measured) == ("good", 300, 300 * 4096 / 60)
    assert judge_as(INDICATORS["throughput"], half).measured == 300 * 4096 / 60
    small = Applicability(min_ios_per_slice=10, max_mean_io_kib=3)
    assert judge(half, clauses=small).reason == "failed"
    (promise,) = in_force(
        simple().replace("    budgeting", "    errors: exclude\n    budgeting")
    ).all_promises
    found = judge_slice(promise, small, [half], {"gw": MINUTE_US}, length_us=MINUTE_US, excluded=False)
    assert outcome(found) == ("not_applicable", "io-size")


@pytest.mark.parametrize("name", ["iops", "throughput", "availability", "mean_latency"])
def test_excluded_ios_are_no_demand(name: str) -> None:
    some = failing(12, 6, 1_000, 1_000)
    assert outcome(judge_as(INDICATORS[name] + EXCLUDE, some)) == ("not_applicable", "few-ios")


@pytest.mark.parametrize("io", ["any", "read"])
@pytest.mark.parametrize("name", ["latency", "mean_latency"])
def test_clients_that_try_again_what_fails_at_once_excuse_no_slow_io(name: str, io: str) -> None:
    """20 I/Os a second take 15 ms, and 600 fail: demand is 20, not 620, beyond the end of the curve."""
    storm = failing(620 * 60, 600 * 60, 15_000, 100, arrived=620 * 60)
    counts = {(IO_READ, us): found for (_, us), found in storm.missed.items()}
    storm = replace(storm, missed={**storm.missed, **counts})
    found = judge_as(INDICATORS[name] + EXCLUDE, storm, io=io)
    assert (found.state, found.reason, found.n) == ("bad", "slow", 20 * 60)
    assert (found.offered_iops, found.threshold_us) == (20, 12_000)
    counted = judge_as(INDICATORS[name], storm, io=io)
    assert (counted.reason, counted.offered_iops) == ("failed", 620)


def test_excluded_ios_are_no_part_of_a_share_of_reads() -> None:
    """100 reads are too slow; that 900 writes fail makes them no other kind of load."""
    hist = np.zeros(BUCKETS, dtype=np.int64)
    hist[bucket_of_ns(100_000)] = 900
    counts = {(IO_ANY, 12_000): (1000, 100, 0, 0, 900, 0)}
    storm = slot(100, latency_us=30_000, counts=counts, writes=900, arrived=1000, hist_write=hist,
                 failed=900, failed_writes=900, errors=900)  # fmt: skip
    half = Applicability(min_ios_per_slice=10, min_read_fraction=0.5)
    text = simple().replace("    budgeting", "    errors: exclude\n    budgeting")
    (promise,) = in_force(text).all_promises
    found = judge_slice(promise, half, [storm], {"gw": MINUTE_US}, length_us=MINUTE_US, excluded=False)
    assert (outcome(found), found.n) == (("bad", "slow"), 100)


# -- Steps of a demand curve

STEPS = (
    "indicator: {metric: latency, percentile: 95}, "
    "demand_curve: [{up_to_iops: 100, value_ms: 50}, {up_to_iops: 1000, value_ms: 200}]"
)
STRICT, LOOSE = 50_000, 200_000


def stepped(
    done: int, strict: tuple[int, ...], loose: tuple[int, ...], before_us: int | None
) -> SliceVerdict:
    counts = {(IO_ANY, STRICT): strict, (IO_ANY, LOOSE): loose}
    return judge_as(STEPS, slot(done, counts=counts, arrived=done), before_us=before_us)


def test_an_io_that_crosses_into_a_stricter_step_is_missed_behind_it() -> None:
    """400 I/Os, 100 ms old at the border, take 4 s: in time for the step before it, too slow for this one."""
    found = stepped(5940, (5940, 400, 0, 400), (5940, 400, 400, 400), LOOSE)
    assert (found.threshold_us, found.n, found.missed, found.state) == (STRICT, 5940, 400, "bad")
    assert not found.inexact
    before = stepped(5940, (5940, 400, 0, 400), (5940, 400, 400, 400), STRICT)
    assert (before.n, before.missed) == (5540, 0), "the slice before counted them"


def test_an_io_that_crosses_into_a_looser_step_was_missed_before_it() -> None:
    found = stepped(6060, (6060, 400, 0, 400), (6060, 400, 400, 400), STRICT)
    assert (found.threshold_us, found.n, found.missed, found.state) == (LOOSE, 5660, 0, "good")
    assert not found.inexact


def test_one_that_completed_in_time_for_the_looser_step_may_hide_no_other() -> None:
    """Three crossed; 400 completed between the steps."""
    found = stepped(6060, (6060, 800, 0, 3), (6060, 400, 3, 3), STRICT)
    assert (found.n, found.missed, found.inexact) == (6057, 397, False), (
        "all three passed the looser one, too"
    )
    found = stepped(6060, (6060, 800, 0, 3), (6060, 400, 0, 0), STRICT)
    assert (found.n, found.missed, found.inexact) == (6057, 400, True), "any of them may have been in time"
    found = stepped(6060, (6060, 3, 0, 3), (6060, 0, 0, 0), STRICT)
    assert (found.n, found.missed, found.inexact) == (6057, 0, False), "all were: nothing else was slow"


@pytest.mark.parametrize("before_us", [STRICT, LOOSE])
def test_ios_of_both_borders_do_not_hide_each_other(before_us: int) -> None:
    """Ten are between the steps at each border of the slice: their difference is nothing."""
    done = 5990 if before_us == LOOSE else 6060
    edge = {(IO_ANY, STRICT): (done, 10, 10, 10), (IO_ANY, LOOSE): (done, 0, 0, 0)}
    found = judge_as(STEPS, slot(done, counts=edge, arrived=done, outstanding=10), before_us=before_us)
    assert found.inexact
    assert (found.n, found.missed) == ((6000, 20) if before_us == LOOSE else (6050, 0))
    none = judge_as(STEPS, slot(done, counts=edge, arrived=done), before_us=before_us)
    assert (none.n, none.missed) == ((5990, 10) if before_us == LOOSE else (6060, 0)), "none waits at its end"


def test_ios_given_up_between_the_steps_are_missed_at_the_stricter_one() -> None:
    left = {(IO_ANY, STRICT): (6000, 0), (IO_ANY, LOOSE): (6000, 0), (IO_ANY, 0): (0, 0, 7, 700)}
    found = judge_as(STEPS, slot(6000, counts=left, arrived=6000), before_us=LOOSE)
    assert (found.n, found.missed, found.inexact) == (6007, 7, True)


# -- What never completes


def test_a_mean_counts_what_hangs_with_its_age() -> None:
    """100 I/Os hang for an hour beside 1,000 fast ones."""
    hangs = slot(1000, latency_us=1_000, oldest_ms=3_600_000, outstanding=100, counts={})
    found = judge_as(INDICATORS["mean_latency"], hangs)
    assert (found.state, found.reason, found.inexact) == ("bad", "hung", True)
    assert found.measured is not None
    assert found.measured > 300e6
    one = slot(10_000, latency_us=1_000, oldest_ms=4_000, outstanding=8, counts={})
    found = judge_as(INDICATORS["mean_latency"], one)
    assert (found.n, found.measured, found.state) == (10_001, (10_000_000 + 4e6) / 10_001, "good")


def test_a_mean_counts_no_io_twice() -> None:
    """It was 4 s old at the end of a cut, and completed after 4.5 s."""
    done = slot(1000, latency_us=4_500_000, oldest_ms=4_000, outstanding=8, counts={})
    assert judge_as(INDICATORS["mean_latency"], done).n == 1000


def test_what_its_client_gave_up_counts_with_its_age() -> None:
    """Three I/Os, 9 s together: entries OVERDUE with threshold 0."""
    some = slot(100, latency_us=1_000, counts={(IO_ANY, 0): (0, 0, 3, 9_000)}, oldest_ms=3_000, outstanding=3)
    found = judge_as(INDICATORS["mean_latency"], some)
    assert (found.n, found.state, found.reason) == (103, "bad", "slow")
    assert found.measured == pytest.approx((100 * 1_000 + 9e6) / 103)
    fast = slot(100, latency_us=11_000, counts={(IO_ANY, 0): (0, 0, 3, 3)})
    assert judge_as(INDICATORS["mean_latency"], fast).n == 100, "it would make the mean better"


@pytest.mark.parametrize("keys", [INDICATORS["iops"], INDICATORS["throughput"]], ids=["iops", "throughput"])
def test_reads_that_were_given_up_were_asked_for(keys: str) -> None:
    told = slot(0, writes=1000, arrived=2000, counts={(IO_ANY, 0): (0, 0, 1000, 4_000_000),
                (IO_READ, 0): (0, 0, 1000, 4_000_000)}, oldest_ms=4_500)  # fmt: skip
    assert outcome(judge_as(keys, told, io="read")) == ("bad", "below")
    before = slot(0, writes=1000, arrived=2000, counts={}, oldest_ms=4_500, outstanding=30)
    assert outcome(judge_as(keys, before, io="read")) == ("bad", "below")
    writing = slot(0, writes=1000, arrived=1030, counts={}, oldest_ms=3, outstanding=30)
    assert outcome(judge_as(keys, writing, io="read")) == ("not_applicable", "few-ios")


def test_excluded_failures_take_an_io_that_was_overdue_off_once() -> None:
    """400 were overdue in the slice before and fail here; 400 others are slow."""
    keys = INDICATORS["latency"] + ", errors: exclude"
    counts = {(IO_ANY, 12_000): (6800, 800, 0, 400, 400, 400, 400, 400)}
    found = judge_as(keys, slot(6800, counts=counts, errors=400, failed=400, failed_reads=400))
    assert (found.n, found.missed, found.state, found.inexact) == (6400, 400, "bad", False)
    unsure = {(IO_ANY, 12_000): (6800, 800, 0, 400, 400, 400, 400, 0)}
    assert judge_as(keys, slot(6800, counts=unsure, errors=400, failed=400, failed_reads=400)).inexact


def test_io_that_waits_for_a_limit_that_was_not_counted_is_not_good() -> None:
    """Another stream of the scope was counted; of this one nothing completed, and 60 wait for 4.5 s."""
    waits = slot(
        0, counts={}, arrived=60, covered_us=MINUTE_US, oldest_ms=4_500, stalled_ms=4_500, outstanding=60
    )
    found = judge(slot(1000, missed=0), waits)
    assert (found.state, found.n, found.missed, found.inexact) == ("bad", 1060, 60, True)


def test_cuts_shared_out_over_several_slots_make_a_slice_inexact() -> None:
    """Their counts are rounded: one more or less was compared than completed."""
    found = judge(slot(100, counts={(IO_ANY, 12_000): (99, 3)}, spread_us=30_000_000))
    assert (found.state, found.missed, found.inexact) == ("good", 3, True)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 9_000), st.booleans()), max_size=6
    )
)
def test_many_slices_are_judged_as_each_alone(parts: list[tuple[int, int, int, bool]]) -> None:
    """One table, rows of several slices; the last slice has all of them."""
    slots = [
        slot(n, missed=min(missed, n) if known else None, stalled_ms=stalled, stream=number)
        for number, (n, missed, stalled, known) in enumerate(parts)
    ]
    (promise,) = promises([in_force(simple())])
    groups = [[each] for each in slots] + [slots]
    sizes = [len(group) for group in groups]
    due = DueSlices(
        rules=[rule_of(promise, TEN)] * len(groups),
        length_us=np.full(len(groups), MINUTE_US),
        is_excluded=np.zeros(len(groups), dtype=np.bool_),
        covered_us=np.full(len(groups), MINUTE_US),
        most_covered_us=np.full(len(groups), MINUTE_US),
        before_us=np.full(len(groups), -1),
        pair_slice=np.repeat(np.arange(len(groups)), sizes),
        pair_row=np.array([*range(len(slots)), *range(len(slots))], dtype=np.int64),
        pair_stream=np.array([*range(len(slots)), *range(len(slots))], dtype=np.int64),
    )
    together = verdicts_of(judge_slices(table_of(slots), due))
    assert together == [judge(*group) for group in groups]


def hanging(minutes: int, reads: int = 60, **last: Any) -> list[StreamSlot]:
    """One read hangs through a slice of so many slots, while others are served."""
    return [
        slot(reads, counts={}, oldest_ms=60_000 * (number + 1), outstanding=1)
        for number in range(minutes - 1)
    ] + [slot(reads, counts={}, **{"oldest_ms": 60_000 * minutes, "outstanding": 1, **last})]


def judge_long(name: str, slots: list[StreamSlot]) -> SliceVerdict:
    """Judge a slice of three minutes."""
    objective = f"  - {{name: other, {INDICATORS[name]}, budgeting: {{target: 0.99}}}}\n"
    *_, promise = in_force(simple() + objective).all_promises
    length_us = 3 * MINUTE_US
    return judge_slice(promise, TEN, slots, {"g": length_us}, length_us=length_us, excluded=False)


@pytest.mark.parametrize(("reads", "state"), [(60, "good"), (33, "bad")])
def test_an_io_that_hangs_through_many_slots_is_one(reads: int, state: str) -> None:
    """1 % of 180 I/Os may hang: in three slots of a minute one is seen three times."""
    assert judge_long("iops", hanging(3, reads)).state == state


def test_the_mean_has_it_once_with_its_last_age() -> None:
    def mean_of(slots: list[StreamSlot]) -> tuple[float | None, int]:
        found = judge_long("mean_latency", slots)
        return found.measured, found.n

    one = hanging(3)
    assert mean_of(one) == (pytest.approx((180 * 5_000 + 180e6) / 181), 181)
    both = [*one, *(replace(each, stream=1) for each in one)]
    assert mean_of(both) == (pytest.approx((180 * 5_000 + 180e6) / 181), 362)
    ended = slot(1, counts={}, latency_us=179_500_000, oldest_ms=0)
    assert mean_of([*one[:2], ended]) == (pytest.approx((120 * 5_000 + 179.5e6) / 121), 121)
