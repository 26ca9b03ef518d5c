"""Events about recipients: one a minute with a count, and none left unsaid."""

from __future__ import annotations

from typing import Any

from sla_server.events.trouble import DELIVERY_FAILED, MOST_IDS, PAUSE_NS, RecipientTrouble


class Raised:
    """What was raised: (kind, severity, name, text, count, identities)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str, str, int, list[str]]] = []
        self.trouble = RecipientTrouble(self._raise)

    def _raise(self, kind: str, severity: str, name: str, text: str, details: dict[str, Any]) -> None:
        self.found.append((kind, severity, name, text, details["count"], details["events"]))


def test_the_first_is_said_at_once_and_the_rest_of_the_minute_in_one_event() -> None:
    raised = Raised()
    raised.trouble.add(DELIVERY_FAILED, "r", ["e1"], "HTTP 400")
    assert raised.trouble.raise_due(0) == 60.0
    text = "recipient r did not take 1 event: HTTP 400"
    assert raised.found == [("delivery-failed", "critical", "r", text, 1, ["e1"])]
    for number in range(500):
        raised.trouble.add(DELIVERY_FAILED, "r", [f"f{number}"], "away")
    assert raised.trouble.raise_due(PAUSE_NS // 2) == 30.0
    assert len(raised.found) == 1
    raised.trouble.raise_due(PAUSE_NS)
    assert raised.found[1][3:5] == ("recipient r did not take 500 events: away", 500)
    assert raised.found[1][5] == [f"f{number}" for number in range(MOST_IDS)]
    raised.trouble.raise_due(3 * PAUSE_NS)
    assert len(raised.found) == 2


def test_recipients_do_not_wait_for_each_other_and_the_end_says_all() -> None:
    raised = Raised()
    for name in ("a", "b", "a", "b"):
        raised.trouble.add(DELIVERY_FAILED, name, ["e"], "away")
        raised.trouble.raise_due(0)
    assert [found[2] for found in raised.found] == ["a", "b"]
    raised.trouble.raise_all()
    raised.trouble.raise_all()
    assert [found[2] for found in raised.found] == ["a", "b", "a", "b"]
