"""Which latencies a gateway has to count: the threshold set of its volumes, and what speaks against one.

A gateway's set holds every distinct value of every demand curve that covers one of its volumes, by (volume,
client pattern, io). Gateways match volumes by name, so patterns over volumes become the gateway's own names.
An entry that another entry of the same volume, kind and value covers with the client pattern ``*`` is left
out, so that gateways do not count the same thing twice.

Invariants: at most ``MAX_THRESHOLDS`` values a (volume, client pattern, io) and ``MAX_SET_BYTES`` a gateway;
``check`` refuses more at apply. Volumes that appear later may exceed both: then the values of the agreements
of higher priority are kept, and what is left out is judged from histogram edges and flagged ``inexact``.

Pure. Source: SLA-MODEL.md 2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final

from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.promise import Promise
from sla_server.agreements.selectors import is_pattern

MAX_THRESHOLDS: Final = 8
MAX_SET_BYTES: Final = 56_000  # a gateway's set travels in one frame header of at most 65,535 bytes
_ENTRY_BYTES: Final = 48  # msgpack of one entry without its names: keys, kind, value


@dataclass(frozen=True, slots=True, order=True)
class Threshold:
    """One entry of a threshold set."""

    volume: str
    client: str
    io: str
    threshold_us: int

    @property
    def size_bytes(self) -> int:
        """Its share of a message, at most."""
        return _ENTRY_BYTES + len(self.volume.encode()) + len(self.client.encode())

    def as_dict(self) -> dict[str, Any]:
        """As in THRESHOLDS (messages.md)."""
        return {
            "volume": self.volume,
            "client": self.client,
            "io": self.io,
            "threshold_us": self.threshold_us,
        }


@dataclass(frozen=True)
class ThresholdSet:
    """What one gateway has to count.

    Attributes:
        entries: sorted
        left_out: entries for which there was no room
        wanted_bytes: what all of them would take
    """

    entries: tuple[Threshold, ...] = ()
    left_out: int = 0
    wanted_bytes: int = 0

    @cached_property
    def version(self) -> int:
        """63 bits that follow from the entries alone, so every process and every start finds the same."""
        digest = blake2b(digest_size=8)
        for entry in self.entries:
            digest.update(f"{entry.volume}\0{entry.client}\0{entry.io}\0{entry.threshold_us}\0".encode())
        return int.from_bytes(digest.digest(), "little") >> 1


class PromiseIndex:
    """Promises by what they say of volumes, so that one volume's are found without looking at all."""

    def __init__(self, promises: Iterable[Promise]) -> None:
        self._naming: dict[str, list[Promise]] = {}
        self._patterned: list[Promise] = []
        for promise in promises:
            for selector in dict.fromkeys(promise.volumes):
                self._naming.setdefault(selector, []).append(promise)
            if any(map(is_pattern, promise.volumes)):
                self._patterned.append(promise)

    def covering(self, selector: str) -> Iterator[Promise]:
        """Promises about a volume; of a pattern, those that use this very pattern."""
        yield from self._naming.get(selector, ())
        if not is_pattern(selector):
            for promise in self._patterned:
                if selector not in promise.volumes and any(fnmatchcase(selector, p) for p in promise.volumes):
                    yield promise


def threshold_set(index: PromiseIndex, volumes: Iterable[str]) -> ThresholdSet:
    """The set of a gateway that has these volumes."""
    pairs = [(promise, volume) for volume in sorted(volumes) for promise in index.covering(volume)]
    values: dict[tuple[str, str, str], set[int]] = {}
    chosen: dict[Threshold, None] = {}  # a set in order of priority
    for promise, volume in sorted(pairs, key=lambda pair: -pair[0].priority):
        for client in promise.clients:
            known = values.setdefault((volume, client, promise.io), set())
            for step in promise.curve:
                if step.threshold_us not in known and len(known) < MAX_THRESHOLDS:
                    known.add(step.threshold_us)
                    chosen[Threshold(volume, client, promise.io, step.threshold_us)] = None
    needed = [entry for entry in chosen if not _is_covered(entry, chosen)]
    sizes = list(accumulate(entry.size_bytes for entry in needed))
    room = bisect_right(sizes, MAX_SET_BYTES)
    return ThresholdSet(tuple(sorted(needed[:room])), len(needed) - room, sizes[-1] if sizes else 0)


def _is_covered(entry: Threshold, entries: Collection[Threshold]) -> bool:
    everyone = Threshold(entry.volume, "*", entry.io, entry.threshold_us)
    return entry.client != "*" and everyone in entries


def touched_by(promises: Iterable[Promise], volumes: Iterable[str]) -> set[str]:
    """Of these volumes, those that the promises cover."""
    selectors = {selector for promise in promises for selector in promise.volumes}
    patterns = list(filter(is_pattern, selectors))
    return {
        name
        for name in volumes
        if name in selectors or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def check(
    promises: Iterable[Promise],
    changed: Collection[Promise],
    volumes: Collection[str],
    carried: Mapping[str, Collection[str]],
) -> list[DocumentProblem]:
    """What speaks against having all of these promises in force together.

    Args:
        promises: all that would be in force.
        changed: those of them that are new; nothing else can have become too much.
        volumes: all names known, for patterns.
        carried: gateway to its volumes, of the gateways connected.
    """
    index = PromiseIndex(promises)
    touched = touched_by(changed, volumes)
    names = touched | {selector for promise in changed for selector in promise.volumes}
    problems = [problem for name in sorted(names) for problem in _too_many_values(index, name)]
    for gateway, own in sorted(carried.items()):
        if not touched.isdisjoint(own):
            found = threshold_set(index, own)
            if found.left_out:
                problems.append(_too_large(gateway, found))
    return problems


HOST_PREFIX: Final = "host:"
"""Names of volumes whose statistics come from beside the I/O path: host:GATEWAY:DEVICE."""
CGROUP_PREFIX: Final = "cgroup:"
"""The same of control groups, of which the kernel counts I/Os and bytes only: cgroup:GATEWAY:NAME."""
QEMU_PREFIX: Final = "qemu:"
"""Drives of virtual machines, of which QEMU counts and times what completes: qemu:GATEWAY:NAME."""
GROUP_PREFIX: Final = "throttle-group:"
"""Throttle groups of QEMU, of which nothing is counted: throttle-group:GATEWAY:NAME."""
_IN_PATH: Final = {"latency": "latency percentiles", "iops": "IOPS", "throughput": "throughput"}
_BESIDE: Final = (
    (CGROUP_PREFIX, "the kernel counts I/Os and bytes of a control group, and times nothing", ""),
    (GROUP_PREFIX, "QEMU counts nothing of a throttle group, which can only be slowed down", ""),
    (
        QEMU_PREFIX,
        "QEMU does not say what is outstanding; latency percentiles and mean latency are possible here",
        "Use metric: latency or mean_latency, or serve it",
    ),
)
"""Beginning of a volume's name, what can be known of it, and what to do instead."""
BESIDE_PREFIXES: Final = (HOST_PREFIX, CGROUP_PREFIX, QEMU_PREFIX, GROUP_PREFIX)
"""Of all volumes of which some indicator is not measured."""
_OF_HOST: Final = (
    "latency percentiles need a gateway in the I/O path; mean latency is possible here",
    "Use metric: mean_latency with io: any, or serve it",
)


def check_measurable(
    changed: Iterable[Promise], volumes: Collection[str], by_labels: Collection[str] = ()
) -> list[DocumentProblem]:
    """Objectives that name a volume which cannot be measured for them, or have no other in their scope.

    ``slices`` says what can. Where a pattern or labels mean other volumes as well: ``warn_unmeasured``.

    Args:
        changed: promises of all indicators that are new.
        volumes: all names known, for patterns.
        by_labels: agreements whose volumes are those with some labels: these are not named.
    """
    problems = []
    for promise in changed:
        names, blind = _meant(promise, volumes), unmeasured_prefixes(promise)
        meant = names or promise.volumes  # none while no volume has the labels that are asked for
        named = [] if promise.sla in by_labels else [each for each in promise.volumes if not is_pattern(each)]
        hidden = sorted(each for each in named if each.startswith(blind))
        if meant and all(name.startswith(blind) for name in meant):
            problems.append(_not_measurable(promise, sorted(names) or list(promise.volumes)))
        elif hidden:
            problems.append(_not_measurable(promise, hidden))
    return problems


def warn_unmeasured(changed: Iterable[Promise], volumes: Collection[str]) -> Iterator[str]:
    """Of objectives in whose scope some of the known volumes cannot be measured, and others can."""
    for promise in changed:
        names, blind = _meant(promise, volumes), unmeasured_prefixes(promise)
        hidden = sorted(name for name in names if name.startswith(blind))
        if hidden and len(hidden) < len(names):
            which = hidden[0] if len(hidden) == 1 else f"{hidden[0]} and {len(hidden) - 1} more"
            it = "it has" if len(hidden) == 1 else "one of them has"
            yield (
                f"{promise.sla}/{promise.objective}: {which} cannot be measured for it, beside the I/O path; "
                f"while {it} I/O there is no data. Name only volumes that a gateway serves"
            )


def _meant(promise: Promise, volumes: Collection[str]) -> set[str]:
    """Volumes in scope, as far as they are known or named."""
    names = {name for name in volumes if promise.has_volume(name)}
    return names | {selector for selector in promise.volumes if not is_pattern(selector)}


def unmeasured_prefixes(promise: Promise) -> tuple[str, ...]:
    """Beginnings of the names of volumes that are not measured for a promise."""
    found = [CGROUP_PREFIX, GROUP_PREFIX]
    if promise.metric != "mean_latency" or promise.io != "any":
        found.append(HOST_PREFIX)
    if promise.metric not in ("latency", "mean_latency"):
        found.append(QEMU_PREFIX)
    return tuple(found)


def _not_measurable(promise: Promise, names: Sequence[str]) -> DocumentProblem:
    what = _IN_PATH.get(promise.metric, promise.metric.replace("_", " "))
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    kind = "" if promise.io == "any" else f" of {promise.io}s alone"
    beside, other = _OF_HOST
    for prefix, why, instead in _BESIDE:
        if all(name.startswith(prefix) for name in names):
            beside, other = why, instead
    return DocumentProblem(
        0,
        f"spec.objectives.{promise.objective}",
        f"{what}{kind} cannot be measured on {which}, whose statistics come from beside the I/O path: "
        f"{beside}",
        f"{other or 'Serve it'} through a gateway (NBD) and name that volume",
        promise.sla,
    )


def _too_many_values(index: PromiseIndex, selector: str) -> Iterator[DocumentProblem]:
    values: dict[tuple[str, str], dict[int, set[str]]] = {}
    for promise in index.covering(selector):
        for client in promise.clients:
            for step in promise.curve:
                of_kind = values.setdefault((client, promise.io), {})
                of_kind.setdefault(step.threshold_us, set()).add(promise.sla)
    for (client, io), found in sorted(values.items()):
        if len(found) > MAX_THRESHOLDS:
            names = ", ".join(sorted(set().union(*found.values())))
            yield DocumentProblem(
                0,
                "spec.objectives",
                f"volume {selector}, client {client}, io {io} would have {len(found)} latency values; "
                f"gateways count at most {MAX_THRESHOLDS}. They come from: {names}",
                "Use the same values in these agreements' demand curves, or fewer steps",
                names,
            )


def _too_large(gateway: str, found: ThresholdSet) -> DocumentProblem:
    return DocumentProblem(
        0,
        "spec.scope",
        f"gateway {gateway} would need {found.wanted_bytes} bytes of latency thresholds "
        f"({len(found.entries) + found.left_out} entries); one gateway's set holds at most {MAX_SET_BYTES}",
        "Name fewer volumes or clients, use fewer steps in the demand curves, or spread the volumes over "
        "more gateways",
    )
