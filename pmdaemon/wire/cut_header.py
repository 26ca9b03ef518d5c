"""What is read or changed in the header of a CUT frame by those that store cuts and never read their columns.

Pure. A frame that is no CUT of any release raises a ``WireError``.
"""

from __future__ import annotations

from typing import NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.wire import cut, frame


class CutHeader(NamedTuple):
    """Which cut a frame holds, and how many cuts its agent dropped directly before it."""

    gateway_id: str
    epoch: int
    seq: int
    gap: int

    @classmethod
    def parse(cls, raw: memoryview | bytes) -> CutHeader:
        """Read a CUT frame that was made or checked by a process of this server.

        Raises:
            WireError: it is no frame, or its identity is missing or of the wrong type.
        """
        header = frame.decode_own(raw).header
        return cls(*cut.identity(header), cut.gap_of(header))


def marks_in(raw: bytes) -> dict[str, int]:
    """Number of the newest DP_CUT of each plane that went into a cut; empty for what is no CUT frame."""
    if not raw:
        return {}
    try:
        marks = frame.decode(raw).header.get("dp")
    except WireError:
        return {}
    return dict(marks) if isinstance(marks, dict) else {}


def with_gap(raw: bytes, gap: int) -> bytes:
    """The same cut, saying that ``gap`` cuts before it were dropped; all other keys stay as they came."""
    parsed = frame.decode(raw)
    return frame.encode(parsed.kind, {**parsed.header, "gap": gap}, parsed.blob, parsed.flags)
