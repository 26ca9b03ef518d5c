"""The POLL frame, encoded by one ``struct`` call.

A POLL is the one frame made for every gateway at every interval. Its header is the same map as ever; only
its numbers are always written as msgpack's uint 64, so that the usual POLL (one epoch, at most one
acknowledgement) is a byte pattern with holes. Any other POLL goes through ``frame.encode``; a reader sees no
difference.

Source: P10 (pre-encoded requests); docs/formats/messages.md (POLL).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

_U64: Final = b"\xcf"  # msgpack: an unsigned 64-bit integer follows, big-endian
_MAP_5: Final = b"\x85"
_ARRAY: Final = (b"\x90", b"\x91", b"\x92")
_BOOL: Final = (b"\xc2", b"\xc3")


def _key(name: str) -> bytes:
    return bytes((0xA0 | len(name),)) + name.encode()


class _Pattern:
    """Header of a POLL with ``acks`` acknowledgements: constant bytes and holes for numbers."""

    def __init__(self, acks: int) -> None:
        ack = _key("ack") + _ARRAY[acks]
        parts = [_MAP_5 + _key("poll") + _U64, _key("sent_ns") + _U64]
        if acks:
            parts += [ack + _ARRAY[2] + _U64, _U64]
            ack = b""
        parts += [ack + _key("from") + _ARRAY[2] + _U64, _U64]
        size = sum(map(len, parts)) + 8 * len(parts) + len(_key("lease")) + 1
        pad = -size % 8
        parts[0] = frame.PREFIX.pack(frame.PREFIX.size + size + pad - 4, size, Kind.POLL, 0) + parts[0]
        self.constants = tuple(parts)
        self.ends = tuple(_key("lease") + flag + bytes(pad) for flag in _BOOL)
        holes = "".join(f"{len(part)}sQ" for part in parts)
        self.pack = struct.Struct(f">{holes}{len(self.ends[0])}s").pack


_BARE: Final = _Pattern(0)
_ACKED: Final = _Pattern(1)
# Used for nearly every poll: what lies here is found in one step.
_A, _B, _C, _D, _E, _F = _ACKED.constants
_ENDS: Final = _ACKED.ends
_pack: Final = _ACKED.pack


def encode_sole(poll: int, sent_ns: int, epoch: int, ack: int, start: int, lease: bool) -> bytes:
    """``encode`` for a gateway with one epoch; nothing is acknowledged if ``ack`` is 0."""
    if ack:
        return _pack(_A, poll, _B, sent_ns, _C, epoch, _D, ack, _E, epoch, _F, start, _ENDS[lease])
    a, b, c, d = _BARE.constants
    return _BARE.pack(a, poll, b, sent_ns, c, epoch, d, start, _BARE.ends[lease])


def encode(poll: int, sent_ns: int, ack: Sequence[Sequence[int]], start: Sequence[int], lease: bool) -> bytes:
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
    return frame.encode(Kind.POLL, header)
