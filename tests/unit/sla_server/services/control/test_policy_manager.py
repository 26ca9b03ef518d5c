"""The policy manager through the controller's door: what is issued, and why."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.decisions import RecordDecision, SetCaps
from sla_server.services.control.simulation import UNIX_0_US
from sla_server.services.control.throttle import MAX_GEN
from tests.support.worlds import (
    A,
    B,
    Feeder,
    caps_of,
    controller,
    cut,
    events_of,
    exports,
    rows_of,
    volume_class,
)


def feeder(mode="enforce", classes=(), volumes=("v",), **settings) -> Feeder:
    return Feeder(controller((), classes, mode, **settings), (A, volumes))


def busy(fed: Feeder, gen: int = 0, iops: int = 100, volume: str = "v"):
    return fed.step((A, {volume: (iops, 1)}, gen))


def test_a_manual_throttle_is_issued_recorded_and_told_in_both_modes():
    for mode in ("observe", "enforce"):
        made = feeder(mode)
        busy(made)
        made.controller.manual_set("t1", "v", ops_per_s=200, who="ann", reason="test")
        found = busy(made)
        caps = caps_of(found, A)
        assert caps.caps == [{"volume": "v", "ops_per_s": 200, "bytes_per_s": None, "cost_per_s": None}]
        assert caps.lease_us == 30_000_000
        (row,) = rows_of(found)
        assert (row["throttle_id"], row["state"], row["gen"], row["who"]) == (
            "t1",
            "requested",
            caps.gen,
            "ann",
        )
        assert row["requested_us"] == made.unix_us
        (event,) = events_of(found)
        assert (event.kind, event.text) == ("throttle-set", "throttled by hand to 200 IOPS by ann (test)")
        assert busy(made) == []


def test_its_life_until_release():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    gen = caps_of(busy(made), A).gen
    made.controller.caps_state(A, gen, "sent", "", made.unix_us)
    assert rows_of(busy(made, 0))[0]["state"] == "sent"
    assert busy(made, -1) == []
    (row,) = rows_of(busy(made, gen))
    assert row["state"] == "seen"  # confirmed by the generation and within the cap in the same cut
    assert made.controller.manual_release(volume="v") == ["t1"]
    found = busy(made, gen)
    assert caps_of(found, A).caps == []
    assert rows_of(found)[0]["state"] == "released"
    assert rows_of(found)[0]["released_us"] == made.unix_us
    assert [e.kind for e in events_of(found)] == ["throttle-released"]
    assert made.controller.manual_release(throttle_id="t1") == []


def test_how_an_operators_throttle_ended_is_added_to_why_it_was_set():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120, who="ann", reason="nightly copy")
    busy(made)
    made.controller.manual_release(volume="v", who="bob")
    found = busy(made)
    (ended,) = rows_of(found)
    assert (ended["reason"], ended["text"]) == ("manual", "nightly copy; released by bob")
    (event,) = events_of(found)
    assert (event.text, event.details["ended"]) == (ended["text"], "manual-release")
    made.controller.manual_set(
        "t2", "v", cost_per_s=120, until_unix_us=made.unix_us + 2_000_000, reason="short"
    )
    busy(made)
    assert rows_of(busy(made))[-1]["text"] == "short; its time is over"


def test_it_is_confirmed_when_the_gateway_proved_it_and_not_when_it_was_asked_for():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    found = busy(made)
    (asked,) = rows_of(found)
    assert (asked["requested_us"], asked["confirmed_us"]) == (made.unix_us, None)
    proved_us = made.unix_us + 40_000  # before the next tick
    made.controller.caps_state(A, caps_of(found, A).gen, "confirmed", "", proved_us)
    (row,) = rows_of(made.controller.tick(made.now_ns, made.unix_us))
    assert (row["state"], row["requested_us"], row["confirmed_us"]) == (
        "confirmed",
        asked["requested_us"],
        proved_us,
    )


@pytest.mark.parametrize("second", [120, 150], ids=["equal", "looser"])
def test_a_second_throttle_that_changes_no_cap_is_proven_like_the_first(second):
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    gen = caps_of(busy(made), A).gen
    busy(made, gen)
    made.controller.manual_set("t2", "v", cost_per_s=second)
    found = busy(made, gen)
    assert not [each for each in found if isinstance(each, SetCaps)]
    assert [(row["throttle_id"], row["state"], row["gen"]) for row in rows_of(found)] == [
        ("t2", "requested", gen)
    ]
    (row,) = rows_of(busy(made, gen))
    assert (row["throttle_id"], row["state"], row["confirmed_us"]) == ("t2", "seen", made.unix_us)
    assert made.controller.manual_release(throttle_id="t1") == ["t1"]
    found = busy(made, gen)
    sent = [each.caps[0]["cost_per_s"] for each in found if isinstance(each, SetCaps)]
    assert sent == ([150] if second == 150 else [])


def test_a_second_throttle_is_not_confirmed_by_a_gateway_that_holds_other_caps():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    gen = caps_of(busy(made), A).gen
    busy(made, gen)
    made.controller.manual_set("t2", "v", cost_per_s=120)
    for _ in range(8):
        busy(made, 0)
    assert {t.throttle_id: t.state for t in made.controller.policy.throttles()} == {
        "t1": "requested", "t2": "requested",
    }  # fmt: skip


def test_release_by_id_leaves_the_others():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    made.controller.manual_set("t2", "v", cost_per_s=80)
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 80
    assert made.controller.manual_release(throttle_id="t2") == ["t2"]
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 120


def test_a_manual_throttle_expires():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120, until_unix_us=made.unix_us + 2_000_000)
    busy(made)
    found = busy(made)
    assert caps_of(found, A).caps == []
    assert rows_of(found)[0]["state"] == "expired"


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_manual_throttle_keeps_its_length_when_the_clock_is_set(step_s):
    made = feeder()
    ends_us = made.unix_us + 60_000_000
    made.controller.manual_set("t1", "v", cost_per_s=120, until_unix_us=ends_us)
    made.controller.tick(made.now_ns, made.unix_us)
    seen = rows_of(made.controller.tick(made.now_ns + 59 * 10**9, ends_us + (step_s - 1) * 1_000_000))
    assert [(row["state"], row["expires_us"]) for row in seen] == [
        ("requested", ends_us + step_s * 1_000_000)
    ]
    seen = rows_of(made.controller.tick(made.now_ns + 60 * 10**9, ends_us + step_s * 1_000_000))
    assert [row["state"] for row in seen] == ["expired"]


def test_policy_caps_act_in_enforce_only_and_manual_takes_their_place():
    made = feeder("observe")
    made.controller.set_policy_caps(3, {"v": 90.0, "w": None})
    assert busy(made) == []
    made.controller.set_mode("enforce")
    found = busy(made)
    assert caps_of(found, A).caps[0]["cost_per_s"] == 90
    assert rows_of(found)[0]["source"] == "policy"
    assert "version 3" in rows_of(found)[0]["text"]
    made.controller.manual_set("t1", "v", cost_per_s=150)
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 150
    made.controller.manual_release(throttle_id="t1")
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 90
    made.controller.set_policy_caps(4, {"v": None})
    found = busy(made)
    assert caps_of(found, A).caps == []
    assert rows_of(found)[0]["reason"] == "policy", "what it was set for stays"
    assert rows_of(found)[0]["text"] == "policy version 3; no longer asked for"
    assert events_of(found, "throttle-released")[0].details["ended"] == "withdrawn"


def test_a_burst_of_a_policys_cap_is_sent_and_recorded_with_it():
    made = feeder("enforce")
    made.controller.set_policy_caps(3, {"v": 90.0}, {"v": 2.5})
    found = busy(made)
    assert (caps_of(found, A).caps[0]["cost_per_s"], caps_of(found, A).caps[0]["burst_s"]) == (90, 2.5)
    assert rows_of(found)[0]["burst_s"] == 2.5
    made.controller.set_policy_caps(4, {"v": 90.0}, {"v": 5.0})
    assert caps_of(busy(made), A).caps[0]["burst_s"] == 5.0, "a longer burst alone is sent, too"
    made.controller.manual_set("t1", "v", cost_per_s=50)
    assert caps_of(busy(made), A).caps[0].get("burst_s") is None, "an operator's cap has no burst"


def test_policies_are_observed_before_they_are_enforced_backend_by_backend():
    made = feeder("enforce")
    made.controller.set_policy_stage("observe", {})
    made.controller.set_policy_caps(3, {"v": 90.0, "w": None})
    for _ in range(6):
        assert busy(made) == []
        made.controller.compare_policy(made.now_ns)
    view = made.controller.snapshot(made.unix_us)["policy_stage"]
    (row,) = view["would_hold"]
    assert (view["stage"], row["volume"], row["backend"], row["cap_cost_per_s"]) == (
        "observe",
        "v",
        "disk",
        90.0,
    )
    assert row["cost_per_s"] > 90
    assert 0 < row["above_s"] <= row["watched_s"]
    assert row["above_cost"] > 0
    made.controller.set_policy_stage("observe", {"disk": "enforce"})
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 90
    made.controller.set_policy_caps(4, {"v": 80.0})
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 80, "the stage is the backend's"
    made.controller.compare_policy(made.now_ns)
    assert made.controller.snapshot(made.unix_us)["policy_stage"]["would_hold"] == []
    made.controller.set_policy_stage("enforce", {"disk": "observe"})
    assert caps_of(busy(made), A).caps == []


def test_the_stage_of_policies_says_nothing_of_other_caps():
    made = feeder("enforce", classes=[volume_class("v", Priority.BRONZE, cap_iops=700.0)])
    made.controller.set_policy_stage("observe", {})
    made.controller.set_policy_caps(3, {"v": 90.0})
    caps = caps_of(busy(made), A).caps[0]
    assert (caps["ops_per_s"], caps["cost_per_s"]) == (700, None)


def test_back_to_observe_releases_all_but_the_operators():
    made = feeder(volumes=("v", "w"))
    made.controller.set_policy_caps(3, {"v": 90.0})
    made.controller.manual_set("t1", "w", ops_per_s=500)
    assert [c["volume"] for c in caps_of(busy(made), A).caps] == ["v", "w"]
    made.controller.set_mode("observe")
    found = busy(made)
    assert [c["volume"] for c in caps_of(found, A).caps] == ["w"]
    assert [e.details["ended"] for e in events_of(found, "throttle-released")] == ["mode-observe"]
    assert [r["reason"] for r in rows_of(found) if r["state"] == "released"] == ["policy"]


def test_floors_hold_against_policies_and_agreed_ones_against_operators_too():
    made = feeder(classes=[volume_class("v", Priority.BRONZE, floor_iops=300.0)])
    made.controller.set_policy_caps(1, {"v": 10.0})
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == pytest.approx(300 * 1.0625)
    made.controller.manual_set("t1", "v", ops_per_s=5)
    assert caps_of(busy(made), A).caps[0]["ops_per_s"] == 300


def test_the_courtesy_floor_does_not_bind_an_operator_and_nothing_is_ever_zero():
    made = feeder()
    made.controller.manual_set("t1", "v", ops_per_s=5, cost_per_s=0)
    caps = caps_of(busy(made), A).caps[0]
    assert (caps["ops_per_s"], caps["cost_per_s"]) == (5, 1.0)


def test_the_cap_of_an_agreement_is_kept_in_enforce():
    made = feeder(classes=[volume_class("v", Priority.BRONZE, cap_iops=700.0)])
    found = busy(made)
    assert caps_of(found, A).caps[0]["ops_per_s"] == 700
    assert rows_of(found)[0]["reason"] == "agreed-cap"


def test_a_volume_on_two_gateways_is_split_by_use_and_equally():
    made = Feeder(controller(()), (A, ("v",)), (B, ("v",)))
    for _ in range(12):
        made.step((A, {"v": (300, 1)}, 0), (B, {"v": (100, 1)}, 0))
    made.controller.manual_set("t1", "v", cost_per_s=100)
    found = made.step()
    shares = {g: caps_of(found, g).caps[0]["cost_per_s"] for g in (A, B)}
    assert shares == pytest.approx({A: 70, B: 30}, rel=0.01)
    assert caps_of(found, A).gen == caps_of(found, B).gen


def test_a_refused_cap_is_told_once_and_sent_again():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=100)
    first = caps_of(busy(made), A).gen
    made.controller.caps_state(A, first, "refused", "no such volume", made.unix_us)
    found = busy(made)
    assert rows_of(found)[0]["state"] == "refused"
    (event,) = events_of(found, "throttle-not-effective")
    assert "no such volume" in event.text
    later = [d for _ in range(3) for d in busy(made)]
    (again,) = [d for d in later if isinstance(d, SetCaps)]
    assert again.gen > first
    made.controller.caps_state(A, first + 1, "sent", "", made.unix_us)
    made.controller.caps_state(A, first + 1, "refused", "no such volume", made.unix_us)
    assert events_of(busy(made), "throttle-not-effective") == []


def test_ios_that_were_held_for_too_long_show_in_the_live_view_of_their_throttle():
    made = feeder()
    made.controller.manual_set("t1", "v", ops_per_s=50)
    gen = caps_of(busy(made), A).gen
    for late in ({"v": [3, 6_000_000]}, {"v": [4, 5_500_000], "other": [1, 9_000_000]}, {"v": "rubbish"}):
        made.second += 1
        counted = cut(A, made.second, {"v": (50, 1)}, gen=gen)
        counted.extra["late"] = late
        made.controller.add_cut(counted, made.unix_us, 0, False, made.now_ns)
        made.controller.tick(made.now_ns, made.unix_us)
    (row,) = made.controller.snapshot(made.unix_us, 10)["throttles"]
    assert (row["late_ios"], row["longest_hold_us"]) == (7, 6_000_000)


def test_a_cap_without_effect_is_told():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=50)
    gen = caps_of(busy(made), A).gen
    found = [d for _ in range(6) for d in busy(made, gen)]
    (event,) = events_of(found, "throttle-not-effective")
    assert event.subject == "v"
    assert "measured above the cap" in event.text
    assert "seen" not in {r["state"] for r in rows_of(found)}


def test_the_first_cut_wholly_under_a_cap_counts():
    """What was under way is known from the cut in which it changed; a loop may change it after each such."""
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=50)
    gen = caps_of(busy(made), A).gen
    found = [d for now in (-1, gen, gen) for d in busy(made, now)]
    assert events_of(found, "throttle-not-effective") == []
    (event,) = events_of(busy(made, gen), "throttle-not-effective")
    assert "measured above the cap in 3 cuts" in event.text


def test_a_gateway_that_came_back_without_caps_gets_them_again():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    gen = caps_of(busy(made), A).gen
    busy(made, gen)
    made.controller.gateway_lost(A, "connection closed", made.now_ns)
    assert made.step() == []
    made.controller.gateway_up(A, "A", [{"volume": "v", "backend": "disk"}], made.now_ns)
    found = [d for _ in range(4) for d in busy(made, 0)]
    (again,) = [d for d in found if isinstance(d, SetCaps)]
    assert again.gen > gen
    assert again.caps[0]["cost_per_s"] == 120


def test_a_throttle_changed_while_its_gateway_was_away_is_sent_when_it_is_back():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    gen = caps_of(busy(made), A).gen
    busy(made, gen)
    made.controller.gateway_lost(A, "connection closed", made.now_ns)
    made.controller.manual_release(volume="v")
    assert not any(isinstance(d, SetCaps) for d in made.step())
    made.controller.gateway_up(A, "A", [{"volume": "v", "backend": "disk"}], made.now_ns)
    assert caps_of(made.step(), A).caps == []


def test_a_stalled_gateway_is_up_again_with_its_first_cut():
    made = feeder()
    busy(made)
    made.controller.gateway_lost(A, "stalled", made.now_ns)
    busy(made)
    assert made.controller.tables[A].state == "up"


def test_caps_nobody_knows_of_are_cleared():
    made = feeder()
    found = [d for _ in range(5) for d in busy(made, 41)]
    (clear,) = [d for d in found if isinstance(d, SetCaps)]
    assert clear.caps == []
    assert clear.gen != 41


def row(**over):
    base = {
        "throttle_id": "t-old",
        "volume": "v",
        "backend": "disk",
        "source": "manual",
        "cost_per_s": 77.0,
        "ops_per_s": None,
        "bytes_per_s": None,
        "reason": "manual",
        "text": "",
        "victim": "",
        "who": "ann",
        "state": "seen",
        "gen": 12,
        "requested_us": 5,
        "confirmed_us": 6,
        "seen_us": 7,
        "released_us": None,
        "expires_us": None,
    }
    return {**base, **over}


def restored(**over) -> Feeder:
    made = controller(())
    made.restore([row(**over)])
    return Feeder(made, (A, ("v",)))


def test_after_a_restart_nothing_is_issued_and_the_cut_confirms():
    made = restored()
    found = [d for _ in range(8) for d in busy(made, 12, iops=60)]
    assert not any(isinstance(d, SetCaps) for d in found)
    assert made.controller.policy.gateways[A].gen == 12
    assert made.controller.snapshot(made.unix_us)["throttles"][0]["cost_per_s"] == 77
    made.controller.manual_release(throttle_id="t-old")
    assert caps_of(busy(made, 12), A).gen > 12


def test_after_a_restart_caps_that_are_gone_are_issued_again():
    made = restored()
    found = [d for _ in range(5) for d in busy(made, 0)]
    (again,) = [d for d in found if isinstance(d, SetCaps)]
    assert again.gen > 12
    assert again.caps[0]["cost_per_s"] == 77


def test_after_a_restart_caps_that_never_arrived_are_issued_again():
    made = restored(state="requested")
    found = [d for _ in range(5) for d in busy(made, 11)]
    (again,) = [d for d in found if isinstance(d, SetCaps)]
    assert again.gen > 12


@pytest.mark.parametrize("odd", [42, UNIX_0_US * 2, MAX_GEN - 1, MAX_GEN, (1 << 63) - 1])
def test_what_a_gateway_claims_to_hold_moves_no_generation_of_others(odd):
    made = Feeder(controller(()), (A, ("v",)), (B, ("w",)))
    made.controller.manual_set("t1", "v", cost_per_s=120)
    made.controller.manual_set("t2", "w", cost_per_s=120)
    found = made.step((A, {"v": (50, 1)}, 0), (B, {"w": (50, 1)}, odd))
    gen = caps_of(found, A).gen
    assert gen == made.unix_us
    for _ in range(5):
        found = made.step((A, {"v": (50, 1)}, gen), (B, {"w": (50, 1)}, odd))
        assert not [d for d in found if isinstance(d, SetCaps) and d.gateway_id == A]
        issued = [d.gen for d in found if isinstance(d, SetCaps)]
        assert issued in ([], [made.unix_us]), "B is sent its caps again, under a generation of ours"
    states = {t.throttle_id: t.state for t in made.controller.policy.throttles()}
    assert states["t1"] == "seen"
    assert states["t2"] in ("requested", "sent"), "a number that was never issued proves nothing"


def test_generations_rise_over_a_restart_with_an_empty_database():
    before = feeder()
    before.controller.manual_set("t1", "v", cost_per_s=120)
    held = caps_of(busy(before), A).gen
    after = feeder()
    after.second = before.second
    after.controller.manual_set("t2", "v", cost_per_s=120)
    assert caps_of(busy(after, held), A).gen > held


def test_generations_rise_while_the_clock_is_set_back():
    made = feeder()
    made.controller.manual_set("t1", "v", cost_per_s=120)
    gen = caps_of(busy(made), A).gen
    made.controller.manual_release(throttle_id="t1")
    assert caps_of(made.controller.tick(made.now_ns + 1, made.unix_us - 3_600_000_000), A).gen == gen + 1


@pytest.mark.parametrize("state", ["requested", "seen"])
def test_a_poisoned_row_is_no_base_for_generations(state):
    made = restored(state=state, gen=(1 << 63) - 2)
    found = [d for _ in range(5) for d in busy(made, 11 if state == "requested" else 0)]
    (again,) = [d for d in found if isinstance(d, SetCaps)]
    assert 12 < again.gen <= made.unix_us


def test_released_rows_are_not_restored():
    made = controller(())
    made.restore([row(released_us=9, state="released"), row(throttle_id="o", state="observed")])
    assert made.policy.throttles() == []


def test_only_a_gateway_in_the_io_path_can_throttle_a_volume():
    made = feeder(volumes=())
    host, nbd = exports("v")[0] | {"source": "host"}, exports("v")[0] | {"source": "nbd"}
    assert made.controller.can_throttle("v"), "nothing is known of it yet"
    made.controller.gateway_up(A, "gw-a", [host], made.now_ns)
    assert not made.controller.can_throttle("v")
    made.controller.gateway_up(B, "gw-b", [nbd], made.now_ns)
    assert made.controller.can_throttle("v")


def test_what_a_lost_gateway_still_lets_through_is_not_given_to_the_others_before_its_lease_ends():
    made = Feeder(controller(()), (A, ("v",)), (B, ("v",)))
    for _ in range(12):
        made.step((A, {"v": (300, 1)}, 0), (B, {"v": (100, 1)}, 0))
    made.controller.manual_set("t1", "v", cost_per_s=100)
    gen = caps_of(made.step(), A).gen
    for _ in range(6):
        made.step((A, {"v": (66, 1)}, gen), (B, {"v": (28, 1)}, gen))
    made.controller.gateway_lost(B, "gone", made.now_ns)
    lost_at = made.second
    found = []
    while not found and made.second < lost_at + 60:
        found = [d for d in made.step((A, {"v": (66, 1)}, gen)) if isinstance(d, SetCaps)]
    assert made.second - lost_at == pytest.approx(30, abs=1)
    assert caps_of(found, A).caps[0]["cost_per_s"] == pytest.approx(100)


def test_a_cap_goes_with_a_volume_to_another_backend_and_follows_its_mode():
    made = feeder("observe")
    made.controller.set_backend_modes({"other": "enforce"})
    made.controller.manual_set("t1", "v", ops_per_s=300)
    made.controller.set_policy_caps(1, {"v": 90.0})
    (row,) = rows_of(busy(made))
    assert (row["source"], row["backend"]) == ("manual", "disk")
    made.controller.manual_release(throttle_id="t1")
    busy(made)
    made.controller.manual_set("t2", "v", ops_per_s=300)
    busy(made)
    made.controller.gateway_up(A, "a", exports("v", backend="other"), made.now_ns)
    rows = {row["throttle_id"]: row for row in rows_of(busy(made))}
    assert rows["t2"]["backend"] == "other"
    made.controller.manual_release(throttle_id="t2")
    assert caps_of(busy(made), A).caps[0]["cost_per_s"] == 90.0


def test_a_decision_names_who_was_sent_the_cap_and_who_was_not():
    made = Feeder(controller((), mode="enforce"), (A, ("v",)), (B, ("v",)))
    made.controller.gateway_lost(B, "connection closed", made.now_ns)
    made.controller.manual_set("t1", "v", ops_per_s=200)
    (row,) = [d.row for d in busy(made) if isinstance(d, RecordDecision)]
    assert (row["figures"]["gateways"], row["figures"]["without_cap"]) == ([A[:4]], [B[:4]])


def late(made: Feeder, count: int, ios: int, change) -> list[RecordDecision]:
    """Seconds in each of which a cap is changed; every cut is made under the caps of the change before."""
    found, gens = [], [0, 0]
    for number in range(count):
        change(number)
        found += (decisions := busy(made, gens[-2], ios))
        gens += [d.gen for d in decisions if isinstance(d, SetCaps)]
    return events_of(found, "throttle-not-effective")


@pytest.mark.parametrize(("ios", "is_deaf"), [(50, False), (100, True)])
def test_a_cap_that_changes_every_second_hides_no_deaf_enforcer(ios, is_deaf):
    """Its cuts are always of older caps; an operator's command sets the same throttle again."""
    made = feeder()
    busy(made)
    told = late(made, 12, ios, lambda n: made.controller.manual_set("t1", "v", cost_per_s=50 + n % 2 * 5))
    assert ["measured above the cap" in event.text for event in told] == [True] * is_deaf


@pytest.mark.parametrize(("ios", "is_deaf"), [(50, False), (100, True)])
def test_caps_of_another_volume_that_change_every_second_hide_no_deaf_enforcer(ios, is_deaf):
    """Nor are caps that are confirmed reported as not confirmed."""
    made = feeder(volumes=("v", "w"))
    busy(made)
    made.controller.manual_set("t1", "v", cost_per_s=50)
    told = late(made, 12, ios, lambda n: made.controller.manual_set("t2", "w", cost_per_s=50 + n % 2 * 5))
    assert ["measured above the cap" in event.text for event in told] == [True] * is_deaf


@pytest.mark.parametrize("reported", [-1, 0], ids=["planes-that-differ", "caps-lost"])
@pytest.mark.parametrize(("ios", "is_deaf"), [(50, False), (100, True)])
def test_a_gateway_that_acknowledges_caps_and_shows_no_cut_under_them_is_found_out(reported, ios, is_deaf):
    made = feeder()
    busy(made)
    made.controller.manual_set("t1", "v", cost_per_s=50)
    found = []
    for _ in range(30):
        found += (decisions := busy(made, reported, ios))
        for each in decisions:
            if isinstance(each, SetCaps):
                made.controller.caps_state(A, each.gen, "confirmed", "", made.unix_us)
    told = events_of(found, "throttle-not-effective")
    assert ["measured above the cap" in event.text for event in told] == [True] * is_deaf
    assert "seen" not in {row["state"] for row in rows_of(found)}


def test_a_client_of_a_divided_volume_is_found_out_also_if_only_every_other_cut_has_it():
    made = Feeder(controller(()), (A, ("v/greedy", "v/calm")), features=("client-caps",))
    busy_ios, found, gen = {"v/greedy": (100, 1), "v/calm": (10, 1)}, [], 0
    made.step((A, busy_ios, 0))
    made.controller.manual_set("t1", "v", cost_per_s=50, client="greedy")
    for second in range(12):
        found += (decisions := made.step((A, {"v/calm": (10, 1)} if second % 2 else busy_ios, gen)))
        gen = next((each.gen for each in decisions if isinstance(each, SetCaps)), gen)
    (event,) = events_of(found, "throttle-not-effective")
    assert event.text.startswith("client greedy: measured above the cap")
