r"""Negotiation as two transition tables: server's side (our clients), client's side (our upstreams).

Sans-IO: ``feed(data)`` takes received bytes and returns a list of actions; no socket, clock, thread or TLS.

Server side. GO, INFO and EXPORT_NAME need facts that the upstream must be asked for, so they lead to BACKEND:
the shell opens the backend (action ``Open``) and calls ``opened`` or ``refused``; bytes that arrive
meanwhile wait.

    FLAGS ──flags──► OPTIONS ──GO, EXPORT_NAME, INFO──► BACKEND ──opened──► TRANSMISSION (GO, EXPORT_NAME)
                     ▲  │ LIST, other: answered in place   │    └─opened──► OPTIONS      (INFO)
                     └──┼──────────refused (GO, INFO)──────┘
                        └──ABORT, or refused EXPORT_NAME (it has no error reply)──► CLOSED
    OPTIONS ──STARTTLS──► TLS ──secured──► OPTIONS

STARTTLS leads to TLS (action ``StartTls``): the shell calls ``secured``, and from then on gives this machine
only what was encrypted. Bytes that came behind STARTTLS, before TLS, may be anyone's: the connection ends.
Where TLS is required, any other option but ABORT is refused before it, and EXPORT_NAME closes.

Client side. GO, or INFO when only the facts are wanted: a ``qemu-nbd`` without ``-t`` ends after its first
client in transmission. EXPORT_NAME is the fallback for servers that know neither. Block sizes are asked for
when our own client asks, because a server may be stricter with clients that ask, and when the server insists.

    GREETING ──greeting──► GO ──ACK──► READY
       │                   ├──ERR_BLOCK_SIZE_REQD──► GO, now with block sizes
       │                   └──ERR_UNSUP──► NAME ──size, flags──► READY
       └──greeting, with TLS──► ASKED ──ACK──► TLS ──secured──► GO

A pair (state, event) that is not in the table is a peer's fault: ``NbdProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from gateway_agent.errors import NbdProtocolError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.protocol import ExportFacts, Opt, Rep
from pmdaemon.runtime.excerpt import printable

REASON_CHARACTERS: Final = 300


class HandshakeState(Enum):
    """Where a negotiation stands (both sides)."""

    FLAGS = "waiting for the client's flags"
    OPTIONS = "waiting for an option"
    BACKEND = "waiting for the backend"
    TLS = "waiting for TLS"
    TRANSMISSION = "in transmission"
    CLOSED = "closed"
    GREETING = "waiting for the server's greeting"
    ASKED = "waiting for the answer to STARTTLS"
    GO = "waiting for the answer to GO or INFO"
    NAME = "waiting for the answer to EXPORT_NAME"
    READY = "ready"


class Event(Enum):
    """What moves a negotiation."""

    FLAGS = "client flags"
    OPEN = "GO, INFO or EXPORT_NAME"
    ANSWER = "an option answered in place"
    ABORT = "ABORT"
    OPENED_GO = "backend opened for transmission"
    OPENED_INFO = "backend opened for information"
    REFUSED = "backend refused"
    REFUSED_NAME = "EXPORT_NAME refused"
    STARTTLS = "STARTTLS accepted"
    SECURED = "TLS established"
    GREETED = "greeting"
    GREETED_TLS = "greeting, and TLS is wanted"
    INFO = "information reply"
    ACK = "acknowledgement"
    SIZES_REQUIRED = "block sizes must be asked for"
    UNSUPPORTED = "GO is not supported"
    SIZE = "size and flags"


SERVER_TABLE: Final[dict[tuple[HandshakeState, Event], HandshakeState]] = {
    (HandshakeState.FLAGS, Event.FLAGS): HandshakeState.OPTIONS,
    (HandshakeState.OPTIONS, Event.OPEN): HandshakeState.BACKEND,
    (HandshakeState.OPTIONS, Event.ANSWER): HandshakeState.OPTIONS,
    (HandshakeState.OPTIONS, Event.ABORT): HandshakeState.CLOSED,
    (HandshakeState.OPTIONS, Event.REFUSED_NAME): HandshakeState.CLOSED,
    (HandshakeState.OPTIONS, Event.STARTTLS): HandshakeState.TLS,
    (HandshakeState.TLS, Event.SECURED): HandshakeState.OPTIONS,
    (HandshakeState.BACKEND, Event.OPENED_GO): HandshakeState.TRANSMISSION,
    (HandshakeState.BACKEND, Event.OPENED_INFO): HandshakeState.OPTIONS,
    (HandshakeState.BACKEND, Event.REFUSED): HandshakeState.OPTIONS,
    (HandshakeState.BACKEND, Event.REFUSED_NAME): HandshakeState.CLOSED,
}

CLIENT_TABLE: Final[dict[tuple[HandshakeState, Event], HandshakeState]] = {
    (HandshakeState.GREETING, Event.GREETED): HandshakeState.GO,
    (HandshakeState.GREETING, Event.GREETED_TLS): HandshakeState.ASKED,
    (HandshakeState.ASKED, Event.ACK): HandshakeState.TLS,
    (HandshakeState.TLS, Event.SECURED): HandshakeState.GO,
    (HandshakeState.GO, Event.INFO): HandshakeState.GO,
    (HandshakeState.GO, Event.ACK): HandshakeState.READY,
    (HandshakeState.GO, Event.SIZES_REQUIRED): HandshakeState.GO,
    (HandshakeState.GO, Event.UNSUPPORTED): HandshakeState.NAME,
    (HandshakeState.NAME, Event.SIZE): HandshakeState.READY,
}


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes to the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """Open the backend of this export, then call ``opened`` or ``refused``."""

    export: str


@dataclass(frozen=True, slots=True)
class StartTls:
    """Begin TLS behind what was sent, then call ``secured``."""


@dataclass(frozen=True, slots=True)
class Transmit:
    """Negotiation has ended; ``left_over`` already belongs to the transmission phase."""

    left_over: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Send what is queued, then close the connection."""

    reason: str


Action = Send | Open | StartTls | Transmit | Close


TLS_REQUIRED: Final = "this gateway requires TLS: connect with nbds://, or in QEMU with tls-creds"


class _Machine:
    """State, input buffer and the one way to change the state."""

    def __init__(
        self, table: dict[tuple[HandshakeState, Event], HandshakeState], start: HandshakeState, peer: str
    ) -> None:
        self.state = start
        self.peer = peer
        self._table = table
        self._input = bytearray()

    def _move(self, event: Event) -> None:
        following = self._table.get((self.state, event))
        if following is None:
            raise NbdProtocolError(self.peer, f"{event.value} while {self.state.value}")
        self.state = following

    def _take(self, count: int) -> bytes | None:
        if len(self._input) < count:
            return None
        data = bytes(self._input[:count])
        del self._input[:count]
        return data


class ServerHandshake(_Machine):
    """Negotiation with one client.

    Args:
        exports: names to list.
        peer: for error texts.
        tls: what this client is offered, or must ask for.

    Attributes:
        exports: names to list now; they may be replaced at any time.
        is_secure: whether TLS is established.
        lacked_tls: whether it asked for something without TLS where that is required.
        wants_block_size: whether the client asked for the block sizes of the backend that ``Open`` names.
    """

    def __init__(self, exports: list[str], peer: str, tls: p.TlsMode = "off") -> None:
        super().__init__(SERVER_TABLE, HandshakeState.FLAGS, peer)
        self.exports = exports
        self._tls = tls
        self.is_secure = self.lacked_tls = False
        self._no_zeroes = False
        self._option = 0
        self.wants_block_size = False

    def greeting(self) -> bytes:
        """First bytes to the client."""
        return p.greeting()

    def feed(self, data: bytes | memoryview) -> list[Action]:
        """Take received bytes.

        Raises:
            NbdProtocolError: close the connection.
        """
        self._input += data
        return self._advance()

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        while step := self._step():
            actions.extend(step)
        return actions

    def _step(self) -> list[Action]:
        if self.state is HandshakeState.FLAGS:
            return self._flags()
        if self.state is not HandshakeState.OPTIONS or len(self._input) < p.OPTION.size:
            return []
        magic, opt, length = p.OPTION.unpack_from(self._input)
        if magic != p.IHAVEOPT:
            raise NbdProtocolError(self.peer, f"option magic {magic:#x}")
        if length > p.MAX_OPTION_BYTES:
            raise NbdProtocolError(self.peer, f"option of {length} bytes, limit {p.MAX_OPTION_BYTES}")
        raw = self._take(p.OPTION.size + length)
        return self._on_option(opt, raw[p.OPTION.size :]) if raw is not None else []

    def _flags(self) -> list[Action]:
        raw = self._take(p.CLIENT_FLAGS.size)
        if raw is None:
            return []
        (flags,) = p.CLIENT_FLAGS.unpack(raw)
        if flags & ~(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES) or not flags & p.FLAG_FIXED_NEWSTYLE:
            raise NbdProtocolError(self.peer, f"client flags {flags:#x}; fixed newstyle is needed")
        self._no_zeroes = bool(flags & p.FLAG_NO_ZEROES)
        self._move(Event.FLAGS)
        return [Send(b"")]  # nothing to say, but the loop goes on with the bytes behind the flags

    def _on_option(self, opt: int, data: bytes) -> list[Action]:
        if opt == Opt.STARTTLS and self._tls != "off":
            return self._start_tls(data)
        if self._tls == "require" and not self.is_secure and opt != Opt.ABORT:
            return self._without_tls(opt)
        try:
            if opt in (Opt.GO, Opt.INFO):
                name, wanted = p.parse_go(data)
                return self._open(opt, name, p.Info.BLOCK_SIZE in wanted)
            if opt == Opt.EXPORT_NAME:
                return self._open(opt, p.decode_name(data), False)
        except p.BadOption as exc:
            if opt == Opt.EXPORT_NAME:
                raise NbdProtocolError(self.peer, str(exc)) from exc
            return self._answer(p.option_reply(opt, Rep.ERR_INVALID, str(exc).encode()))
        if opt == Opt.ABORT:
            self._move(Event.ABORT)
            return [Send(p.option_reply(opt, Rep.ACK)), Close("the client aborted negotiation")]
        if opt == Opt.LIST:
            return self._answer(self._listing(data))
        return self._answer(p.option_reply(opt, Rep.ERR_UNSUP, b"not supported by this gateway"))

    def _start_tls(self, data: bytes) -> list[Action]:
        if data or self.is_secure:
            text = b"STARTTLS takes no data" if data else b"this connection is encrypted already"
            return self._answer(p.option_reply(Opt.STARTTLS, Rep.ERR_INVALID, text))
        if self._input:
            raise NbdProtocolError(self.peer, f"{len(self._input)} bytes behind STARTTLS without TLS")
        self._move(Event.STARTTLS)
        return [Send(p.option_reply(Opt.STARTTLS, Rep.ACK)), StartTls()]

    def _without_tls(self, opt: int) -> list[Action]:
        self.lacked_tls = True
        if opt == Opt.EXPORT_NAME:  # it has no error reply
            self._move(Event.REFUSED_NAME)
            return [Close(TLS_REQUIRED)]
        return self._answer(p.option_reply(opt, Rep.ERR_TLS_REQD, TLS_REQUIRED.encode()))

    def secured(self) -> None:
        """TLS is established."""
        self._move(Event.SECURED)
        self.is_secure = True

    def _listing(self, data: bytes) -> bytes:
        if data:
            return p.option_reply(Opt.LIST, Rep.ERR_INVALID, b"LIST takes no data")
        entries = [p.option_reply(Opt.LIST, Rep.SERVER, p.server_entry(name)) for name in self.exports]
        return b"".join((*entries, p.option_reply(Opt.LIST, Rep.ACK)))

    def _answer(self, reply: bytes) -> list[Action]:
        self._move(Event.ANSWER)
        return [Send(reply)]

    def _open(self, opt: int, name: str, wants_block_size: bool) -> list[Action]:
        self._move(Event.OPEN)
        self._option, self.wants_block_size = opt, wants_block_size
        return [Open(name)]

    @property
    def keeps_backend(self) -> bool:
        """Whether the backend asked for by ``Open`` will carry I/O (else it was for INFO only)."""
        return self._option != Opt.INFO

    def opened(self, facts: ExportFacts) -> list[Action]:
        """The backend is there."""
        if not self.keeps_backend:
            self._move(Event.OPENED_INFO)
            return [Send(self._export_reply(facts)), *self._advance()]
        self._move(Event.OPENED_GO)
        if self._option == Opt.EXPORT_NAME:
            padding = b"" if self._no_zeroes else p.NAME_PADDING
            reply = p.EXPORT_NAME_REPLY.pack(facts.size_bytes, facts.flags) + padding
        else:
            reply = self._export_reply(facts)
        left_over = bytes(self._input)
        self._input.clear()
        return [Send(reply), Transmit(left_over)]

    def _export_reply(self, facts: ExportFacts) -> bytes:
        reply = p.option_reply(self._option, Rep.INFO, p.info_export(facts))
        if self.wants_block_size:
            reply += p.option_reply(self._option, Rep.INFO, p.info_block_size(facts.blocks))
        return reply + p.option_reply(self._option, Rep.ACK)

    def refused(self, code: int, text: str) -> list[Action]:
        """The backend is not there; ``text`` is shown to the client's user."""
        if self._option == Opt.EXPORT_NAME:
            self._move(Event.REFUSED_NAME)
            return [Close(text)]
        self._move(Event.REFUSED)
        return [Send(p.option_reply(self._option, code, text.encode()[: p.MAX_NAME_BYTES])), *self._advance()]


class ClientHandshake(_Machine):
    """Negotiation with one upstream, as its client.

    Args:
        export: name to ask for.
        upstream: for error texts.
        will_transmit: else only the facts are wanted.
        wants_block_size: see the module docstring.
        wants_tls: nothing but STARTTLS is said in the clear; the shell establishes it in the state TLS.
    """

    def __init__(
        self,
        export: str,
        upstream: str,
        *,
        will_transmit: bool = True,
        wants_block_size: bool = False,
        wants_tls: bool = False,
    ) -> None:
        super().__init__(CLIENT_TABLE, HandshakeState.GREETING, f"upstream {upstream}")
        self._export = export
        self._upstream = upstream
        self._no_zeroes = False
        self._option = Opt.GO if will_transmit else Opt.INFO
        self._infos = (p.Info.BLOCK_SIZE,) if wants_block_size else ()
        self._wants_tls = wants_tls
        self._blocks = p.BlockSizes()
        self.facts: ExportFacts | None = None

    @property
    def farewell(self) -> bytes:
        """What ends a READY connection politely."""
        return p.option(Opt.ABORT) if self._option == Opt.INFO else p.request(p.Cmd.DISC, 0, 0, 0)

    @property
    def left_over(self) -> bytes:
        """Bytes behind negotiation (a correct server sends none)."""
        return bytes(self._input)

    def feed(self, data: bytes | memoryview) -> bytes:
        """Take received bytes, return what to send. ``state`` is READY and ``facts`` set when it has ended.

        Raises:
            NbdProtocolError: the server broke the protocol.
            UpstreamError: it refused the export; the text carries its reason.
        """
        self._input += data
        steps: dict[HandshakeState, Callable[[], bytes | None]] = {
            HandshakeState.GREETING: self._on_greeting,
            HandshakeState.ASKED: self._on_tls_reply,
            HandshakeState.GO: self._on_go_reply,
            HandshakeState.NAME: self._on_name_reply,
        }
        out = b""
        while (step := steps.get(self.state)) is not None and (sent := step()) is not None:
            out += sent
        return out

    def _on_greeting(self) -> bytes | None:
        raw = self._take(p.GREETING.size)
        if raw is None:
            return None
        magic, have_opt, flags = p.GREETING.unpack(raw)
        if magic != p.NBDMAGIC or have_opt != p.IHAVEOPT or not flags & p.FLAG_FIXED_NEWSTYLE:
            raise NbdProtocolError(self.peer, "it does not speak fixed newstyle NBD")
        self._no_zeroes = bool(flags & p.FLAG_NO_ZEROES)
        answer = flags & (p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES)
        self._move(Event.GREETED_TLS if self._wants_tls else Event.GREETED)
        return p.CLIENT_FLAGS.pack(answer) + (p.option(Opt.STARTTLS) if self._wants_tls else self._question())

    def _on_tls_reply(self) -> bytes | None:
        reply = self._option_reply(Opt.STARTTLS)
        if reply is None:
            return None
        kind, data = reply
        if kind != Rep.ACK:
            raise UpstreamError(self._upstream, f"refused TLS: {_reason(kind, data)}")
        if self._input:
            raise NbdProtocolError(self.peer, f"{len(self._input)} bytes behind STARTTLS without TLS")
        self._move(Event.ACK)
        return b""

    def secured(self) -> bytes:
        """TLS is established; returns what to send."""
        self._move(Event.SECURED)
        return self._question()

    def _question(self) -> bytes:
        return p.option(self._option, p.go_data(self._export, self._infos))

    def _on_go_reply(self) -> bytes | None:
        reply = self._option_reply(self._option)
        return None if reply is None else self._on_go_kind(*reply)

    def _option_reply(self, asked: int) -> tuple[int, bytes] | None:
        """Type and data of the next reply, if it is here."""
        if len(self._input) < p.OPTION_REPLY.size:
            return None
        magic, opt, kind, length = p.OPTION_REPLY.unpack_from(self._input)
        if magic != p.OPTION_REPLY_MAGIC or opt != asked or length > p.MAX_OPTION_BYTES:
            raise NbdProtocolError(
                self.peer, f"answer to option {asked} with magic {magic:#x}, option {opt}, {length} bytes"
            )
        raw = self._take(p.OPTION_REPLY.size + length)
        return None if raw is None else (kind, raw[p.OPTION_REPLY.size :])

    def _on_go_kind(self, kind: int, data: bytes) -> bytes:
        if kind == Rep.INFO:
            self._move(Event.INFO)
            self._on_info(data)
            return b""
        if kind == Rep.ACK and self.facts is not None:
            self._move(Event.ACK)
            self.facts = replace(self.facts, blocks=self._blocks)
            return b""
        if kind == Rep.ERR_BLOCK_SIZE_REQD and not self._infos:
            self._move(Event.SIZES_REQUIRED)
            self._infos = (p.Info.BLOCK_SIZE,)
            return self._question()
        if kind == Rep.ERR_UNSUP:
            self._move(Event.UNSUPPORTED)
            self._option = Opt.EXPORT_NAME
            return p.option(Opt.EXPORT_NAME, self._export.encode())
        if kind & p.REP_ERROR_BIT:
            raise UpstreamError(self._upstream, f"refused export {self._export!r}: {_reason(kind, data)}")
        raise NbdProtocolError(self.peer, f"reply type {kind} to option {self._option}")

    def _on_info(self, data: bytes) -> None:
        about = int.from_bytes(data[:2], "big")
        if about == p.Info.EXPORT and len(data) == p.EXPORT_INFO.size:
            self.facts = ExportFacts(*p.EXPORT_INFO.unpack(data)[1:])
        elif about == p.Info.BLOCK_SIZE:
            try:
                self._blocks = p.parse_block_size(data)
            except p.BadOption as exc:
                raise NbdProtocolError(self.peer, str(exc)) from exc

    def _on_name_reply(self) -> bytes | None:
        padding = 0 if self._no_zeroes else len(p.NAME_PADDING)
        raw = self._take(p.EXPORT_NAME_REPLY.size + padding)
        if raw is None:
            return None
        self.facts = ExportFacts(*p.EXPORT_NAME_REPLY.unpack_from(raw))
        self._move(Event.SIZE)
        return b""


def _reason(kind: int, data: bytes) -> str:
    """What an upstream says of its refusal, for a log line and our client."""
    text = data.decode("utf-8", "replace")
    return printable(text, REASON_CHARACTERS) or f"error {kind & ~p.REP_ERROR_BIT}"
