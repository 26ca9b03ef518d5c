"""The session table: every (state, kind) pair in both directions."""

import re
from pathlib import Path

import pytest

import gateway_agent
from pmdaemon.errors import LocalProtocolError, MalformedFrame, ProtocolViolation, WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import PROTO_MAX, PROTO_MIN, Kind
from pmdaemon.wire.messages.agent import Hello, Poll
from pmdaemon.wire.messages.alerts import ALERT_KINDS
from pmdaemon.wire.messages.base import WireMessage
from pmdaemon.wire.messages.ends import Bye
from pmdaemon.wire.session import (
    DEFERRABLE,
    MAX_DEFERRED,
    RECEIVE,
    SEND,
    AgentSession,
    SessionState,
)
from tests.support.link import caps, poll, thresholds, welcome

HELLO = Hello.of("g", "n", 1, "t")
LEGAL = {
    Kind.WELCOME: welcome(),
    Kind.REGISTERED: frame.encode(Kind.REGISTERED, {"ok": True}),
    Kind.POLL: poll(),
    Kind.CAPS: caps(1),
    Kind.THRESHOLDS: thresholds(1),
    Kind.COSTS: frame.encode(Kind.COSTS, {"version": 1, "backends": []}),
    Kind.CERTIFICATE: frame.encode(Kind.CERTIFICATE, {"cert": b"der", "ca": b"der"}),
    Kind.ERROR: frame.encode(Kind.ERROR, {"code": "c", "text": "t"}),
    Kind.BYE: frame.encode(Kind.BYE, {"reason": "r"}),
    Kind.UNSUPPORTED: frame.encode(Kind.UNSUPPORTED, {"kind": 9}),
}
EXPECTED = {
    (SessionState.CONNECTED, Kind.WELCOME): SessionState.AUTHENTICATED,
    (SessionState.AUTHENTICATED, Kind.REGISTERED): SessionState.REGISTERED,
    (SessionState.REGISTERED, Kind.REGISTERED): SessionState.REGISTERED,
    (SessionState.REGISTERED, Kind.CAPS): SessionState.REGISTERED,
    (SessionState.REGISTERED, Kind.THRESHOLDS): SessionState.REGISTERED,
    (SessionState.REGISTERED, Kind.COSTS): SessionState.REGISTERED,
    (SessionState.REGISTERED, Kind.CERTIFICATE): SessionState.REGISTERED,
    (SessionState.REGISTERED, Kind.POLL): SessionState.POLLING,
    (SessionState.POLLING, Kind.CERTIFICATE): SessionState.POLLING,
    (SessionState.POLLING, Kind.POLL): SessionState.POLLING,
    (SessionState.POLLING, Kind.CAPS): SessionState.POLLING,
    (SessionState.POLLING, Kind.THRESHOLDS): SessionState.POLLING,
    (SessionState.POLLING, Kind.COSTS): SessionState.POLLING,
    (SessionState.POLLING, Kind.REGISTERED): SessionState.POLLING,
}
ALIVE = (
    SessionState.CONNECTED,
    SessionState.AUTHENTICATED,
    SessionState.REGISTERED,
    SessionState.POLLING,
)
for _state in ALIVE:
    EXPECTED |= {(_state, Kind.UNSUPPORTED): _state}
    EXPECTED |= {(_state, kind): SessionState.DRAINING for kind in (Kind.ERROR, Kind.BYE)}


class Bare(WireMessage):
    """A frame of any kind, with any header."""

    def __init__(self, kind, header=None):
        self.KIND = kind
        self._header = header or {}

    def header(self):
        return self._header


WIRE_KINDS = [kind for kind in Kind if kind < 64]


def in_state(state: SessionState) -> AgentSession:
    session = AgentSession()
    if state is SessionState.CLOSED:
        return session
    session.opened(HELLO)
    if state is SessionState.DRAINING:
        session.drain(Bye("r"))
        return session
    for step in (Kind.WELCOME, Kind.REGISTERED, Kind.POLL)[: ALIVE.index(state)]:
        list(session.receive(LEGAL[step]))
    assert session.state is state
    del session.outgoing[:]
    return session


def kinds_in(session: AgentSession) -> list[Kind]:
    return [Kind(frame.decode(raw).kind) for raw in frame.split(bytes(session.outgoing))]


@pytest.mark.parametrize("kind", WIRE_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("state", list(SessionState), ids=lambda state: state.value)
def test_every_received_pair(state, kind):
    session = in_state(state)
    data = LEGAL.get(kind, frame.encode(kind, {}))
    following = EXPECTED.get((state, kind))
    if following is None:
        with pytest.raises(ProtocolViolation, match=f"{kind.name} is not allowed while {state.value}"):
            list(session.receive(data))
        assert session.state is state
    else:
        received = list(session.receive(data))
        assert len(received) == 1
        assert session.state is following


@pytest.mark.parametrize("kind", WIRE_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("state", list(SessionState), ids=lambda state: state.value)
def test_every_sent_pair(state, kind):
    session = in_state(state)
    if kind in SEND[state]:
        session.send(Bare(kind))
        assert kinds_in(session) == [kind]
    elif kind in DEFERRABLE and state is not SessionState.DRAINING:
        session.send(Bare(kind))
        assert not session.outgoing
    else:
        with pytest.raises(LocalProtocolError, match=kind.name):
            session.send(Bare(kind))


def test_the_tables_name_every_state():
    assert set(RECEIVE) == set(SEND) == set(SessionState)


def test_hello_says_which_versions_we_speak():
    session = in_state(SessionState.CLOSED)
    session.opened(HELLO)
    header = frame.decode(bytes(session.outgoing)).header
    assert (header["proto_min"], header["proto_max"], header["gw"]) == (PROTO_MIN, PROTO_MAX, "g")


def test_a_protocol_we_do_not_speak_is_refused():
    session = in_state(SessionState.CONNECTED)
    header = {"proto": PROTO_MAX + 1, "interval_us": 1, "software": "s"}
    with pytest.raises(MalformedFrame, match="protocol"):
        list(session.receive(frame.encode(Kind.WELCOME, header)))
    assert session.state is SessionState.CONNECTED


def test_what_is_due_too_early_leaves_in_order_at_the_first_poll():
    session = in_state(SessionState.REGISTERED)
    for kind in (Kind.CAPS_ACK, Kind.ALERT, Kind.REGISTER):
        session.send(Bare(kind))
    list(session.receive(poll()))
    assert kinds_in(session) == [Kind.CAPS_ACK, Kind.ALERT, Kind.REGISTER]


def test_alerts_outlive_a_session_and_acknowledgements_do_not():
    session = in_state(SessionState.REGISTERED)
    session.send(Bare(Kind.CAPS_ACK))
    session.send(Bare(Kind.ALERT))
    session.closed()
    session.opened(HELLO)
    list(session.receive(welcome()))
    list(session.receive(LEGAL[Kind.REGISTERED] + poll()))
    assert kinds_in(session) == [Kind.HELLO, Kind.ALERT]


def test_deferred_frames_are_bounded_and_old_alerts_go_first():
    session = in_state(SessionState.REGISTERED)
    session.send(Bare(Kind.REGISTER))
    for number in range(2 * MAX_DEFERRED):
        session.send(Bare(Kind.ALERT, {"n": number}))
    list(session.receive(poll()))
    sent = kinds_in(session)
    assert len(sent) == MAX_DEFERRED
    assert sent[0] is Kind.REGISTER
    last = list(frame.split(bytes(session.outgoing)))[-1]
    assert frame.decode(last).header["n"] == 2 * MAX_DEFERRED - 1


def test_nothing_is_read_behind_a_goodbye():
    session = in_state(SessionState.POLLING)
    received = list(session.receive(LEGAL[Kind.BYE] + poll()))
    assert [type(item) for item in received] == [Bye]


def test_frames_may_arrive_in_pieces():
    session = in_state(SessionState.REGISTERED)
    data = caps(4) + thresholds(2) + poll(9, [(1, 2)], (1, 3), True)
    received = [item for byte in data for item in session.receive(bytes([byte]))]
    assert [type(item).__name__ for item in received] == ["CapSet", "Thresholds", "Poll"]
    assert received[2] == Poll(9, 5, ((1, 2),), (1, 3), True)


def test_live_flag_is_set_on_the_wire_only():
    session = in_state(SessionState.POLLING)
    raw = frame.encode(Kind.CUT, {"a": 1})
    session.send_cut(raw, live=True)
    session.send_cut(raw, live=False)
    flags = [frame.decode(item).flags for item in frame.split(bytes(session.outgoing))]
    assert flags == [frame.FLAG_LIVE, 0]
    with pytest.raises(LocalProtocolError):
        in_state(SessionState.REGISTERED).send_cut(raw, live=False)


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        (Kind.POLL, {"poll": "x", "sent_ns": 1, "ack": []}),
        (Kind.POLL, {"poll": 1, "sent_ns": 1, "ack": None}),
        (Kind.POLL, {"poll": 1, "sent_ns": 1, "ack": [[1]]}),
        (Kind.POLL, {"poll": 1, "sent_ns": 1, "ack": [], "from": [1, "2"]}),
        (Kind.CAPS, {"gen": 1, "lease_us": 1, "caps": [{}]}),
        (Kind.CAPS, {"gen": 1, "lease_us": 1, "caps": [{"volume": "v", "cost_per_s": -1}]}),
        (Kind.CAPS, {"gen": 1, "lease_us": 1, "caps": [{"volume": "v", "ops_per_s": True}]}),
        (Kind.CAPS, {"gen": 1, "lease_us": 0, "caps": []}),
        (Kind.THRESHOLDS, {"version": 1, "entries": [{"volume": "v", "client": "*", "io": "x"}]}),
        (Kind.THRESHOLDS, {"version": 1, "entries": {}}),
        (Kind.UNSUPPORTED, {"kind": "no"}),
    ],
)
def test_headers_of_wrong_types_are_refused_by_name(kind, header):
    with pytest.raises(MalformedFrame, match=kind.name):
        list(in_state(SessionState.POLLING).receive(frame.encode(kind, header)))


def test_garbage_is_a_wire_error():
    with pytest.raises(WireError):
        list(in_state(SessionState.POLLING).receive(b"GET / HTTP/1.1\r\n"))


def test_the_server_knows_every_kind_of_alert_that_we_raise() -> None:
    """An unknown one would get a prefix there, and problems and documents would not find it."""
    raised: set[str] = set()
    for path in Path(gateway_agent.__file__).parent.rglob("*.py"):
        raised |= set(re.findall(r'alerts\.report\(\s*"([a-z-]+)"', path.read_text()))
    assert "spool-overflow" in raised
    assert raised <= ALERT_KINDS


def test_an_unknown_kind_behind_the_last_frame_is_nobodys_fault() -> None:
    session = AgentSession()
    session.opened(HELLO)
    list(session.receive(frame.encode(Kind.BYE, {"reason": "r"})))
    session.outgoing.clear()
    assert list(session.receive(frame.encode(50, {}))) == []
    assert not session.outgoing
