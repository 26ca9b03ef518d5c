"""Whether agreements can be kept beside those in force: capacity against everything promised, by backend.

Theory of operation. Load is counted in cost a second (1 an I/O, 1 per 64 KiB), as capacity is. An agreement
may ask for the end of its demand curve, and its volumes are never throttled below their floors: it reserves
the larger of both. Of agreements about all clients of a volume the largest floor counts; one that names
clients has its floor for them alone, beside those. A volume whose other clients no agreement covers reserves
the default floor for them. The capacity of a backend is the smallest that the newest policy found for a
promise on it, at that promise's first latency and percentile. It says nothing about a stricter promise.

    no       what would be promised is above the capacity
    yes      it is not, and the capacity was found for promises at least as strict
    unknown  a figure is missing; the reasons say which

The estimate is cautious: demand of an agreement over several backends is counted in full on each of them, and
demands of different agreements are added, though they seldom peak together. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from sla_server.agreements.document import (
    DEFAULT_FLOOR_IOPS,
    Agreement,
    IopsObjective,
    LatencyObjective,
    MeanLatencyObjective,
    ThroughputObjective,
)
from sla_server.agreements.selectors import matches
from sla_server.agreements.volume_labels import LabelBook

COST_BYTES: Final = 65_536
KIB: Final = 1024
MEGABYTE: Final = 1_000_000
Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class VolumeUse:
    """A volume that gateways have shown.

    Attributes:
        mean_io_bytes: over everything stored; None before its first I/O
    """

    volume: str
    backend: str
    mean_io_bytes: float | None


@dataclass(frozen=True, slots=True)
class KnownCapacity:
    """What the newest policy says of a backend for one promise on it; ``cost_per_s`` None: ``reason``."""

    backend: str
    sla: str
    objective: str
    cost_per_s: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BackendAdmission:
    """The answer for one backend; rates in cost a second.

    Attributes:
        capacity: None: not known
        capacity_of: agreement/objective for which it was found
        promised: by the agreements in force, without those that would be replaced
        unpromised_floors: of volumes that no agreement covers for all their clients
        added: by the documents asked about
        reasons: why the answer is unknown or no
    """

    backend: str
    answer: Answer
    capacity: float | None
    capacity_of: str
    promised: float
    unpromised_floors: float
    added: float
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdmissionAnswer:
    """The answer, and what it rests on."""

    answer: Answer
    backends: list[BackendAdmission]
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """As the API answers."""
        return asdict(self)


EVERYONE: Final = ("*",)


@dataclass(slots=True)
class _Reserved:
    """What agreements reserve on one backend; ``floors``: the largest counted, by volume and clients."""

    cost: float = 0.0
    reasons: list[str] = field(default_factory=list)
    floors: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)


def admit(
    wanted: Sequence[Agreement],
    in_force: Sequence[Agreement],
    volumes: Sequence[VolumeUse],
    capacities: Sequence[KnownCapacity],
    labels: LabelBook | None = None,
    studied: Sequence[Agreement] | None = None,
) -> AdmissionAnswer:
    """Answer for some agreements together.

    Args:
        wanted: documents asked about; they replace those of the same name.
        in_force: all agreements in force.
        volumes: all volumes known.
        capacities: of the newest policy.
        labels: by which agreements choose volumes; None: no volume has any.
        studied: in force when the capacities were found; None: those in force now.
    """
    book = labels or LabelBook()
    wanted = [_chosen(agreement, book) for agreement in wanted]
    in_force = [_chosen(agreement, book) for agreement in in_force]
    names = {agreement.name for agreement in wanted}
    others = [agreement for agreement in in_force if agreement.name not in names]
    reasons = [text for agreement in wanted for text in _unseen(agreement, volumes)]
    touched = {use.backend for agreement in wanted for use in _covered(agreement, volumes)}
    known = in_force if studied is None else studied
    by_key = {(agreement.name, each.name): each for agreement in known for each in _latencies(agreement)}
    found = []
    for backend in sorted(touched):
        on_it = [use for use in volumes if use.backend == backend]
        here = [item for item in capacities if item.backend == backend]
        found.append(_one_backend(backend, wanted, others, on_it, here, by_key))
    answers = {item.answer for item in found}
    if "no" in answers:
        answer: Answer = "no"
    else:
        answer = "unknown" if "unknown" in answers or reasons or not found else "yes"
    return AdmissionAnswer(answer, found, reasons)


def _latencies(agreement: Agreement) -> list[LatencyObjective]:
    """Objectives of the kind for which policies find capacities."""
    return [item for item in agreement.spec.objectives if isinstance(item, LatencyObjective)]


def _covered(agreement: Agreement, volumes: Iterable[VolumeUse]) -> list[VolumeUse]:
    return [use for use in volumes if matches(use.volume, agreement.spec.scope.volumes)]


def _chosen(agreement: Agreement, book: LabelBook) -> Agreement:
    """The same, naming the volumes that its labels choose."""
    spec = agreement.spec
    if spec.scope.volume_labels is None:
        return agreement
    scope = spec.scope.model_copy(update={"volumes": list(book.in_scope(spec.scope))})
    return agreement.model_copy(update={"spec": spec.model_copy(update={"scope": scope})})


def _unseen(agreement: Agreement, volumes: Sequence[VolumeUse]) -> Iterable[str]:
    scope = agreement.spec.scope
    if scope.volume_labels is not None and not scope.volumes:
        yield f"{agreement.name}: no volume has labels that fit {scope.volume_labels!r}"
    for selector in agreement.spec.scope.volumes:
        if not any(matches(use.volume, [selector]) for use in volumes):
            yield f"{agreement.name}: no gateway has shown a volume {selector!r}, so its backend is not known"


def _one_backend(
    backend: str,
    wanted: Sequence[Agreement],
    others: Sequence[Agreement],
    volumes: Sequence[VolumeUse],
    capacities: Sequence[KnownCapacity],
    by_key: Mapping[tuple[str, str], LatencyObjective],
) -> BackendAdmission:
    promised, added = _Reserved(), _Reserved()
    for agreements, reserved in ((wanted, added), (others, promised)):
        reserved.floors = dict(added.floors)  # a floor is counted once
        for agreement in agreements:
            _reserve(agreement, volumes, reserved)
    free = [use for use in volumes if (use.volume, EVERYONE) not in promised.floors]
    floors = sum(DEFAULT_FLOOR_IOPS * _cost_of(use.mean_io_bytes or 0.0) for use in free)
    reasons = [*added.reasons, *promised.reasons]
    known = [item for item in capacities if item.cost_per_s is not None]
    limit = min(known, key=lambda item: item.cost_per_s or 0.0, default=None)
    total = promised.cost + floors + added.cost
    answer: Answer
    if limit is None or limit.cost_per_s is None:
        answer = "unknown"
        why = [f"{item.sla}/{item.objective}: {item.reason}" for item in capacities if item.reason]
        reasons += why or ["its capacity is not known: run 'sla policy run' when it has been busy"]
    elif total > limit.cost_per_s:
        answer = "no"
    else:
        stricter = [text for each in wanted for text in _stricter(each, volumes, known, by_key)]
        reasons += stricter
        answer = "unknown" if reasons else "yes"
    return BackendAdmission(
        backend=backend,
        answer=answer,
        capacity=limit.cost_per_s if limit is not None else None,
        capacity_of=f"{limit.sla}/{limit.objective}" if limit is not None else "",
        promised=promised.cost,
        unpromised_floors=floors,
        added=added.cost,
        reasons=reasons,
    )


def _cost_of(io_bytes: float) -> float:
    """Of one I/O."""
    return 1.0 + io_bytes / COST_BYTES


def _reserve(agreement: Agreement, volumes: Sequence[VolumeUse], reserved: _Reserved) -> None:
    own = _covered(agreement, volumes)
    if not own:
        return
    guarantee, floors = agreement.spec.guarantee, 0.0
    clients = tuple(sorted(agreement.spec.scope.clients))
    whose = EVERYONE if "*" in clients else clients
    for use in own:
        floor = max(
            guarantee.floor_iops * _cost_of(use.mean_io_bytes or 0.0),
            guarantee.floor_mbps * MEGABYTE / COST_BYTES,
        )
        counted = reserved.floors.get((use.volume, whose), 0.0)
        reserved.floors[use.volume, whose] = max(floor, counted)
        floors += max(floor - counted, 0.0)
    demand, reasons = _demand(agreement, own)
    reserved.cost += max(floors, demand)
    reserved.reasons += reasons


def _demand(agreement: Agreement, own: Sequence[VolumeUse]) -> tuple[float, list[str]]:
    """The largest load that the agreement promises something for, and what of it is not known."""
    demand, reasons = 0.0, []
    for objective in agreement.spec.objectives:
        where = f"{agreement.name}/{objective.name}"
        if isinstance(objective, ThroughputObjective):
            demand = max(demand, objective.promised_mbps * MEGABYTE / COST_BYTES)
            continue
        if isinstance(objective, LatencyObjective | MeanLatencyObjective):
            iops = objective.demand_curve[-1].up_to_iops
            if iops is None:
                reasons.append(f"{where} holds at any rate: its demand curve has no end")
                continue
        elif isinstance(objective, IopsObjective):
            iops = objective.promised_iops
        else:
            continue
        largest_kib = objective.applicability.max_mean_io_kib
        measured = [use.mean_io_bytes for use in own if use.mean_io_bytes is not None]
        if largest_kib is None and not measured:
            text = "the size of its I/Os is neither limited (applicability.max_mean_io_kib) nor measured"
            reasons.append(f"{where}: {text}")
        size = largest_kib * KIB if largest_kib is not None else max(measured, default=0.0)
        demand = max(demand, iops * _cost_of(size))
    return demand, reasons


def _stricter(
    agreement: Agreement,
    volumes: Sequence[VolumeUse],
    known: Sequence[KnownCapacity],
    by_key: Mapping[tuple[str, str], LatencyObjective],
) -> Iterable[str]:
    """Promises of this agreement for which no capacity found here says anything."""
    if not _covered(agreement, volumes):
        return
    studied = [by_key[item.sla, item.objective] for item in known if (item.sla, item.objective) in by_key]
    for other in agreement.spec.objectives:
        if isinstance(other, MeanLatencyObjective):
            yield f"{agreement.name}/{other.name}: capacities are found for percentiles, not for mean latency"
    for objective in _latencies(agreement):
        value, percentile = objective.demand_curve[0].value_ms, objective.indicator.percentile
        if not any(
            each.demand_curve[0].value_ms <= value and each.indicator.percentile >= percentile
            for each in studied
        ):
            yield (
                f"{agreement.name}/{objective.name}: p{percentile:g} {value:g} ms is stricter than what "
                "the capacity was found for"
            )
