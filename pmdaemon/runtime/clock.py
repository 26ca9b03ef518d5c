"""The two time bases, behind one small protocol so that tests can set the time.

Durations, leases and schedules use ``monotonic_ns``; stored timestamps use ``unix_us`` (wall clock, UTC).

Server time. All processes of a server stamp and judge by one clock that does not follow a step of the
machine's wall clock at once: the time since boot plus an offset. The supervisor owns the offset
(``SteadyClock``), reads the wall clock ten times a second and publishes the offset in a file; its children
read it there (``SharedClock``), so no two processes ever disagree. The rules:

    off by less than STEP_US          drift, or a clock that is slewed: followed at once
    off by more                       a step: the former offset is held for HOLD_S
    the wall clock comes back         nothing has happened
    the step has lasted HOLD_S        the wall clock is believed: server time jumps

Source: docs/adr/0018-server-time.md.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from pmdaemon.runtime.files import write_whole

STEP_US: Final = 2_000_000
"""Above any drift between two readings, and the limit from which a gateway's clock is reported, too."""
HOLD_S: Final = 600.0
"""Twice the time for which ntpd distrusts a step (its ``stepout`` of 300 s): what is mended by then was no
more than a mishap, what lasts longer is meant."""
CLOCK_FILE: Final = "SLA_CLOCK_FILE"
"""Environment variable: where a supervisor publishes the offset to its children."""
STEP_FILE: Final = "SLA_TEST_CLOCK_STEP_FILE"
"""Environment variable, of tests alone: see ``SteppedClock``."""
STEP_READ_NS: Final = 100_000_000
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_READING_NS: Final = 10_000_000  # one that took longer was interrupted, and means nothing


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


class SteppedClock(SystemClock):
    """The real clocks, the wall clock moved by the microseconds that a file holds (read 10 times/s).

    For tests only: it does what an administrator, or NTP, does that steps this machine's clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step_us = 0
        self._read_ns = 0

    def unix_us(self) -> int:
        """See ``Clock``."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._read_ns:
            self._read_ns = now_ns + STEP_READ_NS
            with contextlib.suppress(OSError, ValueError):
                self._step_us = int(self._path.read_text())
        return super().unix_us() + self._step_us


def wall_clock() -> SystemClock:
    """The clock of this machine: the real one unless a test named a file in ``STEP_FILE``."""
    path = os.environ.get(STEP_FILE)
    return SteppedClock(Path(path)) if path else SystemClock()


class FakeClock:
    """A clock that moves only by ``advance``; both bases move together unless stepped apart."""

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


def boot_ns() -> int:
    """Nanoseconds since boot, suspension included; the same in all processes of this machine."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """What tells this boot from all others; "" where the kernel does not say it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class StepState(Enum):
    """What became of a step of the wall clock."""

    HELD = "held"
    RETURNED = "returned"
    ADOPTED = "adopted"


class ClockStep(NamedTuple):
    """News of a step: ``by_us`` is the wall clock against server time, before it was adopted."""

    state: StepState
    by_us: int


class SteadyClock:
    """The owner of server time; see the module. Not thread-safe: belongs to one thread.

    Args:
        wall: the machine's wall clock.
        base_ns: a clock that is never set.
        hold_s: how long a step must last.
    """

    def __init__(
        self, wall: Clock | None = None, base_ns: Callable[[], int] = boot_ns, hold_s: float = HOLD_S
    ) -> None:
        self._wall = wall or wall_clock()
        self._base_ns = base_ns
        self._hold_ns = round(hold_s * 1e9)
        self._held_since_ns: int | None = None
        self._step_us = 0
        self.ahead_us = self._wall_ahead_us()

    def monotonic_ns(self) -> int:
        """See ``Clock``."""
        return self._wall.monotonic_ns()

    def unix_us(self) -> int:
        """See ``Clock``: server time."""
        return self._base_ns() // 1000 + self.ahead_us

    def check(self) -> ClockStep | None:
        """Compare with the wall clock; returns news of a step, once each."""
        found_us, now_ns = self._wall_ahead_us(), self._base_ns()
        off_us, was_held = found_us - self.ahead_us, self._held_since_ns is not None
        if abs(off_us) < STEP_US:
            self.ahead_us, self._held_since_ns = found_us, None
            return ClockStep(StepState.RETURNED, self._step_us) if was_held else None
        if self._held_since_ns is None or abs(off_us - self._step_us) >= STEP_US:
            self._held_since_ns, self._step_us = now_ns, off_us
            return ClockStep(StepState.HELD, off_us)
        self._step_us = off_us  # it drifts while it is held
        if now_ns - self._held_since_ns < self._hold_ns:
            return None
        self.ahead_us, self._held_since_ns = found_us, None
        return ClockStep(StepState.ADOPTED, off_us)

    def _wall_ahead_us(self) -> int:
        while True:
            before_ns = self._base_ns()
            wall_us = self._wall.unix_us()
            after_ns = self._base_ns()
            if after_ns - before_ns < _READING_NS:
                return wall_us - (before_ns + after_ns) // 2000


class ClockFile:
    """Where a ``SteadyClock``'s offset is published: one int64, in the machine's byte order."""

    def __init__(self, path: Path, ahead_us: int) -> None:
        self.path = path
        write_whole(path, struct.pack("q", ahead_us))
        self._ahead = _mapped(path, writable=True)

    def publish(self, ahead_us: int) -> None:
        """Readers see the former offset or this one: eight aligned bytes are written at once."""
        self._ahead[0] = ahead_us


class SharedClock(SystemClock):
    """Server time in a child of the supervisor. Any thread."""

    def __init__(self, path: Path, base_ns: Callable[[], int] = boot_ns) -> None:
        self._base_ns = base_ns
        self._ahead = _mapped(path, writable=False)

    def unix_us(self) -> int:
        """See ``Clock``: server time."""
        return self._base_ns() // 1000 + self._ahead[0]


def server_clock() -> Clock:
    """Server time as the supervisor has it; in a process without one the machine's clocks."""
    path = os.environ.get(CLOCK_FILE)
    return SharedClock(Path(path)) if path else SystemClock()


def _mapped(path: Path, *, writable: bool) -> memoryview[int]:
    with path.open("r+b" if writable else "rb") as file:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(file.fileno(), 8, access=access)).cast("q")


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
