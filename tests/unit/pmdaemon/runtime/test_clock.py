"""Clocks, deadlines, and server time over steps of the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.runtime.clock import (
    CLOCK_FILE,
    HOLD_S,
    ClockFile,
    ClockStep,
    Deadline,
    FakeClock,
    SharedClock,
    SteadyClock,
    StepState,
    SystemClock,
    server_clock,
)

HOUR_S = 3600
SECOND_US = 1_000_000


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


class Server:
    """A wall clock that can be set, and server time that is looked at once a second."""

    def __init__(self) -> None:
        self.wall = FakeClock()
        self.steady = SteadyClock(self.wall, self.wall.monotonic_ns)
        self.news: list[ClockStep] = []

    def let_pass(self, seconds: int) -> None:
        for _ in range(seconds):
            before_us = self.steady.unix_us()
            self.wall.advance(1)
            assert self.steady.unix_us() == before_us + SECOND_US
            if step := self.steady.check():
                self.news.append(step)

    @property
    def off_s(self) -> float:
        """Server time against the wall clock."""
        return (self.steady.unix_us() - self.wall.unix_us()) / SECOND_US


@pytest.mark.parametrize(("by_s", "for_s"), [(180, 70), (HOUR_S, 75), (-HOUR_S, 75)])
def test_a_step_that_is_taken_back_changes_nothing_at_all(by_s: int, for_s: int) -> None:
    server = Server()
    server.let_pass(5)
    server.wall.step_wall(by_s)
    server.let_pass(for_s)
    assert server.off_s == -by_s
    server.wall.step_wall(-by_s)
    server.let_pass(int(HOLD_S) + 5)
    assert server.off_s == 0
    by_us = by_s * SECOND_US
    assert server.news == [ClockStep(StepState.HELD, by_us), ClockStep(StepState.RETURNED, by_us)]


def test_a_step_that_lasts_is_adopted_once() -> None:
    server = Server()
    server.wall.step_wall(HOUR_S)
    server.let_pass(int(HOLD_S))
    assert server.off_s == -HOUR_S
    server.wall.advance(1)
    assert server.steady.check() == ClockStep(StepState.ADOPTED, HOUR_S * SECOND_US)
    assert server.off_s == 0
    server.let_pass(5)
    assert server.news == [ClockStep(StepState.HELD, HOUR_S * SECOND_US)]


def test_another_step_meanwhile_must_last_by_itself() -> None:
    server = Server()
    server.wall.step_wall(HOUR_S)
    server.let_pass(int(HOLD_S) - 10)
    server.wall.step_wall(-HOUR_S // 2)
    server.let_pass(20)
    assert server.off_s == -HOUR_S / 2
    assert [step.by_us for step in server.news] == [HOUR_S * SECOND_US, HOUR_S // 2 * SECOND_US]


def test_drift_and_slewing_are_followed_also_beyond_the_limit_of_a_step() -> None:
    server = Server()
    for _ in range(10):
        server.wall.step_wall(0.5)
        assert server.steady.check() is None
        assert server.off_s == 0


def test_a_look_that_was_interrupted_is_made_again() -> None:
    """Else a process that was stopped between two reads would see a step."""
    wall = FakeClock()
    steady = SteadyClock(wall, wall.monotonic_ns)
    pauses = [40.0, 40.0]

    def paused_ns() -> int:
        now_ns = wall.monotonic_ns()
        if pauses:
            wall.advance(pauses.pop())
        return now_ns

    steady._base_ns = paused_ns  # a process that is suspended between two readings
    assert steady.check() is None
    assert not pauses
    assert steady.unix_us() == wall.unix_us()


def test_other_processes_read_what_the_owner_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLOCK_FILE, raising=False)
    assert type(server_clock()) is SystemClock
    path = tmp_path / "clock"
    published = ClockFile(path, 1_000)
    monkeypatch.setenv(CLOCK_FILE, str(path))
    assert isinstance(server_clock(), SharedClock)
    shared = SharedClock(path, lambda: 5_000_000)
    assert shared.unix_us() == 6_000
    published.publish(-2_000)
    assert shared.unix_us() == 3_000
