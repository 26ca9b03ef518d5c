"""How near promises are to their thresholds, beside what their storage takes anyway.

``r`` is a latency percentile / threshold. A percentile of 5 ms where 12 are promised is far from trouble, and
so is one of 8 ms if the storage takes 7 without neighbours. So what is *far*, and from where on C does not
rise (*park*), are shares of the room above the least ``r`` that was seen under caps: where that is low, as it
mostly is, the settings hold as they are. See docs/adr/0066-far-from-trouble-on-slow-storage.md.

Pure. Of one loop; changed only by the controller's one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.victims import Victim

FAR_RATIO: Final = 0.2
"""Of the room between the least r and 1: below it, all are far."""
PARK_RATIO: Final = 0.2
"""The same: no step up from there on. Where the least r is 0.25, both are what the settings say."""
NEW_RATIO: Final = 0.1
"""What a step adds to the smoothed r; four steps a second: some 2.5 s."""


@dataclass(slots=True)
class Nearness:
    """See the module."""

    settings: ControlSettings
    smoothed: float = 0.0
    least: float = math.inf

    def see(self, victims: Sequence[Victim]) -> None:
        """What windows under the caps in force say; asked once a step."""
        r = max(v.signal.r for v in victims)
        self.smoothed += NEW_RATIO * (r - self.smoothed) if self.smoothed else r
        self.least = min(self.least, self.smoothed)

    def are_far(self, victims: Sequence[Victim]) -> bool:
        """Whether none of them is nearer its threshold than its storage alone brings it."""
        return _are_below(victims, self._at_least(self.settings.far_clear_r, FAR_RATIO), self.settings)

    def are_spare(self, victims: Sequence[Victim]) -> bool:
        """Whether they are so far from trouble that the last decrease must have been too much."""
        return _are_below(victims, self.settings.far_clear_r, self.settings)

    def margin(self, r: float) -> float:
        """The share of a step that may be taken: 1 far from where C parks, 0 from there on."""
        park_r = self._at_least(self.settings.park_r, PARK_RATIO)
        return min(max(4 * (1 - r / park_r), 0.0), 1.0)

    def reset(self) -> None:
        """The loop ended."""
        self.smoothed, self.least = 0.0, math.inf

    def _at_least(self, known: float, share: float) -> float:
        if math.isinf(self.least):
            return known
        return max(known, self.least + share * (1 - self.least))


def _are_below(victims: Sequence[Victim], r: float, settings: ControlSettings) -> bool:
    return all(v.signal.r <= r and v.signal.u <= settings.far_clear_u for v in victims)
