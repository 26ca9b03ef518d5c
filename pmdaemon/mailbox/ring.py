"""Payload ring of one route: where the bytes lie, what room is left, bundles, and the checksum.

Positions count bytes since the segment was made and never wrap; the place in the ring is the position
modulo its size, and a payload that meets the ring's end goes on at its beginning. The sender alone moves
both ends: ``written`` when it posts, ``freed`` when it sees that a slot was TAKEN. Neither is stored in
shared memory: after a crash both follow from the slots still linked.

**Checksum.** crc32 of all bytes, by ISA-L (ADR 37), at any length; it costs less than the copies do. It
guards against stray stores and stale positions, not against an attacker.

**Growth.** Of a large ring only the first part is reserved when the segment is made. While nothing is
pending, writing goes back to the ring's start when it is past half of that part, or the next payload does not
fit behind it: a ring with little to carry needs no more, and one that cannot grow has room for all that its
first part holds. When a payload does not fit and the rest of the ring would do, the sender reserves twice as
much. It never goes back with something pending: the ring holds as much as if all of it had been reserved. How
much is reserved only the sender knows; after a restart it begins with the first part, or where it writes, and
to reserve again what is reserved changes nothing.

**Bundle.** A slot, its checksum, its place in the ring, its link and its release cost about a microsecond in
Python, whatever it carries. A bundle pays that once for up to 64 messages of one ``post_many``:

    directory  n lengths, u32 each, and 4 bytes more if n is odd
    payloads   back to back, without gaps: aligned to 8 bytes as long as their lengths are multiples of 8

n is in the slot's CHECK word, the checksum covers all of it, and the messages' sequence numbers are that of
the slot and those that follow. The sender writes a bundle as one copy before any process can reach it, so a
crash leaves all of it or nothing. The recipient takes, releases and returns single messages all the same: bit
i of the slot's DONE word says that message i was released. When the last one is, the slot becomes TAKEN
instead. DONE is one word, which is why 64 is the limit, and one store, which is why no crash leaves half of
it.

Invariant: 0 <= written - freed <= size; every payload of a READY slot lies within [freed, written).

Thread: ``PayloadRing`` is stateless; ``Outlet`` belongs to the posting thread.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Final

from isal.isal_zlib import crc32

from pmdaemon.mailbox.layout import BUNDLE_SHIFT

BUNDLE_MESSAGES: Final = 64
"""Bits of the DONE word; and what the slot costs is then 1 or 2 % of the whole."""
BUNDLED_BYTES: Final = 16_384
"""Longest payload in a bundle; longer ones get slots of their own."""
BUNDLE_BYTES: Final = 262_144
"""Payload bytes of one bundle: what a recipient takes at once unless it asks for another limit. A bundle
taken in parts is checked again for each."""
LENGTHS: Final = tuple(struct.Struct(f"={count}I{count % 2 * 4}x") for count in range(BUNDLE_MESSAGES + 1))


Piece = tuple[int, int, int]
"""(first, number, span): ``number`` payloads from ``first`` on, ``span`` bytes in one slot's ring space."""


def plan(lengths: Sequence[int]) -> list[Piece]:
    """Divide payloads of these lengths, in order, among slots: bundles where they are small."""
    total, count = sum(lengths), len(lengths)
    if max(lengths) <= BUNDLED_BYTES:
        if 1 < count <= BUNDLE_MESSAGES and total <= BUNDLE_BYTES:
            return [(0, count, directory_bytes(count) + total)]
    elif min(lengths) > BUNDLED_BYTES:
        return [(at, 1, length) for at, length in enumerate(lengths)]
    return list(_plan(lengths))


def _plan(lengths: Sequence[int]) -> Iterator[Piece]:
    first = collected = 0
    for at, length in enumerate(lengths):
        alone = length > BUNDLED_BYTES
        if at > first and (alone or collected + length > BUNDLE_BYTES or at - first == BUNDLE_MESSAGES):
            yield _piece(first, at - first, collected)
            first, collected = at, 0
        if alone:
            yield at, 1, length
            first = at + 1
        else:
            collected += length
    if first < len(lengths):
        yield _piece(first, len(lengths) - first, collected)


def _piece(first: int, number: int, total: int) -> Piece:
    """``number`` payloads from ``first`` on, ``total`` bytes; a single one needs no directory."""
    return first, number, total if number == 1 else total + directory_bytes(number)


def directory_bytes(count: int) -> int:
    """Size of the directory of a bundle of ``count`` messages."""
    return 4 * count + 7 & -8


def shrink(lengths: Sequence[int], piece: Piece, room_bytes: int) -> Piece | None:
    """The longest beginning of a piece that fits; None if not even its first payload does."""
    first, number, _ = piece
    totals = list(accumulate(lengths[first : first + number - 1]))
    shorter = [_piece(first, fewer, total) for fewer, total in enumerate(totals, 1)]
    fitting = bisect_right(shorter, room_bytes, key=itemgetter(2))
    return shorter[fitting - 1] if fitting else None


def bundle(
    payloads: Sequence[bytes | memoryview], lengths: Sequence[int], first: int, count: int
) -> list[bytes | memoryview]:
    """A bundle of ``count`` of the payloads from ``first`` on: its directory, then they."""
    return [LENGTHS[count].pack(*lengths[first : first + count]), *payloads[first : first + count]]


def messages_in(check: int) -> int:
    """Number of messages of a bundle by its CHECK word; 0 for a plain slot."""
    return check >> BUNDLE_SHIFT


def offsets(data: bytes | memoryview, count: int) -> list[int] | None:
    """Where each payload of a bundle begins, and where the last one ends; None if it contradicts itself."""
    if not 0 < count <= BUNDLE_MESSAGES or directory_bytes(count) > len(data):
        return None
    ends = list(accumulate(LENGTHS[count].unpack_from(data), initial=directory_bytes(count)))
    return ends if ends[-1] == len(data) else None


def all_done(count: int) -> int:
    """DONE when every message of a bundle is released."""
    return (1 << count) - 1


IN_PLACE_BYTES: Final = 65_536
"""Larger bundles are written, checked and read payload by payload: a copy of the whole on the way would cost
more than the slices that it saves."""


class PayloadRing:
    """Copies payloads into and out of one ring. ``size`` in bytes, a multiple of 64.

    Attributes:
        start, end: offsets of the ring in the segment, in bytes.
    """

    __slots__ = ("_map", "_view", "end", "size", "start")

    def __init__(self, memory: mmap.mmap, view: memoryview, at_bytes: int, size: int) -> None:
        self._map = memory
        self._view = view
        self.start = at_bytes
        self.end = at_bytes + size
        self.size = size

    def write(self, position: int, payload: bytes | memoryview, length: int) -> None:
        """Copy ``payload`` (``length`` bytes, at most ``size``) to ``position``."""
        start = self.start + position % self.size
        end = start + length
        if end <= self.end:
            self._map[start:end] = payload
        else:
            first = self.end - start
            self._map[start : self.end] = payload[:first]
            self._map[self.start : end - self.size] = payload[first:]

    def write_parts(self, position: int, parts: Sequence[bytes | memoryview], length: int) -> int:
        """Copy ``parts`` (``length`` bytes together) to ``position``, one after the other; their checksum."""
        start = self.start + position % self.size
        if length <= IN_PLACE_BYTES or start + length > self.end:
            data: bytes | memoryview = b"".join(parts)
            self.write(position, data, length)
        else:
            data = self._view[start : start + length]
            for part in parts:
                end = start + len(part)
                self._map[start:end] = part
                start = end
        return crc32(data)

    def read(self, position: int, length: int) -> bytes:
        """Copy out ``length`` bytes (at most ``size``, checked by the caller)."""
        start = self.start + position % self.size
        end = start + length
        if end <= self.end:
            return self._map[start:end]
        return self._map[start : self.end] + self._map[self.start : end - self.size]

    def view(self, position: int, length: int) -> memoryview:
        """The bytes where they lie, read-only; a copy if they meet the ring's end."""
        start = self.start + position % self.size
        end = start + length
        if end <= self.end:
            return self._view[start:end].toreadonly()
        return memoryview(self.read(position, length))


class Outlet:
    """The sender's side of one route.

    Attributes:
        address: sender << 16 | recipient, as in a slot's ADDRESS word.
        sleep_word: index of the recipient's SLEEP word.
        quota: slots this route may hold at once.
        written, limit: ring positions, see the module; ``limit`` is freed + size, where writing must end.
        pending: slots of this route not freed yet, in the order of their payloads.
        size, start, end: of the ring, in bytes.
        reserved: bytes of the ring from its start on that are reserved; ``limit`` stays within them.
        reclaim_at: number of pending slots at which to search for taken ones.
        room_word: index of the recipient's ROOM word, or 0 once its room is known to be reserved. Until then
            ``limit`` and ``reclaim_at`` let nothing in.
    """

    __slots__ = (
        "_freed",
        "_reserve",
        "address",
        "end",
        "limit",
        "pending",
        "quota",
        "recipient",
        "reclaim_at",
        "reserved",
        "ring",
        "room_word",
        "size",
        "sleep_word",
        "start",
        "written",
    )

    def __init__(self, recipient: str, address: int, ring: PayloadRing, sleep_word: int, quota: int) -> None:
        self.recipient = recipient
        self.address = address
        self.ring = ring
        self.size = ring.size
        self.start = ring.start
        self.end = ring.end
        self.sleep_word = sleep_word
        self.quota = quota
        self.written = 0
        self._reserve: Callable[[int, int], bool] | None = None
        self.reserved = ring.size
        self._freed = 0
        self.limit = self.reserved
        self.pending: deque[int] = deque()
        self.reclaim_at = 0
        self.room_word = 0

    def reserve_first(self, first_bytes: int, reserve: Callable[[int, int], bool]) -> None:
        """Only so much of the ring is reserved; ``reserve`` reserves more, by offset and size, if it can."""
        self.reserved, self._reserve = first_bytes, reserve

    def block(self) -> None:
        """Let nothing in."""
        self.limit, self.reclaim_at = -1, 0

    def set_ends(self, written: int, freed: int) -> None:
        """Set both ends to what the slots say."""
        self.written, self._freed = written, freed
        while self.reserved < written % self.size:  # a process of this name has written there
            self.reserved = min(2 * self.reserved, self.size)
        self._set_limit()

    def free_up_to(self, position: int, need: int) -> None:
        """Everything before ``position`` may be overwritten; ``written`` if nothing is pending.

        ``need``: bytes that should find room next.
        """
        place = self.written % self.size
        if not self.pending and self.reserved < self.size and place + max(place, need) >= self.reserved:
            position = self.written = self.written + self.size - place
        self._freed = position
        self._set_limit()

    def _set_limit(self) -> None:
        self.limit = self._freed + self.size
        if self.reserved < self.size:
            lap = self.written - self.written % self.size
            self.limit = min(self.limit, lap + self.reserved)

    def grow(self, need: int) -> None:
        """Reserve more of the ring if that makes room for ``need`` bytes, or for some of them."""
        if self._reserve is None or self.room_word:
            return
        while self.written + need > self.limit < self._freed + self.size and self.reserved < self.size:
            more = min(2 * self.reserved, self.size)
            if not self._reserve(self.start + self.reserved, more - self.reserved):
                return
            self.reserved = more
            self._set_limit()

    def place(self, position: int, length: int) -> int:
        """Where a bundle of ``length`` bytes goes that may start at ``position``: on, or at the ring's start.

        The rest of the ring is left out if there is room for that, so that a bundle lies in one piece.
        """
        rest = self.size - position % self.size
        if length <= rest or position + rest + length > self.limit:
            return position
        return position + rest
