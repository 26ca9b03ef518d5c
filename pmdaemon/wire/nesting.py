"""How deep a msgpack object nests, and how much it announces, before any of it is decoded.

msgpack's decoder allocates a list by the length that its first bytes announce, and goes 1,024 levels deep.
This walk allocates nothing but one number a level. It reads sizes only, so what is wrong in another way
(text that is not UTF-8, keys of a wrong type) is left to the decoder.

Pure. Source: the msgpack specification, "Formats".
"""

from __future__ import annotations

from typing import Final

from pmdaemon.errors import MalformedFrame

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


def check(packed: bytes, max_depth: int) -> None:
    """Refuse what nests deeper than ``max_depth`` or announces more items than it has bytes.

    Raises:
        MalformedFrame: names the limit. What ends too early is refused, too.
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
