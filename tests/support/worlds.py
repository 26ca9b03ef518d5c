"""Promises, cuts and small worlds that the tests of the controller share."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import (
    COL,
    COLUMNS,
    FAILED,
    HIST_DTYPE,
    IO_ANY,
    IO_KINDS,
    IO_READ,
    IO_WRITE,
    MISSED_DTYPE,
    OUTSTANDING,
    OVERDUE,
    Cut,
)
from pmdaemon.wire.histogram import BUCKETS, TOTAL_READ, TOTAL_WRITE, bucket_of_ns, missed_upper
from pmdaemon.wire.names import stream_id
from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.services.control.controller import Controller
from sla_server.services.control.decisions import RaiseEvent, RecordThrottle, SetCaps
from sla_server.services.control.pieces import ALL_BUCKETS, Pieces, percentiles_us, placed
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import UNIX_0_US, Simulation

A = str(uuid.uuid5(uuid.NAMESPACE_DNS, "A"))
B = str(uuid.uuid5(uuid.NAMESPACE_DNS, "B"))
KEY = ("gold", "latency")


def promise(volume: str = "gold", ms: float = 12, priority: Priority = Priority.GOLD, **over: Any) -> Promise:
    values: dict[str, Any] = {
        "sla": volume,
        "version": 1,
        "objective": "latency",
        "priority": priority,
        "volumes": (volume,),
        "clients": ("*",),
        "io": "any",
        "percentile": 95.0,
        "curve": (CurveStep(math.inf, round(ms * 1000)),),
        "target_ratio": 0.995,
        "slice_s": 60,
        "floor_iops": 50.0,
        "floor_bytes_per_s": 0.0,
    }
    return Promise(**{**values, **over})


def volume_class(volume: str = "gold", priority: Priority = Priority.GOLD, **over: Any) -> VolumeClass:
    return VolumeClass(volume, priority, (volume,), **over)


def controller(
    promises: Sequence[Promise] = (promise(),),
    classes: Sequence[VolumeClass] = (volume_class(),),
    mode: str = "enforce",
    **settings: Any,
) -> Controller:
    made = Controller(ControlSettings(**settings))
    made.set_agreements(promises, classes)
    made.set_mode(mode)
    return made


def user(name: str) -> tuple[str, str]:
    """Volume and client of a stream called VOLUME or VOLUME/CLIENT; without one the client is "client"."""
    volume, _, client = name.partition("/")
    return volume, client or "client"


def streams(gateway: str, *names: str, backend: str = "disk") -> list[dict[str, Any]]:
    return [
        {"id": stream_id(gateway, v, c), "volume": v, "client": c, "backend": backend}
        for v, c in map(user, names)
    ]


def exports(*volumes: str, backend: str = "disk") -> list[dict[str, Any]]:
    return [{"volume": v, "backend": backend} for v in volumes]


def cut(
    gateway: str,
    seq: int,
    ios: dict[str, tuple[int, float]],
    *,
    gen: int = 0,
    epoch: int = 1,
    thresholds_us: Sequence[int] = (12_000,),
    end_s: float | None = None,
    duration_s: float = 1.0,
    held: int = 0,
    starved_us: int = 0,
    waiting: dict[str, tuple[int, float]] | None = None,
    overdue: dict[str, tuple[int, int]] | None = None,
    failed: dict[str, int] | None = None,
    arriving: dict[str, int] | None = None,
    old_agent: bool = False,
    kinds: dict[str, tuple[float, float]] | None = None,
    abandoned: dict[str, tuple[int, int]] | None = None,
) -> Cut:
    """A cut that ends at second ``seq`` unless told.

    Args:
        gateway: its id.
        seq: of the cut.
        ios: volume, or VOLUME/CLIENT, to (I/Os completed, latency of each in ms).
        waiting: volume to (I/Os sent upstream and outstanding, age of the oldest in ms).
        overdue: volume to (newly overdue, settled), for every threshold.
        failed: volume to how many of the completions failed.
        arriving: volume to I/Os that arrived and did not complete in this cut.
        old_agent: sends none of the entries for the last three.
        kinds: volume to (age of the oldest read, of the oldest write outstanding, in ms); 0 without one.
        abandoned: volume to (I/Os whose client left, their ages in ms in all).
        gen, epoch, thresholds_us, end_s, duration_s, held, starved_us: as the cut has them.
    """
    waiting, overdue, failed, arriving = waiting or {}, overdue or {}, failed or {}, arriving or {}
    kinds, abandoned = kinds or {}, abandoned or {}
    counters = np.zeros((len(COLUMNS), len(ios)), dtype=np.int64)
    hist, missed = [], []
    for row, (volume, (count, ms)) in enumerate(ios.items()):
        counters[COL["stream_id"], row] = stream_id(gateway, *user(volume))
        counters[COL["arrived"], row] = count + arriving.get(volume, 0)
        counters[COL["reads"], row] = count
        counters[COL["read_bytes"], row] = count * 4096
        counters[COL["cost_milli"], row] = round(count * 1062.5)
        counters[COL["held"], row] = held
        if count:
            hist.append((row, bucket_of_ns(round(ms * 1e6)), count))
            missed += [(row, IO_ANY, t, count, count if ms * 1000 > t else 0) for t in thresholds_us]
        inflight, oldest_ms = waiting.get(volume, (0, 0.0))
        counters[COL["inflight"], row] = inflight
        errors = counters[COL["errors"], row] = failed.get(volume, 0)
        if old_agent:
            continue
        if inflight and volume not in kinds:
            missed.append((row, OUTSTANDING, 0, round(oldest_ms), round(oldest_ms)))
        if volume in kinds:
            ages = [round(age) for age in kinds[volume]]
            missed.append((row, OUTSTANDING, 0, max(ages), max(ages)))
            missed += [(row, OUTSTANDING + io, 0, age, age) for io, age in enumerate(ages, 1) if age]
        if volume in overdue:
            missed += [(row, OVERDUE + IO_ANY, t, *overdue[volume]) for t in thresholds_us]
        if volume in abandoned:
            missed += [(row, OVERDUE + io, 0, *abandoned[volume]) for io in (IO_ANY, IO_READ)]
        if errors:
            missed += [(row, FAILED + io, 0, errors, 0) for io in (IO_ANY, IO_READ)]
            slow = [errors if ms * 1000 > t else 0 for t in thresholds_us]
            missed += [(row, FAILED, t, errors, n) for t, n in zip(thresholds_us, slow, strict=True)]
    end = seq if end_s is None else end_s
    return Cut(
        gateway,
        epoch,
        seq,
        UNIX_0_US + round((end - duration_s) * 1e6),
        round(duration_s * 1e6),
        gen,
        1,
        counters,
        np.array(hist, dtype=HIST_DTYPE),
        np.array(missed, dtype=MISSED_DTYPE),
        starved_us=starved_us,
    )


class Feeder:
    """Feeds a controller by hand, a second at a time."""

    def __init__(
        self, made: Controller, *volumes_of: tuple[str, tuple[str, ...]], features: Sequence[str] = ()
    ) -> None:
        self.controller, self.second = made, 0
        self._waited: dict[str, int] = {}
        for gateway, volumes in volumes_of:
            names = dict.fromkeys(user(volume)[0] for volume in volumes)
            made.set_features(gateway, features)
            made.gateway_up(gateway, gateway[:4], exports(*names), self.now_ns)
            made.add_streams(gateway, streams(gateway, *volumes))

    @property
    def now_ns(self) -> int:
        return 1_000_000_000 + self.second * 1_000_000_000

    @property
    def unix_us(self) -> int:
        return UNIX_0_US + self.second * 1_000_000

    def step(
        self, *cuts: tuple[str, dict[str, tuple[int, float]], int], held: int = 0, **more: Any
    ) -> list[Any]:
        """A second passes; ``cuts``: (gateway, ios, generation), more as ``cut``; the tick's decisions."""
        self.second += 1
        waits = {volume: count for volume, (count, _) in more.get("waiting", {}).items()}
        new = {volume: max(count - self._waited.get(volume, 0), 0) for volume, count in waits.items()}
        self._waited = waits
        for gateway, ios, gen in cuts:
            made = cut(gateway, self.second, ios, gen=gen, held=held, arriving=new, **more)
            self.controller.add_cut(made, self.unix_us, 0, False, self.now_ns)
        return self.controller.tick(self.now_ns, self.unix_us)


def caps_of(decisions: Sequence[Any], gateway: str) -> SetCaps:
    (found,) = [d for d in decisions if isinstance(d, SetCaps) and d.gateway_id == gateway]
    return found


def events_of(decisions: Sequence[Any], kind: str = "") -> list[RaiseEvent]:
    return [d for d in decisions if isinstance(d, RaiseEvent) and (not kind or d.kind == kind)]


def rows_of(decisions: Sequence[Any]) -> list[dict[str, Any]]:
    return [d.row for d in decisions if isinstance(d, RecordThrottle)]


def simulation(made: Controller, seed: int, **over: Any) -> Simulation:
    return Simulation(made, seed, **over)


@dataclass(slots=True)
class Piece:
    """One of ``Pieces``; ``missed`` by threshold (us)."""

    duration_us: int
    offered: float
    done: int
    missed: dict[int, int]
    hist: npt.NDArray[np.int64]
    waiting: int
    inexact: bool
    excused: float = 0.0
    completed: int = 0
    reads: int = 0
    size_bytes: int = 0
    counted: dict[int, int] = field(default_factory=dict)
    failed: int = 0
    oldest_us: int = 0
    silence_us: int = 0
    end_us: int = 0
    is_present: bool = True
    carried: float = 0.0
    is_stuck: bool = False
    sized: int = 0


def piece_at(pieces: Pieces, index: int, promise: Promise) -> Piece:
    return Piece(
        int(pieces.covered_us[index]),
        float(pieces.offered[index]),
        int(pieces.done[index]),
        {step.threshold_us: int(pieces.missed[index, i]) for i, step in enumerate(promise.curve)},
        placed(pieces.hist, pieces.used, ALL_BUCKETS)[index].astype(np.int64),
        int(pieces.waiting[index]),
        bool(pieces.inexact[index]),
        float(pieces.excused[index]),
        int(pieces.completed[index]),
        int(pieces.reads[index]),
        int(pieces.size_bytes[index]),
        {step.threshold_us: int(pieces.counted[index, i]) for i, step in enumerate(promise.curve)},
        int(pieces.failed[index]),
        int(pieces.oldest_us[index]),
        int(pieces.silence_us[index]),
        int(pieces.end_us[index]),
        bool(pieces.is_present[index]),
        float(pieces.carried[index]),
        bool(pieces.is_stuck[index]),
        int(pieces.sized[index]),
    )


def pieces_of(pieces: Sequence[Piece], promise: Promise, now_ns: int) -> Pieces:
    """Pieces of one promise as a batch."""
    hist = np.array([each.hist for each in pieces], dtype=np.int32)
    return Pieces(
        now_ns=np.full(len(pieces), now_ns),
        covered_us=np.array([each.duration_us for each in pieces]),
        offered=np.array([each.offered for each in pieces]),
        done=np.array([float(each.done) for each in pieces]),
        waiting=np.array([float(each.waiting) for each in pieces]),
        completed=np.array([float(each.completed) for each in pieces]),
        end_us=np.array([each.end_us for each in pieces]),
        is_present=np.array([each.is_present for each in pieces]),
        says_nothing=np.zeros(len(pieces), np.bool_),
        lacks=np.zeros(len(pieces), np.bool_),
        carried=np.array([each.carried for each in pieces]),
        is_stuck=np.array([each.is_stuck for each in pieces]),
        reads=np.array([float(each.reads) for each in pieces]),
        size_bytes=np.array([float(each.size_bytes) for each in pieces]),
        sized=np.array([float(each.sized) for each in pieces]),
        counted=np.array([[float(each.counted[s.threshold_us]) for s in promise.curve] for each in pieces]),
        failed=np.array([float(each.failed) for each in pieces]),
        oldest_us=np.array([float(each.oldest_us) for each in pieces]),
        silence_us=np.array([float(each.silence_us) for each in pieces]),
        stuck=np.zeros(len(pieces)),
        overdue=np.zeros((len(pieces), len(promise.curve))),
        missed=np.array([[float(each.missed[s.threshold_us]) for s in promise.curve] for each in pieces]),
        hist=hist,
        inexact=np.array([each.inexact for each in pieces]),
        is_measured=np.ones(len(pieces), np.bool_),
        latency_us=percentiles_us(hist, np.full(len(pieces), promise.percentile)),
        excused=np.array([each.excused for each in pieces]),
    )


def piece_of(cut: Cut, in_scope: npt.NDArray[np.bool_], promise: Promise) -> Piece:
    """What ``cut`` says of ``promise``, worked out alone and as the first of its gateway.

    Batches must agree with it.

    Args:
        cut: a decoded cut.
        in_scope: shape (cut.rows,), which of its rows belong to the promise.
        promise: gives io kind and thresholds.
    """
    done_all = (cut.column("reads") + cut.column("writes"))[in_scope].sum()
    if promise.io == "any":
        done = int(done_all)
    else:
        done = int(cut.column("reads" if promise.io == "read" else "writes")[in_scope].sum())
    offered = sum((_arrived(cut, row, promise.io) for row in np.flatnonzero(in_scope).tolist()), 0.0)
    hist = _hist(cut, in_scope, promise.io)
    waiting = int((cut.column("held") + cut.column("inflight"))[in_scope].sum())
    piece = Piece(cut.duration_us, offered, done, {}, hist, waiting, False)
    piece.completed, piece.end_us = int(done_all), cut.start_unix_us + cut.duration_us
    piece.is_present = bool(in_scope.any())
    piece.reads = int(cut.column("reads")[in_scope].sum())
    sizes = [f"{kind}_bytes" for kind in ("read", "write") if promise.io in ("any", kind)]
    piece.size_bytes = int(sum(cut.column(name)[in_scope].sum() for name in sizes))
    says_more = bool((cut.missed["io"] > IO_WRITE).any())
    errors = 0 if says_more else min(int(cut.column("errors")[in_scope].sum()), done)
    rows = [_Waiting.of(cut, row, IO_KINDS[promise.io]) for row in np.flatnonzero(in_scope).tolist()]
    former = [each for each in rows if each.is_former]
    by_kind = bool((cut.missed["io"] > OUTSTANDING).any())
    ended = piece.done if by_kind else piece.completed
    piece.is_stuck = not ended and any(each.count for each in former)
    piece.oldest_us = max((each.oldest_us for each in rows), default=0)
    piece.silence_us = max((each.silence_us for each in rows), default=0)
    entries = cut.missed[in_scope[cut.missed["row"]]]
    _compare(piece, entries, promise, errors)
    for step in promise.curve:
        _add_uncompared(piece, cut, rows, IO_KINDS[promise.io], step.threshold_us)
    if not promise.counts_errors:
        _leave_out(piece, entries, done)
    return piece


def _leave_out(piece: Piece, entries: npt.NDArray[Any], done: int) -> None:
    """What failed, and is excluded, is no demand and no part of the mix."""
    writes = piece.completed - piece.reads
    failed = [
        sum(int(e["counted"]) for e in entries if e["io"] == FAILED + io and not e["threshold_us"])
        for io in (IO_READ, IO_WRITE)
    ]
    piece.offered -= done - piece.sized
    piece.completed -= min(failed[0], piece.reads) + min(failed[1], writes)
    piece.reads -= min(failed[0], piece.reads)


def _arrived(cut: Cut, row: int, io: str) -> float:
    """I/Os of a kind that arrived in a row: what waits is shared out by how long the kinds do."""
    arrived, reads, writes = (int(cut.column(name)[row]) for name in ("arrived", "reads", "writes"))
    if io == "any":
        return float(arrived)
    entries = cut.missed[cut.missed["row"] == row]
    gone = {int(e["io"]) - OVERDUE: int(e["counted"]) for e in entries if not e["threshold_us"]}
    ended = (reads if io == "read" else writes) + gone.get(IO_KINDS[io], 0)
    all_ended = reads + writes + gone.get(IO_ANY, 0)
    waits = {
        int(e["io"]) - OUTSTANDING: max(int(e["counted"]), int(e["missed"])) * 1000.0
        for e in entries
        if e["io"] > OUTSTANDING
    }
    all_wait = waits.get(IO_READ, 0.0) + waits.get(IO_WRITE, 0.0)
    if arrived >= all_ended and all_wait:
        return ended + (arrived - all_ended) * (waits.get(IO_KINDS[io], 0.0) / max(all_wait, 1.0))
    return arrived * (ended / all_ended) if all_ended else float(arrived)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What is outstanding in one row of a cut, of one kind."""

    row: int
    count: int
    oldest_us: int
    silence_us: int
    is_former: bool  # some of it was when the cut began

    @classmethod
    def of(cls, cut: Cut, row: int, io: int) -> _Waiting:
        entries = cut.missed[cut.missed["row"] == row]
        found = {int(e["io"]) - OUTSTANDING: e for e in entries if e["io"] >= OUTSTANDING}
        entry = found.get(io if found.keys() & {IO_READ, IO_WRITE} else IO_ANY)
        oldest_us = int(entry["counted"]) * 1000 if entry is not None else 0
        silence_us = int(entry["missed"]) * 1000 if entry is not None else 0
        names = ("held", "inflight", "arrived", "reads", "writes")
        value = {name: int(cut.column(name)[row]) for name in names}
        gauge = value["held"] + value["inflight"]
        count = min(max(gauge + value["arrived"] - value["reads"] - value["writes"], 0), gauge)
        if (cut.missed["io"] > OUTSTANDING).any():
            count = int(oldest_us > 0) if io != IO_ANY else count * (oldest_us > 0)
            is_former = oldest_us + 1000 >= cut.duration_us
        else:
            is_former = True
        is_former &= gauge - value["arrived"] + value["reads"] + value["writes"] > 0
        return cls(row, count, oldest_us, silence_us, is_former)


def _add_uncompared(piece: Piece, cut: Cut, rows: Sequence[_Waiting], io: int, limit: int) -> None:
    """Outstanding I/Os that passed a threshold in this cut, of rows in which nothing names it."""
    unsure_us = 50_000
    for each in rows:
        passed = each.oldest_us > limit + unsure_us and each.oldest_us - cut.duration_us < limit - unsure_us
        entries = cut.missed[(cut.missed["row"] == each.row) & (cut.missed["threshold_us"] == limit)]
        if passed and each.count and not np.isin(entries["io"], (io, OVERDUE + io)).any():
            piece.counted[limit] += each.count
            piece.missed[limit] += each.count
            piece.inexact = True


def _hist(cut: Cut, in_scope: npt.NDArray[np.bool_], io: str) -> npt.NDArray[np.int64]:
    bucket = cut.hist["bucket"].astype(np.int64)
    chosen = in_scope[cut.hist["row"]] & (bucket < TOTAL_WRITE + BUCKETS)
    if io == "read":
        chosen &= bucket < TOTAL_WRITE
    elif io == "write":
        chosen &= bucket >= TOTAL_WRITE
    folded = bucket[chosen] - np.where(bucket[chosen] >= TOTAL_WRITE, TOTAL_WRITE, TOTAL_READ)
    return np.bincount(folded, weights=cut.hist["count"][chosen], minlength=BUCKETS).astype(np.int64)


def _compare(piece: Piece, entries: npt.NDArray[Any], promise: Promise, errors: int) -> None:
    """Fill in what the missed entries of its rows say of a piece."""
    io = IO_KINDS[promise.io]

    def sums(kind: int, threshold_us: int) -> tuple[int, int]:
        found = entries[(entries["io"] == kind) & (entries["threshold_us"] == threshold_us)]
        return int(found["counted"].sum()), int(found["missed"].sum())

    kinds = (IO_READ, IO_WRITE) if promise.io == "any" else (io,)
    failed = errors + sum(sums(FAILED + kind, 0)[0] for kind in kinds)
    rest = max(sums(FAILED, 0)[0] - sums(FAILED + IO_READ, 0)[0] - sums(FAILED + IO_WRITE, 0)[0], 0)
    gone = rest if piece.done == 0 else 0
    failed += gone
    piece.sized = max(piece.done - failed, 0)
    exclude = not promise.counts_errors
    for step in promise.curve:
        limit = step.threshold_us
        counted, missed = sums(io, limit)
        if counted != piece.done:
            missed, piece.inexact = missed_upper(piece.hist, limit), True
        overdue, settled = sums(OVERDUE + io, limit)
        slow = sums(FAILED + io, limit)[1]
        counted = max(piece.done + gone + overdue - settled - (failed if exclude else 0), 0)
        piece.counted[limit] = counted
        missed += overdue - settled + (0 if exclude else failed) - slow
        piece.missed[limit] = min(max(missed, 0), counted)
    piece.failed = 0 if exclude else min(failed, *piece.missed.values())
