"""A capacity where nothing was seen between loads that kept a promise and loads that broke it.

A neighbour that is off or asks for all there is leaves two crowds of points: an almost idle backend, and one
at its limit. The largest load that was kept is then that of the idle backend, however much it could take.
What both crowds say together is more: idle, an I/O takes S; at the limit, mu of them are done a second. So up
to mu S of them are served at once, and in a queue of c servers the percentile at a load between is known
(M/G/c: Sakasegawa's approximation of the wait, whose tail is exponential). c is the root of mu S: parts of an
array are not equally busy, and its I/Os wait long before all are (found on ``tests.support.public_curves``).
The answer is the load at which the percentile is at the margin of the promise, and never outside of the gap.

It is a model, not an observation, and the reason of the capacity says so. It is asked only where the gap is
wide; where the loads that broke the promise are those of a backend at its limit, at which I/Os take
``SATURATED`` times as long; and where the promise leaves room for ``ROOMY`` times S, as what backends do by
themselves now and then is no matter of load, and breaks tighter ones first. Once a policy lets neighbours go
so far, loads within the gap are seen.

Pure numpy. Source: Sakasegawa 1977, "An approximation formula L_q = a rho^b / (1 - rho)".
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
WIDE: Final = 1.15  # the lowest load that breaks the promise, of the highest that keeps it
LEAST_BROKEN: Final = 5  # intervals
FIRST_BROKEN: Final = 0.1  # of them at lower loads, which are rather edges of bursts than loads
AT_LIMIT: Final = 0.9
SATURATED: Final = 2.0
ROOMY: Final = 5.0
SPREAD: Final = 0.5  # standard deviation of the time an I/O takes, of its mean; as in ``simulate.stored``


def load_in_gap(
    load: Floats, is_broken: npt.NDArray[np.bool_], rate: Floats, service_us: Floats, kept: float,
    limit_us: float, allowed: float,
) -> float | None:  # fmt: skip
    """The largest load that keeps a promise, above ``kept``; None: there is no gap, or no limit was seen.

    Args:
        load: cost a second of each interval; shape (n,).
        is_broken: whether it broke the promise.
        rate: I/Os a second of the whole backend.
        service_us: their mean time at the storage.
        kept: the largest load known to keep the promise.
        limit_us: what the percentile may be.
        allowed: share of I/Os that may take longer.
    """
    known = (rate > 0) & (service_us > 0)
    broken, low = known & is_broken & (load > kept), known & ~is_broken & (load <= kept)
    if broken.sum() < LEAST_BROKEN or not low.any() or not 0.0 < allowed < 1.0:
        return None
    idle_us = float(np.average(service_us[low], weights=rate[low]))
    at_limit = broken & (service_us >= SATURATED * idle_us)
    first = float(np.quantile(load[broken], FIRST_BROKEN))
    if first < WIDE * kept or at_limit.sum() < LEAST_BROKEN or limit_us < ROOMY * idle_us:
        return None
    most = float(np.quantile(load[at_limit], AT_LIMIT))
    most_ios_per_s = most * float(rate[at_limit].sum() / load[at_limit].sum())
    share = share_of_limit(idle_us / 1e6, most_ios_per_s, limit_us / 1e6, allowed)
    return min(max(share * most, kept), first)


def share_of_limit(service_s: float, most_ios_per_s: float, limit_s: float, allowed: float) -> float:
    """Of what a backend can do at most, the part at which the percentile is the limit; 0: at none."""
    at_once = max(service_s * most_ios_per_s, 1.0)
    service_s, servers = at_once / most_ios_per_s, math.sqrt(at_once)
    own_s = service_s * (1 + SPREAD * NormalDist().inv_cdf(1 - allowed))
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        waiting = share ** (math.sqrt(2 * (servers + 1)) - 1)  # who has to wait at all
        wait_s = (1 + SPREAD**2) / 2 * service_s / servers / (1 - share)  # their mean wait
        percentile_s = own_s + wait_s * max(math.log(max(waiting, 1e-300) / allowed), 0.0)
        low, high = (low, share) if percentile_s > limit_s else (share, high)
    return low
