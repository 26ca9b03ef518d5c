"""How far an agent's wall clock is off.

A REPLY carries the agent's wall clock; we know our own wall clock and the round trip of the poll. If both
ways took equally long, the agent stamped the reply half a round trip before it arrived. The error is at
most half the round trip, so of the last 16 answers the one with the *smallest* round trip counts.

Source: DESIGN.md 4 "Time"; the estimate is NTP's clock filter in its simplest form.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SAMPLES: Final = (
    16  # at one poll a second: short enough to follow a stepped clock, long enough to meet a quiet moment
)


class OffsetEstimator:
    """Clock offset of one session, microseconds to *add* to the agent's times."""

    __slots__ = ("_best", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        self._best = (0, 0)  # of the samples: smallest round trip, then the newest

    @property
    def known(self) -> bool:
        """Whether at least one reply was seen."""
        return bool(self._samples)

    def add(self, agent_unix_us: int, server_unix_us: int, round_trip_us: int) -> None:
        """One reply: the agent's stamp, our wall clock at receipt, and the monotonic round trip."""
        if round_trip_us < 0:
            round_trip_us = 0
        self.remember((round_trip_us, server_unix_us - round_trip_us // 2 - agent_unix_us))

    def samples(self) -> list[tuple[int, int]]:
        """(round trip, offset) of the last replies, oldest first."""
        return list(self._samples)

    def remember(self, sample: tuple[int, int]) -> None:
        """Take one of ``samples``."""
        samples = self._samples
        gone = samples[0] if len(samples) == SAMPLES else None
        samples.append(sample)
        # Looked for anew only when the best one has left: the other 15 of 16 replies pay one comparison.
        if len(samples) == 1 or sample[0] <= self._best[0]:
            self._best = sample
        elif gone is self._best:
            self._best = min(reversed(samples), key=lambda item: item[0])

    @property
    def offset_us(self) -> int:
        """The best estimate, 0 while nothing is known. Of equal round trips the newest counts."""
        return self._best[1]
