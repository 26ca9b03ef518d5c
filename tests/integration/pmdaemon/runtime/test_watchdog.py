"""Progress of threads and processes: what is blamed, what is not, and how a process ends that hangs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.service_manager import NOTIFY_SOCKET, ServiceManager
from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.runtime.watchdog import (
    HUNG_STATUS,
    PARENT_REPORTED_S,
    ParentPulse,
    Pulse,
    beat,
    rest,
    within,
)

LIMIT_S = 60


@pytest.fixture(autouse=True)
def _only_ours() -> Iterator[None]:
    """The main thread says nothing after a test."""
    yield
    rest()


def looks(count: int) -> list[str]:
    """What ``count`` further looks found, without those that found nothing."""
    return [found for _ in range(count) if (found := watchdog.find_hung())]


def test_a_thread_without_a_step_for_its_limit_is_named() -> None:
    beat(limit_s=5)
    assert looks(5) == []
    assert watchdog.find_hung() == "its thread main has made no progress for 5 s"


def test_a_step_in_time_is_enough() -> None:
    for _ in range(10):
        beat(limit_s=5)
        assert looks(5) == []


def test_a_thread_at_rest_is_not_blamed() -> None:
    rest()
    assert looks(10_000) == []


def test_long_work_declares_a_longer_limit_and_then_the_shorter_one_holds_again() -> None:
    beat(limit_s=5)
    with within(100, "merged files"):
        assert looks(100) == []
        assert watchdog.find_hung() == "its thread main has made no progress for 100 s while it merged files"
    watchdog.find_hung()
    assert looks(4) == []
    assert watchdog.find_hung() == "its thread main has made no progress for 5 s"


def test_a_slow_step_is_worth_a_word_long_before_its_limit() -> None:
    beat(limit_s=1000)
    looks(60)
    assert watchdog.slow() == []
    watchdog.find_hung()
    words = "its thread main has made no progress for 60 s; the limit is 1000 s"
    assert watchdog.slow() == [("main", words)]
    beat()
    looks(1)
    assert watchdog.slow() == []


def test_a_thread_is_watched_from_its_start_to_its_end() -> None:
    group, runs, release = ThreadGroup(), threading.Event(), threading.Event()

    def wait() -> None:
        runs.set()
        release.wait(LIMIT_S)

    group.start("waits", wait, limit_s=3)
    assert runs.wait(LIMIT_S)
    assert looks(4) == ["its thread waits has made no progress for 3 s"]
    release.set()
    group.join(LIMIT_S)
    assert looks(10) == []


def test_a_start_that_does_not_return_is_blamed_on_the_thread_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CPython does when the new thread dies of want of memory before it has begun."""
    found: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda _self: found.extend(looks(11)))
    ThreadGroup().start("db-commit", lambda: None)
    assert found == ["its thread main has made no progress for 10 s while it started the thread db-commit"]


HANGS = """
import sys, threading
from pmdaemon.runtime import logs, watchdog
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup, watch
logs.configure("hangs")
watchdog.CHECK_S = 0.01
watch(Stop(), lambda text: print(text, flush=True))
ThreadGroup().start("stuck", threading.Lock().__enter__)  # fine, and over
lock = threading.Lock()
lock.acquire()
ThreadGroup().start("stuck", lock.acquire, limit_s=0.05)
watchdog.rest()
threading.Event().wait()
"""


def test_a_process_whose_thread_hangs_ends_with_a_status_and_says_which() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == HUNG_STATUS
    assert "its thread stuck has made no progress" in done.stdout
    assert "event=thread-hangs" in done.stderr


FULL = """
import sys, threading
from pmdaemon.runtime import logs, threads, watchdog
from pmdaemon.runtime.stop import Stop
logs.configure("hangs")
watchdog.CHECK_S = 0.01
def full(*_args, **_values):
    raise MemoryError
if sys.argv[1] == "log":
    threads.log = type("Full", (), {"critical": full})
    note = lambda text: print(text, flush=True)
else:
    note = full
threads.watch(Stop(), note)
lock = threading.Lock()
lock.acquire()
threads.ThreadGroup().start("stuck", lock.acquire, limit_s=0.05)
watchdog.rest()
threading.Event().wait()
"""


@pytest.mark.parametrize("part", ["log", "note"])
def test_a_process_that_hangs_ends_although_it_can_neither_be_logged_nor_noted(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, part], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == HUNG_STATUS
    assert "its thread stuck has made no progress" in done.stdout + done.stderr


def test_a_thread_that_wakes_from_rest_is_not_blamed_for_its_rest() -> None:
    rest()
    looks(700)
    assert watchdog.slow() == []
    beat()
    assert watchdog.slow() == []
    looks(1)
    assert watchdog.slow() == []


class Waking(watchdog.Progress):
    """A thread that ends its rest in the midst of a look: ``awake`` is called when its limit is read."""

    __slots__ = ("rests",)

    @property
    def limit_s(self) -> float:  # type: ignore[override]
        if self.rests and self.idle >= 700:
            self.rests = False
            self.steps += 1
        return watchdog.AT_REST if self.rests else 5.0

    @limit_s.setter
    def limit_s(self, _value: float) -> None:
        self.rests = True


def test_a_thread_that_wakes_during_a_look_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    waking = Waking("wakes", 5.0)
    monkeypatch.setattr(watchdog, "_watched", lambda: [waking])
    assert looks(706) == []
    assert watchdog.find_hung() == "its thread wakes has made no progress for 5 s"


def test_a_parent_hears_a_child_until_it_is_silent() -> None:
    pulse = Pulse()
    assert (pulse.check(), pulse.has_beaten) == (1, False)
    os.eventfd_write(pulse.fd, 1)
    os.eventfd_write(pulse.fd, 1)
    assert (pulse.check(), pulse.has_beaten) == (0, True)
    assert [pulse.check() for _ in range(3)] == [1, 2, 3]
    assert pulse.env() == {watchdog.PULSE_FD_VARIABLE: str(pulse.fd)}
    pulse.close()


def test_a_parent_that_takes_no_beat_is_reported_once_and_when_it_goes_on() -> None:
    pulse = Pulse()
    child = ParentPulse(pulse.fd)
    for _ in range(300):  # a parent that is late now and then takes two at a time
        assert [child.beat(), child.beat()] == ["", ""]
        pulse.check()
    said = [child.beat() for _ in range(3 * PARENT_REPORTED_S)]  # the first finds nothing left
    found = {number: text for number, text in enumerate(said) if text}
    silent = f"has made no progress for {PARENT_REPORTED_S} s: what ends is not started again, nothing stops"
    assert found == {PARENT_REPORTED_S: silent}
    assert pulse.check() == 0, "all of them are one"
    assert child.beat() == f"makes progress again, after {3 * PARENT_REPORTED_S - 1} s"
    pulse.check()
    assert (child.beat(), child.silent_s) == ("", 0)
    pulse.close()


HUNG_PARENT = """
import threading
from pmdaemon.runtime import logs, watchdog
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import watch
logs.configure("orphan")
watchdog.CHECK_S = 0.01
said = threading.Event()
def on_parent(text):
    print(text, flush=True)
    said.set()
watch(Stop(), on_parent=on_parent)
said.wait()
"""


def test_a_process_says_that_its_parent_hangs_and_goes_on() -> None:
    pulse = Pulse()
    done = subprocess.run(
        [sys.executable, "-c", HUNG_PARENT],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        pass_fds=[pulse.fd],
        env={**os.environ, **pulse.env()},
    )
    pulse.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"has made no progress for {PARENT_REPORTED_S} s")
    assert "event=parent-stalled" in done.stderr


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_gets_a_beat_and_children_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    name = f"sla-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}" if is_abstract else name)
        systemd.settimeout(LIMIT_S)
        monkeypatch.setenv(NOTIFY_SOCKET, f"@{name}" if is_abstract else name)
        manager = ServiceManager()
        assert NOTIFY_SOCKET not in os.environ
        manager.beat()
        assert systemd.recv(100) == b"WATCHDOG=1"
    manager.beat()  # systemd is away
    ServiceManager().beat()  # it never asked
