"""Checks an agent's ALERT: it becomes an event in SQL, on the page and in the operator's terminal.

What would be harmless after a small change is changed and accepted, so that an agent with a long text or a
wrong clock is not disconnected for it: texts are cut and made printable, a time that is more than a day off
becomes ours, a kind that we do not know gets the prefix ``agent-``, so that no agent can raise the server's
own events. What has the wrong type is refused.

Pure. Source: docs/formats/messages.md (ALERT).
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt, printable

TEXT_CHARACTERS: Final = 500
DETAIL_CHARACTERS: Final = 200
DETAILS_BYTES: Final = 1024  # of keys and values together
CLOCK_US: Final = 86_400 * 1_000_000  # a time further from ours is no time
SEVERITIES: Final = ("info", "warning", "critical")
KINDS: Final = frozenset(
    (
        "certificate-expires",
        "certificate-not-renewed",
        "lease-expired",
        "plane-back",
        "plane-died",
        "plane-stalled",
        "process-restarted",
        "source-failed",
        "spool-damaged",
        "spool-overflow",
        "spool-write-failed",
        "state-write-failed",
        "throttle-bound-hit",
    )
)
PREFIX: Final = "agent-"
_KIND: Final = re.compile(r"[a-z][a-z0-9-]{0,57}")
_KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


def parse_alert(header: dict[str, Any], now_us: int) -> dict[str, Any]:
    """The five keys of an ALERT, and no other.

    Args:
        header: as received.
        now_us: the server's wall clock.

    Raises:
        MalformedFrame: names the key, its value and what is expected.
    """
    kind, severity, text = header.get("kind"), header.get("severity"), header.get("text")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise MalformedFrame(
            f"ALERT: key 'kind' is {excerpt(kind)}, expected 1 to 58 of small letters, digits and -"
        )
    if severity not in SEVERITIES:
        raise MalformedFrame(
            f"ALERT: key 'severity' is {excerpt(severity)}, expected one of {', '.join(SEVERITIES)}"
        )
    if not isinstance(text, str):
        raise MalformedFrame(f"ALERT: key 'text' is {excerpt(text)}, expected text")
    at_us = header.get("at_us", now_us)
    if type(at_us) is not int:
        raise MalformedFrame(f"ALERT: key 'at_us' is {excerpt(at_us)}, expected microseconds since 1970")
    return {
        "kind": kind if kind in KINDS or kind.startswith(PREFIX) else PREFIX + kind,
        "severity": severity,
        "text": printable(text, TEXT_CHARACTERS),
        "at_us": at_us if abs(at_us - now_us) <= CLOCK_US else now_us,
        "details": _details(header.get("details")),
    }


def _details(details: Any) -> dict[str, Any]:
    """A flat map of text, whole and finite numbers and booleans."""
    if details is None:
        return {}
    if not isinstance(details, dict):
        raise MalformedFrame(f"ALERT: key 'details' is {excerpt(details)}, expected a map")
    found: dict[str, Any] = {}
    size = 0
    for key, value in details.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
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
