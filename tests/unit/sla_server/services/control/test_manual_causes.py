"""A throttle set by hand on a volume of a promise in trouble is named at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sla_server.agreements.promise import CurveStep, Promise
from tests.support.worlds import A, B, Feeder, controller, events_of, promise, user, volume_class

BACKOFF_S = 60


def world(**settings: Any) -> Feeder:
    made = controller((promise(),), (volume_class(),), **settings)
    return Feeder(made, (A, ("gold",)), (B, ("greedy",)), features=("client-caps", "group-caps"))


def seconds(fed: Feeder, count: int, ms: float, held: int = 3) -> list[Any]:
    """The decisions of that many seconds in which gold has this latency."""
    found: list[Any] = []
    for _ in range(count):
        gens = {name: fed.controller.policy.gateways[name].gen for name in (A, B)}
        busy = (A, {"gold": (40, ms)}, gens[A]), (B, {"greedy": (400, 5.0)}, gens[B])
        found += fed.step(*busy, held=held)
    return found


def named(decisions: list[Any]) -> list[str]:
    return [event.text for event in events_of(decisions, "unattributed") if "by hand" in event.text]


def test_it_is_named_as_soon_as_the_promise_is_at_risk() -> None:
    fed = world()
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "gold", ops_per_s=50, who="ann", reason="nightly copy")
    found, passed = list[Any](), 0
    while not named(found):
        found += seconds(fed, 1, 40.0)
        passed += 1
        assert passed < 8, "not only when the loop has found out that neighbours are not the cause"
    (text,) = named(found)
    assert text.startswith("gold/latency at ")
    assert "gold is throttled by hand to 50 IOPS by ann (nightly copy)" in text
    assert text.endswith("It ends with: sla throttle release gold")
    (event,) = [each for each in events_of(found, "unattributed") if each.text == text]
    assert event.details == {"backend": "disk", "throttle_id": "t1", "promise": "gold/latency"}


def test_it_is_named_again_only_after_the_back_off() -> None:
    fed = world()
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "gold", ops_per_s=50)
    assert len(named(seconds(fed, BACKOFF_S - 5, 40.0))) == 1
    assert len(named(seconds(fed, 2 * BACKOFF_S - 10, 40.0))) == 1, (
        "the second; the third waits twice as long"
    )


def test_no_loop_says_meanwhile_that_nobody_is_the_cause() -> None:
    alone = Feeder(controller((promise(),), (volume_class(),)), (A, ("gold",)))

    def late(count: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(count):
            gen = alone.controller.policy.gateways[A].gen
            found += alone.step((A, {"gold": (40, 40.0)}, gen), held=3)
        return found

    (text,) = [event.text for event in events_of(late(40), "unattributed")]
    assert "no other volume uses this backend" in text
    alone.controller.manual_set("t1", "gold", ops_per_s=50)
    texts = [event.text for event in events_of(late(3 * BACKOFF_S), "unattributed")]
    assert texts
    assert all("by hand" in text for text in texts)
    alone.controller.manual_release("gold")
    (text, *_) = [event.text for event in events_of(late(20 * BACKOFF_S), "unattributed")]
    assert "no other volume uses this backend" in text, "it is said again once no throttle explains it"


def test_one_that_holds_nothing_back_is_not_named() -> None:
    fed = world()
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "gold", ops_per_s=5000)
    assert named(seconds(fed, 20, 40.0, held=0)) == []


def test_one_of_a_neighbour_is_not_named() -> None:
    fed = world()
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "greedy", ops_per_s=50)
    assert named(seconds(fed, 20, 40.0)) == []


def test_a_promise_that_is_kept_is_not_in_trouble() -> None:
    fed = world()
    fed.controller.manual_set("t1", "gold", ops_per_s=50)
    assert named(seconds(fed, 20, 2.0)) == []


def test_of_a_group_and_of_a_client_the_way_to_end_it_is_said() -> None:
    fed = world()
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "", ops_per_s=50, group="tier", weights={"gold": 1.0, "greedy": 1.0})
    (text,) = named(seconds(fed, 10, 40.0))
    assert "group tier is throttled by hand to 50 IOPS" in text
    assert text.endswith("sla throttle release --group tier")
    fed = world()
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "gold", ops_per_s=50, client=user("gold")[1])
    (text,) = named(seconds(fed, 10, 40.0))
    assert text.endswith("sla throttle release gold --client client")


def test_in_mode_observe_it_is_named_as_well() -> None:
    fed = world(mode="observe")
    seconds(fed, 4, 2.0)
    fed.controller.manual_set("t1", "gold", ops_per_s=50)
    assert len(named(seconds(fed, 10, 40.0))) == 1


def bounded(volume: str) -> Promise:
    """Up to 500 IOPS."""
    return replace(promise(volume), curve=(CurveStep(500.0, 12_000),))


def test_what_is_promised_while_a_throttle_stands_below_it_is_said() -> None:
    """By hand below a promise asks for --force; a promise above what is set by hand was taken in silence."""
    fed = world()
    seconds(fed, 2, 2.0)
    made, gold = fed.controller, bounded("gold")
    assert not list(made.manual_causes.below([gold]))
    made.manual_set("t1", "gold", ops_per_s=50, who="ann", reason="nightly copy")
    (text,) = made.manual_causes.below([gold])
    assert text.startswith("gold is throttled by hand to 50 IOPS by ann (nightly copy), which is below what ")
    assert "promised for it: gold/latency (p95 within 12.0 ms up to 500 IOPS)" in text
    assert text.endswith("It ends with: sla throttle release gold")
    assert not list(made.manual_causes.below([bounded("greedy")])), "another volume"
    assert not list(made.manual_causes.below([]))


def test_of_a_group_each_volume_has_its_share() -> None:
    fed = world()
    seconds(fed, 2, 2.0)
    made, weights = fed.controller, {"gold": 1.0, "greedy": 3.0}
    made.manual_set("t1", "", ops_per_s=2_000, group="night", weights=weights)
    assert not list(made.manual_causes.below([bounded("gold")]))
    made.manual_set("t2", "", ops_per_s=1_900, group="night", weights=weights)
    (text,) = made.manual_causes.below([bounded("gold")])
    assert text.endswith("It ends with: sla throttle release --group night")
