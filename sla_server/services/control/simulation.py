"""A small world in which the real controller runs: one shared disk, gateways, clients, and lag.

    clients --> SimGateway --(GCRA caps)--> SimBackend: one FIFO server, ``service_s`` a request
                   |  cut each poll interval (real ``Cut``: counters, histograms, missed, throttle_gen)
                   `------------------- lag -------------------> Controller.add_cut, tick every 250 ms
                   <------------------- lag ------------------- SetCaps

Deterministic: seeded generators, events in order of (time, number). Modelled, and therefore only as good
as the model: one FIFO server with constant service time, no clock skew; throttle wake-ups are rounded up to
1 ms as epoll rounds them. A gateway may be given a ``SimHost`` on which it has to wait for the processor. It
is used by tests and for tuning; it is never part of a running server.

Times are seconds inside, nanoseconds and microseconds at the controller's border.
"""

from __future__ import annotations

import heapq
import math
import random
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, IO_ANY, MISSED_DTYPE, Cut
from pmdaemon.wire.histogram import DELAY, SERVICE, TOTAL_READ, bucket_of_ns, coarse_bucket_of_ns
from pmdaemon.wire.names import stream_id
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import Decision, SetCaps

UNIX_0_US: Final = 1_800_000_000_000_000
IO_BYTES: Final = 4096
IO_COST: Final = 1 + IO_BYTES / 65_536
TAU_S: Final = 0.02  # bucket depth of the gateways' throttle
EPOLL_S: Final = 0.001


@dataclass(slots=True)
class Io:
    """One request: ``done`` is called with the time it completed."""

    volume: str
    arrived: float
    done: Callable[[float], None]
    sent: float = 0.0


class World:
    """The event loop and its clock, in seconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, action))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    @property
    def now_ns(self) -> int:
        """Monotonic clock of the controller; does not begin at 0."""
        return 1_000_000_000 + round(self.now * 1e9)

    @property
    def unix_us(self) -> int:
        """Wall clock of all."""
        return UNIX_0_US + round(self.now * 1e6)


class SimBackend:
    """One FIFO server shared by all gateways. ``service_s`` may be changed while it runs."""

    def __init__(self, world: World, service_s: float) -> None:
        self.world, self.service_s, self._free_at = world, service_s, 0.0

    def submit(self, done: Callable[[], None]) -> None:
        """Queue one request; ``done`` is called when it completes."""
        self._free_at = max(self._free_at, self.world.now) + self.service_s
        self.world.at(self._free_at, done)


class SimHost:
    """A processor that others want, too: while ``noisy(now)``, a process runs and is kept waiting by turns.

    Both take exponentially distributed times. A process that has nothing to do while it would be kept waiting
    notices nothing, as with the kernel's run delay.

    Args:
        seed: of this host's own generator.
        noisy: whether others want the processor at that second.
        runs_s: mean time until the process is kept waiting.
        waits_s: mean time that it is kept waiting.
    """

    def __init__(self, seed: int, noisy: Callable[[float], bool], runs_s: float, waits_s: float) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self.noisy, self.runs_s, self.waits_s = noisy, runs_s, waits_s
        self._start = self._end = self._noticed = 0.0
        self.starved = 0.0
        """Seconds in which it wanted to run and was kept waiting, since the last ``take``."""

    def runs_at(self, now: float) -> float:
        """When a process that is woken ``now`` runs; times never go back between two calls."""
        while self._end <= now:
            self._start = self._end + self.random.expovariate(1 / self.runs_s)
            length = self.random.expovariate(1 / self.waits_s) if self.noisy(self._start) else 0.0
            self._end = self._start + length
        if now < self._start:
            return now
        since = max(now, self._noticed)
        self.starved += self._end - since
        self._noticed = self._end
        return self._end

    def take(self) -> float:
        """Seconds starved since the last call."""
        taken, self.starved = self.starved, 0.0
        return taken


@dataclass(slots=True)
class _Account:
    """Counters of one volume at one gateway since the last cut, and for ever (``cum``)."""

    arrived: int = 0
    reads: int = 0
    lat: float = 0.0
    svc: float = 0.0
    delay: float = 0.0
    cum: int = 0
    hist: dict[int, int] = field(default_factory=dict)
    missed: dict[int, int] = field(default_factory=dict)

    def count(self, bucket: int) -> None:
        """One I/O more in a bucket of the wire's numbering."""
        self.hist[bucket] = self.hist.get(bucket, 0) + 1


@dataclass(slots=True)
class _Cap:
    rate: float
    tat: float = 0.0


class SimGateway:
    """A gateway: counts, holds back, cuts when polled, takes caps with a lag.

    Attributes:
        deaf: takes caps without enforcing them, as a broken enforcer would.
        lost: no session; I/O and caps go on, as the data plane's do.
        host: where it has to wait for the processor; None: never.
    """

    def __init__(
        self, world: World, name: str, backend: SimBackend, volumes: list[str], phase_s: float
    ) -> None:
        self.world, self.name, self.backend, self.volumes = world, name, backend, volumes
        self.gateway_id = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
        self.phase_s = phase_s
        self.deaf = self.lost = False
        self.host: SimHost | None = None
        self.thresholds: dict[str, list[int]] = {}
        self.accounts = {volume: _Account() for volume in volumes}
        self.held: dict[str, deque[Io]] = {volume: deque() for volume in volumes}
        self.inflight = dict.fromkeys(volumes, 0)
        self.caps: dict[str, _Cap] = {}
        self.gen = self.seq = 0
        self._gen_changed = False
        self._cut_at = 0.0
        self._wake: dict[str, bool] = dict.fromkeys(volumes, False)

    def streams(self) -> list[dict[str, Any]]:
        """As in message STREAMS."""
        return [
            {
                "id": stream_id(self.gateway_id, v, "client"),
                "volume": v,
                "client": "client",
                "backend": "disk",
            }
            for v in self.volumes
        ]

    def submit(self, io: Io) -> None:
        """A client's request arrives."""
        if self.host is not None and (runs := self.host.runs_at(self.world.now)) > self.world.now:
            self.world.at(runs, lambda: self._take(io))
        else:
            self._take(io)

    def _take(self, io: Io) -> None:
        io.arrived = self.world.now  # a gateway knows of a request from when it reads it
        self.accounts[io.volume].arrived += 1
        self.held[io.volume].append(io)
        self._admit(io.volume)

    def _admit(self, volume: str) -> None:
        queue, cap, now = self.held[volume], self.caps.get(volume), self.world.now
        while queue:
            if cap is not None and not self.deaf and cap.tat - TAU_S > now:
                if not self._wake[volume]:
                    self._wake[volume] = True
                    late = math.ceil((cap.tat - TAU_S - now) / EPOLL_S) * EPOLL_S
                    self.world.at(now + late, lambda: self._woken(volume))
                return
            if cap is not None:
                cap.tat = max(cap.tat, now) + IO_COST / cap.rate
            self._send(queue.popleft())

    def _woken(self, volume: str) -> None:
        self._wake[volume] = False
        self._admit(volume)

    def _send(self, io: Io) -> None:
        io.sent = self.world.now
        self.inflight[io.volume] += 1
        self.backend.submit(lambda: self._answered(io))

    def _answered(self, io: Io) -> None:
        if self.host is not None and (runs := self.host.runs_at(self.world.now)) > self.world.now:
            self.world.at(runs, lambda: self._complete(io))
        else:
            self._complete(io)

    def _complete(self, io: Io) -> None:
        now, account = self.world.now, self.accounts[io.volume]
        self.inflight[io.volume] -= 1
        account.reads += 1
        account.cum += 1
        total_ns, delay_ns = round((now - io.arrived) * 1e9), round((io.sent - io.arrived) * 1e9)
        account.lat += now - io.arrived
        account.svc += now - io.sent
        account.delay += io.sent - io.arrived
        account.count(TOTAL_READ + bucket_of_ns(total_ns))
        account.count(SERVICE + coarse_bucket_of_ns(total_ns - delay_ns))
        account.count(DELAY + coarse_bucket_of_ns(delay_ns))
        for threshold_us in self.thresholds.get(io.volume, ()):
            account.missed[threshold_us] = account.missed.get(threshold_us, 0) + (
                total_ns > threshold_us * 1000
            )
        io.done(now)

    def apply(self, decision: SetCaps) -> None:
        """Caps arrive: the complete set of this gateway."""
        wanted = {cap["volume"]: cap["cost_per_s"] for cap in decision.caps if cap["cost_per_s"] is not None}
        tats = {volume: cap.tat for volume, cap in self.caps.items()}
        self.caps = {volume: _Cap(rate, tats.get(volume, 0.0)) for volume, rate in wanted.items()}
        self.gen, self._gen_changed = decision.gen, True
        for volume in self.volumes:
            self._admit(volume)

    def expire_lease(self) -> None:
        """No renewal came for a lease: back to the static policy."""
        self.caps, self.gen, self._gen_changed = {}, 0, True
        for volume in self.volumes:
            self._admit(volume)

    def cut(self) -> Cut:
        """A poll arrived: everything since the last cut."""
        counters = np.zeros((len(COLUMNS), len(self.volumes)), dtype=np.int64)
        hist, missed = [], []
        for row, volume in enumerate(self.volumes):
            account = self.accounts[volume]
            values = {
                "stream_id": stream_id(self.gateway_id, volume, "client"),
                "arrived": account.arrived,
                "reads": account.reads,
                "read_bytes": account.reads * IO_BYTES,
                "lat_sum_us": round(account.lat * 1e6),
                "svc_sum_us": round(account.svc * 1e6),
                "delay_sum_us": round(account.delay * 1e6),
                "cost_milli": round(account.reads * IO_COST * 1000),
                "inflight": self.inflight[volume],
                "held": len(self.held[volume]),
                "cum_reads": account.cum,
                "cum_read_bytes": account.cum * IO_BYTES,
            }
            for name, value in values.items():
                counters[COL[name], row] = value
            hist += [(row, bucket, count) for bucket, count in sorted(account.hist.items())]
            missed += [(row, IO_ANY, t, account.reads, m) for t, m in sorted(account.missed.items())]
            self.accounts[volume] = _Account(cum=account.cum)
        self.seq += 1
        gen, start = (-1 if self._gen_changed else self.gen), self._cut_at
        self._gen_changed, self._cut_at = False, self.world.now
        return Cut(
            self.gateway_id,
            epoch=7,
            seq=self.seq,
            start_unix_us=UNIX_0_US + round(start * 1e6),
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
        bad = []
        for second in range(start, end):
            found = [latency for at, latency in self.completed if second <= at < second + 1]
            if sum(latency > threshold_s for latency in found) > allowed_ratio * len(found):
                bad.append(second)
        return bad


class Simulation:
    """Gateways and a controller, wired: polls, ticks, lag in both directions.

    Attributes:
        controller: may be replaced while it runs (a restarted services process).
        log: every decision with the second it was made.
    """

    def __init__(
        self, controller: Controller, seed: int, service_s: float = 0.002, lag_s: float = 0.01
    ) -> None:
        self.world = World(seed)
        self.backend = SimBackend(self.world, service_s)
        self.controller, self.lag_s = controller, lag_s
        self.gateways: dict[str, SimGateway] = {}
        self.log: list[tuple[float, Decision]] = []
        self._interval_s = controller.settings.poll_interval_s
        self._tick()

    def gateway(
        self,
        name: str,
        volumes: list[str],
        thresholds: dict[str, list[int]] | None = None,
        phase_s: float | None = None,
    ) -> SimGateway:
        """Add a gateway; its polls are out of phase with those before it unless ``phase_s`` says when."""
        if phase_s is None:
            phase_s = (0.37 * len(self.gateways)) % 1 * self._interval_s
        gateway = SimGateway(self.world, name, self.backend, volumes, phase_s)
        gateway.thresholds = thresholds or {}
        self.gateways[gateway.gateway_id] = gateway
        self.announce(gateway)
        self.world.at(self.world.now + phase_s + self._interval_s, lambda: self._poll(gateway))
        return gateway

    def announce(self, gateway: SimGateway) -> None:
        """What the pair posts when a session begins, or when the controller is new."""
        exports = [{"volume": volume, "backend": "disk"} for volume in gateway.volumes]
        self.controller.gateway_up(gateway.gateway_id, gateway.name, exports, self.world.now_ns)
        self.controller.add_streams(gateway.gateway_id, gateway.streams())

    def run(self, until: float) -> None:
        """Let time pass."""
        self.world.run(until)

    def of_kind(self, kind: str) -> list[tuple[float, Decision]]:
        """Logged events of one kind."""
        return [(at, d) for at, d in self.log if getattr(d, "kind", None) == kind]

    def _poll(self, gateway: SimGateway) -> None:
        self.world.at(self.world.now + self._interval_s, lambda: self._poll(gateway))
        if gateway.lost:
            return
        cut = gateway.cut()
        self.world.at(self.world.now + self.lag_s, lambda: self._deliver(cut))

    def _deliver(self, cut: Cut) -> None:
        self.controller.add_cut(cut, self.world.unix_us, 0, False, self.world.now_ns)

    def _tick(self) -> None:
        self.world.at(self.world.now + 0.25, self._tick)
        for decision in self.controller.tick(self.world.now_ns, self.world.unix_us):
            self.log.append((self.world.now, decision))
            if isinstance(decision, SetCaps):
                gateway = self.gateways[decision.gateway_id]
                if not gateway.lost:
                    self._send(gateway, decision)

    def _send(self, gateway: SimGateway, decision: SetCaps) -> None:
        self.world.at(self.world.now + self.lag_s, lambda: gateway.apply(decision))
