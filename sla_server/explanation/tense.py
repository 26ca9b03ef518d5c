"""Whether words speak of now, of a time that was asked for, or of the last that was known before a silence.

While the services part is silent there is no live snapshot: throttles and episodes are those that SQL has,
and may have ended since. Facts are those of ``explain``. Pure.
"""

from __future__ import annotations

from typing import Final

from sla_server.explanation import words
from sla_server.explanation.words import Row, Times

LAST_KNOWN: Final = " when last known"
DURABLE: Final = ("not-in-force", "not-judged")
"""Statuses that SQL alone says."""


def is_of_now(facts: Row) -> bool:
    """Whether states and throttles are those of now."""
    return bool(facts["is_now"] and not facts.get("live_is_stale"))


def is_or_was(facts: Row, times: Times) -> tuple[str, str]:
    """The verb for what is throttled, and of what was, since or until when that holds."""
    if is_of_now(facts):
        return "is", ""
    return "was", LAST_KNOWN if facts["is_now"] else f" at {times.full(facts['at_us'])}"


def known_status(status: str, facts: Row) -> str:
    """The same, or "unknown" where only a live snapshot can say it and there is none."""
    return "unknown" if facts.get("live_is_stale") and status not in DURABLE else status


def state_words(promise: Row, facts: Row) -> str:
    """A promise's state with its verb."""
    found = words.SLA_STATES.get(str(promise.get("state")))
    if not facts["is_now"]:
        return found[2] if found else "was in a state that is not stored"
    if is_of_now(facts):
        return found[1] if found else "is in a state that is not known here"
    return f"{found[2]}{LAST_KNOWN}" if found else "is in a state that is not known now"
