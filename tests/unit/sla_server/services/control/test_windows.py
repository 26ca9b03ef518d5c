"""Windows: when they close, and many promises at once as one after another."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest

from sla_server.agreements.promise import CurveStep, Promise
from sla_server.services.control.pieces import Pieces
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalTable
from sla_server.services.control.verdicts import NOTHING, signals_of
from sla_server.services.control.windows import WindowTable
from tests.support.windows import OnePromise, random_pieces
from tests.support.worlds import A, B, cut, promise

S = 1_000_000_000
SETTINGS = ControlSettings()
STEPS = (CurveStep(60, 5_000), CurveStep(200, 12_000))


def test_windows_merge_until_twenty_ios():
    made = OnePromise()
    assert not made.feed(12, 1, 1)
    assert made.feed(12, 1, 2)
    assert made.windows == 1
    assert made.table.w_done[made.newest] == 24


def test_a_slow_volume_is_judged_after_ten_seconds():
    made = OnePromise()
    closed = [made.feed(1, 1, second) for second in range(1, 11)]
    assert closed == [False] * 9 + [True]
    assert made.table.w_done[made.newest] == 10


def test_a_slow_volume_at_two_gateways_is_judged_after_ten_seconds_of_one():
    made = OnePromise(A, B)
    closed = [made.feed(1, 1, second + at / 2, g) for second in range(1, 11) for at, g in enumerate((A, B))]
    assert closed == [False] * 18 + [True, False]
    assert made.table.w_done[made.newest] == 19
    assert made.signal().offered_iops == pytest.approx(2)


def test_every_gateway_in_scope_must_have_spoken():
    made = OnePromise(A, B)
    made.feed(0, 1, 0.5, B)
    made.signals.reset(np.array([made.row.row]))
    assert not made.feed(30, 1, 1)
    assert made.feed(30, 1, 1, gateway=B)
    # side by side, not one behind the other: 60 I/Os in one second
    assert made.table.w_iops[made.newest] == pytest.approx(60)


def test_silent_gateways_are_not_waited_for():
    made = OnePromise(A, B)
    assert made.feed(30, 1, 1)  # B never spoke
    made.feed(30, 1, 1.5, B)
    made.signals.reset(np.array([made.row.row]))
    assert not made.feed(30, 1, 2)
    assert made.feed(30, 1, 2.5, B)
    assert not made.feed(30, 1, 3)
    assert not made.feed(30, 1, 4)
    assert made.feed(30, 1, 6)  # B is silent for more than three intervals
    made.feed(30, 1, 6.5, B)
    made.table.set_up(B, False)
    assert made.feed(30, 1, 7)
    made.table.set_up(B, True)
    assert not made.feed(30, 1, 8)


def test_a_second_gateway_joins_an_open_window():
    made = OnePromise()
    assert not made.feed(12, 1, 1)
    made.members[B] = made.table.join(made.row.row, B)
    assert made.feed(12, 1, 1, B)
    assert made.table.w_done[made.newest] == 24
    assert made.signal().offered_iops == pytest.approx(24)


def test_reset_forgets_windows_but_not_activity():
    made = OnePromise()
    made.feed(100, 20, 1)
    made.row.reset()
    assert made.signal() is NOTHING
    assert made.table.active_ns[made.row.row] == S


def test_idle_needs_cuts_without_io():
    made = OnePromise()
    assert not made.row.idle
    made.feed(30, 1, 1)
    for second in range(2, 6):
        made.feed(0, 1, second)
        assert not made.row.idle
    made.feed(0, 1, 6)
    assert made.row.idle


def test_a_held_io_is_activity():
    made = OnePromise()
    for second in range(1, 9):
        made.take(cut(A, second, {"gold": (0, 1)}, held=1), second)
    assert not made.row.idle


GATEWAYS = ("g0", "g1", "g2", "g3")


@pytest.mark.parametrize("seed", range(5))
def test_all_pieces_of_a_batch_are_as_each_by_number_and_are_left_as_they_were(seed):
    rng = random.Random(seed)
    promises = [promise(f"p{i}", curve=STEPS) for i in range(6)]
    tables = SignalTable(SETTINGS), SignalTable(SETTINGS)
    for each in tables:
        for made in promises:
            each.allot(made, A, "", SETTINGS.r_on)
    one, other = (each.windows for each in tables)
    for second in range(1, 30):
        pieces = random_pieces(rng, promises, second * S, 0.5)
        before = copy.deepcopy(pieces)
        one.add(one.member[:6], slice(None), pieces)
        for name, values in vars_of(before).items():
            assert np.array_equal(values, getattr(pieces, name)), name
        other.add(other.member[:6], np.arange(6), pieces)
        for row in range(6):
            assert windows_of(one, row) == windows_of(other, row)


def vars_of(pieces: Pieces) -> dict[str, np.ndarray]:
    return {each.name: getattr(pieces, each.name) for each in dataclasses.fields(pieces)}


def windows_of(made: WindowTable, row: int) -> list[object]:
    """All that a table keeps of a row: closed windows oldest first, the open one, times."""
    count, pos, found = int(made.count[row]), int(made.pos[row]), list[object]()
    for age in range(count):
        slot = (pos - count + age) % made.depth * len(made.pos) + row
        found += [made.w_done[slot], made.w_missed[slot].tolist(), made.w_hist[slot].tolist()]
        found += [bool(made.w_inexact[slot]), made.w_iops[slot], made.w_latency[slot]]
        found += [pytest.approx(made.w_excused[slot]), pytest.approx(made.w_sure[slot])]
        found += [made.w_counted[slot].tolist(), made.w_failed[slot], made.w_stall_us[slot]]
    opened = made.m_covered[made.m_row == row]
    found += [opened.tolist(), made.m_offered[made.m_row == row][opened > 0].tolist()]
    if opened.any():
        found += [made.o_done[row], made.o_missed[row].tolist(), made.o_hist[row].tolist()]
    return [*found, made.first_ns[row], made.last_ns[row], made.active_ns[row]]


@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_many_gateways_together_are_as_one_after_another(seed):
    """Six promises over one to four gateways each; a batch against the same pieces one by one."""
    rng = random.Random(seed)
    promises = [promise(f"p{i}", curve=STEPS if i % 2 else STEPS[1:], percentile=90.0 + i) for i in range(6)]
    signals = SignalTable(SETTINGS), SignalTable(SETTINGS)
    tables = [each.windows for each in signals]
    members: list[tuple[int, int, int]] = []  # promise, gateway, member
    for table, made in zip(signals, tables, strict=True):
        rows = [table.allot(each, GATEWAYS[0], "", SETTINGS.r_on) for each in promises]
        joined = [(i, g) for i in range(6) for g in range(1, 1 + i % 4)]
        members = [(i, 0, int(made.member[rows[i].row])) for i in range(6)]
        members += [(i, g, made.join(rows[i].row, GATEWAYS[g])) for i, g in joined]
    together, alone = tables
    for second in range(1, 60):
        now_ns = second * S
        spoke = sorted(rng.sample(range(4), rng.randrange(1, 5)))
        fed = [(i, g, member) for i, g, member in members if g in spoke]
        if not fed:
            continue
        pieces = random_pieces(rng, [promises[i] for i, *_ in fed], now_ns, (1.0, 0.5, 0.0)[second // 9 % 3])
        numbers = np.array([member for *_, member in fed])
        order = np.array(sorted(range(len(fed)), key=lambda at: fed[at][1]))  # a gateway's cut at a time
        for made in tables:
            made.spoke(np.array([made.gateway(GATEWAYS[g]) for g in spoke]), np.full(len(spoke), now_ns))
        together.add(numbers[order], order, pieces)
        for at in order.tolist():
            alone.add(numbers[[at]], np.array([at]), pieces)
        if rng.random() < 0.1:
            for table in signals:
                table.reset(np.arange(3))
        one, other = (each.assess(now_ns, SETTINGS.silent_s) for each in signals)
        assert one == other
        for row in range(6):
            assert windows_of(together, row) == windows_of(alone, row)
    assert any(together.count)


@pytest.mark.parametrize("more", [promise("more", curve=STEPS), promise("more", curve=(*STEPS, STEPS[-1]))])
def test_windows_are_the_same_when_there_are_more_rows_or_longer_curves(more: Promise) -> None:
    rng = random.Random(4)
    promises = [promise(f"p{i}", curve=STEPS) for i in range(6)]
    made = SignalTable(SETTINGS)
    for each in promises:
        made.allot(each, A, "", SETTINGS.r_on)
    windows = made.windows
    for second in range(1, 30):
        windows.add(windows.member[:6], slice(None), random_pieces(rng, promises, second * S, 0.5))
    rows = np.arange(6)
    before = [each.tolist() for each in made.newest_over(rows)], signals_of(windows, rows)
    size = len(windows.pos)
    for number in range(size):
        made.allot(dataclasses.replace(more, sla=f"more-{number}"), A, "", SETTINGS.r_on)
    assert (len(windows.pos), windows.steps) == (2 * size, len(more.curve))
    assert ([each.tolist() for each in made.newest_over(rows)], signals_of(windows, rows)) == before
    assert all(signal.windows == windows.depth for signal in before[1])
