"""What a webhook recipient of another server posts, as records of our queue.

The body is that of ``recipients.webhook``: each of its alerts carries a whole notice under ``delivery``. It
comes from outside, so its size, signature and depth are known to be right before it is parsed, and each
field is checked. Nothing of a body is taken unless all of it is right: the other server then sends its
notices singly, and only the wrong one becomes a dead letter there.

The identity of a notice goes on: a reminder stays the reminder that it was. That it was held back there is of
no use here and is left out.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pmdaemon.errors import SlaError
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.excerpt import excerpt
from sla_server.events.event import NAME_CHARACTERS, EventUnreadable, from_row
from sla_server.events.queue import QueuedEvent

MOST_ALERTS: Final = 1000
"""As many as a recipient's ``batch`` may have."""
MOST_DEPTH: Final = 64
"""A body of ours has 37 levels at most: details of an event have 32."""
MOST_COUNT: Final = 1 << 31
MOST_US: Final = 1 << 62
_TEXTS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[\[{]+|[\]}]+")


class PostRefused(SlaError):
    """A body that is none of ours; the text names the field, its value and what is expected."""


def depth(content: bytes) -> int:
    """How deep the brackets of a JSON text nest; a text that is no JSON has some depth, too."""
    deepest = level = 0
    for found in _BRACKETS.finditer(_TEXTS.sub(b"", content)):
        run = found[0]
        level += len(run) if run[:1] in b"[{" else -len(run)
        deepest = max(deepest, level)
    return deepest


def posted(content: bytes) -> list[QueuedEvent]:
    """The notices of a body.

    Raises:
        PostRefused: one of them, or the body, is wrong.
    """
    if (found := depth(content)) > MOST_DEPTH:
        raise PostRefused(f"the body nests {found} levels deep, at most {MOST_DEPTH} are taken")
    body = strict_json.loads(content.decode("utf-8", "replace"))
    alerts = body.get("alerts") if isinstance(body, Mapping) else None
    if not isinstance(alerts, list) or not 1 <= len(alerts) <= MOST_ALERTS:
        raise PostRefused(
            f"'alerts' is {excerpt(alerts)}, expected a list of 1 to {MOST_ALERTS}: "
            "this address takes what a webhook recipient of an SLA server sends"
        )
    return [_item(f"alerts[{number}].delivery", alert) for number, alert in enumerate(alerts)]


def _item(where: str, alert: Any) -> QueuedEvent:
    delivery = alert.get("delivery") if isinstance(alert, Mapping) else None
    if not isinstance(delivery, Mapping) or not isinstance(row := delivery.get("event"), Mapping):
        raise PostRefused(f"{where} is {excerpt(delivery)}, expected a notice with its event")
    try:
        event = from_row({**row, "recorded_us": 0})
    except EventUnreadable as exc:
        raise PostRefused(f"{where}.{exc}") from exc
    if event.event_id != row["event_id"]:  # cut, it could be that of another event, which would be dropped
        raise PostRefused(
            f"{where}.event: 'event_id' is {excerpt(row['event_id'])} of {len(row['event_id'])} characters, "
            f"expected at most {NAME_CHARACTERS} characters, all of them printable"
        )
    if not 0 <= event.at_us < MOST_US:
        said = excerpt(event.at_us)
        raise PostRefused(f"{where}.event: 'at_us' is {said}, expected microseconds since 1970")
    return QueuedEvent(
        event,
        repeats=_count(where, delivery, "repeats", 1),
        reminder=_count(where, delivery, "reminder", 0),
        escalated=delivery.get("escalated") is True,
    )


def _count(where: str, delivery: Mapping[str, Any], name: str, least: int) -> int:
    value = delivery.get(name, least)
    if type(value) is not int or not least <= value < MOST_COUNT:
        raise PostRefused(f"{where}: {name!r} is {excerpt(value)}, expected a whole number from {least} on")
    return value
