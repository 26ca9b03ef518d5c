"""Mean latency, IOPS and throughput as counts, so that windows and verdicts are those of all promises.

A latency promise counts I/Os compared with a threshold and those that missed it; u is the share of misses by
the share allowed. The same holds for the others with other counts:

    mean latency      each I/O counts, and misses as often as the threshold is in its latency: with one miss
                      allowed for each, u is the mean latency / the threshold. What is outstanding counts once
                      the oldest has waited for ``HUNG_US``, with the age of that; what clients gave up
                      with its age, unless that would make the mean better: it would have taken longer
    IOPS, throughput  I/Os that were asked for, as far as they were promised, and those of them that were
                      not delivered: 2 % may be missed. An I/O that failed is not delivered, nor is one that
                      its client gave up; one that is outstanding counts as delivered unless the oldest has
                      waited for ``HUNG_US``

With ``errors: exclude`` an I/O that failed is in none of these numbers. How long it took is not known, the
histogram has it with the others: the mean is then the worst that is possible, and inexact. Bytes are counted
of what succeeded, so the size of an I/O is that of those.

More than 1 % of failed I/Os break any of them, too, and a stream that hangs (``verdicts``).

Judging in slices has the same rules over a minute (``agreements.slices``), where what is on its way does not
matter. No state. Pure. Source: SLA-MODEL.md 2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import EDGES_NS
from sla_server.agreements.rules import HUNG_US
from sla_server.services.control.pieces import Bools, Floats, Ints

_LOWER_US: Final = EDGES_NS[:-1].astype(np.float64) / 1000
_UPPER_US: Final = EDGES_NS[1:].astype(np.float64) / 1000


@dataclass(slots=True)
class LineUse:
    """What some lines of a batch say, shape (lines,), histograms (lines, 99).

    Attributes:
        done, offered: I/Os of the promise's kind; failed: those that failed, and refused clients.
        excludes: those that failed do not count at all.
        size_bytes: of reads and writes of that kind.
        lat_sum_us: of reads and writes, and ``both``: their count.
        oldest_us: age of the oldest outstanding; covered_us: duration of the cut.
        stuck: for how many outstanding a mean takes that: those that hang.
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
    stuck: Floats
    covered_us: Ints
    abandoned: Floats
    abandoned_us: Floats
    hist: npt.NDArray[Any]

    @property
    def errors(self) -> Floats:
        """Completions that failed."""
        return np.minimum(self.failed, self.done)

    @property
    def left_out(self) -> Floats:
        """Completions that do not count."""
        found: Floats = self.errors * self.excludes
        return found

    def at(self, chosen: Bools | Ints) -> LineUse:
        """Of some of the lines."""
        return LineUse(*(getattr(self, each.name)[chosen] for each in fields(self)))


def mean_counts(use: LineUse, threshold_us: Floats, slow: Floats | None = None) -> tuple[Floats, Floats]:
    """(counted, missed) of mean latencies, both of shape (lines, steps).

    Args:
        use: of the lines.
        threshold_us: of each step, 0 for none; shape (lines, steps).
        slow: completions without an error that took longer, NaN where not known; None: nowhere.
    """
    # The sum is of reads and writes together: of one of them it is no more than their histogram allows.
    upper_us = (use.hist * _UPPER_US).sum(axis=1)
    sum_us = np.where(use.done == use.both, use.lat_sum_us, np.minimum(use.lat_sum_us, upper_us))
    limit_us = np.maximum(threshold_us, 1.0)
    sums_us = np.repeat(sum_us[:, None], limit_us.shape[1], axis=1)
    fails = np.flatnonzero(use.left_out)
    if len(fails):
        known = np.full((len(fails), limit_us.shape[1]), np.nan) if slow is None else slow[fails]
        sums_us[fails] = _most_us(use.at(fails), sums_us[fails], limit_us[fails], known)
    waits = (use.oldest_us[:, None] > limit_us) * use.stuck[:, None]  # that hang
    gave_up = use.abandoned_us[:, None] > limit_us * use.abandoned[:, None]
    done = np.where(use.excludes, use.done - use.left_out, np.maximum(use.done, use.failed))
    counted = done[:, None] + use.abandoned[:, None] * gave_up + waits
    sums_us += use.abandoned_us[:, None] * gave_up + use.oldest_us[:, None] * waits
    return counted, sums_us / limit_us


def _most_us(use: LineUse, sums_us: Floats, limit_us: Floats, slow: Floats) -> Floats:
    """What completions without an error took together at most, shape (lines, steps).

    No more than the sum of all without the fastest, and than the slowest of the histogram, of which no more
    are above the limit than were counted.
    """
    hist = use.hist.astype(np.float64)
    kept = (use.done - use.left_out)[:, None]
    before = np.cumsum(hist, axis=1) - hist
    fastest = np.clip(use.left_out[:, None] - before, 0.0, hist)
    without_fastest = np.maximum(sums_us - (fastest * _LOWER_US).sum(axis=1)[:, None], 0.0)
    behind = np.cumsum(hist[:, ::-1], axis=1)[:, ::-1] - hist
    most = np.zeros_like(sums_us)
    for step in range(limit_us.shape[1]):
        limit = limit_us[:, step, None]
        above = np.minimum(np.where(np.isnan(slow[:, step, None]), kept, slow[:, step, None]), kept)
        slowest = np.clip(above - behind, 0.0, hist)
        low = np.where(limit > _LOWER_US, hist, 0.0)
        low_behind = np.cumsum(low[:, ::-1], axis=1)[:, ::-1] - low
        rest = np.clip(kept - above - low_behind, 0.0, low)
        most[:, step] = (slowest * _UPPER_US + rest * np.minimum(_UPPER_US, limit)).sum(axis=1)
    found: Floats = np.minimum(most, without_fastest)
    return found


def rate_counts(use: LineUse, promised: Floats, is_bytes: Bools) -> tuple[Floats, Floats]:
    """(counted, missed) of delivered rates, shape (lines,); ``promised``: I/Os or bytes a second."""
    served = use.done - use.errors
    # What was given up may have been asked for in a cut before.
    asked = np.where(use.abandoned > 0, np.maximum(use.offered, use.done + use.abandoned), use.offered)
    wanted = np.maximum(asked - use.left_out, 0.0)
    is_sized = is_bytes & (served > 0)
    mean_bytes = np.where(is_sized, use.size_bytes / np.maximum(served, 1.0), 1.0)
    most = promised * (use.covered_us / 1e6) / np.maximum(mean_bytes, 1.0)
    # Where nothing was served the size of an I/O is not known: all that was asked for counts.
    counted = np.where(is_bytes & ~is_sized, wanted, np.minimum(most, wanted))
    waits = np.maximum(use.offered - use.done - use.abandoned, 0.0)
    under_way = np.where(use.oldest_us < HUNG_US, waits, 0.0)
    # Clients that are refused ask for nothing that could be counted: each is an I/O.
    refused = np.where(use.excludes, 0.0, np.maximum(use.failed - use.errors, 0.0))
    counted = np.where(wanted > 0, counted, refused)
    return counted, np.clip(counted - served - under_way, 0.0, counted)
