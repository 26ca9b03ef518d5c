"""A queue that fills is an event, and one that drained another; between both there is none."""

from __future__ import annotations

import pytest

from sla_server.events import catalogue
from sla_server.events.engine import FULL_RATIO
from sla_server.relay.process import FILLING_RATIO, FullnessWatch


def kinds(watch: FullnessWatch, *ratios: float) -> list[str]:
    return [due[0] for ratio in ratios if (due := watch.check(ratio)) is not None]


def test_it_is_said_once_when_the_queue_fills_and_once_when_it_drained() -> None:
    watch = FullnessWatch(0.0)
    assert kinds(watch, 0.1, 0.69, 0.7, 0.75, 0.6, 0.9) == ["event-queue-filling"]
    assert kinds(watch, 0.51, 0.5, 0.1, 0.69) == ["event-queue-drained"]
    assert kinds(watch, 0.7) == ["event-queue-filling"]


@pytest.mark.parametrize(("ratio", "said"), [(0.6, ["event-queue-drained"]), (0.4, [])])
def test_the_end_comes_also_after_a_restart(ratio: float, said: list[str]) -> None:
    assert kinds(FullnessWatch(ratio), ratio, 0.3) == said


@pytest.mark.parametrize("ratio", [0.6, 0.9])
def test_a_queue_that_fills_after_a_restart_or_was_made_smaller_is_said_to_fill(ratio: float) -> None:
    watch = FullnessWatch(ratio)
    assert kinds(watch, ratio, 0.9, 0.4) == ["event-queue-filling", "event-queue-drained"]


def test_a_queue_that_a_restart_made_larger_has_drained_if_people_believe_otherwise() -> None:
    watch = FullnessWatch(0.3)
    due = watch.check(0.3, is_known=True)
    assert due is not None
    assert due[0] == "event-queue-drained"
    assert watch.check(0.3, is_known=True) is None, "recipients do not have it yet"
    assert kinds(watch, 0.8) == ["event-queue-filling"]
    assert watch.check(0.6, is_known=True) is None
    assert kinds(watch, 0.4) == ["event-queue-drained"]


def test_it_is_said_before_events_are_given_up_and_both_are_one_condition() -> None:
    assert FILLING_RATIO < FULL_RATIO
    begun, ended = catalogue.described("event-queue-filling"), catalogue.described("event-queue-drained")
    assert begun.begins == ended.ends != ""
