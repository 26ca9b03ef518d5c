"""The load that a backend can take before a promise breaks: C_X, with a lower bound.

For one promise at one step of its demand curve, each interval gives a point: the total load U of the backend,
the I/Os counted and missed, and the latency percentile where it is known. C_X is the largest load at which
the percentile is at most ``MARGIN`` of the promised X. Two curves are fitted to the points, gathered in at
most 200 bins of load:

- *Isotonic* (pool adjacent violators, weighted by I/Os) on the miss ratio, which gateways count exactly: more
  load never makes a shared backend faster. It assumes nothing else, and answers with loads that were seen.
  The margin becomes one of the miss ratio by an exponential tail, P(latency > x) = exp(-x / tau), by which
  the percentile is ``MARGIN`` X where the miss ratio is allowed ** (1 / MARGIN).
- *Queueing*, L = L0 + k (U/C) / (1 - U/C), on percentile / X, or where percentiles are not known on the same
  tail's ln(allowed) / ln(miss ratio). Robust: Huber weights on residuals relative to the isotonic fit of the
  same, L0 and k not below 0, C by search above the highest load. It smooths where points are few.

Of 40 intervals of about one load the worst two count no more than the next: a disk that hangs now and then
does so at any load. The isotonic answer is replaced by its lower bootstrap bound: blocks of one hour are
drawn again 200 times, with a fixed seed, and 95 % of the draws give at least the bound. The smaller of the
bound and the queueing answer is recommended.

A value is given only where it is plausible: the promise was kept at low load and broken at high load, and the
bound is not below half of the estimate. Otherwise it is None with the reason, and the caller keeps the last
valid value.

Pure numpy: executors of a cluster need no more. Source: SLA-MODEL.md 4, point 2; Barlow and others,
Statistical Inference under Order Restrictions, 1 (pool adjacent violators); Huber and Ronchetti, Robust
Statistics, 7; Kuensch, The jackknife and the bootstrap for general stationary observations (blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from sla_server.policy_jobs.gap import load_in_gap

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MARGIN: Final = 0.85  # of the limit: a load at which it is just met would break it every other minute
MIN_POINTS: Final = 5  # fewer intervals say nothing about a curve
MIN_IOS: Final = 20  # an interval with fewer I/Os cannot show a percentile
MOST_BINS: Final = 200  # half of equal counts, half of equal widths: crowded loads are rare and matter most
NEIGHBOURS: Final = 40  # intervals of about one load
OUTLYING: Final = 0.05  # of them: bad at any load, so it is not the load; more than that counts
MOST_RATIO: Final = 2.0  # of a percentile to X: by how much more it is broken says nothing of where it breaks

MIN_BOUND_POINTS: Final = 30  # with fewer intervals a draw repeats some and lacks others: that is no bound
DRAWS: Final = 200
SEED: Final = 17
CONFIDENCE: Final = 0.95
BLOCK_US: Final = 3_600_000_000  # what slows a backend down lasts for minutes: neighbours are not independent
MOST_BLOCKS: Final = 1000
LEAST_BOUND: Final = 0.5  # of the estimate; a lower bound says that the data do not tell

MIN_CURVE_BINS: Final = 10
HUBER: Final = 1.345  # 95 % as efficient as least squares where errors are normal
HUBER_ROUNDS: Final = 8
LEAST_SCALE: Final = 0.05  # of X: differences below are noise of the measurement
MOST_MISFIT: Final = 0.35  # median of the relative residuals; above, the curve is of another form
LEAST_CURVE: Final = 0.5  # of the isotonic estimate, likewise
DRAWN_POINTS: Final = 40  # of a curve that people look at: some 800 bytes of a policy's report


@dataclass(frozen=True, slots=True)
class Intervals:
    """What was seen of one promise at one step of its curve; arrays of shape (n,), one element an interval.

    Attributes:
        load: completed cost a second of all volumes of the backend.
        counted, missed: I/Os that the promise covers, and those above the threshold.
        allowed_ratio: what the promise allows of missed / counted.
        latency_ratio: the promised percentile over X, NaN where it is not known; None: of no interval.
        at_us: begin; None: not known, then intervals are in order of time.
        limit_us: X; 0: not known.
        rate, service_us: I/Os a second of the whole backend, and their mean time at the storage; None: not
            known.
    """

    load: Floats
    counted: Floats
    missed: Floats
    allowed_ratio: float
    latency_ratio: Floats | None = None
    at_us: Ints | None = None
    limit_us: float = 0.0
    rate: Floats | None = None
    service_us: Floats | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the data say of one promise on one backend.

    Attributes:
        cost_per_s: recommended; None where the data show no limit, or no plausible one.
        points: intervals with enough I/Os.
        highest_load: of them.
        highest_kept: the largest load at which the isotonic curve is within the margin; 0: at none.
        isotonic, bound, queueing: what the value was chosen from; None where there is none.
        between: likewise; a load that was not seen, see ``gap``.
        reason: how it was chosen, or why there is none.
        unlimited: the promise was kept at every load seen.
        curve: the points and what was fitted to them; None with too few.
    """

    cost_per_s: float | None
    points: int
    highest_load: float
    reason: str
    highest_kept: float = 0.0
    isotonic: float | None = None
    bound: float | None = None
    queueing: float | None = None
    unlimited: bool = False
    curve: CapacityCurve | None = None
    between: float | None = None


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """What the capacity was read from, for people to look at.

    Attributes:
        points: (load, percentile / X there, isotonic fit of that), by load; ``DRAWN_POINTS`` at most, each
            the mean of some bins.
        queueing: base, slope and limit of the queueing curve; None where it was not fitted, or does not
            describe the points.
    """

    points: tuple[tuple[float, float, float], ...]
    queueing: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class QueueingCurve:
    """``base + slope * (U / limit) / (1 - U / limit)``, as a share of X.

    Attributes:
        misfit: median of the residuals relative to the curve.
    """

    base: float
    slope: float
    limit: float
    misfit: float

    def load_at(self, ratio: float) -> float | None:
        """The load at which it reaches this; None where it never does, or is above it without load."""
        if self.slope <= 0 or ratio <= self.base:
            return None
        x = (ratio - self.base) / self.slope
        return self.limit * x / (1.0 + x)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Non-decreasing least-squares fit (pool adjacent violators); shapes (n,)."""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, mass, length = blocks.pop()
            below = blocks[-1]
            total = below[1] + mass
            below[0] = (below[0] * below[1] + mean * mass) / total
            below[1] = total
            below[2] += length
    return np.repeat([block[0] for block in blocks], [int(block[2]) for block in blocks]).astype(np.float64)


def capacity(seen: Intervals) -> Capacity:
    """The largest load at which the promise is kept with a margin, as far as the data tell."""
    seen = _enough(seen)
    points = len(seen.load)
    highest = float(seen.load.max()) if points else 0.0
    if points < MIN_POINTS:
        reason = f"only {points} intervals with {MIN_IOS} I/Os, {MIN_POINTS} needed"
        return Capacity(None, points, highest, reason)
    bins = _Bins.of(seen)
    load, counted, missed = bins.load, bins.counted.sum(axis=0), bins.missed.sum(axis=0)
    most = most_missed(seen.allowed_ratio)
    kept = isotonic(missed / counted, counted) <= most
    shown = _curve_points(seen, bins) if 0.0 < seen.allowed_ratio < 1.0 else None
    if kept.all():
        reason = "the promise was kept at every load seen: no limit is known"
        found = Capacity(None, points, highest, reason, highest_kept=float(load[-1]), unlimited=True)
        return replace(found, curve=_drawn(shown, None))
    if not kept.any():
        reason = "the promise was broken at every load seen: no load to recommend"
        return Capacity(None, points, highest, reason, curve=_drawn(shown, None))
    estimate = float(load[kept].max())
    bound = _lower_bound(bins, most, estimate) if points >= MIN_BOUND_POINTS else None
    queueing = _described(shown)
    crossing = _curve_estimate(queueing, estimate, float(load[-1]))
    found = _choose(points, highest, estimate, bound, crossing)
    return replace(_with_gap(found, seen, most), curve=_drawn(shown, queueing))


def _with_gap(found: Capacity, seen: Intervals, most: float) -> Capacity:
    """The capacity, or where it lies in a gap between loads that were seen."""
    if found.cost_per_s is None or seen.rate is None or seen.service_us is None:
        return found
    is_broken = seen.missed > most * seen.counted
    between = load_in_gap(
        seen.load, is_broken, seen.rate, seen.service_us,
        found.highest_kept, MARGIN * seen.limit_us, seen.allowed_ratio,
    )  # fmt: skip
    if between is None or between <= found.cost_per_s:
        return found
    kept = f"{found.highest_kept:.0f} weighted IOPS"
    reason = f"no load was seen just above {kept}, where it was kept: by a queue model"
    return replace(found, cost_per_s=between, between=between, reason=reason)


def combined(of_minutes: Capacity, steady: Intervals | None) -> Capacity:
    """What minutes say, or what intervals of one load say that are shorter.

    Minutes that blur bursts show less than there is, never more. So shorter intervals are taken instead,
    where they are enough for a bound: by their value, or, if the promise was kept at each of their loads, by
    the largest of these. The latter is no limit (``unlimited``), and the last valid value is kept if it is
    larger.
    """
    if steady is None:
        return of_minutes
    found = capacity(steady)
    if found.points < MIN_BOUND_POINTS or (found.cost_per_s is None and not found.unlimited):
        return of_minutes
    return found


def _choose(
    points: int, highest: float, estimate: float, bound: float | None, curve: float | None
) -> Capacity:
    value, reason = estimate, "largest load at which the promise was kept"
    if bound is not None:
        value, reason = bound, "lower bound of the largest load at which the promise was kept"
        if bound < LEAST_BOUND * estimate:
            reason = (
                f"too uncertain: between {bound:.0f} and {estimate:.0f} weighted IOPS, the "
                f"promise does not follow "
                "the load"
            )
            return Capacity(None, points, highest, reason, estimate, estimate, bound, curve)
    else:
        reason += f" (fewer than {MIN_BOUND_POINTS} intervals: no bound)"
    if curve is not None and curve < value:
        value, reason = curve, "load at which the queueing curve comes near the promise"
    return Capacity(value, points, highest, reason, estimate, estimate, bound, curve)


def _enough(seen: Intervals) -> Intervals:
    """The intervals with enough I/Os and a load, outliers made as bad as their neighbours."""
    good = (seen.counted >= MIN_IOS) & np.isfinite(seen.load) & (seen.load > 0)
    load, counted = seen.load[good], seen.counted[good]
    latency = None if seen.latency_ratio is None else _without_outliers(load, seen.latency_ratio[good])
    return Intervals(
        load=load,
        counted=counted,
        missed=_without_outliers(load, seen.missed[good] / counted) * counted,
        allowed_ratio=seen.allowed_ratio,
        latency_ratio=latency,
        at_us=None if seen.at_us is None else seen.at_us[good],
        limit_us=seen.limit_us,
        rate=None if seen.rate is None else seen.rate[good],
        service_us=None if seen.service_us is None else seen.service_us[good],
    )


def _without_outliers(load: Floats, values: Floats) -> Floats:
    """Each value, but at most what all but ``OUTLYING`` of its neighbours in load have.

    Where a group of neighbours has more outliers by chance, those on both sides outvote it. The highest loads
    count as they are: there the worst are what is looked for, not outliers.
    """
    groups = np.array_split(np.argsort(load, kind="stable"), max(len(load) // NEIGHBOURS, 1))
    most = np.full(len(groups), np.inf)
    for i, members in enumerate(groups):
        known = values[members][np.isfinite(values[members])]
        if len(known) >= NEIGHBOURS // 2:
            most[i] = np.quantile(known, 1 - OUTLYING, method="lower")
    padded = np.concatenate([most[:1], most, [np.inf]])
    medians = np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)
    result = values.copy()
    for i, members in enumerate(groups[:-1]):
        result[members] = np.minimum(values[members], min(most[i], medians[i]))
    return result


def most_missed(allowed_ratio: float) -> float:
    """The miss ratio at which the percentile is ``MARGIN`` of X, by an exponential tail."""
    return float(allowed_ratio ** (1.0 / MARGIN)) if allowed_ratio < 1.0 else allowed_ratio


# -- Bins of load, and the bootstrap over them


@dataclass(frozen=True, slots=True)
class _Bins:
    """Intervals gathered by load and by block of time.

    Attributes:
        load: mean of each bin, shape (bins,), rising.
        counted, missed: I/Os; shapes (blocks, bins).
        index: the bin of each interval, shape (n,).
    """

    load: Floats
    counted: Floats
    missed: Floats
    index: Ints

    @classmethod
    def of(cls, seen: Intervals) -> _Bins:
        bin_of, bins = _bin_index(seen.load)
        block_of, blocks = _block_index(seen)
        flat = block_of * bins + bin_of
        size = blocks * bins

        def gathered(values: Floats) -> Floats:
            return np.bincount(flat, weights=values, minlength=size).astype(np.float64).reshape(blocks, bins)

        load = np.bincount(bin_of, weights=seen.load) / np.bincount(bin_of)
        return cls(load, gathered(seen.counted), gathered(seen.missed), bin_of)


def _bin_index(load: Floats) -> tuple[Ints, int]:
    """The bin of each interval, and how many there are; none is empty."""
    distinct = np.unique(load)
    if len(distinct) > MOST_BINS:
        half = MOST_BINS // 2
        by_count = np.quantile(load, np.linspace(0.0, 1.0, half + 1), method="lower")
        by_width = np.linspace(load.min(), load.max(), half + 1)
        distinct = np.unique(np.concatenate([by_count, by_width]))
    found = np.searchsorted(distinct, load, side="right") - 1
    used, index = np.unique(found, return_inverse=True)
    return index.astype(np.int64), len(used)


def _block_index(seen: Intervals) -> tuple[Ints, int]:
    """The block of time of each interval, and how many there are."""
    n = len(seen.load)
    raw = np.arange(n) if seen.at_us is None else seen.at_us // BLOCK_US
    used, index = np.unique(raw, return_inverse=True)
    if seen.at_us is not None and len(used) < MIN_POINTS:  # minutes of one morning: better than no draws
        used, index = np.unique(seen.at_us, return_inverse=True)
    joined = -(-len(used) // MOST_BLOCKS)
    return (index // joined).astype(np.int64), -(-len(used) // joined)


def _lower_bound(bins: _Bins, most: float, estimate: float) -> float:
    """What 95 % of the draws say at least; never above the estimate.

    A draw may lack the bins around its own crossing. Its answer is the bin before the first at which the
    curve is above ``most``, whether or not it has that bin: a load it lacks is no evidence against it.
    """
    blocks = len(bins.counted)
    drawn = np.random.default_rng(SEED).multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS)
    answers = np.empty(DRAWS)
    for i, (counted, missed) in enumerate(zip(drawn @ bins.counted, drawn @ bins.missed, strict=True)):
        has = np.flatnonzero(counted > 0)
        above = np.flatnonzero(isotonic(missed[has] / counted[has], counted[has]) > most)
        first = int(has[above[0]]) if len(above) else len(bins.load)
        answers[i] = bins.load[first - 1] if first else 0.0
    return min(float(np.quantile(answers, 1 - CONFIDENCE, method="lower")), estimate)


# -- The queueing curve


def queueing_curve(load: Floats, ratio: Floats, scale: Floats, weight: Floats) -> QueueingCurve:
    """Robust fit; shapes (n,), at least two distinct loads.

    For a given limit the curve is linear in base and slope: each candidate is solved at once, and the search
    narrows around the best. ``scale`` is what a residual is measured in.
    """
    highest = float(load.max())
    low, high = np.log(0.001), np.log(9.0)
    best = QueueingCurve(0.0, 0.0, highest * 10, np.inf)
    for _ in range(3):
        grid = np.linspace(low, high, 40)
        limits = highest * (1.0 + np.exp(grid))
        base, slope, error = _solve(load, ratio, scale, weight, limits)
        at = int(np.argmin(error))
        curve = base[at] + slope[at] * _wait(load, limits[at])
        misfit = _weighted_median(np.abs(ratio - curve) / np.maximum(curve, LEAST_SCALE), weight)
        best = QueueingCurve(float(base[at]), float(slope[at]), float(limits[at]), misfit)
        step = grid[1] - grid[0]
        low, high = grid[at] - step, grid[at] + step
    return best


def _wait(load: Floats, limit: Floats | float) -> Floats:
    ratio = load / limit
    return np.asarray(ratio / (1.0 - ratio), dtype=np.float64)


def _solve(
    load: Floats, ratio: Floats, scale: Floats, weight: Floats, limits: Floats
) -> tuple[Floats, Floats, Floats]:
    """Base, slope and Huber loss for each limit; arrays inside have shape (limits, n)."""
    x = _wait(load[None, :], limits[:, None])
    share = (weight / weight.sum())[None, :]
    precise = share / scale**2
    robust = np.ones_like(x)
    for _ in range(HUBER_ROUNDS):
        base, slope = _line(x, ratio, precise * robust)
        residual = (ratio - base[:, None] - slope[:, None] * x) / scale
        size = np.abs(residual)
        robust = HUBER / np.maximum(size, HUBER)
    loss = np.where(size <= HUBER, size**2 / 2, HUBER * size - HUBER**2 / 2)
    return base, slope, (share * loss).sum(axis=1)


def _line(x: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Weighted line through points, neither part below 0; x and weight of shape (limits, n)."""
    total = weight.sum(axis=1)
    x_mean, y_mean = (weight * x).sum(axis=1) / total, (weight * y).sum(axis=1) / total
    centred = x - x_mean[:, None]
    spread = (weight * centred**2).sum(axis=1)
    slope = (weight * centred * y).sum(axis=1) / np.maximum(spread, 1e-300)
    base = y_mean - slope * x_mean
    through_zero = (weight * x * y).sum(axis=1) / np.maximum((weight * x**2).sum(axis=1), 1e-300)
    slope = np.where(base < 0, through_zero, slope)
    base = np.where(base < 0, 0.0, base)
    return np.where(slope < 0, y_mean, base), np.maximum(slope, 0.0)


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _curve_points(seen: Intervals, bins: _Bins) -> tuple[Floats, Floats, Floats]:
    """Load, percentile / X and weight of each bin that says something of where the promise breaks."""
    known = np.zeros(len(seen.load), dtype=bool)
    if seen.latency_ratio is not None:
        known = np.isfinite(seen.latency_ratio)
    size = len(bins.load)
    if seen.latency_ratio is not None and 2 * known.sum() >= len(known):
        weight = np.bincount(bins.index[known], seen.counted[known], size).astype(np.float64)
        clipped = np.minimum(seen.latency_ratio[known], MOST_RATIO)
        total = np.bincount(bins.index[known], seen.counted[known] * clipped, size)
        ratio = total / np.maximum(weight, 1e-9)
    else:
        weight, missed = bins.counted.sum(axis=0), bins.missed.sum(axis=0)
        share = (missed + 0.5) / (weight + 1.0)  # none missed of n is no proof of 0
        ratio = np.log(seen.allowed_ratio) / np.log(np.minimum(share, 1 - 1e-6))
    good = (weight > 0) & (ratio < 0.95 * MOST_RATIO)
    return bins.load[good], ratio[good], weight[good]


def _described(shown: tuple[Floats, Floats, Floats] | None) -> QueueingCurve | None:
    """The queueing curve of such points; None where it does not describe them."""
    if shown is None or len(shown[0]) < MIN_CURVE_BINS:
        return None
    load, ratio, weight = shown
    scale = np.maximum(isotonic(ratio, weight), LEAST_SCALE)
    curve = queueing_curve(load, ratio, scale, weight)
    return None if curve.misfit > MOST_MISFIT else curve


def _curve_estimate(curve: QueueingCurve | None, estimate: float, highest: float) -> float | None:
    """Where the queueing curve meets the margin; None where it does not, or far from the estimate."""
    found = curve.load_at(MARGIN) if curve is not None else None
    return None if found is None or found < LEAST_CURVE * estimate else min(found, highest)


def _drawn(
    shown: tuple[Floats, Floats, Floats] | None, queueing: QueueingCurve | None
) -> CapacityCurve | None:
    if shown is None or not len(shown[0]):
        return None
    load, ratio, weight = shown
    fitted = isotonic(ratio, weight)
    points = []
    for part in np.array_split(np.arange(len(load)), min(DRAWN_POINTS, len(load))):
        means = (float(np.average(each[part], weights=weight[part])) for each in (load, ratio, fitted))
        x, y, fit = (float(f"{value:.4g}") for value in means)
        points.append((x, y, fit))
    form = None if queueing is None else (queueing.base, queueing.slope, queueing.limit)
    return CapacityCurve(tuple(points), form)
