"""Which caps are in force at a plane: the static ones of its part, and the server's while its lease lives.

Both hold together: the smaller one counts. The server's set is complete and idempotent: the same generation
may come again (a restarted link sends it again). It carries a lease; ``renew`` extends it, ``expire`` drops
the set. A dropped set does not come back by a late renewal: the gateway reports generation 0 and the server
decides again. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway_agent.errors import BadCaps
from gateway_agent.nbd.client_rates import NO_CLIENTS
from gateway_agent.nbd.groups import VolumeGroupCap
from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.messages.client_caps import EXCEPT, except_of
from pmdaemon.wire.rates import LEAST_BURST_S, LEAST_RATE, MOST_BURST_S, MOST_RATE, NO_CAPS, Rates

DEFAULT_LEASE_NS: Final = 30 * 10**9
MAX_LEASE_NS: Final = 3_600 * 10**9  # an hour without a living server would be a static cap, not a lease
NO_GENERATION: Final = 0
MOST_WEIGHT: Final = 1e6


@dataclass(frozen=True, slots=True)
class ServerCaps:
    """A set of caps that the server sent.

    Attributes:
        volumes: by volume.
        clients: by volume and client, or a glob: all that match it, and none of its ``named``.
        groups: of several volumes together, by the group's name.
    """

    generation: int
    lease_ns: int
    volumes: dict[str, Rates]
    clients: dict[str, dict[str, Rates]]
    groups: dict[str, VolumeGroupCap]
    named: dict[str, dict[str, Sequence[str]]]


def parse_caps(header: dict[str, Any]) -> ServerCaps:
    """What the header of DP_CAPS says.

    Raises:
        BadCaps: a key of the wrong type, a rate that is not above 0, a volume, client or group named twice,
            a volume in two groups.
    """
    generation, lease_us, entries = header.get("gen"), header.get("lease_us"), header.get("caps")
    if type(generation) is not int or generation < 0 or not isinstance(entries, list):
        raise BadCaps("caps", f"gen {excerpt(generation)} or the list of caps is not well-formed")
    if lease_us is None:
        lease_us = DEFAULT_LEASE_NS // 1000
    if type(lease_us) is not int or not 0 < lease_us <= MAX_LEASE_NS // 1000:
        raise BadCaps(f"caps {generation}", f"lease_us is {excerpt(lease_us)}")
    volumes: dict[str, Rates] = {}
    for entry in entries:
        volume = entry.get("volume") if isinstance(entry, dict) else None
        if not isinstance(volume, str) or volume in volumes:
            raise BadCaps(
                f"caps {generation}", f"entry {excerpt(entry)} names no volume, or one named before"
            )
        volumes[volume] = _rates(generation, entry, volume)
    clients = _client_caps(generation, header.get("clients"))
    groups = _group_caps(generation, header.get("groups"))
    named = _named_clients(generation, header.get("clients") or ())
    return ServerCaps(generation, lease_us * 1000, volumes, clients, groups, named)


def _client_caps(generation: int, entries: Any) -> dict[str, dict[str, Rates]]:
    """Key ``clients``, absent in a set without caps of clients."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise BadCaps(f"caps {generation}", "the list of clients' caps is not well-formed")
    found: dict[str, dict[str, Rates]] = {}
    for entry in entries:
        volume, client = (
            (entry.get("volume"), entry.get("client")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(volume, str) or not isinstance(client, str):
            raise BadCaps(f"caps {generation}", f"entry {excerpt(entry)} names no volume and client")
        if client in found.get(volume, ()):
            raise BadCaps(f"caps {generation}", f"entry {excerpt(entry)} names a client named before")
        found.setdefault(volume, {})[client] = _rates(generation, entry, volume)
    return found


def _named_clients(generation: int, entries: Iterable[dict[str, Any]]) -> dict[str, dict[str, Sequence[str]]]:
    """Globs of the clients that a cap of a glob is not for, by volume and glob."""
    found: dict[str, dict[str, Sequence[str]]] = {}
    for entry in entries:
        try:
            globs = except_of(entry).get(EXCEPT)
        except MalformedFrame as exc:
            raise BadCaps(f"caps {generation}", str(exc)) from exc
        if globs is not None:
            found.setdefault(entry["volume"], {})[entry["client"]] = tuple(globs)
    return found


def _group_caps(generation: int, entries: Any) -> dict[str, VolumeGroupCap]:
    """Key ``groups``, absent in a set without caps of groups."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise BadCaps(f"caps {generation}", "the list of groups is not well-formed")
    found: dict[str, VolumeGroupCap] = {}
    members = set[str]()
    for entry in entries:
        group, volumes = (
            (entry.get("group"), entry.get("volumes")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(group, str) or group in found or not isinstance(volumes, dict) or not volumes:
            problem = f"entry {excerpt(entry)} names no group with volumes, or one named before"
            raise BadCaps(f"caps {generation}", problem)
        for volume, weight in volumes.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 < weight <= MOST_WEIGHT:
                problem = f"weight of {excerpt(volume)} in group {excerpt(group)} is {excerpt(weight)}"
                raise BadCaps(f"caps {generation}", f"{problem}; a weight is above 0 to {MOST_WEIGHT:g}")
            if not isinstance(volume, str) or volume in members:
                problem = f"volume {excerpt(volume)} of group {excerpt(group)} is in another group, too"
                raise BadCaps(f"caps {generation}", problem)
            members.add(volume)
        rates = _rates(generation, entry, group)
        if rates.is_open:
            raise BadCaps(f"caps {generation}", f"group {excerpt(group)} has no rate")
        found[group] = VolumeGroupCap(rates, {volume: float(weight) for volume, weight in volumes.items()})
    return found


def _rates(generation: int, entry: dict[str, Any], name: str) -> Rates:
    keys = ("ops_per_s", "bytes_per_s", "cost_per_s")
    ops, size, cost = (_rate(generation, entry, key, name) for key in keys)
    return Rates(ops, size, cost, _burst_s(generation, entry, name))


def _rate(generation: int, entry: dict[str, Any], key: str, name: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_RATE <= value <= MOST_RATE:
        named = f"{key} of {excerpt(name)} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a rate is {LEAST_RATE} to {MOST_RATE:g}")
    return float(value)


def _burst_s(generation: int, entry: dict[str, Any], name: str) -> float | None:
    value = entry.get("burst_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_BURST_S <= value <= MOST_BURST_S:
        named = f"burst_s of {excerpt(name)} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a burst is {LEAST_BURST_S} to {MOST_BURST_S:g} s")
    return float(value)


class CapsInForce:
    """The caps of all volumes of one plane, of single clients of theirs, and of groups of them.

    Args:
        static: by volume, from the configuration.
    """

    def __init__(self, static: dict[str, Rates]) -> None:
        self.static = static
        self._server: dict[str, Rates] = {}
        self._clients: dict[str, dict[str, Rates]] = {}
        self._named: Mapping[str, Mapping[str, Sequence[str]]] = {}
        self.groups: Mapping[str, VolumeGroupCap] = {}
        self._said: dict[str, Any] | None = None
        self._lease_ns = DEFAULT_LEASE_NS
        self.generation = NO_GENERATION
        self.lease_end_ns: int | None = None

    def apply(self, header: dict[str, Any], now_ns: int) -> int:
        """Take a DP_CAPS header; returns how many volumes, clients and groups it caps.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        caps = parse_caps(header)
        self._said = header
        self.generation, self._lease_ns = caps.generation, caps.lease_ns
        self._server, self._clients, self.groups = caps.volumes, caps.clients, caps.groups
        self._named = caps.named
        self.lease_end_ns = now_ns + caps.lease_ns
        return len(caps.volumes) + sum(map(len, caps.clients.values())) + len(caps.groups)

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
        self._server, self._clients, self.groups, self._named = {}, {}, {}, {}
        return True

    @property
    def in_words(self) -> tuple[dict[str, Any] | None, int | None]:
        """The header of DP_CAPS that the server's set came with, and the end of its lease; or None twice."""
        return self._said, self.lease_end_ns

    def inherit(self, header: dict[str, Any], lease_end_ns: int, now_ns: int) -> None:
        """Take what another process says ``in_words``.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        self.apply(header, now_ns)
        self.lease_end_ns = lease_end_ns
        self.expire(now_ns)

    def of(self, volume: str) -> Rates:
        """What holds for one volume."""
        return self.static.get(volume, NO_CAPS).tighter(self._server.get(volume, NO_CAPS))

    @property
    def cost_capped(self) -> frozenset[str]:
        """Volumes whose cost the server limits: their own, that of a client, or that of their group."""
        own = (volume for volume, rates in self._server.items() if rates.cost_per_s is not None)
        of_clients = (
            volume
            for volume, clients in self._clients.items()
            if any(rates.cost_per_s is not None for rates in clients.values())
        )
        groups = [group.weights for group in self.groups.values() if group.rates.cost_per_s is not None]
        return frozenset(own).union(of_clients, *groups)

    def of_clients(self, volume: str) -> Mapping[str, Rates]:
        """What holds for single clients of a volume, beside that; a glob for all that match it, together."""
        return self._clients.get(volume, NO_CLIENTS)

    def named_clients(self, volume: str) -> Mapping[str, Sequence[str]]:
        """Globs of the clients that the cap of a glob is not for, by that glob."""
        return self._named.get(volume, {})
