"""From documents to promises, classes and threshold sets."""

from __future__ import annotations

from sla_server.agreements.compile import InForce, Threshold, check, classes, promises, threshold_set
from sla_server.agreements.promise import Priority
from tests.unit.agreements.documents import FULL, in_force, simple


def test_a_promise_carries_what_judging_and_control_need() -> None:
    (promise,) = promises([in_force(FULL, version=3)])
    assert (promise.key, promise.version, promise.priority) == (("erp-gold", "latency"), 3, Priority.GOLD)
    assert promise.threshold_us(3000) == 5000
    assert promise.threshold_us(3000.1) == 8000
    assert promise.threshold_us(6000.1) is None
    assert promise.slice_s == 60
    assert promise.floor_bytes_per_s == 20e6
    assert promise.covers("vol-17", "host-a")
    assert not promise.covers("vol-17", "host-b")


def test_a_last_step_without_limit_has_no_limit() -> None:
    (promise,) = promises([in_force(simple().replace("up_to_iops: 500, ", ""))])
    assert promise.threshold_us(1e12) == 12_000


def test_classes_carry_floor_and_cap() -> None:
    (gold,) = classes([in_force(FULL)])
    assert (gold.floor_iops, gold.cap_iops, gold.priority) == (500, 20_000, Priority.GOLD)
    (plain,) = classes([in_force(simple(priority="best-effort"))])
    assert (plain.floor_iops, plain.cap_iops, plain.priority) == (50, None, Priority.BEST_EFFORT)


def test_the_threshold_set_has_every_value_of_every_step() -> None:
    entries = threshold_set([in_force(FULL)], [])
    assert entries == [
        Threshold("vol-17", "host-a", "any", 5000),
        Threshold("vol-17", "host-a", "any", 8000),
    ]
    assert entries[0].as_dict() == {"volume": "vol-17", "client": "host-a", "io": "any", "threshold_us": 5000}


def test_patterns_over_volumes_become_the_volumes_known() -> None:
    item = in_force(simple(volumes='"db-*"'))
    assert threshold_set([item], []) == []
    assert [entry.volume for entry in threshold_set([item], {"db-2", "web-1", "db-1"})] == ["db-1", "db-2"]


def test_equal_values_are_counted_once() -> None:
    both = [in_force(simple("a")), in_force(simple("b", clients="host-a")), in_force(simple("c"))]
    assert threshold_set(both, []) == [Threshold("vol-1", "*", "any", 12_000)]
    other = [in_force(simple("a")), in_force(simple("b", clients="host-a", value_ms=3))]
    assert len(threshold_set(other, [])) == 2


def many(count: int, **keys: str) -> list[InForce]:
    return [
        in_force(simple(f"sla-{i}", value_ms=1 + i, priority=keys.get("priority", "gold")))
        for i in range(count)
    ]


def test_eight_values_fit_and_the_ninth_is_refused_naming_all() -> None:
    assert check(many(8), []) == []
    (found,) = check(many(9), [])
    assert "vol-1" in found.problem
    assert all(f"sla-{i}" in found.document for i in range(9))


def test_the_limit_sees_through_patterns() -> None:
    items = [*many(8), in_force(simple("wide", volumes='"vol-*"', value_ms=100))]
    assert check(items, []) == []
    assert check(items, {"vol-1"})


def test_a_pattern_that_comes_to_hold_too_many_keeps_the_higher_priorities() -> None:
    low = [in_force(simple(f"l{i}", volumes='"vol-*"', value_ms=50 + i, priority="bronze")) for i in range(4)]
    entries = threshold_set([*low, *many(6)], {"vol-1"})
    values = {entry.threshold_us for entry in entries}
    assert len(values) == 8
    assert {1000 * (1 + i) for i in range(6)} <= values


def test_a_set_that_no_message_holds_is_refused() -> None:
    names = {f"volume-with-a-long-name-{'x' * 80}-{i}" for i in range(400)}
    item = in_force(simple(volumes='"volume-*"'))
    assert check([item], set()) == []
    assert "one message" in check([item], names)[0].problem
