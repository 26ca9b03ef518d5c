"""What an operator's throttle would do to the promises of the volume itself, worked out before it is set.

A promise holds while demand is inside its curve. A cap below the end of the curve makes I/Os wait that the
promise covers, and the wait counts against it: that is for the operator to decide, knowingly. A promise for
several volumes is shared out equally, as for neighbours (``inventory``).

Pure functions. Rates of bytes and of cost are compared as I/Os a second at the volume's present mean cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pmdaemon.wire.rates import COST_BYTES, Rates
from sla_server.agreements.promise import Promise
from sla_server.explanation import words
from sla_server.services.control.decision_log import rates_figures


@dataclass(frozen=True, slots=True)
class ManualEffect:
    """What a throttle set by hand would mean.

    Attributes:
        held: the rates that would hold: those asked for, raised to the floor.
        is_lifted: whether that is more than was asked for.
        broken: promises that would break, as "agreement/objective (what it promises)".
    """

    held: Rates
    is_lifted: bool
    broken: tuple[str, ...]

    @property
    def held_text(self) -> str:
        """The rates that would hold, in words."""
        return words.rates(rates_figures(self.held))


def effect(
    asked: Rates, held: Rates, mean_cost: float, promises: Iterable[tuple[Promise, int]]
) -> ManualEffect:
    """Of a throttle.

    Args:
        asked: what the operator wants.
        held: the same, raised to the volume's floor.
        mean_cost: recent cost of the volume's mean I/O.
        promises: those that cover the volume, each with how many volumes it covers.
    """
    most_iops, mean_bytes = _iops(held, mean_cost), _mean_bytes(mean_cost)
    broken = []
    for promise, volumes in promises:
        if promise.metric == "availability":  # what is held back is not an outage
            continue
        if promise.metric in ("iops", "throughput"):
            needed = promise.promised / (mean_bytes if promise.metric == "throughput" else 1)
        else:
            needed = promise.curve[-1].up_to_iops
        if most_iops < needed / max(volumes, 1):
            broken.append(f"{promise.sla}/{promise.objective} ({_curve(promise, volumes)})")
    return ManualEffect(held, held.differs(asked, 0.001), tuple(broken))


def _iops(rates: Rates, mean_cost: float) -> float:
    """The fewest I/Os a second that any of the rates lets through."""
    mean_bytes = _mean_bytes(mean_cost)
    found = (
        rates.ops_per_s,
        None if rates.cost_per_s is None else rates.cost_per_s / mean_cost,
        None if rates.bytes_per_s is None else rates.bytes_per_s / mean_bytes,
    )
    return min((rate for rate in found if rate is not None), default=math.inf)


def _mean_bytes(mean_cost: float) -> float:
    return max(mean_cost - 1.0, 1 / 64) * COST_BYTES


def _curve(promise: Promise, volumes: int) -> str:
    shared = f", for {volumes} volumes together" if volumes > 1 else ""
    if promise.metric == "iops":
        return f"{words.number(promise.promised)} IOPS{shared}"
    if promise.metric == "throughput":
        return f"{promise.promised / 1e6:g} MB/s{shared}"
    last = promise.curve[-1]
    figure = "mean latency" if promise.metric == "mean_latency" else f"p{promise.percentile:g}"
    within = f"{figure} within {words.latency(last.threshold_us)}"
    if math.isinf(last.up_to_iops):
        return f"{within} at any demand"
    return f"{within} up to {words.number(last.up_to_iops)} IOPS{shared}"
