"""What the loop of one backend is shown step by step: a victim, its neighbours, and times in nanoseconds."""

from __future__ import annotations

from sla_server.agreements.promise import Priority
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.loop_step import LoopStep
from sla_server.services.control.sharing import Neighbour
from sla_server.services.control.throttle import LoopMemory
from sla_server.services.control.verdicts import NOTHING, Signal
from sla_server.services.control.victims import Need, Victim

S = 1_000_000_000


def victim(need=Need.AT_RISK, r=2.0, u=5.0, priority=Priority.GOLD, g=0.0, name="gold") -> Victim:
    signal = Signal(3, 80.0, 12_000, u, r, r * 12_000, 3, 3, False, at_risk=need is Need.AT_RISK, r_step=r)
    signal = NOTHING if need is Need.UNKNOWN else signal
    return Victim((name, "latency"), priority, g, need, signal, frozenset((name,)))


def clear(r=0.3, u=0.0, **over) -> Victim:
    return victim(Need.CLEAR, r=r, u=u, **over)


def neighbour(
    volume="greedy", cost=400.0, priority=Priority.BEST_EFFORT, queueing=False, **over
) -> Neighbour:
    """It uses what it used at most recently, unless ``peak`` is given."""
    return Neighbour(volume, priority, cost, over.pop("peak", cost), 53.0, queueing, **over)


def world(*found: Neighbour) -> dict[str, Neighbour]:
    return {n.volume: n for n in (neighbour("gold", 85.0, Priority.GOLD), *found)}


BUSY = world(neighbour(cost=245.0, queueing=True))


def start(control: BackendControl, r=2.0, now=100 * S) -> LoopStep:
    """Its first cut: a neighbour of 400 is slowed down."""
    return control.step([victim(r=r)], world(neighbour()), now)


def settled(control: BackendControl, found: dict[str, Neighbour], at_risk: Victim | None = None) -> LoopStep:
    """The step ten seconds after the first look at a victim whom nobody harms visibly."""
    assert control.step([at_risk or victim()], found, 0).notice == ""
    return control.step([at_risk or victim()], found, 10 * S)


def ahead(control: BackendControl, now: int = 0) -> None:
    """C of 250 before a burst of the neighbour."""
    control.pre_position({"greedy": neighbour(cost=10.0)}, clear(), [("gold", "latency")], 250.0,
                         LoopMemory(400.0, 300.0), 8.0, now)  # fmt: skip


def resting(control: BackendControl) -> int:
    """Attempts without effect until it rests; the second."""
    found, second = world(neighbour(cost=4000.0)), 100
    while not control.quiet_until_ns:
        control.step([victim(r=3.0)], found, second * S)
        second += 3
    return second
