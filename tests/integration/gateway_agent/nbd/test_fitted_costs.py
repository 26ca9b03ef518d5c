"""Fitted costs and caps of cost in one plane: which costs a volume is charged, and from when on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_agent.config import ExportConfig, PlaneConfig
from gateway_agent.nbd.plane import Plane
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.plane_sets import PlaneCaps


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def plane(tmp_path: Path, clock: FakeClock) -> Iterator[Plane]:
    (tmp_path / "disk").write_bytes(bytes(4096))
    export = ExportConfig(volume="vol-1", backend="b", file=str(tmp_path / "disk"), cost="fitted")
    made = Plane(PlaneConfig("nbd-0", [f"unix:{tmp_path}/x"], f"{tmp_path}/c", [export]), clock)
    yield made
    made.close()


def fit(version: int, cost_write: float) -> Costs:
    entry = {"backend": "b", "cost_write": cost_write, "cost_bytes": 4096.0}
    return Costs.parse({"version": version, "backends": [entry]})


def set_of(gen: int, **rates: float) -> PlaneCaps:
    caps = [{"volume": "vol-1", **rates}] if rates else []
    return PlaneCaps.parse({"gen": gen, "lease_us": 30_000_000, "caps": caps})


def cost_write_of(plane: Plane) -> float:
    return plane._exports.volumes["vol-1"].export.cost_write  # what is charged shows in I/O only


def test_a_cap_of_cost_holds_with_the_costs_that_it_was_computed_with(plane: Plane) -> None:
    plane.costs(fit(4, 2.0))
    plane.caps(set_of(1, cost_per_s=100.0))
    plane.costs(fit(5, 6.0))
    assert cost_write_of(plane) == 2.0
    plane.caps(set_of(2, cost_per_s=50.0))
    assert cost_write_of(plane) == 2.0, "computed from what was used under the cap before"
    plane.caps(set_of(3, ops_per_s=50.0))
    assert cost_write_of(plane) == 6.0
    plane.costs(fit(6, 8.0))
    assert cost_write_of(plane) == 8.0, "a cap of I/Os is in no units of cost"


def test_costs_hold_when_the_lease_of_the_caps_has_ended(plane: Plane, clock: FakeClock) -> None:
    plane.caps(set_of(1, cost_per_s=100.0))
    plane.costs(fit(5, 6.0))
    assert cost_write_of(plane) == 1.0
    clock.advance(31)
    plane.lease()
    assert cost_write_of(plane) == 6.0
