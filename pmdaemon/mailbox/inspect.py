"""What stands in a segment, read by an outsider: for tools and for looking after a crash.

Maps read-only and changes nothing. ``describe`` is what ``sla mailbox dump`` shows, and a source of metrics:
the figures of a participant are those it publishes itself. Lanes move while they are read: a lane that
changed under the walk is tried again a few times, then reported as ``moving`` with what was seen of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pmdaemon.mailbox.bundle import BUNDLE_MESSAGES, all_done, messages_in
from pmdaemon.mailbox.figures import PUBLISHED, metrics
from pmdaemon.mailbox.layout import (
    C_HEAD,
    C_INCARNATION,
    C_PID,
    C_ROOM,
    C_SEQUENCE,
    C_SLEEP,
    C_START,
    H_CREATED_US,
    H_DAMAGED,
    H_OWNER_PID,
    H_OWNER_START,
    L_DIRTY,
    L_HEAD,
    LAYOUT_VERSION,
    MASK32,
    READY,
    S_ADDRESS,
    S_CHECK,
    S_DONE,
    S_NEXT,
    SLOT_WORDS,
    Layout,
)
from pmdaemon.mailbox.liveness import is_alive
from pmdaemon.mailbox.segment import Segment

_ATTEMPTS: Final = 5
SLOT_STATES: Final = ("free", "ready", "taken", "damaged")  # FREE, READY, TAKEN, anything else


def describe(path: Path) -> dict[str, Any]:
    """Participants, lanes and fill of a segment, as plain values.

    Raises:
        SegmentError: the file is no usable segment.
    """
    segment = Segment(path, writable=False)
    try:
        words, layout = segment.words, segment.layout
        lanes = _lanes(words, layout)
        people = [_participant(words, layout, index) for index in range(len(layout.participants))]
        routes = [
            {
                "sender": route.sender,
                "recipient": route.recipient,
                "ring_bytes": route.ring_bytes,
                **_waiting(lanes[layout.index(route.sender)], route.recipient, route.ring_bytes),
            }
            for route in layout.routes
        ]
        return {
            "path": str(path),
            "layout_version": LAYOUT_VERSION,
            "form": layout.form,
            "checksum": layout.checksum,
            "repair_pending": bool(words[layout.list_word + L_DIRTY]),
            "damaged": bool(words[H_DAMAGED]),
            "total_bytes": layout.total_bytes,
            "slots_per_sender": layout.slots_per_sender,
            "created_unix_us": words[H_CREATED_US],
            "owner": {"pid": words[H_OWNER_PID], "alive": is_alive(words[H_OWNER_PID], words[H_OWNER_START])},
            "participants": people,
            "lanes": lanes,
            "routes": routes,
            "metrics": _metrics(people, routes),
        }
    finally:
        segment.close()


def _metrics(people: list[dict[str, Any]], routes: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of all participants by metric name and labels, as ``figures.METRICS`` declares them."""
    found: dict[str, float] = {}
    for person in people:
        ratios = {
            route["recipient"]: route["fill_ratio"] for route in routes if route["sender"] == person["name"]
        }
        found.update(metrics(person["name"], {**person, "ring_fill_ratio": ratios}))
    return found


def _participant(words: memoryview, layout: Layout, index: int) -> dict[str, Any]:
    control = layout.control_word(index)
    pid, has_room = words[control + C_PID], bool(words[control + C_ROOM])
    return {
        "name": layout.participants[index],
        "pid": pid,
        "attached": is_alive(pid, words[control + C_START]),
        "incarnation": words[control + C_INCARNATION],
        "sleeping": bool(words[control + C_SLEEP]),
        "posted_sequence": words[control + C_SEQUENCE],
        "room_reserved": has_room,
        # Not even looked at without a room: a load would take a page of the tmpfs.
        "slots": _slots(words, layout, index) if has_room else dict.fromkeys(SLOT_STATES, 0),
        **_figures(words, control),
    }


def _figures(words: memoryview, control: int) -> dict[str, Any]:
    """What the participant published about itself: when it last fell asleep, or some takes ago."""
    figures: dict[str, Any] = {name: words[control + word] for name, word in PUBLISHED.items()}
    takes = figures["takes"]
    figures["inspected_per_take"] = figures["slots_inspected"] / takes if takes else None
    return figures


def _slots(words: memoryview, layout: Layout, index: int) -> dict[str, int]:
    """How many of its slots are free, hold a message not released yet, or wait to be freed."""
    first, counts = layout.slots_word(index), [0, 0, 0, 0]
    for word in range(first, first + layout.slots_per_sender * SLOT_WORDS, SLOT_WORDS):
        counts[min(words[word] & 0xFF, 3)] += 1
    return dict(zip(SLOT_STATES, counts, strict=True))


def _lanes(words: memoryview, layout: Layout) -> list[dict[str, Any]]:
    """For each sender: its slots linked, and its READY messages and bytes by recipient."""
    if layout.form == "shared":
        return _settled(words, layout, layout.list_word + L_HEAD, range(len(layout.participants)))
    lanes: list[dict[str, Any]] = []
    for index in range(len(layout.participants)):
        lanes += _settled(words, layout, layout.control_word(index) + C_HEAD, range(index, index + 1))
    return lanes


def _settled(words: memoryview, layout: Layout, head_word: int, senders: range) -> list[dict[str, Any]]:
    for _ in range(_ATTEMPTS):
        found = _walk(words, layout, head_word, senders)
        if not found[0]["moving"]:
            break
    return found


def _walk(words: memoryview, layout: Layout, head_word: int, senders: range) -> list[dict[str, Any]]:
    lanes: list[dict[str, Any]] = [
        {"sender": layout.participants[sender], "linked": 0, "moving": False, "waiting": {}}
        for sender in senders
    ]
    count, linked, moving = layout.slots_per_sender * len(senders), 0, False
    reference = words[head_word]
    while reference and not moving:
        slot = (reference & MASK32) - 1
        # More slots than there are, or a slot outside: damaged, or rewritten while we read.
        if linked >= count or not 0 <= slot < count:
            moving = True
            break
        word = layout.slots_word(senders.start) + slot * SLOT_WORDS
        behind, address, state = words[word + S_NEXT], words[word + S_ADDRESS], words[word]
        recipient = address & 0xFFFF
        moving = state >> 8 != reference >> 32 or recipient >= len(layout.participants)
        if not moving:
            linked += 1
            lane = lanes[slot // layout.slots_per_sender]
            lane["linked"] += 1
            if state & 0xFF == READY:
                entry = lane["waiting"].setdefault(layout.participants[recipient], [0, 0])
                entry[0] += _messages(words, word)
                entry[1] += address >> 32
            reference = behind
    for lane in lanes:
        lane["moving"] = moving
    return lanes


def _messages(words: memoryview, word: int) -> int:
    """Messages of the READY slot at ``word`` that are not released."""
    messages = messages_in(words[word + S_CHECK])
    return (all_done(messages) & ~words[word + S_DONE]).bit_count() if 0 < messages <= BUNDLE_MESSAGES else 1


def _waiting(lane: dict[str, Any], recipient: str, ring_bytes: int) -> dict[str, Any]:
    messages, size = lane["waiting"].get(recipient, (0, 0))
    return {"messages": messages, "bytes": size, "fill_ratio": min(1.0, size / ring_bytes)}
