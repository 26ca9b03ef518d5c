"""A session between an agent and the PMDaemon: bytes in, frames out, one table of what is allowed when.

Theory of operation. The agent connects and speaks first. Each side's frames are checked against ``TABLE``:
(state, sender, kind) -> next state; a pair that is not there is a ``ProtocolViolation``. Only frames of the
*daemon* move a session forward (WELCOME, REGISTERED, POLL): the daemon decides that a step has succeeded,
so a pipelining agent, which sends HELLO, SCHEMA and REGISTER in one write, is served frame by frame and
needs no waiting. ERROR and BYE end a session from either side: the sender is ``draining`` (it sends no
more, and discards what still arrives so that the peer can read the reason before the reset), the receiver
is ``closed``.

    connected --WELCOME--> authenticated --REGISTERED--> registered --POLL--> polling
        any state --ERROR or BYE sent--> draining --end of stream--> closed

A frame of a kind this side does not know is *not* an error: ``feed`` yields it and the shell answers
UNSUPPORTED, so that a newer peer may try something and get an answer. Kinds for our own processes (64 and
above) count as unknown here. A frame that contradicts the table, a limit or the framing raises; the shell
answers ERROR (``error_code``), closes that connection and nothing else.

A peer without a certificate stays connected: it may ask for the CA (CA_QUERY) and enrol (ENROL), once each
as far as its time goes, and dials again with what it got. ``admit_enrolment_alone`` says so: of any other
kind of frame nothing but the prefix is looked at.

Limits: before WELCOME a peer may send ``MAX_HELLO_BYTES`` a frame, so that a stranger cannot make us buffer;
after it ``MAX_CUT_BYTES``, below the general frame limit because a cut travels on inside a CUTS frame.

Thread: ``feed`` belongs to the receiving thread. ``sending`` may be called by another thread under the
connection's lock: on the daemon's side only ``sending`` and ``close`` change ``state``, receiving never does.

The agent's link adds one thing (``AgentSession``): what is *due* before it is allowed. CAPS_ACK,
THRESHOLDS_ACK and ALERT wait for polling, as do REGISTER and STREAMS that came up in between. They are kept
in order, at most ``MAX_DEFERRED``; then the oldest alert is given up first (it is also in the agent's log).
The link never enrols, so answers to CA_QUERY and ENROL are out of place there.

Source: docs/formats/messages.md; DESIGN.md 5.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from pmdaemon.errors import (
    BadCut,
    FrameTooLarge,
    LocalProtocolError,
    MalformedFrame,
    PeerRefused,
    ProtocolViolation,
    WireError,
)
from pmdaemon.runtime.excerpt import printable
from pmdaemon.wire.frame import FLAG_LIVE, FLAGS_AT, MAX_FRAME_BYTES, Frame, FrameReader, unfold
from pmdaemon.wire.kinds import PROTO_MAX, PROTO_MIN, Kind
from pmdaemon.wire.messages.agent import CapSet, Hello, Poll, Registered, Welcome
from pmdaemon.wire.messages.base import WireMessage
from pmdaemon.wire.messages.certificates import Certificate
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.ends import Bye, Error, Unsupported
from pmdaemon.wire.messages.thresholds import Thresholds

OWN_KINDS: Final = 64  # kinds from here on travel between our own processes only
MAX_HELLO_BYTES: Final = 4096  # a HELLO is some 200 bytes; names and features leave room to grow
MAX_CUT_BYTES: Final = MAX_FRAME_BYTES - (
    72 << 10
)  # room for the header (64 KiB at most) of the CUTS around it


class SessionState(Enum):
    """How far a session has come."""

    CONNECTED = "connected"
    AUTHENTICATED = "authenticated"
    REGISTERED = "registered"
    POLLING = "polling"
    DRAINING = "draining"
    CLOSED = "closed"

    __hash__ = object.__hash__  # members are single; Enum's own hashes the name, in Python, for every frame


class Side(Enum):
    """Which of the two sends."""

    AGENT = "agent"
    DAEMON = "daemon"

    __hash__ = object.__hash__  # as in SessionState


def _table() -> dict[tuple[SessionState, Side, Kind], SessionState]:
    agent, daemon = Side.AGENT, Side.DAEMON
    acks = (
        Kind.CAPS_ACK,
        Kind.THRESHOLDS_ACK,
        Kind.ALERT,
        Kind.STREAMS,
        Kind.REGISTER,
        Kind.RENEW,
        Kind.SPACE,
    )
    orders = (Kind.CAPS, Kind.THRESHOLDS, Kind.COSTS, Kind.REGISTERED, Kind.CERTIFICATE)
    table = {
        (SessionState.CONNECTED, agent, Kind.HELLO): SessionState.CONNECTED,
        (SessionState.CONNECTED, agent, Kind.CA_QUERY): SessionState.CONNECTED,
        (SessionState.CONNECTED, daemon, Kind.CA_CERT): SessionState.CONNECTED,
        (SessionState.CONNECTED, agent, Kind.ENROL): SessionState.CONNECTED,
        (SessionState.CONNECTED, daemon, Kind.CERTIFICATE): SessionState.CONNECTED,
        (SessionState.CONNECTED, daemon, Kind.WELCOME): SessionState.AUTHENTICATED,
        (SessionState.AUTHENTICATED, agent, Kind.SCHEMA): SessionState.AUTHENTICATED,
        (SessionState.AUTHENTICATED, agent, Kind.REGISTER): SessionState.AUTHENTICATED,
        (SessionState.AUTHENTICATED, daemon, Kind.REGISTERED): SessionState.REGISTERED,
    }
    for state in (SessionState.REGISTERED, SessionState.POLLING):
        table |= {(state, agent, kind): state for kind in acks}
        table |= {(state, daemon, kind): state for kind in orders}
        table[state, daemon, Kind.POLL] = SessionState.POLLING
    table |= {(SessionState.POLLING, agent, kind): SessionState.POLLING for kind in (Kind.CUT, Kind.REPLY)}
    for state in (
        SessionState.CONNECTED,
        SessionState.AUTHENTICATED,
        SessionState.REGISTERED,
        SessionState.POLLING,
    ):
        for side in Side:
            table[state, side, Kind.UNSUPPORTED] = state
            table[state, side, Kind.ERROR] = SessionState.DRAINING
            table[state, side, Kind.BYE] = SessionState.DRAINING
    return table


TABLE: Final = MappingProxyType(_table())
ENROLMENT: Final = frozenset((int(Kind.CA_QUERY), int(Kind.ENROL)))
WIRE_KINDS: Final = frozenset(kind for kind in Kind if kind < OWN_KINDS)

_CODES: Final = (
    (FrameTooLarge, "too-large"),
    (MalformedFrame, "malformed"),
    (BadCut, "bad-cut"),
    (ProtocolViolation, "violation"),
)


def error_code(error: WireError) -> str:
    """The ``code`` of the ERROR frame that tells a peer why its connection is closed."""
    if isinstance(error, PeerRefused):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), "refused")


def farewell(received: Frame) -> str:
    """What an agent's BYE or ERROR says, for people: as reason why its session has ended."""
    name = "BYE" if received.kind == Kind.BYE else "ERROR"
    text = received.header.get("text") or received.header.get("reason") or "no reason given"
    return f"the agent said {name}: {printable(text, 300)}"


def negotiate(proto_min: int, proto_max: int) -> int:
    """Highest protocol version both sides speak.

    Raises:
        ProtocolViolation: the ranges do not meet; the text names both.
    """
    chosen = min(proto_max, PROTO_MAX)
    if proto_min > proto_max or chosen < max(proto_min, PROTO_MIN):
        raise ProtocolViolation(
            SessionState.CONNECTED.value,
            f"HELLO of protocol versions {proto_min}..{proto_max}",
            f"a version between {PROTO_MIN} and {PROTO_MAX}; upgrade the older side",
        )
    return chosen


_WHILE_POLLING: Final = frozenset(
    int(kind) for state, side, kind in TABLE if state is SessionState.POLLING and side is Side.AGENT
)


def _then_raise(frames: list[Frame], error: WireError) -> Iterator[Frame]:
    yield from frames
    raise error


class Session:
    """One side's view of one connection.

    Attributes:
        side: which side we are.
        state: see the table; on the daemon's side changed by ``sending`` and ``close`` only, on the agent's
            side also by what the daemon sends.
        is_whole: no part of a frame is held: what comes next begins one.
    """

    __slots__ = ("_peer", "_reader", "is_whole", "side", "state")

    def __init__(self, side: Side) -> None:
        self.side = side
        self.state = SessionState.CONNECTED
        self.is_whole = True
        self._peer = Side.DAEMON if side is Side.AGENT else Side.AGENT
        self._reader = FrameReader(MAX_HELLO_BYTES if side is Side.DAEMON else MAX_FRAME_BYTES)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return self._reader.pending_bytes

    def admit_enrolment_alone(self) -> None:
        """The peer has shown no certificate where one is needed."""
        self._reader.readable = ENROLMENT

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes, each allowed by the table or of an unknown kind.

        The frames are views into ``data``: use or copy them before the next read. Nothing is yielded any
        more once the session drains.

        Raises:
            WireError: framing, size or state; close the connection with ``error_code``.
        """
        if self.state is SessionState.POLLING and self.side is Side.DAEMON:
            return self._feed_polling(data)
        return self._feed_steps(data)

    def _feed_polling(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Statistics, all the time: no frame of an agent changes the state or the limit any more."""
        frames, error = self._reader.take(data)
        self.is_whole = not self._reader.partial
        for count, frame in enumerate(frames):
            if frame.kind not in _WHILE_POLLING and frame.kind in WIRE_KINDS:
                kind = Kind(frame.kind).name
                error = ProtocolViolation(self.state.value, kind, self.allowed(self._peer))
                del frames[count:]
                break
        return iter(frames) if error is None else _then_raise(frames, error)

    def _feed_steps(self, data: bytes | memoryview) -> Generator[Frame, None, None]:
        if self.state in (SessionState.DRAINING, SessionState.CLOSED):
            return
        try:
            with closing(self._reader.feed(data)) as frames:  # closed half-way, it keeps what is not read yet
                for frame in frames:
                    self._check(frame)
                    yield frame
                    if self.state in (SessionState.DRAINING, SessionState.CLOSED):
                        return
                    self._set_limit()
        finally:
            self.is_whole = not self._reader.partial

    def _set_limit(self) -> None:
        if self.state is not SessionState.CONNECTED:
            self._reader.limit_bytes = MAX_CUT_BYTES if self.side is Side.DAEMON else MAX_FRAME_BYTES

    @property
    def pending(self) -> bytes:
        """Bytes that have arrived and were not yielded."""
        return self._reader.pending

    def resume(self, state: SessionState, pending: bytes) -> None:
        """Go on where a session in another process stopped."""
        self.state = state
        self._set_limit()
        self._reader.resume(pending)
        self.is_whole = not pending

    def _check(self, frame: Frame) -> None:
        # Kinds are integers with the hash of one: no member has to be looked up for a frame that is right.
        following = TABLE.get((self.state, self._peer, frame.kind))  # type: ignore[arg-type]
        if following is None:
            if frame.kind not in WIRE_KINDS:
                return
            raise ProtocolViolation(self.state.value, Kind(frame.kind).name, self.allowed(self._peer))
        if self.side is Side.AGENT:
            self.state = following

    def allowed(self, side: Side) -> str:
        """Names of the kinds that ``side`` may send now, for messages."""
        names = [kind.name for state, who, kind in TABLE if state is self.state and who is side]
        return ", ".join(names) or "nothing"

    def sending(self, kind: Kind) -> None:
        """Account for a frame of ours that is about to leave.

        Raises:
            ProtocolViolation: we may not send it now; a defect of ours, or a race with the session's end.
        """
        if kind is Kind.POLL and self.state is SessionState.POLLING:
            return  # nearly every frame of ours
        following = TABLE.get((self.state, self.side, kind))
        if following is None:
            raise ProtocolViolation(self.state.value, f"our {kind.name}", self.allowed(self.side))
        self.state = following

    def close(self) -> None:
        """The connection is gone."""
        self.state = SessionState.CLOSED


# -- the agent's link

MAX_DEFERRED: Final = 64
DEFERRABLE: Final = frozenset({Kind.REGISTER, Kind.STREAMS, Kind.CAPS_ACK, Kind.THRESHOLDS_ACK, Kind.ALERT})
_ENROLS: Final = frozenset({Kind.CA_QUERY, Kind.ENROL, Kind.CA_CERT, Kind.CERTIFICATE})
_LATER: Final = (DEFERRABLE - {Kind.STREAMS}) | {
    Kind.RENEW,
    Kind.SPACE,
}  # allowed sooner; the link waits for a POLL


def _of_link(side: Side) -> dict[SessionState, Mapping[Kind, SessionState]]:
    """What ``side`` may send to or from the link, by state: kind to next state."""
    found: dict[SessionState, dict[Kind, SessionState]] = {state: {} for state in SessionState}
    for (state, sender, kind), following in TABLE.items():
        is_enrolment = state is SessionState.CONNECTED and kind in _ENROLS
        is_early = side is Side.AGENT and state is SessionState.REGISTERED and kind in _LATER
        if sender is side and not is_enrolment and not is_early:
            found[state][kind] = following
    return {state: MappingProxyType(kinds) for state, kinds in found.items()}


RECEIVE: Final = MappingProxyType(_of_link(Side.DAEMON))
SEND: Final = MappingProxyType(_of_link(Side.AGENT))
FromServer = (
    Welcome | Registered | Poll | CapSet | Thresholds | Costs | Certificate | Error | Bye | Unsupported
)
_PARSERS: Final[dict[Kind, Callable[[dict[str, Any]], FromServer]]] = {
    Kind.WELCOME: Welcome.parse,
    Kind.REGISTERED: Registered.parse,
    Kind.POLL: Poll.parse,
    Kind.CAPS: CapSet.parse,
    Kind.THRESHOLDS: Thresholds.parse,
    Kind.COSTS: Costs.parse,
    Kind.CERTIFICATE: Certificate.parse,
    Kind.ERROR: Error.parse,
    Kind.BYE: Bye.parse,
    Kind.UNSUPPORTED: Unsupported.parse,
}


class AgentSession:
    """One agent's session; reused for every connection.

    ``outgoing`` are bytes for the socket: the loop takes them away as they are sent.
    Thread: the link's loop only.
    """

    def __init__(self) -> None:
        self.state = SessionState.CLOSED
        self.outgoing = bytearray()
        self._reader = FrameReader()
        self._deferred: list[WireMessage] = []

    def opened(self, hello: Hello) -> None:
        """The connection is open; HELLO leaves."""
        self.outgoing = bytearray()
        self._reader = FrameReader()
        self.state = SessionState.CONNECTED
        self.send(hello)

    def closed(self) -> None:
        """The connection is gone. Deferred alerts stay for the next session; acknowledgements go."""
        self.state = SessionState.CLOSED
        self.outgoing = bytearray()
        self._deferred = [item for item in self._deferred if item.KIND is Kind.ALERT]

    def receive(self, data: bytes) -> Iterator[FromServer]:
        """Messages completed by ``data``, in order. Nothing more is read once the session drains.

        Raises:
            WireError: the server broke framing, order or a header's type; close the connection.
        """
        received = list(self._reader.feed(data))
        for item in received:
            command = self._command(item)
            if command is not None:
                yield command
            if self.state in (SessionState.DRAINING, SessionState.CLOSED):
                return

    def _command(self, received: Frame) -> FromServer | None:
        try:
            kind = Kind(received.kind)
        except ValueError:
            kind = None
        if kind is None or kind >= OWN_KINDS:
            if Kind.UNSUPPORTED in SEND[self.state]:  # else it is draining, and the frame came too late
                self.send(Unsupported(received.kind))
            return None
        following = RECEIVE[self.state].get(kind)
        if following is None:
            expected = ", ".join(sorted(allowed.name for allowed in RECEIVE[self.state])) or "nothing"
            raise ProtocolViolation(self.state.value, kind.name, expected)
        command = _PARSERS[kind](unfold(received).header if kind is Kind.CAPS else received.header)
        self.state = following
        if following is SessionState.POLLING:
            self._flush_deferred()
        return command

    def keeps(self, message: WireMessage) -> bool:
        """Whether a message waits for a state that allows it."""
        return any(message is item for item in self._deferred)

    @property
    def waiting_alerts(self) -> int:
        """How many alerts wait for a state that allows them."""
        return sum(item.KIND is Kind.ALERT for item in self._deferred)

    def _flush_deferred(self) -> None:
        due, self._deferred = self._deferred, []
        for message in due:
            self.send(message)

    def _defer(self, message: WireMessage) -> None:
        if len(self._deferred) >= MAX_DEFERRED:
            oldest_alert = (index for index, item in enumerate(self._deferred) if item.KIND is Kind.ALERT)
            del self._deferred[next(oldest_alert, 0)]
        self._deferred.append(message)

    def send(self, message: WireMessage) -> None:
        """Queue one message, or keep it until the state allows it.

        Raises:
            LocalProtocolError: the state does not allow it and it cannot wait.
            FrameTooLarge: the header does not fit a frame.
        """
        if message.KIND in SEND[self.state]:
            self.outgoing += message.encode()
        elif message.KIND in DEFERRABLE and self.state is not SessionState.DRAINING:
            self._defer(message)
        else:
            raise LocalProtocolError(self.state.value, message.KIND.name)

    def send_cut(self, raw: bytes, *, live: bool) -> None:
        """Queue a CUT frame as it is in the spool, flagged LIVE if it is sent for judging only."""
        if Kind.CUT not in SEND[self.state]:
            raise LocalProtocolError(self.state.value, "CUT")
        start = len(self.outgoing)
        self.outgoing += raw
        if live:
            self.outgoing[start + FLAGS_AT] |= FLAG_LIVE

    def drain(self, last: Bye | Error) -> None:
        """Send BYE or ERROR as the last frame, where the state still allows it."""
        if last.KIND in SEND[self.state]:
            self.outgoing += last.encode()
        self.state = SessionState.DRAINING
