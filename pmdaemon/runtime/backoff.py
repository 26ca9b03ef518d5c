"""How long to wait before the next try. Pure but for the random source, which is given."""

from __future__ import annotations

import random
from typing import Final

MOST_DOUBLINGS: Final = 64
"""More make no difference to any limit in use, and a thousand of them are no number any more."""


def doubled(first: float, times: int, most: float) -> float:
    """``first`` doubled so many times, at most ``most``; in the unit of both."""
    return min(first * 2.0 ** min(max(times, 0), MOST_DOUBLINGS), most)


class Backoff:
    """Waits double from ``first_s`` to ``max_s``; a random share, at most ``jitter_ratio``, is taken off."""

    def __init__(
        self, first_s: float, max_s: float, jitter_ratio: float = 0.0, chance: random.Random | None = None
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter_ratio = jitter_ratio
        self._chance = chance
        self._failures = 0

    def failed(self) -> float:
        """Seconds to wait after one more failure."""
        wait_s = doubled(self._first_s, self._failures, self._max_s)
        self._failures += 1
        if self._chance is None:
            return wait_s
        return wait_s * (1 - self._jitter_ratio * self._chance.random())

    def succeeded(self) -> None:
        """Begin again with the shortest wait."""
        self._failures = 0
