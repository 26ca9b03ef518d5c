"""What feed-forward knows of one backend: what its loop found, the load since, and the burst it expects.

    learn     the loop has moved C: what it found to be kept
    sample    the load of now, high or low, in bins
    expected  a burst that is near or under way, and what came of it so far
    trials    whether C ahead of bursts helps (``feed_forward_trial``)

State: one ``Watched`` for each backend watched. Pure: no clock, no I/O. Changed only by ``feed_forward``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decision_log import LoopBefore
from sla_server.services.control.decisions import Reason
from sla_server.services.control.feed_forward_pattern import SPANS, Recurrence
from sla_server.services.control.feed_forward_trial import Burst, Trial
from sla_server.services.control.loop_step import LoopStep
from sla_server.services.control.pieces import Ints
from sla_server.services.control.scopes import Key

SAME_RATIO: Final = 0.75
"""Storage that gives less than this share of what it gave, or as much more, may be another one: C0 of
bursts alike differs by a tenth, and a step of an increase is a sixteenth."""
MOST_STARTS: Final = 6
"""C0 kept of a backend: bursts of one storage differ in size, and a known size shows nothing."""
MOST_ONSETS: Final = 64
"""Kept of a backend: three periods of a pattern with many bursts in each."""


def _no_rows() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Expected:
    """A burst that is expected.

    Attributes:
        reason: why it is: RECURRING_BURST or POLICY_AHEAD.
        at_s: when, in seconds of the monotonic clock.
        is_ahead: C was set before it; else it is left alone.
        rows: of the signal table, over all backends: every promise whose bad windows are counted; shape (n,).
        seen: which change of the windows of each was counted last; shape (n,).
        until_s: end of what is watched, once it ``came``.
        bad: bad windows so far.
        r: the most that a victim reached.
        is_proven: its volumes did the I/O of a burst, rather than being held back by C that was set ahead.
        is_asked: a victim had I/O that its promise is about: without any, nothing can be bad.
        is_void: caps did not hold, or something else made it no evidence.
    """

    reason: Reason
    at_s: float
    is_ahead: bool
    rows: Ints = field(default_factory=_no_rows)
    seen: Ints = field(default_factory=_no_rows)
    came: bool = False
    until_s: float = 0.0
    bad: int = 0
    r: float = 0.0
    is_proven: bool = False
    is_asked: bool = False
    is_void: bool = False

    def burst(self, now_s: float) -> Burst:
        """As evidence."""
        return Burst(self.is_ahead, self.bad, now_s, self.r, self.is_proven or not self.is_ahead)


@dataclass(slots=True)
class Watched:
    """One backend: what its loop did last, and the load of its volumes since.

    Attributes:
        allowed: the last C under which the promises were kept, or to which it was lowered; 0: not known.
        start, ceiling: C0, and where C met risk.
        set_ahead: C as it was set before a burst, while the loop that began so is at work; else 0.
        least: where the loop was the last time that it only reacted, or the largest first cut, if lower: what
            is set ahead is not below it, or bursts that are bad whatever is set would lower C each time.
        r_free: r of the lead when the loop last reacted, before its first cut.
        is_ahead: C was set ahead when the loop began last; else it reacted.
        volumes, victims: slowed down (volumes, or clients), and for whom.
        modes: by agreement on the backend, when it was looked at last.
        starts: C0 of bursts without C ahead, on this storage; of the volumes ``compared``.
        doubt: the newest of them was above (1) or below (-1) all others; else 0.
        short: the least C came down to since, where C set ahead fell short; else 0.
        explained: such a C, when a burst without C ahead then showed the same storage; else 0.
        at_fault: its storage hangs or fails.
        bins: share of each bin in which the load was high, oldest first; ``bin``: number of the open one.
        loud, samples: of the open bin.
        onsets_s: when the load became high.
        next_s: when the next burst of the pattern is expected.
    """

    allowed: float = 0.0
    start: float = 0.0
    ceiling: float = 0.0
    least: float = 0.0
    r_free: float = 0.0
    is_ahead: bool = False
    set_ahead: float = 0.0
    volumes: tuple[str, ...] = ()
    victims: tuple[Key, ...] = ()
    modes: dict[str, str] = field(default_factory=dict)
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STARTS))
    compared: tuple[str, ...] = ()
    doubt: int = 0
    short: float = 0.0
    explained: float = 0.0
    at_fault: bool = False
    learned_ns: int = 0
    bins: deque[float] = field(default_factory=lambda: deque(maxlen=SPANS[-1]))
    bin: int = -1
    loud: int = 0
    samples: int = 0
    loud_s: float = float("-inf")
    is_loud: bool = False
    onsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_ONSETS))
    pattern: Recurrence | None = None
    next_s: float | None = None
    expected: Expected | None = None
    trials: dict[Reason, Trial] = field(default_factory=dict)

    def learn(self, control: BackendControl, step: LoopStep, before: LoopBefore, now_ns: int) -> bool:
        """The loop has moved C; whether what was known is about storage that was faster or slower."""
        is_other = self._is_other(control, before)
        if is_other:
            self.forget_capacity()
        # What it raises C from is known to be kept, not yet what it raises C to.
        known = before.allowed if step.reason is Reason.RECOVERY else control.allowed
        park_ratio, ceiling = control.settings.park_ratio, control.ceiling
        self.is_ahead = self.is_ahead and before.active
        if not self.is_ahead:
            # A loop that reacts begins without a ceiling. What was met before fades, as by its own probes.
            if not before.active and self.ceiling:
                self.ceiling += control.start / control.settings.increase_divisor
            ceiling = min(ceiling, self.ceiling or ceiling)
            self.least = min(known, park_ratio * ceiling, control.settings.decrease_min * control.start)
            known = max(known, self.allowed)
            if not before.active:
                self.r_free = control.effect.r_before
        self.allowed = max(min(known, park_ratio * ceiling), self.least)
        self.ceiling = ceiling
        self.start, self.learned_ns = control.start, now_ns
        self.volumes, self.victims = tuple(sorted(control.managed)), tuple(sorted(control.victims))
        return is_other

    def _is_other(self, control: BackendControl, before: LoopBefore) -> bool:
        """Whether what its volumes used before the first cut shows that the storage gives another rate.

        One burst of another size may be another demand: two in a row, on the same side of all known, show it.
        So does one that is lower, if C that had been kept fell short: a smaller demand needs no lower C.
        """
        if before.active:
            return False
        volumes = tuple(sorted(control.managed))
        if volumes != self.compared:  # what others used says nothing about these
            self.compared, self.doubt, self.short, self.explained = volumes, 0, 0.0, 0.0
            self.starts.clear()
        known = list(self.starts)[: -1 if self.doubt else None]
        side = 0
        if known:
            side = (control.start > max(known) / SAME_RATIO) - (control.start < SAME_RATIO * min(known))
        is_other = side != 0 and (side == self.doubt or (side < 0 and self.short > 0))
        if is_other:
            self.starts.clear()
        elif self.short and not side:
            self.explained = self.short
        self.starts.append(control.start)
        self.doubt, self.short = (0 if is_other else side), 0.0
        return is_other

    def fell_short(self, control: BackendControl) -> bool:
        """Whether C set ahead of this burst had to come down far in it, and further than bursts explain."""
        kept = min(self.set_ahead, self.explained or self.set_ahead)
        if not (self.is_ahead and 0 < control.allowed <= SAME_RATIO * kept):
            return False
        self.short = min(self.short or control.allowed, control.allowed)
        return True

    def forget_capacity(self) -> None:
        """The storage is another one now: nothing is set ahead until the loop has found C again."""
        self.allowed = self.ceiling = self.least = self.r_free = 0.0
        self.doubt, self.short, self.explained = 0, 0.0, 0.0

    def discard(self) -> bool:
        """What came of bursts is no evidence any more; whether there was any. The load's pattern stays."""
        was_known = self.expected is not None
        self.expected = None
        for trial in self.trials.values():
            was_known |= trial.discard()
        return was_known

    def sample(self, is_loud: bool, bin_s: float, now_s: float) -> bool:
        """Enter the load of now; whether a bin was completed by it."""
        number = int(now_s // bin_s)
        is_complete = self.bin >= 0 and number > self.bin
        if is_complete:
            self.bins.append(self.loud / self.samples)
            # A process that was stopped for a while has seen nothing: low, and at their place.
            self.bins.extend([0.0] * min(number - self.bin - 1, SPANS[-1]))
            self.loud = self.samples = 0
        self.bin, self.samples, self.is_loud = number, self.samples + 1, is_loud
        if is_loud:
            self.loud += 1
            if now_s - self.loud_s > bin_s:
                self.onsets_s.append(now_s)
            self.loud_s = now_s
        return is_complete

    def trial(self, reason: Reason) -> Trial:
        """Of expectations of this kind."""
        return self.trials.setdefault(reason, Trial())
