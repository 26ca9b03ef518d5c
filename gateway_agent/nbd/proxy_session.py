"""Upstream mode: cut-through, one upstream connection per client connection, no rewriting of cookies.

Requests leave in the bytes in which they came, replies too; the gateway only reads headers. A batch is
whatever one receive brings: tens of requests go out in one send, and their replies come back in one.

``UpstreamOpening`` connects and negotiates without blocking; one is one attempt. ``ReplyReader`` finds where
each reply ends while the bytes pass through. A simple reply does not say its own length: a read's payload has
the length that was asked for, unless the error field is set; so the reader looks each cookie up among the
requests in flight.

Ways this ends:
    the client says DISC, everything is answered   DISC to the upstream, both closed
    the client goes away                           both closed; requests under way are forgotten
    the upstream goes away                         between replies: each request under way or held is answered
                                                   EIO, then the connection is ended; within a reply: ended at
                                                   once (its rest would be garbage). Counted as errors;
                                                   the next connection finds it back, or is refused
Nothing is retried here: a write that the dead upstream may have done is the client's to repeat.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final

from gateway_agent.errors import GatewayError, NbdProtocolError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, StreamAccount
from gateway_agent.nbd.buffers import Finished, InFlight
from gateway_agent.nbd.handshake import ClientHandshake, HandshakeState
from gateway_agent.nbd.limits import Pending
from gateway_agent.nbd.loop import GONE, IN, OUT, EventLoop
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.session import NbdSession
from gateway_agent.nbd.sockets import Connection, begin_connect, connect_error, parse_upstream
from gateway_agent.nbd.tls import TlsOpening
from gateway_agent.nbd.upstream_tls import UpstreamTls
from gateway_agent.nbd.volume import PlaneContext, Volume
from pmdaemon.errors import ConfigError

_NOTHING: Final = (0, 0, 0)


class ReplyReader:
    """Parses simple replies while they pass through. Sans-IO.

    Attributes:
        payload_left: bytes of the reply in progress that have not arrived; 0 at a boundary between replies.
        boundary: offset, in the view last fed, behind the last whole reply; None when all of that view lies
            within one payload. Only there may bytes of our own be inserted.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.payload_left = 0
        self.boundary: int | None = None
        self._current = _NOTHING

    @property
    def in_progress(self) -> tuple[int, int, int] | None:
        """(arrived_ns, sent_ns, word) of the reply that has arrived in part, else None."""
        word, arrived_ns, sent_ns = self._current
        return (arrived_ns, sent_ns, word) if self.payload_left else None

    def paused(self, paused_ns: int) -> None:
        """What has arrived in part is later by a pause of its client."""
        word, arrived_ns, sent_ns = self._current
        self._current = word, arrived_ns + paused_ns, sent_ns + paused_ns

    def feed(
        self, view: memoryview, paused_ns: int, inflight: InFlight, now_ns: int
    ) -> tuple[int, list[Finished]]:
        """Parse received bytes.

        Args:
            view: bytes that begin where the last call stopped. An error number that the protocol does not
                know is replaced by EIO, in place.
            paused_ns: pauses of the client since the last cut, for ``Finished``.
            inflight: answered requests are taken out of it.
            now_ns: when these bytes were received.

        Returns:
            Number of bytes that may be passed on (the rest, below 16 bytes, is part of a header and must be
            fed again), and the requests that they finish.

        Raises:
            NbdProtocolError: not a simple reply, or one that nobody asked for.
        """
        finished: list[Finished] = []
        size, offset = len(view), 0
        self.boundary = None
        if self.payload_left:
            offset = min(self.payload_left, size)
            self.payload_left -= offset
            if self.payload_left:
                return offset, finished
            finished.append((paused_ns, *self._current, now_ns))
        self.boundary = offset
        unpack, pop = p.SIMPLE_REPLY.unpack_from, inflight.pop
        while size - offset >= 16:
            magic, error, cookie = unpack(view, offset)
            entry = pop(cookie, None)
            if magic != 0x67446698 or entry is None:
                _put_back(inflight, finished, cookie, entry)
                raise NbdProtocolError(
                    self._peer, f"reply with magic {magic:#x} and unknown cookie {cookie:#x}"
                )
            arrived_ns, sent_ns, word, payload_bytes = entry
            offset += 16
            if error:
                word |= FAILED_BIT
                if error not in p.WIRE_ERRORS:
                    p.SIMPLE_REPLY.pack_into(view, offset - 16, magic, p.EIO, cookie)
            elif payload_bytes:
                offset += payload_bytes
                if offset > size:
                    self.payload_left = offset - size
                    self._current = word, arrived_ns, sent_ns
                    return size, finished
            finished.append((paused_ns, word, arrived_ns, sent_ns, now_ns))
            self.boundary = offset
        return offset, finished


def _put_back(
    inflight: InFlight, finished: list[Finished], cookie: int, entry: tuple[int, int, int, int] | None
) -> None:
    """Requests whose replies cannot be passed on are under way again: nothing that arrived goes uncounted."""
    if entry is not None:
        inflight[cookie] = entry
    for number, (_, word, arrived_ns, sent_ns, _) in enumerate(finished, 2):
        inflight[-number] = (arrived_ns, sent_ns, word, 0)


OPENING_LIMIT_NS: Final = 3 * 10**9  # a healthy upstream needs milliseconds; clients give up after some 10 s
_RECEIVE_BYTES: Final = 65_536


class UpstreamOpening:
    """One attempt to connect and negotiate, within a time limit.

    It calls exactly one of ``on_ready`` (with the connected socket, in transmission, not watched any
    more) and ``on_failed``, never from inside its constructor, unless it is cancelled.

    Args:
        loop: what watches it.
        uri: the export's ``upstream``.
        on_ready: gets the socket and the facts; no socket when only the facts were wanted.
        on_failed: gets the reason.
        will_transmit: else only the facts are wanted, and the connection is ended.
        wants_block_size: see ``handshake``.
        tls: how to speak TLS with it; None: not at all.
    """

    def __init__(
        self,
        loop: EventLoop,
        uri: str,
        on_ready: Callable[[Connection | None, ExportFacts], None],
        on_failed: Callable[[GatewayError], None],
        *,
        will_transmit: bool,
        wants_block_size: bool,
        tls: UpstreamTls | None = None,
    ) -> None:
        self._loop = loop
        self._uri = uri
        self._on_ready = on_ready
        self._on_failed = on_failed
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
        )
        self._has_ended = False
        loop.at(self, loop.clock.monotonic_ns(), self._begin)

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
        assert facts is not None  # READY only with facts
        self._end()
        if not self._will_transmit:
            with contextlib.suppress(OSError):
                sock.send(handshake.farewell)
            sock.close()
            sock = None
        self._on_ready(sock, facts)

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
        if not self._has_ended:
            self.cancel()
            self._on_failed(error)

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


_HEADER_ROOM = p.SIMPLE_REPLY_BYTES  # kept free before received bytes for the start of such a header
_NO_COOKIE = -1  # cookies are unsigned


class ProxySession(NbdSession):
    """See the module docstring.

    Args:
        upstream: socket of the upstream connection, in transmission, non-blocking, not watched.
    """

    def __init__(
        self,
        context: PlaneContext,
        sock: Connection,
        volume: Volume,
        stream: StreamAccount,
        facts: p.ExportFacts,
        upstream: Connection,
    ) -> None:
        super().__init__(context, sock, volume, stream, facts)
        self._up = upstream
        self._up_fd = upstream.fileno()
        self._up_is_watched = False
        self._reader = ReplyReader(f"upstream of {volume.export.volume}")
        self._partial_header = b""  # first bytes of a reply header
        self._local: list[bytes] = []  # our own replies, waiting for a boundary
        self._want_upstream(IN)

    def push(self, now_ns: int) -> None:
        """Send admitted bytes upstream, as many as it takes."""
        if self.is_closed or self._ending:
            return self._watch_or_end()
        waiting = self.requests.outgoing()
        if waiting:
            try:
                sent = self._up.send(waiting)
            except BlockingIOError:
                sent = 0
            except OSError as exc:
                return self._upstream_gone(exc.strerror or "send failed")
            self.requests.sent(sent)
            if sent < len(waiting):
                self._want_upstream(OUT | (IN if self._out.is_empty else 0))
                return self._watch_or_end()
        # Replies wait in the upstream's socket while our client does not take those we have.
        self._want_upstream(IN if self._out.is_empty else 0)
        self._watch_or_end()

    def _want_upstream(self, mask: int) -> None:
        """Watch the upstream; with mask 0 not at all, or its hang-up would be reported again and again."""
        loop = self._context.loop
        if mask and self._up_is_watched:
            loop.want(self._up_fd, mask)
        elif mask:
            loop.watch(self._up_fd, mask, self._on_upstream, self._on_failure)
            self._up_is_watched = True
        elif self._up_is_watched:
            loop.forget(self._up_fd)
            self._up_is_watched = False

    def _on_upstream(self, events: int) -> None:
        if events & OUT:
            self._serve_on()
        if self.is_closed or self._ending or not events & (IN | GONE) or not self._out.is_empty:
            return
        start = _HEADER_ROOM - len(self._partial_header)
        scratch = self._context.scratch
        try:
            count = self._up.recv_into(scratch[_HEADER_ROOM:])
        except BlockingIOError:
            return
        except OSError as exc:
            self._upstream_gone(exc.strerror or "receive failed")
            return
        if not count:
            self._upstream_gone("it closed the connection")
            return
        scratch[start:_HEADER_ROOM] = self._partial_header
        self._on_replies(scratch[start : _HEADER_ROOM + count])

    def _on_replies(self, view: memoryview) -> None:
        now_ns = self._context.clock.monotonic_ns()
        usable, finished = self._reader.feed(view, self._pause.total_ns(now_ns), self.inflight, now_ns)
        self._record(finished)
        self._partial_header = bytes(view[usable:])
        boundary = self._reader.boundary
        if self._local and boundary is not None:
            self._reply(b"".join((view[:boundary], *self._take_local(), view[boundary:usable])))
        elif usable:
            self._reply(view[:usable])
        if not self.is_closed and not self._out.is_empty:
            self._want_upstream(OUT if self.requests.outgoing() else 0)
        if self._blocked and not self.is_closed:
            self._serve_on()  # a cookie may be free again
        else:
            self._watch_or_end()

    def _take_local(self) -> list[bytes]:
        local, self._local = self._local, []
        return local

    def _reply_error(self, reply: bytes) -> None:
        self._local.append(reply)
        if not self._reader.payload_left:
            self._reply(b"".join(self._take_local()))

    def _upstream_gone(self, problem: str) -> None:
        if self._is_finished():
            self.close("disconnected")
            return
        error = UpstreamError(self._volume.export.upstream or "", problem)
        self._volume.warnings.warning(
            self._context.clock.monotonic_ns(),
            "upstream-gone",
            peer=self.peer,
            inflight=len(self.inflight),
            error=str(error),
        )
        self._want_upstream(0)
        self._up.close()
        within = self._reader.in_progress
        if within is not None:
            self.inflight[_NO_COOKIE] = (*within, 0)  # to be counted; it cannot be answered any more
            self._reader.payload_left = 0
            self._local.clear()  # nor can what waits for its end
        self._fail_all(p.EIO, can_reply=within is None)

    def outstanding(self, now_ns: int) -> list[Pending]:
        """See ``accounting.CountedSession``; of a reply that has arrived in part, too."""
        found, within = super().outstanding(now_ns), self._reader.in_progress
        if within is not None:
            paused_ns = self._pause.total_ns(now_ns)
            found.append((within[0] + paused_ns, within[2] & 3, paused_ns))
        return found

    def cut_ended(self, now_ns: int) -> None:
        """See ``accounting.CountedSession``."""
        self._reader.paused(self._pause.total_ns(now_ns))
        super().cut_ended(now_ns)

    def _is_finished(self) -> bool:
        return super()._is_finished() and not self._reader.payload_left and not self._local

    def _begin_end(self) -> None:
        self._want_upstream(0)
        super()._begin_end()

    def _on_failure(self, exc: Exception) -> None:
        # A reply that nobody asked for, or a bug: nothing that follows on this connection can be trusted.
        if not self.is_closed and not self._ending:
            self._fail_all(p.EIO, can_reply=False)
        self.close(str(exc))

    def _release_storage(self) -> None:
        self._want_upstream(0)
        if self.requests.is_drained:  # else DISC would become the end of a torn write's payload
            with contextlib.suppress(OSError):
                self._up.send(p.request(p.Cmd.DISC, 0, 0, 0))
        with contextlib.suppress(OSError):
            self._up.close()
