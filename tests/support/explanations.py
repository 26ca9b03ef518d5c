"""Facts that explanations are made of, and what is said under a title."""

from __future__ import annotations

from typing import Any

from sla_server.explanation import Explanation
from tests.support.api import NOW_US, decisions, throttle

DAY_US = 86_400_000_000
REACH_US = NOW_US - 20 * DAY_US
CAP, STEP = decisions()
PROMISE: dict[str, Any] = {
    "sla": "erp-gold",
    "objective": "latency",
    "priority": "gold",
    "metric": "latency",
    "percentile": 95.0,
    "curve": [{"up_to_iops": 150.0, "value_ms": 12.0}],
    "state": "ok",
    "live": None,
    "slice": None,
    "episode": None,
    "last_episode": None,
}
"""A promise that is kept."""


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
