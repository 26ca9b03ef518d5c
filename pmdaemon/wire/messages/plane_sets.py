"""The sets of caps and thresholds that a plane puts in force: the keys of DP_CAPS and DP_THRESHOLDS, checked.

A set is complete, so one that is not well-formed is refused as a whole (``BadCaps``), and the former stays.
A threshold set is matched against a stream once per (stream, set), never per I/O; clients are matched by
glob, so that one never seen before is counted from its first I/O. Pure.

Source: SLA-MODEL.md 2; docs/formats/messages.md, CAPS and THRESHOLDS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

from pmdaemon.errors import BadCaps, MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.messages.base import Header
from pmdaemon.wire.messages.client_caps import EXCEPT, except_of, is_glob
from pmdaemon.wire.rates import LEAST_BURST_S, LEAST_RATE, MOST_BURST_S, MOST_RATE, Rates

DEFAULT_LEASE_NS: Final = 30 * 10**9
MAX_LEASE_NS: Final = 3_600 * 10**9  # an hour without a living server would be a static cap, not a lease
MOST_WEIGHT: Final = 1e6
MAX_THRESHOLD_US: Final = 0xFFFF_FFFF  # a u32 on the wire: 71 minutes
Limit = tuple[int, int]
"""(io kind, threshold in us) as in a missed entry."""


@dataclass(frozen=True, slots=True)
class VolumeGroupCap:
    """What the server says of one group; ``weights`` by volume, also of volumes that are not here."""

    rates: Rates
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlaneCaps:
    """A set of caps that the server sent.

    Attributes:
        volumes: by volume.
        clients: by volume and client, or a glob: all that match it, and none of its ``named``.
        groups: of several volumes together, by the group's name.
        whole_clients: of clients over all volumes that they use through the plane, by client.
        said: the header that the set came with, for the next process of the plane.
    """

    generation: int
    lease_ns: int
    volumes: dict[str, Rates]
    clients: dict[str, dict[str, Rates]]
    groups: dict[str, VolumeGroupCap]
    named: dict[str, dict[str, Sequence[str]]]
    whole_clients: dict[str, Rates] = field(default_factory=dict)
    said: Header = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, header: Header) -> PlaneCaps:
        """What the header of DP_CAPS says.

        Raises:
            BadCaps: a key of the wrong type, a rate that is not above 0, a volume, client or group named
                twice, a volume in two groups, a whole client that is a glob or has no rate.
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
        whole = _whole_client_caps(generation, header.get("whole_clients"))
        return cls(generation, lease_us * 1000, volumes, clients, groups, named, whole, header)


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


def _named_clients(generation: int, entries: Iterable[Header]) -> dict[str, dict[str, Sequence[str]]]:
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


def _whole_client_caps(generation: int, entries: Any) -> dict[str, Rates]:
    """Key ``whole_clients``, absent in a set without caps of whole clients."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise BadCaps(f"caps {generation}", "the list of whole clients is not well-formed")
    found: dict[str, Rates] = {}
    for entry in entries:
        client = entry.get("client") if isinstance(entry, dict) else None
        if not isinstance(client, str) or is_glob(client) or client in found:
            problem = f"entry {excerpt(entry)} names no single client, or one named before"
            raise BadCaps(f"caps {generation}", problem)
        found[client] = _rates(generation, entry, client)
        if found[client].is_open:
            raise BadCaps(f"caps {generation}", f"client {excerpt(client)} has no rate")
    return found


def _rates(generation: int, entry: Header, name: str) -> Rates:
    keys = ("ops_per_s", "bytes_per_s", "cost_per_s", "peak_ops_per_s")
    ops, size, cost, peak = (_rate(generation, entry, key, name) for key in keys)
    most_s = MOST_BURST_S if peak is None else MOST_RATE  # what accumulates for a slow burst takes long
    return Rates(ops, size, cost, _burst_s(generation, entry, name, most_s), peak)


def _rate(generation: int, entry: Header, key: str, name: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_RATE <= value <= MOST_RATE:
        named = f"{key} of {excerpt(name)} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a rate is {LEAST_RATE} to {MOST_RATE:g}")
    return float(value)


def _burst_s(generation: int, entry: Header, name: str, most_s: float) -> float | None:
    value = entry.get("burst_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_BURST_S <= value <= most_s:
        named = f"burst_s of {excerpt(name)} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a burst is {LEAST_BURST_S} to {most_s:g} s")
    return float(value)


@dataclass(frozen=True, slots=True)
class ThresholdEntry:
    """One threshold: for one volume and the clients that match a glob."""

    volume: str
    client: str
    io: int
    threshold_us: int


@dataclass(frozen=True, slots=True)
class PlaneThresholds:
    """All thresholds of one version; ``said`` is the header that they came with."""

    version: int = 0
    entries: tuple[ThresholdEntry, ...] = ()
    said: Header = field(default_factory=dict, repr=False, compare=False)

    def limits_for(self, volume: str, client: str) -> tuple[Limit, ...]:
        """Distinct limits of one stream, in a fixed order."""
        matching = {
            (entry.io, entry.threshold_us)
            for entry in self.entries
            if entry.volume == volume and fnmatchcase(client, entry.client)
        }
        return tuple(sorted(matching))

    @classmethod
    def parse(cls, header: Header) -> PlaneThresholds:
        """The set in the header of DP_THRESHOLDS.

        Raises:
            BadCaps: a key is missing, of the wrong type or out of range.
        """
        version, entries = header.get("version"), header.get("entries")
        if type(version) is not int or version < 0 or not isinstance(entries, list):
            raise BadCaps(
                "thresholds", f"version {excerpt(version)} or the list of entries is not well-formed"
            )
        return cls(version, tuple(_entry(version, entry) for entry in entries), header)


def _entry(version: int, entry: Any) -> ThresholdEntry:
    from pmdaemon.wire.cut import IO_KINDS  # and numpy, which the agent's parent does not need

    if not isinstance(entry, dict):
        raise BadCaps(f"thresholds {version}", f"entry {excerpt(entry)} is not a map")
    volume, client, io = entry.get("volume"), entry.get("client"), entry.get("io")
    threshold_us = entry.get("threshold_us")
    if not (isinstance(volume, str) and isinstance(client, str) and isinstance(io, str) and io in IO_KINDS):
        problem = f"entry {excerpt(entry)} lacks volume, client or a known io kind"
        raise BadCaps(f"thresholds {version}", problem)
    if type(threshold_us) is not int or not 0 < threshold_us <= MAX_THRESHOLD_US:
        problem = f"threshold_us is {excerpt(threshold_us)}, expected 1 to 2**32 - 1"
        raise BadCaps(f"thresholds {version}", problem)
    return ThresholdEntry(volume, client, IO_KINDS[io], threshold_us)
