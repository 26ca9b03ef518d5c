"""When a window has said enough: after ``window_min_ios`` I/Os, or as soon as it is plain.

Of fewer, a late one or two say nothing of a percentile. But where most of them missed that were promised to
arrive in time, more would not change what the window says: five of ten, of which one in twenty may be late,
are by chance once in ten thousand. So at fast polls a promise that is plainly broken is known after two cuts.
At polls of a second a window would be no shorter for volumes with twenty I/Os in it, and for slower ones
the effect of caps is measured on no fewer I/Os than before. What failed is left out, for load does not make
it fail; and a promise of anything but a percentile has other counts. See
docs/adr/0078-look-before-the-step.md.

Shapes: (rows,). Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sla_server.services.control.pieces import Bools, Floats, Ints, Pieces, PieceSums, running_sums

if TYPE_CHECKING:
    from sla_server.services.control.windows import WindowTable

PLAIN_MISSES: Final = 5
"""At least, of the I/Os of one window."""
PLAIN_RATIO: Final = 0.5
"""Of them, at least; and twice what may be missed."""
BRIEF_US: Final = 750_000
"""Windows that cover more wait for their I/Os."""


def has_enough(
    windows: WindowTable, rows: Ints, covered: Ints, counted: Floats, missed: Floats, failed: Floats
) -> Bools:
    """Whether so many I/Os of these rows say something.

    Args:
        windows: the rows'.
        rows: one for each of the others' values; may be named several times.
        covered: microseconds of their windows.
        counted: I/Os compared with a threshold.
        missed: those over the last threshold of the curve, failed ones included.
        failed: those of them that failed.
    """
    late = missed - failed
    least = np.maximum(PLAIN_RATIO, 2 * windows.terms.allowed[rows])
    is_plain = (late >= PLAIN_MISSES) & (late >= least * counted) & (covered <= BRIEF_US)
    is_plain &= windows.terms.percentile[rows] > 0
    found: Bools = (counted >= windows.settings.window_min_ios) | is_plain
    return found


def sums_have_enough(windows: WindowTable, rows: Ints, covered: Ints, sums: PieceSums) -> Bools:
    """The same of all that windows hold."""
    late = sums.missed[np.arange(len(rows)), windows.terms.last_step[rows]]
    return has_enough(windows, rows, covered, sums.counted[:, 0], late, sums.failed)


def late_in_runs(
    windows: WindowTable, rows: Ints, pick: Ints, first: Ints, run: Ints, opened: Bools, pieces: Pieces
) -> tuple[Floats, Floats]:
    """Of each piece, what its row's window has up to it: ``missed`` and ``failed`` of ``has_enough``.

    Args:
        windows: the rows'.
        rows: of each run; shape (runs,).
        pick: the pieces, by run; shape (picked,).
        first: where each run begins; shape (runs,).
        run: of each piece; shape (picked,).
        opened: whether a window is open already; shape (runs,).
        pieces: of the batch.
    """
    last = windows.terms.last_step[rows]
    missed = running_sums(pieces.missed[pick, last[run]], first, run)
    failed = running_sums(pieces.failed[pick], first, run)
    missed += np.where(opened, windows.o_missed[rows, last], 0.0)[run]
    failed += np.where(opened, windows.o_failed[rows], 0.0)[run]
    return missed, failed
