"""Uses beside caps that do not hold: bounded work a second, whatever the size of the fleet."""

from __future__ import annotations

from collections import Counter

from pmdaemon.wire.rates import Rates
from sla_server.services.control.policy_stage import MOST_LOOKED, MOST_WATCHED, PolicyStage

S = 1_000_000_000
FLEET = 64_000


class World:
    """Caps of a fleet; those of ``holding`` hold."""

    def __init__(self, volumes: int) -> None:
        self.stage = PolicyStage("observe")
        self.caps = {f"v{number:05}": Rates(cost_per_s=10.0) for number in range(volumes)}
        self.holding: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.now_s = 0

    def holds(self, volume: str) -> bool:
        self.asked[volume] += 1
        return volume in self.holding

    def place_of(self, volume: str) -> tuple[str, float]:
        self.places[volume] += 1
        return "disk", 15.0

    def second(self) -> None:
        self.now_s += 1
        self.stage.compare(1, self.caps, self.holds, self.place_of, self.now_s * S)

    def compared(self) -> set[str]:
        self.places.clear()
        self.second()
        return set(self.places)


def test_a_second_asks_of_a_bounded_number_of_volumes() -> None:
    for is_holding in (False, True):
        world = World(FLEET)
        world.holding = set(world.caps) if is_holding else set()
        for _ in range(5):
            world.asked.clear()
            world.places.clear()
            world.second()
            assert sum(world.asked.values()) <= MOST_WATCHED + MOST_LOOKED
            assert sum(world.places.values()) <= MOST_WATCHED


def test_what_does_not_hold_is_found_in_a_large_fleet_and_left_when_it_does() -> None:
    world = World(FLEET)
    last = "v63999"
    world.holding = set(world.caps) - {last}
    for _ in range(FLEET // MOST_LOOKED):
        world.second()
    assert world.compared() == {last}
    world.holding.add(last)
    assert world.compared() == set()
    assert [row["volume"] for row in world.stage.rows(10)] == [last]


def test_of_a_small_fleet_all_are_compared_each_second() -> None:
    world = World(3)
    world.caps["none"] = Rates(ops_per_s=5.0)
    assert world.compared() == {"v00000", "v00001", "v00002"}
    world.caps = {"other": Rates(cost_per_s=1.0)}
    assert world.compared() == {"other"}
