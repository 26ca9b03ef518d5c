"""Response curves of storage that others have measured and published, and capacities found on them.

Source: github.com/lee-j-sanders/perfresults, commit bbdff31, 251204_replica_min_shard_read_size (December
2025): random reads from RBD volumes of a Ceph cluster with 4 OSDs and three replicas, by fio under CBT, a
minute each, at rising numbers of I/Os under way. Below are, by size of the reads: I/Os under way, I/O a
second, mean and standard deviation of the latency in us. They are all points of the files, also those at
which it hung.

A curve gives two moments of the latency. Its percentile is taken from the log-normal distribution that has
them. The knee for a promise is the load at which the percentile passes ``MARGIN`` of the promised X; between
two points the curve is a straight line over the logarithm of the I/Os under way. Where it hung at some load,
and was faster again at more, there are several such loads: then the first and the last are the bounds.

Promises of less than 1.5 times the idle latency are not tried: there these curves are flat, have no knee, and
the margin of a miss ratio, which assumes an exponential tail, is less than that of the percentile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sla_server.policy_jobs.capacity import MARGIN, Intervals, capacity

Floats = npt.NDArray[np.float64]
CURVES = {
    "128 KiB": (
        (2, 2122, 936, 409),
        (4, 5834, 681, 442),
        (6, 10340, 577, 255),
        (8, 15024, 529, 187),
        (12, 22569, 528, 190),
        (16, 27889, 570, 185),
        (24, 37293, 639, 221),
        (32, 45237, 703, 252),
        (64, 63334, 1006, 654),
        (128, 72851, 1752, 1438),
        (256, 74626, 3425, 5468),
        (384, 74591, 5143, 11202),
        (512, 74445, 6872, 14542),
    ),
    "256 KiB": (
        (1, 802, 1235, 311),
        (2, 2009, 988, 375),
        (3, 3830, 778, 371),
        (4, 5824, 682, 320),
        (5, 7101, 700, 281),
        (8, 10890, 731, 262),
        (16, 19503, 816, 271),
        (24, 25182, 948, 554),
        (32, 26907, 1184, 3564),
        (64, 38415, 1661, 770),
        (128, 42756, 2988, 2330),
        (160, 43331, 3687, 3657),
        (192, 43217, 4436, 5357),
        (256, 43621, 5863, 9118),
        (384, 43642, 8793, 16761),
    ),
    "512 KiB": (
        (1, 520, 1905, 476),
        (2, 1224, 1622, 445),
        (3, 2424, 1229, 561),
        (4, 3596, 1105, 528),
        (8, 5946, 1338, 448),
        (16, 10996, 1449, 458),
        (24, 13982, 1711, 1578),
        (32, 16600, 1922, 648),
        (40, 17315, 2304, 3912),
        (48, 19740, 2426, 921),
        (64, 21582, 2959, 1263),
        (128, 23572, 5423, 4313),
        (256, 23654, 10816, 16095),
        (512, 22714, 22532, 32998),
    ),
    "1 MiB": (
        (1, 369, 2696, 530),
        (2, 898, 2213, 755),
        (3, 1591, 1875, 851),
        (4, 1956, 2035, 810),
        (8, 3441, 2315, 697),
        (12, 4917, 2432, 752),
        (16, 6093, 2617, 821),
        (20, 6830, 2920, 2419),
        (24, 7244, 3305, 5466),
        (28, 8390, 3329, 2156),
        (32, 9081, 3516, 1120),
        (64, 11265, 5673, 2336),
        (128, 11406, 11212, 8258),
        (256, 11299, 22650, 29500),
        (384, 11522, 33373, 63819),
    ),
    "2 MiB": (
        (1, 261, 3811, 697),
        (2, 593, 3356, 1162),
        (3, 950, 3145, 1179),
        (4, 1238, 3216, 1105),
        (8, 2146, 3716, 1163),
        (12, 2805, 4265, 1238),
        (16, 3362, 4745, 1380),
        (20, 3823, 5219, 2409),
        (24, 4141, 5783, 3567),
        (28, 4544, 6150, 1773),
        (32, 4894, 6527, 1961),
        (64, 5548, 11521, 4778),
        (128, 5446, 23484, 17812),
        (192, 5590, 34343, 33465),
    ),
}
Z95 = 1.6448536269514722
MINUTE_US = 60_000_000
N = 1000


def spread(mean: Floats, deviation: Floats) -> tuple[Floats, Floats]:
    """Parameters of the log-normal distribution with these moments."""
    variance = np.log1p((deviation / mean) ** 2)
    return np.log(mean) - variance / 2, np.sqrt(variance)


def at_depth(name: str, depth: Floats) -> tuple[Floats, Floats, Floats]:
    """Load, and the parameters of the latency, with so many I/Os under way."""
    depths, load, mean, deviation = np.array(CURVES[name], dtype=np.float64).T
    place = np.log(depth)
    mu, sigma = spread(mean, deviation)
    known = np.log(depths)
    return np.interp(place, known, load), np.interp(place, known, mu), np.interp(place, known, sigma)


def percentile_of(name: str, depth: Floats) -> tuple[Floats, Floats]:
    load, mu, sigma = at_depth(name, depth)
    return load, np.exp(mu + Z95 * sigma)


def idle_us(name: str) -> float:
    """The largest percentile up to the load at which it is fastest: what no load can be blamed for."""
    depths = np.array([point[0] for point in CURVES[name]], dtype=np.float64)
    p95 = percentile_of(name, depths)[1]
    return float(p95[: p95.argmin() + 1].max())


def knees_of(name: str, limit_us: float) -> tuple[float, float]:
    """The loads at which the percentile passes the limit for the first time and for the last."""
    depths = np.geomspace(CURVES[name][0][0], CURVES[name][-1][0], 20_000)
    load, p95 = percentile_of(name, depths)
    return float(load[np.argmax(p95 > limit_us)]), float(load[p95 <= limit_us].max())


def history(name: str, x_us: float, seed: int) -> Intervals:
    rng = np.random.default_rng(seed)
    depth = np.exp(rng.uniform(math.log(CURVES[name][0][0]), math.log(CURVES[name][-1][0]), N))
    load, mu, sigma = at_depth(name, depth)
    mu = mu + 0.1 * rng.standard_normal(N)
    above = (math.log(x_us) - mu) / sigma
    miss = 0.5 * np.vectorize(math.erfc)(above / math.sqrt(2))
    counted = rng.integers(500, 5000, N)
    return Intervals(
        load=load * np.exp(0.02 * rng.standard_normal(N)),
        counted=counted.astype(np.float64),
        missed=rng.binomial(counted, miss).astype(np.float64),
        allowed_ratio=0.05,
        at_us=np.arange(N, dtype=np.int64) * MINUTE_US,
    )


@dataclass(frozen=True, slots=True)
class FoundKnee:
    """A capacity beside the knee that was measured.

    Attributes:
        first, last: loads at which the percentile passes the limit; one and the same, unless it hung.
        cost_per_s: what was found; None: nothing.
    """

    first: float
    last: float
    cost_per_s: float | None

    @property
    def above_ratio(self) -> float:
        """By how much it is above the knee, as a share of it; below 0: not."""
        return (self.cost_per_s or 0.0) / self.last - 1.0

    @property
    def below_ratio(self) -> float:
        """By how much it is below the knee; 1 if nothing was found."""
        return 1.0 - (self.cost_per_s or 0.0) / self.first


TIMES = (1.5, 2.0, 3.0, 5.0)
"""Promises, in parts of the idle latency."""


def found_knee(name: str, times: float, seed: int = 0) -> FoundKnee:
    """The capacity of one curve for a promise of so many times its idle latency."""
    limit_us = idle_us(name) * times
    found = capacity(history(name, limit_us / MARGIN, seed))
    return FoundKnee(*knees_of(name, limit_us), found.cost_per_s)
