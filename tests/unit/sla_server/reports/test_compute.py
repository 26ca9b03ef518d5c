"""What a report says, from rows that a person can add up."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.reports.compute import compute_report
from sla_server.reports.document import ReportContent
from sla_server.reports.errors import NoSuchPeriod, NothingToReport, PeriodTooLong
from sla_server.reports.inputs import read_inputs
from tests.support.agreements import FULL, simple
from tests.support.reports import (
    DAY_US,
    HOUR_US,
    MINUTE_US,
    StoredRows,
    at_us,
    episode_row,
    example_month,
    slice_row,
    throttle_row,
    version_row,
)

DAY = at_us("2026-10-03")
AFTER = at_us("2026-10-20")
DAILY = simple(extra="  window: {type: calendar, period: day}\n")


def stored(text: str = DAILY, **more: object) -> StoredRows:
    """A day of good slices of the agreement ``gold``."""
    found = StoredRows([version_row(text, 1, DAY - 10 * DAY_US)])
    found.slices = [slice_row(DAY + minute * MINUTE_US) for minute in range(1440)]
    for name, value in more.items():
        setattr(found, name, value)
    return found


def report(rows: StoredRows, period: str = "2026-10-03", now_us: int = AFTER) -> ReportContent:
    return compute_report(read_inputs(rows, "gold", period, now_us))  # type: ignore[arg-type]


def test_a_good_day() -> None:
    found = report(stored())
    (latency,) = found.objectives
    assert (latency.compliance, latency.coverage, latency.is_kept) == (1.0, 1.0, True)
    assert latency.slices.good == 1440
    assert (latency.time.all_s, latency.time.good_s, latency.time.unplanned_s) == (86_400, 86_400, 0)
    assert (latency.budget.allowed_s, latency.budget.left_s, latency.budget.left_ratio) == (8640, 8640, 1)
    assert not found.is_preliminary
    assert (found.bad, found.missing, found.inexact, found.episodes, found.notes) == ([], [], [], [], [])


def test_bad_slices_are_listed_and_spend_the_budget() -> None:
    rows = stored()
    for minute in (10, 11, 12, 40):
        rows.slices[minute] = slice_row(DAY + minute * MINUTE_US, "bad", missed=100 + minute)
    found = report(rows)
    (latency,) = found.objectives
    assert latency.compliance == 1436 / 1440
    assert (latency.budget.spent_s, latency.budget.left_s) == (240, 8400)
    assert [(span.from_us, span.slices, span.missed) for span in found.bad] == [
        (DAY + 10 * MINUTE_US, 3, 112),
        (DAY + 40 * MINUTE_US, 1, 140),
    ]
    assert [(each.state, each.reason, each.slices) for each in latency.reasons] == [("bad", "slow", 4)]


def test_missing_time_is_named_whether_it_was_judged_or_not() -> None:
    rows = stored()
    del rows.slices[100:110]
    rows.slices[5] = slice_row(DAY + 5 * MINUTE_US, "no_data", ours=True, reason="cuts-lost")
    found = report(rows)
    (latency,) = found.objectives
    assert [(span.reason, span.slices, span.is_ours) for span in found.missing] == [
        ("cuts-lost", 1, True),
        ("not-judged", 0, False),
    ]
    assert (found.missing[1].from_us, found.missing[1].to_us) == (DAY + 6000_000_000, DAY + 6600_000_000)
    assert (latency.time.unjudged_s, latency.time.no_data_s, latency.time.all_s) == (600, 60, 86_400)
    assert latency.compliance == 1429 / 1430  # bad_if_ours


def test_work_excuses_and_the_report_says_what_it_was_without() -> None:
    rows = stored()
    reason = "maintenance: disks"
    for minute in range(60, 70):
        missed = 500 if minute < 64 else 0
        rows.slices[minute] = slice_row(DAY + minute * MINUTE_US, "excluded", reason=reason, missed=missed)
    found = report(rows)
    (latency,) = found.objectives
    assert (latency.compliance, latency.compliance_without_exclusions) == (1.0, 1436 / 1440)
    assert (latency.time.planned_s, latency.time.outside_service_s) == (600, 0)
    (work,) = found.maintenance
    assert (work.from_us, work.slices, work.reason) == (DAY + HOUR_US, 10, reason)


def test_a_period_that_goes_on_is_preliminary_and_its_budget_is_of_the_whole() -> None:
    rows = stored()
    del rows.slices[600:]
    found = report(rows, now_us=DAY + 600 * MINUTE_US + 5_000_000)
    (latency,) = found.objectives
    assert found.preliminary_because == ["the period has not ended"]
    assert latency.budget.allowed_s == 8640
    assert latency.time.unjudged_s == 5
    assert [span.text for span in found.missing] == ["not judged yet"]
    late = report(stored(), now_us=DAY + DAY_US + HOUR_US)
    assert late.preliminary_because == [
        "statistics that arrive late may revise slices until 48 h after the end"
    ]


def test_a_revision_counts_from_when_it_was_judged() -> None:
    rows = stored()
    later = DAY + DAY_US + 3 * HOUR_US
    rows.slices.append(slice_row(DAY, "bad", revision=1, judged_us=later))
    assert report(rows, now_us=later - 1).objectives[0].slices.bad == 0
    assert report(rows, now_us=later).objectives[0].slices.bad == 1


def test_an_edit_within_the_period_counts_each_part_by_its_own_terms() -> None:
    edit = DAY + 12 * HOUR_US
    rows = stored()
    rows.versions = [
        version_row(DAILY, 1, DAY - 10 * DAY_US, edit),
        version_row(DAILY.replace("slice: 1m", "slice: 5m").replace("0.9}", "0.99}"), 2, edit),
    ]
    rows.slices = [slice_row(DAY + minute * MINUTE_US) for minute in range(720)]
    rows.slices += [
        slice_row(edit + number * 5 * MINUTE_US, "bad" if number == 3 else "good", version=2,
                  length_us=5 * MINUTE_US)
        for number in range(144)
    ]  # fmt: skip
    found = report(rows)
    (latency,) = found.objectives
    assert latency.slice_lengths_s == [60, 300]
    assert latency.compliance == 1 - 300 / 86_400
    assert latency.budget.allowed_s == pytest.approx(0.1 * 43_200 + 0.01 * 43_200)
    assert [change.field for change in found.versions[1].changes] == [
        "spec.objectives[latency].budgeting.slice",
        "spec.objectives[latency].budgeting.target",
    ]


def test_credits_are_of_the_agreement_s_own_periods() -> None:
    penalties = "  penalties: [{below: 0.99, credit: 0.1}]\n"
    monthly = simple(extra=penalties)
    rows = stored(monthly)
    for minute in range(60):
        rows.slices[minute] = slice_row(DAY + minute * MINUTE_US, "bad")
    day = report(rows)
    assert [period.is_over for period in day.credits.periods] == [False]
    assert day.credits.note.startswith("no period of the agreement ends in this one")
    month = report(rows, "2026-10", now_us=at_us("2026-11-05"))
    (october,) = month.credits.periods
    assert (october.is_over, october.credit) == (True, 0.1)
    assert report(stored(DAILY + penalties)).credits.periods[0].credit == 0.0


@pytest.mark.parametrize(
    ("kind", "reason", "cause"),
    [
        ("start", "promise-violated", "neighbours"),
        ("unattributed", "unattributed", "elsewhere"),
        ("infeasible", "promise-violated", "overcommitted"),
        ("release", "storage-fault", "storage"),
    ],
)
def test_a_violation_has_a_cause(kind: str, reason: str, cause: str) -> None:
    opened, closed = DAY + HOUR_US, DAY + HOUR_US + 5 * MINUTE_US
    decision = {
        "at_us": opened, "victim": "gold/latency", "kind": kind, "reason": reason,
        "figures": {"throttled": ["batch"]},
    }  # fmt: skip
    rows = stored(stored_episodes=[episode_row(opened, closed)], stored_decisions=[decision])
    (episode,) = report(rows).episodes
    assert (episode.cause, episode.in_period_s) == (cause, 300)
    assert episode.volumes == (["batch"] if cause == "neighbours" else [])


@pytest.mark.parametrize(
    ("throttles", "text"),
    [
        ([], "no neighbour was found to be the cause: the cause was elsewhere"),
        (
            [throttle_row("batch", DAY, None)],
            "slowing down its neighbours did not help: the cause was elsewhere",
        ),
        (
            [throttle_row("vol-1", DAY, None, source="manual", victim="")],
            "its own storage was throttled by hand then (vol-1): what waited for that counts against the "
            "promise",
        ),
        (
            [throttle_row("vol-1", DAY, DAY + HOUR_US // 2, source="manual", victim="")],
            "no neighbour was found to be the cause: the cause was elsewhere",
        ),
    ],
)
def test_a_cause_elsewhere_says_what_was_tried(throttles: list[dict[str, Any]], text: str) -> None:
    """An operator's throttle is named; neighbours that were not slowed down did not fail to help."""
    opened, closed = DAY + HOUR_US, DAY + HOUR_US + 5 * MINUTE_US
    decision = {
        "at_us": opened, "victim": "gold/latency", "kind": "unattributed", "reason": "unattributed",
        "figures": {},
    }  # fmt: skip
    rows = stored(
        stored_episodes=[episode_row(opened, closed)],
        stored_decisions=[decision],
        stored_throttles=throttles,
    )
    (episode,) = report(rows).episodes
    assert (episode.cause, episode.cause_text) == ("elsewhere", text)


def test_a_violation_has_the_slices_that_it_reaches_into_whenever_they_were_judged() -> None:
    """The last one is judged after it has closed, and one of before is not of it."""
    opened, closed = DAY + HOUR_US + 30_000_000, DAY + HOUR_US + 150_000_000
    rows = stored(stored_episodes=[episode_row(opened, closed)])
    for minute in (59, 60, 62, 63):
        rows.slices[minute] = slice_row(DAY + minute * MINUTE_US, "bad")
    (episode,) = report(rows).episodes
    assert episode.slices_bad == 2


def test_a_violation_without_decisions_has_no_known_cause() -> None:
    rows = stored(stored_episodes=[episode_row(DAY + HOUR_US, None)], since_us=DAY + 5 * HOUR_US)
    found = report(rows)
    assert found.episodes[0].cause == "unknown"
    assert any("decisions" in note for note in found.notes)


def test_a_violation_that_goes_on_does_not_keep_a_period_open_for_ever() -> None:
    rows = stored(stored_episodes=[episode_row(DAY + HOUR_US, None)])
    assert "a violation goes on" in report(rows, now_us=DAY + 2 * DAY_US).preliminary_because
    found = report(rows)
    assert not found.is_preliminary
    assert any("a violation went on" in note for note in found.notes)
    assert found.episodes[0].closed_us is None


def test_what_it_cost_others() -> None:
    rows = stored(
        stored_throttles=[
            throttle_row("batch", DAY, DAY + 101_000_000),
            throttle_row("batch", DAY + 50_000_000, DAY + 151_000_000, cost_per_s=100.0),
            throttle_row("scan", DAY - HOUR_US, None),
            throttle_row("vol-1", DAY, DAY + 61_000_000, victim="other/latency"),
        ],
        held={"batch": {"ios": 5000, "delay_us": 12_500_000}},
    )
    found = report(rows).throttling
    assert [(each.volume, each.throttles, each.throttled_s) for each in found.others] == [
        ("scan", 1, 86_400),
        ("batch", 2, 150),
    ]
    batch = found.others[1]
    assert (batch.ios, batch.delayed_s, batch.least_cost_per_s) == (5000, 12.5, 100.0)
    assert (found.others_throttled_s, found.others_delayed_s) == (86_550, 12.5)
    assert [(each.volume, each.throttled_s) for each in found.own] == [("vol-1", 60)]


def test_time_outside_service_hours_is_accounted_for() -> None:
    text = DAILY + "  service_hours: {calendar: business, days: [sat], from: '08:00', to: '18:00'}\n"
    rows = stored(text)
    for minute in (*range(480), *range(1080, 1440)):
        rows.slices[minute] = slice_row(DAY + minute * MINUTE_US, "excluded", reason="outside service hours")
    (latency,) = report(rows).objectives
    assert (latency.time.outside_service_s, latency.time.good_s) == (50_400, 36_000)
    assert latency.budget.allowed_s == 3600
    assert latency.compliance_without_exclusions == 1.0


def test_what_cannot_be_reported_is_refused_with_the_reason() -> None:
    with pytest.raises(NothingToReport, match="was ever applied"):
        read_inputs(StoredRows(), "gold", "2026-10", AFTER)  # type: ignore[arg-type]
    with pytest.raises(NothingToReport, match="not in force yet in 2026-01"):
        report(stored(), "2026-01")
    with pytest.raises(NoSuchPeriod, match="2026-10-03"):
        report(stored(), "last month")
    with pytest.raises(PeriodTooLong, match=r"up to 1,441 slices, and at most 1,440"):
        read_inputs(stored(), "gold", "2026-10-03", AFTER, 1440)  # type: ignore[arg-type]
    with pytest.raises(NothingToReport, match="2199 has not begun"):
        report(stored(), "2199")
    ended = stored()
    ended.versions[0]["ended_us"] = DAY - DAY_US
    with pytest.raises(NothingToReport, match="ended on 2026-10-02"):
        report(ended, "2026-10-03")


def test_a_period_that_goes_on_beyond_the_report_s_end_is_credited_so_far() -> None:
    rows, now = example_month()
    later = version_row(FULL.replace("credit: 0.10", "credit: 0.15"), 3, at_us("2026-10-20", "Europe/Berlin"))
    rows.versions[-1]["ended_us"] = later["applied_us"]
    rows.versions.append(later)
    found = compute_report(read_inputs(rows, "erp-gold", "2026-10-15", now + 10 * DAY_US))  # type: ignore[arg-type]
    assert not found.is_preliminary
    (month,) = found.credits.periods
    assert (month.is_over, month.version) == (False, 2)
    assert found.credits.note.startswith("no period of the agreement ends in this one")


def test_a_report_is_final_when_judging_has_passed_its_end_and_not_when_the_clock_says_so() -> None:
    rows = stored()
    del rows.slices[600:]
    weeks_ahead = AFTER + 30 * DAY_US
    because = ["the last slices of latency are not judged yet"]
    assert report(rows, now_us=weeks_ahead).preliminary_because == because
    rows.slices.append(slice_row(DAY + 3 * DAY_US, name="other"))
    assert report(rows, now_us=weeks_ahead).preliminary_because == because, "it catches up"
    rows.slices.append(slice_row(DAY + DAY_US))
    assert report(rows, now_us=weeks_ahead).preliminary_because == []


def test_slices_that_stay_unjudged_hold_no_report_up() -> None:
    away_for_weeks = stored()
    del away_for_weeks.slices[600:]
    away_for_weeks.slices.append(slice_row(DAY + 8 * DAY_US, name="other"))
    assert not report(away_for_weeks).is_preliminary
    without_volumes = stored(slices=[])
    assert report(without_volumes).preliminary_because == ["the last slices of latency are not judged yet"]
    without_volumes.slices.append(slice_row(DAY + DAY_US, name="other"))
    assert not report(without_volumes).is_preliminary


def test_where_nothing_is_judged_any_more_the_server_s_own_mark_ends_the_wait() -> None:
    """All agreements ended while the server was away, or no volume of the only one was ever seen."""
    week = DAY + DAY_US + 7 * DAY_US
    ended = stored()
    ended.versions[0]["ended_us"] = DAY + 20 * HOUR_US
    del ended.slices[600:]
    never_seen = stored(slices=[])
    for rows, end_us in ((ended, week - 4 * HOUR_US), (never_seen, week)):
        rows.alive_us = end_us
        because = ["the last slices of latency are not judged yet"]
        assert report(rows).preliminary_because == because, "one of a moment ago may be on its way"
        rows.alive_us = end_us + HOUR_US
        assert report(rows).preliminary_because == []
        assert report(rows, now_us=end_us).preliminary_because == because, "as of then"
    (objective,) = report(ended).objectives
    assert (objective.time.good_s, objective.time.unjudged_s) == (36_000, 36_000)


class CountedRow(dict[str, object]):
    """Counts in ``looks`` how often some column of any row is read."""

    looks = 0

    def __getitem__(self, name: str) -> object:
        CountedRow.looks += 1
        return super().__getitem__(name)


def looks_at(versions: int, minutes: int, episodes: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a month of days with so many of each."""
    step = DAY_US // versions
    rows = StoredRows(
        [
            version_row(DAILY, number + 1, DAY + number * step, DAY + (number + 1) * step)
            for number in range(versions)
        ]
    )
    spacing = DAY_US // minutes // MINUTE_US * MINUTE_US
    rows.slices = [
        CountedRow(slice_row(DAY + at * spacing, "bad", version=at * spacing // step + 1))
        for at in range(minutes)
    ]
    rows.stored_episodes = [
        episode_row(DAY + at * spacing, DAY + at * spacing + MINUTE_US) for at in range(episodes)
    ]
    monkeypatch.setattr(CountedRow, "looks", 0)
    assert len(report(rows).objectives) == 1
    return CountedRow.looks


def test_each_slice_is_looked_at_a_few_times_however_many_versions_and_violations_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = looks_at(2, 240, 2, monkeypatch)
    assert looks_at(120, 240, 2, monkeypatch) < 2 * few, "versions"
    assert looks_at(2, 240, 240, monkeypatch) < 2 * few, "violations"
