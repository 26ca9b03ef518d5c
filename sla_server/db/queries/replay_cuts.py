"""When requests arrived within some slots: raw cuts from their files, for replays of stored load.

Cuts are stored for two days or so, and are many: files are read that overlap a wanted slot, the newest first,
of those the row groups that do, and at most ``MOST_ROWS`` rows. Slots whose cuts are not read, or not stored
any more, are simply not in the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sla_server.db.archive import manifest
from sla_server.db.archive.files import opened
from sla_server.db.archive.manifest import FileRow
from sla_server.db.archive.store import open_files
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine, translated

Ints = npt.NDArray[np.int64]
MOST_ROWS: Final = 8_000_000  # read: some 10 s, an hour of 2,000 streams by the second
COUNTED: Final = (
    *("duration_us", "stream_id", "arrived", "reads", "writes"),
    *("read_bytes", "write_bytes", "svc_sum_us", "inflight"),
)


def read_cuts(
    config: DatabaseConfig,
    data_dir: Path,
    streams: Collection[int],
    slots_us: Sequence[int],
    slot_us: int,
    most_rows: int = MOST_ROWS,
) -> dict[str, Ints]:
    """Cuts of these streams that start in these slots.

    Args:
        config: of the database.
        data_dir: of the server.
        streams: stream_ids.
        slots_us: begins of slots, us, rising.
        slot_us: length of a slot.
        most_rows: read at most so many.

    Returns:
        start_us (corrected) and ``COUNTED`` as arrays of shape (rows,), in no order.

    Raises:
        FileDamaged, FilesUnavailable: a file cannot be read.
        DatabaseUnavailable: retryable.
    """
    found: list[pa.Table] = []
    if slots_us and streams:
        wanted = _Wanted(streams, slots_us, slot_us)
        files, left = open_files(config, data_dir), most_rows
        for row in reversed(_listed(config, data_dir, slots_us[0], slots_us[-1] + slot_us)):
            if not wanted.overlaps(row.min_us, row.max_us):
                continue
            if left <= 0:
                break
            with opened(files, row) as file:
                for part in _groups(file, wanted):
                    left -= part.num_rows
                    found.append(wanted.of(part))
    columns = {"start_us": np.zeros(0, np.int64)} | {name: np.zeros(0, np.int64) for name in COUNTED}
    if not found:
        return columns
    table = pa.concat_tables(found)
    start_us = table["start"].cast(pa.int64()).to_numpy()
    return {"start_us": start_us, **{name: table[name].to_numpy() for name in COUNTED}}


def _listed(config: DatabaseConfig, data_dir: Path, from_us: int, to_us: int) -> list[FileRow]:
    engine = make_engine(config, data_dir, read_only=True)
    try:
        with translated(engine), engine.connect() as connection:
            return manifest.snapshot(connection, manifest.CUTS, from_us, to_us)
    finally:
        engine.dispose()


class _Wanted:
    """Streams and slots."""

    def __init__(self, streams: Collection[int], slots_us: Sequence[int], slot_us: int) -> None:
        self._streams = np.fromiter(streams, np.int64)
        self._slots_us = list(slots_us)
        self._of_slot = np.array(slots_us, np.int64)
        self._slot_us = slot_us

    def overlaps(self, from_us: int, to_us: int) -> bool:
        """Whether a wanted slot lies in this time, if only in part."""
        place = bisect_right(self._slots_us, to_us) - 1
        return place >= 0 and self._slots_us[place] + self._slot_us > from_us

    def of(self, rows: pa.Table) -> pa.Table:
        """Those rows."""
        rows = rows.filter(rows["stream_id"].is_valid())  # a cut without I/O has a row without a stream
        start_us = rows["start"].cast(pa.int64()).to_numpy()
        place = np.maximum(np.searchsorted(self._of_slot, start_us, side="right") - 1, 0)
        since_us = start_us - self._of_slot[place]
        within = (since_us >= 0) & (since_us < self._slot_us)
        return rows.filter(pa.array(within & np.isin(rows["stream_id"].to_numpy(), self._streams)))


def _groups(file: Any, wanted: _Wanted) -> Iterator[pa.Table]:
    """Row groups that may have a wanted slot, one at a time."""
    start = file.schema_arrow.get_field_index("start")
    for index in range(file.metadata.num_row_groups):
        said = file.metadata.row_group(index).column(start).statistics
        if said is not None and said.has_min_max:
            first, last = (round(each.timestamp() * 1e6) for each in (said.min, said.max))
            if not wanted.overlaps(first, last):
                continue
        yield file.read_row_group(index, columns=["start", *COUNTED])
