"""Feed-forward: C of a backend is set *before* a burst that is expected, where that is known to help.

The loop reacts: a burst has broken a promise for some seconds when the first cap holds. Where bursts recur,
or the policy has lower caps from the coming hour on, C can be in force when the burst begins:

    the loop acted here --> its volumes are watched: high or low use, in bins (``feed_forward_pattern``)
    a pattern is clear  --> a burst is *expected*; every n-th, the first too, is left alone
    15 s before         --> C that the loop knows to be kept, in phase ``hold``: it goes on from there
    the burst           --> bad windows of all promises of the backend are counted (``feed_forward_trial``)

So this decides one thing only: whether the loop begins before a burst or in it. What it sets is what the
loop found last, on volumes (or clients of them) that the loop slowed down; they lie below the victims'
priority, and none has a promise of its own. It is a layer like any cap of the loop: the policy's caps, agreed
caps and floors hold beside it, so it can only narrow. A cap is no reservation, it is set only where it takes
nothing of what is done now, and the loop releases one that is not felt for 30 s: a burst that does not come
costs nothing. I/Os that C holds back show that a burst may have come; they prove none.

It is off by evidence, for a time that doubles: if bursts with C ahead have not clearly fewer bad windows
than those left alone (``AHEAD_NO_HELP``), or bursts expected did not come (``AHEAD_NO_BURST``). Evidence is
about one storage, one set of promises and one mode: it is discarded when any of them changes, and when the
storage hangs or fails; a burst in which caps did not hold, or no victim had I/O, is none.

State: one ``Watched`` for each backend in which the loop acted since the process began, 64 at most; a restart
forgets them, and they are learned again. Pure: no clock, no I/O. Changed only by the controller's one thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decision_log import LoopBefore
from sla_server.services.control.decisions import DecisionKind, Reason
from sla_server.services.control.feed_forward_pattern import TOLERANCE_BINS, next_onset, recurrence
from sla_server.services.control.feed_forward_watch import Expected, Watched
from sla_server.services.control.loop_context import LoopContext
from sla_server.services.control.loop_step import LoopStep
from sla_server.services.control.pieces import Ints
from sla_server.services.control.scopes import Key
from sla_server.services.control.sharing import Neighbour, floor_for, may_slow
from sla_server.services.control.targets import named, volume_of
from sla_server.services.control.throttle import LoopMemory
from sla_server.services.control.victims import Need, Victim

MOST_WATCHED: Final = 64
"""Backends watched; the one whose loop acted longest ago gives way. Each costs some 0.1 ms a second."""
LOUD_RATIO: Final = 0.7
"""Of the use at which the loop first acted: from here on a volume's use is a burst."""
HELD_RATIO: Final = 0.5
"""Of C in use, while I/Os are held back: more than C is wanted, and C may just have been raised."""
FELT_RATIO: Final = 0.9
"""C is not set ahead where its volumes use more of it now: it would take from what is no burst."""
WATCHED_BINS: Final = 6
"""Of a burst in which bad windows are counted: the loop has had its say within a minute."""


@dataclass(slots=True)
class Counters:
    """Since the process began.

    Attributes:
        looks, clear: for a pattern, at the end of each bin; and how often there was one.
        expected: bursts; of them ``came`` and ``missed``.
        ahead, left_alone: bursts with C set before, and without.
        bad_ahead, bad_alone: bad windows in those that came.
        switched_off: by evidence.
        discarded: times that evidence was discarded, as it was about something else.
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
    discarded: int = 0


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

    def __init__(self, context: LoopContext) -> None:
        self.backends: dict[str, Watched] = {}
        self.counters = Counters()
        self._settings, self._own = context.settings, context.settings.feed_forward
        self._inventory, self._scopes, self._policy = context.inventory, context.scopes, context.policy
        self._faults, self._log = context.faults, context.log
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
            watched = self.backends.get(control.backend)
            if watched is None:
                if len(self.backends) >= MOST_WATCHED:
                    del self.backends[min(self.backends, key=lambda name: self.backends[name].learned_ns)]
                watched = self.backends[control.backend] = Watched(modes=self._modes_on(control.backend))
            if watched.learn(control, step, before, now_ns):
                # The storage gives another rate now: only this burst, without C ahead, is evidence about it.
                self.counters.discarded += sum(trial.discard() for trial in watched.trials.values()) > 0
            elif watched.expected is not None and watched.fell_short(control):
                watched.trial(watched.expected.reason).is_doubtful = True  # the next burst, left alone, tells

    def modes_changed(self) -> None:
        """A mode of the server, of a backend or of an agreement is another one: so is what bursts come to."""
        for backend, watched in self.backends.items():
            modes = self._modes_on(backend)
            if modes != watched.modes:
                watched.modes = modes
                self._discard(watched)

    def promises_changed(self, backends: Collection[str]) -> None:
        """On these backends other promises are in force: other windows are bad."""
        for backend in backends:
            if (watched := self.backends.get(backend)) is not None:
                watched.modes = self._modes_on(backend)
                self._discard(watched)

    def poll(self, controls: Mapping[str, BackendControl], now_ns: int, unix_us: int) -> list[PrePosition]:
        """Once a poll: follow the load of each backend watched; what must be put in force now."""
        if now_ns < self._next_ns or not self.backends:
            return []
        self._now_ns, self._next_ns = now_ns, now_ns + round(self._settings.poll_interval_s * 1e9)
        found = []
        for backend, watched in self.backends.items():
            control = controls[backend]
            is_used = self._sample(control, watched, now_ns / 1e9)
            self._follow_fault(backend, watched)
            if watched.expected is not None:
                self._watch(control, watched, watched.expected, is_used, unix_us)
            elif not watched.is_loud:
                ready = self._expect(control, watched, unix_us)
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

    # What evidence is about.

    def _modes_on(self, backend: str) -> dict[str, str]:
        """Mode of each agreement with a promise on a backend; "" for what has no agreement."""
        names = {scope.promise.sla for scope in self._scopes.on_backend(backend)}
        return {name: self._policy.mode_of(backend, name) for name in ("", *names)}

    def _discard(self, watched: Watched) -> None:
        self.counters.discarded += watched.discard()

    def _follow_fault(self, backend: str, watched: Watched) -> None:
        """What was learned before the storage hung or failed may be about another storage."""
        at_fault = self._faults.since_ns(backend) is not None
        if at_fault and not watched.at_fault:
            self._discard(watched)
            watched.forget_capacity()
        watched.at_fault = at_fault

    # The load.

    def _sample(self, control: BackendControl, watched: Watched, now_s: float) -> bool:
        """Follow the load; whether its volumes do the I/O of a burst, whatever C holds back."""
        use, is_held = self._load(control.backend, watched)
        is_used = use >= LOUD_RATIO * watched.start
        is_loud = is_used or (control.active and is_held and use >= HELD_RATIO * control.allowed)
        if watched.sample(is_loud, self._own.bin_s, now_s):
            watched.pattern = recurrence(watched.bins)
            self.counters.looks += 1
            self.counters.clear += watched.pattern is not None
            watched.next_s = None
            if watched.pattern is not None:
                period_s = watched.pattern.period_bins * self._own.bin_s
                watched.next_s = next_onset(tuple(watched.onsets_s), period_s, self._tolerance_s, now_s)
        return is_used

    def _load(self, backend: str, watched: Watched) -> tuple[float, bool]:
        """Cost rate of the volumes, or clients of divided ones, that the loop slowed down last.

        Returns:
            (cost units a second, whether I/Os of any are held back).
        """
        here, use, is_held = self._inventory.backends().get(backend, ()), 0.0, False
        for target in watched.volumes:
            if volume_of(target) in here:
                neighbour = self._inventory.neighbour(target, None, backend)
                use += neighbour.cost_per_s
                is_held |= neighbour.queueing
        return use, is_held

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
        is_ahead = watched.trial(reason).is_ahead(self._own, self._now_ns / 1e9)
        rows = self._rows_on(control.backend)
        seen, _ = self._scopes.table.newest_over(rows)  # what is bad already is not this burst's
        watched.expected, watched.is_ahead = Expected(reason, at_s, is_ahead, rows, seen), is_ahead
        watched.set_ahead = ready.allowed if is_ahead else 0.0
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
        for volume in dict.fromkeys(map(volume_of, watched.volumes)):
            coming = self._coming.get(volume)
            now = layer[volume].rates.cost_per_s if volume in layer else None
            is_lower = coming is not None and (now is None or coming < now)
            if is_lower and self._policy.enforces("policy", volume):
                return True
        return False

    def _ready(
        self, control: BackendControl, watched: Watched, reason: Reason, at_s: float
    ) -> PrePosition | None:
        """C as it would be put in force now; None while the loop is at work, or nothing is at stake."""
        backend = control.backend
        if control.active or self._now_ns < control.quiet_until_ns:
            return None
        if watched.at_fault or not watched.allowed:
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
            managed = {t: n for t, n in managed.items() if self._coming.get(volume_of(t)) is not None}
            wanted = min(wanted, sum(self._coming[v] or 0.0 for v in {volume_of(t) for t in managed}))
        allowed = max(wanted, sum(floor_for(lead.priority, n) for n in managed.values()))
        if not managed or allowed >= watched.start:
            return None
        if sum(n.cost_per_s for n in managed.values()) > FELT_RATIO * allowed:
            return None  # what is done before the burst is not the burst
        text = self._text(watched, reason, at_s, lead, managed, allowed)
        loop = LoopMemory(watched.start, watched.ceiling)
        keys = frozenset(victim.key for victim in victims)
        return PrePosition(backend, reason, text, allowed, managed, lead, keys, loop, watched.r_free)

    def _managed(self, backend: str, watched: Watched, lead: Victim) -> dict[str, Neighbour]:
        """Those that the loop slowed down and may slow down again, without a promise of their own."""
        here, found = self._inventory.backends().get(backend, ()), {}
        for target in watched.volumes:
            if volume_of(target) not in here or target in lead.volumes:
                continue
            if not self._inventory.can_be_managed(target):
                continue
            neighbour = self._inventory.neighbour(target, None, backend)
            lower = neighbour.priority < lead.priority and may_slow(lead.priority, lead.urgency, neighbour)
            if lower and not self._scopes.is_promised(target):
                found[target] = neighbour
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
        return f"ahead of time for {lead.name}: {why}; {named(managed)} to {allowed:.0f} weighted IOPS"

    # What came of it.

    def _watch(
        self, control: BackendControl, watched: Watched, expected: Expected, is_used: bool, unix_us: int
    ) -> None:
        """Follow a burst that is expected or has begun; at its end, judge."""
        now_s, own = self._now_ns / 1e9, self._own
        self._count_bad(expected)
        expected.is_void |= bool(control.away)  # the caps of a gateway that is lost lapse
        expected.is_proven |= is_used
        if not expected.came:
            if watched.is_loud:
                length_s = WATCHED_BINS * own.bin_s
                if watched.pattern is not None:
                    length_s = min(length_s, watched.pattern.period_bins * own.bin_s / 2)
                expected.came, expected.until_s = True, now_s + length_s
                return
            if now_s <= expected.at_s + self._tolerance_s:
                return
        else:
            self._follow_victims(watched, expected)
            if now_s < expected.until_s:
                return
        watched.expected = None
        self.counters.came += expected.came
        self.counters.missed += not expected.came
        if expected.came:
            self.counters.bad_ahead += expected.bad * expected.is_ahead
            self.counters.bad_alone += expected.bad * (not expected.is_ahead)
        self._judge(control.backend, watched, expected, unix_us)

    def _judge(self, backend: str, watched: Watched, expected: Expected, unix_us: int) -> None:
        """Enter a burst as evidence, if it is any, and see what follows."""
        if expected.is_void or (expected.came and not expected.is_asked):
            return
        trial = watched.trial(expected.reason)
        if not expected.came:
            trial.miss()
        elif trial.add(expected.burst(self._now_ns / 1e9)):
            self.counters.discarded += 1
        trial.is_doubtful |= watched.doubt != 0  # one more without C ahead tells storage from demand
        reason = trial.why_off(self._own)
        if reason is not None:
            if trial.nothing_to_save:
                watched.forget_capacity()
            self._switch_off(backend, watched, expected.reason, reason, unix_us)

    def _rows_on(self, backend: str) -> Ints:
        """Rows, over all backends, of the promises with streams on this one; shape (n,)."""
        keys = (scope.promise.key for scope in self._scopes.on_backend(backend))
        found = (self._scopes.over_all(key) for key in keys)
        return np.array([scope.row.row for scope in found if scope is not None], dtype=np.int64)

    def _count_bad(self, expected: Expected) -> None:
        """Windows in which a promise of the backend was broken, whatever was slowed down; each once."""
        if not len(expected.rows):
            return
        changes, is_bad = self._scopes.table.newest_over(expected.rows)
        expected.bad += int(np.count_nonzero(is_bad & (changes != expected.seen)))
        expected.seen = changes

    def _follow_victims(self, watched: Watched, expected: Expected) -> None:
        """How those for whom C is set fare in the burst."""
        for key in watched.victims:
            scope = self._scopes.over_all(key)
            if scope is None or scope.row.is_excluded:
                continue
            signal = scope.row.signal()
            if signal.windows and not signal.excuse:
                expected.is_asked, expected.r = True, max(expected.r, signal.r)

    def _switch_off(self, backend: str, watched: Watched, kind: Reason, why: Reason, unix_us: int) -> None:
        trial = watched.trial(kind)
        (ahead, alone), missed, nothing_to_save = trial.bad(), trial.missed, trial.nothing_to_save
        off_s = trial.switch_off(self._own, self._now_ns)
        self.counters.switched_off += 1
        if why is Reason.AHEAD_NO_BURST:
            came = f"{missed} bursts that were expected did not come"
        elif nothing_to_save:
            came = f"the last {len(alone)} bursts without caps ahead of them broke no promise"
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
