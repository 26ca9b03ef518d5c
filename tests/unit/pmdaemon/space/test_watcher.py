"""The round through the sources: readings, and failures said once."""

from __future__ import annotations

import threading

import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.space.readers import SpaceUnreadable
from pmdaemon.space.watcher import SourceBack, SourceFailed, SpaceWatcher, WatchedSource
from pmdaemon.wire.messages.space import Space


class Source:
    """Reads what ``problem`` says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem = ""
        self.reads = 0

    def read(self, now_us: int) -> Space:
        self.reads += 1
        if self.problem:
            raise SpaceUnreadable(self.name, self.problem)
        return Space(self.name, "path", "", 10, 5, None, 0, 0, (), now_us)


def test_each_source_is_read_at_the_time_of_the_clock_also_behind_one_that_fails() -> None:
    a, b, clock = Source("a"), Source("b"), FakeClock(unix_us=7)
    watcher = SpaceWatcher(
        lambda _stop: [WatchedSource(each.name, each.read) for each in (a, b)], 60, 1, clock
    )
    a.problem = "no disk"
    watcher.read_all()
    failed, reading = watcher.inbox.drain()
    assert failed == SourceFailed("a", "no disk")
    assert isinstance(reading, Space)
    assert (reading.pool, reading.at_us) == ("b", 7)


def test_a_failure_is_said_once_and_its_end_too() -> None:
    source = Source("a")
    watcher = SpaceWatcher(lambda _stop: [WatchedSource("a", source.read)], 60, 1, FakeClock())
    outcomes = []
    for problem in ("one 1", "one 22", "two", "two", "", ""):
        source.problem = problem
        watcher.read_all()
        outcomes += [type(each) for each in watcher.inbox.drain()]
    assert outcomes == [SourceFailed, SourceFailed, SourceBack, Space, Space]
    assert source.reads == 6


def test_the_thread_reads_until_it_is_stopped() -> None:
    source = Source("a")
    watcher = SpaceWatcher(lambda _stop: [WatchedSource("a", source.read)], 3600, 1, FakeClock())
    watcher.start()
    watcher.stop()
    assert watcher.stopping()
    assert source.reads <= 1
    watcher.read_all()
    assert source.reads <= 1, "it reads nothing more"


def test_a_reader_that_waits_on_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array may take a minute to answer; what is to be closed after it was not."""
    monkeypatch.setattr("pmdaemon.space.watcher.STOP_S", 0.05)
    reading, release = threading.Event(), threading.Event()

    def read(_now_us: int) -> Space:
        reading.set()
        release.wait(60)
        raise SpaceUnreadable("a", "away")

    watcher = SpaceWatcher(lambda _stop: [WatchedSource("a", read)], 60, 1, FakeClock())
    watcher.start()
    assert reading.wait(60)
    watcher.stop()
    release.set()
    watcher.stop()
    assert watcher.inbox.drain() == []
