"""Windows of promises: pieces merged, the last few kept, in arrays.

A *window* merges pieces (``pieces``) until it holds enough I/Os (``enough``) and every gateway in scope that
still reports has spoken, or until one of them has covered ``window_max_s``. The last three windows are kept.
For control they are emptied when caps change and fed again only with cuts that began under them, so that what
they say is always about the caps in force (SLA-MODEL.md 3, "Signal").

Storage that hangs counts nothing more. So a window in which nothing completed while an I/O was outstanding
all through it, and for longer than the threshold, is *stalled*: it breaks the promise whatever was counted,
and closes at once. So does, of what people see, one in which one stream completed nothing for ``hung_us``
(``promise_terms``), over clients that give up and come again, whatever others completed. That one closes
with the second piece that says so: cuts of the other streams may be kept apart.
An I/O that hung already while others completed stalls no window before nothing has completed for ``lost_us``.

A pause (``idle``) empties the windows. What people see does not pause while an I/O is in no closed window,
and keeps the newest one if it was broken (``kept``): that counts again with the next one.

State of ``WindowTable``, all of it in arrays that grow by doubling:

    rows       a promise on one backend, or over all of them; numbered by ``signal``
      w_*      a ring of ``depth`` closed windows at [place * rows + row]: what is of one age lies together;
               ``count`` of them are filled, the next goes to place ``pos``
      o_*      sums of the open window; they hold only while a member has covered something
      times    first, last and last active piece, monotonic ns, NEVER before the first. Of what people see a
               window that closes is activity, too
      pending  the open window has something to count
      kept     how many of its windows are of before a pause
      fed      whether there was news since the last look at the row; version: changes of its windows
    members    one gateway of a row: what pieces are fed to. A row begins with one, ``member``; of a row with
               several, ``_shared`` lists all. ``m_covered`` and ``m_offered`` belong to the open window
               (gateways run side by side, so rates are sums of theirs); covered 0: has not spoken in it.
               ``m_end_us`` is the end of its last piece by the agent's clock, ``m_new_us`` how much of that
               piece's time was in none before; ``m_stall_us`` for how long nothing has completed though I/Os
               were outstanding, ``m_unsure`` that it may be longer, for its beginning was not seen;
               ``m_stuck``: I/Os stuck, at most in the present slice (``slice_sums``);
               ``m_aged_us``: age of the oldest I/O outstanding that its pieces have counted, of a mean
               latency, and ``m_aged``, for how many it counts;
               ``m_measures``: its source measures what is promised, so windows wait for it,
               unless it is ``m_mute``: its gateway's cuts have said nothing of its streams for a while;
               ``m_lacks``: the newest said nothing of some of them, whose data plane has stopped;
               ``m_blind_ns``: when one came that has I/O of streams that its source cannot measure
    gateways   when each spoke last, and whether it is up
    used       buckets that some piece ever had I/Os in: the histograms have these alone

``slices`` has what the slices of rows say (``slice_sums``).

Shapes: (rows,), (depth * rows, ...); histograms (.., buckets used) int32. Pure: no clock; times are the
caller's monotonic nanoseconds. Changed only by the controller's one thread.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sla_server.services.control.enough import has_enough, late_in_runs, sums_have_enough
from sla_server.services.control.pieces import (
    MIX,
    Bools,
    Floats,
    Ints,
    Pick,
    Pieces,
    PieceSums,
    evenly,
    join_used,
    mix_of,
    percentiles_us,
    placed,
    running_sums,
)
from sla_server.services.control.promise_terms import PromiseTerms, arrays_of, copy_arrays
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.slice_sums import SliceSums
from sla_server.services.control.stalls import stall_us_of

NEVER: Final = -(1 << 62)
RETIRED_S: Final = 86_400.0
"""As in ``judging.track``: slices are judged without a gateway that is silent for longer, likewise."""
_FIRST: Final = 64


class WindowTable:
    """See the module. ``terms``: what the promise of each row asks."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.depth = settings.signal_windows
        self.terms = PromiseTerms(_FIRST)
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
        self.m_end_us, self.m_new_us = np.full(_FIRST, NEVER, np.int64), np.zeros(_FIRST, np.int64)
        self.m_stall_us = np.zeros(_FIRST)
        self.m_aged_us, self.m_aged, self.m_stuck = np.zeros(_FIRST), np.zeros(_FIRST), np.zeros(_FIRST)
        self.m_measures, self.m_mute = np.ones(_FIRST, np.bool_), np.zeros(_FIRST, np.bool_)
        self.m_unsure, self.m_lacks = np.ones(_FIRST, np.bool_), np.zeros(_FIRST, np.bool_)
        self.m_fed_ns, self.m_blind_ns = np.full(_FIRST, NEVER, np.int64), np.full(_FIRST, NEVER, np.int64)
        self.used = slice(0, 0)
        self._make_rows(_FIRST)
        self.slices = SliceSums(self.terms)

    def _make_rows(self, rows: int) -> None:
        depth, steps = self.depth, self.terms.steps
        self.member = np.zeros(rows, np.int64)
        self.several = np.zeros(rows, np.bool_)
        self.pos = np.zeros(rows, np.int64)
        self.count = np.zeros(rows, np.int64)
        self.kept, self.pending = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
        self.version = np.zeros(rows, np.int64)
        self.fed = np.zeros(rows, np.bool_)
        self.first_ns = np.full(rows, NEVER, np.int64)
        self.last_ns = np.full(rows, NEVER, np.int64)
        self.active_ns = np.full(rows, NEVER, np.int64)
        self.o_mix, self.w_mix = np.zeros((MIX, rows)), np.zeros((MIX, rows * depth))
        self.o_done, self.o_failed, self.o_stall_us = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self.o_counted, self.o_missed = np.zeros((rows, steps)), np.zeros((rows, steps))
        buckets = self.used.stop - self.used.start
        self.o_hist = np.zeros((rows, buckets), np.int32)
        self.o_inexact, self.o_excused = np.zeros(rows, np.bool_), np.zeros(rows)
        self.w_iops, self.w_latency = np.zeros(rows * depth), np.zeros(rows * depth)
        self.w_done, self.w_failed = np.zeros(rows * depth), np.zeros(rows * depth)
        self.w_counted = np.ones((rows * depth, steps))
        self.w_missed = np.zeros((rows * depth, steps))
        self.w_stall_us = np.zeros(rows * depth)
        self.w_hist = np.zeros((rows * depth, buckets), np.int32)
        self.w_inexact, self.w_excused = np.zeros(rows * depth, np.bool_), np.zeros(rows * depth)
        self.w_sure = np.zeros(rows * depth)  # as w_latency, without the I/Os excused, where there are any
        self.w_flawed = np.zeros(rows * depth, np.bool_)  # of others w_failed, w_stall_us, w_excused are 0

    @property
    def steps(self) -> int:
        """Steps of the longest demand curve: the columns of ``counted`` and ``missed``."""
        return self.terms.steps

    def grow(self, rows: int, steps: int) -> None:
        """Room for more rows, or for longer curves."""
        old = arrays_of(self)
        self.terms.grow(rows, steps)
        self._make_rows(rows)
        copy_arrays({name: old[name] for name in old if not name.startswith(("g_", "m_", "w_"))}, self)
        for name in [name for name in old if name.startswith("w_")]:
            axis = 1 if name == "w_mix" else 0
            parts = np.split(old[name], self.depth, axis), np.split(getattr(self, name), self.depth, axis)
            for part, into in zip(*parts, strict=True):
                into[tuple(slice(size) for size in part.shape)] = part
        self.slices.grow()

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

    # Rows and their members.

    def open(self, row: int, gateway_id: str) -> None:
        """A row begins, empty, with its first gateway."""
        self.first_ns[row] = self.last_ns[row] = self.active_ns[row] = NEVER
        self.member[row] = self._allot_member(row, gateway_id)
        self.reset(np.array([row]))
        self.slices.forget(np.array([row]))

    def _allot_member(self, row: int, gateway_id: str) -> int:
        if self._free_members:
            member = self._free_members.pop()
        else:
            member, self._members = self._members, self._members + 1
            if member == len(self.m_row):
                for name in [name for name in arrays_of(self) if name.startswith("m_")]:
                    value = getattr(self, name)
                    setattr(self, name, np.concatenate((value, np.zeros_like(value))))
        self.m_row[member], self.m_gateway[member] = row, self.gateway(gateway_id)
        self.m_covered[member] = self.m_stall_us[member] = self.m_aged_us[member] = 0
        self.m_end_us[member], self.m_measures[member] = NEVER, True
        self.m_fed_ns[member], self.m_mute[member], self.m_unsure[member] = NEVER, False, True
        self.m_lacks[member], self.m_stuck[member], self.m_blind_ns[member] = False, 0.0, NEVER
        return member

    def join(self, row: int, gateway_id: str) -> int:
        """The promise of a row reaches one more gateway; the member to feed its pieces to."""
        member = self._allot_member(row, gateway_id)
        self.m_fed_ns[member] = self.last_ns[row]  # it has as long to speak as one that just did
        self._shared[row] = np.append(self._shared.get(row, self.member[row]), member)
        self.several[row] = True
        return member

    def close(self, row: int) -> None:
        """No scope needs the row any more."""
        self._free_members += self._shared.pop(row, self.member[row : row + 1]).tolist()
        self.several[row] = self.fed[row] = False
        self.last_ns[row], self.count[row] = NEVER, 0

    def reset(self, rows: Ints) -> None:
        """Forget windows, closed and open; the times stay."""
        self.count[rows] = self.pos[rows] = self.m_covered[self.member[rows]] = self.kept[rows] = 0
        self.pending[rows] = False
        for members in self._shared_of(rows):
            self.m_covered[members] = 0
        self.fed[rows] = True
        self.version[rows] += 1

    def forget_closed(self, rows: Ints, but_newest: Bools) -> None:
        """Forget all closed windows, of some of the rows but the newest."""
        self.count[rows] = self.kept[rows] = but_newest
        self.fed[rows] = True
        self.version[rows] += 1

    def _shared_of(self, rows: Ints) -> list[Ints]:
        """Members of those of ``rows`` that have several."""
        if not self._shared:
            return []
        return [self._shared[row] for row in rows[self.several[rows]].tolist()]

    def measures(self, row: int) -> bool:
        """Whether the source of some member measures what is promised."""
        members = self._shared.get(row)
        return bool(self.m_measures[self.member[row] if members is None else members].any())

    # Feeding.

    def record_activity(self, members: Ints, pick: Pick, pieces: Pieces) -> None:
        """Remember only that there was, or was no, I/O; ``members`` are distinct, fed ``pieces[pick]``."""
        rows, now_ns = self.m_row[members], pieces.now_ns[pick]
        at, of = evenly(members), evenly(rows)
        self.m_fed_ns[at], self.m_mute[at] = now_ns, False
        self.m_lacks[at] = pieces.lacks[pick]
        # A row may be named several times, in the order of the cuts: of each assignment the last one holds.
        self.last_ns[of] = now_ns
        begins = np.flatnonzero(self.first_ns[of] == NEVER)[::-1]
        self.first_ns[rows[begins]] = now_ns[begins]
        active = (pieces.offered[pick] > 0) | (pieces.done[pick] > 0) | (pieces.waiting[pick] > 0)
        active |= pieces.counted[pick, 0] > 0
        # Clients that are refused have no I/O; of what people see they are no pause.
        active |= (pieces.silence_us[pick] > 0) & (self.terms.hung_us[of] < np.inf)
        self.active_ns[rows[active]] = now_ns[active]
        self.fed[of] = True
        # A cut may reach into the time of one before it (of another plane, or a late one): that is not new.
        span_us, end_us, former_us = pieces.covered_us[pick], pieces.end_us[pick], self.m_end_us[at]
        is_put_back = former_us - end_us > span_us  # the agent's clock
        new_us = np.where(is_put_back, span_us, np.minimum(np.maximum(end_us - former_us, 0), span_us))
        self.m_new_us[at] = new_us
        self.m_end_us[at] = np.where(is_put_back, end_us, np.maximum(end_us, former_us))
        self.m_stall_us[at] = (self.m_stall_us[at] + new_us) * pieces.is_stuck[pick]
        self.m_unsure[at] &= pieces.is_stuck[pick]
        self.m_measures[members[pieces.done[pick] > 0]] = True

    def pass_over(self, members: Ints, now_ns: Ints) -> None:
        """Cuts that came at ``now_ns`` say nothing of the streams of these members: planes have stopped."""
        silent_ns = now_ns - self.m_fed_ns[members]
        self.m_mute[members] = silent_ns > self.settings.stale_s * 1e9

    def record_blind(self, members: Ints, now_ns: int) -> None:
        """A cut has I/O of streams that cannot be measured for the promises of these members."""
        self.m_blind_ns[members] = now_ns
        self.fed[self.m_row[members]] = True

    def is_blind(self, member: int, now_ns: int) -> bool:
        """Whether there was such I/O recently."""
        return bool(now_ns - self.m_blind_ns[member] <= self.settings.silent_s * 1e9)

    def add_to_slices(self, members: Ints, start_us: Ints, lines: Ints, pieces: Pieces) -> None:
        """Count pieces ``lines`` in the slices that people see; what they say is then of new I/Os only.

        Args:
            members: distinct, to be fed these pieces.
            start_us: when each piece began, server's clock.
            lines: which pieces.
            pieces: of a mean latency, what was counted before of I/Os outstanding is taken off.
        """
        rows = self.m_row[members]
        if len(rolled := self.slices.rolls(rows, start_us)):
            self._begin_slices(rolled)
        self._count_once(members, lines, pieces)
        more = np.maximum(pieces.stuck[lines] - self.m_stuck[members], 0.0)
        more *= self.slices.belong(rows, start_us)
        self.m_stuck[members] += more
        self.slices.add(rows, start_us, lines, pieces, more)

    def _begin_slices(self, rows: Ints) -> None:
        for members in (self.member[rows], *self._shared_of(rows)):
            self.m_stuck[members] = 0.0
        for row in rows[self.terms.is_mean[rows]].tolist():
            everyone = self._shared.get(row, self.member[row : row + 1])
            self.slices.carry(row, *(part.sum(axis=0) for part in self._aged(everyone)))

    def _aged(self, members: Ints) -> tuple[Floats, Floats]:
        """What was counted of I/Os outstanding, and what they added to the misses; shape (members, steps)."""
        limit_us, age_us = self.terms.threshold_us[self.m_row[members]], self.m_aged_us[members, None]
        counted = (age_us > limit_us) * self.m_aged[members, None]
        return counted, counted * age_us / limit_us

    def _count_once(self, members: Ints, lines: Ints, pieces: Pieces) -> None:
        """Of a mean latency an I/O counts once, as in slices: with its age, and then with its latency.

        A piece has the whole of it each time. Only what was added since the piece before is left.
        """
        at = np.flatnonzero(self.terms.is_mean[self.m_row[members]])
        if not len(at):
            return
        members, lines = members[at], lines[at]
        counted, missed = self._aged(members)
        pieces.counted[lines] = np.maximum(pieces.counted[lines] - counted, 0.0)
        pieces.missed[lines] = np.maximum(pieces.missed[lines] - missed, 0.0)
        self.m_aged_us[members], self.m_aged[members] = pieces.oldest_us[lines], pieces.stuck[lines]

    def resync(self, members: Ints) -> None:
        """A cut of the gateway of these members was not seen: in that time I/O may have completed."""
        self.m_stall_us[members], self.m_unsure[members] = 0.0, True

    def add(self, members: Ints, pick: Pick, pieces: Pieces) -> None:
        """Take one piece a member, in the order of the cuts; they are distinct, fed ``pieces[pick]``."""
        self.record_activity(members, pick, pieces)
        self._align(pieces)
        rows = self.m_row[members]
        if self._shared:
            shared = self.several[rows]
            if shared.any():
                pick = np.arange(len(rows)) if isinstance(pick, slice) else pick
                self._add_shared(members[shared], rows[shared], pick[shared], pieces)
                members, rows, pick = members[~shared], rows[~shared], pick[~shared]
        if len(rows):
            self._add_alone(members, rows, pick, pieces)

    def _align(self, pieces: Pieces) -> None:
        """Histograms of windows and pieces have the same buckets from now on."""
        used = join_used(self.used, pieces.used)
        self.w_hist, self.o_hist = (placed(hist, self.used, used) for hist in (self.w_hist, self.o_hist))
        pieces.hist = placed(pieces.hist, pieces.used, used)
        self.used = pieces.used = used

    def _add_alone(self, members: Ints, rows: Ints, pick: Pick, pieces: Pieces) -> None:
        """Rows with one member, each with one piece."""
        opened = np.flatnonzero(self.m_covered[evenly(members)])
        covered, offered = pieces.covered_us[pick], pieces.offered[pick] + pieces.carried[pick]
        if len(opened):
            covered, offered = self._span_with(members, pick, pieces)
        stall_us, is_long = stall_us_of(self, members, pick, pieces)
        sums = PieceSums(
            pieces.done[pick],
            mix_of(pieces, pick),
            pieces.counted[pick],
            pieces.missed[pick],
            pieces.failed[pick],
            stall_us,
            pieces.hist[pick],
            pieces.inexact[pick],
            pieces.excused[pick],
            pieces.latency_us[pick],
        )
        if len(opened):
            sums = sums.copied() if isinstance(pick, slice) else sums
            self._add_open(sums, opened, rows[opened])
        closes = sums_have_enough(self, rows, covered, sums)
        closes |= is_long | (covered >= self.settings.window_max_s * 1e6)
        if len(opened) and sums.stall_us.any():
            hung_us = self.terms.hung_us[rows]
            was_hung = (self.m_covered[members] > 0) & (self.o_stall_us[rows] >= hung_us)
            closes |= (sums.stall_us >= hung_us) & was_hung
        if not closes.all():
            stays = np.flatnonzero(~closes)
            into = members[stays]
            self.m_covered[into], self.m_offered[into] = covered[stays], offered[stays]
            self._keep_open(rows[stays], sums.at(stays))
        if len(opened):
            self.m_covered[members[opened[closes[opened]]]] = 0
        self._push(rows, offered * 1e6 / covered, sums, closes)

    def _span_with(self, members: Ints, pick: Pick, pieces: Pieces) -> tuple[Ints, Floats]:
        """What the open window of each member covers with its piece, and the I/Os offered in that time."""
        opened, span_us = self.m_covered[members] > 0, pieces.covered_us[pick]
        longer_us = self.m_covered[members] + self.m_new_us[members]
        covered = np.where(opened, np.maximum(longer_us, span_us * pieces.is_present[pick]), span_us)
        former = np.where(opened, self.m_offered[members], pieces.carried[pick])
        return covered, pieces.offered[pick] + former

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
        silent = self._speaking(everyone, newest_ns[owner]) & ~spoken & self.m_measures[everyone]
        opened = np.bincount(owner, spoken, len(rows)) > 0
        new = self._speaking(members, newest_ns[run]) & (self.m_covered[members] == 0)
        new &= self.m_measures[members]
        awaited = np.bincount(owner, silent, len(rows))[run] - running_sums(new, first, run)
        covered, offered = self._span_with(members, pick, pieces)
        counted = running_sums(pieces.counted[pick, 0], first, run)
        counted += np.where(opened, self.o_counted[rows, 0], 0.0)[run]
        stall_us, is_long = stall_us_of(self, members, pick, pieces)
        s, at = self.settings, np.arange(len(run))
        done = running_sums(pieces.done[pick], first, run) + np.where(opened, self.o_done[rows], 0.0)[run]
        hangs = is_long & ((done == 0) | self.terms.is_outage[rows][run])
        is_hung = stall_us >= self.terms.hung_us[rows][run]
        if is_hung.any():
            was_hung = opened & (self.o_stall_us[rows] >= self.terms.hung_us[rows])
            hangs |= is_hung & (running_sums(is_hung, first, run) + was_hung[run] > 1)
        late, failed = late_in_runs(self, rows, pick, first, run, opened, pieces)
        enough = has_enough(self, rows[run], covered, counted, late, failed) | hangs
        full = (enough & (awaited <= 0)) | (covered >= s.window_max_s * 1e6)
        end = np.minimum.reduceat(np.where(full, at, len(at)), first)
        closes = end < len(at)
        taken = at <= end[run]
        into = members[taken]
        self.m_offered[into], self.m_covered[into] = offered[taken], covered[taken]
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

    def _sums_of(self, rows: Ints, pick: Ints, first: Ints, stall_us: Floats, pieces: Pieces) -> PieceSums:
        """Pieces summed by run: the run of each of ``rows`` begins at ``pick[first]``."""
        hist = np.add.reduceat(pieces.hist[pick], first, axis=0)
        return PieceSums(
            np.add.reduceat(pieces.done[pick], first),
            np.add.reduceat(mix_of(pieces, pick), first, axis=1),
            np.add.reduceat(pieces.counted[pick], first, axis=0),
            np.add.reduceat(pieces.missed[pick], first, axis=0),
            np.add.reduceat(pieces.failed[pick], first),
            np.maximum.reduceat(stall_us, first),
            hist,
            np.logical_or.reduceat(pieces.inexact[pick], first),
            np.add.reduceat(pieces.excused[pick], first),
            percentiles_us(hist, self.terms.percentile[rows], self.used),
        )

    def _members_of(self, rows: Ints) -> tuple[Ints, Ints]:
        """All members of these rows, which have several; and of each the index of its row."""
        found = self._shared_of(rows)
        return np.concatenate(found), np.repeat(np.arange(len(found)), [len(each) for each in found])

    def _speaking(self, members: Ints, now_ns: Ints) -> Bools:
        """Whether the gateway of each member is up and its last cut is not too old to be waited for."""
        gateways = self.m_gateway[members]
        fresh: Bools = now_ns - self.g_spoke_ns[gateways] <= self.settings.stale_s * 1e9
        return fresh & self.g_up[gateways] & ~self.m_mute[members]

    def _add_open(self, sums: PieceSums, at: Ints, rows: Ints) -> None:
        """Add the open windows of ``rows`` to ``sums`` at ``at``."""
        sums.done[at] += self.o_done[rows]
        sums.mix[:, at] += self.o_mix[:, rows]
        sums.counted[at] += self.o_counted[rows]
        sums.missed[at] += self.o_missed[rows]
        sums.failed[at] += self.o_failed[rows]
        sums.stall_us[at] = np.maximum(sums.stall_us[at], self.o_stall_us[rows])
        sums.hist[at] += self.o_hist[rows]
        sums.inexact[at] |= self.o_inexact[rows]
        sums.excused[at] += self.o_excused[rows]
        sums.latency_us[at] = percentiles_us(sums.hist[at], self.terms.percentile[rows], self.used)

    def _keep_open(self, rows: Ints, sums: PieceSums) -> None:
        self.o_mix[:, rows] = sums.mix
        self.o_done[rows], self.o_counted[rows], self.o_missed[rows] = sums.done, sums.counted, sums.missed
        self.o_failed[rows], self.o_stall_us[rows], self.o_hist[rows] = sums.failed, sums.stall_us, sums.hist
        self.o_inexact[rows], self.o_excused[rows] = sums.inexact, sums.excused
        self.pending[rows] = (sums.counted[:, 0] > 0) | (sums.missed[:, 0] > 0) | (sums.stall_us > 0)

    def _push(self, rows: Ints, iops: Floats, sums: PieceSums, closes: Bools) -> None:
        """The windows that close, unless they are empty, become the newest of their rows."""
        # Nothing completed in all of the window: one gateway of several that hangs briefly is in the counts.
        of, stall_us = evenly(rows), sums.stall_us
        if stall_us.any():
            counts = (sums.done == 0) | self.terms.is_outage[of] | (stall_us >= self.terms.hung_us[of])
            stall_us = np.where(counts, stall_us, 0.0)
        says_something = (sums.counted[:, 0] > 0) | (sums.missed[:, 0] > 0) | (stall_us > 0)
        push = closes & says_something
        self.pending[rows[closes]] = False
        # There was I/O, and all of it failed and is excluded: windows of before say nothing of now.
        self.reset(rows[closes & ~says_something & (sums.done > 0)])
        if not push.all():
            rows, iops, sums, stall_us = rows[push], iops[push], sums.at(push), stall_us[push]
            of = evenly(rows)
        shown = rows[self.terms.remember_us[of] > 0]
        self.active_ns[shown] = self.last_ns[shown]
        slots = self.pos[of] * len(self.pos) + rows
        slot = evenly(slots)
        self.w_iops[slot], self.w_done[slot] = np.maximum(iops, 0.0), sums.done
        for into, part in zip(self.w_mix, sums.mix, strict=True):
            into[slot] = part
        for step in range(self.steps):  # with one index numpy writes five times as fast as with two
            self.w_counted[:, step][slot] = sums.counted[:, step]
            self.w_missed[:, step][slot] = sums.missed[:, step]
        self.w_hist[slot] = sums.hist
        self.w_inexact[slot], self.w_latency[slot] = sums.inexact, sums.latency_us
        flawed = (sums.failed > 0) | (stall_us > 0) | (sums.excused > 0)
        at = np.flatnonzero(flawed | self.w_flawed[slot])
        self.w_flawed[slot], changed = flawed, slots[at]
        self.w_failed[changed], self.w_stall_us[changed] = sums.failed[at], stall_us[at]
        self.w_excused[changed] = sums.excused[at]
        excused = np.flatnonzero(sums.excused)
        if len(excused):
            ratio = sums.excused[excused] / np.maximum(sums.done[excused], 1)
            percentile = self.terms.percentile[rows[excused]] * (1 - ratio)
            self.w_sure[slots[excused]] = percentiles_us(sums.hist[excused], percentile, self.used)
        after = self.pos[of] + 1  # no remainders: they take three times as long
        self.pos[of] = np.where(after == self.depth, 0, after)
        self.count[of] = np.minimum(self.count[of] + 1, self.depth)
        self.version[of] += 1

    # What is known.

    def is_partial(self, rows: Ints, of: Pick, now_ns: int, silent_s: float) -> Bools:
        """Whether nothing is known of some streams of rows: a gateway is silent, or a plane has stopped.

        Of a gateway whose source cannot measure what is promised nothing is expected, but what it counts says
        that there is I/O of which nothing is known. Nor is it of one that is silent for ``RETIRED_S`` while
        others speak: its volumes have moved. ``of``: as in ``slots``.
        """
        found = self._says_little(self.member[of], now_ns, silent_s)
        shared = np.flatnonzero(self.several[of])
        if len(shared):
            everyone, owner = self._members_of(rows[shared])
            little = self._says_little(everyone, now_ns, silent_s)
            found[shared] = np.bincount(owner, little, len(shared)) > 0
        return found

    def _says_little(self, members: Ints, now_ns: int, silent_s: float) -> Bools:
        """Of some members; one that was never fed is as old as its row."""
        rows = self.m_row[members]
        silent_ns = now_ns - np.maximum(self.m_fed_ns[members], self.first_ns[rows])
        found: Bools = self.m_lacks[members] | (silent_ns > silent_s * 1e9)
        if found.any():
            found &= (silent_ns <= RETIRED_S * 1e9) & self.m_measures[members]
            found &= self.first_ns[rows] != NEVER
        found |= now_ns - self.m_blind_ns[members] <= silent_s * 1e9
        return found

    def spoke_since(self, row: int, since_ns: int) -> bool:
        """Whether each member of a row was fed since then, of those of which something is expected."""
        members = self._shared.get(row, self.member[row : row + 1])
        silent_ns = self.last_ns[row] - self.m_fed_ns[members]
        is_awaited = self.m_measures[members] & (silent_ns <= RETIRED_S * 1e9)
        return bool((self.m_fed_ns[members[is_awaited]] >= since_ns).all())

    # What is kept.

    def slots(self, rows: Ints, of: Pick) -> tuple[Ints, Bools]:
        """Where the windows of these rows are kept, oldest first, and whether there is one at all.

        Both of shape (depth, rows). ``of``: ``rows``, or a slice of the same.
        """
        count, ages = self.count[of], np.arange(self.depth)[:, None]
        place = self.pos[of] - count + ages
        place += self.depth * (place < 0)
        place -= self.depth * (place >= self.depth)
        return place * len(self.pos) + rows, ages < count

    def idle(self, rows: Pick) -> Bools:
        """Whether cuts arrive and none had I/O for ``idle_release_s``. No cuts are no idleness.

        Nor is it idle as long as people have yet to see what its last I/Os say.
        """
        active_ns, first_ns = self.active_ns[rows], self.first_ns[rows]
        quiet_ns = self.last_ns[rows] - np.where(active_ns == NEVER, first_ns, active_ns)
        idle: Bools = (first_ns != NEVER) & (quiet_ns >= self.settings.idle_release_s * 1e9)
        waits: Bools = self.pending[rows] & (self.terms.remember_us[rows] > 0)
        return idle & ~waits
