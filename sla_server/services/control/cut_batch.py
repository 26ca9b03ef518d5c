"""The cuts of a CUTS message, their columns checked all at once.

To look at the columns of each cut by itself takes as long as to decode it, of forty joined a third. Only if
something is wrong anywhere is each looked at, since the others are other gateways'.

Pure functions; the cuts are views into the message.
"""

from __future__ import annotations

from collections.abc import Callable

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import Cut
from pmdaemon.wire.messages.base import count

Place = tuple[int, Cut]
"""Position in the message, and the cut."""


def read_cuts(message: frame.Frame, on_bad: Callable[[BadCut], None]) -> list[Place]:
    """The cuts of a message that can be true, in order; each of the others is told to ``on_bad``.

    Raises:
        WireError: the message holds fewer frames than it says, or does not say how many.
    """
    end = _frames_end(message.blob, count(message.header, "n"))
    found: list[Place] = []
    for position, raw in enumerate(frame.split(message.blob[:end])):
        try:
            found.append((position, cuts.view(raw)))
        except BadCut as exc:
            on_bad(exc)
    if cuts.are_sound([cut for _, cut in found]):
        return found
    sound: list[Place] = []
    for position, cut in found:
        problem = cuts.fault_of(cut)
        if problem is None:
            sound.append((position, cut))
        else:
            on_bad(BadCut(problem))
    return sound


def _frames_end(blob: memoryview, announced: int) -> int:
    """Where the last of ``count`` frames ends; a blob is padded to a multiple of 8, and so are frames."""
    end = 0
    for _ in range(announced):
        size = frame.peek_size(blob[end:])
        if size is None:
            raise WireError(f"CUTS announces {announced} cuts, its blob holds fewer")
        end += size
    return end
