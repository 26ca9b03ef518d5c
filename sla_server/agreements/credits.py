"""What is credited for a period: compliance of each objective, the penalty it falls under, and the cap.

An objective whose compliance ended below several penalties is credited the largest of theirs. The credits of
an agreement's objectives add up, and ``credit_cap`` is the most that a period costs. An objective of which
nothing was eligible is credited nothing. Penalties and cap are those of the version at the period's end; what
was judged by an earlier version counts as that version said (``compliance``), also of an objective that the
last version no longer has. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sla_server.agreements.compliance import PeriodSums
from sla_server.agreements.document import Agreement, Penalty
from sla_server.agreements.periods import RollingWindow, Span


@dataclass(frozen=True, slots=True)
class ObjectiveCredit:
    """One objective in one period.

    Attributes:
        target: as the version says that had it last
        good, bad: slices, no_data counted as each version says
        bad_s, due_s: their time, seconds: ``due`` is good and bad together
        slice_lengths_s: of the slices of the period; several after an edit within it
        compliance: good / due, by time; None: nothing was eligible
        coverage: share of the judged time that was measured
        credit: 0..1, of its penalties alone
        is_agreed: whether the version at the period's end has it
    """

    objective: str
    target: float
    good: int
    bad: int
    bad_s: int
    due_s: int
    slice_lengths_s: list[int]
    compliance: float | None
    coverage: float | None
    credit: float
    is_agreed: bool = True


@dataclass(frozen=True, slots=True)
class PeriodCredit:
    """One period of one agreement.

    Attributes:
        version: of the agreement at the period's end, or now
        so_far: the period has not ended
        credit: 0..1, all objectives together, at most the cap
        uncapped: the same without the cap
        has_penalties: whether that version has any; without them nothing is owed
    """

    start_us: int
    end_us: int
    version: int
    so_far: bool
    objectives: tuple[ObjectiveCredit, ...]
    credit: float
    uncapped: float
    has_penalties: bool = False

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
    agreement: Agreement,
    version: int,
    sums: Mapping[str, PeriodSums],
    bounds: Span,
    now_us: int,
    former: Mapping[str, float] | None = None,
) -> PeriodCredit:
    """What one period costs.

    Args:
        agreement: the version that holds at the period's end.
        version: its number.
        sums: judged slices of the period by objective.
        bounds: [start, end) of the period, us UTC.
        now_us: wall clock.
        former: target of each objective that only earlier versions have; left out if nothing of it counts.
    """
    spec = agreement.spec
    agreed = {objective.name: objective.budgeting.target for objective in agreement.judged}
    found = []
    for name, target in {**(former or {}), **agreed}.items():
        of_objective = sums.get(name, PeriodSums())
        if name not in agreed and not of_objective.good + of_objective.bad:
            continue
        found.append(
            ObjectiveCredit(
                objective=name,
                target=target,
                good=of_objective.good,
                bad=of_objective.bad,
                **of_objective.by_time(),
                compliance=of_objective.compliance,
                coverage=of_objective.coverage,
                credit=penalty_for(spec.penalties, of_objective.compliance),
                is_agreed=name in agreed,
            )
        )
    found.sort(key=lambda item: not item.is_agreed)
    uncapped = round(sum(item.credit for item in found), 9)  # 0.1 + 0.2 is not 0.3 in floating point
    return PeriodCredit(
        start_us=bounds[0],
        end_us=bounds[1],
        version=version,
        so_far=bounds[1] > now_us or (isinstance(spec.window, RollingWindow) and bounds[1] == now_us),
        objectives=tuple(found),
        credit=min(uncapped, spec.credit_cap),
        uncapped=uncapped,
        has_penalties=bool(spec.penalties),
    )
