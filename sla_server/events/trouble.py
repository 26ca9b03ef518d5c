"""Events about recipients that would come in floods: one of a kind, recipient and minute, with a count.

The first one is raised at once; what comes within the minute after it is one event when that has passed. So
a recipient that gives up thousands of notices does not fill the queue with events that say so.

What a crash can leave: a count that was not raised yet dies with the process; the rows of ``deliveries`` name
each notice.

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PAUSE_NS: Final = 60_000_000_000
MOST_IDS: Final = 20
"""Identities that an event names: it has to fit a record."""
DELIVERY_FAILED: Final = "delivery-failed"
HELD_BACK_FULL: Final = "held-back-full"
REMINDERS_DROPPED: Final = "reminders-dropped"
_SEVERITIES: Final = {DELIVERY_FAILED: "critical", HELD_BACK_FULL: "warning", REMINDERS_DROPPED: "warning"}
_TEXTS: Final = {
    DELIVERY_FAILED: "recipient {name} did not take {count}: {reason}",
    HELD_BACK_FULL: "no room to hold {count} back from recipient {name}: {reason}",
    REMINDERS_DROPPED: "reminders and escalations of recipient {name} of {count} were dropped: {reason}",
}


@dataclass(slots=True)
class _Collected:
    """What was not said yet, and from when on it may be."""

    next_ns: int
    count: int = 0
    ids: list[str] = field(default_factory=list)
    reason: str = ""


class RecipientTrouble:
    """See the module.

    Args:
        raise_event: see ``engine.Raise``.
    """

    def __init__(self, raise_event: Callable[[str, str, str, str, dict[str, Any]], None]) -> None:
        self._raise = raise_event
        self._collected: dict[tuple[str, str], _Collected] = {}

    def add(self, kind: str, name: str, ids: Sequence[str], reason: str) -> None:
        """These notices of a recipient; the newest reason is the one that is said."""
        found = self._collected.setdefault((kind, name), _Collected(0))
        found.count += len(ids)
        found.ids += ids[: MOST_IDS - len(found.ids)]
        found.reason = reason

    def raise_due(self, now_ns: int) -> float:
        """Raise what may be said now; returns the seconds until there is more to say."""
        wait_s = 60.0
        for (kind, name), found in list(self._collected.items()):
            left_s = (found.next_ns - now_ns) / 1e9
            if left_s > 0:
                wait_s = min(wait_s, left_s) if found.count else wait_s
            elif found.count:
                self._say(kind, name, found)
                self._collected[kind, name] = _Collected(now_ns + PAUSE_NS)
            else:
                del self._collected[kind, name]
        return wait_s

    def raise_all(self) -> None:
        """Raise what was collected: the process ends."""
        for (kind, name), found in self._collected.items():
            if found.count:
                self._say(kind, name, found)
        self._collected.clear()

    def _say(self, kind: str, name: str, found: _Collected) -> None:
        count = f"{found.count} event{'s' * (found.count > 1)}"
        text = _TEXTS[kind].format(name=name, count=count, reason=found.reason)
        details = {"events": found.ids, "count": found.count, "answer": found.reason}
        self._raise(kind, _SEVERITIES[kind], name, text, details)
