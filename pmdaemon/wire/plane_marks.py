"""What the header of a cut says of data planes: keys ``dp`` and ``of`` (``cut``), as far as it can be true.

Pure; what comes from an agent is checked here, and parts of it that cannot be are left out: no cut is refused
for what it says of planes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MOST_PLANES: Final = 64
"""Of a gateway, whose data counts; more are left out. An agent has some."""
MOST_NAME: Final = 64


def marks_of(value: Any) -> dict[str, int]:
    """Key ``dp``: number of the newest DP_CUT of each plane."""
    if not isinstance(value, dict):
        return {}
    return {
        name: mark
        for name, mark in list(value.items())[:MOST_PLANES]
        if isinstance(name, str) and isinstance(mark, int) and 0 < len(name) <= MOST_NAME and " " not in name
    }


def rows_by_plane(said: Mapping[Any, Any], rows: int) -> dict[str, npt.NDArray[np.int64]]:
    """Key ``of`` of a cut with so many rows: indices of the rows that each plane has counted in."""
    found = {}
    for name, bitmap in list(said.items())[:MOST_PLANES]:
        if isinstance(name, str) and isinstance(bitmap, bytes) and 0 < len(name) <= MOST_NAME:
            bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
            found[name] = np.flatnonzero(bits[:rows])
    return found
