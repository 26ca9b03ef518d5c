"""Bounds of the loop on the simulator: loads of every shape, slow links, and what fails in the middle.

Everywhere: a cap changes direction at most four times within a minute and is never below a floor; the
neighbour keeps a share of what the storage can give it; the promise is broken for a bounded time. The world is
one FIFO disk of 500 IOPS, gold (80 IOPS, p95 <= 12 ms) and a neighbour that takes what it can get, from second
5. Bounds were set over sixteen seeds (benchmarks of the author, not run here); each world below is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from sla_server.agreements.promise import Promise, VolumeClass
from sla_server.services.control.decisions import SetCaps
from sla_server.services.control.simulation import SimGateway, Simulation
from sla_server.simulate.device import DeviceModel
from sla_server.simulate.figures import ModeFigures, VolumeFigures, figures_of
from sla_server.simulate.loads import Load
from sla_server.simulate.run import GeneratedFeed, ModeRun, Plan, made_controller, run_mode
from sla_server.simulate.setup import Contract
from tests.support.worlds import promise, volume_class

MOST_TURNS = 4
GOLD = Load(volume="gold", iops=80, gateway="A")
DEVICE = DeviceModel(spread=0)
FREE_IOPS = 420  # of the neighbour beside gold without control


def greedy(**over) -> Load:
    values = {"volume": "greedy", "gateway": "B", "from_s": 5, **over}
    if "iops" not in values:
        values.setdefault("depth", 32)
    return Load(**values)


def plan(
    loads: Sequence[Load],
    length_s: float,
    *,
    seed: int = 1,
    promises: Sequence[Promise] = (promise(),),
    classes: Sequence[VolumeClass] = (volume_class(),),
    lag_s: float = 0.01,
) -> Plan:
    contract = Contract(promises, classes)
    feeds = [GeneratedFeed(load) for load in loads]
    return Plan(contract, feeds, {"disk": DEVICE}, [(0.0, length_s)], seed=seed, lag_s=lag_s)


def enforced(
    made: Plan, disturb: Callable[[Simulation], None] | None = None
) -> tuple[ModeRun, ModeFigures, list[VolumeFigures]]:
    """What came of it, and the volumes that were capped; holds the bounds that hold everywhere."""
    run = run_mode(made, "enforce", disturb)
    figures = figures_of(made, run, None)
    capped = [volume for volume in figures.volumes if volume.caps]
    for volume in capped:
        assert volume.turns_a_minute <= MOST_TURNS
        assert volume.least_cost >= volume.floor_cost * 0.99
    return run, figures, capped


def bad_seconds(made: Plan, run: ModeRun, first: float, last: float) -> int:
    """Bad seconds of all promises within [first, last)."""
    part = Plan(made.contract, made.feeds, made.devices, [(first, last)])
    logs = {stream: log for stream, log in run.logs.items()}
    for stream, log in logs.items():
        keep = [first <= at < last for at in log.at]
        chosen = type(log)()
        for name in ("at", "latency", "size", "is_write"):
            values = getattr(log, name)
            getattr(chosen, name).extend(v for v, kept in zip(values, keep, strict=True) if kept)
        logs[stream] = chosen
    return sum(p.bad_s for p in figures_of(part, ModeRun("enforce", logs), None).promises)


def gateway(sim: Simulation, name: str) -> SimGateway:
    return next(found for found in sim.gateways.values() if found.name == name)


@pytest.mark.parametrize(
    ("load", "least_ratio", "most_bad"),
    [
        (greedy(), 0.70, 10),
        (greedy(iops=450, low_iops=10, shape="ramp"), 0.70, 8),
        (greedy(shape="square", period_s=20), 0.65, 14),
        (greedy(shape="square", period_s=7), 0.65, 18),
        (greedy(shape="bursty", on_s=4, off_s=8), 0.40, 12),
    ],
    ids=["step", "ramp", "square of 20 s", "square of 7 s", "bursts"],
)
def test_a_neighbour_of_any_shape(load, least_ratio, most_bad):
    made = plan([GOLD, load], 90)
    free = figures_of(made, run_mode(made, "off"), None)
    _, figures, (capped,) = enforced(made)
    (gold,), (uncontrolled,) = figures.promises, free.promises
    assert gold.bad_s <= most_bad
    assert uncontrolled.bad_s >= 2.5 * most_bad
    assert capped.volume == "greedy"
    assert capped.bytes_per_s >= least_ratio * free.volumes[1].bytes_per_s
    assert capped.least_cost >= 0.25 * FREE_IOPS, "the first cuts did not overshoot"
