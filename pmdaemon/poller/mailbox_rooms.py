"""Shared memory for the mailbox of a pair, reserved before the pair is started.

The segment is laid out for every pair there may be, but the room of a pair (its slots and rings, some 50
MiB) is taken from the tmpfs only here. Where it does not fit, the pair is not started; the log and an event
say so, and the pairs that run go on.

Thread: the parent's main thread, which posts nothing else.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import attach, reserve_room
from pmdaemon.mailbox.errors import SegmentMissing
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.server import RecordRows

log = structlog.get_logger("rooms")


def reserve_pair(segment: Path, clock: Clock, index: int) -> bool:
    """Reserve the room of a pair; False if there is none, which has been made known."""
    name = f"pair-{index}"
    try:
        reserve_room(segment, name)
    except SegmentMissing:
        return True  # not made yet: the pair waits for it, and its next start reserves
    except MailboxError as exc:
        log.error("no-room-for-pair", pair=index, error=str(exc))
        _make_known(segment, clock.unix_us(), name, str(exc))
        return False
    return True


def _make_known(segment: Path, at_us: int, name: str, problem: str) -> None:
    event = {
        "event_id": str(uuid.uuid4()),
        "at_us": at_us,
        "kind": "no-room-for-pair",
        "severity": "warning",
        "element": "pmdaemon",
        "subject": name,
        "text": f"{name} is not started: {problem}. The pairs that run serve its gateways, too",
        "details": {},
    }
    try:
        with attach(segment, "pmdaemon") as box:
            box.post("dbmanager", RecordRows([["events", event]], None, "pmdaemon").encode())
    except MailboxError as exc:
        log.warning("not-announced", error=str(exc))
