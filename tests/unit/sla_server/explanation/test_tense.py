"""What is said of now, of then, and of a time since which nothing was heard; and what is left of a budget."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.explanation import Explanation, explain
from tests.support.api import NOW_US, decisions, throttle
from tests.support.explanations import PROMISE

CAP, STEP = decisions()
EPISODE = {"opened_us": NOW_US - 9_000_000, "closed_us": None, "worst_u": 3.1}
VIOLATED = {**PROMISE, "state": "violating", "episode": EPISODE}
FACTS = {
    "at_us": NOW_US,
    "now_us": NOW_US,
    "is_now": True,
    "mode": "enforce",
    "decisions_from_us": NOW_US - 1_000_000_000,
    "promises": [VIOLATED],
}


def volume(**changed: Any) -> Explanation:
    return explain({**FACTS, "kind": "volume", "name": "batch", **changed})


def agreement(**changed: Any) -> Explanation:
    return explain({**FACTS, "kind": "sla", "name": "erp-gold", "in_force": True, **changed})


def said(found: Explanation, title: str) -> str:
    return " ".join(line for section in found.sections if section.title == title for line in section.lines)


def test_now_and_then() -> None:
    assert agreement().headline == "erp-gold/latency is violated. Nothing is throttled for it."
    then = agreement(is_now=False).headline
    assert then == "erp-gold/latency was violated at 2027-01-15 08:00:00 UTC. Nothing was throttled for it."


def test_in_silence_nothing_is_said_to_be_so_now() -> None:
    found = agreement(throttles=[throttle()], decisions=[CAP], live_is_stale=True)
    assert found.status == "unknown"
    assert found.headline == "erp-gold/latency was violated when last known. batch was throttled for it."
    assert "services part is silent" in said(found, "Stored")
    assert said(found, "State").endswith(
        "Violated since 07:59:51, at worst 3.10 times the misses allowed; whether it still is, is not known."
    )
    calm = agreement(promises=[{**PROMISE, "state": None, "episode": None}], live_is_stale=True)
    assert calm.headline == "erp-gold/latency is in a state that is not known now."
    assert calm.status == "unknown"
    ended = agreement(in_force=False, live_is_stale=True)
    assert (ended.status, ended.headline) == ("not-in-force", "erp-gold is not in force.")


def test_in_silence_a_volume_was_throttled_when_last_known() -> None:
    """Leases end while the services part is away, so whether a cap holds is not known."""
    found = volume(throttles=[throttle()], decisions=[CAP], promises=[], live_is_stale=True)
    assert found.status == "unknown"
    assert (
        found.headline
        == "batch was throttled to 290 weighted IOPS when last known, to keep erp-gold/latency."
    )
    free = volume(live_is_stale=True)
    assert free.headline == (
        "batch was not throttled when last known. Its promise erp-gold/latency was violated when last known."
    )
    assert "At risk:" not in said(free, "Own promise")


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (0.635, "Error budget left: 63 %."),
        (0.996, "Error budget left: 99 %."),
        (0.004, "Error budget left: under 1 %."),
        (0.0, "Error budget left: 0 %."),
        (-0.004, "Error budget left: -1 %: more was spent than there is."),
        (-1.5, "Error budget left: -150 %: more was spent than there is."),
    ],
)
def test_a_budget_that_is_overspent_is_not_one_that_is_just_spent(left: float, text: str) -> None:
    """As ``sla get slas`` and the page show it, rounded down."""
    live = {"latency_us": 5_000, "threshold_us": 12_000, "percentile": 95.0, "budget_remaining": left}
    assert text in said(agreement(promises=[{**PROMISE, "live": live}]), "State")
