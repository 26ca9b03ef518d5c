"""The cuts of a CUTS message, their columns checked all at once.

To look at the columns of each cut by itself takes as long as to decode it, of forty joined a third. Only if
something is wrong anywhere is each looked at, since the others are other gateways'.

Pure functions; the cuts are views into the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import HIST_DTYPE, MISSED_DTYPE, Cut

Place = tuple[int, Cut]
"""Position in the message, and the cut."""


def read_cuts(message: frame.Frame, on_bad: Callable[[BadCut], None]) -> list[Place]:
    """The cuts of a message that can be true, in order; each of the others is told to ``on_bad``.

    Raises:
        KeyError: the header lacks ``n``.
        WireError: the message holds fewer frames than it says.
    """
    end = _frames_end(message.blob, message.header["n"])
    found: list[Place] = []
    for position, raw in enumerate(frame.split(message.blob[:end])):
        try:
            found.append((position, cuts.view(raw)))
        except BadCut as exc:
            on_bad(exc)
    if _all_sound([cut for _, cut in found]):
        return found
    sound: list[Place] = []
    for position, cut in found:
        problem = cuts.problem_of(cut.counters, cut.hist, cut.missed, cut.rows, cut.rows)
        if problem is None and cuts.overflows(cut.counters):
            problem = f"a counter exceeds {cuts.MAX_COUNTER}"
        if problem is None:
            sound.append((position, cut))
        else:
            on_bad(BadCut(problem))
    return sound


def _all_sound(found: Sequence[Cut]) -> bool:
    if not found:
        return True
    rows = np.array([cut.rows for cut in found])
    # As plain integers: numpy works out the common type of structured arrays anew for each of them.
    problem = cuts.problem_of(
        np.concatenate([cut.counters.ravel() for cut in found]),
        np.concatenate([cut.hist.view("<u8") for cut in found]).view(HIST_DTYPE),
        np.concatenate([cut.missed.view("<u8") for cut in found]).view(MISSED_DTYPE),
        np.repeat(rows, [len(cut.hist) for cut in found]),
        np.repeat(rows, [len(cut.missed) for cut in found]),
    )
    summed = np.concatenate([cut.counters[cuts.SUMMED].ravel() for cut in found])
    return problem is None and (not summed.size or int(summed.max()) <= cuts.MAX_COUNTER)


def _frames_end(blob: memoryview, count: int) -> int:
    """Where the last of ``count`` frames ends; a blob is padded to a multiple of 8, and so are frames."""
    end = 0
    for _ in range(count):
        size = frame.peek_size(blob[end:])
        if size is None:
            raise WireError(f"CUTS announces {count} cuts, its blob holds fewer")
        end += size
    return end
