"""The storage of a simulation: parallel servers, and what a request costs them by kind and size.

    service time = curve(kind, size) * ((1 - spread) + spread * Exp(1))

A curve is a list of points (KiB, ms), straight between them and level beyond; the mean does not depend on
``spread``. Requests are served in order of arrival by the first of ``servers`` that is free. With
``client_depth`` a client has so many at the device, and what it sends beyond waits before it, as behind the
threads that an NBD server has for a connection: others do not wait for that. What this leaves out: seeks,
caches, reordering, garbage collection. Seeded; changed only by the event loop of its world.

A ``Fault`` is a time in which the storage hangs (it serves nothing, and goes on afterwards where it stopped)
or fails (each request that ends in it has an error, after the time it would have taken).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from pmdaemon.runtime.config import StrictModel
from pmdaemon.wire.names import NAME_RE
from sla_server.services.control.simulation import BACKEND, Io, World


class CostPoint(StrictModel):
    """Mean service time of a request of this size."""

    kib: float = Field(gt=0, le=1 << 20)
    ms: float = Field(gt=0, le=60_000)


class Fault(StrictModel):
    """A time in which a backend does not serve, as ``simulation.yaml`` or ``--fault`` describes it."""

    backend: str = Field(default=BACKEND, pattern=f"^{NAME_RE.pattern}$")
    kind: Literal["hangs", "fails"]
    from_s: float = Field(ge=0)
    until_s: float | None = Field(default=None, gt=0)
    """When it serves again; absent: never."""

    @model_validator(mode="after")
    def _lasts(self) -> Fault:
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s {self.until_s:g} must be after from_s {self.from_s:g}")
        return self

    @property
    def ends_s(self) -> float:
        """Infinite if it does not end."""
        return math.inf if self.until_s is None else self.until_s

    @property
    def text(self) -> str:
        """For people, in one line."""
        end = "until the end" if self.until_s is None else f"until {self.until_s:g} s"
        return f"backend {self.backend} {self.kind} from {self.from_s:g} s {end}"


class DeviceModel(StrictModel):
    """One backend, as ``simulation.yaml`` or ``--device`` describes it."""

    servers: int = Field(default=1, ge=1, le=4096)
    """Requests served at the same time."""
    spread: float = Field(default=0.5, ge=0, le=1)
    """Share of the service time that is random (exponential): 0 constant, 1 a queue of the textbook."""
    read: list[CostPoint] = Field(default_factory=lambda: [CostPoint(kib=4, ms=2.0)], min_length=1)
    """Mean service time of reads by size."""
    write: list[CostPoint] | None = None
    """The same of writes; as reads when absent."""
    client_depth: int | None = Field(default=None, ge=1, le=4096)
    """Requests of one client, of one volume, that are at the device at a time; absent: all of them."""

    @model_validator(mode="after")
    def _rising(self) -> DeviceModel:
        for curve in (self.read, self.write or []):
            sizes = [point.kib for point in curve]
            if sizes != sorted(set(sizes)):
                raise ValueError("the sizes (kib) of a cost curve must rise from point to point")
        return self

    def mean_s(self, size_bytes: float, is_write: bool) -> float:
        """Mean service time of one request."""
        return _at((self.write or self.read) if is_write else self.read, size_bytes / 1024) / 1e3

    @property
    def text(self) -> str:
        """For people, in one line."""
        servers = "1 server" if self.servers == 1 else f"{self.servers} servers"
        parts = [f"read {_described(self.read)}"]
        parts += [f"write {_described(self.write)}"] if self.write else []
        parts += [f"{self.client_depth} of each client at a time"] if self.client_depth else []
        return f"{servers}, {', '.join(parts)}"


def _described(curve: Sequence[CostPoint]) -> str:
    return " - ".join(f"{point.ms:.3g} ms at {point.kib:g} KiB" for point in curve)


def _at(curve: Sequence[CostPoint], kib: float) -> float:
    index = bisect_left([point.kib for point in curve], kib)
    if index == 0:
        return curve[0].ms
    if index == len(curve):
        return curve[-1].ms
    low, high = curve[index - 1], curve[index]
    return low.ms + (high.ms - low.ms) * (kib - low.kib) / (high.kib - low.kib)


class QueueingDevice:
    """A device at work in a world; see the module. Two of one seed and model give equal service times."""

    def __init__(self, world: World, model: DeviceModel, seed: int, faults: Sequence[Fault] = ()) -> None:
        """``faults``: of this backend."""
        self._world, self._model = world, model
        self._hangs = sorted((f.from_s, f.ends_s) for f in faults if f.kind == "hangs")
        self._fails = [(f.from_s, f.ends_s) for f in faults if f.kind == "fails"]
        self._random = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self._free_at = [0.0] * model.servers
        self._means: dict[tuple[int, bool], float] = {}
        self._there: dict[tuple[str, str], int] = {}  # by volume and client, with client_depth alone
        self._waiting: dict[tuple[str, str], deque[tuple[Io, Callable[[], None]]]] = {}
        self.busy_s = 0.0
        """Service time of all requests so far."""

    def become(self, model: DeviceModel) -> None:
        """Serve as this one from now on, with as many servers as before."""
        self._model = model
        self._means.clear()

    def submit(self, io: Io, done: Callable[[], None]) -> None:
        """Queue one request; ``done`` is called when it completes."""
        if self._model.client_depth is None:
            self._serve(io, done)
            return
        whose = io.volume, io.client
        if self._there.get(whose, 0) >= self._model.client_depth:
            self._waiting.setdefault(whose, deque()).append((io, done))
            return
        self._there[whose] = self._there.get(whose, 0) + 1
        self._serve(io, partial(self._left, whose, done))

    def _left(self, whose: tuple[str, str], done: Callable[[], None]) -> None:
        """One of a client was served: the next one of its own takes its place."""
        waiting = self._waiting.get(whose)
        if waiting:
            io, then = waiting.popleft()
            self._serve(io, partial(self._left, whose, then))
        else:
            self._there[whose] -= 1
        done()

    def _serve(self, io: Io, done: Callable[[], None]) -> None:
        size = io.size_bytes, io.is_write
        mean = self._means.get(size)
        if mean is None:
            mean = self._means[size] = self._model.mean_s(*size)
        spread = self._model.spread
        service = mean * (1 - spread - spread * math.log(1 - self._random.random())) if spread else mean
        self.busy_s += service
        end = self._ends(max(self._free_at[0], self._world.now), service)
        heapq.heapreplace(self._free_at, end)
        io.failed = any(first <= end < last for first, last in self._fails)
        if end < math.inf:
            self._world.at(end, done)

    def _ends(self, start: float, service: float) -> float:
        """When a request ends that is served from ``start`` on, hangs left out."""
        for first, last in self._hangs:
            if last <= start:
                continue
            if start + service <= first:
                break
            service -= max(first - start, 0.0)
            start = last
        return start + service
