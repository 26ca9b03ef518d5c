"""ALERT: what an agent reports unasked, checked for the server.

It becomes an event, so what is kept of it is short, printable and of a known severity. What would be harmless
after a small change is changed; what has the wrong type raises ``MalformedFrame`` and closes the session.

Pure. Source: docs/formats/messages.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt, printable
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, Key, WireMessage

ALERT_CHARACTERS: Final = 500
DETAIL_CHARACTERS: Final = 200
DETAILS_BYTES: Final = 1024  # of keys and values together
ALERT_CLOCK_US: Final = 86_400 * 1_000_000  # a time further from ours is no time
SEVERITIES: Final = ("info", "warning", "critical")
ALERT_KINDS: Final = frozenset(
    (
        "certificate-expires",
        "certificate-not-renewed",
        "lease-expired",
        "plane-back",
        "plane-died",
        "plane-stalled",
        "process-restarted",
        "process-stalled",
        "qemu-lost",
        "reload-incomplete",
        "reload-refused",
        "reloaded",
        "source-failed",
        "space-source-back",
        "space-source-failed",
        "spool-damaged",
        "spool-overflow",
        "spool-write-failed",
        "state-write-failed",
        "storage-away",
        "storage-back",
        "throttle-bound-hit",
    )
)
ALERT_PREFIX: Final = "agent-"
_ALERT_KIND: Final = re.compile(rf"(?:{ALERT_PREFIX})?[a-z][a-z0-9-]{{0,57}}")  # with it, 64 in all
_DETAIL_KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Alert(WireMessage):
    """What an agent reports unasked: it becomes an event in SQL, on the page and in the operator's terminal.

    ``kind`` is 1 to 58 of a-z, 0-9 and -, not counting a prefix ``agent-``. Kinds that the server does not
    know get that prefix, so that no agent can raise the server's own events. 500 printable characters of the
    text are kept. A time that is more than a day off becomes the server's. Details are text (200 characters),
    whole or finite numbers and booleans, 1,024 bytes together. What would be harmless after such a small
    change is changed and accepted; what has the wrong type is refused.
    """

    KIND: ClassVar = Kind.ALERT
    kind: str
    severity: Annotated[str, Key(form='"info" | "warning" | "critical"')]
    text: str
    at_us: int
    details: Annotated[Header, Key(form="{name: str | int | float | bool}")]

    @classmethod
    def parse(cls, header: Header, now_us: int) -> Alert:
        """Check a header.

        Args:
            header: as received.
            now_us: the server's wall clock.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
        """
        kind, severity, said = header.get("kind"), header.get("severity"), header.get("text")
        if not isinstance(kind, str) or not _ALERT_KIND.fullmatch(kind):
            raise MalformedFrame(
                f"ALERT: key 'kind' is {excerpt(kind)}, expected 1 to 58 of small letters, digits and -"
            )
        if severity not in SEVERITIES:
            raise MalformedFrame(
                f"ALERT: key 'severity' is {excerpt(severity)}, expected one of {', '.join(SEVERITIES)}"
            )
        if not isinstance(said, str):
            raise MalformedFrame(f"ALERT: key 'text' is {excerpt(said)}, expected text")
        at_us = header.get("at_us", now_us)
        if type(at_us) is not int:
            raise MalformedFrame(f"ALERT: key 'at_us' is {excerpt(at_us)}, expected microseconds since 1970")
        return cls(
            kind=kind if kind in ALERT_KINDS or kind.startswith(ALERT_PREFIX) else ALERT_PREFIX + kind,
            severity=severity,
            text=printable(said, ALERT_CHARACTERS),
            at_us=at_us if abs(at_us - now_us) <= ALERT_CLOCK_US else now_us,
            details=_details(header.get("details")),
        )


def _details(details: Any) -> Header:
    """A flat map of text, whole and finite numbers and booleans."""
    if details is None:
        return {}
    if not isinstance(details, dict):
        raise MalformedFrame(f"ALERT: key 'details' is {excerpt(details)}, expected a map")
    found: Header = {}
    size = 0
    for key, value in details.items():
        if not isinstance(key, str) or not _DETAIL_KEY.fullmatch(key):
            raise MalformedFrame(f"ALERT: 'details' has the key {excerpt(key)}, expected a short name")
        if isinstance(value, str):
            value = printable(value, DETAIL_CHARACTERS)
        elif isinstance(value, int):  # booleans are integers, too
            if not -(1 << 63) <= value < 1 << 63:
                raise MalformedFrame(f"ALERT: detail {key!r} is {value}, expected 63 bits and a sign")
        elif not isinstance(value, float) or not math.isfinite(value):
            raise MalformedFrame(
                f"ALERT: detail {key!r} is {excerpt(value)}, expected text, a finite number or a boolean"
            )
        found[key] = value
        size += len(key) + (len(value.encode()) if isinstance(value, str) else 8)
        if size > DETAILS_BYTES:
            raise MalformedFrame(f"ALERT: 'details' has more than {DETAILS_BYTES} bytes")
    return found
