"""Throttles set by hand: what holds of them now, and the promises that wait for them."""

from __future__ import annotations

from typing import Any

from sla_server.explanation import explain
from tests.support.api import NOW_US, throttle
from tests.support.explanations import PROMISE

RISKY = {**PROMISE, "state": "at-risk"}


def facts(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """Of now, with nothing stored."""
    about = {"kind": kind, "name": name, "at_us": NOW_US, "now_us": NOW_US, "is_now": True, "mode": "enforce"}
    return {**about, "decisions_from_us": NOW_US, **more}


def row(**changed: Any) -> dict[str, Any]:
    """The volume of the promise is to have 20 IOPS, and its floor is 50."""
    asked = {"source": "manual", "victim": "", "volume": "erp-db", "cost_per_s": None, "ops_per_s": 20.0}
    return throttle(**{**asked, "lifted_to": {"ops_per_s": 50.0}, **changed})


def headline(*throttles: dict[str, Any], promise: dict[str, Any] = RISKY, **more: Any) -> str:
    known = {"version": 2, "in_force": True, "promises": [promise], "volumes": ["erp-db"]}
    return explain(facts("sla", "erp-gold", **known, own_throttles=list(throttles), **more)).headline


def test_what_holds_of_one_that_was_set_just_now_is_as_the_live_view_says() -> None:
    assert "erp-db is throttled to 50 IOPS" in explain(facts("volume", "erp-db", throttles=[row()])).headline


def test_a_promise_in_trouble_names_one_of_its_own_volumes() -> None:
    assert headline(row()) == (
        "erp-gold/latency is at risk. Its own erp-db is throttled by hand to 50 IOPS: what waits for that "
        "counts against this promise. Nothing is throttled for it."
    )
    other = row(throttle_id="t-3", volume="erp-log", lifted_to=None)
    assert "Its own erp-db is throttled by hand to 50 IOPS, erp-log to 20 IOPS:" in headline(row(), other)
    assert "Its own erp-db was throttled by hand" in headline(row(), is_now=False)


def test_neither_the_loops_nor_those_of_a_promise_that_is_kept() -> None:
    assert "by hand" not in headline(row(source="control"))
    assert "by hand" not in headline(row(), promise={**PROMISE, "state": "ok"})


def said(*throttles: dict[str, Any]) -> str:
    found = explain(facts("volume", "erp-db", throttles=list(throttles)))
    return " ".join((found.headline, *(line for section in found.sections for line in section.lines)))


def test_a_client_over_all_its_volumes_is_said_and_how_it_is_released() -> None:
    whole = row(volume="", client="host-a", members={"erp-db": 1.0, "w": 1.0}, lifted_to=None)
    found = said(whole)
    assert found.startswith("client host-a over all its volumes is throttled to 20 IOPS")
    assert "20 IOPS at most for client host-a over all its volumes together" in found
    assert "It holds until 'sla throttle release --client host-a'." in found
    here = row(throttle_id="t-9", client="host-a", lifted_to=None, ops_per_s=5.0)
    assert "sla throttle release erp-db --client host-a" in said(here)
    assert "is throttled to 20 IOPS" in said(whole, here), "one is not the other"
