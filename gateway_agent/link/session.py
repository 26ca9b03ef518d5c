"""The agent's side of the session with the PMDaemon: a table and a pure class, bytes in, commands out.

Theory of operation. The agent dials in and the two sides speak in turn until the first POLL:

    closed ──opened──► connected ──WELCOME──► authenticated ──REGISTERED──► registered ──POLL──► polling
       ▲     HELLO         │       SCHEMA, REGISTER            STREAMS                              │
       └──── closed() ─────┴────── ERROR or BYE from either side: draining ◄────────────────────────┘

``RECEIVE`` and ``SEND`` are the whole protocol: which kinds may come in which state and where they lead, and
which we may send. A known kind out of turn is the peer's ``ProtocolViolation``; an unknown kind is answered
UNSUPPORTED and forgotten, so that a newer server can talk to us; a kind of our own out of turn is
``LocalProtocolError``.

Three kinds may be *due* before they are allowed: CAPS_ACK, THRESHOLDS_ACK and ALERT wait for polling, as do
REGISTER and STREAMS that came up in between. They are kept in order, at most ``MAX_DEFERRED``; then the
oldest alert is given up first (it is also in the agent's log).

Source: docs/formats/messages.md, "Between agent and PMDaemon".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

from gateway_agent.link.errors import LocalProtocolError
from pmdaemon.errors import ProtocolViolation
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import (
    Bye,
    CapSet,
    Certificate,
    Error,
    Hello,
    Poll,
    Registered,
    Thresholds,
    Unsupported,
    Welcome,
)
from pmdaemon.wire.messages.base import Message

MAX_DEFERRED: Final = 64


class AgentSessionState(Enum):
    """Where the session stands."""

    CLOSED = "closed"
    CONNECTED = "connected"
    AUTHENTICATED = "authenticated"
    REGISTERED = "registered"
    POLLING = "polling"
    DRAINING = "draining"


_END: Final = {Kind.ERROR: AgentSessionState.DRAINING, Kind.BYE: AgentSessionState.DRAINING}
RECEIVE: Final[dict[AgentSessionState, dict[Kind, AgentSessionState]]] = {
    AgentSessionState.CLOSED: {},
    AgentSessionState.CONNECTED: {
        Kind.WELCOME: AgentSessionState.AUTHENTICATED,
        Kind.UNSUPPORTED: AgentSessionState.CONNECTED,
        **_END,
    },
    AgentSessionState.AUTHENTICATED: {
        Kind.REGISTERED: AgentSessionState.REGISTERED,
        Kind.UNSUPPORTED: AgentSessionState.AUTHENTICATED,
        **_END,
    },
    AgentSessionState.REGISTERED: {
        Kind.POLL: AgentSessionState.POLLING,
        Kind.CAPS: AgentSessionState.REGISTERED,
        Kind.THRESHOLDS: AgentSessionState.REGISTERED,
        Kind.REGISTERED: AgentSessionState.REGISTERED,
        Kind.CERTIFICATE: AgentSessionState.REGISTERED,
        Kind.UNSUPPORTED: AgentSessionState.REGISTERED,
        **_END,
    },
    AgentSessionState.POLLING: {
        Kind.POLL: AgentSessionState.POLLING,
        Kind.CAPS: AgentSessionState.POLLING,
        Kind.THRESHOLDS: AgentSessionState.POLLING,
        Kind.REGISTERED: AgentSessionState.POLLING,  # answers a REGISTER with changed exports
        Kind.CERTIFICATE: AgentSessionState.POLLING,  # answers a RENEW
        Kind.UNSUPPORTED: AgentSessionState.POLLING,
        **_END,
    },
    AgentSessionState.DRAINING: {},
}
_ALWAYS: Final = frozenset({Kind.BYE, Kind.ERROR, Kind.UNSUPPORTED})
DEFERRABLE: Final = frozenset({Kind.REGISTER, Kind.STREAMS, Kind.CAPS_ACK, Kind.THRESHOLDS_ACK, Kind.ALERT})
SEND: Final[dict[AgentSessionState, frozenset[Kind]]] = {
    AgentSessionState.CLOSED: frozenset(),
    AgentSessionState.CONNECTED: _ALWAYS | {Kind.HELLO},
    AgentSessionState.AUTHENTICATED: _ALWAYS | {Kind.SCHEMA, Kind.REGISTER},
    AgentSessionState.REGISTERED: _ALWAYS | {Kind.STREAMS},
    AgentSessionState.POLLING: _ALWAYS | DEFERRABLE | {Kind.CUT, Kind.REPLY, Kind.RENEW},
    AgentSessionState.DRAINING: frozenset(),
}
AGENT_SIDE_LIMIT: Final = 64  # kinds from here on never travel on this connection
FromServer = Welcome | Registered | Poll | CapSet | Thresholds | Certificate | Error | Bye | Unsupported
_PARSERS: Final[dict[Kind, Callable[[dict[str, Any]], FromServer]]] = {
    Kind.WELCOME: Welcome.parse,
    Kind.REGISTERED: Registered.parse,
    Kind.POLL: Poll.parse,
    Kind.CAPS: CapSet.parse,
    Kind.THRESHOLDS: Thresholds.parse,
    Kind.CERTIFICATE: Certificate.parse,
    Kind.ERROR: Error.parse,
    Kind.BYE: Bye.parse,
    Kind.UNSUPPORTED: Unsupported.parse,
}


class AgentSession:
    """One agent's session; reused for every connection.

    ``outgoing`` are bytes for the socket: the shell takes them away as they are sent.
    Thread: the link's loop only.
    """

    def __init__(self) -> None:
        self.state = AgentSessionState.CLOSED
        self.outgoing = bytearray()
        self._reader = frame.FrameReader()
        self._deferred: list[Message] = []

    def opened(self, hello: Hello) -> None:
        """The connection is open; HELLO leaves."""
        self.outgoing = bytearray()
        self._reader = frame.FrameReader()
        self.state = AgentSessionState.CONNECTED
        self.send(hello)

    def closed(self) -> None:
        """The connection is gone. Deferred alerts stay for the next session; acknowledgements go."""
        self.state = AgentSessionState.CLOSED
        self.outgoing = bytearray()
        self._deferred = [item for item in self._deferred if item.KIND is Kind.ALERT]

    def receive(self, data: bytes) -> Iterator[FromServer]:
        """Commands completed by ``data``, in order. Nothing more is read once the session drains.

        Raises:
            WireError: the server broke framing, order or a header's type; close the connection.
        """
        received = list(self._reader.feed(data))
        for item in received:
            command = self._command(item)
            if command is not None:
                yield command
            if self.state in (AgentSessionState.DRAINING, AgentSessionState.CLOSED):
                return

    def _command(self, received: frame.Frame) -> FromServer | None:
        try:
            kind = Kind(received.kind)
        except ValueError:
            kind = None
        if kind is None or kind >= AGENT_SIDE_LIMIT:
            if Kind.UNSUPPORTED in SEND[self.state]:  # else it is draining, and the frame came too late
                self.send(Unsupported(received.kind))
            return None
        following = RECEIVE[self.state].get(kind)
        if following is None:
            expected = ", ".join(sorted(allowed.name for allowed in RECEIVE[self.state])) or "nothing"
            raise ProtocolViolation(self.state.value, kind.name, expected)
        command = _PARSERS[kind](received.header)
        self.state = following
        if following is AgentSessionState.POLLING:
            self._flush_deferred()
        return command

    def _flush_deferred(self) -> None:
        due, self._deferred = self._deferred, []
        for message in due:
            self.send(message)

    def _defer(self, message: Message) -> None:
        if len(self._deferred) >= MAX_DEFERRED:
            oldest_alert = (index for index, item in enumerate(self._deferred) if item.KIND is Kind.ALERT)
            del self._deferred[next(oldest_alert, 0)]
        self._deferred.append(message)

    def send(self, message: Message) -> None:
        """Queue one message, or keep it until the state allows it.

        Raises:
            LocalProtocolError: the state does not allow it and it cannot wait.
            FrameTooLarge: the header does not fit a frame.
        """
        if message.KIND in SEND[self.state]:
            self.outgoing += message.encode()
        elif message.KIND in DEFERRABLE and self.state is not AgentSessionState.DRAINING:
            self._defer(message)
        else:
            raise LocalProtocolError(self.state.value, message.KIND.name)

    def send_cut(self, raw: bytes, *, live: bool) -> None:
        """Queue a CUT frame as it stands in the spool, flagged LIVE if it is sent for judging only."""
        if Kind.CUT not in SEND[self.state]:
            raise LocalProtocolError(self.state.value, "CUT")
        start = len(self.outgoing)
        self.outgoing += raw
        if live:
            self.outgoing[start + _FLAGS_OFFSET] |= frame.FLAG_LIVE

    def drain(self, last: Bye | Error) -> None:
        """Send BYE or ERROR as the last frame, where the state still allows it."""
        if last.KIND in SEND[self.state]:
            self.outgoing += last.encode()
        self.state = AgentSessionState.DRAINING


_FLAGS_OFFSET: Final = 7  # of the frame's prefix, docs/formats/wire.md
