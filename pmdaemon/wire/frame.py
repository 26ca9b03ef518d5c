r"""Frames: a length word, a small msgpack header, and columns that need no parsing.

Every message, on a socket, in a mailbox and in the spool, has this form (little-endian):

    offset  size  field
    0       4     length     bytes that follow this word; the whole frame is a multiple of 8
    4       2     header_len bytes of the msgpack map
    6       1     kind       see ``kinds.Kind``
    7       1     flags      bit 0: LIVE (newest cut, for judging only)
    8       h     header     msgpack map with string keys
    8+h     0..7  zero padding to a multiple of 8
    ...           blob       binary columns, 8-byte aligned from the frame's start

A header is looked at before it is decoded. Lists and maps nest at most ``MAX_DEPTH`` deep and announce
together no more items than the header has bytes, because msgpack allocates a list by its announced length.
Keys are text or bytes: hashes of numbers can be chosen so that a map of them takes for ever. Unknown header
keys are kept and ignored by readers; unknown kinds are the session's business.

A few messages name as much as there is (caps). Their header is *folded* when it is longer than 64 KiB: it is
the blob then, and the header says ``{folded: bytes}``. A reader that expects such a message unfolds it.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from typing import Any, Final, NamedTuple

import msgpack

from pmdaemon.errors import FrameTooLarge, MalformedFrame, WireError, not_enrolled
from pmdaemon.runtime.excerpt import excerpt

PREFIX = struct.Struct("<IHBB")
MAX_FRAME_BYTES = 1 << 20  # four times the largest backlog reply (256 KB), so a legal frame never meets it
MAX_HEADER_BYTES = 0xFFFF
MAX_FOLDED_BYTES: Final = 512 * 1024  # half of a frame: others may be put around it
MAX_HEADER_ITEMS = 8192  # of one list
MAX_DEPTH = 32  # our own messages nest some ten deep (an agreement in an audit row)
FLAG_LIVE = 1
FOLDED: Final = "folded"
_ZERO = b"\0" * 8
_KIND_AT = 6
FLAGS_AT = 7
_STRINGS = frozenset((str,))
_OPENING = bytes((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))  # first bytes of msgpack's maps and lists
_LONG_LISTS = (b"\xdc", b"\xdd")
_FEW_LONG_LISTS = 2  # that may announce a header's size each: 16 bytes of memory for each byte received
_unpack_prefix = PREFIX.unpack_from
_new_frame = tuple.__new__  # a named tuple's own constructor is a Python function


class Frame(NamedTuple):
    """One decoded frame. ``blob`` and ``raw`` are views into the buffer they were decoded from.

    A tuple, because one is made for every frame received: measured, a third of a frozen dataclass' cost.
    """

    kind: int
    header: dict[str, Any]
    blob: memoryview
    flags: int
    raw: memoryview


def encode(kind: int, header: dict[str, Any], blob: bytes | memoryview = b"", flags: int = 0) -> bytes:
    """Return one frame as bytes.

    Raises:
        FrameTooLarge: the header exceeds 64 KiB or the frame exceeds ``MAX_FRAME_BYTES``; put long data
            into the blob, or into several frames.
    """
    head = encode_head(kind, header, len(blob), flags)
    return b"".join((head, blob, _ZERO[: -len(blob) % 8])) if blob else head


def encode_head(kind: int, header: dict[str, Any], blob_bytes: int, flags: int = 0) -> bytes:
    """The frame up to its blob: prefix, header and padding; the caller appends blob and padding to 8.

    Raises:
        FrameTooLarge: as ``encode``.
    """
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise FrameTooLarge("frame header", len(packed), MAX_HEADER_BYTES)
    head_pad = -len(packed) % 8
    total = PREFIX.size + len(packed) + head_pad + blob_bytes + -blob_bytes % 8
    if total > MAX_FRAME_BYTES:
        raise FrameTooLarge("frame", total, MAX_FRAME_BYTES)
    return b"".join((PREFIX.pack(total - 4, len(packed), kind, flags), packed, _ZERO[:head_pad]))


def encode_folding(kind: int, header: dict[str, Any]) -> bytes:
    """As ``encode``, for a header that may be longer than 64 KiB; a shorter one has the same bytes as there.

    Raises:
        FrameTooLarge: it exceeds ``MAX_FOLDED_BYTES``.
    """
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) <= MAX_HEADER_BYTES:
        return encode(kind, header)
    if len(packed) > MAX_FOLDED_BYTES:
        raise FrameTooLarge("folded frame header", len(packed), MAX_FOLDED_BYTES)
    return encode(kind, {FOLDED: len(packed)}, packed)


def unfold(received: Frame) -> Frame:
    """A frame with the header that was folded; any other as it is.

    Raises:
        MalformedFrame: what is in the blob is no header.
    """
    size = received.header.get(FOLDED)
    if size is None:
        return received
    most = min(len(received.blob), MAX_FOLDED_BYTES)
    if type(size) is not int or not 0 < size <= most:
        raise MalformedFrame(f"a folded header of {excerpt(size)} bytes, expected 1 to {most}")
    return received._replace(header=_unpack_header(received.blob[:size]), blob=received.blob[:0])


def peek_size(view: memoryview, limit_bytes: int = MAX_FRAME_BYTES) -> int | None:
    """Total size in bytes of the frame that starts at ``view``, or None while its prefix is incomplete.

    Raises:
        FrameTooLarge: the announced size is above ``limit_bytes``.
        MalformedFrame: the size is too small, or no multiple of 8.
    """
    if len(view) < PREFIX.size:
        return None
    length, header_len, _, _ = PREFIX.unpack_from(view)
    total: int = length + 4
    if total > limit_bytes:
        raise FrameTooLarge("frame", total, limit_bytes)
    if total < PREFIX.size + header_len or total % 8:
        raise MalformedFrame(f"length {total} does not hold its header of {header_len} bytes in units of 8")
    return total


def decode(view: memoryview | bytes) -> Frame:
    """Decode exactly one frame that fills ``view``.

    Raises:
        MalformedFrame: wrong size, a header that is not msgpack, or not a map with string keys.
        FrameTooLarge: see ``peek_size``.
    """
    view = memoryview(view)
    total = peek_size(view)
    if total is None or total != len(view):
        raise MalformedFrame(f"{len(view)} bytes given, the frame says {total}")
    return _decode_whole(view, total)


def decode_own(view: memoryview | bytes) -> Frame:
    """As ``decode``, of a message that another process of the server made, or this one stored.

    What gateways sent was looked at where it came in (``FrameReader``). Times in a list look like maps and
    lists to the search that precedes ``check_nesting``, and walking through them is most of such a decode.

    Raises:
        MalformedFrame, FrameTooLarge: as ``decode``.
    """
    view = memoryview(view)
    total = peek_size(view)
    if total is None or total != len(view):
        raise MalformedFrame(f"{len(view)} bytes given, the frame says {total}")
    return _decode_whole(view, total, is_own=True)


# First bytes 0xC0 to 0xDF: (bytes of a length field, bytes that follow it or the first byte).
_SIZES: Final = (
    *((0, 0), (0, 0), (0, 0), (0, 0)),  # nil, never used, false, true
    *((1, 0), (2, 0), (4, 0)),  # bytes
    *((1, 1), (2, 1), (4, 1)),  # extensions: a type behind the length
    *((0, 4), (0, 8)),  # floats
    *((0, 1), (0, 2), (0, 4), (0, 8)) * 2,  # unsigned and signed numbers
    *((0, 2), (0, 3), (0, 5), (0, 9), (0, 17)),  # extensions of a fixed size
    *((1, 0), (2, 0), (4, 0)),  # text
    *((2, 0), (4, 0)) * 2,  # lists and maps, see _ITEMS
)
_ITEMS: Final = {0xDC: 1, 0xDD: 1, 0xDE: 2, 0xDF: 2}  # items of a long list or map for each of its length


def check_nesting(packed: bytes, max_depth: int) -> None:
    """Refuse what nests deeper than ``max_depth`` or announces more items than it has bytes.

    msgpack's decoder allocates a list by the length that its first bytes announce, and goes 1,024 levels
    deep. This walk allocates nothing but one number a level. It reads sizes only, so what is wrong in another
    way (text that is not UTF-8, keys of a wrong type) is left to the decoder.

    Raises:
        MalformedFrame: names the limit. What ends too early is refused, too.

    Source: the msgpack specification, "Formats".
    """
    left, size, at, announced = [1], len(packed), 0, 1
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= size:
            raise MalformedFrame("the header ends within a list or map")
        first = packed[at]
        at += 1
        if first < 0x80 or first >= 0xE0:
            continue
        if first < 0xA0:
            items = (first & 15) * (1 if first >= 0x90 else 2)
        elif first < 0xC0:
            at += first & 31
            continue
        else:
            length_bytes, following = _SIZES[first - 0xC0]
            length = int.from_bytes(packed[at : at + length_bytes], "big")
            at += length_bytes + following
            if first not in _ITEMS:
                at += length
                continue
            items = length * _ITEMS[first]
        announced += items
        if announced > size:
            raise MalformedFrame(f"the header announces {announced} items in {size} bytes")
        left.append(items)
        if len(left) > max_depth + 1:
            raise MalformedFrame(f"the header nests more than {max_depth} lists and maps")


def _unpack_header(view: memoryview, *, is_own: bool = False) -> dict[str, Any]:
    packed = view.tobytes()
    # Nearly every header has too few bytes that could open a list to break a limit: three searches in C.
    if not is_own and (
        sum(map(packed.count, _LONG_LISTS)) > _FEW_LONG_LISTS
        or len(packed) - len(packed.translate(None, _OPENING)) > MAX_DEPTH
    ):
        check_nesting(packed, MAX_DEPTH)
    most = min(MAX_HEADER_ITEMS, len(packed))  # an item has a byte at least
    try:
        header = msgpack.unpackb(packed, raw=False, strict_map_key=True, max_array_len=most)
    except Exception as exc:
        raise MalformedFrame(f"the header is not msgpack ({type(exc).__name__}: {exc})") from exc
    if type(header) is not dict or not _STRINGS.issuperset(map(type, header)):
        raise MalformedFrame("the header is not a map with string keys")
    return header


def _decode_whole(view: memoryview, total: int, *, is_own: bool = False) -> Frame:
    """``decode`` for a caller that has looked at the size."""
    _, header_len, kind, flags = PREFIX.unpack_from(view)
    end = PREFIX.size + header_len
    header = _unpack_header(view[PREFIX.size : end], is_own=is_own)
    return Frame(kind, header, view[min(end + (-header_len % 8), total) :], flags, view)


def split(view: memoryview | bytes) -> Iterator[memoryview]:
    """Yield the raw frames that lie one behind another in ``view``.

    Raises:
        MalformedFrame: bytes are left over behind the last whole frame.
    """
    view = memoryview(view)
    while view:
        total = peek_size(view)
        if total is None or total > len(view):
            raise MalformedFrame(f"{len(view)} bytes left over behind the last whole frame")
        yield view[:total]
        view = view[total:]


class FrameReader:
    """Collects received bytes and yields whole frames; at most one partial frame is buffered.

    ``limit_bytes`` may be changed between frames (a session allows little before the handshake). A peer that
    dribbles a large frame byte by byte costs one append a byte: the partial frame is looked at again only
    when enough of it has arrived.

    Not thread-safe: one reader belongs to one connection and one thread.

    Attributes:
        limit_bytes: of a frame.
        partial: what has arrived of a frame that is not whole; to be read only.
        readable: kinds whose headers ``feed`` decodes; None for all.
    """

    __slots__ = ("_need_bytes", "limit_bytes", "partial", "readable")

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.readable: frozenset[int] | None = None
        self.partial = bytearray()
        self._need_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self.partial)

    @property
    def pending(self) -> bytes:
        """The bytes that have arrived and were not yielded."""
        return bytes(self.partial)

    def resume(self, pending: bytes) -> None:
        """Go on where another reader stopped, with its ``pending``."""
        self.partial[:] = pending
        self._need_bytes = 0

    def take(self, data: bytes | memoryview) -> tuple[list[Frame], WireError | None]:
        """All frames completed by ``data`` at once, and the error behind them, if any.

        For a reader whose limit no longer changes from frame to frame: half the cost of ``feed``.
        """
        if self.partial:
            frames: list[Frame] = []
            try:
                frames.extend(self.feed(data))
            except WireError as exc:
                return frames, exc
            return frames, None
        view = memoryview(data)
        size, at, frames = len(view), 0, []
        limit_bytes, need = self.limit_bytes, PREFIX.size
        try:
            while size - at >= 8:
                length, header_len, kind, flags = _unpack_prefix(view, at)
                total = length + 4
                blob_at = 8 + header_len + (-header_len & 7)
                if total > limit_bytes or total < blob_at or total & 7:
                    peek_size(view[at:], limit_bytes)  # says what is wrong
                    blob_at = total  # a header that ends within the padding: legal, and no blob
                if size - at < total:
                    need = total
                    break
                header = _unpack_header(view[at + 8 : at + 8 + header_len])
                end = at + total
                parts = (kind, header, view[at + blob_at : end], flags, view[at:end])
                frames.append(_new_frame(Frame, parts))
                at = end
        except WireError as exc:
            return frames, exc
        if at < size:
            self.partial += view[at:]
        self._need_bytes = need
        return frames, None

    def feed(self, data: bytes | memoryview) -> Generator[Frame, None, None]:
        """Yield the frames completed by ``data``. Views are valid until the caller lets go of them.

        Raises:
            WireError: the peer broke the framing; drop the connection.
        """
        if self.partial:
            self.partial += data
            if len(self.partial) < self._need_bytes:
                return
            view = memoryview(bytes(self.partial))
            self.partial.clear()
        else:
            view = memoryview(data)
        total: int | None = None
        try:
            while True:
                total = peek_size(view, self.limit_bytes)
                if total is not None and self.readable is not None and view[_KIND_AT] not in self.readable:
                    raise not_enrolled()
                if total is None or total > len(view):
                    break
                yield _decode_whole(view[:total], total)
                view = view[total:]
        finally:
            # Also when the caller closes us at a frame: that frame and the rest are still to be read, here
            # or by the process that the connection moves to.
            self.partial += view
            self._need_bytes = total or PREFIX.size
