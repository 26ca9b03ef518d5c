"""One volume: its rates, and the sessions whose requests wait for them; and which caps are in force.

Held requests stay in their connection's buffer. A ``Volume`` has a ring of the connections that hold some,
served one request each in turn (fair between connections, whatever their depth), and one timer for all. A
client that has rates of its own waits for both; while its own hold it, the others of the ring go on.

The rate always holds, whatever waits (ADR 15). I/Os held for ``max_hold_ns`` and more are counted, so that
cuts can say that a client may time out. Refused requests are not charged; they keep their place behind held
ones of their own connection, and wait for no rate.

``CapsInForce``: the static caps of the configuration, and the server's while its lease lives. Both hold
together: the smaller one counts. The server's set is complete and idempotent: the same generation may come
again (a restarted link sends it again). It carries a lease; ``renew`` extends it, ``expire`` drops the set. A
dropped set does not come back by a late renewal: the gateway reports generation 0 and the server decides
again. Pure; time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway_agent.config import ExportConfig
from gateway_agent.errors import BadCaps
from gateway_agent.nbd.buffers import MemoryBudget
from gateway_agent.nbd.client_rates import NO_CLIENTS, ClientRates
from gateway_agent.nbd.cuts import CutMaker
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.tls import TlsEngine
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.wire.rates import LEAST_RATE, MOST_RATE, NO_CAPS, Rates, RateSet

DEFAULT_LEASE_NS: Final = 30 * 10**9
MAX_LEASE_NS: Final = 3_600 * 10**9  # an hour without a living server would be a static cap, not a lease
NO_GENERATION: Final = 0


@dataclass(frozen=True, slots=True)
class ServerCaps:
    """A set of caps that the server sent.

    Attributes:
        volumes: by volume.
        clients: of single clients, by volume and client.
    """

    generation: int
    lease_ns: int
    volumes: dict[str, Rates]
    clients: dict[str, dict[str, Rates]]


def parse_caps(header: dict[str, Any]) -> ServerCaps:
    """What the header of DP_CAPS says.

    Raises:
        BadCaps: a key of the wrong type, a rate that is not above 0, a volume or client named twice.
    """
    generation, lease_us, entries = header.get("gen"), header.get("lease_us"), header.get("caps")
    if type(generation) is not int or generation < 0 or not isinstance(entries, list):
        raise BadCaps("caps", f"gen {excerpt(generation)} or the list of caps is not well-formed")
    if lease_us is None:
        lease_us = DEFAULT_LEASE_NS // 1000
    if type(lease_us) is not int or not 0 < lease_us <= MAX_LEASE_NS // 1000:
        raise BadCaps(f"caps {generation}", f"lease_us is {excerpt(lease_us)}")
    volumes: dict[str, Rates] = {}
    for entry in entries:
        volume = entry.get("volume") if isinstance(entry, dict) else None
        if not isinstance(volume, str) or volume in volumes:
            raise BadCaps(
                f"caps {generation}", f"entry {excerpt(entry)} names no volume, or one named before"
            )
        volumes[volume] = _rates(generation, entry)
    return ServerCaps(generation, lease_us * 1000, volumes, _client_caps(generation, header.get("clients")))


def _client_caps(generation: int, entries: Any) -> dict[str, dict[str, Rates]]:
    """Key ``clients``, absent in a set without caps of clients."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise BadCaps(f"caps {generation}", "the list of clients' caps is not well-formed")
    found: dict[str, dict[str, Rates]] = {}
    for entry in entries:
        volume, client = (
            (entry.get("volume"), entry.get("client")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(volume, str) or not isinstance(client, str):
            raise BadCaps(f"caps {generation}", f"entry {excerpt(entry)} names no volume and client")
        if client in found.get(volume, ()):
            raise BadCaps(f"caps {generation}", f"entry {excerpt(entry)} names a client named before")
        found.setdefault(volume, {})[client] = _rates(generation, entry)
    return found


def _rates(generation: int, entry: dict[str, Any]) -> Rates:
    return Rates(*(_rate(generation, entry, key) for key in ("ops_per_s", "bytes_per_s", "cost_per_s")))


def _rate(generation: int, entry: dict[str, Any], key: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_RATE <= value <= MOST_RATE:
        named = f"{key} of {excerpt(entry['volume'])} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a rate is {LEAST_RATE} to {MOST_RATE:g}")
    return float(value)


class CapsInForce:
    """The caps of all volumes of one plane, and of single clients of theirs.

    Args:
        static: by volume, from the configuration.
    """

    def __init__(self, static: dict[str, Rates]) -> None:
        self.static = static
        self._server: dict[str, Rates] = {}
        self._clients: dict[str, dict[str, Rates]] = {}
        self._lease_ns = DEFAULT_LEASE_NS
        self.generation = NO_GENERATION
        self.lease_end_ns: int | None = None

    def apply(self, header: dict[str, Any], now_ns: int) -> int:
        """Take a DP_CAPS header; returns how many volumes and clients it caps.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        caps = parse_caps(header)
        self.generation, self._lease_ns = caps.generation, caps.lease_ns
        self._server, self._clients = caps.volumes, caps.clients
        self.lease_end_ns = now_ns + caps.lease_ns
        return len(caps.volumes) + sum(map(len, caps.clients.values()))

    def renew(self, now_ns: int) -> None:
        """The server lives: extend the lease of the set in force, if there is one."""
        if self.lease_end_ns is not None:
            self.lease_end_ns = now_ns + self._lease_ns

    def expire(self, now_ns: int) -> bool:
        """Drop the server's set if its lease has run out; returns whether that happened now."""
        if self.lease_end_ns is None or now_ns < self.lease_end_ns:
            return False
        self.generation, self.lease_end_ns = NO_GENERATION, None
        self._server, self._clients = {}, {}
        return True

    def of(self, volume: str) -> Rates:
        """What holds for one volume."""
        return self.static.get(volume, NO_CAPS).tighter(self._server.get(volume, NO_CAPS))

    def of_clients(self, volume: str) -> Mapping[str, Rates]:
        """What holds for single clients of a volume, beside that."""
        return self._clients.get(volume, NO_CLIENTS)


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """What every connection of a plane shares.

    Attributes:
        scratch: buffer for one handler's use; nothing stays in it between events.
        payload_memory: for large writes; ``reply_memory`` for large reads (see ``buffers``).
        tls_engine: for handshakes with upstreams.
    """

    loop: EventLoop
    clock: Clock
    cuts: CutMaker
    scratch: memoryview
    payload_memory: MemoryBudget
    reply_memory: MemoryBudget
    tls_engine: TlsEngine | None = None


class ThrottledSession(Protocol):
    """What a volume asks of a session."""

    @property
    def client(self) -> str:
        """Whose it is."""

    def head_charge(self) -> tuple[int, float] | None:
        """(bytes, base cost) of the request at the head, or None when it is free of charge."""

    def head_arrived_ns(self) -> int | None:
        """When the head arrived; None when nothing can be admitted now."""

    def admit_head(self, now_ns: int) -> None:
        """Pass the head on."""

    def admit_all(self, now_ns: int) -> None:
        """Pass on as many as possible."""

    def push(self, now_ns: int) -> None:
        """Move admitted requests towards the storage; may close the session."""

    def unblock(self) -> bool:
        """Whether a refused request at the head can be answered now, after a push."""

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""

    def drain(self) -> None:
        """Answer what has arrived, then end the connection."""


class Volume:
    """See the module docstring.

    Attributes:
        facts: size and flags once known (at start for files, after the first connection for upstreams).
        warnings: about its upstream; limited, because one death is seen by every client.
        clients: rates of single clients.
        sessions: open connections to it.

    ``_late`` and ``_longest_ns`` count the I/Os of this cut that were held for too long.
    """

    def __init__(self, export: ExportConfig, rates: RateSet, context: PlaneContext, max_hold_ns: int) -> None:
        self.export = export
        self.rates = rates
        self.clients = ClientRates(rates.tau_ns)
        self.sessions: set[ThrottledSession] = set()
        self.facts: ExportFacts | None = None
        self.warnings = LimitedLog("upstream")
        self._context = context
        self._max_hold_ns = max_hold_ns
        self._waiting: deque[ThrottledSession] = deque()
        self._late, self._longest_ns = 0, 0
        context.cuts.volumes.append(self)

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """See ``cuts.ThrottledVolume``."""
        heads = [session.head_arrived_ns() for session in self._waiting]
        held_ns = max((now_ns - arrived for arrived in heads if arrived is not None), default=0)
        late, longest_ns = self._late, max(self._longest_ns, held_ns)
        self._late, self._longest_ns = 0, 0
        return (late, longest_ns // 1000) if longest_ns >= self._max_hold_ns else None

    def serve(self, session: ThrottledSession, now_ns: int) -> None:
        """``session`` has received something: admit what the rates allow, and push."""
        if self.rates.is_open and not self._is_capped(session):
            self._serve_open(session, now_ns)
            return
        if session not in self._waiting:
            self._waiting.append(session)
        touched = self._release(now_ns)
        touched[session] = None  # also without an admission: payload of an admitted write may have come
        self._push(touched, now_ns)

    def _serve_open(self, session: ThrottledSession, now_ns: int) -> None:
        while True:
            session.admit_all(now_ns)
            session.push(now_ns)
            if not session.unblock():
                return

    def set_caps(self, caps: Rates, now_ns: int, clients: Mapping[str, Rates] = NO_CLIENTS) -> None:
        """Put other caps in force, now, also for what is already held.

        Args:
            caps: of the volume.
            now_ns: monotonic.
            clients: of single clients of it, complete.
        """
        changed = self.rates.set_caps(caps, now_ns)
        if self.clients.set_caps(clients, now_ns) or changed:
            self.pump(now_ns)

    def pump(self, now_ns: int) -> None:
        """Admit what the rates allow by now."""
        if self.rates.is_open:
            waiting = tuple(self._waiting)
            self._waiting = deque(session for session in waiting if self._is_capped(session))
            for session in waiting:
                if not self._is_capped(session):
                    self._serve_open(session, now_ns)
        # With nothing left in the ring this only ends the timer.
        self._push(self._release(now_ns), now_ns)

    def _is_capped(self, session: ThrottledSession) -> bool:
        """Whether its client has rates of its own."""
        return bool(self.clients) and session.client in self.clients

    def _push(self, touched: dict[ThrottledSession, None], now_ns: int) -> None:
        while touched:
            for session in touched:
                session.push(now_ns)
            again = [session for session in touched if session.unblock()]
            self._waiting.extend(session for session in again if session not in self._waiting)
            touched = self._release(now_ns) if again else {}

    def forget(self, session: ThrottledSession) -> None:
        """The session is closed."""
        self.sessions.discard(session)
        if session in self._waiting:
            self._waiting.remove(session)

    def _release(self, now_ns: int) -> dict[ThrottledSession, None]:
        touched: dict[ThrottledSession, None] = {}
        passed_over: list[ThrottledSession] = []
        while self._waiting:
            session = self._waiting[0]
            if session.head_arrived_ns() is None:
                self._waiting.popleft()
                continue
            charge = session.head_charge()
            if charge is not None and self._client_ready_ns(session) > now_ns:
                # Held by its client's own rates: the others need not wait for it, and it keeps its place.
                passed_over.append(self._waiting.popleft())
                continue
            if charge is not None and self.rates.ready_ns() > now_ns:
                free = self._free_of_charge()
                if free is None:
                    break
                session, charge = free, None
            if charge is not None:
                self._count_late(session, now_ns)
                self.rates.charge(now_ns, *charge)
                if self.clients:
                    self.clients.charge(session.client, now_ns, *charge)
            session.admit_head(now_ns)
            touched[session] = None
            if session in self._waiting:  # it may have closed itself
                self._waiting.remove(session)
                self._waiting.append(session)
        self._waiting.extendleft(reversed(passed_over))
        self._plan()
        return touched

    def _client_ready_ns(self, session: ThrottledSession) -> int:
        """From this moment its next I/O may pass, as far as its client's own rates go."""
        return self.clients.ready_ns(session.client) if self.clients else 0

    def _free_of_charge(self) -> ThrottledSession | None:
        """A session whose head need not wait for the rates."""
        for session in self._waiting:
            if session.head_arrived_ns() is not None and session.head_charge() is None:
                return session
        return None

    def _count_late(self, session: ThrottledSession, now_ns: int) -> None:
        arrived_ns = session.head_arrived_ns()
        if arrived_ns is not None and now_ns - arrived_ns >= self._max_hold_ns:
            self._late += 1
            self._longest_ns = max(self._longest_ns, now_ns - arrived_ns)

    def _plan(self) -> None:
        waiting = [session for session in self._waiting if session.head_arrived_ns() is not None]
        if waiting:
            client_ns = min(map(self._client_ready_ns, waiting)) if self.clients else 0
            self._context.loop.at(self, max(self.rates.ready_ns(), client_ns), self.pump)
        else:
            self._context.loop.cancel(self)
