"""How far a step beyond the ceiling goes, and when a long one has shown to be too long.

A ceiling that was learned from little is left in hours by steps that are shares of it, so a *stride* is a
share of what the storage carries of all its volumes. But what a cost is to the storage differs: where I/Os of
victims are cheap, as of large sequential ones, a sixteenth of all may be more than neighbours can have. So
once C had to be lowered after a stride, steps are shares of C0, until two in a row have brought no promise
near its threshold. See docs/adr/0066-far-from-trouble-on-slow-storage.md.

Pure. Of one loop; changed only by the controller's one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_DOUBLED: Final = 10
"""So often a step doubles."""


@dataclass(slots=True)
class Strides:
    """See the module."""

    made: bool = False  # since C was lowered last
    are_too_long: bool = False

    def step(self, start: float, carried: float, probes: int, ceiling: float, divisor: float) -> float:
        """What the ceiling rises by.

        Args:
            start: C0.
            carried: by the storage, of all its volumes.
            probes: steps in a row that brought no promise near its threshold.
            ceiling: as it is.
            divisor: how many of a step are C0.
        """
        self.are_too_long = self.are_too_long and probes < 2
        rate = start if self.are_too_long else max(start, carried)
        self.made = self.made or rate > start
        step = rate / divisor
        return min(step * 2.0 ** min(max(probes - 1, 0), MOST_DOUBLED), max(step, ceiling / 2))

    def lowered(self) -> None:
        """C is."""
        self.made, self.are_too_long = False, self.made or self.are_too_long
