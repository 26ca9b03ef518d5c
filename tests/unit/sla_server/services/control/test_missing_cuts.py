"""Cuts that are late, replayed, or not seen at all: storage that goes on is never taken for stalled."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pmdaemon.wire.cut import COL, Cut
from sla_server.agreements.promise import CurveStep
from tests.support.worlds import KEY, A, Feeder, controller, cut, events_of, exports, promise, volume_class

OUTAGE = {"metric": "availability", "percentile": 99.0, "curve": (CurveStep(float("inf"), 2_000_000),)}


def busy(turns: int, *, old_agent: bool = True) -> Iterator[Cut]:
    """A stream that always goes on: an I/O of some milliseconds arrives at the end of every second cut."""
    done = 0
    for turn in range(1, turns + 1):
        completes = turn % 2 == 0
        done += completes
        more: dict[str, Any] = {}
        if not completes:
            more = {"waiting": {"gold": (1, 2.0)}, "arriving": {"gold": 1}}
        made = cut(A, turn, {"gold": (int(completes), 4.0)}, old_agent=old_agent, **more)
        counters = made.counters.copy()
        counters[COL["arrived"], 0] = 0 if completes else 1
        counters[COL["cum_reads"], 0] = done
        yield dataclasses.replace(made, counters=counters)


class Link(Feeder):
    """Cuts come as the pairs post them."""

    def __init__(self, **over: Any) -> None:
        super().__init__(controller((promise(**over),), (volume_class(),), "observe"), (A, ("gold",)))
        self.kinds: list[str] = []
        self.stalls: list[float] = []

    def take(self, made: Cut, late_s: float = 0.0) -> None:
        self.second = max(self.second, round(made.seq + late_s))
        self.controller.add_cut(made, self.unix_us, 0, False, self.now_ns)

    def tick(self) -> None:
        found = events_of(self.controller.tick(self.now_ns, self.unix_us))
        self.kinds += [event.kind for event in found]
        self.stalls.append(self.controller.live[KEY].signal.stall_us)


@pytest.mark.parametrize("old_agent", [True, False])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("over", [{}, OUTAGE], ids=["latency", "availability"])
def test_of_a_backlog_only_the_newest_cuts_are_seen(
    every: int, old_agent: bool, over: dict[str, Any]
) -> None:
    made = Link(**over)
    for each in busy(60, old_agent=old_agent):
        if each.seq % every == 1 % every:
            made.take(each)
            made.tick()
    assert (made.kinds, max(made.stalls)) == ([], 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_late_and_replayed_cuts_and_a_move_to_another_pair(seed: int) -> None:
    """The new pair asks for cuts again, and posts the newest before what the old one still holds."""
    rng, made, held = random.Random(seed), Link(), list[Cut]()
    for each in busy(80):
        held.append(each)
        if rng.random() < 0.2:
            made.controller.gateway_lost(A, "moved", made.now_ns)
            made.controller.gateway_up(A, "A", exports("gold"), made.now_ns)
            rng.shuffle(held)
        if rng.random() < 0.6:
            for late in held:
                made.take(late, each.seq - late.seq)
            if rng.random() < 0.3:
                made.take(held[0], each.seq - held[0].seq)
            held.clear()
        made.tick()
    assert (made.kinds, max(made.stalls)) == ([], 0.0)


def test_what_was_seen_stalled_before_a_gap_is_not_added_to_what_is_after_it() -> None:
    """Each I/O takes a second and a half; the cuts in which it completes are not seen."""
    made = Link()
    for turn in range(3, 60, 3):
        waiting = {"waiting": {"gold": (1, 0.0)}, "old_agent": True}
        made.take(cut(A, turn, {"gold": (0, 0.0)}, **waiting))
        made.tick()
    assert made.stalls[-1] == 1e6
    assert made.controller.tables[A].usage_table.values[10].max() == 1e6


def test_a_stall_that_goes_on_over_a_gap_is_seen_by_the_age_of_its_io() -> None:
    made = Link(**OUTAGE)
    for turn in range(2, 40, 2):
        waiting = {"waiting": {"gold": (1, 1000.0 * turn)}}
        made.take(cut(A, turn, {"gold": (0, 0.0)}, **waiting))
        made.tick()
    assert made.controller.live[KEY].state == "violating"
