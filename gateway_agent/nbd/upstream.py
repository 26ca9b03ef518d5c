"""Opening an upstream: connect and negotiate without blocking, within a time limit.

One ``UpstreamOpening`` is one attempt. It calls exactly one of ``on_ready`` (with the connected socket, in
transmission, watched by nobody any more) and ``on_failed``, never from inside its constructor, unless it
is cancelled.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final

from gateway_agent.errors import GatewayError, UpstreamError
from gateway_agent.nbd.config import parse_upstream
from gateway_agent.nbd.handshake import ClientHandshake, HandshakeState
from gateway_agent.nbd.loop import IN, OUT, EventLoop
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.sockets import begin_connect, connect_error

LIMIT_NS: Final = 3 * 10**9  # a healthy upstream needs milliseconds; clients give up after some 10 s
_RECEIVE_BYTES: Final = 65_536


class UpstreamOpening:
    """See the module docstring.

    Args:
        loop: what watches it.
        uri: the export's ``upstream``.
        on_ready: gets the socket and the facts; no socket when only the facts were wanted.
        on_failed: gets the reason.
        will_transmit: else only the facts are wanted, and the connection is ended.
        wants_block_size: see ``handshake``.
    """

    def __init__(
        self,
        loop: EventLoop,
        uri: str,
        on_ready: Callable[[socket.socket | None, ExportFacts], None],
        on_failed: Callable[[GatewayError], None],
        *,
        will_transmit: bool,
        wants_block_size: bool,
    ) -> None:
        self._loop = loop
        self._uri = uri
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._sock: socket.socket | None = None
        self._address, export = parse_upstream(uri)
        self._will_transmit = will_transmit
        self._handshake = ClientHandshake(
            export, uri, will_transmit=will_transmit, wants_block_size=wants_block_size
        )
        self._is_over = False
        loop.at(self, loop.clock.monotonic_ns(), self._begin)

    def _begin(self, now_ns: int) -> None:
        try:
            self._sock = begin_connect(self._address)
        except UpstreamError as exc:
            self._fail(UpstreamError(self._uri, exc.problem))
            return
        self._loop.watch(self._sock.fileno(), OUT, self._on_event, self._on_surprise)
        self._loop.at(self, now_ns + LIMIT_NS, self._on_late)

    def _on_event(self, events: int) -> None:
        assert self._sock is not None  # watched only while it exists
        if self._loop.is_watched_for(self._sock.fileno(), OUT):
            problem = connect_error(self._sock)
            if problem:
                self._fail(UpstreamError(self._uri, problem))
            else:
                self._loop.want(self._sock.fileno(), IN)
            return
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise UpstreamError(self._uri, "it closed the connection during negotiation")
            self._say(self._handshake.feed(data))
        except BlockingIOError:
            return
        except OSError as exc:
            self._fail(UpstreamError(self._uri, exc.strerror or "negotiation failed"))
        except GatewayError as exc:
            self._fail(exc)
        else:
            self._check_ready()

    def _say(self, data: bytes) -> None:
        """Answers of negotiation are some 100 bytes: an empty socket buffer takes them whole."""
        if data and self._sock is not None and self._sock.send(data) != len(data):
            raise UpstreamError(self._uri, "it does not take the bytes of negotiation")

    def _check_ready(self) -> None:
        handshake = self._handshake
        if handshake.state is not HandshakeState.READY:
            return
        if handshake.left_over:
            self._fail(UpstreamError(self._uri, "it sent replies that nobody asked for"))
            return
        sock, facts = self._sock, handshake.facts
        assert sock is not None  # READY only after receiving
        assert facts is not None  # READY only with facts
        self._end()
        if not self._will_transmit:
            with contextlib.suppress(OSError):
                sock.send(handshake.farewell)
            sock.close()
            sock = None
        self._on_ready(sock, facts)

    def _on_late(self, _now_ns: int) -> None:
        self._fail(UpstreamError(self._uri, f"no answer within {LIMIT_NS // 10**9} s"))

    def _on_surprise(self, exc: Exception) -> None:
        self._fail(UpstreamError(self._uri, str(exc)))

    def _fail(self, error: GatewayError) -> None:
        if not self._is_over:
            self.cancel()
            self._on_failed(error)

    def _end(self) -> None:
        self._is_over = True
        self._loop.cancel(self)
        if self._sock is not None:
            self._loop.forget(self._sock.fileno())

    def cancel(self) -> None:
        """Give up without calling anybody."""
        if self._is_over:
            return
        self._end()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
