"""Stop: set once, readable by selectors, and the death of the parent."""

from __future__ import annotations

import os
import select

import pytest

from pmdaemon.runtime.stop import PARENT_FD_VARIABLE, ParentPipe, Stop


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_the_first_reason_is_kept_and_the_descriptor_stays_readable() -> None:
    stop = Stop()
    assert not readable(stop.fileno())
    stop.set("first")
    stop.set("second")
    assert stop.is_set()
    assert stop.reason == "first"
    assert readable(stop.fileno())


def test_a_flag_that_is_gone_has_no_descriptors() -> None:
    stop = Stop()
    fd = stop.fileno()
    os.fstat(fd)
    del stop
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_dead_parent_stops_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ParentPipe()
    monkeypatch.setenv(PARENT_FD_VARIABLE, str(os.dup(pipe.child_fd)))
    stop = Stop()
    thread = stop.watch_parent()
    assert thread is not None
    assert PARENT_FD_VARIABLE not in os.environ, "grandchildren must not inherit it"
    assert not stop.is_set()
    pipe.close()
    assert stop.wait(60)
    assert "parent" in stop.reason
    thread.join(60)


def test_without_a_parent_pipe_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_FD_VARIABLE, raising=False)
    assert Stop().watch_parent() is None
