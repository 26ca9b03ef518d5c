"""Caps of single clients: who is slowed on a volume that several clients share, and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pmdaemon.wire.messages.agent import CLIENT_CAPS, OTHER_CLIENT_CAPS
from pmdaemon.wire.messages.client_caps import caps_client
from sla_server.agreements.promise import CurveStep, Priority, VolumeClass
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import RecordDecision, SetCaps
from sla_server.services.control.targets import client_of, named, target_of, volume_of
from sla_server.services.control.throttle import LEAST
from tests.support.worlds import (
    A,
    B,
    Feeder,
    caps_of,
    controller,
    events_of,
    promise,
    rows_of,
    streams,
    volume_class,
)

NAMES = ("erp/host-a", "erp/greedy")
CAN = (CLIENT_CAPS,)


def promised(mode: str = "enforce", **over) -> Controller:
    """Host-a was promised a latency on erp; who else uses erp was promised nothing."""
    gold = promise("erp", clients=("host-a",), **over)
    return controller((gold,), (volume_class("erp", clients=("host-a",)),), mode)


def shared(made: Controller | None = None, features=CAN, *more: tuple[str, tuple[str, ...]]) -> Feeder:
    return Feeder(made or promised(), (A, NAMES), *more, features=features)


def suffer(fed: Feeder, gen: int = 0, greedy: int = 400, seconds: int = 1, ms: float = 30) -> list:
    """Seconds in which host-a is slow beside the greedy client; all decisions."""
    found = []
    for _ in range(seconds):
        found += fed.step((A, {"erp/host-a": (80, ms), "erp/greedy": (greedy, 30)}, gen), held=5)
    return found


def until_caps(fed: Feeder, use: dict[str, tuple[int, float]], gen: int = 0, seconds: int = 8) -> list:
    """Seconds of this use of A until caps are sent; all decisions."""
    found: list = []
    while not caps_in(found) and seconds:
        found, seconds = found + fed.step((A, use, gen), held=5), seconds - 1
    return found


def caps_in(decisions: list) -> list[SetCaps]:
    return [each for each in decisions if isinstance(each, SetCaps)]


def test_targets_are_names_of_volumes_or_of_their_clients():
    assert target_of("v") == "v"
    target = target_of("v:1", "10.0.0.5")
    assert (volume_of(target), client_of(target)) == ("v:1", "10.0.0.5")
    assert (volume_of("v"), client_of("v")) == ("v", "")
    assert named(["v/b", "v/a"]) == "v/a, v/b"
    assert named(f"v{n:02}" for n in range(12)).endswith("v08, v09 and 2 more")


def test_use_of_clients_is_that_of_the_last_cuts():
    fed = shared()
    table, uses = fed.controller.tables[A], fed.controller.inventory.uses
    assert uses.clients(table, "nowhere") == []
    assert uses.of(table, "erp/nobody") is None
    assert uses.of(table, "erp/greedy").cost_per_s == 0.0
    fed.step((A, {"erp/host-a": (80, 1), "erp/greedy": (400, 1)}, 0), held=3)
    fed.step((A, {"erp/greedy": (200, 1)}, 0))
    assert uses.clients(table, "erp") == ["host-a", "greedy"]
    assert uses.costs(table, "erp") == {"host-a": pytest.approx(42.5), "greedy": pytest.approx(318.75)}
    found = {name: uses.of(table, f"erp/{name}") for name in uses.clients(table, "erp")}
    assert found["greedy"].ops_per_s == 300
    assert found["greedy"].last_ops_per_s == 200
    assert found["greedy"].peak_cost_per_s == pytest.approx(425)
    assert found["greedy"].held == 0
    assert (found["host-a"].ops_per_s, found["host-a"].last_ops_per_s) == (40, 0)
    fed.step((A, {"erp/greedy": (200, 1)}, 0), held=3)
    assert uses.of(table, "erp/greedy").held == 3, "summed again with the next cut"


def test_the_greedy_client_is_slowed_and_neither_the_promised_one_nor_its_volume():
    fed = shared()
    found = suffer(fed, seconds=4)
    (sent,) = caps_in(found)
    assert sent.caps == []
    (cap,) = sent.clients
    assert (cap["volume"], cap["client"]) == ("erp", "greedy")
    assert cap["cost_per_s"] < 425
    (row, *_) = rows_of(found)
    assert (row["volume"], row["client"], row["source"]) == ("erp", "greedy", "control")
    (said,) = events_of(found, "throttle-set")
    assert said.subject == "erp"
    assert said.text.startswith("client greedy: ")
    assert "erp/greedy from " in row["text"]


def test_it_is_confirmed_seen_and_slowed_further_by_generation():
    fed = shared()
    (first,) = caps_in(suffer(fed, seconds=4))
    cap = first.clients[0]["cost_per_s"]
    rows = rows_of(suffer(fed, first.gen, greedy=int(cap / 1.0625)))
    assert rows[-1]["state"] == "seen"
    found = suffer(fed, first.gen, greedy=int(cap / 1.0625), seconds=5)
    assert caps_in(found)[0].clients[0]["cost_per_s"] < cap


def test_it_is_released_when_the_promised_client_stops():
    fed = shared()
    (first,) = caps_in(suffer(fed, seconds=4))
    found = []
    for _ in range(20):
        found += fed.step((A, {"erp/greedy": (100, 1)}, first.gen))
    assert caps_in(found)[-1].clients == []
    assert rows_of(found)[-1]["state"] == "released"


def test_a_gateway_of_before_is_sent_no_cap_of_a_client_and_its_volume_is_spared():
    fed = shared(features=())
    found = suffer(fed, seconds=30)
    assert caps_in(found) == []
    assert events_of(found, "unattributed"), "nobody to slow down, as before"


def test_a_volume_that_one_old_gateway_carries_is_slowed_as_a_whole_for_others():
    made = controller(
        (promise("gold"),), (volume_class("gold"), low("erp", "host-a", priority=Priority.BEST_EFFORT))
    )
    fed = Feeder(made, (A, ("gold", *NAMES)), features=CAN)
    fed.controller.set_features(B, ())
    fed.controller.gateway_up(B, "B", [{"volume": "erp", "backend": "disk"}], fed.now_ns)
    found = until_caps(fed, {"gold": (80, 30), "erp/greedy": (400, 30)})
    assert {cap["volume"] for cap in caps_of(found, A).caps} == {"erp"}
    assert all(each.clients == [] for each in caps_in(found))


def low(volume: str, *clients: str, priority: Priority = Priority.BRONZE):
    return volume_class(volume, priority, clients=clients or ("*",))


def test_clients_of_a_neighbour_are_slowed_one_by_one_by_their_own_terms():
    silver = low("erp", "host-a", priority=Priority.SILVER)
    made = controller((promise("gold"),), (volume_class("gold"), silver))
    fed = Feeder(made, (A, ("gold", *NAMES)), features=CAN)
    found = until_caps(fed, {"gold": (80, 30), "erp/host-a": (200, 30), "erp/greedy": (400, 30)})
    assert {cap["client"] for cap in caps_of(found, A).clients} == {"greedy"}, "silver is spared at first"
    assert caps_of(found, A).caps == []
    inventory = fed.controller.inventory
    assert inventory.terms_of("erp/host-a").priority is Priority.SILVER
    assert inventory.terms_of("erp/greedy").priority is Priority.BEST_EFFORT
    assert inventory.terms_of("erp").priority is Priority.SILVER


def test_clients_that_no_agreement_names_are_slowed_with_their_volume():
    made = controller((promise("gold"),), (volume_class("gold"), low("erp", priority=Priority.BEST_EFFORT)))
    fed = Feeder(made, (A, ("gold", *NAMES)), features=CAN)
    found = until_caps(fed, {"gold": (80, 30), "erp/greedy": (400, 30)})
    sent = caps_of(found, A)
    assert ([cap["volume"] for cap in sent.caps], sent.clients) == (["erp"], [])


def test_a_volume_that_becomes_divided_hands_its_cap_to_the_client_that_may_be_slowed_and_takes_it_back():
    made = controller((promise("gold"),), (volume_class("gold"), low("erp", priority=Priority.BEST_EFFORT)))
    fed = Feeder(made, (A, ("gold", *NAMES)), features=CAN)
    use = {"gold": (80, 30), "erp/host-a": (20, 30), "erp/greedy": (400, 30)}
    before = caps_of(until_caps(fed, use), A)
    made.set_agreements((promise("gold"),), (volume_class("gold"), low("erp", "host-a")))
    found = fed.step((A, use, before.gen), held=5)
    first = caps_of(found, A)
    assert (first.caps, [cap["client"] for cap in first.clients]) == ([], ["greedy"]), "at once"
    assert first.clients[0]["cost_per_s"] == pytest.approx(
        before.caps[0]["cost_per_s"] - 20 * 1.0625, rel=0.01
    )
    states = {(row["client"], row["state"]) for row in rows_of(found)}
    assert states == {("", "released"), ("greedy", "requested")}
    made.set_agreements((promise("gold"),), (volume_class("gold"), low("erp", priority=Priority.BEST_EFFORT)))
    second = caps_of(fed.step((A, use, first.gen), held=5), A)
    assert ([cap["volume"] for cap in second.caps], second.clients) == (["erp"], [])
    assert second.caps[0]["cost_per_s"] == pytest.approx(before.caps[0]["cost_per_s"], rel=0.01)


def test_what_may_not_be_slowed_in_the_other_form_is_let_go():
    """Of erp as a whole host-a is a part, whose promise is being kept."""
    fed = shared()
    first = caps_in(suffer(fed, seconds=4))[0]
    fed.controller.set_features(A, ())
    found = suffer(fed, first.gen)
    assert (caps_of(found, A).caps, caps_of(found, A).clients) == ([], [])
    assert events_of(found, "throttle-released")[-1].details["ended"] == "withdrawn"


def renamed(fed: Feeder, every: int, seconds: int = 120) -> tuple[int, list[SetCaps]]:
    """Bad seconds beside a client that has another name each so many seconds; and the caps sent."""
    entries, bad, gen, sent, number = list[dict](), 0, 0, list[SetCaps](), 0
    for second in range(seconds):
        number += second % every == 0
        fed.controller.add_streams(A, streams(A, f"erp/job-{number}"))
        held = [each["cost_per_s"] for each in entries if caps_client(each, f"job-{number}")]
        use = int(min(400, min(held, default=1e9) / 1.0625))
        slow = use + 80 > 250
        bad += slow
        ios = {"erp/host-a": (80, 30 if slow else 3), f"erp/job-{number}": (use, 30)}
        for decision in fed.step((A, ios, gen), held=5 if use < 400 else 0):
            if isinstance(decision, SetCaps):
                sent.append(decision)
                gen, entries = decision.gen, decision.clients
    return bad, sent


def test_a_client_that_comes_under_a_new_name_shares_what_its_volume_has_and_the_old_one_leaves():
    one, _ = renamed(shared(), 1000)
    bad, sent = renamed(shared(), 20)
    assert bad <= one + 2 * 6, "the seconds until its first cut is decided on"
    assert max(len(each.clients) for each in sent) == 2
    (last,) = sent[-1].clients
    assert last["client"] == "job-6"


TOGETHER = (CLIENT_CAPS, OTHER_CLIENT_CAPS)


def test_clients_that_come_under_new_names_again_and_again_share_one_rate():
    fed = shared(None, TOGETHER)
    bad, sent = renamed(fed, 5, 62)
    forms = [[(cap["client"], cap.get("except")) for cap in each.clients] for each in sent]
    first = forms.index([("*", ["host-a"])])
    assert all(client.startswith("job-") for each in forms[:first] for client, _ in each)
    assert all(each == forms[first] for each in forms[first:])
    before, together = sent[first - 1].clients, sent[first].clients
    assert together[0]["cost_per_s"] == pytest.approx(sum(cap["cost_per_s"] for cap in before), rel=0.01)
    one, _ = renamed(shared(), 1000, 60)
    assert bad <= one + 2 * 2, "of the two names before it; 8 more without"
    throttles = fed.controller.policy.throttles()
    assert [(t.client, t.state) for t in throttles] == [("*", "seen")]


FOREIGN = volume_class("*", Priority.BRONZE, clients=("job-*",))


def beside(foreign: VolumeClass) -> Controller:
    """Another agreement names clients of all volumes by a glob; host-a's promise is urgent."""
    own = volume_class("erp", clients=("host-a",))
    made = controller((promise("erp", clients=("host-a",)),), (own, foreign))
    made.set_budget(("erp", "latency"), 2.0, 0.0)
    return made


@pytest.mark.parametrize("foreign", [FOREIGN, replace(FOREIGN, priority=Priority.BEST_EFFORT)])
def test_a_glob_of_another_agreement_frees_no_new_names(foreign: VolumeClass):
    fed = shared(beside(foreign), TOGETHER)
    bad, sent = renamed(fed, 5, 62)
    forms = [[(cap["client"], cap.get("except")) for cap in each.clients] for each in sent]
    assert [("job-*", [])] in forms
    first = forms.index([("job-*", [])])
    assert all(each == forms[first] for each in forms[first:])
    one, _ = renamed(shared(beside(foreign)), 1000, 60)
    assert bad <= one + 2 * 2, "of the two names before it; 8 more without"
    (throttle,) = fed.controller.policy.throttles()
    assert (throttle.client, throttle.state) == ("job-*", "seen")
    terms = fed.controller.inventory.terms_of("erp/job-*")
    assert (terms.priority, terms.floor_iops) == (foreign.priority, pytest.approx(50.0))


def test_a_client_is_of_the_first_glob_that_it_matches_and_a_listed_one_of_none():
    gold = volume_class("erp", clients=("db-1*", "db-7"))
    fed = shared(controller((promise("erp", clients=("db-1*",)),), (gold, low("erp", "db-*", "web"))))
    find = fed.controller.inventory
    names = ("db-11", "db-2", "db-7", "web", "other", "db-*")
    assert [find.glob_of(f"erp/{name}") for name in names] == ["erp/db-1*", "erp/db-*", "", "", "erp/*", ""]
    assert find.except_of("erp/db-*") == ("db-7", "db-1*")
    assert find.except_of("erp/db-1*") == ()
    assert set(find.except_of("erp/*")) == {"db-7", "web", "db-1*", "db-*"}


def test_clients_of_a_glob_and_of_none_are_taken_together_side_by_side():
    names = ("erp/host-a", "erp/job-1", "erp/job-2", "erp/x-1", "erp/x-2")
    fed = shared(beside(FOREIGN), TOGETHER, (B, names))
    fed.controller.set_features(B, TOGETHER)
    inventory = fed.controller.inventory
    for target in ("erp/*", "erp/job-*"):
        inventory.take_together(target, True)
    use = {"erp/job-1": (100, 1), "erp/job-2": (50, 1), "erp/x-1": (30, 1), "erp/x-2": (20, 1)}
    for _ in range(4):
        fed.step((A, {"erp/greedy": (10, 1)}, 0), (B, use, 0))
    assert inventory.targets("erp") == ["erp/*", "erp/host-a", "erp/job-*"]
    found = inventory.neighbours("disk", (), {})
    assert found["erp/job-*"].cost_per_s == pytest.approx(150 * 1.0625)
    assert found["erp/*"].cost_per_s == pytest.approx(60 * 1.0625)
    fed.controller.set_agreements(
        (promise("erp", clients=("host-a",)),), (volume_class("erp", clients=("host-a",)),)
    )
    assert inventory.targets("erp") == ["erp/*", "erp/host-a"], "no agreement has that glob any more"
    assert not inventory.can_be_managed("erp/job-*")


def test_why_they_share_one_rate_is_said():
    fed = shared(None, TOGETHER)
    renamed(fed, 5, 13)
    (throttle,) = fed.controller.policy.throttles()
    assert throttle.text.startswith(
        "erp: clients came under new names 2 times within 60 s. All that no agreement"
    )


def test_where_an_agent_cannot_cap_them_together_they_are_capped_one_by_one_again():
    fed = shared(None, TOGETHER)
    _, sent = renamed(fed, 5, 40)
    assert [cap["client"] for cap in sent[-1].clients] == ["*"]
    fed.controller.set_features(A, CAN)
    found = fed.step((A, {"erp/host-a": (80, 3), "erp/job-8": (200, 30)}, sent[-1].gen), held=5)
    (last,) = caps_in(found)
    assert [cap["client"] for cap in last.clients] == ["job-8"]
    assert last.clients[0]["cost_per_s"] == pytest.approx(sent[-1].clients[0]["cost_per_s"], rel=0.01)


def test_after_a_restart_they_still_share_it_and_other_agreements_change_whom_it_is_for():
    before = shared(None, TOGETHER)
    renamed(before, 5, 40)
    (throttle,) = before.controller.policy.throttles()
    after = promised()
    after.restore([throttle.row()])
    after.set_mode("enforce")
    after.set_features(A, TOGETHER)
    after.gateway_up(A, "A", [{"volume": "erp", "backend": "disk"}], before.now_ns)
    after.add_streams(A, streams(A, "erp/host-a", "erp/job-8"))
    before.controller = after
    use = {"erp/host-a": (80, 3), "erp/job-8": (200, 3)}
    assert caps_in(before.step((A, use, throttle.gen), held=5)) == [], "nothing is sent"
    assert [t.target for t in after.policy.throttles()] == ["erp/*"]
    gold = promise("erp", clients=("host-*",))
    after.set_agreements((gold,), (volume_class("erp", clients=("host-*",)),))
    (sent,) = caps_in(before.step((A, use, throttle.gen), held=5))
    assert [(cap["client"], cap["except"]) for cap in sent.clients] == [("*", ["host-*"])]


def test_their_use_and_floor_are_those_of_all_that_are_not_named():
    fed = shared(None, TOGETHER, (B, ("erp/host-a", "erp/other")))
    fed.controller.set_features(B, TOGETHER)
    inventory = fed.controller.inventory
    inventory.take_together("erp/*", True)
    use = {"erp/host-a": (80, 1), "erp/greedy": (100, 1)}
    for _ in range(4):
        fed.step((A, use, 0), (B, {"erp/other": (60, 1)}, 0))
    assert inventory.targets("erp") == ["erp/*", "erp/host-a"]
    found = inventory.neighbours("disk", (), {})
    assert found["erp/*"].cost_per_s == pytest.approx(160 * 1.0625)
    one_by_one = sum(inventory.terms_of(f"erp/{name}").floor_iops for name in ("greedy", "other"))
    assert inventory.terms_of("erp/*").floor_iops == pytest.approx(50.0)
    assert one_by_one <= 2 * 50.0
    assert inventory.can_be_managed("erp/*")
    assert not inventory.can_be_managed("erp/greedy")
    inventory.take_together("erp/*", False)
    assert inventory.targets("erp") == ["erp/greedy", "erp/host-a", "erp/other"]


def test_observe_says_which_client_it_would_slow():
    fed = shared(promised("observe"))
    found = suffer(fed, seconds=5)
    (row,) = rows_of(found)
    assert (row["state"], row["volume"], row["client"]) == ("observed", "erp", "greedy")
    decided = [d.row for d in found if isinstance(d, RecordDecision) and d.row["kind"] == "observed"]
    assert (decided[0]["volume"], decided[0]["figures"]["client"]) == ("erp", "greedy")


def test_after_a_restart_the_cap_of_a_client_is_taken_over_before_the_gateway_says_what_it_can():
    before = shared()
    found = suffer(before, seconds=4)
    (sent,) = caps_in(found)
    rows = {row["throttle_id"]: row for row in rows_of(found)}
    after = promised()
    after.restore([{**row, "released_us": None} for row in rows.values()])
    after.set_mode("enforce")
    after.gateway_up(A, "A", [{"volume": "erp", "backend": "disk"}], before.now_ns)
    before.controller = after
    found = suffer(before, sent.gen)
    assert caps_in(found) == [], "nothing is sent"
    (throttle,) = after.policy.throttles()
    assert (throttle.target, throttle.state) == ("erp/greedy", "confirmed")
    after.set_features(A, CAN)
    after.add_streams(A, streams(A, *NAMES))
    assert caps_in(suffer(before, sent.gen)) == []


# By hand.


def test_a_client_throttled_by_hand_holds_beside_its_volume():
    fed = shared(controller(()))
    fed.step((A, dict.fromkeys(NAMES, (100, 1)), 0))
    fed.controller.manual_set("t1", "erp", ops_per_s=500)
    fed.controller.manual_set("t2", "erp", ops_per_s=50, client="greedy")
    sent = caps_of(fed.step((A, dict.fromkeys(NAMES, (100, 1)), 0)), A)
    assert [(cap["volume"], cap["ops_per_s"]) for cap in sent.caps] == [("erp", 500)]
    assert [(cap["client"], cap["ops_per_s"]) for cap in sent.clients] == [("greedy", 50)]
    over = fed.step((A, {"erp/host-a": (100, 1), "erp/greedy": (100, 1)}, sent.gen))
    states = {row["throttle_id"]: row["state"] for row in rows_of(over)}
    assert states == {"t1": "seen", "t2": "confirmed"}
    within = fed.step((A, {"erp/host-a": (400, 1), "erp/greedy": (50, 1)}, sent.gen))
    assert [(row["throttle_id"], row["state"]) for row in rows_of(within)] == [("t2", "seen")]
    assert fed.controller.manual_release("erp", client="nobody") == []
    assert fed.controller.manual_release("erp", client="greedy") == ["t2"]
    after = caps_of(fed.step((A, {}, sent.gen)), A)
    assert (len(after.caps), after.clients) == (1, [])
    fed.controller.manual_set("t3", "erp", ops_per_s=50, client="greedy")
    assert fed.controller.manual_release("erp") == ["t1", "t3"], "a volume's are those of its clients, too"


def test_a_clients_cap_goes_to_the_gateways_it_uses():
    fed = shared(controller(()), CAN, (B, ("erp/other",)))
    fed.controller.manual_set("t1", "erp", ops_per_s=50, client="greedy")
    found = fed.step((A, {"erp/greedy": (100, 1)}, 0), (B, {"erp/other": (100, 1)}, 0))
    (sent,) = caps_in(found)
    assert sent.gateway_id == A
    fed.controller.add_streams(B, streams(B, "erp/greedy"))
    found = fed.step((A, {"erp/greedy": (50, 1)}, sent.gen), (B, {"erp/greedy": (50, 1)}, 0))
    rates = {each.gateway_id: each.clients[0]["ops_per_s"] for each in caps_in(found)}
    assert rates.keys() >= {B}
    assert all(LEAST.ops_per_s <= rate <= 50 for rate in rates.values())


def test_why_a_client_cannot_be_capped():
    fed = shared(controller(()))
    made = fed.controller
    assert made.why_no_client_cap("erp", "greedy") is None
    problem, fix = made.why_no_client_cap("erp", "nobody") or ("", "")
    assert problem == "volume 'erp' has no client 'nobody'; it has greedy, host-a"
    assert fix
    made.set_features(A, ())
    problem, fix = made.why_no_client_cap("erp", "greedy") or ("", "")
    assert problem == f"the agent of {A[:4]} caps whole volumes only, no single clients"
    assert "Upgrade" in fix


def test_what_a_throttle_by_hand_breaks_is_what_covers_the_client():
    made = shared().controller
    assert made.manual_effect("erp", ops_per_s=100).broken
    assert made.manual_effect("erp", ops_per_s=100, client="host-a").broken
    assert not made.manual_effect("erp", ops_per_s=100, client="greedy").broken


def test_a_client_that_is_gone_takes_no_part_of_its_volumes_curve():
    names = ("erp/host-a", *(f"erp/other-{n}" for n in range(9)))
    made = promised(curve=(CurveStep(300, 12_000),))
    made.set_agreements(
        (promise("erp", clients=("other-*",), curve=(CurveStep(300, 12_000),)),),
        (volume_class("erp", clients=("other-*",)),),
    )
    fed = Feeder(made, (A, names), features=CAN)
    for _ in range(4):
        fed.step((A, {"erp/host-a": (10, 1), "erp/other-0": (400, 1)}, 0))
    found = made.inventory.neighbours("disk", made.scopes.on_backend("disk"), {})
    mean_cost = made.inventory.mean_cost_of("erp/other-0")
    assert found["erp/other-0"].curve_end == pytest.approx(300 * mean_cost)
