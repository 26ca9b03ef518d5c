"""What neighbours want, learned from what they use until the first cut of a loop holds.

Who has just begun may want far more than its first second shows: kept to what it used in that second, it
would wait half an hour for the rest. Peaks are compared, as caps end the cut in which a volume used more, and
the next cut, under caps, comes with it. See docs/adr/0063-a-ceiling-learned-too-early.md and 0073.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sla_server.services.control.sharing import Neighbour

GREW_RATIO: Final = 1.5
"""Use that differs by less is the same: a cut of 250 ms may be off by a quarter."""
SEVERAL_GREW_RATIO: Final = 1.75
"""Of three and more, none with two thirds of it: each peak is of another moment."""


def grown_to(managed: Iterable[Neighbour], start: float, peaks: float) -> float | None:
    """What these want in all, if it is clearly more than what the first cut was made of; cost units a second.

    Args:
        managed: those that are slowed down.
        start: their use as the first cut has it.
        peaks: the sum of their peaks when it was made.
    """
    known = [n.peak for n in managed]
    used, most = sum(known), max(known, default=0.0)
    ratio = SEVERAL_GREW_RATIO if len(known) > 2 and most < 2 * used / 3 else GREW_RATIO
    return used if used > max(ratio * start, peaks) else None
