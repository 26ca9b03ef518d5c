from collections import deque

import pytest

from gateway_agent.errors import BadCaps
from gateway_agent.nbd.control import ControlServer
from gateway_agent.nbd.loop import IN, OUT
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.nbd import FakeLoop, FakeSocket


class Listener(FakeSocket):
    def __init__(self):
        super().__init__()
        self.waiting = deque()

    def accept(self):
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft(), ""


class Plane:
    def __init__(self):
        self.orders = []
        self.refuses = False

    def hello(self):
        return {"plane": "nbd-0"}

    def collect(self, got):
        return frame.encode(Kind.DP_CUT, {"id": got + 1}, bytes(200_000))

    def caps(self, header):
        if self.refuses:
            raise BadCaps("caps", "no")
        self.orders.append(header)

    thresholds = caps

    def lease(self):
        self.orders.append("lease")


class Desk:
    def __init__(self):
        self.loop, self.listener, self.plane = FakeLoop(FakeClock()), Listener(), Plane()
        self.server = ControlServer(self.loop, self.listener, self.plane)

    def connect(self):
        sock = FakeSocket()
        self.listener.waiting.append(sock)
        self.loop.handlers[self.listener.fileno()](IN)
        return sock

    def say(self, sock, *frames):
        sock.incoming.append(b"".join(frames))
        self.loop.handlers[sock.fileno()](IN)

    def heard(self, sock):
        found = [frame.decode(raw) for raw in frame.split(bytes(sock.sent))]
        sock.sent.clear()
        return [(item.kind, item.header) for item in found]


@pytest.fixture
def desk():
    return Desk()


def test_hello_first_and_again_when_something_is_learned(desk):
    sock = desk.connect()
    desk.server.send_hello()
    assert desk.heard(sock) == [(Kind.DP_HELLO, {"plane": "nbd-0"})] * 2


def test_orders_reach_the_plane_in_order(desk):
    sock = desk.connect()
    desk.heard(sock)
    desk.say(
        sock,
        frame.encode(Kind.DP_CAPS, {"gen": 1}),
        frame.encode(Kind.DP_THRESHOLDS, {"version": 2}),
        frame.encode(Kind.DP_LEASE, {}),
        frame.encode(Kind.DP_COLLECT, {"got": 6}),
    )
    assert desk.plane.orders == [{"gen": 1}, {"version": 2}, "lease"]
    assert desk.heard(sock) == [(Kind.DP_CUT, {"id": 7})]


def test_refused_orders_leave_the_connection(desk):
    sock = desk.connect()
    desk.plane.refuses = True
    desk.say(sock, frame.encode(Kind.DP_CAPS, {}), frame.encode(Kind.DP_THRESHOLDS, {}))
    assert not sock.is_closed


def test_an_unknown_kind_is_unsupported(desk):
    sock = desk.connect()
    desk.heard(sock)
    desk.say(sock, frame.encode(Kind.POLL, {}))
    assert desk.heard(sock) == [(Kind.UNSUPPORTED, {"kind": int(Kind.POLL)})]


@pytest.mark.parametrize("data", [b"\xff" * 64, frame.encode(Kind.DP_COLLECT, {"got": "1"})])
def test_a_malformed_message_ends_that_connection_with_the_reason(desk, data):
    sock = desk.connect()
    desk.heard(sock)
    desk.say(sock, data, frame.encode(Kind.DP_LEASE, {}))
    assert desk.heard(sock)[0][0] == Kind.ERROR
    assert sock.is_closed
    assert desk.plane.orders == []
    assert not desk.connect().is_closed


def test_a_new_link_replaces_the_former(desk):
    first = desk.connect()
    second = desk.connect()
    assert first.is_closed
    assert not second.is_closed
    desk.server.close()
    assert second.is_closed
    assert desk.loop.masks == {}


def test_a_slow_link_gets_everything_and_a_stuck_one_is_dropped(desk):
    sock = desk.connect()
    desk.heard(sock)
    sock.window = 100
    collect = frame.encode(Kind.DP_COLLECT, {"got": 1})
    desk.say(sock, collect)
    assert desk.loop.masks[sock.fileno()] == IN | OUT
    sock.window = 1 << 30
    desk.loop.handlers[sock.fileno()](OUT)
    assert desk.heard(sock) == [(Kind.DP_CUT, {"id": 2})]
    sock.window = 0
    for _ in range(50):
        if not sock.is_closed:
            desk.say(sock, collect)
    assert sock.is_closed


def test_a_link_that_leaves_is_forgotten(desk):
    sock = desk.connect()
    sock.is_ended = True
    desk.loop.handlers[sock.fileno()](IN)
    assert sock.is_closed
    desk.server.send_hello()


def test_caps_that_are_folded_are_unfolded():
    desk = Desk()
    sock = desk.connect()
    header = {"gen": 7, "lease_us": 1, "caps": [{"volume": f"v{n}" + "x" * 120} for n in range(600)]}
    encoded = frame.encode_folding(Kind.DP_CAPS, header)
    desk.say(sock, encoded[:40_000])
    desk.say(sock, encoded[40_000:])
    assert desk.plane.orders == [header]
