"""What the missed entries of a batch of cuts say: of rows, and of the lines of promises (``wire.cut``).

Completions are in the entries of kinds 0 to 2; OVERDUE, FAILED and OUTSTANDING say what these do not show.
OUTSTANDING comes for reads and writes together, and of newer agents for each: of a promise about one kind its
own entry counts where the row has one of either kind, else that of both, which of older agents has flush and
trim in it, too.

A threshold that no entry names was not compared. Where I/Os completed, the histogram answers instead; where
none did, an I/O that has passed the threshold in this cut while no entry says so counts as missed, with all
that are outstanding of its stream: pessimistic, and ``inexact``.

Shapes: rows of a batch side by side (rows,), lines (lines,), steps of their curves (lines, steps). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import FAILED, IO_WRITE, OUTSTANDING, OVERDUE, Cut
from pmdaemon.wire.histogram import BUCKETS, EDGES_NS
from sla_server.services.control.pieces import Bools, Floats, Ints

NO_LINE: Final = -1
_EVERY: Final = np.arange(BUCKETS)
UNSURE_US: Final = 50_000.0
"""Ages are whole milliseconds, and planes of one cut are asked within milliseconds: nearer to the beginning
or end of a cut it is not sure that a threshold was passed in it."""


@dataclass(slots=True)
class LineSums:
    """What is worked out of completions for each line, before the entries; see ``Compared``.

    Attributes:
        io: kind the promise is about, shape (lines,); threshold_us: 0 for none, shape (lines, steps).
        done: completions of that kind; hist: their latencies, in the buckets ``used``.
        errors: completions with an error, of a gateway that says no more of them; else 0.
        excludes: lines in which an I/O that failed does not count at all.
    """

    io: Ints
    threshold_us: Floats
    done: Floats
    hist: npt.NDArray[np.int32]
    errors: Floats
    excludes: Bools
    used: slice


@dataclass(slots=True)
class Pairs:
    """Rows of a batch in the scope of a line, shape (pairs,).

    Attributes:
        row, line: of each pair.
        waiting: reads and writes of the row outstanding at the end; covered_us: duration of its cut.
    """

    row: Ints
    line: Ints
    waiting: Floats
    covered_us: Floats


@dataclass(slots=True)
class Compared:
    """I/Os of each line against its thresholds; shapes (lines,) and (lines, steps).

    Attributes:
        counted: compared with each threshold, the n of SLA-MODEL.md 2; missed: of them slower, or failed.
        overdue: of both, those outstanding that passed the threshold, less those that had and completed.
        failed: how many of ``missed`` are there because they failed, at whatever speed.
        errors: I/Os that failed, and clients that were refused, whether or not that counts.
        oldest_us: age of the oldest I/O outstanding at the end; silence_us: longest time without completion.
        abandoned: I/Os whose clients left before they completed; abandoned_us: how old they were in all.
        failed_reads, failed_writes: as far as their agents tell kinds, of lines in which they do not count.
    """

    counted: Floats
    missed: Floats
    overdue: Floats
    inexact: Bools
    failed: Floats
    errors: Floats
    abandoned: Floats
    abandoned_us: Floats
    oldest_us: Floats
    silence_us: Floats
    failed_reads: Floats
    failed_writes: Floats


class MissedEntries:
    """Entries of a batch; ``row_start``: where the rows of each cut begin; ``rows``: how many there are."""

    def __init__(self, cuts: Sequence[Cut], row_start: Ints, rows: int) -> None:
        lens = np.array([len(cut.missed) for cut in cuts])
        # {u16 row, u16 io, u32 threshold_us, u32 counted, u32 missed}
        joined = np.frombuffer(b"".join([cut.missed.tobytes() for cut in cuts]), "<u4")
        self._entries = joined.reshape(-1, 4).astype(np.int64)
        self._row = (self._entries[:, 0] & 0xFFFF) + np.repeat(row_start, lens)
        self._word = self._entries[:, 0] >> 16
        self._special = np.flatnonzero(self._word > IO_WRITE)
        self.most = int(self._word.max()) if len(self._word) else 0
        """Highest kind of an entry."""
        self._rows = rows
        self.oldest_us, self.silence_us = np.zeros((3, rows)), np.zeros((3, rows))
        """Of reads and writes, reads, writes outstanding, as the entries say; shape (3, rows)."""
        self._tells_kinds = np.zeros(rows, np.bool_)
        if len(self._special):
            self._read_outstanding()

    def _read_outstanding(self) -> None:
        at = self._special[self._word[self._special] >= OUTSTANDING]
        if not len(at):
            return
        kind, row = self._word[at] - OUTSTANDING, self._row[at]
        cell = kind * self._rows + row  # one index: with two it takes ten times as long
        for into, column in ((self.oldest_us, 2), (self.silence_us, 3)):
            np.maximum.at(into.reshape(-1), cell, self._entries[at, column] * 1000.0)
        both = np.ones(self._rows, np.bool_)
        both[row[kind > 0]] = False
        self._tells_kinds = ~both
        for into in (self.oldest_us, self.silence_us):
            into[1:, both] = into[0, both]

    def failed(self, says_more: Bools) -> Ints:
        """Reads and writes that failed, by row, of agents that say it; ``says_more``: by row."""
        word, limit = self._word[self._special], self._entries[self._special, 1]
        at = self._special[(word > FAILED) & (word <= FAILED + IO_WRITE) & (limit == 0)]
        counts = np.bincount(self._row[at], weights=self._entries[at, 2], minlength=self._rows)
        return counts.astype(np.int64) * says_more

    def arrivals(self, arrived: Ints, reads: Ints, writes: Ints) -> Floats:
        """Reads and writes that arrived, reads, and writes, by row: shape (3, rows).

        Arrivals are not counted by kind. What did not end waits, and is shared out by how long the kinds do,
        as slices do it (``slot_table.arrivals``): many gather of one that hangs, few of one that is served.
        Where nothing says what waits, all are shared out as what ended.

        Args:
            arrived: reads and writes together, shape (rows,).
            reads: that completed; writes: likewise.
            writes: see there.
        """
        at = self._special[(self._word[self._special] & ~3) == OVERDUE]
        at = at[self._entries[at, 1] == 0]
        cell = (self._word[at] & 3) * self._rows + self._row[at]
        gone = np.bincount(cell, self._entries[at, 2], 3 * self._rows).reshape(3, self._rows)
        ended, all_ended = np.stack((reads, writes)) + gone[1:], reads + writes + gone[0]
        waits_us = np.maximum(self.oldest_us, self.silence_us)[1:] * self._tells_kinds
        all_wait_us, left = waits_us.sum(axis=0), arrived - all_ended
        by_wait = ended + left * (waits_us / np.maximum(all_wait_us, 1.0))
        by_end = arrived * (ended / np.maximum(all_ended, 1.0))
        found = np.where((left >= 0) & (all_wait_us > 0), by_wait, by_end)
        found = np.where((all_ended == 0) & (all_wait_us == 0), arrived, found)
        return np.concatenate((arrived[None], found))

    def compare(self, finder: Lines, sums: LineSums, pairs: Pairs) -> Compared:
        """What the entries say of each line, whatever their kind."""
        total, steps = sums.threshold_us.shape
        chosen, line = finder.of(self._row)
        entries, row, word = self._entries, self._row, self._word
        if chosen is not None:
            entries, row, word = entries[chosen], row[chosen], word[chosen]
        missed, compared = np.zeros((total, steps)), np.zeros((total, steps))
        own = np.flatnonzero(word == sums.io[line])
        for step in range(steps):
            found = own[entries[own, 1] == sums.threshold_us[line[own], step]]
            of = line[found]
            compared[:, step] = np.bincount(of, weights=entries[found, 2], minlength=total)
            missed[:, step] = np.bincount(of, weights=entries[found, 3], minlength=total)
        guessed = (compared != sums.done[:, None]) & (sums.threshold_us > 0)
        if guessed.any():
            # Not counted for this threshold: pessimistic, a bucket counts unless it lies wholly below.
            at, which = np.nonzero(guessed)
            bucket = np.searchsorted(EDGES_NS, sums.threshold_us[at, which] * 1000, side="right") - 1
            is_slow = np.maximum(bucket, 0)[:, None] <= _EVERY[sums.used]
            missed[at, which] = (sums.hist[at] * is_slow).sum(axis=1)
        counted: Floats = np.repeat(sums.done[:, None], steps, axis=1)
        overdue = np.zeros_like(missed)
        result = Compared(counted, missed, overdue, guessed.any(axis=1), *np.zeros((8, total)))
        special = np.flatnonzero(word > IO_WRITE)
        oldest_us = np.zeros(0)
        if len(special):
            kind = sums.io[pairs.line]
            oldest_us = self.oldest_us[kind, pairs.row]
            np.maximum.at(result.oldest_us, pairs.line, oldest_us)
            np.maximum.at(result.silence_us, pairs.line, self.silence_us[kind, pairs.row])
        if len(special) or sums.errors.any():
            _add_unseen(result, entries[special], line[special], sums)
        if len(special):
            self._add_uncompared(result, finder, sums, pairs, oldest_us)
        return result

    def served_slower(
        self, finder: Lines, io: Ints, threshold_us: Floats, done: Floats, failed: Floats
    ) -> Floats:
        """Completions without an error that took longer than each threshold; NaN where that is not counted.

        Args:
            finder: of the lines.
            io: kind each is about, shape (lines,).
            threshold_us: 0 for none, shape (lines, steps).
            done: completions of that kind; failed: those of them with an error; both of shape (lines,).
            failed: see there.
        """
        total, steps = threshold_us.shape
        chosen, line = finder.of(self._row)
        entries, word = (
            (self._entries, self._word)
            if chosen is None
            else (
                self._entries[chosen],
                self._word[chosen],
            )
        )
        found = np.full((total, steps), np.nan)
        for step in range(steps):
            is_limit = (entries[:, 1] == threshold_us[line, step]) & (threshold_us[line, step] > 0)
            own, fails = is_limit & (word == io[line]), is_limit & (word == FAILED + io[line])
            counted, missed, errors, slow_errors = (
                np.bincount(line[which], entries[which, column], total)
                for which in (own, fails)
                for column in (2, 3)
            )
            is_exact = (counted == done) & (errors == failed)
            found[is_exact, step] = np.maximum(missed - slow_errors, 0)[is_exact]
        return found

    def _add_uncompared(
        self, result: Compared, finder: Lines, sums: LineSums, pairs: Pairs, oldest_us: Floats
    ) -> None:
        """Add what waits in rows that are not compared with their line's threshold at all; see the module."""
        for step in range(sums.threshold_us.shape[1]):
            limit_us = sums.threshold_us[pairs.line, step]
            passed = (oldest_us > limit_us + UNSURE_US) & (limit_us > 0) & (pairs.waiting > 0)
            passed &= oldest_us - pairs.covered_us < limit_us - UNSURE_US
            at = np.flatnonzero(passed)
            if not len(at):
                continue
            chosen, line = finder.of(self._row)
            index = np.arange(len(self._row)) if chosen is None else chosen
            word, limit = self._word[index], self._entries[index, 1]
            names = ((word == sums.io[line]) | (word == OVERDUE + sums.io[line])) & (
                limit == sums.threshold_us[line, step]
            )
            total = len(sums.io)
            named = np.unique(self._row[index[names]] * total + line[names])
            at = at[~np.isin(pairs.row[at] * total + pairs.line[at], named)]
            of, waiting = pairs.line[at], np.maximum(pairs.waiting[at], 1.0)
            np.add.at(result.counted[:, step], of, waiting)
            np.add.at(result.missed[:, step], of, waiting)
            result.inexact[of] = True


def _add_unseen(result: Compared, entries: Ints, line: Ints, sums: LineSums) -> None:
    """Add what completions do not show: entries of the kinds OVERDUE and FAILED."""
    io, done, errors, excludes = sums.io, sums.done, sums.errors, sums.excludes
    total, steps = sums.threshold_us.shape
    word, limit_us = entries[:, 0] >> 16, entries[:, 1]
    kind, about = word & ~3, (word & 3) == io[line]

    def counts(which: Bools, column: int) -> Floats:
        return np.bincount(line[which], weights=entries[which, column], minlength=total).astype(float)

    left = about & (kind == OVERDUE) & (limit_us == 0)
    result.abandoned, result.abandoned_us = counts(left, 2), counts(left, 3) * 1000.0
    fails = kind == FAILED
    # All kinds together also count flush and trim: reads and writes are added up instead.
    ours = fails & (limit_us == 0) & np.where(io[line] == 0, (word & 3) != 0, about)
    failed = counts(ours, 2) + errors
    # Storage that is gone completes nothing: its flushes fail, and clients are refused.
    every = fails & (limit_us == 0) & ((word & 3) == 0)
    parts = fails & (limit_us == 0) & ((word & 3) != 0)
    gone = np.where(done == 0, np.maximum(counts(every, 2) - counts(parts, 2), 0.0), 0.0)
    if excludes.any():
        for kind_of, into in ((1, result.failed_reads), (2, result.failed_writes)):
            into += counts(fails & (limit_us == 0) & ((word & 3) == kind_of), 2) * excludes
    result.counted += gone[:, None]
    failed += gone
    result.errors = failed
    for step in range(steps):
        at = about & (limit_us == sums.threshold_us[line, step]) & (limit_us > 0)
        overdue = at & (kind == OVERDUE)
        late = result.overdue[:, step] = counts(overdue, 2) - counts(overdue, 3)
        result.counted[:, step] += late
        result.missed[:, step] += late
        slow = counts(at & fails, 3)  # they failed, and are in the missed ones already
        result.missed[:, step] += np.where(excludes, 0.0, failed) - slow
        result.counted[:, step] -= np.where(excludes, failed, 0.0)
    np.maximum(result.counted, 0.0, out=result.counted)
    np.clip(result.missed, 0.0, result.counted, out=result.missed)
    used = sums.threshold_us > 0
    used[:, 0] = True  # of a curve; of a promise without one they are all the same
    least = np.where(used, result.missed, np.inf).min(axis=1)
    result.failed = np.where(excludes, 0.0, np.minimum(failed, least))


class Lines:
    """From rows of a batch to lines; a row may be in none or several."""

    def __init__(self, row: Ints, line: Ints, rows: int, plain: bool) -> None:
        self._line, self._plain = line, plain
        if plain:
            self._of_row = np.full(rows, NO_LINE)
            self._of_row[row] = line
        else:
            self._count = np.bincount(row, minlength=rows)
            self._first = starts_of(self._count)

    def of(self, row: Ints) -> tuple[Ints | None, Ints]:
        """(which of the rows, None for all of them once and in order; the line of each of those)."""
        if self._plain:
            line = self._of_row[row]
            if not len(line) or line.min() >= 0:
                return None, line
            chosen = np.flatnonzero(line >= 0)
            return chosen, line[chosen]
        count = self._count[row]
        chosen = np.repeat(np.arange(len(row)), count)
        within = np.arange(len(chosen)) - np.repeat(starts_of(count), count)
        return chosen, self._line[self._first[row][chosen] + within]


def starts_of(sizes: Ints) -> Ints:
    """Where each part begins in the concatenation."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts
