"""``make bench-control``: the control loop on the deterministic simulator, over seeds and settings.

World: one FIFO disk of 2 ms, gold 80 I/O/s (Poisson, p95 <= 12 ms) behind one gateway, greedy (depth 32)
behind another, polls of 1 s; 15 s observed, then 90 s enforced, or greedy under a fixed manual throttle. A
*bad second* has more than 5 % of its gold I/Os above 12 ms, the first 3 s not counted; *kept* is greedy's
rate against the same while only observed. These are figures of a model, the same on every machine. What is
timed is CPU: ``control_fleet`` says of what. ``lone_cut_cpu_us`` (no goal) is a cut of 16 streams with 4
promises and a tick for it alone, as with a single gateway; batches are what makes many cuts cheap.
Square bursts with caps ahead of them and without are another world: ``control_bursts``.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from benchmarks import control_bursts, control_clients, harness
from pmdaemon.wire.cut import Cut
from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import SetCaps
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import IO_COST, SimClient, SimGateway, Simulation

SEEDS: Final = range(16)
LIMIT_S: Final = 0.012
JOINS_S, ENFORCES_S, ENDS_S = 5, 15, 105
SETTLED_S: Final = 3
LOOPS: Final[Mapping[str, Mapping[str, float]]] = {
    "defaults": {},
    "no park_r": {"park_r": 100.0},
    "park_r 0.5": {"park_r": 0.5, "far_clear_r": 0.45},
    "park_r 0.55": {"park_r": 0.55, "far_clear_r": 0.45},
    "park_r 0.65": {"park_r": 0.65},
}
FIXED_RATIOS: Final = (0.76, 0.81, 0.86, 0.90)
STREAMS: Final = 16
PROMISES: Final = 4
CUTS: Final = 1_000


def promised(volume: str) -> Promise:
    """p95 <= 12 ms for one volume."""
    return Promise(
        sla=volume,
        version=1,
        objective="latency",
        priority=Priority.GOLD,
        volumes=(volume,),
        clients=("*",),
        io="any",
        percentile=95.0,
        curve=(CurveStep(math.inf, round(LIMIT_S * 1e6)),),
        target_ratio=0.995,
        slice_s=60,
        floor_iops=50.0,
        floor_bytes_per_s=0.0,
    )


def made_controller(mode: str, gold: tuple[str, ...] = ("gold",), **settings: Any) -> Controller:
    """A controller that protects the volumes of ``gold``."""
    controller = Controller(ControlSettings(**settings))
    controller.set_agreements(
        [promised(name) for name in gold], [VolumeClass(name, Priority.GOLD, (name,)) for name in gold]
    )
    controller.set_mode(mode)
    return controller


def one_world(seed: int, settings: Mapping[str, Any], greedy_iops: float = 0.0) -> dict[str, float]:
    """One seed: controlled by the loop, or by a fixed cap of ``greedy_iops`` from the same second on."""
    sim = Simulation(made_controller("observe", **settings), seed)
    front = sim.gateway("A", ["gold"], {"gold": [round(LIMIT_S * 1e6)]})
    back = sim.gateway("B", ["greedy"])
    gold = SimClient(front, "gold", rate=80)
    greedy = SimClient(back, "greedy", depth=32, active=lambda now: now >= JOINS_S)
    sim.run(ENFORCES_S)
    if greedy_iops:
        sim.controller.manual_set("fixed", "greedy", cost_per_s=greedy_iops * IO_COST)
    else:
        sim.controller.set_mode("enforce")
    sim.run(ENDS_S)
    free = greedy.rate_between(JOINS_S + 2, ENFORCES_S)
    bad = gold.bad_seconds(ENFORCES_S + SETTLED_S, ENDS_S, LIMIT_S)
    return {
        "bad_ratio": len(bad) / (ENDS_S - ENFORCES_S - SETTLED_S),
        "kept_20s": greedy.rate_between(ENFORCES_S, ENFORCES_S + 20) / free,
        "kept_90s": greedy.rate_between(ENFORCES_S, ENDS_S) / free,
        "changes": sum(isinstance(decision, SetCaps) for _, decision in sim.log),
        "free_iops": free,
    }


def over_seeds(settings: Mapping[str, float], greedy_iops: float = 0.0) -> dict[str, float]:
    """Means over all seeds, and the worst share of bad seconds."""
    worlds = [one_world(seed, settings, greedy_iops) for seed in SEEDS]
    means = {key: float(np.mean([world[key] for world in worlds])) for key in worlds[0]}
    return {**means, "worst_bad_ratio": max(world["bad_ratio"] for world in worlds)}


def recorded_cuts() -> tuple[SimGateway, list[Cut]]:
    """Cuts of one gateway with 16 busy streams, a second apart."""
    names = [f"v{number}" for number in range(STREAMS)]
    sim = Simulation(made_controller("observe"), 1)
    gateway = sim.gateway("A", names, {name: [round(LIMIT_S * 1e6)] for name in names[:PROMISES]})
    for name in names:
        SimClient(gateway, name, rate=20)
    cuts: list[Cut] = []
    sim.controller.add_cut = lambda cut, *_rest: cuts.append(cut)  # type: ignore[method-assign]
    sim.run(CUTS)
    return gateway, cuts


def lone_cut_cpu_us() -> float:
    """CPU microseconds of a controller for each cut of ``recorded_cuts``, with the ticks between them."""
    gateway, cuts = recorded_cuts()
    controller = made_controller("enforce", tuple(f"v{number}" for number in range(PROMISES)))
    sim = Simulation(controller, 1)
    sim.announce(gateway)
    started_ns = time.process_time_ns()
    for number, cut in enumerate(cuts):
        now_ns, unix_us = 1_000_000_000 * (number + 2), cut.start_unix_us + cut.duration_us
        controller.add_cut(cut, unix_us, 0, False, now_ns)
        controller.tick(now_ns, unix_us)
    return (time.process_time_ns() - started_ns) / len(cuts) / 1e3


def fleet() -> dict[str, float]:
    """The figures of ``control_fleet``, in a process of their own: memory is one of them."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.control_fleet"], capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def measure() -> harness.Sample:
    """All loops and fixed rates, and the controller's own cost; prints the table of docs/adr/0002."""
    loops = {name: over_seeds(settings) for name, settings in LOOPS.items()}
    free_iops = loops["defaults"]["free_iops"]
    fixed = {f"{ratio:.0%} fixed": over_seeds({}, ratio * free_iops) for ratio in FIXED_RATIOS}
    print(f"{'loop':<14} {'bad':>7} {'worst':>7} {'kept 20 s':>10} {'kept 90 s':>10} {'changes':>8}")
    for name, found in {**loops, **fixed}.items():
        print(
            f"{name:<14} {found['bad_ratio']:>7.1%} {found['worst_bad_ratio']:>7.1%}"
            f" {found['kept_20s']:>10.0%} {found['kept_90s']:>10.0%} {found['changes']:>8.1f}"
        )
    burst_values, bursts = control_bursts.measure()
    defaults = loops["defaults"]
    values: dict[str, float] = {
        "bad_ratio": defaults["bad_ratio"],
        "worst_bad_ratio": defaults["worst_bad_ratio"],
        "kept_20s": defaults["kept_20s"],
        "kept_90s": defaults["kept_90s"],
        **burst_values,
        "lone_cut_cpu_us": lone_cut_cpu_us(),
        **control_clients.figures(),
        **fleet(),
    }
    for name, value in values.items():
        print(f"{name:<20} {value:>12.4g}")
    raw: dict[str, Any] = {
        "loops": loops,
        "fixed": fixed,
        "bursts": bursts,
        "seeds": len(SEEDS),
        "values": values,
    }
    return harness.Sample(values, raw=raw)


if __name__ == "__main__":
    harness.main("control", measure)
