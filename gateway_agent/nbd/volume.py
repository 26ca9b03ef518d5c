"""One volume: its rates, and the sessions whose requests wait for them; and which caps are in force.

Held requests stay in their connection's buffer. A ``Volume`` has an order of the connections that hold some
(``fair_order``), and one timer for all: connections get equal shares of the rate, whatever their depth and
however large their requests. A client that has rates of its own waits for both; while its own hold it, the
others go on. A volume of a group waits for the group's rates, too (``groups``), which has a timer of its own.

A request that is large against the rate is paid for in parts while others use the volume, or its group:
parts of 20 ms of the rate, in turn with the requests of the others, and it passes with the last part. Paid
for behind its passing it would hold all others for as long as its size takes. While no other uses the volume
it passes at once with its first part, and the others are its connection's *debt*, however large: what this
connection asks for next waits until they are paid, and they take turns with the requests of connections that
come meanwhile. So four GiB of zeroes under a low cap hold up their own connection alone. There is at most one
debt of a volume: while one is paid, a large request of another connection is paid for before it passes.
A debt stays when its connection is closed.

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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gateway_agent.config import ExportConfig
from gateway_agent.errors import BadCaps
from gateway_agent.nbd.buffers import MemoryBudget
from gateway_agent.nbd.client_rates import NO_CLIENTS, ClientRates
from gateway_agent.nbd.cuts import CutMaker
from gateway_agent.nbd.fair_order import FairOrder
from gateway_agent.nbd.farewell import UpstreamFarewell
from gateway_agent.nbd.groups import CONTENDED_NS, VolumeGroup, VolumeGroupCap
from gateway_agent.nbd.ledger import ChangeLedger, OtherProcess
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.tls import TlsEngine
from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.wire.messages.client_caps import EXCEPT, except_of
from pmdaemon.wire.rates import (
    LEAST_BURST_S,
    LEAST_RATE,
    MOST_BURST_S,
    MOST_RATE,
    NO_CAPS,
    Rates,
    RateSet,
)

DEFAULT_LEASE_NS: Final = 30 * 10**9
MAX_LEASE_NS: Final = 3_600 * 10**9  # an hour without a living server would be a static cap, not a lease
NO_GENERATION: Final = 0
PART_NS: Final = 20_000_000  # of the rate: a request that takes longer because of its size is paid in parts
PART_BYTES: Final = 65_536  # and none is smaller
PAID_RATIO: Final = 1e-9  # of a request: less is what the arithmetic of its parts has left
MOST_WEIGHT: Final = 1e6


@dataclass(frozen=True, slots=True)
class ServerCaps:
    """A set of caps that the server sent.

    Attributes:
        volumes: by volume.
        clients: of single clients, by volume and client; ``*`` is all but the ``named`` of the volume.
        groups: of several volumes together, by the group's name.
    """

    generation: int
    lease_ns: int
    volumes: dict[str, Rates]
    clients: dict[str, dict[str, Rates]]
    groups: dict[str, VolumeGroupCap]
    named: dict[str, tuple[str, ...]]


def parse_caps(header: dict[str, Any]) -> ServerCaps:
    """What the header of DP_CAPS says.

    Raises:
        BadCaps: a key of the wrong type, a rate that is not above 0, a volume, client or group named twice,
            a volume in two groups.
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
        volumes[volume] = _rates(generation, entry, volume)
    clients = _client_caps(generation, header.get("clients"))
    groups = _group_caps(generation, header.get("groups"))
    named = _named_clients(generation, header.get("clients") or ())
    return ServerCaps(generation, lease_us * 1000, volumes, clients, groups, named)


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
        found.setdefault(volume, {})[client] = _rates(generation, entry, volume)
    return found


def _named_clients(generation: int, entries: Iterable[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Globs of the clients that a cap of all others is not for, by volume."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        try:
            globs = except_of(entry).get(EXCEPT)
        except MalformedFrame as exc:
            raise BadCaps(f"caps {generation}", str(exc)) from exc
        if globs is not None:
            found[entry["volume"]] = tuple(globs)
    return found


def _group_caps(generation: int, entries: Any) -> dict[str, VolumeGroupCap]:
    """Key ``groups``, absent in a set without caps of groups."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise BadCaps(f"caps {generation}", "the list of groups is not well-formed")
    found: dict[str, VolumeGroupCap] = {}
    members = set[str]()
    for entry in entries:
        group, volumes = (
            (entry.get("group"), entry.get("volumes")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(group, str) or group in found or not isinstance(volumes, dict) or not volumes:
            problem = f"entry {excerpt(entry)} names no group with volumes, or one named before"
            raise BadCaps(f"caps {generation}", problem)
        for volume, weight in volumes.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 < weight <= MOST_WEIGHT:
                problem = f"weight of {excerpt(volume)} in group {excerpt(group)} is {excerpt(weight)}"
                raise BadCaps(f"caps {generation}", f"{problem}; a weight is above 0 to {MOST_WEIGHT:g}")
            if not isinstance(volume, str) or volume in members:
                problem = f"volume {excerpt(volume)} of group {excerpt(group)} is in another group, too"
                raise BadCaps(f"caps {generation}", problem)
            members.add(volume)
        rates = _rates(generation, entry, group)
        if rates.is_open:
            raise BadCaps(f"caps {generation}", f"group {excerpt(group)} has no rate")
        found[group] = VolumeGroupCap(rates, {volume: float(weight) for volume, weight in volumes.items()})
    return found


def _rates(generation: int, entry: dict[str, Any], name: str) -> Rates:
    keys = ("ops_per_s", "bytes_per_s", "cost_per_s")
    ops, size, cost = (_rate(generation, entry, key, name) for key in keys)
    return Rates(ops, size, cost, _burst_s(generation, entry, name))


def _rate(generation: int, entry: dict[str, Any], key: str, name: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_RATE <= value <= MOST_RATE:
        named = f"{key} of {excerpt(name)} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a rate is {LEAST_RATE} to {MOST_RATE:g}")
    return float(value)


def _burst_s(generation: int, entry: dict[str, Any], name: str) -> float | None:
    value = entry.get("burst_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_BURST_S <= value <= MOST_BURST_S:
        named = f"burst_s of {excerpt(name)} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a burst is {LEAST_BURST_S} to {MOST_BURST_S:g} s")
    return float(value)


class CapsInForce:
    """The caps of all volumes of one plane, of single clients of theirs, and of groups of them.

    Args:
        static: by volume, from the configuration.
    """

    def __init__(self, static: dict[str, Rates]) -> None:
        self.static = static
        self._server: dict[str, Rates] = {}
        self._clients: dict[str, dict[str, Rates]] = {}
        self._named: dict[str, tuple[str, ...]] = {}
        self.groups: Mapping[str, VolumeGroupCap] = {}
        self._said: dict[str, Any] | None = None
        self._lease_ns = DEFAULT_LEASE_NS
        self.generation = NO_GENERATION
        self.lease_end_ns: int | None = None

    def apply(self, header: dict[str, Any], now_ns: int) -> int:
        """Take a DP_CAPS header; returns how many volumes, clients and groups it caps.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        caps = parse_caps(header)
        self._said = header
        self.generation, self._lease_ns = caps.generation, caps.lease_ns
        self._server, self._clients, self.groups = caps.volumes, caps.clients, caps.groups
        self._named = caps.named
        self.lease_end_ns = now_ns + caps.lease_ns
        return len(caps.volumes) + sum(map(len, caps.clients.values())) + len(caps.groups)

    def renew(self, now_ns: int) -> None:
        """The server lives: extend the lease of the set in force, if there is one."""
        if self.lease_end_ns is not None:
            self.lease_end_ns = now_ns + self._lease_ns

    def expire(self, now_ns: int) -> bool:
        """Drop the server's set if its lease has run out; returns whether that happened now."""
        if self.lease_end_ns is None or now_ns < self.lease_end_ns:
            return False
        self._said = None
        self.generation, self.lease_end_ns = NO_GENERATION, None
        self._server, self._clients, self.groups, self._named = {}, {}, {}, {}
        return True

    @property
    def in_words(self) -> tuple[dict[str, Any] | None, int | None]:
        """The header of DP_CAPS that the server's set came with, and the end of its lease; or None twice."""
        return self._said, self.lease_end_ns

    def inherit(self, header: dict[str, Any], lease_end_ns: int, now_ns: int) -> None:
        """Take what another process says ``in_words``.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        self.apply(header, now_ns)
        self.lease_end_ns = lease_end_ns
        self.expire(now_ns)

    def of(self, volume: str) -> Rates:
        """What holds for one volume."""
        return self.static.get(volume, NO_CAPS).tighter(self._server.get(volume, NO_CAPS))

    def of_clients(self, volume: str) -> Mapping[str, Rates]:
        """What holds for single clients of a volume, beside that; ``*`` for all that are not named."""
        return self._clients.get(volume, NO_CLIENTS)

    def named_clients(self, volume: str) -> tuple[str, ...]:
        """Globs of the clients that the cap of all others is not for."""
        return self._named.get(volume, ())


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """What every connection of a plane shares.

    Attributes:
        scratch: buffer for one handler's use; nothing stays in it between events.
        payload_memory: for large writes; ``reply_memory`` for large reads (see ``buffers``).
        tls_engine: for handshakes with upstreams.
        other: whether ledgers can be believed.
        farewells: connections to upstreams that end.
    """

    loop: EventLoop
    clock: Clock
    cuts: CutMaker
    scratch: memoryview
    payload_memory: MemoryBudget
    reply_memory: MemoryBudget
    tls_engine: TlsEngine | None = None
    other: OtherProcess = field(default_factory=OtherProcess)
    farewells: set[UpstreamFarewell] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Debt:
    """What is left to pay of a request that has passed; waits for the rates in turn with the connections."""

    transfer_bytes: int
    cost: float
    left_ratio: float
    session: ThrottledSession | None  # which waits for it; None when it is closed


class ThrottledSession(Protocol):
    """What a volume asks of a session."""

    @property
    def client(self) -> str:
        """Whose it is."""

    def head_charge(self) -> tuple[int, float] | None:
        """(bytes, cost) of the request at the head, or None when it is free of charge."""

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

    def drain(self, *, moves: bool = False) -> None:
        """Answer what has arrived, or, if its client moves to another process, what has begun; then end."""


class Volume:
    """See the module docstring.

    Attributes:
        facts: size and flags once known (at start for files, after the first connection for upstreams).
        warnings: about its upstream; limited, because one death is seen by every client.
        clients: rates of single clients; ``group``: the one that it is in.
        sessions: open connections to it.

    ``_late`` and ``_longest_ns`` count the I/Os of this cut that were held for too long.
    """

    def __init__(self, export: ExportConfig, rates: RateSet, context: PlaneContext, max_hold_ns: int) -> None:
        self.export = export
        self.rates = rates
        self.clients = ClientRates(rates.tau_ns)
        self.group: VolumeGroup | None = None
        self.sessions: set[ThrottledSession] = set()
        self.facts: ExportFacts | None = None
        self.warnings = LimitedLog("upstream")
        self._context = context
        self._max_hold_ns = max_hold_ns
        self._waiting: FairOrder[ThrottledSession | Debt] = FairOrder()
        self._debts: dict[ThrottledSession, Debt] = {}  # sessions that wait for their own
        self._used_ns: dict[ThrottledSession, int] = {}
        self._parts: dict[ThrottledSession, tuple[int, int]] = {}
        self._group_holds = False
        self._late, self._longest_ns = 0, 0
        self._ledgers: dict[str, ChangeLedger] = {}
        context.cuts.volumes.append(self)

    @property
    def name(self) -> str:
        """Its name at the server."""
        return self.export.volume

    def ledger_of(self, upstream: str) -> ChangeLedger:
        """What is known of the changes that an upstream acknowledged; a reload may give another upstream."""
        return self._ledgers.setdefault(upstream, ChangeLedger())

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """See ``cuts.ThrottledVolume``."""
        heads = [session.head_arrived_ns() for session in (*self._sessions(), *self._debts)]
        held_ns = max((now_ns - arrived for arrived in heads if arrived is not None), default=0)
        late, longest_ns = self._late, max(self._longest_ns, held_ns)
        self._late, self._longest_ns = 0, 0
        return (late, longest_ns // 1000) if longest_ns >= self._max_hold_ns else None

    def serve(self, session: ThrottledSession, now_ns: int) -> None:
        """``session`` has received something: admit what the rates allow, and push."""
        if self._is_open and not self._is_capped(session):
            self._serve_open(session, now_ns)
            return
        self._waiting.add(session)
        touched = self._release(now_ns)
        touched[session] = None  # also without an admission: payload of an admitted write may have come
        self._push(touched, now_ns)

    def _serve_open(self, session: ThrottledSession, now_ns: int) -> None:
        while True:
            session.admit_all(now_ns)
            session.push(now_ns)
            if not session.unblock():
                return

    def set_caps(
        self,
        caps: Rates,
        now_ns: int,
        clients: Mapping[str, Rates] = NO_CLIENTS,
        named: Sequence[str] = (),
    ) -> None:
        """Put other caps in force, now, also for what is already held.

        Args:
            caps: of the volume.
            now_ns: monotonic.
            clients: of single clients of it, complete; ``*``: of all others together.
            named: globs of the clients that those others are not.
        """
        changed = self.rates.set_caps(caps, now_ns)
        if self.clients.set_caps(clients, now_ns, named) or changed:
            self.pump(now_ns)

    def set_group(self, group: VolumeGroup | None, now_ns: int) -> None:
        """It is in this group from now on, or in none; also for what is already held."""
        self.group, self._group_holds = group, False
        self.pump(now_ns)

    def pump(self, now_ns: int) -> None:
        """Admit what the rates allow by now."""
        if self._is_open:
            self._forgive()
            waiting = tuple(self._sessions())
            for session in waiting:
                if not self._is_capped(session):
                    self._waiting.remove(session)
                    self._parts.pop(session, None)
            for session in waiting:
                if not self._is_capped(session):
                    self._serve_open(session, now_ns)
        # With nothing left to wait this only ends the timer.
        self._push(self._release(now_ns), now_ns)

    def _sessions(self) -> Iterator[ThrottledSession]:
        """Those that wait for the rates."""
        return (flow for flow in self._waiting if not isinstance(flow, Debt))

    def _forgive(self) -> None:
        """No rate is left that a debt could be owed to."""
        for flow in tuple(self._waiting):
            if isinstance(flow, Debt):
                self._waiting.forget(flow)
        for session in self._debts:
            self._waiting.add(session)
        self._debts.clear()

    @property
    def _is_open(self) -> bool:
        """Whether nothing but rates of clients holds."""
        return self.rates.is_open and self.group is None

    def _is_capped(self, session: ThrottledSession) -> bool:
        """Whether its client has rates of its own."""
        return bool(self.clients) and session.client in self.clients

    def _push(self, touched: dict[ThrottledSession, None], now_ns: int) -> None:
        while touched:
            for session in touched:
                session.push(now_ns)
            again = [session for session in touched if session.unblock()]
            for session in again:
                self._waiting.add(session)
            touched = self._release(now_ns) if again else {}

    def forget(self, session: ThrottledSession) -> None:
        """The session is closed."""
        self.sessions.discard(session)
        self._waiting.forget(session)
        self._used_ns.pop(session, None)
        self._parts.pop(session, None)
        debt = self._debts.pop(session, None)
        if debt is not None:
            debt.session = None

    def _release(self, now_ns: int) -> dict[ThrottledSession, None]:
        touched: dict[ThrottledSession, None] = {}
        self._group_holds = False
        while (flow := self._waiting.first()) is not None:
            if isinstance(flow, Debt):
                if self._may_pass(now_ns):
                    self._pay_debt(flow, now_ns)
                    continue
                session = self._free_of_charge()
                if session is None:
                    break
            else:
                session = flow
            if session.head_arrived_ns() is None:
                self._waiting.remove(session)
                continue
            charge = session.head_charge()
            if charge is not None and session in self._debts:
                self._waiting.remove(session)  # until its debt is paid
                continue
            if charge is not None and self._client_ready_ns(session) > now_ns:
                # Held by its client's own rates: the others need not wait for it, and it keeps its place.
                self._waiting.set_aside(session)
                continue
            if charge is not None and not self._may_pass(now_ns):
                free = self._free_of_charge()
                if free is None:
                    break
                session, charge = free, None
            used_ns = 0.0
            if charge is not None:
                used_ns, is_paid = self._pay(session, *charge, now_ns)
                if not is_paid:
                    self._waiting.served(session, used_ns)
                    continue
                self._count_late(session, now_ns)
            session.admit_head(now_ns)
            touched[session] = None
            if session in self._waiting:  # it may have closed itself
                self._waiting.served(session, used_ns)
        self._waiting.put_back()
        self._plan()
        return touched

    def _may_pass(self, now_ns: int) -> bool:
        if self.rates.ready_ns() > now_ns:
            return False
        self._group_holds = self.group is not None and not self.group.admits(self, now_ns)
        return not self._group_holds

    def _pay(
        self, session: ThrottledSession, transfer_bytes: int, cost: float, now_ns: int
    ) -> tuple[float, bool]:
        """Charge the head of a session, or its next part; (ns of the rate, whether it may pass)."""
        parts = self._parts.get(session)
        done, of = parts or (0, self._parts_of(transfer_bytes, cost))
        self._used_ns[session] = now_ns
        used_ns = self._charge(transfer_bytes, cost, 1 / of, now_ns)
        if self.clients:
            used_ns = max(used_ns, self.clients.shared_ns(session.client, transfer_bytes, cost) / of)
        if parts is not None or (of > 1 and self._is_contended(session, now_ns)):
            if done + 1 < of:
                self._parts[session] = done + 1, of
                return used_ns, False
        elif of > 1:
            debt = self._debts[session] = Debt(transfer_bytes, cost, 1 - 1 / of, session)
            self._waiting.add(debt)
        self._parts.pop(session, None)
        if self.clients:
            self.clients.charge(session.client, now_ns, transfer_bytes, cost)
        return used_ns, True

    def _charge(self, transfer_bytes: int, cost: float, part: float, now_ns: int) -> float:
        """Charge a part of a request; returns what it takes of the rate, in ns."""
        self.rates.charge(now_ns, transfer_bytes, cost, part)
        used_ns = self.rates.duration_ns(transfer_bytes, cost) * part
        if self.group is not None:
            self.group.charge(self, now_ns, transfer_bytes, cost, part)
            used_ns = max(used_ns, self.group.rates.duration_ns(transfer_bytes, cost) * part)
        return used_ns

    def _pay_debt(self, debt: Debt, now_ns: int) -> None:
        """Charge the next part, by the rates of now."""
        part = min(debt.left_ratio, 1 / self._parts_of(debt.transfer_bytes, debt.cost))
        self._waiting.served(debt, self._charge(debt.transfer_bytes, debt.cost, part, now_ns))
        debt.left_ratio -= part
        if debt.left_ratio > PAID_RATIO:
            return
        self._waiting.forget(debt)
        if debt.session is not None:
            del self._debts[debt.session]
            self._waiting.add(debt.session)

    def _parts_of(self, transfer_bytes: int, cost: float) -> int:
        """Of how many parts a request is: 1 unless it is large."""
        own_ns = self.rates.size_ns(transfer_bytes, cost)
        group_ns = self.group.rates.size_ns(transfer_bytes, cost) if self.group is not None else 0.0
        parts = min(math.ceil(max(own_ns, group_ns) / PART_NS), math.ceil(transfer_bytes / PART_BYTES))
        return max(parts, 1)

    def _is_contended(self, session: ThrottledSession, now_ns: int) -> bool:
        """Whether others use the rates, too."""
        return (
            any(
                now_ns - used_ns < CONTENDED_NS
                for each, used_ns in self._used_ns.items()
                if each is not session
            )
            or any(each is not session for each in self._waiting)
            or (self.group is not None and self.group.is_contended(self, now_ns))
        )

    def _client_ready_ns(self, session: ThrottledSession) -> int:
        """From this moment its next I/O may pass, as far as its client's own rates go."""
        return self.clients.ready_ns(session.client) if self.clients else 0

    def _free_of_charge(self) -> ThrottledSession | None:
        """A session whose head need not wait for the rates."""
        for session in (*self._sessions(), *self._debts):
            if session.head_arrived_ns() is not None and session.head_charge() is None:
                return session
        return None

    def _count_late(self, session: ThrottledSession, now_ns: int) -> None:
        arrived_ns = session.head_arrived_ns()
        if arrived_ns is not None and now_ns - arrived_ns >= self._max_hold_ns:
            self._late += 1
            self._longest_ns = max(self._longest_ns, now_ns - arrived_ns)

    def _plan(self) -> None:
        group = self.group
        if group is not None and not self._group_holds:
            group.withdraw(self)
        waiting = [session for session in self._sessions() if session.head_arrived_ns() is not None]
        owes = any(isinstance(flow, Debt) for flow in self._waiting)
        if not (waiting or owes) or self._group_holds:  # the group has a timer for all of its volumes
            self._context.loop.cancel(self)
            return
        client_ns = min(map(self._client_ready_ns, waiting)) if self.clients and not owes else 0
        self._context.loop.at(self, max(self.rates.ready_ns(), client_ns), self.pump)
