"""Compliance, budget and burn rate: all by time, each part of a period by the terms that judged it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements import compliance
from sla_server.agreements.compliance import JudgedTime, Terms, agreed_periods, standing, terms_of
from sla_server.agreements.document import NoDataPolicy, Window
from sla_server.agreements.periods import CalendarWindow, RollingWindow
from sla_server.agreements.slice_history import (
    BAD,
    EXCLUDED,
    GOOD,
    NO_DATA,
    NO_DATA_OURS,
    NOT_APPLICABLE,
    SliceHistory,
)
from tests.support.agreements import agreement, in_force, simple

MINUTE_US = 60_000_000
DAY_US = 1440 * MINUTE_US
START_US = 1_798_761_600_000_000  # 2027-01-01 00:00 UTC
POLICIES: tuple[NoDataPolicy, ...] = ("good", "bad", "exclude", "bad_if_ours")
CODES = st.lists(st.integers(0, EXCLUDED), max_size=300)
MINUTES = Terms(MINUTE_US, 0.995, "bad_if_ours")


def judged(codes: list[int], terms: Terms = MINUTES, start_us: int = START_US) -> JudgedTime:
    made = JudgedTime()
    return more(made, codes, terms, start_us)


def more(made: JudgedTime, codes: list[int], terms: Terms, start_us: int) -> JudgedTime:
    for index, code in enumerate(codes):
        made.put(terms, start_us + index * terms.length_us, code)
    return made


@given(CODES, st.sampled_from(POLICIES))
def test_ratios_stay_between_zero_and_one(codes: list[int], policy: NoDataPolicy) -> None:
    sums = judged(codes, replace(MINUTES, no_data=policy)).sums(START_US, START_US + DAY_US)
    for ratio in (sums.compliance, sums.coverage):
        assert ratio is None or 0 <= ratio <= 1
    assert (sums.compliance is None) == (sums.good + sums.bad == 0)


def test_no_data_counts_as_the_policy_says() -> None:
    made = judged([GOOD, BAD, NO_DATA, NO_DATA_OURS]).sums(START_US, START_US + DAY_US)
    found = {policy: compliance.eligible(made.counts, policy) for policy in POLICIES}
    assert found == {"good": (3, 1), "bad": (1, 3), "exclude": (1, 1), "bad_if_ours": (1, 2)}
    assert made.coverage == 0.5


def test_a_period_is_the_sum_of_its_parts_by_time() -> None:
    fives = Terms(5 * MINUTE_US, 0.9, "bad")
    made = judged([GOOD, BAD, NO_DATA, NOT_APPLICABLE], fives)
    more(made, [GOOD] * 10 + [NO_DATA], MINUTES, START_US + 20 * MINUTE_US)
    sums = made.sums(START_US, START_US + DAY_US)
    assert (sums.good, sums.bad) == (11, 2)
    assert (sums.good_us, sums.bad_us) == (15 * MINUTE_US, 10 * MINUTE_US), "each policy for its own part"
    assert sums.compliance == 0.6
    assert sums.coverage == pytest.approx(25 / 31)
    assert sums.allowed_us == pytest.approx((0.1 * 15 + 0.005 * 10) * MINUTE_US)
    assert (sums.counts.no_data, sums.lengths_s) == (2, (60, 300))
    assert sums.by_time() == {"bad_s": 600, "due_s": 1500, "slice_lengths_s": [60, 300]}
    assert made.sums(START_US + 5 * MINUTE_US, START_US + 10 * MINUTE_US).bad == 1


def test_what_is_forgotten_may_be_a_whole_part() -> None:
    made = judged([BAD] * 10, Terms(5 * MINUTE_US, 0.9, "bad"))
    more(made, [GOOD], MINUTES, START_US + 50 * MINUTE_US)
    made.forget_before(START_US + 50 * MINUTE_US)
    assert made.sums(START_US, START_US + DAY_US).lengths_s == (60,)


def test_sums_of_rows_use_the_terms_of_the_version_and_the_length_of_the_slice() -> None:
    versions = {1: Terms(5 * MINUTE_US, 0.9, "bad"), 2: MINUTES}
    row = {"ours": False, "inexact": True, "n": 2}
    rows = [
        {**row, "version": 1, "state": "no_data", "length_us": 5 * MINUTE_US},
        {**row, "version": 2, "state": "no_data", "length_us": MINUTE_US},
        {**row, "version": 7, "state": "good", "length_us": 10 * MINUTE_US},  # of a release that is not read
    ]
    sums = compliance.sums_of_rows(rows, versions, MINUTES)
    assert (sums.bad_us, sums.good_us) == (10 * MINUTE_US, 20 * MINUTE_US)
    assert (sums.lengths_s, sums.inexact) == ((60, 300, 600), 2)


def test_terms_of_stored_versions_are_those_of_their_documents() -> None:
    made = agreement(simple(slice_text="5m", target=0.9))
    rows = [
        {"version": 1, "spec": made.spec_json()},
        {
            "version": 2,
            "spec": {"spec": {"objectives": [{"name": "latency", "budgeting": "of another kind"}]}},
        },
        {"version": 3, "spec": None},
    ]
    assert compliance.terms_by_version(rows, "latency") == {1: terms_of(made.judged[0])}
    assert compliance.terms_by_version(rows, "none") == {}


def test_the_budget_of_a_month() -> None:
    found = compliance.error_budget(0.005 * 43_200 * MINUTE_US, 54 * MINUTE_US)
    assert found.total_minutes == pytest.approx(216)
    assert found.remaining_ratio == pytest.approx(0.75)
    assert found.minutes_left == pytest.approx(162)


@given(st.floats(0, 1e18), st.integers(0, 10**16))
def test_minutes_left_are_never_negative(allowed_us: float, bad_us: int) -> None:
    found = compliance.error_budget(allowed_us, bad_us)
    assert found.minutes_left >= 0
    assert (found.remaining_ratio is None) == (allowed_us <= 0)
    if found.remaining_ratio is not None:
        assert found.remaining_ratio <= 1


def test_the_pairs_at_thirty_days() -> None:
    hour = 60 * MINUTE_US
    found = compliance.burn_alerts(30 * DAY_US, MINUTE_US, 0.995)
    assert [(a.long_us // hour, a.short_us // MINUTE_US) for a in found] == [(1, 5), (6, 30), (72, 360)]
    assert [a.factor for a in found] == pytest.approx([14.4, 6.0, 1.0])


@given(st.floats(0.5, 0.9999), st.integers(1, 400), st.sampled_from([60, 300, 3600]))
def test_every_alert_can_fire(target: float, days: int, slice_s: int) -> None:
    for alert in compliance.burn_alerts(days * DAY_US, slice_s * 1_000_000, target):
        assert alert.factor <= 0.9 / (1 - target)
        assert alert.long_us >= 3 * slice_s * 1_000_000
        assert alert.short_us >= slice_s * 1_000_000


def active(codes: list[int], target: float = 0.995, days: int = 30) -> set[str]:
    made = judged(codes)
    now_us = START_US + len(codes) * MINUTE_US
    return {
        alert.name
        for alert in compliance.burn_alerts(days * DAY_US, MINUTE_US, target)
        if compliance.alert_is_active(alert, made, now_us, target)
    }


def test_two_bad_slices_alert_nobody_and_a_burst_does() -> None:
    quiet = [GOOD] * 60
    assert active([*quiet[:58], BAD, BAD]) == set()
    assert "fast" in active([*quiet[:50], *[BAD] * 10])


def test_an_alert_ends_when_the_short_window_is_clean() -> None:
    assert "fast" not in active([GOOD] * 45 + [BAD] * 10 + [GOOD] * 5)


def in_a_row(codes: list[int], policy: NoDataPolicy) -> int:
    made = judged(codes, replace(MINUTES, no_data=policy))
    return compliance.consecutive_bad(made, START_US + len(codes) * MINUTE_US, DAY_US)


def test_bad_slices_in_a_row_step_over_what_does_not_apply() -> None:
    row = [GOOD, *[BAD, NOT_APPLICABLE, NO_DATA] * 4]
    assert in_a_row(row, "bad_if_ours") == 4
    assert in_a_row(row, "bad") == 8
    assert in_a_row(row, "good") == 0
    assert in_a_row([*row, GOOD], "bad_if_ours") == 0


def test_bad_slices_in_a_row_go_on_over_an_edit() -> None:
    made = judged([GOOD, BAD, BAD])
    more(made, [BAD] * 2, replace(MINUTES, target=0.9), START_US + 3 * MINUTE_US)
    assert compliance.consecutive_bad(made, START_US + 5 * MINUTE_US, DAY_US) == 4


def test_a_calendar_budget_counts_what_is_still_to_come() -> None:
    item = in_force(simple(target=0.9, extra="  window: {type: calendar, period: day}\n"))
    (objective,) = item.agreement.judged
    made = judged([GOOD] * 700 + [BAD] * 20, terms_of(objective))
    now_us = START_US + 720 * MINUTE_US
    found = standing(item, objective, made, now_us, now_us)
    assert (found.period_start_us, found.period_end_us) == (START_US, START_US + DAY_US)
    assert found.compliance == pytest.approx(700 / 720)
    assert found.coverage == 1.0
    assert found.budget.total_minutes == pytest.approx(144)
    assert found.snapshot()["budget_remaining"] == pytest.approx(1 - 20 / 144)
    assert found.alerts >= {"consecutive"}
    assert found.burn_1h == pytest.approx(20 / 60 / 0.1)


def test_a_calendar_budget_starts_with_the_agreement() -> None:
    applied_us = START_US + 720 * MINUTE_US
    item = in_force(
        simple(target=0.9, extra="  window: {type: calendar, period: day}\n"), applied_us=applied_us
    )
    (objective,) = item.agreement.judged
    found = standing(item, objective, JudgedTime(), START_US, applied_us)
    assert found.budget.total_minutes == pytest.approx(72)
    assert (found.compliance, found.coverage, found.burn_1h) == (None, None, 0.0)


def test_a_rolling_budget_is_that_of_the_whole_window() -> None:
    item = in_force(simple(target=0.9, extra="  window: {type: rolling, duration: 1d}\n"))
    (objective,) = item.agreement.judged
    made = judged([BAD, BAD, NOT_APPLICABLE], terms_of(objective))
    now_us = START_US + 3 * MINUTE_US
    found = standing(item, objective, made, now_us, now_us)
    assert found.budget.total_minutes == pytest.approx((1440 - 1) * 0.1)
    assert found.burn_1h == 0.0
    assert found.compliance == 0.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("since", [0, 4, 59, 60, 61, 1439, 1440, 1441, 4320, 4463, 4464, 4465, 6000])
def test_the_short_way_without_bad_slices_says_the_same_as_the_long_one(
    monkeypatch: pytest.MonkeyPatch, since: int, policy: NoDataPolicy
) -> None:
    item = in_force(simple(extra="  window: {type: calendar, period: month}\n"))
    objective = item.agreement.judged[0].model_copy(update={"no_data": policy})
    trouble = [BAD, NO_DATA, NO_DATA_OURS] * 5
    made = judged([GOOD] * 10 + trouble + [NOT_APPLICABLE] * since, terms_of(objective))
    now_us = START_US + (25 + since) * MINUTE_US
    short = standing(item, objective, made, now_us, now_us)
    newest_bad = (
        since if policy in ("bad", "bad_if_ours") else since + 2
    )  # no data counts as bad, or does not
    assert made.is_clean_since(now_us - newest_bad * MINUTE_US)
    assert not made.is_clean_since(now_us - (newest_bad + 1) * MINUTE_US)
    monkeypatch.setattr(SliceHistory, "is_free_of", lambda *_: False)
    assert standing(item, objective, made, now_us, now_us) == short
    if policy == "bad":
        assert (short.consecutive_bad > 0) == (since < compliance.LOOK_BACK_SLICES)


MONTH, DAY, YEAR = (CalendarWindow(type="calendar", period=each) for each in ("month", "day", "year"))
ROLLING = RollingWindow.model_validate({"type": "rolling", "duration": "7d"})


@pytest.mark.parametrize(
    ("first", "then", "wanted"),
    [
        (MONTH, MONTH, ["11-01 12-01", "10-01 11-01", "09-01 10-01", "08-01 09-01"]),
        (MONTH, DAY, ["11-07 11-08", "11-06 11-07", "11-01 11-06", "10-01 11-01"]),
        (MONTH, YEAR, ["11-01 01-01", "10-01 11-01", "09-01 10-01", "08-01 09-01"]),
        (MONTH, ROLLING, ["10-31 11-07", "10-01 11-01", "09-01 10-01", "08-01 09-01"]),
        (ROLLING, MONTH, ["11-01 12-01"]),
        (DAY, MONTH, ["11-05 12-01", "11-04 11-05", "11-03 11-04", "11-02 11-03"]),
    ],
)
def test_a_period_that_has_ended_keeps_the_window_it_ended_under(
    first: Window, then: Window, wanted: list[str]
) -> None:
    def at_us(text: str) -> int:
        return int(datetime.fromisoformat(f"{text}+00:00").timestamp()) * 1_000_000

    windows = [(at_us("2026-09-01T00:00"), first), (at_us("2026-11-05T12:00"), then)]
    found = agreed_periods(windows, at_us("2026-11-07T12:00"), 4)
    shown = [" ".join(f"{datetime.fromtimestamp(us / 1e6, UTC):%m-%d}" for us in span) for span in found]
    assert shown == wanted
