"""A stream that turns up later, and cannot be measured for what is promised: never good, nor live."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pmdaemon.wire.cut import COL, Cut
from sla_server.agreements.promise import CurveStep
from tests.support.worlds import KEY, A, B, Feeder, controller, cut, exports, promise, streams, volume_class

MEAN = {"metric": "mean_latency", "percentile": 99.0}
AVAILABILITY = {"metric": "availability", "percentile": 99.0, "curve": (CurveStep(math.inf, 5_000_000),)}
IOPS = {"metric": "iops", "percentile": 99.0, "curve": (), "promised": 10.0}
HOST, CGROUP, QEMU = "host:g:sda", "cgroup:g:job", "qemu:g:disk-1"
GOOD, LATE = (100, 2.0), (100, 30.0)


def world(**over: Any) -> Feeder:
    made = controller((promise(volumes=("*",), **over),), (volume_class(),), "observe")
    return Feeder(made, (A, ("gold",)))


def turns_up(made: Feeder, volume: str, gateway: str = A) -> None:
    """The gateway exports one more volume, and announces a stream of it."""
    source = volume.partition(":")[0]
    others = exports("gold") if gateway == A else []
    shown = [*others, {"volume": volume, "backend": "disk", "source": source}]
    made.controller.gateway_up(gateway, gateway[:4], shown, made.now_ns)
    made.controller.add_streams(gateway, streams(gateway, volume))


def run(made: Feeder, seconds: int, gold: tuple[int, float], beside: str = "", at: str = A) -> str:
    """State after some seconds; the volume beside the path has many I/Os, that say nothing."""
    for _ in range(seconds):
        made.second += 1
        use: dict[str, dict[str, tuple[int, float]]] = {A: {"gold": gold}}
        if beside:
            use.setdefault(at, {})[beside] = (10_000, 0.01)
        for gateway, ios in use.items():
            made.controller.add_cut(timed(gateway, made.second, ios), made.unix_us, 0, False, made.now_ns)
        made.controller.tick(made.now_ns, made.unix_us)
    return made.controller.live[KEY].state


def timed(gateway: str, seq: int, ios: dict[str, tuple[int, float]]) -> Cut:
    """With the sum of latencies, of which the kernel has none for a control group."""
    found = cut(gateway, seq, ios)
    counters = found.counters.copy()
    for row, (volume, (count, ms)) in enumerate(ios.items()):
        counters[COL["lat_sum_us"], row] = 0 if volume == CGROUP else round(count * ms * 1000)
    return replace(found, counters=counters)


def reason(made: Feeder) -> str:
    (row,) = made.controller.snapshot(0)["slas"]
    return str(row["reason"])


CASES = [
    (HOST, {}, "latency percentile"),
    (CGROUP, {}, "latency percentile"),
    (HOST, {**MEAN, "io": "read"}, "mean of one kind of I/O"),
    (CGROUP, MEAN, "latency"),
    (HOST, AVAILABILITY, "outage"),
    (QEMU, AVAILABILITY, "outage"),
    (QEMU, IOPS, "rate that was asked for"),
]


@pytest.mark.parametrize("gateway", [A, B], ids=["the same gateway", "another gateway"])
@pytest.mark.parametrize(("volume", "terms", "what"), CASES)
def test_there_is_no_data_while_it_has_io_and_it_is_named(
    gateway: str, volume: str, terms: dict[str, Any], what: str
) -> None:
    made = world(**terms)
    assert run(made, 3, GOOD) == "ok"
    turns_up(made, volume, gateway)
    assert run(made, 3, GOOD, volume, gateway) == "no-data"
    assert reason(made).startswith(f"{volume} is counted beside the I/O path: no {what} can be measured")
    assert run(made, 9, GOOD) == "ok", "it has no I/O any more"
    assert reason(made) == ""


@pytest.mark.parametrize("gateway", [A, B])
def test_what_is_measured_is_violated_all_the_same(gateway: str) -> None:
    """What the rest measures is broken, whatever the others did: of slices that is no data."""
    made = world()
    turns_up(made, HOST, gateway)
    assert run(made, 4, LATE, HOST, gateway) == "violating"
    made = world(**MEAN)
    turns_up(made, CGROUP, gateway)
    assert run(made, 4, LATE, CGROUP, gateway) == "violating"


def test_an_open_violation_is_not_closed_by_what_is_left() -> None:
    made = world()
    assert run(made, 4, LATE) == "violating"
    turns_up(made, HOST)
    assert run(made, 60, GOOD, HOST) == "no-data"
    assert made.controller.live[KEY].violating


@pytest.mark.parametrize(("volume", "terms"), [(HOST, MEAN), (QEMU, {}), (QEMU, MEAN)])
def test_what_can_be_measured_there_is(volume: str, terms: dict[str, Any]) -> None:
    made = world(**terms)
    turns_up(made, volume)
    assert run(made, 4, GOOD, volume) == "ok"
    assert run(made, 1, (0, 0), volume) == "ok"


def test_neighbours_are_slowed_down_for_what_is_measured() -> None:
    made = Feeder(controller((promise(),), (volume_class(),), "enforce"), (A, ("gold", "greedy")))
    turns_up(made, HOST)
    made.controller.gateway_up(A, "A", exports("gold", "greedy"), made.now_ns)
    for _ in range(4):
        made.step((A, {"gold": LATE, "greedy": (400, 30.0)}, 0))
    assert made.controller.loops.controls["disk"].active
