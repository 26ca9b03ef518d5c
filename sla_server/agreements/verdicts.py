"""Judging many slices at once: columns of counts in, columns of verdicts out. ``slices`` says what they mean.

Theory of operation. A ``SlotTable`` has a row for each stream in each rollup slot of one read. A *pair* is a
slice to judge and one of its rows; pairs come ordered by slice, stream and slot, so a sum over a slice is a
difference of two cumulative sums. Each question of SLA-MODEL.md 2 is one expression over all pairs, or over
all slices. Only what is rare (limits that were not counted, means of one kind) looks into histograms, which
stay sparse.

Steps of a demand curve. An I/O counts in the slice in which it is first seen beyond the step in force there.
One that crosses the end of a slice may meet another step behind it. With lo < hi the steps of the two slices,
those beyond lo but not yet hi at the border ("in the band") were counted before it if the step there was lo,
and were not if it was hi. How many of them left the band in this slice follows from what lo and hi say of it:

    left = (settled - overdue) of lo - (settled - overdue) of hi

That is a difference: those in the band at the slice's own end hide as many that left; of them there are at
most as many as came beyond lo in it, and as were outstanding at the end of some cut. The slice before bounds
those of its beginning in the same way. Those whose client left from within the band are in none of the terms.
Where the bounds do not meet, the slice is inexact, and the worst of what is possible is taken. From hi to lo
all that were in the band are missed here: they are added, as lo's ``settled`` takes them off. From lo to hi
they are taken off n, and off the missed ones unless they completed in time for hi; how many did may be known
only as a range, too.

What an agent does not tell. One of before these entries says nothing of what waits or was refused. Where such
a stream has arrivals without a completion, or failures of nothing that completed, few I/Os are no proof of
little demand: the slice has no data.

Outstanding I/O of a kind. Agents tell reads from writes; what agents of before say is of all kinds together,
flush and trim, too ("kindless"). For a promise of one kind it counts unless that kind completed and its
counted limits show none overdue. What rests on it is inexact.

Pure; no shape depends on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_ANY
from sla_server.agreements.rules import (
    AVAILABILITY,
    IOPS,
    LATENCY,
    MEAN,
    THROUGHPUT,
    Failures,
    Params,
    Rule,
    offered,
)
from sla_server.agreements.slot_table import (
    SLOT_COLUMNS,
    Bools,
    Floats,
    Ints,
    SlotTable,
    added,
    float_sums,
    of_kind,
)

MIN_COVERAGE_RATIO: Final = 0.9
MOST_COVERAGE_RATIO: Final = 1.5
"""Above this the slice was filled twice: a clock went back."""
DELIVERED_RATIO: Final = 0.98
"""Of what was promised or asked for, the smaller: I/Os under way at a slice's ends are not a shortfall."""
SPREAD_SLACK: Final = 8
"""I/Os that rounding may part the counts of shared-out cuts by: one for each of a few cuts in a slot."""
_UNKNOWN: Final = 1 << 40  # I/Os: more than there are, and sums of many fit int64


@dataclass(frozen=True, slots=True)
class DueSlices:
    """Slices to judge, n of them, and their rows.

    Attributes:
        rules: of each.
        length_us: shape (n,).
        is_excluded: shape (n,).
        covered_us: of the worst observed source in scope, shape (n,).
        most_covered_us: of the best, shape (n,).
        before_us: threshold in force in the slice before, -1: none, or not known; shape (n,).
        pair_slice: index of each pair's slice, rising, shape (pairs,).
        pair_row: row of each pair.
        pair_stream: number of each pair's stream; pairs of a slice are ordered by it.
        pair_is_beside: whether each pair's stream is of a source that knows completions only, also one with
            histograms (drives of QEMU); None: only streams without histograms are.
        before: the same three of the slots of the slice before, for slices with a step in ``before_us``;
            None if they are not known.
    """

    rules: Sequence[Rule]
    length_us: Ints
    is_excluded: Bools
    covered_us: Ints
    most_covered_us: Ints
    before_us: Ints
    pair_slice: Ints
    pair_row: Ints
    pair_stream: Ints
    before: tuple[Ints, Ints, Ints] | None = None
    pair_is_beside: Bools | None = None


@dataclass(slots=True)
class Verdicts:
    """As ``slices.SliceVerdict``, in columns of shape (n,); None: ``threshold_us`` -1, ``measured`` NaN."""

    state: npt.NDArray[np.str_]
    n: Ints
    missed: Ints
    offered_iops: Floats
    threshold_us: Ints
    coverage_ratio: Floats
    inexact: Bools
    reason: npt.NDArray[np.str_]
    measured: Floats
    failed: Ints


def judge_slices(table: SlotTable, due: DueSlices) -> Verdicts:
    """Judge them all."""
    return _Judging(table, due).verdicts()


class _Judging:
    """One call of ``judge_slices``: pairs' columns, made one from another, then those of slices."""

    def __init__(self, table: SlotTable, due: DueSlices) -> None:
        self._table, self._due = table, due
        self._size = len(due.rules)
        self._params = params = Params(due.rules)
        self._row, self._of = due.pair_row, due.pair_slice
        changes = (self._of[1:] != self._of[:-1]) | (due.pair_stream[1:] != due.pair_stream[:-1])
        self._starts = np.flatnonzero(np.append(True, changes)) if len(self._of) else self._of
        self._io = io = params.io[self._of]
        self._metric = params.metric[self._of]
        self._errors_count = params.counts_errors[self._of]
        c = {name: table.columns[name][self._row] for name in SLOT_COLUMNS}
        self._c = c
        failures = Failures(c, io)
        self._both, self._done = failures.both, failures.done
        self._bytes = of_kind(io, c["read_bytes"], c["write_bytes"])
        self._tells, self._unknown = failures.is_told, failures.unknown
        waits = (c["arrived"] > self._both) | ((self._done == 0) & (c["outstanding"] > 0))
        self._is_untold = ~self._tells & (waits | (self._unknown > self._both))
        self._failures, self._failed = failures.every, failures.of_done
        read_hist, write_hist = (of[self._row] for of in table.in_hist)
        self._in_hist = of_kind(io, read_hist, write_hist)
        self._is_beside = (self._both > 0) & (read_hist + write_hist == 0)
        self._is_unwatched = self._is_beside
        if due.pair_is_beside is not None:
            self._is_unwatched = self._is_beside | (due.pair_is_beside & (self._both > 0))
        self._wait()
        asked = offered(table, params, self._of, self._row, self._failed)
        self.offered = asked * 1e6 / due.length_us
        self.threshold_us = params.threshold_us(self.offered)
        # What is excluded is in no figure; a percentile's own counts say what that is.
        is_latency = self._metric == LATENCY
        self._left_out = np.where(self._errors_count | is_latency, 0, self._failed)
        self.n = self._sum(self._done - self._left_out)
        self.missed = self._sum(np.where(self._errors_count & ~is_latency, self._failures, 0))
        self.inexact = self._any((c["spread_us"] > 0) | (self._errors_count & (self._unknown > 0)))
        self.is_measurable = np.ones(self._size, dtype=np.bool_)
        self.fault = np.full(self._size, "", dtype="<U16")
        self.measured = np.full(self._size, np.nan)
        self._stuck()
        for metric, find in (
            (LATENCY, self._find_percentile),
            (MEAN, self._find_mean),
            (IOPS, self._find_rate),
            (AVAILABILITY, self._find_availability),
        ):
            kinds = (metric, THROUGHPUT) if metric == IOPS else (metric,)
            if np.isin(params.metric, kinds).any():
                find(np.isin(params.metric, kinds))

    def _sum(self, values: Ints) -> Ints:
        return added(self._of, values.astype(np.int64), self._size)

    def _any(self, flags: Bools) -> Bools:
        found = np.zeros(self._size, dtype=np.bool_)
        found[self._of[flags]] = True
        return found

    # -- What was outstanding

    def _wait(self) -> None:
        """Ages (us) that concern the promised kind: the longest stall, and the oldest outstanding I/O."""
        c, io, row = self._c, self._io, self._row
        by_kind = ("oldest_read_ms", "stalled_read_ms", "oldest_write_ms", "stalled_write_ms")
        kindless = ("kindless_oldest_ms", "kindless_stalled_ms")
        said = np.bitwise_or.reduce([c[name] for name in (*by_kind, *kindless)])
        # Stored before kinds were reported: what is known is of all kinds together.
        oldest, stalled = (
            np.where(said > 0, c[name], c[whole])
            for name, whole in zip(kindless, ("oldest_ms", "stalled_ms"), strict=True)
        )
        # An agent that says nothing of stalls shows I/O in flight all the time, and that none came or went.
        # (Of one that does it is flush or trim, which concerns no promise.)
        is_silent = ~(self._tells | (said > 0)) & (c["arrived"] == 0) & (self._both == 0)
        is_silent &= c["outstanding"] > 0
        stalled = np.maximum(stalled, np.where(is_silent, c["covered_us"] // 1000, 0))
        counted, passed = self._table.overdue_of
        place = row * 4 + io
        concerns = (io == IO_ANY) | (self._done == 0) | ~counted[place] | passed[place]
        self._kindless_oldest_us = np.where(concerns, oldest, 0) * 1000
        self._kindless_stalled_us = np.where(concerns, stalled, 0) * 1000
        own_oldest, own_stalled = (
            np.choose(io, [c[name] for name in names])
            for names in (
                ("oldest_ms", "oldest_read_ms", "oldest_write_ms"),
                ("stalled_ms", "stalled_read_ms", "stalled_write_ms"),
            )
        )
        self._own_oldest_us = own_oldest * 1000
        self._oldest_us = np.maximum(self._own_oldest_us, self._kindless_oldest_us)
        self._stalled_us = np.maximum(own_stalled * 1000, self._kindless_stalled_us)
        self._is_known_to_wait = np.bitwise_or.reduce([c[name] for name in by_kind]) > 0

    def _stuck(self) -> None:
        """Hangs: of all I/O (a stall), and of some while others complete (stuck)."""
        hung_us = np.maximum(self._params.hung_us, 0)[self._of]
        self.is_hung = self._any(self._stalled_us >= hung_us)
        sure = np.where(self._metric == AVAILABILITY, False, self._oldest_us >= hung_us)
        self._is_stuck = sure
        self.is_stuck = self._any(sure)
        kindless = (self._kindless_stalled_us >= hung_us) | (sure & (self._kindless_oldest_us >= hung_us))
        self.inexact |= self._any(kindless)
        # How many are stuck: of a latency those that became overdue; else no limit was counted, so all of
        # them.
        outstanding = np.where(sure & (self._metric != LATENCY), np.maximum(self._c["outstanding"], 1), 0)
        most = np.zeros_like(outstanding)  # of each stream once, however many slots it hangs through
        most[self._starts] = np.maximum.reduceat(outstanding, self._starts) if len(most) else 0
        self.stuck = np.maximum(self._sum(most), self.is_stuck)

    # -- What each indicator measures

    def _find_percentile(self, mine: Bools) -> None:
        at = np.flatnonzero(mine[self._of] & (self.threshold_us >= 0)[self._of])
        of, row, io, done = self._of[at], self._row[at], self._io[at], self._done[at]
        limit_us = self.threshold_us[of]
        counts, is_there = self._table.counts(row, io, limit_us)
        errors_count = self._errors_count[at]
        c = {name: self._c[name][at] for name in ("covered_us", "outstanding")}
        beyond = counts["overdue"] - counts["settled"]
        lost = added(of, np.maximum(beyond, 0), self._size)
        oldest_us = self._oldest_us[at]
        # Nothing completed and nothing was compared: exact only if nothing has waited for longer than the
        # limit. # (One older than the slot was overdue in a slot before.)
        began_us = np.where(self._own_oldest_us[at] < c["covered_us"], self._own_oldest_us[at], 0)
        uncounted = ~is_there & (done == 0) & (began_us > limit_us)
        spread = (self._c["spread_us"][at] > 0) & (counts["counted"] >= done - SPREAD_SLACK)
        is_exact = ((counts["counted"] == done) | (is_there & spread)) & ~uncounted
        missed, failed = counts["missed"], counts["failed"]
        failed_missed = counts["failed_missed"]
        both, both_sure = counts["settled_failed"], counts["settled_failed_sure"]
        # Of failures of unknown kind: which of them were slow is not known. None of them, so each adds one.
        extra = np.where(self._unknown[at] > 0, np.maximum(self._failures[at] - failed, 0), 0)
        extra = np.where(errors_count, np.minimum(extra, np.maximum(done - missed, 0)), extra)
        rough = np.flatnonzero(~is_exact)
        inexact = (is_exact & (extra > 0)) | ~is_exact | (~errors_count & (both != both_sure))
        failed = failed + extra
        is_blind = np.zeros(len(at), dtype=np.bool_)
        if len(rough):
            in_hist = self._in_hist[at][rough]
            slower = self._table.slower(row[rough], io[rough], limit_us[rough])
            missed = missed.copy()
            missed[rough] = np.minimum(done[rough], slower + np.maximum(done[rough] - in_hist, 0))
            failures = self._failures[at][rough]
            failed[rough] = np.where(
                errors_count[rough], np.minimum(failures, done[rough] - missed[rough]), failures
            )
            failed_missed, both = failed_missed.copy(), both.copy()
            failed_missed[rough] = both[rough] = 0
            waits = oldest_us[rough] > limit_us[rough]
            most = np.maximum(beyond[rough], np.maximum(c["outstanding"][rough], 1))
            beyond[rough] = np.where(waits, most, beyond[rough])
            is_blind[rough] = (in_hist == 0) & (counts["counted"][rough] == 0) & ~uncounted[rough]
        self.is_measurable[of[is_blind]] = False
        self.inexact[of[inexact & ~is_blind]] = True
        slow = missed + beyond - failed_missed + np.where(errors_count, failed, both)
        more = beyond + np.where(errors_count, 0, both - failed)
        self.missed += added(of, np.where(is_blind, 0, slow), self._size)
        self.n += added(of, np.where(is_blind, 0, more), self._size)
        self._carry(at)
        np.maximum(self.missed, 0, out=self.missed)
        np.maximum(self.n, self.missed, out=self.n, where=mine & (self.threshold_us >= 0))
        is_slow = self.missed * 1_000_000 > self._params.allowed_parts * self.n
        self.fault[mine & is_slow & (self.threshold_us >= 0)] = "slow"
        self.stuck = np.where(mine & self.is_stuck, np.maximum(lost, 1), self.stuck)

    def _carry(self, at: Ints) -> None:
        """I/Os that crossed the beginning of a slice whose step is not that of the slice before."""
        before_us = self._due.before_us[self._of[at]]
        now_us = self.threshold_us[self._of[at]]
        at = at[(before_us >= 0) & (before_us != now_us)]
        if not len(at):
            return
        of, row, io = self._of[at], self._row[at], self._io[at]
        now_us, before_us = self.threshold_us[of], self._due.before_us[of]
        low, has_low = self._table.counts(row, io, np.minimum(now_us, before_us))
        high, has_high = self._table.counts(row, io, np.maximum(now_us, before_us))
        stream = self._due.pair_stream[at]
        starts = np.flatnonzero(np.append(True, (of[1:] != of[:-1]) | (stream[1:] != stream[:-1])))
        total = partial(np.add.reduceat, indices=starts)
        left = np.maximum(total((low["settled"] - low["overdue"]) - (high["settled"] - high["overdue"])), 0)
        # Those that may have come into the band, and be in it at the end; those whose client left.
        came = np.minimum(total(low["overdue"]), np.maximum.reduceat(self._c["outstanding"][at], starts))
        gone = total(self._table.abandoned(row, io)[0])
        of, is_stricter = of[starts], (now_us < before_us)[starts]
        most = left + came + np.where(is_stricter, gone, 0)
        most = np.maximum(np.minimum(most, self._most_before(of, stream[starts])), left)
        # Of those that were counted before: which were in time for this step, and which are in no n here.
        in_time = np.minimum(total(low["missed"] - high["missed"]), total(low["settled"] - high["settled"]))
        failed = total(low["settled_failed"])
        slow = total(high["missed"] + high["overdue"] - high["settled"])
        slow += total(low["failed_missed"] - high["failed_missed"])
        least_off = np.maximum(np.maximum(left - failed, 0) - np.maximum(in_time, 0), 0)
        most_off = np.minimum(most, np.maximum(slow, 0))
        self.missed += added(of, np.where(is_stricter, most, -least_off), self._size)
        self.n += added(of, np.where(is_stricter, most, -most), self._size)
        is_unsure = most > left
        # One that fails in the first cut is left out, if failures are; else it was missed at either step.
        is_unsure |= (failed > 0) & (most > 0) & ~(is_stricter & self._params.counts_errors[of])
        is_unsure |= ~is_stricter & (least_off < most_off)
        is_unsure |= np.logical_or.reduceat(has_low != has_high, starts)
        self.inexact[of[is_unsure]] = True

    def _most_before(self, of: Ints, stream: Ints) -> Ints:
        """I/Os that may have been in the band at the beginning of slices, by the slots before it.

        Args:
            of: index of each slice.
            stream: of it; together they rise.
        """
        if self._due.before is None:
            return np.full(len(of), _UNKNOWN)
        slice_, row, number = self._due.before
        place = np.searchsorted((of << 32) | stream, (slice_ << 32) | number)
        inside = np.minimum(place, len(of) - 1)
        is_there = (of[inside] == slice_) & (stream[inside] == number)
        slice_, row, place = slice_[is_there], row[is_there], inside[is_there]
        limit_us = np.minimum(self.threshold_us[slice_], self._due.before_us[slice_])
        columns = self._table.columns
        counts, is_counted = self._table.counts(row, self._params.io[slice_], limit_us)
        is_unknown = ~is_counted & (columns["reads"][row] + columns["writes"][row] > 0)
        came = added(place, np.where(is_unknown, _UNKNOWN, counts["overdue"]), len(of))
        waited = np.zeros(len(of), dtype=np.int64)
        np.maximum.at(waited, place, np.where(is_unknown, _UNKNOWN, columns["outstanding"][row]))
        return np.minimum(came, waited)

    def _find_mean(self, mine: Bools) -> None:
        at = np.flatnonzero(mine[self._of])
        of, row, io, done = self._of[at], self._row[at], self._io[at], self._done[at]
        total = self._c["lat_sum_us"][at].astype(np.float64)
        is_all = done == self._both[at]
        is_part = ~is_all & (done > 0) & ~self._is_beside[at]
        if is_part.any():
            total[is_part] = np.minimum(total[is_part], self._table.upper_sum_us(row[is_part], io[is_part]))
            self.inexact[of[is_part]] = True
        # The kernel counts a control group's I/Os, and times none.
        is_untimed = self._is_beside[at] & (total == 0)
        is_blind = (~is_all & ~is_part) | is_untimed
        self.is_measurable[of[is_blind & (done > 0)]] = False
        total[is_blind] = 0.0
        limit_us, oldest_us = self.threshold_us[of], self._oldest_us[at]
        fails = np.flatnonzero(self._left_out[at])
        if len(fails):
            # The histogram holds what failed, too: the others took at most this.
            kept, gone = (done - self._left_out[at])[fails], self._left_out[at][fails]
            most = self._table.most_us(row[fails], io[fails], kept, gone, limit_us[fails])
            least = self._table.least_us(row[fails], io[fails], gone)
            total[fails] = np.minimum(most, np.maximum(total[fails] - least, 0))
            self.inexact[of[fails]] = True
        # What its client gave up has taken at least its age; left out where it would make the mean better.
        ended, ages_us = self._table.abandoned(row, io)
        more = np.where((limit_us >= 0) & (ages_us > limit_us * ended), ended, 0)
        total += np.where(more > 0, ages_us, 0)
        # So has one that waits for longer than the limit and is in no histogram.
        waits = self._waiting_longest(at, np.where(limit_us >= 0, np.maximum(limit_us, ages_us), _UNKNOWN))
        if len(waits):
            outstanding = np.maximum(self._c["outstanding"][at][waits], 1)
            many = np.where(self._is_stuck[at][waits], outstanding, 1)
            more[waits] += many
            total[waits] += many * oldest_us[waits]
            self.inexact[of[waits[many > 1]]] = True
        sums = float_sums(of, total, self._size)
        self.n += added(of, more, self._size)
        known = mine & (self.n > 0) & self.is_measurable
        self.measured[known] = sums[known] / self.n[known]
        self.fault[known & (self.threshold_us >= 0) & (sums > self.threshold_us * self.n)] = "slow"

    def _waiting_longest(self, at: Ints, least_us: Ints) -> Ints:
        """Which of some pairs have an I/O that waits for longer than ``least_us``: one a stream of a slice.

        The last one that it waits in, where it is oldest; none if an I/O that took as long has completed.
        """
        oldest_us = np.where(self._oldest_us[at] > least_us, self._oldest_us[at], 0)
        if not oldest_us.any():
            return at[:0]
        run = np.cumsum(np.isin(at, self._starts)) - 1
        starts = np.flatnonzero(np.diff(run, prepend=-1))
        longest_us = np.maximum.reduceat(oldest_us, starts)[run]
        slower = self._table.slower(self._row[at], self._io[at], longest_us)
        has_ended = np.add.reduceat(slower, starts)[run] > 0
        is_longest = (oldest_us == longest_us) & (oldest_us > 0) & ~has_ended
        place = np.where(is_longest, np.arange(len(at)), -1)
        found: Ints = np.unique(np.maximum.reduceat(place, starts))
        return found[found >= 0]

    def _find_rate(self, mine: Bools) -> None:
        """IOPS and throughput: what was delivered, of what was promised or asked for."""
        served, size = self._sum(self._done - self._failed), self._sum(self._bytes)
        wanted = np.maximum(float_sums(self._of, self._asked() - self._left_out, self._size), 0.0)
        is_bytes = self._params.metric == THROUGHPUT
        # Bytes are counted of what succeeded.
        unit = np.where(is_bytes, size / np.maximum(served, 1), 1.0)
        per_s = 1e6 / self._due.length_us
        delivered, demand = served * unit * per_s, wanted * unit * per_s
        promised = self._params.promised
        # Nothing was served, so sizes are not known: what was asked for may have been all that is promised.
        demand = np.where(is_bytes & (served == 0) & (wanted > 0), promised, demand)
        is_below = delivered < DELIVERED_RATIO * np.minimum(promised, demand)
        # Beside the I/O path demand is not known: what was not served may have been asked for.
        unclear = ~is_below & (delivered < promised) & self._any(self._is_unwatched)
        self.n = np.where(mine, np.maximum(self.n, np.rint(wanted).astype(np.int64)), self.n)
        self.measured = np.where(mine, delivered, self.measured)
        self.fault[mine & is_below] = "below"
        self.is_measurable &= ~(mine & unclear)

    def _asked(self) -> Floats:
        """I/Os of the promised kind that arrived, or that their clients gave up."""
        c, io, done = self._c, self._io, self._done
        arrived = c["arrived"].astype(np.float64)
        ended, _ = self._table.abandoned(self._row, io)
        every, _ = self._table.abandoned(self._row, np.zeros_like(io))
        found = self._table.arrivals(self._row, io)
        found = np.maximum(found, np.where(every > 0, done + ended, 0))
        # Of agents that do not tell what was given up: those not in flight at the end of a cut.
        gone = np.maximum(c["arrived"] - self._both - c["outstanding"], 0)
        found = np.where((done == 0) & (every == 0) & ~self._is_known_to_wait, gone, found)
        return np.where(io == IO_ANY, arrived, found)

    def _find_availability(self, mine: Bools) -> None:
        longest = np.zeros(self._size, dtype=np.int64)
        np.maximum.at(longest, self._of, self._stalled_us)
        self.measured = np.where(mine, longest, self.measured)
        self.is_measurable &= ~(mine & self._any(self._is_unwatched))

    # -- The questions, in their order

    def verdicts(self) -> Verdicts:
        due, params, size = self._due, self._params, self._size
        coverage = np.minimum(due.covered_us, due.length_us) / due.length_us
        inexact = self.inexact | (due.most_covered_us > MOST_COVERAGE_RATIO * due.length_us)
        lost = self._lost()
        inapplicable = self._inapplicable()
        nothing = np.full(size, "", dtype="<U16")
        thin = coverage < MIN_COVERAGE_RATIO
        blind = ~self.is_measurable & (self.fault == "")
        untold = (inapplicable == "few-ios") & self._any(self._is_untold)
        cases = [due.is_excluded, thin, lost != "", blind, untold, inapplicable != "", self.fault != ""]
        states = ["excluded", "no_data", "bad", "no_data", "no_data", "not_applicable", "bad"]
        state = np.select(cases, states, "good")
        reason = np.select(
            cases,
            [
                nothing,
                np.full(size, "no-samples"),
                lost,
                np.full(size, "not-measurable"),
                np.full(size, "not-told"),
                inapplicable,
                self.fault,
            ],
            nothing,
        )
        threshold_us = np.where(params.has_curve, self.threshold_us, -1)
        failed = self._sum(self._failures)
        figures = (state, self.n, self.missed, self.offered, threshold_us, coverage, inexact, reason)
        return Verdicts(*figures, self.measured, failed)

    def _lost(self) -> npt.NDArray[np.str_]:
        """Whether I/O hung, or failed too often: no clause excuses that. A reason, or nothing."""
        failed = np.where(self._params.counts_errors, self._sum(self._failures), 0)
        stuck = np.where(self.is_stuck, self.stuck, 0)
        lost = failed + stuck
        is_over = lost * 1_000_000 > self._params.allowed_parts * np.maximum(self.n, lost)
        return np.select(
            [self.is_hung, is_over & (failed >= stuck), is_over], ["hung", "failed", "hung"], ""
        ).astype("<U16")

    def _inapplicable(self) -> npt.NDArray[np.str_]:
        """The clause that fails, a reason; or nothing."""
        params, c = self._params, self._c
        # Also of these what is excluded is no part.
        reads, writes = (
            self._sum(c[kind] - np.where(self._errors_count, 0, np.minimum(c[f"failed_{kind}"], c[kind])))
            for kind in ("reads", "writes")
        )
        served, size = self._sum(self._done - self._failed), self._sum(self._bytes)
        is_large = np.zeros(self._size, dtype=np.bool_)
        finite = np.isfinite(params.max_mean_bytes)
        is_large[finite] = size[finite] > params.max_mean_bytes[finite] * served[finite]
        return np.select(
            [
                params.has_curve & (self.threshold_us < 0),
                self.n < params.min_ios,
                reads < params.min_read_ratio * (reads + writes),
                is_large,
            ],
            ["above-curve", "few-ios", "read-share", "io-size"],
            "",
        ).astype("<U16")
