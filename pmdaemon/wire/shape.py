"""Frames that differ in their numbers only: recognised by one mask, read by one ``struct`` call.

CUT and REPLY are made by one program from one pattern: of two of them, only the bytes that hold numbers
differ (and the blob), as long as no number outgrows its msgpack width. A ``Shape`` is *learned* from the head
(prefix and header) of a frame that was decoded and accepted:

    head        1c 25 00 00 71 00 04 00 8c a3 's' 'e' 'q' cd 01 2c a1 't' cf 00 05 ...
    mask        00 00 00 00 ff ff ff ff ff ff  ff  ff  ff ff 00 00 ff  ff ff 80 00 ...  numbers are free
    pattern     00 00 00 00 71 00 04 00 8c a3 's' 'e' 'q' cd 00 00 a1 't' cf 00 00 ...  head under the mask
    fields                                                   H                          what is asked for

A head whose bytes under the mask are the pattern is of the same kind, with the same keys in the same order
and numbers of the same types, so decoding it would have given the same map with other numbers. The highest bit of a number of
8 bytes is not free: what is accepted is below 2^63 (``free_keys`` are exempt). Everything that is not an
unsigned number, 16 bytes of identity or a list of numbers must be as it was when learned.

A head of another shape (longer numbers, an older agent) is nobody's fault: it is decoded the usual way.

Pure; no clock, no sockets. Source: P10 (work for one gateway is short); notes/polling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any, Final

from pmdaemon.wire.frame import PREFIX, decode

SHAPES_A_SIZE: Final = 4  # of equal size are, say, a cut with a long seq and one with a long histogram
_NUMBER_CODES: Final = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"}
_from_bytes = int.from_bytes
_BIN_16: Final = b"\xc4\x10"
_FREE: Final = {"B": b"\0", "H": b"\0\0", "I": bytes(4), "Q": b"\x80" + bytes(7)}


class _Unlearnable(Exception):
    """This header has something that no shape can describe."""


class _Learner:
    """Walks one msgpack map behind a frame's prefix and notes what is free."""

    def __init__(self, head: bytes, wanted: Sequence[str], free_keys: Collection[str]) -> None:
        self._head = head
        self._wanted = list(wanted)
        self._free_keys = free_keys
        self._at = PREFIX.size
        self.mask = bytearray(bytes(4) + b"\xff" * (PREFIX.size - 4))  # the length is free
        self.fields = f">{PREFIX.size}x"

    def walk(self) -> None:
        """The whole header."""
        pairs = self._byte() ^ 0x80
        if pairs > 15:
            raise _Unlearnable
        self._fix(1)
        for _ in range(pairs):
            key = self._key()
            wanted = bool(self._wanted) and key == self._wanted[0]
            if wanted:
                self._wanted.pop(0)
            self._value(wanted, key in self._free_keys)
        if self._wanted or self._at != len(self._head):
            raise _Unlearnable

    def _byte(self) -> int:
        if self._at >= len(self._head):
            raise _Unlearnable
        return self._head[self._at]

    def _fix(self, size: int) -> None:
        """These bytes must always be as they are."""
        self.mask += b"\xff" * size
        self.fields += f"{size}x"
        self._at += size

    def _key(self) -> str:
        size = self._byte() ^ 0xA0
        if size > 31:
            raise _Unlearnable
        start = self._at + 1
        self._fix(1 + size)
        return self._head[start : start + size].decode()

    def _value(self, wanted: bool, is_free: bool) -> None:
        kind = self._byte()
        if kind < 0x80:  # the number is in this byte
            self._number("B", b"\x80", wanted)
        elif (code := _NUMBER_CODES.get(kind)) is not None:
            self._fix(1)
            self._number(code, bytes(8) if is_free and code == "Q" else _FREE[code], wanted)
        elif self._head.startswith(_BIN_16, self._at):
            self._fix(2)
            self._number("16s", bytes(16), wanted)
        elif wanted:
            raise _Unlearnable
        elif 0x90 <= kind <= 0x92:
            self._fix(1)
            for _ in range(kind - 0x90):
                self._value(wanted=False, is_free=is_free)
        elif kind >= 0xE0 or kind == 0xC0:  # -1 to -32, or nothing
            self._fix(1)
        else:
            raise _Unlearnable

    def _number(self, code: str, mask: bytes, wanted: bool) -> None:
        self.mask += mask
        self.fields += code if wanted else f"{len(mask)}x"
        self._at += len(mask)


class Shape:
    """One form of a head.

    Attributes:
        size: bytes of the head.
        mask, pattern: as above, as little-endian integers.
        least_bytes: of a frame with this head: the head, padded to a multiple of 8.
        read: the wanted values, in the order asked for, from a buffer and the frame's offset in it.
    """

    __slots__ = ("least_bytes", "mask", "pattern", "read", "size")

    def __init__(self, head: bytes, mask: bytes, fields: str) -> None:
        self.size = len(head)
        self.mask = int.from_bytes(mask, "little")
        self.pattern = int.from_bytes(head, "little") & self.mask
        self.least_bytes = len(head) + -len(head) % 8
        self.read = struct.Struct(fields).unpack_from


def learn(
    head: bytes, decoded: dict[str, Any], wanted: Sequence[str], free_keys: Collection[str] = ()
) -> Shape | None:
    """The shape of a head, or None if it has none.

    Args:
        head: prefix and header of a frame that the caller has accepted.
        decoded: what the header says; a key that stands there twice cannot be described.
        wanted: keys whose values ``Shape.read`` returns; must stand in this order.
        free_keys: keys whose numbers may use all of 64 bits.
    """
    learner = _Learner(head, wanted, free_keys)
    try:
        learner.walk()
    except _Unlearnable:
        return None
    if len(decoded) != head[PREFIX.size] ^ 0x80:
        return None
    return Shape(head, bytes(learner.mask), learner.fields)


class Shapes:
    """Shapes of one kind of frame, by the length of the header; the newest few of each length."""

    def __init__(self, wanted: Sequence[str], free_keys: Collection[str] = ()) -> None:
        self._wanted = wanted
        self._free_keys = free_keys
        self._by_header_bytes: dict[int, list[Shape]] = {}

    def match(self, data: memoryview, at: int, end: int) -> tuple[int, Shape] | None:
        """(size in bytes, shape) of the frame in ``data[at:end]``; None if it is not whole or of no known shape."""
        if end - at < PREFIX.size:
            return None
        for shape in self._by_header_bytes.get(data[at + 4] | data[at + 5] << 8, ()):
            head = _from_bytes(data[at : at + shape.size], "little")
            if head & shape.mask == shape.pattern:
                size = (head & 0xFFFFFFFF) + 4
                is_whole = shape.least_bytes <= size <= end - at and not size & 7
                return (size, shape) if is_whole else None
        return None

    def learn(self, raw: memoryview) -> None:
        """Learn the shape of an accepted frame, unless it is known or has none."""
        if self.match(raw, 0, len(raw)) is not None:
            return
        _, header_bytes, _, _ = PREFIX.unpack_from(raw)
        head = bytes(raw[: PREFIX.size + header_bytes])
        shape = learn(head, decode(raw).header, self._wanted, self._free_keys)
        if shape is not None:
            known = self._by_header_bytes.setdefault(header_bytes, [])
            known.insert(0, shape)
            del known[SHAPES_A_SIZE:]
