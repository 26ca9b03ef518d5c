"""What each gateway should hold of the caps in force, kept from tick to tick.

Thousands of caps are quiet as a rule. So what a target's gateways should hold is worked out again only when
something about the target has changed (``ThrottleIndex.changed``), and a gateway is looked at only while it
is *due*: what it should hold may differ from what it was sent.

State: shares by target and by gateway; which gateways are due; lost ones that hold caps until their lease
ends. No clock, no I/O. Changed only by the policy manager; ``cap_split`` works shares out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pmdaemon.wire.rates import Rates

_NOTHING: Final[Mapping[str, Rates]] = MappingProxyType({})


class CapShares:
    """See the module.

    Attributes:
        due: gateways to look at.
        lapsing: lost gateways to when their leases end, monotonic ns.
        worked_out: shares worked out, in all; for tests of what a tick costs.
    """

    def __init__(self) -> None:
        self.due: set[str] = set()
        self.lapsing: dict[str, float] = {}
        self.worked_out = 0
        self._of: dict[str, Mapping[str, Rates]] = {}
        self._at: dict[str, dict[str, Rates]] = {}

    def put(self, target: str, shares: Mapping[str, Rates]) -> None:
        """These are the rates of a target at each of its gateways; none: it is free."""
        self.worked_out += 1
        before = self._of.pop(target, _NOTHING)
        for gateway_id in before.keys() - shares.keys():
            del self._at[gateway_id][target]
        for gateway_id, rates in shares.items():
            self._at.setdefault(gateway_id, {})[target] = rates
        if shares:
            self._of[target] = shares
        self.due |= before.keys() | shares.keys()

    def at(self, gateway_id: str) -> Mapping[str, Rates]:
        """What a gateway should hold, by target."""
        return self._at.get(gateway_id, _NOTHING)

    def lapsed(self, now_ns: int) -> list[str]:
        """Lost gateways whose leases have ended since the last call."""
        found = [gateway_id for gateway_id, end_ns in self.lapsing.items() if now_ns >= end_ns]
        for gateway_id in found:
            del self.lapsing[gateway_id]
        return found
