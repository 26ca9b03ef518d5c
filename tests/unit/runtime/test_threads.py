"""Named threads, their failures and their end."""

from __future__ import annotations

import threading

import pytest

from pmdaemon.runtime.threads import ThreadDidNotStop, ThreadGroup


def test_a_thread_has_its_name_and_is_joined() -> None:
    seen: list[str] = []
    group = ThreadGroup()
    group.start("pm-in-0", lambda: seen.append(threading.current_thread().name))
    group.join(60)
    assert seen == ["pm-in-0"]


def test_a_failure_is_kept_and_told() -> None:
    told: list[str] = []
    group = ThreadGroup(on_failure=lambda name, exc: told.append(f"{name}: {exc}"))

    def broken() -> None:
        raise RuntimeError("boom")

    group.start("broken", broken)
    group.join(60)
    assert told == ["broken: boom"]
    assert group.failed is not None
    assert group.failed[0] == "broken"


def test_a_thread_that_does_not_stop_is_named() -> None:
    release = threading.Event()
    group = ThreadGroup()
    thread = group.start("stubborn", lambda: bool(release.wait(60)))
    with pytest.raises(ThreadDidNotStop, match="stubborn"):
        group.join(0.01)
    release.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_name_too_long_for_top_is_refused() -> None:
    with pytest.raises(ValueError, match="15 characters"):
        ThreadGroup().start("a-name-of-20-letters", lambda: None)
