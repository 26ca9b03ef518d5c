"""The scenarios of ``sla`` on the simulator: the same loads and agreements, a model of the storage.

Each without control, under the best static cap found by bisection, observed and enforced. These are figures
of a model, the same on every machine: what they have in common with the real ones is the control code. Where
storage hangs or fails, it does so for ``FAULT_S`` after the first half: when every promise is shown as
broken, whether a cap gets lower meanwhile, and what the slices within that time say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from benchmarks.sla_scenarios import FAULT_S, Client, Scenario
from sla_server.agreements.document import Agreement
from sla_server.agreements.load import load_documents
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import BACKEND, CLIENT, Simulation
from sla_server.simulate.device import CostPoint, DeviceModel, Fault, QueueingDevice
from sla_server.simulate.figures import ModeFigures, figures_of
from sla_server.simulate.loads import Arrival, Load
from sla_server.simulate.run import Feed, GeneratedFeed, Plan, TraceFeed, run_mode
from sla_server.simulate.setup import Stream, contract_of
from tests.support.stage import DISK_AT_ONCE, DISK_MS

BLOCK_BYTES: Final = 4096
SETTLED_S: Final = 5
"""From the neighbours' first I/O to what is counted: the loop needs so long."""
STATIC_STEPS: Final = 5
SHORT_S: Final = 20.0
"""Of each step of the search."""
MOST_BAD: Final = {False: 0.03, True: 0.08}
NBDKIT_DEPTH: Final = 8
"""Of a connection, at an nbdkit that serves one request at a time: beside two busy ones p95 is 51 ms."""
DEVICES: Final = {
    "modelled": DeviceModel(servers=DISK_AT_ONCE, spread=0, read=[CostPoint(kib=4, ms=DISK_MS)]),
    "nbdkit": DeviceModel(servers=1, spread=0, read=[CostPoint(kib=4, ms=3.0)], client_depth=NBDKIT_DEPTH),
    "direct": DeviceModel(servers=1, spread=0.5, read=[CostPoint(kib=4, ms=2.5)]),
}
SLOWER: Final = 1.5


@dataclass(frozen=True)
class Simulated:
    """Figures of one scenario; rates are of all greedy neighbours together.

    Attributes:
        violation_ratio: worst victim's p95 over its promise without control.
        free_iops, static_iops, kept_iops: without control, under the best static cap, enforced.
        observe_changes: caps set while control only observed.
        bad_ratio: of the seconds of all victims under control, from ``SETTLED_S`` on.
        changes_per_min: direction changes of the cap that changed most within any minute.
        fault: what a hang, or I/Os that fail, led to; as of the real ones.
    """

    violation_ratio: float
    free_iops: float
    static_iops: float
    kept_iops: float
    observe_changes: int
    bad_ratio: float
    changes_per_min: int
    fault: dict[str, Any] = field(default_factory=dict)

    def text(self, scenario: Scenario) -> str:
        """In words of 80 columns."""
        kept = self.kept_iops / self.static_iops if self.static_iops else 0.0
        return (
            f"{scenario.name}, simulated: p95 {self.violation_ratio:.1f} of the promise without control; "
            f"{self.free_iops:.0f}/s\n"
            f"  enforced {self.bad_ratio:.1%} bad, neighbours {self.kept_iops:.0f}/s ({kept:.0%} of static), "
            f"{self.changes_per_min} turns/min"
        ) + (f"\n  {scenario.event}: {self.fault}" if self.fault else "")


def run(scenario: Scenario, seconds: float, agreements: str) -> Simulated:
    """One scenario; ``agreements``: its documents."""
    made = Runs(scenario, agreements)
    half_s = seconds / 2 if scenario.has_fault else seconds
    free = made.figures("off", half_s)
    free_iops = made.iops(free)
    observed = made.figures("observe", half_s)
    enforced = made.figures("enforce", half_s, made.become_slower(half_s / 2))
    victims = [p for p in free.promises if p.latency_ms is not None]
    worst_ms = max((p.latency_ms or 0.0 for p in victims), default=0.0)
    return Simulated(
        violation_ratio=worst_ms / scenario.promise_ms,
        free_iops=free_iops,
        static_iops=made.best_static_iops(free_iops),
        kept_iops=made.iops(enforced),
        observe_changes=sum(len(volume.caps) for volume in observed.users),
        bad_ratio=made.bad_ratio(enforced, half_s),
        changes_per_min=max((user.turns_a_minute for user in enforced.users), default=0),
        fault=made.fault(half_s) if scenario.has_fault else {},
    )


def fault_of(scenario: Scenario, from_s: float, agreements: str) -> dict[str, Any]:
    """What follows in a scenario when its storage hangs, or fails, from then on for ``FAULT_S``."""
    return Runs(scenario, agreements).fault(from_s)


class Runs:
    """Plans of one scenario, and what came of them."""

    def __init__(self, scenario: Scenario, agreements: str) -> None:
        self._scenario = scenario
        documents = [loaded.document for loaded in load_documents(agreements, 1)]
        self._contract = contract_of([each for each in documents if isinstance(each, Agreement)])
        self._greedy = {_name_of(client) for client in scenario.greedy}

    def plan(self, seconds: float) -> Plan:
        scenario = self._scenario
        return Plan(
            self._contract,
            [_feed(client, seconds) for client in (*scenario.victims, *scenario.greedy)],
            {BACKEND: DEVICES[scenario.backend]},
            [(0.0, seconds)],
            settings=ControlSettings(poll_interval_s=scenario.interval_s),
        )

    def figures(
        self, mode: str, seconds: float, disturb: Callable[[Simulation], None] | None = None
    ) -> ModeFigures:
        plan = self.plan(seconds)
        return figures_of(plan, run_mode(plan, mode, disturb), None)

    def fault(self, from_s: float) -> dict[str, Any]:
        """See ``fault_of``."""
        until_s = from_s + FAULT_S
        event = Fault.model_validate({"kind": self._scenario.event, "from_s": from_s, "until_s": until_s})
        plan = replace(self.plan(until_s), faults=[event])
        shown = list[float]()

        def look(sim: Simulation) -> None:
            states = sim.controller.promise_states(promise.key for promise in plan.contract.promises)
            if all(each["state"] == "violating" for each in states.values()):
                shown.append(sim.world.now)

        def disturb(sim: Simulation) -> None:
            for quarter in range(1, round(FAULT_S * 4)):
                sim.world.at(from_s + quarter / 4, partial(look, sim))

        run = run_mode(plan, "enforce", disturb)
        found, inside = (
            figures_of(replace(plan, spans=spans), run, None) for spans in (plan.spans, [(from_s, until_s)])
        )
        throttled = False
        for user in found.users:
            known = next((cap for at, cap in reversed(user.caps) if at <= from_s), None)
            caps = (cap for at, cap in user.caps if at > from_s and cap is not None)
            throttled |= any(known is None or cap < 0.9 * known for cap in caps)
        return {
            "shown_after_windows": (shown[0] - from_s) / self._scenario.interval_s if shown else None,
            "throttled": throttled,
            "slices": [promise.slices for promise in inside.promises],
        }

    def become_slower(self, at_s: float) -> Callable[[Simulation], None] | None:
        """What happens to the storage; None: nothing."""
        if self._scenario.event != "slower":
            return None
        model = DEVICES[self._scenario.backend]
        read = [CostPoint(kib=point.kib, ms=point.ms * SLOWER) for point in model.read]

        def disturb(sim: Simulation) -> None:
            slower = model.model_copy(update={"read": read})
            for device in sim.storage.values():
                assert isinstance(device, QueueingDevice)
                sim.world.at(at_s, partial(device.become, slower))

        return disturb

    def iops(self, found: ModeFigures) -> float:
        """Of all greedy neighbours."""
        return sum(user.iops for user in found.users if user.volume in self._greedy)

    def bad_ratio(self, found: ModeFigures, seconds: float) -> float:
        """Seconds in which some promise was broken, of those from ``SETTLED_S`` on."""
        bad = {second for promise in found.promises for second in promise.bad_at if second >= SETTLED_S}
        return len(bad) / max(seconds - SETTLED_S, 1)

    def best_static_iops(self, free_iops: float) -> float:
        """The neighbours' rate under the highest cap, the same for all, that keeps the promises."""
        lowest, highest, best = 0.0, free_iops, 0.0
        for _ in range(STATIC_STEPS):
            total = (lowest + highest) / 2
            found = self.figures("observe", SHORT_S, self._capped(total / len(self._scenario.greedy)))
            if self.bad_ratio(found, SHORT_S) <= MOST_BAD[self._scenario.is_bursty]:
                lowest, best = total, max(best, self.iops(found))
            else:
                highest = total
        return best

    def _capped(self, iops: float) -> Callable[[Simulation], None]:
        def disturb(sim: Simulation) -> None:
            for number, client in enumerate(self._scenario.greedy):
                volume, _, name = client.volume.partition("@")
                sim.controller.manual_set(f"static-{number}", volume, ops_per_s=iops, client=name)

        return disturb


def _name_of(client: Client) -> str:
    """As figures name it: a volume, or one client of it."""
    return client.volume.replace("@", "/")


def _feed(client: Client, seconds: float) -> Feed:
    volume, _, name = client.volume.partition("@")
    gaps_s = client.gaps_s()
    if gaps_s is not None:
        found: Sequence[Arrival] = list(
            itertools.takewhile(lambda each: each.at_s < seconds, _replayed(gaps_s))
        )
        return TraceFeed(Stream(volume, name or CLIENT, client.gateway), found)
    return GeneratedFeed(
        Load(
            volume=volume,
            client=name or CLIENT,
            gateway=client.gateway,
            iops=client.rate_iops,
            depth=client.depth,
            read_fraction=0.7,
        )
    )


def _replayed(gaps_s: Iterator[float]) -> Iterator[Arrival]:
    """7 of 10 are reads, as of the other loads."""
    at_s = 0.0
    for number, gap_s in enumerate(gaps_s):
        at_s += gap_s
        yield Arrival(at_s, number % 10 >= 7, BLOCK_BYTES)
