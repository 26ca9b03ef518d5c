"""Compliance, budget and burn rate; the history they are counted from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements import compliance
from sla_server.agreements.compliance import SliceHistory, standing
from sla_server.agreements.document import NoDataPolicy
from tests.support.agreements import in_force, simple

MINUTE_US = 60_000_000
DAY_US = 1440 * MINUTE_US
START_US = 1_798_761_600_000_000  # 2027-01-01 00:00 UTC
POLICIES: tuple[NoDataPolicy, ...] = ("good", "bad", "exclude", "bad_if_ours")
CODES = st.lists(st.integers(0, compliance.EXCLUDED), max_size=300)


def book(codes: list[int], origin_us: int = START_US) -> SliceHistory:
    made = SliceHistory(MINUTE_US, origin_us)
    for index, code in enumerate(codes):
        made.put(origin_us + index * MINUTE_US, code)
    return made


@given(CODES, st.integers(-5, 310), st.integers(0, 310))
def test_counts_agree_with_counting_by_hand(codes: list[int], low: int, length: int) -> None:
    found = book(codes).counts(START_US + low * MINUTE_US, START_US + (low + length) * MINUTE_US)
    part = codes[max(low, 0) : max(low + length, 0)]
    assert found.good == part.count(compliance.GOOD)
    assert found.bad == part.count(compliance.BAD)
    assert found.no_data_ours == part.count(compliance.NO_DATA_OURS)
    assert found.no_data == part.count(compliance.NO_DATA) + found.no_data_ours
    states = found.states()
    assert sum(states.values()) + found.unjudged == length


def test_ranges_take_the_slices_that_start_in_them() -> None:
    made = book([compliance.GOOD, compliance.BAD, compliance.GOOD])
    assert made.counts(START_US + 1, START_US + MINUTE_US).bad == 0
    assert made.counts(START_US + 1, START_US + MINUTE_US + 1).bad == 1
    assert made.get(START_US + MINUTE_US) == compliance.BAD
    assert made.get(START_US - MINUTE_US) == compliance.UNJUDGED


def test_a_slice_off_the_grid_or_before_the_origin_is_refused() -> None:
    made = book([])
    assert not made.put(START_US + 1, compliance.BAD)
    assert not made.put(START_US - MINUTE_US, compliance.BAD)


def test_memory_is_given_back_by_the_chunk_and_nothing_else_changes() -> None:
    made = book([compliance.GOOD] * 5000)
    made.forget_before(START_US + 3000 * MINUTE_US)
    assert made.counts(START_US, START_US + 5000 * MINUTE_US).good == 5000 - 2048
    assert made.counts(START_US + 3000 * MINUTE_US, START_US + 5000 * MINUTE_US).good == 2000
    assert not made.put(START_US, compliance.BAD)
    assert made.put(START_US + 5000 * MINUTE_US, compliance.BAD)
    assert made.counts(START_US, START_US + 6000 * MINUTE_US).bad == 1
    made.forget_before(START_US - DAY_US)
    made.forget_before(START_US + 100 * DAY_US)
    assert made.counts(START_US, START_US + 6000 * MINUTE_US).bad == 1  # the newest stay


PUTS = st.lists(st.tuples(st.integers(0, 9000), st.integers(0, compliance.EXCLUDED)), max_size=40)


@given(PUTS, st.integers(0, 7), st.lists(st.tuples(st.integers(-10, 9100), st.integers(0, 9100)), max_size=8))
def test_sealed_chunks_hold_what_a_plain_list_holds(
    puts: list[tuple[int, int]], fill: int, ranges: list[tuple[int, int]]
) -> None:
    made, plain = book([]), dict[int, int]()
    several = [(index, 1 + index // 700 % 6) for index in range(fill * 1000)]
    for index, code in (*several, *puts):
        assert made.put(START_US + index * MINUTE_US, code)
        plain[index] = code
    end = max(plain, default=-1) + 1
    for low, length in (*ranges, (0, end), (1024, 2048), (1023, 1), (1024, 0)):
        from_us, to_us = START_US + low * MINUTE_US, START_US + (low + length) * MINUTE_US
        expected = [plain.get(index, 0) for index in range(max(low, 0), min(max(low + length, 0), end))]
        assert made.codes(from_us, to_us).tolist() == expected
        found = made.counts(from_us, to_us)
        assert found.good == expected.count(compliance.GOOD)
        assert found.bad == expected.count(compliance.BAD)
        assert found.no_data == expected.count(compliance.NO_DATA) + expected.count(compliance.NO_DATA_OURS)
        assert sum(found.states().values()) + found.unjudged == max(length, 0)


def test_a_month_of_minutes_is_small_and_a_restless_one_is_bounded() -> None:
    quiet = book([compliance.GOOD] * 44_640)
    assert quiet.size_bytes < 2_500  # the newest chunk or two, and eight bytes for each of the others
    rng = random.Random(1)
    restless = book([rng.randrange(1, 7) for _ in range(44_640)])
    assert restless.size_bytes < 25_000
    assert restless.counts(START_US, START_US + 31 * DAY_US).unjudged == 0


@given(CODES, st.sampled_from(POLICIES))
def test_ratios_stay_between_zero_and_one(codes: list[int], policy: NoDataPolicy) -> None:
    counts = book(codes).counts(START_US, START_US + DAY_US)
    good, bad = compliance.eligible(counts, policy)
    for ratio in (compliance.compliance_ratio(good, bad), compliance.coverage_ratio(counts)):
        assert ratio is None or 0 <= ratio <= 1
    assert (compliance.compliance_ratio(good, bad) is None) == (good + bad == 0)


def test_no_data_counts_as_the_policy_says() -> None:
    counts = book([compliance.GOOD, compliance.BAD, compliance.NO_DATA, compliance.NO_DATA_OURS]).counts(
        START_US, START_US + DAY_US
    )
    found = {policy: compliance.eligible(counts, policy) for policy in POLICIES}
    assert found == {"good": (3, 1), "bad": (1, 3), "exclude": (1, 1), "bad_if_ours": (1, 2)}
    assert compliance.coverage_ratio(counts) == 0.5


def test_the_budget_of_a_month() -> None:
    found = compliance.error_budget(0.995, 43_200, 54, 60)
    assert found.total_slices == pytest.approx(216)
    assert found.remaining_ratio == pytest.approx(0.75)
    assert found.minutes_left == pytest.approx(162)


@given(st.floats(0.5, 0.9999), st.integers(0, 10**6), st.integers(0, 10**6))
def test_minutes_left_are_never_negative(target: float, possible: int, bad: int) -> None:
    found = compliance.error_budget(target, possible, bad, 60)
    assert found.minutes_left >= 0
    assert (found.remaining_ratio is None) == (found.total_slices <= 0)
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
    made = book(codes)
    now_us = START_US + len(codes) * MINUTE_US
    return {
        alert.name
        for alert in compliance.burn_alerts(days * DAY_US, MINUTE_US, target)
        if compliance.alert_is_active(alert, made, now_us, target, "bad_if_ours")
    }


def test_two_bad_slices_alert_nobody_and_a_burst_does() -> None:
    quiet = [compliance.GOOD] * 60
    assert active([*quiet[:58], compliance.BAD, compliance.BAD]) == set()
    assert "fast" in active([*quiet[:50], *[compliance.BAD] * 10])


def test_an_alert_ends_when_the_short_window_is_clean() -> None:
    assert "fast" not in active([compliance.GOOD] * 45 + [compliance.BAD] * 10 + [compliance.GOOD] * 5)


def test_bad_slices_in_a_row_step_over_what_does_not_apply() -> None:
    row = [compliance.GOOD, *[compliance.BAD, compliance.NOT_APPLICABLE, compliance.NO_DATA] * 4]
    now_us = START_US + len(row) * MINUTE_US
    assert compliance.consecutive_bad(book(row), now_us, "bad_if_ours") == 4
    assert compliance.consecutive_bad(book(row), now_us, "bad") == 8
    assert compliance.consecutive_bad(book(row), now_us, "good") == 0
    assert compliance.consecutive_bad(book([*row, compliance.GOOD]), now_us + MINUTE_US, "bad_if_ours") == 0


def test_a_calendar_budget_counts_what_is_still_to_come() -> None:
    item = in_force(simple(target=0.9, extra="  window: {type: calendar, period: day}\n"))
    (objective,) = item.agreement.judged
    made = book([compliance.GOOD] * 700 + [compliance.BAD] * 20)
    now_us = START_US + 720 * MINUTE_US
    found = standing(item, objective, made, now_us, now_us)
    assert (found.period_start_us, found.period_end_us) == (START_US, START_US + DAY_US)
    assert found.compliance == pytest.approx(700 / 720)
    assert found.coverage == 1.0
    assert found.budget.total_slices == pytest.approx(144)
    assert found.snapshot()["budget_remaining"] == pytest.approx(1 - 20 / 144)
    assert found.alerts >= {"consecutive"}
    assert found.burn_1h == pytest.approx(20 / 60 / 0.1)


def test_a_calendar_budget_starts_with_the_agreement() -> None:
    applied_us = START_US + 720 * MINUTE_US
    item = in_force(
        simple(target=0.9, extra="  window: {type: calendar, period: day}\n"), applied_us=applied_us
    )
    (objective,) = item.agreement.judged
    found = standing(item, objective, book([]), START_US, applied_us)
    assert found.budget.total_slices == pytest.approx(72)
    assert (found.compliance, found.coverage, found.burn_1h) == (None, None, 0.0)


def test_a_rolling_budget_is_that_of_the_whole_window() -> None:
    item = in_force(simple(target=0.9, extra="  window: {type: rolling, duration: 1d}\n"))
    (objective,) = item.agreement.judged
    made = book([compliance.BAD, compliance.BAD, compliance.NOT_APPLICABLE])
    now_us = START_US + 3 * MINUTE_US
    found = standing(item, objective, made, now_us, now_us)
    assert found.budget.total_slices == pytest.approx((1440 - 1) * 0.1)
    assert found.burn_1h == 0.0
    assert found.compliance == 0.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("since", [0, 4, 59, 60, 61, 1439, 1440, 1441, 4320, 4463, 4464, 4465, 6000])
def test_the_short_way_without_bad_slices_says_the_same_as_the_long_one(
    monkeypatch: pytest.MonkeyPatch, since: int, policy: NoDataPolicy
) -> None:
    item = in_force(simple(extra="  window: {type: calendar, period: month}\n"))
    objective = item.agreement.judged[0].model_copy(update={"no_data": policy})
    trouble = [compliance.BAD, compliance.NO_DATA, compliance.NO_DATA_OURS] * 5
    made = book([compliance.GOOD] * 10 + trouble + [compliance.NOT_APPLICABLE] * since)
    now_us = START_US + (25 + since) * MINUTE_US
    short = standing(item, objective, made, now_us, now_us)
    assert made.is_clean_since(now_us - since * MINUTE_US)
    assert not made.is_clean_since(now_us - (since + 1) * MINUTE_US)
    monkeypatch.setattr(SliceHistory, "is_clean_since", lambda *_: False)
    assert standing(item, objective, made, now_us, now_us) == short
    if policy == "bad":
        assert (short.consecutive_bad > 0) == (since < compliance.LOOK_BACK_SLICES)
