"""Where the PMDaemon dials this agent, if the agent may not dial it: ``listen`` in the agent's file.

Whoever connects is a candidate until it has proved to be the server (with TLS we are the client also here,
and it must show the server's certificate); only then does it take the place of the session there is. So a
stranger can neither speak nor end a session. One candidate at a time, ``LIMIT_NS`` each: a newcomer replaces
a candidate that has not proved itself yet.

    listening ──accept──► candidate ──TLS agreed──► ``ServerConnection.take``
                              └── not the server, 5 s ──► closed, logged

Thread: the link's loop only.
"""

from __future__ import annotations

import selectors
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from gateway_agent.link.connection import ServerConnection
from gateway_agent.link.errors import LinkError
from pmdaemon.errors import ConfigError
from pmdaemon.pki.certificates import SERVER_URI
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.transport import HandshakeFailed, TlsTransport, prepare

LIMIT_NS: Final = 5_000_000_000
log = structlog.get_logger("doorway")


class LinkListener:
    """See the module.

    Raises:
        ConfigError: the address is in use or not this host's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        connection: ServerConnection,
        selector: selectors.BaseSelector,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None,
        server_name: str | None = None,
    ) -> None:
        self._connection = connection
        self._selector = selector
        self._clock = clock
        self._tls = tls
        self._server_name = server_name
        self._candidate: TlsTransport | None = None
        self._since_ns = 0
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self)

    @property
    def due_ns(self) -> int | None:
        """When the candidate's time is over."""
        return self._since_ns + LIMIT_NS if self._candidate is not None else None

    def turn(self) -> None:
        """Give up a candidate that takes too long."""
        if (due_ns := self.due_ns) is not None and self._clock.monotonic_ns() >= due_ns:
            self._dismiss("it did not prove to be the server within 5 s")

    def ready(self, _events: int) -> None:
        """The selector says that somebody knocks, or that the candidate has said something."""
        try:
            self._welcome(*self._listener.accept())
        except BlockingIOError:
            pass
        except OSError as exc:  # a stranger that was gone before we came must not end the link
            log.warning("cannot-answer", reason=exc.strerror or str(exc))
        if self._candidate is not None:
            self._prove(self._candidate)

    def _welcome(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        if self._tls is None:
            prepare(sock)
            log.info("dialled-by-server", address=f"{peer[0]}:{peer[1]}")
            self._connection.take(sock)
            return
        if self._candidate is not None:
            self._dismiss("another connection came before it proved to be the server")
        try:
            name = self._server_name
            self._candidate = TlsTransport(sock, self._tls(), server_side=False, server_name=name)
        except (OSError, LinkError) as exc:
            log.warning("cannot-answer", reason=str(exc))
            sock.close()
            return
        self._since_ns = self._clock.monotonic_ns()
        self._selector.register(self._candidate, selectors.EVENT_READ, self)

    def _prove(self, candidate: TlsTransport) -> None:
        try:
            wanted = candidate.handshake()
        except HandshakeFailed as exc:
            self._dismiss(str(exc))
            return
        if wanted is not None:
            self._selector.modify(candidate, wanted, self)
        elif SERVER_URI not in candidate.peer_uris():
            self._dismiss("its certificate is not a server's")
        else:
            self._selector.unregister(candidate)
            self._candidate = None
            self._connection.take(candidate)

    def _dismiss(self, reason: str) -> None:
        if self._candidate is not None:
            log.warning("not-the-server", reason=reason)
            self._selector.unregister(self._candidate)
            self._candidate.close()
            self._candidate = None

    def close(self) -> None:
        """Stop listening."""
        self._dismiss("the link stops")
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
        raise ConfigError("listen", f"cannot listen on {where}: {exc.strerror}", "Choose another") from exc
    sock.setblocking(False)
    return sock
