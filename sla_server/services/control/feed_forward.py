"""Feed-forward: C of a backend is set *before* a burst that is expected, where that is known to help.

The loop reacts: a burst has broken a promise for some seconds when the first cap holds. Where bursts recur,
or the policy has lower caps from the coming hour on, C can be in force when the burst begins:

    the loop acted here --> its volumes are watched: high or low use, in bins (``feed_forward_pattern``)
    a pattern is clear  --> a burst is *expected*; every n-th, the first too, is left alone
    15 s before         --> C that the loop knows to be kept, in phase ``hold``: it goes on from there
    the burst           --> bad windows of all promises of the backend are counted (``feed_forward_trial``)

So this decides one thing only: whether the loop begins before a burst or in it. What it sets is what the
loop found last, on volumes that the loop slowed down; they lie below the victims' priority, and none has a
promise of its own. It is a layer like any cap of the loop: the policy's caps, agreed caps and floors hold
beside it, so it can only narrow. A cap is no reservation, and the loop releases one that is not felt for
30 s: a burst that does not come costs nothing.

It is off by evidence, for a time that doubles: if bursts with C ahead have not clearly fewer bad windows
than those left alone (``AHEAD_NO_HELP``), or bursts expected did not come (``AHEAD_NO_BURST``).

State: one ``Watched`` for each backend in which the loop acted since the process began, 64 at most; a restart
forgets them, and they are learned again. Pure: no clock, no I/O. Changed only by the controller's one thread.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from sla_server.services.control.backend_loop import BackendControl, LoopStep
from sla_server.services.control.decision_log import DecisionLog, LoopBefore
from sla_server.services.control.decisions import DecisionKind, Reason
from sla_server.services.control.feed_forward_pattern import (
    SPANS,
    TOLERANCE_BINS,
    Recurrence,
    next_onset,
    recurrence,
)
from sla_server.services.control.feed_forward_trial import Trial
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import Key, PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour, floor_for, may_slow
from sla_server.services.control.storage_faults import StorageFaults
from sla_server.services.control.throttle import LoopMemory
from sla_server.services.control.victims import Need, Victim

MOST_WATCHED: Final = 64
"""Backends watched; the one whose loop acted longest ago gives way. Each costs some 0.1 ms a second."""
MOST_ONSETS: Final = 64
"""Kept of a backend: three periods of a pattern with many bursts in each."""
MOST_PROMISES: Final = 64
"""Of a backend, whose bad windows are counted."""
LOUD_RATIO: Final = 0.7
"""Of the use at which the loop first acted: from here on a volume's use is a burst."""
WATCHED_BINS: Final = 6
"""Of a burst in which bad windows are counted: the loop has had its say within a minute."""


@dataclass(slots=True)
class Expected:
    """A burst that is expected.

    Attributes:
        reason: why it is: RECURRING_BURST or POLICY_AHEAD.
        at_s: when, in seconds of the monotonic clock.
        is_ahead: C was set before it; else it is left alone.
        until_s: end of what is watched, once it ``came``.
        bad: bad windows so far.
        seen: by promise, which change of its windows was counted last.
    """

    reason: Reason
    at_s: float
    is_ahead: bool
    came: bool = False
    until_s: float = 0.0
    bad: int = 0
    seen: dict[Key, int] = field(default_factory=dict)


@dataclass(slots=True)
class Watched:
    """One backend: what its loop did last, and the load of its volumes since.

    Attributes:
        allowed: the last C under which the promises were kept, or to which it was lowered.
        start, ceiling: C0, and where C met risk.
        least: where the loop was the last time that it only reacted, or the largest first cut, if lower: what
            is set ahead is not below it, or bursts that are bad whatever is set would lower C each time.
        r_free: r of the lead when the loop last reacted, before its first cut.
        is_ahead: C was set ahead when the loop began last; else it reacted.
        volumes, victims: slowed down, and for whom.
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
    volumes: tuple[str, ...] = ()
    victims: tuple[Key, ...] = ()
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

    def learn(self, control: BackendControl, step: LoopStep, before: LoopBefore, now_ns: int) -> None:
        """The loop has moved C."""
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
                self.r_free = control.r_before
        self.allowed = max(min(known, park_ratio * ceiling), self.least)
        self.ceiling = ceiling
        self.start, self.learned_ns = control.start, now_ns
        self.volumes, self.victims = tuple(sorted(control.managed)), tuple(sorted(control.victims))

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


@dataclass(slots=True)
class Counters:
    """Since the process began.

    Attributes:
        looks, clear: for a pattern, at the end of each bin; and how often there was one.
        expected: bursts; of them ``came`` and ``missed``.
        ahead, left_alone: bursts with C set before, and without.
        bad_ahead, bad_alone: bad windows in those that came.
        switched_off: by evidence.
    """

    looks: int = 0
    clear: int = 0
    expected: int = 0
    came: int = 0
    missed: int = 0
    ahead: int = 0
    left_alone: int = 0
    bad_ahead: int = 0
    bad_alone: int = 0
    switched_off: int = 0


@dataclass(frozen=True, slots=True)
class PrePosition:
    """C of a backend before a burst: to be put in force now."""

    backend: str
    reason: Reason
    text: str
    allowed: float
    managed: dict[str, Neighbour]
    lead: Victim
    victims: frozenset[Key]
    loop: LoopMemory
    r_free: float


class FeedForward:
    """See the module."""

    def __init__(
        self,
        settings: ControlSettings,
        inventory: BackendInventory,
        scopes: PromiseScopes,
        policy: PolicyManager,
        faults: StorageFaults,
        log: DecisionLog,
    ) -> None:
        self.backends: dict[str, Watched] = {}
        self.counters = Counters()
        self._settings, self._own = settings, settings.feed_forward
        self._inventory, self._scopes, self._policy = inventory, scopes, policy
        self._faults, self._log = faults, log
        self._coming: dict[str, float | None] = {}
        self._coming_us = 0
        self._next_ns = self._now_ns = 0
        self._tolerance_s = TOLERANCE_BINS * self._own.bin_s

    def set_coming_caps(self, caps: Mapping[str, float | None], from_unix_us: int) -> None:
        """The policy's caps of the hour that begins at ``from_unix_us``, complete; None is no cap."""
        self._coming, self._coming_us = dict(caps), from_unix_us

    def learn(self, control: BackendControl, step: LoopStep, before: LoopBefore, now_ns: int) -> None:
        """The loop of a backend, in mode enforce, has taken a step; ``before``: as it was."""
        if not (step.changed and self._own.enabled):
            return
        if step.reason is Reason.UNATTRIBUTED:  # slowing these volumes down does not help
            self.backends.pop(control.backend, None)
        elif control.active:
            if control.backend not in self.backends and len(self.backends) >= MOST_WATCHED:
                del self.backends[min(self.backends, key=lambda name: self.backends[name].learned_ns)]
            self.backends.setdefault(control.backend, Watched()).learn(control, step, before, now_ns)

    def look(self, controls: Mapping[str, BackendControl], now_ns: int, unix_us: int) -> list[PrePosition]:
        """Once a poll: follow the load of each backend watched; what must be put in force now."""
        if now_ns < self._next_ns or not self.backends:
            return []
        self._now_ns, self._next_ns = now_ns, now_ns + round(self._settings.poll_interval_s * 1e9)
        found = []
        for backend, watched in self.backends.items():
            self._sample(backend, watched, now_ns / 1e9)
            if watched.expected is not None:
                self._watch(backend, watched, watched.expected, unix_us)
            elif not watched.is_loud:
                ready = self._expect(controls[backend], watched, unix_us)
                if ready is not None:
                    found.append(ready)
        return found

    def figures(self) -> dict[str, int]:
        """Backends watched, with a clear pattern, and switched off just now; and all counters."""
        off = sum(
            any(trial.off_until_ns > self._now_ns for trial in watched.trials.values())
            for watched in self.backends.values()
        )
        recurring = sum(watched.pattern is not None for watched in self.backends.values())
        return {"watched": len(self.backends), "recurring": recurring, "off": off, **asdict(self.counters)}

    # The load.

    def _sample(self, backend: str, watched: Watched, now_s: float) -> None:
        here, use = self._inventory.backends().get(backend, ()), 0.0
        for volume in watched.volumes:
            if volume in here:
                neighbour = self._inventory.neighbour(volume, None)
                # I/Os are held only where a cap hides what is wanted.
                use += watched.start if neighbour.queueing else neighbour.cost_per_s
        if watched.sample(use >= LOUD_RATIO * watched.start, self._own.bin_s, now_s):
            watched.pattern = recurrence(watched.bins)
            self.counters.looks += 1
            self.counters.clear += watched.pattern is not None
            watched.next_s = None
            if watched.pattern is not None:
                period_s = watched.pattern.period_bins * self._own.bin_s
                watched.next_s = next_onset(tuple(watched.onsets_s), period_s, self._tolerance_s, now_s)

    # A burst that is expected.

    def _expect(self, control: BackendControl, watched: Watched, unix_us: int) -> PrePosition | None:
        """Begin to expect a burst that is near, if C can be set; None also if it is left alone."""
        due = self._due(watched, unix_us)
        if due is None:
            return None
        reason, at_s = due
        ready = self._ready(control, watched, reason, at_s)
        if ready is None:
            return None
        is_ahead = watched.trial(reason).is_ahead(self._own)
        watched.expected, watched.is_ahead = Expected(reason, at_s, is_ahead), is_ahead
        self._count_bad(control.backend, watched.expected)
        watched.expected.bad = 0  # what was bad before is not this burst's
        self.counters.expected += 1
        self.counters.ahead += is_ahead
        self.counters.left_alone += not is_ahead
        return ready if is_ahead else None

    def _due(self, watched: Watched, unix_us: int) -> tuple[Reason, float] | None:
        """Why a burst is expected within the tolerance, and when it is; the earlier of two."""
        now_s, found = self._now_ns / 1e9, list[tuple[float, Reason]]()
        if watched.next_s is not None:
            found.append((watched.next_s, Reason.RECURRING_BURST))
        if self._is_tighter(watched):
            found.append((now_s + (self._coming_us - unix_us) / 1e6, Reason.POLICY_AHEAD))
        near = [
            (at_s, reason)
            for at_s, reason in found
            if 0 < at_s - now_s <= self._tolerance_s and self._now_ns >= watched.trial(reason).off_until_ns
        ]
        if not near:
            return None
        at_s, reason = min(near)
        return reason, at_s

    def _is_tighter(self, watched: Watched) -> bool:
        """Whether the policy allows a volume less from the coming hour on than it does now."""
        layer = self._policy.layers["policy"]
        for volume in watched.volumes:
            coming = self._coming.get(volume)
            now = layer[volume].rates.cost_per_s if volume in layer else None
            if coming is not None and (now is None or coming < now):
                return True
        return False

    def _ready(
        self, control: BackendControl, watched: Watched, reason: Reason, at_s: float
    ) -> PrePosition | None:
        """C as it would be put in force now; None while the loop is at work, or nothing is at stake."""
        backend = control.backend
        if control.active or self._now_ns < control.quiet_until_ns:
            return None
        if self._faults.since_ns(backend) is not None:
            return None
        victims = [
            victim
            for key in watched.victims
            if (scope := self._scopes.find(backend, key)) is not None
            and self._policy.mode_of(backend, key[0]) == "enforce"
            and (victim := self._inventory.victim(scope, self._now_ns)).need in (Need.CLEAR, Need.HOLD)
        ]
        if not victims:
            return None
        lead = max(victims, key=lambda victim: (int(victim.priority), victim.urgency))
        managed = self._managed(backend, watched, lead)
        wanted = watched.allowed
        if reason is Reason.POLICY_AHEAD:
            managed = {v: n for v, n in managed.items() if self._coming.get(v) is not None}
            wanted = min(wanted, sum(self._coming[v] or 0.0 for v in managed))
        allowed = max(wanted, sum(floor_for(lead.priority, n) for n in managed.values()))
        if not managed or allowed >= watched.start:
            return None
        text = self._text(watched, reason, at_s, lead, managed, allowed)
        loop = LoopMemory(watched.start, watched.ceiling)
        keys = frozenset(victim.key for victim in victims)
        return PrePosition(backend, reason, text, allowed, managed, lead, keys, loop, watched.r_free)

    def _managed(self, backend: str, watched: Watched, lead: Victim) -> dict[str, Neighbour]:
        """Those that the loop slowed down and may slow down again, without a promise of their own."""
        here, found = self._inventory.backends().get(backend, ()), {}
        for volume in watched.volumes:
            if volume not in here or volume in lead.volumes or not self._inventory.can_throttle(volume):
                continue
            neighbour = self._inventory.neighbour(volume, None)
            lower = neighbour.priority < lead.priority and may_slow(lead.priority, lead.urgency, neighbour)
            if lower and not self._scopes.is_promised(volume):
                found[volume] = neighbour
        return found

    def _text(
        self,
        watched: Watched,
        reason: Reason,
        at_s: float,
        lead: Victim,
        managed: Mapping[str, Neighbour],
        allowed: float,
    ) -> str:
        left_s = at_s - self._now_ns / 1e9
        if reason is Reason.POLICY_AHEAD:
            why = f"the policy has lower caps from the hour on that begins in {left_s:.0f} s"
        else:
            assert watched.pattern is not None  # or nothing would be expected
            period_s = watched.pattern.period_bins * self._own.bin_s
            why = (
                f"a burst is expected in {left_s:.0f} s, as every {period_s:.0f} s "
                f"(correlation {watched.pattern.strength:.2f})"
            )
        return f"ahead of time for {lead.name}: {why}; {', '.join(managed)} to {allowed:.0f} cost/s"

    # What came of it.

    def _watch(self, backend: str, watched: Watched, expected: Expected, unix_us: int) -> None:
        """Follow a burst that is expected or has begun; at its end, judge."""
        now_s, own = self._now_ns / 1e9, self._own
        self._count_bad(backend, expected)
        if not expected.came:
            if watched.is_loud:
                length_s = WATCHED_BINS * own.bin_s
                if watched.pattern is not None:
                    length_s = min(length_s, watched.pattern.period_bins * own.bin_s / 2)
                expected.came, expected.until_s = True, now_s + length_s
                return
            if now_s <= expected.at_s + self._tolerance_s:
                return
        elif now_s < expected.until_s:
            return
        watched.expected = None
        self.counters.came += expected.came
        self.counters.missed += not expected.came
        if expected.came:
            self.counters.bad_ahead += expected.bad * expected.is_ahead
            self.counters.bad_alone += expected.bad * (not expected.is_ahead)
        trial = watched.trial(expected.reason)
        trial.enter(expected.came, expected.is_ahead, expected.bad)
        reason = trial.why_off(own)
        if reason is not None:
            self._switch_off(backend, watched, expected.reason, reason, unix_us)

    def _count_bad(self, backend: str, expected: Expected) -> None:
        """Windows in which a promise of the backend was broken, whoever was slowed down; each once."""
        table, keys, rows = self._scopes.table, list[Key](), list[int]()
        for scope in self._scopes.on_backend(backend)[:MOST_PROMISES]:
            over_all = self._scopes.over_all(scope.promise.key)
            if over_all is not None:
                keys.append(scope.promise.key)
                rows.append(over_all.row.row)
        if not rows:
            return
        changes, is_bad = table.newest_over(np.array(rows))
        for key, change, bad in zip(keys, changes.tolist(), is_bad.tolist(), strict=True):
            if expected.seen.get(key) != change:
                expected.seen[key] = change
                expected.bad += bad

    def _switch_off(self, backend: str, watched: Watched, kind: Reason, why: Reason, unix_us: int) -> None:
        trial = watched.trial(kind)
        ahead, alone, missed = list(trial.ahead), list(trial.alone), trial.missed
        off_s = trial.switch_off(self._own, self._now_ns)
        self.counters.switched_off += 1
        if why is Reason.AHEAD_NO_BURST:
            came = f"{missed} bursts expected in a row did not come"
        else:
            came = f"bad windows a burst: {_mean(ahead)} with caps ahead of it, {_mean(alone)} without"
        victims = ["/".join(key) for key in watched.victims]
        figures: dict[str, Any] = {
            "kind": kind.value,
            "bad_ahead": ahead,
            "bad_alone": alone,
            "missed": missed,
            "off_s": round(off_s),
            "victims": victims,
            "throttled": list(watched.volumes),
        }
        self._log.add(
            DecisionKind.AHEAD_OFF,
            unix_us,
            backend=backend,
            victim=victims[0] if victims else "",
            reason=why,
            text=f"no caps ahead of bursts for {off_s:.0f} s: {came}",
            figures=lambda: figures,
        )


def _mean(counts: Sequence[int]) -> str:
    return f"{statistics.fmean(counts):.1f}" if counts else "none"
