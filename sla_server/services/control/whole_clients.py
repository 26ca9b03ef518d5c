"""Whole clients: what is known of one before an operator caps it over all volumes that it uses (ADR 74).

Which volumes those are follows from the streams that gateways announce; the row of its throttle names them,
and ``policy_manager`` adds what it begins to use. State: none of its own; reads that of the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pmdaemon.wire.rates import Rates
from sla_server.services.control.groups import terms_of_all
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.manual import ManualEffect
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.targets import named, target_of
from sla_server.services.control.throttle import LEAST
from sla_server.services.control.usage import GatewayTable

MOST_CLIENT_CAPS: Final = 100
"""Of clients throttled by hand: some 20 KB of the 64 KiB that the caps of a gateway may have."""


class WholeClients:
    """See the module.

    Args:
        inventory, policy: of the controller.
        tables: its gateways.
        effect: what rates mean to the promises of one client of a volume: (asked, held, volume, client).
    """

    def __init__(
        self,
        inventory: BackendInventory,
        policy: PolicyManager,
        tables: Mapping[str, GatewayTable],
        effect: Callable[[Rates, Rates, str, str], ManualEffect],
    ) -> None:
        self._inventory, self._policy, self._tables, self._effect = inventory, policy, tables, effect

    def weights(self, client: str) -> dict[str, float]:
        """The volumes that it was seen to use through any gateway, by name; each has the weight 1."""
        uses = self._inventory.uses
        found = {volume for table in self._tables.values() for volume in uses.volumes(table, client)}
        return dict.fromkeys(sorted(found), 1.0)

    def why_no_cap(self, client: str) -> tuple[int, str, str] | None:
        """Why it cannot be capped now: (status, problem, what to do); None if it can."""
        one_by_one = f"Throttle its volumes one by one: sla throttle set VOLUME --client {client}"
        uses, old = self._inventory.uses, []
        for table in self._tables.values():
            volumes = uses.volumes(table, client)
            apart = [v for v in volumes if v in table.no_groups or not table.can_throttle(v)]
            if apart and table.state == "up":
                problem = (
                    f"client {client!r} uses volume {named(apart)}, where no data plane tells clients apart"
                )
                return 422, problem, one_by_one
            if volumes and table.state == "up" and table.caps_whole_clients is False:
                old.append(table.name or table.gateway_id)
        if not self.weights(client):
            return (
                404,
                f"no client {client!r} is known",
                "Name one that uses a volume: 'sla get volumes' has them",
            )
        if old:
            problem = (
                f"the agent of {named(old)}, which client {client!r} uses, caps no clients over all volumes"
            )
            return 422, problem, f"Upgrade it. {one_by_one}"
        by_hand = {t.target for t in self._policy.layers["manual"].values() if t.client}
        if len(by_hand - {target_of("", client)}) >= MOST_CLIENT_CAPS:
            return (
                422,
                f"{len(by_hand)} clients are throttled by hand, which is the most",
                "Release some of them",
            )
        return None

    def effect(self, client: str, rates: Rates) -> ManualEffect:
        """What a cap would do to the promises that cover it, while it uses all its volumes alike."""
        volumes = self.weights(client)
        targets = [target_of(volume, client) for volume in volumes]
        terms = terms_of_all(targets, self._inventory.terms_of)
        mean_cost = max(map(self._inventory.mean_cost_of, targets))
        least = Rates(terms.floor_iops, terms.floor_bytes_per_s, terms.floor_cost(mean_cost))
        held = (rates.at_least(least) if terms.agreed else rates).at_least(LEAST)
        share, broken = held.scaled(1 / len(volumes)), list[str]()
        for volume in volumes:
            broken += (
                f"{promise} for {volume}" for promise in self._effect(share, share, volume, client).broken
            )
        return ManualEffect(held, held.differs(rates, 0.001), tuple(broken))
