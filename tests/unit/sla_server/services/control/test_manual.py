"""What a throttle set by hand would do to the volume's own promises."""

from __future__ import annotations

import math

import pytest

from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import CurveStep
from sla_server.services.control.manual import effect
from tests.support.worlds import A, Feeder, controller, promise, volume_class

MEAN_COST = 1.0625  # 4 KiB


@pytest.mark.parametrize(
    ("rates", "breaks"),
    [
        (Rates(ops_per_s=149), True),
        (Rates(ops_per_s=150), False),
        (Rates(cost_per_s=150 * MEAN_COST - 1), True),
        (Rates(cost_per_s=150 * MEAN_COST), False),
        (Rates(bytes_per_s=150 * 4096 - 1), True),
        (Rates(bytes_per_s=150 * 4096), False),
    ],
)
def test_below_the_end_of_the_curve_it_breaks(rates: Rates, breaks: bool) -> None:
    curve = (CurveStep(100, 8_000), CurveStep(150, 12_000))
    found = effect(rates, rates, MEAN_COST, [(promise(curve=curve), 1)])
    assert found.broken == (("gold/latency (p95 within 12.0 ms up to 150 IOPS)",) if breaks else ())
    assert not found.is_lifted


def test_a_promise_for_any_demand_or_for_several_volumes() -> None:
    rates = Rates(ops_per_s=80)
    endless = promise(curve=(CurveStep(math.inf, 12_000),))
    assert effect(rates, rates, MEAN_COST, [(endless, 1)]).broken == (
        "gold/latency (p95 within 12.0 ms at any demand)",
    )
    shared = promise(curve=(CurveStep(150, 12_000),))
    assert effect(rates, rates, MEAN_COST, [(shared, 2)]).broken == ()
    low = Rates(ops_per_s=70)
    (text,) = effect(low, low, MEAN_COST, [(shared, 2)]).broken
    assert "for 2 volumes together" in text


def test_rates_and_outages_are_promises_without_a_curve_of_latencies() -> None:
    low = Rates(ops_per_s=100)
    rate = promise(metric="iops", promised=500.0, curve=(), objective="rate")
    assert effect(low, low, MEAN_COST, [(rate, 1)]).broken == ("gold/rate (500 IOPS)",)
    assert effect(low, low, MEAN_COST, [(rate, 5)]).broken == ()
    flow = promise(metric="throughput", promised=2e6, curve=(), objective="flow")
    assert effect(low, low, MEAN_COST, [(flow, 1)]).broken == ("gold/flow (2 MB/s)",)
    wide = Rates(ops_per_s=500)
    assert effect(wide, wide, MEAN_COST, [(flow, 1), (rate, 1)]).broken == ()
    up = promise(metric="availability", curve=(CurveStep(math.inf, 5_000_000),), objective="up")
    assert effect(low, low, MEAN_COST, [(up, 1)]).broken == ()
    mean = promise(metric="mean_latency", objective="mean")
    (text,) = effect(low, low, MEAN_COST, [(mean, 1)]).broken
    assert text == "gold/mean (mean latency within 12.0 ms at any demand)"


def test_the_controller_knows_promises_and_floors() -> None:
    gold = promise(curve=(CurveStep(400, 12_000),))
    made = controller((gold,), (volume_class(floor_iops=300.0),))
    Feeder(made, (A, ("gold", "greedy")))
    found = made.manual_effect("gold", ops_per_s=100)
    assert (found.held, found.is_lifted, found.held_text) == (Rates(ops_per_s=300.0), True, "300 IOPS")
    assert len(found.broken) == 1
    made.manual_set("t", "gold", ops_per_s=100)
    assert made.policy.effective("gold") == found.held, "what was said is what holds"
    free = made.manual_effect("greedy", ops_per_s=10)
    assert (free.held, free.is_lifted, free.broken) == (Rates(ops_per_s=10), False, ())
