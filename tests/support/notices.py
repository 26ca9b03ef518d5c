"""Events and notices for tests of delivery."""

from __future__ import annotations

from typing import Any

from sla_server.events.event import Event
from sla_server.events.recipients.base import Notice, Status

AT_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z


def event(number: int = 1, **fields: Any) -> Event:
    """A violation of agreement erp-gold."""
    values: dict[str, Any] = {
        "event_id": f"event-{number}",
        "at_us": AT_US + number * 1_000_000,
        "kind": "violation-opened",
        "severity": "critical",
        "element": "sla",
        "subject": "erp-gold/latency",
        "text": f"erp-gold/latency: broken, number {number}",
        "details": {"volume": "vol-1", "worst_u": 1.5},
    }
    return Event(**{**values, **fields})


def notice(number: int = 1, *, recipient: str = "oncall", event_fields: Any = None, **fields: Any) -> Notice:
    """A notice of it."""
    values: dict[str, Any] = {"status": Status.FIRING, "condition": "violation"}
    return Notice(event(number, **(event_fields or {})), recipient, number, **{**values, **fields})


def closed(number: int = 2, **fields: Any) -> Notice:
    """The end of the violation."""
    event_fields = {"kind": "violation-closed", "severity": "info", "details": {"opened_us": AT_US}}
    return notice(number, event_fields=event_fields, status=Status.RESOLVED, **fields)
