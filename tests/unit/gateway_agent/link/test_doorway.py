"""The door of an agent that is dialled: who knocks and is gone again must not end the link."""

import errno
import selectors
import socket

import pytest

from gateway_agent.link import listener as doorway
from pmdaemon.runtime.clock import FakeClock


class Listener:
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


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EMFILE])
def test_a_failed_accept_is_no_end_and_the_next_is_let_in(number, monkeypatch):
    listener, taken = Listener(), Taken()
    monkeypatch.setattr(doorway, "_listen", lambda _address: listener)
    with selectors.DefaultSelector() as selector:
        door = doorway.LinkListener(("127.0.0.1", 0), taken, selector, FakeClock(), tls=None)
        near, far = socket.socketpair()
        listener.outcomes = [OSError(number, "gone"), near]
        door.ready(selectors.EVENT_READ)
        assert taken.sockets == []
        door.ready(selectors.EVENT_READ)
        assert taken.sockets == [near]
        assert not near.getblocking()
        near.close()
        far.close()
        door.close()
