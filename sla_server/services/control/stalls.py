"""For how long nothing has completed though I/O was outstanding, of pieces that windows are fed with.

``windows`` says what that means for a window; the state, by member, is its own. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sla_server.services.control.missed_entries import UNSURE_US
from sla_server.services.control.pieces import Bools, Floats, Ints, Pick, Pieces

if TYPE_CHECKING:
    from sla_server.services.control.windows import WindowTable


def stall_us_of(windows: WindowTable, members: Ints, pick: Pick, pieces: Pieces) -> tuple[Floats, Bools]:
    """For how long nothing has completed, of pieces all through which an I/O was outstanding; else 0.

    Of an outage, or if a stream has hung: the longest of one stream, whatever others completed.

    Returns:
        That, and where it is longer than the threshold, a hang aside.
    """
    stall_us, is_long = np.zeros(len(members)), np.zeros(len(members), np.bool_)
    stuck, silence_us = pieces.stuck[pick], pieces.silence_us[pick]
    at = np.flatnonzero(pieces.is_stuck[pick] | (silence_us > 0) | (stuck > 0))
    if len(at):  # all others do not wait
        lines = at if isinstance(pick, slice) else pick[at]
        stall_us[at], is_long[at] = _waits_us(windows, members[at], lines, pieces)
    return stall_us, is_long


def _waits_us(windows: WindowTable, members: Ints, pick: Ints, pieces: Pieces) -> tuple[Floats, Bools]:
    seen_us, rows, silence_us = windows.m_stall_us[members], windows.m_row[members], pieces.silence_us[pick]
    oldest_us = pieces.oldest_us[pick]
    # What is older than the silence hung while others completed: as long as no more than that waits,
    # it is no proof that storage is dead. An agent that says nothing of silence may have had it come last
    # in a cut with completions; and of a silence whose beginning was not seen, its age is all.
    untold = (silence_us == 0) & (
        (oldest_us <= seen_us + pieces.covered_us[pick]) | windows.m_unsure[members]
    )
    is_new = untold | ((silence_us > 0) & (oldest_us <= silence_us + UNSURE_US))
    counts = is_new | (seen_us >= windows.terms.lost_us[rows])
    age_us = np.where(is_new, oldest_us, 0.0)
    stall: Floats = np.where((seen_us > 0) & counts, np.maximum(age_us, seen_us), 0.0)
    if pieces.stuck[pick].any():
        silence_us = np.maximum(silence_us, _stuck_us(windows, rows, pick, pieces))
    stall = np.maximum(stall, silence_us * windows.terms.is_outage[rows])
    is_long: Bools = stall > windows.terms.stall_limit_us(rows, windows.terms.threshold_us[rows, 0])
    return np.maximum(stall, silence_us * (silence_us >= windows.terms.hung_us[rows])), is_long


def _stuck_us(windows: WindowTable, rows: Ints, pick: Pick, pieces: Pieces) -> Floats:
    """Of rates of which so many I/Os hang that slices are bad, though others complete: their age, else 0.

    As many are served in the slice as in this piece and in the slice before, whichever is more: of one
    that was not seen ``slices`` decides.
    """
    stuck, done = pieces.stuck[pick], pieces.done[pick]
    served = done - np.maximum(done - pieces.sized[pick], 0.0) * windows.terms.excludes[rows]
    in_slice = served / pieces.covered_us[pick] * windows.terms.remember_us[rows]
    n = np.maximum(np.maximum(in_slice, windows.slices.former_n[rows]), stuck)
    is_broken = windows.terms.is_rate[rows] & (served > 0) & (stuck > windows.terms.most_failed[rows] * n)
    found: Floats = pieces.oldest_us[pick] * is_broken
    return found
