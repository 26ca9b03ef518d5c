"""Windows of one promise fed by hand, and pieces by chance."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from pmdaemon.wire.cut import Cut
from pmdaemon.wire.histogram import BUCKETS
from sla_server.agreements.promise import Promise
from sla_server.services.control.pieces import Pieces, percentiles_us
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalRow, SignalTable
from sla_server.services.control.verdicts import Signal
from tests.support.worlds import A, cut, piece_of, pieces_of, promise

S = 1_000_000_000
ALL = np.array([True])


class OnePromise:
    """A table with one row; ``gateways`` are its members."""

    def __init__(self, *gateways: str, r_on: float = 0.95, **over: Any) -> None:
        self.signals, self.promise = SignalTable(ControlSettings()), promise(**over)
        self.table = self.signals.windows
        first, *others = gateways or (A,)
        self.row: SignalRow = self.signals.allot(self.promise, first, "disk", r_on)
        self.members = {first: int(self.table.member[self.row.row])}
        for other in others:
            self.members[other] = self.table.join(self.row.row, other)

    @property
    def windows(self) -> int:
        return int(self.table.count[self.row.row])

    @property
    def newest(self) -> int:
        return self.row.row * self.table.depth + int(self.table.pos[self.row.row] - 1) % self.table.depth

    def signal(self) -> Signal:
        return self.row.signal()

    def take(self, made: Cut, second: float) -> bool:
        """One cut; whether it closed a window."""
        piece, before = piece_of(made, ALL, self.promise), int(self.table.version[self.row.row])
        now_ns = round(second * S)
        self.table.spoke(np.array([self.table.gateway(made.gateway_id)]), np.array([now_ns]))
        members = np.array([self.members[made.gateway_id]])
        self.table.add(members, np.array([0]), pieces_of([piece], self.promise, now_ns))
        return int(self.table.version[self.row.row]) > before

    def feed(self, count: int, ms: float, second: float, gateway: str = A) -> bool:
        return self.take(cut(gateway, math.ceil(second), {"gold": (count, ms)}), second)


def random_pieces(
    rng: random.Random, promises: list[Promise], now_ns: int, busy: float, steps: int = 2
) -> Pieces:
    """A random piece for each promise; steps are those of the bank."""
    count = len(promises)
    hist = np.zeros((count, BUCKETS), dtype=np.int32)
    missed = np.zeros((count, steps))
    for row in range(count):
        if rng.random() < busy:
            for _ in range(rng.choice((3, 30, 90))):
                hist[row, rng.choice((20, 30, 38, 46, 54))] += 1
            late = int(hist[row, 46:].sum())
            missed[row] = (late, late // 2)[:steps]
    done = hist.sum(axis=1).astype(np.float64)
    percentile = np.array([p.percentile for p in promises])
    return Pieces(
        now_ns=np.full(count, now_ns),
        covered_us=np.array([rng.randrange(900_000, 1_100_000) for _ in range(count)]),
        offered=done + [rng.choice((0, 0, 7)) for _ in range(count)],
        done=done,
        completed=done,
        reads=done // 2,
        size_bytes=done * 4096,
        sized=done,
        end_us=np.full(count, now_ns // 1000),
        is_present=done > 0,
        says_nothing=np.zeros(count, np.bool_),
        lacks=np.zeros(count, np.bool_),
        carried=np.array([rng.choice((0.0, 5.0)) for _ in range(count)]),
        is_stuck=(done == 0) & np.array([rng.random() < 0.3 for _ in range(count)]),
        counted=np.repeat(done[:, None], steps, axis=1),
        failed=np.array([float(rng.randrange(3)) for _ in range(count)]),
        oldest_us=np.array([rng.choice((0.0, 0.0, 2e6)) for _ in range(count)]),
        silence_us=np.zeros(count),
        stuck=np.zeros(count),
        overdue=np.zeros((count, steps)),
        waiting=np.array([float(rng.random() < 0.1) for _ in range(count)]),
        missed=missed,
        hist=hist,
        inexact=np.array([rng.random() < 0.1 for _ in range(count)]),
        is_measured=np.ones(count, np.bool_),
        latency_us=percentiles_us(hist, percentile),
        excused=np.array([rng.choice((0.0, 0.0, 0.1, 0.5)) for _ in range(count)]) * done,
    )
