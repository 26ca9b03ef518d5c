"""Group: how long a batch waits for events that belong together.

A batch is a run of a recipient's events in their order, so that order is never traded for tidiness; each
notice carries the key of its group. The batch goes when the first of its events has waited long enough, and
at once when it is full.
"""

from __future__ import annotations

from collections.abc import Iterable

from sla_server.events.event import Event
from sla_server.events.recipients.base import Routed


def due_us(events: Iterable[tuple[Event, Routed]]) -> int:
    """When a batch of these goes."""
    return min(event.recorded_us + round(routed.group_wait_s * 1e6) for event, routed in events)
