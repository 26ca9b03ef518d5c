"""Who may be slowed down for whom, and how an allowed rate is shared among them.

A victim may ask for volumes of lower priority on its backend; how far down the classes depends on its
*urgency* g, which follows the error budget: below 0.5 best-effort only, below 1 bronze too, else silver. A
volume of the victim's own priority is touched only while its demand is above its own curve, and then not
below the curve's end: two promises of one priority never take from each other what both were promised.
Volumes that use less than 5 % of the backend's cost are left alone. Clients of a divided volume that are of
one priority count together, as many small ones are one large one; of them the smallest, which make up less
than 5 %, are left alone.

Classes have an order, in whom to slow down and in what each gets: one gives way only when those below it are
at their floors (``by_class``), and what it is known to want comes before what they want (``share``).

The rest is weighted max-min with floors. Pour the allowance C over volumes as water over a floor of steps:
each volume v gets ``x_v = min(d_v, max(f_v, w_v * level))`` and the level is such that the sum is C. A volume
that wants less than its share gets what it wants, and what it leaves raises the level for the others (work
conservation).

    rate
     |        ____
     |  level ~~~~|~~~~~~~~~~~~~~   d: wants less than the level, gets all of it
     |  ____      |          ____   f: a floor above the level is kept
     | | d  |     |         | f  |
     +-+----+-----+---------+----+-> volumes (width = weight)

Pure functions. Source: SLA-MODEL.md 3 "Urgency", "Several victims", "Sharing C".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sla_server.agreements.promise import Priority, VolumeClass
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.targets import named, volume_of

COST_UNIT_BYTES: Final = 65_536
"""Bytes that cost as much as one I/O (docs/formats/messages.md)."""
Parts = Mapping[VolumeClass | None, float]
"""What a client has of each floor that covers it, 0..1; None: of that of a volume without an agreement."""
WHOLE: Final[Parts] = {}
"""All of every floor."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A volume on the victim's backend, or one client of it; rates in cost units a second.

    Attributes:
        volume: its target (``targets``).
        cost_per_s: what it uses now.
        peak: the most it used recently, fading.
        floor: never throttled below this.
        queueing: a cap hides its demand (I/Os held back).
        curve_end: cost rate at the end of its own curve while its demand is above it, else None.
        last_cost_per_s: what it used in the newest cut.
        under_way: its I/Os at the storage when that ended.
        seen_ns: when the newest cut came; of several gateways the oldest of these with a queue.
    """

    volume: str
    priority: Priority
    cost_per_s: float
    peak: float
    floor: float
    queueing: bool
    curve_end: float | None = None
    last_cost_per_s: float = math.inf
    under_way: int = 0
    seen_ns: int = 0


class Neighbours(dict[str, Neighbour]):
    """The neighbours of a backend that may count, by target.

    Of a large backend small ones are left out: ``left_out`` of them; they use ``rest_cost_per_s`` together.
    """

    left_out: int = 0
    rest_cost_per_s: float = 0.0


def cost_of(neighbours: Mapping[str, Neighbour]) -> float:
    """What all of a backend use, also those left out."""
    rest = neighbours.rest_cost_per_s if isinstance(neighbours, Neighbours) else 0.0
    return sum(n.cost_per_s for n in neighbours.values()) + rest


def count_of(neighbours: Mapping[str, Neighbour]) -> int:
    """How many there are, with those left out."""
    return len(neighbours) + (neighbours.left_out if isinstance(neighbours, Neighbours) else 0)


@dataclass(frozen=True, slots=True)
class NeighbourTerms:
    """What the agreements say of a volume as a neighbour.

    Attributes:
        caps: agreements for all clients that cap it; ``client_caps``: those that cap clients they name.
    """

    priority: Priority
    floor_iops: float
    floor_bytes_per_s: float
    agreed: bool
    caps: tuple[VolumeClass, ...] = ()
    client_caps: tuple[VolumeClass, ...] = ()

    def floor_cost(self, mean_cost: float) -> float:
        """Floor as a cost rate, for I/Os of ``mean_cost`` each (1 + bytes / 65,536)."""
        mean_bytes = max(mean_cost - 1.0, 1 / 64) * COST_UNIT_BYTES
        return max(self.floor_iops * mean_cost, self.floor_bytes_per_s / mean_bytes * mean_cost)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one volume brings to the sharing; rates in cost units a second.

    Attributes:
        demand: what it would use, infinite while it is queueing at a cap that hides its demand.
        floor: never gets less, even when the floors together exceed what is shared.
        weight: 8 gold, 4 silver, 2 bronze, 1 best-effort.
        known: of its demand, what it has used recently and room above it: comes before classes below.
    """

    demand: float
    floor: float
    weight: float
    known: float = 0.0


def terms(
    volume: str,
    classes: Iterable[VolumeClass],
    settings: ControlSettings,
    client: str = "",
    parts: Parts = WHOLE,
) -> NeighbourTerms:
    """Highest priority, largest floor and the caps of all agreements that cover ``volume``.

    An agreement that names clients caps those, not the volume.

    With a ``client`` only those that cover its use of the volume. A floor is promised to the volume, so a
    client has ``parts`` of it (``client_floors``).
    """
    found = [c for c in classes if c.has_volume(volume) and (not client or c.has_client(client))]
    if not found:
        floor_iops = settings.default_floor_iops * parts.get(None, 1.0)
        return NeighbourTerms(Priority.BEST_EFFORT, floor_iops, 0.0, agreed=False)
    capped = [c for c in found if c.cap_iops is not None]
    return NeighbourTerms(
        priority=max(c.priority for c in found),
        floor_iops=max(c.floor_iops * parts.get(c, 1.0) for c in found),
        floor_bytes_per_s=max(c.floor_bytes_per_s * parts.get(c, 1.0) for c in found),
        agreed=True,
        caps=tuple(c for c in capped if "*" in c.clients),
        client_caps=tuple(c for c in capped if "*" not in c.clients),
    )


def part_of(n: Neighbour) -> tuple[str, Priority]:
    """What a neighbour counts with: its volume, and of the clients of a divided one those of its priority."""
    return volume_of(n.volume), n.priority


def largest(members: Sequence[Neighbour], rest_ratio: float) -> list[Neighbour]:
    """Of these the largest, in their order; those left out use at most ``rest_ratio`` of all, together."""
    left = rest_ratio * sum(n.cost_per_s for n in members)
    small = set[str]()
    for n in sorted(members, key=lambda n: n.cost_per_s):
        left -= n.cost_per_s
        if left < 0:
            break
        small.add(n.volume)
    return [n for n in members if n.volume not in small]


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


def class_of(victim: Priority, neighbour: Neighbour) -> int:
    """Place of a neighbour in the order in which classes give way, the first lowest.

    What a volume of the victim's own priority wants beyond its curve was promised to no one: it is as
    best-effort.
    """
    return int(Priority.BEST_EFFORT if neighbour.priority == victim else neighbour.priority)


def by_class(
    victim: Priority,
    g: float,
    spared: Collection[str],
    neighbours: Mapping[str, Neighbour],
    settings: ControlSettings,
) -> list[tuple[int, list[Neighbour]]]:
    """Neighbours that count and may be slowed down for such a victim, as (class, members), lowest first.

    Args:
        victim: its priority; ``g``: its urgency.
        g: see there.
        spared: volumes that are left out: the victim's own.
        neighbours: all volumes of the backend.
        settings: what is too small to count.
    """
    ratio = settings.small_share_ratio
    least, users = ratio * cost_of(neighbours), dict[tuple[str, Priority], list[Neighbour]]()
    for target, n in neighbours.items():
        if n.cost_per_s > 0 and target not in spared and may_slow(victim, g, n):
            users.setdefault(part_of(n), []).append(n)
    found: dict[int, list[Neighbour]] = {}
    for members in users.values():
        if sum(n.cost_per_s for n in members) >= least:
            for n in largest(members, ratio):
                found.setdefault(class_of(victim, n), []).append(n)
    return sorted(found.items())


def why_none(
    victim_volumes: Collection[str],
    victim: Priority,
    g: float,
    neighbours: Mapping[str, Neighbour],
    settings: ControlSettings,
) -> tuple[str, str]:
    """Why a victim with these volumes finds no neighbour to slow down: (event kind, text)."""
    others = [n for v, n in neighbours.items() if v not in victim_volumes and n.cost_per_s > 0]
    least = settings.small_share_ratio * cost_of(neighbours)
    equals = sorted(n.volume for n in others if n.priority >= victim)
    cost: dict[tuple[str, Priority], float] = {}
    for n in others:
        cost[part_of(n)] = cost.get(part_of(n), 0.0) + n.cost_per_s
    small = [n.volume for n in others if n.priority < victim and cost[part_of(n)] < least]
    spared = [n.volume for n in others if n.priority < victim and cost[part_of(n)] >= least]
    names, why = named(equals), []
    if equals and not small and not spared:
        all_others = f"all others that use the backend ({names})"
        return "infeasible", f"{all_others} are of the same or a higher priority: none is slowed down for it"
    if equals:
        why.append(f"{names}: of the same or a higher priority")
    if small:
        why.append(f"{named(small)}: less than {settings.small_share_ratio:.0%} of the backend's cost")
    if spared:
        why.append(f"{named(spared)}: not slowed down while so much error budget is left (urgency {g:.2f})")
    return "unattributed", f"nobody to slow down: {'; '.join(why) or 'no other volume uses this backend'}"


def gives_way(victim: Priority, neighbour: Neighbour) -> bool:
    """Whether a volume that is being slowed down may be slowed further for a victim of this priority."""
    if neighbour.priority == victim:
        return neighbour.curve_end is not None
    return neighbour.priority < victim


def floor_for(victim: Priority, neighbour: Neighbour) -> float:
    """Its floor towards this victim: a volume of equal priority keeps what its curve promises.

    One that does not give way, as it was slowed down for a more important promise, keeps what it uses.
    """
    if neighbour.priority < victim:
        return neighbour.floor
    least = max(neighbour.floor, neighbour.curve_end or 0.0)
    return least if gives_way(victim, neighbour) else max(least, neighbour.cost_per_s)


def claims(
    managed: Mapping[str, Neighbour], victim: Priority, backend_cost: float, settings: ControlSettings
) -> dict[str, Claim]:
    """What each managed volume brings to the sharing."""
    slack = settings.demand_slack_ratio * backend_cost
    members = Counter(map(part_of, managed.values()))
    found = {}
    for volume, n in managed.items():
        recent = settings.demand_factor * n.peak + slack / members[part_of(n)]
        found[volume] = Claim(
            demand=float("inf") if n.queueing else recent,
            floor=floor_for(victim, n),
            weight=float(n.priority),
            known=recent if n.priority < victim else 0.0,
        )
    return found


def allot(allowed: float, managed: Mapping[str, Neighbour], claims: Mapping[str, Claim]) -> dict[str, float]:
    """All of ``allowed``, by target: first among volumes, then among the clients of each that is divided.

    So a volume has no more of it because it is divided, however many names its clients have.
    """
    parts: dict[tuple[str, Priority], dict[str, Claim]] = {}
    for target, n in managed.items():
        parts.setdefault(part_of(n), {})[target] = claims[target]
    names = {next(iter(members)): members for members in parts.values()}
    wholes = {name: _together(members.values()) for name, members in names.items()}
    found: dict[str, float] = {}
    for name, rate in spread(allowed, share(allowed, wholes), wholes).items():
        members = names[name]
        found |= spread(rate, water_fill(rate, members), members) if len(members) > 1 else {name: rate}
    return found


def _together(claims: Collection[Claim]) -> Claim:
    """Claims of one weight as one."""
    weight = next(iter(claims)).weight
    demand, floor = sum(c.demand for c in claims), sum(c.floor for c in claims)
    return Claim(demand, floor, weight, sum(c.known for c in claims))


def share(allowed: float, claims: Mapping[str, Claim]) -> dict[str, float]:
    """Share ``allowed`` in the order of classes: what one is known to want comes before those below it.

    Returns:
        As ``water_fill``, which shares within a class and what is left.
    """
    lifted = dict(claims)
    left = allowed - sum(claim.floor for claim in claims.values())
    weights = sorted({claim.weight for claim in claims.values()})
    for weight in reversed(weights[1:]):
        members = {name: claim for name, claim in claims.items() if claim.weight == weight}
        floors = sum(claim.floor for claim in members.values())
        wanted = sum(max(min(claim.known, claim.demand) - claim.floor, 0.0) for claim in members.values())
        granted = water_fill(floors + max(min(wanted, left), 0.0), members)
        left -= sum(granted.values()) - floors
        lifted |= {name: replace(members[name], floor=rate) for name, rate in granted.items()}
    return water_fill(allowed, lifted)


def water_fill(allowed: float, claims: Mapping[str, Claim]) -> dict[str, float]:
    """Share ``allowed`` among the claims.

    Returns:
        A rate for each name: never below its floor; the sum is at most max(allowed, sum of floors), and equal
        to ``allowed`` when demands can use it.

    The level is found exactly: the sum is piecewise linear and rising in the level, with corners at f/w and
    d/w.
    """
    if not claims:
        return {}
    # A demand below its floor is still entitled to the floor: it may start to use it at any moment.
    wants = {name: max(claim.demand, claim.floor) for name, claim in claims.items()}

    def poured(level: float) -> float:
        return sum(min(wants[name], max(c.floor, c.weight * level)) for name, c in claims.items())

    corners = sorted(
        {c.floor / c.weight for c in claims.values()}
        | {wants[name] / c.weight for name, c in claims.items() if math.isfinite(wants[name])}
        | {0.0}
    )
    above = bisect_left(corners, allowed, key=poured)
    low = corners[above - 1] if above else 0.0
    if above < len(corners):
        # Between two corners the sum is a straight line.
        rise = poured(corners[above]) - poured(low)
        level = low + (corners[above] - low) * (max(allowed - poured(low), 0.0) / rise if rise > 0 else 0.0)
    else:
        # Beyond the last corner only those without a limit still rise.
        slope = sum(c.weight for name, c in claims.items() if math.isinf(wants[name]))
        level = low + ((allowed - poured(low)) / slope if slope else 0.0)
    return {name: min(wants[name], max(c.floor, c.weight * level)) for name, c in claims.items()}


def spread(allowed: float, shares: Mapping[str, float], claims: Mapping[str, Claim]) -> dict[str, float]:
    """Hand out by weight what no volume claimed: a cap is no reservation. The sum is within ``allowed``."""
    rest = max(allowed - sum(shares.values()), 0.0)
    weights = sum(claims[name].weight for name in shares)
    return {name: share + rest * claims[name].weight / weights for name, share in shares.items()}


def split(
    rate: float,
    recent: Mapping[str, float],
    recent_ratio: float,
    parts: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Split a cap over gateways: ``recent_ratio`` by recent use, the rest equally or by ``parts``.

    Args:
        rate: the cap.
        recent: gateway_id to its recent rate; must not be empty.
        recent_ratio: 0..1.
        parts: share of each gateway, instead of equal ones; their sum is 1.
    """
    total = sum(recent.values())
    shares = parts or dict.fromkeys(recent, 1.0 / len(recent))
    if total <= 0:
        return {gateway: rate * shares[gateway] for gateway in recent}
    return {
        gateway: rate * (recent_ratio * (use / total) + (1 - recent_ratio) * shares[gateway])
        for gateway, use in recent.items()
    }
