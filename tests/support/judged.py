"""What the judge reads, made from rows as dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from sla_server.db.histogram_codec import TOTAL_BUCKETS
from sla_server.db.queries.slice_inputs import LIMIT_NAMES, SLOT_NAMES, SliceInputs
from sla_server.rows import Row


def inputs_of(
    rows: Iterable[Row],
    missed: Iterable[Row] = (),
    coverage: Iterable[Row] = (),
    plane_gaps: Iterable[Row] = (),
    planes: Mapping[int, str] | None = None,
) -> SliceInputs:
    """Rows of rollups with hist_read and hist_write, of rollup_missed, and so on; a column left out is 0."""
    rows = list(rows)
    both = [np.concatenate((row["hist_read"], row["hist_write"])) for row in rows]
    dense = np.array(both, dtype=np.int64).reshape(-1, TOTAL_BUCKETS)
    at, bucket = np.nonzero(dense)
    return SliceInputs(
        _columns(SLOT_NAMES, rows),
        (at, bucket, dense[at, bucket]),
        _columns(LIMIT_NAMES, list(missed)),
        list(coverage),
        list(plane_gaps),
        planes or {},
    )


def _columns(names: Iterable[str], rows: list[Row]) -> dict[str, npt.NDArray[np.int64]]:
    return {name: np.array([row.get(name, 0) for row in rows], dtype=np.int64) for name in names}
