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
        under_way: I/Os at the storage when it was looked at last; None: nothing is waited for.
        looked_ns: when the cuts came that say so; 0: when caps went down.
    """

    under_way: int | None = None
    looked_ns: int = 0

    @property
    def is_on(self) -> bool:
        """Whether it is waited for."""
        return self.under_way is not None

    def begin(self, managed: Collection[Neighbour], most: float) -> None:
        """Caps of these go down; with no more I/Os under way than ``most`` nothing is waited for."""
        under_way = sum(n.under_way for n in managed)
        self.under_way, self.looked_ns = under_way if under_way > most else None, 0

    def stop(self) -> None:
        """Wait no longer."""
        self.under_way = None

    def check(self, managed: Collection[Neighbour], most: float, from_ns: int, until_ns: int) -> int:
        """The caps are confirmed: is there still what was sent before?

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
        seen_ns = max((n.seen_ns for n in managed), default=0)
        span_ns = seen_ns - (self.looked_ns or from_ns)
        if span_ns <= 0:
            return 0
        under_way = sum(n.under_way for n in managed)
        if under_way <= max(most, LEAST_UNDER_WAY * len(managed)):
            self.stop()
            return seen_ns
        if span_ns < LEAST_SPAN_S * 1e9:
            return 0
        left = self.under_way - under_way
        self.under_way, self.looked_ns = under_way, seen_ns
        if left <= 0 or seen_ns + span_ns * under_way / left > until_ns:
            self.stop()
        return 0
