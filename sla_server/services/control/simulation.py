"""A small world in which the real controller runs: shared disks, gateways, clients, and lag.

    clients --> SimGateway --(caps: ``RateSet``, as in the data plane)--> SimStorage, here SimBackend: FIFO
                   |  cut each poll interval (real ``Cut``: counters, histograms, missed, throttle_gen)
                   `------------------- lag -------------------> Controller.add_cut, tick every 250 ms
                   <------------------- lag ------------------- SetCaps, and the renewal of leases

Deterministic, on the clock and storage of ``simulated_world``, counting as ``simulated_account`` does;
throttle wake-ups are rounded up to 1 ms as epoll rounds them. Caps of clients hold beside that of their
volume, as in the data plane (ADR 21): a client that is held by its own keeps its place, and holds up no
other; those that no agreement names may share one. A gateway may be given a ``SimHost`` on which it has to
wait for the processor, and a wall clock that jumps; gateways can be lost, volumes moved, the server killed.
Used by tests, by ``sla simulate`` (``sla_server.simulate``) and for tuning; it is never part of a
running server.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, IO_ANY, MISSED_DTYPE, Cut
from pmdaemon.wire.messages.agent import CLIENT_CAPS, LARGE_CAPS, OTHER_CLIENT_CAPS
from pmdaemon.wire.messages.client_caps import EXCEPT, is_glob, is_of_glob
from pmdaemon.wire.names import stream_id
from pmdaemon.wire.rates import COST_BYTES, Rates, RateSet, io_cost
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import Decision, SetCaps
from sla_server.services.control.simulated_account import SimAccount
from sla_server.services.control.simulated_world import (
    CLIENT,
    IO_BYTES,
    UNIX_0_US,
    Io,
    SimBackend,
    SimHost,
    SimStorage,
    World,
)
from sla_server.services.control.targets import target_of

__all__ = [  # with those of simulated_world: a world needs one import
    "BACKEND",
    "CLIENT",
    "IO_COST",
    "UNIX_0_US",
    "Io",
    "SimBackend",
    "SimClient",
    "SimGateway",
    "SimHost",
    "SimStorage",
    "Simulation",
    "World",
]

IO_COST: Final = 1 + IO_BYTES / COST_BYTES
TAU_NS: Final = 20_000_000  # bucket depth of the gateways' throttle
EPOLL_NS: Final = 1_000_000
TICK_S: Final = 0.25
LEASE_FRESH_S: Final = 3.0  # polls renew leases only while the server's own renewal is younger
BACKEND: Final = "disk"


class SimGateway:
    """A gateway: counts, holds back, cuts when polled and when caps come, takes caps with a lag.

    Attributes:
        deaf: takes caps without enforcing them, as a broken enforcer would.
        caps_clients: its agent applies caps of single clients; ``caps_others``: one of all others, too.
        lost: no session; I/O and caps go on, as the data plane's do, until the lease ends.
        host: where it has to wait for the processor; None: never.
        step_us: how far its wall clock was set forward (or back) since the start.
        offset_us: what the server adds to its wall clock: as of the poll before.
        thresholds: volume to (io kind, us) that it counts misses of.
        caps: target (``targets``) to its rates in force.
        named: volume to the clients that a cap of its other clients is not for.
    """

    def __init__(
        self,
        world: World,
        name: str,
        storage: dict[str, SimStorage],
        streams: list[tuple[str, str]],
        phase_s: float,
        backends: dict[str, str] | None = None,
    ) -> None:
        """``storage``: volume to what serves it; ``streams``: (volume, client); ``backends``: names."""
        self.world, self.name, self._storage = world, name, storage
        self.volumes = list(dict.fromkeys(volume for volume, _ in streams))
        self.backends = backends or dict.fromkeys(self.volumes, BACKEND)
        self.gateway_id = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
        self.phase_s = phase_s
        self.deaf = self.lost = False
        self.caps_clients = self.caps_others = True
        self.host: SimHost | None = None
        self.step_us = self.offset_us = 0
        self.thresholds: dict[str, list[tuple[int, int]]] = {}
        self.accounts = {stream: SimAccount() for stream in streams}
        self.held: dict[str, dict[str, deque[tuple[int, Io]]]] = {volume: {} for volume in self.volumes}
        for volume, client in streams:
            self.held[volume][client] = deque()
        self._arrivals = 0
        self.caps: dict[str, RateSet] = {}
        self.named: dict[str, list[tuple[str, Sequence[str]]]] = {}  # globs, and whom each is not for
        self._own: dict[tuple[str, str], tuple[RateSet, ...]] = {}  # answers of ``_rates_of`` for these caps
        self.gen = self.seq = 0
        self._lease_ends = math.inf
        self._lease_s = 0.0
        self._gen_changed = False
        self._cut_at = world.now
        self._kept: list[Cut] = []
        self._wake: dict[str, float] = dict.fromkeys(self.volumes, math.inf)

    def move(self, volume: str, backend: str, storage: SimStorage) -> None:
        """Its configuration has a volume on another backend from now on."""
        self.backends[volume], self._storage[volume] = backend, storage

    def streams(self) -> list[dict[str, Any]]:
        """As in message STREAMS."""
        return [
            {
                "id": stream_id(self.gateway_id, volume, client),
                "volume": volume,
                "client": client,
                "backend": self.backends[volume],
            }
            for volume, client in self.accounts
        ]

    def submit(self, io: Io) -> None:
        """A client's request arrives."""
        if self.host is not None and (runs := self.host.runs_at(self.world.now)) > self.world.now:
            self.world.at(runs, lambda: self._take(io))
        else:
            self._take(io)

    def _take(self, io: Io) -> None:
        io.arrived = self.world.now  # a gateway knows of a request from when it reads it
        account = self.accounts[io.volume, io.client]
        account.arrive(io)
        if not self.caps:
            self._send(io)
            return
        self._arrivals += 1
        self.held[io.volume][io.client].append((self._arrivals, io))
        self._admit(io.volume)

    def _admit(self, volume: str) -> None:
        """Let through what may pass now, in order of arrival among the clients that may."""
        cap, now_ns, queues, known = self.caps.get(volume), self.world.now_ns, self.held[volume], self._own
        while True:
            head: deque[tuple[int, Io]] | None = None
            own: tuple[RateSet, ...] = ()
            soonest_ns = 0
            for client, queue in queues.items():
                if not queue:
                    continue
                rates = known.get((volume, client))
                if rates is None:
                    rates = self._rates_of(volume, client)
                wait_ns = 0
                for each in rates:
                    wait_ns = max(wait_ns, self._wait_ns(each, now_ns))
                if wait_ns > 0:
                    soonest_ns = min(soonest_ns or wait_ns, wait_ns)
                elif head is None or queue[0][0] < head[0][0]:
                    head, own = queue, rates
            if head is not None:
                soonest_ns = self._wait_ns(cap, now_ns)
            if soonest_ns > 0:
                self._wake_after(volume, soonest_ns)
                return
            if head is None:
                return
            _, io = head.popleft()
            if cap is not None or own:
                cost = io_cost(1.0, io.size_bytes)
                for each in own if cap is None else (cap, *own):
                    each.charge(now_ns, io.size_bytes, cost)
            self._send(io)

    def _rates_of(self, volume: str, client: str) -> tuple[RateSet, ...]:
        """The rates that hold for a client: its own, and those it shares with others of its glob."""
        if (found := self._own.get((volume, client))) is not None:
            return found
        globs = (glob for glob, others in self.named.get(volume, ()) if is_of_glob(client, glob, others))
        targets = (target_of(volume, name) for name in (client, *globs))
        found = tuple(self.caps[target] for target in targets if target in self.caps)
        self._own[volume, client] = found
        return found

    def _wait_ns(self, rates: RateSet | None, now_ns: int) -> int:
        return 0 if rates is None or self.deaf else rates.ready_ns() - now_ns

    def _wake_after(self, volume: str, wait_ns: int) -> None:
        at = self.world.now + -(-wait_ns // EPOLL_NS) * EPOLL_NS / 1e9
        if at < self._wake[volume] - EPOLL_NS / 1e9:  # what is less is the rounding
            self._wake[volume] = at
            self.world.at(at, partial(self._woken, volume))

    def _woken(self, volume: str) -> None:
        if self.world.now >= self._wake[volume]:
            self._wake[volume] = math.inf
        self._admit(volume)

    def _send(self, io: Io) -> None:
        io.sent = self.world.now
        account = self.accounts[io.volume, io.client]
        account.held -= 1
        account.inflight += 1
        self._storage[io.volume].submit(io, partial(self._answered, io))

    def _answered(self, io: Io) -> None:
        if self.host is not None and (runs := self.host.runs_at(self.world.now)) > self.world.now:
            self.world.at(runs, lambda: self._complete(io))
        else:
            self._complete(io)

    def _complete(self, io: Io) -> None:
        account = self.accounts[io.volume, io.client]
        account.inflight -= 1
        account.complete(io, self.world.now, self.thresholds.get(io.volume, []), self._cut_at)
        io.done(self.world.now)

    def apply(self, decision: SetCaps) -> None:
        """Caps arrive: the complete set of this gateway."""
        before, self.caps, self._own = self.caps, {}, {}
        for cap in (*decision.caps, *decision.clients):
            target = target_of(cap["volume"], cap.get("client", ""))
            keys = ("ops_per_s", "bytes_per_s", "cost_per_s", "burst_s", "peak_ops_per_s")
            rates = Rates(*(cap.get(key) for key in keys))
            if not rates.is_open:
                kept = before.get(target) or RateSet(TAU_NS)
                kept.set_caps(rates, self.world.now_ns)
                self.caps[target] = kept
        self.named = {}
        for cap in decision.clients:
            if is_glob(cap["client"]):
                self.named.setdefault(cap["volume"], []).append((cap["client"], cap[EXCEPT]))
        self.gen, self._gen_changed = decision.gen, True
        self._kept.append(self._close())
        self._lease_s = decision.lease_us / 1e6
        self.renew_lease()
        for volume in self.volumes:
            self._admit(volume)

    def renew_lease(self) -> None:
        """A poll renews the lease of the caps in force."""
        if not self.gen:
            return
        is_new = math.isinf(self._lease_ends)
        self._lease_ends = self.world.now + self._lease_s
        if is_new:
            self.world.at(self._lease_ends, self._check_lease)

    def _check_lease(self) -> None:
        if math.isinf(self._lease_ends):
            return
        if self.world.now >= self._lease_ends:
            self.expire_lease()
        else:
            self.world.at(self._lease_ends, self._check_lease)

    def expire_lease(self) -> None:
        """No renewal came for a lease: back to the static policy."""
        self.caps, self._own = {}, {}
        self.gen, self._gen_changed, self._lease_ends = 0, True, math.inf
        for volume in self.volumes:
            self._admit(volume)

    def cuts(self) -> list[Cut]:
        """A poll arrived: everything since the last one, in parts where caps came in between."""
        kept, self._kept = self._kept, []
        return [*kept, self._close()]

    def _close(self) -> Cut:
        """Everything since the last cut."""
        counters = np.zeros((len(COLUMNS), len(self.accounts)), dtype=np.int64)
        hist, missed = [], []
        for row, (stream, account) in enumerate(self.accounts.items()):
            counters[COL["stream_id"], row] = stream_id(self.gateway_id, *stream)
            for name, value in account.counters().items():
                counters[COL[name], row] = value
            hist += [(row, bucket, count) for bucket, count in sorted(account.hist.items())]
            entries = account.entries(self.thresholds.get(stream[0], ()), self._cut_at, self.world.now)
            missed += [(row, *entry) for entry in entries]
            self.accounts[stream] = account.rest()
        self.seq += 1
        gen, start = (-1 if self._gen_changed else self.gen), self._cut_at
        self._gen_changed, self._cut_at = False, self.world.now
        return Cut(
            self.gateway_id,
            epoch=7,
            seq=self.seq,
            start_unix_us=UNIX_0_US + self.step_us + round(start * 1e6),
            duration_us=max(round((self.world.now - start) * 1e6), 1),
            throttle_gen=gen,
            threshold_version=1,
            counters=counters,
            hist=np.array(hist, dtype=HIST_DTYPE),
            missed=np.array(missed, dtype=MISSED_DTYPE),
            starved_us=round(self.host.take() * 1e6) if self.host is not None else 0,
        )


class SimClient:
    """Load on one volume: open loop (``rate``, Poisson) or closed loop (``depth``), while ``active(now)``."""

    def __init__(
        self,
        gateway: SimGateway,
        volume: str,
        *,
        rate: float = 0.0,
        depth: int = 0,
        active: Callable[[float], bool] = lambda now: True,
    ) -> None:
        self.gateway, self.volume, self.rate, self.active = gateway, volume, rate, active
        self.completed: list[tuple[float, float]] = []
        """(arrived, latency) in seconds of each I/O."""
        self._world = gateway.world
        for _ in range(depth):
            self._world.at(0.0, self._again)
        if rate:
            self._world.at(0.0, self._next_arrival)

    def _issue(self, done: Callable[[float], None]) -> None:
        self.gateway.submit(Io(self.volume, self._world.now, done))

    def _next_arrival(self) -> None:
        now = self._world.now
        self._world.at(now + self._world.random.expovariate(self.rate), self._next_arrival)
        if self.active(now):
            self._issue(lambda end: self.completed.append((now, end - now)))

    def _again(self) -> None:
        now = self._world.now
        if not self.active(now):
            self._world.at(now + 0.01, self._again)
            return

        def done(end: float) -> None:
            self.completed.append((now, end - now))
            self._again()

        self._issue(done)

    def rate_between(self, start: float, end: float) -> float:
        """I/Os a second completed in [start, end)."""
        return sum(start <= at + latency < end for at, latency in self.completed) / (end - start)

    def percentile_between(self, start: float, end: float, percentile: float) -> float:
        """Latency percentile in seconds of the I/Os that arrived in [start, end)."""
        found = sorted(latency for at, latency in self.completed if start <= at < end)
        return found[min(math.ceil(percentile / 100 * len(found)), len(found)) - 1] if found else 0.0

    def bad_seconds(self, start: int, end: int, threshold_s: float, allowed_ratio: float = 0.05) -> list[int]:
        """Seconds in [start, end) in which more than ``allowed_ratio`` of the arrivals took too long."""
        late, every = dict.fromkeys(range(start, end), 0), dict.fromkeys(range(start, end), 0)
        for at, latency in self.completed:
            if start <= at < end:
                every[int(at)] += 1
                late[int(at)] += latency > threshold_s
        return [second for second in late if late[second] > allowed_ratio * every[second]]


class Simulation:
    """Gateways and a controller, wired: polls, ticks, lag in both directions.

    Attributes:
        controller: may be replaced while it runs (a restarted services process).
        alive: False while the server is down: polls are answered into the void, leases are not renewed.
        log: every decision with the second it was made.
        storage: backend to what serves it; ``backend`` is the one there is unless others are given.
    """

    def __init__(
        self,
        controller: Controller,
        seed: int,
        service_s: float = 0.002,
        lag_s: float = 0.01,
        world: World | None = None,
        storage: dict[str, SimStorage] | None = None,
    ) -> None:
        self.world = world or World(seed)
        self.backend = SimBackend(self.world, service_s)
        self.storage: dict[str, SimStorage] = storage or {BACKEND: self.backend}
        self.controller, self.lag_s = controller, lag_s
        self.gateways: dict[str, SimGateway] = {}
        self.log: list[tuple[float, Decision]] = []
        self.alive = True
        self._renewed = self.world.now
        self._interval_s = controller.settings.poll_interval_s
        self._tick()

    def gateway(
        self,
        name: str,
        volumes: list[str],
        thresholds: dict[str, list[int]] | None = None,
        phase_s: float | None = None,
        *,
        clients: dict[str, list[str]] | None = None,
        backends: dict[str, str] | None = None,
    ) -> SimGateway:
        """Add a gateway.

        Args:
            name: its name.
            volumes: what it carries.
            thresholds: volume to thresholds in us, counted for I/Os of any kind.
            phase_s: when its polls come; None: out of phase with those of gateways before it.
            clients: volume to its clients; one unless given.
            backends: volume to its backend; the only one unless given.
        """
        if phase_s is None:
            phase_s = (0.37 * len(self.gateways)) % 1 * self._interval_s
        where = backends or dict.fromkeys(volumes, next(iter(self.storage)))
        streams = [(volume, client) for volume in volumes for client in (clients or {}).get(volume, [CLIENT])]
        storage = {volume: self.storage[where[volume]] for volume in volumes}
        gateway = SimGateway(self.world, name, storage, streams, phase_s, where)
        gateway.thresholds = {v: [(IO_ANY, us) for us in found] for v, found in (thresholds or {}).items()}
        self.gateways[gateway.gateway_id] = gateway
        self.announce(gateway)
        self.world.at(self.world.now + phase_s + self._interval_s, lambda: self._poll(gateway))
        return gateway

    def announce(self, gateway: SimGateway) -> None:
        """What the pair posts when a session begins, or when the controller is new."""
        exports = [{"volume": volume, "backend": gateway.backends[volume]} for volume in gateway.volumes]
        features: tuple[str, ...] = (CLIENT_CAPS, LARGE_CAPS) if gateway.caps_clients else ()
        features += (OTHER_CLIENT_CAPS,) if gateway.caps_others and gateway.caps_clients else ()
        self.controller.set_features(gateway.gateway_id, features)
        self.controller.gateway_up(gateway.gateway_id, gateway.name, exports, self.world.now_ns)
        self.controller.add_streams(gateway.gateway_id, gateway.streams())

    def lose(self, gateway: SimGateway) -> None:
        """Its session ends; what it holds stays until its lease ends."""
        gateway.lost = True
        self.controller.gateway_lost(gateway.gateway_id, "connection closed", self.world.now_ns)

    def find(self, gateway: SimGateway) -> None:
        """It dials again."""
        gateway.lost = False
        self.announce(gateway)

    def move(self, gateway: SimGateway, volume: str, backend: str) -> None:
        """It was started again with a volume on another backend of ``storage``, and dials."""
        gateway.move(volume, backend, self.storage[backend])
        self.find(gateway)

    def kill(self) -> None:
        """The server dies, with all the controller knew."""
        self.alive = False

    def restart(self, controller: Controller) -> None:
        """Another controller takes over, and every gateway that is not lost registers with it."""
        self.controller, self.alive = controller, True
        for gateway in self.gateways.values():
            if not gateway.lost:
                self.announce(gateway)

    def run(self, until: float) -> None:
        """Let time pass."""
        self.world.run(until)

    def of_kind(self, kind: str) -> list[tuple[float, Decision]]:
        """Logged events of one kind."""
        return [(at, d) for at, d in self.log if getattr(d, "kind", None) == kind]

    def _poll(self, gateway: SimGateway) -> None:
        world = self.world
        world.at(world.now + self._interval_s, lambda: self._poll(gateway))
        if gateway.lost:
            return
        cuts, offset_us = gateway.cuts(), gateway.offset_us
        gateway.offset_us = world.step_us - gateway.step_us
        world.at(world.now + self.lag_s, lambda: self._deliver(cuts, offset_us))
        if world.now - self._renewed < LEASE_FRESH_S:
            world.at(world.now + self.lag_s, gateway.renew_lease)

    def _deliver(self, cuts: list[Cut], offset_us: int) -> None:
        if self.alive:
            for cut in cuts:
                self.controller.add_cut(cut, self.world.unix_us, offset_us, False, self.world.now_ns)

    def _tick(self) -> None:
        self.world.at(self.world.now + TICK_S, self._tick)
        if not self.alive:
            return
        self._renewed = self.world.now
        for decision in self.controller.tick(self.world.now_ns, self.world.unix_us):
            self.log.append((self.world.now, decision))
            if isinstance(decision, SetCaps):
                gateway = self.gateways[decision.gateway_id]
                if not gateway.lost:
                    self._send(gateway, decision)

    def _send(self, gateway: SimGateway, decision: SetCaps) -> None:
        self.world.at(self.world.now + self.lag_s, lambda: gateway.apply(decision))
