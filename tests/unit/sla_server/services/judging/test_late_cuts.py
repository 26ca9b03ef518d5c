from __future__ import annotations

import pytest

from sla_server.services.judging import judge
from sla_server.services.judging.judge import EVERY_US, LateCuts
from tests.support.services import MINUTE_US, START_US, Away, FakeStore

SPAN_US = 4 * MINUTE_US


def at(minutes: float) -> int:
    return START_US + round(minutes * MINUTE_US)


def test_more_cuts_than_were_seen_are_late() -> None:
    store = FakeStore()
    late = LateCuts(store)
    store.add_slot(at(0), gateway="a")
    store.add_slot(at(0), gateway="b")
    late.note(store.coverage)
    assert late.look(["a", "b"], SPAN_US, at(1)) == []
    store.add_slot(at(0), gateway="b")
    assert late.look(["a", "b"], SPAN_US, at(1) + EVERY_US - 1) == []  # its time has not come
    assert late.look(["a", "b"], SPAN_US, at(1) + EVERY_US) == [("b", at(0))]
    assert late.look(["a", "b"], SPAN_US, at(1) + 2 * EVERY_US) == []  # told once


def test_what_was_never_seen_is_late_and_what_is_old_is_not_looked_at() -> None:
    store = FakeStore()
    late = LateCuts(store)
    store.add_slot(at(0), gateway="a")
    store.add_slot(at(9), gateway="a")
    assert late.look(["a"], SPAN_US, at(10)) == [("a", at(9))]


def test_a_failed_look_comes_again_at_once() -> None:
    store = FakeStore()
    late = LateCuts(store)
    store.add_slot(at(0), gateway="a")
    store.away = {"slice_inputs"}
    with pytest.raises(Away):
        late.look(["a"], SPAN_US, at(1))
    store.away = set()
    assert late.look(["a"], SPAN_US, at(1) + 1) == [("a", at(0))]


def test_many_gateways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MOST_ROWS", 8)  # two gateways of four minutes
    store = FakeStore()
    late = LateCuts(store)
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        store.add_slot(at(0), gateway=name)
    told = [[g for g, _ in late.look(names, SPAN_US, at(1) + turn * EVERY_US)] for turn in range(4)]
    assert told == [["a", "b"], ["c", "d"], ["e"], []]
