"""Groups of volumes under one cap: which volumes each has, and what they are together.

A group is there while a throttle caps it (``policy_manager``). Its rate is divided between the gateways that
carry its volumes, as that of a volume is; at each gateway the data plane shares it between the volumes there,
by weight. So a question about a group is the sum of the answers about its volumes: use, floors, gateways.
A whole client is a group, too, of the volumes that it was seen to use: there the answers are about this
client of each volume, and only the gateways that it uses count.

State: the volumes of each group and their weights. No clock, no I/O. Changed only by the policy manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sla_server.agreements.promise import Priority
from sla_server.services.control.client_use import ClientUse, ClientUses
from sla_server.services.control.sharing import NeighbourTerms
from sla_server.services.control.targets import (
    SEPARATOR,
    group_of,
    is_glob,
    target_of,
    volume_of,
    whole_client_of,
)
from sla_server.services.control.usage import GatewayTable, Usage

MOST_VOLUMES: Final = 64
"""Of a group, whose names all go into each message of caps: 8 KB of its 64 KiB at most."""
MOST_GROUPS: Final = 32
MOST_WEIGHT: Final = 1000.0
SUMMED: Final = tuple(field for field in ClientUse._fields if field not in ("held", "inflight"))

Weights = Mapping[str, float]


class Groups:
    """See the module."""

    def __init__(self) -> None:
        self._weights: dict[str, Weights] = {}

    def set(self, group: str, weights: Weights) -> None:
        """The group has these volumes from now on."""
        self._weights[group] = dict(weights)

    def remove(self, group: str) -> None:
        """No throttle caps it any more."""
        self._weights.pop(group, None)

    def weights(self, group: str) -> Weights:
        """Weight of each of its volumes; empty for a group that is not there."""
        return self._weights.get(group, {})

    def names(self) -> list[str]:
        """Every group, but for whole clients."""
        return [name for name in self._weights if SEPARATOR not in name]

    def of_volume(self, volume: str) -> str:
        """The group that a volume is in; "" for none."""
        return next((name for name in self.names() if volume in self._weights[name]), "")

    def at(self, group: str, table: GatewayTable) -> Weights:
        """Those of its volumes that a gateway carries and can throttle."""
        return {
            volume: weight
            for volume, weight in self.weights(group).items()
            if volume not in table.no_groups and table.carries(volume) and table.can_throttle(volume)
        }

    def use(self, group: str, table: GatewayTable) -> ClientUse | None:
        """What its volumes use together through a gateway; None if none of them was ever seen there."""
        return _sum_of([use for volume in self.weights(group) if (use := table.use.get(volume)) is not None])

    def parts(self, group: str, tables: Mapping[str, GatewayTable]) -> dict[str, float]:
        """Share of each of these gateways by the weights of the volumes there; one of two counts half."""
        carried = {gateway_id: self.at(group, table) for gateway_id, table in tables.items()}
        copies = {v: sum(v in each for each in carried.values()) for v in self.weights(group)}
        sums = {g: sum(weight / copies[v] for v, weight in each.items()) for g, each in carried.items()}
        total = sum(sums.values())
        return {g: found / total for g, found in sums.items()} if total else {}


def _sum_of(uses: list[Usage]) -> ClientUse | None:
    """Use of several volumes together."""
    if not uses:
        return None
    rates = [sum(float(getattr(use, name)) for use in uses) for name in SUMMED]
    return ClientUse._make((*rates, sum(use.held for use in uses), sum(use.inflight for use in uses)))


def terms_of_all(parts: Iterable[str], terms_of: Callable[[str], NeighbourTerms]) -> NeighbourTerms:
    """Terms of a group: the sum of the floors that agreements promise to its volumes, or their clients."""
    agreed = [found for part in parts if (found := terms_of(part)).agreed]
    return NeighbourTerms(
        max((found.priority for found in agreed), default=Priority.BEST_EFFORT),
        sum(found.floor_iops for found in agreed),
        sum(found.floor_bytes_per_s for found in agreed),
        bool(agreed),
    )


class TargetAnswers:
    """What is known of a target: of a volume or a client as the inventory says, of a group the sums.

    Args:
        groups: see ``Groups``.
        terms_of: of a volume or a client; the others alike.
        mean_cost_of: recent cost of its mean I/O.
        carriers_of: gateways that carry it.
        uses: of volumes and clients.
    """

    def __init__(
        self,
        groups: Groups,
        terms_of: Callable[[str], NeighbourTerms],
        mean_cost_of: Callable[[str], float],
        carriers_of: Callable[[str], Mapping[str, GatewayTable]],
        uses: ClientUses,
    ) -> None:
        self._groups, self._uses = groups, uses
        self._terms_of, self._mean_cost_of, self._carriers_of = terms_of, mean_cost_of, carriers_of

    def parts_of(self, target: str) -> list[str]:
        """The volumes of a group, or this client of each of the volumes of a whole client; else itself."""
        if not (group := group_of(target)):
            return [target]
        client = whole_client_of(target)
        return [target_of(volume, client) for volume in self._groups.weights(group)]

    def terms_of(self, target: str) -> NeighbourTerms:
        """Floors that are promised to it."""
        return (
            terms_of_all(self.parts_of(target), self._terms_of)
            if group_of(target)
            else self._terms_of(target)
        )

    def mean_cost_of(self, target: str) -> float:
        """Recent cost of its mean I/O; of a group by the use of its volumes."""
        if not group_of(target):
            return self._mean_cost_of(target)
        parts = self.parts_of(target)
        used = {
            part: sum(
                use.ops_per_s
                for table in self._carriers_of(part).values()
                if table.state == "up" and (use := self._uses.of(table, part)) is not None
            )
            for part in parts
        }
        ops = sum(used.values())
        if ops > 0:
            return sum(self._mean_cost_of(part) * each for part, each in used.items()) / ops
        return max(map(self._mean_cost_of, parts), default=1.0)

    def carriers_of(self, target: str) -> Mapping[str, GatewayTable]:
        """Gateways that carry it; of a group those that carry one of its volumes.

        Of a whole client those that it uses; while it was seen at none, those that carry its volumes.
        """
        if not group_of(target):
            return self._carriers_of(target)
        found = {g: t for part in self.parts_of(target) for g, t in self._carriers_of(part).items()}
        if not whole_client_of(target):
            return found
        return {g: t for g, t in found.items() if len(self._uses.rows_of(t, target))} or found

    def members(self, targets: Iterable[str], table: GatewayTable) -> dict[str, Weights]:
        """What goes with a target: volumes of a group at a gateway; whom a glob of clients is not for."""
        found: dict[str, Weights] = {}
        for target in targets:
            if whole_client_of(target):  # all its volumes, also those that it begins to use
                continue
            if group := group_of(target):
                found[target] = self._groups.at(group, table)
            elif is_glob(target):
                found[target] = dict.fromkeys(self._uses.except_of(target), 0.0)
        return found

    def use(self, table: GatewayTable, target: str) -> Usage | ClientUse | None:
        """Its recent use through a gateway; None if it was never seen there."""
        group = group_of(target) if not whole_client_of(target) else ""
        return self._groups.use(group, table) if group else self._uses.of(table, target)

    def volumes_of(self, target: str) -> Iterable[str]:
        """Its volume, or those of the group."""
        group = group_of(target)
        return self._groups.weights(group) if group else (volume_of(target),)
