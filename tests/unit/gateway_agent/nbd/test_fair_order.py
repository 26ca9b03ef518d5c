"""Fair order: equal and weighted shares, whatever the requests cost; what leaves is not owed anything."""

from __future__ import annotations

from collections import Counter

from gateway_agent.nbd.fair_order import FairOrder


def served(order: FairOrder[str], costs: dict[str, float], total: float) -> Counter[str]:
    """Serve until so much is used; how much each flow got."""
    used: Counter[str] = Counter()
    while used.total() < total:
        flow = order.first()
        assert flow is not None
        used[flow] += costs[flow]
        order.served(flow, costs[flow])
    return used


def ordered(*flows: str) -> FairOrder[str]:
    order: FairOrder[str] = FairOrder()
    for flow in flows:
        order.add(flow)
    return order


def test_flows_whose_requests_are_alike_take_turns():
    order, found = ordered("a", "b", "c"), []
    for _ in range(7):
        found.append(order.first())
        order.served(found[-1], 10)
    assert found == ["a", "b", "c", "a", "b", "c", "a"]


def test_large_requests_get_no_more_than_small_ones():
    used = served(ordered("large", "small"), {"large": 500.0, "small": 1.0}, 10_000)
    assert abs(used["large"] - used["small"]) <= 500


def test_a_flow_that_comes_or_comes_back_is_owed_nothing():
    order = ordered("a")
    served(order, {"a": 1.0}, 1000)
    order.add("b")
    used = served(order, {"a": 1.0, "b": 1.0}, 100)
    assert abs(used["a"] - used["b"]) <= 2
    order.remove("b")
    served(order, {"a": 1.0}, 1000)
    order.add("b")
    used = served(order, {"a": 1.0, "b": 1.0}, 100)
    assert abs(used["a"] - used["b"]) <= 2


def test_what_is_set_aside_keeps_its_place_and_what_is_forgotten_has_none():
    order = ordered("a", "b", "c")
    order.set_aside("a")
    assert order.first() == "b"
    order.served("b", 1)
    order.set_aside("c")
    order.put_back()
    assert order.first() == "a"
    order.forget("a")
    assert order.first() == "c"
    assert "a" not in order
    assert sorted(order) == ["b", "c"]


def test_what_passed_while_one_was_set_aside_is_not_owed_to_it():
    order = ordered("held", "later", "other")
    for _ in range(10):
        order.set_aside("held")
        order.set_aside("later")
        order.served("other", 5)
        order.put_back()
    assert order.first() == "held", "its place, among equals"
    order.served("held", 5)
    assert order.first() == "later"
    order.served("later", 5)
    order.served("other", 5)
    assert order.first() == "held", "and not twice as often as the other"
    used = dict.fromkeys(("held", "later", "other"), 0)
    for _ in range(30):
        flow = order.first()
        used[flow] += 1
        order.served(flow, 5)
    assert used == {"held": 10, "later": 10, "other": 10}


def test_one_that_is_forgotten_while_it_is_aside_does_not_come_back():
    order = ordered("a", "b")
    order.set_aside("a")
    order.forget("a")
    order.put_back()
    assert [order.first(), len(order)] == ["b", 1]
    order.remove("b")
    assert order.first() is None
