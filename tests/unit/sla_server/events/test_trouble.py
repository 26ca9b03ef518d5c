"""Events about recipients: one a minute with a count, and none left unsaid."""

from __future__ import annotations

from typing import Any

from sla_server.events.trouble import HELD_BACK_FULL, MOST_IDS, PAUSE_NS, RecipientTrouble


class Raised:
    """What was raised: (kind, severity, name, text, count, identities)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str, str, int, list[str]]] = []
        self.trouble = RecipientTrouble(self._raise)

    def _raise(self, kind: str, severity: str, name: str, text: str, details: dict[str, Any]) -> None:
        self.found.append((kind, severity, name, text, details["count"], details["events"]))


def test_the_first_is_said_at_once_and_the_rest_of_the_minute_in_one_event() -> None:
    raised = Raised()
    raised.trouble.add(HELD_BACK_FULL, "r", ["e1"], "full")
    assert raised.trouble.raise_due(0) == (True, 60.0)
    text = "no room to hold 1 event back from recipient r: full"
    assert raised.found == [("held-back-full", "warning", "r", text, 1, ["e1"])]
    for number in range(500):
        raised.trouble.add(HELD_BACK_FULL, "r", [f"f{number}"], "full")
    assert raised.trouble.raise_due(PAUSE_NS // 2) == (False, 30.0)
    assert len(raised.found) == 1
    raised.trouble.raise_due(PAUSE_NS)
    assert raised.found[1][3:5] == ("no room to hold 500 events back from recipient r: full", 500)
    assert raised.found[1][5] == [f"f{number}" for number in range(MOST_IDS)]
    raised.trouble.raise_due(3 * PAUSE_NS)
    assert len(raised.found) == 2


def test_recipients_do_not_wait_for_each_other_and_the_end_says_all() -> None:
    raised = Raised()
    for name in ("a", "b", "a", "b"):
        raised.trouble.add(HELD_BACK_FULL, name, ["e"], "full")
        raised.trouble.raise_due(0)
    assert [found[2] for found in raised.found] == ["a", "b"]
    raised.trouble.raise_all()
    raised.trouble.raise_all()
    assert [found[2] for found in raised.found] == ["a", "b", "a", "b"]
