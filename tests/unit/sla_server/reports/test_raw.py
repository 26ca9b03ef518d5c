"""Stored slices are judged again from the raw counters: the judge's own are found right, others are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sla_server.agreements.promise import InForce
from sla_server.reports.inputs import ReportInputs
from sla_server.reports.period import parse_period
from sla_server.reports.raw import RawCheck, RawDifference, raw_differences
from sla_server.services.judging.judge import Judge
from tests.support.agreements import in_force, simple
from tests.support.services import MINUTE_US, START_US, FakeStore

STEPS = simple().replace(
    "demand_curve: [{up_to_iops: 500, value_ms: 12.0}]",
    "demand_curve: [{up_to_iops: 5, value_ms: 12.0}, {up_to_iops: 500, value_ms: 20.0}]",
)


class Stored(FakeStore):
    """As much of ``SqlReader`` as the check asks."""

    from_us: int | None = START_US

    @property
    def reports(self) -> Any:
        return SimpleNamespace(rollups_from_us=lambda: self.from_us)


def judged(item: InForce, minutes: int = 6) -> Stored:
    """Some minutes of which the third is slow and the fourth has no data, judged."""
    store = Stored()
    store.add_stream()
    for minute in range(minutes):
        if minute != 3:
            store.add_slot(START_US + minute * MINUTE_US, missed=31 if minute == 2 else 3)
    judge = Judge(store, judge_late_s=30)
    judge.set_agreements((item,), START_US)
    store.keep(judge.run(START_US + minutes * MINUTE_US + MINUTE_US).rows)
    return store


def check(store: Stored, item: InForce) -> tuple[list[RawDifference], RawCheck]:
    rows = store.slices("gold", "latency", START_US, START_US + 60 * MINUTE_US)
    period = parse_period("2027-01", "UTC")
    inputs = ReportInputs("gold", period, period.to_us, [item], [], slices={"latency": rows})
    counted = RawCheck()
    return list(raw_differences(store, inputs, counted)), counted  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [simple(), STEPS], ids=["one step", "two steps"])
def test_what_the_judge_stored_is_what_the_counters_give(text: str) -> None:
    item = in_force(text, applied_us=START_US)
    found, counted = check(judged(item), item)
    assert found == []
    assert counted.compared == (6 if text == simple() else 5), "with steps the slice before is needed, too"
    assert counted.compared + counted.gone == 6


def test_a_slice_that_was_changed_is_named_with_both_values() -> None:
    item = in_force(simple(), applied_us=START_US)
    store = judged(item)
    row = next(each for each in store.tables["slices"] if each["state"] == "bad")
    row["state"] = "good"
    ((difference,), _) = check(store, item)
    assert (difference.objective, difference.start_us) == ("latency", START_US + 2 * MINUTE_US)
    assert (difference.stored["state"], difference.raw["state"]) == ("good", "bad")


def test_counters_that_were_changed_are_noticed() -> None:
    item = in_force(simple(), applied_us=START_US)
    store = judged(item)
    store.missed[0]["missed"] += 1
    ((difference,), _) = check(store, item)
    assert (difference.stored["missed"], difference.raw["missed"]) == (3, 4)


def test_what_has_left_sql_is_not_compared() -> None:
    item = in_force(simple(), applied_us=START_US)
    store = judged(item)
    store.from_us = START_US + 4 * MINUTE_US
    found, counted = check(store, item)
    assert (found, counted.compared, counted.gone) == ([], 2, 4)
    store.from_us = None
    assert check(store, item)[1].gone == 6
