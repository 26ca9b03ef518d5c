"""The clock that a test can step: the wall clock alone."""

from __future__ import annotations

import time

from pmdaemon.runtime import clock
from pmdaemon.runtime.clock import STEP_FILE, SteppedClock, SystemClock, wall_clock

HOUR_US = 3_600_000_000


def test_without_the_variable_it_is_the_real_clock(monkeypatch):
    monkeypatch.delenv(STEP_FILE, raising=False)
    assert type(wall_clock()) is SystemClock


def test_the_wall_clock_follows_the_file_and_the_monotonic_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "STEP_READ_NS", 0)
    path = tmp_path / "step"
    monkeypatch.setenv(STEP_FILE, str(path))
    stepped = wall_clock()
    assert isinstance(stepped, SteppedClock)
    assert abs(stepped.unix_us() - time.time_ns() // 1000) < HOUR_US // 2, "no file yet"
    path.write_text(str(-HOUR_US))
    assert stepped.unix_us() < time.time_ns() // 1000 - HOUR_US // 2
    assert stepped.monotonic_ns() <= time.monotonic_ns()
    path.write_text("nonsense")
    assert stepped.unix_us() < time.time_ns() // 1000 - HOUR_US // 2, "the last step that was readable"
