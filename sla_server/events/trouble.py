"""Events about recipients that would come in floods: one of a kind, recipient and minute, with a count.

The first one is raised at once; what comes within the minute after it is one event when that has passed. So
a recipient that gives up thousands of notices does not fill the queue with events that say so. Dead letters
that are about dead letters are counted apart (``stages.fallback``): they go to others.

What a crash can leave: what was collected is in the state file with the cursors that passed it
(``collected``), and is raised after the next start. After a kill between the raise and the next write of that
file it comes a second time, as another event.

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from pmdaemon.runtime.excerpt import printable
from sla_server.events.event import SEVERITIES, Event
from sla_server.events.recipients.base import Notice
from sla_server.events.stages.fallback import DELIVERY_FAILED, MOST_LEVELS, level_of, not_taken_by
from sla_server.events.stages.route import ASKED_FOR

PAUSE_NS: Final = 60_000_000_000
MOST_IDS: Final = 20
"""Identities that an event names: it has to fit a record."""
MOST_SHOWN: Final = 3
"""Dead letters of which an event says what they are about, the most severe first."""
SHOWN_CHARACTERS: Final = 240
REASON_CHARACTERS: Final = 500
MOST_NAMES_CHARACTERS: Final = 256
"""Names that fit a short detail, which stays when an event is cut (``pmdaemon.reserve``)."""
HELD_BACK_FULL: Final = "held-back-full"
REMINDERS_DROPPED: Final = "reminders-dropped"
_SEVERITIES: Final = {DELIVERY_FAILED: "critical", HELD_BACK_FULL: "warning", REMINDERS_DROPPED: "warning"}
_TEXTS: Final = {
    DELIVERY_FAILED: "recipient {name} did not take {count}: {reason}",
    HELD_BACK_FULL: "no room to hold {count} back from recipient {name}: {reason}",
    REMINDERS_DROPPED: "reminders and escalations of recipient {name} of {count} were dropped: {reason}",
}


class CollectedTrouble(BaseModel):
    """What was not said yet of one kind, recipient and level; as the state file has it.

    Attributes:
        shown: severity and text of some dead letters. not_taken_by: recipients that did not take them.
    """

    model_config = ConfigDict(strict=True)
    kind: str
    name: str
    level: int = 0
    count: Annotated[int, Field(ge=0)] = 0
    ids: list[str] = []
    reason: str = ""
    shown: list[tuple[str, str]] = []
    not_taken_by: list[str] = []

    @property
    def key(self) -> tuple[str, str, int]:
        """What is counted apart."""
        return self.kind, self.name, self.level


class RecipientTrouble:
    """See the module.

    Args:
        raise_event: see ``engine.Raise``.
    """

    def __init__(self, raise_event: Callable[[str, str, str, str, dict[str, Any]], None]) -> None:
        self._raise = raise_event
        self._collected: dict[tuple[str, str, int], CollectedTrouble] = {}
        self._next_ns: dict[tuple[str, str, int], int] = {}

    def add(self, kind: str, name: str, ids: Sequence[str], reason: str, level: int = 0) -> CollectedTrouble:
        """These notices of a recipient; the newest reason is the one that is said."""
        new = CollectedTrouble(kind=kind, name=name, level=level)
        found = self._collected.setdefault(new.key, new)
        found.count += len(ids)
        found.ids += ids[: MOST_IDS - len(found.ids)]
        found.reason = printable(
            reason, REASON_CHARACTERS
        )  # a lone surrogate makes the state file unreadable
        return found

    def gave_up(self, name: str, notices: Iterable[Notice], reason: str) -> None:
        """Dead letters of a recipient."""
        by_level: dict[int, list[Notice]] = {}
        for notice in notices:
            # Who tries a recipient sees the answer: nobody else is notified. Behind a relay nobody sees it.
            is_tried = notice.event.kind in ASKED_FOR and notice.event.subject == name
            level = MOST_LEVELS if is_tried else level_of(notice.event)
            by_level.setdefault(min(level, MOST_LEVELS) + 1, []).append(notice)
        for level, found in by_level.items():
            ids = [notice.delivery_id for notice in found]
            collected = self.add(DELIVERY_FAILED, name, ids, reason, level)
            events = [notice.event for notice in found]
            shown = [*collected.shown, *((event.severity, _shown(event)) for event in events)]
            collected.shown = sorted(shown, key=lambda one: -SEVERITIES.index(one[0]))[:MOST_SHOWN]
            names = {
                name,
                *collected.not_taken_by,
                *(each for event in events for each in not_taken_by(event)),
            }
            collected.not_taken_by = sorted(names)

    def collected(self) -> list[CollectedTrouble]:
        """What was not said yet, for the state file."""
        return [found for found in self._collected.values() if found.count]

    def restore(self, collected: Iterable[CollectedTrouble]) -> None:
        """At the start: what the process before had not said."""
        self._collected |= {found.key: found for found in collected}

    def raise_due(self, now_ns: int) -> tuple[bool, float]:
        """Raise what may be said now; whether there was any, and the seconds until there is more to say."""
        has_raised, wait_s = False, 60.0
        for key, found in list(self._collected.items()):
            left_s = (self._next_ns.get(key, now_ns) - now_ns) / 1e9
            if left_s > 0:
                wait_s = min(wait_s, left_s)
                continue
            self._say(found)
            has_raised = True
            del self._collected[key]
            self._next_ns[key] = now_ns + PAUSE_NS
        self._next_ns = {key: next_ns for key, next_ns in self._next_ns.items() if next_ns > now_ns}
        return has_raised, wait_s

    def raise_all(self) -> None:
        """Raise what was collected: the process ends."""
        for found in self._collected.values():
            self._say(found)
        self._collected.clear()

    def _say(self, found: CollectedTrouble) -> None:
        count = f"{found.count} event{'s' * (found.count > 1)}"
        text = _TEXTS[found.kind].format(name=found.name, count=count, reason=found.reason)
        details: dict[str, Any] = {"events": found.ids, "count": found.count, "answer": found.reason}
        if found.kind == DELIVERY_FAILED:
            text += f". {'; '.join(shown for _, shown in found.shown)}"
            text += " and more" if found.count > len(found.shown) else ""
            names = " ".join(found.not_taken_by)
            is_short = len(names) <= MOST_NAMES_CHARACTERS
            details["level"] = found.level if is_short else MOST_LEVELS + 1
            details["not_taken_by"] = names if is_short else found.name
        self._raise(found.kind, _SEVERITIES[found.kind], found.name, text, details)


def _shown(event: Event) -> str:
    return printable(f"{event.severity} {event.kind} {event.subject}: {event.text}", SHOWN_CHARACTERS)
