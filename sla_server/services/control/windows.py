"""From cuts to the signal: pieces, windows, u and r.

A *piece* is what one cut says of one promise: the sums over the streams in its scope. A *window* merges
pieces until it holds ``window_min_ios`` I/Os and every gateway in scope has spoken, at most ``window_max_s``.
The tracker keeps the last three windows. For control it is emptied when caps change and fed again only with
cuts that began under them, so that what it says is always about the caps in force (SLA-MODEL.md 3, "Signal").

Misses are exact where the cut counted them for the threshold; where it did not (a threshold set of another
version) they are taken from histogram edges, pessimistically, and the window is ``inexact``.

What people see (u, r, ``over``, ``risky``) counts every I/O. Whether neighbours must give way (``at_risk``,
``r_step``) leaves out the I/Os that the gateway's own host may have made late (``excused``): if its data
plane wanted to run and was kept waiting for a tenth of a cut, the slowest fifth of the cut's I/Os and as many
of its misses are no evidence against a neighbour. The rest is: under contention nearly all I/Os are late.

Pure: no clock; times are the caller's monotonic nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS, percentile_us
from sla_server.agreements.promise import Promise
from sla_server.services.control.settings import ControlSettings

Hist = npt.NDArray[np.int64]


@dataclass(slots=True)
class Piece:
    """Sums over the streams in scope.

    Attributes:
        offered: I/Os of the promise's kind that arrived, also those held back.
        done: of them completed.
        missed: for each threshold of the curve (us), how many took longer.
        hist: latency histogram, shape (99,).
        waiting: gauge, I/Os held or under way when the cut ended.
    """

    gateway_id: str
    duration_us: int
    offered: float
    done: int
    missed: dict[int, int]
    hist: Hist
    waiting: int
    inexact: bool
    excused: float = 0.0
    """I/Os that may be late because the gateway had to wait for the processor of its host."""


@dataclass(slots=True)
class SignalWindow:
    """Pieces merged. ``covered_us`` and ``offered`` are per gateway, since gateways run side by side."""

    covered_us: dict[str, int] = field(default_factory=dict)
    offered: dict[str, float] = field(default_factory=dict)
    done: int = 0
    missed: dict[int, int] = field(default_factory=dict)
    hist: Hist = field(default_factory=lambda: np.zeros(BUCKETS, dtype=np.int64))
    inexact: bool = False
    excused: float = 0.0

    def add(self, piece: Piece) -> None:
        """Merge one piece."""
        self.covered_us[piece.gateway_id] = self.covered_us.get(piece.gateway_id, 0) + piece.duration_us
        self.offered[piece.gateway_id] = self.offered.get(piece.gateway_id, 0.0) + piece.offered
        self.done += piece.done
        for threshold_us, count in piece.missed.items():
            self.missed[threshold_us] = self.missed.get(threshold_us, 0) + count
        self.hist = self.hist + piece.hist
        self.inexact |= piece.inexact
        self.excused += piece.excused

    @property
    def offered_iops(self) -> float:
        """Rate at which I/Os arrived, all gateways together."""
        return sum(self.offered[g] * 1e6 / us for g, us in self.covered_us.items() if us > 0)


class Figures(NamedTuple):
    """What some windows say together."""

    u: float = 0.0
    latency_us: float = 0.0
    offered_iops: float = 0.0


NO_FIGURES = Figures()


@dataclass(frozen=True, slots=True)
class Signal:
    """What the last windows say; ``windows`` 0 means nothing is known.

    Attributes:
        threshold_us: of the curve at the offered rate, None outside the curve.
        u: misses / misses allowed over all windows.
        r: interpolated percentile / threshold over all windows.
        latency_us: that percentile, interpolated.
        risky: windows at risk; over: windows with u > 1.
        of_over: u, that percentile and the offered rate of the windows with u > 1 alone; zeros without one.
        at_risk: the neighbours must give way: enough windows are at risk, the newest too, also without what
            is excused, and r does not fall by itself.
        r_step: by how much: the r, without what is excused, that ``at_risk_windows`` windows reached.
        excused_ratio: share of the I/Os that is excused.
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


NOTHING = Signal(0, 0.0, None, 0.0, 0.0, 0.0, 0, 0, False)


class Closed(Protocol):
    """A closed window."""

    @property
    def offered_iops(self) -> float:
        """Rate at which I/Os arrived, all gateways together."""

    @property
    def done(self) -> int:
        """I/Os completed, at least one."""

    @property
    def missed(self) -> Mapping[int, int]:
        """Threshold (us) to how many took longer."""

    @property
    def hist(self) -> npt.NDArray[Any]:
        """Latency histogram, shape (99,)."""

    @property
    def inexact(self) -> bool:
        """Whether misses are from histogram edges."""

    @property
    def excused(self) -> float:
        """I/Os that the gateway's host may have made late."""


class Tracker(Protocol):
    """The last windows of one promise, on one backend or on all: ``WindowTracker``, or a row of ``bank``."""

    @property
    def last_piece_ns(self) -> int | None:
        """When the last piece came, whether or not it was of use."""

    @property
    def idle(self) -> bool:
        """Whether cuts arrive and none had I/O for ``idle_release_s``. No cuts are no idleness."""

    def reset(self) -> None:
        """Forget all windows: caps have changed."""

    def signal(self, r_on: float) -> Signal:
        """What the closed windows say, with ``r_on`` the entry threshold of r."""


class Silence:
    """The tracker of a promise without streams."""

    last_piece_ns: int | None = None
    idle = False

    def reset(self) -> None:
        """Nothing to forget."""

    def signal(self, r_on: float) -> Signal:
        """Nothing is known."""
        return NOTHING


def work_out(windows: Sequence[Closed], promise: Promise, settings: ControlSettings, r_on: float) -> Signal:
    """What these windows, oldest first and at least one, say of a promise."""
    offered = _offered(windows)
    threshold_us = promise.threshold_us(offered)
    if threshold_us is None:
        return Signal(len(windows), offered, None, 0.0, 0.0, 0.0, 0, 0, False)
    found = _figures(windows, promise, threshold_us)
    risky, over = 0, []
    for window in windows:
        one = _figures((window,), promise, threshold_us)
        risky += one.u >= settings.at_risk_u or one.latency_us / threshold_us >= r_on
        if one.u > 1:
            over.append(window)
    return Signal(
        len(windows),
        offered,
        threshold_us,
        found.u,
        found.latency_us / threshold_us,
        found.latency_us,
        risky,
        len(over),
        any(w.inexact for w in windows),
        _figures(over, promise, threshold_us) if over else NO_FIGURES,
        *_evidence(windows, promise, threshold_us, settings, r_on),
        sum(w.excused for w in windows) / sum(w.done for w in windows),
    )


def _evidence(
    windows: Sequence[Closed], promise: Promise, threshold_us: int, settings: ControlSettings, r_on: float
) -> tuple[bool, float]:
    """``at_risk`` and ``r_step`` of a signal."""
    ratios, risky = [], []
    for window in windows:
        u = max(window.missed[threshold_us] - window.excused, 0.0) / window.done / promise.allowed_miss_ratio
        percentile = promise.percentile * (1 - window.excused / window.done)
        ratios.append((percentile_us(np.asarray(window.hist), percentile) or 0.0) / threshold_us)
        risky.append(u >= settings.at_risk_u or ratios[-1] >= r_on)
    enough = settings.at_risk_windows
    if len(windows) < enough:
        return False, 0.0
    falls = len(windows) > 1 and ratios[-1] <= settings.falling_ratio * ratios[-2]
    return sum(risky) >= enough and risky[-1] and not falls, sorted(ratios)[-enough]


def _offered(windows: Sequence[Closed]) -> float:
    return sum(w.offered_iops for w in windows) / len(windows)


def _figures(windows: Sequence[Closed], promise: Promise, threshold_us: int) -> Figures:
    latency_us = percentile_us(np.sum([w.hist for w in windows], axis=0), promise.percentile) or 0.0
    missed, done = sum(w.missed[threshold_us] for w in windows), sum(w.done for w in windows)
    return Figures(missed / done / promise.allowed_miss_ratio, latency_us, _offered(windows))


class WindowTracker:
    """The last windows of one promise (on one backend, or all of them).

    State: ``windows`` (closed, at most ``signal_windows``), ``open`` (still filling), and when the first
    piece, the last one, and the last one with I/O came; the times survive ``reset``.
    """

    def __init__(self, settings: ControlSettings, promise: Promise) -> None:
        self._settings = settings
        self.promise = promise
        self.windows: deque[Closed] = deque(maxlen=settings.signal_windows)
        self.open = SignalWindow()
        self._said: tuple[float, Signal] | None = None
        self.first_piece_ns: int | None = None
        self.last_active_ns: int | None = None
        self.last_piece_ns: int | None = None

    @property
    def stale_ns(self) -> float:
        """A gateway silent for so long is not waited for."""
        return self._settings.stale_s * 1e9

    def add(self, piece: Piece, heard: Callable[[Collection[str]], bool], now_ns: int) -> bool:
        """Take one piece; returns whether a window was closed.

        Args:
            piece: sums of one cut.
            heard: told which gateways have spoken, whether those are all that a window needs; asked only
                when the window has enough I/Os.
            now_ns: monotonic.
        """
        self.note(piece, now_ns)
        self.open.add(piece)
        longest_us = max(self.open.covered_us.values())
        complete = self.open.done >= self._settings.window_min_ios and heard(self.open.covered_us.keys())
        if not complete and longest_us < self._settings.window_max_s * 1e6:
            return False
        if self.open.done:
            self.windows.append(self.open)
            self._said = None
        self.open = SignalWindow()
        return True

    def note(self, piece: Piece, now_ns: int) -> None:
        """Remember only that there was, or was no, I/O: what a cut outside the gate may still say."""
        self.last_piece_ns = now_ns
        if self.first_piece_ns is None:
            self.first_piece_ns = now_ns
        if piece.offered > 0 or piece.done or piece.waiting:
            self.last_active_ns = now_ns

    def reset(self) -> None:
        """Forget all windows: caps have changed."""
        self.windows.clear()
        self.open, self._said = SignalWindow(), None

    @property
    def idle(self) -> bool:
        """Whether cuts arrive and none had I/O for ``idle_release_s``. No cuts are no idleness."""
        if self.first_piece_ns is None or self.last_piece_ns is None:
            return False
        since_ns = self.first_piece_ns if self.last_active_ns is None else self.last_active_ns
        return self.last_piece_ns - since_ns >= self._settings.idle_release_s * 1e9

    def signal(self, r_on: float) -> Signal:
        """What the closed windows say, with ``r_on`` the entry threshold of r; worked out once a window."""
        if not self.windows:
            return NOTHING
        if self._said is None or self._said[0] != r_on:
            self._said = (r_on, work_out(list(self.windows), self.promise, self._settings, r_on))
        return self._said[1]
