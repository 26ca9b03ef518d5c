"""What applications do in a simulation: arrivals, and a record of what became of each.

Two kinds of application. *Open*: requests arrive when they arrive (a trace, a Poisson stream of a shape),
however slow the storage is; ``most`` bounds how many are outstanding at once, beyond that an arrival is left
out, as a client with so many threads would not have made it. *Closed*: ``depth`` requests are outstanding
all the time.

    steady   iops (or depth) throughout            ramp    from low_iops up to iops
    square   iops for ``duty`` of each period_s,   bursty  iops in bursts of on_s, low_iops between them for
             then low_iops                                 off_s (both exponential, mean)

Each load draws from a generator of its own, so that it is the same in every mode. Times are seconds of the
simulation. Changed only by the event loop of its world.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from pmdaemon.runtime.config import StrictModel
from pmdaemon.wire.names import NAME_RE
from sla_server.services.control.simulation import BACKEND, CLIENT, Io, SimGateway

Floats = npt.NDArray[np.float64]
NAME: Final = f"^{NAME_RE.pattern}$"
RETRY_S: Final = 0.01  # a closed client that pauses looks again
MOST_SPAN_S: Final = 7 * 86_400.0
"""Of a simulation, a week: an idle second costs a poll of each gateway, some 0.1 ms."""
LEAST_BURST_S: Final = 0.001


class Arrival(NamedTuple):
    """A request that an application makes."""

    at_s: float
    is_write: bool
    size_bytes: int


class Load(StrictModel):
    """One generated load, as ``simulation.yaml`` or ``--load`` describes it."""

    volume: str = Field(pattern=NAME)
    client: str = Field(default=CLIENT, pattern=NAME)
    gateway: str = Field(default="gateway-1", pattern=NAME)
    backend: str = Field(default=BACKEND, pattern=NAME)
    shape: Literal["steady", "ramp", "square", "bursty"] = "steady"
    iops: float = Field(default=0, ge=0, le=1_000_000)
    """Requests a second (open)."""
    low_iops: float = Field(default=0, ge=0, le=1_000_000)
    """At the foot of a ramp, between squares and bursts."""
    depth: int = Field(default=0, ge=0, le=4096)
    """Requests outstanding all the time (closed), instead of ``iops``."""
    from_s: float = Field(default=0, ge=0, le=MOST_SPAN_S)
    until_s: float | None = Field(default=None, gt=0, le=MOST_SPAN_S)
    period_s: float = Field(default=20, ge=LEAST_BURST_S, le=MOST_SPAN_S)
    duty: float = Field(default=0.5, gt=0, lt=1)
    on_s: float = Field(default=3, ge=LEAST_BURST_S, le=MOST_SPAN_S)
    off_s: float = Field(default=10, ge=LEAST_BURST_S, le=MOST_SPAN_S)
    kib: float = Field(default=4, gt=0, le=1 << 20)
    """Size of a request."""
    read_fraction: float = Field(default=1, ge=0, le=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Load:
        if bool(self.iops) == bool(self.depth):
            raise ValueError("give either iops (requests arrive) or depth (requests outstanding), above 0")
        if self.depth and self.low_iops:
            raise ValueError("low_iops goes with iops; a load with depth pauses instead")
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s {self.until_s:g} must be after from_s {self.from_s:g}")
        return self

    @property
    def size_bytes(self) -> int:
        """Of a request."""
        return max(round(self.kib * 1024), 1)


def strength(load: Load, ends_s: float, rng: random.Random) -> Callable[[float], float]:
    """How much of ``iops`` (or ``depth``) is on at a second, 0..1; of bursts the times are drawn now."""
    first, last, shape = load.from_s, min(load.until_s or ends_s, ends_s), load.shape
    low = load.low_iops / load.iops if load.iops else 0.0
    bursts = list(_bursts(load, last, rng)) if load.shape == "bursty" else []
    starts = [start for start, _ in bursts]

    def at(now: float) -> float:
        if not first <= now < last:
            return 0.0
        if shape == "steady":
            return 1.0
        if shape == "ramp":
            return low + (1 - low) * (now - first) / (last - first)
        if shape == "square":
            return 1.0 if (now - first) % load.period_s < load.duty * load.period_s else low
        if shape == "bursty":
            index = bisect_right(starts, now) - 1
            return 1.0 if index >= 0 and now < bursts[index][1] else low
        return 1.0

    return at


def _bursts(load: Load, last: float, rng: random.Random) -> Iterator[tuple[float, float]]:
    now = load.from_s
    while now < last:
        now += rng.expovariate(1 / load.off_s)
        end = now + rng.expovariate(1 / load.on_s)
        yield now, end
        now = end


def arrivals(load: Load, ends_s: float, rng: random.Random) -> Iterator[Arrival]:
    """The requests of an open load: a Poisson stream, thinned to its shape."""
    on, now, peak = strength(load, ends_s, rng), load.from_s, max(load.iops, load.low_iops)
    scale = load.iops / peak
    while True:
        now += rng.expovariate(peak)
        if now >= ends_s:
            return
        if (share := on(now) * scale) >= 1 or rng.random() < share:
            is_write = load.read_fraction < 1 and rng.random() >= load.read_fraction
            yield Arrival(now, is_write, load.size_bytes)


class IoLog:
    """What became of each request of one stream: arrival, latency, size, kind, error; in order of arrival."""

    def __init__(self) -> None:
        self.at, self.latency = array("d"), array("d")
        self.size, self.is_write, self.failed = array("q"), array("b"), array("b")
        self.held_back = 0
        """Requests that a throttle let wait, of those that were answered."""

    def begin(self, now: float, size_bytes: int, is_write: bool) -> int:
        """A request arrives; returns its number. Its latency is infinite until it is answered."""
        self.at.append(now)
        self.latency.append(float("inf"))
        self.size.append(size_bytes)
        self.is_write.append(is_write)
        self.failed.append(False)
        return len(self.at) - 1

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """``at``, ``latency`` (s), ``size`` (bytes), ``is_write``, ``failed``, each of shape (requests,)."""
        return {
            "at": np.array(self.at),
            "latency": np.array(self.latency),
            "size": np.array(self.size, dtype=np.int64),
            "is_write": np.array(self.is_write, dtype=bool),
            "failed": np.array(self.failed, dtype=bool),
        }


class Application:
    """One client of one volume; begins with ``replay`` or ``hold``."""

    def __init__(self, gateway: SimGateway, volume: str, client: str, log: IoLog, most: int = 0) -> None:
        self.gateway, self.volume, self.client, self.log = gateway, volume, client, log
        self.most = most
        """Requests outstanding at most, 0 for any number."""
        self.outstanding = self.left_out = 0
        self._world = gateway.world

    def replay(self, found: Iterable[Arrival]) -> None:
        """Open: make these requests at their times."""
        self._next(iter(found))

    def _next(self, found: Iterator[Arrival]) -> None:
        for arrival in found:

            def due(arrival: Arrival = arrival) -> None:
                if self.most and self.outstanding >= self.most:
                    self.left_out += 1
                else:
                    self._issue(arrival.is_write, arrival.size_bytes, None)
                self._next(found)

            self._world.at(max(arrival.at_s, self._world.now), due)
            return

    def hold(self, load: Load, ends_s: float, rng: random.Random) -> None:
        """Closed: keep ``depth`` requests outstanding while the load is on; a ramp adds one by one."""
        on, last = strength(load, ends_s, rng), min(load.until_s or ends_s, ends_s)
        first, depth, size_bytes, reads = load.from_s, load.depth, load.size_bytes, load.read_fraction

        def again(slot: int) -> None:
            now = self._world.now
            if now >= last:
                return
            if now < first or on(now) * depth <= slot:
                self._world.at(max(now + RETRY_S, first), partial(again, slot))
                return
            is_write = reads < 1 and rng.random() >= reads
            self._issue(is_write, size_bytes, partial(again, slot))

        for slot in range(load.depth):
            self._world.at(self._world.now, partial(again, slot))

    def _issue(self, is_write: bool, size_bytes: int, then: Callable[[], None] | None) -> None:
        now = self._world.now
        number = self.log.begin(now, size_bytes, is_write)
        self.outstanding += 1

        def done(end: float) -> None:
            self.outstanding -= 1
            self.log.latency[number], self.log.failed[number] = end - now, io.failed
            self.log.held_back += io.sent > io.arrived
            if then is not None:
                then()

        io = Io(self.volume, now, done, 0.0, self.client, size_bytes, is_write)
        self.gateway.submit(io)
