"""Group: how long a batch waits for events that belong together.

A batch is a run of a recipient's events in their order, so that order is never traded for tidiness; each
notice carries the key of its group. The batch goes when the first of its events has waited long enough, and
at once when it is full.
"""

from __future__ import annotations

from collections.abc import Iterable

from sla_server.events.event import Event
from sla_server.events.recipients.base import Routed


def wait_us(events: Iterable[tuple[Event, Routed]], now_us: int) -> int:
    """How long a batch of these still waits: at most as its groups do, however the clock was set."""
    return max(0, min(_left_us(event, round(routed.group_wait_s * 1e6), now_us) for event, routed in events))


def _left_us(event: Event, whole_us: int, now_us: int) -> int:
    return min(whole_us, event.recorded_us + whole_us - now_us)
