"""What stands in a segment, read by an outsider: for tools and for looking after a crash.

Maps read-only and changes nothing. Lanes move while they are read: a lane that changed under the walk is
tried again a few times, then reported as ``moving`` with what was seen of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pmdaemon.mailbox.layout import (
    C_HEAD,
    C_INCARNATION,
    C_PID,
    C_SEQUENCE,
    C_SLEEP,
    C_START,
    H_CREATED_US,
    H_OWNER_PID,
    H_OWNER_START,
    LAYOUT_VERSION,
    MASK32,
    READY,
    S_ADDRESS,
    S_NEXT,
    SLOT_WORDS,
    Layout,
)
from pmdaemon.mailbox.liveness import is_alive
from pmdaemon.mailbox.segment import Segment

_ATTEMPTS: Final = 5


def describe(path: Path) -> dict[str, Any]:
    """Participants, lanes and fill of a segment, as plain values.

    Raises:
        SegmentError: the file is no usable segment.
    """
    segment = Segment(path, writable=False)
    try:
        words, layout = segment.words, segment.layout
        lanes = [_lane(words, layout, index) for index in range(len(layout.participants))]
        return {
            "path": str(path),
            "layout_version": LAYOUT_VERSION,
            "total_bytes": layout.total_bytes,
            "slots_per_sender": layout.slots_per_sender,
            "created_unix_us": words[H_CREATED_US],
            "owner": {"pid": words[H_OWNER_PID], "alive": is_alive(words[H_OWNER_PID], words[H_OWNER_START])},
            "participants": [_participant(words, layout, index) for index in range(len(layout.participants))],
            "lanes": lanes,
            "routes": [
                {
                    "sender": route.sender,
                    "recipient": route.recipient,
                    "ring_bytes": route.ring_bytes,
                    **_waiting(lanes[layout.index(route.sender)], route.recipient, route.ring_bytes),
                }
                for route in layout.routes
            ],
        }
    finally:
        segment.close()


def _participant(words: memoryview, layout: Layout, index: int) -> dict[str, Any]:
    control = layout.control_word(index)
    pid = words[control + C_PID]
    return {
        "name": layout.participants[index],
        "pid": pid,
        "attached": is_alive(pid, words[control + C_START]),
        "incarnation": words[control + C_INCARNATION],
        "sleeping": bool(words[control + C_SLEEP]),
        "posted_sequence": words[control + C_SEQUENCE],
    }


def _lane(words: memoryview, layout: Layout, index: int) -> dict[str, Any]:
    """One lane: slots linked, and READY messages and bytes by recipient."""
    for _ in range(_ATTEMPTS):
        lane = _walk(words, layout, index)
        if not lane["moving"]:
            break
    return lane


def _walk(words: memoryview, layout: Layout, index: int) -> dict[str, Any]:
    linked, moving = 0, False
    waiting: dict[str, list[int]] = {}
    reference = words[layout.control_word(index) + C_HEAD]
    while reference and not moving:
        slot = (reference & MASK32) - 1
        word = layout.slots_word(index) + slot * SLOT_WORDS
        # More slots than there are, or a slot outside: damaged, or rewritten while we read.
        moving = linked >= layout.slots_per_sender or not 0 <= slot < layout.slots_per_sender
        if moving:
            break
        reference_next, address, state = words[word + S_NEXT], words[word + S_ADDRESS], words[word]
        recipient = address & 0xFFFF
        moving = state >> 8 != reference >> 32 or recipient >= len(layout.participants)
        if not moving:
            linked += 1
            if state & 0xFF == READY:
                entry = waiting.setdefault(layout.participants[recipient], [0, 0])
                entry[0] += 1
                entry[1] += address >> 32
            reference = reference_next
    return {"sender": layout.participants[index], "linked": linked, "moving": moving, "waiting": waiting}


def _waiting(lane: dict[str, Any], recipient: str, ring_bytes: int) -> dict[str, Any]:
    messages, size = lane["waiting"].get(recipient, (0, 0))
    return {"messages": messages, "bytes": size, "fill_ratio": min(1.0, size / ring_bytes)}
