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
