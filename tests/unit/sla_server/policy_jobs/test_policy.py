"""From points and demands to caps and a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.policy_jobs.model import build, capacities


def promise(
    sla: str, priority: Priority, volume: str, curve: tuple[CurveStep, ...] = (CurveStep(150, 12_000),)
) -> Promise:
    return Promise(sla, 1, "latency", priority, (volume,), ("*",), "any", 95.0, curve, 0.95, 60, 0, 0)


GOLD = promise("gold", Priority.GOLD, "erp")


@dataclass
class Known:
    former_capacity: dict[str, float] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=lambda: [GOLD])

    protected: frozenset[str] = frozenset({"erp", "shop"})

    def class_of(self, volume: str) -> VolumeClass:
        return VolumeClass("", Priority.BEST_EFFORT, ("*",), floor_iops=50)


def point(load: float, missed: int, backend: str = "disk", sla: str = "gold") -> dict[str, Any]:
    return {
        "backend": backend,
        "sla": sla,
        "objective": "latency",
        "allowed": 0.05,
        "load": load,
        "counted": 100,
        "missed": missed,
    }


def demand(volume: str, p95: float, hour: int = 0) -> dict[str, Any]:
    return {
        "backend": "disk",
        "volume": volume,
        "hour_of_week": hour,
        "p50": p95 / 2,
        "p95": p95,
        "samples": 9,
    }


CONTENDED = [point(100, 0), point(200, 0), point(300, 1), point(370, 2), point(490, 80)]


def test_the_greedy_volume_gets_what_is_left() -> None:
    policy = build(CONTENDED, [demand("erp", 80), demand("batch", 420)], Known())
    caps = {row["volume"]: row["cost_per_s"] for row in policy.caps}
    assert caps == {"erp": None, "batch": pytest.approx(290)}
    assert policy.capacity[0]["cost_per_s"] == 370


def test_an_hour_in_which_all_fits_has_no_cap() -> None:
    policy = build(
        CONTENDED, [demand("erp", 80), demand("batch", 420), demand("batch", 100, hour=5)], Known()
    )
    caps = {(row["volume"], row["hour_of_week"]): row["cost_per_s"] for row in policy.caps}
    assert caps["batch", 5] is None
    assert caps["batch", 0] is not None


def test_the_strictest_promise_of_a_backend_counts() -> None:
    other = [point(load, 40 if load >= 200 else 0, sla="other") for load in (100, 150, 200, 300, 490)]
    rows = capacities(CONTENDED + other, {})
    assert {row["sla"]: row["cost_per_s"] for row in rows} == {"gold": 370, "other": 150}
    policy = build(CONTENDED + other, [demand("batch", 420)], Known())
    assert policy.caps[0]["cost_per_s"] == pytest.approx(150)


def test_the_last_valid_capacity_is_kept_and_said() -> None:
    quiet = [point(load, 0) for load in (10, 20, 30, 40, 50)]
    policy = build(quiet, [demand("batch", 420)], Known({"disk": 300.0}))
    assert policy.capacity[0]["cost_per_s"] == 300
    assert "last valid value" in policy.capacity[0]["reason"]
    assert policy.caps[0]["cost_per_s"] == pytest.approx(300)


def test_nothing_is_capped_where_no_limit_is_known() -> None:
    policy = build([], [demand("batch", 420)], Known())
    assert policy.caps[0]["cost_per_s"] is None
    assert policy.capacity == []


def test_what_was_kept_at_more_than_the_last_valid_capacity_replaces_it() -> None:
    """The disk was replaced: it now does easily what it never did before."""
    quick = [point(load, 0) for load in (100, 200, 300, 400, 500)]
    (row,) = capacities(quick, {"disk": 300.0})
    assert row["cost_per_s"] == 500
    assert "more than the last valid value" in row["reason"]


def test_a_volume_with_a_lower_promise_is_capped_and_gets_what_that_needs() -> None:
    known = Known(promises=[GOLD, promise("shop", Priority.SILVER, "shop", (CurveStep(180, 20_000),))])
    rows = [
        {**demand("erp", 80), "mean_cost": 1.0},
        {**demand("shop", 300), "mean_cost": 1.0},
        {**demand("batch", 400), "mean_cost": 1.0},
    ]
    caps = {row["volume"]: row["cost_per_s"] for row in build(CONTENDED, rows, known).caps}
    assert caps["erp"] is None
    assert caps["shop"] == pytest.approx(232), "180 at least; above that four times what batch gets"
    assert caps["batch"] == pytest.approx(58)


def test_a_floor_is_one_of_ios_of_their_size_and_of_bytes() -> None:
    """Of I/Os of 128 KiB, which cost 3, 50 a second cost 150; 65 MB/s are 500 of them."""
    known = Known()
    tight = [point(load, 0 if load < 250 else 90) for load in (100, 150, 200, 300, 490)]
    rows = [demand("erp", 190), {**demand("batch", 900), "mean_cost": 3.0}]
    caps = {row["volume"]: row["cost_per_s"] for row in build(tight, rows, known).caps}
    assert caps["batch"] == pytest.approx(150)


STEPPED = promise("gold", Priority.GOLD, "erp", (CurveStep(100, 5_000), CurveStep(200, 12_000)))


@pytest.mark.parametrize(
    ("iops", "left"),
    [((20, 90), 200), ((120, 180), 370), ((90, 150), 200), ((250, 300), 370), ((None, None), 200)],
)
def test_each_step_of_the_curve_has_its_capacity_and_the_hour_decides(
    iops: tuple[float | None, float | None], left: float
) -> None:
    """Up to 100 I/Os a second the 5 ms hold, for which the backend can do 200; above, it can do 370."""
    strict = [{**point(load, 0 if load <= 200 else 50), "step": 0} for load in (100, 150, 200, 300, 490)]
    points = strict + [{**each, "step": 1} for each in CONTENDED]
    erp = {**demand("erp", 80), "iops_p50": iops[0], "iops_p95": iops[1]}
    policy = build(points, [erp, demand("batch", 420)], Known(promises=[STEPPED]))
    assert [(row["step"], row["cost_per_s"]) for row in policy.capacity] == [(0, 200), (1, 370)]
    caps = {row["volume"]: row["cost_per_s"] for row in policy.caps}
    assert caps["batch"] == pytest.approx(left - 80)


def test_a_known_percentile_is_compared_with_the_threshold_of_its_step() -> None:
    """Misses alone would allow 490: the curve through the percentiles comes near 12 ms before."""
    points = [
        {**point(load, 0 if load < 900 else 90), "at_us": load, "latency_us": 2000 / (1 - load / 1000)}
        for load in range(50, 940, 10)
    ]
    (row,) = capacities(points, {}, [GOLD])
    assert row["isotonic"] == 890
    assert row["queueing"] == pytest.approx(1000 * (1 - 2 / (0.85 * 12)), rel=0.01)
    assert row["cost_per_s"] == row["queueing"]
