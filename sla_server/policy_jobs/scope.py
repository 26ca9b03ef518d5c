"""Which volumes and clients are meant: patterns of agreements against names, once for each distinct name.

What comes out are small tables, which Spark joins with the streams (``transforms.promised_streams``): no
process goes through promises times streams. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

import pyarrow as pa

from pmdaemon.wire.cut import IO_KINDS
from sla_server.agreements.promise import Priority, Promise, VolumeClass
from sla_server.agreements.selectors import is_pattern

DEFAULT_CLASS: Final = VolumeClass("", Priority.BEST_EFFORT, ("*",))


class KnownNames:
    """Distinct names, and which of them selectors mean (``agreements.selectors.matches``).

    A name costs a look-up; a pattern is compared with all names once, however many agreements have it.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._of_patterns: dict[str, frozenset[str]] = {}

    def meant(self, selectors: Collection[str]) -> frozenset[str]:
        """The names that one of the selectors means."""
        found: set[str] = set()
        for selector in selectors:
            if selector == "*":
                return self._names
            if selector in self._names:
                found.add(selector)
            if is_pattern(selector):
                found |= self._of_pattern(selector)
        return frozenset(found)

    def _of_pattern(self, pattern: str) -> frozenset[str]:
        if pattern not in self._of_patterns:
            fits = re.compile(translate(pattern)).match
            self._of_patterns[pattern] = frozenset(name for name in self._names if fits(name))
        return self._of_patterns[pattern]


@dataclass(frozen=True, slots=True)
class Scope:
    """Small tables, by name; ``promise`` is a promise's number.

    Attributes:
        promises: promise, sla, objective, step (of the curve, from 0), io, threshold_us, allowed (miss
            ratio), any_client; a row a step.
        volumes: promise, volume: volumes in scope.
        clients: promise, client: clients in scope of promises that are not for any client.
        classes: volume, weight, floor_iops, floor_bytes_per_s, promised_iops (up to so much a promise holds
            that covers it, else 0): of all volumes.
    """

    promises: pa.Table
    volumes: pa.Table
    clients: pa.Table
    classes: pa.Table


PROMISES: Final = pa.schema(
    [
        ("promise", pa.int32()),
        ("sla", pa.string()),
        ("objective", pa.string()),
        ("step", pa.int32()),
        ("io", pa.int32()),
        ("threshold_us", pa.int64()),
        ("allowed", pa.float64()),
        ("any_client", pa.bool_()),
    ]
)
CLASSES: Final = pa.schema(
    [
        ("volume", pa.string()),
        ("weight", pa.float64()),
        ("floor_iops", pa.float64()),
        ("floor_bytes_per_s", pa.float64()),
        ("promised_iops", pa.float64()),
    ]
)


def scope_of(
    promises: Sequence[Promise],
    classes: Sequence[VolumeClass],
    volumes: Collection[str],
    clients: Collection[str],
) -> Scope:
    """What agreements in force say of the volumes and clients that there are.

    A promise is studied at every step of its demand curve. A volume has at least the priority of the promises
    that cover it.
    """
    of_volumes, of_clients = KnownNames(volumes), KnownNames(clients)
    rows = [
        (
            number,
            promise.sla,
            promise.objective,
            number_of_step,
            IO_KINDS[promise.io],
            step.threshold_us,
            promise.allowed_miss_ratio,
            "*" in promise.clients,
        )
        for number, promise in enumerate(promises)
        for number_of_step, step in enumerate(promise.curve)
    ]
    in_scope = [
        (number, name) for number, each in enumerate(promises) for name in of_volumes.meant(each.volumes)
    ]
    asking = [
        (number, name)
        for number, each in enumerate(promises)
        if "*" not in each.clients
        for name in of_clients.meant(each.clients)
    ]
    best = dict.fromkeys(volumes, DEFAULT_CLASS)
    for each in sorted(classes, key=lambda item: -item.priority):  # of equals the first one holds
        for name in of_volumes.meant(each.volumes):
            if best[name] is DEFAULT_CLASS:
                best[name] = each
    weight = {name: float(found.priority) for name, found in best.items()}
    promised = dict.fromkeys(volumes, 0.0)
    for number, name in in_scope:
        weight[name] = max(weight[name], float(promises[number].priority))
        promised[name] = max(promised[name], promises[number].curve[-1].up_to_iops)
    return Scope(
        promises=_table(rows, PROMISES),
        volumes=_table(sorted(in_scope), _named("volume")),
        clients=_table(sorted(asking), _named("client")),
        classes=_table(
            [
                (name, weight[name], found.floor_iops, found.floor_bytes_per_s, promised[name])
                for name, found in sorted(best.items())
            ],
            CLASSES,
        ),
    )


def _named(name: str) -> pa.Schema:
    return pa.schema([("promise", pa.int32()), (name, pa.string())])


def _table(rows: Sequence[tuple[object, ...]], kind: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(kind)
    return pa.table(
        [pa.array(column, type=field.type) for column, field in zip(columns, kind, strict=True)], schema=kind
    )
