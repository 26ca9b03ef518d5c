"""Deduplicate: a condition that begins twice, because two processes noticed it or one was restarted.

Equal identities never come this far (intake drops them). Here an event that begins a condition which the
recipient knows to be firing is dropped for ``WINDOW_US``, unless it is more severe. After that time it
passes: the end may have been lost with a process, and silence for ever would be worse than a repeat.
"""

from __future__ import annotations

from typing import Final

from sla_server.events import catalogue
from sla_server.events.event import SEVERITIES, Event
from sla_server.events.recipients.base import Status
from sla_server.events.stages.base import StageDecision, StageReason, StageVerdict
from sla_server.events.stages.inhibit import Firing

WINDOW_US: Final = 600_000_000
MOST_FIRING: Final = 2000
"""Conditions that a lane keeps in mind; the oldest go first."""


def deduplicate(event: Event, recipient: str, firing: Firing) -> StageDecision | None:
    """See the module."""
    if catalogue.status_of(event) is not Status.FIRING:
        return None
    rank, at_us = firing.get(catalogue.condition_key(event), (-1, 0))
    if rank >= SEVERITIES.index(event.severity) and abs(event.at_us - at_us) < WINDOW_US:
        text = f"{recipient} knows that it is so"
        return StageDecision(StageVerdict.SKIP, StageReason.ALREADY_FIRING, text)
    return None


def known_after(event: Event, firing: dict[tuple[str, ...], tuple[int, int]]) -> None:
    """What the recipient knows once it has the event: changes ``firing``."""
    key = catalogue.condition_key(event)
    status = catalogue.status_of(event)
    if status is Status.RESOLVED:
        firing.pop(key, None)
    elif status is Status.FIRING:
        firing.pop(key, None)  # the newest last
        firing[key] = SEVERITIES.index(event.severity), event.at_us
        while len(firing) > MOST_FIRING:
            del firing[next(iter(firing))]
