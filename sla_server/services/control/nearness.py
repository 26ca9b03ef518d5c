"""How near promises are to their thresholds, beside what their storage takes anyway.

``r`` is a latency percentile / threshold. A percentile of 5 ms where 12 are promised is far from trouble, and
so is one of 8 ms if the storage takes 7 without neighbours. So what is *far*, and from where on C does not
rise (*park*), are shares of the room above the least ``r`` that was seen under caps: where that is low, as it
mostly is, the settings hold as they are. It is the least of the promise itself, or of the worst of all, if
that is lower: of many, only some are seen in each step. Windows over the threshold count for neither: they
say nothing of storage without neighbours, and what is smoothed from them on is too high for forty steps.
A step up asks for what is usual at the present C, too: of windows of some sixty I/Os one in ten has a low
percentile anyway. See docs/adr/0066-far-from-trouble-on-slow-storage.md, 0073 and 0075.

Pure. Of one loop; changed only by the controller's one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.victims import Key, Victim

FAR_RATIO: Final = 0.2
"""Of the room between the least r and 1: below it, all are far."""
PARK_RATIO: Final = 0.2
"""The same: no step up from there on. Where the least r is 0.25, both are what the settings say."""
NEW_RATIO: Final = 0.1
"""What a step adds to the smoothed r; four steps a second: some 2.5 s."""
MOST_R: Final = 1.0
"""Of a window, in what is usual: far over the threshold is no more than over it."""
MOST_KEPT: Final = 256
"""Promises known by themselves beyond those of a step: loops last for months, and of thousands each step sees
others."""

Known = TypeVar("Known")


@dataclass(slots=True)
class Least:
    """The least that r was smoothed to."""

    smoothed: float
    least: float = math.inf

    def see(self, r: float) -> None:
        """R of one step more."""
        self.smoothed += NEW_RATIO * (r - self.smoothed)
        self.least = min(self.least, self.smoothed)


@dataclass(slots=True)
class Nearness:
    """See the module."""

    settings: ControlSettings
    worst: Least | None = None  # of the promise that is nearest in each step
    each: dict[Key, Least] = field(default_factory=dict)
    usual: dict[Key, float] = field(default_factory=dict)

    def see(self, victims: Sequence[Victim]) -> None:
        """What windows under the caps in force say; asked once a step."""
        self.usual = _kept(self.usual, victims)
        for v in victims:
            r, before = min(v.signal.r, MOST_R), self.usual.get(v.key)
            if v.signal.excused_ratio > 0:  # its gateway's own host was busy
                r = min(r, v.signal.r_step)
            self.usual[v.key] = r if before is None else before + NEW_RATIO * (r - before)
        victims = [v for v in victims if v.signal.r < 1]
        if not victims:
            return
        r = max(v.signal.r for v in victims)
        self.worst = self.worst or Least(r)
        self.worst.see(r)
        self.each = _kept(self.each, victims)
        for v in victims:
            self.each.setdefault(v.key, Least(v.signal.r)).see(v.signal.r)

    def are_far(self, victims: Sequence[Victim]) -> bool:
        """Whether none of them is nearer its threshold than its storage alone brings it."""
        return all(
            self._is_below(v, self._at_least(v, self.settings.far_clear_r, FAR_RATIO)) for v in victims
        )

    def are_spare(self, victims: Sequence[Victim]) -> bool:
        """Whether they are so far from trouble that the last decrease must have been too much."""
        return all(self._is_below(v, self.settings.far_clear_r) for v in victims)

    def margin(self, victims: Sequence[Victim]) -> float:
        """The share of a step that may be taken: 1 far from where C parks, 0 if one of them is beyond."""
        nearest = max(self._now(v) / self._parks_at(v) for v in victims)
        return min(max(4 * (1 - nearest), 0.0), 1.0)

    def reach(self, victims: Sequence[Victim], unused: float) -> float:
        """By how much C may rise until one of them is where it parks, if the storage is one queue.

        The time that an I/O waits in it is in proportion to use / (capacity - use), so nearly to what is left
        of the capacity: that may shrink as what they wait may grow.

        Args:
            victims: those that keep C from rising.
            unused: of what the storage gave when it was at its limit; below 0 it gives more now.

        Returns:
            Infinite where nothing is known of that limit.
        """
        if unused <= 0:
            return math.inf
        waits = 0.0
        for v in victims:
            alone = min(v.signal.r_alone, v.signal.r)
            waits = max(waits, (self._now(v) - alone) / max(self._parks_at(v) - alone, 1e-9))
        return unused * max(1 - waits, 0.0)

    def _now(self, victim: Victim) -> float:
        return max(victim.signal.r, self.usual.get(victim.key, 0.0))

    def _parks_at(self, victim: Victim) -> float:
        return self._at_least(victim, self.settings.park_r, PARK_RATIO)

    def reset(self) -> None:
        """The loop ended."""
        self.worst = None
        self.each.clear()
        self.usual.clear()

    def _is_below(self, victim: Victim, r: float) -> bool:
        return victim.signal.r <= r and victim.signal.u <= self.settings.far_clear_u

    def _at_least(self, victim: Victim, known: float, share: float) -> float:
        own = self.each.get(victim.key)
        if self.worst is None or own is None:
            return known
        least = min(own.least, self.worst.least)
        return max(known, least + share * (1 - least))


def _kept(known: dict[Key, Known], victims: Sequence[Victim]) -> dict[Key, Known]:
    """What is known of promises, when it is of very many: of those of this step."""
    if len(known) <= MOST_KEPT:
        return known
    return {v.key: known[v.key] for v in victims if v.key in known}
