"""The judged slices of one objective that have one length, and how many there are of each state.

One code for each slice; index = (start - origin) / length; 0 = never judged. The newest 1,024 to 2,047 are
kept as they are, a byte each. Older ones are *sealed*, 1,024 in a chunk: how many there are of each code,
then the codes, compressed. A chunk of one code, which most are, is the same object in all histories, so a
year of good minutes is 6 KB and not half a megabyte; of minutes that change at random a chunk is some 400
bytes. A window is summed from the chunks' counts, only its ends are unpacked; a late revision unpacks one
chunk and seals it again.

A history has one length; ``put`` refuses starts that are not on its grid. Slices of a version with another
length are another history (``compliance.JudgedTime``). Belongs to one thread; no I/O.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
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
DECIDED: Final = frozenset(("good", "bad"))
_CHUNK: Final = 1024  # 17 hours of minutes
_HEAD: Final = struct.Struct("<7H")  # how many slices of each code


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


def _seal(codes: bytes | bytearray) -> bytes:
    counts = np.bincount(np.frombuffer(codes, np.uint8), minlength=EXCLUDED + 1)
    sealed = _HEAD.pack(*counts.tolist()) + zlib.compress(codes, 1)
    return _COMMON.setdefault(sealed, sealed) if counts.max() == _CHUNK else sealed


def _unseal(sealed: bytes) -> bytes:
    return zlib.decompress(sealed[_HEAD.size :])


_COMMON: Final[dict[bytes, bytes]] = {}  # chunks of one code, at most seven


class SliceHistory:
    """Codes on a grid of slices. Belongs to one thread."""

    def __init__(self, length_us: int, origin_us: int) -> None:
        self.length_us = length_us
        self._origin = origin_us // length_us
        self._sealed: list[bytes] = []
        self._open = bytearray()
        self._newest = [-1] * (EXCLUDED + 1)  # slice on the grid that was ever put, by code

    def put(self, start_us: int, code: int) -> bool:
        """Set the slice that starts here; False if it is before the origin or off the grid."""
        index, rest = divmod(start_us, self.length_us)
        index -= self._origin
        if rest or index < 0:
            return False
        self._newest[code] = max(self._newest[code], start_us // self.length_us)
        chunk, at = divmod(index, _CHUNK)
        if chunk < len(self._sealed):
            codes = bytearray(_unseal(self._sealed[chunk]))
            codes[at] = code
            self._sealed[chunk] = _seal(codes)
            return True
        at = index - len(self._sealed) * _CHUNK
        self._open.extend(bytes(max(0, at + 1 - len(self._open))))
        self._open[at] = code
        while len(self._open) >= 2 * _CHUNK:
            self._sealed.append(_seal(bytes(self._open[:_CHUNK])))
            del self._open[:_CHUNK]
        return True

    def is_free_of(self, codes: Iterable[int], from_us: int) -> bool:
        """Whether no slice that starts then or later was ever put as one of ``codes``."""
        return all(self._newest[code] * self.length_us < from_us for code in codes)

    def get(self, start_us: int) -> int:
        """Code of the slice that starts here, UNJUDGED if there is none."""
        part = self.codes(start_us, start_us + self.length_us)
        return int(part[0]) if part.size else UNJUDGED

    def forget_before(self, start_us: int) -> None:
        """Drop what starts before, whole chunks only."""
        drop = max(0, min((start_us // self.length_us - self._origin) // _CHUNK, len(self._sealed)))
        del self._sealed[:drop]
        self._origin += drop * _CHUNK

    @property
    def size_bytes(self) -> int:
        """Memory of the codes, those shared with other histories left out."""
        own = sum(len(sealed) for sealed in self._sealed if sealed not in _COMMON)
        return own + len(self._open) + 8 * len(self._sealed)

    def codes(self, from_us: int, to_us: int) -> npt.NDArray[np.uint8]:
        """Codes of the slices that start in [from_us, to_us), oldest first.

        Shorter than the range before the origin and beyond the newest slice stored.
        """
        return np.frombuffer(self._between(*self._range(from_us, to_us)), np.uint8)

    @property
    def end_us(self) -> int:
        """End of the newest slice."""
        return (self._origin + len(self._sealed) * _CHUNK + len(self._open)) * self.length_us

    def starts(self, from_us: int, to_us: int) -> npt.NDArray[np.int64]:
        """Starts of the slices of ``codes``, us."""
        low, high = self._range(from_us, to_us)
        return (np.arange(low, high, dtype=np.int64) + self._origin) * self.length_us

    def _range(self, from_us: int, to_us: int) -> tuple[int, int]:
        """First index, and the one behind the last."""
        low = max(-(-from_us // self.length_us) - self._origin, 0)
        high = max(-(-to_us // self.length_us) - self._origin, low)
        end = len(self._sealed) * _CHUNK + len(self._open)
        return min(low, end), min(high, end)

    def _between(self, low: int, high: int) -> bytes:
        border = len(self._sealed) * _CHUNK
        if low >= border:
            return bytes(self._open[low - border : high - border])
        first, last = low // _CHUNK, min(-(-high // _CHUNK), len(self._sealed))
        old = b"".join(map(_unseal, self._sealed[first:last]))
        return old[low - first * _CHUNK : high - first * _CHUNK] + self._open[: max(high - border, 0)]

    def counts(self, from_us: int, to_us: int) -> Counts:
        """Slices by state that start in [from_us, to_us)."""
        total = max(-(-to_us // self.length_us) + (from_us // -self.length_us), 0)
        low, high = self._range(from_us, to_us)
        first, last = -(-low // _CHUNK), min(high // _CHUNK, len(self._sealed))
        if first < last:
            ends = self._between(low, first * _CHUNK) + self._between(last * _CHUNK, high)
            whole = [_HEAD.unpack_from(sealed) for sealed in self._sealed[first:last]]
            found = [sum(column) + ends.count(code) for code, column in enumerate(zip(*whole, strict=True))]
        else:
            part = self._between(low, high)
            found = [part.count(code) for code in range(EXCLUDED + 1)]
        return Counts(
            good=found[GOOD],
            bad=found[BAD],
            no_data=found[NO_DATA] + found[NO_DATA_OURS],
            no_data_ours=found[NO_DATA_OURS],
            not_applicable=found[NOT_APPLICABLE],
            excluded=found[EXCLUDED],
            unjudged=total - sum(found[GOOD:]),
        )
