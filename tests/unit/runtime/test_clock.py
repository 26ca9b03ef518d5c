"""Clocks and deadlines."""

from __future__ import annotations

from pmdaemon.runtime.clock import Deadline, FakeClock


def test_one_deadline_over_several_steps() -> None:
    clock = FakeClock()
    deadline = Deadline(5.0, clock)
    clock.advance(3.0)
    assert deadline.left_s() == 2.0
    assert not deadline.passed
    clock.advance(3.0)
    assert deadline.left_s() == 0.0
    assert deadline.passed


def test_stepping_the_wall_clock_leaves_durations_alone() -> None:
    clock = FakeClock()
    wall_us, mono_ns = clock.unix_us(), clock.monotonic_ns()
    clock.step_wall(-3600)
    assert clock.unix_us() == wall_us - 3_600_000_000
    assert clock.monotonic_ns() == mono_ns
