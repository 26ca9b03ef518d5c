"""One read of rollups, indexed the way slices are judged: by stream and slot, by gateway and data plane.

Pure. When a gap is *ours*: ``judge``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np

from sla_server.agreements.slot_table import (
    LIMIT_COLUMNS,
    SLOT_COLUMNS,
    Bools,
    Ints,
    SlotTable,
    expanded,
    limit_key,
)
from sla_server.agreements.thresholds import QEMU_PREFIX
from sla_server.rows import Row
from sla_server.services.judging.track import JudgedStream
from sla_server.services.store import SliceInputs

_TIME_BITS: Final = 44  # microseconds of half a year, from the first slot of the read on
HOST: Final = "-"
"""In ``streams.planes``: of no data plane."""


class SliceRows:
    """One read. ``table``: its slots as columns."""

    def __init__(self, inputs: SliceInputs, outages: Sequence[Row] = ()) -> None:
        slots, limits = inputs.slots, inputs.limits
        self._outages = outages
        self._streams = np.unique(slots["stream_id"])
        self._origin_us = int(slots["slot_us"].min()) if len(slots["slot_us"]) else 0
        key = self._key(slots["stream_id"], slots["slot_us"])
        self._order = np.argsort(key, kind="stable")
        self._sorted = key[self._order]
        columns = {name: slots[name] for name in SLOT_COLUMNS if name != "outstanding"}
        columns["outstanding"] = slots["held_max"] + slots["inflight_max"]
        self.table = SlotTable(columns, inputs.hist, *self._limits(limits))
        self._coverage: dict[str, list[Row]] = defaultdict(list)
        self._gaps: dict[str, list[Row]] = defaultdict(list)
        for row in inputs.plane_gaps:
            self._gaps[row["gateway_id"]].append(row)
        self._planes = inputs.planes
        self._sums: dict[tuple[str, int, int], int] = {}
        self.add_coverage(inputs.coverage)

    def _key(self, stream_id: Ints, slot_us: Ints) -> Ints:
        """Orders rows by stream and slot."""
        found: Ints = (np.searchsorted(self._streams, stream_id) << _TIME_BITS) | (slot_us - self._origin_us)
        return found

    def _limits(self, limits: Mapping[str, Ints]) -> tuple[dict[str, Ints], Ints]:
        """Counts against limits, and their keys; those of a row that is not in the read are left out."""
        if not len(self._sorted):
            return {name: limits[name][:0] for name in LIMIT_COLUMNS}, limits["io"][:0]
        key = self._key(limits["stream_id"], limits["slot_us"])
        place = np.minimum(np.searchsorted(self._sorted, key), len(self._sorted) - 1)
        known = (self._sorted[place] == key) & np.isin(limits["stream_id"], self._streams)
        row = self._order[place[known]]
        found = {name: limits[name][known] for name in LIMIT_COLUMNS}
        return found, limit_key(row, limits["io"][known], limits["threshold_us"][known])

    def add_coverage(self, rows: Iterable[Row]) -> None:
        """More rows of table ``coverage``, later than those known."""
        for row in sorted(rows, key=lambda row: int(row["slot_us"])):
            self._coverage[row["gateway_id"]].append(row)
        self._sums.clear()

    def pairs(
        self, scopes: Sequence[Sequence[JudgedStream]], start_us: Ints, end_us: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """What the streams of each scope did in the slots that start in its slice.

        Returns:
            Index of the slice, row of ``table`` and number of the stream of each pair, ordered by the first
            and the third; see ``verdicts.DueSlices``.
        """
        of = np.repeat(np.arange(len(scopes)), [len(scope) for scope in scopes])
        ids = np.fromiter((stream.stream_id for stream in chain.from_iterable(scopes)), dtype=np.int64)
        place = np.minimum(np.searchsorted(self._streams, ids), max(len(self._streams) - 1, 0))
        if not len(self._streams):
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, nothing
        known = self._streams[place] == ids
        of, place = of[known], place[known]
        first, last = (
            np.searchsorted(self._sorted, (place << _TIME_BITS) | np.maximum(us[of] - self._origin_us, 0))
            for us in (start_us, end_us)
        )
        at, entry = expanded(first, last)
        return of[at], self._order[entry], place[at]

    def is_beside(self, numbers: Ints, scopes: Iterable[Iterable[JudgedStream]]) -> Bools | None:
        """Whether streams, by their numbers in ``pairs``, are of a source that knows completions only."""
        found = {
            stream.stream_id
            for stream in chain.from_iterable(scopes)
            if stream.volume.startswith(QEMU_PREFIX)
        }
        return np.isin(self._streams[numbers], list(found)) if found else None

    # -- How much of a slice was observed

    def covered_us(self, gateway_id: str, start_us: int, end_us: int) -> int:
        """Sum of the durations of the gateway's cuts within the slice."""
        key = gateway_id, start_us, end_us
        found = self._sums.get(key)
        if found is None:
            rows = self._coverage.get(gateway_id, ())
            found = sum(int(row["covered_us"]) for row in rows if start_us <= row["slot_us"] < end_us)
            self._sums[key] = found
        return found

    def sources(
        self, scope: Iterable[JudgedStream], gateways: Iterable[str], start_us: int, end_us: int
    ) -> list[tuple[str, int]]:
        """(gateway, observed time) of each source that some stream in scope needs.

        A source is a gateway; where cuts were without one of its data planes, that plane.
        """
        found: list[tuple[str, int]] = []
        streams = list(scope) if self._gaps else []
        for gateway_id in gateways:
            covered = self.covered_us(gateway_id, start_us, end_us)
            missing: dict[str, int] = defaultdict(int)
            for row in self._gaps.get(gateway_id, ()):
                if start_us <= row["slot_us"] < end_us:
                    missing[row["plane"]] += int(row["missing_us"])
            needed = set[str]()
            for stream in streams if missing else ():
                if stream.gateway_id == gateway_id:
                    needed |= _needed(self._planes.get(stream.stream_id, ""), missing)
            found.append((gateway_id, covered - max((missing.get(name, 0) for name in needed), default=0)))
        return found

    def lost_by_us(self, gateway_id: str, start_us: int, end_us: int) -> str:
        """How we lost cuts of the slice, or of a gap that lasts beyond its end: a reason, or nothing."""
        for row in self._coverage.get(gateway_id, ()):
            if row["slot_us"] >= start_us and (row["gap_cuts"] > 0 or row["gap_ios"] > 0):
                return "cuts-lost"
            if row["slot_us"] >= end_us:
                break
        if any(row["from_us"] < end_us and row["to_us"] > start_us for row in self._outages):
            return "server-down"
        return ""


def _needed(planes: str, missing: Iterable[str]) -> set[str]:
    """Planes whose time a stream needs; ``planes`` as in ``streams.planes``, "" for all."""
    return set() if planes == HOST else set(planes.split() if planes else missing)
