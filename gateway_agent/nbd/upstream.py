"""Connections to upstreams: one attempt to connect and negotiate (``UpstreamOpening``), and what comes of it.

An ``UpstreamPlan`` says how to reach one upstream for one client; an ``Upstream`` is a connection of it in
transmission. With its plan a session can ask for another one after a loss. Thread: the loop's.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway_agent.errors import GatewayError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.farewell import UpstreamFarewell
from gateway_agent.nbd.handshake import HandshakeState
from gateway_agent.nbd.loop import IN, OUT, EventLoop, OnFailure
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.sockets import Connection, begin_connect, connect_error, parse_upstream
from gateway_agent.nbd.tls import TlsOpening
from gateway_agent.nbd.upstream_handshake import Agreed, ClientHandshake, disconnection
from gateway_agent.nbd.upstream_silence import end_when_silent
from gateway_agent.nbd.upstream_tls import UpstreamTls
from pmdaemon.errors import ConfigError

OPENING_LIMIT_NS: Final = 3 * 10**9  # a healthy upstream needs milliseconds; clients give up after some 10 s
_RECEIVE_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class UpstreamPlan:
    """How to reach an upstream for one client.

    Attributes:
        uri: the export's ``upstream``.
        wants_block_size: see ``upstream_handshake``.
        mode: how the client wants its replies.
        tls: how to speak TLS with it; None: not at all.
    """

    uri: str
    wants_block_size: bool = False
    mode: p.ReplyMode = p.SIMPLE_REPLIES
    tls: UpstreamTls | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """A connection in transmission, non-blocking, not watched.

    Attributes:
        sock: owned by the holder of this.
        agreed: how it replies.
        facts: as it says them.
        plan: to open another one.
    """

    sock: Connection
    agreed: Agreed
    facts: ExportFacts
    plan: UpstreamPlan

    def is_like(self, other: Upstream) -> bool:
        """Whether it is of the same export, and replies in the same form."""
        mine, others = self.agreed, other.agreed
        return (
            self.facts == other.facts
            and (mine.structured, mine.extended) == (others.structured, others.extended)
            and (mine.context_id is None) == (others.context_id is None)
        )

    def leave(self, loop: EventLoop) -> None:
        """It is not needed: nothing was asked on it."""
        UpstreamFarewell(loop, self.sock, disconnection(self.agreed))

    def close(self) -> None:
        """Close the connection, which the upstream has ended or which cannot be trusted."""
        with contextlib.suppress(OSError):
            self.sock.close()


class UpstreamOpening:
    """One attempt to connect and negotiate, within a time limit.

    It calls exactly one of ``on_ready`` (with the connected socket, in transmission, not watched any
    more) and ``on_failed``, never from inside its constructor, unless it is cancelled.

    Args:
        loop: what watches it.
        uri: the export's ``upstream``.
        on_ready: gets the connection and the facts; no connection when only the facts were wanted.
        on_failed: gets the reason.
        on_failure: gets what either of them raises, which is logged.
        will_transmit: else only the facts are wanted, and the connection is ended.
        wants_block_size: see ``upstream_handshake``.
        tls: how to speak TLS with it; None: not at all.
        mode: how our client wants its replies.
    """

    def __init__(
        self,
        loop: EventLoop,
        uri: str,
        on_ready: Callable[[Upstream | None, ExportFacts], None],
        on_failed: Callable[[GatewayError], None],
        *,
        on_failure: OnFailure = lambda _exc: None,
        will_transmit: bool,
        wants_block_size: bool,
        tls: UpstreamTls | None = None,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
    ) -> None:
        self._loop = loop
        self._uri = uri
        self._plan = UpstreamPlan(uri, wants_block_size, mode, tls)
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_failure = on_failure
        self._plain: socket.socket | None = None
        self._sock: Connection | None = None  # the same, or TLS over it
        self._address, export = parse_upstream(uri)
        self._will_transmit = will_transmit
        self._tls = tls
        self._securing: TlsOpening | None = None
        self._handshake = ClientHandshake(
            export,
            uri,
            will_transmit=will_transmit,
            wants_block_size=wants_block_size,
            wants_tls=tls is not None,
            mode=mode,
        )
        self._has_ended = False
        loop.at(self, loop.clock.monotonic_ns(), self._begin)

    @property
    def agreed(self) -> Agreed:
        """What came of the negotiation so far."""
        return self._handshake.agreed

    def _begin(self, now_ns: int) -> None:
        try:
            self._sock = self._plain = begin_connect(self._address)
        except UpstreamError as exc:
            self._fail(UpstreamError(self._uri, exc.problem))
            return
        self._loop.watch(self._sock.fileno(), OUT, self._on_event, self._on_surprise)
        self._loop.at(self, now_ns + OPENING_LIMIT_NS, self._on_late)

    def _on_event(self, events: int) -> None:
        assert self._sock is not None  # watched only while it exists
        assert self._plain is not None  # made with it
        if self._loop.is_watched_for(self._sock.fileno(), OUT):
            problem = connect_error(self._plain)
            if problem:
                self._fail(UpstreamError(self._uri, problem))
            else:
                self._loop.want(self._sock.fileno(), IN)
            return
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise UpstreamError(self._uri, "it closed the connection during negotiation")
            self._send(self._handshake.feed(data))
        except BlockingIOError:
            return
        except OSError as exc:
            self._fail(UpstreamError(self._uri, exc.strerror or "negotiation failed"))
        except GatewayError as exc:
            self._fail(exc)
        else:
            self._check_ready()

    def _send(self, data: bytes) -> None:
        """Answers of negotiation are some 100 bytes: an empty socket buffer takes them whole."""
        if data and self._sock is not None and self._sock.send(data) != len(data):
            raise UpstreamError(self._uri, "it does not take the bytes of negotiation")

    def _check_ready(self) -> None:
        handshake = self._handshake
        if handshake.state is HandshakeState.TLS:
            self._start_tls()
        if handshake.state is not HandshakeState.READY:
            return
        if handshake.left_over:
            self._fail(UpstreamError(self._uri, "it sent replies that were not asked for"))
            return
        sock, facts = self._sock, handshake.facts
        assert sock is not None  # READY only after receiving
        assert self._plain is not None  # the same, or below it
        assert facts is not None  # READY only with facts
        self._end()
        made: Upstream | None = Upstream(sock, handshake.agreed, facts, self._plan)
        if not self._will_transmit:
            UpstreamFarewell(self._loop, sock, handshake.farewell)
            made = None
        else:
            end_when_silent(self._loop, self._plain, self._uri)
        try:
            self._on_ready(made, facts)
        except Exception as exc:  # noqa: BLE001 - it is the caller's, and not of this connection
            self._loop.report(exc, self._on_failure)

    def _start_tls(self) -> None:
        assert self._plain is not None  # connected
        assert self._tls is not None  # else TLS was not asked for
        self._loop.forget(self._plain.fileno())
        try:
            self._sock, self._securing = self._tls.secure(self._plain, self._on_secured, self._on_insecure)
        except ConfigError as exc:
            self._on_insecure(str(exc))

    def _on_secured(self) -> None:
        assert self._sock is not None  # set when it began
        self._securing = None
        self._loop.watch(self._sock.fileno(), IN, self._on_event, self._on_surprise)
        try:
            self._send(self._handshake.secured())
        except OSError as exc:
            self._fail(UpstreamError(self._uri, exc.strerror or "negotiation failed"))
        except GatewayError as exc:
            self._fail(exc)

    def _on_insecure(self, reason: str) -> None:
        self._securing = None
        self._fail(UpstreamError(self._uri, reason))

    def _on_late(self, _now_ns: int) -> None:
        self._fail(UpstreamError(self._uri, f"no answer within {OPENING_LIMIT_NS // 10**9} s"))

    def _on_surprise(self, exc: Exception) -> None:
        self._fail(UpstreamError(self._uri, str(exc)))

    def _fail(self, error: GatewayError) -> None:
        if self._has_ended:
            return
        self.cancel()
        try:
            self._on_failed(error)
        except Exception as exc:  # noqa: BLE001 - see _check_ready
            self._loop.report(exc, self._on_failure)

    def _end(self) -> None:
        self._has_ended = True
        self._loop.cancel(self)
        if self._securing is not None:
            self._securing.cancel()
        if self._sock is not None:
            self._loop.forget(self._sock.fileno())

    def cancel(self) -> None:
        """Give up and call neither function."""
        if self._has_ended:
            return
        self._end()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
