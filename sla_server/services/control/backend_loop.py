"""The loop of one backend: how much all slowed-down volumes together may use, and when that changes.

    phase      idle -> decrease -> hold <-> increase -> idle (release)
    C          allowed cost rate of the managed volumes; starts from what they use, not from what they might
    managed    the volumes that are slowed down: the least important class, and more only when that is not
               enough; one that is not needed any more is let go again (``unneeded``). Of a divided volume it
               is clients, which come and go in their volume's place (``client_turnover``)
    ceiling    lowest C at which risk was met recently; C is parked a little below it and probes it rarely.
               What was learned while a gateway was away is forgotten when it is back: its caps had lapsed
    gate       what was made under the caps last set (``cap_gate``); while it is shut no window is formed and
               nothing is decided
    rest       after attempts without effect; it ends early when the trouble has ended meanwhile

Each step answers one question: given what the victims' windows say under the caps in force, should C change?
It never decides twice on the same evidence, because a change shuts the gate and empties the windows.

The increase differs from SLA-MODEL.md's C0/16: docs/adr/0002-approach-the-ceiling.md, 0062 to 66, 73, 75.

Pure: no clock, no I/O; ``now_ns`` is monotonic. Changed only by the controller's one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sla_server.services.control.cap_gate import CapGate
from sla_server.services.control.decisions import Reason
from sla_server.services.control.effect import SAME_RATIO, Effect, Freed
from sla_server.services.control.first_use import grown_to
from sla_server.services.control.loop_step import NOTHING, LoopStep, Moves, Notices, Phase, Report
from sla_server.services.control.nearness import Nearness
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import (
    Neighbour,
    by_class,
    class_of,
    cost_of,
    floor_for,
    gives_way,
    part_of,
    why_none,
)
from sla_server.services.control.strides import Strides
from sla_server.services.control.targets import client_of, named
from sla_server.services.control.throttle import LoopMemory
from sla_server.services.control.victims import (
    ASKS_NOTHING,
    Key,
    Need,
    Victim,
    figures_of,
    helped_with,
    why_over,
)

PLENTY_RATIO: Final = 1.1
"""A rate this far above its floor can still give; what is left of the rest is not worth a step."""
FELT_RATIO: Final = 0.8
"""Volumes that use less of C, and hold nothing back, do not feel it."""


@dataclass(slots=True)
class BackendControl:
    """State of one backend's loop; see the module for the words."""

    settings: ControlSettings
    backend: str
    phase: Phase = Phase.IDLE
    allowed: float = 0.0
    start: float = 0.0
    carried: float = 0.0  # by the storage, of all its volumes
    given: float = 0.0  # by the storage, of all, at the most when C had to be lowered
    ceiling: float = 0.0
    managed: dict[str, Neighbour] = field(default_factory=dict)
    lead: Victim | None = None
    victims: set[Key] = field(default_factory=set)
    gate: CapGate = field(default_factory=CapGate)
    settling: bool = False
    is_ahead: bool = False  # C was set before a burst and not lowered since: nothing says that it is too low
    changed_ns: int = 0
    clear_since_ns: int | None = None
    calm_since_ns: int = 0  # later by the time in which C was not felt
    is_learning: bool = False  # the first cut does not hold yet: what they use is what they want
    peaks: float = 0.0  # of the managed volumes, when it was made
    grew: bool = False  # they used clearly more until it held: what is late at first is of that
    probes: int = 0  # beyond the ceiling, in a row, that brought no promise near its threshold
    effect: Effect = field(init=False)
    near: Nearness = field(init=False)
    strides: Strides = field(default_factory=Strides)
    hold_up_factor: int = 1
    moves: Moves = field(default_factory=Moves)
    demands: deque[tuple[int, float]] = field(default_factory=deque)
    watched_from_ns: int = 0  # without a longer time in which no step was taken, as the storage hung
    quiet_until_ns: int = 0
    notices: Notices = field(default_factory=Notices)
    helpless_since_ns: int | None = None  # at risk without a break, and no neighbour found to slow down
    away: dict[str, float] = field(default_factory=dict)  # gateways that were lost, and the ceiling then
    rests_without: frozenset[str] = frozenset()  # those of them that were away when the last attempt ended
    calm_from_ns: int | None = None  # nothing is at risk since then
    ends: dict[str, float] = field(default_factory=dict)  # of managed volumes above their curves: its end
    fits_from_ns: dict[str, int] = field(default_factory=dict)  # since when a managed volume feels no cap
    unused_from_ns: dict[str, int] = field(default_factory=dict)  # since when a managed client uses nothing
    turned_ns: int | None = None  # when clients of managed volumes joined or left last

    def __post_init__(self) -> None:
        self.effect, self.near = Effect(self.settings), Nearness(self.settings)

    @property
    def active(self) -> bool:
        """Whether C is in force."""
        return self.phase is not Phase.IDLE

    def adopt(
        self,
        managed: Mapping[str, Neighbour],
        victims: set[Key],
        allowed: float,
        loop: LoopMemory | None = None,
    ) -> None:
        """Take over caps found in force after a restart, and what was learned before if it was kept."""
        self.phase, self.managed, self.victims = Phase.HOLD, dict(managed), set(victims)
        self.settling, self.changed_ns = True, 0
        known = loop or LoopMemory(allowed, allowed / self.settings.park_ratio)
        self.allowed, self.start, self.ceiling = allowed, known.start, known.ceiling

    def leave_out(self, volumes: Iterable[str], shares: Mapping[str, float] | None = None) -> None:
        """These volumes are no longer slowed down: C is about the others from now on.

        Args:
            volumes: managed ones.
            shares: what each has of C; without them, it is taken to be in proportion to its use, or to its
                floor, if that is more: C of those that pause just now would be 0, and never rise again.
        """
        total = sum(max(n.cost_per_s, n.floor) for n in self.managed.values())
        gone = [self._part_with(volume) for volume in volumes]
        if shares is not None:
            self._resize(1.0, -sum(shares.get(n.volume, 0.0) for n in gone))
        elif total > 0:
            self._resize(sum(max(n.cost_per_s, n.floor) for n in self.managed.values()) / total, 0.0)
        if not self.managed:
            self.reset()

    def replace(self, leave: Iterable[str], join: Iterable[Neighbour], more: float = 0.0) -> None:
        """Other targets take the place of some in C, which changes only by ``more``."""
        for target in leave:
            self._part_with(target)
        self.managed |= {n.volume: n for n in join}
        self._resize(1.0, more)

    def _part_with(self, target: str) -> Neighbour:
        """Nothing that was noted of it remains: clients come under new names for months."""
        for noted in (self.ends, self.fits_from_ns, self.unused_from_ns):
            noted.pop(target, None)
        return self.managed.pop(target)

    def _resize(self, ratio: float, more: float) -> None:
        """The managed volumes are others: C and what was learned of it are changed alike."""
        before, c0 = self.allowed, self.start
        self.allowed, self.start, self.ceiling = (
            max(rate * ratio + more, 0.0) for rate in (self.allowed, self.start, self.ceiling)
        )
        if self.allowed < before:  # beyond C0, what goes may have more of C than C0 was: steps would be 0
            self.start = max(self.start, c0 * self.allowed / before)
        self.effect.resize(ratio, more)
        self.is_learning = False  # what others used says nothing of these
        self.away = {
            gateway: rate if math.isinf(rate) else max(rate * ratio + more, 0.0)
            for gateway, rate in self.away.items()
        }

    def lost(self, gateway_id: str) -> None:
        """A gateway with volumes of this backend is lost: from its lease's end on its caps do not hold."""
        self.gate.awaiting.pop(gateway_id, None)
        self.away.setdefault(gateway_id, self.ceiling if self.active else float("inf"))

    def came_back(self, gateway_id: str) -> None:
        """It holds its caps again: what was learned without them says nothing of now, nor did it count."""
        self.start = max(self.start, sum(n.peak for n in self.managed.values()))
        self.ceiling = max(self.ceiling, min(self.away.pop(gateway_id), self.start))
        if gateway_id in self.rests_without:
            self.end_rest()

    def end_rest(self) -> None:
        """The trouble that no attempt could help has ended."""
        self.quiet_until_ns, self.rests_without = 0, frozenset()
        self.effect.freed = self.effect.rest = None

    def reset(self) -> None:
        """Give up C and what was learned; back-off, futile attempts and the times of reports stay."""
        self.is_ahead, self.probes = False, 0
        self.effect.reset()
        self.near.reset()
        self.gate.drain.stop()
        self.strides = Strides()
        self.is_learning, self.grew = False, False
        self.phase, self.allowed, self.start, self.ceiling, self.given = Phase.IDLE, 0.0, 0.0, 0.0, 0.0
        self.managed, self.victims, self.lead = {}, set(), None
        self.clear_since_ns, self.hold_up_factor, self.settling = None, 1, False
        self.ends, self.fits_from_ns, self.unused_from_ns = {}, {}, {}
        self.away = dict.fromkeys(self.away, float("inf"))  # of another C nothing is known yet
        self.moves.made.clear()
        self.demands.clear()

    def pre_position(
        self,
        managed: Mapping[str, Neighbour],
        lead: Victim,
        victims: Iterable[Key],
        allowed: float,
        loop: LoopMemory,
        r_free: float,
        now_ns: int,
    ) -> None:
        """C before a burst that is expected (``feed_forward``); from here on it moves like any other.

        ``r_free``: r without caps; the effect of decreases is measured from it, or what C has done already
        would not count, and the neighbours be released in the middle of the burst.
        """
        self.phase, self.managed, self.victims, self.lead = Phase.HOLD, dict(managed), set(victims), lead
        self.allowed, self.start, self.ceiling = allowed, loop.start, loop.ceiling
        self.changed_ns = self.calm_since_ns = now_ns
        self.is_ahead, self.effect.r_free = True, r_free

    def step(self, victims: Sequence[Victim], neighbours: Mapping[str, Neighbour], now_ns: int) -> LoopStep:
        """At most one change. Call it with the windows of this gate only."""
        self._refresh(neighbours, now_ns)
        if self.active and (released := self._release(victims, now_ns)):
            return released
        at_risk = [v for v in victims if v.need is Need.AT_RISK]
        self._follow_trouble(victims, now_ns)
        if self.gate.is_open:
            self.effect.follow(victims, now_ns)
        asking = [v for v in victims if v.need not in ASKS_NOTHING]
        if at_risk and self.gate.is_open:
            most = min(self.effect.least(v, now_ns) for v in at_risk)
            if self.active and self.allowed < SAME_RATIO * most:  # up to there C makes no difference to them
                step = self._recover([v for v in asking if v.need is not Need.AT_RISK], now_ns, most)
                if step.changed:
                    return step
            else:
                self.clear_since_ns = None
                self.calm_since_ns, self.probes = now_ns, 0
            lead = self.effect.lead_of(at_risk, self.allowed)
            return self._protect(lead, victims, neighbours, now_ns)
        if self.active and self.gate.is_open:
            return self._recover(asking, now_ns)
        return NOTHING

    # What the step is made of.

    def _refresh(self, neighbours: Mapping[str, Neighbour], now_ns: int) -> None:
        self.managed = {v: self._seen(neighbours.get(v, n), now_ns) for v, n in self.managed.items()}
        if not self.active:
            return
        self.carried = cost_of(neighbours)
        if self.settling and not self.changed_ns:
            self.changed_ns = self.calm_since_ns = now_ns
        if self.gate.drain.is_on:  # by Little's law, what C lets be there
            promised_us = 0 if self.lead is None else self.lead.signal.threshold_us or 0
            most = self.allowed * promised_us / 1e6
            self.gate.follow_drain(self.managed.values(), most, self.settings.drain_max_s, now_ns)
        if self.is_learning:
            if (used := grown_to(self.managed.values(), self.start, self.peaks)) is not None:
                self.grew, self.start, self.ceiling = True, used, used
            self.is_learning = not self.gate.is_confirmed
        before_ns = self.demands[-1][0] if self.demands else 0
        is_unseen = now_ns - before_ns > self.settings.settled_s * 1e9
        if is_unseen:
            self.watched_from_ns = now_ns
        if before_ns and (is_unseen or self._is_slack()):
            self.calm_since_ns += now_ns - before_ns  # only C that is felt can show that it is kept
        demand = sum(float("inf") if n.queueing else n.cost_per_s for n in self.managed.values())
        self.demands.append((now_ns, demand))
        while now_ns - self.demands[0][0] > self.settings.demand_memory_s * 1e9:
            self.demands.popleft()

    def _seen(self, n: Neighbour, now_ns: int) -> Neighbour:
        """A managed volume as it is now; one that was above its curve keeps what its curve promises."""
        if n.cost_per_s > 0 or n.queueing or not client_of(n.volume):
            self.unused_from_ns.pop(n.volume, None)
        else:
            self.unused_from_ns.setdefault(n.volume, now_ns)
        if n.queueing or n.curve_end is not None:
            self.fits_from_ns.pop(n.volume, None)
        else:
            self.fits_from_ns.setdefault(n.volume, now_ns)
        if n.curve_end is not None and (self.lead is None or n.priority >= self.lead.priority):
            self.ends[n.volume] = n.curve_end
        end = self.ends.get(n.volume)
        return n if end is None or end == n.curve_end else replace(n, curve_end=end)

    def _follow_trouble(self, victims: Sequence[Victim], now_ns: int) -> None:
        """A rest ends once promises have been kept for as long as it takes to call a violation ended."""
        needs = {v.need for v in victims}
        if Need.AT_RISK in needs:
            self.calm_from_ns = None
            return
        self.helpless_since_ns = None
        if not needs & {Need.CLEAR, Need.HOLD}:
            self.calm_from_ns = None  # nothing is known of the trouble
        elif self.calm_from_ns is None:
            self.calm_from_ns = now_ns
        elif now_ns - self.calm_from_ns >= self.settings.episode_calm_s * 1e9:
            self.end_rest()

    def _release(self, victims: Sequence[Victim], now_ns: int) -> LoopStep | None:
        waiting = [v for v in victims if v.key in self.victims]
        if self.settling:
            # Just restarted: gateways and their streams are still coming in. No gateway is gone before a
            # lease has ended.
            self.settling = (
                not all(v.need is not Need.UNKNOWN for v in waiting)
                or {v.key for v in waiting} != self.victims
            ) and now_ns - self.changed_ns < self.settings.lease_s * 1e9
            if self.settling:
                return None
        open_needs = {v.need for v in waiting} - ASKS_NOTHING
        if not open_needs:
            reason, why = why_over(waiting, self.victims, self.settings.idle_release_s)
            return self._give_up(reason, why, now_ns)
        demand = max(demand for _, demand in self.demands)
        known_ns = now_ns - max(self.changed_ns, self.watched_from_ns)
        remembered = known_ns >= self.settings.demand_memory_s * 1e9
        if remembered and self.allowed >= self.settings.release_factor * demand:
            text = f"{self.allowed:.0f} weighted IOPS is allowed and at most {demand:.0f} was wanted recently"
            return self._give_up(Reason.DEMAND_FITS, text, now_ns)
        return None

    def _give_up(self, reason: Reason, text: str, now_ns: int) -> LoopStep:
        self.reset()
        if self.effect.rest is not None and now_ns < self.effect.rest[1]:
            self.effect.freed, self.quiet_until_ns = self.effect.rest  # others are not helped by caps
        return LoopStep(changed=True, reason=reason, text=text)

    def _protect(
        self, lead: Victim, victims: Sequence[Victim], neighbours: Mapping[str, Neighbour], now_ns: int
    ) -> LoopStep:
        s, at_risk = self.settings, [v for v in victims if v.need is Need.AT_RISK]
        if now_ns < self.quiet_until_ns:
            found = self.effect.take_back(victims, self.quiet_until_ns, now_ns)
            return NOTHING if found is None else self._take_back(*found, victims, neighbours, now_ns)
        if self.active and now_ns - self.changed_ns < s.hold_down_for(lead.signal.latency_us / 1e6) * 1e9:
            return NOTHING
        r = max(lead.signal.r_step, lead.signal.r_middle, 1e-9)
        factor = min(max(1 / r, s.decrease_min), s.decrease_max)
        no_effect = self.active and self.effect.had_none(lead, self.allowed)
        is_least = self.active and self.effect.least(lead, now_ns) >= SAME_RATIO * self.allowed
        rose = self._manage(lead, neighbours, factor, no_effect or is_least)
        if not self.managed:
            return self._helpless(
                lead, *why_none(lead.volumes, lead.priority, lead.urgency, neighbours, s), now_ns
            )
        if not any(gives_way(lead.priority, n) for n in self.managed.values()):
            # The caps in force were set for a more important promise: it decides what is slowed down next.
            return self._report("infeasible", now_ns, lead, "the backend works for a higher priority")
        if no_effect and not rose:
            return self._restore(lead, victims, now_ns)
        floors = self._floors(lead)
        # A cap above what the storage gives any more is not felt: as a first cut, the step is from the use.
        used = sum(n.cost_per_s for n in self.managed.values())
        felt = max(used, s.decrease_min * self.allowed) if self._is_slack() else self.allowed
        least = max(floors, self.effect.least(lead, now_ns))
        wanted = max(least, felt * factor)
        if not self.grew and least < SAME_RATIO * self.allowed:  # else what is late is of before, or of no C
            self.ceiling = min(self.ceiling, felt, self._given())
        if wanted >= SAME_RATIO * self.allowed:
            return self._at_floor(lead, victims, least > floors, now_ns)
        self.helpless_since_ns, self.grew = None, False
        if not self.active:
            self.is_learning, self.peaks = True, sum(n.peak for n in self.managed.values())
            self.carried = cost_of(neighbours)
        self.effect.count(lead, at_risk, self.allowed, is_first=not self.active)
        self.lead = lead
        others = helped_with(lead, [v for v in at_risk if v.key not in self.effect.useless], self.managed)
        self.victims |= {v.key for v in (lead, *others)}
        names = named(self.managed)
        also = f"; at risk, too: {named(v.name for v in others)}" if others else ""
        text = f"{figures_of(lead)}{also}: {names} from {self.allowed:.0f} to {wanted:.0f} weighted IOPS"
        reason = Reason.PROMISE_VIOLATED if lead.signal.u > 1 else Reason.PROMISE_AT_RISK
        return self._move(wanted, Phase.DECREASE, reason, text, lead, now_ns)

    def _is_slack(self) -> bool:
        """Whether the managed volumes do not feel C: none holds I/Os back, and they use clearly less."""
        used = sum(n.cost_per_s for n in self.managed.values())
        return not any(n.queueing for n in self.managed.values()) and used < FELT_RATIO * self.allowed

    def _given(self) -> float:
        """What the storage gave the managed volumes at the last, if none of them was held back by its cap."""
        if not self.active or any(n.queueing for n in self.managed.values()):
            return math.inf
        last = sum(n.last_cost_per_s for n in self.managed.values())
        return max(last, self.settings.decrease_min * self.allowed)

    def _floors(self, lead: Victim) -> float:
        return sum(floor_for(lead.priority, n) for n in self.managed.values())

    def _manage(
        self, lead: Victim, neighbours: Mapping[str, Neighbour], factor: float, no_effect: bool
    ) -> bool:
        """Let in the neighbours that count, class by class; each brings its present use into C.

        A class comes in when those below it are at their floors, or slowing them down had no effect; of a
        first cut, when they could not give what it takes.

        Returns:
            Whether there was a class more to let in.
        """
        classes = by_class(lead.priority, lead.urgency, lead.volumes, neighbours, self.settings)
        highest = max((class_of(lead.priority, n) for n in self.managed.values()), default=0)
        parts, rose = set(map(part_of, self.managed.values())), False
        for at, (rank, members) in enumerate(classes):
            if rank > highest:
                rest = sum(n.cost_per_s for _, each in classes[at:] for n in each)
                if self.managed and not no_effect and self._can_give(lead, factor, rest):
                    break
                rose, no_effect, highest = True, False, rank
            for n in members:
                if n.volume not in self.managed:
                    # A client more of what is managed shares what the others have.
                    self._let_in(n, lead, 0.0 if part_of(n) in parts else n.cost_per_s)
        if rose and self.active:
            self.effect.others()
        return rose

    def _let_in(self, n: Neighbour, lead: Victim, more: float) -> None:
        self.managed[n.volume] = n
        if n.curve_end is not None and n.priority == lead.priority:
            self.ends[n.volume] = n.curve_end
        self._resize(1.0, more)

    def _can_give(self, lead: Victim, factor: float, rest: float) -> bool:
        """Whether the classes that are managed suffice; ``rest``: what those use that are not."""
        floors = self._floors(lead)
        if self.active:
            return self.allowed > PLENTY_RATIO * floors
        return self.allowed - floors >= (1 - factor) * (self.allowed + rest)

    def _helpless(self, lead: Victim, kind: str, why: str, now_ns: int) -> LoopStep:
        """Nobody can be slowed down; said once that has held for a while, as harm precedes a first cut."""
        if self.helpless_since_ns is None or not lead.fresh:
            self.helpless_since_ns = now_ns
        if now_ns - self.helpless_since_ns < self.settings.settled_s * 1e9:
            return NOTHING
        return self._report(kind, now_ns, lead, why)

    def _restore(self, lead: Victim, victims: Sequence[Victim], now_ns: int) -> LoopStep:
        r, effect = lead.signal.r_step, self.effect
        names, where = named(self.managed), "is elsewhere"
        if effect.is_nil(lead, self.allowed):
            found = (
                f"{effect.decreases} decreases of {names} from {self.start:.0f} to {self.allowed:.0f} "
                f"weighted IOPS changed r from {effect.before[lead.key]:.2f} to {r:.2f} only"
            )
        else:
            found, where = f"{names} at their floors did not suffice", "may be elsewhere"
        if (least := effect.stop_at(victims, self.allowed, now_ns)) is not None:
            self.ceiling = max(self.ceiling, least)
            why = f"{found}, but r rises without them: back to {least:.0f}, as far as slowing down helps"
            said = self._report("infeasible", now_ns, lead, why)
            text = f"{figures_of(lead)}; {why}"
            step = self._move(max(least, self.allowed), Phase.HOLD, Reason.RECOVERY, text, lead, now_ns)
            return (
                step if step.notice else replace(said, changed=True, reason=step.reason, text=text, lead=lead)
            )
        quiet_s = effect.rest_s(self.quiet_until_ns, now_ns)
        loop = self.allowed, self.start, self.ceiling
        effect.free(lead, victims, self.managed, self.victims, loop, quiet_s, now_ns)
        text = f"{figures_of(lead)}; {found}: the cause {where}. Restored for {quiet_s:g} s"
        self.reset()
        self.quiet_until_ns, self.rests_without = now_ns + round(quiet_s * 1e9), frozenset(self.away)
        self.notices.given["unattributed"] = Report(now_ns, quiet_s)
        return LoopStep(True, Reason.UNATTRIBUTED, text, "unattributed", text, lead.signal.u > 1, lead)

    def _take_back(
        self,
        freed: Freed,
        lead: Victim,
        victims: Sequence[Victim],
        neighbours: Mapping[str, Neighbour],
        now_ns: int,
    ) -> LoopStep:
        """They are slowed down as before the decreases that seemed to have no effect."""
        self.quiet_until_ns, self.rests_without = now_ns, frozenset()
        self.managed = {v: neighbours.get(v, n) for v, n in freed.managed.items()}
        self.victims = {lead.key, *(freed.victims & {v.key for v in victims} - freed.unhelped.keys())}
        self.allowed, self.start, self.ceiling, self.lead = freed.allowed, freed.start, freed.ceiling, lead
        able = {v for v, n in neighbours.items() if v not in lead.volumes and gives_way(lead.priority, n)}
        self.leave_out(sorted(self.managed.keys() - able))
        if not self.managed:
            return NOTHING  # others are there: the next step finds out who
        r, names = freed.r.get(lead.key), named(self.managed)
        why = f"r rose from {r:.2f} while {names} had no caps" if r else f"not known while {names} had caps"
        text = f"{figures_of(lead)}; {why}. Back to {self.allowed:.0f} weighted IOPS"
        reason = Reason.PROMISE_VIOLATED if lead.signal.u > 1 else Reason.PROMISE_AT_RISK
        return self._move(self.allowed, Phase.DECREASE, reason, text, lead, now_ns)

    def _at_floor(self, lead: Victim, victims: Sequence[Victim], is_useless: bool, now_ns: int) -> LoopStep:
        if not self.active:
            names = named(self.managed)
            self.reset()  # nothing was in force: the managed set was only a trial
            why = f"{names} use no more than their floors already"
            return self._helpless(lead, "unattributed", f"nobody to slow down: {why}", now_ns)
        is_doubtful = self.effect.is_doubtful(lead, (now_ns - self.changed_ns) / 1e9, now_ns)
        # It waits for its own cap: that is no cause elsewhere.
        is_own = not lead.volumes.isdisjoint(self.managed)
        if not is_useless and not is_own and (is_doubtful or self.effect.is_nil(lead, self.allowed)):
            return self._restore(lead, victims, now_ns)
        why = (
            "slowing its neighbours down further did not help"
            if is_useless
            else "its neighbours are at their floors already"
        )
        return self._report("infeasible", now_ns, lead, why)

    def _report(self, kind: str, now_ns: int, lead: Victim, why: str) -> LoopStep:
        return self.notices.step(kind, now_ns, lead, why, self.settings)

    def _recover(self, asking: Sequence[Victim], now_ns: int, most: float = math.inf) -> LoopStep:
        """C goes up, to ``most``, if all that ask are clear."""
        throttled = frozenset(self.managed)
        # A throttled volume's own promise suffers from our throttle; it must not keep the throttle in place.
        others = [v for v in asking if not v.volumes & throttled]
        known = [v for v in others if v.need is not Need.UNKNOWN]
        if known:
            self.near.see(known)
            self.grew, self.probes = False, self.probes if self.near.are_far(known) else 0
        if not others or any(v.need is not Need.CLEAR for v in others):
            self.clear_since_ns = None
            self.phase = (
                Phase.HOLD if others and all(v.need is not Need.UNKNOWN for v in others) else self.phase
            )
            return NOTHING
        biting = not self._is_slack()
        if self.clear_since_ns is None or (self.is_ahead and not biting):
            self.clear_since_ns = now_ns  # quiet before the burst says nothing of the burst
        if now_ns - self.clear_since_ns < self._hold_up_ns(others):
            return NOTHING
        if not biting:
            self.phase = Phase.HOLD  # a cap that is not felt is not evidence for a higher one
            return NOTHING
        worst = max(others, key=lambda v: v.signal.r)
        wanted = min(self._target(others, now_ns), most)
        if wanted <= self.allowed:
            self.phase = Phase.HOLD
            return NOTHING
        if most == math.inf:
            self.effect.helped()
        names = named(throttled)
        text = f"{figures_of(worst)}: {names} from {self.allowed:.0f} to {wanted:.0f} weighted IOPS"
        return self._move(wanted, Phase.INCREASE, Reason.RECOVERY, text, worst, now_ns)

    def _hold_up_ns(self, others: Sequence[Victim]) -> float:
        s = self.settings
        far = self.near.are_spare(others) and not self.is_ahead  # no decrease that overshot
        hold_s = s.hold_up_far_s if far else s.hold_up_s
        return min(hold_s * self.hold_up_factor, s.hold_up_max_s) * 1e9

    def _target(self, others: Sequence[Victim], now_ns: int) -> float:
        """The next C on the way to the parking place below the ceiling; beyond it only by a rare probe.

        Latency turns up steeply near saturation, so steps shrink as ``r`` nears ``park_r`` and end there.
        """
        s, is_far = self.settings, self.near.are_far(others)
        after_s = s.probe_after_s / 2 if self.probes > 1 and is_far else s.probe_after_s
        if now_ns - self.calm_since_ns >= after_s * 1e9 * self.hold_up_factor:
            self.calm_since_ns = now_ns
            divisor = s.increase_divisor * self.hold_up_factor
            self.ceiling += self.strides.step(self.start, self.carried, self.probes, self.ceiling, divisor)
            self.probes = self.probes + 1 if is_far else 0
        room = (s.park_ratio * self.ceiling - self.allowed) * self.near.margin(others)
        # A change that small is not worth new evidence; of C far beyond C0 it would not even be sent.
        smallest = max(self.start, self.allowed) / s.increase_divisor / 4
        if room < smallest:
            return self.allowed
        share = s.approach_ratio if self.ceiling < self.start else s.first_approach_ratio
        room = min(share / self.hold_up_factor * room, self.near.reach(others, self.given - self.carried))
        return self.allowed + max(room, smallest)

    def _move(
        self, wanted: float, phase: Phase, reason: Reason, text: str, lead: Victim, now_ns: int
    ) -> LoopStep:
        sign = 1 if wanted > self.allowed else -1
        if sign < 0:
            self.strides.lowered()
            self.given = max(self.given, self.carried)
            # An I/O costs 1 and more: what is under way lasts for that long, at least.
            self.gate.drain.begin(self.managed.values(), self.settings.drain_s * self.carried)
        self.is_ahead = self.is_ahead and sign > 0
        self.near.usual.clear()
        self.allowed, self.phase, self.changed_ns, self.clear_since_ns = wanted, phase, now_ns, None
        notice = ""
        if self.moves.turn_often(sign, now_ns, self.settings):
            most = max(1, round(self.settings.hold_up_max_s / max(self.settings.hold_up_s, 1e-9)))
            self.hold_up_factor, notice = min(self.hold_up_factor * 2, most), "control-oscillation"
        return LoopStep(True, reason, text, notice, text if notice else "", lead=lead)
