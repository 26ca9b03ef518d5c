"""The books of the judge over edits of an agreement: what was judged stays judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sla_server.agreements.compliance import Budget, Counts, ObjectiveStatus
from sla_server.agreements.promise import InForce
from sla_server.services.judging.judge import Judge
from sla_server.services.judging.objectives import alert_events
from sla_server.services.judging.track import DAY_US
from tests.support.agreements import agreement, simple
from tests.support.services import MINUTE_US, START_US, FakeStore

DAY = "  window: {type: calendar, period: day}\n"
MONTH = "  window: {type: calendar, period: month}\n"
EDIT_MINUTE = 12.5


def at(minutes: float) -> int:
    return START_US + round(minutes * MINUTE_US)


class Edited:
    """One promise, judged by a version until minute 12.5 and by another one after it."""

    def __init__(self, before: str, after: str) -> None:
        self.first = InForce(agreement(before), 1, START_US)
        self.ended = InForce(self.first.agreement, 1, START_US, ended_us=at(EDIT_MINUTE))
        self.second = InForce(agreement(after), 2, at(EDIT_MINUTE))
        self.store = FakeStore()
        self.store.add_stream()
        versions = [self.ended, self.second]
        rows = [{"name": "gold", "version": v.version, "spec": v.agreement.spec_json()} for v in versions]
        self.store.tables["agreements"] = rows
        for minute in range(40):
            self.store.add_slot(at(minute), missed=600 if minute == 3 else 0)
        self.judge = Judge(self.store, judge_late_s=30)
        self.judge.set_agreements([self.first], START_US)

    def run(self, minutes: float) -> ObjectiveStatus:
        found = self.judge.run(at(minutes))
        self.store.keep(found.rows)
        return found.standings["gold", "latency"]

    def edit(self) -> None:
        self.judge.set_agreements([self.ended, self.second], at(EDIT_MINUTE))

    def restart(self, minutes: float) -> None:
        self.judge = Judge(self.store, judge_late_s=30)
        self.judge.set_agreements([self.ended, self.second], at(minutes))


@pytest.mark.parametrize(("before", "after"), [("1m", "5m"), ("5m", "1m"), ("10m", "1m")])
def test_an_edit_of_the_slice_length_erases_nothing_and_judges_no_time_twice(before: str, after: str) -> None:
    scene = Edited(simple(slice_text=before, extra=DAY), simple(slice_text=after, extra=DAY))
    scene.run(12)
    scene.edit()
    live = scene.run(40.5)
    minutes = int(before[:-1])
    starts = [(row["start_us"] - START_US) / MINUTE_US for row in scene.store.tables["slices"]]
    lengths = [row["length_us"] / MINUTE_US for row in scene.store.tables["slices"]]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "no time is judged twice"
    judged = sum(lengths)
    assert live.compliance == pytest.approx(1 - minutes / judged)
    assert live.counts.bad == 1
    expected = (1 - 0.9) * (24 * 60)  # the whole day may still become eligible, but for what the edit skipped
    skipped = starts[-1] + lengths[-1] - judged
    assert live.budget.total_minutes == pytest.approx(expected - (1 - 0.9) * skipped, abs=0.2)
    scene.restart(40.5)
    assert scene.run(40.6).compliance == live.compliance, "SQL says the same"


def test_each_part_is_allowed_what_its_own_target_allows() -> None:
    scene = Edited(simple(target=0.5, extra=DAY), simple(target=0.9, extra=DAY))
    scene.run(12)
    scene.edit()
    found = scene.run(40.5)
    assert found.budget.total_minutes == pytest.approx(13 * 0.5 + (24 * 60 - 13) * 0.1)


def test_a_window_that_was_made_longer_reads_what_the_book_had_dropped() -> None:
    scene = Edited(simple(extra=DAY), simple(extra=MONTH))
    scene.run(12)
    reads = scene.store.reads.count("slices")
    scene.edit()
    assert scene.run(13.6).counts.bad == 1
    assert scene.store.reads.count("slices") == reads + 2, "what was judged, and the period"
    same = Edited(simple(extra=DAY), simple(target=0.5, extra=DAY))
    same.run(12)
    same.edit()
    assert same.store.reads.count("slices") == 1, "a book that reaches back far enough goes on"


def test_time_judged_by_verdict_only_grows_and_late_revisions_are_not_in_it() -> None:
    scene = Edited(simple(extra=DAY), simple(extra=DAY))
    assert scene.run(12).judged_us == (10 * MINUTE_US, MINUTE_US)
    scene.store.missed[3]["missed"] = 0
    scene.store.add_late(at(3))
    live = scene.run(12.4)
    assert live.counts.bad == 0, "minute 3 was judged again"
    assert live.judged_us == (10 * MINUTE_US, MINUTE_US)
    scene.edit()
    assert scene.run(40.5).judged_us == (39 * MINUTE_US, MINUTE_US), "an edit goes on counting"
    scene.restart(40.5)
    assert scene.run(40.6).judged_us == (0, 0), "as a counter of a process that was started again"


def status(burn_1h: float, minutes_left: float, alerts: frozenset[str]) -> ObjectiveStatus:
    """Of 30 days at 99.5 %: 216 minutes of bad time are allowed."""
    budget = Budget(216.0, minutes_left / 216.0, minutes_left)
    span_us = (START_US, START_US + 30 * DAY_US)
    return ObjectiveStatus(
        "gold", "latency", *span_us, Counts(), 0.99, 1.0, budget, burn_1h, 0, alerts, 0.995
    )


@pytest.mark.parametrize(
    ("burn_1h", "minutes_left", "said"),
    [
        (7.2, 203.0, "; 93 % of it is left, which at the pace of the last hour (7.2 times what is allowed) "
                     "lasts 3 d 21 h"),
        (0.0, 203.0, "; 93 % of it is left"),
        (14.0, 0.0, "; 0 % of it is left"),
    ],
)  # fmt: skip
def test_an_alert_says_what_is_left_of_the_budget_and_how_long_it_lasts(
    burn_1h: float, minutes_left: float, said: str
) -> None:
    found = status(burn_1h, minutes_left, frozenset({"medium"}))
    (row,) = [row for _, row in alert_events(found, frozenset(), START_US)]
    assert row["text"] == f"gold/latency: the error budget was spent too fast over the last 6 h{said}"
    (row,) = [row for _, row in alert_events(replace(found, alerts=frozenset()), found.alerts, START_US)]
    assert row["text"].startswith("gold/latency: the error budget is no longer spent too fast, over 6 h; ")
