"""What promises ask, in arrays: a line of ``PromiseTerms`` for each row of the signal table.

Filled when a row is given to a promise; ``r_on`` alone changes while it lasts, with the error budget. Read by
the windows (``windows``), which close by them, and by what is said of the windows (``verdicts``).

Shapes: (rows,) or (rows, steps) where a demand curve has steps. Pure. Changed only by the controller's one
thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import NO_PERCENTILE, Promise
from sla_server.agreements.rules import HUNG_US
from sla_server.agreements.verdicts import DELIVERED_RATIO
from sla_server.services.control.pieces import Floats, Ints


class PromiseTerms:
    """See the module. The values of a row that has no promise are of no use, and harmless.

    Attributes:
        steps: of the curve that has most.
        allowed: 1 - q, or what else may be missed of what counts; percentile: 0..100, 0 if the
            promise has none; r_on: entry threshold of r; near_u: the u from which it is at risk.
        up_to: I/Os a second, -1 where a curve has fewer steps; threshold_us: 1 there; shape (rows, steps).
        last_step: number of the last one of the curve.
        is_outage: of availability: a silence counts though it has ended.
        is_rate: a rate is promised; excludes: what failed does not count at all.
        is_mean: of a mean latency: a stall is in its figures, and breaks it by itself from ``lost_us`` on.
        hung_us: a stream that completes nothing for so long, though I/O of it is outstanding, breaks the
            promise whatever others complete; infinite where that does not count.
        lost_us: a time without completion that breaks it whatever its curve and its applicability say;
            most_failed: share of the I/Os that may fail, likewise.
        remember_us: for how long a broken window counts beside the first one after a pause; 0: not at all.
        least_iops, least_reads, most_bytes: the applicability, as in ``Promise``.
    """

    def __init__(self, rows: int) -> None:
        self.steps = 1
        self._make(rows)

    def _make(self, rows: int) -> None:
        self.allowed, self.percentile, self.r_on = np.ones(rows), np.zeros(rows), np.zeros(rows)
        self.near_u = np.full(rows, np.inf)
        self.up_to = np.full((rows, self.steps), -1.0)
        self.threshold_us = np.ones((rows, self.steps))
        self.last_step = np.zeros(rows, np.int64)
        self.is_outage, self.is_mean = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        self.is_rate, self.excludes = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        self.hung_us, self.remember_us = np.full(rows, np.inf), np.zeros(rows)
        self.lost_us, self.most_failed = np.full(rows, np.inf), np.ones(rows)
        self.least_iops, self.least_reads = np.zeros(rows), np.zeros(rows)
        self.most_bytes = np.full(rows, np.inf)

    def grow(self, rows: int, steps: int) -> None:
        """Room for more rows, or for longer curves."""
        old = arrays_of(self)
        self.steps = steps
        self._make(rows)
        copy_arrays(old, self)

    def put(self, row: int, promise: Promise, r_on: float, near_u: float, is_shown: bool) -> None:
        """A row is of this promise from now on; ``steps`` must be enough for its curve.

        ``is_shown``: people see what it says, so it must be what slices will say. What control looks at
        (a promise on one backend) ends with a pause, and has no hang of one stream among others that go on:
        to slow neighbours down helps neither.
        """
        self.allowed[row], self.percentile[row] = promise.allowed_miss_ratio, promise.percentile
        self.near_u[row] = near_u
        if promise.metric == "mean_latency":  # counted in thresholds: u is the mean / the threshold, as r is
            self.allowed[row], self.percentile[row], self.near_u[row] = 1.0, 0.0, r_on
        elif promise.promised:
            self.allowed[row], self.percentile[row] = 1 - DELIVERED_RATIO, 0.0
        self.r_on[row], self.is_outage[row] = r_on, promise.metric == "availability"
        self.is_mean[row], self.is_rate[row] = promise.metric == "mean_latency", promise.promised > 0
        self.excludes[row] = not promise.counts_errors
        self.least_iops[row], self.least_reads[row] = promise.least_iops, promise.least_read_ratio
        self.most_bytes[row] = promise.max_mean_bytes
        self.lost_us[row] = hung_us(promise)
        self.most_failed[row] = 1 - (promise.percentile or NO_PERCENTILE) / 100
        self.hung_us[row] = self.lost_us[row] if is_shown else np.inf
        self.remember_us[row] = promise.slice_s * 1e6 if is_shown else 0.0
        self.up_to[row], self.threshold_us[row] = -1.0, 1.0
        self.last_step[row] = max(len(promise.curve) - 1, 0)
        for index, step in enumerate(promise.curve):
            self.up_to[row, index], self.threshold_us[row, index] = step.up_to_iops, step.threshold_us
        if not promise.curve:  # of a rate: only what hangs is measured in time
            self.up_to[row, 0], self.threshold_us[row, 0] = np.inf, HUNG_US

    def stall_limit_us(self, rows: Ints, limit_us: Floats) -> Floats:
        """How long nothing may complete, where the threshold in force is ``limit_us``; shape (rows,)."""
        return np.where(self.is_mean[rows], self.lost_us[rows], limit_us)


def hung_us(promise: Promise) -> int:
    """How long one of its streams may complete nothing while I/O is outstanding, as slices are judged."""
    if promise.metric == "availability":
        return promise.outage_us
    return max(HUNG_US, promise.curve[-1].threshold_us if promise.curve else 0)


def arrays_of(owner: object) -> dict[str, npt.NDArray[Any]]:
    """The arrays among the attributes of an object, by name."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, np.ndarray)}


def copy_arrays(old: dict[str, npt.NDArray[Any]], owner: object) -> None:
    """Copy each array into the beginning of the owner's of that name, which is at least as large."""
    for name, value in old.items():
        target = getattr(owner, name)
        target[tuple(slice(size) for size in value.shape)] = value
