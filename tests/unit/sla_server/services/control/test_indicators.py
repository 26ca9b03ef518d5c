"""Mean latency, IOPS and throughput have a live state, and episodes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire.cut import (
    COL,
    FAILED,
    IO_ANY,
    IO_READ,
    IO_WRITE,
    OUTSTANDING,
    Cut,
    hist_array,
    missed_array,
)
from pmdaemon.wire.histogram import BUCKETS, bucket_of_ns
from sla_server.agreements.promise import CurveStep
from sla_server.services.control.indicators import LineUse, mean_counts, rate_counts
from tests.support.worlds import (
    KEY,
    A,
    Feeder,
    controller,
    cut,
    events_of,
    promise,
    streams,
    volume_class,
)

MEAN = {"metric": "mean_latency", "percentile": 99.0, "curve": (CurveStep(math.inf, 5_000),)}
IOPS = {"metric": "iops", "percentile": 99.0, "curve": (), "promised": 80.0}
THROUGHPUT = {"metric": "throughput", "percentile": 99.0, "curve": (), "promised": 80.0 * 4096}


def second(made: Feeder, count: int, ms: float, *, arrived: int | None = None, **more: Any) -> list[str]:
    """A cut with so many I/Os of this latency; kinds of events about the promise."""
    made.second += 1
    each = cut(A, made.second, {"gold": (count, ms)}, thresholds_us=(), **more)
    found = _changed(each, lat_sum_us=round(count * ms * 1000))
    if arrived is not None:
        found = _changed(found, arrived=arrived)
    made.controller.add_cut(found, made.unix_us, 0, False, made.now_ns)
    return [e.kind for e in events_of(made.controller.tick(made.now_ns, made.unix_us)) if e.element == "sla"]


def _changed(made: Cut, **columns: int) -> Cut:
    counters = made.counters.copy()
    for name, value in columns.items():
        counters[COL[name], 0] = value
    return dataclasses.replace(made, counters=counters)


def world(**over: Any) -> Feeder:
    made = controller((promise(**over),), (volume_class(),), "enforce", episode_calm_s=0)
    return Feeder(made, (A, ("gold", "greedy")))


def state(made: Feeder) -> str:
    return made.controller.live[KEY].state


def test_a_mean_latency_above_its_threshold_is_an_episode_and_asks_control_for_nothing() -> None:
    made = world(**MEAN)
    assert [second(made, 100, 4.0) for _ in range(3)] == [[], [], []]
    assert state(made) == "ok"
    assert [second(made, 100, 6.0) for _ in range(3)] == [[], ["violation-opened"], []]
    signal = made.controller.live[KEY].signal
    assert (round(signal.latency_us), signal.u) == (6000, pytest.approx(1.2))
    (row,) = made.controller.snapshot(0)["slas"]
    assert (row["measured"], row["percentile"], row["threshold_us"], row["inexact"]) == (
        6000,
        None,
        5000,
        False,
    )
    kinds = [kind for _ in range(3) for kind in second(made, 100, 4.0)]
    assert kinds == ["violation-closed"]
    assert not made.controller.loops.controls


def beside_one(made: Feeder, age_s: int, count: int = 300, took_us: int = 0) -> list[str]:
    """I/Os of 1 ms beside a read that is outstanding for so long, or took so long; kinds of events."""
    made.second += 1
    each = cut(A, made.second, {"gold": (count + (took_us > 0), 1.0)}, thresholds_us=())
    entries = [(0, OUTSTANDING + io, 0, 1000 * age_s, 0) for io in (IO_ANY, IO_READ)] if age_s else []
    counts = {
        "lat_sum_us": 1000 * count + took_us,
        "arrived": count + (age_s == 1),
        "inflight": int(age_s > 0),
    }
    found = _changed(dataclasses.replace(each, missed=missed_array(entries)), **counts)
    made.controller.add_cut(found, made.unix_us, 0, False, made.now_ns)
    return [e.kind for e in events_of(made.controller.tick(made.now_ns, made.unix_us))]


def test_one_io_that_hangs_among_fast_ones_breaks_a_mean_when_it_breaks_slices() -> None:
    """300 I/Os of 1 ms a second: a slice of 20 s has 6000, with one of more than 24 s a mean above 5 ms."""
    made = world(**MEAN, slice_s=20)
    opened = [(age_s, kind) for age_s in range(90) for kind in beside_one(made, age_s)]
    ((age_s, kind),) = opened
    assert kind == "violation-opened"
    assert 34 <= age_s <= 56  # a slice in which it was so old has ended, and half of the next


def test_one_io_that_took_long_counts_once() -> None:
    """3 s among 20 s of 100 I/Os of 1 ms a second: their mean is 2.5 ms, that of one window above 5."""
    made, states, ages = world(**MEAN, slice_s=20), [], (*[0] * 10, 1, 2, *[0] * 8)
    for number in range(60):
        assert beside_one(made, ages[number % 20], 100, 3_000_000 if number % 20 == 12 else 0) == []
        states.append(state(made))
    assert set(states) == {"ok"}


@pytest.mark.parametrize("terms", [IOPS, THROUGHPUT])
def test_what_is_not_delivered_is_an_episode_only_if_it_was_asked_for_and_promised(
    terms: dict[str, Any],
) -> None:
    made = world(**terms)
    assert [second(made, 40, 1.0) for _ in range(3)] == [[], [], []]  # no more was wanted
    assert [second(made, 200, 1.0, failed={"gold": 1}) for _ in range(3)] == [[], [], []]
    assert state(made) == "ok"
    waits = {"waiting": {"gold": (16, 900.0)}, "arrived": 110}
    assert [second(made, 95, 1.0, **waits) for _ in range(3)] == [[], [], []]  # they are on their way
    kinds = [
        kind for _ in range(3) for kind in second(made, 60, 1.0, arrived=100, waiting={"gold": (99, 6e3)})
    ]
    assert kinds == ["violation-opened"]
    made.second += 1
    (row,) = made.controller.snapshot(0)["slas"]
    assert (row["threshold_us"], row["latency_us"], row["promised"]) == (None, None, terms["promised"])
    assert row["u"] == pytest.approx(0.25 / 0.02)
    assert "was not delivered" in made.controller.live[KEY]._figures_text(
        made.controller.live[KEY].signal, made.controller.live[KEY].signal.of_over
    )
    assert [kind for _ in range(3) for kind in second(made, 100, 1.0)] == ["violation-closed"]


@pytest.mark.parametrize("terms", [MEAN, IOPS, THROUGHPUT])
def test_failures_and_hangs_break_each_of_them(terms: dict[str, Any]) -> None:
    made = world(**terms)
    assert "violation-opened" in [k for _ in range(3) for k in second(made, 100, 1.0, failed={"gold": 5})]
    made, kinds = world(**terms), list[str]()
    second(made, 100, 1.0)
    for age_s in range(12):
        waits = {"waiting": {"gold": (16, 1000.0 * age_s + 900)}}
        kinds += second(made, 0, 1.0, arrived=16 if not age_s else 0, **waits)
    assert kinds == ["violation-opened"]
    assert state(made) == "violating"


@pytest.mark.parametrize(("terms", "wanted"), [(MEAN, "ok"), (IOPS, "no-data"), (THROUGHPUT, "no-data")])
def test_beside_the_io_path_only_a_mean_is_measured(terms: dict[str, Any], wanted: str) -> None:
    made = controller((promise(**terms),), (volume_class(),), "observe")
    made.gateway_up(A, "A", [{"volume": "gold", "backend": "disk", "source": "host"}], 0)
    made.add_streams(A, streams(A, "gold"))
    world = Feeder(made)
    for _ in range(3):
        second(world, 100, 1.0)
    assert state(world) == wanted
    (row,) = made.snapshot(0)["slas"]
    assert ("beside the I/O path: no rate" in row["reason"]) == (wanted == "no-data")


def test_a_mean_of_reads_alone_is_bounded_by_their_histogram() -> None:
    made = world(**MEAN, io="read")
    for _ in range(3):
        made.second += 1
        each = cut(A, made.second, {"gold": (100, 1.0)}, thresholds_us=())
        # As many writes of 50 ms: the sum is of both.
        found = _changed(each, writes=100, arrived=200, lat_sum_us=100 * 51_000)
        made.controller.add_cut(found, made.unix_us, 0, False, made.now_ns)
        made.controller.tick(made.now_ns, made.unix_us)
    signal = made.controller.live[KEY].signal
    assert (state(made), signal.inexact) == ("ok", True)
    assert 1000 <= signal.latency_us < 1300


def test_an_outage_shows_how_long_nothing_has_completed() -> None:
    outage = {"metric": "availability", "percentile": 99.0, "curve": (CurveStep(math.inf, 2_000_000),)}
    made = world(**outage)
    second(made, 100, 1.0)
    for age_s in range(5):
        second(made, 0, 1.0, arrived=0 if age_s else 16, waiting={"gold": (16, 1000.0 * age_s + 900)})
    (row,) = made.controller.snapshot(0)["slas"]
    assert (row["state"], row["percentile"], row["measured"]) == ("violating", None, 4_900_000)


@pytest.mark.parametrize("terms", [MEAN, IOPS])
def test_ios_that_clients_give_up_are_slow_and_not_delivered(terms: dict[str, Any]) -> None:
    made = world(**terms)
    waits = {"abandoned": {"gold": (8, 8 * 4000)}, "waiting": {"gold": (8, 900.0)}, "arrived": 80}
    kinds = [kind for _ in range(3) for kind in second(made, 60, 1.0, **waits)]
    assert kinds == ["violation-opened"]
    # What is outstanding counts when it completes, or hangs.
    mean_us, row = (60 * 1000 + 8 * 4_000_000) / 68, made.controller.snapshot(0)["slas"][0]
    assert row["measured" if terms is MEAN else "u"] == pytest.approx(mean_us if terms is MEAN else 5, 0.01)


def test_ios_given_up_young_do_not_make_a_mean_better() -> None:
    """100 I/Os of 15 ms; that 900 more were given up after 0.1 ms says nothing of how long they take."""
    made = world(**MEAN)
    gave_up = {"abandoned": {"gold": (900, 90)}, "arrived": 1000}
    assert [kind for _ in range(3) for kind in second(made, 100, 15.0, **gave_up)] == ["violation-opened"]
    assert made.controller.live[KEY].signal.latency_us == 15_000


def test_what_was_given_up_in_a_later_cut_than_it_came_in_was_not_delivered() -> None:
    """Of 100 I/Os a second 10 are given up after four seconds: 90 are delivered, and all are promised."""
    made = world(**{**IOPS, "promised": 100.0})
    waits = {"waiting": {"gold": (40, 4000.0)}, "arrived": 100}
    kinds = [kind for _ in range(4) for kind in second(made, 90, 1.0, **waits)]
    assert (kinds, state(made)) == ([], "ok")
    gives_up = {**waits, "abandoned": {"gold": (10, 40_000)}}
    assert [kind for _ in range(3) for kind in second(made, 90, 1.0, **gives_up)] == ["violation-opened"]
    assert made.controller.snapshot(0)["slas"][0]["u"] == pytest.approx(5)


def mixed(
    made: Feeder,
    served: int,
    ms: float,
    failed: int,
    failed_ms: float,
    *,
    limit_us: int = 0,
    failed_io: int = IO_READ,
) -> None:
    """A second in which some reads complete and others fail; with exact counts against a limit, if given."""
    made.second += 1
    done = served + failed
    both = ((served, ms), (failed, failed_ms))
    hist = np.array([bucket_of_ns(round(each * 1e6)) for _, each in both])
    slow, slow_failed = (count if each * 1000 > limit_us else 0 for count, each in both)
    entries = [(0, FAILED + io, 0, failed, 0) for io in (IO_ANY, failed_io)]
    writes = failed if failed_io == IO_WRITE else 0
    if limit_us:
        entries += [
            (0, IO_ANY, limit_us, done, slow + slow_failed),
            (0, FAILED, limit_us, failed, slow_failed),
        ]
    each = _changed(
        cut(A, made.second, {"gold": (done, 1.0)}, thresholds_us=()),
        lat_sum_us=round(served * ms * 1000 + failed * failed_ms * 1000),
        errors=failed,
        reads=done - writes,
        writes=writes,
        read_bytes=served * 4096,
    )
    hist = np.array([each + (i > 0 and writes > 0) * BUCKETS for i, each in enumerate(hist.tolist())])
    counts = np.array([served, failed])
    found = dataclasses.replace(
        each, hist=hist_array(np.zeros(2, np.int64), hist, counts), missed=missed_array(entries)
    )
    made.controller.add_cut(found, made.unix_us, 0, False, made.now_ns)
    made.controller.tick(made.now_ns, made.unix_us)


@pytest.mark.parametrize("limit_us", [0, 5_000])
def test_an_excluded_io_is_in_no_mean(limit_us: int) -> None:
    """300 I/Os of 6 ms, and 300 that fail at once: their mean is 6 ms, not 3."""
    made = world(**MEAN, counts_errors=False)
    for _ in range(3):
        mixed(made, 300, 6.0, 300, 0.1, limit_us=limit_us)
    signal = made.controller.live[KEY].signal
    assert (state(made), signal.inexact) == ("violating", True)
    assert signal.latency_us == pytest.approx(6000, rel=0.01)


def test_an_excluded_io_that_took_long_is_in_no_mean_if_it_was_compared_with_the_limit() -> None:
    made = world(**MEAN, counts_errors=False)
    for _ in range(3):
        mixed(made, 300, 4.0, 300, 5000.0, limit_us=5_000)
    assert state(made) == "ok"


def test_the_size_of_an_io_is_that_of_those_that_succeeded() -> None:
    """Half of 100 I/Os of 4096 bytes fail: 50 are delivered of 50 that are promised."""
    made = world(**{**THROUGHPUT, "promised": 50.0 * 4096}, counts_errors=False)
    for _ in range(3):
        mixed(made, 50, 1.0, 50, 1.0)
    assert state(made) == "ok"
    made = world(**{**THROUGHPUT, "promised": 60.0 * 4096})
    for _ in range(3):
        mixed(made, 50, 1.0, 50, 1.0)
    assert made.controller.live[KEY].signal.u == pytest.approx(10 / 60 / 0.02)


def line_use(**over: Any) -> LineUse:
    """One line."""
    values = {field.name: np.zeros(1) for field in dataclasses.fields(LineUse)}
    values |= {"excludes": np.ones(1, np.bool_), "covered_us": np.array([1_000_000])}
    values |= {"stuck": np.ones(1)}
    values |= {"hist": np.zeros((1, BUCKETS), np.int32)}
    return LineUse(**(values | {name: np.array([value]) for name, value in over.items()}))


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), min_size=1, max_size=30), st.booleans())
def test_the_mean_of_what_succeeded_is_never_understated(ios: list[tuple[int, bool]], knows: bool) -> None:
    hist, limit_us = np.zeros(BUCKETS, np.int32), 12_000
    np.add.at(hist, [bucket_of_ns(us * 1000) for us, _ in ios], 1)
    done, failed, total = len(ios), sum(fails for _, fails in ios), sum(us for us, _ in ios)
    use = line_use(hist=hist, done=done, both=done, failed=failed, lat_sum_us=total)
    slow = np.array([[float(sum(us > limit_us and not fails for us, fails in ios))]]) if knows else None
    counted, missed = mean_counts(use, np.array([[float(limit_us)]]), slow)
    kept = [us for us, fails in ios if not fails]
    assert counted[0, 0] == len(kept)
    assert missed[0, 0] * limit_us >= sum(kept) - 1e-6
    if not failed:
        assert missed[0, 0] * limit_us == pytest.approx(total)


def test_excluded_failures_and_refusals_are_no_demand() -> None:
    use = line_use(done=60.0, offered=60.0, both=60.0, failed=30.0)
    assert [float(each[0]) for each in rate_counts(use, np.array([80.0]), np.array([False]))] == [30, 0]
    refused = line_use(failed=5.0)
    assert [float(each[0]) for each in rate_counts(refused, np.array([80.0]), np.array([False]))] == [0, 0]
    counts = dataclasses.replace(refused, excludes=np.zeros(1, np.bool_))
    assert [float(each[0]) for each in rate_counts(counts, np.array([80.0]), np.array([False]))] == [5, 5]


@pytest.mark.parametrize("terms", [MEAN, {}])
def test_clients_that_try_again_what_fails_at_once_excuse_no_slow_io(terms: dict[str, Any]) -> None:
    """20 I/Os a second take 15 ms, and 600 fail: demand is 20, not 620, beyond the end of the curve."""
    ended = {**terms, "curve": (CurveStep(500, 5_000),)}
    made = world(**ended, counts_errors=False)
    for _ in range(3):
        mixed(made, 20, 15.0, 600, 0.1, limit_us=5_000)
    assert (state(made), made.controller.live[KEY].signal.offered_iops) == ("violating", 20)
    made = world(**ended)
    for _ in range(3):
        mixed(made, 20, 15.0, 600, 0.1, limit_us=5_000)
    assert made.controller.live[KEY].signal.offered_iops == 620


def test_a_clause_about_reads_leaves_out_what_failed_and_is_excluded() -> None:
    """Of 100 reads and 300 I/Os that fail at once the latter are writes, or reads; half must be reads."""
    for failed_io, counts_errors, wanted in (
        (IO_WRITE, False, "violating"),
        (IO_WRITE, True, "violating"),  # three of four fail, which no clause excuses
        (IO_READ, False, "violating"),
    ):
        late = {"curve": (CurveStep(math.inf, 5_000),), "least_read_ratio": 0.5}
        made = world(**late, counts_errors=counts_errors)
        for _ in range(3):
            mixed(made, 100, 15.0, 300, 0.1, limit_us=5_000, failed_io=failed_io)
        assert state(made) == wanted


def test_a_clause_about_sizes_leaves_out_what_failed() -> None:
    """Half of the I/Os fail; those that succeed have 4096 bytes, more than the promise is about."""
    late = {"curve": (CurveStep(math.inf, 500),), "counts_errors": False}
    for most_bytes, wanted in ((3000.0, "not-applicable"), (4096.0, "violating")):
        made = world(**late, max_mean_bytes=most_bytes)
        for _ in range(3):
            mixed(made, 100, 1.0, 100, 1.0, limit_us=500)
        assert state(made) == wanted
