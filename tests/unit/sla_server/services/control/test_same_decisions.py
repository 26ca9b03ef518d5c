"""Control decides what it decided before: a change that is about speed alone shows here if it is not."""

from __future__ import annotations

import json

import pytest

from benchmarks.sla_scenarios import SCENARIOS, Scenario
from tests.support.decided import SEEDS, STORED, decided

KNOWN: dict[str, list[str]] = json.loads(STORED.read_text())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_decisions_of_each_scenario_are_those_that_are_stored(scenario: Scenario, seed: int) -> None:
    assert decided(scenario, seed) == KNOWN[f"{scenario.name} {seed}"]


def test_what_is_stored_has_caps_releases_and_faults() -> None:
    lines = [line for found in KNOWN.values() for line in found]
    kinds = '"kind": "decrease"', '"kind": "increase"', " event violation-opened ", " event storage-fault "
    for what in (" caps gateway-b ", *kinds):
        assert any(what in line for line in lines), what
