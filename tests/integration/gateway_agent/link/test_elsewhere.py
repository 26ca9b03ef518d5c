"""Other servers are tried while the one of the session is silent: real sockets, a clock that is set."""

from __future__ import annotations

import contextlib
import itertools
import random
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from gateway_agent.link.connection import PATIENCE_NS, PeerConnection
from gateway_agent.link.elsewhere import EVERY_NS, PROOF_NS, Attempt
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import FakeClock

LIMIT_S = 60.0


class Told:
    """A peer that says one word."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.to_send = bytearray()

    def opened(self) -> None:
        self.told.append("opened")
        self.to_send += b"hello"

    def received(self, data: bytes) -> None:
        self.told.append(data.decode())

    def lost(self, reason: str) -> None:
        self.told.append(reason)

    def pending(self) -> bytearray:
        return self.to_send


class Bench:
    """A connection to two servers, of which tests open and close the listeners."""

    def __init__(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        for listener in self.listeners:
            listener.settimeout(LIMIT_S)
        self.clock = FakeClock()
        self.peer = Told()
        self.selector = selectors.DefaultSelector()
        addresses = [("127.0.0.1", int(each.getsockname()[1])) for each in self.listeners]
        backoff = Backoff(1.0, 5.0, 0.0, random.Random(1))
        self.connection = PeerConnection("pmdaemon", addresses, self.peer, backoff, self.selector, self.clock)

    def turn(self) -> None:
        """As the link's loop."""
        self.connection.turn()
        for key, events in self.selector.select(0.01):
            if isinstance(key.data, PeerConnection | Attempt):
                key.data.ready(events)
        self.connection.turn()

    def until(self, ready: Callable[[], bool], step_s: float = 0.0) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < deadline_s
            self.turn()
            self.clock.advance(step_s)

    def open_first(self) -> socket.socket:
        self.until(lambda: self.peer.told == ["opened"])
        accepted = self.listeners[0].accept()[0]
        accepted.settimeout(LIMIT_S)
        return accepted

    def close(self) -> None:
        self.connection.abandon()
        for listener in self.listeners:
            listener.close()
        self.selector.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_a_silent_session_is_left_for_a_server_that_answers(bench: Bench) -> None:
    with bench.open_first():
        bench.clock.advance(60)  # it was in order for long: it would be dialled again first
        bench.connection.silent(True)
        bench.until(lambda: len(bench.peer.told) > 1, 0.1)
        assert bench.peer.told == ["opened", "another server answers, and this one does not", "opened"]
        with bench.listeners[1].accept()[0] as second:
            bench.turn()
            assert second.recv(64) == b"hello"
            assert not [key for key in bench.selector.get_map().values() if isinstance(key.data, Attempt)]


def test_a_silent_session_stays_while_every_other_server_refuses_and_may_speak_again(bench: Bench) -> None:
    bench.listeners[1].close()
    with bench.open_first() as first:
        bench.connection.silent(True)
        for _ in range(60):
            bench.turn()
            bench.clock.advance(EVERY_NS / 4e9)
        assert bench.peer.told == ["opened"]
        assert bench.connection.try_ns is not None
        first.sendall(b"late")
        bench.connection.silent(False)
        bench.until(lambda: bench.peer.told == ["opened", "late"])
        assert bench.connection.try_ns is None


def test_a_server_that_closes_at_once_does_not_answer(bench: Bench) -> None:
    """As a forwarder does whose server does not run."""
    with bench.open_first():
        bench.connection.silent(True)
        bench.listeners[1].settimeout(0)
        taken = 0
        for _ in range(200):
            bench.turn()
            with contextlib.suppress(BlockingIOError):
                bench.listeners[1].accept()[0].close()
                taken += 1
            bench.turn()
            bench.clock.advance(PROOF_NS / 3e9)
        assert taken > 1
        assert bench.peer.told == ["opened"]


def test_the_other_server_is_taken_when_a_dial_gets_no_answer(bench: Bench) -> None:
    """A machine without power refuses nothing: its address is waited for."""

    class Lost(PeerConnection):
        def _dial(self, address):  # type: ignore[no-untyped-def]  # the network takes it, and says no more
            if address[1] != bench.listeners[0].getsockname()[1]:
                super()._dial(address)
                return
            self._socket = socket.socket()
            self._due_ns = self._clock.monotonic_ns() + 5 * 10**9

    addresses = [("127.0.0.1", int(each.getsockname()[1])) for each in bench.listeners]
    backoff = Backoff(1.0, 5.0, 0.0, random.Random(1))
    bench.connection = Lost("pmdaemon", addresses, bench.peer, backoff, bench.selector, bench.clock)
    began_ns = bench.clock.monotonic_ns()
    bench.turn()
    assert bench.connection.try_ns == began_ns + PATIENCE_NS
    bench.until(lambda: bench.peer.told == ["opened"], 0.1)
    assert bench.clock.monotonic_ns() < began_ns + 3 * 10**9
    bench.listeners[1].accept()[0].close()


def test_servers_that_all_refuse_are_asked_again_within_a_second(bench: Bench) -> None:
    for listener in bench.listeners:
        listener.close()
    waits_s: list[float] = []
    for _ in range(8):
        bench.turn()
        bench.until(lambda: not bench.selector.get_map())  # all have refused: it waits
        due_ns = bench.connection.due_ns
        assert due_ns is not None
        waits_s.append((due_ns - bench.clock.monotonic_ns()) / 1e9)
        bench.clock.advance(waits_s[-1])
    assert max(waits_s) == 1.0


def test_a_silent_session_stays_when_there_is_no_descriptor_for_another_dial(bench: Bench) -> None:
    with bench.open_first() as first:
        bench.connection.silent(True)
        bench.turn()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as highest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), before[1]))
        try:
            for _ in range(20):
                bench.turn()
                bench.clock.advance(EVERY_NS / 2e9)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        first.sendall(b"late")
        bench.until(lambda: bench.peer.told == ["opened", "late"])


QUIET_S, SILENT_S = 8.0, 13.0  # as the link with an interval of a second


def test_two_servers_that_were_stopped_are_tried_less_and_less_often(bench: Bench) -> None:
    """Their kernels accept connections for them, so each seems to answer, and says nothing."""
    with bench.open_first() as first:
        first.sendall(b"welcome")
        bench.until(lambda: bench.peer.told == ["opened", "welcome"])
        step_s, now_s = 0.25, 0.0
        opened_s = [now_s]
        while now_s < 150:
            if bench.peer.told.count("opened") > len(opened_s):
                opened_s.append(now_s)
            silent_s = now_s - opened_s[-1]
            bench.connection.silent(silent_s >= QUIET_S)
            if bench.connection.due_ns is None and silent_s >= SILENT_S:
                bench.connection.close("silent", is_silent=True)
            bench.turn()
            bench.clock.advance(step_s)
            now_s += step_s
        stays_s = [later - former for former, later in itertools.pairwise(opened_s)]
        left = bench.peer.told.count("another server answers, and this one does not")
        assert len(opened_s) > 6, "they are tried for ever"
        assert stays_s[0] < QUIET_S + 2, "the first time at once"
        assert left <= 5, (
            "then a session is kept until it is given up, and dials have a back-off of their own"
        )
        assert min(stays_s[5:]) >= SILENT_S
        assert stays_s[-1] >= SILENT_S + 4
