"""The event: one standard form for everything that the server notices and people may want to know (E1).

An event is made once, in the process that noticed it, and never changed. Its ``event_id`` is its identity
from there to the last recipient: whatever is repeated on the way (a row that is posted again, a replay after
a crash) has the same one. Its columns are those of the table ``events``; ``source`` and ``recorded_us`` are
added on the way and stay out of SQL.

``encode`` and ``parse`` are the only codec: JSON, so that a file of events can be read with any tool. Parsing
never trusts: what comes from a file that a dying process wrote is bounded and made printable.

Pure. Source: E1; docs/formats/events.md has the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.excerpt import excerpt, printable

SEVERITIES: Final = ("info", "warning", "critical")
"""From the least to the most urgent."""
NAME_CHARACTERS: Final = 256
TEXT_CHARACTERS: Final = 2000
DETAILS_CHARACTERS: Final = 16_000  # as JSON; details that are longer are replaced by their excerpt
_OLD_SEVERITIES: Final = {"error": "critical"}  # written by 0.1.0


class EventUnreadable(ValueError):
    """Bytes or a mapping that are no event; the text names the field, its value and what is expected."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        event_id: identity; a recipient drops what it has had already by it.
        at_us: when it was noticed, server time.
        kind: its nature, one of the catalogue (``events.catalogue``), such as ``violation-opened``.
        severity: info, warning or critical.
        element: kind of thing it is about: sla, volume, gateway, backend, policy, server, supervisor ...
        subject: that thing's name; for a violation ``AGREEMENT/OBJECTIVE``.
        text: what happened, for people.
        details: figures and names that belong to it (``episode_id``, ``gateway_id``, ``volume`` ...).
        source: process that noticed it.
        recorded_us: when the server had it on disk; 0 before.
    """

    event_id: str
    at_us: int
    kind: str
    severity: str
    element: str
    subject: str
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    recorded_us: int = 0

    @property
    def agreement(self) -> str:
        """Name of the agreement it is about, or ""."""
        if self.element == "sla":
            return self.subject.partition("/")[0]
        named = self.details.get("agreement", self.details.get("sla", ""))
        return named if isinstance(named, str) else ""

    @property
    def gateway(self) -> str:
        """Name of the gateway it is about, or ""."""
        return self.subject if self.element == "gateway" else _text(self.details.get("gateway"))

    @property
    def volume(self) -> str:
        """Name of the volume it is about, or ""."""
        return self.subject if self.element == "volume" else _text(self.details.get("volume"))

    def row(self) -> dict[str, Any]:
        """The columns of the table ``events``."""
        return {
            "event_id": self.event_id,
            "at_us": self.at_us,
            "kind": self.kind,
            "severity": self.severity,
            "element": self.element,
            "subject": self.subject,
            "text": self.text,
            "details": dict(self.details),
        }

    def as_json(self) -> dict[str, Any]:
        """All fields, as ``schema`` describes them."""
        return {  # ``row`` and two more, in one piece: thousands of events a second are written so
            "event_id": self.event_id,
            "at_us": self.at_us,
            "kind": self.kind,
            "severity": self.severity,
            "element": self.element,
            "subject": self.subject,
            "text": self.text,
            "details": dict(self.details),
            "source": self.source,
            "recorded_us": self.recorded_us,
        }

    def encode(self) -> bytes:
        """The event as one line of JSON without its end."""
        return strict_json.dumps(self.as_json(), ensure_ascii=False).encode("utf-8", "replace")


def parse(data: bytes) -> Event:
    """An event from ``Event.encode``.

    Raises:
        EventUnreadable: it is none.
    """
    return from_row(row_in(data))


def row_in(data: bytes) -> Mapping[str, Any]:
    """The mapping that is written there, for ``from_row``.

    Raises:
        EventUnreadable: it is none.
    """
    found = strict_json.loads(data.decode("utf-8", "replace"))
    if not isinstance(found, Mapping):
        raise EventUnreadable(f"an event is a JSON object, not {excerpt(found)}")
    return found


def from_row(row: Mapping[str, Any]) -> Event:
    """An event from a mapping with the columns of the table ``events``; what is too long is cut.

    Raises:
        EventUnreadable: a field is missing or has the wrong type.
    """
    details = row.get("details") or {}
    if isinstance(details, str):  # as SQL has it
        details = strict_json.loads(details)
    if not isinstance(details, Mapping):
        raise EventUnreadable(f"event: 'details' is {excerpt(details)}, expected a map")
    if len(written := strict_json.dumps(details)) > DETAILS_CHARACTERS:
        details = {"cut": printable(written, 500)}
    severity = _OLD_SEVERITIES.get(_text(row.get("severity")), row.get("severity"))
    if severity not in SEVERITIES:
        raise EventUnreadable(
            f"event: 'severity' is {excerpt(severity)}, expected one of {', '.join(SEVERITIES)}"
        )
    return Event(
        event_id=_required(row, "event_id"),
        at_us=_whole(row, "at_us"),
        kind=_required(row, "kind"),
        severity=_text(severity),
        element=printable(_text(row.get("element")), NAME_CHARACTERS),
        subject=printable(_text(row.get("subject")), NAME_CHARACTERS),
        text=printable(_text(row.get("text")), TEXT_CHARACTERS),
        details=details,
        source=printable(_text(row.get("source")), NAME_CHARACTERS),
        recorded_us=_whole(row, "recorded_us", 0),
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of ``Event.as_json``."""
    text = {"type": "string"}
    whole = {"type": "integer"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Event",
        "type": "object",
        "required": ["event_id", "at_us", "kind", "severity", "element", "subject", "text", "details"],
        "properties": {
            "event_id": {**text, "minLength": 1, "description": "Identity: drop what you have had already."},
            "at_us": {**whole, "description": "When it was noticed, microseconds since 1970 UTC."},
            "kind": {**text, "description": "Its nature; docs/formats/events.md lists all."},
            "severity": {"enum": list(SEVERITIES)},
            "element": {**text, "description": "Kind of thing it is about."},
            "subject": {**text, "description": "Name of that thing."},
            "text": {**text, "description": "What happened, for people."},
            "details": {"type": "object", "description": "Figures and names that belong to it."},
            "source": {**text, "description": "Process that noticed it."},
            "recorded_us": {**whole, "description": "When the server had it on disk."},
        },
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _required(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise EventUnreadable(f"event: {name!r} is {excerpt(value)}, expected a text that is not empty")
    return printable(value, NAME_CHARACTERS)


def _whole(row: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = row.get(name, default)
    if type(value) is not int:
        raise EventUnreadable(f"event: {name!r} is {excerpt(value)}, expected microseconds since 1970")
    return value
