"""What the closed windows of a promise say: u, r, whether it is at risk, over, or stalled.

What people see (u, r, ``over``, ``risky``) counts every I/O. Whether neighbours must be slowed down
(``at_risk``, ``r_step``) leaves out the I/Os that failed, for load does not make them fail, and those that
the gateway's own host may have made late (``excused``): if its data plane wanted to run and was kept waiting
for a tenth of a cut, the slowest fifth of the cut's I/Os and as many of its misses are no evidence against a
neighbour. The rest is: under contention nearly all I/Os are late.

``verdict`` looks at many rows at once and says little of each, ``signals_of`` says all of each. No state: the
windows are in ``windows``, what is promised in ``promise_terms``. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import NO_PERCENTILE
from sla_server.services.control.pieces import Bools, Floats, Ints, Pick, percentiles_us
from sla_server.services.control.windows import WindowTable

ALONE_PERCENTILE: Final = 10.0
"""Of the latencies: up to nine tenths of its capacity, storage is idle when a tenth of the I/Os come."""
MIDDLE_PERCENTILE: Final = 50.0
MOST_FAILED_RATIO: Final = 1 - NO_PERCENTILE / 100
"""Of the I/Os of a promise without a percentile."""


class Figures(NamedTuple):
    """What some windows say together."""

    u: float = 0.0
    latency_us: float = 0.0
    offered_iops: float = 0.0
    alone_us: float = 0.0


NO_FIGURES: Final = Figures()


@dataclass(frozen=True, slots=True)
class Signal:
    """What the last windows of a promise say; ``windows`` 0 means nothing is known.

    Attributes:
        threshold_us: of the curve at the offered rate, None outside the curve; of storage that hangs or
            fails there, its last one.
        u: misses / misses allowed over all windows.
        r: interpolated percentile / threshold over all windows.
        latency_us: that percentile, interpolated.
        risky: windows at risk; over: windows with u > 1.
        of_over: u, that percentile and the offered rate of the windows with u > 1 alone; zeros without one.
        excuse: the live state that says why nothing is promised of these I/Os, "" if something is; only
            windows in which storage hung or failed are risky, or over, then.
        at_risk: the neighbours must be slowed down: enough windows are at risk, the newest too, also without
            what is excused, and r does not fall by itself.
        r_step: by how much: the r, without what is excused, that ``at_risk_windows`` windows reached.
        r_middle: what half of the I/Os of the newest window took, as a share of the threshold, likewise.
        excused_ratio: share of the I/Os that is excused.
        stalled: windows in which nothing completed though I/O was outstanding, or one stream hung.
        stall_us: for how long at least, as the newest of them says.
        is_partial: other I/O completed in that one.
        failed_ratio: share of the I/Os that failed, and count as missed because of it.
        near_u: the u from which it is at risk.
        r_alone: r of I/Os that waited for no other, or for few: the least tenth.
    """

    windows: int
    offered_iops: float
    threshold_us: int | None
    u: float
    r: float
    latency_us: float
    risky: int
    over: int
    inexact: bool
    of_over: Figures = NO_FIGURES
    at_risk: bool = False
    r_step: float = 0.0
    r_middle: float = 0.0
    excused_ratio: float = 0.0
    stalled: int = 0
    stall_us: float = 0.0
    is_partial: bool = False
    failed_ratio: float = 0.0
    excuse: str = ""
    near_u: float = 0.7
    r_alone: float = 0.0


NOTHING: Final = Signal(0, 0.0, None, 0.0, 0.0, 0.0, 0, 0, False)


@dataclass(slots=True)
class Verdict:
    """What the closed windows of some rows say, oldest first: shape (depth, rows) unless said otherwise.

    Attributes:
        slots: where they are stored; valid: whether there is one at all.
        count, offered, inside, applies, threshold_us, allowed: of each row; shape (rows,).
        missed, counted, risky, over: of each window, every I/O counted; what is not promised is neither
            risky nor over, unless it is lost.
        holds: whether something is promised of these I/Os: they are inside the curve and apply, or some
            window is lost, for that is no excuse; shape (rows,).
        lost: windows in which nothing completed for ``lost_us``, or more failed than may.
        stalled: windows without completion for longer than the threshold, or with a stream that hung.
        sure_r: r without what is excused.
        at_risk: see ``Signal``; shape (rows,).
    """

    slots: Ints
    valid: Bools
    count: Ints
    offered: Floats
    inside: Bools
    applies: Bools
    threshold_us: Floats
    allowed: Floats
    missed: Floats
    counted: Floats
    risky: Bools
    over: Bools
    stalled: Bools
    sure_r: Floats
    at_risk: Bools
    holds: Bools
    lost: Bools

    def sums_of(self, values: Floats) -> Floats:
        """Of figures of each window, over all windows of a row."""
        found: Floats = (values if self.valid.all() else values * self.valid).sum(axis=0)
        return found


def times(flags: Bools) -> npt.NDArray[np.int8]:
    """In how many windows of each row; bytes are added in a tenth of the time."""
    found: npt.NDArray[np.int8] = flags.view(np.int8).sum(axis=0, dtype=np.int8)
    return found


def verdict(windows: WindowTable, rows: Ints, of: Pick | None = None) -> Verdict:
    """What the closed windows of some rows say; ``of``: the rows as a slice, if they are one."""
    s, terms, of = windows.settings, windows.terms, rows if of is None else of
    count, (slots, valid) = windows.count[of], windows.slots(rows, of)
    iops = windows.w_iops[slots]
    offered = (iops if valid.all() else iops * valid).sum(axis=0) / np.maximum(count, 1)
    allowed, r_on = terms.allowed[of], terms.r_on[of]
    if terms.steps == 1:  # nothing to choose; and with one index numpy reads ten times as fast as with two
        inside = offered <= terms.up_to[of, 0]
        limit_us = terms.threshold_us[of, 0]
        missed, counted = windows.w_missed[:, 0][slots], windows.w_counted[:, 0][slots]
    else:
        fits = offered[:, None] <= terms.up_to[rows]
        inside = fits.any(axis=1)
        step = np.where(inside, fits.argmax(axis=1), (terms.up_to[rows] >= 0).sum(axis=1) - 1)
        limit_us = terms.threshold_us[rows, step]
        missed, counted = windows.w_missed[slots, step], windows.w_counted[slots, step]
    near_u = terms.near_u[of]
    stalled = lost = hangs = breaks = np.zeros(slots.shape, np.bool_)
    is_flawed = bool((windows.w_flawed[slots] & valid).any())
    if is_flawed:
        failed, stall_us = windows.w_failed[slots], windows.w_stall_us[slots]
        stall_limit_us = terms.stall_limit_us(rows, limit_us)
        stalled = ((stall_us > stall_limit_us) | (stall_us >= terms.hung_us[rows])) & valid
        # A promise without a percentile has its failed I/Os in no count of misses.
        fails = failed > terms.most_failed[rows] * np.maximum(windows.w_done[slots], failed)
        hangs = (stall_us >= terms.lost_us[rows]) & valid
        lost = hangs | (fails & valid)
        breaks = stalled | (fails & (terms.percentile[rows] == 0))

    def risky(u: Floats, r: Floats) -> Bools:
        found: Bools = ((u >= near_u) | (r >= r_on) | breaks) & valid
        return found

    u, r = missed / np.maximum(counted, 1) / allowed, windows.w_latency[slots] / limit_us
    if is_flawed:
        r = np.maximum(r, np.where(stalled, stall_us, 0.0) / limit_us)
    all_risky = sure = risky(u, r)
    sure_r = r
    if is_flawed:
        excused = windows.w_excused[slots]
        sure_us = np.where(excused > 0, windows.w_sure[slots], windows.w_latency[slots])
        sure_r = np.where(stalled, r, sure_us / limit_us)
        left_out = excused + failed
        sure = risky(np.maximum(missed - left_out, 0.0) / np.maximum(counted, 1) / allowed, sure_r)
    over = ((u > 1) | breaks) & valid
    applies = _applies(windows, of, slots, valid, offered) | (count == 0)
    is_promised = inside & applies
    if not is_promised.all():  # of the others, only what no clause excuses
        all_risky, over = (np.where(is_promised, found, lost) for found in (all_risky, over))
        sure = np.where(is_promised, sure, hangs)  # load does not make them fail
    at_risk = times(sure) >= s.at_risk_windows
    every = np.flatnonzero(at_risk)
    if len(every):
        newest = np.maximum(count[every] - 1, 0)
        falls = sure_r[newest, every] <= s.falling_ratio * sure_r[newest - 1, every]
        at_risk[every] = sure[newest, every] & ~(falls & (count[every] > 1))
    return Verdict(
        slots,
        valid,
        count,
        offered,
        inside,
        applies,
        limit_us,
        allowed,
        missed,
        counted,
        all_risky,
        over,
        stalled,
        sure_r,
        at_risk,
        is_promised | lost.any(axis=0) if is_flawed else is_promised,
        lost,
    )


def _applies(windows: WindowTable, of: Pick, slots: Ints, valid: Bools, offered: Floats) -> Bools:
    """Whether the I/Os are such as the promise is about."""
    terms = windows.terms
    applies: Bools = offered >= terms.least_iops[of]
    most_bytes, least_reads = terms.most_bytes[of], terms.least_reads[of]
    asks = np.flatnonzero((most_bytes < np.inf) | (least_reads > 0))
    if len(asks):
        completed, reads, size_bytes, sized = (windows.w_mix[:, slots[:, asks]] * valid[:, asks]).sum(axis=1)
        applies[asks] &= size_bytes <= most_bytes[asks] * np.maximum(sized, 1)
        applies[asks] &= reads >= least_reads[asks] * completed
    return applies


def signals_of(windows: WindowTable, rows: Ints) -> list[Signal]:
    """All that the closed windows of each of these rows say; shape (rows,)."""
    found = verdict(windows, rows)
    return [_signal(windows, found, row, at) for at, row in enumerate(rows.tolist())]


def _signal(windows: WindowTable, found: Verdict, row: int, at: int) -> Signal:
    """All that the closed windows of a row say, of whose verdict ``found`` has it at ``at``."""
    count = int(found.count[at])
    if count <= windows.kept[row]:
        return NOTHING
    offered = float(found.offered[at])
    excuse = "" if found.applies[at] else "not-applicable"
    if not found.inside[at]:
        excuse = "out-of-curve"
        if not found.lost[:, at].any():
            return Signal(count, offered, None, 0.0, 0.0, 0.0, 0, 0, False, excuse=excuse)
    counted = max(float(found.counted[:count, at].sum()), 1.0)
    threshold_us, slots = int(found.threshold_us[at]), found.slots[:count, at]
    newest_stalled = slots[found.stalled[:count, at]][-1:]
    together = _figures(windows, found, at, np.arange(count))
    over = np.flatnonzero(found.over[:, at])
    is_flawed = bool(windows.w_flawed[slots].any())
    of_over = together  # as a rule, of one that is broken: it costs half of a signal
    if len(over) < count:
        of_over = _figures(windows, found, at, over) if len(over) else NO_FIGURES
    least = windows.settings.at_risk_windows
    return Signal(
        windows=count,
        offered_iops=offered,
        threshold_us=threshold_us,
        u=together.u,
        r=together.latency_us / threshold_us,
        near_u=float(windows.terms.near_u[row]),
        r_alone=together.alone_us / threshold_us,
        latency_us=together.latency_us,
        risky=int(found.risky[:, at].sum()),
        over=len(over),
        inexact=bool(windows.w_inexact[slots].any()),
        of_over=of_over,
        at_risk=bool(found.at_risk[at]),
        r_step=float(np.sort(found.sure_r[:count, at])[-least]) if count >= least else 0.0,
        r_middle=_r_middle(windows, found, at, count) if found.at_risk[at] else 0.0,
        excused_ratio=float(windows.w_excused[slots].sum() / counted) if is_flawed else 0.0,
        stalled=len(newest_stalled) and int(found.stalled[:, at].sum()),
        stall_us=float(windows.w_stall_us[newest_stalled].sum()) if is_flawed else 0.0,
        is_partial=len(newest_stalled) > 0 and bool(windows.w_done[newest_stalled[0]] > 0),
        failed_ratio=float(windows.w_failed[slots].sum() / counted) if is_flawed else 0.0,
        excuse=excuse,
    )


def _r_middle(windows: WindowTable, found: Verdict, at: int, count: int) -> float:
    newest = found.slots[count - 1, at]
    if windows.w_failed[newest] or found.stalled[count - 1, at]:
        return 0.0
    excused = windows.w_excused[newest] / max(windows.w_done[newest], 1)
    middle = np.array([MIDDLE_PERCENTILE * (1 - excused)])
    middle_us = percentiles_us(windows.w_hist[newest][None], middle, windows.used)
    return float(middle_us[0] / found.threshold_us[at])


def _figures(windows: WindowTable, found: Verdict, at: int, ages: Ints) -> Figures:
    """What the windows of these ages say together, of the row that a verdict has at ``at``."""
    slots = found.slots[:, at]
    hist = windows.w_hist[slots[ages]].sum(axis=0)
    percentile = windows.terms.percentile[slots[:1] % len(windows.pos)]
    counted = found.counted[ages, at].sum()
    stalled = found.stalled[ages, at] & (windows.w_done[slots[ages]] == 0)
    missed = found.missed[ages, at].sum()
    ratio = missed / counted if counted else max(float(missed), float(stalled.any()))
    offered = windows.w_iops[slots[ages]].sum() / len(ages)
    u = float(ratio / found.allowed[at])
    asked = np.array([percentile[0], ALONE_PERCENTILE])
    latency_us, alone_us = map(float, percentiles_us(np.array([hist, hist]), asked, windows.used))
    if not percentile[0]:  # a mean is counted in thresholds, a rate in I/Os
        latency_us = u * float(found.threshold_us[at]) if found.allowed[at] == 1 else 0.0
    if stalled.any():  # what is outstanding is at least as slow as that
        latency_us = max(latency_us, float(windows.w_stall_us[slots[ages[stalled]]].max()))
    return Figures(u, latency_us, float(offered), alone_us)
