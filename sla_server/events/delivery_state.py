"""The file in which the delivery process reports how each recipient is: delivery.json beside the metrics.

    {"recipients": [{"name", "kind", "state", "waiting", "waiting_is_at_most", "waiting_since_us",
                     "attempt", "is_trying", "failing_since_us", "next_try_us", "last_answer",
                     "last_confirmed_us", "confirmed", "dead_letters"}],
     "undelivered": [{"event_id", "recipient", "state", "attempt", "since_us", "reason"}]}

Further keys are figures: ``queue_fullness``, ``reserves`` (share in use of each), ``later`` (held back,
reminders, escalations), ``accepted``, ``repeated``, ``skipped`` (by reason), ``pair`` (of a server that has a
partner: ``pair_core.PairCore.status``).

``state`` of a recipient: ``ok``, ``failing`` (its newest answer was no confirmation), ``held`` (silences). Of
a long backlog ``waiting`` is an upper bound (``waiting_is_at_most``); ``waiting_since_us`` is when the oldest
that waits was recorded, 0 for none. ``attempt`` counts the tries of what it has not confirmed, with the one
under way (``is_trying``); ``failing_since_us`` and ``next_try_us`` are null where there is no such time.

Of what is undelivered the oldest ``MOST_UNDELIVERED`` are listed. The application server shows it; a file
that is old or missing means that it is not known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime.files import write_whole
from sla_server.rows import Row

FILE: Final = "delivery.json"
FRESH_S: Final = 15.0
MOST_UNDELIVERED: Final = 1000


def write_delivery_state(
    folder: Path, recipients: Sequence[Row], undelivered: Sequence[Row], **figures: Any
) -> None:
    """Replace the file.

    Raises:
        OSError: no room; the file is as it was, and soon too old.
    """
    content = {"recipients": list(recipients), "undelivered": list(undelivered)[:MOST_UNDELIVERED], **figures}
    write_whole(folder / FILE, json.dumps(content))


def read_delivery_state(folder: Path | None) -> tuple[list[Row], list[Row]] | None:
    """(recipients, undelivered); None without a fresh and readable file."""
    if folder is None:
        return None
    path = folder / FILE
    try:
        if time.time() - path.stat().st_mtime > FRESH_S:
            return None
        content = json.loads(path.read_bytes())
        return list(content["recipients"]), list(content["undelivered"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def read_pair_state(folder: Path) -> Row | None:
    """Status of the cooperating pair; None without a fresh file that has one."""
    path = folder / FILE
    try:
        if time.time() - path.stat().st_mtime > FRESH_S:
            return None
        found = json.loads(path.read_bytes())["pair"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
