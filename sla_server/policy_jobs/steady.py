"""Intervals of one load within minutes: what raw cuts say that minutes blur.

A minute in which a neighbour was at work for ten seconds has the misses of those seconds, and a mean load far
below theirs: from such minutes a backend seems to take a fraction of what it can. Cuts are a poll long. Added
up over a backend in bins of that length they show the load as it was, but for bins within which it changed.
So a bin counts only if the one before it or after it has about the same load: more than noise apart they are
the edges of a burst. Bins that follow one another in that way are joined until they have enough I/Os, at most
``MOST_S``.

Minutes stay the measure of what is complete: bins of a minute whose cuts are not all there (``is_complete``)
would show less load than there was, and are left out.

Pure numpy. Source: SLA-MODEL.md 3 (windows of the signal), and 4, point 2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from sla_server.policy_jobs.capacity import Intervals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ALIKE: Final = 0.1  # of the larger of two loads, and one standard deviation of their difference
ENOUGH_IOS: Final = 20  # as windows of the signal have
MOST_S: Final = 10.0  # likewise
COMPLETE: Final = 0.9
"""Of a minute's load that the bins in it must have: a cut at its edge may count for the next."""


@dataclass(frozen=True, slots=True)
class Bins:
    """A backend and one promise on it, in bins of one length; arrays of shape (n,), by time.

    Attributes:
        at_us: begin.
        load: completed cost a second of all volumes of the backend.
        counted, missed: I/Os that the promise covers, and those above its threshold.
        ios: completed by the backend.
        svc_us: their time at the storage, added up.
    """

    at_us: Ints
    load: Floats
    counted: Floats
    missed: Floats
    ios: Floats
    svc_us: Floats

    def only(self, chosen: Flags) -> Bins:
        """Those bins."""
        return Bins(*(getattr(self, field.name)[chosen] for field in fields(self)))


def is_complete(at_us: Ints, load: Floats, bin_us: int, minute_us: Ints, minute_load: Floats) -> Flags:
    """Bins of minutes that have the load which the minutes' own sums say; shape (n,).

    Args:
        at_us: begins of bins, shape (n,).
        load: in them.
        bin_us: their length.
        minute_us: begins of minutes, rising and of one length.
        minute_load: their mean loads.
    """
    if not len(at_us) or len(minute_us) < 2:
        return np.zeros(len(at_us), dtype=np.bool_)
    length_us = int(np.diff(minute_us).min())
    place = np.searchsorted(minute_us, at_us, side="right") - 1
    within = (place >= 0) & (at_us - minute_us[np.maximum(place, 0)] < length_us)
    place = np.where(within, place, 0)
    summed = np.bincount(place[within], load[within] * bin_us / length_us, len(minute_us))
    return within & (summed >= COMPLETE * minute_load)[place]


def steady(bins: Bins, bin_us: int, allowed_ratio: float, limit_us: float) -> Intervals:
    """The intervals of one load.

    Args:
        bins: by time.
        bin_us: their length.
        allowed_ratio: what the promise allows, see ``Intervals``.
        limit_us: likewise.
    """
    first, length = _runs(bins, bin_us) if len(bins.at_us) > 1 else ([], [])
    begin, end = np.array(first, dtype=np.int64), np.array(first, dtype=np.int64) + length

    def summed(values: Floats) -> Floats:
        total = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(total[end.astype(np.int64)] - total[begin], dtype=np.float64)

    ios, seconds = summed(bins.ios), np.array(length, dtype=np.float64) * bin_us / 1e6
    return Intervals(
        load=summed(bins.load) / np.maximum(end - begin, 1),
        counted=summed(bins.counted),
        missed=summed(bins.missed),
        allowed_ratio=allowed_ratio,
        at_us=bins.at_us[begin],
        limit_us=limit_us,
        rate=ios / np.maximum(seconds, 1e-9),
        service_us=summed(bins.svc_us) / np.maximum(ios, 1.0),
    )


def _runs(bins: Bins, bin_us: int) -> tuple[list[int], list[int]]:
    """First bin of each interval, and how many they are."""
    alike = _alike(bins, bin_us)
    holds = np.concatenate((alike, [False])) | np.concatenate(([False], alike))
    most = max(int(MOST_S * 1e6) // bin_us, 1)
    first: list[int] = []
    length: list[int] = []
    ios, goes_on = 0.0, False
    counted, follows = bins.counted.tolist(), alike.tolist()
    for place in np.flatnonzero(holds).tolist():
        goes_on = goes_on and place > 0 and follows[place - 1]
        if goes_on and ios < ENOUGH_IOS and length[-1] < most:
            length[-1] += 1
            ios += counted[place]
        else:
            first.append(place)
            length.append(1)
            ios = counted[place]
        goes_on = True
    return first, length


def _alike(bins: Bins, bin_us: int) -> Flags:
    """Whether a bin and the next, which follows at once, differ by no more than chance; shape (n - 1,)."""
    larger = np.maximum(bins.load[1:], bins.load[:-1])
    cost = bins.load * bin_us / 1e6
    an_io = float(cost.sum() / max(bins.ios.sum(), 1.0))
    noise = np.sqrt(2.0 * larger * an_io / (bin_us / 1e6))
    follows = np.diff(bins.at_us) == bin_us
    return np.asarray(follows & (np.abs(np.diff(bins.load)) <= ALIKE * larger + noise), dtype=np.bool_)
