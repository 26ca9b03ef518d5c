"""Credits: compliance of a period against penalties and the cap."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pytest

from sla_server.agreements.compliance import add_up, terms_of
from sla_server.agreements.credits import penalty_for, period_credit
from sla_server.agreements.document import Agreement
from sla_server.agreements.periods import CalendarWindow, RollingWindow, periods_back
from sla_server.agreements.slice_history import Counts
from tests.support.agreements import FULL, agreement

NOW = round(datetime(2026, 3, 15, tzinfo=UTC).timestamp() * 1e6)
MONTH = CalendarWindow.model_validate({"type": "calendar", "period": "month"})
SECOND = FULL.replace("  window:", FULL[FULL.index("  - name: latency") : FULL.index("  window:")].replace(
    "name: latency", "name: other") + "  window:")  # fmt: skip


def credit(document: Agreement, **counts: Counts) -> tuple[float, float]:
    terms = terms_of(document.judged[0])
    sums = {name: add_up([(terms, count)]) for name, count in counts.items()}
    found = period_credit(document, 1, sums, (NOW, NOW + 1), NOW)
    return found.credit, found.uncapped


@pytest.mark.parametrize(
    ("compliance", "expected"),
    [(1.0, 0.0), (0.995, 0.0), (0.9949, 0.10), (0.99, 0.10), (0.95, 0.25), (0.9, 0.50), (None, 0.0)],
)
def test_the_largest_credit_whose_limit_was_missed(compliance: float | None, expected: float) -> None:
    assert penalty_for(agreement(FULL).spec.penalties, compliance) == expected


def test_compliance_at_the_limit_is_kept_however_it_is_computed() -> None:
    assert credit(agreement(FULL), latency=Counts(good=199, bad=1)) == (0.0, 0.0)
    assert credit(agreement(FULL), latency=Counts(good=1989, bad=11)) == (0.10, 0.10)


def test_no_data_counts_as_the_objective_says() -> None:
    counts = Counts(good=98, no_data=2, no_data_ours=2)
    assert credit(agreement(FULL), latency=counts)[0] == 0.25
    excused = agreement(FULL.replace("no_data: bad_if_ours", "no_data: exclude"))
    assert credit(excused, latency=counts)[0] == 0.0


def test_credits_of_objectives_add_up_to_the_cap() -> None:
    bad = Counts(good=98, bad=2)
    both = agreement(SECOND)
    assert credit(both, latency=bad, other=bad) == (0.50, 0.50)
    capped = agreement(SECOND.replace("credit_cap: 0.50", "credit_cap: 0.30"))
    assert credit(capped, latency=bad, other=bad) == (0.30, 0.50)
    assert credit(capped, latency=Counts(good=9, bad=91)) == (0.30, 0.50)


def test_a_period_shows_what_it_rests_on() -> None:
    terms = terms_of(agreement(FULL).judged[0])
    sums = {"latency": add_up([(terms, Counts(good=90, bad=10, excluded=50, not_applicable=5))])}
    found = period_credit(agreement(FULL), 3, sums, (NOW - 9, NOW - 1), NOW)
    (latency,) = found.objectives
    assert (latency.bad_s, latency.due_s, latency.slice_lengths_s) == (600, 6000, [60])
    assert (found.version, found.so_far, found.has_slices) == (3, False, True)
    assert (latency.compliance, latency.coverage, latency.target, latency.bad) == (0.9, 1.0, 0.995, 10)
    assert found.as_dict()["objectives"][0]["objective"] == "latency"


def test_periods_go_back_one_after_another() -> None:
    bounds = periods_back(MONTH, NOW, 3)
    assert [datetime.fromtimestamp(start / 1e6, UTC).month for start, _ in bounds] == [3, 2, 1]
    assert all(earlier[1] == later[0] for later, earlier in pairwise(bounds))
    rolling = RollingWindow.model_validate({"type": "rolling", "duration": "30d"})
    starts = [start_us for start_us, _ in periods_back(rolling, NOW, 3)]
    assert starts == sorted(starts, reverse=True)
    assert len(set(starts)) == 3
