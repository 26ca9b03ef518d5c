"""Caps that agreements have for themselves: of a volume, or of the clients that they name."""

from __future__ import annotations

from typing import Any

from pmdaemon.wire.messages.agent import BURST_CAPS, CLIENT_CAPS
from pmdaemon.wire.messages.plane_sets import PlaneCaps
from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import Priority, VolumeClass
from sla_server.services.control.agreed_caps import rates_of
from sla_server.services.control.targets import client_of, volume_of
from tests.support.worlds import A, B, Feeder, caps_of, controller, events_of, exports, rows_of, streams

CAN = (CLIENT_CAPS,)
BATCH = VolumeClass("batch-bronze", Priority.BRONZE, ("erp",), cap_iops=60.0, clients=("batch*",))
GOLD = VolumeClass("erp-gold", Priority.GOLD, ("erp",), clients=("db",))
USE = {"erp/db": (40, 5.0), "erp/batch-1": (40, 5.0)}


def world(*classes: VolumeClass, features: tuple[str, ...] = CAN) -> Feeder:
    return Feeder(controller((), classes or (BATCH, GOLD)), (A, tuple(USE)), features=features)


def entries(decisions: list[Any]) -> list[tuple[str, str, float]]:
    sent = caps_of(decisions, A)
    return [(e["volume"], e.get("client", ""), e["ops_per_s"]) for e in (*sent.caps, *sent.clients)]


def test_a_cap_of_named_clients_is_of_those_and_of_no_other_agreements_client() -> None:
    fed = world()
    decided = fed.step((A, USE, 0))
    assert entries(decided) == [("erp", "batch-1", 60.0)]
    (row,) = rows_of(decided)
    assert (row["client"], row["text"], row["reason"]) == (
        "batch-1",
        "cap of agreement batch-bronze",
        "agreed-cap",
    )
    fed.controller.add_streams(A, streams(A, "erp/batch-2"))
    assert [e[1] for e in entries(fed.step((A, USE, 0)))] == ["batch-1", "batch-2"]
    fed.controller.set_agreements((), (GOLD,))
    assert entries(fed.step((A, USE, 0))) == []


def test_an_agreement_for_all_clients_caps_the_volume_beside_it() -> None:
    whole = VolumeClass("erp-silver", Priority.SILVER, ("erp",), cap_iops=900.0)
    decided = world(BATCH, GOLD, whole).step((A, USE, 0))
    assert entries(decided) == [("erp", "", 900.0), ("erp", "batch-1", 60.0)]
    assert {row["text"] for row in rows_of(decided)} == {
        "cap of agreement erp-silver",
        "cap of agreement batch-bronze",
    }


def test_without_client_caps_it_is_not_applied_and_said_once() -> None:
    fed = world(features=())
    decided = fed.step((A, USE, 0))
    assert rows_of(decided) == []
    (event,) = events_of(decided, "throttle-not-effective")
    assert (event.element, event.subject) == ("sla", "batch-bronze")
    assert "needs agents with client-caps" in event.text
    assert events_of(fed.step((A, USE, 0))) == []
    fed.controller.set_features(A, CAN)
    fed.controller.gateway_up(A, "A", exports("erp"), 10**9)
    assert entries(fed.step((A, USE, 0))) == [("erp", "batch-1", 60.0)], "it was upgraded"


def test_a_gateway_that_cannot_takes_the_cap_away_and_gives_it_back_when_it_is_lost() -> None:
    fed = world()
    fed.step((A, USE, 0))
    fed.controller.set_features(B, ())
    fed.controller.gateway_up(B, "B", exports("erp"), 10**9)
    decided = fed.step((A, USE, 0))
    assert entries(decided) == []
    assert "the agent of B caps whole volumes" in events_of(decided, "throttle-not-effective")[0].text
    fed.controller.gateway_lost(B, "gone", 2 * 10**9)
    assert entries(fed.step((A, USE, 0))) == [("erp", "batch-1", 60.0)]


def test_after_a_restart_it_stays_and_that_of_the_whole_volume_is_withdrawn() -> None:
    (row,) = rows_of(world().step((A, USE, 0)))
    whole = {**row, "throttle_id": "t-2", "client": "", "text": "cap of the volume's own agreement"}
    made = controller((), ())
    made.restore([{**row, "state": "seen"}, {**whole, "state": "seen"}])
    made.set_agreements((), (BATCH, GOLD))
    decided = made.tick(10**9, row["requested_us"] + 10**6)
    assert [r["throttle_id"] for r in rows_of(decided) if r["released_us"]] == ["t-2"]
    assert list(made.policy.layers["agreed"]) == ["erp/batch-1"]


def test_an_agreement_that_is_only_observed_has_no_cap_in_force() -> None:
    fed = world()
    assert len(entries(fed.step((A, USE, 0)))) == 1
    fed.controller.set_agreement_modes({"batch-bronze": "observe"})
    assert entries(fed.step((A, USE, 0))) == []
    fed.controller.set_agreement_modes({"batch-bronze": "enforce"})
    fed.controller.set_mode("observe")
    assert entries(fed.step((A, USE, 0))) == [("erp", "batch-1", 60.0)]


def test_an_agreements_mode_holds_for_its_own_cap() -> None:
    fed = world()
    made = fed.controller
    made.set_mode("observe")
    assert entries_now(fed) == []
    made.set_agreement_modes({"batch-bronze": "enforce"})
    assert entries_now(fed) == [("erp", "batch-1", 60.0)]
    made.set_agreement_modes({})
    assert entries_now(fed) == []
    made.set_mode("enforce")
    made.set_agreement_modes({"batch-bronze": "observe"})
    assert entries_now(fed) == []
    made.set_backend_modes({"disk": "enforce"})
    assert entries_now(fed) == [], "an agreement's mode comes before its backend's"


def test_of_several_agreements_the_lowest_cap_that_is_enforced_holds() -> None:
    """One that is only observed hides no other's cap, whichever of them is lower."""
    low = VolumeClass("erp-low", Priority.BRONZE, ("erp",), cap_iops=500.0)
    high = VolumeClass("erp-high", Priority.SILVER, ("erp",), cap_iops=900.0)
    jobs = VolumeClass("jobs", Priority.BRONZE, ("erp",), cap_iops=80.0, clients=("batch-*",))
    fed = world(BATCH, GOLD, low, high, jobs)
    made = fed.controller
    assert entries_now(fed) == [("erp", "", 500.0), ("erp", "batch-1", 60.0)]
    made.set_agreement_modes({"erp-low": "observe", "batch-bronze": "observe"})
    assert entries_now(fed) == [("erp", "", 900.0), ("erp", "batch-1", 80.0)]
    texts = {t.text for t in made.policy.throttles()}
    assert texts == {"cap of agreement erp-high", "cap of agreement jobs"}
    made.set_mode("observe")
    assert entries_now(fed) == []
    made.set_agreement_modes({"erp-high": "enforce"})
    assert entries_now(fed) == [("erp", "", 900.0)]
    made.set_agreement_modes({})
    made.set_backend_modes({"disk": "enforce"})
    assert entries_now(fed) == [("erp", "", 500.0), ("erp", "batch-1", 60.0)]


def entries_now(fed: Feeder) -> list[tuple[str, str, float]]:
    """What gateway A holds after another second."""
    fed.step((A, USE, fed.controller.policy.gateways[A].gen))
    issued = fed.controller.policy.gateways[A].issued
    return [(volume_of(t), client_of(t), rates.ops_per_s or 0.0) for t, rates in sorted(issued.items())]


BURSTS = VolumeClass("erp-gold", Priority.GOLD, ("erp",), cap_iops=100.0, burst_iops=300.0, burst_s=5.0)


def test_a_burst_is_sent_with_its_peak_and_what_accumulates_for_it() -> None:
    fed = world(BURSTS, features=(CLIENT_CAPS, BURST_CAPS))
    (entry,) = caps_of(fed.step((A, USE, 0)), A).caps
    assert (entry["ops_per_s"], entry["peak_ops_per_s"], entry["burst_s"]) == (100.0, 300.0, 10.0)


def test_an_agent_that_cannot_hold_a_burst_to_its_peak_is_sent_none() -> None:
    (entry,) = caps_of(world(BURSTS).step((A, USE, 0)), A).caps
    assert entry["ops_per_s"] == 100.0
    assert not entry.keys() & {"peak_ops_per_s", "burst_s"}


def test_a_cap_of_bursts_that_are_no_faster_is_a_plain_one() -> None:
    level = VolumeClass("a", Priority.GOLD, ("erp",), cap_iops=100.0, burst_iops=100.0, burst_s=5.0)
    assert rates_of(level) == Rates(ops_per_s=100.0)


def test_the_longest_burst_of_the_lowest_cap_is_one_that_a_plane_takes() -> None:
    """It refuses a set with one rate that cannot be, and all caps of the gateway with it."""
    widest = VolumeClass("a", Priority.GOLD, ("erp",), cap_iops=1e-9, burst_iops=1e9, burst_s=3600.0)
    sent = caps_of(world(widest, features=(CLIENT_CAPS, BURST_CAPS)).step((A, USE, 0)), A)
    taken = PlaneCaps.parse({"gen": 1, "caps": [*sent.caps]})
    assert taken.volumes["erp"].peak_ops_per_s == 1e9
