"""Is a segment in order? Asked by the server before it keeps the segment of an earlier run.

Each participant's side is adopted, as an attach would do it, in a private copy of everything in front of
the rings: what an interrupted post or reclaim has left is repaired there, and damage is what cannot be
repaired. The segment itself is only read. A payload that was damaged is no reason to refuse a segment: its
message is discarded when it is taken.

Thread: any; participants may still be running. A lane that changes while it is copied looks damaged, hence
the repeats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from pmdaemon.mailbox.doorbell import Ringer
from pmdaemon.mailbox.errors import MailboxBusy, MailboxCorrupt
from pmdaemon.mailbox.layout import C_ROOM, SLOT_BYTES
from pmdaemon.mailbox.ring import Outlet, PayloadRing
from pmdaemon.mailbox.segment import Segment
from pmdaemon.mailbox.shared_writer import SharedWriter
from pmdaemon.mailbox.writer import LaneWriter

_ATTEMPTS: Final = 5


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
            # Only ``mutex`` asks for more than a buffer, and a bytearray will do for it.
            writer(cast(Any, copy), words, layout, index, outlets, Ringer(segment.path), where)
        except MailboxBusy:
            return  # a living process holds the list: it is in use


def _copy(segment: Segment) -> bytearray:
    """Header, control blocks and slots; zeroes for the slots without a room, which are not even looked at."""
    layout, memory = segment.layout, segment.memory
    copy = bytearray(memory[: layout.slots_at_bytes])
    size = SLOT_BYTES * layout.slots_per_sender
    for index in range(len(layout.participants)):
        start = layout.slots_word(index) * 8
        copy += memory[start : start + size] if segment.has_room(index) else bytes(size)
    return copy
