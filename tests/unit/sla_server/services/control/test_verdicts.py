"""What windows say: u, r, risk, and nothing above the curve."""

from __future__ import annotations

import math

import pytest

from sla_server.agreements.promise import CurveStep
from sla_server.services.control.verdicts import NOTHING
from tests.support.windows import OnePromise
from tests.support.worlds import A, cut


def test_u_and_r_of_three_windows():
    made = OnePromise()
    for second, ms in enumerate((1, 1, 20), 1):
        made.feed(100, ms, second)
    signal = made.signal()
    assert signal.u == pytest.approx((100 / 300) / 0.05)
    assert (signal.windows, signal.risky, signal.over) == (3, 1, 1)
    assert signal.of_over.u == pytest.approx(20)
    assert 18_000 < signal.latency_us < 21_000
    assert signal.r == pytest.approx(signal.latency_us / 12_000)
    made.feed(100, 1, 4)
    assert made.signal().windows == 3


def test_r_on_alone_makes_a_window_risky():
    made = OnePromise(r_on=0.8)
    made.feed(100, 10.6, 1)  # no miss, but its bucket's interpolated p95 is above 0.8 * 12 ms
    assert made.signal().risky == 1
    made.signals.set_r_on(made.row.row, 1.2)
    assert made.signal().risky == 0


def test_above_the_curve_nothing_is_said():
    made = OnePromise(curve=(CurveStep(50, 12_000), CurveStep(90, 20_000)))
    made.take(cut(A, 1, {"gold": (80, 15)}, thresholds_us=(12_000, 20_000)), 1)
    assert made.signal().threshold_us == 20_000
    assert made.signal().u == 0
    made.take(cut(A, 2, {"gold": (120, 15)}, thresholds_us=(12_000, 20_000)), 2)
    assert made.signal().threshold_us is None


def test_infinite_curve_and_no_ios():
    made = OnePromise(curve=(CurveStep(math.inf, 5000),))
    made.feed(0, 1, 1)
    assert made.signal() is NOTHING
