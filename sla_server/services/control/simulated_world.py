"""Clock, storage and hosts of the simulator: what its gateways (``simulation``) run on.

Deterministic: a seeded generator, events in order of (time, number). Modelled, and therefore only as good as
the model: storage serves in order of arrival. Times are seconds inside, nanoseconds and microseconds at the
controller's border. Never part of a running server.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

UNIX_0_US: Final = 1_800_000_000_000_000
IO_BYTES: Final = 4096
CLIENT: Final = "client"


@dataclass(slots=True)
class Io:
    """One request: ``done`` is called with the time it completed; ``failed``: with an error."""

    volume: str
    arrived: float
    done: Callable[[float], None]
    sent: float = 0.0
    client: str = CLIENT
    size_bytes: int = IO_BYTES
    is_write: bool = False
    failed: bool = False


class SimStorage(Protocol):
    """What serves the requests of a backend."""

    def submit(self, io: Io, done: Callable[[], None]) -> None:
        """Queue one request; ``done`` is called when it completes."""


class World:
    """The event loop and its clock, in seconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self.now = 0.0
        self.step_us = 0
        """How far the server's wall clock was set forward (or back) since the start."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, action))

    def run(self, until: float) -> None:
        """Let time pass."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, action = pop(queue)
            action()
        self.now = until

    @property
    def now_ns(self) -> int:
        """Monotonic clock of the controller; does not begin at 0."""
        return 1_000_000_000 + round(self.now * 1e9)

    @property
    def unix_us(self) -> int:
        """The server's wall clock."""
        return UNIX_0_US + self.step_us + round(self.now * 1e6)


class SimBackend:
    """One FIFO server shared by all gateways. ``service_s`` may be changed while it runs."""

    def __init__(self, world: World, service_s: float) -> None:
        self.world, self.service_s, self._free_at = world, service_s, 0.0

    def submit(self, _io: Io, done: Callable[[], None]) -> None:
        """See ``SimStorage``."""
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
