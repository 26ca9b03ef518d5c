"""What one record of the spool holds, little-endian.

    kind 1, a cut            kind 2, a note: cuts were dropped
    0   8  epoch             0   8  through: records up to this number of the queue are dropped
    8   8  seq               8   8  0
    16  8  dropped: cuts this spool has lost in its life
    24  4  n
    28  24 each of n gaps: epoch, seq, cuts lost directly before that cut
    ... a CUT frame          (nothing)

Every record carries the whole account of what was dropped, so the newest one of either kind is the truth,
and a drop becomes durable together with the record that says so. Pure.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.wire import frame

CUT: Final = 1
NOTE: Final = 2
_HEAD: Final = struct.Struct("<QQQI")
_GAP: Final = struct.Struct("<QQQ")

Key = tuple[int, int]
Gaps = dict[Key, int]


class Account(NamedTuple):
    """What was dropped: lifetime count, and by cut what was lost directly before it and not told yet."""

    dropped: int
    gaps: Gaps


class Unpacked(NamedTuple):
    """One record; ``first`` and ``second`` are epoch and seq, or ``through`` and 0."""

    first: int
    second: int
    account: Account
    raw: bytes


def pack(first: int, second: int, account: Account, raw: bytes = b"") -> bytes:
    """The record's bytes."""
    gaps = b"".join(_GAP.pack(*key, count) for key, count in account.gaps.items())
    return _HEAD.pack(first, second, account.dropped, len(account.gaps)) + gaps + raw


def unpack(data: bytes) -> Unpacked:
    """The record in ``data``, which the disk queue has checked.

    Raises:
        ValueError: it is none: not written by this release's spool.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"a record of {len(data)} bytes")
    first, second, dropped, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _GAP.size
    if len(data) < end:
        raise ValueError(f"{count} gaps in a record of {len(data)} bytes")
    gaps = {(epoch, seq): lost for epoch, seq, lost in _GAP.iter_unpack(data[_HEAD.size : end])}
    return Unpacked(first, second, Account(dropped, gaps), data[end:])


def marks_of(raw: bytes) -> dict[str, int]:
    """Key ``dp`` of a CUT frame; empty without one."""
    if not raw:
        return {}
    try:
        marks = frame.decode(raw).header.get("dp")
    except WireError:
        return {}
    return dict(marks) if isinstance(marks, dict) else {}


def with_gap(raw: bytes, gap: int) -> bytes:
    """The same cut, saying that ``gap`` cuts before it were dropped."""
    parsed = frame.decode(raw)
    header: dict[str, Any] = {**parsed.header, "gap": gap}
    return frame.encode(parsed.kind, header, parsed.blob, parsed.flags)
