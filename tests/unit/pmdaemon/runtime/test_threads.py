"""Named threads, their failures and their end."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from pmdaemon.runtime import threads, watchdog
from pmdaemon.runtime.threads import ThreadDidNotStop, ThreadGroup, ThreadInbox
from tests.support.paths import ROOT


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


@pytest.mark.parametrize("step", ["register", "set_os_thread_name"])
def test_a_thread_that_dies_before_its_target_has_failed(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*_args: object) -> None:
        raise MemoryError

    told: list[str] = []
    monkeypatch.setattr(watchdog if step == "register" else threads, step, full)
    group = ThreadGroup(on_failure=lambda name, _exc: told.append(name))
    group.start("doomed", lambda: told.append("its target has run"))
    group.join(60)
    assert told == ["doomed"]
    assert group.failed is not None
    assert isinstance(group.failed[1], MemoryError)


def test_a_failure_that_cannot_be_logged_is_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def exception(self, *_args: object, **_values: object) -> None:
            raise MemoryError

    told: list[str] = []
    monkeypatch.setattr(threads, "log", Full())
    group = ThreadGroup(on_failure=lambda name, _exc: told.append(name))
    group.start("broken", [].pop)
    group.join(60)
    assert told == ["broken"]
    assert group.failed is not None
    assert isinstance(group.failed[1], IndexError)


def test_a_thread_that_could_not_be_started_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    seen: list[int] = []
    group = ThreadGroup()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start"):
            group.start("never", lambda: None)
    group.start("next", lambda: seen.append(1))
    group.join(60)
    assert seen == [1]


def test_a_thread_that_did_not_stop_is_waited_for_by_the_next_join() -> None:
    release, seen = threading.Event(), []
    group = ThreadGroup()
    group.start("stubborn", lambda: seen.append(release.wait(60)))
    with pytest.raises(ThreadDidNotStop):
        group.join(0.01)
    release.set()
    group.join(60)
    assert seen == [True]


def test_what_is_put_into_a_closed_inbox_wakes_nothing_else() -> None:
    """A thread that outlived its stop puts, when the number of the descriptor is another file's."""
    inbox: ThreadInbox[int] = ThreadInbox()
    inbox.put(1)
    number = inbox.fileno()
    inbox.close()
    made = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    other = made if made == number else os.dup2(made, number, inheritable=False)
    try:
        inbox.put(2)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.eventfd_write(other, 3)
        assert inbox.drain() == [1, 2]
        assert os.eventfd_read(other) == 3
        inbox.close()
        os.fstat(other)
    finally:
        for fd in {made, other}:
            with contextlib.suppress(OSError):
                os.close(fd)


def test_threads_are_started_here_but_for_those_that_wait_in_one_call() -> None:
    """Each of them has its reason in the module's docstring."""
    folders = ("pmdaemon", "gateway_agent", "sla_server", "dashboard")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    starting = {path.name: text.count("threading.Thread(") for path in sources if (text := path.read_text())}
    found = {name: count for name, count in starting.items() if count}
    assert found == {"threads.py": 1, "stop.py": 1, "apprise_services.py": 1, "network.py": 1}
    for name in ("watch-parent", "apprise", "dns-HOST"):
        assert f"\n    {name} " in str(threads.__doc__)
