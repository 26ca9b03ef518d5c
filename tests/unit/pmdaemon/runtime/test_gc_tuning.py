from __future__ import annotations

import gc

import pytest

from pmdaemon.runtime.gc_tuning import EVERY_NS, FIRST_NS, YOUNG, GcTuning


def test_survivors_are_frozen_after_a_last_look_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    collector = GcTuning()
    assert not collector.tick(5)
    assert not collector.tick(4 + FIRST_NS)
    assert collector.tick(5 + FIRST_NS)
    assert calls == ["collect", "freeze"]
    assert not collector.tick(4 + FIRST_NS + EVERY_NS)
    assert collector.tick(5 + FIRST_NS + EVERY_NS)
    assert calls == ["collect", "freeze"] * 2


def test_a_start_is_not_disturbed_and_its_objects_are_out_of_sight_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(gc, name, lambda name=name: seen.append(name))
    with pytest.raises(ZeroDivisionError), GcTuning.held():
        _fail_if(seen == ["disable"])
    assert seen == ["disable", "freeze", "enable"]


def test_python_makes_no_full_collection_by_itself_while_the_collector_is_in_charge() -> None:
    before, (_, young, full) = gc.get_threshold(), [each["collections"] for each in gc.get_stats()]
    with GcTuning.in_charge():
        kept = [[number] for number in range(30 * YOUNG)]
        assert gc.get_stats()[1]["collections"] > young
        assert gc.get_stats()[2]["collections"] == full
    assert gc.get_threshold() == before
    assert len(kept) == 30 * YOUNG


def _fail_if(as_expected: bool) -> None:
    if as_expected:
        raise ZeroDivisionError
