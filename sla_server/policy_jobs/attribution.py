"""Who hurt whom: the volumes whose use went with the bad intervals of a promise, and what would be without.

Two answers, side by side, because each is weak where the other is strong:

- *Share*: misses per I/O are explained by the use of each volume, ``y = a + sum of b_j u_j`` with b_j not
  below 0 (no volume makes another faster), weighted by I/Os, with a small ridge so that volumes which act
  together share the blame. A share is a volume's part of b_j u_j over the bad intervals.
- *Without j*: the miss ratio as a function of total load (isotonic, as for capacities) says by how much
  misses would be fewer at the load less what j used. It knows the knee, but no difference between volumes.

It is called ``likely-cause`` only where the data can tell volumes apart: at least 30 intervals and 5 bad
ones, and a use that the other volumes' uses do not predict (variance inflation at most 10). Otherwise, and of
the pooled small volumes, it is a ``correlation``, with the reason.

Pure numpy. Source: SLA-MODEL.md 4, point 6; Hastie, Tibshirani and Friedman, The Elements of Statistical
Learning, 3.4 (ridge); Belsley, Kuh and Welsch, Regression Diagnostics, 3 (variance inflation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sla_server.policy_jobs.capacity import MIN_IOS, isotonic

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
OTHERS: Final = "(others)"
MIN_INTERVALS: Final = 30
MIN_BAD: Final = 5
MOST_INFLATION: Final = 10.0
RIDGE: Final = 0.01  # of a column's own variance
LEAST_USE: Final = 0.05  # of the backend's cost in bad intervals; smaller volumes are pooled (SLA-MODEL.md 3)
MOST_VOLUMES: Final = 20
LEAST_SHARE: Final = 0.05  # of what was done, or of the bad intervals avoided; less is not worth a line
ROUNDS: Final = 10_000
CLOSE: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Harm:
    """What one volume did to one promise.

    Attributes:
        volume: who; ``OTHERS`` for the pooled small ones.
        share: of what all did in the bad intervals, 0..1.
        avoided_bad: bad intervals that would have been good without it.
        avoided_missed: I/Os that would not have been late.
        bad: all bad intervals.
        first_us, last_us, worst_us: of the bad intervals, first and last in which it did at least
            ``LEAST_SHARE``, and the one in which it did most.
        likely_cause: else a correlation.
        reason: why it is no more than that; empty for a likely cause.
    """

    volume: str
    share: float
    avoided_bad: int
    avoided_missed: float
    bad: int
    first_us: int
    last_us: int
    worst_us: int
    likely_cause: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SharedIntervals:
    """What was seen of one promise and of all volumes of its backend.

    Attributes:
        at_us, counted, missed: shapes (n,).
        load: completed cost a second of the whole backend; shape (n,).
        times: how many intervals each represents; shape (n,).
        used: completed cost a second of the larger volumes; shape (n, volumes).
        volumes: names of the columns.
        victims: volumes that the promise covers: not blamed.
    """

    at_us: Ints
    counted: Floats
    missed: Floats
    load: Floats
    times: Floats
    used: Floats
    volumes: tuple[str, ...]
    victims: frozenset[str]
    allowed_ratio: float


def non_negative_ridge(x: Floats, y: Floats, weight: Floats, ridge: float = RIDGE) -> Floats:
    """Coefficients not below 0 of the least squares with a free constant.

    Coordinate descent on the normal equations of centred and scaled columns. The ridge makes them positive
    definite, so there is one solution, and each round comes closer to it.

    Args:
        x: shape (n, k).
        y: shape (n,).
        weight: shape (n,).
        ridge: added to the variance of each column, in parts of it.
    """
    share = weight / weight.sum()
    centred, target = x - share @ x, y - share @ y
    scale = np.sqrt(share @ centred**2)
    varies = scale > 1e-12 * np.maximum(np.abs(x).max(axis=0), 1e-300)
    scaled = np.where(varies, centred / np.where(varies, scale, 1.0), 0.0)
    gram = (scaled * share[:, None]).T @ scaled
    wanted = scaled.T @ (share * target)
    found = np.zeros(x.shape[1])
    for _ in range(ROUNDS):
        largest = 0.0
        for j in np.flatnonzero(varies):
            rest = wanted[j] - gram[j] @ found + gram[j, j] * found[j]
            value = max(rest / (gram[j, j] + ridge), 0.0)
            largest = max(largest, abs(value - found[j]))
            found[j] = value
        if largest <= CLOSE * max(found.max(initial=0.0), 1e-300):
            break
    return np.asarray(np.where(varies, found / np.where(varies, scale, 1.0), 0.0), dtype=np.float64)


def inflation(x: Floats) -> Floats:
    """Of each column, by how much what the others predict of it inflates its variance; shape (k,).

    1: nothing; infinite: all, or it does not vary.
    """
    spread = x.std(axis=0)
    varies = spread > 1e-12 * np.maximum(np.abs(x).max(axis=0), 1e-300)
    result = np.full(x.shape[1], np.inf)
    columns = (x[:, varies] - x[:, varies].mean(axis=0)) / spread[varies]
    correlation = columns.T @ columns / len(x)
    # A tiny ridge: of columns that are the same the inflation is large instead of an error.
    result[varies] = np.diag(np.linalg.inv(correlation + 1e-9 * np.eye(len(correlation))))
    return result


def attribute(seen: SharedIntervals) -> list[Harm]:
    """Who hurt this promise, the largest share first; empty where no interval is bad."""
    enough = seen.counted >= MIN_IOS
    at_us = seen.at_us[enough]
    counted, missed, load, used, times = (
        column[enough] for column in (seen.counted, seen.missed, seen.load, seen.used, seen.times)
    )
    if not len(counted):
        return []
    ratio = missed / counted
    bad = ratio > seen.allowed_ratio
    if not bad.any():
        return []
    names, used = _pooled(seen, load, used, bad)
    weights = non_negative_ridge(used, ratio, counted * times)
    inflated = inflation(used)
    did = used[bad] * weights[None, :] * (counted * times)[bad, None]
    # What remains for the victims' own use is theirs: shares are of all that is explained.
    total = did.sum()
    without = _without(load, used, ratio, counted * times)
    all_bad = round(times[bad].sum())
    found = []
    for j, name in enumerate(names):
        left = without[:, j]
        share = float(did[:, j].sum() / total) if total > 0 else 0.0
        avoided = round(times[bad & (ratio * left <= seen.allowed_ratio)].sum())
        if name in seen.victims or max(share, avoided / all_bad) < LEAST_SHARE:
            continue
        reason = _doubt(name, round(times.sum()), all_bad, float(inflated[j]), weights[j] > 0)
        when = at_us[bad]
        parts = did[:, j] / np.maximum(did.sum(axis=1), 1e-300)
        active = when[parts >= LEAST_SHARE] if (parts >= LEAST_SHARE).any() else when
        found.append(
            Harm(
                volume=name,
                share=share,
                avoided_bad=avoided,
                avoided_missed=float((missed * times * (1 - left))[bad].sum()),
                bad=all_bad,
                first_us=int(active.min()),
                last_us=int(active.max()),
                worst_us=int(when[np.argmax(did[:, j] + used[bad, j] * 1e-12)]),
                likely_cause=not reason,
                reason=reason,
            )
        )
    return sorted(found, key=lambda harm: (-harm.share, -harm.avoided_bad, harm.volume))


def _doubt(name: str, n: int, bad: int, inflated: float, explains: bool) -> str:
    """Why it is no more than a correlation; empty: it is."""
    if n < MIN_INTERVALS:
        return f"only {n} intervals, {MIN_INTERVALS} needed"
    if bad < MIN_BAD:
        return f"only {bad} bad intervals, {MIN_BAD} needed"
    if name == OTHERS:
        return f"volumes with less than {LEAST_USE:.0%} of the use each, counted together"
    if not np.isfinite(inflated):
        return "its use does not vary"
    if inflated > MOST_INFLATION:
        return "its use always changes together with that of other volumes"
    if not explains:
        return "misses do not rise with its use, only with the total"
    return ""


def _pooled(
    seen: SharedIntervals, load: Floats, used: Floats, bad: npt.NDArray[np.bool_]
) -> tuple[tuple[str, ...], Floats]:
    """The larger volumes and the victims, and the others as one column."""
    mean = used[bad].mean(axis=0)
    large = np.argsort(-mean, kind="stable")[:MOST_VOLUMES]
    kept = [
        j
        for j, name in enumerate(seen.volumes)
        if name in seen.victims or (j in large and mean[j] >= LEAST_USE * load[bad].mean())
    ]
    names, columns = tuple(seen.volumes[j] for j in kept), used[:, kept]
    rest = np.maximum(load - columns.sum(axis=1), 0.0)
    if rest[bad].mean() <= 1e-6 * load[bad].mean():
        return names, columns
    return (*names, OTHERS), np.column_stack([columns, rest])


def _without(load: Floats, used: Floats, ratio: Floats, weight: Floats) -> Floats:
    """What of the misses of each interval is left without each column, 0..1; shape of ``used``."""
    order = np.argsort(load, kind="stable")
    levels = load[order]
    curve = isotonic(ratio[order], weight[order])

    def misses_at(at: Floats) -> Floats:
        index = np.searchsorted(levels, at * (1 + 1e-12), side="right") - 1
        return np.asarray(curve[np.maximum(index, 0)], dtype=np.float64)

    now = misses_at(load)[:, None]
    then = misses_at(load[:, None] - used)
    return np.where(now > 0, then / np.where(now > 0, now, 1.0), 1.0)


def describe(row: Mapping[str, Any]) -> list[str]:
    """A row of ``grouped.HARMS`` for people."""
    hurt = "hurt" if row["likely_cause"] else "may have hurt"
    share = f"{row['share']:.0%} of the harm; " if row["share"] >= LEAST_SHARE else ""
    return [
        f"  {row['volume']} {hurt} {row['sla']}/{row['objective']} on {row['backend']} "
        f"({'likely cause' if row['likely_cause'] else 'correlation'}): {share}without it "
        f"{row['avoided_bad']} of {row['bad']} bad intervals would be good",
        *([f"    {row['reason']}"] if row["reason"] else []),
    ]
