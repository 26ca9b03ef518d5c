"""The row of an event: what every process raises, and what dbmanager stores in the table ``events``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any


def event_row(
    kind: str,
    severity: str,
    element: str,
    subject: str,
    text: str,
    at_us: int,
    details: Mapping[str, Any] | None = None,
    event_id: str | None = None,
) -> dict[str, Any]:
    """The columns of one event.

    Args:
        kind: one of ``sla_server.events.catalogue``, for example ``process-restarted``.
        severity: info, warning or critical.
        element: kind of thing it is about: sla, volume, gateway, recipient, server.
        subject: that thing's name.
        text: for people.
        at_us: when.
        details: figures.
        event_id: default: a random one. An event that may be made twice needs one made of what happened.
    """
    return {
        "event_id": event_id or str(uuid.uuid4()),
        "at_us": at_us,
        "kind": kind,
        "severity": severity,
        "element": element,
        "subject": subject,
        "text": text,
        "details": dict(details or {}),
    }
