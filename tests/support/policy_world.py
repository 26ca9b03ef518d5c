"""A policy learnt from one history of bursts and tried on others: what the job computes, without Spark.

The disk serves some 200 I/Os a second in order of arrival. Gold does 25 (p95 <= 40 ms); batch keeps 24
requests outstanding in bursts of 12 s on average, at random times, every minute or so. An hour of it, in
which nothing is throttled, becomes minutes as they are stored; capacity, caps and bursts are computed of
those, with the floor of a volume without an agreement. Then another hour, of other bursts, runs with the loop
alone, and with the loop and the policy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sla_server.agreements.document import DEFAULT_FLOOR_IOPS, Agreement
from sla_server.agreements.load import load_documents
from sla_server.policy_jobs.back_test import NO_POLICY, ReplayedPolicy, ReplaySums, by_hour, outcome
from sla_server.policy_jobs.bursts import ROOM_S, Floats, Ints, burst_pair, burst_seconds
from sla_server.policy_jobs.capacity import Intervals, capacity
from sla_server.policy_jobs.model import caps_of_week, needs_of
from sla_server.policy_jobs.transforms import HOURS_A_WEEK
from sla_server.simulate.device import CostPoint, DeviceModel
from sla_server.simulate.loads import Load
from sla_server.simulate.run import GeneratedFeed, Plan, run_mode
from sla_server.simulate.setup import contract_of

LIMIT_MS: Final = 40
HALF_LIFE_DAYS: Final = 14.0
GOLD: Final = f"""
apiVersion: storage-sla/v1
kind: SLA
metadata: {{name: gold}}
spec:
  parties: {{provider: team, customer: acme}}
  scope: {{volumes: [gold]}}
  priority: gold
  objectives:
  - name: latency
    indicator: {{metric: latency, percentile: 95}}
    demand_curve: [{{up_to_iops: 1000, value_ms: {LIMIT_MS}}}]
    budgeting: {{slice: 1m, target: 0.99}}
"""
MINUTE_S: Final = 60
DEVICE: Final = DeviceModel(servers=1, spread=0.2, read=[CostPoint(kib=4, ms=5.0)])


def plan(seed: int, minutes: int) -> Plan:
    """So many minutes of it; bursts depend on the seed."""
    documents = [item.document for item in load_documents(GOLD, MINUTE_S)]
    contract = contract_of([item for item in documents if isinstance(item, Agreement)])
    loads = (
        Load(volume="gold", client="a", gateway="A", backend="disk", iops=25),
        Load(volume="batch", client="b", gateway="B", backend="disk", depth=24, shape="bursty",
             on_s=12, off_s=50),
    )  # fmt: skip
    span = (0.0, float(minutes * MINUTE_S))
    feeds = [GeneratedFeed(load) for load in loads]
    return Plan(contract, feeds, {"disk": DEVICE}, [span], seed=seed)


def learnt(history: Plan) -> tuple[ReplayedPolicy, float]:
    """The policy of a history, and the capacity it rests on."""
    run = run_mode(history, "off")
    minutes = int(history.seconds) // MINUTE_S
    used: dict[str, Any] = {}
    for stream, log in run.logs.items():
        ios = log.arrays()
        at = np.minimum((ios["at"] // MINUTE_S).astype(int), minutes - 1)
        cost = np.bincount(at, 1 + ios["size"] / 65_536, minutes) / MINUTE_S
        late = np.bincount(at, ios["latency"] > LIMIT_MS / 1000, minutes)
        used[stream.volume] = cost, np.bincount(at, minlength=minutes).astype(float), late
    (promise,) = history.contract.promises
    _, counted, missed = used["gold"]
    load = used["gold"][0] + used["batch"][0]
    at_us = np.arange(minutes, dtype=np.int64) * MINUTE_S * 1_000_000
    found = capacity(Intervals(load, counted, missed, promise.allowed_miss_ratio, at_us=at_us))
    assert found.cost_per_s is not None, found.reason
    row = {"backend": "disk", "sla": promise.sla, "objective": promise.objective, "step": 0}
    needs = needs_of([{**row, "cost_per_s": found.cost_per_s}], [promise])["disk"]
    nothing = {
        "floor_iops": DEFAULT_FLOOR_IOPS,
        "floor_bytes_per_s": 0.0,
        "mean_cost": 1 + 4096 / 65_536,
        "promised_iops": 0.0,
    }
    rows = [
        {
            **nothing,
            "volume": volume,
            "hour_of_week": hour,
            "weight": 8.0 if volume == "gold" else 1.0,
            "p50": float(np.quantile(cost, 0.5)),
            "p95": float(np.quantile(cost, 0.95)),
        }
        for volume, (cost, _, _) in used.items()
        for hour in range(HOURS_A_WEEK)
    ]
    week = caps_of_week(rows, needs)
    caps = [
        {
            "volume": volume,
            "hour_of_week": hour,
            "cost_per_s": cap,
            "burst_s": None if cap is None else burst_s(used[volume][0], at_us, cap, found.cost_per_s),
        }
        for volume, hours in week.items()
        for hour, cap in hours.items()
    ]
    return by_hour(caps), found.cost_per_s


def burst_s(cost: Floats, at_us: Ints, cap: float, capacity_per_s: float) -> float | None:
    """Of a cap of the one volume that has caps, as ``grouped.with_bursts`` has it."""
    pair = burst_pair(at_us, cost, MINUTE_S, int(at_us[-1]), HALF_LIFE_DAYS)
    if pair is None:
        return None
    room = np.array([ROOM_S * capacity_per_s])
    (found,) = burst_seconds(np.array([cap]), np.array([pair.burst_cost]), np.array([0]), room)
    return None if np.isnan(found) else float(found)


@dataclass(frozen=True, slots=True)
class Trial:
    """One history that the policy has not seen.

    Attributes:
        alone, both: the loop by itself, and with the policy.
        cap: of batch, cost a second.
    """

    alone: ReplaySums
    both: ReplaySums
    cap: float


def tried(seed: int, learn_minutes: int = 60, minutes: int = 60) -> Trial:
    """Learn from one history, try on another."""
    policy, _ = learnt(plan(1000 + seed, learn_minutes))
    other = plan(seed, minutes)
    cap = policy.caps[0]["batch"]
    assert cap is not None
    return Trial(outcome(other, NO_POLICY), outcome(dataclasses.replace(other), policy), cap)
