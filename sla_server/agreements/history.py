"""The judged slices of one objective, one byte a slice, so that sums over any window are one numpy count.

Index = (start - origin) / length; 0 = never judged. A year of 1-minute slices is half a megabyte. Slices of
an agreement whose slice length was edited keep their own start; a history has one length, and ``put`` refuses
starts that are not on its grid (the caller drops judgements of another length).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sla_server.agreements.slices import State

UNJUDGED: Final = 0
GOOD: Final = 1
BAD: Final = 2
NO_DATA: Final = 3
NO_DATA_OURS: Final = 4
NOT_APPLICABLE: Final = 5
EXCLUDED: Final = 6
_CODES: Final[dict[str, int]] = {
    "good": GOOD,
    "bad": BAD,
    "no_data": NO_DATA,
    "not_applicable": NOT_APPLICABLE,
    "excluded": EXCLUDED,
}
_GROW: Final = 1024


def code_of(state: State | str, ours: bool) -> int:
    """The byte of a judged slice.

    Raises:
        KeyError: no such state.
    """
    code = _CODES[state]
    return NO_DATA_OURS if code == NO_DATA and ours else code


@dataclass(frozen=True, slots=True)
class Counts:
    """Slices by state within a range. ``no_data`` includes ``no_data_ours``."""

    good: int = 0
    bad: int = 0
    no_data: int = 0
    no_data_ours: int = 0
    not_applicable: int = 0
    excluded: int = 0
    unjudged: int = 0

    def states(self) -> dict[str, int]:
        """As in the live snapshot."""
        return {
            "good": self.good,
            "bad": self.bad,
            "no_data": self.no_data,
            "not_applicable": self.not_applicable,
            "excluded": self.excluded,
        }


class SliceHistory:
    """Codes on a grid of slices. Belongs to one thread."""

    def __init__(self, length_us: int, origin_us: int) -> None:
        self.length_us = length_us
        self._origin = origin_us // length_us
        self._codes = np.zeros(_GROW, dtype=np.uint8)

    def put(self, start_us: int, code: int) -> bool:
        """Set the slice that starts here; False if it is before the origin or off the grid."""
        index, rest = divmod(start_us, self.length_us)
        index -= self._origin
        if rest or index < 0:
            return False
        if index >= len(self._codes):
            grown = np.zeros(max(2 * len(self._codes), index + _GROW), dtype=np.uint8)
            grown[: len(self._codes)] = self._codes
            self._codes = grown
        self._codes[index] = code
        return True

    def get(self, start_us: int) -> int:
        """Code of the slice that starts here, UNJUDGED if there is none."""
        part = self.codes(start_us, start_us + self.length_us)
        return int(part[0]) if part.size else UNJUDGED

    def forget_before(self, start_us: int) -> None:
        """Drop what starts before, to bound memory."""
        drop = min(max(start_us // self.length_us - self._origin, 0), len(self._codes))
        # Copying is worth it only for a good part of the array.
        if drop > _GROW and drop > len(self._codes) // 4:
            self._codes = self._codes[drop:].copy()
            self._origin += drop

    def codes(self, from_us: int, to_us: int) -> npt.NDArray[np.uint8]:
        """Codes of the slices that start in [from_us, to_us), oldest first.

        Shorter than the range before the origin and beyond the newest slice stored.
        """
        low = max(-(-from_us // self.length_us) - self._origin, 0)
        high = max(-(-to_us // self.length_us) - self._origin, 0)
        return self._codes[low:high]

    def counts(self, from_us: int, to_us: int) -> Counts:
        """Slices by state that start in [from_us, to_us)."""
        total = max(-(-to_us // self.length_us) + (from_us // -self.length_us), 0)
        found = np.bincount(self.codes(from_us, to_us), minlength=EXCLUDED + 1).tolist()
        return Counts(
            good=found[GOOD],
            bad=found[BAD],
            no_data=found[NO_DATA] + found[NO_DATA_OURS],
            no_data_ours=found[NO_DATA_OURS],
            not_applicable=found[NOT_APPLICABLE],
            excluded=found[EXCLUDED],
            unjudged=total - sum(found[GOOD:]),
        )
