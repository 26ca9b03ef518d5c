"""Real children: a host that has no process to spare, progress, the order of the stop."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from pmdaemon.runtime.children import (
    FIRST_WAIT_S,
    REASON_ENV,
    RESTARTS_ENV,
    Child,
    ChildKind,
    stop_together,
    wait_for_any,
)
from pmdaemon.runtime.clock import FakeClock, SystemClock
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.watchdog import KILLED_S

KIND = ChildKind("child", stop_s=0.0)
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


def test_a_child_that_cannot_be_started_is_tried_again_and_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pipe = FakeClock(), ParentPipe()
    child = Child(KIND, "nbd-0", (sys.executable, "-c", ""), pipe, clock)
    real, refusals = subprocess.Popen, [OSError(errno.EAGAIN, "busy"), OSError(errno.ENOMEM, "full")]

    def popen(*args: Any, **how: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return real(*args, **how)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert [child.is_due and child.start() for _ in range(3)] == [False] * 3
    assert len(refusals) == 1, "not before its wait is over"
    assert "Free memory on this host" in child.reason
    clock.advance(FIRST_WAIT_S)
    assert not child.start()
    assert child.reason == "it could not be started: busy"
    clock.advance(2 * FIRST_WAIT_S)
    assert child.is_due
    assert child.start()
    assert child.wait(None) == 0
    pipe.close()


@pytest.mark.parametrize("has_pulse", [True, False])
def test_a_child_that_makes_no_progress_is_killed_if_it_has_a_pulse(has_pulse: bool) -> None:
    pipe = ParentPipe()
    child = Child(KIND, "link", SLEEPER, pipe, SystemClock(), has_pulse=has_pulse)
    assert child.start()
    if child.pulse is not None:
        os.eventfd_write(child.pulse.fd, 1)  # as its watchdog does each second
    for _ in range(1 + KILLED_S):
        child.check_progress()
    if has_pulse:
        assert child.wait(None) == -signal.SIGKILL
        assert child.hung == "has made no progress for 60 s"
    else:
        assert not select.select([child], [], [], 0)[0], "it runs"
        assert child.end(0) == -signal.SIGKILL
    pipe.close()


def test_a_child_knows_its_restarts_and_how_the_one_before_it_ended() -> None:
    pipe, stop = ParentPipe(), Stop()
    found = f"(os.environ['{RESTARTS_ENV}'], os.environ['{REASON_ENV}'])"
    says = f"import os, sys; sys.exit({found} != ('1', 'a b'))"
    child = Child(KIND, "link", (sys.executable, "-c", says), pipe, FakeClock())
    assert child.start()
    assert not wait_for_any(stop, [child], 60)
    assert child.wait(0) == 1
    child.died("a\0b", 1)
    assert child.start()
    assert child.wait(60) == 0
    stop.set()
    assert wait_for_any(stop, [child], 60)
    pipe.close()


def test_children_that_do_not_stop_are_killed() -> None:
    pipe, clock = ParentPipe(), SystemClock()
    children = [Child(KIND, name, SLEEPER, pipe, clock) for name in ("a", "b")]
    ignores = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    read_fd, write_fd = os.pipe()
    children[1].command = (sys.executable, "-c", f"import os; os.dup2({write_fd}, 1); {ignores}")
    children[1].descriptors = (write_fd,)
    for child in children:
        assert child.start()
    os.read(read_fd, 1)  # it ignores the signal from here on
    statuses = stop_together([*children, Child(KIND, "c", SLEEPER, pipe, clock)], clock)
    assert statuses["b"] == -signal.SIGKILL
    assert set(statuses) == {"a", "b"}
    assert not any(child.is_running for child in children)
    os.close(read_fd)
    os.close(write_fd)
    pipe.close()


def test_a_child_of_the_program_before_is_watched_stopped_and_reaped() -> None:
    """Exec keeps a process and its children; the new program knows them by their ids."""
    before = ParentPipe()
    pipe = ParentPipe(before.descriptors)
    assert not any(os.get_inheritable(fd) for fd in pipe.descriptors)
    started = subprocess.Popen(["sleep", "600"])
    child = Child(KIND, "nbd-0", SLEEPER, pipe, SystemClock())
    child.adopt(started.pid, 5)
    assert (child.pid, child.since_unix_us, child.restarts) == (started.pid, 5, 0)
    assert child.wait(0) is None
    child.signal(signal.SIGTERM)
    assert child.wait(None) == -signal.SIGTERM
    assert not child.is_running
    child.died("it was asked to")
    with pytest.raises(ProcessLookupError):
        child.adopt(started.pid, 5)
    started.poll()  # reaped already: it only learns so
    pipe.close()
