"""Throttles by what they are about: what a cut and a tick look at."""

from __future__ import annotations

from pmdaemon.wire.rates import Rates
from sla_server.services.control.throttle import Throttle
from sla_server.services.control.throttle_index import ThrottleIndex
from tests.support.worlds import A, B, Feeder, controller

USE = (100, 5.0)


def throttle(volume: str, client: str = "") -> Throttle:
    return Throttle("t", volume, "disk", "control", Rates(cost_per_s=9.0), "manual", "", client=client)


def test_throttles_are_found_by_target_and_by_volume_until_they_end() -> None:
    index, whole, part = ThrottleIndex(), throttle("v"), throttle("v", "c")
    for each in (whole, part, throttle("w")):
        index.add(each)
    assert list(index.about(["v/c", "none"])) == [part]
    assert list(index.of_volumes(["v"])) == [whole, part]
    assert index.targets() == ["v", "v/c", "w"]
    index.remove(whole)
    assert list(index.of_volumes(["v"])) == [part]
    assert index.looked_at == 4


def test_what_is_proven_is_not_looked_after() -> None:
    index, one = ThrottleIndex(), throttle("v")
    index.add(one)
    index.refresh(one)
    assert index.unproven() == []
    one.waiting[A] = 5
    index.refresh(one)
    assert index.unproven() == [one]
    del one.waiting[A]
    assert index.unproven() == []
    one.over_cuts[A] = 1
    index.refresh(one)
    index.remove(one)
    assert index.unproven() == []


def test_a_cut_looks_at_the_caps_of_its_gateway_alone() -> None:
    """Two for each of the cuts; not those of all volumes."""
    many = tuple(f"w{n:03}" for n in range(200))
    fed = Feeder(controller(()), (A, ("v1", "v2")), (B, many))
    fed.controller.set_policy_caps(1, dict.fromkeys(("v1", "v2", *many), 900.0))
    policy = fed.controller.policy
    gen, use = 0, {"v1": USE, "v2": USE}
    for _ in range(3):
        fed.step((A, use, gen), (B, dict.fromkeys(many, USE), gen))
        gen = policy.gen
    before = policy.index.looked_at
    fed.step((A, use, gen))
    assert policy.index.looked_at - before == 2


def test_only_what_changed_is_worked_out() -> None:
    index, asked = ThrottleIndex(), list[str]()

    def effective(target: str) -> Rates:
        asked.append(target)
        return Rates(cost_per_s=9.0)

    one, two = throttle("v"), throttle("w")
    index.add(one)
    index.add(two)
    assert index.totals(effective, ()).keys() == {"v", "w"}
    index.totals(effective, ())
    assert asked == ["v", "w"]
    index.changed(["w"])
    index.totals(effective, [one])
    assert asked == ["v", "w", "w", "v"]
    index.remove(one)
    assert index.totals(effective, ()).keys() == {"w"}
    index.changed()
    index.totals(effective, ())
    assert asked[4:] == ["w"]
