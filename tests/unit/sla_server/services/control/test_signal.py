"""Windows and what they say: of one promise, and of many at once."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pmdaemon.wire.histogram import BUCKETS, percentile_us
from sla_server.agreements.promise import CurveStep, Promise
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import (
    NEVER,
    NOTHING,
    Pieces,
    Signal,
    SignalRow,
    SignalTable,
    percentiles_us,
)
from tests.support.worlds import A, B, cut, piece_of, pieces_of, promise

S = 1_000_000_000
ALL = np.array([True])
SETTINGS = ControlSettings()
STEPS = (CurveStep(60, 5_000), CurveStep(200, 12_000))


class OnePromise:
    """A table with one row; ``gateways`` are its members."""

    def __init__(self, *gateways: str, r_on: float = 0.95, **over) -> None:
        self.table, self.promise = SignalTable(SETTINGS), promise(**over)
        first, *others = gateways or (A,)
        self.row: SignalRow = self.table.allot(self.promise, first, "disk", r_on)
        self.members = {first: int(self.table.member[self.row.row])}
        for other in others:
            self.members[other] = self.table.join(self.row.row, other)

    @property
    def windows(self) -> int:
        return int(self.table.count[self.row.row])

    @property
    def newest(self) -> int:
        return self.row.row * self.table.depth + int(self.table.pos[self.row.row] - 1) % self.table.depth

    def signal(self) -> Signal:
        return self.row.signal()

    def take(self, made, second: float) -> bool:
        """One cut; whether it closed a window."""
        piece, before = piece_of(made, ALL, self.promise), int(self.table.version[self.row.row])
        now_ns = round(second * S)
        self.table.spoke(np.array([self.table.gateway(made.gateway_id)]), np.array([now_ns]))
        members = np.array([self.members[made.gateway_id]])
        self.table.add(members, np.array([0]), pieces_of([piece], self.promise, now_ns))
        return int(self.table.version[self.row.row]) > before

    def feed(self, count: int, ms: float, second: float, gateway: str = A) -> bool:
        return self.take(cut(gateway, math.ceil(second), {"gold": (count, ms)}), second)


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
    made.table.reset(np.array([made.row.row]))
    assert not made.feed(30, 1, 1)
    assert made.feed(30, 1, 1, gateway=B)
    # side by side, not one behind the other: 60 I/Os in one second
    assert made.table.w_iops[made.newest] == pytest.approx(60)


def test_silent_gateways_are_not_waited_for():
    made = OnePromise(A, B)
    assert made.feed(30, 1, 1)  # B never spoke
    made.feed(30, 1, 1.5, B)
    made.table.reset(np.array([made.row.row]))
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


def test_the_newest_window_changes_and_is_over_or_not():
    made, seen = OnePromise(), []
    for second, ms in enumerate((20, 1, 20), 1):
        made.feed(100, ms, second)
        seen.append(made.table.newest_over(np.array([made.row.row])))
    assert [over.tolist() for _, over in seen] == [[True], [False], [True]]
    assert len({int(change[0]) for change, _ in seen}) == 3
    made.table.set_excluded(made.row.row, True)
    assert made.table.newest_over(np.array([made.row.row]))[1].tolist() == [False]
    made.table.set_excluded(made.row.row, False)
    made.row.reset()
    assert made.table.newest_over(np.array([made.row.row]))[1].tolist() == [False]


def test_r_on_alone_makes_a_window_risky():
    made = OnePromise(r_on=0.8)
    made.feed(100, 10.6, 1)  # no miss, but its bucket's interpolated p95 is above 0.8 * 12 ms
    assert made.signal().risky == 1
    made.table.set_r_on(made.row.row, 1.2)
    assert made.signal().risky == 0


def test_above_the_curve_nothing_is_said():
    made = OnePromise(curve=(CurveStep(50, 12_000), CurveStep(90, 20_000)))
    made.take(cut(A, 1, {"gold": (80, 15)}, thresholds_us=(12_000, 20_000)), 1)
    assert made.signal().threshold_us == 20_000
    assert made.signal().u == 0
    made.take(cut(A, 2, {"gold": (120, 15)}, thresholds_us=(12_000, 20_000)), 2)
    assert made.signal().threshold_us is None


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


def test_infinite_curve_and_no_ios():
    made = OnePromise(curve=(CurveStep(math.inf, 5000),))
    made.feed(0, 1, 1)
    assert made.signal() is NOTHING


def random_pieces(
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
        completed=done,
        reads=done // 2,
        size_bytes=done * 4096,
        arrived=done + [float(rng.randrange(3)) for _ in range(count)],
        counted=np.repeat(done[:, None], steps, axis=1),
        failed=np.array([float(rng.randrange(3)) for _ in range(count)]),
        oldest_us=np.array([rng.choice((0.0, 0.0, 2e6)) for _ in range(count)]),
        silence_us=np.zeros(count),
        waiting=np.array([float(rng.random() < 0.1) for _ in range(count)]),
        missed=missed,
        hist=hist,
        inexact=np.array([rng.random() < 0.1 for _ in range(count)]),
        latency_us=percentiles_us(hist, percentile),
        excused=np.array([rng.choice((0.0, 0.0, 0.1, 0.5)) for _ in range(count)]) * done,
    )


GATEWAYS = ("g0", "g1", "g2", "g3")


def windows_of(made: SignalTable, row: int) -> list[object]:
    """All that a table keeps of a row: closed windows oldest first, the open one, times."""
    count, pos, found = int(made.count[row]), int(made.pos[row]), list[object]()
    for age in range(count):
        slot = row * made.depth + (pos - count + age) % made.depth
        found += [made.w_done[slot], made.w_missed[slot].tolist(), made.w_hist[slot].tolist()]
        found += [bool(made.w_inexact[slot]), made.w_iops[slot], made.w_latency[slot]]
        found += [pytest.approx(made.w_excused[slot]), pytest.approx(made.w_sure[slot])]
        found += [made.w_counted[slot].tolist(), made.w_failed[slot], made.w_stall_us[slot]]
    opened = made.m_covered[made.m_row == row]
    found += [opened.tolist(), made.m_offered[made.m_row == row][opened > 0].tolist()]
    if opened.any():
        found += [made.o_done[row], made.o_missed[row].tolist(), made.o_hist[row].tolist()]
    return [*found, made.first_ns[row], made.last_ns[row], made.active_ns[row]]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_many_gateways_together_are_as_one_after_another(seed):
    """Six promises over one to four gateways each; a batch against the same pieces one by one."""
    rng = random.Random(seed)
    promises = [promise(f"p{i}", curve=STEPS if i % 2 else STEPS[1:], percentile=90.0 + i) for i in range(6)]
    tables = SignalTable(SETTINGS), SignalTable(SETTINGS)
    members: list[tuple[int, int, int]] = []  # promise, gateway, member
    for made in tables:
        rows = [made.allot(each, GATEWAYS[0], "", SETTINGS.r_on) for each in promises]
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
            for made in tables:
                made.reset(np.arange(3))
        assert together.assess(now_ns, SETTINGS.silent_s) == alone.assess(now_ns, SETTINGS.silent_s)
        for row in range(6):
            assert windows_of(together, row) == windows_of(alone, row)
    assert any(together.count)


def test_percentiles_of_many_are_those_of_each():
    rng = np.random.default_rng(3)
    hist = rng.integers(0, 4, (50, 99)) * (rng.random((50, 99)) < 0.2)
    hist[7] = 0
    percentile = rng.choice([50.0, 95.0, 99.9, 100.0], 50)
    wanted = [percentile_us(row, p) or 0.0 for row, p in zip(hist, percentile, strict=True)]
    assert percentiles_us(hist, percentile).tolist() == wanted


def test_rows_are_used_again_empty_and_arrays_grow():
    table = SignalTable(SETTINGS)
    rows = [table.allot(promise(f"p{i}"), f"g{i}", "", 1.0) for i in range(200)]
    table.join(5, "elsewhere")
    table.add(table.member[[5]], np.array([0]), random_pieces(random.Random(1), [promise()], S, 1.0, steps=1))
    assert rows[5].last_piece_ns == S
    table.free(5)
    again = table.allot(promise("new", curve=(*STEPS, CurveStep(900, 50_000))), "g", "", 1.0)
    assert (again.row, again.last_piece_ns, again.signal()) == (5, None, NOTHING)
    assert table.threshold_us[5].tolist() == [5_000, 12_000, 50_000]
    assert table.threshold_us[6].tolist()[:1] == [12_000]
    assert table.first_ns[5] == NEVER
    table.free(5)
    assert sorted(table.member[[table.allot(promise(), "g", "", 1.0).row for _ in range(2)]]) == [5, 200]


def test_at_risk_rows_are_found_until_their_windows_go():
    table, made = SignalTable(SETTINGS), promise(ms=5)
    row = table.allot(made, "g", "disk", SETTINGS.r_on)
    for second in (1, 2, 3):
        pieces = random_pieces(random.Random(5), [made], second * S, 1.0, steps=1)
        pieces.missed[:] = pieces.done[:, None]
        table.add(table.member[[row.row]], np.array([0]), pieces)
        table.assess(second * S, 3.0)
    assert table.risky_rows(3 * S, 30.0) == [row.row]
    row.reset()
    assert table.risky_rows(3 * S, 30.0) == []
