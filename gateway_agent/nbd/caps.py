"""Which caps are in force at a plane: the static ones of its part, and the server's while its lease lives.

Both hold together: the smaller one counts. The server's set is complete and idempotent: the same generation
may come again (a restarted link sends it again). It carries a lease; ``renew`` extends it, ``expire`` drops
the set. A dropped set does not come back by a late renewal: the gateway reports generation 0 and the server
decides again. Pure; time is an argument.

While an upgrade lets former processes of the plane keep their clients, several processes serve its volumes.
None knows what the others let through, so each has an equal part of every cap, and the bursts of the next one
begin empty (``PlaneContext.bursts_since_ns``): together they do not exceed it. What one of them does not use
of its part is lost; that ends with the former processes, after ``drain_s``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway_agent.config import PlaneConfig
from gateway_agent.nbd.client_rates import NO_CLIENTS
from gateway_agent.nbd.groups import CONFIGURED, SERVER, GroupKey
from pmdaemon.wire.messages.base import Header
from pmdaemon.wire.messages.plane_sets import DEFAULT_LEASE_NS, PlaneCaps, VolumeGroupCap
from pmdaemon.wire.rates import NO_CAPS, Rates

NO_GENERATION: Final = 0
NO_GROUPS: Final[Mapping[str, VolumeGroupCap]] = {}


class CapsInForce:
    """The caps of a plane: of volumes, of single clients of theirs, of whole clients, and of groups.

    Attributes:
        static: by volume, from the configuration; ``static_groups`` the same of groups, by name.
        processes: so many of this plane serve its volumes.
    """

    def __init__(
        self, static: dict[str, Rates], static_groups: Mapping[str, VolumeGroupCap] = NO_GROUPS
    ) -> None:
        self.static, self.static_groups = static, static_groups
        self.processes = 1
        self._server: dict[str, Rates] = {}
        self._clients: dict[str, dict[str, Rates]] = {}
        self._named: Mapping[str, Mapping[str, Sequence[str]]] = {}
        self._groups: Mapping[str, VolumeGroupCap] = {}
        self._whole_clients: Mapping[str, Rates] = {}
        self._said: Header | None = None
        self._lease_ns = DEFAULT_LEASE_NS
        self.generation = NO_GENERATION
        self.lease_end_ns: int | None = None

    def apply(self, caps: PlaneCaps, now_ns: int) -> int:
        """Take a set of the server; returns how many volumes, clients and groups it caps."""
        self._said = caps.said
        self.generation, self._lease_ns = caps.generation, caps.lease_ns
        self._server, self._clients, self._groups = caps.volumes, caps.clients, caps.groups
        self._named, self._whole_clients = caps.named, caps.whole_clients
        self.lease_end_ns = now_ns + caps.lease_ns
        of_clients = sum(map(len, caps.clients.values())) + len(caps.whole_clients)
        return len(caps.volumes) + of_clients + len(caps.groups)

    def renew(self, now_ns: int) -> None:
        """The server lives: extend the lease of the set in force, if there is one."""
        if self.lease_end_ns is not None:
            self.lease_end_ns = now_ns + self._lease_ns

    def expire(self, now_ns: int) -> bool:
        """Drop the server's set if its lease has run out; returns whether that happened now."""
        if self.lease_end_ns is None or now_ns < self.lease_end_ns:
            return False
        self._said = None
        self.generation, self.lease_end_ns = NO_GENERATION, None
        self._server, self._clients, self._groups, self._named = {}, {}, {}, {}
        self._whole_clients = {}
        return True

    @property
    def in_words(self) -> tuple[Header | None, int | None]:
        """The header of DP_CAPS that the server's set came with, and the end of its lease; or None twice."""
        return self._said, self.lease_end_ns

    def inherit(self, header: Header, lease_end_ns: int, now_ns: int) -> None:
        """Take what another process says ``in_words``.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        self.apply(PlaneCaps.parse(header), now_ns)
        self.lease_end_ns = lease_end_ns
        self.expire(now_ns)

    def of(self, volume: str) -> Rates:
        """What holds for one volume."""
        return self._part(self.static.get(volume, NO_CAPS).tighter(self._server.get(volume, NO_CAPS)))

    def _part(self, rates: Rates) -> Rates:
        return rates if self.processes == 1 else rates.scaled(1 / self.processes)

    def cost_capped(self, volumes: Iterable[str]) -> frozenset[str]:
        """Of the plane's volumes those whose cost the server limits: their own, a client's, their group's.

        All of them if that of a whole client is limited, which may use any.
        """
        if any(rates.cost_per_s is not None for rates in self._whole_clients.values()):
            return frozenset(volumes)
        own = (volume for volume, rates in self._server.items() if rates.cost_per_s is not None)
        of_clients = (
            volume
            for volume, clients in self._clients.items()
            if any(rates.cost_per_s is not None for rates in clients.values())
        )
        groups = [group.weights for group in self._groups.values() if group.rates.cost_per_s is not None]
        return frozenset(own).union(of_clients, *groups)

    def of_clients(self, volume: str) -> Mapping[str, Rates]:
        """What holds for single clients of a volume, beside that; a glob for all that match it, together."""
        found = self._clients.get(volume, NO_CLIENTS)
        return {client: self._part(rates) for client, rates in found.items()} if found else NO_CLIENTS

    @property
    def groups(self) -> Mapping[GroupKey, VolumeGroupCap]:
        """What holds for groups of volumes, beside that: those of the server, and those configured."""
        found = {(SERVER, name): group for name, group in self._groups.items()}
        found |= {(CONFIGURED, name): group for name, group in self.static_groups.items()}
        if self.processes == 1:
            return found
        return {key: replace(group, rates=self._part(group.rates)) for key, group in found.items()}

    @property
    def whole_clients(self) -> Mapping[str, Rates]:
        """What holds for clients over all volumes that they use through the plane, beside all that."""
        return {client: self._part(rates) for client, rates in self._whole_clients.items()}

    def named_clients(self, volume: str) -> Mapping[str, Sequence[str]]:
        """Globs of the clients that the cap of a glob is not for, by that glob."""
        return self._named.get(volume, {})


def configured_caps(config: PlaneConfig) -> tuple[dict[str, Rates], dict[str, VolumeGroupCap]]:
    """The static caps of a plane's volumes, and of their groups."""
    volumes = {export.volume: export.cap.rates for export in config.exports if export.cap is not None}
    return volumes, {group.name: group.shared for group in config.groups}
