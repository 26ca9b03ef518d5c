"""What has ended: conditions that ended and events that a person has acknowledged.

An end is often seen before a recipient has confirmed the beginning: both are in one batch, or the recipient
was away, or the beginning was held back. Whatever is confirmed after its end is not reminded of. Order is
that of the queue; times count only where a condition has begun again since.

Thread: the main loop.
"""

from __future__ import annotations

from typing import Final

from sla_server.events import catalogue
from sla_server.events.event import Event
from sla_server.events.recipients.base import Status
from sla_server.events.stages.inhibit import Firing

ACKNOWLEDGED: Final = "event-acknowledged"
"""Kind of the event that a person's acknowledgement is; ``details`` name the event that is acknowledged."""
MOST: Final = 2000
"""What is kept in mind at most; the oldest goes first."""


class EndedConditions:
    """See the module.

    Args:
        known: changed in place and durable with the observer's lane: the key of a condition to (1 if it has
            begun again since, when it ended), and ``ACKNOWLEDGED`` with an identity to (0, when).
    """

    def __init__(self, known: dict[tuple[str, ...], tuple[int, int]]) -> None:
        self._known = known

    def saw(self, event: Event) -> None:
        """Take note of an event; once for each, in the order of the queue."""
        status, key = catalogue.status_of(event), catalogue.condition_key(event)
        if status is Status.RESOLVED:
            self._add(key, event.at_us)
        elif status is Status.FIRING and key in self._known:
            self._known[key] = 1, self._known[key][1]

    def acknowledged(self, event_id: str, at_us: int) -> None:
        """A person takes care of an event."""
        self._add((ACKNOWLEDGED, event_id), at_us)

    def has(self, event: Event) -> bool:
        """Whether nobody needs to be reminded of an event."""
        if (ACKNOWLEDGED, event.event_id) in self._known:
            return True
        if catalogue.status_of(event) is not Status.FIRING:
            return False
        has_begun_again, at_us = self._known.get(catalogue.condition_key(event), (1, -1))
        return not has_begun_again or event.at_us <= at_us

    @property
    def knows_any(self) -> bool:
        """Whether there is anything to forget."""
        return bool(self._known)

    def forget(self) -> None:
        """No beginning is left that is not confirmed, and no reminder that a crash may bring back."""
        self._known.clear()

    def _add(self, key: tuple[str, ...], at_us: int) -> None:
        self._known.pop(key, None)  # the newest last
        self._known[key] = 0, at_us
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]


def ends_one_of(event: Event, firing: Firing) -> bool:
    """Whether an event ends a condition that a recipient knows to be firing."""
    is_end = catalogue.status_of(event) is Status.RESOLVED
    return is_end and catalogue.condition_key(event) in firing
