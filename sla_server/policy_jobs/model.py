"""The arithmetic of policies, in numpy and without Spark: capacities, demands, caps by hour of the week.

**Capacity.** For one promise on one backend, every interval gives a point (total load U, I/Os counted, I/Os
missed). More load never makes a shared backend faster, so the miss ratio as a function of U is fitted by
isotonic regression (pool adjacent violators, weighted by I/Os). The capacity C_X is the largest load whose
fitted miss ratio is within what the promise allows, never more than was seen. If no interval broke the
promise, the data show no limit: C_X is unknown and nothing is capped. If all did, there is no load to
recommend either.

**Caps.** In each hour of the week, what is left of C_X after the p95 demand of protected volumes is shared
between the others by weighted max-min (water-filling) with floors. A volume whose p95 demand fits its share
gets no cap. From one hour to the next a cap falls by 25 % at most.

Source: SLA-MODEL.md 3 (sharing) and 4 (points 2 to 4, in their simplest form: no bootstrap and no recency
weights).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import VolumeClass
from sla_server.policy_jobs.transforms import HOURS_A_WEEK

Floats = npt.NDArray[np.float64]
MIN_POINTS: Final = 5  # fewer intervals say nothing about a curve
MIN_IOS: Final = 20  # an interval with fewer I/Os cannot show a percentile
MAX_CHANGE: Final = 0.25  # per hour, SLA-MODEL.md 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the data say of one promise on one backend. ``cost_per_s`` is None where they show no limit."""

    cost_per_s: float | None
    points: int
    highest_load: float
    reason: str


@dataclass(frozen=True, slots=True)
class Demand:
    """One volume in one hour of the week, cost units a second."""

    volume: str
    p50: float
    p95: float
    weight: float
    floor: float
    protected: bool


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Non-decreasing least-squares fit (pool adjacent violators); shapes (n,)."""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append([float(value), float(weight), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, mass, length = blocks.pop()
            below = blocks[-1]
            total = below[1] + mass
            below[0] = (below[0] * below[1] + mean * mass) / total
            below[1] = total
            below[2] += length
    return np.repeat([block[0] for block in blocks], [int(block[2]) for block in blocks]).astype(np.float64)


def capacity(load: Floats, counted: Floats, missed: Floats, allowed_ratio: float) -> Capacity:
    """Largest load at which the promise was kept; arrays of shape (n,), one element an interval."""
    enough = counted >= MIN_IOS
    load, counted, missed = load[enough], counted[enough], missed[enough]
    highest = float(load.max()) if len(load) else 0.0
    if len(load) < MIN_POINTS:
        return Capacity(
            None, len(load), highest, f"only {len(load)} intervals with {MIN_IOS} I/Os, {MIN_POINTS} needed"
        )
    order = np.argsort(load, kind="stable")
    load, counted, missed = load[order], counted[order], missed[order]
    fitted = isotonic(missed / counted, counted)
    kept = fitted <= allowed_ratio
    if kept.all():
        return Capacity(
            None, len(load), highest, "the promise was kept at every load seen: no limit is known"
        )
    if not kept.any():
        return Capacity(
            None, len(load), highest, "the promise was broken at every load seen: no load to recommend"
        )
    return Capacity(float(load[kept].max()), len(load), highest, "largest load at which the promise was kept")


def water_fill(total: float, demand: Floats, floor: Floats, weight: Floats) -> Floats:
    """Weighted max-min shares with floors: ``min(demand, max(floor, weight * level))`` summing to ``total``.

    Shapes (n,). Where the floors alone exceed ``total`` they are returned: a floor is a promise.

    ``services.control.sharing.water_fill`` gives a volume its floor where its demand is below: it caps
    volumes as they are now, and one may begin to use its floor at any moment. Here demands are what is
    expected of an hour, and what a volume will not use is planned for the others; ``caps_for_hour`` gives no
    cap below a floor either.
    """
    lowest = np.minimum(demand, floor)
    if lowest.sum() >= total:
        return lowest
    if demand.sum() <= total:
        return demand.copy()
    low, high = 0.0, float((demand / weight).max())
    for _ in range(60):  # halves the interval each time: exact to 1e-15 of its width
        level = (low + high) / 2
        if np.minimum(demand, np.maximum(floor, weight * level)).sum() > total:
            high = level
        else:
            low = level
    return np.minimum(demand, np.maximum(floor, weight * low))


def caps_for_hour(capacity_cost_per_s: float, demands: Sequence[Demand]) -> dict[str, float | None]:
    """Cap of each unprotected volume; None where its demand fits."""
    head = capacity_cost_per_s - sum(item.p95 for item in demands if item.protected)
    others = [item for item in demands if not item.protected]
    if not others:
        return {}
    shares = water_fill(
        max(head, 0.0),
        np.array([item.p95 for item in others]),
        np.array([item.floor for item in others]),
        np.array([item.weight for item in others]),
    )
    return {
        item.volume: None if item.p95 <= share * (1 + 1e-9) else float(max(share, item.floor))
        for item, share in zip(others, shares, strict=True)
    }


def limit_change(caps: Mapping[int, float | None]) -> dict[int, float | None]:
    """Keep a cap from falling by more than 25 % from one hour to the next (the week is a ring).

    Hours without a cap are left alone: going from none to a cap is what a cap is for.
    """
    limited = dict(caps)
    for _ in range(2):  # twice around the ring: the second round settles hour 0 against hour 167
        for hour in range(HOURS_A_WEEK):
            before, now = limited.get((hour - 1) % HOURS_A_WEEK), limited.get(hour)
            if before is not None and now is not None:
                limited[hour] = max(now, before * (1 - MAX_CHANGE))
    return limited


# -- From collected points and demands to a policy: caps by hour of the week, and a report
#
# One backend may serve several promises; its capacity is the smallest that any of them needs. A backend for
# which the data show no limit keeps the last valid capacity of an earlier policy, marked as such; without
# one, nothing on it is capped.


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
    """What a run found.

    Attributes:
        caps: as ``PolicyStore.publish`` takes them.
        capacity: one row a (backend, promise).
        costs: one row a backend, as ``cost_model.cost_rows`` makes them.
    """

    caps: list[dict[str, Any]]
    capacity: list[dict[str, Any]]
    costs: list[dict[str, Any]] = field(default_factory=list)


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
