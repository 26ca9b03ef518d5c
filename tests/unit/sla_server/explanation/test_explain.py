"""Stored rows in, plain words out: each case of why a volume is throttled, or is not, and of a promise."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.explanation import Explanation, evidence, explain, words
from sla_server.explanation.words import Times
from sla_server.services.control.decisions import DecisionKind, Reason
from tests.support.api import NOW_US, decisions, throttle
from tests.support.explanations import PROMISE

DAY_US = 86_400_000_000
REACH_US = NOW_US - 20 * DAY_US
CAP, STEP = decisions()


def volume(**changed: Any) -> dict[str, Any]:
    facts = {
        "kind": "volume",
        "name": "batch",
        "at_us": NOW_US,
        "now_us": NOW_US,
        "is_now": True,
        "mode": "enforce",
        "decisions_from_us": REACH_US,
        "throttles": [],
        "decisions": [],
        "loop": None,
        "finding": None,
        "later": [],
        "later_more": 0,
        "backend": "disk-0",
        "promises": [],
        "protected": None,
        "measured": None,
    }
    return {**facts, **changed}


def agreement(**changed: Any) -> dict[str, Any]:
    about = {"kind": "sla", "name": "erp-gold", "version": 2, "in_force": True, "own_throttles": []}
    return volume(**{**about, "promises": [PROMISE], "volumes": ["erp-db"], **changed})


def throttled(**changed: Any) -> dict[str, Any]:
    return volume(
        **{"throttles": [throttle()], "decisions": [CAP], "loop": STEP, "protected": PROMISE, **changed}
    )


def cap(**figures: Any) -> dict[str, Any]:
    return {**CAP, "figures": {**CAP["figures"], **figures}}


def finding(kind: str, age_us: int = 0, **changed: Any) -> dict[str, Any]:
    text = "erp-gold/latency at 15.1 ms of 12 ms allowed (2.40 times the misses allowed); "
    text += "its neighbours are at their floors already"
    return {**STEP, "decision_id": "d-9", "kind": kind, "at_us": NOW_US - age_us, "text": text, **changed}


def said(found: Explanation, title: str) -> str:
    """All lines under a title; "" if there is no such section."""
    return " ".join(line for section in found.sections if section.title == title for line in section.lines)


def test_throttled_for_a_promise() -> None:
    found = explain(throttled())
    assert found.status == "throttled"
    assert found.headline == "batch is throttled to 290 weighted IOPS, to keep erp-gold/latency."
    assert said(found, "It protects") == (
        "erp-gold/latency (gold): p95 of latency within 12.0 ms up to 150 I/O/s."
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
    assert "Its reason: A copy. It ends by itself at 08:10:00." in said(found, "Why")
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
    assert said(found, "Volume") == "What it does now is not known: no gateway of it sends statistics."


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


def test_then() -> None:
    at_us = NOW_US - 40_500_000
    found = explain(throttled(is_now=False, at_us=at_us, later=[CAP], later_more=4))
    assert found.headline == (
        "batch was throttled to 290 weighted IOPS at 2027-01-15 07:59:19 UTC, to keep erp-gold/latency."
    )
    assert "Confirmed by gateway-b at 07:59:19; not yet seen" in said(found, "Why"), "as it was known then"
    assert said(found, "Since then").startswith("5 decisions since; the last: 07:59:18 set the cap")
    quiet = explain(volume(is_now=False, at_us=at_us))
    assert quiet.headline == "batch was not throttled at 2027-01-15 07:59:19 UTC."
    assert said(quiet, "Since then") == "Nothing was decided about it since."
    assert "None about batch is stored up to then" in said(quiet, "Decisions")


def test_then_a_rate_that_is_no_longer_stored_is_not_made_up() -> None:
    found = explain(throttled(is_now=False, at_us=NOW_US - 40_000_000, decisions=[]))
    assert found.headline.startswith("batch was throttled to a rate that is no longer stored at ")
    assert "290" not in found.headline + said(found, "Why")


def test_older_than_what_is_stored() -> None:
    at_us = REACH_US - DAY_US
    measured = {"slot_us": at_us // 3_600_000_000 * 3_600_000_000, "length_us": 3_600_000_000, "iops": 5.0}
    found = explain(volume(is_now=False, at_us=at_us, mode=None, measured=measured))
    assert found.status == "unknown"
    assert found.headline.startswith("Nothing that is stored says that batch was throttled at ")
    assert "Decisions are stored from 2026-12-26 08:00:00 UTC on." in said(found, "Stored")
    assert "means over the whole hour" in said(found, "Volume"), "a mean of an hour is none of a minute"
    never = explain(volume(is_now=False, at_us=at_us, decisions_from_us=None))
    assert "No decision is stored yet" in said(never, "Stored")


def test_then_a_slice_says_how_the_promise_was() -> None:
    judged = {"start_us": NOW_US - 120_000_000, "length_us": 60_000_000, "state": "bad", "n": 4820,
              "missed": 410, "offered_iops": 80.3, "threshold_us": 12_000}  # fmt: skip
    row = {**PROMISE, "state": "bad", "slice": judged}
    found = explain(agreement(is_now=False, at_us=NOW_US - 90_000_000, promises=[row]))
    assert found.status == "violated"
    assert "is bad: 410 of 4,820 I/Os were too slow for 12.0 ms, 80 I/O/s offered." in said(found, "State")
    none = explain(agreement(is_now=False, at_us=NOW_US - 90_000_000, promises=[{**PROMISE, "state": None}]))
    assert "no slice of that time is stored" in said(none, "State")
    assert none.headline.startswith("erp-gold/latency was in a state that is not stored")


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


def of_metric(metric: str, **changed: Any) -> dict[str, Any]:
    return {**PROMISE, "objective": "other", "metric": metric, "percentile": None, "curve": [], **changed}


@pytest.mark.parametrize(
    ("promise", "text"),
    [
        (of_metric("mean_latency", curve=[{"up_to_iops": 150.0, "value_ms": 5.0}]),
         "mean latency within 5.00 ms up to 150 I/O/s."),
        (of_metric("iops", promised_iops=500.0), "500 I/O/s, or as many as are asked for."),
        (of_metric("throughput", promised_mbps=20.0), "20 MB/s, or as much as is asked for."),
        (of_metric("availability", outage="10s"),
         "some I/O completes within 10s while any is outstanding, and at most 1 % fail."),
        (of_metric("latency", percentile=99.0, curve=[{"value_ms": 12.0}]),
         "p99 of latency within 12.0 ms at any demand."),
    ],
)  # fmt: skip
def test_every_indicator_is_a_promise_with_a_state(promise: dict[str, Any], text: str) -> None:
    found = explain(agreement(promises=[{**promise, "state": "violating"}]))
    assert found.status == "violated"
    assert found.headline == "erp-gold/other is violated. Nothing is throttled for it."
    assert said(found, "Promise") == f"erp-gold/other (gold): {text}"


@pytest.mark.parametrize(
    ("metric", "row", "text"),
    [
        ("mean_latency", {"measured": 6_100.0, "threshold_us": 5_000},
         "mean latency 6.10 ms of 5.00 ms allowed, 80 I/O/s offered."),
        ("iops", {"measured": 410.0, "missed": 3}, "410 I/O/s delivered, 3 of 4,820 I/Os failed, 80 I/O/s"),
        ("iops", {"measured": 410.0, "failed": 9}, "410 I/O/s delivered, 9 of 4,820 I/Os failed, 80 I/O/s"),
        ("latency", {"missed": 410, "failed": 400, "threshold_us": 12_000},
         "is bad: 410 of 4,820 I/Os missed 12.0 ms, and 400 failed, 80 I/O/s offered."),
        ("throughput", {"measured": 12.5e6}, "12 MB/s delivered, 80 I/O/s offered."),
        ("availability", {"measured": 11e6, "why": "no I/O completed for seconds"},
         "is bad (no I/O completed for seconds): the longest time without completion was 11.0 s"),
        ("availability", {"measured": None, "offered_iops": None}, "08:00:00 is bad."),
    ],
)  # fmt: skip
def test_a_slice_is_explained_by_what_its_indicator_measures(
    metric: str, row: dict[str, Any], text: str
) -> None:
    judged = {"start_us": NOW_US - 60_000_000, "length_us": 60_000_000, "state": "bad", "n": 4820,
              "missed": 0, "offered_iops": 80.3, **row}  # fmt: skip
    promise = {**of_metric(metric), "state": "bad", "slice": judged}
    assert text in said(explain(agreement(promises=[promise])), "State")


def test_availability_now() -> None:
    live = {"metric": "availability", "state": "violating", "latency_us": None, "threshold_us": 5_000_000,
            "stall_us": 6_200_000, "failed_ratio": 0.02, "offered_iops": 80.0, "u": 3.0}  # fmt: skip
    episode = {"opened_us": NOW_US - 9_000_000, "closed_us": None, "worst_u": 3.1}
    promise = {**of_metric("availability"), "state": "violating", "live": live, "episode": episode}
    assert said(explain(agreement(promises=[promise])), "State") == (
        "other: in the last windows no I/O completed for 6.2 s of 5.0 s allowed, 2 % of the I/Os failed, "
        "80 I/O/s offered. Violated since 07:59:51, at worst 3.10 times what is allowed."
    )
    calm = {**promise, "live": {**live, "stall_us": 0, "failed_ratio": 0.0}, "episode": None}
    assert "no outage, 0 % of the I/Os failed" in said(explain(agreement(promises=[calm])), "State")
    silent = {**promise, "live": {**live, "reason": "no stream in its scope is known"}, "episode": None}
    assert said(explain(agreement(promises=[silent])), "State") == "other: no stream in its scope is known."


@pytest.mark.parametrize(
    ("metric", "live", "text"),
    [
        ("iops", {"state": "violating", "u": 3.0},
         "in the last windows 6.0 % of what was asked for, as far as it was promised, was not delivered, "
         "2 % allowed, 420 I/O/s offered."),
        ("throughput", {"state": "violating", "u": 99.0}, "windows 100.0 % of what was asked for, as far"),
        ("iops", {"state": "idle", "u": 0.0}, "there is no I/O to measure."),
        ("mean_latency", {"state": "violating", "u": 1.8, "latency_us": 9_000, "threshold_us": 5_000},
         "the last windows have mean latency 9.00 ms of 5.00 ms allowed, 420 I/O/s offered."),
        ("latency", {"state": "out-of-curve", "u": 0.0, "threshold_us": 5_000, "percentile": 95.0},
         "420 I/O/s offered are more than its curve covers."),
        ("latency", {"state": "idle", "u": 0.0}, "there is no I/O to measure."),
    ],
)  # fmt: skip
def test_what_the_windows_say_now_is_in_the_words_of_the_indicator(
    metric: str, live: dict[str, Any], text: str
) -> None:
    row = {"metric": metric, "latency_us": None, "threshold_us": None, "percentile": None,
           "offered_iops": 420.0, "stall_us": 0, "failed_ratio": 0.0, "reason": "", **live}  # fmt: skip
    promise = {**of_metric(metric), "state": live["state"], "live": row}
    assert text in said(explain(agreement(promises=[promise])), "State")


def test_what_the_windows_said_when_it_was_decided_is_in_the_words_of_the_indicator() -> None:
    seen = {"metric": "iops", "u": 1.5, "latency_us": 0, "threshold_us": 5_000_000, "percentile": 99.0,
            "windows": 3, "over": 2, "offered_iops": 300.0}  # fmt: skip
    row = {"kind": "decrease", "at_us": NOW_US, "figures": {"promise": seen}}
    assert evidence.windows_line(row["figures"], NOW_US, Times(NOW_US)) == (
        "08:00:00: 3.0 % of what was asked for, as far as it was promised, was not delivered, 2 % allowed; "
        "2 of 3 windows over the promise; 300 I/O/s offered."
    )


def test_one_that_is_judged_in_slices_only_says_when_there_is_none_yet() -> None:
    found = explain(agreement(promises=[{**of_metric("iops"), "state": None}]))
    assert said(found, "State") == "other: no slice of it has been judged yet."


def test_the_worst_of_all_promises_is_the_headline() -> None:
    up = {**of_metric("availability"), "state": "violating"}
    assert explain(agreement(promises=[PROMISE, up])).headline.startswith("erp-gold/other is violated.")


@pytest.mark.parametrize("state", [None, "of-a-later-release"])
def test_an_agreement_is_not_called_kept_while_the_state_of_one_promise_is_not_known(state) -> None:
    other = {**of_metric("availability"), "state": state}
    found = explain(agreement(promises=[{**PROMISE, "state": "ok"}, other]))
    assert found.status == "unknown"
    assert found.headline == "erp-gold/other is in a state that is not known here."
    idle = {**of_metric("availability"), "state": "idle"}
    assert explain(agreement(promises=[{**PROMISE, "state": "ok"}, idle])).status == "kept"


def test_a_gateway_that_was_never_sent_the_cap_is_named_as_such() -> None:
    row = cap(gateways=["gateway-b"], without_cap=["old"])
    why = said(explain(throttled(decisions=[row])), "Why")
    assert "Confirmed by gateway-b at 07:59:19" in why
    assert why.endswith("old was never sent it.")
    two = cap(gateways=["gateway-b"], without_cap=["old", "older"])
    assert "old, older were never sent it." in said(
        explain(agreement(throttles=[throttle()], decisions=[two])), "For it"
    )


def mode(mode: str, of: str = "server", name: str = "") -> dict[str, str]:
    return {"mode": mode, "of": of, "name": name}


def test_the_mode_that_holds_is_named_with_whose_it_is() -> None:
    """Of an agreement, else of a backend, else of the server: only the last was looked at."""
    risky = {**PROMISE, "state": "at-risk"}
    row = {**CAP, "kind": "observed", "mode": "observe"}
    own = explain(volume(decisions=[row], protected=risky, mode_here=mode("enforce"),
                         mode_for=mode("observe", "agreement", "erp-gold")))  # fmt: skip
    assert own.status == "observed"
    assert "batch is not throttled: the mode of agreement erp-gold is observe. Mode enforce" in own.headline
    there = explain(volume(mode="observe", mode_here=mode("enforce", "backend", "disk-0")))
    assert said(there, "Why") == "", "the loop acts here, whatever the server does elsewhere"
    here = explain(volume(mode_here=mode("observe", "backend", "disk-0"),
                          own_modes=[{"name": "erp-gold", "mode": "enforce"}]))  # fmt: skip
    assert said(here, "Why") == (
        "The mode of backend disk-0 is observe: the loop and the policies only log; what is set by hand "
        "acts. The loop acts for those with mode enforce: erp-gold."
    )
    some = explain(volume(own_modes=[{"name": "erp-gold", "mode": "observe"}]))
    assert said(some, "Why") == "For agreements with mode observe the loop only logs: erp-gold."


@pytest.mark.parametrize(
    ("modes", "text"),
    [
        ([mode("enforce")], ""),
        ([mode("observe")], ": the mode is observe"),
        ([mode("observe", "agreement", "erp-gold")] * 2, ": the mode of agreement erp-gold is observe"),
        ([mode("observe", "backend", "a"), mode("enforce")], ", and the mode of backend a is observe"),
        ([mode("observe", "backend", "a"), mode("observe", "backend", "b")],
         ": the mode of backend a, the mode of backend b are observe"),
    ],
)  # fmt: skip
def test_nothing_is_throttled_for_a_promise_because_of_its_mode(modes: list[Any], text: str) -> None:
    for server in ("observe", "enforce"):
        found = explain(agreement(mode=server, modes=modes, promises=[{**PROMISE, "state": "at-risk"}]))
        assert found.headline == f"erp-gold/latency is at risk. Nothing is throttled for it{text}."


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


def test_the_cause_then_is_that_of_its_decision_not_of_its_end() -> None:
    """A row of before has the reason of its end."""
    row = throttle(victim="", source="policy", reason="withdrawn", text="no longer asked for")
    made = {**cap(source="agreed"), "reason": "agreed-cap", "text": "cap of agreement batch-bronze"}
    found = explain(volume(is_now=False, throttles=[row], decisions=[made]))
    assert found.headline.endswith("the cap of agreement batch-bronze.")
    ahead = throttle(reason="victim-idle")
    found = explain(volume(is_now=False, throttles=[ahead], decisions=[{**CAP, "reason": "recurring-burst"}]))
    assert found.headline.endswith("to keep erp-gold/latency: a burst that recurs was expected.")
