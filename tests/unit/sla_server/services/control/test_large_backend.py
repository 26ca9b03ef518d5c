"""One backend with 10,000 promises beside 1,000 small ones, all at risk: work is bounded, none waits for it.

The real controller; work is counted, in turns and in objects that a tick looks at one by one, not in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pmdaemon.wire.cut import Cut
from sla_server.services.control import loops
from sla_server.services.control.backend_use import MOST_LISTED
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import Decision
from sla_server.services.control.feed_forward import MOST_WATCHED
from sla_server.services.control.signal import SignalRow
from tests.support.worlds import controller, cut, events_of, exports, promise, streams, volume_class

S = 1_000_000_000
PROMISES, GATEWAYS = 10_000, 20
SMALL, EXPORTED = 1_000, 10
LATE = (60, 30.0)


class Site:
    """A controller with these backends, and the cuts of a second of each gateway."""

    def __init__(self, promises: int, small: int) -> None:
        self.large = [f"gold-{number:05}" for number in range(promises)]
        self.small = [f"s{number:04}" for number in range(small)]
        golds = [*self.large, *(f"{name}-gold" for name in self.small)]
        self.controller = controller(
            [promise(name) for name in golds], [volume_class(name) for name in golds]
        )
        self.cuts: dict[str, Cut] = {}
        for number in range(GATEWAYS if promises else 0):
            volumes = self.large[number::GATEWAYS]
            ios = dict.fromkeys(volumes, LATE) | ({"greedy": (900_000, 30.0)} if number == 0 else {})
            self._join(f"g{number}", ios, "large", [])
        for name in self.small:
            rest = [f"{name}-{number}" for number in range(EXPORTED - 2)]
            self._join(name, {f"{name}-gold": LATE, f"{name}-greedy": (400, 30.0)}, name, rest)
        self.second = 0

    def _join(self, gateway: str, ios: dict[str, tuple[int, float]], backend: str, idle: list[str]) -> None:
        self.controller.gateway_up(gateway, gateway, exports(*ios, *idle, backend=backend), 0)
        self.controller.add_streams(gateway, streams(gateway, *ios, backend=backend))
        self.cuts[gateway] = cut(gateway, 1, ios)

    def step(self) -> list[Decision]:
        """A second passes: all cuts, of gateways that hold the caps they were sent, and a tick."""
        self.second += 1
        number, made = self.second, self.controller
        unix_us = 0
        for gateway, first in self.cuts.items():
            start_us = first.start_unix_us + (number - 1) * 1_000_000
            gen = made.policy.gateways[gateway].gen
            unix_us = start_us + first.duration_us
            each = replace(first, seq=number, start_unix_us=start_us, throttle_gen=gen)
            made.add_cut(each, unix_us, 0, False, number * S)
        return made.tick(number * S, unix_us)


class Work:
    """What ticks look at one by one: promises, and neighbours; and which backends take a step in each."""

    def __init__(self, made: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
        self.victims = self.neighbours = 0
        self.turns: list[list[str]] = []
        self.batches: list[int] = []
        table, inventory, by_turns = made.scopes.table, made.inventory, made.loops._by_turns
        work_out = table.work_out
        victim, neighbour = inventory.victim, inventory.neighbour

        def counted_victim(*given: Any) -> Any:
            self.victims += 1
            return victim(*given)

        def counted_neighbour(*given: Any) -> Any:
            self.neighbours += 1
            return neighbour(*given)

        def counted_turns(*given: Any) -> list[str]:
            self.turns.append(by_turns(*given))
            return self.turns[-1]

        def counted_signals(rows: Iterable[SignalRow]) -> None:
            due = list(rows)
            self.batches.append(len(due))
            work_out(due)

        monkeypatch.setattr(table, "work_out", counted_signals)
        monkeypatch.setattr(inventory, "victim", counted_victim)
        monkeypatch.setattr(inventory, "neighbour", counted_neighbour)
        monkeypatch.setattr(made.loops, "_by_turns", counted_turns)


def seconds_until_helped(site: Site) -> int:
    """When the last of the small ones has a throttle for it."""
    wanted, helped = {f"{name}-greedy" for name in site.small}, set[str]()
    while not wanted <= helped:
        helped |= {event.subject for event in events_of(site.step(), "throttle-set")}
        assert site.second < 60, "some wait for ever"
    return site.second


def test_ten_thousand_promises_on_one_backend_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alone_s = seconds_until_helped(Site(0, SMALL))
    site = Site(PROMISES, SMALL)
    work = Work(site.controller, monkeypatch)
    step = site.step

    def bounded() -> list[Decision]:
        work.victims = work.neighbours = 0
        decisions = step()
        turn = work.turns[-1]
        room = sum(loops.MOST_VOLUMES // 2 if name == "large" else EXPORTED for name in turn)
        assert room <= loops.MOST_VOLUMES
        assert work.neighbours <= room + MOST_LISTED + MOST_WATCHED
        assert work.victims <= len(turn) + loops.MOST_PROMISES, "of the large one, those that decide"
        if site.second == 2:
            assert len(events_of(decisions, "violation-opened")) == PROMISES + SMALL
            assert "greedy" in {event.subject for event in events_of(decisions, "throttle-set")}
        return decisions

    monkeypatch.setattr(site, "step", bounded)
    assert seconds_until_helped(site) <= alone_s + 2, "the large one takes half of a turn in three"
    assert work.batches[1] == PROMISES + SMALL, "their windows are looked at together"
    while site.second < 12:
        site.step()
    steps = [at for at, turn in enumerate(work.turns) if "large" in turn]
    assert len(steps) >= 2, "nor do a thousand keep it from its steps"


def test_the_room_of_a_large_backend_that_rests_is_that_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The active ones take all of a turn in which no other may take a step."""
    made = controller([], [])
    sizes = {"large": 3 * loops.MOST_VOLUMES} | {
        f"a{number}": loops.MOST_VOLUMES // 8 for number in range(16)
    }
    monkeypatch.setattr(made.inventory, "volumes_on", sizes.__getitem__)
    active = sizes.keys() - {"large"}
    turns = [made.loops._by_turns(set(sizes), set(active)) for _ in range(4)]
    assert [("large" in turn, len(turn)) for turn in turns] == [(True, 5), (False, 8), (False, 8), (True, 5)]
