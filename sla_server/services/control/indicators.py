"""Mean latency, IOPS and throughput as counts, so that windows and verdicts are those of all promises.

A latency promise counts I/Os compared with a threshold and those that missed it; u is the share of misses by
the share allowed. The same holds for the others with other counts:

    mean latency      each I/O counts, and misses as often as the threshold is in its latency: with one miss
                      allowed for each, u is the mean latency / the threshold. What is outstanding counts with
                      the age of the oldest, as one I/O; what clients gave up with its age
    IOPS, throughput  I/Os that were asked for, as far as they were promised, and those of them that were
                      not delivered: 2 % may be missed. An I/O that failed is not delivered; one that is
                      outstanding counts as delivered unless the oldest has waited for ``HUNG_US``

More than 1 % of failed I/Os break any of them, too (``verdicts``).

Judging in slices has the same rules over a minute (``agreements.slices``), where what is on its way does not
matter. No state. Pure. Source: SLA-MODEL.md 2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import EDGES_NS
from sla_server.agreements.verdicts import HUNG_US
from sla_server.services.control.pieces import Bools, Floats, Ints

_UPPER_US: Final = EDGES_NS[1:].astype(np.float64) / 1000


@dataclass(slots=True)
class LineUse:
    """What some lines of a batch say, shape (lines,), histograms (lines, 99).

    Attributes:
        done, offered, failed: I/Os of the promise's kind; excludes: those that failed do not count at all.
        lat_sum_us, size_bytes: of reads and writes, and ``both``: their count.
        oldest_us: age of the oldest outstanding; covered_us: duration of the cut.
        abandoned, abandoned_us: I/Os whose clients left, and how old they were in all.
    """

    done: Floats
    offered: Floats
    failed: Floats
    excludes: Bools
    both: Floats
    lat_sum_us: Floats
    size_bytes: Floats
    oldest_us: Floats
    covered_us: Ints
    abandoned: Floats
    abandoned_us: Floats
    hist: npt.NDArray[Any]

    def at(self, chosen: Bools) -> LineUse:
        """Of some of the lines."""
        return LineUse(*(getattr(self, each.name)[chosen] for each in fields(self)))


def mean_counts(use: LineUse, threshold_us: Floats) -> tuple[Floats, Floats]:
    """(counted, missed) of mean latencies; ``threshold_us``: of each step, 0 for none; all (lines, steps)."""
    # The sum is of reads and writes together: of one of them it is no more than their histogram allows.
    upper_us = (use.hist * _UPPER_US).sum(axis=1)
    sum_us = np.where(use.done == use.both, use.lat_sum_us, np.minimum(use.lat_sum_us, upper_us))
    limit_us = np.maximum(threshold_us, 1.0)
    waits = use.oldest_us[:, None] > limit_us
    counted = (np.maximum(use.done, use.failed) + use.abandoned)[:, None] + waits
    return counted, ((sum_us + use.abandoned_us)[:, None] + use.oldest_us[:, None] * waits) / limit_us


def rate_counts(use: LineUse, promised: Floats, is_bytes: Bools) -> tuple[Floats, Floats]:
    """(counted, missed) of delivered rates, shape (lines,); ``promised``: I/Os or bytes a second."""
    wanted = np.where(use.excludes, np.maximum(use.offered - use.failed, 0.0), use.offered)
    mean_bytes = np.where(is_bytes & (use.both > 0), use.size_bytes / np.maximum(use.both, 1.0), 1.0)
    most = promised * (use.covered_us / 1e6) / np.maximum(mean_bytes, 1.0)
    # Without a completion the size of an I/O is not known: all that was asked for counts.
    counted = np.where(is_bytes & (use.both == 0), wanted, np.minimum(most, wanted))
    waits = np.maximum(use.offered - use.done - use.abandoned, 0.0)
    under_way = np.where(use.oldest_us < HUNG_US, waits, 0.0)
    served = np.maximum(use.done - use.failed, 0.0) + under_way
    # Clients that are refused ask for nothing that could be counted: each is an I/O.
    counted = np.where(wanted > 0, counted, use.failed)
    return counted, np.clip(counted - served, 0.0, counted)
