from __future__ import annotations

from sla_server.services.judging.due_queue import DueQueue


def name(number: int) -> tuple[str, str, int]:
    return f"a{number}", "latency", 1


def made(count: int) -> DueQueue:
    rota = DueQueue()
    rota.reset(name(number) for number in range(count))
    return rota


def taken(rota: DueQueue, most: int = 100) -> list[int]:
    return [int(found[0][1:]) for found in rota.take(most)]


def test_all_are_awake_at_first_and_taken_once_in_order_some_at_a_time() -> None:
    rota = made(5)
    assert (taken(rota, 2), rota.awake) == ([0, 1], 3)
    rota.wake(name(1))
    rota.wake(name(3))  # awake already: it keeps its place
    assert taken(rota) == [2, 3, 4, 1]
    assert (taken(rota), rota.awake) == ([], 0)


def test_who_is_taken_but_not_reached_stays_awake() -> None:
    rota = made(3)
    assert next(rota.take(3)) == name(0)
    assert taken(rota) == [1, 2]


def test_a_parked_one_is_woken_by_time_or_by_its_gateway_whichever_is_first() -> None:
    rota = made(3)
    for found in rota.take(3):
        rota.park(found, 100, {"g1": 50} if found == name(0) else {"g1": 60, "g2": 70})
    rota.rouse({"g1": 49}, 99)
    assert taken(rota) == []
    rota.rouse({"g1": 55}, 99)
    assert taken(rota) == [0]
    rota.rouse({"g2": 70}, 99)
    assert taken(rota) == [1, 2]
    rota.rouse({"g1": 99, "g2": 99}, 1000)
    assert taken(rota) == []  # each was woken once


def test_one_that_is_parked_anew_is_not_woken_by_its_old_instant() -> None:
    rota = made(1)
    (found,) = rota.take(1)
    rota.park(found, 100, {"g": 50})
    rota.rouse({"g": 50}, 60)
    assert taken(rota) == [0]
    rota.park(found, 160, {"g": 110})
    rota.rouse({"g": 60}, 100)
    assert taken(rota) == []
    rota.rouse({"g": 60}, 160)
    assert taken(rota) == [0]


def test_a_reset_forgets_who_was_parked() -> None:
    rota = made(2)
    for found in rota.take(2):
        rota.park(found, 100, {"g": 50})
    rota.reset([name(7)])
    rota.rouse({"g": 99}, 200)
    assert taken(rota) == [7]
