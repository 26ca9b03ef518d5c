"""Lets a plan run in one mode: builds the world, feeds it, and keeps what happened.

    off       no controller: what happens if nothing is done
    observe   the controller decides what it would do first, and acts for agreements that say enforce alone
    enforce   it acts, but for agreements that say observe

A plan has one or more spans of time; each is a world of its own that begins idle, with a controller that
knows nothing. Loads, devices and phases of polls depend on the seed alone, so that modes differ by what
control did.

Deterministic and pure. Nothing outlives a call but what it returns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

from pmdaemon.wire.cut import IO_KINDS
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import Decision, SetCaps
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import UNIX_0_US, Simulation, World
from sla_server.simulate.device import DeviceModel, Fault, QueueingDevice
from sla_server.simulate.loads import Application, Arrival, IoLog, Load, arrivals
from sla_server.simulate.setup import HOURS_A_WEEK, Contract, Stream

MODES: Final = ("off", "observe", "enforce")
MINUTE_US: Final = 60_000_000
HOUR_US: Final = 3_600_000_000
THURSDAY_HOURS: Final = 72  # 1970-01-01 was a Thursday; weeks begin on Monday


class Feed(Protocol):
    """What one application does."""

    @property
    def stream(self) -> Stream:
        """Whose requests they are."""

    def begin(self, application: Application, span: tuple[float, float], rng: random.Random) -> None:
        """Feed it from the first to the last second of the span."""


@dataclass(frozen=True)
class GeneratedFeed:
    """A load of a shape."""

    load: Load

    @property
    def stream(self) -> Stream:
        """Whose load it is."""
        load = self.load
        return Stream(load.volume, load.client, load.gateway, load.backend)

    def begin(self, application: Application, span: tuple[float, float], rng: random.Random) -> None:
        """See ``Feed``."""
        if self.load.depth:
            application.hold(self.load, span[1], rng)
        else:
            found = arrivals(self.load, span[1], rng)
            application.replay(arrival for arrival in found if arrival.at_s >= span[0])


@dataclass(frozen=True)
class TraceFeed:
    """Recorded requests."""

    stream: Stream
    found: Sequence[Arrival]

    def begin(self, application: Application, span: tuple[float, float], rng: random.Random) -> None:
        """See ``Feed``."""
        application.replay(arrival for arrival in self.found if span[0] <= arrival.at_s < span[1])


@dataclass(frozen=True)
class Plan:
    """What to simulate.

    Attributes:
        feeds: what applications do.
        devices: backend to its device.
        spans: (first, last) seconds, in order; several: each begins idle.
        start_unix_us: wall clock at second 0.
        budget_left: share of each error budget that is left, which is what urgency follows.
        policy: hour of the week to volume to cost rate.
        bursts: the same to the seconds of it that may pass at once, where that is not the default.
        lag_s: how long a cut and a SET_CAPS are under way.
        faults: times in which backends hang or fail.
        title: where the loads come from, for people.
        notes: what the reader of the result must know.
    """

    contract: Contract
    feeds: Sequence[Feed]
    devices: Mapping[str, DeviceModel]
    spans: Sequence[tuple[float, float]]
    seed: int = 1
    settings: ControlSettings = field(default_factory=ControlSettings)
    lag_s: float = 0.01
    start_unix_us: int = UNIX_0_US
    budget_left: float = 1.0
    policy: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    bursts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Of all spans."""
        return sum(last - first for first, last in self.spans)

    @property
    def streams(self) -> list[Stream]:
        """All streams, each once."""
        return list(dict.fromkeys(feed.stream for feed in self.feeds))


@dataclass
class ModeRun:
    """What happened in one mode.

    Attributes:
        logs: requests of each stream.
        decisions: with the second of each.
        volumes_of: gateway_id to its volumes.
        left_out: requests that a client with all its requests outstanding did not make.
    """

    mode: str
    logs: dict[Stream, IoLog]
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    volumes_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: int = 0

    @cached_property
    def carriers(self) -> Mapping[str, Sequence[str]]:
        """Volume to the gateway_ids that carry it; once the mode has run."""
        found: dict[str, list[str]] = {}
        for gateway_id, volumes in self.volumes_of.items():
            for volume in volumes:
                found.setdefault(volume, []).append(gateway_id)
        return found

    @cached_property
    def sent(self) -> Mapping[str, Sequence[tuple[int, float, SetCaps]]]:
        """gateway_id to its caps, each with its place among all decisions and its second; likewise."""
        found: dict[str, list[tuple[int, float, SetCaps]]] = {}
        for number, (at, decision) in enumerate(self.decisions):
            if isinstance(decision, SetCaps):
                found.setdefault(decision.gateway_id, []).append((number, at, decision))
        return found


def hour_of_week(unix_us: int) -> int:
    """0 is Monday 00 UTC."""
    return (unix_us // HOUR_US + THURSDAY_HOURS) % HOURS_A_WEEK


def run_mode(plan: Plan, mode: str, disturb: Callable[[Simulation], None] | None = None) -> ModeRun:
    """Let all spans of a plan run.

    Args:
        plan: what.
        mode: "off", "observe" or "enforce".
        disturb: called with each world before it runs, to schedule what goes wrong in it.
    """
    result = ModeRun(mode, {stream: IoLog() for stream in plan.streams})
    for span in plan.spans:
        _run_span(plan, mode, span, result, disturb)
    return result


def made_controller(plan: Plan, mode: str) -> Controller:
    """A controller that knows the plan's agreements and nothing else."""
    controller = Controller(plan.settings)
    controller.set_agreements(plan.contract.promises, plan.contract.classes)
    controller.set_agreement_modes(plan.contract.modes)
    controller.set_mode("enforce" if mode == "enforce" else "observe")
    for promise in plan.contract.promises:
        controller.set_budget(promise.key, 0.0, plan.budget_left)
    return controller


def _run_span(
    plan: Plan,
    mode: str,
    span: tuple[float, float],
    result: ModeRun,
    disturb: Callable[[Simulation], None] | None,
) -> None:
    world = World(plan.seed)
    world.now, world.step_us = span[0], plan.start_unix_us - UNIX_0_US
    devices = {
        name: QueueingDevice(
            world,
            plan.devices[name],
            plan.seed + n,
            [fault for fault in plan.faults if fault.backend == name],
        )
        for n, name in _numbered(plan)
    }
    controller = made_controller(plan, mode)
    sim = Simulation(controller, plan.seed, lag_s=plan.lag_s, world=world, storage=dict(devices))
    if plan.contract.excusable:
        _follow_promises(plan, sim)
    if mode == "off":
        sim.kill()
    elif plan.policy:
        _follow_policy(plan, sim)
    applications = _applications(plan, sim, result)
    for number, (feed, application) in enumerate(zip(plan.feeds, applications, strict=True)):
        text = f"{plan.seed}/{number}/{feed.stream.volume}/{feed.stream.client}"
        feed.begin(application, span, random.Random(text))  # noqa: S311 - a simulation, not a secret
    if disturb is not None:
        disturb(sim)
    sim.run(span[1])
    result.decisions += sim.log
    result.left_out += sum(application.left_out for application in applications)


def _numbered(plan: Plan) -> Iterable[tuple[int, str]]:
    return enumerate(sorted({stream.backend for stream in plan.streams}))


def _applications(plan: Plan, sim: Simulation, result: ModeRun) -> list[Application]:
    """Gateways with what they carry and count, and an application for each feed."""
    by_gateway: dict[str, list[Stream]] = {}
    for stream in plan.streams:
        by_gateway.setdefault(stream.gateway, []).append(stream)
    gateways = {}
    for name, streams in by_gateway.items():
        volumes = list(dict.fromkeys(stream.volume for stream in streams))
        clients: dict[str, list[str]] = {}
        for stream in streams:
            clients.setdefault(stream.volume, []).append(stream.client)
        backends = {stream.volume: stream.backend for stream in streams}
        gateway = sim.gateway(name, volumes, clients=clients, backends=backends)
        gateway.step_us = sim.world.step_us
        for volume in volumes:
            gateway.thresholds[volume] = sorted(
                {
                    (IO_KINDS[promise.io], step.threshold_us)
                    for promise in plan.contract.promises
                    if promise.metric == "latency"  # gateways compare for no other indicator
                    and any(promise.covers(volume, client) for client in clients[volume])
                    for step in promise.curve
                }
            )
        gateways[name] = gateway
        result.volumes_of[gateway.gateway_id] = tuple(volumes)
    return [
        Application(
            gateways[feed.stream.gateway],
            feed.stream.volume,
            feed.stream.client,
            result.logs[feed.stream],
        )
        for feed in plan.feeds
    ]


def _follow_promises(plan: Plan, sim: Simulation) -> None:
    """What is excused, now and every minute: the controller protects no promise that does not hold."""
    sim.controller.set_excluded(plan.contract.excused_at(sim.world.unix_us))
    left_s = (MINUTE_US - sim.world.unix_us % MINUTE_US) / 1e6
    sim.world.at(sim.world.now + left_s, lambda: _follow_promises(plan, sim))


def _follow_policy(plan: Plan, sim: Simulation) -> None:
    """The caps of the hour, now and whenever an hour begins."""
    hour = hour_of_week(sim.world.unix_us)
    sim.controller.set_policy_caps(1, plan.policy.get(hour, {}), plan.bursts.get(hour, {}))
    next_us = (sim.world.unix_us // HOUR_US + 1) * HOUR_US
    sim.controller.set_coming_caps(plan.policy.get(hour_of_week(next_us), {}), next_us)
    left_s = (HOUR_US - sim.world.unix_us % HOUR_US) / 1e6
    sim.world.at(sim.world.now + left_s, lambda: _follow_policy(plan, sim))
