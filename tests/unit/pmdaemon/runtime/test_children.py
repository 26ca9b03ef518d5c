"""When children are started again, and what is said of them; nothing is started here."""

from __future__ import annotations

import errno
import subprocess
from typing import Any

import pytest

from pmdaemon.poller.children import PAIRS
from pmdaemon.runtime.children import (
    FIRST_WAIT_S,
    REASON_ENV,
    RESTARTS_ENV,
    Child,
    ChildKind,
    describe_status,
    restarts_of_this_process,
)
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import ParentPipe
from sla_server.supervisor import PROCESSES


@pytest.mark.parametrize("kind", [ChildKind("child"), PAIRS, PROCESSES])
def test_waits_double_until_a_child_proved_healthy(kind: ChildKind, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_args: Any, **_how: Any) -> None:
        raise OSError(errno.EAGAIN, "busy")

    monkeypatch.setattr(subprocess, "Popen", popen)
    clock, pipe = FakeClock(), ParentPipe()
    child = Child(kind, "one", ["x"], pipe, clock)
    waits = []
    for _ in range(8):
        assert child.is_due
        assert not child.start()
        waits.append(child.wait_s)
        assert child.seconds_until_due() == child.wait_s
        clock.advance(child.wait_s)
    assert waits[:5] == [FIRST_WAIT_S, 0.4, 0.8, 1.6, 3.2]
    assert waits[-2:] == [kind.max_wait_s] * 2
    child.start()
    clock.advance(kind.healthy_s)
    child.died("it ended")
    assert child.wait_s == FIRST_WAIT_S
    assert child.restarts == 8
    pipe.close()


def test_a_status_in_words() -> None:
    assert describe_status(0) == "exit status 0"
    assert describe_status(-9) == "killed by SIGKILL"
    assert describe_status(-40) == "killed by signal 40"


def test_a_child_learns_of_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarts_of_this_process() == (0, "")
    monkeypatch.setenv(RESTARTS_ENV, "2")
    monkeypatch.setenv(REASON_ENV, "it was killed by SIGKILL")
    assert restarts_of_this_process() == (2, "it was killed by SIGKILL")
