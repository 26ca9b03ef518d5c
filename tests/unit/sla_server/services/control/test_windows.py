from __future__ import annotations

import math

import numpy as np
import pytest

from sla_server.agreements.promise import CurveStep
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.windows import NOTHING, WindowTracker
from tests.support.worlds import A, B, cut, piece_of, promise

S = 1_000_000_000
ALL = np.array([True])
ONLY_A = frozenset((A,))


def heard(*needed: str):
    return lambda spoken: set(needed) <= set(spoken)


def tracker(**over) -> WindowTracker:
    return WindowTracker(ControlSettings(), promise(**over))


def feed(made: WindowTracker, count: int, ms: float, second: int, gateway: str = A, needed=ONLY_A) -> bool:
    piece = piece_of(cut(gateway, second, {"gold": (count, ms)}), ALL, made.promise)
    return made.add(piece, heard(*needed), second * S)


def test_exact_misses_are_taken_from_the_cut():
    piece = piece_of(cut(A, 1, {"gold": (40, 12.001)}), ALL, promise())
    assert (piece.done, piece.missed, piece.inexact) == (40, {12_000: 40}, False)
    piece = piece_of(cut(A, 1, {"gold": (40, 11.99)}), ALL, promise())
    assert piece.missed == {12_000: 0}


def test_a_threshold_nobody_counted_is_judged_from_edges_and_flagged():
    # the bucket of 12 ms is counted in full: pessimistic
    piece = piece_of(cut(A, 1, {"gold": (40, 11.9)}, thresholds_us=()), ALL, promise())
    assert (piece.missed, piece.inexact) == ({12_000: 40}, True)
    piece = piece_of(cut(A, 1, {"gold": (40, 2)}, thresholds_us=()), ALL, promise())
    assert (piece.missed, piece.inexact) == ({12_000: 0}, True)


def test_only_rows_in_scope_count():
    made = cut(A, 1, {"gold": (40, 1), "other": (500, 99)})
    piece = piece_of(made, np.array([True, False]), promise())
    assert (piece.done, piece.offered, piece.missed[12_000], int(piece.hist.sum())) == (40, 40.0, 0, 40)


def test_io_kind_selects_counters_and_histogram():
    piece = piece_of(cut(A, 1, {"gold": (40, 1)}), ALL, promise(io="write"))
    assert (piece.done, piece.offered, int(piece.hist.sum())) == (0, 0.0, 0)
    piece = piece_of(cut(A, 1, {"gold": (40, 1)}), ALL, promise(io="read"))
    assert (piece.done, int(piece.hist.sum())) == (40, 40)


def test_windows_merge_until_twenty_ios():
    made = tracker()
    assert not feed(made, 12, 1, 1)
    assert feed(made, 12, 1, 2)
    assert [w.done for w in made.windows] == [24]


def test_a_slow_volume_is_judged_after_ten_seconds():
    made = tracker()
    closed = [feed(made, 1, 1, second) for second in range(1, 11)]
    assert closed == [False] * 9 + [True]
    assert made.windows[0].done == 10


def test_every_gateway_in_scope_must_have_spoken():
    made = tracker()
    both = frozenset((A, B))
    assert not feed(made, 30, 1, 1, needed=both)
    assert feed(made, 30, 1, 1, gateway=B, needed=both)
    # side by side, not one behind the other: 60 I/Os in one second
    assert made.windows[0].offered_iops == pytest.approx(60)


def test_u_and_r_of_three_windows():
    made = tracker()
    for second, ms in enumerate((1, 1, 20), 1):
        feed(made, 100, ms, second)
    signal = made.signal(0.95)
    assert signal.u == pytest.approx((100 / 300) / 0.05)
    assert (signal.windows, signal.risky, signal.over) == (3, 1, 1)
    assert 18_000 < signal.latency_us < 21_000
    assert signal.r == pytest.approx(signal.latency_us / 12_000)
    feed(made, 100, 1, 4)
    assert made.signal(0.95).windows == 3


def test_r_on_alone_makes_a_window_risky():
    made = tracker()
    feed(made, 100, 10.6, 1)  # no miss, but its bucket's interpolated p95 is above 0.8 * 12 ms
    assert made.signal(0.8).risky == 1
    assert made.signal(1.2).risky == 0


def test_above_the_curve_nothing_is_said():
    curve = (CurveStep(50, 12_000), CurveStep(90, 20_000))
    made = tracker(curve=curve)
    made_cut = cut(A, 1, {"gold": (80, 15)}, thresholds_us=(12_000, 20_000))
    made.add(piece_of(made_cut, ALL, made.promise), heard(A), S)
    assert made.signal(0.95).threshold_us == 20_000
    assert made.signal(0.95).u == 0
    made_cut = cut(A, 2, {"gold": (120, 15)}, thresholds_us=(12_000, 20_000))
    made.add(piece_of(made_cut, ALL, made.promise), heard(A), 2 * S)
    assert made.signal(0.95).threshold_us is None


def test_reset_forgets_windows_but_not_activity():
    made = tracker()
    feed(made, 100, 20, 1)
    made.reset()
    assert made.signal(0.95) is NOTHING
    assert made.last_active_ns == S


def test_idle_needs_cuts_without_io():
    made = tracker()
    assert not made.idle
    feed(made, 30, 1, 1)
    for second in range(2, 6):
        feed(made, 0, 1, second)
        assert not made.idle
    feed(made, 0, 1, 6)
    assert made.idle


def test_a_held_io_is_activity():
    made = tracker()
    for second in range(1, 9):
        piece = piece_of(cut(A, second, {"gold": (0, 1)}, held=1), ALL, made.promise)
        made.add(piece, heard(A), second * S)
    assert not made.idle


def test_infinite_curve_and_no_ios():
    made = tracker(curve=(CurveStep(math.inf, 5000),))
    feed(made, 0, 1, 1)
    assert made.signal(0.95) is NOTHING
