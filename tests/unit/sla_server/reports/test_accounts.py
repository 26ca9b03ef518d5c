"""Sums over slices of which like ones are one row are those over single slices; and which periods count."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sla_server.agreements.compliance import agreed_periods
from sla_server.agreements.periods import Span
from sla_server.reports import inputs
from sla_server.reports.accounts import GROUP, end_us_of, grouped, runs, starting_within
from sla_server.reports.period import parse_period
from tests.support.agreements import in_force, simple

Row = dict[str, Any]
LENGTH_US = 60_000_000
DAILY = simple(extra="  window: {type: calendar, period: day, tz: Europe/Berlin}\n")


def made_up(seed: int) -> tuple[list[Row], list[Row]]:
    """Runs with gaps between some of them; and the same slices one by one."""
    chosen = random.Random(seed)
    found: list[Row] = []
    at_us = 0
    for _ in range(12):
        at_us += chosen.choice((0, 0, 7)) * LENGTH_US
        state, slices = chosen.choice(("good", "bad", "no_data")), chosen.randint(1, 9)
        row = {**dict.fromkeys(GROUP, 1), "length_us": LENGTH_US, "state": state, "reason": "x"}
        found.append({**row, "start_us": at_us, "slices": slices})
        at_us += slices * LENGTH_US
    return found, single(found)


def single(rows: list[Row]) -> list[Row]:
    return [
        {**row, "start_us": start_us, "slices": 1}
        for row in rows
        for start_us in range(row["start_us"], end_us_of(row), LENGTH_US)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_divided_at_any_bound(seed: int) -> None:
    rows, slices = made_up(seed)
    end_us = end_us_of(rows[-1]) + 2 * LENGTH_US
    bounds = [*range(-LENGTH_US, end_us, 7 * LENGTH_US), LENGTH_US // 2, end_us - 1]
    for from_us in bounds:
        for to_us in bounds:
            inside = [row for row in slices if from_us <= row["start_us"] < to_us]
            found = starting_within(rows, from_us, to_us)
            assert single(found) == inside, (from_us, to_us)
            assert grouped(found) == grouped(inside)


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_rows_are_those_of_slices(seed: int) -> None:
    rows, slices = made_up(seed)

    def spans(found: list[list[Row]]) -> list[tuple[int, int, int]]:
        return [(run[0]["start_us"], end_us_of(run[-1]), sum(row["slices"] for row in run)) for run in found]

    assert spans(runs(rows, lambda row: row["state"])) == spans(runs(slices, lambda row: row["state"]))


@pytest.mark.parametrize("period", ["2026-10-04", "2026-10", "2026"])
def test_no_more_periods_are_counted_back_than_there_can_be(
    period: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not two years of days for the report of one day; and none is missing."""
    asked: list[int] = []

    def counted(windows: Any, now_us: int, most: int, most_rolling: int) -> list[Span]:
        asked.append(most)
        return agreed_periods(windows, now_us, most, most_rolling)

    monkeypatch.setattr(inputs, "agreed_periods", counted)
    item = in_force(DAILY)
    versions = [item]
    reported = parse_period(period, "Europe/Berlin")
    found = inputs.credited_periods(versions, reported, reported.to_us)
    days = [(day[1], day[2]) for day in reported.days()]
    assert found == days
    assert asked[0] <= len(days) * 24 / 23 + 3
