"""What is credited for a period: compliance of each objective, the penalty it falls under, and the cap.

An objective whose compliance ended below several penalties is credited the largest of theirs. The credits of
an agreement's objectives add up, and ``credit_cap`` is the most that a period costs. An objective of which
nothing was eligible is credited nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sla_server.agreements.compliance import Counts, compliance_ratio, coverage_ratio, eligible
from sla_server.agreements.document import Agreement, Penalty
from sla_server.agreements.periods import CalendarWindow, RollingWindow, period_bounds


@dataclass(frozen=True, slots=True)
class ObjectiveCredit:
    """One objective in one period.

    Attributes:
        compliance: good / (good + bad), no_data counted as the objective says; None: nothing was eligible
        coverage: share of the judged slices that were measured
        credit: 0..1, of its penalties alone
    """

    objective: str
    target: float
    good: int
    bad: int
    compliance: float | None
    coverage: float | None
    credit: float


@dataclass(frozen=True, slots=True)
class PeriodCredit:
    """One period of one agreement.

    Attributes:
        version: of the agreement at the period's end, or now
        so_far: the period has not ended
        credit: 0..1, all objectives together, at most the cap
        uncapped: the same without the cap
    """

    start_us: int
    end_us: int
    version: int
    so_far: bool
    objectives: tuple[ObjectiveCredit, ...]
    credit: float
    uncapped: float

    def as_dict(self) -> dict[str, Any]:
        """As the API answers."""
        return asdict(self) | {"objectives": [asdict(item) for item in self.objectives]}

    @property
    def has_slices(self) -> bool:
        """Whether anything was judged that counts."""
        return any(item.good + item.bad for item in self.objectives)


def penalty_for(penalties: Iterable[Penalty], compliance: float | None) -> float:
    """The largest credit whose ``below`` the compliance is under."""
    if compliance is None:
        return 0.0
    return max((item.credit for item in penalties if compliance < item.below), default=0.0)


def period_credit(
    agreement: Agreement, version: int, counts: Mapping[str, Counts], bounds: tuple[int, int], now_us: int
) -> PeriodCredit:
    """What one period costs.

    Args:
        agreement: the version that holds at the period's end.
        version: its number.
        counts: judged slices of the period by objective.
        bounds: [start, end) of the period, us UTC.
        now_us: wall clock.
    """
    spec = agreement.spec
    found = []
    for objective in agreement.judged:
        of_objective = counts.get(objective.name, Counts())
        good, bad = eligible(of_objective, objective.no_data)
        compliance = compliance_ratio(good, bad)
        found.append(
            ObjectiveCredit(
                objective=objective.name,
                target=objective.budgeting.target,
                good=good,
                bad=bad,
                compliance=compliance,
                coverage=coverage_ratio(of_objective),
                credit=penalty_for(spec.penalties, compliance),
            )
        )
    uncapped = round(sum(item.credit for item in found), 9)  # 0.1 + 0.2 is not 0.3 in floating point
    return PeriodCredit(
        start_us=bounds[0],
        end_us=bounds[1],
        version=version,
        so_far=bounds[1] > now_us or isinstance(spec.window, RollingWindow),
        objectives=tuple(found),
        credit=min(uncapped, spec.credit_cap),
        uncapped=uncapped,
    )


def periods_back(
    window: CalendarWindow | RollingWindow, now_us: int, count: int
) -> Sequence[tuple[int, int]]:
    """The current period and those before, newest first; a rolling window has only the one that ends now."""
    bounds = [period_bounds(window, now_us)]
    while len(bounds) < count and isinstance(window, CalendarWindow):
        bounds.append(period_bounds(window, bounds[-1][0] - 1))
    return bounds
