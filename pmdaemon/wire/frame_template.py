"""Frames that differ in their numbers only: written, or recognised and read, by one ``struct`` call.

A POLL is the one frame made for every gateway at every interval. Its header is the same map as ever; only
its numbers are always written as msgpack's uint 64, so that a POLL of one epoch with at most one
acknowledgement is a byte pattern with holes. Any other POLL goes through ``frame.encode``; a reader sees no
difference.

The usual answer is a CUT and its REPLY in one read. Both are made by one program from one pattern: of two
answers only the bytes that hold numbers differ (and the blob), as long as no number outgrows its msgpack
width. A ``FrameTemplate`` is *learned* from an answer that was decoded and accepted. It looks at the CUT's
head (prefix and header) and the REPLY together, as if the blob between them were not there:

    answer    1c 25 00 00 71 00 04 00 8c a3 's' 'e' 'q' cd 01 2c a1 't' cf 00 05 ...  60 00 00 00 59 00 ...
    mask      00 00 00 00 ff ff ff ff ff ff  ff  ff  ff ff 00 00 ff  ff ff 80 00 ...  ff ff ff ff ff ff ...
    pattern   00 00 00 00 71 00 04 00 8c a3 's' 'e' 'q' cd 00 00 a1 't' cf 00 00 ...  60 00 00 00 59 00 ...
    fields                                                 H                          (what is asked for)

An answer whose bytes under the mask are the pattern has frames of the same kinds, with the same keys in the
same order and numbers of the same types, so decoding it would have given the same maps with other numbers.
The highest bit of a number of 8 bytes is not free: what is accepted is below 2^63 (``FREE_KEYS`` are exempt),
and times are below ``cut.MAX_TIME_US``, 2^53, so that their highest 11 bits are not free. What other bytes
hold (``sq`` of a CUT) is free, their number is not. Everything else that is not an unsigned number, 16 bytes
of identity, or a list or map of numbers must be as it was when learned. An answer of another shape (longer
numbers, an older agent) is no fault: it is decoded. A LIVE cut has another flag, so its answers have shapes
of their own.

Pure; no clock, no sockets.

Source: P10 (pre-encoded requests; work for one gateway is short).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from pmdaemon.errors import WireError
from pmdaemon.wire.frame import FLAG_LIVE, PREFIX, decode, encode, split
from pmdaemon.wire.kinds import Kind

SHAPES_A_SIZE: Final = 4  # of equal size are, say, a cut with a long seq and one with a long histogram
SIZES: Final = (
    4096  # sizes of answers that are remembered, a few hundred bytes each; then they are learned again
)
MOST_HEAD_BYTES: Final = 5 << 10
"""Of both headers of an answer that is learned: some 1,000 streams. Larger ones change from cut to cut."""
MOST_BYTES: Final = 8 << 20
"""That all shapes take, about, with those that others have replaced; then they are learned again."""
_OWN_BYTES: Final = 400  # of a shape, beside its heads
CUT_KEYS: Final = ("gw", "ep", "seq", "n", "h", "m")
REPLY_KEYS: Final = ("poll", "wall_us", "dropped")
FREE_KEYS: Final = ("ep",)  # random numbers of 64 bits
TIME_KEYS: Final = ("t", "d", "wall_us")
_NUMBER_CODES: Final = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"}
_from_bytes = int.from_bytes
_LEAST: Final = 2 * PREFIX.size
_BIN_16: Final = b"\xc4\x10"
_BYTES_8: Final = 0xC4  # their number is in one byte
_BYTES_16: Final = 0xC5  # in two
_FREE: Final = {"B": b"\0", "H": b"\0\0", "I": bytes(4), "Q": b"\x80" + bytes(7)}
_FREE_TIME: Final = b"\xff\xe0" + bytes(6)


class _Unlearnable(Exception):
    """This header has something that no shape can describe."""


class _Learner:
    """Walks one msgpack map behind a frame's prefix and notes what is free."""

    def __init__(self, head: bytes, wanted: Sequence[str], free_bytes: int) -> None:
        self._head = head
        self._wanted = list(wanted)
        self._at = PREFIX.size
        self.mask = bytearray(bytes(free_bytes) + b"\xff" * (PREFIX.size - free_bytes))
        self.fields = f"{PREFIX.size}x"

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
            self._value(wanted, key in FREE_KEYS, key in TIME_KEYS)
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

    def _value(self, wanted: bool, is_free: bool, is_time: bool = False) -> None:
        kind = self._byte()
        if kind < 0x80:  # the number is in this byte
            self._number("B", b"\x80", wanted)
        elif (code := _NUMBER_CODES.get(kind)) is not None:
            self._fix(1)
            if code == "Q" and (is_free or is_time):
                self._number(code, bytes(8) if is_free else _FREE_TIME, wanted)
            else:
                self._number(code, _FREE[code], wanted)
        elif self._head.startswith(_BIN_16, self._at):
            self._fix(2)
            self._number("16s", bytes(16), wanted)
        elif wanted:
            raise _Unlearnable
        elif kind in (_BYTES_8, _BYTES_16):
            prefix = 2 if kind == _BYTES_8 else 3
            size = _from_bytes(self._head[self._at + 1 : self._at + prefix], "big")
            self._fix(prefix)
            self._number("s", bytes(size), wanted=False)
        elif 0x80 <= kind <= 0x8F:
            self._fix(1)
            for _ in range(kind - 0x80):
                self._key()
                self._value(wanted=False, is_free=is_free)
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


class FrameTemplate:
    """One form of an answer.

    Attributes:
        head_bytes: of the CUT's head.
        blob_at: where the CUT's blob begins.
        tail_bytes: of the REPLY.
        mask, pattern: as above, as little-endian integers.
        read: the values of ``CUT_KEYS`` and ``REPLY_KEYS`` from head and tail together.
    """

    __slots__ = ("blob_at", "head_bytes", "mask", "pattern", "read", "tail_bytes")

    def __init__(self, head: bytes, tail: bytes) -> None:
        cut, reply = (
            _Learner(head, CUT_KEYS, free_bytes=4),
            _Learner(_unpadded(tail), REPLY_KEYS, free_bytes=0),
        )
        cut.walk()
        reply.walk()
        self.head_bytes = len(head)
        self.blob_at = len(head) + -len(head) % 8
        self.tail_bytes = len(tail)
        self.mask = int.from_bytes(cut.mask + reply.mask, "little")
        self.pattern = int.from_bytes(head + tail, "little") & self.mask
        self.read = struct.Struct(f">{cut.fields}{reply.fields}").unpack_from


def _unpadded(raw: bytes | memoryview) -> bytes:
    """A frame's prefix and header."""
    _, header_bytes, _, _ = PREFIX.unpack_from(raw)
    return bytes(raw[: PREFIX.size + header_bytes])


Match = tuple[int, int, tuple[Any, ...]]
"""(bytes of the CUT, bytes of its blob with padding, values of ``CUT_KEYS`` and ``REPLY_KEYS``)."""


class FrameTemplates:
    """Those learned, by the length of the CUT's header; the newest few of each length.

    Answers of one gateway nearly always have the same size. What a shape comes to with a size that was met
    before (both parts by one call, the CUT's length among the constants) is kept.
    """

    def __init__(self) -> None:
        self._by_header_bytes: dict[int, list[FrameTemplate]] = {}
        self._by_bytes: dict[int, list[tuple[Any, ...]]] = {}
        self._bytes = 0

    def match(self, data: memoryview, size: int) -> Match | None:
        """What the first ``size`` bytes of ``data`` say, if they are one whole answer of a known shape."""
        for parts, mask, pattern, read, cut_bytes, blob_bytes in self._by_bytes.get(size, ()):
            head, tail = parts(data)
            both = head + tail
            if _from_bytes(both, "little") & mask == pattern:
                return cut_bytes, blob_bytes, read(both)
        return self._match_of_new_size(data[:size])

    def _match_of_new_size(self, data: memoryview) -> Match | None:
        end = len(data)
        if end < _LEAST:
            return None
        for shape in self._by_header_bytes.get(data[4] | data[5] << 8, ()):
            tail_bytes = shape.tail_bytes
            both = data[: shape.head_bytes].tobytes() + data[end - tail_bytes :].tobytes()
            number = _from_bytes(both, "little")
            if number & shape.mask == shape.pattern:
                cut_bytes = (number & 0xFFFFFFFF) + 4
                if cut_bytes + tail_bytes != end or cut_bytes < shape.blob_at or cut_bytes & 7:
                    return None
                self._keep(end, shape, cut_bytes)
                return cut_bytes, cut_bytes - shape.blob_at, shape.read(both)
        return None

    def _keep(self, end: int, shape: FrameTemplate, cut_bytes: int) -> None:
        if len(self._by_bytes) >= SIZES:
            self._by_bytes.clear()
        self._make_room(shape.head_bytes + shape.tail_bytes)
        between = end - shape.head_bytes - shape.tail_bytes
        parts = struct.Struct(f"{shape.head_bytes}s{between}x{shape.tail_bytes}s").unpack_from
        mask, pattern = shape.mask | 0xFFFFFFFF, shape.pattern | (cut_bytes - 4)
        known = self._by_bytes.setdefault(end, [])
        known.insert(0, (parts, mask, pattern, shape.read, cut_bytes, cut_bytes - shape.blob_at))
        del known[SHAPES_A_SIZE:]

    def _make_room(self, head_bytes: int) -> None:
        """For mask and pattern of one shape."""
        more = 2 * head_bytes + _OWN_BYTES
        if self._bytes + more > MOST_BYTES:
            self._by_bytes.clear()
            self._by_header_bytes.clear()
            self._bytes = 0
        self._bytes += more

    def learn(self, data: memoryview) -> bool:
        """Learn the shape of an accepted answer; False if it has none, or is no usual answer."""
        try:
            frames = [decode(raw) for raw in split(data)]
        except WireError:  # not whole frames: callers see to it, but no peer may end a thread by this
            return False
        if [item.kind for item in frames] != [Kind.CUT, Kind.REPLY]:
            return False
        cut, reply = frames
        if cut.flags not in (0, FLAG_LIVE) or reply.flags:
            return False
        head = _unpadded(cut.raw)
        if len(head) + len(reply.raw) > MOST_HEAD_BYTES:
            return False
        if any(len(item.header) != item.raw[PREFIX.size] ^ 0x80 for item in frames):
            return False  # a key is there twice: which one counts no shape can say
        try:
            shape = FrameTemplate(head, bytes(reply.raw))
        except _Unlearnable:
            return False
        self._make_room(len(head) + len(reply.raw))
        known = self._by_header_bytes.setdefault(len(head) - PREFIX.size, [])
        known.insert(0, shape)
        del known[SHAPES_A_SIZE:]
        return True


# -- POLL

_U64: Final = b"\xcf"  # msgpack: an unsigned 64-bit integer follows, big-endian
_MAP_5: Final = b"\x85"
_ARRAY: Final = (b"\x90", b"\x91", b"\x92")
_BOOL: Final = (b"\xc2", b"\xc3")


def _packed_key(name: str) -> bytes:
    return bytes((0xA0 | len(name),)) + name.encode()


class _PollPattern:
    """Header of a POLL with ``acks`` acknowledgements: constant bytes and holes for numbers."""

    def __init__(self, acks: int) -> None:
        ack = _packed_key("ack") + _ARRAY[acks]
        parts = [_MAP_5 + _packed_key("poll") + _U64, _packed_key("sent_ns") + _U64]
        if acks:
            parts += [ack + _ARRAY[2] + _U64, _U64]
            ack = b""
        parts += [ack + _packed_key("from") + _ARRAY[2] + _U64, _U64]
        size = sum(map(len, parts)) + 8 * len(parts) + len(_packed_key("lease")) + 1
        pad = -size % 8
        parts[0] = PREFIX.pack(PREFIX.size + size + pad - 4, size, Kind.POLL, 0) + parts[0]
        self.constants = tuple(parts)
        self.ends = tuple(_packed_key("lease") + flag + bytes(pad) for flag in _BOOL)
        holes = "".join(f"{len(part)}sQ" for part in parts)
        self.pack = struct.Struct(f">{holes}{len(self.ends[0])}s").pack


_BARE: Final = _PollPattern(0)
_ACKED: Final = _PollPattern(1)
# Used for nearly every poll: a global is found in one step.
_A, _B, _C, _D, _E, _F = _ACKED.constants
_ENDS: Final = _ACKED.ends
_pack: Final = _ACKED.pack


def encode_single_epoch_poll(poll: int, sent_ns: int, epoch: int, ack: int, start: int, lease: bool) -> bytes:
    """``encode_poll`` for a gateway with one epoch; nothing is acknowledged if ``ack`` is 0."""
    if ack:
        return _pack(_A, poll, _B, sent_ns, _C, epoch, _D, ack, _E, epoch, _F, start, _ENDS[lease])
    a, b, c, d = _BARE.constants
    return _BARE.pack(a, poll, b, sent_ns, c, epoch, d, start, _BARE.ends[lease])


def encode_poll(
    poll: int, sent_ns: int, ack: Sequence[Sequence[int]], start: Sequence[int], lease: bool
) -> bytes:
    """One POLL frame.

    Args:
        poll: number of the poll.
        sent_ns: monotonic clock of the daemon.
        ack: (epoch, seq) durable, by epoch.
        start: (epoch, seq) from which the answer begins; empty for a gateway whose spool is exhausted.
        lease: whether the lease of caps is renewed.
    """
    if len(start) == 2 and len(ack) == 1:
        a, b, c, d, e, f = _ACKED.constants
        (epoch, seq), (start_epoch, start_seq) = ack[0], start
        return _ACKED.pack(
            *(a, poll, b, sent_ns, c, epoch, d, seq, e, start_epoch, f, start_seq), _ACKED.ends[lease]
        )
    if len(start) == 2 and not ack:
        a, b, c, d = _BARE.constants
        return _BARE.pack(a, poll, b, sent_ns, c, start[0], d, start[1], _BARE.ends[lease])
    header = {"poll": poll, "sent_ns": sent_ns, "ack": ack, "from": start, "lease": lease}
    return encode(Kind.POLL, header)
