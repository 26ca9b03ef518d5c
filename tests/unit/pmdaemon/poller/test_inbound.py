"""The selector of the inbound thread: owners by descriptor, interest in both directions, level-triggered."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from selectors import EVENT_READ, EVENT_WRITE

import pytest

from pmdaemon.poller.inbound import READ, WRITE, Readiness


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture
def readiness() -> Iterator[Readiness]:
    made = Readiness()
    yield made
    made.close()


def test_ready_until_it_is_read(readiness: Readiness, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ)
    assert readiness.wait(0, 8) == []
    far.send(b"12")
    for expected in (b"1", b"2"):
        assert readiness.wait(0, 8) == [(near.fileno(), READ)]
        assert readiness.owners[near.fileno()] is near
        assert near.recv(1) == expected
    assert readiness.wait(0, 8) == []


def test_interest_can_change(readiness: Readiness, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ | EVENT_WRITE)
    assert readiness.wait(0, 8) == [(near.fileno(), WRITE)]
    far.send(b"1")
    assert readiness.wait(0, 8) == [(near.fileno(), READ | WRITE)]
    readiness.modify(near, EVENT_READ)
    assert readiness.wait(0, 8) == [(near.fileno(), READ)]


def test_a_hang_up_is_more_than_reading(
    readiness: Readiness, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ)
    far.close()
    [(_, events)] = readiness.wait(0, 8)
    assert events & select.EPOLLHUP
    assert events & ~WRITE


def test_unregistered_is_forgotten_and_may_come_again(
    readiness: Readiness, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ)
    far.send(b"1")
    readiness.unregister(near)
    assert readiness.owners == {}
    assert readiness.wait(0, 8) == []
    readiness.register(near, EVENT_READ)
    assert readiness.wait(0, 8) == [(near.fileno(), READ)]
