"""Which data planes a gateway's cuts are of: the time that a plane is missing from them, and whose streams.

A gateway has several sources of statistics: data planes and its host. They usually share a cut; a plane that
is stopped is in none, and the cuts of the others must not prove its time. Header key ``dp`` of a cut names
the newest DP_CUT of each plane that went into this or an earlier one, so a plane is in a cut exactly if its
number has changed since the cut before (sequence number less one). Of the first cut after a start, and of one
that does not follow its predecessor, it is not known: all planes are taken to be in it.

``missing``: planes that are not in a cut. A slot is observed for a plane's streams as long as its cuts last,
less the time that the plane is missing from them.

Whose streams: header key ``of`` of a cut with the samples of several sources says it row by row, as a bitmap
for each plane (bit i, from the lowest of the first byte, is row i). An agent of before does not send it: the
rows of a cut with one plane are of that one, those of a cut with none are of the host, and of a stream that
was seen in cuts of several planes only nothing is known: it needs all of its gateway's planes. (So a volume
that two planes of such an agent export is taken for one of the plane that is left when the other one stops.)

``streams``: "" all planes of its gateway; HOST none; else names, joined by a space. A plane that was not
heard of for GONE_US is no longer one of a stream that another one has.

State: of each gateway with a plane the newest marks and when each plane was in a cut; of streams what was
said of them. Belongs to the writer thread; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pmdaemon.wire.cut import Cut

HOST: Final = "-"
GONE_US: Final = 86_400_000_000
MOST_PLANES: Final = 64
"""Of a gateway, whose data counts; more are left out. An agent has some."""
MOST_NAME: Final = 64


@dataclass(slots=True)
class _Gateway:
    epoch: int
    seq: int
    marks: dict[str, int]
    seen_us: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CutPlanes:
    """What a cut says of planes.

    Attributes:
        missing: planes that are not in it.
        streams: stream_id to the planes that are proved to have it (none: the host), of its rows.
    """

    missing: tuple[str, ...] = ()
    streams: Mapping[int, frozenset[str]] = field(default_factory=dict)


NOTHING: Final = CutPlanes()


class PlaneMemory:
    """See the module."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._known: dict[int, frozenset[str]] = {}

    def restore(self, stored: Mapping[int, str]) -> None:
        """What SQL says of streams; before the first cut."""
        self._known = {key: frozenset(text.split()) - {HOST} for key, text in stored.items() if text}

    def look(self, cut: Cut, end_us: int) -> CutPlanes:
        """What the next cut of its gateway says; notes it.

        Args:
            cut: in order of its gateway.
            end_us: its corrected end.
        """
        marks = _marks(cut.extra.get("dp"))
        if not marks:
            return NOTHING
        before = self._gateways.get(cut.gateway_id)
        if before is not None and before.epoch == cut.epoch and cut.seq <= before.seq:
            return NOTHING  # read again from the queue
        follows = before is not None and before.epoch == cut.epoch and cut.seq == before.seq + 1
        old = before.marks if before is not None and follows else {}
        inside = frozenset(name for name, mark in marks.items() if old.get(name) != mark)
        seen_us = dict.fromkeys(marks, end_us) | (before.seen_us if before is not None else {})
        seen_us |= dict.fromkeys(inside, end_us)
        self._gateways[cut.gateway_id] = _Gateway(cut.epoch, cut.seq, marks, seen_us)
        missing = tuple(name for name in marks if name not in inside)
        if not follows:
            return NOTHING
        return CutPlanes(missing, dict(self._learn(cut, inside, len(marks), seen_us, end_us)))

    def _learn(
        self, cut: Cut, inside: frozenset[str], planes: int, seen_us: Mapping[str, int], end_us: int
    ) -> Iterable[tuple[int, frozenset[str]]]:
        """(stream, planes) that were not known of streams of this cut."""
        said = cut.extra.get("of")
        if not isinstance(said, dict) and (len(inside) > 1 or len(inside) == planes):
            return  # nothing is proved, or there is but one plane and no cut without it
        ids = cut.column("stream_id").tolist()
        by_row = _by_row(said, len(ids)) if isinstance(said, dict) else [inside] * len(ids)
        for stream_id, found in zip(ids, by_row, strict=True):
            known = self._known.get(stream_id)
            if known is not None and (found <= known if found else not known):
                continue
            if found and known is not None and not known and not isinstance(said, dict):
                continue  # the host's, in a cut together with a plane
            gone = {name for name in known or () if end_us - seen_us.get(name, end_us) > GONE_US}
            # In a cut without any plane is nothing of a plane.
            self._known[stream_id] = found | ((known or frozenset()) - gone) if found else found
            yield stream_id, self._known[stream_id]


def _marks(value: Any) -> dict[str, int]:
    """Key ``dp``, as far as it can be true."""
    if not isinstance(value, dict):
        return {}
    return {
        name: mark
        for name, mark in list(value.items())[:MOST_PLANES]
        if isinstance(name, str) and isinstance(mark, int) and 0 < len(name) <= MOST_NAME and " " not in name
    }


def _by_row(said: Mapping[Any, Any], rows: int) -> list[frozenset[str]]:
    found: list[set[str]] = [set() for _ in range(rows)]
    for name, bitmap in list(said.items())[:MOST_PLANES]:
        if isinstance(name, str) and isinstance(bitmap, bytes) and 0 < len(name) <= MOST_NAME:
            bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
            for row in np.flatnonzero(bits[:rows]).tolist():
                found[row].add(name)
    return [frozenset(each) for each in found]


def planes_text(planes: Iterable[str]) -> str:
    """As in ``streams.planes``."""
    return " ".join(sorted(planes)) or HOST
