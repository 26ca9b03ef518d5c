"""A row of the bank says what a tracker of its own says, to the last bit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pmdaemon.wire.histogram import BUCKETS
from sla_server.agreements.promise import CurveStep, Promise
from sla_server.services.control.live_state import LiveState
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import (
    CODE,
    QUIET,
    STATES,
    Pieces,
    SignalTable,
    percentiles_us,
)
from sla_server.services.control.signal_row import SignalRow, piece_at
from sla_server.services.control.windows import NOTHING, WindowTracker
from tests.support.worlds import promise

S = 1_000_000_000
SETTINGS = ControlSettings()
STEPS = (CurveStep(60, 5_000), CurveStep(200, 12_000))


def pieces_of(
    rng: random.Random, promises: list[Promise], now_ns: int, busy: float, steps: int = 2
) -> Pieces:
    """A random piece for each promise; steps are those of the bank."""
    count = len(promises)
    hist = np.zeros((count, BUCKETS), dtype=np.int32)
    missed = np.zeros((count, steps))
    for row in range(count):
        if rng.random() < busy:
            for _ in range(rng.choice((3, 30, 90))):
                hist[row, rng.choice((20, 30, 38, 46, 54))] += 1
            late = int(hist[row, 46:].sum())
            missed[row] = (late, late // 2)[:steps]
    done = hist.sum(axis=1).astype(np.float64)
    percentile = np.array([p.percentile for p in promises])
    return Pieces(
        now_ns=np.full(count, now_ns),
        covered_us=np.array([rng.randrange(900_000, 1_100_000) for _ in range(count)]),
        offered=done + [rng.choice((0, 0, 7)) for _ in range(count)],
        done=done,
        waiting=np.array([float(rng.random() < 0.1) for _ in range(count)]),
        missed=missed,
        hist=hist,
        inexact=np.array([rng.random() < 0.1 for _ in range(count)]),
        latency_us=percentiles_us(hist, percentile),
        excused=np.array([rng.choice((0.0, 0.0, 0.1, 0.5)) for _ in range(count)]) * done,
    )


@pytest.mark.parametrize("seed", range(20))
def test_windows_signals_and_live_states_are_those_of_single_trackers(seed):
    rng = random.Random(seed)
    promises = [promise(f"p{i}", curve=STEPS if i % 2 else STEPS[1:], percentile=90.0 + i) for i in range(6)]
    bank = SignalTable(SETTINGS)
    rows = [SignalRow(bank, bank.allot(p, "g", "", SETTINGS.r_on)) for p in promises]
    alone = [LiveState(SETTINGS, p, WindowTracker(SETTINGS, p), r_on=SETTINGS.r_on) for p in promises]
    ours = [LiveState(SETTINGS, p, t, r_on=SETTINGS.r_on) for p, t in zip(promises, rows, strict=True)]
    all_rows = np.array([t.row for t in rows])
    for second in range(60):
        now_ns = (second + 1) * S
        busy = (1.0, 0.7, 0.0)[second // 9 % 3]
        pieces = pieces_of(rng, promises, now_ns, busy)
        pick = np.array(sorted(rng.sample(range(6), rng.randrange(1, 7))) if second < 50 else [0])
        bank.add(all_rows[pick], pick, pieces)
        for i in pick.tolist():
            piece = piece_at(pieces, i, "g", promises[i])
            alone[i].tracker.add(piece, lambda spoken: True, now_ns)
        if rng.random() < 0.1:
            bank.reset(all_rows[:2])
            alone[0].tracker.reset()
            alone[1].tracker.reset()
        changed = dict(bank.assess(now_ns, SETTINGS.silent_s))
        for i, (one, other) in enumerate(zip(alone, ours, strict=True)):
            told = one.update(now_ns)
            code = changed.get(rows[i].row)
            if code in QUIET and not other.violating:
                assert told is None
                other.state = STATES[code]
                bank.note_state(rows[i].row, code, False)
            elif code is not None:
                assert other.update(now_ns) == told
                bank.note_state(rows[i].row, CODE[other.state], other.violating)
            else:
                assert told is None
            assert (other.state, other.violating) == (one.state, one.violating)
            assert STATES[bank.code[rows[i].row]] == one.state
            assert other.signal == one.signal
            assert rows[i].idle == one.tracker.idle


def test_a_row_that_leaves_goes_on_where_it_was():
    rng, made = random.Random(1), promise(curve=STEPS)
    bank, alone = SignalTable(SETTINGS), WindowTracker(SETTINGS, made)
    SignalRow(bank, bank.allot(promise("other"), "g", "", 1.0))
    row = SignalRow(bank, bank.allot(made, "g", "disk", 1.0))

    def feed(seconds: range) -> None:
        for second in seconds:
            pieces = pieces_of(rng, [made], second * S, 0.6)
            if isinstance(moved, WindowTracker):
                moved.add(piece_at(pieces, 0, "g", made), lambda spoken: True, second * S)
            else:
                bank.add(np.array([row.row]), np.array([0]), pieces)
            alone.add(piece_at(pieces, 0, "g", made), lambda spoken: True, second * S)

    moved: object = row
    feed(range(1, 9))
    assert row.signal(0.9) == alone.signal(0.9) != NOTHING
    moved = row.leave()
    assert moved.signal(0.9) == alone.signal(0.9)
    feed(range(9, 20))
    assert moved.signal(0.9) == alone.signal(0.9)
    assert moved.idle == alone.idle


def test_rows_are_used_again_empty_and_arrays_grow():
    bank = SignalTable(SETTINGS)
    rows = [SignalRow(bank, bank.allot(promise(f"p{i}"), "g", "", 1.0)) for i in range(200)]
    bank.add(np.array([5]), np.array([0]), pieces_of(random.Random(1), [promise()], S, 1.0, steps=1))
    assert rows[5].last_piece_ns == S
    bank.free(5)
    again = SignalRow(bank, bank.allot(promise("new", curve=(*STEPS, CurveStep(900, 50_000))), "g", "", 1.0))
    assert (again.row, again.last_piece_ns, again.signal(1.0)) == (5, None, NOTHING)
    assert bank.threshold_us[5].tolist() == [5_000, 12_000, 50_000]
    assert bank.threshold_us[6].tolist()[:1] == [12_000]


def test_at_risk_rows_are_found_until_their_windows_go():
    bank, made = SignalTable(SETTINGS), promise(ms=5)
    row = SignalRow(bank, bank.allot(made, "g", "disk", SETTINGS.r_on))
    for second in (1, 2, 3):
        pieces = pieces_of(random.Random(5), [made], second * S, 1.0, steps=1)
        pieces.missed[:] = pieces.done[:, None]
        bank.add(np.array([row.row]), np.array([0]), pieces)
        bank.assess(second * S, 3.0)
    assert bank.risky_rows(3 * S, 30.0) == [row.row]
    row.reset()
    assert bank.risky_rows(3 * S, 30.0) == []
