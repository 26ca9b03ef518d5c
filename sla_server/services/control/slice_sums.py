"""The slice that goes on, and the one before, of what people see: whether both break the promise.

Windows see what lasts for seconds. What they cannot see breaks slices all the same: 1.33 % of failures where
1 % may fail (a window has one or none), or writes that are slow in one half of each slice (windows without a
read do not apply, the slice does). So the counts of the pieces are added up by slice as well. A promise is
broken *by slices* while the former slice was bad, this one is after half of its time, and what broke it goes
on: one of the last windows has more misses than may be, whatever the clauses say of that window alone. Once
it is shown as violated, the first half of a slice does not end that.

A slice whose first tenth was not seen is no proof: a stored one would have no data. That a stream completes
nothing is not in the sums: ``windows`` sees it. *Stuck* are I/Os that hang while others of their stream are
served: as many as are outstanding at most, of a latency those that became overdue in the slice, one at least.
With what failed they break a slice as failures do. They go on as long as some hang in the present slice.
Of a mean latency an I/O that is outstanding counts in each slice with its whole age, as in stored ones; the
pieces have what was added to it (``WindowTable.add_to_slices``), so its age so far goes into each new slice.

State, in arrays by row of the signal table: ``now`` and ``former``, of shape (figures, rows); when the
present slice began, from and until when it was seen (server's clock, as the cuts of gateways have it, us),
whether the former was bad, and how many I/Os count of it (``former_n``, infinite if not all of it was seen).
Changed only by the controller's one thread. Pure: no clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sla_server.services.control.pieces import MIX, Bools, Floats, Ints, Pieces, evenly, mix_of
from sla_server.services.control.promise_terms import PromiseTerms, arrays_of, copy_arrays

_UNSEEN: Final = -(1 << 62)
_UNSEEN_RATIO: Final = 0.1
"""As slices: less than nine tenths of one say nothing."""
_BY_STEP: Final = 3
"""Counted, missed and overdue have a figure for each step of the curve."""
_DONE, _FAILED, _OFFERED, _STUCK = range(4)
_REST: Final = 4 + MIX
"""Figures behind those, of the promise's kind: done, failed, offered, stuck; the mix (``pieces``)."""
_ROUNDING: Final = 1 + 1e-9


class SliceFigures(NamedTuple):
    """What slices say: misses / misses allowed, the step in force; the others as in ``Signal``.

    ``stuck``: I/Os that hang while others are served.
    """

    u: float
    threshold_us: int
    failed_ratio: float
    offered_iops: float
    stuck: int = 0


class SliceSums:
    """See the module. ``terms``: what the promise of each row asks; one without ``remember_us`` has none."""

    def __init__(self, terms: PromiseTerms) -> None:
        self._terms = terms
        self._make(len(terms.r_on))

    def _make(self, rows: int) -> None:
        self.now = np.zeros((_BY_STEP * self._terms.steps + _REST, rows))
        self.former = np.zeros_like(self.now)
        self.begin_us, self.from_us = np.full(rows, _UNSEEN), np.full(rows, _UNSEEN)
        self.until_us, self.was_bad = np.full(rows, _UNSEEN), np.zeros(rows, np.bool_)
        self.former_n = np.full(rows, np.inf)

    def grow(self) -> None:
        """The terms have more rows, or longer curves."""
        old, steps = arrays_of(self), (len(self.now) - _REST) // _BY_STEP
        self._make(len(self._terms.r_on))
        copy_arrays({name: value for name, value in old.items() if value.ndim == 1}, self)
        count = old["now"].shape[1]
        for name, into in (("now", self.now), ("former", self.former)):
            for part in range(_BY_STEP):
                first = part * self._terms.steps
                into[first : first + steps, :count] = old[name][part * steps : (part + 1) * steps]
            into[-_REST:, :count] = old[name][-_REST:]

    def forget(self, rows: Ints) -> None:
        """What was counted of them is of something else than what is promised now."""
        self.begin_us[rows] = self.from_us[rows] = self.until_us[rows] = _UNSEEN
        self.was_bad[rows], self.former_n[rows] = False, np.inf

    def rolls(self, rows: Ints, start_us: Ints) -> Ints:
        """Begin the slices of pieces that start then; those of the rows whose present slice is a new one."""
        length = self._terms.remember_us[rows].astype(np.int64)
        begin = start_us // np.maximum(length, 1) * length
        new = np.flatnonzero((begin > self.begin_us[rows]) & (length > 0))
        if not len(new):
            return rows[:0]
        found, first = np.unique(rows[new], return_index=True)
        begin, start_us, length = begin[new[first]], start_us[new[first]], length[new[first]]
        follows = self.begin_us[found] == begin - length
        late_us = self.from_us[found] - self.begin_us[found]
        is_whole = follows & (late_us <= _UNSEEN_RATIO * length)
        self.former[:, found] = self.now[:, found]
        n, is_bad = self._judged(self.former[:, found], found, length)
        self.was_bad[found] = is_whole & is_bad
        self.former_n[found] = np.where(is_whole, n, np.inf)
        self.now[:, found] = 0.0
        self.begin_us[found], self.from_us[found], self.until_us[found] = begin, start_us, start_us
        return found

    def carry(self, row: int, counted: Floats, missed: Floats) -> None:
        """I/Os outstanding at the beginning of a slice count in it; both of shape (steps,)."""
        steps = self._terms.steps
        self.now[:steps, row] += counted
        self.now[steps : 2 * steps, row] += missed

    def belong(self, rows: Ints, start_us: Ints) -> Bools:
        """Whether pieces of these rows that start then are of the present slice."""
        found: Bools = (start_us >= self.begin_us[rows]) & (self._terms.remember_us[rows] > 0)
        return found

    def add(self, rows: Ints, start_us: Ints, lines: Ints, pieces: Pieces, stuck: Floats) -> None:
        """Add pieces ``lines``, that start then, to their slices; ``rows`` may be named several times.

        ``stuck``: by how many the I/Os stuck of each are more than were known in its slice.
        """
        mine = np.flatnonzero(self.belong(rows, start_us))
        rows, lines = rows[mine], lines[mine]
        of = evenly(rows)
        compared = (part for each in (pieces.counted, pieces.missed, pieces.overdue) for part in each.T)
        done, failed, offered = pieces.done[lines], pieces.failed[lines], pieces.offered[lines]
        rest = done, failed, offered, stuck[mine], *mix_of(pieces, lines)
        of_several = len(rows) > 0 and bool((np.bincount(rows) > 1).any())  # gateways
        for into, part in zip(self.now, (*(each[lines] for each in compared), *rest), strict=True):
            if of_several:
                np.add.at(into, rows, part)
            else:
                into[of] += part
        self.until_us[of] = np.maximum(self.until_us[of], start_us[mine] + pieces.covered_us[lines])

    def are_broken(self, rows: Ints, goes_on: Bools, is_shown: Bools) -> Bools:
        """Whether promises are broken by slices, shape (rows,).

        Args:
            rows: which.
            goes_on: whether what broke them does, hangs aside.
            is_shown: whether they are shown as violated now: that ends with no slice, but in one.
        """
        found = self.was_bad[rows] & (goes_on | self._are_stuck(rows))
        at = np.flatnonzero(found)
        if len(at):
            rows = rows[at]
            span_us = self.until_us[rows] - self.begin_us[rows]
            is_late = span_us >= self._terms.remember_us[rows] / 2
            is_bad = self._judged(self.now[:, rows], rows, span_us)[1]
            found[at] = np.where(is_late, is_bad, is_shown[at])
        return found

    def figures(self, row: int) -> SliceFigures:
        """What both slices of a row that is broken by them say together."""
        rows, steps = np.array([row]), self._terms.steps
        sums = self.now[:, row] + self.former[:, row]
        span_us = self.until_us[rows] - self.begin_us[rows] + self._terms.remember_us[rows]
        offered = sums[_OFFERED - _REST] * 1e6 / span_us
        step = self._step(rows, offered)[0]
        counted, missed = sums[step[0]], sums[steps + step[0]]
        u = missed / max(counted, 1.0) / self._terms.allowed[row]
        failed_ratio = sums[_FAILED - _REST] / max(counted, 1.0)
        limit_us = int(self._terms.threshold_us[row, step[0]])
        stuck = int(self.now[_STUCK - _REST, row]) if self._are_stuck(rows)[0] else 0
        return SliceFigures(float(u), limit_us, float(failed_ratio), float(offered[0]), stuck)

    def _step(self, rows: Ints, offered: Floats) -> tuple[Ints, Bools]:
        """Of the demand curve, the last one above it; and whether demand is inside."""
        fits = offered[:, None] <= self._terms.up_to[rows]
        inside: Bools = np.asarray(fits.any(axis=1))
        last = (self._terms.up_to[rows] >= 0).sum(axis=1) - 1
        return np.where(inside, fits.argmax(axis=1), last), inside

    def _are_stuck(self, rows: Ints) -> Bools:
        """Whether some I/O hangs in the present slice, of promises for which that counts."""
        found: Bools = (self.now[_STUCK - _REST, rows] > 0) & ~self._terms.is_outage[rows]
        return found

    def _judged(self, sums: Floats, rows: Ints, span_us: Ints) -> tuple[Floats, Bools]:
        """As slices are judged (``agreements.slices``), but for streams that complete nothing.

        Args:
            sums: shape (figures, n).
            rows: of each.
            span_us: length of each.

        Returns:
            How many I/Os count, and whether the slice is bad; both of shape (n,).
        """
        terms, steps, every = self._terms, self._terms.steps, np.arange(len(rows))
        seconds = np.maximum(span_us, 1) / 1e6
        done, failed, offered, stuck = sums[-_REST:-MIX]
        completed, reads, size_bytes, sized = sums[-MIX:]
        step, inside = self._step(rows, offered / seconds)
        counted, missed, overdue = (sums[part * steps + step, every] for part in range(_BY_STEP))
        is_latency, is_rate = terms.percentile[rows] > 0, terms.is_rate[rows]
        left_out = np.maximum(done - sized, 0.0) * terms.excludes[rows]
        n = np.where(is_latency & ~inside, done, counted)
        n = np.where(is_rate, np.maximum(done - left_out, offered), n)
        stuck = np.where(is_latency & (stuck > 0), np.maximum(overdue * inside, 1.0), stuck)
        lost = failed + stuck * ~terms.is_outage[rows]
        is_lost = lost > terms.most_failed[rows] * _ROUNDING * np.maximum(n, lost)
        applies = inside & (n >= terms.least_iops[rows] * seconds)
        applies &= reads >= terms.least_reads[rows] * completed
        applies &= ~(size_bytes > terms.most_bytes[rows] * np.maximum(sized, 1.0))
        is_slow = applies & (missed > terms.allowed[rows] * _ROUNDING * counted) & (counted > 0)
        return n, is_lost | is_slow
