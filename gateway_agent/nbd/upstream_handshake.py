r"""Negotiation with an upstream, as its client, as a transition table. Sans-IO, like ``handshake``.

GO, or INFO when only the facts are wanted: a ``qemu-nbd`` without ``-t`` ends after its first client in
transmission. EXPORT_NAME is the fallback for servers that know neither. Block sizes are asked for when our
own client asks, because a server may be stricter with clients that ask, and when the server insists.

Structured replies, and the context base:allocation, are asked for when our client wants them. A server that
has none of them goes on without: ``agreed`` says what came of it, and replies are translated. Extended
headers are asked for when our client has them, or to know whether the server has; they are not translated, so
a server that has lost them since is not used for that client.

    GREETING ──greeting──► GO ──ACK──► READY
       │ │                 ├──ERR_BLOCK_SIZE_REQD──► GO, now with block sizes
       │ │                 └──ERR_UNSUP──► NAME ──size, flags──► READY
       │ ├──greeting, with extended headers──► EXTENDED, as STRUCTURED
       │ └──greeting, with structured replies──► STRUCTURED ──ACK, or refused──► GO
       │                                            └──ACK, with allocation──► CONTEXT ──ACK, or refused──► GO
       └──greeting, with TLS──► ASKED ──ACK──► TLS ──secured──► GO, or STRUCTURED

A pair (state, event) that is not in the table is the upstream's fault: ``NbdProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from gateway_agent.errors import NbdProtocolError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import HandshakeEvent, HandshakeState, Machine
from gateway_agent.nbd.protocol import ExportFacts, Opt, Rep
from pmdaemon.runtime.excerpt import printable

REASON_CHARACTERS: Final = 300
NO_EXTENDED_HEADERS: Final = "it has no extended headers any more; connect again to do without them"

CLIENT_TABLE: Final[dict[tuple[HandshakeState, HandshakeEvent], HandshakeState]] = {
    (HandshakeState.GREETING, HandshakeEvent.GREETED): HandshakeState.GO,
    (HandshakeState.GREETING, HandshakeEvent.GREETED_TLS): HandshakeState.ASKED,
    (HandshakeState.GREETING, HandshakeEvent.ASKED_STRUCTURED): HandshakeState.STRUCTURED,
    (HandshakeState.ASKED, HandshakeEvent.ACK): HandshakeState.TLS,
    (HandshakeState.TLS, HandshakeEvent.SECURED): HandshakeState.GO,
    (HandshakeState.TLS, HandshakeEvent.ASKED_STRUCTURED): HandshakeState.STRUCTURED,
    (HandshakeState.GREETING, HandshakeEvent.ASKED_EXTENDED): HandshakeState.EXTENDED,
    (HandshakeState.TLS, HandshakeEvent.ASKED_EXTENDED): HandshakeState.EXTENDED,
    (HandshakeState.EXTENDED, HandshakeEvent.ACK): HandshakeState.GO,
    (HandshakeState.EXTENDED, HandshakeEvent.DECLINED): HandshakeState.GO,
    (HandshakeState.EXTENDED, HandshakeEvent.ASKED_CONTEXT): HandshakeState.CONTEXT,
    (HandshakeState.STRUCTURED, HandshakeEvent.ACK): HandshakeState.GO,
    (HandshakeState.STRUCTURED, HandshakeEvent.DECLINED): HandshakeState.GO,
    (HandshakeState.STRUCTURED, HandshakeEvent.ASKED_CONTEXT): HandshakeState.CONTEXT,
    (HandshakeState.CONTEXT, HandshakeEvent.INFO): HandshakeState.CONTEXT,
    (HandshakeState.CONTEXT, HandshakeEvent.ACK): HandshakeState.GO,
    (HandshakeState.CONTEXT, HandshakeEvent.DECLINED): HandshakeState.GO,
    (HandshakeState.GO, HandshakeEvent.INFO): HandshakeState.GO,
    (HandshakeState.GO, HandshakeEvent.ACK): HandshakeState.READY,
    (HandshakeState.GO, HandshakeEvent.SIZES_REQUIRED): HandshakeState.GO,
    (HandshakeState.GO, HandshakeEvent.UNSUPPORTED): HandshakeState.NAME,
    (HandshakeState.NAME, HandshakeEvent.SIZE): HandshakeState.READY,
}


@dataclass(frozen=True, slots=True)
class Agreed:
    """How an upstream replies to us.

    Attributes:
        structured: in chunks.
        context_id: what it calls base:allocation; None: it answers no block status.
        extended: with extended headers, as it is asked.
    """

    structured: bool = False
    context_id: int | None = None
    extended: bool = False


def disconnection(agreed: Agreed) -> bytes:
    """DISC, the last request on a connection in transmission."""
    return (p.extended_request if agreed.extended else p.request)(p.Cmd.DISC, 0, 0, 0)


class ClientHandshake(Machine):
    """Negotiation with one upstream, as its client.

    Args:
        export: name to ask for.
        upstream: for error texts.
        will_transmit: else only the facts are wanted.
        wants_block_size: see the module docstring.
        wants_tls: nothing but STARTTLS is said in the clear; the shell establishes it in the state TLS.
        mode: what our client wants, and is asked for here.

    Attributes:
        facts: once READY.
        agreed: once READY.
    """

    def __init__(
        self,
        export: str,
        upstream: str,
        *,
        will_transmit: bool = True,
        wants_block_size: bool = False,
        wants_tls: bool = False,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
    ) -> None:
        super().__init__(CLIENT_TABLE, HandshakeState.GREETING, f"upstream {upstream}")
        self._export = export
        self._upstream = upstream
        self._no_zeroes = False
        self._option = Opt.GO if will_transmit else Opt.INFO
        self._infos = (p.Info.BLOCK_SIZE,) if wants_block_size else ()
        self._wants_tls = wants_tls
        self._mode = mode
        self._blocks = p.BlockSizes()
        self.facts: ExportFacts | None = None
        self.agreed = Agreed()

    @property
    def farewell(self) -> bytes:
        """What ends a READY connection politely."""
        return p.option(Opt.ABORT) if self._option == Opt.INFO else disconnection(self.agreed)

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
            HandshakeState.EXTENDED: partial(self._on_chunks_reply, Opt.EXTENDED_HEADERS),
            HandshakeState.STRUCTURED: partial(self._on_chunks_reply, Opt.STRUCTURED_REPLY),
            HandshakeState.CONTEXT: self._on_context_reply,
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
        answer = p.CLIENT_FLAGS.pack(flags & (p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES))
        if self._wants_tls:
            self._move(HandshakeEvent.GREETED_TLS)
            return answer + p.option(Opt.STARTTLS)
        return answer + self._first_question(HandshakeEvent.GREETED)

    def _on_tls_reply(self) -> bytes | None:
        reply = self._option_reply(Opt.STARTTLS)
        if reply is None:
            return None
        kind, data = reply
        if kind != Rep.ACK:
            raise UpstreamError(self._upstream, f"refused TLS: {_reason(kind, data)}")
        if self._input:
            raise NbdProtocolError(self.peer, f"{len(self._input)} bytes behind STARTTLS without TLS")
        self._move(HandshakeEvent.ACK)
        return b""

    def secured(self) -> bytes:
        """TLS is established; returns what to send."""
        return self._first_question(HandshakeEvent.SECURED)

    def _first_question(self, event: HandshakeEvent) -> bytes:
        """``event`` has made questions possible."""
        if self._mode.extended:
            self._move(HandshakeEvent.ASKED_EXTENDED)
            return p.option(Opt.EXTENDED_HEADERS)
        if self._mode.structured:
            self._move(HandshakeEvent.ASKED_STRUCTURED)
            return p.option(Opt.STRUCTURED_REPLY)
        self._move(event)
        return self._question()

    def _question(self) -> bytes:
        return p.option(self._option, p.go_data(self._export, self._infos))

    def _on_chunks_reply(self, asked: int) -> bytes | None:
        reply = self._option_reply(asked)
        if reply is None:
            return None
        if self._is_declined(*reply):
            if asked == Opt.EXTENDED_HEADERS and self._option == Opt.GO:
                raise UpstreamError(self._upstream, NO_EXTENDED_HEADERS)
            return self._question()
        self.agreed = Agreed(structured=True, extended=asked == Opt.EXTENDED_HEADERS)
        if not self._mode.allocation:
            self._move(HandshakeEvent.ACK)
            return self._question()
        self._move(HandshakeEvent.ASKED_CONTEXT)
        return p.option(Opt.SET_META_CONTEXT, p.meta_context_data(self._export, [p.ALLOCATION]))

    def _on_context_reply(self) -> bytes | None:
        reply = self._option_reply(Opt.SET_META_CONTEXT)
        if reply is None:
            return None
        kind, data = reply
        if kind == Rep.META_CONTEXT and len(data) > 4:
            self._move(HandshakeEvent.INFO)
            if data[4:] == p.ALLOCATION.encode():
                self.agreed = replace(self.agreed, context_id=int.from_bytes(data[:4], "big"))
            return b""
        if self._is_declined(kind, data):
            self.agreed = replace(self.agreed, context_id=None)
        else:
            self._move(HandshakeEvent.ACK)
        return self._question()

    def _is_declined(self, kind: int, data: bytes) -> bool:
        """Whether an option was refused that we can do without; else it was acknowledged."""
        if kind & p.REP_ERROR_BIT:
            self._move(HandshakeEvent.DECLINED)
            return True
        if kind != Rep.ACK or data:
            raise NbdProtocolError(
                self.peer, f"reply type {kind} with {len(data)} bytes while {self.state.value}"
            )
        return False

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
            self._move(HandshakeEvent.INFO)
            self._on_info(data)
            return b""
        if kind == Rep.ACK and self.facts is not None:
            self._move(HandshakeEvent.ACK)
            self.facts = replace(self.facts, blocks=self._blocks)
            return b""
        if kind == Rep.ERR_BLOCK_SIZE_REQD and not self._infos:
            self._move(HandshakeEvent.SIZES_REQUIRED)
            self._infos = (p.Info.BLOCK_SIZE,)
            return self._question()
        if kind == Rep.ERR_UNSUP:
            self._move(HandshakeEvent.UNSUPPORTED)
            self._option = Opt.EXPORT_NAME
            return p.option(Opt.EXPORT_NAME, self._export.encode())
        if kind & p.REP_ERROR_BIT:
            raise UpstreamError(self._upstream, f"refused export {self._export!r}: {_reason(kind, data)}")
        raise NbdProtocolError(self.peer, f"reply type {kind} to option {self._option}")

    def _on_info(self, data: bytes) -> None:
        about = int.from_bytes(data[:2], "big")
        if about == p.Info.EXPORT and len(data) == p.EXPORT_INFO.size:
            self._learn(*p.EXPORT_INFO.unpack(data)[1:])
        elif about == p.Info.BLOCK_SIZE:
            try:
                self._blocks = p.parse_block_size(data)
            except p.BadOption as exc:
                raise NbdProtocolError(self.peer, str(exc)) from exc

    def _learn(self, size_bytes: int, flags: int) -> None:
        """A server that offers DF without structured replies cannot mean it."""
        if size_bytes >> 63:
            raise NbdProtocolError(self.peer, f"its size of {size_bytes} bytes exceeds 63 bits")
        self.facts = ExportFacts(size_bytes, flags).for_client(p.ReplyMode(self.agreed.structured))

    def _on_name_reply(self) -> bytes | None:
        padding = 0 if self._no_zeroes else len(p.NAME_PADDING)
        raw = self._take(p.EXPORT_NAME_REPLY.size + padding)
        if raw is None:
            return None
        self._learn(*p.EXPORT_NAME_REPLY.unpack_from(raw))
        self._move(HandshakeEvent.SIZE)
        return b""


def _reason(kind: int, data: bytes) -> str:
    """What an upstream says of its refusal, for a log line and our client."""
    text = data.decode("utf-8", "replace")
    return printable(text, REASON_CHARACTERS) or f"error {kind & ~p.REP_ERROR_BIT}"
