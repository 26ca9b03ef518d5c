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
