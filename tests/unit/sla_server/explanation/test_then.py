"""What was so at a time that has passed, as far as it is stored."""

from __future__ import annotations

from sla_server.explanation import explain
from tests.support.api import NOW_US, throttle
from tests.support.explanations import CAP, DAY_US, PROMISE, REACH_US, agreement, cap, said, throttled, volume


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
    assert "is bad: 410 of 4,820 I/Os were too slow for 12.0 ms, 80 IOPS offered." in said(found, "State")
    none = explain(agreement(is_now=False, at_us=NOW_US - 90_000_000, promises=[{**PROMISE, "state": None}]))
    assert "no slice of that time is stored" in said(none, "State")
    assert none.headline.startswith("erp-gold/latency was in a state that is not stored")


def test_the_cause_then_is_that_of_its_decision_not_of_its_end() -> None:
    """A row of before has the reason of its end."""
    row = throttle(victim="", source="policy", reason="withdrawn", text="no longer asked for")
    made = {**cap(source="agreed"), "reason": "agreed-cap", "text": "cap of agreement batch-bronze"}
    found = explain(volume(is_now=False, throttles=[row], decisions=[made]))
    assert found.headline.endswith("the cap of agreement batch-bronze.")
    ahead = throttle(reason="victim-idle")
    found = explain(volume(is_now=False, throttles=[ahead], decisions=[{**CAP, "reason": "recurring-burst"}]))
    assert found.headline.endswith("to keep erp-gold/latency: a burst that recurs was expected.")
