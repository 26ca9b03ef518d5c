"""The signal: what the last windows of every promise say, in arrays.

A *piece* is what one cut says of one promise: the sums over the streams in its scope at one gateway. A
*window* merges pieces until it holds ``window_min_ios`` I/Os and every gateway in scope that still reports
has spoken, or until one of them has covered ``window_max_s``. The last three windows are kept. For control
they are emptied when caps change and fed again only with cuts that began under them, so that what they say
is always about the caps in force (SLA-MODEL.md 3, "Signal").

Misses are exact where the cut counted them for the threshold; where it did not (a threshold set of another
version) they are taken from histogram edges, pessimistically, and the window is ``inexact``. An I/O that is
outstanding for longer than the threshold counts as missed from then on, once, and so does one that failed
(SLA-MODEL.md 2, "Never good without proof"); ``counted`` has both.

Storage that hangs counts nothing more. So a window in which nothing completed while an I/O was outstanding
all through it, and for longer than the threshold, is *stalled*: it breaks the promise whatever was counted,
and closes at once. What was outstanding at the end of the last cut still is, if nothing has completed since;
so it is known of agents that send no entries about it, too.

What people see (u, r, ``over``, ``risky``) counts every I/O. Whether neighbours must be slowed down
(``at_risk``, ``r_step``) leaves out the I/Os that failed, for load does not make them fail, and those that
the gateway's own host may have made late (``excused``): if
its data plane wanted to run and was kept waiting for a tenth of a cut, the slowest fifth of the cut's I/Os
and as many of its misses are no evidence against a neighbour. The rest is: under contention nearly all I/Os
are late.

State of ``SignalTable``, all of it in arrays that grow by doubling; freed numbers are used again:

    rows       a promise on one backend, or over all of them
      w_*      a ring of ``depth`` closed windows at [row * depth + slot]; ``count`` of them are filled, the
               next goes to slot ``pos``
      o_*      sums of the open window; they hold only while a member has covered something
      times    first, last and last active piece, monotonic ns, NEVER before the first
    members    one gateway of a row: what pieces are fed to. A row begins with one, ``member``; of a row with
               several, ``_shared`` lists all. ``m_covered`` and ``m_offered`` belong to the open window
               (gateways run side by side, so rates are sums of theirs); covered 0: has not spoken in it.
               ``m_waiting`` counts reads and writes outstanding at the end of its last piece (negative: not
               known), ``m_stall_us`` for how long nothing has completed though there were some
    gateways   when each spoke last, and whether it is up

``add`` feeds the pieces of a whole batch of cuts, ``assess`` looks once a tick at the rows fed since then; it
finds the live states that have changed, and the rows at risk. A ``Signal`` in full is worked out for the
rows that are asked for.

Shapes: (rows,), (rows * depth, ...); histograms (.., 99) int32. Pure: no clock; times are the caller's
monotonic nanoseconds. Changed only by the controller's one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS, EDGES_NS
from sla_server.agreements.promise import Promise
from sla_server.services.control.settings import ControlSettings

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]
NEVER: Final = -(1 << 62)
STATES: Final = (
    "no-data",
    "idle",
    "out-of-curve",
    "violating",
    "at-risk",
    "ok",
    "not-applicable",
    "excluded",
)
NO_DATA, IDLE, OUT_OF_CURVE, VIOLATING, AT_RISK, OK, NOT_APPLICABLE, EXCLUDED = range(8)
CODE: Final = {name: code for code, name in enumerate(STATES)}
QUIET: Final = frozenset((NO_DATA, OUT_OF_CURVE, AT_RISK, OK, NOT_APPLICABLE, EXCLUDED))
"""States that begin without an event and without a change of the windows."""
_FIRST: Final = 64
_EDGES: Final = EDGES_NS.astype(np.float64)


class Figures(NamedTuple):
    """What some windows say together."""

    u: float = 0.0
    latency_us: float = 0.0
    offered_iops: float = 0.0


NO_FIGURES: Final = Figures()


@dataclass(frozen=True, slots=True)
class Signal:
    """What the last windows of a promise say; ``windows`` 0 means nothing is known.

    Attributes:
        threshold_us: of the curve at the offered rate, None outside the curve.
        u: misses / misses allowed over all windows.
        r: interpolated percentile / threshold over all windows.
        latency_us: that percentile, interpolated.
        risky: windows at risk; over: windows with u > 1.
        of_over: u, that percentile and the offered rate of the windows with u > 1 alone; zeros without one.
        at_risk: the neighbours must be slowed down: enough windows are at risk, the newest too, also without
            what is excused, and r does not fall by itself.
        r_step: by how much: the r, without what is excused, that ``at_risk_windows`` windows reached.
        excused_ratio: share of the I/Os that is excused.
        stalled: windows in which nothing completed though I/O was outstanding.
        stall_us: for how long at least, as the newest of them says.
        failed_ratio: share of the I/Os that failed, and count as missed because of it.
        applies: the I/Os are such as the promise is about (its applicability); storage that hangs or fails
            them is no excuse.
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
    excused_ratio: float = 0.0
    stalled: int = 0
    stall_us: float = 0.0
    failed_ratio: float = 0.0
    applies: bool = True


NOTHING: Final = Signal(0, 0.0, None, 0.0, 0.0, 0.0, 0, 0, False)


@dataclass(slots=True)
class Pieces:
    """Pieces of one batch, one a line of its plans (``cut_batch``), in the order of the cuts.

    Attributes:
        now_ns: when the cut came; covered_us: its duration; both of shape (pieces,).
        offered: I/Os of the promise's kind that arrived, also those held back; done: of them completed.
        completed, arrived, reads, size_bytes: reads and writes, also where the promise is about one of them.
        waiting: gauge, I/Os held or under way when the cut ended.
        counted: for each step of the curve, how many were compared with it; shape (pieces, steps).
        missed: how many of them took longer, are overdue, or failed; shape (pieces, steps).
        failed: how many of ``missed`` failed.
        oldest_us: age of the oldest I/O outstanding when the cut ended, 0 if not known.
        silence_us: longest time without completion while an I/O was outstanding, 0 if not known.
        hist: latency histogram; shape (pieces, 99).
        inexact: whether misses are from histogram edges.
        latency_us: the promise's percentile of ``hist``.
        excused: I/Os that may be late because the gateway had to wait for the processor of its host.
    """

    now_ns: Ints
    covered_us: Ints
    offered: Floats
    done: Floats
    completed: Floats
    arrived: Floats
    reads: Floats
    size_bytes: Floats
    waiting: Floats
    counted: Floats
    missed: Floats
    failed: Floats
    oldest_us: Floats
    silence_us: Floats
    hist: Counts
    inexact: Bools
    latency_us: Floats
    excused: Floats


@dataclass(slots=True)
class _Sums:
    """What goes into a window of each of some rows, which are distinct.

    ``mix``: reads and writes completed, reads, bytes; shape (rows, 3).
    """

    done: Floats
    mix: Floats
    counted: Floats
    missed: Floats
    failed: Floats
    stall_us: Floats
    hist: Counts
    inexact: Bools
    excused: Floats
    latency_us: Floats

    def at(self, index: Ints | Bools) -> _Sums:
        """Of some of the rows."""
        return _Sums(
            self.done[index],
            self.mix[index],
            self.counted[index],
            self.missed[index],
            self.failed[index],
            self.stall_us[index],
            self.hist[index],
            self.inexact[index],
            self.excused[index],
            self.latency_us[index],
        )


@dataclass(slots=True)
class _Verdict:
    """What the closed windows of some rows say, oldest first: shape (rows, depth) unless said otherwise.

    Attributes:
        slots: where they are stored; valid: whether there is one at all.
        count, offered, inside, applies, threshold_us, allowed: of each row; shape (rows,).
        missed, counted, risky, over: of each window, every I/O counted.
        stalled: windows without completion for longer than the threshold.
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


def percentiles_us(hist: npt.NDArray[Any], percentile: Floats) -> Floats:
    """``histogram.percentile_us`` of each row of ``hist``, shape (rows, 99); 0 for a row without I/O."""
    cumulative = hist.cumsum(axis=1, dtype=np.int32)
    want = percentile / 100 * cumulative[:, -1]
    index = (cumulative < want[:, None]).sum(axis=1)
    every = np.arange(len(hist))
    count = hist[every, index]
    before = cumulative[every, index] - count
    inside = np.where(count > 0, (want - before) / np.maximum(count, 1), 1.0)
    low = _EDGES[index]
    latency: Floats = (low + (_EDGES[index + 1] - low) * np.clip(inside, 0.0, 1.0)) / 1000
    latency[cumulative[:, -1] == 0] = 0.0
    return latency


class SignalTable:
    """See the module."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.depth = settings.signal_windows
        self.steps = 1
        self.promises: list[Promise | None] = []
        self.backends: list[str] = []
        self._backend_numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._free_members: list[int] = []
        self._members = 0
        self._shared: dict[int, Ints] = {}
        self._gateways: dict[str, int] = {}
        self.g_spoke_ns = np.full(_FIRST, NEVER, np.int64)
        self.g_up = np.ones(_FIRST, np.bool_)
        self.m_row = np.zeros(_FIRST, np.int64)
        self.m_gateway = np.zeros(_FIRST, np.int64)
        self.m_covered = np.zeros(_FIRST, np.int64)
        self.m_offered = np.zeros(_FIRST)
        self.m_waiting, self.m_stall_us = np.zeros(_FIRST), np.zeros(_FIRST)
        self._make_rows(_FIRST)

    def _make_rows(self, rows: int) -> None:
        depth = self.depth
        self.member = np.zeros(rows, np.int64)
        self.several = np.zeros(rows, np.bool_)
        self.pos = np.zeros(rows, np.int64)
        self.count = np.zeros(rows, np.int64)
        self.version = np.zeros(rows, np.int64)
        self.first_ns = np.full(rows, NEVER, np.int64)
        self.last_ns = np.full(rows, NEVER, np.int64)
        self.active_ns = np.full(rows, NEVER, np.int64)
        self.o_mix, self.w_mix = np.zeros((rows, 3)), np.zeros((rows * depth, 3))
        self.o_done, self.o_failed, self.o_stall_us = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self.o_counted, self.o_missed = np.zeros((rows, self.steps)), np.zeros((rows, self.steps))
        self.o_hist = np.zeros((rows, BUCKETS), np.int32)
        self.o_inexact, self.o_excused = np.zeros(rows, np.bool_), np.zeros(rows)
        self.w_iops, self.w_latency = np.zeros(rows * depth), np.zeros(rows * depth)
        self.w_done, self.w_failed = np.zeros(rows * depth), np.zeros(rows * depth)
        self.w_counted = np.ones((rows * depth, self.steps))
        self.w_missed = np.zeros((rows * depth, self.steps))
        self.w_stall_us = np.zeros(rows * depth)
        self.w_hist = np.zeros((rows * depth, BUCKETS), np.int32)
        self.w_inexact, self.w_excused = np.zeros(rows * depth, np.bool_), np.zeros(rows * depth)
        self.w_sure = np.zeros(rows * depth)  # as w_latency, without the I/Os excused
        self.allowed, self.percentile, self.r_on = np.ones(rows), np.zeros(rows), np.zeros(rows)
        self.up_to = np.full((rows, self.steps), -1.0)
        self.threshold_us = np.ones((rows, self.steps))
        self.over_all = np.zeros(rows, np.bool_)  # a row over all backends
        self.is_outage = np.zeros(rows, np.bool_)  # of availability: a silence counts though it has ended
        self.least_iops, self.least_reads = np.zeros(rows), np.zeros(rows)
        self.most_bytes = np.full(rows, np.inf)
        self.excluded = np.zeros(rows, np.bool_)
        self.backend = np.full(rows, -1)
        self.code = np.zeros(rows, np.int8)
        self.broken = np.zeros(rows, np.bool_)
        self.at_risk = np.zeros(rows, np.bool_)
        self.outside = np.zeros(rows, np.bool_)
        self.u = np.zeros(rows)
        self._fed = np.zeros(rows, np.bool_)

    def _grow_rows(self, rows: int, steps: int) -> None:
        old = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray) and not name.startswith(("g_", "m_"))
        }
        self.steps = steps
        self._make_rows(rows)
        for name, value in old.items():
            target = getattr(self, name)
            target[tuple(slice(size) for size in value.shape)] = value

    # Gateways.

    def gateway(self, gateway_id: str) -> int:
        """Number of a gateway, made when it is first asked for."""
        number = self._gateways.setdefault(gateway_id, len(self._gateways))
        if number == len(self.g_up):
            self.g_spoke_ns = np.concatenate((self.g_spoke_ns, np.full(number, NEVER, np.int64)))
            self.g_up = np.concatenate((self.g_up, np.ones(number, np.bool_)))
        return number

    def set_up(self, gateway_id: str, up: bool) -> None:
        """Whether a gateway is up: windows do not wait for one that is not."""
        number = self.gateway(gateway_id)  # first: it may make the arrays longer
        self.g_up[number] = up

    def spoke(self, gateways: Ints, now_ns: Ints) -> None:
        """A cut of each of these gateways was taken; before ``add``, for windows wait for who speaks."""
        self.g_spoke_ns[gateways] = now_ns
        self.g_up[gateways] = True

    def resync(self, gateway: int) -> None:
        """A cut of this gateway is missing: what is outstanding follows from the gauges of the next one."""
        self.m_waiting[self.m_gateway == gateway] = -1

    # Rows and their members.

    def allot(self, promise: Promise, gateway_id: str, backend: str, r_on: float) -> SignalRow:
        """A row for a promise, with its first gateway; ``backend`` "" is all of them together."""
        steps = max(self.steps, len(promise.curve))
        if steps > self.steps:
            self._grow_rows(len(self.pos), steps)
        if not self._free and len(self.promises) == len(self.pos):
            self._grow_rows(2 * len(self.pos), self.steps)
        row = self._free.pop() if self._free else len(self.promises)
        if row == len(self.promises):
            self.promises.append(promise)
            self.backends.append(backend)
        self.promises[row], self.backends[row] = promise, backend
        self.backend[row] = self._backend_numbers.setdefault(backend, len(self._backend_numbers))
        self.allowed[row], self.percentile[row] = promise.allowed_miss_ratio, promise.percentile
        self.r_on[row], self.over_all[row] = r_on, backend == ""
        self.is_outage[row], self.excluded[row] = promise.metric == "availability", False
        self.least_iops[row], self.least_reads[row] = promise.least_iops, promise.least_read_ratio
        self.most_bytes[row] = promise.max_mean_bytes
        self.up_to[row], self.threshold_us[row] = -1.0, 1.0
        for index, step in enumerate(promise.curve):
            self.up_to[row, index], self.threshold_us[row, index] = step.up_to_iops, step.threshold_us
        self.first_ns[row] = self.last_ns[row] = self.active_ns[row] = NEVER
        self.code[row], self.broken[row] = NO_DATA, False
        self.member[row] = self._allot_member(row, gateway_id)
        self.reset(np.array([row]))
        return SignalRow(self, row)

    def _allot_member(self, row: int, gateway_id: str) -> int:
        if self._free_members:
            member = self._free_members.pop()
        else:
            member, self._members = self._members, self._members + 1
            if member == len(self.m_row):
                for name in ("m_row", "m_gateway", "m_covered", "m_offered", "m_waiting", "m_stall_us"):
                    value = getattr(self, name)
                    setattr(self, name, np.concatenate((value, np.zeros_like(value))))
        self.m_row[member], self.m_gateway[member] = row, self.gateway(gateway_id)
        self.m_covered[member] = self.m_stall_us[member] = 0
        self.m_waiting[member] = -1  # not known
        return member

    def join(self, row: int, gateway_id: str) -> int:
        """The promise of a row reaches one more gateway; the member to feed its pieces to."""
        member = self._allot_member(row, gateway_id)
        self._shared[row] = np.append(self._shared.get(row, self.member[row]), member)
        self.several[row] = True
        return member

    def free(self, row: int) -> None:
        """No scope needs the row any more."""
        self._free_members += self._shared.pop(row, self.member[row : row + 1]).tolist()
        self.promises[row], self.backend[row] = None, -1
        self.over_all[row] = self._fed[row] = self.at_risk[row] = self.outside[row] = False
        self.several[row] = False
        self.last_ns[row], self.code[row] = NEVER, NO_DATA
        self._free.append(row)

    def set_r_on(self, row: int, r_on: float) -> None:
        """Another entry threshold of r."""
        if self.r_on[row] != r_on:
            self.r_on[row] = r_on
            self.version[row] += 1
            self._fed[row] = True

    def set_excluded(self, row: int, is_excluded: bool) -> None:
        """Nothing is promised at present, as in maintenance; or it is again."""
        if bool(self.excluded[row]) != is_excluded:
            self.excluded[row] = is_excluded
            self._fed[row] = True

    def reset(self, rows: Ints) -> None:
        """Forget windows, closed and open; the times stay."""
        self.count[rows] = self.pos[rows] = self.m_covered[self.member[rows]] = 0
        for members in self._shared_of(rows):
            self.m_covered[members] = 0
        self.at_risk[rows] = self.outside[rows] = False
        self._fed[rows] = True
        self.version[rows] += 1

    def _shared_of(self, rows: Ints) -> list[Ints]:
        """Members of those of ``rows`` that have several."""
        if not self._shared:
            return []
        return [self._shared[row] for row in rows[self.several[rows]].tolist()]

    # Feeding.

    def record_activity(self, members: Ints, pick: Ints, pieces: Pieces) -> None:
        """Remember only that there was, or was no, I/O; ``members`` are distinct, fed ``pieces[pick]``."""
        rows, now_ns = self.m_row[members], pieces.now_ns[pick]
        # A row may be named several times, in the order of the cuts: of each assignment the last one holds.
        self.last_ns[rows] = now_ns
        begins = np.flatnonzero(self.first_ns[rows] == NEVER)[::-1]
        self.first_ns[rows[begins]] = now_ns[begins]
        active = (pieces.offered[pick] > 0) | (pieces.done[pick] > 0) | (pieces.waiting[pick] > 0)
        active |= pieces.counted[pick, 0] > 0
        self.active_ns[rows[active]] = now_ns[active]
        self._fed[rows] = True
        # Reads and writes outstanding: the gauges have flush and trim as well, the sums clients that left.
        waiting, before = pieces.waiting[pick], self.m_waiting[members]
        before = np.where(before < 0, waiting, before)
        balance = before + pieces.arrived[pick] - pieces.completed[pick]
        after = np.clip(balance, 0.0, waiting)
        stuck = (pieces.completed[pick] == 0) & (before > 0) & (after > 0)
        self.m_stall_us[members] = (self.m_stall_us[members] + pieces.covered_us[pick]) * stuck
        self.m_waiting[members] = after

    def _stall_us(self, members: Ints, pick: Ints, pieces: Pieces) -> Floats:
        """For how long nothing has completed, of pieces all through which an I/O was outstanding; else 0."""
        seen_us = self.m_stall_us[members]
        stall: Floats = np.where(seen_us > 0, np.maximum(pieces.oldest_us[pick], seen_us), 0.0)
        outage = self.is_outage[self.m_row[members]]
        return np.maximum(stall, pieces.silence_us[pick] * outage)

    def add(self, members: Ints, pick: Ints, pieces: Pieces) -> None:
        """Take one piece a member, in the order of the cuts; they are distinct, fed ``pieces[pick]``."""
        self.record_activity(members, pick, pieces)
        rows = self.m_row[members]
        if self._shared:
            shared = self.several[rows]
            if shared.any():
                self._add_shared(members[shared], rows[shared], pick[shared], pieces)
                members, rows, pick = members[~shared], rows[~shared], pick[~shared]
        if len(rows):
            self._add_alone(members, rows, pick, pieces)

    def _add_alone(self, members: Ints, rows: Ints, pick: Ints, pieces: Pieces) -> None:
        """Rows with one member, each with one piece."""
        s = self.settings
        covered, offered = pieces.covered_us[pick], pieces.offered[pick]
        stall_us = self._stall_us(members, pick, pieces)
        sums = _Sums(
            pieces.done[pick],
            _mix_of(pieces, pick),
            pieces.counted[pick],
            pieces.missed[pick],
            pieces.failed[pick],
            stall_us,
            pieces.hist[pick],
            pieces.inexact[pick],
            pieces.excused[pick],
            pieces.latency_us[pick],
        )
        opened = np.flatnonzero(self.m_covered[members])
        if len(opened):
            into = members[opened]
            covered[opened] += self.m_covered[into]
            offered[opened] += self.m_offered[into]
            self._add_open(sums, opened, rows[opened])
        closes = (sums.counted[:, 0] >= s.window_min_ios) | (covered >= s.window_max_s * 1e6)
        closes |= stall_us > self.threshold_us[rows, 0]
        if not closes.all():
            stays = np.flatnonzero(~closes)
            into = members[stays]
            self.m_covered[into], self.m_offered[into] = covered[stays], offered[stays]
            self._keep_open(rows[stays], sums.at(stays))
        if len(opened):
            self.m_covered[members[opened[closes[opened]]]] = 0
        self._push(rows, offered * 1e6 / covered, sums, closes)

    def _add_shared(self, members: Ints, rows: Ints, pick: Ints, pieces: Pieces) -> None:
        """Rows with several members, which may all have a piece here: up to the end of a window at a time."""
        order = np.argsort(rows, kind="stable")
        members, rows, pick = members[order], rows[order], pick[order]
        while len(rows):
            rest = self._fill(members, rows, pick, pieces)
            members, rows, pick = members[rest], rows[rest], pick[rest]

    def _fill(self, members: Ints, rows: Ints, pick: Ints, pieces: Pieces) -> Bools:
        """Fill the open window of each row; returns which pieces are left because theirs was full before.

        ``rows`` is sorted; the pieces of one of them are a *run*, in the order of the cuts.
        """
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        size = np.diff(first, append=len(rows))
        run = np.repeat(np.arange(len(first)), size)
        rows, newest_ns = rows[first], pieces.now_ns[pick[first + size - 1]]
        everyone, owner = self._members_of(rows)
        spoken = self.m_covered[everyone] > 0
        silent = self._speaking(everyone, newest_ns[owner]) & ~spoken
        opened = np.bincount(owner, spoken, len(rows)) > 0
        new = self._speaking(members, newest_ns[run]) & (self.m_covered[members] == 0)
        awaited = np.bincount(owner, silent, len(rows))[run] - _running(new, first, run)
        covered = self.m_covered[members] + pieces.covered_us[pick]
        counted = _running(pieces.counted[pick, 0], first, run)
        counted += np.where(opened, self.o_counted[rows, 0], 0.0)[run]
        stall_us = self._stall_us(members, pick, pieces)
        s, at = self.settings, np.arange(len(run))
        done = _running(pieces.done[pick], first, run) + np.where(opened, self.o_done[rows], 0.0)[run]
        hangs = (stall_us > self.threshold_us[rows, 0][run]) & ((done == 0) | self.is_outage[rows][run])
        enough = (counted >= s.window_min_ios) | hangs
        full = (enough & (awaited <= 0)) | (covered >= s.window_max_s * 1e6)
        end = np.minimum.reduceat(np.where(full, at, len(at)), first)
        closes = end < len(at)
        taken = at <= end[run]
        into = members[taken]
        self.m_offered[into] = pieces.offered[pick[taken]] + np.where(
            self.m_covered[into] > 0, self.m_offered[into], 0.0
        )
        self.m_covered[into] = covered[taken]
        starts = np.flatnonzero(np.diff(run[taken], prepend=-1))
        sums = self._sums_of(rows, pick[taken], starts, stall_us[taken], pieces)
        if opened.any():
            self._add_open(sums, np.flatnonzero(opened), rows[opened])
        self._keep_open(rows[~closes], sums.at(~closes))
        spans = np.maximum(self.m_covered[everyone], 1)
        rates = np.where(self.m_covered[everyone] > 0, self.m_offered[everyone] * 1e6 / spans, 0.0)
        iops: Floats = np.bincount(owner, rates, len(rows)).astype(np.float64, copy=False)
        self.m_covered[everyone[closes[owner]]] = 0
        self._push(rows, iops, sums, closes)
        return ~taken

    def _sums_of(self, rows: Ints, pick: Ints, first: Ints, stall_us: Floats, pieces: Pieces) -> _Sums:
        """Pieces summed by run: the run of each of ``rows`` begins at ``pick[first]``."""
        hist = np.add.reduceat(pieces.hist[pick], first, axis=0)
        return _Sums(
            np.add.reduceat(pieces.done[pick], first),
            np.add.reduceat(_mix_of(pieces, pick), first, axis=0),
            np.add.reduceat(pieces.counted[pick], first, axis=0),
            np.add.reduceat(pieces.missed[pick], first, axis=0),
            np.add.reduceat(pieces.failed[pick], first),
            np.maximum.reduceat(stall_us, first),
            hist,
            np.logical_or.reduceat(pieces.inexact[pick], first),
            np.add.reduceat(pieces.excused[pick], first),
            percentiles_us(hist, self.percentile[rows]),
        )

    def _members_of(self, rows: Ints) -> tuple[Ints, Ints]:
        """All members of these rows, which have several; and of each the index of its row."""
        found = self._shared_of(rows)
        return np.concatenate(found), np.repeat(np.arange(len(found)), [len(each) for each in found])

    def _speaking(self, members: Ints, now_ns: Ints) -> Bools:
        """Whether the gateway of each member is up and its last cut is not too old to be waited for."""
        gateways = self.m_gateway[members]
        fresh: Bools = now_ns - self.g_spoke_ns[gateways] <= self.settings.stale_s * 1e9
        return fresh & self.g_up[gateways]

    def _add_open(self, sums: _Sums, at: Ints, rows: Ints) -> None:
        """Add the open windows of ``rows`` to ``sums`` at ``at``."""
        sums.done[at] += self.o_done[rows]
        sums.mix[at] += self.o_mix[rows]
        sums.counted[at] += self.o_counted[rows]
        sums.missed[at] += self.o_missed[rows]
        sums.failed[at] += self.o_failed[rows]
        sums.stall_us[at] = np.maximum(sums.stall_us[at], self.o_stall_us[rows])
        sums.hist[at] += self.o_hist[rows]
        sums.inexact[at] |= self.o_inexact[rows]
        sums.excused[at] += self.o_excused[rows]
        sums.latency_us[at] = percentiles_us(sums.hist[at], self.percentile[rows])

    def _keep_open(self, rows: Ints, sums: _Sums) -> None:
        self.o_mix[rows] = sums.mix
        self.o_done[rows], self.o_counted[rows], self.o_missed[rows] = sums.done, sums.counted, sums.missed
        self.o_failed[rows], self.o_stall_us[rows], self.o_hist[rows] = sums.failed, sums.stall_us, sums.hist
        self.o_inexact[rows], self.o_excused[rows] = sums.inexact, sums.excused

    def _push(self, rows: Ints, iops: Floats, sums: _Sums, closes: Bools) -> None:
        """The windows that close, unless they are empty, become the newest of their rows."""
        # Nothing completed in all of the window: one gateway of several that hangs is in the counts.
        stall_us = np.where((sums.done == 0) | self.is_outage[rows], sums.stall_us, 0.0)
        push = closes & ((sums.counted[:, 0] > 0) | (stall_us > 0))
        if not push.all():
            rows, iops, sums, stall_us = rows[push], iops[push], sums.at(push), stall_us[push]
        slot = rows * self.depth + self.pos[rows]
        self.w_iops[slot], self.w_done[slot], self.w_mix[slot] = iops, sums.done, sums.mix
        self.w_counted[slot], self.w_missed[slot], self.w_hist[slot] = sums.counted, sums.missed, sums.hist
        self.w_failed[slot], self.w_stall_us[slot] = sums.failed, stall_us
        self.w_inexact[slot], self.w_latency[slot] = sums.inexact, sums.latency_us
        self.w_excused[slot], self.w_sure[slot] = sums.excused, sums.latency_us
        excused = np.flatnonzero(sums.excused)
        if len(excused):
            ratio = sums.excused[excused] / np.maximum(sums.done[excused], 1)
            percentile = self.percentile[rows[excused]] * (1 - ratio)
            self.w_sure[slot[excused]] = percentiles_us(sums.hist[excused], percentile)
        self.pos[rows] = (self.pos[rows] + 1) % self.depth
        self.count[rows] = np.minimum(self.count[rows] + 1, self.depth)
        self.version[rows] += 1

    # Asking.

    def set_state(self, row: int, code: int, broken: bool) -> None:
        """The live state as it is now; ``broken``: a violation is open."""
        self.code[row], self.broken[row] = code, broken

    def risky_rows(self, now_ns: int, gone_s: float) -> list[int]:
        """Rows on one backend at risk, as the last ``assess`` found them, and not silent for ``gone_s``."""
        speaking = now_ns - self.last_ns <= gone_s * 1e9
        rows: list[int] = np.flatnonzero(self.at_risk & ~self.over_all & speaking).tolist()
        return rows

    def rows_on(self, backend: str) -> Ints:
        """All rows on one backend."""
        return np.flatnonzero(self.backend == self._backend_numbers.get(backend, -2))

    def least_room(self, rows: Ints, now_ns: int) -> list[Ints]:
        """Which of these rows keep C from rising, as ``inventory`` finds it promise by promise.

        Returns:
            Those that are not clear, worst first; if there is none, the others by r, and by u.
        """
        s = self.settings
        found = self._verdict(rows)
        speaking = (now_ns - self.last_ns[rows] <= s.lease_s * 1e9) & ~self.excluded[rows] & ~self.idle(rows)
        asks = speaking & ((found.count == 0) | (found.inside & found.applies))
        counted = np.maximum((found.counted * found.valid).sum(axis=1), 1)
        u = (found.missed * found.valid).sum(axis=1) / counted / found.allowed
        hist = (self.w_hist[found.slots] * found.valid[:, :, None]).sum(axis=1)
        r = percentiles_us(hist, self.percentile[rows]) / found.threshold_us
        clear = (found.count >= s.at_risk_windows) & ~found.risky.any(axis=1)
        clear &= (u <= s.clear_u) & (r <= s.clear_r)
        not_clear = np.flatnonzero(asks & ~clear)
        if len(not_clear):
            worst = rows[not_clear[np.argsort(-u[not_clear], kind="stable")]]
            by_r = rows[np.flatnonzero(asks & clear)]  # those of throttled volumes do not count
            return [worst, by_r[np.argsort(-r[asks & clear], kind="stable")]]
        at = np.flatnonzero(asks)
        return [rows[at[np.argsort(-values[at], kind="stable")]] for values in (r, u)]

    def outside_rows(self) -> list[int]:
        """Rows on one backend whose demand is above their curve, as the last ``assess`` found them."""
        rows: list[int] = np.flatnonzero(self.outside & ~self.over_all).tolist()
        return rows

    def newest_over(self, rows: Ints) -> tuple[Ints, Bools]:
        """Of each row a number that changes with its windows, and whether the newest closed one is bad.

        A window in which nothing was promised does not: excluded, above the curve, or not applicable.
        """
        found = self._verdict(rows)
        over: Bools = found.over[np.arange(len(rows)), np.maximum(found.count - 1, 0)]
        return self.version[rows], over & found.inside & found.applies & ~self.excluded[rows]

    def assess(self, now_ns: int, silent_s: float) -> list[tuple[int, int]]:
        """Look at the rows fed since the last time; those over all backends whose live state has changed.

        Returns:
            (row, code of the state it should be in), by row.

        Args:
            now_ns: monotonic.
            silent_s: age of the last piece from which on there is no data, and windows are forgotten.
        """
        stale = np.flatnonzero((self.count > 0) & (now_ns - self.last_ns > silent_s * 1e9))
        if len(stale):  # what was measured then says nothing of now
            self.reset(stale)
        rows = np.flatnonzero(self._fed)
        self._fed[rows] = False
        code = self._states(rows) if len(rows) else self.code[rows]
        differs = (code != self.code[rows]) & self.over_all[rows]
        found = dict(zip(rows[differs].tolist(), code[differs].tolist(), strict=True))
        speaking = self.over_all & (self.code != NO_DATA)
        silent = np.flatnonzero(speaking & (now_ns - self.last_ns > silent_s * 1e9))
        return sorted((found | dict.fromkeys(silent.tolist(), NO_DATA)).items())

    def idle(self, rows: Ints) -> Bools:
        """Whether cuts arrive and none had I/O for ``idle_release_s``. No cuts are no idleness."""
        since = np.where(self.active_ns[rows] == NEVER, self.first_ns[rows], self.active_ns[rows])
        quiet_ns = self.last_ns[rows] - since
        idle: Bools = (self.first_ns[rows] != NEVER) & (quiet_ns >= self.settings.idle_release_s * 1e9)
        return idle

    def _states(self, rows: Ints) -> npt.NDArray[np.int8]:
        """Live states as they should be; sets ``at_risk``, ``outside`` and ``u``, empties idle rows."""
        s, idle = self.settings, self.idle(rows)
        if idle.any():
            # One that has just become idle is emptied by its live state, whose event has figures of before.
            empty = rows[idle & ~(self.over_all[rows] & (self.code[rows] != IDLE))]
            self.reset(empty)
            self._fed[empty] = False
        found = self._verdict(rows)
        known, over = found.count > 0, found.over.sum(axis=1)
        counted = (found.counted * found.valid).sum(axis=1)
        holds = found.applies & ~self.excluded[rows]
        self.at_risk[rows] = found.at_risk & found.inside & ~idle & holds
        self.outside[rows] = known & ~found.inside & ~idle & holds
        ratio = (found.missed * found.valid).sum(axis=1) / np.maximum(counted, 1)
        self.u[rows] = np.where((counted == 0) & found.stalled.any(axis=1), 1.0, ratio) / found.allowed
        code = np.where(found.risky.sum(axis=1) >= s.at_risk_windows, AT_RISK, OK).astype(np.int8)
        broken = self.broken[rows]
        code[broken & ((over > 0) | (self.u[rows] >= s.at_risk_u))] = VIOLATING
        code[over >= s.at_risk_windows] = VIOLATING
        code[~found.applies] = NOT_APPLICABLE
        code[~found.inside] = OUT_OF_CURVE
        code[~known] = np.where(broken[~known], VIOLATING, NO_DATA)
        code[idle] = IDLE
        code[self.excluded[rows]] = EXCLUDED
        return code

    def _verdict(self, rows: Ints) -> _Verdict:
        s, count, ages = self.settings, self.count[rows], np.arange(self.depth)
        slots = rows[:, None] * self.depth + ((self.pos[rows] - count)[:, None] + ages) % self.depth
        valid = ages < count[:, None]
        offered = (self.w_iops[slots] * valid).sum(axis=1) / np.maximum(count, 1)
        fits = offered[:, None] <= self.up_to[rows]
        step = fits.argmax(axis=1)
        threshold_us, allowed, r_on = self.threshold_us[rows, step], self.allowed[rows], self.r_on[rows]
        missed, counted = self.w_missed[slots, step[:, None]], self.w_counted[slots, step[:, None]]
        limit_us = threshold_us[:, None]
        stalled = (self.w_stall_us[slots] > limit_us) & valid
        stall_r = np.where(stalled, self.w_stall_us[slots], 0.0) / limit_us

        def u_of(missed: Floats) -> Floats:
            u: Floats = missed / np.maximum(counted, 1) / allowed[:, None]
            return u

        def risky(missed: Floats, r: Floats) -> Bools:
            found: Bools = ((u_of(missed) >= s.at_risk_u) | (r >= r_on[:, None]) | stalled) & valid
            return found

        sure_r = np.maximum(self.w_sure[slots] / limit_us, stall_r)
        left_out = self.w_excused[slots] + self.w_failed[slots]
        sure = risky(np.maximum(missed - left_out, 0.0), sure_r)
        every, newest = np.arange(len(rows)), np.maximum(count - 1, 0)
        falls = sure_r[every, newest] <= s.falling_ratio * sure_r[every, newest - 1]
        enough = sure.sum(axis=1) >= s.at_risk_windows
        mix = (self.w_mix[slots] * valid[:, :, None]).sum(axis=1)
        ios = np.maximum(mix[:, 0], 1)
        applies = (offered >= self.least_iops[rows]) & (mix[:, 2] <= self.most_bytes[rows] * ios)
        applies &= mix[:, 1] >= self.least_reads[rows] * mix[:, 0]
        applies |= stalled.any(axis=1) | ((self.w_failed[slots] > 0) & valid).any(axis=1) | (count == 0)
        return _Verdict(
            slots,
            valid,
            count,
            offered,
            fits.any(axis=1),
            applies,
            threshold_us,
            allowed,
            missed,
            counted,
            risky(missed, np.maximum(self.w_latency[slots] / limit_us, stall_r)),
            ((u_of(missed) > 1) | stalled) & valid,
            stalled,
            sure_r,
            enough & sure[every, newest] & ~(falls & (count > 1)),
        )

    def signal(self, row: int) -> Signal:
        """All that the closed windows of one row say."""
        count = int(self.count[row])
        if not count:
            return NOTHING
        found, promise = self._verdict(np.array([row])), self.promises[row]
        offered = float(found.offered[0])
        if promise is None or not found.inside[0]:
            return Signal(count, offered, None, 0.0, 0.0, 0.0, 0, 0, False)
        counted = max(float(found.counted[0, :count].sum()), 1.0)
        threshold_us, slots = int(found.threshold_us[0]), found.slots[0, :count]
        together = self._figures(found, slots, np.arange(count))
        over = np.flatnonzero(found.over[0])
        least = self.settings.at_risk_windows
        return Signal(
            windows=count,
            offered_iops=offered,
            threshold_us=threshold_us,
            u=together.u,
            r=together.latency_us / threshold_us,
            latency_us=together.latency_us,
            risky=int(found.risky.sum()),
            over=len(over),
            inexact=bool(self.w_inexact[slots].any()),
            of_over=self._figures(found, slots, over) if len(over) else NO_FIGURES,
            at_risk=bool(found.at_risk[0]),
            r_step=float(np.sort(found.sure_r[0, :count])[-least]) if count >= least else 0.0,
            excused_ratio=float(self.w_excused[slots].sum() / counted),
            stalled=int(found.stalled.sum()),
            stall_us=float(self.w_stall_us[slots[found.stalled[0, :count]]][-1:].sum()),
            failed_ratio=float(self.w_failed[slots].sum() / counted),
            applies=bool(found.applies[0]),
        )

    def _figures(self, found: _Verdict, slots: Ints, ages: Ints) -> Figures:
        """What the windows of these ages say together, of a verdict on one row stored at ``slots``."""
        hist = self.w_hist[slots[ages]].sum(axis=0)[None]
        percentile = self.percentile[slots[:1] // self.depth]
        counted, stalled = found.counted[0, ages].sum(), found.stalled[0, ages]
        ratio = found.missed[0, ages].sum() / counted if counted else float(stalled.any())
        offered = self.w_iops[slots[ages]].sum() / len(ages)
        latency_us = float(percentiles_us(hist, percentile)[0])
        if stalled.any():  # what is outstanding is at least as slow as that
            latency_us = max(latency_us, float(self.w_stall_us[slots[ages[stalled]]].max()))
        return Figures(float(ratio / found.allowed[0]), latency_us, float(offered))


class SignalRow:
    """One row of the table; its signal is worked out once for each change of the windows."""

    __slots__ = ("_known", "_table", "row")

    def __init__(self, table: SignalTable, row: int) -> None:
        self._table, self.row = table, row
        self._known: tuple[int, Signal] | None = None

    @property
    def last_piece_ns(self) -> int | None:
        """When the last piece came, whether or not it was of use."""
        last_ns = int(self._table.last_ns[self.row])
        return None if last_ns == NEVER else last_ns

    @property
    def is_excluded(self) -> bool:
        """Whether nothing is promised at present."""
        return bool(self._table.excluded[self.row])

    @property
    def idle(self) -> bool:
        """See ``SignalTable.idle``."""
        return bool(self._table.idle(np.array([self.row]))[0])

    def reset(self) -> None:
        """Forget all windows: caps have changed."""
        self._table.reset(np.array([self.row]))

    def signal(self) -> Signal:
        """What the closed windows say."""
        version = int(self._table.version[self.row])
        if self._known is None or self._known[0] != version:
            self._known = (version, self._table.signal(self.row))
        return self._known[1]


def _mix_of(pieces: Pieces, pick: Ints) -> Floats:
    return np.stack((pieces.completed[pick], pieces.reads[pick], pieces.size_bytes[pick]), axis=1)


def _running(values: npt.NDArray[Any], first: Ints, run: Ints) -> Floats:
    """Sums from the beginning of each run to each of its pieces."""
    total = np.cumsum(values, dtype=np.float64)
    before = np.concatenate((np.zeros(1), total))[first]
    running: Floats = total - before[run]
    return running
