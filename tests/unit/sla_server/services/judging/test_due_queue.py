from __future__ import annotations

from sla_server.services.judging.scopes import DueQueue


def name(number: int) -> tuple[str, str, int]:
    return f"a{number}", "latency", 1


def made(count: int) -> DueQueue:
    queue = DueQueue()
    queue.reset(name(number) for number in range(count))
    return queue


def taken(queue: DueQueue, most: int = 100) -> list[int]:
    return [int(found[0][1:]) for found in queue.take(most)]


def test_all_are_due_at_first_and_taken_once_in_order_some_at_a_time() -> None:
    queue = made(5)
    assert (taken(queue, 2), len(queue)) == ([0, 1], 3)
    queue.add(name(1))
    queue.add(name(3))  # due already: it keeps its place
    assert taken(queue) == [2, 3, 4, 1]
    assert (taken(queue), len(queue)) == ([], 0)


def test_what_is_taken_but_not_reached_stays_due() -> None:
    queue = made(3)
    assert next(queue.take(3)) == name(0)
    assert taken(queue) == [1, 2]


def test_a_deferred_one_is_due_by_time_or_by_its_gateway_whichever_is_first() -> None:
    queue = made(3)
    for found in queue.take(3):
        queue.defer(found, 100, {"g1": 50} if found == name(0) else {"g1": 60, "g2": 70})
    queue.advance({"g1": 49}, 99)
    assert taken(queue) == []
    queue.advance({"g1": 55}, 99)
    assert taken(queue) == [0]
    queue.advance({"g2": 70}, 99)
    assert taken(queue) == [1, 2]
    queue.advance({"g1": 99, "g2": 99}, 1000)
    assert taken(queue) == []  # each was added once


def test_one_that_is_deferred_again_is_not_due_by_its_old_instant() -> None:
    queue = made(1)
    (found,) = queue.take(1)
    queue.defer(found, 100, {"g": 50})
    queue.advance({"g": 50}, 60)
    assert taken(queue) == [0]
    queue.defer(found, 160, {"g": 110})
    queue.advance({"g": 60}, 100)
    assert taken(queue) == []
    queue.advance({"g": 60}, 160)
    assert taken(queue) == [0]


def test_a_reset_forgets_what_was_deferred() -> None:
    queue = made(2)
    for found in queue.take(2):
        queue.defer(found, 100, {"g": 50})
    queue.reset([name(7)])
    queue.advance({"g": 99}, 200)
    assert taken(queue) == [7]
