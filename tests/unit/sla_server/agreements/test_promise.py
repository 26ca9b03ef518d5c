"""From documents to promises and classes."""

from __future__ import annotations

from sla_server.agreements.promise import Priority, classes, promises
from tests.support.agreements import FULL, in_force, simple


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


def test_promises_of_one_version_are_made_once() -> None:
    item = in_force(FULL)
    assert promises([item])[0] is promises([item])[0]
    assert in_force(FULL) == item  # what was made does not count when versions are compared
