"""Inhibit: an event that another one makes pointless.

A recipient's own trouble is not sent to itself, nor to others that did not take the same
(``stages.fallback``): it would wait behind what fails, and, refused, would make the next event of its kind.
While a gateway is gone, lesser events about it are its consequences: a route may leave them out
(``inhibit: true``). What begins or ends a condition is never left out, so that no end comes
alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from sla_server.events import catalogue
from sla_server.events.event import Event
from sla_server.events.recipients.base import Routed, Status
from sla_server.events.stages.base import StageDecision, StageReason, StageVerdict
from sla_server.events.stages.fallback import not_taken_by

Firing = Mapping[tuple[str, ...], tuple[int, int]]
"""Conditions that a recipient knows to be firing: key to (rank of severity, when)."""


def inhibit(event: Event, routed: Routed, firing: Firing) -> StageDecision | None:
    """See the module."""
    recipient = routed.recipient
    if recipient in not_taken_by(event):
        return StageDecision(StageVerdict.SKIP, StageReason.OWN_TROUBLE, f"it is about {recipient} itself")
    if not routed.inhibit or catalogue.status_of(event) is not Status.INFO:
        return None
    if event.severity != "critical" and event.gateway:
        rank = firing.get(("gateway", "gateway", event.gateway, ""), (0, 0))[0]
        if rank == 2:  # critical: lost, not only slow
            text = f"gateway {event.gateway} is gone, which {recipient} knows"
            return StageDecision(StageVerdict.SKIP, StageReason.GATEWAY_GONE, text)
    return None
