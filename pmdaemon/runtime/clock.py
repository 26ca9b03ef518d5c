"""The two time bases, behind one small protocol so that tests can turn the hands.

Durations, leases and schedules use ``monotonic_ns``; stored timestamps use ``unix_us`` (wall clock, UTC).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of both time bases."""

    def monotonic_ns(self) -> int:
        """Nanoseconds on the monotonic clock of this machine."""

    def unix_us(self) -> int:
        """Wall clock, microseconds since 1970 UTC."""


class SystemClock:
    """The real clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)  # as it is: read several times for every poll

    def unix_us(self) -> int:
        """See ``Clock``."""
        return time.time_ns() // 1000


class FakeClock:
    """A clock that stands until told to advance; both bases move together unless stepped apart."""

    def __init__(self, unix_us: int = 1_800_000_000_000_000, monotonic_ns: int = 1_000_000_000) -> None:
        self._unix_us = unix_us
        self._monotonic_ns = monotonic_ns

    def monotonic_ns(self) -> int:
        """See ``Clock``."""
        return self._monotonic_ns

    def unix_us(self) -> int:
        """See ``Clock``."""
        return self._unix_us

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._monotonic_ns += round(seconds * 1e9)
        self._unix_us += round(seconds * 1e6)

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock alone, as NTP or an administrator may."""
        self._unix_us += round(seconds * 1e6)


class Deadline:
    """One time limit over several steps.

    Example: ``deadline = Deadline(5.0, clock)``; each step waits at most ``deadline.left_s()``.
    """

    def __init__(self, limit_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._end_ns = self._clock.monotonic_ns() + round(limit_s * 1e9)

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, (self._end_ns - self._clock.monotonic_ns()) / 1e9)

    @property
    def passed(self) -> bool:
        """Whether the limit is reached."""
        return self._clock.monotonic_ns() >= self._end_ns
