"""Slices of what people see: which are bad, and when two of them break a promise."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from sla_server.agreements.promise import CurveStep
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalTable
from tests.support.windows import ALL, S
from tests.support.worlds import (
    A,
    B,
    Feeder,
    controller,
    cut,
    events_of,
    piece_of,
    pieces_of,
    promise,
)

FAST, SLOW = (100, 2.0), (100, 30.0)
GOES_ON = np.array([True])


class OneRow:
    """A promise with slices of 20 s, which begin at second 0."""

    def __init__(self, **over: Any) -> None:
        self.promise = promise(**{"slice_s": 20, **over})
        self.signals = SignalTable(ControlSettings())
        self.row = self.signals.allot(self.promise, A, "", 0.95).row
        self.slices, self.rows = self.signals.windows.slices, np.array([self.row])
        self.is_shown = np.array([False])

    def second(self, at: int, ios: tuple[int, float], gateways: int = 1, **more: Any) -> bool:
        """A cut of each gateway that begins at this second; whether the promise is broken by slices then."""
        start_us = np.full(gateways, at * 1_000_000)
        piece = piece_of(cut(A, at + 1, {"gold": ios}, **more), ALL, self.promise)
        pieces = pieces_of([piece] * gateways, self.promise, (at + 1) * S)
        rows, more_steps = (
            np.repeat(self.rows, gateways),
            self.signals.windows.steps - len(self.promise.curve),
        )
        pieces.counted, pieces.missed, pieces.overdue = (
            np.pad(part, ((0, 0), (0, more_steps)))
            for part in (pieces.counted, pieces.missed, pieces.overdue)
        )
        self.slices.rolls(rows, start_us)
        self.slices.add(rows, start_us, np.arange(gateways), pieces, np.zeros(gateways))
        self.is_shown = self.slices.are_broken(self.rows, GOES_ON, self.is_shown)
        return bool(self.is_shown[0])

    def run(self, first: int, until: int, bad_from: int, *, every: int = 20) -> list[int]:
        """Seconds of which those from ``bad_from`` on in each slice are slow; those in which it is broken."""
        ios = [(at, SLOW if at % every >= bad_from else FAST) for at in range(first, until)]
        return [at for at, each in ios if self.second(at, each)]


def test_it_is_broken_from_half_of_the_second_bad_slice_on() -> None:
    assert OneRow().run(0, 60, 0) == list(range(29, 60))
    assert OneRow().run(0, 40, 15) == list(range(35, 40)), "no more than 5 % were slow before"
    assert OneRow().run(0, 60, 19) == [], "one of 20 s is what may be slow"


def test_what_was_not_seen_from_the_beginning_or_does_not_follow_is_no_proof() -> None:
    assert OneRow().run(5, 40, 0) == []
    assert OneRow().run(2, 40, 0) == list(range(29, 40))
    made = OneRow()
    made.run(0, 20, 0)
    assert made.run(40, 60, 0) == []


def test_the_clauses_are_about_the_slice() -> None:
    made = OneRow(curve=(CurveStep(150.0, 12_000),))
    ios = [(200, 30.0) if at % 20 >= 15 else (100, 2.0) for at in range(40)]  # 125 I/O/s in a slice
    assert [at for at, each in enumerate(ios) if made.second(at, each)] == list(range(35, 40))
    assert OneRow(curve=(CurveStep(90.0, 12_000),)).run(0, 40, 0) == []
    assert OneRow(least_iops=101.0).run(0, 40, 0) == []
    few = OneRow(least_iops=101.0)
    broken = [few.second(at, FAST, failed={"gold": 40 * (at % 7 == 0)}) for at in range(40)]
    assert broken[-1], "no clause excuses failures: 5.7 %, of 5 allowed"


def test_a_row_of_several_gateways_has_the_sums_of_all() -> None:
    made = OneRow()
    for at in range(20):
        made.second(at, FAST, gateways=2)
    assert made.slices.now[0, made.row] == 4000
    made.second(20, SLOW, gateways=2)
    assert (made.slices.now[0, made.row], made.slices.now[1, made.row]) == (200, 200)
    assert made.slices.former[made.row, 0] == 4000


def test_another_promise_in_the_row_begins_again() -> None:
    made = OneRow()
    made.run(0, 20, 0)
    made.signals.free(made.row)
    assert made.signals.allot(made.promise, A, "", 0.95).row == made.row
    assert made.run(20, 40, 0) == []


def test_longer_curves_and_more_rows_keep_the_sums() -> None:
    made = OneRow()
    made.run(0, 25, 0)
    steps = (CurveStep(10.0, 5_000), CurveStep(900.0, 12_000), CurveStep(1e9, 50_000))
    for number in range(100):
        made.signals.allot(promise(sla=f"p{number}", curve=steps), B, "", 0.95)
    assert made.run(25, 40, 0) == list(range(29, 40))


def test_the_event_says_what_two_slices_say() -> None:
    """1.4 % of p99 are slow: one window of three has too many."""
    made = Feeder(controller((promise(percentile=99.0, slice_s=20),), mode="observe"), (A, ("gold",)))
    events = []
    for number in range(80):
        slow = {"overdue": {"gold": (1, 0)}} if number % 3 == 0 else {}
        events += events_of(made.step((A, {"gold": (24, 2.0)}, 0), **slow), "violation-opened")
    assert len(events) == 1
    assert re.search(
        r"in this slice of 20 s and the one before it 1\.[2-5]\d times the misses", events[0].text
    )
    assert (events[0].details["windows_over"], events[0].details["slices_over"]) == (1, 2)
