"""Documents in force to what control, gateways and judge need: promises, volume classes, a threshold set.

A threshold set holds every distinct value of every demand curve, by (volume, client pattern, io). Gateways
match volumes by name, so patterns over volumes are expanded over the volumes known, and a set is compiled
anew when one appears. An entry that another entry of the same volume, kind and value covers with the client
pattern ``*`` is left out, so that gateways do not count the same thing twice.

Invariant: at most ``MAX_THRESHOLDS`` values a (volume, client pattern, io), ``check`` refuses more at
apply. A volume that appears later and would exceed it keeps the values of the agreements of higher priority;
what is left out is judged from histogram edges and flagged ``inexact``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from sla_server.agreements.errors import Problem
from sla_server.agreements.model import Agreement
from sla_server.agreements.objectives import LatencyObjective
from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass

MAX_THRESHOLDS: Final = 8
MAX_SET_BYTES: Final = 56_000  # the whole set travels in one frame header of at most 65,535 bytes
_ENTRY_BYTES: Final = 48  # msgpack of one entry without its names: keys, kind, value
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class InForce:
    """One version of one agreement and the time it holds: slices that start in [applied_us, ended_us)."""

    agreement: Agreement
    version: int
    applied_us: int
    ended_us: int | None = None

    @property
    def name(self) -> str:
        """The agreement's name."""
        return self.agreement.name


@dataclass(frozen=True, slots=True, order=True)
class Threshold:
    """One entry of a threshold set."""

    volume: str
    client: str
    io: str
    threshold_us: int

    def as_dict(self) -> dict[str, Any]:
        """As in THRESHOLDS (messages.md)."""
        return {
            "volume": self.volume,
            "client": self.client,
            "io": self.io,
            "threshold_us": self.threshold_us,
        }


def is_pattern(text: str) -> bool:
    """Whether a selector is more than one name."""
    return any(character in text for character in "*?[")


def promise_of(item: InForce, objective: LatencyObjective) -> Promise:
    """One judged objective, reduced."""
    spec = item.agreement.spec
    return Promise(
        sla=item.name,
        version=item.version,
        objective=objective.name,
        priority=Priority.parse(spec.priority),
        volumes=tuple(spec.scope.volumes),
        clients=tuple(spec.scope.clients),
        io=spec.scope.io,
        percentile=float(objective.indicator.percentile),
        curve=tuple(CurveStep(step.limit_iops, step.threshold_us) for step in objective.demand_curve),
        target_ratio=objective.budgeting.target,
        slice_s=objective.budgeting.slice_s,
        floor_iops=spec.guarantee.floor_iops,
        floor_bytes_per_s=spec.guarantee.floor_mbps * MEGABYTE,
    )


def promises(items: Iterable[InForce]) -> list[Promise]:
    """Every judged objective, in order of agreement and document."""
    return [promise_of(item, objective) for item in items for objective in item.agreement.judged]


def classes(items: Iterable[InForce]) -> list[VolumeClass]:
    """What each agreement says of its volumes as neighbours."""
    result = []
    for item in items:
        spec = item.agreement.spec
        result.append(
            VolumeClass(
                sla=item.name,
                priority=Priority.parse(spec.priority),
                volumes=tuple(spec.scope.volumes),
                floor_iops=spec.guarantee.floor_iops,
                floor_bytes_per_s=spec.guarantee.floor_mbps * MEGABYTE,
                cap_iops=spec.cap.max_iops if spec.cap else None,
            )
        )
    return result


def threshold_set(items: Sequence[InForce], volumes: Collection[str]) -> list[Threshold]:
    """The entries to deliver, sorted; ``volumes`` are the names known now."""
    chosen: dict[tuple[str, str, str], set[int]] = {}
    for promise in sorted(promises(items), key=lambda promise: -promise.priority):
        for key in _keys(promise, volumes, patterns=False):
            values = chosen.setdefault(key, set())
            for step in promise.curve:
                if len(values) < MAX_THRESHOLDS:
                    values.add(step.threshold_us)
    entries = {Threshold(*key, value) for key, values in chosen.items() for value in values}
    return sorted(entry for entry in entries if not _is_covered(entry, entries))


def _keys(promise: Promise, volumes: Collection[str], *, patterns: bool) -> Iterator[tuple[str, str, str]]:
    for selector in promise.volumes:
        names = [selector]
        if is_pattern(selector):
            names = sorted(name for name in volumes if fnmatchcase(name, selector)) + names * patterns
        for name in names:
            for client in promise.clients:
                yield name, client, promise.io


def _is_covered(entry: Threshold, entries: Collection[Threshold]) -> bool:
    everyone = Threshold(entry.volume, "*", entry.io, entry.threshold_us)
    return entry.client != "*" and everyone in entries


def check(items: Sequence[InForce], volumes: Collection[str]) -> list[Problem]:
    """What stands against having all of these in force together; names the agreements concerned."""
    values: dict[tuple[str, str, str], dict[int, set[str]]] = {}
    for promise in promises(items):
        for key in _keys(promise, volumes, patterns=True):
            for step in promise.curve:
                values.setdefault(key, {}).setdefault(step.threshold_us, set()).add(promise.sla)
    problems = []
    for (volume, client, io), found in sorted(values.items()):
        if len(found) > MAX_THRESHOLDS:
            names = sorted(set().union(*found.values()))
            problems.append(
                Problem(
                    0,
                    "spec.objectives",
                    f"volume {volume}, client {client}, io {io} would have {len(found)} latency values; "
                    f"gateways count at most {MAX_THRESHOLDS}. They come from: {', '.join(names)}",
                    "Use the same values in these agreements' demand curves, or fewer steps",
                    ", ".join(names),
                )
            )
    size_bytes = sum(
        _ENTRY_BYTES + len(entry.volume) + len(entry.client) for entry in threshold_set(items, volumes)
    )
    if size_bytes > MAX_SET_BYTES:
        problems.append(
            Problem(
                0,
                "spec.scope",
                "all agreements together need more latency thresholds than one message to a gateway holds",
                "Name fewer volumes, or use fewer steps in the demand curves",
            )
        )
    return problems
