"""The made-up world of the page's tests and pictures is one that a server could show."""

from __future__ import annotations

import itertools

from sla_server.agreements.fields import parse_duration_s
from sla_server.agreements.periods import period_bounds
from sla_server.events import catalogue
from tests.support import api, made_up_events
from tests.support.world import KEPT, MONTH, World, kept, snapshot

MINUTES_OF_MONTH = 30 * 24 * 60


def test_its_events_are_of_the_catalogue() -> None:
    rows = api.events(25)
    assert len(rows) == len(made_up_events.STORY) == 25
    for row in rows:
        assert row["severity"] in catalogue.described(row["kind"]).severities, row["kind"]
        assert row["text"]
        assert row["subject"]
    assert all(one["at_us"] > other["at_us"] for one, other in itertools.pairwise(rows)), "newest first"


def test_its_figures_agree() -> None:
    """What is left of the budget goes with the bad minutes, and what is measured with what is promised."""
    world = World()
    (row,) = world.agreements()
    (objective,) = row["spec"]["spec"]["objectives"]
    shown = kept(api.NOW_US)
    slices = shown["slices"]
    allowed = MINUTES_OF_MONTH * (1 - objective["budgeting"]["target"])
    assert parse_duration_s(objective["budgeting"]["slice"]) == 60
    assert KEPT["budget_remaining"] == round(1 - slices["bad"] / allowed, 2)
    assert KEPT["budget_minutes_left"] == round(allowed - slices["bad"])
    assert shown["compliance"] == slices["good"] / (slices["good"] + slices["bad"])
    begun_us, _ = period_bounds(MONTH, api.NOW_US)
    hours = world.slice_hours("erp-gold", "latency", begun_us, api.NOW_US)
    for state in ("good", "bad", "no_data"):
        assert sum(hour["n"] for hour in hours if hour["state"] == state) == slices[state], state
    gold = snapshot(api.NOW_US)["slas"][0]
    assert gold["threshold_us"] == objective["demand_curve"][0]["value_ms"] * 1000
    capped = [one for one in world.policy_caps(3) if one["cost_per_s"]]
    assert len(capped) == world.policy_volumes(3, "", "", 1)[0]["hours"]
