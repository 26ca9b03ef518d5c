"""Caps of groups and of whole clients that several planes serve: what part of their rates each plane has.

The server divides a group between gateways, a plane shares its part between its volumes. Between the planes
of a gateway the link divides, as the server does: by recent use, and a part by the weights of the volumes
there. The parts follow the use, with every collection, and are sent again when one has changed by
``LEAST_CHANGE``. After an upgrade two processes serve the volumes of a plane: they are two planes here. Of a
whole client each plane has a part, since it may use any of them next: by its use, and of the rest equal ones.

State: recent use of volumes that are in groups, and of whole clients, through each plane, and the parts sent
last. A whole client is named as ``client_key`` says, which is no name of a volume or group. No I/O, no clock.
Thread: the link's loop only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from gateway_agent.sources.sample import Sample
from pmdaemon.wire.cut import COL
from pmdaemon.wire.messages.agent import RATES, CapSet

BY_USE: Final = 0.8
LEAST_CHANGE: Final = 0.2
SMOOTHING: Final = 0.5
FORGOTTEN: Final = 0.001
"""Cost a second below which the use of a volume through a plane that is not collected any more is none."""

Parts = Mapping[str, Mapping[str, float]]
"""Of each plane, by its name: the part of each group and whole client."""


def client_key(client: str) -> str:
    """A whole client beside names of volumes and groups, which hold no slash."""
    return f"//{client}"


class GroupShares:
    """See the module docstring."""

    def __init__(self) -> None:
        self._use: dict[tuple[str, str], float] = {}  # cost a second, by plane and volume or client
        self._sent: Parts = {}

    def count(self, caps: CapSet | None, samples: Iterable[Sample]) -> None:
        """Learn from what was collected what the volumes of groups, and whole clients, use."""
        grouped = {volume for entry in (caps.groups if caps else None) or () for volume in entry["volumes"]}
        grouped |= {client_key(entry["client"]) for entry in (caps.whole_clients if caps else None) or ()}
        known = {key for key, use in self._use.items() if key[1] in grouped and use >= FORGOTTEN}
        found = dict.fromkeys(known, 0.0)
        for sample in samples if grouped else ():
            found = dict.fromkeys(((sample.source, volume) for volume in grouped), 0.0) | found
            seconds = max(sample.end_ns - sample.start_ns, 1_000_000) / 1e9
            costs = np.asarray(sample.counters[COL["cost_milli"]]).tolist()
            for stream, cost in zip(sample.streams, costs, strict=True):
                for name in grouped.intersection((stream.volume, client_key(stream.client))):
                    found[sample.source, name] += cost / 1000 / seconds
        before = {key: self._use.get(key, use) for key, use in found.items()}
        self._use = {key: old + SMOOTHING * (found[key] - old) for key, old in before.items()}

    def parts(
        self, caps: CapSet, planes: Mapping[str, Collection[str]], of_clients: Collection[str] = ()
    ) -> Parts:
        """What part of each group, and of each whole client, each plane has.

        Args:
            caps: with the groups.
            planes: volumes of each plane, by its name.
            of_clients: planes that tell clients apart.
        """
        found: dict[str, dict[str, float]] = {name: {} for name in planes}
        for entry in caps.whole_clients or ():
            key = client_key(entry["client"])
            use = {name: self._use.get((name, key), 0.0) for name in of_clients}
            total_use = sum(use.values())
            for name in of_clients:
                part = 1 / len(of_clients)
                if total_use > 0:
                    part = BY_USE * use[name] / total_use + (1 - BY_USE) * part
                found[name][key] = part
        for entry in caps.groups or ():
            weights: Mapping[str, float] = entry["volumes"]
            here = {name: [v for v in weights if v in volumes] for name, volumes in planes.items()}
            here = {name: volumes for name, volumes in here.items() if volumes}
            weight = {name: sum(weights[v] for v in volumes) for name, volumes in here.items()}
            use = {name: sum(self._used(name, v) for v in volumes) for name, volumes in here.items()}
            total_weight, total_use = sum(weight.values()), sum(use.values())
            for name in here:
                part = weight[name] / total_weight
                if total_use > 0:
                    part = BY_USE * use[name] / total_use + (1 - BY_USE) * part
                found[name][entry["group"]] = part
        return found

    def _used(self, name: str, volume: str) -> float:
        """Use through a plane; of one not counted yet, maybe a former process, as through the others."""
        others = sum(use for (_, each), use in self._use.items() if each == volume)
        return self._use.get((name, volume), others)

    def sent(self, parts: Parts) -> None:
        """These parts are in force."""
        self._sent = parts

    def have_moved(self, parts: Parts) -> bool:
        """Whether a part differs so much from the one in force that it should be sent."""
        return any(
            abs(part - self._sent.get(name, {}).get(group, 0.0)) > LEAST_CHANGE * part
            for name, groups in parts.items()
            for group, part in groups.items()
        )


def caps_of_plane(caps: CapSet, parts: Mapping[str, float]) -> CapSet:
    """The set as one plane gets it: of each group that it has volumes of its part, of the others nothing.

    Of each whole client its part, if it tells clients apart.
    """
    if not caps.is_shared:
        return caps
    groups = tuple(
        _scaled(each, parts[each["group"]]) for each in caps.groups or () if each["group"] in parts
    )
    keys = [(client_key(each["client"]), each) for each in caps.whole_clients or ()]
    clients = tuple(_scaled(each, parts[key]) for key, each in keys if key in parts)
    return replace(caps, groups=groups or None, whole_clients=clients or None)


def _scaled(entry: dict[str, Any], part: float) -> dict[str, Any]:
    rates = {key: None if entry.get(key) is None else entry[key] * part for key in RATES}
    return {**entry, **rates}
