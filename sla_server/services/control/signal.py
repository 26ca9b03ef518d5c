"""The windows of very many promises, in arrays: one row is what ``windows.WindowTracker`` is for one.

A row is a promise with streams at *one* gateway, on one backend or over all of them; promises that span
gateways keep a tracker of their own (``scopes``). Rows are fed by ``add`` with the pieces of a whole batch
of cuts and looked at by ``assess`` once a tick, only those that were fed since; it finds the live states
that are others now, and the rows at risk. Figures are worked out for the rows that somebody asks for, by the
same function that single trackers use, so both say the same to the last bit (``test_signal`` holds them
against each other).

    windows   a ring of ``depth`` closed windows a row: w_* at [row * depth + slot]; ``count`` of them, the
              next goes to slot ``pos``
    open      o_* at [row]; o_covered 0 means empty, whatever the other columns hold
    times     first, last and last-active piece, monotonic ns, NEVER before the first

Shapes: (rows,), (rows * depth, ...); histograms (.., 99) int32. Grown by doubling; freed rows are used again.
Pure: no clock. Changed only by the brain's one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS, EDGES_NS
from sla_server.agreements.promise import Promise
from sla_server.services.control.settings import ControlSettings

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]
NEVER: Final = -(1 << 62)
STATES: Final = ("no-data", "idle", "out-of-curve", "violating", "at-risk", "ok")
NO_DATA, IDLE, OUT_OF_CURVE, VIOLATING, AT_RISK, OK = range(6)
CODE: Final = {name: code for code, name in enumerate(STATES)}
QUIET: Final = frozenset((NO_DATA, OUT_OF_CURVE, AT_RISK, OK))
"""States that begin without an event and without a change of the windows."""
_FIRST: Final = 64
_EDGES: Final = EDGES_NS.astype(np.float64)


@dataclass(slots=True)
class Pieces:
    """Pieces of one batch, one a line (``batch``); see ``windows.Piece`` for what the columns mean.

    Attributes:
        now_ns, covered_us, offered, done, waiting, latency_us, inexact, excused: shape (pieces,).
        missed: shape (pieces, steps).
        hist: shape (pieces, 99).
    """

    now_ns: Ints
    covered_us: Ints
    offered: Floats
    done: Floats
    waiting: Floats
    missed: Floats
    hist: Counts
    inexact: Bools
    latency_us: Floats
    excused: Floats


def percentiles_us(hist: npt.NDArray[Any], percentile: Floats) -> Floats:
    """``histogram.percentile_us`` of each row of ``hist``, shape (rows, 99); 0 for a row without I/O."""
    cumulative = hist.cumsum(axis=1, dtype=np.int32)
    want = percentile / 100 * cumulative[:, -1]
    index = (cumulative < want[:, None]).sum(axis=1)
    every = np.arange(len(hist))
    count = hist[every, index]
    before = cumulative[every, index] - count
    inside = np.where(count > 0, (want - before) / np.maximum(count, 1), 1.0)
    low = _EDGES[index]
    latency: Floats = (low + (_EDGES[index + 1] - low) * np.clip(inside, 0.0, 1.0)) / 1000
    latency[cumulative[:, -1] == 0] = 0.0
    return latency


class SignalTable:
    """See the module."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.depth = settings.signal_windows
        self.steps = 1
        self.promises: list[Promise | None] = []
        self.gateways: list[str] = []
        self.backends: list[str] = []
        self._free: list[int] = []
        self._make(_FIRST)

    def _make(self, rows: int) -> None:
        depth = self.depth
        self.pos = np.zeros(rows, np.int64)
        self.count = np.zeros(rows, np.int64)
        self.version = np.zeros(rows, np.int64)
        self.first_ns = np.full(rows, NEVER, np.int64)
        self.last_ns = np.full(rows, NEVER, np.int64)
        self.active_ns = np.full(rows, NEVER, np.int64)
        self.o_covered = np.zeros(rows, np.int64)
        self.o_offered, self.o_done = np.zeros(rows), np.zeros(rows)
        self.o_missed = np.zeros((rows, self.steps))
        self.o_hist = np.zeros((rows, BUCKETS), np.int32)
        self.o_inexact, self.o_excused = np.zeros(rows, np.bool_), np.zeros(rows)
        self.w_iops, self.w_latency = np.zeros(rows * depth), np.zeros(rows * depth)
        self.w_done = np.ones(rows * depth)
        self.w_missed = np.zeros((rows * depth, self.steps))
        self.w_hist = np.zeros((rows * depth, BUCKETS), np.int32)
        self.w_inexact, self.w_excused = np.zeros(rows * depth, np.bool_), np.zeros(rows * depth)
        self.w_sure = np.zeros(rows * depth)  # as w_latency, without the I/Os excused
        self.allowed, self.percentile, self.r_on = np.ones(rows), np.zeros(rows), np.zeros(rows)
        self.up_to = np.full((rows, self.steps), -1.0)
        self.threshold_us = np.ones((rows, self.steps))
        self.whole = np.zeros(rows, np.bool_)
        self.code = np.zeros(rows, np.int8)
        self.broken = np.zeros(rows, np.bool_)
        self.at_risk = np.zeros(rows, np.bool_)
        self.outside = np.zeros(rows, np.bool_)
        self.u = np.zeros(rows)
        self._fed = np.zeros(rows, np.bool_)

    def _grow(self, rows: int, steps: int) -> None:
        old = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        self.steps = steps
        self._make(rows)
        for name, value in old.items():
            target = getattr(self, name)
            target[tuple(slice(size) for size in value.shape)] = value

    # Rows.

    def allot(self, promise: Promise, gateway_id: str, backend: str, r_on: float) -> int:
        """A row for a promise at one gateway; ``backend`` "" is all of them together."""
        steps = max(self.steps, len(promise.curve))
        if steps > self.steps:
            self._grow(len(self.pos), steps)
        if not self._free and len(self.promises) == len(self.pos):
            self._grow(2 * len(self.pos), self.steps)
        row = self._free.pop() if self._free else len(self.promises)
        if row == len(self.promises):
            self.promises.append(promise)
            self.gateways.append(gateway_id)
            self.backends.append(backend)
        self.promises[row], self.gateways[row], self.backends[row] = promise, gateway_id, backend
        self.allowed[row], self.percentile[row] = promise.allowed_miss_ratio, promise.percentile
        self.r_on[row], self.whole[row] = r_on, backend == ""
        self.up_to[row], self.threshold_us[row] = -1.0, 1.0
        for index, step in enumerate(promise.curve):
            self.up_to[row, index], self.threshold_us[row, index] = step.up_to_iops, step.threshold_us
        self.first_ns[row] = self.last_ns[row] = self.active_ns[row] = NEVER
        self.code[row], self.broken[row] = NO_DATA, False
        self.reset(row)
        return row

    def free(self, row: int) -> None:
        """Nobody needs the row any more."""
        self.promises[row] = None
        self.whole[row] = self._fed[row] = self.at_risk[row] = self.outside[row] = False
        self.last_ns[row], self.code[row] = NEVER, NO_DATA
        self._free.append(row)

    def set_r_on(self, row: int, r_on: float) -> None:
        """Another entry threshold of r."""
        if self.r_on[row] != r_on:
            self.r_on[row] = r_on
            self._fed[row] = True

    def reset(self, rows: int | Ints) -> None:
        """Forget windows, closed and open; the times stay."""
        self.count[rows] = self.pos[rows] = self.o_covered[rows] = 0
        self.at_risk[rows] = self.outside[rows] = False
        self._fed[rows] = True
        self.version[rows] += 1

    # Feeding.

    def note(self, rows: Ints, pick: Ints, pieces: Pieces) -> None:
        """Remember only that there was, or was no, I/O; ``rows`` are distinct, fed from ``pieces[pick]``."""
        now_ns = pieces.now_ns[pick]
        self.last_ns[rows] = now_ns
        self.first_ns[rows] = np.where(self.first_ns[rows] == NEVER, now_ns, self.first_ns[rows])
        active = (pieces.offered[pick] > 0) | (pieces.done[pick] > 0) | (pieces.waiting[pick] > 0)
        self.active_ns[rows] = np.where(active, now_ns, self.active_ns[rows])
        self._fed[rows] = True

    def add(self, rows: Ints, pick: Ints, pieces: Pieces) -> None:
        """Take one piece a row; ``rows`` are distinct, fed from ``pieces[pick]``."""
        self.note(rows, pick, pieces)
        covered, offered, done = pieces.covered_us[pick], pieces.offered[pick], pieces.done[pick]
        missed, hist, inexact = pieces.missed[pick], pieces.hist[pick], pieces.inexact[pick]
        latency, excused = pieces.latency_us[pick], pieces.excused[pick]
        merged = np.flatnonzero(self.o_covered[rows])
        if len(merged):
            into = rows[merged]
            covered[merged] += self.o_covered[into]
            offered[merged] += self.o_offered[into]
            done[merged] += self.o_done[into]
            missed[merged] += self.o_missed[into]
            hist[merged] += self.o_hist[into]
            inexact[merged] |= self.o_inexact[into]
            excused[merged] += self.o_excused[into]
            latency[merged] = percentiles_us(hist[merged], self.percentile[into])
        closes = (done >= self.settings.window_min_ios) | (covered >= self.settings.window_max_s * 1e6)
        if not closes.all():
            stay = np.flatnonzero(~closes)
            into = rows[stay]
            self.o_covered[into], self.o_offered[into] = covered[stay], offered[stay]
            self.o_done[into], self.o_inexact[into] = done[stay], inexact[stay]
            self.o_missed[into], self.o_hist[into] = missed[stay], hist[stay]
            self.o_excused[into] = excused[stay]
        if len(merged):
            self.o_covered[rows[merged[closes[merged]]]] = 0
        push = closes & (done > 0)
        if not push.all():
            rows, covered, offered, done = rows[push], covered[push], offered[push], done[push]
            missed, hist, inexact, latency = missed[push], hist[push], inexact[push], latency[push]
            excused = excused[push]
        slot = rows * self.depth + self.pos[rows]
        self.w_iops[slot], self.w_done[slot] = offered * 1e6 / covered, done
        self.w_missed[slot], self.w_hist[slot] = missed, hist
        self.w_inexact[slot], self.w_latency[slot] = inexact, latency
        self.w_excused[slot], self.w_sure[slot] = excused, latency
        some = np.flatnonzero(excused)
        if len(some):
            percentile = self.percentile[rows[some]] * (1 - excused[some] / done[some])
            self.w_sure[slot[some]] = percentiles_us(hist[some], percentile)
        self.pos[rows] = (self.pos[rows] + 1) % self.depth
        self.count[rows] = np.minimum(self.count[rows] + 1, self.depth)
        self.version[rows] += 1

    # Looking.

    def note_state(self, row: int, code: int, broken: bool) -> None:
        """What the live state says now; ``broken``: a violation is open."""
        self.code[row], self.broken[row] = code, broken

    def risky_rows(self, now_ns: int, gone_s: float) -> list[int]:
        """Rows on one backend at risk, as the last ``assess`` found them, and not silent for ``gone_s``."""
        speaking = now_ns - self.last_ns <= gone_s * 1e9
        rows: list[int] = np.flatnonzero(self.at_risk & ~self.whole & speaking).tolist()
        return rows

    def outside_rows(self) -> list[int]:
        """Rows on one backend whose demand is above their curve, as the last ``assess`` found them."""
        rows: list[int] = np.flatnonzero(self.outside & ~self.whole).tolist()
        return rows

    def assess(self, now_ns: int, silent_s: float) -> list[tuple[int, int]]:
        """Look at the rows fed since the last time; those over all backends whose live state has changed.

        Returns:
            (row, code of the state it should be in), by row.

        Args:
            now_ns: monotonic.
            silent_s: age of the last piece from which on there is no data.
        """
        rows = np.flatnonzero(self._fed)
        self._fed[rows] = False
        code = self._judge(rows) if len(rows) else self.code[rows]
        differs = (code != self.code[rows]) & self.whole[rows]
        found = dict(zip(rows[differs].tolist(), code[differs].tolist(), strict=True))
        speaking = self.whole & (self.code != NO_DATA)
        silent = np.flatnonzero(speaking & (now_ns - self.last_ns > silent_s * 1e9))
        return sorted((found | dict.fromkeys(silent.tolist(), NO_DATA)).items())

    def _judge(self, rows: Ints) -> npt.NDArray[np.int8]:
        """Live states as they should be (``LiveState._measured``); sets ``at_risk``, empties idle rows."""
        s = self.settings
        since = np.where(self.active_ns[rows] == NEVER, self.first_ns[rows], self.active_ns[rows])
        idle = (self.first_ns[rows] != NEVER) & (self.last_ns[rows] - since >= s.idle_release_s * 1e9)
        if idle.any():
            # One that has just become idle is emptied by its live state, which still tells what was before.
            empty = rows[idle & ~(self.whole[rows] & (self.code[rows] != IDLE))]
            self.reset(empty)
            self._fed[empty] = False
        count, slots = self.count[rows], rows[:, None] * self.depth + np.arange(self.depth)
        known = count > 0
        valid = (self.pos[rows][:, None] - 1 - np.arange(self.depth)) % self.depth < count[:, None]
        step, inside = self._step(rows, count)
        threshold = self.threshold_us[rows, step]
        missed = self.w_missed[slots, step[:, None]]
        done, allowed = self.w_done[slots], self.allowed[rows]
        u = missed / done / allowed[:, None]
        r = self.w_latency[slots] / threshold[:, None]
        risky = (((u >= s.at_risk_u) | (r >= self.r_on[rows][:, None])) & valid).sum(axis=1)
        over = ((u > 1) & valid).sum(axis=1)
        self.at_risk[rows] = known & inside & ~idle & self._evidence(rows, missed, threshold, valid)
        self.outside[rows] = known & ~inside & ~idle
        self.u[rows] = (missed * valid).sum(axis=1) / np.maximum((done * valid).sum(axis=1), 1) / allowed
        code = np.where(risky >= s.at_risk_windows, AT_RISK, OK).astype(np.int8)
        broken = self.broken[rows]
        code[broken & ((over > 0) | (self.u[rows] >= s.at_risk_u))] = VIOLATING
        code[over >= s.at_risk_windows] = VIOLATING
        code[~inside] = OUT_OF_CURVE
        code[~known] = np.where(broken[~known], VIOLATING, NO_DATA)
        code[idle] = IDLE
        return code

    def _evidence(self, rows: Ints, missed: Floats, threshold: Floats, valid: Bools) -> Bools:
        """``Signal.at_risk``, shape (rows,); see ``windows.work_out``."""
        s, slots = self.settings, rows[:, None] * self.depth + np.arange(self.depth)
        u = np.maximum(missed - self.w_excused[slots], 0.0) / self.w_done[slots] / self.allowed[rows][:, None]
        r = self.w_sure[slots] / threshold[:, None]
        risky = ((u >= s.at_risk_u) | (r >= self.r_on[rows][:, None])) & valid
        every, newest = np.arange(len(rows)), (self.pos[rows] - 1) % self.depth
        before = (newest - 1) % self.depth
        falls = (r[every, newest] <= s.falling_ratio * r[every, before]) & (self.count[rows] > 1)
        found: Bools = (risky.sum(axis=1) >= s.at_risk_windows) & risky[every, newest] & ~falls
        return found

    def _step(self, rows: Ints, count: Ints) -> tuple[Ints, Bools]:
        """Step of the curve at the mean offered rate, and whether there is one, each of shape (rows,)."""
        offered = np.zeros(len(rows))
        for age in range(self.depth):  # oldest first: a sum of floats depends on its order
            slot = rows * self.depth + (self.pos[rows] - count + age) % self.depth
            offered += np.where(age < count, self.w_iops[slot], 0.0)
        fits = (offered / np.maximum(count, 1))[:, None] <= self.up_to[rows]
        inside: Bools = np.asarray(fits.any(axis=1))
        return fits.argmax(axis=1), inside
