"""Inhibit: an event that another one makes pointless.

A recipient's own trouble is not sent to itself: it would wait behind what fails, and, refused, would make the
next event of its kind. While a gateway is gone, lesser events about it are its consequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sla_server.events import catalogue
from sla_server.events.event import Event
from sla_server.events.recipients.base import Status
from sla_server.events.stages.base import StageDecision, StageReason, StageVerdict

OWN: Final = ("delivery-failed", "recipient-failing", "recipient-recovered")
Firing = Mapping[tuple[str, ...], tuple[int, int]]
"""Conditions that a recipient knows to be firing: key to (rank of severity, when)."""


def inhibit(event: Event, recipient: str, firing: Firing) -> StageDecision | None:
    """See the module."""
    if event.kind in OWN and event.subject == recipient:
        return StageDecision(StageVerdict.SKIP, StageReason.OWN_TROUBLE, f"it is about {recipient} itself")
    if event.severity != "critical" and catalogue.status_of(event) is not Status.RESOLVED and event.gateway:
        rank = firing.get(("gateway", "gateway", event.gateway, ""), (0, 0))[0]
        if rank == 2:  # critical: lost, not only slow
            text = f"gateway {event.gateway} is gone, which {recipient} knows"
            return StageDecision(StageVerdict.SKIP, StageReason.GATEWAY_GONE, text)
    return None
