from __future__ import annotations

import gc

import pytest

from sla_server.services.collector import EVERY_NS, FIRST_NS, Collector


def test_survivors_are_frozen_after_a_last_look_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    collector = Collector()
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
    with pytest.raises(ZeroDivisionError), Collector.held():
        _fail_if(seen == ["disable"])
    assert seen == ["disable", "freeze", "enable"]


def _fail_if(as_expected: bool) -> None:
    if as_expected:
        raise ZeroDivisionError
