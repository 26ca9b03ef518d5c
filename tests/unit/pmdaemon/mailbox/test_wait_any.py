"""Waiting on several mailboxes and other descriptors."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from pmdaemon.mailbox import BACKSTOP_S, attach, wait_any
from pmdaemon.mailbox import mailbox as mailbox_module
from pmdaemon.mailbox.errors import MailboxCorrupt
from tests.support.mailbox import make_mesh


class Sleeper:
    """A mailbox of which only the sleep is known."""

    def __init__(self, fd: int, has_message: bool = False, is_damaged: bool = False) -> None:
        self.fd, self.has_message, self.is_damaged = fd, has_message, is_damaged
        self.is_asleep = False

    def fileno(self) -> int:
        return self.fd

    def prepare_sleep(self) -> bool:
        if self.is_damaged:
            raise MailboxCorrupt("lane", "x")
        self.is_asleep = not self.has_message
        return self.is_asleep

    def awake(self) -> None:
        self.is_asleep = False


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """(descriptors, milliseconds) of each sleep; none takes any time."""
    found: list[tuple[list[int], float]] = []

    class Poll:
        def __init__(self) -> None:
            self.fds: list[int] = []

        def register(self, source: Sleeper | int, events: int) -> None:
            assert events == select.POLLIN
            self.fds.append(source if isinstance(source, int) else source.fileno())

        def poll(self, timeout_ms: float) -> None:
            found.append((self.fds, timeout_ms))

    monkeypatch.setattr(mailbox_module.select, "poll", Poll)
    return found


def test_it_sleeps_on_all_of_them_and_no_longer_than_a_lost_ring_allows(
    polls: list[tuple[list[int], float]],
) -> None:
    one, two = Sleeper(11), Sleeper(12)
    for timeout_s in (0.01, 60.0, -1.0):
        wait_any((one, two), timeout_s, [13])
    assert polls == [([11, 12, 13], 1000 * timeout_s) for timeout_s in (0.01, BACKSTOP_S, 0.0)]
    assert not one.is_asleep
    assert not two.is_asleep


def test_a_message_anywhere_is_no_time_to_sleep(polls: list[tuple[list[int], float]]) -> None:
    one = Sleeper(11)
    wait_any((one, Sleeper(12, has_message=True)), 1.0)
    assert (polls, one.is_asleep) == ([], False)


def test_all_are_awake_again_after_damage(polls: list[tuple[list[int], float]]) -> None:
    one = Sleeper(11)
    with pytest.raises(MailboxCorrupt):
        wait_any((one, Sleeper(12, is_damaged=True)), 1.0)
    assert (polls, one.is_asleep) == ([], False)


def test_who_was_waited_for_is_not_rung_any_more(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        wait_any([b], 0.0)
        a.post("b", b"x")
        assert a.stats()["rings"] == 0
        assert b.take()[0].payload == b"x"
