"""From points and demands to caps and a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from sla_server.agreements.promise import Priority, VolumeClass
from sla_server.policy_jobs.model import build, capacities


@dataclass
class Known:
    former_capacity: dict[str, float] = field(default_factory=dict)

    protected: frozenset[str] = frozenset({"erp"})

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


CONTENDED = [point(100, 0), point(200, 0), point(300, 1), point(370, 3), point(490, 80)]


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
