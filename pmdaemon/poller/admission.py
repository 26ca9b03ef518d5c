"""Admission of new connections: room among the unregistered, TLS, and the log of those that are refused.

A connection that has not registered costs a descriptor and memory (less than a session: ``make bench-tls``)
and has proved nothing. At most ``limit_for`` are kept: 1,024 with TLS, and never more than half of the
descriptors, so that the other half is left to gateways. When one more comes, the oldest goes if it has had
``GRACE_NS`` (an honest handshake takes milliseconds, a slow-loris takes for ever), else the newcomer
goes: in a storm of honest reconnects those that wait are about to be served, and one that is turned away
dials again after a random wait.

Log lines about them are limited too, or ten thousand attempts would fill the disk.

Thread: the inbound thread's.

Source: DESIGN.md 5.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import structlog

from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.runtime.transport import TlsTransport

log = structlog.get_logger("inbound")


MAX_UNREGISTERED: Final = 1024  # with TLS
MAX_UNREGISTERED_PLAIN: Final = (
    8192  # without: half of the default limit of open files, and twice a large fleet
)
GRACE_NS: Final = 2 * 10**9
TLS_LIMIT_NS: Final = 5 * 10**9  # a handshake is two round trips
HANDSHAKES_A_ROUND: Final = 4  # about 1 ms each: what a registered gateway waits for behind a storm

Conn = TypeVar("Conn")


def limit_for(tls: bool) -> int:
    """How many unregistered connections may be open, by what they cost and the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = (
        MAX_UNREGISTERED_PLAIN if soft == resource.RLIM_INFINITY else min(MAX_UNREGISTERED_PLAIN, soft // 2)
    )
    return min(MAX_UNREGISTERED, half) if tls else half


class UnregisteredConnections(Generic[Conn]):
    """Unregistered connections, oldest first."""

    def __init__(self, limit: int = MAX_UNREGISTERED) -> None:
        self._limit = limit
        self._since: dict[Conn, int] = {}

    def __len__(self) -> int:
        return len(self._since)

    def admit(self, now_ns: int) -> tuple[bool, Conn | None]:
        """Whether a newcomer may stay, and the one that must go for it."""
        if len(self._since) < self._limit:
            return True, None
        oldest, since_ns = next(iter(self._since.items()))
        if now_ns - since_ns >= GRACE_NS:
            return True, oldest
        return False, None

    def add(self, conn: Conn, now_ns: int) -> None:
        """A connection has come."""
        self._since[conn] = now_ns

    def remove(self, conn: Conn) -> None:
        """It has registered, or is gone. Harmless for one that is not here."""
        self._since.pop(conn, None)


class Admission:
    """Lets connections in.

    Args:
        certificate_worker: whose TLS context they must speak to; None without TLS.
        on_blocked: what a connection calls when a send of its would block.

    Attributes:
        unregistered: those inside that have not registered.
        handshakes_left: steps of TLS handshakes that this round may still take.
    """

    def __init__(
        self,
        clock: Clock,
        counters: Counter[str],
        certificate_worker: CertificateWorker | None,
        on_blocked: Callable[[AgentConnection], None],
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._certificate_worker = certificate_worker
        self._on_blocked = on_blocked
        self._refusals = LimitedLog("inbound")
        self.unregistered: UnregisteredConnections[AgentConnection] = UnregisteredConnections(
            limit_for(tls=certificate_worker is not None)
        )
        self.handshakes_left = HANDSHAKES_A_ROUND

    def begin_round(self) -> None:
        """Handshakes may go on."""
        self.handshakes_left = HANDSHAKES_A_ROUND

    def make_room(self, sock: socket.socket, address: str) -> tuple[bool, AgentConnection | None]:
        """Whether a newcomer may stay (else it is closed), and the one that must be dropped for it."""
        now_ns = self._clock.monotonic_ns()
        may_stay, oldest = self.unregistered.admit(now_ns)
        if not may_stay:
            self._counters["strangers_turned_away"] += 1
            self._refusals.warning(now_ns, "turned-away", address=address, strangers=len(self.unregistered))
            with contextlib.suppress(OSError):  # gone already
                sock.shutdown(socket.SHUT_RDWR)  # the parent has a duplicate of what it has dialled
            sock.close()
        return may_stay, oldest

    def record_eviction(self, conn: AgentConnection, reason: str) -> None:
        """An unregistered connection was closed to make room for a newer one."""
        self._counters["strangers_evicted"] += 1
        self._refusals.warning(self._clock.monotonic_ns(), "evicted", address=conn.address, reason=reason)

    def open(self, sock: socket.socket, address: str) -> AgentConnection | None:
        """A connection on the socket; None if its peer is gone already."""
        now_ns = self._clock.monotonic_ns()
        transport: socket.socket | TlsTransport = sock
        if self._certificate_worker is not None:
            try:
                transport = TlsTransport(sock, self._certificate_worker.context, server_side=True)
            except OSError as exc:
                self._counters["refusal_closed"] += 1
                log.debug("gone-before-handshake", address=address, reason=exc.strerror)
                sock.close()
                return None
        conn = AgentConnection(transport, address, now_ns, self._on_blocked)
        self.unregistered.add(conn, now_ns)
        self._counters["connections"] += 1
        log.debug("connected", address=address)
        return conn

    def record_refusal(self, conn: AgentConnection, code: str, reason: str) -> None:
        """Count a refusal, and log it; of unregistered peers a few lines a second."""
        self._counters[f"refusal_{code.replace('-', '_')}"] += 1
        if conn.gateway is not None:
            name = conn.gateway.name
            log.warning("peer-refused", address=conn.address, gateway=name, code=code, error=reason)
        else:
            now_ns = self._clock.monotonic_ns()
            self._refusals.warning(now_ns, "peer-refused", address=conn.address, code=code, error=reason)
