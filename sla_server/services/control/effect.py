"""Whether slowing volumes down helps promises: what the loop of one backend measures of its decreases.

    decreases  counted, with C and r of each promise at risk as they were before the first of them. After a
               few, r must have fallen by a tenth, else they had no effect on that promise; if it has, the
               next ones are measured from there
    freed      what was slowed down without effect, or to its floors for a minute and not enough, and has no
               caps any more, with r of all promises under them. If r of one is half as high again now, or
               none was known of it, they come back at once
    trial      the time after that. When r falls again, they had an effect after all: they are *proven*. When
               it does not, the next rest is longer, does not end for that promise a second time, nor for
               others in its first half
    useless    C below which decreases had no effect on a promise: while caps are proven, C goes no lower for
               it, and up to that although it is at risk

So a promise that its storage cannot keep even without neighbours is not given up to them (r may be 1.2 with
caps on them, and 16 without), and one that caps help does not lose them to one that they do not help. See
docs/adr/0065-what-caps-are-proven-by.md.

Pure: no clock, no I/O; ``now_ns`` is monotonic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pmdaemon.runtime.backoff import doubled
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour
from sla_server.services.control.victims import Key, Need, Victim, rank_of

ROSE_RATIO: Final = 1.5
"""r without caps above r with them: more than the storage's own noise, which is some 10 % of a percentile."""
SAME_RATIO: Final = 0.999
"""C that is lowered by less is the same."""
_MEASURED: Final = frozenset((Need.AT_RISK, Need.HOLD, Need.CLEAR))


class Freed(NamedTuple):
    """What was slowed down when its caps were taken off as without effect.

    Attributes:
        r: of each promise that was measured under the caps; infinite for one that a trial has not helped.
        late: those of them that were at risk all the same.
        unhelped: those of these that the decreases have not changed, and their r.
        managed, victims: of the loop then.
        allowed, start, ceiling: C before the decreases that had no effect, and what was known of it.
        from_ns: when it may come back.
    """

    r: Mapping[Key, float]
    late: frozenset[Key]
    unhelped: Mapping[Key, float]
    managed: Mapping[str, Neighbour]
    victims: frozenset[Key]
    allowed: float
    start: float
    ceiling: float
    from_ns: int


class Useless(NamedTuple):
    """C below which decreases had no effect on a promise, and its r there."""

    allowed: float
    r: float


@dataclass(slots=True)
class Effect:
    """Of the decreases of one backend's loop; see the module for the words."""

    settings: ControlSettings
    decreases: int = 0
    before: dict[Key, float] = field(default_factory=dict)  # r of each promise at risk
    r_before: float = 0.0  # of the one that led
    c_before: float = 0.0
    r_free: float = 0.0  # r that a burst has without caps, where C was set before it
    futile: int = 0  # attempts in a row that had no effect
    freed: Freed | None = None
    rest: tuple[Freed, int] | None = None  # of others than whom it was taken back for, and until when
    trial: tuple[Key, float] | None = None  # the promise whose r rose, and how high
    tried: set[Key] = field(default_factory=set)  # since the last attempt that began after a whole rest
    proof: Key | None = None  # the promise that caps are proven to help
    proofs: int = 0  # in a row
    proven_until_ns: int = 0
    useless: dict[Key, Useless] = field(default_factory=dict)

    def count(self, lead: Victim, at_risk: Iterable[Victim], allowed: float, *, is_first: bool) -> None:
        """One decrease of C from ``allowed``, for ``lead``; ``is_first``: nothing is slowed down yet."""
        if is_first:
            self.freed = None  # of a rest that has ended
        if is_first or not self.decreases:
            self.r_before = max(lead.signal.r_step, self.r_free)
            self.before = {v.key: v.signal.r_step for v in at_risk} | {lead.key: self.r_before}
            self.r_free, self.c_before = 0.0, allowed
        self.decreases += 1

    def is_nil(self, victim: Victim, allowed: float) -> bool:
        """Whether the decreases counted changed nothing for it: C is ``allowed`` now, clearly less."""
        least_change = 1 - self.settings.effective_ratio
        is_less = self.decreases > 0 and allowed <= least_change * self.c_before
        return is_less and victim.signal.r_step >= least_change * self.before.get(victim.key, math.inf)

    def had_none(self, lead: Victim, allowed: float) -> bool:
        """Whether enough decreases changed nothing, so that the volumes slowed down are not the cause."""
        if self.decreases < self.settings.effective_decreases:
            return False
        if self.is_nil(lead, allowed):
            return True
        if lead.key in self.before:
            self.futile = 0  # it helped
        self.decreases = 0  # measure the next ones from here
        return False

    def is_doubtful(self, lead: Victim, lasted_s: float, now_ns: int) -> bool:
        """Whether C, at the floors for ``lasted_s``, may be in vain: nothing proves an effect now."""
        is_long = lasted_s >= self.settings.backoff_s and now_ns >= self.proven_until_ns
        return is_long and lead.signal.u > 1

    def others(self) -> None:
        """More volumes are slowed down: the effect is measured from here on."""
        self.decreases = 0
        self.useless.clear()

    def helped(self) -> None:
        """The promises are kept: no attempt, and no decrease, was in vain."""
        self.decreases = self.futile = self.proofs = 0
        self.rest = None
        self.useless.clear()
        self.tried.clear()

    def resize(self, ratio: float, more: float) -> None:
        """The managed volumes are others, and C with them; of those that come nothing is known."""
        self.c_before, less = max(self.c_before * ratio + more, 0.0), min(more, 0.0)
        self.useless = {
            key: Useless(max(each.allowed * ratio + less, 0.0), each.r) for key, each in self.useless.items()
        }

    def reset(self) -> None:
        """C is given up; futile attempts and what was proven stay."""
        self.decreases, self.r_free, self.trial = 0, 0.0, None
        self.useless.clear()

    # Caps without effect: a rest, or no further.

    def rest_s(self, rested_until_ns: int, now_ns: int) -> float:
        """Seconds for which volumes are left alone: each attempt costs them some, and the cause may stay."""
        s = self.settings
        if now_ns - rested_until_ns > s.backoff_max_s * 1e9:
            self.futile = 0
        wait_s = doubled(s.backoff_s, self.futile, s.backoff_max_s)
        self.futile += 1
        return wait_s

    def free(
        self,
        lead: Victim,
        victims: Sequence[Victim],
        managed: Mapping[str, Neighbour],
        helped: Iterable[Key],
        loop: tuple[float, float, float],
        quiet_s: float,
        now_ns: int,
    ) -> None:
        """Caps without effect are taken off.

        Args:
            lead: the promise that decided.
            victims: all promises.
            managed: what they slowed down; ``helped``: for whom.
            helped: see there.
            loop: C, C0 and ceiling.
            quiet_s: length of the rest.
            now_ns: monotonic.
        """
        allowed, start, ceiling = loop
        from_ns, self.rest = now_ns, None
        if self.trial is None:
            self.tried.clear()
        else:
            from_ns += round(quiet_s / 2 * 1e9)
        r = {v.key: v.signal.r_step for v in victims if v.signal.r_step}
        late = [v for v in victims if v.need is Need.AT_RISK]
        unhelped = {v.key: v.signal.r_step for v in late if self.is_nil(v, allowed)}
        if lead.key in unhelped:
            allowed = self.c_before
        self.freed = Freed(
            r | dict.fromkeys(self.tried, math.inf),
            frozenset(v.key for v in late),
            unhelped | {lead.key: lead.signal.r_step},
            dict(managed),
            frozenset(helped),
            allowed,
            start,
            max(ceiling, allowed),  # what had no effect says nothing of where risk is met
            from_ns,
        )

    def take_back(
        self, victims: Sequence[Victim], rest_until_ns: int, now_ns: int
    ) -> tuple[Freed, Victim] | None:
        """What is slowed down again, and for whom; asked in the rest after it was freed.

        r of that promise rose when it was free; or none was known, as the promise had no I/O then. Of those
        that were at risk before, half must have risen: of many, one rises by chance at any time.
        """
        freed = self.freed
        if freed is None or now_ns < freed.from_ns:
            return None
        at_risk = [v for v in victims if v.need is Need.AT_RISK]
        rose = [v for v in at_risk if v.signal.r_step >= ROSE_RATIO * freed.r.get(v.key, 0.0)]
        late = [v for v in victims if v.key in freed.late and v.need in _MEASURED]
        found = [v for v in rose if v.key not in freed.late] or rose
        if not found or (found is rose and 2 * len(rose) < len(late)):
            return None
        lead = max(found, key=rank_of)
        self.freed, self.decreases, self.r_before = None, 0, lead.signal.r_step
        self.rest = (freed, rest_until_ns) if freed.unhelped.keys() - {lead.key} else None
        self.trial = lead.key, lead.signal.r_step
        self.tried.add(lead.key)
        self.useless = {key: Useless(freed.allowed, r) for key, r in freed.unhelped.items()}
        return freed, lead

    def follow(self, victims: Iterable[Victim], now_ns: int) -> None:
        """What the victims' windows under the caps in force say of a trial."""
        if self.trial is None:
            return
        key, r_free = self.trial
        seen = next((v for v in victims if v.key == key and v.need in _MEASURED), None)
        if seen is None or (seen.need is Need.AT_RISK and ROSE_RATIO * seen.signal.r_step > r_free):
            return
        s = self.settings
        self.proven_until_ns = now_ns + round(doubled(s.backoff_s, self.proofs, s.backoff_max_s) * 1e9)
        self.proofs += 1
        self.futile = self.decreases = 0  # the effect of the next ones is measured from here
        self.proof, self.trial = key, None
        self.tried.clear()

    def stop_at(self, victims: Sequence[Victim], allowed: float, now_ns: int) -> float | None:
        """C to go back to, as lower ones had no effect, but caps have; None if that is not proven now."""
        is_asking = any(v.key == self.proof and v.need in _MEASURED for v in victims)
        if now_ns >= self.proven_until_ns or not is_asking:
            return None
        for v in victims:
            if v.need is Need.AT_RISK and self.is_nil(v, allowed):
                self.useless[v.key] = Useless(self.c_before, v.signal.r_step)
        self.decreases = 0
        return self.c_before

    def least(self, victim: Victim, now_ns: int) -> float:
        """C below which decreases are known not to help it, while caps are proven or on trial; else 0."""
        is_held = now_ns < self.proven_until_ns if self.trial is None else victim.key != self.trial[0]
        return self._limit_of(victim) if is_held else 0.0

    def lead_of(self, at_risk: Sequence[Victim], allowed: float) -> Victim:
        """The promise that decides: of those that a C below ``allowed`` may help, if there are any."""
        helped = [v for v in at_risk if self._limit_of(v) < SAME_RATIO * allowed]
        return max(helped or at_risk, key=rank_of)

    @property
    def unhelped(self) -> Collection[Key]:
        """Promises at risk that caps, in force now or taken off, were found not to help."""
        return self.freed.unhelped if self.freed is not None else self.useless

    def _limit_of(self, victim: Victim) -> float:
        """0 if there is none, or its trouble grew worse."""
        limit = self.useless.get(victim.key)
        if limit is None or victim.signal.r_step >= ROSE_RATIO * limit.r:
            return 0.0
        return limit.allowed
