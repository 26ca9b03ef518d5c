"""Where one objective stands now: the figures of the live snapshot, and the alerts that are active.

``standing`` is a pure function of the objective, its judged slices and the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sla_server.agreements import budget, windows
from sla_server.agreements.calendars import CalendarWindow
from sla_server.agreements.compile import InForce
from sla_server.agreements.history import Counts, SliceHistory
from sla_server.agreements.objectives import LatencyObjective


@dataclass(frozen=True, slots=True)
class ObjectiveStatus:
    """Figures of one objective over the period that ``now_us`` lies in.

    Attributes:
        burn_1h: over the last hour, 0 with fewer than 3 bad slices in it
        alerts: names of the burn-rate pairs that are active, and ``consecutive`` for 10 bad slices in a row
    """

    name: str
    objective: str
    period_start_us: int
    period_end_us: int
    counts: Counts
    compliance: float | None
    coverage: float | None
    budget: budget.Budget
    burn_1h: float
    consecutive_bad: int
    alerts: frozenset[str]

    @property
    def key(self) -> tuple[str, str]:
        """(agreement, objective)."""
        return self.name, self.objective

    def snapshot(self) -> dict[str, Any]:
        """The keys this adds to an entry of ``slas`` (messages.md, "Live snapshot")."""
        return {
            "compliance": self.compliance,
            "coverage": self.coverage,
            "budget_remaining": self.budget.remaining_ratio,
            "budget_minutes_left": self.budget.minutes_left,
            "slices": self.counts.states(),
        }


def standing(
    item: InForce, objective: LatencyObjective, history: SliceHistory, judged_to_us: int, now_us: int
) -> ObjectiveStatus:
    """Compute the figures.

    Args:
        item: the agreement's version in force.
        objective: one of its judged objectives.
        history: its judged slices.
        judged_to_us: end of the newest judged slice; alerts look back from here.
        now_us: wall clock.
    """
    spec = item.agreement.spec
    start_us, end_us = windows.period_bounds(spec.window, now_us)
    counts = history.counts(start_us, end_us)
    good, bad = budget.eligible(counts, objective.no_data)
    slice_us = history.length_us
    target = objective.budgeting.target
    if isinstance(spec.window, CalendarWindow):
        ahead_us = windows.service_us(
            spec.service_hours, max(judged_to_us, start_us, item.applied_us), end_us, spec.time_zone
        )
        possible = good + bad + ahead_us / slice_us
    else:
        in_service_us = windows.service_us(spec.service_hours, start_us, end_us, spec.time_zone)
        measured_out = counts.not_applicable + counts.no_data + counts.good + counts.bad - good - bad
        possible = in_service_us / slice_us - measured_out
    burn_1h, in_a_row, active = _burning(objective, history, end_us - start_us, judged_to_us)
    return ObjectiveStatus(
        name=item.name,
        objective=objective.name,
        period_start_us=start_us,
        period_end_us=end_us,
        counts=counts,
        compliance=budget.compliance_ratio(good, bad),
        coverage=budget.coverage_ratio(counts),
        budget=budget.error_budget(target, possible, bad, objective.budgeting.slice_s),
        burn_1h=burn_1h,
        consecutive_bad=in_a_row,
        alerts=active,
    )


def _burning(
    objective: LatencyObjective, history: SliceHistory, period_us: int, judged_to_us: int
) -> tuple[float, int, frozenset[str]]:
    """Burn rate over the last hour, bad slices in a row, and active alerts."""
    slice_us, target = history.length_us, objective.budgeting.target
    alerts = budget.burn_alerts(period_us, slice_us, target)
    back_us = max(budget.HOUR_US, budget.LOOK_BACK_SLICES * slice_us, *(alert.long_us for alert in alerts))
    if history.is_clean_since(judged_to_us - back_us):
        return 0.0, 0, frozenset()  # nearly all, nearly always
    good, bad = budget.eligible(
        history.counts(judged_to_us - budget.HOUR_US, judged_to_us), objective.no_data
    )
    burn_1h = budget.burn_rate(good, bad, target) if bad >= budget.MIN_BAD_SLICES else 0.0
    in_a_row = budget.consecutive_bad(history, judged_to_us, objective.no_data)
    active = {
        alert.name
        for alert in alerts
        if budget.alert_is_active(alert, history, judged_to_us, target, objective.no_data)
    }
    if in_a_row >= budget.CONSECUTIVE_BAD:
        active.add("consecutive")
    return burn_1h, in_a_row, frozenset(active)
