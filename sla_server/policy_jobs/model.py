"""A policy from what Spark found: capacities of backends, and caps of volumes by hour of the week.

Rows in, rows out; the arithmetic is in ``capacity`` and ``caps``. One backend may serve several promises,
each with several steps of its demand curve. Each (promise, step) has a capacity of its own. In an hour of the
week a promise is at the steps that its volumes' demand between p50 and p95 falls on, and needs the smallest
capacity of them. A promise without a capacity of its own keeps the last valid one of its backend, marked as
such, and never less than a load at which it was kept now; where there is none, nothing is capped for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from sla_server.agreements.promise import Priority, Promise, VolumeClass
from sla_server.policy_jobs.capacity import Capacity, Intervals, capacity
from sla_server.policy_jobs.caps import Demand, HourShare, LoadLimit, limit_change, shares_of_hour

BYTES_A_UNIT: Final = 65_536  # an I/O costs 1, and 1 more for so many bytes (docs/formats/messages.md)
LEAST_UNIT: Final = 1 / 64  # of the bytes of a mean I/O, as ``services.control.sharing`` has it


class Classes(Protocol):
    """What a policy must know of the volumes."""

    @property
    def former_capacity(self) -> dict[str, float]:
        """Backend to the newest valid capacity of an earlier policy."""

    @property
    def promises(self) -> Sequence[Promise]:
        """In force."""

    @property
    def protected(self) -> frozenset[str]:
        """Volumes that some promise covers."""

    def class_of(self, volume: str) -> VolumeClass:
        """Priority and floor."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run found.

    Attributes:
        caps: as ``PolicyStore.publish`` takes them.
        capacity: one row a (backend, promise, step).
        costs: one row a backend, as ``cost_model.cost_rows`` makes them.
    """

    caps: list[dict[str, Any]]
    capacity: list[dict[str, Any]]
    costs: list[dict[str, Any]] = field(default_factory=list)


# -- Capacities


def capacities(
    points: Iterable[Mapping[str, Any]], former: Mapping[str, float], promises: Sequence[Promise] = ()
) -> list[dict[str, Any]]:
    """One row a (backend, promise, step), from the rows of ``transforms.promise_points``.

    Args:
        points: backend, sla, objective, allowed, load, counted, missed; where known step (0 is the first),
            at_us, and latency_us, the promised percentile.
        former: of backends, the newest valid capacity of an earlier policy.
        promises: in force, for the steps' thresholds.
    """
    groups: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for point in points:
        groups[point["backend"], point["sla"], point["objective"], point.get("step", 0)].append(point)
    by_key = {promise.key: promise for promise in promises}
    rows = []
    for (backend, sla, objective, step), members in sorted(groups.items()):
        found = capacity(_intervals(members, step, by_key.get((sla, objective))))
        rows.append(_capacity_row(found, former.get(backend)))
        rows[-1] |= {"backend": backend, "sla": sla, "objective": objective, "step": step}
    return rows


def _intervals(members: Sequence[Mapping[str, Any]], step: int, promise: Promise | None) -> Intervals:
    load, counted, missed = (
        np.array([float(member[name]) for member in members]) for name in ("load", "counted", "missed")
    )
    at_us = latency = None
    if all(member.get("at_us") is not None for member in members):
        at_us = np.array([member["at_us"] for member in members], dtype=np.int64)
    if promise is not None and step < len(promise.curve):
        raw = [member.get("latency_us") for member in members]
        latency = np.array([np.nan if each is None else float(each) for each in raw])
        latency /= promise.curve[step].threshold_us
    return Intervals(load, counted, missed, float(members[0]["allowed"]), latency, at_us)


def _capacity_row(found: Capacity, former: float | None) -> dict[str, Any]:
    value, reason = found.cost_per_s, found.reason
    if value is None and former is not None:
        value, reason = former, f"{reason}; the last valid value is kept"
        if found.unlimited and found.highest_kept > former:
            value, reason = found.highest_kept, f"{found.reason}; more than the last valid value"
    return {
        "cost_per_s": value,
        "points": found.points,
        "highest_load": found.highest_load,
        "isotonic": found.isotonic,
        "bound": found.bound,
        "queueing": found.queueing,
        "reason": reason,
    }


# -- Caps


@dataclass(frozen=True, slots=True)
class _Need:
    """What a promise needs of a backend, by step: (up to so many I/Os a second, capacity)."""

    promise: Promise | None
    weight: float
    steps: tuple[tuple[float, float], ...]

    def limit(self, rows: Sequence[Mapping[str, Any]]) -> LoadLimit:
        """In an hour with these demands of the backend's volumes."""
        return LoadLimit(min(cost for _, cost in self._steps_at(rows)), self.weight)

    def _steps_at(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[tuple[float, float]]:
        if self.promise is None or len(self.steps) == 1:
            return self.steps
        own = [row for row in rows if self.promise.has_volume(row["volume"])]
        if not own or any(row.get("iops_p95") is None for row in own):
            return self.steps  # how much it asks for is not known: any of them
        low, high = sum(row["iops_p50"] for row in own), sum(row["iops_p95"] for row in own)
        found = []
        below = 0.0
        for up_to, cost in self.steps:
            if up_to >= low and below <= high:
                found.append((up_to, cost))
            below = up_to
        return found or self.steps[-1:]


def _needs(rows: Iterable[Mapping[str, Any]], promises: Sequence[Promise]) -> dict[str, list[_Need]]:
    """By backend, from the rows of ``capacities``; steps without a capacity need nothing."""
    by_key = {promise.key: promise for promise in promises}
    steps: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["cost_per_s"] is not None:
            promise = by_key.get((row["sla"], row["objective"]))
            known = promise is not None and row["step"] < len(promise.curve)
            up_to = promise.curve[row["step"]].up_to_iops if promise is not None and known else float("inf")
            steps[row["backend"], row["sla"], row["objective"]].append((up_to, row["cost_per_s"]))
    found: dict[str, list[_Need]] = defaultdict(list)
    for (backend, *key), costs in steps.items():
        promise = by_key.get((key[0], key[1]))
        weight = float(promise.priority if promise is not None else Priority.GOLD)
        found[backend].append(_Need(promise, weight, tuple(sorted(costs))))
    return found


def build(
    points: Iterable[Mapping[str, Any]], demands: Sequence[Mapping[str, Any]], known: Classes
) -> Policy:
    """The policy, from rows of ``transforms.promise_points`` and ``transforms.hourly_demand``.

    Args:
        points: as for ``capacities``.
        demands: backend, volume, hour_of_week (UTC: ``demand.expected_rows``), p50, p95 (cost a second);
            where known iops_p50, iops_p95 (offered I/Os a second) and mean_cost (of an I/O).
        known: agreements in force and the former capacities.
    """
    found = capacities(points, known.former_capacity, known.promises)
    return Policy(caps_of_week(found, demands, known), found)


def caps_of_week(
    found: Sequence[Mapping[str, Any]], demands: Sequence[Mapping[str, Any]], known: Classes
) -> list[dict[str, Any]]:
    """Caps of all volumes and hours, from the rows of ``capacities`` and the demands as for ``build``."""
    needs = _needs(found, known.promises)
    by_hour: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in demands:
        if row["backend"] in needs:
            by_hour[row["backend"], row["hour_of_week"]].append(row)
    # Once a volume, not once a row: there are 168 of each, and a class is found by matching patterns.
    volumes = {row["volume"] for rows in by_hour.values() for row in rows}
    terms = {volume: _terms(volume, known) for volume in volumes}
    shares: dict[str, dict[int, HourShare]] = defaultdict(dict)
    for (backend, hour), rows in by_hour.items():
        members = [_demand(row, terms[row["volume"]]) for row in rows]
        limits = [need.limit(rows) for need in needs[backend]]
        for volume, share in shares_of_hour(limits, members).items():
            shares[volume][hour] = share
    caps = {volume: limit_change(hours) for volume, hours in shares.items()}
    return [
        {
            "volume": row["volume"],
            "hour_of_week": row["hour_of_week"],
            "cost_per_s": caps.get(row["volume"], {}).get(row["hour_of_week"]),
            "demand_p50": row["p50"],
            "demand_p95": row["p95"],
        }
        for row in sorted(demands, key=lambda row: (row["volume"], row["hour_of_week"]))
    ]


@dataclass(frozen=True, slots=True)
class _Terms:
    """What agreements say of a volume.

    Attributes:
        promised_iops: up to how much a promise of its own holds; 0 without one.
    """

    weight: float
    floor_iops: float
    floor_bytes_per_s: float
    promised_iops: float


def _terms(volume: str, known: Classes) -> _Terms:
    own = [
        promise
        for promise in known.promises
        if promise.curve and volume in known.protected and promise.has_volume(volume)
    ]
    volume_class = known.class_of(volume)
    return _Terms(
        weight=float(max([volume_class.priority, *(promise.priority for promise in own)])),
        floor_iops=volume_class.floor_iops,
        floor_bytes_per_s=volume_class.floor_bytes_per_s,
        promised_iops=max((promise.curve[-1].up_to_iops for promise in own), default=0.0),
    )


def _demand(row: Mapping[str, Any], terms: _Terms) -> Demand:
    mean_cost = row.get("mean_cost")
    floor = terms.floor_iops
    promised = row["p95"] if terms.promised_iops else 0.0
    if mean_cost is not None:
        mean_bytes = max(mean_cost - 1.0, LEAST_UNIT) * BYTES_A_UNIT
        floor = max(floor * mean_cost, terms.floor_bytes_per_s / mean_bytes * mean_cost)
        promised = min(promised, terms.promised_iops * mean_cost)
    return Demand(
        volume=row["volume"],
        p50=row["p50"],
        p95=row["p95"],
        weight=terms.weight,
        floor=floor,
        promised=promised,
    )
