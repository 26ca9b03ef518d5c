r"""Negotiation with our clients, as a transition table; with our upstreams: ``upstream_handshake``.

Sans-IO: ``feed(data)`` takes received bytes and returns a list of actions; no socket, clock, thread or TLS.

GO, INFO and EXPORT_NAME need facts that the upstream must be asked for, so they lead to BACKEND:
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

STRUCTURED_REPLY, EXTENDED_HEADERS and SET_META_CONTEXT are remembered, and go into ``Open``. A selected
context holds for the export that it was selected for, and nothing that was agreed before TLS holds behind it.
An option that is too long is answered at once, and its data are dropped as they come.

A pair (state, event) that is not in the table is a peer's fault: ``NbdProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.protocol import ExportFacts, Opt, Rep, ReplyMode


class HandshakeState(Enum):
    """How far a negotiation has come (both sides)."""

    FLAGS = "waiting for the client's flags"
    OPTIONS = "waiting for an option"
    BACKEND = "waiting for the backend"
    TLS = "waiting for TLS"
    TRANSMISSION = "in transmission"
    CLOSED = "closed"
    GREETING = "waiting for the server's greeting"
    ASKED = "waiting for the answer to STARTTLS"
    EXTENDED = "waiting for the answer to EXTENDED_HEADERS"
    STRUCTURED = "waiting for the answer to STRUCTURED_REPLY"
    CONTEXT = "waiting for the answer to SET_META_CONTEXT"
    GO = "waiting for the answer to GO or INFO"
    NAME = "waiting for the answer to EXPORT_NAME"
    READY = "ready"


class HandshakeEvent(Enum):
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
    ASKED_EXTENDED = "extended headers are asked for"
    ASKED_STRUCTURED = "structured replies are asked for"
    ASKED_CONTEXT = "replies in chunks acknowledged, a context is asked for"
    DECLINED = "an option refused that is not needed"
    INFO = "information reply"
    ACK = "acknowledgement"
    SIZES_REQUIRED = "block sizes must be asked for"
    UNSUPPORTED = "GO is not supported"
    SIZE = "size and flags"


SERVER_TABLE: Final[dict[tuple[HandshakeState, HandshakeEvent], HandshakeState]] = {
    (HandshakeState.FLAGS, HandshakeEvent.FLAGS): HandshakeState.OPTIONS,
    (HandshakeState.OPTIONS, HandshakeEvent.OPEN): HandshakeState.BACKEND,
    (HandshakeState.OPTIONS, HandshakeEvent.ANSWER): HandshakeState.OPTIONS,
    (HandshakeState.OPTIONS, HandshakeEvent.ABORT): HandshakeState.CLOSED,
    (HandshakeState.OPTIONS, HandshakeEvent.REFUSED_NAME): HandshakeState.CLOSED,
    (HandshakeState.OPTIONS, HandshakeEvent.STARTTLS): HandshakeState.TLS,
    (HandshakeState.TLS, HandshakeEvent.SECURED): HandshakeState.OPTIONS,
    (HandshakeState.BACKEND, HandshakeEvent.OPENED_GO): HandshakeState.TRANSMISSION,
    (HandshakeState.BACKEND, HandshakeEvent.OPENED_INFO): HandshakeState.OPTIONS,
    (HandshakeState.BACKEND, HandshakeEvent.REFUSED): HandshakeState.OPTIONS,
    (HandshakeState.BACKEND, HandshakeEvent.REFUSED_NAME): HandshakeState.CLOSED,
}


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes to the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """Open the backend of this export, then call ``opened`` or ``refused``."""

    export: str
    mode: ReplyMode = p.SIMPLE_REPLIES


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
MOST_AT_ONCE: Final = 256  # options that a client sends without waiting; libnbd waits for each
MOST_REPLY_BYTES: Final = 256 << 10  # to those; the longest list has some 80 KB
_ALL_OF_BASE: Final = "base:"
_NO_TEXTS: Final[Mapping[p.Info, str]] = MappingProxyType({})


class Machine:
    """State, input buffer and the one way to change the state."""

    def __init__(
        self,
        table: dict[tuple[HandshakeState, HandshakeEvent], HandshakeState],
        start: HandshakeState,
        peer: str,
    ) -> None:
        self.state = start
        self.peer = peer
        self._table = table
        self._input = bytearray()

    def _move(self, event: HandshakeEvent) -> None:
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


class ServerHandshake(Machine):
    """Negotiation with one client.

    Args:
        exports: names to list; gone through when the client asks.
        peer: for error texts.
        tls: what this client is offered, or must ask for.
        has_extended: whether every export that it may open has extended headers; asked when the client asks.

    Attributes:
        exports: names to list; they may be replaced at any time.
        is_secure: whether TLS is established.
        lacked_tls: whether it asked for something without TLS where that is required.
        wanted: kinds of information the client asked for about the export that ``Open`` names.
    """

    def __init__(
        self,
        exports: Iterable[str],
        peer: str,
        tls: p.TlsMode = "off",
        has_extended: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(SERVER_TABLE, HandshakeState.FLAGS, peer)
        self._has_extended = has_extended
        self.exports = exports
        self._tls = tls
        self.is_secure = self.lacked_tls = False
        self._no_zeroes = False
        self._option = 0
        self._skip_bytes = 0  # of an option that is too long
        self._at_once = self._reply_bytes = 0  # options that came together, and what they are answered
        self._is_structured = self._is_extended = False
        self._allocation_of: str | None = None  # the export that the context was selected for
        self.wanted: tuple[int, ...] = ()

    def greeting(self) -> bytes:
        """First bytes to the client."""
        return p.greeting()

    def feed(self, data: bytes | memoryview) -> list[Action]:
        """Take received bytes.

        Raises:
            NbdProtocolError: close the connection. Also more options at once than any client asks for: they
                would be answered in one turn of the loop.
        """
        self._input += data
        self._at_once = self._reply_bytes = 0
        return self._advance()

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        while step := self._step():
            actions.extend(step)
            self._at_once += 1
            self._reply_bytes += sum(len(action.data) for action in step if isinstance(action, Send))
            if self._at_once > MOST_AT_ONCE or self._reply_bytes > MOST_REPLY_BYTES:
                raise NbdProtocolError(self.peer, f"{self._at_once} options at once")
        return actions

    def _step(self) -> list[Action]:
        if self.state is HandshakeState.FLAGS:
            return self._flags()
        if self._skip_bytes and not self._skip():
            return []
        if self.state is not HandshakeState.OPTIONS or len(self._input) < p.OPTION.size:
            return []
        magic, opt, length = p.OPTION.unpack_from(self._input)
        if magic != p.IHAVEOPT:
            raise NbdProtocolError(self.peer, f"option magic {magic:#x}")
        if length > p.MAX_OPTION_BYTES:
            return self._too_big(opt, length)
        raw = self._take(p.OPTION.size + length)
        return self._on_option(opt, raw[p.OPTION.size :]) if raw is not None else []

    def _too_big(self, opt: int, length: int) -> list[Action]:
        text = f"option {opt} has {length} bytes of data; at most {p.MAX_OPTION_BYTES} are read"
        if opt == Opt.EXPORT_NAME:  # it has no error reply
            raise NbdProtocolError(self.peer, text)
        if opt == Opt.SET_META_CONTEXT:
            self._allocation_of = None
        self._skip_bytes = p.OPTION.size + length
        if opt != Opt.STARTTLS and self._lacks_tls(opt):
            return self._without_tls(opt)
        return self._answer(p.option_reply(opt, Rep.ERR_TOO_BIG, text.encode()))

    def _skip(self) -> bool:
        """Drop what is here of an option that is too long; returns whether that was all of it."""
        dropped = min(self._skip_bytes, len(self._input))
        del self._input[:dropped]
        self._skip_bytes -= dropped
        return not self._skip_bytes

    def _flags(self) -> list[Action]:
        raw = self._take(p.CLIENT_FLAGS.size)
        if raw is None:
            return []
        (flags,) = p.CLIENT_FLAGS.unpack(raw)
        if flags & ~(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES) or not flags & p.FLAG_FIXED_NEWSTYLE:
            raise NbdProtocolError(self.peer, f"client flags {flags:#x}; fixed newstyle is needed")
        self._no_zeroes = bool(flags & p.FLAG_NO_ZEROES)
        self._move(HandshakeEvent.FLAGS)
        return [Send(b"")]  # nothing to say, but the loop goes on with the bytes behind the flags

    def _on_option(self, opt: int, data: bytes) -> list[Action]:
        if opt == Opt.STARTTLS and self._tls != "off":
            return self._start_tls(data)
        if self._lacks_tls(opt):
            return self._without_tls(opt)
        try:
            if opt in (Opt.GO, Opt.INFO):
                name, wanted = p.parse_go(data)
                return self._open(opt, name, wanted)
            if opt == Opt.EXPORT_NAME and not self._is_extended:
                return self._open(opt, p.decode_name(data), ())
            if opt in (Opt.LIST_META_CONTEXT, Opt.SET_META_CONTEXT):
                return self._answer(self._meta_contexts(opt, data))
        except p.BadOption as exc:
            if opt == Opt.EXPORT_NAME:
                raise NbdProtocolError(self.peer, str(exc)) from exc
            return self._answer(p.option_reply(opt, Rep.ERR_INVALID, str(exc).encode()))
        if opt == Opt.ABORT:
            self._move(HandshakeEvent.ABORT)
            return [Send(p.option_reply(opt, Rep.ACK)), Close("the client aborted negotiation")]
        if opt == Opt.LIST:
            return self._answer(self._listing(data))
        if opt == Opt.STRUCTURED_REPLY:
            return self._answer(self._structured(data))
        if opt == Opt.EXTENDED_HEADERS:
            return self._answer(self._extended(data))
        if opt == Opt.EXPORT_NAME:
            raise NbdProtocolError(self.peer, "EXPORT_NAME behind EXTENDED_HEADERS, which needs GO")
        return self._answer(p.option_reply(opt, Rep.ERR_UNSUP, b"not supported by this gateway"))

    def _start_tls(self, data: bytes) -> list[Action]:
        if data or self.is_secure:
            text = b"STARTTLS takes no data" if data else b"this connection is encrypted already"
            return self._answer(p.option_reply(Opt.STARTTLS, Rep.ERR_INVALID, text))
        if self._input:
            raise NbdProtocolError(self.peer, f"{len(self._input)} bytes behind STARTTLS without TLS")
        self._move(HandshakeEvent.STARTTLS)
        return [Send(p.option_reply(Opt.STARTTLS, Rep.ACK)), StartTls()]

    def _lacks_tls(self, opt: int) -> bool:
        return self._tls == "require" and not self.is_secure and opt != Opt.ABORT

    def _without_tls(self, opt: int) -> list[Action]:
        self.lacked_tls = True
        if opt == Opt.EXPORT_NAME:  # it has no error reply
            self._move(HandshakeEvent.REFUSED_NAME)
            return [Close(TLS_REQUIRED)]
        return self._answer(p.option_reply(opt, Rep.ERR_TLS_REQD, TLS_REQUIRED.encode()))

    def secured(self) -> None:
        """TLS is established."""
        self._move(HandshakeEvent.SECURED)
        self.is_secure = True
        self._is_structured = self._is_extended = False
        self._allocation_of = None

    def _listing(self, data: bytes) -> bytes:
        if data:
            return p.option_reply(Opt.LIST, Rep.ERR_INVALID, b"LIST takes no data")
        entries = [p.option_reply(Opt.LIST, Rep.SERVER, p.server_entry(name)) for name in self.exports]
        return b"".join((*entries, p.option_reply(Opt.LIST, Rep.ACK)))

    def _structured(self, data: bytes) -> bytes:
        if data:
            return p.option_reply(Opt.STRUCTURED_REPLY, Rep.ERR_INVALID, b"STRUCTURED_REPLY takes no data")
        if self._is_extended:
            text = b"extended headers are negotiated: all replies are in chunks"
            return p.option_reply(Opt.STRUCTURED_REPLY, Rep.ERR_EXT_HEADER_REQD, text)
        self._is_structured = True
        return p.option_reply(Opt.STRUCTURED_REPLY, Rep.ACK)

    def _extended(self, data: bytes) -> bytes:
        if data:
            return p.option_reply(Opt.EXTENDED_HEADERS, Rep.ERR_INVALID, b"EXTENDED_HEADERS takes no data")
        if not (self._is_extended or self._has_extended()):
            text = b"not every storage behind this gateway has extended headers"
            return p.option_reply(Opt.EXTENDED_HEADERS, Rep.ERR_UNSUP, text)
        self._is_structured = self._is_extended = True
        return p.option_reply(Opt.EXTENDED_HEADERS, Rep.ACK)

    def _meta_contexts(self, opt: int, data: bytes) -> bytes:
        """LIST or SET: the same for every export name, so that it says nothing of which there are."""
        is_set = opt == Opt.SET_META_CONTEXT
        if is_set:
            self._allocation_of = None  # replaced, also when this one fails
        if not self._is_structured:
            return p.option_reply(opt, Rep.ERR_INVALID, b"ask for STRUCTURED_REPLY first")
        name, queries = p.parse_meta_context(data)
        if not (p.ALLOCATION in queries or (not is_set and (not queries or _ALL_OF_BASE in queries))):
            return p.option_reply(opt, Rep.ACK)
        if is_set:
            self._allocation_of = name
        found = p.meta_context(p.ALLOCATION_ID if is_set else 0, p.ALLOCATION)
        return p.option_reply(opt, Rep.META_CONTEXT, found) + p.option_reply(opt, Rep.ACK)

    def _answer(self, reply: bytes) -> list[Action]:
        self._move(HandshakeEvent.ANSWER)
        return [Send(reply)]

    def _open(self, opt: int, name: str, wanted: tuple[int, ...]) -> list[Action]:
        self._move(HandshakeEvent.OPEN)
        self._option, self.wanted = opt, wanted
        mode = ReplyMode(self._is_structured, self._allocation_of == name, self._is_extended)
        return [Open(name, mode)]

    @property
    def wants_block_size(self) -> bool:
        """Whether the client asked for the block sizes of the backend that ``Open`` names."""
        return p.Info.BLOCK_SIZE in self.wanted

    @property
    def keeps_backend(self) -> bool:
        """Whether the backend asked for by ``Open`` will carry I/O (else it was for INFO only)."""
        return self._option != Opt.INFO

    def opened(self, facts: ExportFacts, texts: Mapping[p.Info, str] = _NO_TEXTS) -> list[Action]:
        """The backend is there.

        Args:
            facts: as this client may see them.
            texts: NAME and DESCRIPTION, for a client that asks for them.
        """
        if not self.keeps_backend:
            self._move(HandshakeEvent.OPENED_INFO)
            return [Send(self._export_reply(facts, texts)), *self._advance()]
        self._move(HandshakeEvent.OPENED_GO)
        if self._option == Opt.EXPORT_NAME:
            padding = b"" if self._no_zeroes else p.NAME_PADDING
            reply = p.EXPORT_NAME_REPLY.pack(facts.size_bytes, facts.flags) + padding
        else:
            reply = self._export_reply(facts, texts)
        left_over = bytes(self._input)
        self._input.clear()
        return [Send(reply), Transmit(left_over)]

    def _export_reply(self, facts: ExportFacts, texts: Mapping[p.Info, str]) -> bytes:
        infos = [p.info_export(facts)]
        infos += [p.info_text(kind, text) for kind, text in texts.items() if kind in self.wanted]
        if self.wants_block_size or facts.blocks.is_strict:  # its requests are refused by what it is shown
            infos.append(p.info_block_size(facts.blocks))
        replies = [p.option_reply(self._option, Rep.INFO, info) for info in infos]
        return b"".join((*replies, p.option_reply(self._option, Rep.ACK)))

    def refused(self, code: int, text: str) -> list[Action]:
        """The backend is not there; ``text`` is shown to the client's user."""
        if self._option == Opt.EXPORT_NAME:
            self._move(HandshakeEvent.REFUSED_NAME)
            return [Close(text)]
        self._move(HandshakeEvent.REFUSED)
        return [Send(p.option_reply(self._option, code, text.encode()[: p.MAX_NAME_BYTES])), *self._advance()]
