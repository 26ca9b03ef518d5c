"""Clients that come, go, and take their volume's place."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.client_turnover import (
    Turnover,
    carried_over,
    come_and_gone,
    turn_over,
)
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour
from sla_server.services.control.victims import Victim

SETTINGS = ControlSettings()
S = 1_000_000_000


def neighbour(target: str, cost: float, priority: Priority = Priority.BEST_EFFORT, **over) -> Neighbour:
    values = {"peak": cost, "floor": 50.0, "queueing": False, **over}
    return Neighbour(target, priority, cost, **values)


def by_name(*found: Neighbour) -> dict[str, Neighbour]:
    return {n.volume: n for n in found}


def came(managed: dict, neighbours: dict, spared=(), unused=()) -> tuple[list[str], list[str]]:
    """Names that join and that leave."""
    found = come_and_gone(managed, neighbours, spared, unused, Priority.GOLD, SETTINGS)
    assert found.more == 0.0
    return [n.volume for n in found.join], found.leave


OLD = neighbour("v/old", 100)
GOLD = neighbour("v/db", 80, Priority.GOLD)


def test_a_new_name_shares_what_its_volume_has():
    new = neighbour("v/new", 400)
    assert came(by_name(OLD), by_name(GOLD, OLD, new)) == (["v/new"], [])
    assert came(by_name(OLD), by_name(OLD, new), spared={"v/new"}) == ([], [])
    assert came(by_name(neighbour("w", 100)), by_name(new)) == ([], []), "its volume is not slowed down"
    assert came(by_name(OLD), by_name(OLD, neighbour("v/new", 400, Priority.SILVER))) == ([], [])


def test_small_ones_join_when_they_are_large_together():
    managed = by_name(neighbour("v/old", 900))
    few = [neighbour(f"v/{n}", 10) for n in range(4)]
    many = [neighbour(f"v/{n}", 10) for n in range(8)]
    assert came(managed, by_name(*managed.values(), *few)) == ([], []), "4 % of the backend"
    assert len(came(managed, by_name(*managed.values(), *many))[0]) == 8


def test_one_that_is_gone_leaves_and_the_last_of_a_volume_waits_for_the_next():
    gone, other = neighbour("v/gone", 0), neighbour("v/gone-too", 0)
    assert came(by_name(OLD, gone), by_name(OLD, gone), unused={"v/gone"}) == ([], ["v/gone"])
    assert came(by_name(gone), by_name(gone), unused={"v/gone"}) == ([], [])
    both = by_name(gone, other)
    assert came(both, both, unused=set(both)) == ([], ["v/gone-too"])
    new = neighbour("v/new", 400)
    assert came(by_name(gone), by_name(gone, new), unused={"v/gone"}) == (["v/new"], ["v/gone"])


def loop(*managed: Neighbour) -> BackendControl:
    made = BackendControl(SETTINGS, "disk")
    made.adopt(by_name(*managed), {("gold", "latency")}, 200.0)
    return made


def test_the_loop_turns_over_once_in_a_while():
    new, gone = neighbour("v/new", 400), neighbour("v/gone", 0)
    control = loop(OLD, gone)
    control.unused_from_ns = {"v/gone": 10 * S}
    assert turn_over(control, (), by_name(OLD, gone), 11 * S) is None, "it is only pausing"
    found, why = turn_over(control, (), by_name(OLD, gone, new), 12 * S)
    assert (found.leave, [n.volume for n in found.join]) == (["v/gone"], ["v/new"])
    assert why == "v/new: shares what its volume has; v/gone: not used any more"
    control.replace(*found)
    assert control.managed.keys() == {"v/old", "v/new"}
    assert control.allowed == 200
    newer = neighbour("v/newer", 400)
    assert turn_over(control, (), by_name(OLD, new, newer), 16 * S) is None
    assert turn_over(control, (), by_name(OLD, new, newer), 17 * S) is not None
    control.reset()
    assert turn_over(control, (), by_name(OLD, new, newer), 60 * S) is None


def carry(managed: dict, neighbours: dict, spared=()) -> Turnover:
    return carried_over(managed, list(managed), neighbours, spared, Priority.GOLD, SETTINGS)


def test_a_volume_that_is_divided_hands_its_caps_to_clients_but_not_to_those_that_are_spared():
    whole = by_name(neighbour("v", 500))
    promised, greedy, small = GOLD, neighbour("v/greedy", 400), neighbour("v/small", 15)
    found = carry(whole, by_name(promised, greedy, small))
    assert found.leave == ["v"]
    assert [n.volume for n in found.join] == ["v/greedy"]
    assert found.more == pytest.approx(-95), "what the others use is not C's any more"
    assert carry(whole, by_name(promised)) == Turnover([], []), "nothing left to slow down"


def test_a_volume_that_is_whole_again_takes_the_caps_of_its_clients():
    managed = by_name(neighbour("v/greedy", 400))
    found = carry(managed, by_name(neighbour("v", 420)))
    assert (found.leave, [n.volume for n in found.join]) == (["v/greedy"], ["v"])
    assert found.more == pytest.approx(20)
    assert carry(managed, by_name(neighbour("v", 420)), spared={"v"}) == Turnover([], [])


def test_clients_that_are_taken_together_hand_their_caps_to_their_glob_alone():
    managed = by_name(neighbour("v/job-1", 100), neighbour("v/job-2", 50), neighbour("v/x", 40))
    others = ["v/job-1", "v/job-2"]
    now = by_name(neighbour("v/job-*", 150), neighbour("v/*", 30), neighbour("v/x", 40))
    found = carried_over(managed, others, now, (), Priority.GOLD, SETTINGS, ["v/job-*"])
    assert (found.leave, [n.volume for n in found.join], found.more) == (others, ["v/job-*"], 0.0)
    held = managed | by_name(neighbour("v/job-*", 150))
    assert carried_over(held, others, now, (), Priority.GOLD, SETTINGS, ["v/job-*"]) == Turnover([], [])


def test_what_is_spared_are_the_targets_of_those_that_are_helped():
    control = loop(OLD)
    silver = neighbour("v/db", 400)
    victim = Victim(("gold", "latency"), Priority.GOLD, 0.0, None, None, frozenset(("v/db",)))  # type: ignore[arg-type]
    assert turn_over(control, (victim,), by_name(OLD, silver), S) is None
    control.victims.clear()
    assert turn_over(control, (victim,), by_name(OLD, silver), S) is not None


def test_of_clients_that_came_and_went_nothing_remains():
    """A loop may be at work for months, while a client takes a new name every few seconds."""
    control = BackendControl(SETTINGS, "disk")
    control.adopt(by_name(neighbour("v/0", 0), neighbour("w/0", 0)), {("gold", "latency")}, 250.0)
    for number in range(1, 20):
        control.step([], by_name(), number * S)
        control.ends[f"v/{number - 1}"] = 200.0
        control.replace([f"v/{number - 1}"], [neighbour(f"v/{number}", 0)])
    assert control.unused_from_ns.keys() == {"w/0"}
    control.step([], by_name(), 20 * S)
    control.leave_out(["v/19"])
    for noted in (control.ends, control.fits_from_ns, control.unused_from_ns):
        assert noted.keys() <= control.managed.keys() == {"w/0"}
