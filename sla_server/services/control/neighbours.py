"""Who may be slowed down for whom, and how hard.

A victim may ask for volumes of lower priority on its backend; how far down the classes depends on its
*urgency* g, which follows the error budget: below 0.5 best-effort only, below 1 bronze too, else silver. A
volume of the victim's own priority is touched only while its demand is above its own curve, and then not
below the curve's end: two promises of one priority never take from each other what both were promised.
Volumes that use less than 5 % of the backend's cost are left alone.

Pure functions. Source: SLA-MODEL.md 3 "Urgency", "Several victims".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sla_server.agreements.promise import Priority, VolumeClass
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Claim

COST_UNIT_BYTES = 65_536
"""Bytes that cost as much as one I/O (docs/formats/messages.md)."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A volume on the victim's backend; rates in cost units a second.

    Attributes:
        cost_per_s: what it uses now.
        peak: the most it used of late, fading.
        floor: never throttled below this.
        queueing: a cap hides its demand (I/Os held back).
        curve_end: cost rate at the end of its own curve while its demand is above it, else None.
    """

    volume: str
    priority: Priority
    cost_per_s: float
    peak: float
    floor: float
    queueing: bool
    curve_end: float | None = None


@dataclass(frozen=True, slots=True)
class NeighbourTerms:
    """What the agreements say of a volume as a neighbour."""

    priority: Priority
    floor_iops: float
    floor_bytes_per_s: float
    cap_iops: float | None
    agreed: bool

    def floor_cost(self, mean_cost: float) -> float:
        """Floor as a cost rate, for I/Os of ``mean_cost`` each (1 + bytes / 65,536)."""
        mean_bytes = max(mean_cost - 1.0, 1 / 64) * COST_UNIT_BYTES
        return max(self.floor_iops * mean_cost, self.floor_bytes_per_s / mean_bytes * mean_cost)


def standing(volume: str, classes: Iterable[VolumeClass], settings: ControlSettings) -> NeighbourTerms:
    """Highest priority, largest floor and smallest cap of all agreements that cover ``volume``."""
    found = [c for c in classes if volume in c.volumes or any(fnmatchcase(volume, p) for p in c.volumes)]
    if not found:
        return NeighbourTerms(Priority.BEST_EFFORT, settings.default_floor_iops, 0.0, None, agreed=False)
    caps = [c.cap_iops for c in found if c.cap_iops is not None]
    return NeighbourTerms(
        priority=max(c.priority for c in found),
        floor_iops=max(c.floor_iops for c in found),
        floor_bytes_per_s=max(c.floor_bytes_per_s for c in found),
        cap_iops=min(caps) if caps else None,
        agreed=True,
    )


def urgency(burn_1h: float, remaining_ratio: float) -> float:
    """Urgency g = clamp(max(burn_1h, (0.25 - remaining) / 0.25), 0, 2)."""
    return min(max(burn_1h, (0.25 - remaining_ratio) / 0.25, 0.0), 2.0)


def highest_touched(victim: Priority, g: float) -> Priority | None:
    """Highest priority that a victim of this urgency may slow down; None for none."""
    limit = Priority.BEST_EFFORT if g < 0.5 else Priority.BRONZE if g < 1 else Priority.SILVER
    lower = [p for p in Priority if p < victim and p <= limit]
    return max(lower) if lower else None


def may_slow(victim: Priority, g: float, neighbour: Neighbour) -> bool:
    """Whether this neighbour may be slowed down for such a victim, its size aside."""
    if neighbour.priority == victim:
        return neighbour.curve_end is not None
    limit = highest_touched(victim, g)
    return limit is not None and neighbour.priority <= limit


def nobody_because(
    own: Collection[str],
    victim: Priority,
    g: float,
    neighbours: Mapping[str, Neighbour],
    settings: ControlSettings,
) -> tuple[str, str]:
    """Why a victim with the volumes ``own`` finds nobody to slow down: (event kind, text)."""
    others = [n for v, n in neighbours.items() if v not in own and n.cost_per_s > 0]
    equals = sorted(n.volume for n in others if n.priority >= victim)
    spared = sorted(n.volume for n in others if n.priority < victim)
    if equals and not spared:
        names = ", ".join(equals)
        return (
            "infeasible",
            f"{names} of the same or higher priority share the backend and keep their promises",
        )
    why = "no other volume uses this backend"
    if spared:
        why = (
            f"{', '.join(spared)} of lower priority use less than {settings.small_share_ratio:.0%} of the "
            f"backend's cost, or may not be slowed down while the error budget lasts (urgency {g:.2f})"
        )
    return "unattributed", f"nobody to slow down: {why}"


def floor_for(victim: Priority, neighbour: Neighbour) -> float:
    """Its floor towards this victim: a volume of equal priority keeps what its curve promises."""
    if neighbour.priority == victim and neighbour.curve_end is not None:
        return max(neighbour.floor, neighbour.curve_end)
    return neighbour.floor


def claims(
    managed: Mapping[str, Neighbour], victim: Priority, backend_cost: float, settings: ControlSettings
) -> dict[str, Claim]:
    """What each managed volume brings to the water-filling."""
    slack = settings.demand_slack_ratio * backend_cost
    return {
        volume: Claim(
            demand=float("inf") if n.queueing else settings.demand_factor * n.peak + slack,
            floor=floor_for(victim, n),
            weight=float(n.priority),
        )
        for volume, n in managed.items()
    }
