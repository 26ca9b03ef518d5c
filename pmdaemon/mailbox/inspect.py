"""What a segment holds and what its participants did: figures, metrics, a description, a probe.

* *Figures.* Each participant stores its own in its control block when it falls asleep and now and then while
  it does not (``publish``). ``METRICS`` names the same figures as Prometheus would, with a sentence each;
  there is no registry here, a process that exposes metrics takes them from ``samples``.
* *Description.* ``describe`` is what ``sla mailbox dump`` shows. It maps read-only and changes nothing. Lanes
  move while they are read: a lane that changed under the walk is read again a few times, then reported as
  ``moving`` with what was seen of it.
* *Probe.* The server asks whether a segment is in order before it keeps that of an earlier run. Each
  participant's side is adopted, as an attach would do it, in a private copy of everything in front of the
  rings: what an interrupted post or reclaim has left is repaired there, and damage is what cannot be
  repaired. The segment itself is only read. A damaged payload is no reason to refuse a segment: its message
  is discarded when it is taken.

Thread: any, with participants running; ``publish`` belongs to the taking thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from pmdaemon.mailbox.doorbell import Ringer
from pmdaemon.mailbox.errors import MailboxBusy, MailboxCorrupt
from pmdaemon.mailbox.layout import (
    C_BUSY,
    C_DISCARDED,
    C_FULL,
    C_HEAD,
    C_HELD,
    C_INCARNATION,
    C_INSPECTED,
    C_PID,
    C_POSTED_BYTES,
    C_POSTS,
    C_RECLAIMED,
    C_RESETS,
    C_RINGS,
    C_ROOM,
    C_SCANS,
    C_SEQUENCE,
    C_SLEEP,
    C_START,
    C_TAKEN_BYTES,
    C_TAKES,
    C_THRESHOLD,
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
    SLOT_BYTES,
    SLOT_WORDS,
    Layout,
)
from pmdaemon.mailbox.reader import LaneReader, UnackedBatch
from pmdaemon.mailbox.ring import BUNDLE_MESSAGES, Outlet, PayloadRing, all_done, messages_in
from pmdaemon.mailbox.segment import Segment, is_alive
from pmdaemon.mailbox.shared_writer import SharedWriter
from pmdaemon.mailbox.writer import LaneWriter, SenderPlace

RESET_CAUSES: Final = ("invalid", "scans", "idle", "urgent", "returned")

METRICS: Final = {
    "posts": ("sla_mailbox_posts_total", "Messages posted, a copy for each recipient."),
    "bytes_posted": ("sla_mailbox_posted_bytes_total", "Payload of the messages posted."),
    "full": ("sla_mailbox_full_total", "Copies refused because slots or ring of their route were full."),
    "busy": ("sla_mailbox_busy_total", "Posts refused because a stopped process held the shared list."),
    "reclaimed": ("sla_mailbox_reclaimed_slots_total", "Slots freed after their messages were taken."),
    "rings": ("sla_mailbox_rings_total", "Doorbells rung for sleeping recipients."),
    "takes": ("sla_mailbox_takes_total", "Messages taken."),
    "bytes_taken": ("sla_mailbox_taken_bytes_total", "Payload of the messages taken."),
    "discarded": ("sla_mailbox_discarded_total", "Slots discarded because their checksum was wrong."),
    "scans": ("sla_mailbox_scans_total", "Searches for a message, empty ones included."),
    "slots_inspected": ("sla_mailbox_slots_inspected_total", "Slots met in searches; by takes, near 1."),
    "resets": ("sla_mailbox_resets_total", "Searches that began at the list's head again."),
    "threshold": ("sla_mailbox_reset_threshold_scans", "Searches between two resets, as adapted."),
    "in_hand": ("sla_mailbox_in_hand", "Messages taken and not released yet."),
}
"""Figure: its name as a metric, and what it means. Names that end in ``_total`` only rise."""
FILL_METRIC: Final = ("sla_mailbox_ring_fill_ratio", "Share of a route's ring that is not taken yet, 0 to 1.")


PUBLISHED: Final = {
    "posts": C_POSTS,
    "bytes_posted": C_POSTED_BYTES,
    "full": C_FULL,
    "reclaimed": C_RECLAIMED,
    "rings": C_RINGS,
    "busy": C_BUSY,
    "takes": C_TAKES,
    "bytes_taken": C_TAKEN_BYTES,
    "scans": C_SCANS,
    "slots_inspected": C_INSPECTED,
    "resets": C_RESETS,
    "discarded": C_DISCARDED,
    "threshold": C_THRESHOLD,
    "in_hand": C_HELD,
}
"""Figure: its word in the control block."""


class Sources(NamedTuple):
    """Where the figures of one mailbox come from."""

    writer: LaneWriter
    ringer: Ringer
    readers: Sequence[LaneReader]
    batch: UnackedBatch


def publish(words: memoryview, control: int, sources: Sources) -> None:
    """Store the figures into the control block that begins at word ``control``."""
    figures = stats(sources)
    figures["resets"] = sum(figures["resets"].values())
    figures["threshold"] = min(figures["threshold"], default=0)
    for figure, word in PUBLISHED.items():
        words[control + word] = figures[figure]


def stats(sources: Sources) -> dict[str, Any]:
    """Counters since attach; lists have an entry for each list searched."""
    writer, ringer, readers, batch = sources
    return {
        "posts": writer.posts,
        "bytes_posted": writer.bytes_posted,
        "full": writer.full,
        "reclaimed": writer.reclaimed,
        "busy": writer.busy,
        "repairs": getattr(writer, "repairs", 0),
        "rings": ringer.rings,
        "rings_missed": ringer.missed,
        "takes": sum(reader.takes for reader in readers),
        "bytes_taken": sum(reader.bytes_taken for reader in readers),
        "discarded": sum(reader.discarded for reader in readers),
        "scans": sum(reader.scans for reader in readers),
        "slots_inspected": sum(reader.inspected for reader in readers),
        "resets": {cause: sum(reader.resets[cause] for reader in readers) for cause in RESET_CAUSES},
        "threshold": [reader.threshold for reader in readers],
        "scans_since_reset": [reader.scans_since_reset for reader in readers],
        "scans_since_met": [reader.scans_since_met for reader in readers],
        "in_hand": len(batch),
        "ring_fill_ratio": writer.fill_ratios(),
    }


class MetricSample(NamedTuple):
    """One value of a metric."""

    metric: str
    labels: dict[str, str]
    value: float


def samples(name: str, figures: Mapping[str, Any]) -> Iterator[MetricSample]:
    """Figures of participant ``name`` (``stats``, or an entry of ``describe``) as metrics."""
    for figure, (metric, _) in METRICS.items():
        value = figures[figure]
        if isinstance(value, Mapping):  # resets, by cause
            for cause, count in value.items():
                yield MetricSample(metric, {"participant": name, "cause": cause}, count)
        else:
            lowest = min(value, default=0) if isinstance(value, list) else value
            yield MetricSample(metric, {"participant": name}, lowest)
    for recipient, ratio in figures.get("ring_fill_ratio", {}).items():
        yield MetricSample(FILL_METRIC[0], {"participant": name, "recipient": recipient}, ratio)


def metrics(name: str, figures: Mapping[str, Any]) -> dict[str, float]:
    """The same by metric name and labels, as Prometheus writes them."""
    found = {}
    for metric, labels, value in samples(name, figures):
        text = ",".join([f'{label}="{value}"' for label, value in labels.items()])
        found[f"{metric}{{{text}}}"] = value
    return found


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
        participants = [_participant(words, layout, index) for index in range(len(layout.participants))]
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
            "checksum": "full",  # of every payload; the only kind there is
            "repair_pending": bool(words[layout.list_word + L_DIRTY]),
            "damaged": bool(words[H_DAMAGED]),
            "total_bytes": layout.total_bytes,
            "slots_per_sender": layout.slots_per_sender,
            "created_unix_us": words[H_CREATED_US],
            "owner": {"pid": words[H_OWNER_PID], "alive": is_alive(words[H_OWNER_PID], words[H_OWNER_START])},
            "participants": participants,
            "lanes": lanes,
            "routes": routes,
            "metrics": _metrics(participants, routes),
        }
    finally:
        segment.close()


def _metrics(participants: list[dict[str, Any]], routes: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of all participants by metric name and labels, as ``METRICS`` declares them."""
    found: dict[str, float] = {}
    for participant in participants:
        ratios = {
            route["recipient"]: route["fill_ratio"]
            for route in routes
            if route["sender"] == participant["name"]
        }
        found.update(metrics(participant["name"], {**participant, "ring_fill_ratio": ratios}))
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
        # Not even read without a room: a load would take a page of the tmpfs.
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
        return _walk_at_rest(words, layout, layout.list_word + L_HEAD, range(len(layout.participants)))
    lanes: list[dict[str, Any]] = []
    for index in range(len(layout.participants)):
        lanes += _walk_at_rest(words, layout, layout.control_word(index) + C_HEAD, range(index, index + 1))
    return lanes


def _walk_at_rest(words: memoryview, layout: Layout, head_word: int, senders: range) -> list[dict[str, Any]]:
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


def probe(path: Path) -> None:
    """See that every participant of the segment could attach.

    Raises:
        MailboxCorrupt: one could not, or a participant has met damage before (the DAMAGED word).
        SegmentError: the file is no usable segment.
    """
    segment = Segment(path, writable=False)
    try:
        if segment.is_damaged:
            raise MailboxCorrupt(str(path), "a participant has found it so")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _adopt_all(segment)
            except MailboxCorrupt:
                if attempt == _ATTEMPTS:
                    raise
            else:
                return
    finally:
        segment.close()


def _adopt_all(segment: Segment) -> None:
    layout = segment.layout
    copy = _copy(segment)
    words = memoryview(copy).cast("Q")
    writer = SharedWriter if layout.form == "shared" else LaneWriter
    for index, name in enumerate(layout.participants):
        room = words[layout.control_word(index) + C_ROOM]
        if room not in (0, 1):
            raise MailboxCorrupt(str(segment.path), f"the word ROOM of {name} is {room:#x}")
        if not room:
            continue
        outlets = []
        for route in layout.routes_of(name):
            recipient = layout.index(route.recipient)
            ring = PayloadRing(segment.memory, segment.bytes, *layout.ring_at_bytes(name, route.recipient))
            outlets.append(Outlet(route.recipient, index << 16 | recipient, ring, 0, layout.quota(name)))
        where = f"{segment.path}, " + ("the shared list" if layout.form == "shared" else f"lane of {name}")
        try:
            # Only ``RobustMutex`` asks for more than a buffer, and a bytearray will do for it.
            ringer = Ringer(segment.path)
            writer(SenderPlace(cast(Any, copy), words, layout, index, outlets, ringer, where))
        except MailboxBusy:
            return  # a living process holds the list: it is in use


def _copy(segment: Segment) -> bytearray:
    """Header, control blocks and slots; zeroes for the slots without a room, which are not even read."""
    layout, memory = segment.layout, segment.memory
    copy = bytearray(memory[: layout.slots_at_bytes])
    size = SLOT_BYTES * layout.slots_per_sender
    for index in range(len(layout.participants)):
        start = layout.slots_word(index) * 8
        copy += memory[start : start + size] if segment.has_room(index) else bytes(size)
    return copy
