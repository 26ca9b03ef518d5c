"""How far a step up may go (ADR 78)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sla_server.services.control.nearness import Nearness
from sla_server.services.control.settings import ControlSettings
from tests.support.loop_steps import S, clear, neighbour, start, world


@pytest.fixture
def near():
    return Nearness(ControlSettings())


def seen(r, alone=0.0, name="gold"):
    found = clear(r=r, name=name)
    return replace(found, signal=replace(found.signal, r_alone=alone))


@pytest.mark.parametrize(
    ("r", "alone", "share"),
    [(0.3, 0.0, 0.5), (0.4, 0.2, 0.5), (0.2, 0.2, 1.0), (0.6, 0.2, 0.0), (0.9, 0.2, 0.0)],
)
def test_what_is_left_of_the_storage_may_shrink_as_the_wait_may_grow(near, r, alone, share):
    """C parks at 0.6: a wait of half of that leaves half."""
    assert near.reach([seen(r, alone)], 100.0) == pytest.approx(100.0 * share)


def test_the_promise_that_waits_most_decides(near):
    assert near.reach([seen(0.1), seen(0.45, name="silver")], 100.0) == pytest.approx(25.0)


def test_what_is_usual_counts_if_the_last_windows_are_better(near):
    near.see([clear(r=0.5)])
    assert near.reach([seen(0.3)], 60.0) == pytest.approx(10.0)


@pytest.mark.parametrize("unused", [0.0, -5.0])
def test_storage_that_carries_more_than_it_gave_sets_no_limit(near, unused):
    assert near.reach([seen(0.5)], unused) == math.inf


def test_a_step_ends_where_one_queue_would_be_too_slow(control):
    """485 were carried of both; C at 200 and the promise's 85 leave 200, of which it takes a quarter."""
    start(control)
    assert control.allowed == pytest.approx(200.0)
    found, second = world(neighbour(cost=200.0, queueing=True)), 104
    while control.allowed == 200.0:
        control.step([clear(r=0.45)], found, second * S)
        second += 1
    assert second < 120
    assert control.allowed == pytest.approx(250.0)


def test_what_the_storage_gave_is_the_most_of_all_decreases_and_forgotten_at_the_end(control):
    start(control)
    assert control.given == pytest.approx(485.0)
    control.reset()
    assert control.given == 0.0
