"""A promise, reduced to what judging and control need, and what is in force at a moment.

The agreement document (``document``) is what people write; a ``Promise`` is one objective of one agreement in
force. Pure data, no I/O. Source: SLA-MODEL.md 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Final, Literal

from sla_server.agreements.calendars import CalendarInForce
from sla_server.agreements.document import (
    Agreement,
    AvailabilityObjective,
    IopsObjective,
    LatencyObjective,
    MeanLatencyObjective,
    Objective,
    ThroughputObjective,
)
from sla_server.agreements.maintenance import AnnouncedWork
from sla_server.agreements.periods import is_excluded, planned_us
from sla_server.agreements.selectors import matches
from sla_server.agreements.volume_labels import LabelBook

Metric = Literal["latency", "mean_latency", "iops", "throughput", "availability"]
LIVE: Final = frozenset(("latency", "mean_latency", "iops", "throughput", "availability"))
"""Indicators that have a live state, and so episodes: all of them."""


class Priority(IntEnum):
    """Agreement class; the value is its weight when what is left is shared."""

    BEST_EFFORT = 1
    BRONZE = 2
    SILVER = 4
    GOLD = 8

    @classmethod
    def parse(cls, text: str) -> Priority:
        """From the document's spelling (gold, silver, bronze, best-effort)."""
        return cls[text.upper().replace("-", "_")]

    @property
    def label(self) -> str:
        """The document's spelling."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class CurveStep:
    """One step of a demand curve: up to this offered rate the threshold holds."""

    up_to_iops: float
    threshold_us: int


@dataclass(frozen=True, slots=True)
class Promise:
    """One objective of one agreement in force.

    Attributes:
        volumes: names or glob patterns; a stream is in scope if its volume matches one of them
        clients: names or glob patterns, ``("*",)`` for any client
        io: "any", "read" or "write"
        percentile: 0..100, e.g. 95.0; of an indicator without one, that of I/Os that must not fail
        curve: of the latencies at least one step, rising in up_to_iops, of which the last may be infinite;
            of availability one step, ``outage``; of the rates none
        target_ratio: share of slices that must be good, 0..1
        floor_iops: the volumes in scope are never throttled below this
        metric: latency (at the percentile), mean_latency, iops, throughput or availability
        counts_errors: whether a failed I/O counts as missed; else it does not count at all
        promised: of iops I/Os, of throughput bytes a second; else 0
        least_iops, max_mean_bytes, least_read_ratio: of I/Os it applies to, as rates; what ``control`` asks
    """

    sla: str
    version: int
    objective: str
    priority: Priority
    volumes: tuple[str, ...]
    clients: tuple[str, ...]
    io: str
    percentile: float
    curve: tuple[CurveStep, ...]
    target_ratio: float
    slice_s: int
    floor_iops: float
    floor_bytes_per_s: float
    metric: Metric = "latency"
    counts_errors: bool = True
    promised: float = 0.0
    least_iops: float = 0.0
    max_mean_bytes: float = math.inf
    least_read_ratio: float = 0.0

    def differs_in_volumes(self, other: Promise) -> bool:
        """Whether it is the same promise of the same version, whose labels chose other volumes then."""
        return self != other and self == replace(other, volumes=self.volumes)

    @property
    def outage_us(self) -> int:
        """Of availability: no completion for so long while I/O is outstanding is an outage."""
        return self.curve[-1].threshold_us

    @property
    def key(self) -> tuple[str, str]:
        """(agreement, objective)."""
        return self.sla, self.objective

    @property
    def allowed_miss_ratio(self) -> float:
        """1 - q: the share of I/Os that may exceed the threshold."""
        return 1.0 - self.percentile / 100.0

    def threshold_us(self, offered_iops: float) -> int | None:
        """Threshold at this demand, or None when demand is above the curve."""
        for step in self.curve:
            if offered_iops <= step.up_to_iops:
                return step.threshold_us
        return None

    def covers(self, volume: str, client: str) -> bool:
        """Whether a stream of this volume and client is in scope."""
        return self.has_volume(volume) and matches(client, self.clients)

    def has_volume(self, volume: str) -> bool:
        """Whether the volume is in scope for some client."""
        return matches(volume, self.volumes)


@dataclass(frozen=True, slots=True)
class VolumeClass:
    """What an agreement says of a volume as a neighbour: its priority, floor and static cap.

    A volume without an agreement is best-effort with a floor of 50 IOPS (DESIGN.md 4, "Names").

    Attributes:
        clients: names or glob patterns, ``("*",)`` for any client.
        burst_iops, burst_s: how fast, and for how long, it may be faster than ``cap_iops``; None: never.
    """

    sla: str
    priority: Priority
    volumes: tuple[str, ...]
    floor_iops: float = 50.0
    floor_bytes_per_s: float = 0.0
    cap_iops: float | None = None
    clients: tuple[str, ...] = ("*",)
    burst_iops: float | None = None
    burst_s: float | None = None

    def has_volume(self, volume: str) -> bool:
        """Whether the volume is in scope for some client."""
        return matches(volume, self.volumes)

    def has_client(self, client: str) -> bool:
        """Whether the client is in scope on the volumes that are."""
        return matches(client, self.clients)


# -- Documents in force, compiled to promises and volume classes
#
# What gateways have to count for them is compiled by ``thresholds``.


MEGABYTE: Final = 1_000_000


@dataclass(frozen=True)
class InForce:
    """One version of one agreement and the time it holds: slices that start in [applied_us, ended_us)."""

    agreement: Agreement
    version: int
    applied_us: int
    ended_us: int | None = None
    work: tuple[AnnouncedWork, ...] = ()
    """Maintenance documents in whose scope it is, those that ended included."""
    calendar: tuple[CalendarInForce, ...] = ()
    """Versions of the calendar that its service hours name."""
    former: tuple[InForce, ...] = ()
    """Versions before it to which work was announced: it counts against ``max_per_period`` of this one."""
    labelled: tuple[str, ...] = ()
    """Volumes that its ``scope.volume_labels`` mean now (``volume_labels``)."""

    @property
    def name(self) -> str:
        """The agreement's name."""
        return self.agreement.name

    @property
    def may_be_excluded(self) -> bool:
        """Whether there are times at which nothing is promised."""
        spec = self.agreement.spec
        return bool(spec.service_hours is not None or spec.maintenance.windows or self.work)

    @property
    def chooses_by_labels(self) -> bool:
        """Whether its volumes are those with some labels."""
        return self.agreement.spec.scope.volume_labels is not None

    @property
    def volumes(self) -> tuple[str, ...]:
        """Names and patterns of the volumes in scope now; of labels names, none while none fits."""
        return self.labelled if self.chooses_by_labels else tuple(self.agreement.spec.scope.volumes)

    def with_labels(self, book: LabelBook) -> InForce:
        """The same with the volumes that its labels mean; itself if nothing changes."""
        if not self.chooses_by_labels:
            return self
        labelled = tuple(book.in_scope(self.agreement.spec.scope))
        return self if labelled == self.labelled else replace(self, labelled=labelled)

    def excluded(self, start_us: int, end_us: int | None = None) -> str | None:
        """Why nothing is promised at an instant or in a slice; None: the promise holds."""
        return is_excluded(
            self.agreement,
            self.work,
            start_us,
            end_us=end_us,
            calendar=self.calendar,
            used_us=self.planned_us,
        )

    def planned_us(self, from_us: int, to_us: int) -> int:
        """How much of [from_us, to_us) is work announced to it, to each version while that was in force.

        What lay before a version, or comes after it, it excuses nothing of.
        """
        begin_us = max(from_us, self.applied_us)
        end_us = to_us if self.ended_us is None else min(to_us, self.ended_us)
        own_us = planned_us(self.agreement, self.work, begin_us, end_us) if begin_us < end_us else 0
        return own_us + sum(version.planned_us(from_us, to_us) for version in self.former)

    @cached_property
    def all_promises(self) -> tuple[Promise, ...]:
        """Its objectives, reduced; made once, because a change of one agreement asks for all."""
        return tuple(promise_of(self, objective) for objective in self.agreement.judged)

    @cached_property
    def promises(self) -> tuple[Promise, ...]:
        """Those of them whose limits gateways count: latency at a percentile."""
        return tuple(promise for promise in self.all_promises if promise.metric == "latency")


NO_PERCENTILE: Final = 99.0
"""Of an indicator without a percentile: more than 1 % of failed I/Os are bad (SLA-MODEL.md 2)."""


def promise_of(item: InForce, objective: Objective) -> Promise:
    """One objective, reduced."""
    spec = item.agreement.spec
    curve: tuple[CurveStep, ...] = ()
    percentile, promised = NO_PERCENTILE, 0.0
    match objective:
        case LatencyObjective() | MeanLatencyObjective():
            curve = tuple(CurveStep(step.limit_iops, step.threshold_us) for step in objective.demand_curve)
            if isinstance(objective, LatencyObjective):
                percentile = float(objective.indicator.percentile)
        case IopsObjective():
            promised = objective.promised_iops
        case ThroughputObjective():
            promised = objective.promised_mbps * MEGABYTE
        case AvailabilityObjective():
            curve = (CurveStep(math.inf, round(objective.outage * 1_000_000)),)
    return Promise(
        sla=item.name,
        version=item.version,
        objective=objective.name,
        priority=Priority.parse(spec.priority),
        volumes=item.volumes,
        clients=tuple(spec.scope.clients),
        io=spec.scope.io,
        percentile=percentile,
        curve=curve,
        target_ratio=objective.budgeting.target,
        slice_s=objective.budgeting.slice_s,
        floor_iops=spec.guarantee.floor_iops,
        floor_bytes_per_s=spec.guarantee.floor_mbps * MEGABYTE,
        metric=objective.indicator.metric,
        counts_errors=objective.errors == "bad",
        promised=promised,
        least_iops=objective.applicability.min_ios_per_slice / objective.budgeting.slice_s,
        max_mean_bytes=(objective.applicability.max_mean_io_kib or math.inf) * 1024,
        least_read_ratio=objective.applicability.min_read_fraction or 0.0,
    )


def promises(items: Iterable[InForce]) -> list[Promise]:
    """Every latency objective at a percentile, in order of agreement and document."""
    return [promise for item in items for promise in item.promises]


def classes(items: Iterable[InForce]) -> list[VolumeClass]:
    """What each agreement says of its volumes as neighbours."""
    result = []
    for item in items:
        spec = item.agreement.spec
        result.append(
            VolumeClass(
                sla=item.name,
                priority=Priority.parse(spec.priority),
                volumes=item.volumes,
                floor_iops=spec.guarantee.floor_iops,
                floor_bytes_per_s=spec.guarantee.floor_mbps * MEGABYTE,
                cap_iops=spec.cap.max_iops if spec.cap else None,
                clients=tuple(spec.scope.clients),
                burst_iops=spec.cap.burst_iops if spec.cap else None,
                burst_s=spec.cap.burst_s if spec.cap else None,
            )
        )
    return result
