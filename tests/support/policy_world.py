"""A policy learnt from one history of bursts and tried on others: what the job computes, without Spark.

The disk serves some 200 I/Os a second in order of arrival. Gold does 25 (p95 <= 40 ms); batch keeps 24
requests outstanding in bursts of 12 s on average, at random times, every minute or so. An hour of it, in
which nothing is throttled, becomes minutes and cuts of a second as they are stored; capacity, caps and bursts
are computed of those, with the floor of a volume without an agreement. Then another hour, of other bursts,
runs with the loop alone, and with the loop and the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sla_server.agreements.document import DEFAULT_FLOOR_IOPS, Agreement
from sla_server.agreements.load import load_documents
from sla_server.policy_jobs.back_test import NO_POLICY, ReplayedPolicy, ReplaySums, by_hour, outcome
from sla_server.policy_jobs.bursts import Floats, Ints, burst_pair, burst_seconds, room_of
from sla_server.policy_jobs.capacity import Intervals, capacity, combined
from sla_server.policy_jobs.cuts import PEAK
from sla_server.policy_jobs.demand import weighted_percentile
from sla_server.policy_jobs.model import caps_of_week, needs_of
from sla_server.policy_jobs.steady import Bins, is_complete, steady
from sla_server.policy_jobs.transforms import HOURS_A_WEEK
from sla_server.simulate.device import CostPoint, DeviceModel
from sla_server.simulate.loads import IoLog, Load
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
SECOND_US: Final = 1_000_000
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
    seconds = int(history.seconds)
    by_second = {stream.volume: _in_seconds(log, seconds) for stream, log in run.logs.items()}
    cuts = _bins(by_second, 1)
    minutes = _bins(by_second, MINUTE_S)
    used = {
        volume: each.cost.reshape(-1, MINUTE_S).sum(axis=1) / MINUTE_S for volume, each in by_second.items()
    }
    (promise,) = history.contract.promises
    at_us, allowed = minutes.at_us, promise.allowed_miss_ratio
    of_minutes = capacity(Intervals(minutes.load, minutes.counted, minutes.missed, allowed, at_us=at_us))
    is_whole = is_complete(cuts.at_us, cuts.load, SECOND_US, at_us, minutes.load)
    found = combined(of_minutes, steady(cuts.only(is_whole), SECOND_US, allowed, LIMIT_MS * 1000.0))
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
            "peak": _peak(by_second[volume].cost),
        }
        for volume, cost in used.items()
        for hour in range(HOURS_A_WEEK)
    ]
    week = caps_of_week(rows, needs)
    caps = [
        {
            "volume": volume,
            "hour_of_week": hour,
            "cost_per_s": cap,
            "burst_s": None if cap is None else burst_s(used[volume], at_us, cap, found.cost_per_s),
        }
        for volume, hours in week.items()
        for hour, cap in hours.items()
    ]
    return by_hour(caps), found.cost_per_s


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of a volume; arrays of shape (seconds,)."""

    cost: Floats
    ios: Floats
    late: Floats
    latency_us: Floats


def _in_seconds(log: IoLog, seconds: int) -> Seconds:
    ios = log.arrays()
    at = np.minimum(ios["at"].astype(int), seconds - 1)
    columns = (
        1 + ios["size"] / 65_536,
        np.ones(len(at)),
        ios["latency"] > LIMIT_MS / 1000,
        ios["latency"] * 1e6,
    )
    return Seconds(*(np.bincount(at, column, seconds).astype(np.float64) for column in columns))


def _peak(cost: Floats) -> float:
    """As ``cuts.peaks`` has it."""
    return weighted_percentile(cost, np.ceil(cost).astype(np.int64), PEAK)


def _bins(found: Mapping[str, Seconds], length_s: int) -> Bins:
    def summed(values: Floats) -> Floats:
        return np.asarray(values.reshape(-1, length_s).sum(axis=1), dtype=np.float64)

    gold, batch = found["gold"], found["batch"]
    load = summed(gold.cost + batch.cost) / length_s
    columns = (gold.ios, gold.late, gold.ios + batch.ios, gold.latency_us + batch.latency_us)
    at_us = np.arange(len(load), dtype=np.int64) * length_s * SECOND_US
    return Bins(at_us, load, *(summed(column) for column in columns))


def burst_s(cost: Floats, at_us: Ints, cap: float, capacity_per_s: float) -> float | None:
    """Of a cap of the one volume that has caps, as ``grouped.with_bursts`` has it."""
    pair = burst_pair(at_us, cost, MINUTE_S, int(at_us[-1]), HALF_LIFE_DAYS)
    if pair is None:
        return None
    room = np.array([room_of(capacity_per_s, LIMIT_MS * 1000.0)])
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
