"""Mean latency, rates and availability on simulated requests: seconds, slices and figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sla_server.agreements.promise import CurveStep, Promise
from sla_server.simulate.device import CostPoint, DeviceModel, Fault
from sla_server.simulate.figures import PromiseFigures, figures_of
from sla_server.simulate.indicators import Served, Waits
from sla_server.simulate.loads import Arrival, IoLog, Load
from sla_server.simulate.run import GeneratedFeed, ModeRun, Plan, TraceFeed, run_mode
from sla_server.simulate.setup import Contract, Stream
from tests.support.worlds import promise, volume_class

MEAN = {"metric": "mean_latency", "percentile": 99.0}
IOPS = {"metric": "iops", "percentile": 99.0, "curve": ()}
THROUGHPUT = {"metric": "throughput", "percentile": 99.0, "curve": ()}
AVAILABILITY = {"metric": "availability", "percentile": 99.0, "curve": (CurveStep(math.inf, 5_000_000),)}
DISK = DeviceModel(spread=0, read=[CostPoint(kib=4, ms=2)])  # 500 I/Os a second


def figures(promised: Promise, *loads: Load, length_s: float = 30.0, **over: Any) -> PromiseFigures:
    made = Plan(
        Contract([promised], [volume_class("v")]),
        [GeneratedFeed(load) for load in loads],
        {"disk": DISK},
        [(0.0, length_s)],
        **over,
    )
    (found,) = figures_of(made, run_mode(made, "off"), None).promises
    return found


def test_a_mean_within_and_above_its_threshold() -> None:
    load = Load(volume="v", depth=4)  # each waits for three others: 8 ms
    kept = figures(promise("v", 9, slice_s=10, **MEAN), load)
    assert (kept.bad_s, kept.slices) == (0, {"good": 3})
    assert kept.measured == pytest.approx(8.0, rel=0.02)
    assert (kept.latency_ms, kept.percentile, kept.unit) == (kept.measured, None, "ms")
    broken = figures(promise("v", 7, slice_s=10, **MEAN), load)
    assert (broken.bad_s, broken.judged_s, broken.slices) == (30, 30, {"bad": 3})


def test_a_mean_follows_the_steps_of_its_curve() -> None:
    steps = (CurveStep(100.0, 1_000), CurveStep(600.0, 9_000))
    found = figures(promise("v", slice_s=10, **{**MEAN, "curve": steps}), Load(volume="v", depth=4))
    assert (found.bad_s, found.above_s, found.slices) == (0, 0, {"good": 3})
    beyond = (CurveStep(100.0, 9_000),)
    found = figures(promise("v", slice_s=10, **{**MEAN, "curve": beyond}), Load(volume="v", depth=4))
    assert (found.judged_s, found.above_s, found.slices) == (0, 30, {"not_applicable": 3})


@pytest.mark.parametrize("terms", [MEAN, {"percentile": 95.0}])
def test_what_failed_and_is_excluded_is_no_demand_and_in_no_figure(terms: dict[str, Any]) -> None:
    """10 I/Os a second take 20 ms, and 200 fail at once; the curve ends at 100."""
    served, log = [(n / 10 + 0.001, 0.02, False) for n in range(300)], IoLog()
    for at, latency, fails in sorted([*served, *((n / 200, 0.0001, True) for n in range(6000))]):
        number = log.begin(at, 4096, is_write=False)
        log.latency[number], log.failed[number] = latency, fails
    curve = (CurveStep(100.0, 12_000),)
    made = promise("v", slice_s=10, counts_errors=False, **{**terms, "curve": curve})
    contract = Contract([made], [volume_class("v")])
    plan = Plan(contract, [TraceFeed(Stream("v"), [])], {"disk": DISK}, [(0.0, 30.0)])
    (found,) = figures_of(plan, ModeRun("off", {Stream("v"): log}), None).promises
    assert (found.judged_s, found.bad_s, found.above_s, found.slices) == (30, 30, 0, {"bad": 3})
    assert found.measured == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize(
    ("promised", "asked", "state"), [(400, 300, "good"), (400, 450, "good"), (600, 700, "bad")]
)
def test_iops_are_promised_as_far_as_they_are_asked_for(promised: float, asked: float, state: str) -> None:
    """The disk gives 500."""
    terms = promise("v", slice_s=10, promised=promised, **IOPS)
    found = figures(terms, Load(volume="v", iops=asked))
    assert found.slices == {state: 3}
    assert found.promised == promised
    assert found.measured == pytest.approx(min(asked, 500), rel=0.05)
    # What is under way is taken for delivered until it has waited for five seconds, as live.
    assert found.bad_s == (0 if state == "good" else pytest.approx(30 - 17, abs=5))


def test_throughput_is_counted_in_bytes() -> None:
    load = Load(volume="v", iops=450, kib=4)
    kept = figures(promise("v", slice_s=10, promised=1.5e6, **THROUGHPUT), load)
    assert (kept.slices, kept.promised, kept.unit) == ({"good": 3}, 1.5, "MB/s")
    assert kept.measured == pytest.approx(450 * 4096 / 1e6, rel=0.05)
    large = Load(volume="v", iops=700, kib=4)
    assert figures(promise("v", slice_s=10, promised=2.5e6, **THROUGHPUT), large).slices == {"bad": 3}


@pytest.mark.parametrize("kind", ["hangs", "fails"])
def test_storage_that_does_not_serve_breaks_each_of_them(kind: Any) -> None:
    load = Load(volume="v", iops=100)
    faults = [Fault(kind=kind, from_s=10, until_s=20)]
    terms = (
        promise("v", slice_s=10, **AVAILABILITY),
        promise("v", 12, slice_s=10, **MEAN),
        promise("v", slice_s=10, promised=50.0, **IOPS),
    )
    for each in terms:
        found = figures(each, load, faults=faults)
        assert found.slices["bad"] >= 1, each.metric
        inside = [second for second in found.bad_at if 10 <= second < 20]
        assert len(inside) == (10 if kind == "fails" else 5), "of a hang from the fifth second on"
        assert not [second for second in found.bad_at if second < 10]
    found = figures(terms[0], load, faults=faults)
    assert (found.measured, found.unit) == (pytest.approx(10.0 if kind == "hangs" else 0, abs=0.1), "s")


def test_without_failures_where_the_agreement_leaves_them_out() -> None:
    load, faults = Load(volume="v", iops=100), [Fault(kind="fails", from_s=10, until_s=20)]
    terms = promise("v", 12, slice_s=10, counts_errors=False, **MEAN)
    assert figures(terms, load, faults=faults).bad_s == 0


def test_kinds_are_told_apart() -> None:
    ios = [Arrival(n / 40, n % 2 == 1, 4096) for n in range(400)]
    slow = DeviceModel.model_validate(
        {"servers": 4, "spread": 0, "read": [{"kib": 4, "ms": 1}], "write": [{"kib": 4, "ms": 30}]}
    )
    terms = [promise("v", 12, objective=io, slice_s=10, io=io, **MEAN) for io in ("read", "write")]
    contract = Contract(terms, [volume_class("v")])
    made = Plan(contract, [TraceFeed(Stream("v"), ios)], {"disk": slow}, [(0.0, 10.0)])
    reads, writes = figures_of(made, run_mode(made, "off"), None).promises
    assert (reads.measured, writes.measured) == (pytest.approx(1), pytest.approx(30))
    assert (reads.bad_s, writes.bad_s) == (0, 10)
    assert (reads.slices, writes.slices) == ({"good": 1}, {"bad": 1})


def test_waits_between_are_those_within_one_by_one() -> None:
    rng = np.random.default_rng(3)
    at = np.sort(rng.uniform(0, 60, 200))
    found = {"at": at, "latency": rng.exponential(2.0, 200), "done": rng.random(200) < 0.97}
    waits, firsts = Waits(found), np.array([*range(0, 20), *range(40, 60)], dtype=float)
    age, stalled = waits.between(firsts, firsts + 1)
    ended = np.where(found["done"], at + found["latency"], np.inf)
    for place, first in enumerate(firsts):
        open_at = at[(at < first + 1) & (ended > first + 1)]
        assert age[place] == pytest.approx(first + 1 - open_at.min() if len(open_at) else 0)
        assert waits.within(first, first + 1) == (int(age[place] * 1e3), int(stalled[place] * 1e3))


def test_nothing_happened() -> None:
    nothing = {name: np.zeros(0) for name in ("at", "latency", "size")}
    empty = {**nothing, **{name: np.zeros(0, bool) for name in ("is_write", "failed", "done")}}
    for terms in (MEAN, {**IOPS, "promised": 5.0}, AVAILABILITY):
        served = Served(promise("v", **terms), empty)
        assert served.measured_in([(0.0, 5.0)]) is None
        found = served.seconds([(0.0, 5.0)])
        assert (found.judged, found.bad, found.above) == (0, [], 0)
        assert served.slot(0.0, 5.0).arrived == 0
