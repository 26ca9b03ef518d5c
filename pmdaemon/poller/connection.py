"""One agent's connection, plain TCP or TLS: a session, a bounded output buffer, and optimistic sends.

Sending: any thread, under ``_lock``. If nothing is buffered the bytes go straight to the socket; only what
would block is buffered, and then the inbound thread is asked (``on_blocked``) to register write interest.
Measured: registering every write costs 6 us a poll, more than half of its whole cost. A peer that lets 1
MiB pile up is disconnected: polls are a few hundred bytes, so it has not read for minutes.

Ending: ``finish`` sends a last frame behind what waits, and shuts our side down when all of it has left.
Then what the peer still sends is read and discarded until it closes, ``DRAIN_NS`` pass or ``DRAIN_BYTES``
arrive. Closing at once with unread input would make the kernel answer with a reset, which can destroy the
last frame before the peer reads it.

Lock ``_lock`` guards ``_out``, ``_closed`` and changes of ``session.state``. Receiving, ``finish``,
``close`` and the attributes below belong to the inbound thread; ``doomed`` may be set by any.

Source: P10 (optimistic, never blocking), P13 (one write); DESIGN.md 3.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from pmdaemon.errors import ProtocolViolation
from pmdaemon.pki.certificates import Credential, credential_of_der
from pmdaemon.poller.gateway import Gateway
from pmdaemon.runtime.transport import TlsTransport, Transport, prepare
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Hello
from pmdaemon.wire.session import Session, SessionState, Side


class Sent(Enum):
    """What became of frames given to ``AgentConnection.send``."""

    SENT = "sent"
    """All bytes are in the kernel."""
    WAITING = "waiting"
    """Some wait for the socket; write interest is registered."""
    OVERFLOW = "overflow"
    """The peer reads too slowly: it is being disconnected."""
    GONE = "gone"
    """The connection is closed or draining; the frames were dropped."""


MAX_OUT_BYTES: Final = 1 << 20
DRAIN_NS: Final = 10**9
DRAIN_BYTES: Final = 4 << 20
# Compared for every poll: a global costs less than a member of an enumeration.
_POLL: Final = Kind.POLL
_POLLING, _DRAINING, _CLOSED = SessionState.POLLING, SessionState.DRAINING, SessionState.CLOSED
_SENT: Final = Sent.SENT


class AgentConnection:
    """An accepted socket and its session.

    Attributes:
        address: "host:port" of the peer, for messages.
        opened_ns: when it was accepted (monotonic).
        last_received_ns: when bytes last arrived.
        doomed: why it must be closed; set by the thread that noticed, acted on by the inbound thread.
        drain_until_ns: while draining, when to give up.
        secured: whether frames may flow: at once without TLS, else when the handshake is done.
        credential: what the peer's certificate says; None without one.
        asking: a certificate is being made for it.
        is_dialled: the parent has dialled it, and wants to know why it is refused.
    """

    __slots__ = (
        "_closed",
        "_discarded_bytes",
        "_lock",
        "_on_blocked",
        "_out",
        "_recv_into",
        "_send",
        "_sock",
        "_tls",
        "address",
        "asking",
        "credential",
        "doomed",
        "drain_until_ns",
        "end_reason",
        "gateway",
        "hello",
        "is_dialled",
        "last_received_ns",
        "opened_ns",
        "schema_seen",
        "secured",
        "session",
    )

    def __init__(
        self,
        sock: socket.socket | TlsTransport,
        address: str,
        now_ns: int,
        on_blocked: Callable[[AgentConnection], None],
    ) -> None:
        self.address = address
        self.session = Session(Side.DAEMON)
        self.hello: Hello | None = None
        self.schema_seen = False
        self.gateway: Gateway | None = None
        self.opened_ns = now_ns
        self.last_received_ns = now_ns
        self.doomed = ""
        self.drain_until_ns: int | None = None
        self.end_reason = ""
        self.credential: Credential | None = None
        self.asking = False
        self.is_dialled = False
        self._sock: Transport = sock
        self._recv_into, self._send = sock.recv_into, sock.send
        self._tls = sock if isinstance(sock, TlsTransport) else None
        self.secured = self._tls is None
        self._lock = threading.Lock()
        self._out = bytearray()
        self._closed = False
        self._discarded_bytes = 0
        self._on_blocked = on_blocked
        if isinstance(sock, socket.socket):
            prepare(sock)

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed."""
        return self._sock.fileno()

    @property
    def is_movable(self) -> bool:
        """Whether another process can go on with it: HELLO was not answered, no TLS session has begun."""
        return self.hello is None and not self._out and (self._tls is None or not self._tls.has_begun)

    @property
    def closed(self) -> bool:
        """Whether the socket is closed."""
        return self._closed

    @property
    def waiting_bytes(self) -> int:
        """Output that the socket has not taken yet."""
        return len(self._out)

    # -- sending

    def send(self, *frames: tuple[Kind, bytes]) -> Sent:
        """Send frames as one write, without blocking. Any thread."""
        data = frames[0][1] if len(frames) == 1 else b"".join([data for _, data in frames])
        with self._lock:
            state = self.session.state
            if self._closed or not self.secured or state is _DRAINING or state is _CLOSED:
                return Sent.GONE
            try:
                for kind, _ in frames:
                    self.session.sending(kind)
            except ProtocolViolation:
                return Sent.GONE  # a race with a session that has ended: the frames are for the former one
            result = self._write(data)
        if result is not _SENT:
            self._on_blocked(self)
        return result

    def send_poll(self, data: bytes) -> Sent:
        """``send`` of a POLL frame alone, which nearly every write is. Any thread."""
        with self._lock:
            is_polling = self.session.state is _POLLING and not self._closed
            result = self._write(data) if is_polling else None
        if result is _SENT:
            return result
        if result is None:
            return self.send((_POLL, data))
        self._on_blocked(self)
        return result

    def _write(self, data: bytes) -> Sent:
        if self._out:
            return self._keep(data)
        send = self._send
        try:
            sent = send(data)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self.doomed = self.doomed or f"sending failed: {exc.strerror or exc}"
            return Sent.GONE
        return _SENT if sent == len(data) else self._keep(data[sent:])

    def _keep(self, data: bytes) -> Sent:
        if len(self._out) + len(data) > MAX_OUT_BYTES:
            self.doomed = self.doomed or f"it left {len(self._out)} bytes of ours unread"
            return Sent.OVERFLOW
        self._out += data
        return Sent.WAITING

    def flush(self) -> bool:
        """The socket takes bytes again: send what waits. True when nothing is left. Inbound thread."""
        with self._lock:
            if self._closed:
                return True
            try:
                while self._out:
                    del self._out[: self._sock.send(self._out)]
            except BlockingIOError:
                return False
            except OSError as exc:
                self._out.clear()
                self.doomed = self.doomed or f"sending failed: {exc.strerror or exc}"
            if self.drain_until_ns is not None:
                self._end_output()
            return True

    # -- receiving

    def secure(self) -> int | None:
        """Go on with the TLS handshake: None when done, else the selector event it waits for. Inbound thread.

        Raises:
            HandshakeFailed: no TLS, or a certificate that is not accepted.
            CredentialRefused: a certificate of ours that names no gateway.
        """
        if self._tls is None:
            return None
        wanted = self._tls.handshake()
        if wanted is None:
            der = self._tls.peer_der()
            self.credential = credential_of_der(der) if der else None
            if self.credential is None:
                self.session.admit_enrolment_alone()
            self.secured = True
        return wanted

    def receive(self, buffer: memoryview, now_ns: int) -> int | None:
        """Read once into the shared buffer: the bytes for the session, or None at the end of the stream.

        Raises:
            OSError: the connection broke (never for lack of data, which is 0 bytes).
        """
        recv_into = self._recv_into  # a slot's content is called the short way only from a local name
        try:
            size = recv_into(buffer)
        except BlockingIOError:
            return 0
        if size == 0:
            return None
        self.last_received_ns = now_ns
        if self.drain_until_ns is not None:
            self._discarded_bytes += size
            return None if self._discarded_bytes > DRAIN_BYTES else 0
        return size

    def resume_frames(self) -> Iterator[frame.Frame]:
        """The whole frames among bytes that another process had received (``session.resume``)."""
        return self.session.feed(b"")

    # -- new connections that are passed on to another process

    def detach(self) -> tuple[int, bytes]:
        """Give the descriptor away, with what was received and not yielded. Inbound thread.

        Only while ``is_movable``: no other thread knows a connection without a gateway.
        """
        sock = self._sock
        assert isinstance(sock, socket.socket | TlsTransport)  # there are no others
        self._closed = True
        return sock.detach(), self.session.pending

    def peek(self) -> bytes:
        """What a peer has sent before its TLS handshake begins; it stays in the kernel. Inbound thread."""
        return self._tls.peek() if self._tls is not None else b""

    def resume(self, received: bytes) -> None:
        """Go on with a new connection of another process, which has received these bytes. Inbound thread."""
        self.session.resume(self.session.state, received)

    # -- ending

    def finish(self, kind: Kind, last_frame: bytes, reason: str, now_ns: int) -> None:
        """Send a last frame (ERROR or BYE), then drain. Inbound thread.

        Behind output that waits it waits, too, however much that is: ``flush`` ends our side after it.
        """
        with self._lock:
            self.end_reason = self.end_reason or reason
            if self._closed or self.drain_until_ns is not None:
                return
            if self.session.state not in (SessionState.DRAINING, SessionState.CLOSED):
                self.session.sending(kind)
                if self._out:
                    self._out += last_frame
                else:
                    self._write(last_frame)
            self.drain_until_ns = now_ns + DRAIN_NS
            waits = bool(self._out) and self.secured  # without a handshake nothing of it can ever leave
            if not waits:
                self._end_output()
        if waits:
            self._on_blocked(self)

    def _end_output(self) -> None:
        with contextlib.suppress(OSError):  # the peer has ended it already
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; nothing can be sent any more. Inbound thread."""
        with self._lock:
            self._closed = True
            self._out.clear()
            self.session.close()
        with contextlib.suppress(OSError):  # the other side has ended it already
            # A dialled connection has a second descriptor in the parent, which notices its end by this.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
