"""The agent's clock; in tests one whose wall clock can be stepped while the agent runs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from pmdaemon.runtime.clock import SystemClock

STEP_FILE: Final = "SLA_TEST_CLOCK_STEP_FILE"
READ_NS: Final = 100_000_000


class SteppedClock(SystemClock):
    """The real clocks, the wall clock moved by the microseconds that a file holds (read 10 times/s).

    For tests only: it does what an administrator, or NTP, does that steps this host's clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step_us = 0
        self._read_ns = 0

    def unix_us(self) -> int:
        """See ``Clock``."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._read_ns:
            self._read_ns = now_ns + READ_NS
            with contextlib.suppress(OSError, ValueError):
                self._step_us = int(self._path.read_text())
        return super().unix_us() + self._step_us


def agent_clock() -> SystemClock:
    """The clock of an agent's process: the real one unless a test named a file in STEP_FILE."""
    path = os.environ.get(STEP_FILE)
    return SteppedClock(Path(path)) if path else SystemClock()
