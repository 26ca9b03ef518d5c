"""One volume: its rates, and the sessions whose requests wait for them.

Held requests stay in their connection's buffer. A ``Volume`` has an order of the connections that hold some
(``fair_order``), and one timer for all: connections get equal shares of the rate, whatever their depth and
however large their requests. A client that has rates of its own waits for both; while its own hold it, the
others go on; the same holds for the rates of a whole client, which its connections to other volumes share.
A volume of a group, or of two, waits for their rates, too. Both are ``groups``, which have timers of their
own.

A request that is large against the rate of the volume, of its group, or the one that its client shares with
others (``client_rates``) is paid for in parts while others use the volume, or its group:
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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from gateway_agent.config import ExportConfig
from gateway_agent.nbd.buffers import MemoryBudget
from gateway_agent.nbd.client_rates import NO_CLIENTS, NO_OTHERS, ClientRates
from gateway_agent.nbd.cuts import CutMaker
from gateway_agent.nbd.fair_order import FairOrder
from gateway_agent.nbd.farewell import UpstreamFarewell
from gateway_agent.nbd.groups import CONTENDED_NS, VolumeGroup
from gateway_agent.nbd.ledger import ChangeLedger, OtherProcess
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.payload_pipe import PipePool
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.tls import TlsEngine
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.wire.rates import DEFAULT_BURST_S, Allowance, Rates, RateSet

PUMP_AGAIN_NS: Final = 200_000_000  # after one that has failed, as without memory
PART_NS: Final = 20_000_000  # of the rate: a request that takes longer because of its size is paid in parts
PART_BYTES: Final = 65_536  # and none is smaller
PAID_RATIO: Final = 1e-9  # of a request: less is what the arithmetic of its parts has left


log = structlog.get_logger("volume")


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """What every connection of a plane shares.

    Attributes:
        scratch: buffer for one handler's use; nothing stays in it between events.
        payload_memory: for large writes; ``reply_memory`` for large reads (see ``buffers``).
        tls_engine: for handshakes with upstreams.
        bursts_since_ns: for ``RateSet``; of a process that takes over, when it began.
        other: whether ledgers can be believed.
        farewells: connections to upstreams that end.
        ledgers: by upstream, also of those that no export has now.
        pipes: for large payloads.
    """

    loop: EventLoop
    clock: Clock
    cuts: CutMaker
    scratch: memoryview
    payload_memory: MemoryBudget
    reply_memory: MemoryBudget
    tls_engine: TlsEngine | None = None
    bursts_since_ns: int | None = None
    other: OtherProcess = field(default_factory=OtherProcess)
    farewells: set[UpstreamFarewell] = field(default_factory=set)
    ledgers: dict[str, ChangeLedger] = field(default_factory=dict)
    pipes: PipePool = field(default_factory=PipePool)


@dataclass(eq=False, slots=True)
class Debt:
    """What is left to pay of a request that has passed; waits for the rates in turn with the connections."""

    transfer_bytes: int
    cost: float
    left_ratio: float
    client: str
    session: ThrottledSession | None  # which waits for it; None when it is closed


@dataclass(slots=True)
class ExtendedHeaders:
    """Whether an upstream has extended headers, and when it was asked last."""

    has: bool = False
    asked_ns: int | None = None


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

    def admit_within(self, now_ns: int, allowance: Allowance) -> None:
        """Pass on ordinary reads and writes from the head on while the allowance lets them, and add them."""

    def push(self, now_ns: int) -> None:
        """Move admitted requests towards the storage; may close the session."""

    def unblock(self) -> bool:
        """Whether a refused request at the head can be answered now, after a push."""

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""

    def failed(self, exc: Exception) -> None:
        """A step of it has raised, which is logged: end it, so that its client does not wait."""

    def drain(self, *, moves: bool = False) -> None:
        """Answer what has arrived, or, if its client moves to another process, what has begun; then end."""


class Volume:
    """See the module docstring.

    Attributes:
        facts: size and flags once known (at start for files, after the first connection for upstreams).
        extended: whether its upstream has extended headers, as far as known.
        warnings: about its upstream; limited, because one death is seen by every client.
        clients: rates of single clients; ``groups``: those that it is in.
        whole_clients: by client, rates that hold for it over all volumes of the plane.
        sessions: open connections to it.

    ``_late`` and ``_longest_ns`` count the I/Os of this cut that were held for too long.
    """

    def __init__(self, export: ExportConfig, rates: RateSet, context: PlaneContext, max_hold_ns: int) -> None:
        self.export = export
        self.rates = rates
        self.clients = ClientRates(rates.tau_ns, rates.since_ns)
        self.groups: tuple[VolumeGroup, ...] = ()
        self.whole_clients: Mapping[str, VolumeGroup] = {}
        self.sessions: set[ThrottledSession] = set()
        self.facts: ExportFacts | None = None
        self.extended = ExtendedHeaders()
        self.warnings = LimitedLog("upstream")
        self._context = context
        self._max_hold_ns = max_hold_ns
        self._waiting: FairOrder[ThrottledSession | Debt] = FairOrder()
        self._debt: Debt | None = None  # one at the most: see the module docstring
        self._used_ns: dict[ThrottledSession, int] = {}
        self._parts: dict[ThrottledSession, tuple[int, int]] = {}
        self._group_holds = False
        self._clients_held: set[str] = set()  # by their whole clients' rates, which have timers
        self._clients_asked: set[str] = set()  # whole clients that may wait for them here
        self._is_behind = False  # a turn has failed: what was admitted in it may not have been pushed
        self._late, self._longest_ns = 0, 0
        context.cuts.volumes.append(self)

    @property
    def name(self) -> str:
        """Its name at the server."""
        return self.export.volume

    def ledger_of(self, upstream: str) -> ChangeLedger:
        """What is known of the changes that an upstream acknowledged, by whichever export they came."""
        return self._context.ledgers.setdefault(upstream, ChangeLedger())

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """See ``cuts.ThrottledVolume``."""
        heads = [session.head_arrived_ns() for session in self._sessions()]
        held_ns = max((now_ns - arrived for arrived in heads if arrived is not None), default=0)
        late, longest_ns = self._late, max(self._longest_ns, held_ns)
        self._late, self._longest_ns = 0, 0
        return (late, longest_ns // 1000) if longest_ns >= self._max_hold_ns else None

    def serve(self, session: ThrottledSession, now_ns: int) -> None:
        """``session`` has received something: admit what the rates allow, and push."""
        if self._is_open and not self._is_capped(session):
            self._serve_open(session, now_ns)
            return
        if self._serve_alone(session, now_ns):
            return
        self._waiting.add(session)
        try:
            touched = self._release(now_ns)
            touched[session] = None  # also without an admission: payload of an admitted write may have come
            self._push(touched, now_ns)
        except Exception:  # costs this connection; what it did for the others is done again
            self._pump_later(now_ns)
            raise

    def _serve_open(self, session: ThrottledSession, now_ns: int) -> None:
        while True:
            session.admit_all(now_ns)
            session.push(now_ns)
            if not session.unblock():
                return

    def _serve_alone(self, session: ThrottledSession, now_ns: int) -> bool:
        """Serve the only connection that asks for something; whether nothing of it waits for a rate."""
        if len(self._waiting) > (session in self._waiting):
            return False
        self._admit_batch(session, now_ns)
        if session.head_arrived_ns() is not None:
            return False
        if session in self._waiting:
            self._waiting.remove(session)
            self._plan()
        session.push(now_ns)
        return not session.unblock()

    def _admit_batch(self, session: ThrottledSession, now_ns: int) -> bool:
        """Admit what the rates allow of ordinary requests, and charge them at once; whether there were any.

        The same as to admit one after another, at a tenth of the time; only for a connection that shares the
        rates with none that waits.
        """
        groups = self.groups
        if self._debt is not None or session in self._parts:
            return False
        whole = self.whole_clients.get(session.client)
        if not all(group.is_free_for(self) for group in (groups if whole is None else (*groups, whole))):
            return False
        own, shared = self.clients.held_of(session.client) if self.clients else (None, None)
        common = [self.rates, *(group.rates for group in groups)]
        if shared is not None:
            common.append(shared)
        largest_bytes = max(min(rates.bytes_within(PART_NS) for rates in common), PART_BYTES)
        allowance = Allowance(largest_bytes, now_ns - self._max_hold_ns)
        alone = [rates for rates in (own, None if whole is None else whole.rates) if rates is not None]
        for rates in (*common, *alone):
            rates.narrow(allowance, now_ns)
        session.admit_within(now_ns, allowance)
        if not allowance.ops:
            return False
        if not session.is_closed:  # to send their answers it may have closed itself, and is forgotten
            self._used_ns[session] = now_ns
        used = [rates.charge_batch(now_ns, allowance) for rates in common]
        for group, used_ns in zip(groups, used[1:], strict=False):
            group.charged(self, now_ns, used_ns, allowance.ops)
        of_client = [rates.charge_batch(now_ns, allowance) for rates in alone]
        if whole is not None:
            whole.charged(self, now_ns, of_client[-1], allowance.ops)
        if session in self._waiting:
            used_ns = max(used) or max(of_client, default=0.0)
            last_ns = used_ns / allowance.ops  # who comes now begins where the last one did
            self._waiting.served(session, used_ns - last_ns)
            self._waiting.served(session, last_ns)
        return True

    def set_caps(
        self,
        caps: Rates,
        now_ns: int,
        clients: Mapping[str, Rates] = NO_CLIENTS,
        others: Mapping[str, Sequence[str]] = NO_OTHERS,
    ) -> None:
        """Put other caps in force, now, also for what is already held.

        Args:
            caps: of the volume.
            now_ns: monotonic.
            clients: of single clients of it, complete, or by a glob of all that match it, together.
            others: by such a glob, globs of the clients that it is not for.
        """
        changed = self.rates.set_caps(caps, now_ns)
        if self.clients.set_caps(clients, now_ns, others) or changed:
            self.pump(now_ns)

    def set_groups(self, groups: tuple[VolumeGroup, ...], now_ns: int) -> None:
        """It is in these groups from now on, or in none; also for what is already held."""
        self.groups, self._group_holds = groups, False
        self.pump(now_ns)

    def set_whole_clients(self, groups: Mapping[str, VolumeGroup], now_ns: int) -> None:
        """These rates hold for its clients from now on, beside all others; also for what is already held."""
        self.whole_clients = dict(groups)
        self._clients_held.clear()
        self.pump(now_ns)

    def pump(self, now_ns: int) -> None:
        """Admit what the rates allow by now. Raises nothing: it is the turn of many connections."""
        try:
            if self._is_behind:
                self._push(dict.fromkeys(self.sessions), now_ns)
            self._pump(now_ns)
            self._is_behind = False
        except Exception:
            log.exception("pump-failed", volume=self.name)
            self._pump_later(now_ns)

    def _pump_later(self, now_ns: int) -> None:
        self._is_behind = True
        self._context.loop.at((self, "again"), now_ns + PUMP_AGAIN_NS, self.pump)

    def _pump(self, now_ns: int) -> None:
        if self._is_open:
            if self._debt is not None and self._shared(self._debt.client) is None:
                self._end_debt()
            waiting = tuple(self._sessions())
            for session in waiting:
                if not self._is_capped(session):
                    self._waiting.remove(session)
                    self._parts.pop(session, None)
            for session in waiting:
                if not self._is_capped(session):
                    try:
                        self._serve_open(session, now_ns)
                    except Exception as exc:  # noqa: BLE001 - logged, and costs this connection only
                        self._context.loop.report(exc, session.failed)
        # With nothing left to wait this only ends the timer.
        self._push(self._release(now_ns), now_ns)

    def _sessions(self) -> Iterator[ThrottledSession]:
        """Those that wait for the rates, or for their own debt."""
        for flow in self._waiting:
            if not isinstance(flow, Debt):
                yield flow
        if self._debt is not None and self._debt.session is not None:
            yield self._debt.session

    def _end_debt(self) -> None:
        """It is paid, or no rate is left that it could be owed to."""
        debt, self._debt = self._debt, None
        if debt is not None:
            self._waiting.forget(debt)
            if debt.session is not None:
                self._waiting.add(debt.session)

    @property
    def _is_open(self) -> bool:
        """Whether nothing but rates of clients holds."""
        return self.rates.is_open and not self.groups

    def _is_capped(self, session: ThrottledSession) -> bool:
        """Whether its client has rates of its own."""
        return bool(self.clients or self.whole_clients) and (
            session.client in self.clients or session.client in self.whole_clients
        )

    def _push(self, touched: dict[ThrottledSession, None], now_ns: int) -> None:
        while touched:
            again = []
            for session in touched:
                try:
                    session.push(now_ns)
                    if session.unblock():
                        again.append(session)
                except Exception as exc:  # noqa: BLE001 - logged, and costs this connection only
                    self._context.loop.report(exc, session.failed)
            for session in again:
                self._waiting.add(session)
            touched = self._release(now_ns) if again else {}

    def forget(self, session: ThrottledSession) -> None:
        """The session is closed."""
        self.sessions.discard(session)
        self._waiting.forget(session)
        self._used_ns.pop(session, None)
        self._parts.pop(session, None)
        if self._debt is not None and self._debt.session is session:
            self._debt.session = None

    def _release(self, now_ns: int) -> dict[ThrottledSession, None]:
        touched: dict[ThrottledSession, None] = {}
        self._group_holds = False
        self._clients_held.clear()
        while (flow := self._waiting.first()) is not None:
            if isinstance(flow, Debt):
                if self._debt_ready_ns(flow) > now_ns:  # which those wait for that share these rates
                    self._waiting.set_aside(flow)
                    continue
                if self._may_pass(now_ns):
                    self._pay_debt(flow, now_ns)
                    continue
                session = self._free_of_charge()
                if session is None:
                    break
            else:
                session = flow
                if len(self._waiting) == 1 and self._admit_batch(session, now_ns):
                    touched[session] = None
            if session.head_arrived_ns() is None:
                self._waiting.remove(session)
                continue
            charge = session.head_charge()
            if charge is not None and self._debt is not None and self._debt.session is session:
                self._waiting.remove(session)  # until its debt is paid
                continue
            if charge is not None and not self._client_may_pass(session, now_ns):
                # Held by its client's own rates: the others need not wait for it, and it keeps its place.
                self._waiting.set_aside(session)
                continue
            if charge is not None and not self._may_pass(now_ns):
                if self.whole_clients and session.client in self.whole_clients:
                    self.whole_clients[session.client].keep_turn(self)
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
            try:
                session.admit_head(now_ns)
            except Exception as exc:  # noqa: BLE001 - logged, and costs this connection only
                self._context.loop.report(exc, session.failed)
            touched[session] = None
            if session in self._waiting:  # it may have closed itself
                self._waiting.served(session, used_ns)
        self._waiting.put_back()
        self._plan()
        return touched

    def _client_may_pass(self, session: ThrottledSession, now_ns: int) -> bool:
        """Whether the rates let its next I/O pass that its client has here, and over all its volumes."""
        if self._client_ready_ns(session) > now_ns:
            return False
        whole = self.whole_clients.get(session.client) if self.whole_clients else None
        if whole is None:
            return True
        self._clients_asked.add(session.client)
        if whole.admits(self, now_ns):
            return True
        self._clients_held.add(session.client)
        return False

    def _may_pass(self, now_ns: int) -> bool:
        if self.rates.ready_ns() > now_ns:
            return False
        letting = [group for group in self.groups if group.admits(self, now_ns)]
        self._group_holds = len(letting) < len(self.groups)
        if self._group_holds:
            for group in letting:
                group.keep_turn(self)
        return not self._group_holds

    def _pay(
        self, session: ThrottledSession, transfer_bytes: int, cost: float, now_ns: int
    ) -> tuple[float, bool]:
        """Charge the head of a session, or its next part; (ns of the rate, whether it may pass)."""
        parts = self._parts.get(session)
        shared = self._shared(session.client)
        done, of = parts or (0, self._parts_of(shared, transfer_bytes, cost))
        self._used_ns[session] = now_ns
        used_ns = self._charge(shared, transfer_bytes, cost, 1 / of, now_ns)
        if parts is not None or (of > 1 and self._is_contended(session, now_ns)):
            if done + 1 < of:
                self._parts[session] = done + 1, of
                return used_ns, False
        elif of > 1:
            self._debt = Debt(transfer_bytes, cost, 1 - 1 / of, session.client, session)
            self._waiting.add(self._debt)
        self._parts.pop(session, None)
        own, whole = self._of_client(session.client)
        if own is not None:
            own.charge(now_ns, transfer_bytes, cost)
        if whole is not None:
            whole.charge(self, now_ns, transfer_bytes, cost, 1.0)
        if not used_ns:  # its client's connections share what is the client's alone
            rates = [each for each in (own, None if whole is None else whole.rates) if each is not None]
            used_ns = max((each.duration_ns(transfer_bytes, cost) for each in rates), default=0.0)
        return used_ns, True

    def _of_client(self, client: str) -> tuple[RateSet | None, VolumeGroup | None]:
        """The rates that are a client's alone: here, and over all volumes."""
        own = self.clients.held_of(client).own if self.clients else None
        return own, self.whole_clients.get(client)

    def _shared(self, client: str) -> RateSet | None:
        """The rates that a client shares with others, if there are any."""
        return self.clients.shared_of(client) if self.clients else None

    def _charge(
        self, shared: RateSet | None, transfer_bytes: int, cost: float, part: float, now_ns: int
    ) -> float:
        """Charge a part of a request; returns what it takes of the rate, in ns."""
        self.rates.charge(now_ns, transfer_bytes, cost, part)
        used_ns = self.rates.duration_ns(transfer_bytes, cost) * part
        for group in self.groups:
            group.charge(self, now_ns, transfer_bytes, cost, part)
            used_ns = max(used_ns, group.rates.duration_ns(transfer_bytes, cost) * part)
        if shared is not None:
            shared.charge(now_ns, transfer_bytes, cost, part)
            used_ns = max(used_ns, shared.duration_ns(transfer_bytes, cost) * part)
        return used_ns

    def _pay_debt(self, debt: Debt, now_ns: int) -> None:
        """Charge the next part, by the rates of now: of a burst that is not used half at once."""
        shared = self._shared(debt.client)
        unused = list[float]()
        for rates in (self.rates, shared):
            if rates is not None and (whole_ns := rates.duration_ns(debt.transfer_bytes, debt.cost)) > 0:
                burst_ns = (rates.caps.burst_s or DEFAULT_BURST_S) * 1e9
                unused.append(min(now_ns - rates.ready_ns(), burst_ns) / 2 / whole_ns)
        part = max(1 / self._parts_of(shared, debt.transfer_bytes, debt.cost), min(unused, default=0.0))
        part = min(debt.left_ratio, part)
        self._waiting.served(debt, self._charge(shared, debt.transfer_bytes, debt.cost, part, now_ns))
        debt.left_ratio -= part
        if debt.left_ratio <= PAID_RATIO:
            self._end_debt()

    def _parts_of(self, shared: RateSet | None, transfer_bytes: int, cost: float) -> int:
        """Of how many parts a request is: 1 unless it is large."""
        found = [self.rates, *(group.rates for group in self.groups)]
        if shared is not None:
            found.append(shared)
        longest_ns = max(rates.size_ns(transfer_bytes, cost) for rates in found)
        parts = min(math.ceil(longest_ns / PART_NS), math.ceil(transfer_bytes / PART_BYTES))
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
            or any(group.is_contended(self, now_ns) for group in self.groups)
        )

    def _client_ready_ns(self, session: ThrottledSession) -> int:
        """From this moment its next I/O may pass, as far as its client's own rates go."""
        return self.clients.ready_ns(session.client) if self.clients else 0

    def _debt_ready_ns(self, debt: Debt) -> int:
        """From this moment its next part may be paid, as far as the rates go that its client shares."""
        shared = self._shared(debt.client)
        return shared.ready_ns() if shared is not None else 0

    def _free_of_charge(self) -> ThrottledSession | None:
        """A session whose head need not wait for the rates."""
        for session in self._sessions():
            if session.head_arrived_ns() is not None and session.head_charge() is None:
                return session
        return None

    def _count_late(self, session: ThrottledSession, now_ns: int) -> None:
        arrived_ns = session.head_arrived_ns()
        if arrived_ns is not None and now_ns - arrived_ns >= self._max_hold_ns:
            self._late += 1
            self._longest_ns = max(self._longest_ns, now_ns - arrived_ns)

    def _plan(self) -> None:
        if not self._group_holds:
            for group in self.groups:
                group.withdraw(self)
        waiting = [session for session in self._sessions() if session.head_arrived_ns() is not None]
        if self.whole_clients:  # which have timers for all of their volumes
            held = self._clients_held.intersection(session.client for session in waiting)
            for client in self._clients_asked - held:
                if client in self.whole_clients:
                    self.whole_clients[client].withdraw(self)
            self._clients_asked = held
            waiting = [session for session in waiting if session.client not in held]
        debt = self._debt
        if not (waiting or debt) or self._group_holds:  # the group has a timer for all of its volumes
            self._context.loop.cancel(self)
            return
        client_ns = 0
        if self.clients:
            ready = [
                self._client_ready_ns(each) for each in waiting if debt is None or each is not debt.session
            ]
            client_ns = min(ready if debt is None else [*ready, self._debt_ready_ns(debt)])
        self._context.loop.at(self, max(self.rates.ready_ns(), client_ns), self.pump)
