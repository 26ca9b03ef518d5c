"""What an I/O costs a backend, fitted to what is stored: numbers for ``cost_write`` and ``cost_bytes``.

The time that I/Os spend at the storage (``svc_sum_us``) is taken as

    reads * a + writes * b + bytes * c        a, b, c >= 0

by weighted least squares over slots. In units of a read, that is cost_write = b / a and cost_bytes = a / c,
as exports of the backend have them. Queueing would be mistaken for cost; so only slots count in which less
than ``MOST_UNDER_WAY`` I/O was under way on average.

The data may not tell: too few such slots, I/Os of one size, reads and writes that always come together, or a
time that follows from something else. Then the constants stay, and the reason is said. Pure, in numpy;
``transforms.cost_moments`` makes the sums.

Source: SLA-MODEL.md 4, point 1; Lawson and Hanson, Solving Least Squares Problems, 23 (for three unknowns all
sets of them that are 0 can be tried).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.rates import COST_BYTES

Floats = npt.NDArray[np.float64]
MOST_UNDER_WAY: Final = 1.0
MIN_IOS: Final = 20  # of a slot; fewer have no mean
MIN_SLOTS: Final = 30
LEAST_VARIATION: Final = 0.2  # of the mean size of the slots' I/Os, as a share of it
MOST_CONDITION: Final = 1000.0
LEAST_R2: Final = 0.5


@dataclass(frozen=True, slots=True)
class CostFit:
    """What the data say of one backend.

    Attributes:
        cost_write, cost_bytes: for the exports of the backend; None where the data do not tell.
        read_us: what a read takes before its bytes are added; None likewise.
        r2: share of the variance that the fit explains; 0 without one.
        slots: that were looked at.
        reason: how good it is, or why it is none.
    """

    cost_write: float | None
    cost_bytes: float | None
    read_us: float | None
    r2: float
    slots: int
    reason: str


def fit(moments: Mapping[str, Any]) -> CostFit:
    """Fit one backend.

    Args:
        moments: a row of ``transforms.cost_moments``: ``n`` slots, ``w`` their I/Os, and sums over slots of
            I/Os times products of x (reads, writes, bytes an I/O) and y (us an I/O).
    """
    n = int(moments["n"])
    if n < MIN_SLOTS:
        quiet = f"slots of {MIN_IOS} I/Os with less than {MOST_UNDER_WAY:g} under way on average"
        return _unknown(n, f"only {n} {quiet}, {MIN_SLOTS} needed")
    xx = np.array([[_moment(moments, i, j) for j in range(3)] for i in range(3)])
    xy = np.array([float(moments[f"x{i}y"]) for i in range(3)])
    total, y_sum, yy = float(moments["w"]), float(moments["y"]), float(moments["yy"])
    if xx[0, 0] <= 0:
        return _unknown(n, "there are no reads to count in")
    mean, square = float(moments["x2"]) / total, xx[2, 2] / total
    if mean <= 0 or max(square - mean * mean, 0.0) ** 0.5 < LEAST_VARIATION * mean:
        return _unknown(n, "its I/Os are nearly all of one size: what a byte costs cannot be measured")
    present = [i for i in range(3) if xx[i, i] > 0]
    if _condition(xx[np.ix_(present, present)]) > MOST_CONDITION:
        return _unknown(n, "reads, writes and sizes always change together: they cannot be told apart")
    found = _non_negative(xx, xy, present)
    spread = yy - y_sum * y_sum / total
    r2 = 1.0 - _error(xx, xy, yy, found) / spread if spread > 0 else 0.0
    read, write, size = (float(each) for each in found)
    if read <= 0 or size <= 0:
        what = "an I/O takes no longer the larger it is" if read > 0 else "reads take time by bytes alone"
        return _unknown(n, f"{what}: that is no model to go by", r2)
    if r2 < LEAST_R2:
        return _unknown(n, f"reads, writes and bytes explain {max(r2, 0.0):.0%} of the time only", r2)
    reason = f"explains {r2:.0%} of the time in {n} slots"
    return CostFit(write / read if 1 in present else None, COST_BYTES * read / size, read, r2, n, reason)


def _moment(moments: Mapping[str, Any], i: int, j: int) -> float:
    return float(moments[f"x{min(i, j)}x{max(i, j)}"])


def _unknown(slots: int, reason: str, r2: float = 0.0) -> CostFit:
    return CostFit(None, None, None, max(r2, 0.0), slots, reason)


def _condition(xx: Floats) -> float:
    scale = np.sqrt(np.diag(xx))
    return float(np.linalg.cond(xx / np.outer(scale, scale)))


def _error(xx: Floats, xy: Floats, yy: float, found: Floats) -> float:
    return float(yy - 2 * found @ xy + found @ xx @ found)


def _non_negative(xx: Floats, xy: Floats, present: list[int]) -> Floats:
    """The solution of the normal equations with the smallest error of which no part is below 0."""
    best, least = np.zeros(3), 0.0
    for size in range(1, len(present) + 1):
        for chosen in itertools.combinations(present, size):
            some = np.array(chosen)
            solved = np.zeros(3)
            solved[some] = np.linalg.lstsq(xx[np.ix_(some, some)], xy[some], rcond=None)[0]
            error = _error(xx, xy, 0.0, solved)
            if (solved >= 0).all() and error < least:
                best, least = solved, error
    return best


def cost_rows(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a backend, as the report of a policy has them."""
    rows = []
    for each in sorted(moments, key=lambda row: str(row["backend"])):
        found = fit(each)
        rows.append(
            {
                "backend": each["backend"],
                "cost_write": _rounded(found.cost_write),
                "cost_bytes": None
                if found.cost_bytes is None
                else round(min(max(found.cost_bytes, 512), 1e9)),
                "read_us": _rounded(found.read_us),
                "r2": round(found.r2, 3),
                "slots": found.slots,
                "reason": found.reason,
            }
        )
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def describe(row: Mapping[str, Any]) -> list[str]:
    """A row for people."""
    if row["cost_bytes"] is None:
        return [
            f"  cost of an I/O on {row['backend']}: not known, the constants stay",
            f"    {row['reason']}",
        ]
    write = "" if row["cost_write"] is None else f", cost_write = {row['cost_write']:g}"
    return [
        f"  cost of an I/O on {row['backend']}: cost_read = 1{write}, cost_bytes = {row['cost_bytes']}",
        f'    {row["reason"]}; exports with cost = "fitted" have them',
    ]
