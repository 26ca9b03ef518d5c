"""The dialled connection at its edges, its backoff, and the listener of an agent that is dialled."""

import errno
import heapq
import random
import selectors
import socket
from collections import Counter

import pytest

from gateway_agent.config import ReconnectConfig
from gateway_agent.link import connection as module
from gateway_agent.link.connection import LinkListener, PeerConnection
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
        connection = PeerConnection("pmdaemon", [("127.0.0.1", 9)], peer, backoff, selector, clock)
        dialled = socket.socket()  # never connected: the kernel says of it what it says of a reset one
        connection._socket = dialled
        selector.register(dialled, selectors.EVENT_WRITE, connection)
        connection.ready(selectors.EVENT_WRITE)
        assert dialled.fileno() == -1
        assert connection.due_ns is not None
        assert connection.due_ns > clock.monotonic_ns()
        assert not selector.get_map()
    assert peer.told == []


def test_without_descriptors_a_dial_fails_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link would end of it, and with it the session and the other connections that are open."""
    clock, peer, tries = FakeClock(), Silent(), []

    def exhausted(*_args: object) -> socket.socket:
        tries.append(clock.monotonic_ns())
        raise OSError(errno.EMFILE, "Too many open files")

    with selectors.DefaultSelector() as selector:
        backoff = Backoff(1.0, 5.0, 0.0, random.Random(1))
        connection = PeerConnection("pmdaemon", [("127.0.0.1", 9)], peer, backoff, selector, clock)
        first_ns = clock.monotonic_ns()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", exhausted)
            for _ in range(9):
                connection.turn()
            assert connection.due_ns == first_ns + 10**9
            clock.advance(1.0)
            connection.turn()
        assert tries == [first_ns, first_ns + 10**9]
        assert not selector.get_map()
    assert peer.told == []


class Dialling(PeerConnection):
    """Dials nothing; ``answers`` says which addresses take a connection."""

    def __init__(self, addresses, selector, clock):
        self.answers: set[tuple[str, int]] = set()
        self.dialled: list[tuple[str, int]] = []
        self.far: list[socket.socket] = []
        super().__init__(
            "pmdaemon", addresses, Silent(), Backoff(1.0, 8.0, 0.0, random.Random(1)), selector, clock
        )

    def _dial(self, address):  # what reaches the network
        self.dialled.append(address)
        if address not in self.answers:
            self.close("refused")
            return
        near, far = socket.socketpair()
        self.far.append(far)
        self.take(near)

    def end(self):
        self.abandon()
        for far in self.far:
            far.close()


A, B, C = ("sla-1", 7411), ("sla-2", 7411), ("sla-3", 7411)


def test_of_several_servers_the_next_one_is_dialled_at_once_and_all_again_after_a_pause():
    clock = FakeClock()
    with selectors.DefaultSelector() as selector:
        connection = Dialling([A, B, C], selector, clock)
        for _ in range(9):
            connection.turn()
        assert connection.dialled == [A, B, C]
        clock.advance(1.0)
        connection.answers = {B}
        for _ in range(9):
            connection.turn()
        assert connection.dialled == [A, B, C, A, B]
        assert connection.due_ns is None
        connection.end()


@pytest.mark.parametrize(
    ("lasted_s", "has_answered", "is_silent", "next_one"),
    [(60, True, False, A), (60, True, True, B), (0.1, True, False, B), (60, False, False, B)],
)
def test_a_connection_in_order_is_made_again_at_its_server_and_any_other_at_the_next(
    lasted_s, has_answered, is_silent, next_one
):
    clock = FakeClock()
    with selectors.DefaultSelector() as selector:
        connection = Dialling([A, B], selector, clock)
        connection.answers = {A, B}
        connection.turn()
        if has_answered:
            connection.far[0].send(b"x")
            connection.ready(selectors.EVENT_READ)
        clock.advance(lasted_s)
        connection.close("lost", is_silent=is_silent)
        connection.turn()
        assert connection.dialled == [A]  # after a pause
        clock.advance(1.0)
        connection.turn()
        assert connection.dialled == [A, next_one]
        connection.end()


def test_a_server_that_accepts_and_says_nothing_is_dialled_less_and_less_often():
    clock = FakeClock()
    with selectors.DefaultSelector() as selector:
        connection = Dialling([A, B], selector, clock)
        connection.answers = {A, B}
        waits_s = []
        for _ in range(5):
            connection.turn()
            clock.advance(60)
            connection.close("silent", is_silent=True)
            waits_s.append((connection.due_ns - clock.monotonic_ns()) / 1e9)
            clock.advance(waits_s[-1])
        assert waits_s == [1, 2, 4, 8, 8]
        assert connection.dialled == [A, B, A, B, A]
        connection.end()


def test_waits_double_to_their_limit_and_begin_again():
    backoff = Backoff(0.2, 1.0, 0.0, random.Random(1))
    assert [backoff.failed() for _ in range(4)] == [0.2, 0.4, 0.8, 1.0]
    backoff.succeeded()
    assert backoff.failed() == 0.2


def test_jitter_only_shortens():
    backoff = Backoff(1.0, 1.0, 0.3, random.Random(1))
    waits = [backoff.failed() for _ in range(50)]
    assert 0.7 <= min(waits) < max(waits) <= 1.0


def test_a_fleet_that_lost_its_server_at_once_returns_spread():
    """4,000 agents with the default waits, a server that takes 100 sessions a tenth of a second."""
    reconnect = ReconnectConfig()
    fleet = [
        Backoff(reconnect.first_s, reconnect.max_s, reconnect.jitter_ratio, random.Random(seed))
        for seed in range(4000)
    ]
    due = [(backoff.failed(), index) for index, backoff in enumerate(fleet)]
    heapq.heapify(due)
    attempts, served = Counter(), Counter()
    while due:
        at_s, index = heapq.heappop(due)
        tenth = int(at_s * 10)
        attempts[tenth] += 1
        if served[tenth] < 100:
            served[tenth] += 1
        else:
            heapq.heappush(due, (at_s + fleet[index].failed(), index))
    assert sum(served.values()) == 4000
    assert max(attempts.values()) < 800, "no instant sees more than a share of the fleet"
    assert max(served) < 100, "and ten seconds later all are back, where 4 s is the least possible"
    first_second = sum(count for tenth, count in attempts.items() if tenth < 10)
    assert first_second < 3 * 4000


class FakeListener:
    """Accepts what is given, or fails as the kernel may."""

    def __init__(self):
        self.ours, self._far = socket.socketpair()
        self.outcomes = []

    def fileno(self):
        return self.ours.fileno()

    def getsockname(self):
        return ("127.0.0.1", 7412)

    def accept(self):
        if not self.outcomes:
            raise BlockingIOError
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome, ("127.0.0.1", 40000)

    def close(self):
        self.ours.close()
        self._far.close()


class Taken:
    def __init__(self):
        self.sockets = []

    def take(self, sock):
        self.sockets.append(sock)


@pytest.mark.parametrize(
    ("number", "pause_s"), [(errno.ECONNABORTED, 0), (errno.EPROTO, 1), (errno.EMFILE, 1)]
)
def test_a_failed_accept_is_no_end_and_the_next_is_let_in(number, pause_s, monkeypatch):
    listener, taken = FakeListener(), Taken()
    monkeypatch.setattr(module, "_listen", lambda _address: listener)
    with selectors.DefaultSelector() as selector:
        clock = FakeClock()
        listening = LinkListener(("127.0.0.1", 0), taken, selector, clock, tls=None)
        near, far = socket.socketpair()
        listener.outcomes = [OSError(number, "gone"), near]
        listening.ready(selectors.EVENT_READ)
        assert taken.sockets == []
        if pause_s:  # nothing watches the listener, and the loop wakes when the pause ends
            assert not selector.get_map()
            assert listening.due_ns == clock.monotonic_ns() + pause_s * 10**9
            listening.turn()
            listening.ready(selectors.EVENT_READ)
            assert (taken.sockets, len(selector.get_map())) == ([], 0)
            clock.advance(pause_s)
            listening.turn()
        assert (listening.due_ns, [key.fileobj for key in selector.get_map().values()]) == (None, [listener])
        listening.ready(selectors.EVENT_READ)
        assert taken.sockets == [near]
        assert not near.getblocking()
        near.close()
        far.close()
        listening.close()


def test_a_listener_that_pauses_can_be_closed(monkeypatch):
    listener = FakeListener()
    monkeypatch.setattr(module, "_listen", lambda _address: listener)
    with selectors.DefaultSelector() as selector:
        listening = LinkListener(("127.0.0.1", 0), Taken(), selector, FakeClock(), tls=None)
        listener.outcomes = [OSError(errno.EMFILE, "Too many open files")]
        listening.ready(selectors.EVENT_READ)
        listening.close()
        assert listener.ours.fileno() == -1
