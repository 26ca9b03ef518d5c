"""Merging the samples of one collection into cuts. Pure.

A cut has one interval, one threshold version and one throttle generation, so only samples that agree may
share one:

- *interval*: starts and ends within a tolerance of each other. A plane that was stalled for three seconds
  hands over three seconds of counts; in one cut with a neighbour's single second, one of the two would get a
  wrong rate.
- *threshold version*: equal, or not counted by the source at all (``host``).
- the throttle generation may differ: the cut then says -1, which keeps it out of control decisions.

The interval of a cut runs from the earliest start to the earliest end of its samples: then the cuts of planes
that are collected within milliseconds of each other tile the time without overlap.

Rows with neither activity nor requests under way are left out; a cut without rows still proves its time as
covered. Two samples of one stream (a volume exported by two planes) are added into one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gateway_agent.link.streams import StreamNames
from gateway_agent.sources.sample import Sample
from pmdaemon.wire import cut
from pmdaemon.wire.cut import joined_late

TOLERANCE_RATIO: Final = 0.1  # of the longer interval: bounds the error of a rate
TOLERANCE_FLOOR_NS: Final = 50_000_000  # what a busy host may spread the answers of one question by
_FIRST_ACTIVITY: Final = cut.COL["arrived"]
_END_ACTIVITY: Final = cut.COL["cum_reads"]


@dataclass(frozen=True, slots=True)
class CutIdentity:
    """Who made a cut: everything of it that the samples do not know."""

    gateway_id: str
    epoch: int
    seq: int
    marks: dict[str, int]
    """Per plane, also those not in it, the id of the newest DP_CUT that is spooled once this cut is."""


def groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that may share a cut, oldest interval first; every sample is in exactly one group."""
    result: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda item: (item.end_ns, item.start_ns)):
        for group in result:
            if all(_fit(sample, member) for member in group):
                group.append(sample)
                break
        else:
            result.append([sample])
    return result


def _fit(one: Sample, other: Sample) -> bool:
    longest = max(one.end_ns - one.start_ns, other.end_ns - other.start_ns)
    tolerance = max(TOLERANCE_FLOOR_NS, longest * TOLERANCE_RATIO)
    versions = {one.threshold_version, other.threshold_version} - {None}
    return (
        abs(one.start_ns - other.start_ns) <= tolerance
        and abs(one.end_ns - other.end_ns) <= tolerance
        and len(versions) <= 1
        and one.source != other.source
    )


def make_cut(group: Sequence[Sample], book: StreamNames, identity: CutIdentity) -> cut.Cut:
    """One cut of one group. New streams are entered into ``book``.

    Header key ``dp`` names each plane's newest spooled DP_CUT: a restarted link goes on from there; ``late``
    is there when caps held I/Os for too long (``wire.cut``).

    Raises:
        BadCut: more streams than a cut may have; split the exports over several gateways.
    """
    counters, hist, missed = _combine(group, book)
    first = min(group, key=lambda sample: sample.start_ns)
    end_ns = min(sample.end_ns for sample in group)
    generations = {sample.throttle_gen for sample in group} - {None}
    versions = {sample.threshold_version for sample in group} - {None}
    extra: dict[str, Any] = {"dp": identity.marks}
    if late := joined_late(sample.late for sample in group):
        extra["late"] = late
    return cut.Cut(
        gateway_id=identity.gateway_id,
        epoch=identity.epoch,
        seq=identity.seq,
        start_unix_us=first.start_unix_us,
        duration_us=(end_ns - first.start_ns) // 1000,
        throttle_gen=_common(generations),
        threshold_version=next((version for version in versions if version is not None), 0),
        counters=counters,
        hist=hist,
        missed=missed,
        # Of which plane it was is lost: an I/O of another may be excused, too, never one of this one accused.
        starved_us=max(sample.starved_us for sample in group),
        extra=extra,
    )


def _common(generations: set[int | None]) -> int:
    """The generation all report; 0 (static policy) when no source has caps, -1 when they differ."""
    if not generations:
        return 0
    only = generations.pop()
    return -1 if generations or only is None else only


def _combine(
    group: Sequence[Sample], book: StreamNames
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any], npt.NDArray[Any]]:
    ids = np.array([book.enter(key) for sample in group for key in sample.streams], dtype=np.int64)
    counters = np.concatenate([sample.counters for sample in group], axis=1)
    offsets = np.cumsum([0] + [len(sample.streams) for sample in group])
    hist, missed = (
        np.concatenate([_shifted(getattr(sample, name), int(offset)) for sample, offset in pairs])
        for name in ("hist", "missed")
        for pairs in [list(zip(group, offsets, strict=False))]
    )
    unique_ids, row_of = np.unique(ids, return_inverse=True)
    summed = np.zeros((len(cut.COLUMNS), len(unique_ids)), dtype=np.int64)
    for column in range(len(cut.COLUMNS)):
        np.add.at(summed[column], row_of, counters[column])
    summed[cut.COL["stream_id"]] = unique_ids
    hist["row"], missed["row"] = row_of[hist["row"]], row_of[missed["row"]]
    return _without_idle(summed, hist, missed)


def _shifted(column: npt.NDArray[Any], offset: int) -> npt.NDArray[Any]:
    moved = column.copy()
    moved["row"] += offset
    return moved


def _without_idle(
    counters: npt.NDArray[np.int64], hist: npt.NDArray[Any], missed: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any], npt.NDArray[Any]]:
    keep: npt.NDArray[np.bool_] = np.asarray(counters[_FIRST_ACTIVITY:_END_ACTIVITY].any(axis=0))
    keep[hist["row"]] = True
    keep[missed["row"]] = True
    new_row = np.cumsum(keep) - 1
    hist["row"], missed["row"] = new_row[hist["row"]], new_row[missed["row"]]
    return np.ascontiguousarray(counters[:, keep]), hist, missed
