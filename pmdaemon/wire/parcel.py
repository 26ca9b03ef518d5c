"""The state of a gateway's session on its way from one pair process to another, as bytes.

Both sides are processes of the same installation and the bytes travel through a memory file that no stranger
can open; still everything is checked for its type by whoever takes it apart, and nothing is ever pickled.
A release may change the form freely: pairs are children of one parent and are started together.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from pmdaemon.errors import MalformedFrame

VERSION: Final = 1


def pack(state: dict[str, Any]) -> bytes:
    """Bytes of a state made of maps, lists, numbers, text and bytes."""
    packed: bytes = msgpack.packb({"v": VERSION, **state}, use_bin_type=True)
    return packed


def unpack(data: bytes) -> dict[str, Any]:
    """The state.

    Raises:
        MalformedFrame: not a state of this version.
    """
    try:
        state = msgpack.unpackb(data, raw=False, strict_map_key=False, max_array_len=1 << 20)
    except Exception as exc:
        raise MalformedFrame(f"a moved session that is not msgpack: {exc}") from exc
    if not isinstance(state, dict) or state.get("v") != VERSION:
        raise MalformedFrame("a moved session of another version")
    return state
