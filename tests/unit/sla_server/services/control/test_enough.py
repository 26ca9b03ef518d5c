"""When a window has enough I/Os, and what half of the newest one's say (ADR 78)."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import CurveStep
from tests.support.windows import OnePromise
from tests.support.worlds import A, B, cut


def brief(made, end_s, count, ms, gateway=A, **over):
    """A cut of a quarter of a second."""
    return made.take(
        cut(gateway, round(end_s * 4), {"gold": (count, ms)}, end_s=end_s, duration_s=0.25, **over), end_s
    )


def test_five_late_ones_of_few_are_plain():
    made = OnePromise()
    assert brief(made, 1.0, 5, 20)
    assert made.signal().over == 1


@pytest.mark.parametrize(("count", "ms"), [(4, 20), (15, 1)])
def test_fewer_or_none_are_not(count, ms):
    made = OnePromise()
    assert not brief(made, 1.0, count, ms)


def test_misses_of_the_cut_before_count_and_must_be_half():
    made = OnePromise()
    assert not brief(made, 1.0, 6, 1)
    assert not brief(made, 1.25, 5, 20)  # five of eleven
    assert brief(made, 1.5, 2, 20)
    assert made.table.w_done[made.newest] == 13


def test_a_window_of_a_second_waits_for_twenty():
    made = OnePromise()
    assert not made.feed(10, 20, 1)
    assert made.feed(10, 20, 2)


def test_io_that_fails_is_not_late():
    made = OnePromise()
    assert not brief(made, 1.0, 8, 20, failed={"gold": 5})


def test_where_half_may_miss_all_of_them_must():
    made = OnePromise(percentile=50.0)
    assert not brief(made, 1.0, 1, 1)
    assert not brief(made, 1.25, 9, 20)
    made = OnePromise(percentile=50.0)
    assert brief(made, 1.0, 9, 20)


def test_over_a_curve_the_loosest_threshold_counts():
    made = OnePromise(curve=(CurveStep(50, 12_000), CurveStep(90, 30_000)))
    assert not brief(made, 1.0, 10, 20, thresholds_us=(12_000, 30_000))
    made = OnePromise(curve=(CurveStep(50, 12_000), CurveStep(90, 30_000)))
    assert brief(made, 1.0, 10, 40, thresholds_us=(12_000, 30_000))


def test_of_two_gateways_both_are_waited_for_and_counted():
    made = OnePromise(A, B)
    brief(made, 0.75, 0, 1, gateway=A)
    brief(made, 0.75, 0, 1, gateway=B)
    assert not brief(made, 1.0, 4, 20, gateway=A)
    assert brief(made, 1.0, 4, 20, gateway=B)
    assert made.table.w_done[made.newest] == 8


def test_the_step_is_sized_by_half_of_the_newest_window():
    """The window before was hardly over: a queue was growing. 24 ms of 12 are half of C."""
    made = OnePromise()
    made.take(cut(A, 1, {"gold": (100, 12.5)}), 1)
    made.take(cut(A, 2, {"gold": (100, 24)}), 2)
    signal = made.signal()
    assert signal.at_risk
    assert signal.r_step < 1.2
    assert signal.r_middle == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("over", [{"failed": {"gold": 3}}, {"starved_us": 600_000}])
def test_of_a_window_that_says_less_the_middle_says_less(over):
    made = OnePromise()
    made.take(cut(A, 1, {"gold": (100, 20)}), 1)
    made.take(cut(A, 2, {"gold": (100, 36)}), 2)
    plain = made.signal().r_middle
    made = OnePromise()
    made.take(cut(A, 1, {"gold": (100, 20)}), 1)
    made.take(cut(A, 2, {"gold": (100, 36)}, **over), 2)
    assert made.signal().r_middle <= plain


def test_what_is_not_at_risk_has_none():
    made = OnePromise()
    made.feed(100, 1, 1)
    assert made.signal().r_middle == 0.0


def test_the_least_tenth_waited_for_nobody():
    made = OnePromise()
    made.feed(30, 3, 1)
    made.feed(70, 9, 2)
    signal = made.signal()
    assert signal.r_alone == pytest.approx(0.25, rel=0.2)
    assert signal.r == pytest.approx(0.75, rel=0.2)
