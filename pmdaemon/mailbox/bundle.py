"""Several small messages in one slot: what `post_many` makes of them, and how a recipient opens it.

A slot, its checksum, its place in the ring, its link and its release cost about a microsecond in Python,
whatever it carries. A *bundle* pays that once for up to 64 messages of one `post_many`:

    directory  n lengths, u32 each
    payloads   back to back, without gaps

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
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from pmdaemon.mailbox.layout import BUNDLE_SHIFT

BUNDLE_MESSAGES: Final = 64
"""Bits of the DONE word; and what the slot costs is then 1 or 2 % of the whole."""
BUNDLE_PAYLOAD_BYTES: Final = 16_384
"""Longer payloads get slots of their own: a slot is cheap beside their copy, and views are then aligned."""
BUNDLE_BYTES: Final = 262_144
"""Payload of one bundle: what a recipient takes at once unless told otherwise."""
LENGTHS: Final = tuple(struct.Struct(f"={count}I") for count in range(BUNDLE_MESSAGES + 1))


Piece = tuple[int, int, int]
"""(first, number, span): ``number`` payloads from ``first`` on, ``span`` bytes in one slot's ring space."""


def plan(lengths: Sequence[int]) -> list[Piece]:
    """Divide payloads of these lengths, in order, among slots: bundles where they are small."""
    total, count = sum(lengths), len(lengths)
    if max(lengths) <= BUNDLE_PAYLOAD_BYTES:
        if 1 < count <= BUNDLE_MESSAGES and total <= BUNDLE_BYTES:
            return [(0, count, 4 * count + total)]  # the usual case
    elif min(lengths) > BUNDLE_PAYLOAD_BYTES:
        return [(at, 1, length) for at, length in enumerate(lengths)]
    return list(_plan(lengths))


def _plan(lengths: Sequence[int]) -> Iterator[Piece]:
    first = held = 0
    for at, length in enumerate(lengths):
        alone = length > BUNDLE_PAYLOAD_BYTES
        if at > first and (alone or held + length > BUNDLE_BYTES or at - first == BUNDLE_MESSAGES):
            yield first, at - first, span(lengths, first, at - first)
            first, held = at, 0
        if alone:
            yield at, 1, length
            first = at + 1
        else:
            held += length
    if first < len(lengths):
        yield first, len(lengths) - first, span(lengths, first, len(lengths) - first)


def span(lengths: Sequence[int], first: int, number: int) -> int:
    """Bytes of ``number`` payloads from ``first`` on in one slot; a single one needs no directory."""
    total = sum(lengths[first : first + number])
    return total if number == 1 else total + 4 * number


def shrink(lengths: Sequence[int], piece: Piece, room_bytes: int) -> Piece | None:
    """The longest beginning of a piece that fits; None if not even its first payload does."""
    first, number, _ = piece
    for fewer in range(number - 1, 0, -1):
        size = span(lengths, first, fewer)
        if size <= room_bytes:
            return first, fewer, size
    return None


def messages_in(check: int) -> int:
    """Number of messages of a bundle by its CHECK word; 0 for a plain slot."""
    return check >> BUNDLE_SHIFT


def offsets(data: bytes | memoryview, count: int) -> list[int] | None:
    """Where each payload of a bundle begins, and where the last one ends; None if it contradicts itself."""
    if not 0 < count <= BUNDLE_MESSAGES or 4 * count > len(data):
        return None
    ends = list(accumulate(LENGTHS[count].unpack_from(data), initial=4 * count))
    return ends if ends[-1] == len(data) else None


def all_done(count: int) -> int:
    """DONE when every message of a bundle is released."""
    return (1 << count) - 1
