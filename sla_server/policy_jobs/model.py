"""A policy from what Spark found: which capacity each promise needs, and caps of volumes by hour of the week.

Rows in, rows out; the arithmetic is in ``capacity`` and ``caps``. One backend may serve several promises,
each with several steps of its demand curve. Each (promise, step) has a capacity of its own. In an hour of the
week a promise is at the steps that its volumes' demand between p50 and p95 falls on, and needs the smallest
capacity of them. Where the data tell none, the last valid one of this step is kept, else the lowest of its
backend, marked as such, and never less than a load at which it was kept now; where there is none, nothing is
capped for it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sla_server.agreements.selectors import matches
from sla_server.policy_jobs.bursts import room_of
from sla_server.policy_jobs.caps import Demand, HourShare, LoadLimit, limit_change, shares_of_hour

if TYPE_CHECKING:  # not in Spark's workers, which would import all of agreements
    from sla_server.agreements.promise import Promise

BYTES_A_UNIT: Final = 65_536  # an I/O costs 1, and 1 more for so many bytes (docs/formats/messages.md)
LEAST_UNIT: Final = 1 / 64  # of the bytes of a mean I/O, as ``services.control.sharing`` has it


StepKey = tuple[str, str, str, int]
"""Backend, sla, objective, step of the curve."""


def with_former(
    row: Mapping[str, Any],
    former: Mapping[str, float],
    own: Mapping[StepKey, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """A capacity, or where the data do not tell it what was known of it, or is of its backend.

    Args:
        row: backend, sla, objective, step, cost_per_s, reason, unlimited (kept at every load seen),
            highest_kept, minutes (what minutes alone say, for where bursts were not seen and nothing else is
            known).
        former: of backends, the lowest valid capacity of the newest policy.
        own: of steps, theirs in it.
    """
    value, reason = row["cost_per_s"], row["reason"]
    is_former = row["backend"] in former
    known = former.get(row["backend"], row.get("minutes"))
    if (last := own.get((row["backend"], row["sla"], row["objective"], row["step"]))) is not None:
        is_former, known = True, last
    if value is None and known is not None:
        value, reason = known, f"{reason}; {'the last valid value is kept' if is_former else 'by minutes'}"
        if row["unlimited"] and row["highest_kept"] > known:
            value, reason = (
                row["highest_kept"],
                f"{row['reason']}; the largest of them, above the {known:.0f} weighted IOPS known "
                f"{'before' if is_former else 'by minutes'}",
            )
    return {**row, "cost_per_s": value, "reason": reason}


# -- What promises need of a backend


@dataclass(frozen=True, slots=True)
class PromiseNeed:
    """What a promise needs of a backend.

    Attributes:
        weight: its priority.
        volumes: it covers; names or glob patterns.
        steps: of its curve, rising: (up to so many I/Os a second, capacity).
    """

    weight: float
    volumes: tuple[str, ...]
    steps: tuple[tuple[float, float], ...]

    def limit(self, iops: Mapping[str, tuple[float, float] | None]) -> LoadLimit:
        """In an hour in which volumes offer so many I/Os a second (p50, p95; None: not known)."""
        return LoadLimit(min(cost for _, cost in self._steps_at(iops)), self.weight)

    def _steps_at(self, iops: Mapping[str, tuple[float, float] | None]) -> Sequence[tuple[float, float]]:
        if len(self.steps) == 1:
            return self.steps
        own = [offered for volume, offered in iops.items() if matches(volume, self.volumes)]
        known = [offered for offered in own if offered is not None]
        if not own or len(known) < len(own):
            return self.steps  # how much it asks for is not known: any of them
        low, high = sum(p50 for p50, _ in known), sum(p95 for _, p95 in known)
        found = []
        below = 0.0
        for up_to, cost in self.steps:
            if up_to >= low and below <= high:
                found.append((up_to, cost))
            below = up_to
        return found or self.steps[-1:]


def needs_of(rows: Iterable[Mapping[str, Any]], promises: Sequence[Promise]) -> dict[str, list[PromiseNeed]]:
    """By backend, from capacities; steps without one need nothing.

    Args:
        rows: backend, sla, objective, step, cost_per_s.
        promises: in force.
    """
    by_key = {promise.key: promise for promise in promises}
    steps: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        promise = by_key[row["sla"], row["objective"]]
        if row["cost_per_s"] is not None:
            step = promise.curve[row["step"]]
            steps[row["backend"], row["sla"], row["objective"]].append((step.up_to_iops, row["cost_per_s"]))
    found: dict[str, list[PromiseNeed]] = defaultdict(list)
    for (backend, sla, objective), costs in sorted(steps.items()):
        promise = by_key[sla, objective]
        found[backend].append(PromiseNeed(float(promise.priority), promise.volumes, tuple(sorted(costs))))
    return dict(found)


def rooms_of(rows: Iterable[Mapping[str, Any]], promises: Sequence[Promise]) -> dict[str, float]:
    """Of each backend the cost units that may come at once: the least that a promise on it allows.

    Args:
        rows: backend, sla, objective, step, cost_per_s.
        promises: in force.
    """
    by_key = {promise.key: promise for promise in promises}
    found: dict[str, float] = {}
    for row in rows:
        if row["cost_per_s"] is not None:
            step = by_key[row["sla"], row["objective"]].curve[row["step"]]
            room = room_of(row["cost_per_s"], step.threshold_us)
            found[row["backend"]] = min(room, found.get(row["backend"], room))
    return found


def encode(needs: Sequence[PromiseNeed]) -> str:
    """For a column of a table."""
    return json.dumps([asdict(need) for need in needs])


def decode(text: str | None) -> list[PromiseNeed]:
    """The reverse; none of None."""
    return [
        PromiseNeed(item["weight"], tuple(item["volumes"]), tuple((up, cost) for up, cost in item["steps"]))
        for item in json.loads(text or "[]")
    ]


# -- Caps


def caps_of_week(
    rows: Sequence[Mapping[str, Any]], needs: Sequence[PromiseNeed]
) -> dict[str, dict[int, float | None]]:
    """Caps of the volumes of one backend by hour of the week; volumes that give way to none are not in it.

    Args:
        rows: volume, hour_of_week, p50, p95 (cost a second), mean_cost (of an I/O, None: not known), weight,
            floor_iops, floor_bytes_per_s, promised_iops (up to so much a promise of its own holds, else 0);
            peak (cost a second while it is at work), where cuts say it.
        needs: of the promises on the backend.
    """
    by_hour: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_hour[row["hour_of_week"]].append(row)
    return caps_of_hours(by_hour.items(), needs)


def caps_of_hours(
    hours: Iterable[tuple[int, Sequence[Mapping[str, Any]]]], needs: Sequence[PromiseNeed]
) -> dict[str, dict[int, float | None]]:
    """The same of hours with their rows, looked at once each: those of a week need not be held together."""
    shares: dict[str, dict[int, HourShare]] = defaultdict(dict)
    for hour, members in hours:
        iops = {row["volume"]: _iops(row) for row in members}
        limits = list(dict.fromkeys(need.limit(iops) for need in needs))  # of equals one says all
        for volume, share in shares_of_hour(limits, [_demand(row) for row in members]).items():
            shares[volume][hour] = share
    return {volume: limit_change(of_volume) for volume, of_volume in shares.items()}


def _iops(row: Mapping[str, Any]) -> tuple[float, float] | None:
    mean_cost = row["mean_cost"]
    return (row["p50"] / mean_cost, row["p95"] / mean_cost) if mean_cost else None


def _demand(row: Mapping[str, Any]) -> Demand:
    mean_cost = row["mean_cost"]
    floor = row["floor_iops"]
    promised = row["p95"] if row["promised_iops"] else 0.0
    if mean_cost:
        mean_bytes = max(mean_cost - 1.0, LEAST_UNIT) * BYTES_A_UNIT
        floor = max(floor * mean_cost, row["floor_bytes_per_s"] / mean_bytes * mean_cost)
        promised = min(promised, row["promised_iops"] * mean_cost)
    peak = row.get("peak") or 0.0
    return Demand(row["volume"], row["p50"], row["p95"], row["weight"], floor, promised, peak)
