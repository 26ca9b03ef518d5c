"""From collected points and demands to a policy: caps by hour of the week, and a report. Pure.

One backend may serve several promises; its capacity is the smallest that any of them needs. A backend for
which the data show no limit keeps the last valid capacity of an earlier policy, marked as such; without one,
nothing on it is capped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sla_server.agreements.promise import VolumeClass
from sla_server.policy_jobs.model import Demand, capacity, caps_for_hour, limit_change


class Classes(Protocol):
    """What a policy must know of the volumes."""

    @property
    def former_capacity(self) -> dict[str, float]:
        """Backend to the newest valid capacity of an earlier policy."""

    @property
    def protected(self) -> frozenset[str]:
        """Volumes that some promise covers."""

    def class_of(self, volume: str) -> VolumeClass:
        """Priority and floor."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``caps`` as ``PolicyStore.publish`` takes them; ``capacity`` one row a (backend, promise)."""

    caps: list[dict[str, Any]]
    capacity: list[dict[str, Any]]


def capacities(points: Iterable[Mapping[str, Any]], former: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row a (backend, promise), from the rows of ``transforms.promise_points``."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for point in points:
        groups[point["backend"], point["sla"], point["objective"]].append(point)
    rows = []
    for (backend, sla, objective), members in sorted(groups.items()):
        load, counted, missed = (
            np.array([float(member[name]) for member in members]) for name in ("load", "counted", "missed")
        )
        found = capacity(load, counted, missed, float(members[0]["allowed"]))
        value, reason = found.cost_per_s, found.reason
        if value is None and backend in former:
            value, reason = former[backend], f"{found.reason}; the last valid value is kept"
        rows.append(
            {
                "backend": backend,
                "sla": sla,
                "objective": objective,
                "cost_per_s": value,
                "points": found.points,
                "highest_load": found.highest_load,
                "reason": reason,
            }
        )
    return rows


def build(
    points: Iterable[Mapping[str, Any]], demands: Sequence[Mapping[str, Any]], known: Classes
) -> Policy:
    """The policy, from rows of ``transforms.promise_points`` and ``transforms.hourly_demand``."""
    found = capacities(points, known.former_capacity)
    limits: dict[str, float] = {}
    for limit in found:
        if limit["cost_per_s"] is not None:
            limits[limit["backend"]] = min(limit["cost_per_s"], limits.get(limit["backend"], float("inf")))
    by_hour: dict[tuple[str, int], list[Demand]] = defaultdict(list)
    # Once a volume, not once a row: there are 168 of each, and a class is found by matching patterns.
    classes = {volume: known.class_of(volume) for volume in {row["volume"] for row in demands}}
    for row in demands:
        demand = _demand(row, classes[row["volume"]], row["volume"] in known.protected)
        by_hour[row["backend"], row["hour_of_week"]].append(demand)
    caps: dict[str, dict[int, float | None]] = defaultdict(dict)
    for (backend, hour), members in by_hour.items():
        if backend in limits:
            for volume, cap in caps_for_hour(limits[backend], members).items():
                caps[volume][hour] = cap
    limited = {volume: limit_change(hours) for volume, hours in caps.items()}
    rows = [
        {
            "volume": row["volume"],
            "hour_of_week": row["hour_of_week"],
            "cost_per_s": limited.get(row["volume"], {}).get(row["hour_of_week"]),
            "demand_p50": row["p50"],
            "demand_p95": row["p95"],
        }
        for row in sorted(demands, key=lambda row: (row["volume"], row["hour_of_week"]))
    ]
    return Policy(rows, found)


def _demand(row: Mapping[str, Any], volume_class: VolumeClass, is_protected: bool) -> Demand:
    return Demand(
        volume=row["volume"],
        p50=row["p50"],
        p95=row["p95"],
        weight=float(volume_class.priority),
        floor=volume_class.floor_iops,
        protected=is_protected,
    )
