r"""Byte map of a segment, and nothing that moves data.

All words are 8 bytes, aligned, native order (x86-64: little-endian).

    offset         size        part
    0              128         header
    128            n * 64      names, UTF-8, NUL-padded           static, covered by TABLES_CRC
    ROUTES         r * 16      routes {sender|recipient, bytes}   static, covered by TABLES_CRC
    (to 64)
    CONTROL        n * 320     control blocks, five cache lines a participant
    LIST           128         mutex and ends of the one list; used by the form `shared` only
    SLOTS          n * s * 64  slots, s a participant; written by it alone but for READY -> TAKEN and DONE
                               (and in the form `shared` NEXT and PREVIOUS, written under the mutex)
    RINGS          sum of ring_bytes                              one ring a route, in the table's order

Header words: MAGIC, VERSION, MACHINE, TOTAL_BYTES, PARTICIPANTS, ROUTES, SLOTS, TABLES_CRC, OWNER_PID,
OWNER_START, CREATED_US, FORM (0 `lanes`, 1 `shared`), CHECKSUM (0: of whole payloads), DAMAGED,
FIRST_BYTES (of a ring, what is reserved before the rest is needed; module ``ring``). They
are written before the file gets its name; later only OWNER, by the next server that keeps the segment, and
DAMAGED, set by the process that meets damage.

Control block of participant i (word: writer):

    line 0  INCARNATION, PID, START: the participant, at attach and close; ROOM: 1 when the participant's
            slots and the rings from and to it are reserved, stored by the process that has reserved them
    line 1  HEAD, FRONT, SEQUENCE: the participant as sender (HEAD and FRONT in the form `lanes` only)
    line 2  SLEEP: set by the participant, cleared by it and by senders that ring its bell
    line 3  figures of the posting thread, for onlookers: POSTS, BYTES, FULL, RECLAIMED, RINGS, BUSY
    line 4  figures of the taking thread, for onlookers: TAKES, BYTES, SCANS, INSPECTED, RESETS, DISCARDED,
            THRESHOLD, HELD

List block:

    words 0-4  a pthread mutex: robust, shared by processes (glibc, 40 bytes)
    word  8    HEAD    9 TAIL (index + 1)    10 URGENT: last urgent slot (index + 1)    11 FRONT
    word  12   DIRTY: 0, or while the list is changed index + 1 of the slot being unlinked, or ~0

Slot:

    word  name      content
    0     STATE     generation << 8 | FREE, READY or TAKEN
    1     NEXT      reference of the next slot, 0 at the end
    2     ADDRESS   length << 32 | sender << 16 | recipient
    3     POSITION  of the payload in its ring, counted since the ring was made; modulo its size: the place
    4     CHECK     messages << 40 | urgent << 32 | checksum of the payload (module ``ring``)
    5     SEQUENCE  of the sender's post; copies of one post share it
    6     PREVIOUS  form `shared`: index + 1 of the slot before, 0 at the head
    7     DONE      of a bundle: bit i, message i was released; written by the recipient

A slot carries one message, or, if the ``messages`` of its CHECK are not 0, a *bundle* of as many (module
``ring``). SEQUENCE is then that of the first.

A reference is generation << 32 | (index + 1); in the form `lanes` the index counts within the sender's lane,
in the form `shared` over all slots. A generation (32 bits) grows by one each time the slot is
freed, so a reference names one *use* of a slot.

Source: M1, M2; DESIGN.md 3 "Mailboxes".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pmdaemon.mailbox.errors import LayoutInvalid

MAGIC: Final = int.from_bytes(b"SLAMBOX\n", "little")
LAYOUT_VERSION: Final = 7
MACHINE_X86_64: Final = 62  # EM_X86_64 of the ELF specification

# Header words
H_MAGIC, H_VERSION, H_MACHINE, H_TOTAL_BYTES, H_PARTICIPANTS, H_ROUTES, H_SLOTS, H_TABLES_CRC = range(8)
H_OWNER_PID, H_OWNER_START, H_CREATED_US, H_FORM, H_CHECKSUM, H_DAMAGED, H_FIRST_BYTES = range(8, 15)

# Control words, relative to ``Layout.control_word``
C_INCARNATION, C_PID, C_START, C_ROOM = range(4)
C_HEAD, C_FRONT, C_SEQUENCE = 8, 9, 10
C_SLEEP: Final = 16
C_POSTS, C_POSTED_BYTES, C_FULL, C_RECLAIMED, C_RINGS, C_BUSY = range(24, 30)
C_TAKES, C_TAKEN_BYTES, C_SCANS, C_INSPECTED, C_RESETS, C_DISCARDED, C_THRESHOLD, C_HELD = range(32, 40)

# List words, relative to ``Layout.list_word``
L_MUTEX: Final = 0
L_HEAD, L_TAIL, L_URGENT, L_FRONT, L_DIRTY = range(8, 13)

# Slot words, relative to the slot's first word
S_STATE, S_NEXT, S_ADDRESS, S_POSITION, S_CHECK, S_SEQUENCE, S_PREVIOUS, S_DONE = range(8)
SLOT_WORDS: Final = 8

FREE, READY, TAKEN = 0, 1, 2  # TAKEN must be READY + 1: the taker adds one
FLAG_URGENT: Final = 1 << 32  # within CHECK
BUNDLE_SHIFT: Final = 40  # within CHECK: number of messages, 0 for a plain slot
MASK32: Final = 0xFFFFFFFF
COUNT_LIMIT: Final = 1 << 62  # no sequence or position gets there; a larger one is damage

HEADER_BYTES: Final = 128
NAME_BYTES: Final = 64
ROUTE: Final = struct.Struct("<II Q")  # static table only: never used on a word that changes
CONTROL_BYTES: Final = 320
LIST_BYTES: Final = 128
SLOT_BYTES: Final = SLOT_WORDS * 8
RING_UNIT_BYTES: Final = 64  # a cache line, so that two rings never share one
MAX_PARTICIPANTS: Final = 512  # far above any server; a sane bound for what is read from a file
MAX_SLOTS: Final = 1 << 20
MAX_RING_BYTES: Final = 1 << 31  # lengths are 32-bit
FIRST_BYTES: Final = 1 << 20  # several rounds of a small fleet; a large one doubles it within seconds
FORMS: Final = ("lanes", "shared")  # the index is what the header holds
CHECKSUM_FULL: Final = 0  # the header's CHECKSUM; 1 was a kind that covered both ends of large payloads only
_NAME_RE: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Route:
    """Payload ring from one sender to one recipient. ``ring_bytes``: a multiple of 64."""

    sender: str
    recipient: str
    ring_bytes: int


@dataclass(frozen=True)
class Layout:
    """Participants of a segment, routes between them, and how much room each has.

    Attributes:
        participants: names; they become file names (doorbells), hence lower case, digits, ``-`` and ``_``.
        routes: one ring for each (sender, recipient); pairs without a route cannot post to each other.
        slots_per_sender: messages one sender may have outstanding, divided equally among its routes, so that
            a recipient that takes nothing costs the others nothing. At least one a route, and one more.
        form: ``lanes``, a list for each sender, or ``shared``, one list for all in order of arrival.
        first_bytes: what is reserved of a larger ring until its sender needs more; a multiple of 64.

    Raises:
        LayoutInvalid: names the entry and what it must be.
    """

    participants: tuple[str, ...]
    routes: tuple[Route, ...]
    slots_per_sender: int = 1024
    form: str = "lanes"
    first_bytes: int = FIRST_BYTES

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise LayoutInvalid(f"form is {self.form!r}, must be one of {', '.join(FORMS)}")
        if self.first_bytes % RING_UNIT_BYTES or not RING_UNIT_BYTES <= self.first_bytes <= MAX_RING_BYTES:
            raise LayoutInvalid(
                f"first_bytes is {self.first_bytes}, must be a multiple of {RING_UNIT_BYTES} "
                f"up to {MAX_RING_BYTES}"
            )
        self._check_participants()
        pairs = set()
        for route in self.routes:
            self._check_route(route)
            pairs.add((route.sender, route.recipient))
        if len(pairs) != len(self.routes):
            raise LayoutInvalid("a route is given twice")
        if not 2 <= self.slots_per_sender <= MAX_SLOTS:
            raise LayoutInvalid(f"slots_per_sender is {self.slots_per_sender}, must be 2 to {MAX_SLOTS}")
        for name in self.participants:
            routes = len(self.routes_of(name))
            if routes and not self.quota(name):
                raise LayoutInvalid(
                    f"slots_per_sender of {self.slots_per_sender} is too small for the {routes} routes of "
                    f"{name!r}; use at least {routes + 1}"
                )

    def _check_participants(self) -> None:
        if not 1 <= len(self.participants) <= MAX_PARTICIPANTS:
            raise LayoutInvalid(f"{len(self.participants)} participants, must be 1 to {MAX_PARTICIPANTS}")
        for name in self.participants:
            if not _NAME_RE.fullmatch(name):
                raise LayoutInvalid(f"participant {name!r}: use 1 to 63 of a-z, 0-9, - and _")
        if len(set(self.participants)) != len(self.participants):
            raise LayoutInvalid("a participant is given twice")

    def _check_route(self, route: Route) -> None:
        for name in (route.sender, route.recipient):
            if name not in self.participants:
                raise LayoutInvalid(f"route {route.sender} -> {route.recipient}: {name!r} is no participant")
        size = route.ring_bytes
        if size % RING_UNIT_BYTES or not RING_UNIT_BYTES <= size <= MAX_RING_BYTES:
            raise LayoutInvalid(
                f"route {route.sender} -> {route.recipient}: ring_bytes is {size}, must be a multiple of "
                f"{RING_UNIT_BYTES} up to {MAX_RING_BYTES}"
            )

    def index(self, name: str) -> int:
        """Number of a participant; ``ValueError`` if there is none of that name."""
        return self.participants.index(name)

    def routes_of(self, sender: str) -> tuple[Route, ...]:
        """Routes on which ``sender`` may post."""
        return tuple(route for route in self.routes if route.sender == sender)

    def quota(self, sender: str) -> int:
        """Slots each route of ``sender`` may hold; one slot of the lane is spare (the parked tail)."""
        return (self.slots_per_sender - 1) // max(1, len(self.routes_of(sender)))

    @property
    def routes_at_bytes(self) -> int:
        """Offset of the route table."""
        return HEADER_BYTES + NAME_BYTES * len(self.participants)

    @property
    def control_at_bytes(self) -> int:
        """Offset of the control blocks."""
        return _round_up(self.routes_at_bytes + ROUTE.size * len(self.routes), 64)

    @property
    def list_at_bytes(self) -> int:
        """Offset of the list block."""
        return self.control_at_bytes + CONTROL_BYTES * len(self.participants)

    @property
    def list_word(self) -> int:
        """Index of the first word of the list block."""
        return self.list_at_bytes // 8

    @property
    def slots_at_bytes(self) -> int:
        """Offset of the slots."""
        return self.list_at_bytes + LIST_BYTES

    @property
    def rings_at_bytes(self) -> int:
        """Offset of the rings."""
        return self.slots_at_bytes + SLOT_BYTES * self.slots_per_sender * len(self.participants)

    @property
    def total_bytes(self) -> int:
        """Size of the segment."""
        return self.rings_at_bytes + sum(route.ring_bytes for route in self.routes)

    def control_word(self, participant: int) -> int:
        """Index of the first word of a participant's control block."""
        return (self.control_at_bytes + CONTROL_BYTES * participant) // 8

    def slots_word(self, participant: int) -> int:
        """Index of the first word of a participant's slots."""
        return (self.slots_at_bytes + SLOT_BYTES * self.slots_per_sender * participant) // 8

    def ring_at_bytes(self, sender: str, recipient: str) -> tuple[int, int]:
        """Offset and size of a route's ring.

        Raises:
            KeyError: there is no such route.
        """
        for route, at_bytes in self._rings():
            if (route.sender, route.recipient) == (sender, recipient):
                return at_bytes, route.ring_bytes
        raise KeyError((sender, recipient))

    def room(self, name: str) -> list[tuple[int, int]]:
        """Offset and size of what participant ``name`` needs to start: slots, first parts of its rings."""
        found = [self._slots_of(name)]
        for route, at_bytes in self._rings():
            if name in (route.sender, route.recipient):
                found.append((at_bytes, min(route.ring_bytes, self.first_bytes)))
        return _joined(found)

    def _slots_of(self, name: str) -> tuple[int, int]:
        return self.slots_word(self.index(name)) * 8, SLOT_BYTES * self.slots_per_sender

    def _rings(self) -> Iterator[tuple[Route, int]]:
        """Each route and the offset of its ring."""
        at_bytes = self.rings_at_bytes
        for route in self.routes:
            yield route, at_bytes
            at_bytes += route.ring_bytes

    def reserved_bytes(self, later: Collection[str] = ()) -> int:
        """Bytes of a new segment without the rooms of the participants ``later``."""
        return sum(size for _, size in self.reserved(later))

    def reserved(self, later: Collection[str]) -> list[tuple[int, int]]:
        """Offset and size of what a new segment needs, without the rooms of the participants ``later``."""
        left = [self._slots_of(name) for name in later]
        for route, ring_at_bytes in self._rings():
            is_later = route.sender in later or route.recipient in later
            first_bytes = 0 if is_later else min(route.ring_bytes, self.first_bytes)
            left.append((ring_at_bytes + first_bytes, route.ring_bytes - first_bytes))
        left = sorted(extent for extent in left if extent[1])
        found, at_bytes = [], 0
        for start, size in left:
            if start > at_bytes:
                found.append((at_bytes, start - at_bytes))
            at_bytes = max(at_bytes, start + size)
        if self.total_bytes > at_bytes:
            found.append((at_bytes, self.total_bytes - at_bytes))
        return found

    def tables(self) -> bytes:
        """The static tables, as they follow the header."""
        names = b"".join(name.encode().ljust(NAME_BYTES, b"\0") for name in self.participants)
        routes = b"".join(
            ROUTE.pack(self.index(route.sender), self.index(route.recipient), route.ring_bytes)
            for route in self.routes
        )
        return names + routes


def _joined(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few pieces as possible; ``extents`` in order."""
    found: list[tuple[int, int]] = []
    for at_bytes, size in extents:
        if found and sum(found[-1]) == at_bytes:
            at_bytes, size = found[-1][0], found.pop()[1] + size
        found.append((at_bytes, size))
    return found


def tables_bytes(participants: int, routes: int) -> int:
    """Size of the static tables."""
    return NAME_BYTES * participants + ROUTE.size * routes


def layout_from_tables(
    tables: bytes, participants: int, slots_per_sender: int, form: int = 0, first_bytes: int = FIRST_BYTES
) -> Layout:
    """Inverse of ``Layout.tables``.

    Raises:
        LayoutInvalid: the tables describe no valid layout.
    """
    split = NAME_BYTES * participants
    try:
        names = tuple(
            tables[start : start + NAME_BYTES].rstrip(b"\0").decode() for start in range(0, split, NAME_BYTES)
        )
        routes = tuple(
            Route(names[sender], names[recipient], size)
            for sender, recipient, size in ROUTE.iter_unpack(tables[split:])
        )
        form_name = FORMS[form]
    except (UnicodeDecodeError, IndexError, struct.error) as exc:
        raise LayoutInvalid(f"tables do not decode ({exc})") from exc
    return Layout(names, routes, slots_per_sender, form_name, first_bytes)
