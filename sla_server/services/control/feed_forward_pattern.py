"""Recurring bursts: whether the load of the last hours repeats, after how long, and when a burst comes next.

Load is a row of *bins*: of each stretch of some seconds the share in which the load was high (0..1). It
recurs with period P if shifting it by P, and by 2 P, covers it: the autocorrelation at P and near 2 P is
high, and low somewhere before P (else the load is only slow). The shortest stretch of history that is clear
decides, so that a pattern that is new is found though hours of another one came before.

The period alone does not say when. *Onsets* do, the seconds at which the load became high: the next one is
expected a period after an onset that itself came a period after another one, and that after a third. Each
prediction begins at the newest onset, so a pattern that drifts by less than ``TOLERANCE_BINS`` a period is
followed; one that has stopped predicts one burst more, and then none.

Pure functions on arrays, deterministic; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SPANS: Final = (64, 256, 1024)
"""Bins looked at: eleven minutes, three quarters of an hour and three hours of 10 s each."""
LEAST_REPEATS: Final = 4
"""Periods that the history must hold: three may be chance where bursts are frequent."""
LEAST_PERIOD: Final = 4
"""Bins; within less than that a loop that has just been released would still be at work."""
CLEAR: Final = 0.6
"""Least autocorrelation at the period. Random bursts reach it in few of the looks, and hardly any of those
three times in a row; bursts that come within a bin of their time have 0.7 and more."""
CLEAR_TWICE: Final = 0.5
"""Least autocorrelation at twice the period: one pair of equal gaps is no pattern."""
VALLEY: Final = 0.3
"""It must have been this much lower before the period: load that is high for long correlates with itself."""
NEAR_BEST: Final = 0.9
"""The shortest period with so much of the best one's correlation is taken: all multiples recur as well."""
TOLERANCE_BINS: Final = 1.5
"""How far from its time an onset may be: what two neighbouring bins cannot tell apart."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A pattern that was found: its period, the autocorrelation there, and the bins that were looked at."""

    period_bins: int
    strength: float
    bins: int


def autocorrelation(load: Floats) -> Floats:
    """Correlation of ``load`` with itself, shifted by 0 to half of its length; shape (n // 2 + 1,).

    Each lag is normalised by what overlaps, so that long lags are not weaker; 0 where nothing varies.
    """
    n, centred = len(load), load - load.mean()
    spectrum = np.fft.rfft(centred, 2 * n)
    products = np.fft.irfft(spectrum * spectrum.conj(), 2 * n)[: n // 2 + 1]
    energy = np.concatenate((np.zeros(1), np.cumsum(centred * centred)))
    lags = np.arange(n // 2 + 1)
    scale = np.sqrt(energy[n - lags] * (energy[n] - energy[lags]))
    found: Floats = np.where(scale > 1e-9, products / np.maximum(scale, 1e-9), 0.0)
    return found


def recurrence(load: Sequence[float] | npt.NDArray[Any]) -> Recurrence | None:
    """The pattern of the newest bins, None unless it is clear.

    Args:
        load: share of high load in each bin, oldest first; shape (bins,).
    """
    bins = np.asarray(load, dtype=np.float64)
    for span in SPANS:
        found = _recurrence(bins[-span:])
        if found is not None or len(bins) <= span:
            return found
    return None


def _recurrence(bins: Floats) -> Recurrence | None:
    if len(bins) < LEAST_PERIOD * LEAST_REPEATS:
        return None
    # A burst that begins half a bin late is the same burst: neighbouring bins share a quarter.
    smooth = np.convolve(np.pad(bins, 1, mode="edge"), (0.25, 0.5, 0.25), mode="valid")
    found = autocorrelation(smooth)
    lags = np.arange(LEAST_PERIOD, len(bins) // LEAST_REPEATS + 1)
    at = found[lags]
    valley = np.minimum.accumulate(found)[lags - 1]
    twice = np.max([found[np.minimum(2 * lags + step, len(found) - 1)] for step in (-1, 0, 1)], axis=0)
    peak = (at >= found[lags - 1]) & (at >= found[np.minimum(lags + 1, len(found) - 1)])
    clear = peak & (at >= CLEAR) & (twice >= CLEAR_TWICE) & (at - valley >= VALLEY)
    if not clear.any():
        return None
    near_best = clear & (at >= NEAR_BEST * at[clear].max())
    index = int(np.argmax(near_best))
    return Recurrence(int(lags[index]), float(at[index]), len(bins))


def next_onset(onsets_s: Sequence[float], period_s: float, tolerance_s: float, now_s: float) -> float | None:
    """When the next burst is expected, in seconds; None if no onset of the last period began a new one.

    Args:
        onsets_s: when the load became high, oldest first.
        period_s: of the pattern.
        tolerance_s: by how much a gap may differ from the period.
        now_s: what lies at or before this is not next.
    """
    expected = []
    for last in reversed(onsets_s):
        if now_s - last > period_s + tolerance_s:
            break
        before = _nearest(onsets_s, last - period_s, tolerance_s)
        first = None if before is None else _nearest(onsets_s, before - period_s, tolerance_s)
        if first is not None:
            expected.append(last + (last - first) / 2)  # two gaps: what one has too much another lacks
    return min((at_s for at_s in expected if at_s > now_s), default=None)


def _nearest(onsets_s: Sequence[float], at_s: float, tolerance_s: float) -> float | None:
    found = min(onsets_s, key=lambda onset_s: abs(onset_s - at_s), default=None)
    return found if found is not None and abs(found - at_s) <= tolerance_s else None
