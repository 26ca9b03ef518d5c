"""What is known of gateways, their streams and their newest cuts.

State: one ``GatewayTable`` a gateway. A stream is a row; ``ring`` holds the scalars of the last ``RING_CUTS``
cuts as one int64 array of shape (RING_CUTS, len(RING_COLUMNS), rows), and ``hists`` the sparse histograms of
the same cuts, from which percentiles are made on demand. Per volume the table keeps a smoothed cost rate.

Invariants: rows are only added, never moved; a (epoch, seq) is taken at most once; cuts that are not newer
than the newest one taken, or older than the settings allow, change nothing here (they are judged from SQL,
not from here). Changed only by the brain's one thread. No clock: every time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import COL, Cut

RING_CUTS: Final = 4
RING_COLUMNS: Final = (
    "arrived",
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "delay_sum_us",
    "cost_milli",
    "inflight",
    "held",
)
RING: Final = {name: index for index, name in enumerate(RING_COLUMNS)}
_SELECT: Final = np.array([COL[name] for name in RING_COLUMNS])
SMOOTHING: Final = 0.5
"""Weight of the newest cut in a volume's smoothed rate: half forgotten after a poll."""
PEAK_DECAY: Final = 0.9
"""A peak counts less by this factor with each cut: half of it after some 7 s."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One client's use of one volume through one gateway."""

    stream_id: int
    volume: str
    client: str
    backend: str


@dataclass(slots=True)
class Use:
    """Recent use of one volume through one gateway; rates a second, gauges at the newest cut's end."""

    cost_per_s: float = 0.0
    ops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    peak_cost_per_s: float = 0.0
    last_cost_per_s: float = 0.0
    last_ops_per_s: float = 0.0
    last_bytes_per_s: float = 0.0
    held: int = 0
    inflight: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """One accepted cut: which table row each of its rows is (-1: a stream not announced yet)."""

    cut: Cut
    rows: npt.NDArray[np.int64]
    recv_ns: int


@dataclass(slots=True)
class GatewayTable:
    """One gateway. ``state`` is "up" or "lost"; ``exports`` maps a volume to its backend."""

    gateway_id: str
    name: str = ""
    state: str = "up"
    reason: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    old_epochs: set[int] = field(default_factory=set)
    seq: int = 0
    end_unix_us: int = 0
    last_cut_ns: int | None = None
    throttle_gen: int = 0
    offset_us: int = 0
    streams: list[Stream] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)
    volume_of_row: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    ring: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((RING_CUTS, len(RING_COLUMNS), 0), dtype=np.int64)
    )
    durations_us: deque[int] = field(default_factory=lambda: deque(maxlen=RING_CUTS))
    hists: deque[npt.NDArray[Any]] = field(default_factory=lambda: deque(maxlen=RING_CUTS))
    use: dict[str, Use] = field(default_factory=dict)
    ignored: int = 0
    dropped_cuts: int = 0
    unknown_rows: int = 0

    def add_streams(self, streams: list[Stream]) -> list[int]:
        """Add rows for the streams not seen before; returns the new rows."""
        new = list({s.stream_id: s for s in streams if s.stream_id not in self.row_of}.values())
        if not new:
            return []
        first = len(self.streams)
        for row, stream in enumerate(new, first):
            self.streams.append(stream)
            self.row_of[stream.stream_id] = row
            if stream.volume not in self.use:
                self.volumes.append(stream.volume)
                self.use[stream.volume] = Use()
        position = {volume: index for index, volume in enumerate(self.volumes)}
        added = np.array([position[stream.volume] for stream in new], dtype=np.int64)
        self.volume_of_row = np.concatenate((self.volume_of_row, added))
        room = np.zeros((RING_CUTS, len(RING_COLUMNS), len(new)), dtype=np.int64)
        self.ring = np.concatenate((self.ring, room), axis=2)
        return list(range(first, len(self.streams)))

    def fresh(self, stale_ns: float, now_ns: int) -> bool:
        """Whether it is up and a cut came within ``stale_ns``."""
        return self.state == "up" and self.last_cut_ns is not None and now_ns - self.last_cut_ns <= stale_ns

    def carries(self, volume: str) -> bool:
        """Whether this gateway exports the volume or has served a stream of it."""
        return volume in self.exports or volume in self.use

    def backend_of(self, volume: str) -> str:
        """Backend of a volume that this gateway carries."""
        if volume in self.exports:
            return self.exports[volume]
        return next(stream.backend for stream in self.streams if stream.volume == volume)

    def take(self, cut: Cut, recv_us: int, offset_us: int, stale_us: float, now_ns: int) -> Taken | None:
        """Enter a cut; None if it was taken before, comes out of order, or is too old for control."""
        end_us = cut.start_unix_us + offset_us + cut.duration_us
        if cut.epoch == self.epoch:
            late = cut.seq <= self.seq
        else:
            late = cut.epoch in self.old_epochs or (self.epoch != 0 and end_us <= self.end_unix_us)
        if late or recv_us - end_us > stale_us or cut.duration_us <= 0:
            self.ignored += 1
            return None
        if cut.epoch != self.epoch and self.epoch:
            self.old_epochs.add(self.epoch)
        self.epoch, self.seq, self.end_unix_us = cut.epoch, cut.seq, end_us
        self.last_cut_ns, self.offset_us, self.throttle_gen = now_ns, offset_us, cut.throttle_gen
        ids = cut.column("stream_id").tolist()
        rows = np.fromiter((self.row_of.get(i, -1) for i in ids), dtype=np.int64, count=len(ids))
        self._enter(cut, rows)
        return Taken(cut, rows, now_ns)

    def _enter(self, cut: Cut, rows: npt.NDArray[np.int64]) -> None:
        known = rows >= 0
        self.unknown_rows += int(len(rows) - known.sum())
        slot = np.zeros(self.ring.shape[1:], dtype=np.int64)
        slot[:, rows[known]] = cut.counters[_SELECT][:, known]
        self.ring = np.roll(self.ring, 1, axis=0)
        self.ring[0] = slot
        self.durations_us.appendleft(cut.duration_us)
        hist = cut.hist.copy()  # a view would keep the whole mailbox batch alive
        row = rows[hist["row"]] if len(hist) else np.zeros(0, dtype=np.int64)
        hist["row"] = np.where(row >= 0, row, 0xFFFF).astype(np.uint16)
        self.hists.appendleft(hist[hist["row"] != 0xFFFF])
        self._measure(slot, cut.duration_us / 1e6)

    def _measure(self, slot: npt.NDArray[np.int64], seconds: float) -> None:
        count = len(self.volumes)

        def per_volume(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            summed = np.bincount(self.volume_of_row, weights=values, minlength=count)
            return summed.astype(np.float64)

        cost = per_volume(slot[RING["cost_milli"]]) / 1000 / seconds
        ops = per_volume(slot[RING["reads"]] + slot[RING["writes"]]) / seconds
        size = per_volume(slot[RING["read_bytes"]] + slot[RING["write_bytes"]]) / seconds
        held = per_volume(slot[RING["held"]])
        inflight = per_volume(slot[RING["inflight"]])
        for index, volume in enumerate(self.volumes):
            use = self.use[volume]
            use.last_cost_per_s, use.last_ops_per_s = float(cost[index]), float(ops[index])
            use.last_bytes_per_s = float(size[index])
            use.cost_per_s += SMOOTHING * (use.last_cost_per_s - use.cost_per_s)
            use.ops_per_s += SMOOTHING * (use.last_ops_per_s - use.ops_per_s)
            use.bytes_per_s += SMOOTHING * (use.last_bytes_per_s - use.bytes_per_s)
            use.peak_cost_per_s = max(use.last_cost_per_s, PEAK_DECAY * use.peak_cost_per_s)
            use.held, use.inflight = int(held[index]), int(inflight[index])
