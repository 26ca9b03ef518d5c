"""What a mailbox is made of: outlets for its routes, places to search, payloads in one piece.

Reads the layout of a segment, touches no shared word; what is touched later is made ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pmdaemon.mailbox.layout import C_FRONT, C_HEAD, C_ROOM, C_SLEEP, L_FRONT, L_HEAD
from pmdaemon.mailbox.message import ListPlace
from pmdaemon.mailbox.ring import Outlet, PayloadRing
from pmdaemon.mailbox.segment import Segment

Buffer = bytes | bytearray | memoryview


_KEPT_BYTES: Final = 1 << 20
"""Several times what a take copies unless told otherwise."""


def keep_freed_memory() -> None:
    """Let the process keep the memory of one batch for the next, instead of faulting it in anew each time.

    glibc gives the top of its heap back beyond twice the size of the largest block that was mapped and freed,
    and maps blocks from that size on; at first that is 128 KiB. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    block = bytearray(_KEPT_BYTES)
    del block


def flatten(payload: Buffer | Sequence[Buffer]) -> bytes | memoryview:
    """The payload as one run of bytes; copies only what is not one already."""
    if isinstance(payload, memoryview):
        return (
            payload
            if payload.c_contiguous and payload.format == "B" and payload.ndim == 1
            else payload.tobytes()
        )
    if isinstance(payload, bytes | bytearray):
        return bytes(payload)
    return b"".join(payload)


def _ring(segment: Segment, sender: str, recipient: str, *, to_write: bool) -> PayloadRing:
    at_bytes, size_bytes = segment.layout.ring_at_bytes(sender, recipient)
    if all(segment.has_room(segment.layout.index(end)) for end in (sender, recipient)):
        segment.prefault(at_bytes, size_bytes, to_write=to_write)
    return PayloadRing(segment.memory, segment.bytes, at_bytes, size_bytes, segment.layout.checksum)


def make_outlets(segment: Segment, name: str, index: int) -> list[Outlet]:
    """The sender's side of each route of participant ``name``, whose number is ``index``."""
    layout = segment.layout
    outlets = []
    for route in layout.routes_of(name):
        recipient = layout.index(route.recipient)
        control = layout.control_word(recipient)
        ring = _ring(segment, name, route.recipient, to_write=True)
        address, quota = index << 16 | recipient, layout.quota(name)
        outlet = Outlet(route.recipient, address, ring, control + C_SLEEP, quota)
        if not segment.has_room(recipient):
            outlet.room_word = control + C_ROOM
        outlets.append(outlet)
    return outlets


def places(segment: Segment, index: int) -> list[ListPlace]:
    """Where messages to participant ``index`` may stand: a place for each lane, or the one shared list."""
    layout = segment.layout
    rings: dict[int, tuple[str, PayloadRing]] = {}
    for route in layout.routes:
        if route.recipient == layout.participants[index]:
            ring = _ring(segment, route.sender, route.recipient, to_write=False)
            rings[layout.index(route.sender) << 16 | index] = (route.sender, ring)
    if layout.form == "shared":
        base, where = layout.list_word, f"{segment.path}, the shared list"
        return [
            ListPlace(layout, 0, len(layout.participants), base + L_HEAD, base + L_FRONT, index, rings, where)
        ]
    found = []
    for address, (name, ring) in rings.items():
        sender = address >> 16
        control, where = layout.control_word(sender), f"{segment.path}, lane of {name}"
        found.append(
            ListPlace(
                layout, sender, 1, control + C_HEAD, control + C_FRONT, index, {address: (name, ring)}, where
            )
        )
    return found
