"""Worlds of bursts on the simulator: a promise kept beside a neighbour that bursts.

The disk serves 200 I/Os a second in order of arrival; gold does 25 (p95 <= 40 ms), greedy keeps 24 requests
outstanding in bursts of 12 s. Bins of 2 s, so that a pattern of 40 s is known after four of them. *Bad*:
seconds in which more than 5 % of gold's I/Os took too long, of a burst and 8 s more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sla_server.services.control.decisions import RecordDecision
from sla_server.services.control.simulation import Io, SimClient, SimGateway, Simulation
from tests.support.worlds import controller, promise

LIMIT_S = 0.040
BURST_S = 12.0
PERIOD_S = 40.0
DEPTH = 24


@dataclass
class Result:
    """What came of it.

    Attributes:
        bad: bad seconds of each burst, in order.
        ahead: whether C was set before it.
        kept: I/Os of greedy.
        allowed: C of each time that it was set ahead, in weighted IOPS.
    """

    bad: list[int]
    ahead: list[bool]
    figures: dict[str, int]
    set_at: list[float]
    kept: int
    allowed: list[float]

    def bad_of(self, is_ahead: bool) -> float:
        found = [bad for bad, ahead in zip(self.bad, self.ahead, strict=True) if ahead is is_ahead]
        return sum(found) / len(found)


class Bursts:
    """Keeps ``DEPTH`` requests outstanding for ``BURST_S`` from each onset on."""

    def __init__(self, gateway: SimGateway, onsets: Sequence[float]) -> None:
        self._gateway, self._world = gateway, gateway.world
        for at in onsets:
            for _ in range(DEPTH):
                self._world.at(at, partial(self._again, at + BURST_S))

    def _again(self, end: float, _now: float = 0.0) -> None:
        if self._world.now < end:
            self._gateway.submit(Io("greedy", self._world.now, partial(self._again, end)))


def run(
    onsets: Sequence[float],
    until: float,
    *,
    seed: int = 1,
    enabled: bool = True,
    faster_at: float | None = None,
    service_s: Sequence[tuple[float, float]] = (),
) -> Result:
    """A run of so many seconds; from ``faster_at`` on the disk is five times as fast.

    ``service_s``: (from when on, how long the disk takes for an I/O).
    """
    own = {"bin_s": 2.0, "backoff_s": 300.0, "enabled": enabled}
    made = controller([promise(ms=1000 * LIMIT_S)], demand_memory_s=5.0, feed_forward=own)
    sim = Simulation(made, seed, service_s=0.005)
    front = sim.gateway("A", ["gold"], {"gold": [round(LIMIT_S * 1e6)]})
    back = sim.gateway("B", ["greedy"])
    gold = SimClient(front, "gold", rate=25)
    Bursts(back, onsets)
    if faster_at is not None:
        service_s = (*service_s, (faster_at, 0.001))
    for at, takes_s in service_s:
        sim.world.at(at, partial(setattr, sim.backend, "service_s", takes_s))
    sim.run(until)
    kept = sum(account.cum_reads for account in back.accounts.values())
    rows = [(at, d.row) for at, d in sim.log if isinstance(d, RecordDecision)]
    ready = [(at, row["figures"]["c_after"]) for at, row in rows if row["kind"] == "pre-position"]
    set_at = [at for at, _ in ready]
    seen = [at for at in onsets if at + BURST_S + 8 <= until]
    bad = [len(gold.bad_seconds(int(at), int(at + BURST_S + 8), LIMIT_S)) for at in seen]
    ahead = [any(at - 8 <= each <= at + 1 for each in set_at) for at in seen]
    return Result(bad, ahead, made.loops.forward.figures(), set_at, kept, [c for _, c in ready])


def square(bursts: int) -> list[float]:
    return [10.0 + PERIOD_S * n for n in range(bursts)]
