"""Cuts as they are ingested, and the screen that they pass. Pure: no clock, no I/O.

``screen`` refuses cuts whose numbers cannot be true; otherwise one of them could overflow a sum and stop the
ingest for everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import COL, Cut

HOUR_US: Final = 3_600_000_000
MAX_COUNTER: Final = 1 << 47  # per cut: 140 TB read or 4 years of summed latency; 2**16 such fit int64
MAX_UNIX_US: Final = 4_102_444_800_000_000  # the year 2100
MAX_DURATION_US: Final = 86_400_000_000  # a day
_CUMULATIVE: Final = ("cum_reads", "cum_writes", "cum_read_bytes", "cum_write_bytes")
_SUMMED: Final = np.array(
    [index for name, index in COL.items() if name != "stream_id" and name not in _CUMULATIVE]
)


@dataclass(frozen=True, slots=True)
class Ingested:
    """One cut with what was learned at receipt.

    Attributes:
        start_us: corrected start, us UTC.
        offset_us: what was added to the agent's clock.
        recv_us: server's wall clock at receipt.
    """

    cut: Cut
    offset_us: int
    recv_us: int

    @property
    def start_us(self) -> int:
        """Corrected start."""
        return self.cut.start_unix_us + self.offset_us

    @property
    def end_us(self) -> int:
        """Corrected end."""
        return self.start_us + self.cut.duration_us


def joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Structured arrays of one type, one behind another; as bytes, which is faster than by fields."""
    return np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays]).view(
        arrays[0].dtype
    )


def screen(item: Ingested) -> str | None:
    """Why this cut cannot be true, or None."""
    cut = item.cut
    if cut.duration_us > MAX_DURATION_US:
        return f"it lasts {cut.duration_us} us, more than a day"
    if not 0 <= item.start_us <= MAX_UNIX_US:
        return f"its corrected start {item.start_us} us lies before 1970 or behind 2100"
    if cut.seq >= 1 << 63 or cut.gap >= 1 << 63:
        return f"its sequence number {cut.seq} or gap {cut.gap} exceeds 63 bits"
    if cut.rows and int(cut.counters[_SUMMED].max()) > MAX_COUNTER:
        return "a counter exceeds 2**47"
    return None
