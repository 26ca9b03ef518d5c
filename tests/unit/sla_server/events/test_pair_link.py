"""The link of a pair when the process has no descriptors left."""

from __future__ import annotations

import errno
import selectors
import ssl
from pathlib import Path
from typing import NoReturn

import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.sockets import ACCEPT_PAUSE_NS
from pmdaemon.runtime.threads import ThreadInbox
from sla_server.events import pair_link
from sla_server.events.config import EventPairConfig
from sla_server.events.pair_link import PairLink
from tests.support.partners import Partners


def no_context(_server_side: bool) -> NoReturn:
    raise ssl.SSLError("none in this test")


class NoDescriptor:
    """A socket of which no connection can be accepted, nor another one made."""

    def __init__(self, *_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


class FullListener:
    """A listener that is readable for ever."""

    def setblocking(self, _is_blocking: bool) -> None:
        """Nothing blocks here."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 7413

    def accept(self) -> NoReturn:
        self.accepts += 1
        raise OSError(errno.EMFILE, "Too many open files")

    def close(self) -> None:
        """Nothing is open."""

    accepts = 0


class FakeSelector(dict[object, int]):
    """What is registered is ready."""

    def register(self, each: object, events: int, data: object = None) -> None:
        assert each not in self
        self[each] = events

    def unregister(self, each: object) -> None:
        del self[each]

    def select(self, _timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        return [
            (selectors.SelectorKey(each, 0, events, None), events)  # type: ignore[arg-type]
            for each, events in self.items()
            if isinstance(each, FullListener)
        ]

    def close(self) -> None:
        """Nothing is open."""


class Linked:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.listener = FullListener()
        monkeypatch.setattr(pair_link.socket, "socket", NoDescriptor)  # as with no descriptor left
        monkeypatch.setattr(pair_link, "open_listener", lambda *_: self.listener)
        monkeypatch.setattr(pair_link.selectors, "DefaultSelector", FakeSelector)  # tests open no socket
        config = EventPairConfig(
            enabled=True, name="a", partner="b", listen="127.0.0.1:7413", address="127.0.0.1:1"
        )
        core = Partners(folder).a.core
        self.inbox: ThreadInbox[None] = ThreadInbox()
        self.link = PairLink(config, core, no_context, self.inbox, self.clock)

    def close(self) -> None:
        self.link.close()
        self.inbox.close()


def test_no_descriptor_to_dial_is_a_failed_dial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Linked(tmp_path, monkeypatch)
    linked.link.turn(0.0)
    assert linked.link.last_failure == "127.0.0.1:1: Too many open files"
    linked.clock.advance(10)
    linked.link.turn(0.0)  # it is tried again
    linked.close()


def test_no_descriptor_to_accept_pauses_the_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Linked(tmp_path, monkeypatch)
    for _ in range(5):
        linked.link.turn(0.0)
    assert linked.listener.accepts == 1
    linked.clock.advance(ACCEPT_PAUSE_NS / 1e9)
    for _ in range(5):
        linked.link.turn(0.0)
    assert linked.listener.accepts == 2
    linked.close()
