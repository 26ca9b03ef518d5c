"""What neighbours had at the storage when their caps went down: until it has left, nothing tells of the caps.

A cap holds back what comes; what was sent before is served as it was. Storage that gives each client its turn
(an NBD server has some threads for a connection, a disk array a queue for a host) makes a victim wait as long
until the last of a deep queue is served: queue / (what the storage serves - C), seconds where the queue has
hundreds of I/Os. Statistics of that time look like statistics of C and are not.

So after a decrease of neighbours with a deep queue the gate stays shut until no more is under way than C lets
be, or until what is under way does not get less, or not soon: that is no drain. See
docs/adr/0075-wait-for-the-drain.md.

Pure. Of one loop; changed only by the controller's one thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sla_server.services.control.sharing import Neighbour

LEAST_UNDER_WAY: Final = 2
"""I/Os of each neighbour: one is at the storage and one comes, also under a cap."""
LEAST_SPAN_S: Final = 0.25
"""Between two looks that are compared: in less, chance says whether a queue gets shorter."""


@dataclass(slots=True)
class Drain:
    """See the module.

    Attributes:
        under_way: I/Os of each neighbour at the storage at the last look; None: nothing is waited for.
        looked_ns: when the cuts came that say so; 0: when caps went down.
    """

    under_way: dict[str, int] | None = None
    looked_ns: int = 0

    @property
    def is_on(self) -> bool:
        """Whether it is waited for."""
        return self.under_way is not None

    def begin(self, managed: Collection[Neighbour], most: float) -> None:
        """Caps of these go down; with no more I/Os under way than ``most`` nothing is waited for."""
        found = _by_neighbour(managed)
        self.under_way, self.looked_ns = found if sum(found.values()) > most else None, 0

    def stop(self) -> None:
        """Wait no longer."""
        self.under_way = None

    def check(self, managed: Collection[Neighbour], most: float, from_ns: int, until_ns: int) -> int:
        """The caps are confirmed: is there still what was sent before?

        A look needs a new cut of each neighbour with a queue: what one of them has not said yet did not stop
        getting less. One that joined since the last look is compared from the next one on.

        Args:
            managed: whose caps went down.
            most: I/Os that the caps let be under way.
            from_ns: when the caps held everywhere.
            until_ns: when to stop waiting in any case.

        Returns:
            When the cuts came that show that it has left; 0: not known, or never waited for.
        """
        if self.under_way is None:
            return 0
        newest_ns = max((n.seen_ns for n in managed), default=0)
        seen_ns = min((n.seen_ns for n in managed if n.under_way > LEAST_UNDER_WAY), default=newest_ns)
        span_ns = seen_ns - (self.looked_ns or from_ns)
        if span_ns <= 0:
            return 0
        found = _by_neighbour(managed)
        if sum(found.values()) <= max(most, LEAST_UNDER_WAY * len(managed)):
            self.stop()
            return newest_ns
        if span_ns < LEAST_SPAN_S * 1e9:
            return 0
        before, self.under_way, self.looked_ns = self.under_way, found, seen_ns
        compared = before.keys() & found.keys()
        left = sum(before[volume] - found[volume] for volume in compared)
        due_ns = span_ns * sum(found[volume] for volume in compared) / left if left > 0 else math.inf
        if compared and seen_ns + due_ns > until_ns:
            self.stop()
        return 0


def _by_neighbour(managed: Collection[Neighbour]) -> dict[str, int]:
    return {n.volume: n.under_way for n in managed}
