"""Which backends a tick looks at, and that those that cannot all be stepped at take turns."""

from __future__ import annotations

import pytest

from sla_server.services.control import loops
from sla_server.services.control.controller import Controller
from tests.support.worlds import controller, cut, events_of, exports, promise, streams, volume_class

S = 1_000_000_000
NAMES = ("a", "b", "c", "d")


def many(mode: str = "enforce", **settings: float) -> Controller:
    """A backend, a gateway and a gold volume each, with a neighbour."""
    golds = [f"gold-{name}" for name in NAMES]
    made = controller([promise(g) for g in golds], [volume_class(g) for g in golds], mode, **settings)
    for name in NAMES:
        volumes = (f"gold-{name}", f"greedy-{name}")
        made.gateway_up(name, name, exports(*volumes, backend=f"disk-{name}"), 0)
        made.add_streams(name, streams(name, *volumes, backend=f"disk-{name}"))
    return made


def second(made: Controller, number: int, bad: tuple[str, ...] = NAMES) -> list[str]:
    """A second passes; returns volumes that are throttled from now on."""
    for name in NAMES:
        ios = {f"gold-{name}": (60, 30 if name in bad else 2), f"greedy-{name}": (400, 30)}
        each = cut(name, number, ios)
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, number * S)
    decisions = made.tick(number * S, 1_800_000_000_000_000 + number * 1_000_000)
    return [event.subject for event in events_of(decisions, "throttle-set")]


def test_all_backends_at_risk_are_helped_in_the_same_tick() -> None:
    made = many()
    assert second(made, 1) == []
    assert second(made, 2) == [f"greedy-{name}" for name in NAMES]


def test_quiet_backends_are_not_looked_at() -> None:
    made = many()
    for number in (1, 2, 3):
        second(made, number, bad=("b",))
    assert list(made.loops.controls) == ["disk-b"]


def test_too_many_take_turns_and_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_VOLUMES", 4)  # two backends
    made = many()
    second(made, 1)
    assert second(made, 2) == ["greedy-a", "greedy-b"]
    # Those are active and have the whole room: one of the others a tick all the same.
    assert second(made, 3) == ["greedy-c"]
    assert second(made, 4) == ["greedy-d"]


def test_in_observe_turns_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_VOLUMES", 2)  # one backend
    made = many("observe")
    stepped = []
    step = made.loops._step
    monkeypatch.setattr(
        made.loops, "_step", lambda backend, *rest: stepped.append(backend) or step(backend, *rest)
    )
    for number in range(1, 8):
        second(made, number)
    assert stepped == ["disk-a", "disk-b", "disk-c", "disk-d", "disk-a", "disk-b"]


def test_the_loudest_promise_leads() -> None:
    made = controller((promise(), promise("other")), (volume_class(), volume_class("other")))
    made.gateway_up("g", "g", exports("gold", "other", "greedy"), 0)
    made.add_streams("g", streams("g", "gold", "other", "greedy"))
    made.set_budget(("other", "latency"), 1.5, 0.5)
    decided = []
    for number in (1, 2, 3):
        ios = {"gold": (60, 90), "other": (60, 30), "greedy": (400, 30)}
        each = cut("g", number, ios)
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, number * S)
        decided += made.tick(number * S, number)
    (event,) = events_of(decided, "throttle-set")
    assert event.details["victim"] == "other/latency"  # its error budget is burning
