"""Which backends a tick looks at, and that those that cannot all be stepped at take turns."""

from __future__ import annotations

import random

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


def beside(source: str = "host") -> Controller:
    """A gold volume, a neighbour behind a gateway, and a device of the same backend that is only counted."""
    made = controller((promise(),), (volume_class(),))
    named = {"volume": "host:g:sda", "backend": "disk", "source": source}
    made.gateway_up("g", "g", [*exports("gold", "greedy"), named], 0)
    made.add_streams("g", streams("g", "gold", "greedy", "host:g:sda"))
    return made


def run(made: Controller, seconds: range, **ios: tuple[int, float]) -> list[object]:
    decided: list[object] = []
    gen = made.policy.gen
    for number in seconds:
        named = {name.replace("_", ":"): done for name, done in ios.items()}
        each = cut("g", number, {"gold": (60, 30), **named}, gen=gen)
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, number * S)
        decided += made.tick(number * S, 1_800_000_000_000_000 + number * 1_000_000)
        gen = max([gen, *(d.gen for d in decided if hasattr(d, "caps"))])
    return decided


def test_a_volume_beside_the_path_is_left_out_of_what_is_shared_and_named_once() -> None:
    decided = run(beside(), range(1, 40), greedy=(400, 30), host_g_sda=(460, 1))
    (named,) = events_of(decided, "neighbour-out-of-reach")
    assert named.subject == "disk"
    assert "host:g:sda is only counted on its host" in named.text
    caps = [cap for d in decided if hasattr(d, "caps") for cap in d.caps]
    assert {cap["volume"] for cap in caps} == {"greedy"}
    assert caps[0]["cost_per_s"] < 400 * 1.0625  # of what greedy uses, not of what the device counts


def test_a_small_one_is_not_worth_a_word() -> None:
    decided = run(beside(), range(1, 7), greedy=(400, 30), host_g_sda=(4, 1))
    assert events_of(decided, "neighbour-out-of-reach") == []


def test_a_volume_whose_caps_a_gateway_refuses_is_left_out_until_its_exports_change() -> None:
    made = beside("nbd")
    decided = run(made, range(1, 4), greedy=(10, 30), host_g_sda=(460, 1))
    (caps,) = [d for d in decided if hasattr(d, "caps")]
    assert [cap["volume"] for cap in caps.caps] == ["host:g:sda"]
    made.caps_state("g", caps.gen, "confirmed", "", 0, refused=["host:g:sda"])
    assert not made.can_throttle("host:g:sda")
    later = run(made, range(4, 16), greedy=(10, 30), host_g_sda=(460, 1))
    (event,) = events_of(later, "throttle-not-effective")
    assert event.text.startswith("gateway g does not serve volume host:g:sda")
    assert not any(cap["volume"] == "host:g:sda" for d in later if hasattr(d, "caps") for cap in d.caps)
    made.gateway_up("g", "g", exports("gold", "greedy", "host:g:sda"), 20 * S)
    assert made.can_throttle("host:g:sda")


class Sizes:
    """An inventory that only knows how large backends are."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def volumes_on(self, backend: str) -> int:
        return self.sizes[backend]


@pytest.mark.parametrize("active", ["large", "all", "none"])
def test_a_backend_of_ten_thousand_volumes_takes_no_turn_from_a_thousand_small_ones(active: str) -> None:
    sizes = {"large": 10_000} | {f"small-{number:04}": 10 for number in range(1_000)}
    made = controller().loops
    made._inventory = Sizes(sizes)  # its turns alone are looked at
    at_work = {"large": {"large"}, "all": set(sizes), "none": set()}[active]
    turns = dict.fromkeys(sizes, 0)
    for _ in range(60):
        chosen = made._by_turns(set(sizes), at_work)
        work = sum(min(sizes[name], loops.MOST_VOLUMES // 2) for name in chosen)
        assert work <= loops.MOST_VOLUMES + 10
        for name in chosen:
            turns[name] += 1
    # At best every third: it is two and a half turns large.
    assert turns.pop("large") in ((20,) if active == "large" else range(15, 21))
    assert min(turns.values()) >= 15  # every fourth at least: together they are two and a half turns, too
    assert max(turns.values()) - min(turns.values()) <= 1


def crowd(count: int, **settings: float) -> Controller:
    """Very many promises on one backend, of which the first is at risk; and a neighbour."""
    golds = [f"gold-{number:03}" for number in range(count)]
    made = controller([promise(g) for g in golds], [volume_class(g) for g in golds], **settings)
    made.gateway_up("g", "g", exports(*golds, "greedy"), 0)
    made.add_streams("g", streams("g", *golds, "greedy"))
    return made


@pytest.mark.parametrize("seed", range(2))
def test_of_very_many_promises_a_few_decide_as_all_of_them_would(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    decided: list[list[object]] = []
    for most in (1000, 5):
        monkeypatch.setattr(loops, "MOST_PROMISES", most)
        rng, made, found = random.Random(seed), crowd(30), list[object]()
        for number in range(1, 45):
            late = 30.0 if number < 8 else 8.6 if number < 20 else 4.0
            ios = {f"gold-{at:03}": (60, rng.choice((2.0, 4.0))) for at in range(30)}
            ios |= {f"gold-{seed:03}": (60, late), "greedy": (400 if number < 8 else 190, 30)}
            each = cut("g", number, ios, gen=made.policy.gateways["g"].gen, held=3)
            made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, number * S)
            found += made.tick(number * S, 1_800_000_000_000_000 + number * 1_000_000)
        decided.append([d for d in found if hasattr(d, "caps")])
    assert decided[0] == decided[1]
    assert len(decided[0]) >= 2


def test_of_ten_thousand_promises_a_handful_is_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = crowd(300), []
    victim = made.inventory.victim
    monkeypatch.setattr(made.inventory, "victim", lambda scope, now: asked.append(1) or victim(scope, now))
    for number in range(1, 12):
        ios = {f"gold-{at:03}": (60, 30.0 if at < 200 else 2.0) for at in range(300)} | {"greedy": (9000, 30)}
        each = cut("g", number, ios, gen=made.policy.gateways["g"].gen)
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, number * S)
        before = len(asked)
        made.tick(number * S, 1_800_000_000_000_000 + number * 1_000_000)
        assert len(asked) - before <= 8
    assert asked
    assert made.loops.controls["disk"].active


@pytest.mark.parametrize("most", [1000, 5])
def test_a_promise_that_no_cap_helps_hides_none_of_very_many(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The first of them is always late, and louder. While its neighbours rest, another one is harmed."""
    monkeypatch.setattr(loops, "MOST_PROMISES", most)
    made, found = crowd(30), dict[int, list[object]]()
    for number in range(1, 61):
        ios = {f"gold-{at:03}": (60, 2.0) for at in range(30)} | {"gold-000": (60, 900.0)}
        if number >= 35:
            ios["gold-007"] = (60, 30.0)
        ios["greedy"] = (400, 30)
        each = cut("g", number, ios, gen=made.policy.gateways["g"].gen, held=3)
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, number * S)
        found[number] = made.tick(number * S, 1_800_000_000_000_000 + number * 1_000_000)
    (freed,) = (at for at, each in found.items() if events_of(each, "unattributed") and at < 35)
    assert not [at for at in range(freed + 1, 35) if events_of(found[at], "throttle-set")]
    (event,) = (event for at in range(35, 40) for event in events_of(found[at], "throttle-set"))
    assert event.details["victim"] == "gold-007/latency"
