"""Documents in force to what control, gateways and judge need: promises and volume classes.

What gateways have to count for them is compiled by ``thresholds``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sla_server.agreements.model import Agreement
from sla_server.agreements.objectives import LatencyObjective
from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass

MEGABYTE: Final = 1_000_000


@dataclass(frozen=True)
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

    @cached_property
    def promises(self) -> tuple[Promise, ...]:
        """Its judged objectives, reduced; made once, because a change of one agreement asks for all."""
        return tuple(promise_of(self, objective) for objective in self.agreement.judged)


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
                volumes=tuple(spec.scope.volumes),
                floor_iops=spec.guarantee.floor_iops,
                floor_bytes_per_s=spec.guarantee.floor_mbps * MEGABYTE,
                cap_iops=spec.cap.max_iops if spec.cap else None,
            )
        )
    return result
