"""The dialled connection at its edges."""

from __future__ import annotations

import random
import selectors
import socket

from gateway_agent.link.connection import ServerConnection
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import FakeClock


class Silent:
    """A peer that says nothing."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def opened(self) -> None:
        self.told.append("opened")

    def received(self, data: bytes) -> None:
        self.told.append("received")

    def lost(self, reason: str) -> None:
        self.told.append(reason)

    def pending(self) -> bytearray:
        return bytearray()


def test_a_connection_that_was_reset_before_it_was_looked_at_is_dialled_again() -> None:
    """It has no error any more, and no peer's name: that must not end the link's loop."""
    clock, peer = FakeClock(), Silent()
    with selectors.DefaultSelector() as selector:
        backoff = Backoff(1.0, 5.0, 0.0, random.Random(1))
        connection = ServerConnection("pmdaemon", ("127.0.0.1", 9), peer, backoff, selector, clock)
        dialled = socket.socket()  # never connected: the kernel says of it what it says of a reset one
        connection._socket = dialled
        selector.register(dialled, selectors.EVENT_WRITE, connection)
        connection.ready(selectors.EVENT_WRITE)
        assert dialled.fileno() == -1
        assert connection.due_ns is not None
        assert connection.due_ns > clock.monotonic_ns()
        assert not selector.get_map()
    assert peer.told == []
