"""Rows that the services process asks dbmanager to keep; a repeat of one is the same row.

An event's identity is a UUID of what happened, to whom and when, so the same event posted twice is one row.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from pmdaemon import reserve
from sla_server.rows import Row

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
    """An event as ("events", row); the default of ``event_id`` is made of kind, element, subject and time."""
    event_id = event_id or identity("event", kind, element, subject, at_us)
    return "events", reserve.event_row(kind, severity, element, subject, text, at_us, details, event_id)


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
