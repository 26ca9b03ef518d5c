"""The model of a cluster's memory: fitted to one and three nodes, it says what five take."""

from __future__ import annotations

import pytest

from benchmarks.cluster_growth import Cost, fit


def _cost(nodes: int, base_bytes: float) -> Cost:
    return Cost(nodes, min(3, nodes), base_bytes, 0.0, 0.0, 0.0, 0)


def test_a_node_costs_its_base_and_a_route_to_each_other_node() -> None:
    model = fit(_cost(1, 20.0), _cost(3, 3 * (20.0 + 2 * 1.5)))
    assert model.base_bytes == pytest.approx(20.0)
    assert model.route_bytes == pytest.approx(1.5)
    assert model.predict(3) == pytest.approx(69.0)
    assert model.predict(5) == pytest.approx(5 * (20.0 + 4 * 1.5))
