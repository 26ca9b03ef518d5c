"""Several messages in one slot: what `post_many` makes of them, and how a recipient opens it.

A slot, its checksum, its place in the ring, its link and its release cost about a microsecond in Python,
whatever it carries. A *bundle* pays that once for up to 64 messages of one `post_many`:

    directory  n lengths, u32 each, and 4 bytes more if n is odd
    payloads   back to back, without gaps: aligned to 8 bytes as long as their lengths are multiples of 8

n stands in the slot's CHECK word, the checksum covers all of it, and the messages' sequence numbers are that
of the slot and those that follow. The sender writes a bundle as one copy before anybody can reach it, so a
crash leaves all of it or nothing.

**Done.** The recipient takes, releases and returns single messages all the same: bit i of the slot's DONE
word says that message i was released. When the last one is, the slot becomes TAKEN instead. DONE is one
word, which is why 64 is the limit, and one store, which is why no crash leaves half of it.

Pure: no shared memory is stored to here.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Final

from pmdaemon.mailbox.layout import BUNDLE_SHIFT

BUNDLE_MESSAGES: Final = 64
"""Bits of the DONE word; and what the slot costs is then 1 or 2 % of the whole."""
LIMITS: Final = {"full": (16_384, 262_144), "ends": (131_072, 2 << 20)}
"""Longest payload in a bundle, and payload bytes of one bundle, by the segment's kind of checksum. Longer
payloads get slots of their own. A bundle taken in parts is checked again for each: that is dear where all
bytes are checked, so the limit there is what a recipient takes at once unless told otherwise."""
LENGTHS: Final = tuple(struct.Struct(f"={count}I{count % 2 * 4}x") for count in range(BUNDLE_MESSAGES + 1))


Piece = tuple[int, int, int]
"""(first, number, span): ``number`` payloads from ``first`` on, ``span`` bytes in one slot's ring space."""


def plan(lengths: Sequence[int], limits: tuple[int, int]) -> list[Piece]:
    """Divide payloads of these lengths, in order, among slots: bundles where they are small (``LIMITS``)."""
    payload_bytes, bundle_bytes = limits
    total, count = sum(lengths), len(lengths)
    if max(lengths) <= payload_bytes:
        if 1 < count <= BUNDLE_MESSAGES and total <= bundle_bytes:
            return [(0, count, directory_bytes(count) + total)]  # the usual case
    elif min(lengths) > payload_bytes:
        return [(at, 1, length) for at, length in enumerate(lengths)]
    return list(_plan(lengths, payload_bytes, bundle_bytes))


def _plan(lengths: Sequence[int], payload_bytes: int, bundle_bytes: int) -> Iterator[Piece]:
    first = held = 0
    for at, length in enumerate(lengths):
        alone = length > payload_bytes
        if at > first and (alone or held + length > bundle_bytes or at - first == BUNDLE_MESSAGES):
            yield _piece(first, at - first, held)
            first, held = at, 0
        if alone:
            yield at, 1, length
            first = at + 1
        else:
            held += length
    if first < len(lengths):
        yield _piece(first, len(lengths) - first, held)


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
