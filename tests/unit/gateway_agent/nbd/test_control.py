import errno
from collections import deque

import pytest

from gateway_agent.nbd.control import MAX_CONNECTIONS, ControlServer
from gateway_agent.nbd.loop import IN, OUT
from pmdaemon.errors import BadCaps
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.plane_report import DpReport, PlaneReport, ReportedCaps, ReportedCut
from pmdaemon.wire.messages.plane_sets import PlaneCaps, PlaneThresholds
from pmdaemon.wire.messages.planes import DpCosts, DpHello
from tests.support.nbd import FakeLoop, FakeSocket

HELLO = DpHello("nbd-0", 1, [], [], is_stopping=False)
REPORT = PlaneReport(HELLO, ReportedCaps(0, None), 0, ReportedCut(1.0, 2.0), {}, ())


class Listener(FakeSocket):
    def __init__(self):
        super().__init__()
        self.waiting = deque()

    def accept(self):
        if not self.waiting:
            raise BlockingIOError
        if isinstance(self.waiting[0], OSError):
            raise self.waiting.popleft()
        return self.waiting.popleft(), ""


class Plane:
    def __init__(self):
        self.orders = []
        self.refuses = False

    def hello(self):
        return HELLO

    def collect(self, got):
        return frame.encode(Kind.DP_CUT, {"id": got + 1}, bytes(200_000))

    def caps(self, order):
        if self.refuses:
            raise BadCaps("caps", "no")
        self.orders.append(order)

    thresholds = costs = caps

    def lease(self):
        self.orders.append("lease")

    def report(self):
        return REPORT


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
    assert desk.heard(sock) == [(Kind.DP_HELLO, frame.decode(HELLO.encode()).header)] * 2


def test_orders_reach_the_plane_in_order(desk):
    caps = {"gen": 1, "lease_us": 5, "caps": [{"volume": "v", "ops_per_s": 2}], "later": 1}
    thresholds = {"version": 2, "entries": [], "later": 1}
    costs = {"version": 3, "backends": [{"backend": "b", "cost_write": None, "cost_bytes": 4096.0}]}
    sock = desk.connect()
    desk.heard(sock)
    desk.say(
        sock,
        frame.encode(Kind.DP_CAPS, caps),
        frame.encode(Kind.DP_THRESHOLDS, thresholds),
        frame.encode(Kind.DP_COSTS, costs),
        frame.encode(Kind.DP_LEASE, {}),
        frame.encode(Kind.DP_COLLECT, {"got": 6}),
    )
    assert desk.plane.orders == [
        PlaneCaps.parse(caps),
        PlaneThresholds.parse(thresholds),
        DpCosts.parse(costs),
        "lease",
    ]
    assert [order.said for order in desk.plane.orders[:2]] == [caps, thresholds]
    assert desk.heard(sock) == [(Kind.DP_CUT, {"id": 7})]


def test_refused_orders_leave_the_connection(desk):
    sock = desk.connect()
    desk.plane.refuses = True
    good = {"gen": 1, "version": 1, "lease_us": 5, "caps": [], "entries": []}
    for header in ({}, good):  # the second is well-formed, and the plane refuses it
        desk.say(sock, frame.encode(Kind.DP_CAPS, header), frame.encode(Kind.DP_THRESHOLDS, header))
    assert (sock.is_closed, desk.plane.orders) == (False, [])


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


def test_a_new_link_replaces_the_former_with_its_first_order(desk):
    first, lease = desk.connect(), frame.encode(Kind.DP_LEASE, {})
    desk.say(first, lease)
    second = desk.connect()
    assert not first.is_closed
    desk.say(second, lease)
    assert first.is_closed
    assert not second.is_closed
    desk.server.close()
    assert second.is_closed
    assert desk.loop.masks == {}


def test_a_question_of_this_host_is_answered_beside_the_link(desk):
    link, lease = desk.connect(), frame.encode(Kind.DP_LEASE, {})
    desk.say(link, lease)
    for _ in range(2 * MAX_CONNECTIONS):  # terminals that never leave
        asker = desk.connect()
        desk.heard(asker)
        desk.say(asker, frame.encode(Kind.DP_STATUS, {}))
        [raw] = frame.split(bytes(asker.sent))
        found = frame.decode(raw)
        assert (found.kind, found.header) == (Kind.DP_REPORT, {"plane": "nbd-0"})
        assert DpReport.parse(found, "nbd-0").report == REPORT
    assert not link.is_closed
    assert len(desk.loop.masks) == 1 + MAX_CONNECTIONS
    assert desk.plane.orders == ["lease"]


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
    assert [order.said for order in desk.plane.orders] == [header]


def test_without_descriptors_the_control_socket_is_not_watched_for_a_second(desk):
    fd = desk.listener.fileno()
    desk.listener.waiting.append(OSError(errno.EMFILE, "Too many open files"))
    desk.loop.handlers[fd](IN)
    assert desk.loop.masks == {fd: 0}
    desk.loop.fire(0.9)
    assert desk.loop.masks == {fd: 0}
    desk.loop.fire(0.1)
    assert desk.loop.masks == {fd: IN}
    assert not desk.connect().is_closed


def test_a_control_socket_that_moves_while_it_pauses_leaves_no_timer(desk):
    desk.listener.waiting.append(OSError(errno.EMFILE, "Too many open files"))
    desk.loop.handlers[desk.listener.fileno()](IN)
    other = Listener()
    desk.server.move(other)
    assert (desk.loop.masks, desk.loop.timers) == ({other.fileno(): IN}, {})
