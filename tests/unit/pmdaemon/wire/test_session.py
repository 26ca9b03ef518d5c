"""The session table: every (state, kind) from the peer, legal and illegal, on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.errors import BadCut, FrameTooLarge, MalformedFrame, ProtocolViolation, WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import (
    MAX_CUT_BYTES,
    MAX_HELLO_BYTES,
    TABLE,
    WIRE_KINDS,
    Session,
    SessionState,
    Side,
    error_code,
    negotiate,
)

TO_STATE = {
    SessionState.CONNECTED: [],
    SessionState.AUTHENTICATED: [Kind.WELCOME],
    SessionState.REGISTERED: [Kind.WELCOME, Kind.REGISTERED],
    SessionState.POLLING: [Kind.WELCOME, Kind.REGISTERED, Kind.POLL],
}
# Written out by hand from docs/formats/messages.md, not computed from the table under test.
AGENT_MAY = {
    SessionState.CONNECTED: {Kind.HELLO, Kind.CA_QUERY, Kind.ENROL},
    SessionState.AUTHENTICATED: {Kind.SCHEMA, Kind.REGISTER},
    SessionState.REGISTERED: {
        Kind.STREAMS,
        Kind.REGISTER,
        Kind.CAPS_ACK,
        Kind.THRESHOLDS_ACK,
        Kind.ALERT,
        Kind.RENEW,
        Kind.SPACE,
    },
    SessionState.POLLING: {
        Kind.STREAMS,
        Kind.REGISTER,
        Kind.CAPS_ACK,
        Kind.THRESHOLDS_ACK,
        Kind.ALERT,
        Kind.RENEW,
        Kind.SPACE,
        Kind.CUT,
        Kind.REPLY,
    },
}
DAEMON_MAY = {
    SessionState.CONNECTED: {Kind.WELCOME, Kind.CA_CERT, Kind.CERTIFICATE},
    SessionState.AUTHENTICATED: {Kind.REGISTERED},
    SessionState.REGISTERED: {
        Kind.CAPS,
        Kind.THRESHOLDS,
        Kind.COSTS,
        Kind.POLL,
        Kind.REGISTERED,
        Kind.CERTIFICATE,
    },
    SessionState.POLLING: {
        Kind.CAPS,
        Kind.THRESHOLDS,
        Kind.COSTS,
        Kind.POLL,
        Kind.REGISTERED,
        Kind.CERTIFICATE,
    },
}
ALWAYS = {Kind.ERROR, Kind.BYE, Kind.UNSUPPORTED}


def daemon_in(state: SessionState) -> Session:
    session = Session(Side.DAEMON)
    for kind in TO_STATE[state]:
        session.sending(kind)
    assert session.state is state
    return session


@pytest.mark.parametrize("state", TO_STATE)
@pytest.mark.parametrize("kind", sorted(WIRE_KINDS))
def test_every_frame_of_the_agent_in_every_state(state: SessionState, kind: Kind) -> None:
    session = daemon_in(state)
    data = frame.encode(kind, {})
    if kind in AGENT_MAY[state] | ALWAYS:
        assert [item.kind for item in session.feed(data)] == [kind]
        assert session.state is state  # receiving never changes it
    else:
        with pytest.raises(ProtocolViolation) as caught:
            list(session.feed(data))
        assert caught.value.state == state.value
        assert caught.value.frame == kind.name
        assert all(name.name in caught.value.expected for name in AGENT_MAY[state])


@pytest.mark.parametrize("state", TO_STATE)
@pytest.mark.parametrize("kind", sorted(WIRE_KINDS))
def test_every_frame_of_the_daemon_in_every_state(state: SessionState, kind: Kind) -> None:
    session = daemon_in(state)
    if kind in DAEMON_MAY[state] | ALWAYS:
        session.sending(kind)
        if kind in (Kind.ERROR, Kind.BYE):
            assert session.state is SessionState.DRAINING
    else:
        with pytest.raises(ProtocolViolation, match="our "):
            session.sending(kind)
        assert session.state is state


@pytest.mark.parametrize("state", [SessionState.DRAINING, SessionState.CLOSED])
def test_an_ended_session_sends_nothing_and_hears_nothing(state: SessionState) -> None:
    session = daemon_in(SessionState.POLLING)
    if state is SessionState.DRAINING:
        session.sending(Kind.BYE)
    else:
        session.close()
    assert list(session.feed(frame.encode(Kind.REPLY, {}))) == []
    with pytest.raises(ProtocolViolation, match="expected nothing"):
        session.sending(Kind.POLL)


def test_pipelined_handshake_is_served_frame_by_frame() -> None:
    session = Session(Side.DAEMON)
    answers = {Kind.HELLO: Kind.WELCOME, Kind.REGISTER: Kind.REGISTERED}
    stream = b"".join(
        frame.encode(kind, {}) for kind in (Kind.HELLO, Kind.SCHEMA, Kind.REGISTER, Kind.STREAMS)
    )
    seen = []
    for item in session.feed(stream):
        seen.append(item.kind)
        if item.kind in answers:
            session.sending(answers[Kind(item.kind)])
    assert seen == [Kind.HELLO, Kind.SCHEMA, Kind.REGISTER, Kind.STREAMS]
    assert session.state is SessionState.REGISTERED


@pytest.mark.parametrize("kind", [0, 63, 200, Kind.CUTS, Kind.SET_CAPS])
def test_unknown_kinds_are_yielded_for_an_unsupported_answer(kind: int) -> None:
    assert [item.kind for item in daemon_in(SessionState.POLLING).feed(frame.encode(kind, {}))] == [kind]


def test_a_stranger_may_send_little_and_a_session_much() -> None:
    large = frame.encode(Kind.HELLO, {}, bytes(MAX_HELLO_BYTES))
    with pytest.raises(FrameTooLarge):
        list(Session(Side.DAEMON).feed(large[:8]))
    session = Session(Side.DAEMON)
    for _ in session.feed(frame.encode(Kind.HELLO, {})):
        session.sending(Kind.WELCOME)
    session.sending(Kind.REGISTERED)
    session.sending(Kind.POLL)
    assert len(list(session.feed(frame.encode(Kind.CUT, {}, bytes(MAX_CUT_BYTES - 16))))) == 1
    with pytest.raises(FrameTooLarge):
        list(session.feed(frame.encode(Kind.CUT, {}, bytes(MAX_CUT_BYTES))))


def test_the_agents_side_reads_the_same_table() -> None:
    agent = Session(Side.AGENT)
    agent.sending(Kind.HELLO)
    with pytest.raises(ProtocolViolation):
        agent.sending(Kind.REPLY)
    assert [item.kind for item in agent.feed(frame.encode(Kind.WELCOME, {}))] == [Kind.WELCOME]
    assert agent.state is SessionState.AUTHENTICATED
    agent.sending(Kind.REGISTER)
    with pytest.raises(ProtocolViolation, match="POLL"):
        list(agent.feed(frame.encode(Kind.POLL, {})))


def test_table_has_no_way_back() -> None:
    order = list(SessionState)
    for (state, _, _), following in TABLE.items():
        assert order.index(following) >= order.index(state)


@pytest.mark.parametrize(("low", "high", "chosen"), [(1, 1, 1), (0, 5, 1), (1, 9, 1)])
def test_negotiation(low: int, high: int, chosen: int) -> None:
    assert negotiate(low, high) == chosen


@pytest.mark.parametrize(("low", "high"), [(2, 3), (0, 0), (1, 0)])
def test_versions_that_do_not_meet(low: int, high: int) -> None:
    with pytest.raises(ProtocolViolation, match="upgrade the older side"):
        negotiate(low, high)


def test_error_codes() -> None:
    assert error_code(FrameTooLarge("x", 2, 1)) == "too-large"
    assert error_code(MalformedFrame("x")) == "malformed"
    assert error_code(BadCut("x")) == "bad-cut"
    assert error_code(ProtocolViolation("a", "b", "c")) == "violation"
    assert error_code(WireError("x")) == "refused"


@given(
    st.lists(st.tuples(st.sampled_from(sorted(WIRE_KINDS)), st.binary(max_size=40)), max_size=6), st.data()
)
@settings(max_examples=200)
def test_damaged_streams_end_in_frames_or_wire_errors(
    parts: list[tuple[Kind, bytes]], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(frame.encode(kind, {"k": 1}, blob) for kind, blob in parts))
    for _ in range(data.draw(st.integers(0, 3))):
        if stream:
            stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    session = daemon_in(data.draw(st.sampled_from(list(TO_STATE))))
    try:
        for item in session.feed(bytes(stream)):
            assert isinstance(item.header, dict)
    except WireError:
        pass
