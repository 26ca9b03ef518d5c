"""What the controller decides in the scenarios of ``bench-sla`` on the simulator, as lines of text.

``python -m tests.support.decided`` writes ``tests/fixtures/decisions.json`` again: after a change of what
control decides, not after one of how fast it does. Numbers have four digits: sums may differ in the last
bits from machine to machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.sla import agreements
from benchmarks.sla_scenarios import SCENARIOS, Scenario
from benchmarks.sla_simulated import Runs
from sla_server.services.control.decisions import (
    Decision,
    RaiseEvent,
    RecordDecision,
    RecordThrottle,
    SetCaps,
)
from sla_server.services.control.simulation import Simulation
from sla_server.simulate.device import Fault
from sla_server.simulate.run import run_mode

STORED: Final = Path(__file__).parents[1] / "fixtures" / "decisions.json"
SEEDS: Final = (0, 1)
LASTS_S: Final = 20.0
FAULT_S: Final = 8.0
KEYS: Final = ("kind", "state", "source", "volume", "client", "victim", "reason", "cost_per_s")
FIGURES: Final = ("u", "latency_us", "offered_iops", "windows", "failed_ratio", "cost_per_s", "reason")


def decided(scenario: Scenario, seed: int) -> list[str]:
    """All decisions of a run in mode enforce; what happens to the storage does so from ``FAULT_S`` on."""
    runs = Runs(scenario, agreements(scenario))
    plan, become_slower = replace(runs.plan(LASTS_S), seed=seed), runs.become_slower(FAULT_S)
    if scenario.has_fault:
        fault = {"kind": scenario.event, "from_s": FAULT_S, "until_s": LASTS_S - 4}
        plan = replace(plan, faults=[Fault.model_validate(fault)])
    seen = list[Simulation]()

    def disturb(sim: Simulation) -> None:
        seen.append(sim)
        if become_slower is not None:
            become_slower(sim)

    run_mode(plan, "enforce", disturb)
    names = {gateway_id: gateway.name for gateway_id, gateway in seen[0].gateways.items()}
    return [f"{at:.2f} {line}" for at, each in seen[0].log for line in _lines(each, names)]


def _lines(decision: Decision, names: dict[str, str]) -> Iterator[str]:
    match decision:
        case SetCaps():
            caps = [*decision.caps, *decision.clients, *decision.groups]
            yield f"caps {names[decision.gateway_id]} {decision.gen} {json.dumps(_short(caps))}"
        case RecordDecision(row) | RecordThrottle(row):
            keys = (
                "kind",
                "state",
                "source",
                "backend",
                "volume",
                "client",
                "victim",
                "reason",
                "cost_per_s",
            )
            yield f"row {json.dumps(_short({key: row[key] for key in keys if row.get(key)}))}"
        case RaiseEvent():
            figures = {key: decision.details[key] for key in FIGURES if key in decision.details}
            yield f"event {decision.kind} {decision.subject} {json.dumps(_short(figures))}"


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value


def all_decided() -> dict[str, list[str]]:
    """By scenario and seed."""
    return {f"{each.name} {seed}": decided(each, seed) for each in SCENARIOS for seed in SEEDS}


if __name__ == "__main__":
    STORED.write_text(json.dumps(all_decided(), indent=0, sort_keys=True) + "\n")
