"""Rows that the services process asks dbmanager to keep; a repeat of one is the same row.

An event's identity is a UUID of what happened, to whom and when, so the same event posted twice is one row.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

Row = dict[str, Any]
Rows = list[tuple[str, Row]]
NAMESPACE: Final = uuid.UUID("5d2b3f0e-6a57-4f0c-9d5b-3a9f1c7e8b21")


def identity(*parts: object) -> str:
    """UUID text that depends on the parts alone."""
    return str(uuid.uuid5(NAMESPACE, "\0".join(str(part) for part in parts)))


def event_row(
    kind: str,
    severity: str,
    element: str,
    subject: str,
    text: str,
    at_us: int,
    details: Row | None = None,
    event_id: str | None = None,
) -> tuple[str, Row]:
    """An event as ("events", row).

    Args:
        kind: e.g. ``policy-applied``.
        severity: info, warning or critical.
        element: kind of thing it is about: sla, volume, gateway, policy, server.
        subject: that thing's name.
        text: for people.
        at_us: when.
        details: figures.
        event_id: default: made of kind, element, subject and time.
    """
    row = {
        "event_id": event_id or identity("event", kind, element, subject, at_us),
        "at_us": at_us,
        "kind": kind,
        "severity": severity,
        "element": element,
        "subject": subject,
        "text": text,
        "details": details or {},
    }
    return "events", row


def audit_row(
    who: str, action: str, subject: str, at_us: int, *, before: Any = None, after: Any = None
) -> tuple[str, Row]:
    """Who changed what, as ("audit", row)."""
    row = {
        "audit_id": identity("audit", who, action, subject, at_us),
        "at_us": at_us,
        "who": who,
        "action": action,
        "subject": subject,
        "before": before,
        "after": after,
    }
    return "audit", row
