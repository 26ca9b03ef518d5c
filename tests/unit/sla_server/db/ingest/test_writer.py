"""A window counts as committed when the commit itself has said so, and not because its thread is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import SystemClock
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest.writer import BackgroundCommit

WINDOW: Any = object()


class Store:
    """Counts commits; the first ends with ``error``."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.where = "a database"
        self.commits = 0
        self.error = error

    def commit(self, _window: object, _oldest_seq: int) -> None:
        self.commits += 1
        error, self.error = self.error, None
        if error is not None:
            raise error


def under_way(store: Any) -> BackgroundCommit:
    return BackgroundCommit(store, SystemClock(), lambda _since_us: None)


def test_a_window_is_committed_once() -> None:
    store = Store()
    commit = under_way(store)
    commit.start(WINDOW, 10, 1)
    assert commit.wait() is WINDOW
    assert (store.commits, commit.is_over) == (1, True)


def test_after_an_error_it_is_tried_again() -> None:
    store = Store(MemoryError())
    commit = under_way(store)
    commit.start(WINDOW, 10, 1)
    with pytest.raises(MemoryError):
        commit.wait()
    assert commit.wait() is WINDOW
    assert store.commits == 2


def test_a_thread_that_dies_before_the_commit_has_committed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store, true_register = Store(), watchdog.register

    def full(_name: str, _limit_s: float) -> None:
        raise MemoryError

    commit = under_way(store)
    monkeypatch.setattr(watchdog, "register", full)
    commit.start(WINDOW, 10, 1)
    with pytest.raises(DatabaseUnavailable, match="db-commit ended before"):
        commit.wait()
    assert (store.commits, commit.is_over) == (0, True)
    monkeypatch.setattr(watchdog, "register", true_register)
    assert commit.wait() is WINDOW
    assert store.commits == 1


def test_a_thread_that_cannot_be_started_has_committed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = Store()
    commit = under_way(store)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        commit.start(WINDOW, 10, 1)
        with pytest.raises(DatabaseUnavailable, match="can't start new thread"):
            commit.wait()
    assert commit.is_over
    assert commit.wait() is WINDOW
    assert store.commits == 1
