"""How a connection comes in: room among the strangers, TLS, and what is said of those that go again.

Thread: belongs to the inbound thread.

Source: DESIGN.md 5; ``poller.unregistered`` for the limits.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Callable

import structlog

from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.unregistered import HANDSHAKES_A_ROUND, UnregisteredConnections, limit_for
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.limited_log import LimitedLog
from pmdaemon.runtime.transport import TlsTransport

log = structlog.get_logger("inbound")


class Admission:
    """Lets connections in.

    Args:
        clerk: whose TLS context they must speak to; None without TLS.
        on_blocked: what a connection calls when a send of its would block.

    Attributes:
        strangers: those inside that have not registered.
        handshakes_left: steps of TLS handshakes that this round may still take.
    """

    def __init__(
        self,
        clock: Clock,
        counters: Counter[str],
        clerk: CertificateWorker | None,
        on_blocked: Callable[[AgentConnection], None],
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._clerk = clerk
        self._on_blocked = on_blocked
        self._refusals = LimitedLog("inbound")
        self.strangers: UnregisteredConnections[AgentConnection] = UnregisteredConnections(
            limit_for(tls=clerk is not None)
        )
        self.handshakes_left = HANDSHAKES_A_ROUND

    def begin_round(self) -> None:
        """Handshakes may go on."""
        self.handshakes_left = HANDSHAKES_A_ROUND

    def make_room(self, sock: socket.socket, address: str) -> tuple[bool, AgentConnection | None]:
        """Whether a newcomer may stay (else it is closed), and who must be dropped for it."""
        now_ns = self._clock.monotonic_ns()
        may_stay, oldest = self.strangers.admit(now_ns)
        if not may_stay:
            self._counters["strangers_turned_away"] += 1
            self._refusals.warning(now_ns, "turned-away", address=address, strangers=len(self.strangers))
            with contextlib.suppress(OSError):  # gone already
                sock.shutdown(socket.SHUT_RDWR)  # the parent has a duplicate of what it has dialled
            sock.close()
        return may_stay, oldest

    def note_eviction(self, conn: AgentConnection, reason: str) -> None:
        """A stranger has to go for a newcomer."""
        self._counters["strangers_evicted"] += 1
        self._refusals.warning(self._clock.monotonic_ns(), "evicted", address=conn.address, reason=reason)

    def open(self, sock: socket.socket, address: str) -> AgentConnection | None:
        """A connection on the socket; None if its peer is gone already."""
        now_ns = self._clock.monotonic_ns()
        transport: socket.socket | TlsTransport = sock
        if self._clerk is not None:
            try:
                transport = TlsTransport(sock, self._clerk.context, server_side=True)
            except OSError as exc:
                self._counters["refusal_closed"] += 1
                log.debug("gone-before-handshake", address=address, reason=exc.strerror)
                sock.close()
                return None
        conn = AgentConnection(transport, address, now_ns, self._on_blocked)
        self.strangers.add(conn, now_ns)
        self._counters["connections"] += 1
        log.debug("connected", address=address)
        return conn

    def note_refusal(self, conn: AgentConnection, code: str, reason: str) -> None:
        """In the metrics; and in the log, of strangers a few lines a second."""
        self._counters[f"refusal_{code.replace('-', '_')}"] += 1
        if conn.gateway is not None:
            who = conn.gateway.name
            log.warning("peer-refused", address=conn.address, gateway=who, code=code, error=reason)
        else:
            now_ns = self._clock.monotonic_ns()
            self._refusals.warning(now_ns, "peer-refused", address=conn.address, code=code, error=reason)
