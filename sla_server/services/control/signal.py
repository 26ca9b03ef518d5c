"""The signal: which promises are at risk, and which live states have changed, of very many at once.

    pieces          what a batch of cuts says of each promise
    windows         pieces merged: the last three of each promise
    promise_terms   what each promise asks
    verdicts        what the windows of some promises say

``SignalTable`` joins them: it gives a row to each promise on one backend, and to each over all backends, and
answers for all rows together. ``assess`` looks once a tick at the rows fed since then; it finds the live
states that have changed, and the rows at risk. A ``Signal`` in full is worked out for the rows that are asked
for.

State: the promise and backend of each row, and what ``assess`` found. Freed rows are used again. Pure: no
clock; times are the caller's monotonic nanoseconds. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import Promise
from sla_server.services.control.pieces import Bools, Ints, evenly, percentiles_us
from sla_server.services.control.promise_terms import arrays_of, copy_arrays
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.slice_sums import SliceFigures
from sla_server.services.control.verdicts import Signal, Verdict, signals_of, times, verdict
from sla_server.services.control.windows import NEVER, WindowTable

STATES: Final = (
    "no-data",
    "idle",
    "out-of-curve",
    "violating",
    "at-risk",
    "ok",
    "not-applicable",
    "excluded",
)
NO_DATA, IDLE, OUT_OF_CURVE, VIOLATING, AT_RISK, OK, NOT_APPLICABLE, EXCLUDED = range(8)
CODE: Final = {name: code for code, name in enumerate(STATES)}
QUIET: Final = frozenset((NO_DATA, OUT_OF_CURVE, AT_RISK, OK, NOT_APPLICABLE, EXCLUDED))
"""States that begin without an event and without a change of the windows."""


class SignalTable:
    """See the module. ``windows`` has the rows' windows, under the same numbers."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.windows = WindowTable(settings)
        self.promises: list[Promise | None] = []
        self.backends: list[str] = []
        self._backend_numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._make(len(self.windows.pos))

    def _make(self, rows: int) -> None:
        self.over_all = np.zeros(rows, np.bool_)  # a row over all backends
        self.excluded = np.zeros(rows, np.bool_)
        self.backend = np.full(rows, -1)
        self.code = np.zeros(rows, np.int8)
        self.broken = np.zeros(rows, np.bool_)
        self.at_risk = np.zeros(rows, np.bool_)
        self.outside = np.zeros(rows, np.bool_)
        self.u = np.zeros(rows)

    def _grow(self, rows: int, steps: int) -> None:
        old = arrays_of(self)
        self.windows.grow(rows, steps)
        self._make(rows)
        copy_arrays(old, self)

    # Rows.

    def allot(self, promise: Promise, gateway_id: str, backend: str, r_on: float) -> SignalRow:
        """A row for a promise, with its first gateway; ``backend`` "" is all of them together."""
        steps = max(self.windows.steps, len(promise.curve))
        if steps > self.windows.steps:
            self._grow(len(self.code), steps)
        if not self._free and len(self.promises) == len(self.code):
            self._grow(2 * len(self.code), steps)
        row = self._free.pop() if self._free else len(self.promises)
        if row == len(self.promises):
            self.promises.append(promise)
            self.backends.append(backend)
        self.promises[row], self.backends[row] = promise, backend
        self.backend[row] = self._backend_numbers.setdefault(backend, len(self._backend_numbers))
        self.over_all[row], self.excluded[row] = backend == "", False
        self.code[row], self.broken[row] = NO_DATA, False
        self.windows.terms.put(row, promise, r_on, self.settings.at_risk_u, backend == "")
        self.windows.open(row, gateway_id)
        self.at_risk[row] = self.outside[row] = False
        return SignalRow(self, row)

    def free(self, row: int) -> None:
        """No scope needs the row any more."""
        self.windows.close(row)
        self.promises[row], self.backend[row] = None, -1
        self.over_all[row] = self.at_risk[row] = self.outside[row] = False
        self.code[row] = NO_DATA
        self._free.append(row)

    def set_r_on(self, row: int, r_on: float) -> None:
        """Another entry threshold of r."""
        terms = self.windows.terms
        if terms.r_on[row] != r_on:
            terms.r_on[row] = r_on
            self.windows.version[row] += 1
            self.windows.fed[row] = True

    def set_excluded(self, row: int, is_excluded: bool) -> None:
        """Nothing is promised at present, as in maintenance; or it is again."""
        if bool(self.excluded[row]) != is_excluded:
            self.excluded[row] = is_excluded
            self.windows.slices.forget(np.array([row]))
            self.windows.fed[row] = True

    def reset(self, rows: Ints) -> None:
        """Forget windows, closed and open; the times stay."""
        self.windows.reset(rows)
        self.at_risk[rows] = self.outside[rows] = False

    def rest(self, rows: Ints) -> None:
        """A pause has begun: forget windows, but for the newest of what people see if it was broken.

        Storage that is dead has no more than one window of a client that gives up and pauses. With the first
        one after the pause, if that is broken too, it makes two.
        """
        windows = self.windows
        quiet_us = (windows.last_ns[rows] - windows.active_ns[rows]) / 1000
        remembers = quiet_us < windows.terms.remember_us[rows]
        self.reset(rows[~remembers])
        rows = rows[remembers]
        self.at_risk[rows] = self.outside[rows] = False
        closed = rows[windows.count[rows] > windows.kept[rows]]
        if len(closed):
            _, over = self.newest_over(closed)
            windows.forget_closed(closed, over)

    def set_up(self, gateway_id: str, up: bool) -> None:
        """Whether a gateway is up: windows do not wait for one that is not."""
        self.windows.set_up(gateway_id, up)

    # Asking.

    def work_out(self, rows: Iterable[SignalRow]) -> None:
        """Work out the signals of these rows that are not known yet, all at once."""
        due = [row for row in rows if not row.is_known]
        if due:
            signals = signals_of(self.windows, np.array([row.row for row in due]))
            for row, signal in zip(due, signals, strict=True):
                row.know(signal)

    def set_state(self, row: int, code: int, broken: bool) -> None:
        """The live state as it is now; ``broken``: a violation is open."""
        self.code[row], self.broken[row] = code, broken

    def risky_rows(self, now_ns: int, gone_s: float) -> list[int]:
        """Rows on one backend at risk, as the last ``assess`` found them, and not silent for ``gone_s``."""
        speaking = now_ns - self.windows.last_ns <= gone_s * 1e9
        rows: list[int] = np.flatnonzero(self.at_risk & ~self.over_all & speaking).tolist()
        return rows

    def rows_on(self, backend: str) -> Ints:
        """All rows on one backend."""
        return np.flatnonzero(self.backend == self._backend_numbers.get(backend, -2))

    def least_room(self, rows: Ints, now_ns: int) -> list[Ints]:
        """Which of these rows keep C from rising, as ``inventory`` finds it promise by promise.

        Returns:
            Those that are not clear, worst first; if there is none, the others by r, and by u.
        """
        s = self.settings
        found = verdict(self.windows, rows)
        speaking = now_ns - self.windows.last_ns[rows] <= s.lease_s * 1e9
        speaking &= ~self.excluded[rows] & ~self.windows.idle(rows)
        asks = speaking & ((found.count == 0) | found.holds)
        counted = np.maximum(found.sums_of(found.counted), 1)
        u = found.sums_of(found.missed) / counted / found.allowed
        hist = (self.windows.w_hist[found.slots] * found.valid[:, :, None]).sum(axis=0)
        percentile = self.windows.terms.percentile[rows]
        r = percentiles_us(hist, percentile, self.windows.used) / found.threshold_us
        clear = (found.count >= s.at_risk_windows) & ~found.risky.any(axis=0)
        clear &= (u <= s.clear_u) & (r <= s.clear_r)
        not_clear = np.flatnonzero(asks & ~clear)
        if len(not_clear):
            worst = rows[not_clear[np.argsort(-u[not_clear], kind="stable")]]
            by_r = rows[np.flatnonzero(asks & clear)]  # those of throttled volumes do not count
            return [worst, by_r[np.argsort(-r[asks & clear], kind="stable")]]
        at = np.flatnonzero(asks)
        return [rows[at[np.argsort(-values[at], kind="stable")]] for values in (r, u)]

    def outside_rows(self) -> list[int]:
        """Rows on one backend whose demand is above their curve, as the last ``assess`` found them."""
        rows: list[int] = np.flatnonzero(self.outside & ~self.over_all).tolist()
        return rows

    def newest_over(self, rows: Ints) -> tuple[Ints, Bools]:
        """Of each row a number that changes with its windows, and whether the newest closed one is bad.

        One in which nothing was promised is not (excluded, above the curve, or not applicable), unless
        storage hung or failed.
        """
        found = verdict(self.windows, rows)
        over: Bools = found.over[np.maximum(found.count - 1, 0), np.arange(len(rows))]
        return self.windows.version[rows], over & ~self.excluded[rows]

    def assess(self, now_ns: int, silent_s: float) -> list[tuple[int, int]]:
        """Look at the rows fed since the last time; those over all backends whose live state has changed.

        Returns:
            (row, code of the state it should be in), by row.

        Args:
            now_ns: monotonic.
            silent_s: age of the last piece from which on there is no data, and windows are forgotten.
        """
        stale = np.flatnonzero((self.windows.count > 0) & (now_ns - self.windows.last_ns > silent_s * 1e9))
        if len(stale):  # what was measured then says nothing of now
            self.reset(stale)
        rows = np.flatnonzero(self.windows.fed)
        self.windows.fed[rows] = False
        code = self._states(rows, now_ns, silent_s) if len(rows) else self.code[rows]
        differs = (code != self.code[rows]) & self.over_all[rows]
        found = dict(zip(rows[differs].tolist(), code[differs].tolist(), strict=True))
        speaking = self.over_all & (self.code != NO_DATA)
        silent = np.flatnonzero(speaking & (now_ns - self.windows.last_ns > silent_s * 1e9))
        return sorted((found | dict.fromkeys(silent.tolist(), NO_DATA)).items())

    def _states(self, rows: Ints, now_ns: int, silent_s: float) -> npt.NDArray[np.int8]:
        """Live states as they should be; sets ``at_risk``, ``outside`` and ``u``, empties idle rows."""
        s, of = self.settings, evenly(rows)
        idle, partial = self.windows.idle(of), self.windows.is_partial(rows, of, now_ns, silent_s)
        if idle.any():
            # One that has just become idle is emptied by its live state, whose event has figures of before.
            empty = rows[idle & (partial | ~(self.over_all[rows] & (self.code[rows] != IDLE)))]
            self.rest(empty)
            self.windows.fed[empty] = False
        found = verdict(self.windows, rows, of)
        known, over = found.count > self.windows.kept[of], times(found.over)
        counted = found.sums_of(found.counted)
        is_live = ~idle & ~self.excluded[of]
        self.at_risk[of] = found.at_risk & is_live
        self.outside[of] = known & ~found.inside & found.applies & is_live & ~found.at_risk
        ratio = found.sums_of(found.missed) / np.maximum(counted, 1)
        if found.stalled.any():
            hangs = (counted == 0) & found.stalled.any(axis=0)
            ratio = np.where(hangs, np.maximum(ratio, 1.0), ratio)
        self.u[of] = ratio / found.allowed
        is_risky = times(found.risky) >= s.at_risk_windows
        is_risky |= (over > 0) & (found.count < s.at_risk_windows)  # all that is known is no proof of good
        code = np.where(is_risky, AT_RISK, OK).astype(np.int8)
        broken = self.broken[of]
        code[broken & (self.u[of] >= self.windows.terms.near_u[of])] = VIOLATING
        code[~found.applies] = NOT_APPLICABLE
        code[~found.inside] = OUT_OF_CURVE
        code[partial & (code != VIOLATING)] = NO_DATA  # what some measured is no proof of the rest
        code[(over >= s.at_risk_windows) | (broken & (over > 0))] = VIOLATING  # no clause excuses that
        code[self._break_slices(rows, found)] = VIOLATING
        code[~known] = np.where(broken[~known], VIOLATING, NO_DATA)
        code[idle] = np.where(partial[idle], NO_DATA, IDLE)
        code[self.excluded[of]] = EXCLUDED
        return code

    def slice_figures(self, row: int) -> SliceFigures | None:
        """What the slices of a row say, if they are broken, and go on to be."""
        if not self.windows.slices.was_bad[row]:
            return None
        rows = np.array([row])
        is_broken = self._break_slices(rows, verdict(self.windows, rows))[0]
        return self.windows.slices.figures(row) if is_broken else None

    def _break_slices(self, rows: Ints, found: Verdict) -> Bools:
        """Which of these rows are broken by their slices (``slice_sums``), and go on to be."""
        slices = self.windows.slices
        if not slices.was_bad[rows].any():
            return np.zeros(len(rows), np.bool_)
        over = found.missed > found.allowed * np.maximum(found.counted, 1)
        goes_on: Bools = np.asarray(((over | found.lost) & found.valid).any(axis=0))
        return slices.are_broken(rows, goes_on, self.broken[rows])


class SignalRow:
    """One row of the table; its signal is worked out once for each change of the windows."""

    __slots__ = ("_known", "_table", "row")

    def __init__(self, table: SignalTable, row: int) -> None:
        self._table, self.row = table, row
        self._known: tuple[int, Signal] | None = None

    @property
    def last_piece_ns(self) -> int | None:
        """When the last piece came, whether or not it was of use."""
        last_ns = int(self._table.windows.last_ns[self.row])
        return None if last_ns == NEVER else last_ns

    def is_partial(self, now_ns: int) -> bool:
        """See ``WindowTable.is_partial``."""
        table = self._table
        rows = np.array([self.row])
        return bool(table.windows.is_partial(rows, rows, now_ns, table.settings.silent_s)[0])

    def spoke_since(self, since_ns: int) -> bool:
        """See ``WindowTable.spoke_since``."""
        return self._table.windows.spoke_since(self.row, since_ns)

    def breaks_slices(self) -> SliceFigures | None:
        """What its slices say, if they are broken, and go on to be; see ``slice_sums``."""
        return self._table.slice_figures(self.row)

    @property
    def is_excluded(self) -> bool:
        """Whether nothing is promised at present."""
        return bool(self._table.excluded[self.row])

    @property
    def idle(self) -> bool:
        """See ``WindowTable.idle``."""
        return bool(self._table.windows.idle(np.array([self.row]))[0])

    def reset(self) -> None:
        """Forget all windows: caps have changed."""
        self._table.reset(np.array([self.row]))

    def rest(self) -> None:
        """A pause has begun; see ``SignalTable.rest``."""
        self._table.rest(np.array([self.row]))

    def signal(self) -> Signal:
        """What the closed windows say."""
        version = int(self._table.windows.version[self.row])
        if self._known is None or self._known[0] != version:
            self._known = (version, signals_of(self._table.windows, np.array([self.row]))[0])
        return self._known[1]

    @property
    def is_known(self) -> bool:
        """Whether its signal is worked out and the windows have not changed since."""
        return self._known is not None and self._known[0] == int(self._table.windows.version[self.row])

    def know(self, signal: Signal) -> None:
        """Its signal, as ``SignalTable.work_out`` finds it."""
        self._known = (int(self._table.windows.version[self.row]), signal)
