"""Admission: yes, no or unknown, with the figures it rests on."""

from __future__ import annotations

import pytest

from sla_server.agreements.admission import COST_BYTES, AdmissionAnswer, KnownCapacity, VolumeUse, admit
from sla_server.agreements.document import Agreement
from tests.support.agreements import agreement, simple

VOLUMES = [
    VolumeUse("vol-1", "disk", 8192.0),
    VolumeUse("vol-2", "disk", 8192.0),
    VolumeUse("other", "ssd", 8192.0),
]
COST = 1 + 8192 / COST_BYTES


def capacity(cost_per_s: float | None, reason: str = "") -> list[KnownCapacity]:
    return [KnownCapacity("disk", "gold", "latency", cost_per_s, reason)]


def gold(**changed: object) -> Agreement:
    """500 IOPS at most, 12 ms."""
    return agreement(simple("gold", **changed))  # type: ignore[arg-type]


def new(**changed: object) -> Agreement:
    return agreement(simple("new", **{"volumes": "vol-2", **changed}))  # type: ignore[arg-type]


def asked(wanted: Agreement, cost_per_s: float | None, *in_force: Agreement) -> AdmissionAnswer:
    return admit([wanted], in_force or [gold()], VOLUMES, capacity(cost_per_s))


def test_what_fits_is_admitted_with_its_figures() -> None:
    found = asked(new(), 1000 * COST)
    assert found.answer == "yes"
    (disk,) = found.backends
    assert (disk.backend, disk.capacity_of, disk.reasons) == ("disk", "gold/latency", [])
    assert (disk.promised, disk.added, disk.unpromised_floors) == (500 * COST, 500 * COST, 0)


def test_what_does_not_fit_is_not() -> None:
    assert asked(new(), 999 * COST).answer == "no"
    assert asked(new(value_ms=3), 999 * COST).answer == "no", "however strict it is"


def test_an_agreement_replaces_the_one_of_its_name() -> None:
    found = admit([gold()], [gold()], VOLUMES, capacity(551 * COST))
    (disk,) = found.backends
    assert (found.answer, disk.promised, disk.unpromised_floors) == ("yes", 0.0, 50 * COST)


def test_floors_count_where_they_are_more_than_the_demand() -> None:
    floor = agreement(simple("new", volumes='"vol-*"', extra="  guarantee: {floor_iops: 400}\n"))
    (disk,) = admit([floor], [], VOLUMES, capacity(1000.0)).backends
    assert disk.added == 2 * 400 * COST


def floored(name: str, floor_iops: int, clients: str = '"*"') -> Agreement:
    """Of vol-1, with next to no demand of its own."""
    text = simple(name, clients=clients, extra=f"  guarantee: {{floor_iops: {floor_iops}}}\n")
    return agreement(text.replace("up_to_iops: 500", "up_to_iops: 1"))


def test_floors_of_several_clients_of_a_volume_are_all_promised() -> None:
    """Each holds for its own clients, and those that no agreement names have the default one."""
    first, second = floored("first", 300, "db"), floored("second", 400, "web")
    found = admit([second], [first], VOLUMES[:1], capacity(700 * COST))
    (disk,) = found.backends
    assert (disk.added, disk.promised, disk.unpromised_floors) == (400 * COST, 300 * COST, 50 * COST)
    assert found.answer == "no", "it was yes: of a volume one floor was counted"


def test_of_two_agreements_about_a_volume_the_larger_floor_counts() -> None:
    small, large = floored("small", 100), floored("large", 900)
    for wanted, other in ((small, large), (large, small)):
        (disk,) = admit([wanted], [other], VOLUMES[:1], capacity(800 * COST)).backends
        assert disk.added + disk.promised >= 900 * COST
        assert (disk.answer, disk.unpromised_floors) == ("no", 0.0)


@pytest.mark.parametrize("changed", [{"value_ms": 11.9}, {"percentile": 99}])
def test_nothing_is_known_of_a_stricter_promise(changed: dict[str, float]) -> None:
    found = asked(new(**changed), 5000.0)
    assert found.answer == "unknown"
    assert "stricter" in found.backends[0].reasons[0]


def test_a_capacity_is_of_the_promise_that_it_was_found_for_and_not_of_what_became_of_it() -> None:
    """Edited to 2 ms since, it made 2 ms of another agreement a yes: the capacity was found for 12 ms."""
    wanted = new(value_ms=2)
    found = admit([wanted], [gold(value_ms=2)], VOLUMES, capacity(5000.0), studied=[gold()])
    assert (found.answer, "stricter" in found.backends[0].reasons[0]) == ("unknown", True)
    ended = admit([new()], [], VOLUMES, capacity(5000.0), studied=[gold()])
    assert (ended.answer, ended.backends[0].reasons) == ("yes", []), "what was found goes on to hold"


def test_without_a_capacity_the_reason_of_the_policy_is_given() -> None:
    found = admit([new()], [gold()], VOLUMES, capacity(None, "no limit is known"))
    assert (found.answer, found.backends[0].reasons) == ("unknown", ["gold/latency: no limit is known"])
    assert "sla policy run" in admit([new()], [gold()], VOLUMES, []).backends[0].reasons[0]


def test_a_volume_that_was_never_seen_is_on_no_known_backend() -> None:
    found = asked(new(volumes="vol-9"), 5000.0)
    assert (found.answer, found.backends) == ("unknown", [])
    assert "vol-9" in found.reasons[0]


def test_a_curve_without_end_and_ios_of_unknown_size_are_said() -> None:
    endless = agreement(simple("new", volumes="vol-2").replace("up_to_iops: 500, ", ""))
    assert "at any rate" in asked(endless, 5000.0).backends[0].reasons[0]
    fresh = [VolumeUse("vol-1", "disk", None), VolumeUse("vol-2", "disk", None)]
    found = admit([new()], [gold()], fresh, capacity(5000.0))
    assert (found.answer, len(found.backends[0].reasons)) == ("unknown", 2)
    limited = simple("new", volumes="vol-2").replace("ice: 10}", "ice: 10, max_mean_io_kib: 64}")
    assert admit([agreement(limited)], [], fresh, capacity(1050.0)).backends[0].added == 1000


def test_backends_that_are_not_touched_are_left_out() -> None:
    assert [item.backend for item in asked(new(volumes="other"), 5000.0).backends] == ["ssd"]


def test_a_capacity_says_nothing_about_mean_latency() -> None:
    mean = (
        "  - {name: mean, indicator: {metric: mean_latency}, demand_curve: [{up_to_iops: 9, value_ms: 99}], "
    )
    text = simple("new", volumes="vol-2") + mean + "budgeting: {target: 0.9}}\n"
    (reason,) = asked(agreement(text), 5000.0).backends[0].reasons
    assert reason.startswith("new/mean: capacities are found for percentiles")
