"""How far an agent's wall clock is off.

A REPLY carries the agent's wall clock; we know our own wall clock and the round trip of the poll. If both
ways took equally long, the agent stamped the reply half a round trip before it arrived. The error is at
most half the round trip, so of the last answers the one with the *smallest* round trip counts.

The last answers are the block of ``BLOCK`` that is being filled and the full one before it: between 16 and
32. Of each block the best is enough.

Two answers whose offsets differ by more than their round trips can explain, and by more than ``STEP_US``, say
that a clock was stepped between them, the agent's or ours: then only what comes from now on counts.

Source: DESIGN.md 4 "Time"; the estimate is NTP's clock filter in its simplest form.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pmdaemon.runtime.clock import STEP_US

# At one poll a second: short enough to follow a drifting clock, long enough to meet a quiet moment.
BLOCK: Final = 16


class OffsetSample(NamedTuple):
    """One answer: its round trip, and the offset that it shows."""

    round_trip_us: int
    offset_us: int


class OffsetEstimator:
    """Clock offset of one session, microseconds to *add* to the agent's times.

    Attributes:
        best: the sample that counts; of equal round trips the newest. None while nothing is known.
        offset_us: its offset, 0 while nothing is known.
    """

    __slots__ = ("_count", "_filling", "_former", "best", "offset_us")

    def __init__(self) -> None:
        self._former: OffsetSample | None = None  # the best of the full block
        self._filling: OffsetSample | None = None  # the best so far of the other
        self._count = 0
        self._choose()

    def add(self, agent_unix_us: int, server_unix_us: int, round_trip_us: int) -> None:
        """One reply: the agent's stamp, our wall clock at receipt, and the monotonic round trip."""
        round_trip_us = max(0, round_trip_us)
        offset_us = server_unix_us - round_trip_us // 2 - agent_unix_us
        best = self.best
        if best is not None and abs(offset_us - best[1]) > STEP_US + (round_trip_us + best[0]) // 2:
            self._count, self._former, self._filling = 0, None, None
        filling = self._filling
        if filling is None or round_trip_us <= filling[0]:
            self._filling = OffsetSample(round_trip_us, offset_us)
            self._choose()
        self._count += 1
        if self._count == BLOCK:
            self._count, self._former, self._filling = 0, self._filling, None
            self._choose()

    def _choose(self) -> None:
        best, former = self._filling, self._former
        if best is None or (former is not None and former.round_trip_us < best.round_trip_us):
            best = former
        self.best = best
        self.offset_us = best.offset_us if best is not None else 0
