"""The connections of a cooperating pair: TLS, one dialled by us, one dialled by the partner.

    dialled    waiting ──back-off ends──► connecting ──► securing ──► open (origin) ──fault──► waiting
    accepted   securing ──► open (keeper): it takes the place of an older one ──fault──► gone

A connection is open once TLS has been agreed on and the other side's certificate names the partner; until
then nothing it sends is read. Connections that do not get so far within ``PROVE_S`` are closed; of those
that others dialled there are ``MOST_CANDIDATES`` at most. Who makes room for the newest is decided by
``makes_room``: the host of ``address`` can have all places, other hosts half of them, and of these the one
with the most loses its oldest. So a stranger costs some descriptors and does not keep the partner out,
however long its handshake takes; only a stranger at the partner's own address can, for as long as it goes
on connecting.

Nothing here blocks but the store's sync: local delivery goes on in other threads whatever the partner does. A
partner that does not read is disconnected when ``MOST_OUTGOING_BYTES`` wait for it. Certificates are read
for each connection, so files that were replaced are used from the next one on. A listener that cannot be
opened is tried again like a dial. A fault of ours ends the connection that met it.

Thread: ``ev-pair``.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import selectors
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from pmdaemon.errors import ConfigError, SlaError, WireError
from pmdaemon.pki.certificates import PARTNER_PREFIX
from pmdaemon.pki.errors import PkiError
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.sockets import accept, dial_error, open_listener
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.runtime.transport import HandshakeFailed, TlsTransport, prepare
from pmdaemon.wire.messages.ends import Bye, Error
from pmdaemon.wire.session import error_code
from sla_server.events.config import EventPairConfig
from sla_server.events.pair_core import PairCore
from sla_server.events.pair_session import MirrorEnded, MirrorSession, MirrorState

log = structlog.get_logger("pair")
PROVE_S: Final = 5.0
MOST_CANDIDATES: Final = 8
MOST_OUTGOING_BYTES: Final = 4 << 20
RECEIVE_BYTES: Final = 256 << 10
RETRY_S: Final = (0.2, 5.0, 0.3)
LONGEST_S: Final = 1.0
Context = Callable[[bool], ssl.SSLContext]
"""Makes the context of a connection; True for the server's side of TLS."""


class MirrorConnection:
    """One connection. ``session`` is None until the other side has proved to be the partner.

    Raises:
        OSError: the other side is gone already.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, is_dialled: bool, until_ns: int
    ) -> None:
        self.is_dialled = is_dialled
        self.until_ns = until_ns
        self.session: MirrorSession | None = None
        self.host: str = sock.getpeername()[0]
        self.transport = TlsTransport(sock, context, server_side=not is_dialled)

    def secure(self, partner: str) -> int | None:
        """Go on with TLS: None when the partner is there, else the selector event it waits for.

        Raises:
            HandshakeFailed: it is not the partner, or TLS cannot be agreed on.
        """
        wanted = self.transport.handshake()
        if wanted is None and f"{PARTNER_PREFIX}{partner}" not in self.transport.peer_uris():
            found = ", ".join(self.transport.peer_uris()) or "no name"
            raise HandshakeFailed("wrong-certificate", f"its certificate is for {found}, not for {partner}")
        return wanted


def makes_room(hosts: Sequence[str], partner: str) -> int | None:
    """Place of the connection that is closed for the newest; None: there is room.

    Args:
        hosts: addresses of those that have not proved it, the oldest first, the one that has just come last.
        partner: address of the partner.
    """
    sources, known = [_plain(host) for host in hosts], _plain(partner)
    counts = Counter(source for source in sources if source != known)
    if counts.total() > MOST_CANDIDATES // 2:
        most = max(counts.values())
        return next(place for place, source in enumerate(sources) if counts[source] == most)
    return sources.index(known) if len(hosts) > MOST_CANDIDATES else None


def _plain(host: str) -> str:
    """An address of IPv4 as such also where the listener is of IPv6."""
    address = ipaddress.ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)


class PairLink:
    """See the module.

    Args:
        config: addresses and names.
        core: what is said, and what follows from it.
        context: makes TLS contexts.
        inbox: wakes the loop.
        clock: both time bases.

    Attributes:
        port: of the listener; 0 while there is none.
        last_failure: why there was no connection, the newest reason.
    """

    def __init__(
        self,
        config: EventPairConfig,
        core: PairCore,
        context: Context,
        inbox: ThreadInbox[None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._core = core
        self._context = context
        self._inbox = inbox
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        chance = random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._dial_backoff, self._listen_backoff = Backoff(*RETRY_S, chance), Backoff(*RETRY_S, chance)
        self._dial_ns = self._listen_ns = 0
        self._accept_ns = 0  # until then no connection is accepted; 0: the listener is watched
        self._listener: socket.socket | None = None
        self._connecting: tuple[socket.socket, int] | None = None
        self._dialled: MirrorConnection | None = None
        self._accepted: MirrorConnection | None = None
        self._candidates: list[MirrorConnection] = []
        self.port = 0
        self.last_failure = ""

    def run(self, stop: Stop) -> None:
        """Until the stop, and then a goodbye.

        Raises:
            DiskQueueError: the disk of the store fails.
        """
        try:
            while not stop.is_set():
                watchdog.beat()
                self.turn()
            self.turn(0.0)  # the last confirmations
            for connection in (self._dialled, self._accepted):
                if connection is not None and connection.session is not None:
                    connection.session.send(Bye("this server stops"))
                    self._send(connection)
        finally:
            self.close()

    def turn(self, limit_s: float = LONGEST_S) -> None:
        """One turn: what is due, what is ready, what the core has to send."""
        self._open_listener()
        self._dial()
        due_ns = self._core.step()
        self._flush()
        now_ns = self._clock.monotonic_ns()
        wait_s = max(0.0, min((min(due_ns, self._due_ns()) - now_ns) / 1e9, limit_s))
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._inbox:
                self._inbox.drain()
            elif key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, MirrorConnection):
                if key.data.transport.fileno() >= 0:  # else it ended in this turn
                    self._guarded(key.data, events)
            elif self._connecting is not None and key.fileobj is self._connecting[0]:
                self._connected(self._connecting[0])
        self._give_up_late()
        self._core.step()
        self._flush()

    def close(self) -> None:
        """Close everything."""
        for connection in (self._dialled, self._accepted, *self._candidates):
            if connection is not None:
                self._drop(connection)
        if self._connecting is not None:
            self._selector.unregister(self._connecting[0])
            self._connecting[0].close()
            self._connecting = None
        if self._listener is not None:
            if not self._accept_ns:
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._selector.close()

    # The two ways to a connection.

    def _open_listener(self) -> None:
        if self._listener is not None and self._accept_ns and self._clock.monotonic_ns() >= self._accept_ns:
            self._accept_ns = 0
            self._selector.register(self._listener, selectors.EVENT_READ)
        if self._listener is not None or self._clock.monotonic_ns() < self._listen_ns:
            return
        try:
            self._listener = open_listener("events.pair.listen", *parse_address(self._config.listen))
        except ConfigError as exc:
            self._listen_ns = self._after(self._listen_backoff)
            self._failed(str(exc))
            return
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _pause_accepting(self, for_ns: int) -> None:
        assert self._listener is not None  # it is what was ready
        self._selector.unregister(self._listener)
        self._accept_ns = self._clock.monotonic_ns() + for_ns

    def _dial(self) -> None:
        is_under_way = self._dialled is not None or self._connecting is not None
        if is_under_way or self._clock.monotonic_ns() < self._dial_ns:
            return
        address = parse_address(self._config.address)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:  # out of descriptors, or of memory
            self._dial_failed(f"{self._config.address}: {exc.strerror}")
            return
        prepare(sock)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._dial_failed(f"{self._config.address}: {os.strerror(code)}")
            return
        self._connecting = sock, self._clock.monotonic_ns() + round(PROVE_S * 1e9)
        self._selector.register(sock, selectors.EVENT_WRITE)

    def _connected(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        assert self._connecting is not None  # the caller looked
        until_ns = self._connecting[1]
        self._connecting = None
        if code := dial_error(sock):
            sock.close()
            self._dial_failed(f"{self._config.address}: {os.strerror(code)}")
            return
        try:
            self._dialled = MirrorConnection(sock, self._context(False), is_dialled=True, until_ns=until_ns)
        except (OSError, PkiError) as exc:
            sock.close()
            self._dial_failed(str(exc))
            return
        self._selector.register(self._dialled.transport, selectors.EVENT_WRITE, self._dialled)
        self._secure(self._dialled)

    def _accept(self) -> None:
        assert self._listener is not None  # it is what was ready
        accepted = accept(self._listener, self._pause_accepting)
        if accepted is None:
            return
        sock, _ = accepted
        until_ns = self._clock.monotonic_ns() + round(PROVE_S * 1e9)
        try:
            connection = MirrorConnection(sock, self._context(True), is_dialled=False, until_ns=until_ns)
        except (OSError, PkiError) as exc:
            sock.close()
            self._failed(str(exc))
            return
        self._candidates.append(connection)
        hosts, partner = [each.host for each in self._candidates], parse_address(self._config.address)[0]
        if (place := makes_room(hosts, partner)) is not None:
            self._end(self._candidates[place], "others came before it proved to be the partner")
        self._selector.register(connection.transport, selectors.EVENT_READ, connection)

    def _secure(self, connection: MirrorConnection) -> None:
        try:
            wanted = connection.secure(self._config.partner)
        except HandshakeFailed as exc:
            self._core.refused(exc.code, exc.reason)
            self._end(connection, str(exc))
            return
        if wanted is not None:
            self._selector.modify(connection.transport, wanted, connection)
            return
        self._selector.modify(connection.transport, selectors.EVENT_READ, connection)
        if connection.is_dialled:
            connection.session = self._core.dialled()
        else:
            self._candidates.remove(connection)
            if self._accepted is not None:
                self._end(self._accepted, "the partner has dialled again")
            self._accepted = connection
            connection.session = self._core.accepted()
        log.info("connected", partner=self._config.partner, dialled=connection.is_dialled)

    # Bytes.

    def _guarded(self, connection: MirrorConnection, events: int) -> None:
        try:
            self._ready(connection, events)
        except (SlaError, OSError):  # the disk fails: the thread ends, and says so
            raise
        except Exception:  # nothing that a peer sends ends the pair
            log.exception("connection-failed", dialled=connection.is_dialled)
            self._end(connection, "a fault of this server, of which its log says more")

    def _ready(self, connection: MirrorConnection, events: int) -> None:
        if connection.session is None:
            self._secure(connection)
            return
        if events & selectors.EVENT_READ:
            self._receive(connection, connection.session)
        if events & selectors.EVENT_WRITE and not connection.transport.fileno() < 0:
            self._send(connection)

    def _receive(self, connection: MirrorConnection, session: MirrorSession) -> None:
        try:
            size = connection.transport.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._end(connection, exc.strerror or str(exc))
            return
        if not size:
            self._end(connection, "it closed the connection")
            return
        try:
            session.received(bytes(self._buffer[:size]))
        except MirrorEnded as exc:
            self._end(connection, str(exc))
        except WireError as exc:
            self._core.refused(error_code(exc), str(exc))
            session.send(Error(error_code(exc), str(exc)[:2000]))
            self._send(connection)
            self._end(connection, str(exc))
        else:
            if session.state is MirrorState.MIRRORING:
                self._core.heard()
                healthy_ns = connection.until_ns  # one that ends sooner was refused
                if connection.is_dialled and self._clock.monotonic_ns() >= healthy_ns:
                    self._dial_backoff.succeeded()

    def _flush(self) -> None:
        for connection in (self._dialled, self._accepted):
            if connection is not None and connection.session is not None and connection.session.outgoing:
                self._send(connection)

    def _send(self, connection: MirrorConnection) -> None:
        assert connection.session is not None  # it is open
        session, outgoing = connection.session, connection.session.outgoing
        try:
            while outgoing or session.refill():
                del outgoing[: connection.transport.send(outgoing)]
        except (BlockingIOError, InterruptedError):
            if len(outgoing) > MOST_OUTGOING_BYTES:
                self._end(connection, f"it left {len(outgoing)} bytes unread")
                return
        except OSError as exc:
            self._end(connection, exc.strerror or str(exc))
            return
        if connection.transport.fileno() < 0:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
        if self._selector.get_key(connection.transport).events != wanted:
            self._selector.modify(connection.transport, wanted, connection)

    # Ends.

    def _give_up_late(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._connecting is not None and now_ns >= self._connecting[1]:
            sock, _ = self._connecting
            self._selector.unregister(sock)
            sock.close()
            self._connecting = None
            self._dial_failed(f"{self._config.address}: no answer within {PROVE_S:g} s")
        for connection in (self._dialled, *self._candidates):
            if connection is not None and connection.session is None and now_ns >= connection.until_ns:
                self._end(connection, f"it did not prove to be the partner within {PROVE_S:g} s")
        limit_ns = now_ns - round(self._config.silence_s * 1e9)
        for connection in (self._dialled, self._accepted):
            session = connection.session if connection is not None else None
            if connection is not None and session is not None and session.heard_ns < limit_ns:
                self._end(connection, f"nothing was heard for {self._config.silence_s:g} s")

    def _end(self, connection: MirrorConnection, reason: str) -> None:
        if connection.transport.fileno() < 0:
            return
        was_open = connection.session is not None
        self._drop(connection)
        if was_open:
            log.warning("connection-ended", dialled=connection.is_dialled, reason=reason)
        if connection.is_dialled:
            self._dial_failed(reason)
        else:
            self._failed(reason)

    def _drop(self, connection: MirrorConnection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.transport)
        connection.transport.close()
        if connection is self._dialled:
            self._dialled = None
        elif connection is self._accepted:
            self._accepted = None
        elif connection in self._candidates:
            self._candidates.remove(connection)
        if connection.session is not None:
            self._core.ended(connection.session)

    def _dial_failed(self, reason: str) -> None:
        self._dial_ns = self._after(self._dial_backoff)
        self._failed(reason)
        self._core.dial_failed()

    def _failed(self, reason: str) -> None:
        if reason != self.last_failure:
            log.warning("no-partner", partner=self._config.partner, reason=reason)
        self.last_failure = reason

    def _after(self, backoff: Backoff) -> int:
        return self._clock.monotonic_ns() + round(backoff.failed() * 1e9)

    def _due_ns(self) -> int:
        due = [self._listen_ns] if self._listener is None else []
        if self._accept_ns:
            due.append(self._accept_ns)
        if self._connecting is not None:
            due.append(self._connecting[1])
        elif self._dialled is None:
            due.append(self._dial_ns)
        connections = (self._dialled, *self._candidates)
        due += [each.until_ns for each in connections if each is not None and each.session is None]
        return min(due, default=1 << 62)
