"""What an I/O costs a backend, fitted to what is stored: numbers for ``cost_write`` and ``cost_bytes``.

The time that I/Os spend at the storage (``svc_sum_us``) is taken as

    reads * a + writes * b + bytes * c + random I/Os * d        a, b, c, d >= 0

by weighted least squares over slots. An I/O is random if it does not begin where the one before of its
connection and kind ended; gateways count them. Exports have no cost of a jump, so it is part of the others,
for the share R of random I/Os that was seen: in units of a read, cost_write = (b + R d) / (a + R d) and
cost_bytes = (a + R d) / c. Without d in the fit, a volume that reads large blocks in sequence would make
bytes look free, and reads of small ones dear. Queueing would be mistaken for cost; so only slots count in
which less than ``MOST_UNDER_WAY`` I/O was under way on average.

The data may not tell: too few such slots, I/Os of one size, reads and writes that always come together, or a
time that follows from something else. Then the constants stay, and the reason is said. Where the share of
random I/Os hardly varies, or is not known, d is left out: it is in a and b. Pure, in numpy.

Source: SLA-MODEL.md 4, point 1; Lawson and Hanson, Solving Least Squares Problems, 23 (for four unknowns all
sets of them that are 0 can be tried).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
LEAST_SPREAD: Final = 0.1  # of the share of random I/Os, 0..1: its standard deviation over slots
MOSTLY_PLACED: Final = 0.9  # of a slot's I/Os; the others may be of any kind
MOST_CONDITION: Final = 1000.0
LEAST_R2: Final = 0.5


@dataclass(frozen=True, slots=True)
class CostFit:
    """What the data say of one backend.

    Attributes:
        cost_write, cost_bytes: for the exports of the backend; None where the data do not tell.
        read_us: what a read takes before its bytes are added, jumps included; None likewise.
        random_us: what a random I/O takes more than a sequential one; None where the data do not tell.
        sequential: share of sequential I/Os, 0..1; None where it is not known.
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
    random_us: float | None = None
    sequential: float | None = None


def is_enough(is_placed: npt.NDArray[np.bool_], weight: Floats) -> bool:
    """Whether slots in which it is known what is sequential say enough of the backend; shapes (slots,)."""
    return int(is_placed.sum()) >= MIN_SLOTS and 2 * weight[is_placed].sum() >= weight.sum()


def moments(x: Sequence[Floats], y: Floats, weight: Floats, *, is_placed: bool) -> dict[str, Any]:
    """What ``fit`` takes: sums of products over slots.

    Args:
        x: reads, writes, bytes and random I/Os an I/O, the last 0 if it is not known. Shapes (slots,).
        y: us an I/O.
        weight: I/Os.
        is_placed: whether it is known which are random.
    """
    parts = {**{f"x{i}": column for i, column in enumerate(x)}, "y": y}
    names = sorted(parts)
    products = [(a, b) for i, a in enumerate(names) for b in names[i:]]
    sums = {f"{a}{b}": float(np.sum(weight * parts[a] * parts[b])) for a, b in products}
    means = {name: float(np.sum(weight * parts[name])) for name in ("y", "x2", "x3")}
    return {"n": len(weight), "w": float(np.sum(weight)), "is_placed": is_placed, **means, **sums}


def fit(moments: Mapping[str, Any]) -> CostFit:
    """Fit one backend.

    Args:
        moments: what ``moments`` made.
    """
    n = int(moments["n"])
    if n < MIN_SLOTS:
        quiet = f"slots of {MIN_IOS} I/Os with less than {MOST_UNDER_WAY:g} under way on average"
        return _unknown(n, f"only {n} {quiet}, {MIN_SLOTS} needed")
    xx = np.array([[_moment(moments, i, j) for j in range(4)] for i in range(4)])
    xy = np.array([float(moments[f"x{i}y"]) for i in range(4)])
    total, y_sum, yy = float(moments["w"]), float(moments["y"]), float(moments["yy"])
    if xx[0, 0] <= 0:
        return _unknown(n, "there are no reads to count in")
    mean, spread = _spread(moments, 2)
    if mean <= 0 or spread < LEAST_VARIATION * mean:
        return _unknown(n, "its I/Os are nearly all of one size: what a byte costs cannot be measured")
    present = [i for i in range(3) if xx[i, i] > 0]
    if _condition(xx[np.ix_(present, present)]) > MOST_CONDITION:
        return _unknown(n, "reads, writes and sizes always change together: they cannot be told apart")
    random, spread = _spread(moments, 3)
    every = [*present, 3]
    tells_random = spread >= LEAST_SPREAD and _condition(xx[np.ix_(every, every)]) <= MOST_CONDITION
    found = _non_negative(xx, xy, every if tells_random else present)
    variance = yy - y_sum * y_sum / total
    r2 = 1.0 - _error(xx, xy, yy, found) / variance if variance > 0 else 0.0
    jump = float(found[3])
    read, write, size = float(found[0]) + random * jump, float(found[1]) + random * jump, float(found[2])
    if read <= 0 or size <= 0:
        what = "an I/O takes no longer the larger it is" if read > 0 else "reads take time by bytes alone"
        return _unknown(n, f"{what}: that is no model to go by", r2)
    if r2 < LEAST_R2:
        return _unknown(n, f"reads, writes and bytes explain {max(r2, 0.0):.0%} of the time only", r2)
    return CostFit(
        cost_write=write / read if 1 in present else None,
        cost_bytes=COST_BYTES * read / size,
        read_us=read,
        r2=r2,
        slots=n,
        reason=f"explains {r2:.0%} of the time in {n} slots",
        random_us=jump if tells_random else None,
        sequential=1.0 - random if moments["is_placed"] else None,
    )


def _spread(moments: Mapping[str, Any], i: int) -> tuple[float, float]:
    """Mean and standard deviation of a part of x over slots."""
    total = float(moments["w"])
    mean = float(moments[f"x{i}"]) / total
    return mean, max(_moment(moments, i, i) / total - mean * mean, 0.0) ** 0.5


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
    best, least = np.zeros(len(xy)), 0.0
    for size in range(1, len(present) + 1):
        for chosen in itertools.combinations(present, size):
            some = np.array(chosen)
            solved = np.zeros(len(xy))
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
                "random_us": _rounded(found.random_us),
                "sequential": None if found.sequential is None else round(found.sequential, 3),
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
    lines = [
        f"  cost of an I/O on {row['backend']}: cost_read = 1{write}, cost_bytes = {row['cost_bytes']}",
        f'    {row["reason"]}; exports with cost = "fitted" have them',
    ]
    if row.get("random_us") is not None:
        lines.append(
            f"    a random I/O takes {row['random_us']:g} us more than a sequential one; "
            f"{row['sequential']:.0%} are sequential"
        )
    return lines
