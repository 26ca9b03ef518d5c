"""Cuts as they are ingested, and their columns joined. Pure: no clock, no I/O.

Which numbers cannot be true is decided in ``wire.cut`` (``fault_of``, ``time_fault_of``); otherwise one cut
could overflow a sum and stop the ingest for all gateways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import Cut, overflows, problem_of

HOUR_US: Final = 3_600_000_000


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


@dataclass(frozen=True, slots=True)
class CutColumns:
    """The columns of many cuts, at least one, each behind the other.

    Attributes:
        rows: of each cut, shape (cuts,); ``hist_entries`` and ``missed_entries`` alike.
        counters: shape (len(COLUMNS), all rows).
        hist: HIST_DTYPE; ``row`` counts from its cut's first row.
        missed: MISSED_DTYPE, likewise.
    """

    rows: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    hist: npt.NDArray[Any]
    hist_entries: npt.NDArray[np.int64]
    missed: npt.NDArray[Any]
    missed_entries: npt.NDArray[np.int64]

    @property
    def is_sound(self) -> bool:
        """Whether each of the cuts passes ``cut.fault_of``."""
        hist_rows = np.repeat(self.rows, self.hist_entries)
        missed_rows = np.repeat(self.rows, self.missed_entries)
        problem = problem_of(self.counters, self.hist, self.missed, hist_rows, missed_rows)
        return problem is None and not overflows(self.counters)


def columns_of(items: Sequence[Ingested]) -> CutColumns:
    """Join the columns of some cuts, at least one."""
    cuts = [item.cut for item in items]
    return CutColumns(
        rows=np.array([cut.rows for cut in cuts], dtype=np.int64),
        counters=np.concatenate([cut.counters for cut in cuts], axis=1),
        hist=_joined([cut.hist for cut in cuts]),
        hist_entries=np.array([len(cut.hist) for cut in cuts], dtype=np.int64),
        missed=_joined([cut.missed for cut in cuts]),
        missed_entries=np.array([len(cut.missed) for cut in cuts], dtype=np.int64),
    )


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Structured arrays of one type, one behind another; as bytes, which is faster than by fields."""
    return np.frombuffer(b"".join([np.ascontiguousarray(one).data for one in arrays]), arrays[0].dtype)
