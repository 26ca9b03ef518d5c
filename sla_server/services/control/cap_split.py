"""How a cap is divided between the gateways that carry what it is on.

By recent use, and a part of it equally, so that what begins somewhere is not starved there; of a group that
part is divided by the weights of its volumes, and a whole client has none where it was never seen. The data
plane of a gateway that is lost goes on with what it holds until its lease ends: that much is left out, but
the others keep at least half of their equal shares.

Reads the policy manager's state; no state of its own, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from pmdaemon.wire.rates import Rates
from sla_server.services.control.groups import Groups, TargetAnswers
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import split
from sla_server.services.control.targets import client_of, group_of, is_glob, volume_of, whole_client_of
from sla_server.services.control.throttle import LEAST, GatewayCaps
from sla_server.services.control.usage import GatewayTable


class CapSplit:
    """See the module. ``gateways``: what each holds, as the policy manager has it."""

    def __init__(
        self,
        settings: ControlSettings,
        gateways: Mapping[str, GatewayCaps],
        groups: Groups,
        answers: TargetAnswers,
    ) -> None:
        self._settings, self._gateways = settings, gateways
        self._groups, self._answers = groups, answers

    def shares(self, target: str, rates: Rates, now_ns: int) -> dict[str, Rates]:
        """A target's rates at each gateway that is up, carries it and can throttle it."""
        carriers = self._answers.carriers_of(target)
        recent = self._recent(target, carriers)
        if not recent:
            return {}
        lease_s = self._settings.lease_s
        held = sum(
            self._gateways[gateway_id].held_ratio(target, rates, lease_s, now_ns)
            for gateway_id in carriers
            if gateway_id in self._gateways
        )
        left = max(1.0 - held, len(recent) / len(carriers) / 2) if held else 1.0
        group = group_of(target)
        by_weight = group and not whole_client_of(target)
        parts = self._groups.parts(group, {g: carriers[g] for g in recent}) if by_weight else None
        ratios = split(left, recent, self._settings.recent_share_ratio, parts)
        plain = rates.without_burst() if rates.peak_ops_per_s is not None else rates
        return {
            gateway_id: (plain if carriers[gateway_id].caps_bursts is False else rates)
            .scaled(ratio)
            .at_least(LEAST)
            for gateway_id, ratio in ratios.items()
        }

    def _recent(self, target: str, carriers: Mapping[str, GatewayTable]) -> dict[str, float]:
        """Recent cost rate of a target through each gateway that can be sent its cap.

        Of a client: through those that it uses; while it uses none, and of a glob, through all.
        """
        client = client_of(target) if not is_glob(target) else ""
        found = {
            gateway_id: self._answers.use(table, target)
            for gateway_id, table in carriers.items()
            if table.state == "up" and self._takes(target, table)
        }
        known = {gateway_id: use.cost_per_s for gateway_id, use in found.items() if use is not None}
        return known if client and known else {**dict.fromkeys(found, 0.0), **known}

    def _takes(self, target: str, table: GatewayTable) -> bool:
        """Whether a gateway can hold a cap of this target.

        Of one that did not say yet, after a restart of ours, what it holds is believed.
        """
        if whole_client_of(target):
            return table.caps_whole_clients is not False and bool(self._groups.at(group_of(target), table))
        if group := group_of(target):
            return table.caps_groups is not False and bool(self._groups.at(group, table))
        if is_glob(target) and table.caps_others is False:
            return False
        if client_of(target) and table.caps_clients is False:
            return False
        return table.can_throttle(volume_of(target))
