"""A sample: what one source counted between two moments, ready to be merged into a cut.

It holds exactly what a DP_CUT frame carries (docs/formats/messages.md), with names instead of indexes. Rows
of ``counters`` are the cut's COLUMNS; row 0 (``stream_id``) is zero here and filled in by
``link.collection``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.errors import BadCut
from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.cut import Late
from pmdaemon.wire.messages.planes import DpCut


class StreamKey(NamedTuple):
    """The names of one stream."""

    volume: str
    client: str
    backend: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One source's counts over one interval.

    Attributes:
        source: name of the source.
        start_ns, end_ns: the interval, monotonic clock of this host (the same for all processes on it).
        start_unix_us: wall clock at the start.
        throttle_gen: generation held during the whole interval, -1 if it changed, None if the source has no
            caps.
        threshold_version: version of the threshold set in force, None if the source counts no misses.
        streams: one key a row, in row order.
        counters: int64, shape (len(COLUMNS), len(streams)).
        hist: HIST_DTYPE, shape (h,).
        missed: MISSED_DTYPE, shape (m,).
        mark: the plane's id of this DP_CUT; 0 for sources that have none.
        more: the source holds another finished sample behind this one.
        late: volumes whose caps held I/Os for too long.
        starved_us: while the source wanted to run and its host kept it waiting; 0 if it does not say.
        silent_us: at the end of the interval, since the source was asked for it; 0 for less than seconds.
        sequential: of each row's ``arrived``, -1 where it is not known, shape (len(streams),); None: of none.
        plane: whose streams these are once the source has gone: of a process that has handed over to another
            one, the plane that both serve; else empty.
    """

    source: str
    start_ns: int
    end_ns: int
    start_unix_us: int
    throttle_gen: int | None
    threshold_version: int | None
    streams: tuple[StreamKey, ...]
    counters: npt.NDArray[np.int64]
    hist: npt.NDArray[Any]
    missed: npt.NDArray[Any]
    mark: int = 0
    more: bool = False
    late: Late = field(default_factory=dict)
    starved_us: int = 0
    silent_us: int = 0
    plane: str = ""
    sequential: npt.NDArray[np.int64] | None = None


def no_hist() -> npt.NDArray[Any]:
    """An empty histogram column."""
    return np.zeros(0, dtype=cut.HIST_DTYPE)


def no_missed() -> npt.NDArray[Any]:
    """An empty missed column."""
    return np.zeros(0, dtype=cut.MISSED_DTYPE)


def stream_key(entry: Any) -> StreamKey:
    """The key in one entry of a ``streams`` list.

    Raises:
        BadCut: not a map with three usable names.
    """
    if not isinstance(entry, dict):
        raise BadCut(f"stream entry {entry!r} is not a map")
    values = [entry.get(key) for key in StreamKey._fields]
    for key, value in zip(StreamKey._fields, values, strict=True):
        if not isinstance(value, str) or not names.is_name(value):
            raise BadCut(f"stream entry has {key} {value!r}, which is no valid name")
    return StreamKey(*(str(value) for value in values))


def from_dp_cut(source: str, received: frame.Frame, plane: str = "") -> Sample:
    """Check and decode a DP_CUT frame. The arrays are copies: the sample outlives the receive buffer.

    Raises:
        BadCut: keys are missing or contradict the columns.
    """
    said, columns = DpCut.parse(received)
    return Sample(
        source=source,
        start_ns=said.start_ns,
        end_ns=said.end_ns,
        start_unix_us=said.start_us,
        throttle_gen=said.throttle_gen,
        threshold_version=said.threshold_version,
        streams=tuple(stream_key(entry) for entry in said.streams),
        counters=columns.counters.copy(),
        hist=columns.hist.copy(),
        missed=columns.missed.copy(),
        mark=said.id,
        more=said.more,
        late=said.late or {},
        starved_us=said.starved_us,
        plane=plane,
        sequential=None if said.sequential is None else cut.sequential_counts(said.sequential),
    )
