"""How long to wait before the next try. Pure but for the random source, which is given."""

from __future__ import annotations

import random


class Backoff:
    """Waits double from ``first_s`` to ``max_s``; a random share, at most ``jitter_ratio``, is taken off."""

    def __init__(
        self, first_s: float, max_s: float, jitter_ratio: float = 0.0, chance: random.Random | None = None
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter_ratio = jitter_ratio
        self._chance = chance
        self._next_s = first_s

    def failed(self) -> float:
        """Seconds to wait after one more failure."""
        wait_s = self._next_s
        self._next_s = min(self._max_s, 2 * wait_s)
        if self._chance is None:
            return wait_s
        return wait_s * (1 - self._jitter_ratio * self._chance.random())

    def succeeded(self) -> None:
        """Begin again with the shortest wait."""
        self._next_s = self._first_s
