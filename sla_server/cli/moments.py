"""Times on a command line: ``--at`` and ``--since``. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import duration_s

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?[smhd])(?: ago)?")
SPAN_MAX_US: Final = 31 * 86_400_000_000
"""The longest time of which the API answers at once."""
_HOUR_US: Final = 3_600_000_000
_TIME_OF_DAY: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")


def moment_us(text: str, now_us: int, option: str = "--at") -> int:
    """A time of this machine's zone, or of the zone it names, as microseconds UTC.

    Args:
        text: ``14:03`` or ``14:03:22`` (the last time it was that), ``2026-11-22 14:03``, ISO 8601, or
            ``10m`` (that long ago).
        now_us: the time now.
        option: of the command line, for the message.

    Raises:
        BadUsage: anything else, or a time ahead of now.
    """
    text = text.strip()
    if ago := _AGO.fullmatch(text):
        try:
            return max(0, now_us - round(duration_s(ago[1]) * 1e6))
        except BadUsage as exc:
            raise BadUsage(f"{option}: {exc}") from exc
    now = datetime.fromtimestamp(now_us / 1e6).astimezone()
    try:
        if _TIME_OF_DAY.fullmatch(text):
            at = datetime.fromisoformat(f"{now.date()} {text if text[2] == ':' else '0' + text}")
            at = at if at.astimezone() <= now else at - timedelta(days=1)
        else:
            at = datetime.fromisoformat(text)
        at_us = round(at.astimezone().timestamp() * 1e6)
    except (ValueError, OverflowError, OSError) as exc:
        raise BadUsage(
            f"{option}: {text[:40]!r} is no time.\n"
            "  Write 14:03, '2026-11-22 14:03', 2026-11-22T14:03:00+01:00, or 10m (ago)"
        ) from exc
    if at_us > now_us:
        shown = now.isoformat(" ", "seconds")
        raise BadUsage(f"{option}: {text[:40]!r} lies ahead of now, {shown}. Give a time that has passed")
    if at_us < 0:
        raise BadUsage(f"{option}: {text[:40]!r} lies before 1970-01-01, where times begin. Give a later one")
    return at_us


def spans_us(since_us: int, now_us: int) -> list[dict[str, int]]:
    """Parts of the time since then that the API answers, as its parameters, the oldest first.

    All are of about one length, as that says how fine an answer is. They meet at full hours: a row that lay
    across would be in both. The last one ends now, by the clock of the server.
    """
    parts = max(1, -(-(now_us - since_us + _HOUR_US) // (SPAN_MAX_US - _HOUR_US)))
    length_us = (now_us - since_us) // parts
    bounds = [since_us, *((since_us + n * length_us) // _HOUR_US * _HOUR_US for n in range(1, parts))]
    spans = [{"from_us": begin, "to_us": end} for begin, end in pairwise(bounds)]
    return [*spans, {"from_us": bounds[-1]}]
