"""Stored rows in, plain words out: each case of why a volume is throttled, or is not, and of a promise."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.explanation import evidence, explain, words
from sla_server.services.control.decisions import DecisionKind, Reason
from tests.support.api import NOW_US, throttle
from tests.support.explanations import CAP, PROMISE, STEP, agreement, cap, finding, said, throttled, volume


def test_throttled_for_a_promise() -> None:
    found = explain(throttled())
    assert found.status == "throttled"
    assert found.headline == "batch is throttled to 290 weighted IOPS, to keep erp-gold/latency."
    assert said(found, "It protects") == (
        "erp-gold/latency (gold): p95 of latency within 12.0 ms up to 150 IOPS."
    )
    assert (
        "p95 of latency 15.1 ms of 12.0 ms allowed; 2.40 times the misses allowed; 3 of 3 windows over"
        in said(found, "Windows")
    )
    use = said(found, "Who used it")
    assert "disk-0 did 667 weighted IOPS for 2 volumes" in use
    assert "batch: 87 %, 581 weighted IOPS (best-effort, throttled to 290 weighted IOPS)" in use
    assert said(found, "Decided") == (
        "07:59:18 throttled batch from 581 weighted IOPS to 290 weighted IOPS, because the "
        "promise was violated."
    )
    why = said(found, "Why")
    assert "Since 07:59:18: 290 weighted IOPS at most" in why
    assert "Never below its floor, 50 IOPS (53 weighted IOPS)" in why
    assert "Confirmed by gateway-b at 07:59:19; the measured rate was within it at 07:59:20." in why
    assert "64 KiB" in said(found, "Units")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"confirmed_us": None, "seen_us": None}, "Not confirmed by a gateway yet."),
        ({"seen_us": None}, "Confirmed by gateway-b at 07:59:19; not yet seen in the measured rate."),
        ({"state": "refused"}, "Refused by a gateway: the cap is not in force there"),
    ],
)
def test_what_gateways_have_not_confirmed_is_not_claimed(changed: dict[str, Any], text: str) -> None:
    assert text in said(explain(throttled(throttles=[throttle(**changed)])), "Why")


def test_changes_of_the_rate_are_counted() -> None:
    later = {**cap(before={"cost_per_s": 290.0}, after={"cost_per_s": 310.0}, in_force={"cost_per_s": 310.0}),
             "kind": "cap-changed", "at_us": NOW_US - 5_000_000, "reason": "recovery-step"}  # fmt: skip
    found = explain(throttled(decisions=[later, CAP]))
    assert "to 310 weighted IOPS" in found.headline
    assert (
        "changed once lately, last at 07:59:55 from 290 weighted IOPS to 310 weighted IOPS (the "
        "promise was kept" in said(found, "Why")
    )


def test_after_a_step_back_it_still_says_why_there_is_a_throttle() -> None:
    promised = {**STEP["figures"]["promise"], "latency_us": 5_000, "u": 0.0, "over": 0}
    figures = {**STEP["figures"], "promise": promised}
    back = {**STEP, "decision_id": "d-3", "kind": "increase", "reason": "recovery-step", "figures": figures}
    back["at_us"] = NOW_US - 4_000_000
    found = explain(throttled(loop=back, cut=STEP))
    assert "07:59:18: p95 of latency 15.1 ms" in said(found, "Windows")
    assert "07:59:56: p95 of latency 5.00 ms" in said(found, "Windows")
    decided = said(found, "Decided")
    assert decided.index("because the promise was violated") < decided.index("gave back")
    alone = explain(throttled(cut=STEP))
    assert said(alone, "Decided").count("throttled batch") == 1


def test_by_hand() -> None:
    row = throttle(source="manual", victim="", who="ann", reason="manual", text="a copy; released",
                   cost_per_s=None, ops_per_s=100.0, expires_us=NOW_US + 600_000_000)  # fmt: skip
    found = explain(volume(throttles=[row]))
    assert found.headline == "batch is throttled to 100 IOPS, set by hand by ann at 07:59:18."
    assert "Its reason: a copy. It ends by itself at 08:10:00." in said(found, "Why")
    assert said(found, "Windows") == said(found, "Who used it") == ""
    forever = explain(volume(throttles=[{**row, "expires_us": None}]))
    assert "It holds until 'sla throttle release batch'." in said(forever, "Why")


def test_by_hand_below_the_floor_says_what_holds() -> None:
    row = throttle(source="manual", victim="", reason="manual", cost_per_s=None, ops_per_s=100.0)
    made = cap(source="manual", after={"ops_per_s": 100.0}, in_force={"ops_per_s": 500.0}, floor_iops=500.0,
               floor_cost_per_s=531.2)  # fmt: skip
    found = explain(volume(throttles=[row], decisions=[made]))
    assert "batch is throttled to 500 IOPS" in found.headline
    assert "100 IOPS at most" in said(found, "Why")
    assert "What holds is 500 IOPS: the volume's floor, 500 IOPS (531 weighted IOPS), lies above it." in said(
        found, "Why"
    )


def test_ahead_of_a_burst() -> None:
    row = throttle(reason="recurring-burst")
    calm = {**STEP["figures"]["promise"], "latency_us": 3_000, "u": 0.0, "over": 0}
    set_ahead = {**STEP, "kind": "pre-position", "reason": "recurring-burst",
                 "figures": {**STEP["figures"], "promise": calm}}  # fmt: skip
    found = explain(throttled(throttles=[row], loop=set_ahead, cut=set_ahead, protected=PROMISE))
    assert found.headline == (
        "batch is throttled to 290 weighted IOPS, to keep erp-gold/latency: a burst that recurs was expected."
    )
    assert said(found, "Decided") == (
        "07:59:18 throttled batch to 290 weighted IOPS ahead of time, because a burst that "
        "recurs was expected."
    )
    policy = {**set_ahead, "reason": "policy-ahead"}
    assert "the policy has lower caps from the next hour on" in said(
        explain(throttled(loop=policy)), "Decided"
    )


def test_no_caps_ahead_any_more() -> None:
    text = "no caps ahead of bursts for 1800 s: bad windows a burst: 5.0 with caps ahead of it, 5.5 without"
    off = {**STEP, "kind": "ahead-off", "reason": "ahead-no-help", "text": text, "figures": {}}
    assert said(explain(agreement(decisions=[off])), "Decisions") == (
        "07:59:18 set no caps ahead of bursts any more, because caps ahead of bursts did not leave fewer bad "
        f"windows: {text}."
    )


def test_by_the_policy_and_by_its_own_agreement() -> None:
    row = throttle(source="policy", victim="", reason="policy")
    found = explain(volume(throttles=[row], decisions=[cap(source="policy", policy_version=3)]))
    assert found.headline == "batch is throttled to 290 weighted IOPS, asked for by the policy."
    assert "Policy version 3 has this cap for this hour of the week." in said(found, "Why")
    agreed = explain(
        volume(throttles=[{**row, "reason": "agreed-cap", "ops_per_s": 400.0, "cost_per_s": None}])
    )
    assert agreed.headline == "batch is throttled to 400 IOPS, the cap of its own agreement."


def test_of_several_the_lowest_holds() -> None:
    other = throttle(throttle_id="t-2", source="manual", victim="", who="ann", cost_per_s=100.0)
    found = explain(throttled(throttles=[other, throttle()]))
    assert "throttled to 100 weighted IOPS, set by hand by ann" in found.headline
    assert "Of several throttles the lowest rate holds." in said(found, "Why")


def test_observe_says_what_enforce_would_do() -> None:
    row = {**CAP, "kind": "observed", "mode": "observe"}
    facts = volume(mode="observe", decisions=[row], loop={**STEP, "mode": "observe"},
                   protected={**PROMISE, "state": "at-risk"})  # fmt: skip
    found = explain(facts)
    assert found.status == "observed"
    assert found.headline == (
        "batch is not throttled: the mode is observe. Mode enforce would have throttled it to "
        "290 weighted IOPS to "
        "keep erp-gold/latency."
    )
    assert "would have throttled batch from 581 weighted IOPS to 290 weighted IOPS" in said(found, "Decided")
    assert "would be throttled to 290 weighted IOPS" in said(found, "Who used it")
    calm = explain({**facts, "protected": PROMISE})
    assert (calm.status, calm.headline) == ("free", "batch is not throttled.")
    assert "only log; what is set by hand acts" in said(calm, "Why")


def test_one_client_of_a_volume() -> None:
    row = throttle(client="host-b")
    made = cap(client="host-b")
    found = explain(volume(throttles=[row], decisions=[made]))
    assert (
        found.headline
        == "client host-b of batch is throttled to 290 weighted IOPS, to keep erp-gold/latency."
    )
    assert "290 weighted IOPS at most for client host-b alone" in said(found, "Why")
    assert "set the cap of client host-b of batch" in said(found, "Decisions")
    whole = throttle(throttle_id="t-2", cost_per_s=600.0)
    both = explain(volume(throttles=[row, whole]))
    assert both.headline.startswith("batch is throttled to 600 weighted IOPS"), (
        "what holds for all of it comes first"
    )
    assert "Of several throttles" not in said(both, "Why"), "each is about another target"
    hand = explain(volume(throttles=[{**row, "source": "manual", "victim": ""}]))
    assert "'sla throttle release batch --client host-b'" in said(hand, "Why")
    helped = explain(agreement(throttles=[row]))
    assert helped.headline.endswith("client host-b of batch is throttled for it.")


def test_clients_under_new_names_that_share_one_rate() -> None:
    found = explain(volume(throttles=[throttle(client="*")], decisions=[cap(client="*")]))
    assert found.headline.startswith(
        "every client of batch that no agreement names is throttled to 290 weighted IOPS"
    )
    why = said(found, "Why")
    assert "290 weighted IOPS at most for all clients together that no agreement names" in why
    assert "a new name brings no new allowance" in why
    assert "set the cap of every client of batch that no agreement names" in said(found, "Decisions")
    globbed = explain(volume(throttles=[throttle(client="job-*")], decisions=[cap(client="job-*")]))
    assert "at most for all clients together whose names match job-*" in said(globbed, "Why")


def test_a_volume_of_silent_gateways_did_not_do_nothing() -> None:
    found = explain(volume(measured={"iops": None, "p95_us": None, "delay_us": 0}))
    assert (
        said(found, "Volume")
        == "What it does now is not known: no client has used it, or no gateway of it sends statistics."
    )


def test_observe_says_which_client_enforce_would_slow() -> None:
    made = {**cap(client="host-b"), "kind": "observed", "mode": "observe"}
    found = explain(volume(mode="observe", decisions=[made], protected={**PROMISE, "state": "at-risk"}))
    assert "Mode enforce would have throttled client host-b of batch to 290 weighted IOPS" in found.headline


def test_never() -> None:
    found = explain(volume(promises=[PROMISE]))
    assert (found.status, found.headline) == ("free", "batch is not throttled.")
    assert said(found, "Own promise").endswith("It is kept. At risk: no.")
    assert said(found, "Decisions") == (
        "None about batch is stored (they are stored from 2026-12-26 08:00:00 UTC on)."
    )
    assert said(found, "Units") == ""


def test_not_throttled_but_at_risk() -> None:
    found = explain(volume(promises=[{**PROMISE, "state": "at-risk"}]))
    assert found.headline == "batch is not throttled. Its promise erp-gold/latency is at risk."
    assert said(found, "Own promise").endswith("At risk: yes. 'sla why erp-gold' says more.")


def test_released() -> None:
    row = {**cap(before={"cost_per_s": 290.0}, after=None), "kind": "cap-released", "reason": "victim-idle",
           "at_us": NOW_US - 3_000_000}  # fmt: skip
    found = explain(volume(decisions=[row, CAP]))
    assert found.status == "free"
    assert said(found, "Decisions").startswith(
        "07:59:57 released batch from 290 weighted IOPS (the protected volume had no I/O)."
    )


def test_at_risk_with_nothing_to_slow_down() -> None:
    live = {"latency_us": 15_100, "threshold_us": 12_000, "percentile": 95.0, "u": 2.4, "offered_iops": 80.0,
            "budget_remaining": 0.635}  # fmt: skip
    risky = {**PROMISE, "state": "violating", "live": live, "episode": {"opened_us": NOW_US - 9_000_000,
             "closed_us": None, "worst_u": 3.1}}  # fmt: skip
    for kind in ("infeasible", "unattributed"):
        found = explain(agreement(promises=[risky], finding=finding(kind)))
        assert found.status == "violated"
        assert found.headline == "erp-gold/latency is violated. Nothing is throttled for it: see below."
        assert "its neighbours are at their floors already" in said(found, "Decided")
        assert "p95 of latency 15.1 ms of 12.0 ms allowed" in said(found, "State")
        assert "Violated since 07:59:51, at worst 3.10 times the misses allowed." in said(found, "State")
    old = explain(agreement(promises=[risky], finding=finding("infeasible", 600_000_000)))
    assert old.headline == "erp-gold/latency is violated. Nothing is throttled for it."
    assert said(old, "Decided") == "", "what was found ten minutes ago is no reason now"


def test_a_promise_for_which_a_neighbour_is_throttled() -> None:
    found = explain(agreement(throttles=[throttle()], decisions=[CAP, STEP], loop=STEP))
    assert found.headline == "erp-gold/latency is kept. batch is throttled for it."
    assert said(found, "For it").startswith(
        "batch: 290 weighted IOPS at most since 07:59:18. Confirmed by gateway-b"
    )
    assert "set the cap" not in said(found, "Decisions"), "it follows from the step"
    two = explain(agreement(throttles=[throttle(), throttle(volume="copy", throttle_id="t-3")]))
    assert two.headline.endswith("batch, copy are throttled for it.")


def test_observe_and_a_promise_at_risk() -> None:
    found = explain(agreement(mode="observe", promises=[{**PROMISE, "state": "at-risk"}]))
    assert found.headline == (
        "erp-gold/latency is at risk. Nothing is throttled for it: the mode is observe."
    )


def test_a_promise_whose_own_volume_is_throttled() -> None:
    row = throttle(volume="erp-db", source="manual", victim="", who="ann")
    found = explain(agreement(own_throttles=[row]))
    assert said(found, "Its volumes") == (
        "erp-db is throttled itself since 07:59:18, set by hand by ann at 07:59:18: the delay counts against "
        "this promise."
    )
    excluded = explain(agreement(own_throttles=[row], promises=[{**PROMISE, "state": "excluded"}]))
    assert said(excluded, "Its volumes").endswith("by ann at 07:59:18: the delay does not count.")


@pytest.mark.parametrize(
    ("changed", "status", "headline"),
    [
        ({"in_force": False}, "not-in-force", "erp-gold is not in force."),
        ({"promises": []}, "not-judged", "erp-gold has no promise."),
        ({"promises": [{**PROMISE, "state": None}]}, "unknown",
         "erp-gold/latency is in a state that is not known here."),
        ({"promises": [{**PROMISE, "state": "idle"}]}, "idle", "erp-gold/latency has no I/O to judge."),
    ],
)  # fmt: skip
def test_agreements_about_which_there_is_little_to_say(
    changed: dict[str, Any], status: str, headline: str
) -> None:
    found = explain(agreement(**changed))
    assert (found.status, found.headline) == (status, headline)


def test_every_reason_and_kind_has_words() -> None:
    assert set(words.REASONS) == set(Reason)
    for kind in DecisionKind:
        text = evidence.decided({**CAP, "kind": kind.value, "text": "why"})
        assert text != "why.", kind
        assert text.endswith(".")


def test_rows_that_were_left_out_are_admitted() -> None:
    found = explain(volume(decisions=[cap(left_out=7)]))
    assert "(7 decisions before it made no row: too many at once)" in said(found, "Decisions")


def test_facts_may_be_missing() -> None:
    """Rows of an older release, or of a newer one."""
    bare = {"decision_id": "d", "at_us": NOW_US - 5, "kind": "new-kind", "text": "something"}
    found = explain(
        volume(throttles=[{"throttle_id": "t", "volume": "batch", "requested_us": NOW_US - 5}],
               decisions=[bare], loop=bare, protected=None, measured={})
    )  # fmt: skip
    assert found.status == "throttled"
    assert "something" in said(found, "Decisions")


def test_a_gateway_that_was_never_sent_the_cap_is_named_as_such() -> None:
    row = cap(gateways=["gateway-b"], without_cap=["old"])
    why = said(explain(throttled(decisions=[row])), "Why")
    assert "Confirmed by gateway-b at 07:59:19" in why
    assert why.endswith("old was never sent it.")
    two = cap(gateways=["gateway-b"], without_cap=["old", "older"])
    assert "old, older were never sent it." in said(
        explain(agreement(throttles=[throttle()], decisions=[two])), "For it"
    )


def test_a_throttle_that_was_set_for_another_promise_helps_this_one_too() -> None:
    found = explain(agreement(throttles=[throttle(victim="crm/latency")]))
    assert found.headline == "erp-gold/latency is kept. batch is throttled for it."
    assert said(found, "For it").startswith(
        "batch: 290 weighted IOPS at most since 07:59:18. It was set for crm/latency; the loop "
        "helps this promise "
        "by it, too."
    )
    assert said(found, "Decisions") == (
        "None was about erp-gold itself: 'sla why crm' says what the loop decided."
    )
    assert said(explain(throttled(protects=["crm/latency"])), "It protects").endswith(
        "The loop helps crm/latency by it, too."
    )


def test_what_was_withdrawn_says_why() -> None:
    text = "greedy is no longer on backend disk-0"
    row = {**CAP, "kind": "cap-released", "reason": "withdrawn", "text": text, "figures": {}}
    assert f"released batch from its cap ({text})." in said(explain(volume(decisions=[row])), "Decisions")
    step = {**STEP, "kind": "release", "reason": "withdrawn", "text": text}
    assert f"because {text}." in said(explain(agreement(decisions=[step])), "Decisions")


def test_one_set_by_hand_takes_the_place_of_the_policys() -> None:
    policy = throttle(source="policy", victim="", reason="policy", cost_per_s=60.0)
    hand = throttle(throttle_id="t-2", source="manual", victim="", who="root", reason="manual", text="a copy",
                    cost_per_s=None, ops_per_s=1000.0)  # fmt: skip
    found = explain(volume(throttles=[policy, hand]))
    assert found.headline == "batch is throttled to 1,000 IOPS, set by hand by root at 07:59:18."
    assert "It is not in force: one set by hand takes the place of the policy's." in said(found, "Why")
    assert "Of several throttles" not in said(found, "Why")


def test_the_headline_of_several_throttles_is_what_their_newest_decision_put_in_force() -> None:
    agreed = throttle(throttle_id="t-2", source="policy", victim="", reason="agreed-cap", cost_per_s=None,
                      ops_per_s=400.0, text="cap of agreement batch-bronze")  # fmt: skip
    held = {"cost_per_s": 425.0, "ops_per_s": 400.0}
    first = cap(throttle_id="t-2", source="agreed", after={"ops_per_s": 400.0}, in_force={"ops_per_s": 400.0})
    facts = throttled(throttles=[throttle(), agreed], decisions=[cap(in_force=held), first])
    found = explain(facts)
    assert found.headline == "batch is throttled to 425 weighted IOPS and 400 IOPS, to keep erp-gold/latency."
    assert "400 IOPS at most, the cap of agreement batch-bronze." in said(found, "Why")
