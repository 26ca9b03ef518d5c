"""Cuts that cover more than the slot they start in: parts of them, one a slot.

A cut of the usual second belongs wholly to the slot of its start. One that reaches far into the next slots (a
data plane or an agent that was stopped for minutes hands over all of it at once) would make one slot twice as
busy as it was and leave the others without a word. So its counts are shared out by time, but for the time in
which its planes gave no answer (``planes``) and served nothing: of each counter the n-th part is what n parts
have of it together, rounded down, less what the parts before have; the parts add up to the cut. What was
outstanding may have been so in any of them: stalls, ages and gauges are in all of them. Such slots say so
(``rollups.spread_us``), and what is judged from them is inexact.

How much of each slot was covered is exact, also of usual cuts: ``shares``.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import (
    COL,
    OUTSTANDING,
    SEQUENTIAL,
    SUMMED,
    Cut,
    sequential_bytes,
    sequential_counts,
)
from sla_server.db.ingest.batch import IngestedCut

LEAST_RATIO: Final = 0.1
"""Of a slot that a cut must reach beyond its own to be shared out; a slice may lack as much."""
MOST_SLOTS: Final = 60
"""Of one cut: a longer one (an hour, with slots of a minute) stays in the slot of its start, and nothing was
observed in the slots that follow."""
_GAUGES: Final = (COL["held"], COL["inflight"])


def shares(start_us: int, duration_us: int, slot_us: int) -> Iterator[tuple[int, int]]:
    """(start of a slot, time of the cut in it), in order; of a cut that is too long the first alone."""
    end_us = start_us + duration_us
    first_us = slot = start_us // slot_us * slot_us
    if end_us - first_us > (MOST_SLOTS + 1) * slot_us:
        end_us = first_us + slot_us
    while slot == first_us or slot < end_us:
        yield slot, max(min(slot + slot_us, end_us) - max(slot, start_us), 0)
        slot += slot_us


def spread(
    items: Sequence[IngestedCut], slot_us: int, idle: Mapping[int, tuple[int, int]] | None = None
) -> Sequence[IngestedCut]:
    """The cuts, long ones in parts; the same object if there are none.

    Args:
        items: some cuts.
        slot_us: length of a slot.
        idle: index of a cut to the time of it in which nothing was served.
    """
    if not any(_is_long(item, slot_us) for item in items):
        return items
    parts: list[IngestedCut] = []
    for index, item in enumerate(items):
        span = (idle or {}).get(index, (0, 0))
        parts += _parts(item, slot_us, span) if _is_long(item, slot_us) else (item,)
    return parts


def overlap_us(from_us: int, to_us: int, span: tuple[int, int]) -> int:
    """How much of a time lies in a span."""
    return max(min(to_us, span[1]) - max(from_us, span[0]), 0)


def _is_long(item: IngestedCut, slot_us: int) -> bool:
    over_us = item.end_us - (item.start_us // slot_us + 1) * slot_us
    return LEAST_RATIO * slot_us < over_us <= MOST_SLOTS * slot_us


def _parts(item: IngestedCut, slot_us: int, idle: tuple[int, int]) -> Iterator[IngestedCut]:
    cut = item.cut
    spans = list(shares(item.start_us, cut.duration_us, slot_us))
    total_us = cut.duration_us - overlap_us(item.start_us, item.end_us, idle)
    if total_us <= 0:
        total_us, idle = cut.duration_us, (0, 0)
    passed_us = now = 0
    for number, (_, us) in enumerate(spans):
        began_us = item.start_us + passed_us
        before, now = now, now + us - overlap_us(began_us, began_us + us, idle)
        counters = cut.counters.copy()
        # As parts of whole and rest: a counter times a duration may be beyond int64.
        summed = _part(cut.counters[SUMMED], before, now, total_us)
        counters[SUMMED] = summed
        for gauge in _GAUGES:
            counters[gauge] = cut.counters[gauge]
        hist = cut.hist.copy()
        hist["count"] = _part(cut.hist["count"].astype(np.int64), before, now, total_us)
        yield replace(
            item,
            cut=replace(
                cut,
                start_unix_us=cut.start_unix_us + passed_us,
                duration_us=us,
                counters=counters,
                hist=hist[hist["count"] > 0],
                missed=_missed(cut.missed, before, now, total_us),
                gap=0 if number else cut.gap,
                extra=_extra(cut, before, now, total_us),
            ),
            part=number + 1,
        )
        passed_us += us


def _extra(cut: Cut, before: int, now: int, total: int) -> dict[str, Any]:
    if not cut.sequential:
        return cut.extra
    counts = sequential_counts(cut.sequential)
    part = np.where(counts < 0, -1, _part(counts, before, now, total))
    return {**cut.extra, SEQUENTIAL: sequential_bytes(part)}


def _missed(missed: npt.NDArray[Any], before: int, now: int, total: int) -> npt.NDArray[Any]:
    found = missed.copy()
    is_count = missed["io"] < OUTSTANDING
    for name in ("counted", "missed"):
        part = _part(missed[name].astype(np.int64), before, now, total)
        found[name] = np.where(is_count, part, missed[name])
    return found


def _part(values: npt.NDArray[np.int64], before: int, now: int, total: int) -> npt.NDArray[np.int64]:
    """What falls on [before, now) of ``total``."""
    low, high = (_until(values, at, total) for at in (before, now))
    found: npt.NDArray[np.int64] = high - low
    return found


def _until(values: npt.NDArray[np.int64], at: int, total: int) -> npt.NDArray[np.int64]:
    if at >= total:
        return values
    # Counters are below 2**47 and durations below 2**37: in two steps of 16 bits nothing overflows.
    ratio = (at << 16) // total
    found: npt.NDArray[np.int64] = (values >> 16) * ratio + ((values & 0xFFFF) * ratio >> 16)
    return found
