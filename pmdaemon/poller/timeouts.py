"""Sessions that end because of time: silent, late with their handshake, done draining, or expired.

The inbound thread asks every ``SWEEP_NS`` and ends what is named here; a gateway that is merely late is
called stalled, and one whose durability lags is rewound.

    stalled   no REPLY for max(3 intervals, 2 s): news, and it may be polled again
    lost      nothing arrived for ``lost_after_ns`` while an answer was due (or the connection closed)

Thread: belongs to the inbound thread.

Source: P16; DESIGN.md 3, 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from pmdaemon.errors import PeerRefused
from pmdaemon.poller.admission import TLS_LIMIT_NS
from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Gateway, GatewayState, Registry
from pmdaemon.poller.positions import FULL_LAG_NS, LAG_NS
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.runtime.clock import Clock

SWEEP_NS: Final = 500_000_000
HANDSHAKE_NS: Final = 10 * 10**9
LOSSES_NS: Final = 10 * 10**9
log = structlog.get_logger("inbound")


@dataclass(frozen=True, slots=True)
class TimeoutPolicy:
    """How long a gateway may be silent, and its cuts not durable."""

    stalled_after_ns: int
    lost_after_ns: int
    durable_lag_ns: int = LAG_NS

    @classmethod
    def for_interval(cls, interval_ns: int, durable_lag_ns: int = LAG_NS) -> TimeoutPolicy:
        """max(3 intervals, 2 s) to stalled; 10 s to lost, but never before it could be called stalled."""
        stalled_after_ns = max(3 * interval_ns, 2 * 10**9)
        return cls(stalled_after_ns, max(10 * 10**9, stalled_after_ns + 2 * 10**9), durable_lag_ns)


class Overdue(NamedTuple):
    """A connection to be dropped. ``code`` is what it counts as if it never registered, else empty."""

    conn: AgentConnection
    reason: str
    code: str = ""


class SessionTimeouts:
    """Checks all sessions and positions; ends nothing itself."""

    def __init__(
        self,
        registry: Registry,
        handlers: FrameHandlers,
        clock: Clock,
        policy: TimeoutPolicy,
        counters: Counter[str],
        certificate_worker: CertificateWorker | None,
        publisher: CutPublisher,
    ) -> None:
        self._registry = registry
        self._publisher = publisher
        self._handlers = handlers
        self._clock = clock
        self._policy = policy
        self._counters = counters
        self._certificate_worker = certificate_worker

    def overdue(self, connections: Iterable[AgentConnection], now_ns: int) -> Iterator[Overdue]:
        """Those to be dropped now; gateways that are merely late are called stalled."""
        recent_ns = now_ns - self._policy.stalled_after_ns
        for conn in connections:
            gateway = conn.gateway
            if conn.drain_until_ns is not None:
                if now_ns >= conn.drain_until_ns:
                    yield Overdue(conn, conn.end_reason)
            elif gateway is None:
                yield from self._late_unregistered(conn, now_ns)
            else:
                # Nearly all, nearly always: nothing awaited for long. Read without the lock, which at
                # worst sees a poll of this moment as none.
                awaiting_ns = gateway.awaiting_since_ns
                is_well = awaiting_ns is None or awaiting_ns > recent_ns
                if gateway.condition is not GatewayState.UP or not is_well:
                    yield from self._silent(conn, gateway, now_ns)

    def _late_unregistered(self, conn: AgentConnection, now_ns: int) -> Iterator[Overdue]:
        limit_ns, awaited = (HANDSHAKE_NS, "REGISTER") if conn.secured else (TLS_LIMIT_NS, "TLS handshake")
        if now_ns - conn.opened_ns >= limit_ns:
            yield Overdue(conn, f"no {awaited} within {limit_ns // 10**9} s of connecting", "slow")

    def _silent(self, conn: AgentConnection, gateway: Gateway, now_ns: int) -> Iterator[Overdue]:
        with gateway.lock:
            oldest_ns, awaiting_ns = gateway.record.oldest_poll_sent_ns, gateway.awaiting_since_ns
        if oldest_ns is None:
            return
        silent_ns = now_ns - max(conn.last_received_ns, oldest_ns)
        if silent_ns >= self._policy.lost_after_ns:
            yield Overdue(conn, f"nothing arrived for {silent_ns / 1e9:.1f} s")
        elif awaiting_ns is not None and now_ns - awaiting_ns >= self._policy.stalled_after_ns:
            self._handlers.stalled(gateway, f"no reply for {(now_ns - awaiting_ns) / 1e9:.1f} s")

    def expired(
        self, connections: Iterable[AgentConnection]
    ) -> Iterator[tuple[AgentConnection, PeerRefused]]:
        """A certificate that ends while its session lives ends the session; the agent has a newer one."""
        now_us = self._clock.unix_us()
        for conn in connections if self._certificate_worker is not None else ():
            credential = conn.credential
            if credential is not None and now_us >= credential.not_after_us and conn.drain_until_ns is None:
                which = f"the certificate {credential.serial} of {credential.name}"
                text = f"{which} has expired; dial again with its successor"
                yield conn, PeerRefused("certificate-expired", text)

    def revoked(
        self, connections: Iterable[AgentConnection]
    ) -> Iterator[tuple[AgentConnection, PeerRefused]]:
        """Sessions whose certificate was revoked."""
        revoked = self._certificate_worker.revoked if self._certificate_worker is not None else frozenset()
        for conn in connections:
            credential = conn.credential
            if credential is not None and credential.serial in revoked and conn.drain_until_ns is None:
                text = f"the certificate {credential.serial} of {credential.name} was revoked"
                yield conn, PeerRefused("revoked", text)

    def check_durability(self, now_ns: int) -> None:
        """Rewind records whose durability lags; announce what agents have lost.

        Not so soon while dbmanager refuses batches: then its mailbox is full of what it has not got to, and
        would hold it twice. But some time, or what it has discarded would be missing while it refuses others.
        """
        refused_ns = self._publisher.refused_ns
        is_full = refused_ns is not None and now_ns - refused_ns < LAG_NS
        limit_ns = self._policy.durable_lag_ns
        limit_ns = max(FULL_LAG_NS, limit_ns) if is_full else limit_ns
        for gateway in self._registry.all():
            if gateway.record.lags(now_ns, limit_ns):
                self._rewind_lagging(gateway, now_ns, limit_ns)
            if gateway.dropped > gateway.announced_dropped[0]:
                self._handlers.announce_losses(gateway, LOSSES_NS)

    def _rewind_lagging(self, gateway: Gateway, now_ns: int, limit_ns: int) -> None:
        with gateway.lock:
            if not gateway.record.lags(now_ns, limit_ns):  # a notice came between the check and the lock
                return
            behind_cuts = gateway.record.behind_cuts
            gateway.record.rewind()
        self._counters["lag_rewinds"] += 1
        log.warning("durability-lags", gateway=gateway.name, behind_cuts=behind_cuts)
