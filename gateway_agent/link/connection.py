"""The link's connections: to the PMDaemon and to the data planes, dialled for ever; and the link's listener.

    waiting ──backoff ends──► connecting ──writable──► (securing) ──TLS agreed──► open ──fault──► waiting
                                  └───────────── 5 s for both ─────────────────────────────────────►

Of several servers the others are tried as well (``elsewhere``) while a dial waits for longer than
``PATIENCE_NS``, and while the session is silent; the first that answers is used. Without TLS a server that
was stopped seems to answer, since its kernel accepts connections. So after sessions in which no server has
said anything the others are tried later, each time after twice as long, up to ``MOST_STAY_S``: the session is
given up before that, and the dials have a back-off of their own.

``PeerConnection`` is non-blocking, with deadline and backoff. Without TLS there is no securing, and the
kernel says whose process is at the other end (``server_users``); with TLS the peer must show the server's
certificate, from the pinned CA. What is said on it is the business of its
``ConnectionPeer``; the connection moves bytes and reports openings and losses.

Where the agent may not dial, the PMDaemon dials it (``listen`` in the agent's file). ``LinkListener``
accepts a connection as a candidate; it takes the place of the session there is only when it has proved to be
the server (with TLS the agent is the client also here). So no other host can speak or end a session. There
is one candidate at a time, for ``CANDIDATE_LIMIT_NS``; a newer one replaces it if it has not proved itself
yet.

    listening ──accept──► candidate ──TLS agreed──► ``PeerConnection.take``
                              └── not the server, 5 s ──► closed, logged

Thread: the link's loop only.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import structlog

from gateway_agent.errors import GatewayError, PeerLost
from gateway_agent.link.elsewhere import OtherServers
from gateway_agent.link.server_users import EVERY_USER, ServerUsers
from pmdaemon.errors import ConfigError
from pmdaemon.pki.certificates import SERVER_URI
from pmdaemon.runtime.backoff import Backoff, doubled
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.sockets import accept, dial_error, why_not
from pmdaemon.runtime.transport import HandshakeFailed, TlsTransport, Transport, prepare

log = structlog.get_logger("connection")


CONNECT_LIMIT_NS: Final = 5_000_000_000
PATIENCE_NS: Final = 500_000_000  # with the dial of one server of several; then the others are tried, too
NOBODY_LISTENS_S: Final = 1.0
"""The longest wait between two rounds of several servers that all refuse connections. One of them acts soon,
and a refusal costs it nothing."""
FIRST_STAY_S: Final = 1.0
MOST_STAY_S: Final = 64.0
HEALTHY_NS: Final = 5_000_000_000
"""A connection that ends sooner, or on which nothing came, was refused: do not hammer that peer."""
RECEIVE_BYTES: Final = 256 << 10  # one backlog reply; also the share of one connection in a turn of the loop
MAX_PENDING_BYTES: Final = 4 << 20  # several replies; a peer that leaves more unread is not reading at all


class ConnectionPeer(Protocol):
    """What a connection reports to, and takes bytes from."""

    def opened(self) -> None:
        """The connection is open; ``pending`` may fill."""

    def received(self, data: bytes) -> None:
        """Bytes arrived.

        Raises:
            PeerLost: the connection must be closed, after what is pending was sent.
        """

    def lost(self, reason: str) -> None:
        """An open connection is gone."""

    def pending(self) -> bytearray:
        """Bytes that wait to be sent; sent ones are deleted from its front."""


class PeerConnection:
    """See the module docstring. ``addresses``: paths of Unix sockets, or (host, port); none: it never dials.

    Of several the next one is dialled at once when one fails, and after the last the first, with backoff. A
    connection that was in order and is lost is dialled at the same address first: a server that was started
    again, or that has asked for it, is back there at once.

    ``tls`` gives the context for one dial; None for plain bytes. ``server_name`` goes into the ClientHello.
    ``users``: who may be at the other end of plain bytes.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[str | tuple[str, int]],
        peer: ConnectionPeer,
        backoff: Backoff,
        selector: selectors.BaseSelector,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None = None,
        server_name: str | None = None,
        users: ServerUsers = EVERY_USER,
    ) -> None:
        self.name = name
        self._users = users
        self._addresses = list(addresses)
        self._place = 0  # of the address that is dialled, or was last
        self._failures = 0  # at one address after the other
        self._refusals = 0  # of these
        self._others = OtherServers(addresses, selector, clock, tls, server_name, users=users)
        self._is_silent = False  # and others are tried
        self._elsewhere_ns: int | None = None  # silent: from when on; None: it is not
        self._has_answered = False  # the other side of the open connection has said something
        self._mute = 0  # connections in a row on which nothing came
        self._peer = peer
        self._backoff = backoff
        self._selector = selector
        self._clock = clock
        self._tls = tls
        self._server_name = server_name
        self._socket: Transport | None = None
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._is_open = False
        self._due_ns = clock.monotonic_ns()  # waiting: next try; connecting: give up
        self._opened_ns = 0
        self._last_failures: dict[int, str] = {}

    @property
    def due_ns(self) -> int | None:
        """When ``turn`` has something to do by the clock; None while the connection is open."""
        return None if self._is_open or not self._addresses else self._due_ns

    @property
    def try_ns(self) -> int | None:
        """When ``turn`` has to see to the other servers; None: it need not."""
        if self._is_silent or self._others.due_ns is not None:
            return self._others.due_ns
        return self._elsewhere_ns if self._is_open else self._patient_until_ns

    @property
    def _patient_until_ns(self) -> int | None:
        is_dialling = self._socket is not None and not self._is_open and len(self._addresses) > 1
        return self._due_ns - CONNECT_LIMIT_NS + PATIENCE_NS if is_dialling else None

    def silent(self, is_silent: bool) -> None:
        """Whether the other side of the open connection says nothing: others are tried, at once or later."""
        if not (is_silent and self._is_open and len(self._addresses) > 1):
            self._is_silent, self._elsewhere_ns = False, None
            return
        now_ns = self._clock.monotonic_ns()
        if self._elsewhere_ns is None:
            stay_s = doubled(FIRST_STAY_S, self._mute - 1, MOST_STAY_S) if self._mute else 0.0
            self._elsewhere_ns = now_ns + round(stay_s * 1e9)
        self._is_silent = now_ns >= self._elsewhere_ns

    def _try_elsewhere(self) -> None:
        until_ns = self._patient_until_ns
        if not self._is_silent and (until_ns is None or self._clock.monotonic_ns() < until_ns):
            self._others.rest()
            return
        self._others.turn(self._place)
        if (found := self._others.proved()) is not None:
            place, transport = found
            self.take(transport, "another server answers, and this one does not")
            self._place = place

    def turn(self) -> None:
        """Dial when it is time, give up a try that takes too long, and send what is pending."""
        if self._is_silent or self._socket is not None or self._others.due_ns is not None:
            self._try_elsewhere()
        if self._is_open:
            self._send()
        elif self._addresses and self._clock.monotonic_ns() >= self._due_ns:
            if self._socket is not None:
                self._failed("no answer within 5 s")
            else:
                self._dial(self._addresses[self._place])

    def abandon(self) -> None:
        """Close without a report; it is not dialled again."""
        self._is_open = False
        self.dial_no_more()
        if self._socket is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def dial_no_more(self) -> None:
        """The link is stopping: what is open stays so, and what is lost is not dialled again."""
        self._addresses.clear()
        self._is_silent, self._elsewhere_ns = False, None
        self._others.rest()

    def take(self, connected: Transport, why: str = "the server has dialled again") -> None:
        """This connection takes the place of the one there is: the other side has dialled us."""
        if self._socket is not None:
            self.close(why)
        self._socket = connected
        self._selector.register(connected, selectors.EVENT_READ, self)
        self._opened(connected)

    def _dial(self, address: str | tuple[str, int]) -> None:
        try:
            dialled = socket.socket(_family(address), socket.SOCK_STREAM)
        except OSError as exc:  # out of descriptors: what is open goes on
            self._failed(exc.strerror or str(exc))
            return
        dialled.setblocking(False)
        self._socket = dialled
        code = dialled.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._failed(os.strerror(code), code=code)
            return
        self._due_ns = self._clock.monotonic_ns() + CONNECT_LIMIT_NS
        self._selector.register(self._socket, selectors.EVENT_WRITE, self)

    def ready(self, events: int) -> None:
        """The selector says that the socket is ready."""
        if self._socket is None:
            return
        if not self._is_open:
            if isinstance(self._socket, socket.socket):
                self._connected(self._socket)
            elif isinstance(self._socket, TlsTransport):
                self._secure(self._socket)
            return
        if events & selectors.EVENT_READ:
            self._receive(self._socket)
        if events & selectors.EVENT_WRITE:
            self._send()

    def _connected(self, dialled: socket.socket) -> None:
        if code := dial_error(dialled):
            self._failed(os.strerror(code), code=code)
            return
        if dialled.family != socket.AF_UNIX:
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            if problem := self._users.why_not_dialled(dialled):
                self._failed(problem)
            else:
                self._opened(dialled)
            return
        self._selector.unregister(dialled)
        try:
            name = self._server_name
            self._socket = TlsTransport(dialled, self._tls(), server_side=False, server_name=name)
        except (OSError, GatewayError) as exc:
            self._failed(str(exc))
            return
        self._selector.register(self._socket, selectors.EVENT_WRITE, self)
        self._secure(self._socket)

    def _secure(self, transport: TlsTransport) -> None:
        try:
            wanted = transport.handshake()
        except HandshakeFailed as exc:
            self._failed(str(exc))
            return
        if wanted is not None:
            self._selector.modify(transport, wanted, self)
        elif SERVER_URI not in transport.peer_uris():
            self._failed("TLS handshake failed (wrong-certificate): the peer's certificate is not a server's")
        else:
            self._opened(transport)

    def _opened(self, connected: Transport) -> None:
        self._is_open, self._has_answered = True, False
        self._last_failures.clear()
        self._opened_ns = self._clock.monotonic_ns()
        self._selector.modify(connected, selectors.EVENT_READ, self)
        log.info("connected", to=self.name)
        self._peer.opened()
        self._send()

    def _receive(self, connected: Transport) -> None:
        try:
            data = bytes(self._buffer[: connected.recv_into(self._buffer)])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.close(exc.strerror or str(exc))
            return
        if not data:
            self.close("the other side closed the connection")
            return
        self._has_answered, self._mute = True, 0
        try:
            self._peer.received(data)
        except PeerLost as exc:
            self.close(str(exc))

    def _send(self) -> None:
        pending = self._peer.pending()
        if self._socket is None or not self._is_open:
            return
        try:
            while pending:
                del pending[: self._socket.send(pending)]
        except (BlockingIOError, InterruptedError):
            if len(pending) > MAX_PENDING_BYTES:
                self.close(f"it left {len(pending)} bytes unread")
                return
        except OSError as exc:
            self.close(exc.strerror or str(exc))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted, self)

    def close(self, reason: str, *, is_silent: bool = False) -> None:
        """Close an open connection; what is pending is sent as far as the socket takes it at once.

        Args:
            reason: for the log.
            is_silent: the other side says nothing; of several addresses the next one is dialled.
        """
        if self._socket is not None and self._is_open:
            with suppress(OSError):
                self._socket.send(self._peer.pending())
        self._failed(reason, is_silent=is_silent)

    def _failed(self, reason: str, *, is_silent: bool = False, code: int = 0) -> None:
        was_open, place, now_ns = self._is_open, self._place, self._clock.monotonic_ns()
        if self._socket is not None:
            with suppress(KeyError, ValueError):  # a dial that failed at once was never registered
                self._selector.unregister(self._socket)
            self._socket.close()
        self._socket, self._is_open, self._is_silent, self._elsewhere_ns = None, False, False, None
        was_healthy = was_open and self._has_answered and now_ns - self._opened_ns >= HEALTHY_NS
        self._mute += was_open and not self._has_answered
        if was_healthy:
            self._backoff.succeeded()
        if not was_healthy or is_silent:
            self._failures += 1
            self._refusals += code == errno.ECONNREFUSED
            self._place = (place + 1) % max(1, len(self._addresses))
        self._due_ns = now_ns
        if was_open or self._failures >= len(self._addresses):
            all_refuse = self._refusals == self._failures > 1
            self._failures = self._refusals = 0
            wait_s = self._backoff.failed()
            self._due_ns += round((min(wait_s, NOBODY_LISTENS_S) if all_refuse else wait_s) * 1e9)
        if was_open:
            self._peer.lost(reason)
        elif self._addresses and reason != self._last_failures.get(place):  # logged once, not at every try
            address = _text_of(self._addresses[place])
            log.warning("cannot-connect", to=self.name, address=address, reason=reason)
            self._last_failures[place] = reason


def _text_of(address: str | tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)


def _family(address: str | tuple[str, int]) -> socket.AddressFamily:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


CANDIDATE_LIMIT_NS: Final = 5_000_000_000


class LinkListener:
    """See the module docstring.

    Raises:
        ConfigError: the address is in use or not this host's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        connection: PeerConnection,
        selector: selectors.BaseSelector,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None,
        server_name: str | None = None,
        users: ServerUsers = EVERY_USER,
    ) -> None:
        self._users = users
        self._connection = connection
        self._selector = selector
        self._clock = clock
        self._tls = tls
        self._server_name = server_name
        self._candidate: TlsTransport | None = None
        self._since_ns = 0
        self._resume_ns: int | None = None  # until then nothing is accepted; None: it is
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self)

    @property
    def due_ns(self) -> int | None:
        """When the candidate's time ends, or a pause in accepting."""
        due = [] if self._resume_ns is None else [self._resume_ns]
        if self._candidate is not None:
            due.append(self._since_ns + CANDIDATE_LIMIT_NS)
        return min(due, default=None)

    def turn(self) -> None:
        """Give up a candidate that takes too long; accept again after a pause."""
        now_ns = self._clock.monotonic_ns()
        if self._candidate is not None and now_ns >= self._since_ns + CANDIDATE_LIMIT_NS:
            self._refuse("it did not prove to be the server within 5 s")
        if self._resume_ns is not None and now_ns >= self._resume_ns:
            self._resume_ns = None
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def _pause(self, for_ns: int) -> None:
        self._resume_ns = self._clock.monotonic_ns() + for_ns
        self._selector.unregister(self._listener)

    def ready(self, _events: int) -> None:
        """The selector says that a connection or bytes of the candidate have arrived."""
        if self._resume_ns is None and (accepted := accept(self._listener, self._pause)) is not None:
            self._accepted(*accepted)
        if self._candidate is not None:
            self._prove(self._candidate)

    def _accepted(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        if self._tls is None:
            if problem := self._users.why_not_accepted(sock):
                log.warning("not-the-server", reason=problem)
                sock.close()
                return
            try:
                prepare(sock)
            except OSError as exc:  # a connection that was gone before we came must not end the link
                log.warning("cannot-answer", reason=exc.strerror or str(exc))
                sock.close()
                return
            log.info("dialled-by-server", address=f"{peer[0]}:{peer[1]}")
            self._connection.take(sock)
            return
        if self._candidate is not None:
            self._refuse("another connection came before it proved to be the server")
        try:
            name = self._server_name
            self._candidate = TlsTransport(sock, self._tls(), server_side=False, server_name=name)
        except (OSError, GatewayError) as exc:
            log.warning("cannot-answer", reason=str(exc))
            sock.close()
            return
        self._since_ns = self._clock.monotonic_ns()
        self._selector.register(self._candidate, selectors.EVENT_READ, self)

    def _prove(self, candidate: TlsTransport) -> None:
        try:
            wanted = candidate.handshake()
        except HandshakeFailed as exc:
            self._refuse(str(exc))
            return
        if wanted is not None:
            self._selector.modify(candidate, wanted, self)
        elif SERVER_URI not in candidate.peer_uris():
            self._refuse("its certificate is not a server's")
        else:
            self._selector.unregister(candidate)
            self._candidate = None
            self._connection.take(candidate)

    def _refuse(self, reason: str) -> None:
        if self._candidate is not None:
            log.warning("not-the-server", reason=reason)
            self._selector.unregister(self._candidate)
            self._candidate.close()
            self._candidate = None

    def close(self) -> None:
        """Stop listening."""
        self._refuse("the link stops")
        if self._resume_ns is None:
            self._selector.unregister(self._listener)
        self._listener.close()


def _listen(address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(16)
    except OSError as exc:
        sock.close()
        where = f"{address[0]}:{address[1]}"
        why, fix = why_not(exc, *address), "Stop that process, or choose another address"
        raise ConfigError("listen", f"cannot listen on {where}: {why}", fix) from exc
    sock.setblocking(False)
    return sock
