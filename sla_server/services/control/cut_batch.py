"""Cuts: checked when their message comes, kept until there are many, and entered as a batch.

``read_cuts`` takes the cuts out of a message and checks their columns all at once: to look at each cut by
itself takes as long as to decode it, of forty joined a third. Only if something is wrong anywhere is each
looked at, since the others are other gateways'.

``CutIntake`` keeps them and enters them in the order they came, with the same result as one after another:
what depends on the order (who spoke when, which caps a cut confirms, which gates are shut at that moment) is
done one by one, and a batch ends before a second cut of a gateway, and before one that makes a gateway known
or brings it back.

``CutBatch`` sums the use of every volume and the pieces of every promise in whole arrays. Which rows of a cut
belong to which lines and places does not change while a gateway reports the same streams in the same order:
that is its ``RowPlan`` (``scopes``). A batch is concatenated plans and cuts, and a few sums over them.

A cut is a view into its message: messages must be taken as copies (``Mailbox.take``), since a view of shared
memory would be overwritten while the cut waits. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL, FAILED, IO_READ, IO_WRITE, OUTSTANDING, OVERDUE, Cut, parse_late
from pmdaemon.wire.histogram import BUCKETS, EDGES_NS, TOTAL_WRITE
from pmdaemon.wire.messages.base import count
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.pieces import Bools, Floats, Ints, Pieces, percentiles_us
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import NO_MEMBER, PromiseScopes, RowPlan
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.usage import GatewayTable, UsageTable

MOST_CUTS: Final = 256
"""Of one batch, and that wait: some 20 ms of work at 16 streams, between two reads of the mailbox."""
_TOTALS: Final = TOTAL_WRITE + BUCKETS
_PIECE: Final = np.array(
    [
        COL[name]
        for name in (
            "reads",
            "writes",
            "arrived",
            "held",
            "inflight",
            "errors",
            "read_bytes",
            "write_bytes",
        )
    ]
)
_EVERY: Final = np.arange(BUCKETS)
NO_LINE: Final = -1

Place = tuple[int, Cut]
"""Position in the message, and the cut."""


def read_cuts(message: frame.Frame, on_bad: Callable[[BadCut], None]) -> list[Place]:
    """The cuts of a message that can be true, in order; the others are reported to ``on_bad``.

    Raises:
        WireError: the message holds fewer frames than it says, or does not say how many.
    """
    end = _frames_end(message.blob, count(message.header, "n"))
    found: list[Place] = []
    for position, raw in enumerate(frame.split(message.blob[:end])):
        try:
            found.append((position, cuts.view(raw)))
        except BadCut as exc:
            on_bad(exc)
    if cuts.are_sound([cut for _, cut in found]):
        return found
    sound: list[Place] = []
    for position, cut in found:
        problem = cuts.fault_of(cut)
        if problem is None:
            sound.append((position, cut))
        else:
            on_bad(BadCut(problem))
    return sound


def _frames_end(blob: memoryview, announced: int) -> int:
    """Where the last of ``count`` frames ends; a blob is padded to a multiple of 8, and so are frames."""
    end = 0
    for _ in range(announced):
        size = frame.peek_size(blob[end:])
        if size is None:
            raise WireError(f"CUTS announces {announced} cuts, its blob holds fewer")
        end += size
    return end


@dataclass(frozen=True, slots=True)
class Taken:
    """One accepted cut and its gateway's plan; ``excused_ratio``: see ``signal``."""

    cut: Cut
    table: GatewayTable
    plan: RowPlan
    now_ns: int
    excused_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    cut: Cut
    recv_us: int
    offset_us: int
    now_ns: int


class CutIntake:
    """See the module. ``unix_us``: the newest time of receipt."""

    def __init__(
        self,
        settings: ControlSettings,
        scopes: PromiseScopes,
        policy: PolicyManager,
        tables: dict[str, GatewayTable],
        controls: Mapping[str, BackendControl],
        usage_table: UsageTable,
    ) -> None:
        self.unix_us = 0
        self._settings = settings
        self._scopes, self._policy, self._usage = scopes, policy, usage_table
        self._tables, self._controls = tables, controls
        self._waiting: list[_Waiting] = []
        self._taken: list[Taken] = []
        self._received: list[int] = []
        self._shut: list[frozenset[str]] = []

    def put(self, cut: Cut, recv_us: int, offset_us: int, now_ns: int) -> None:
        """A cut came; it is entered with the next ``flush``, or at once with others if many wait."""
        self._waiting.append(_Waiting(cut, recv_us, offset_us, now_ns))
        if len(self._waiting) >= MOST_CUTS:
            self.flush()

    def flush(self) -> None:
        """Enter what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        stale_us, inside = self._settings.stale_s * 1e6, set[str]()
        awaiting = {backend: c for backend, c in self._controls.items() if c.awaiting}
        for each in waiting:
            gateway_id = each.cut.gateway_id
            table = self._tables.get(gateway_id)
            known = table is not None and table.state == "up" and gateway_id in self._policy.gateways
            if not known or gateway_id in inside or len(inside) == MOST_CUTS:
                self._enter_batch()
                inside.clear()
            if table is None:
                table = self._tables[gateway_id] = GatewayTable(gateway_id, self._usage)
            if gateway_id not in self._policy.gateways:
                self._policy.gateway_up(table, each.now_ns)
            if not table.accept(each.cut, each.recv_us, each.offset_us, stale_us, each.now_ns):
                continue
            if table.state != "up":  # a stalled gateway recovered: its statistics are the proof
                table.state, table.reason = "up", ""
                self._policy.gateway_up(table, each.now_ns)
            inside.add(gateway_id)
            for control in awaiting.values():
                control.confirm(gateway_id, each.cut.throttle_gen, self._policy.gateways[gateway_id].gen)
            plan = self._scopes.plan(table, each.cut.column("stream_id"))
            if table.skipped:
                self._scopes.table.windows.resync(plan.gateway)
                self._usage.resync(table.places)
            self._taken.append(Taken(each.cut, table, plan, each.now_ns, self._excused(table.starved_ratio)))
            self._received.append(each.recv_us)
            self._shut.append(frozenset(b for b, c in awaiting.items() if not c.gate_open))
        self._enter_batch()

    def _excused(self, starved_ratio: float) -> float:
        """Share of a cut's I/Os that its gateway's own host may have made late; see ``signal``."""
        s = self._settings
        if starved_ratio < s.starved_least_ratio:
            return 0.0
        return min(s.starved_weight * starved_ratio, s.starved_most_ratio)

    def _enter_batch(self) -> None:
        if not self._taken:
            return
        taken, received, shut = self._taken, self._received, self._shut
        self._taken, self._received, self._shut = [], [], []
        self.unix_us = max(self.unix_us, *received)
        gateways = np.array([each.plan.gateway for each in taken])
        self._scopes.table.windows.spoke(gateways, np.array([each.now_ns for each in taken]))
        batch = CutBatch(taken)
        batch.measure(self._usage)
        for each, recv_us in zip(taken, received, strict=True):
            table, rows = each.table, each.plan.rows
            table.keep(each.cut, rows)
            table.unknown_rows += len(rows) - len(each.plan.known)
            self._policy.cut(table, each.cut.duration_us, recv_us)
            if "late" in each.cut.extra:
                self._policy.held_late(parse_late(each.cut.extra["late"]))
        pieces = batch.pieces()
        if pieces is not None:
            self._feed(batch, pieces, shut)

    def _feed(self, batch: CutBatch, pieces: Pieces, shut: list[frozenset[str]]) -> None:
        windows = self._scopes.table.windows
        over_all, on_backend = batch.targets()
        closed = _lines_shut(batch, shut)
        # I/Os without any latency are of a source that measures none: nothing follows from them.
        measured = (pieces.done == 0) | (pieces.latency_us > 0) | ~pieces.inexact
        feeds = (on_backend != NO_MEMBER) & measured
        if closed is not None:
            noted = np.flatnonzero(feeds & closed)
            windows.record_activity(on_backend[noted], noted, pieces)
            feeds &= ~closed
        shown, fed = np.flatnonzero((over_all != NO_MEMBER) & measured), np.flatnonzero(feeds)
        members = np.concatenate((over_all[shown], on_backend[fed]))
        if len(members):
            windows.add(members, np.concatenate((shown, fed)), pieces)


class CutBatch:
    """Accepted cuts of distinct gateways, at least one, side by side: counters of shape (columns, rows)."""

    def __init__(self, taken: Sequence[Taken]) -> None:
        self.taken = taken
        self.plans = [t.plan for t in taken]
        self.counters: Ints = _joined([t.cut.counters for t in taken], axis=1)
        self.lines = np.array([len(plan.io) for plan in self.plans])
        self._rows = np.array([t.cut.rows for t in taken])
        self._row_start = _starts(self._rows)
        self._line_start = _starts(self.lines)
        for each in taken:
            missed = each.cut.missed
            if not each.table.says_more and len(missed) and int(missed["io"].max()) > IO_WRITE:
                each.table.says_more = True

    def measure(self, usage_table: UsageTable) -> None:
        """Enter the use of every volume of these gateways; one not named in a cut had none."""
        sizes = np.array([len(t.table.places) for t in self.taken])
        total = int(sizes.sum())
        if not total:
            return
        counts = np.array([len(plan.known) for plan in self.plans])
        place = _joined([plan.place for plan in self.plans]) + np.repeat(_starts(sizes), counts)
        c = self.counters
        parts = np.stack(
            (
                c[COL["cost_milli"]],
                c[COL["reads"]] + c[COL["writes"]],
                c[COL["read_bytes"]] + c[COL["write_bytes"]],
                c[COL["held"]],
                c[COL["inflight"]],
                self._failed(),
                c[COL["arrived"]],
            )
        )
        if len(place) != parts.shape[1]:  # some streams are not announced
            known = _joined([plan.known for plan in self.plans]) + np.repeat(self._row_start, counts)
            parts = parts[:, known]
        sums = _sums(parts, place, total)
        seconds = np.repeat([t.cut.duration_us / 1e6 for t in self.taken], sizes)
        usage_table.update(_joined([t.table.places for t in self.taken]), sums, seconds)

    def _failed(self) -> Ints:
        """Reads and writes that failed, by row."""
        terse = np.repeat([not t.table.says_more for t in self.taken], self._rows)
        failed: Ints = self.counters[COL["errors"]] * terse
        for each, start in zip(self.taken, self._row_start.tolist(), strict=True):
            entries = each.cut.missed
            if each.table.says_more and len(entries):
                kind = entries["io"]
                said = (kind > FAILED) & (kind <= FAILED + IO_WRITE) & (entries["threshold_us"] == 0)
                np.add.at(failed, entries["row"][said] + start, entries["counted"][said])
        return failed

    def pieces(self) -> Pieces | None:
        """The piece of every line, in order of cuts and their plans' lines; None if there is no line."""
        total = int(self.lines.sum())
        if not total:
            return None
        pairs = np.array([len(plan.pair_row) for plan in self.plans])
        row = _joined([plan.pair_row for plan in self.plans]) + np.repeat(self._row_start, pairs)
        line = _joined([plan.pair_line for plan in self.plans]) + np.repeat(self._line_start, pairs)
        finder = _Lines(row, line, self.counters.shape[1], all(plan.plain for plan in self.plans))
        io = _joined([plan.io for plan in self.plans])
        parts = _sums(self.counters[_PIECE][:, row], line, total)
        reads, writes, arrived, held, inflight, errors, read_bytes, write_bytes = parts
        completed = done = reads + writes
        offered = arrived
        if io.any():  # not all of them are about reads and writes alike
            done = np.choose(io, (done, reads, writes))
            # Arrivals are not counted by kind: assume the mix of what completed.
            mix = (io > 0) & (completed > 0)
            offered = np.where(mix, arrived * done / np.maximum(completed, 1), arrived)
        hist = self._hist(finder, io, total)
        threshold_us = _joined([plan.threshold_us for plan in self.plans])
        excludes = _joined([plan.excludes_errors for plan in self.plans])
        terse = np.repeat([not t.table.says_more for t in self.taken], self.lines)
        errors = np.minimum(errors, done) * terse
        compares = _joined([plan.compares for plan in self.plans])
        limits_us = np.where(compares[:, None], threshold_us, 0.0)
        found = self._compared(finder, io, limits_us, errors, excludes, done, hist)
        return Pieces(
            now_ns=np.repeat([t.now_ns for t in self.taken], self.lines),
            covered_us=np.repeat([t.cut.duration_us for t in self.taken], self.lines),
            offered=offered,
            done=done,
            completed=completed,
            arrived=arrived,
            reads=reads,
            size_bytes=read_bytes + write_bytes,
            waiting=held + inflight,
            counted=found.counted,
            missed=found.missed,
            failed=found.failed,
            oldest_us=found.oldest_us,
            silence_us=found.silence_us,
            hist=hist,
            inexact=found.inexact,
            latency_us=percentiles_us(hist, _joined([plan.percentile for plan in self.plans])) * compares,
            excused=done * np.repeat([t.excused_ratio for t in self.taken], self.lines),
        )

    def _hist(self, finder: _Lines, io: Ints, total: int) -> npt.NDArray[np.int32]:
        lens = np.array([len(t.cut.hist) for t in self.taken])
        # An entry is {u16 row, u16 bucket, u32 count}; as one integer it is taken apart faster.
        entries = _joined([t.cut.hist.view("<u8") for t in self.taken])
        bucket = (entries >> 16).astype(np.uint16)
        start = np.repeat(self._row_start, lens)
        keep = np.flatnonzero(bucket < _TOTALS)
        entries, bucket = entries[keep], bucket[keep].astype(np.int64)
        row = (entries & 0xFFFF).astype(np.int64) + start[keep]
        chosen, line = finder.of(row)
        if chosen is not None:
            entries, bucket = entries[chosen], bucket[chosen]
        count = (entries >> 32).astype(np.float64)
        if io.any():
            kind = io[line]
            count[
                ((kind == IO_READ) & (bucket >= TOTAL_WRITE)) | ((kind == IO_WRITE) & (bucket < TOTAL_WRITE))
            ] = 0
        cell = line * BUCKETS + bucket - BUCKETS * (bucket >= TOTAL_WRITE)
        dense = np.bincount(cell, weights=count, minlength=total * BUCKETS)
        return dense.astype(np.int32).reshape(total, BUCKETS)

    def _compared(
        self,
        finder: _Lines,
        io: Ints,
        threshold_us: Floats,
        errors: Floats,
        excludes: Bools,
        done: Floats,
        hist: npt.NDArray[np.int32],
    ) -> _Compared:
        """What the missed entries say of each line, whatever their kind (``wire.cut``).

        Args:
            finder: from rows to lines.
            io: of each line; ``threshold_us``: of each line and step.
            threshold_us: see there.
            errors: completions with an error, of a gateway that says no more of them; else 0.
            excludes: lines in which an I/O that failed does not count at all.
            done: completions of the line's kind.
            hist: of each line.
        """
        total, steps = threshold_us.shape
        lens = np.array([len(t.cut.missed) for t in self.taken])
        # {u16 row, u16 io, u32 threshold_us, u32 counted, u32 missed}
        entries = _joined([t.cut.missed.view("<u4") for t in self.taken]).reshape(-1, 4).astype(np.int64)
        chosen, line = finder.of((entries[:, 0] & 0xFFFF) + np.repeat(self._row_start, lens))
        if chosen is not None:
            entries = entries[chosen]
        word = entries[:, 0] >> 16
        missed, compared = np.zeros((total, steps)), np.zeros((total, steps))
        own = np.flatnonzero(word == io[line])
        for step in range(steps):
            found = own[entries[own, 1] == threshold_us[line[own], step]]
            of = line[found]
            compared[:, step] = np.bincount(of, weights=entries[found, 2], minlength=total)
            missed[:, step] = np.bincount(of, weights=entries[found, 3], minlength=total)
        guessed = (compared != done[:, None]) & (threshold_us > 0)
        if guessed.any():
            # Not counted for this threshold: pessimistic, a bucket counts unless it lies wholly below.
            at, which = np.nonzero(guessed)
            bucket = np.searchsorted(EDGES_NS, threshold_us[at, which] * 1000, side="right") - 1
            missed[at, which] = (hist[at] * (np.maximum(bucket, 0)[:, None] <= _EVERY)).sum(axis=1)
        counted: Floats = np.repeat(done[:, None], steps, axis=1)
        result = _Compared(
            counted, missed, guessed.any(axis=1), np.zeros(total), np.zeros(total), np.zeros(total)
        )
        special = np.flatnonzero(word > IO_WRITE)
        if len(special) or errors.any():
            result.add(entries[special], line[special], io, threshold_us, errors, excludes, done)
        return result

    def targets(self) -> tuple[Ints, Ints]:
        """Members of the signal table that each line feeds, over all backends and on one."""
        over_all = _joined([plan.over_all for plan in self.plans])
        return over_all, _joined([plan.on_backend for plan in self.plans])


@dataclass(slots=True)
class _Compared:
    """I/Os of each line against its thresholds; shapes (lines,) and (lines, steps).

    Attributes:
        counted: compared with each threshold, the n of SLA-MODEL.md 2; missed: of them slower, or failed.
        failed: how many of ``missed`` are there because they failed, at whatever speed.
        oldest_us: age of the oldest I/O outstanding at the end; silence_us: longest time without completion.
    """

    counted: Floats
    missed: Floats
    inexact: Bools
    failed: Floats
    oldest_us: Floats
    silence_us: Floats

    def add(
        self,
        entries: Ints,
        line: Ints,
        io: Ints,
        threshold_us: Floats,
        errors: Floats,
        excludes: Bools,
        done: Floats,
    ) -> None:
        """Add what completions do not show: entries of the kinds OVERDUE, FAILED and OUTSTANDING."""
        total, steps = threshold_us.shape
        word, limit_us = entries[:, 0] >> 16, entries[:, 1]
        kind, about = word & ~3, (word & 3) == io[line]

        def sums(which: Bools, column: int) -> Floats:
            return np.bincount(line[which], weights=entries[which, column], minlength=total).astype(float)

        waits = kind == OUTSTANDING
        np.maximum.at(self.oldest_us, line[waits], entries[waits, 2] * 1000.0)
        np.maximum.at(self.silence_us, line[waits], entries[waits, 3] * 1000.0)
        fails = kind == FAILED
        # All kinds together also count flush and trim: reads and writes are added up instead.
        ours = fails & (limit_us == 0) & np.where(io[line] == 0, (word & 3) != 0, about)
        failed = sums(ours, 2) + errors
        # Storage that is gone completes nothing: its flushes fail, and clients are refused.
        every = fails & (limit_us == 0) & ((word & 3) == 0)
        parts = fails & (limit_us == 0) & ((word & 3) != 0)
        gone = np.where(done == 0, np.maximum(sums(every, 2) - sums(parts, 2), 0.0), 0.0)
        self.counted += gone[:, None]
        failed += gone
        for step in range(steps):
            at = about & (limit_us == threshold_us[line, step]) & (limit_us > 0)
            overdue = at & (kind == OVERDUE)
            late = sums(overdue, 2) - sums(overdue, 3)
            self.counted[:, step] += late
            self.missed[:, step] += late
            slow = sums(at & fails, 3)  # they failed, and are in the missed ones already
            self.missed[:, step] += np.where(excludes, 0.0, failed) - slow
            self.counted[:, step] -= np.where(excludes, failed, 0.0)
        np.maximum(self.counted, 0.0, out=self.counted)
        np.clip(self.missed, 0.0, self.counted, out=self.missed)
        self.failed = np.where(excludes, 0.0, np.minimum(failed, self.missed.min(axis=1)))


class _Lines:
    """From rows of a batch to lines; a row may be in none or several."""

    def __init__(self, row: Ints, line: Ints, rows: int, plain: bool) -> None:
        self._line, self._plain = line, plain
        if plain:
            self._of_row = np.full(rows, NO_LINE)
            self._of_row[row] = line
        else:
            self._count = np.bincount(row, minlength=rows)
            self._first = _starts(self._count)

    def of(self, row: Ints) -> tuple[Ints | None, Ints]:
        """(which of the rows, None for all of them once and in order; the line of each of those)."""
        if self._plain:
            line = self._of_row[row]
            if not len(line) or line.min() >= 0:
                return None, line
            chosen = np.flatnonzero(line >= 0)
            return chosen, line[chosen]
        count = self._count[row]
        chosen = np.repeat(np.arange(len(row)), count)
        within = np.arange(len(chosen)) - np.repeat(_starts(count), count)
        return chosen, self._line[self._first[row][chosen] + within]


def _lines_shut(batch: CutBatch, shut: list[frozenset[str]]) -> Bools | None:
    """Which lines of a batch are on a backend whose gate was shut when their cut came; None if none."""
    if not any(shut):
        return None
    return np.array(
        [
            backend in gates
            for plan, gates in zip(batch.plans, shut, strict=True)
            for backend in plan.backends
        ],
        dtype=np.bool_,
    )


def _joined(arrays: Sequence[npt.NDArray[Any]], axis: int = 0) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)


def _starts(sizes: Ints) -> Ints:
    """Where each part begins in the concatenation."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts


def _sums(parts: Ints, index: Ints, total: int) -> Floats:
    """Sums of each of ``parts``, shape (m, n), by ``index``, shape (n,): shape (m, total)."""
    cells = (np.arange(len(parts))[:, None] * total + index).ravel()
    sums = np.bincount(cells, weights=parts.ravel(), minlength=len(parts) * total)
    return sums.astype(np.float64, copy=False).reshape(len(parts), total)
