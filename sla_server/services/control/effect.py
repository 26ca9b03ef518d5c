"""Whether slowing volumes down helps a promise: what the loop of one backend measures of its decreases.

    decreases  counted with r and C as they were before the first of them. After a few, r must have fallen by
               a tenth, else they had no effect; if it has, the next ones are measured from there
    freed      what was slowed down without effect and has no caps any more, with r under them. If r is half
               as high again now, they had an effect after all: they come back at once, and are *proven*
    useless    C below which decreases had no effect: it goes no lower while the caps are proven

So a promise that its storage cannot keep even without neighbours is not given up to them: r may be 1.2 with
caps on them, and 16 without. See docs/adr/0065-what-caps-are-proven-by.md.

Pure: no clock, no I/O; ``now_ns`` is monotonic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from pmdaemon.runtime.backoff import doubled
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.victims import Key, Victim

ROSE_RATIO: Final = 1.5
"""r without caps above r with them: more than the storage's own noise, which is some 10 % of a percentile."""


class Freed(NamedTuple):
    """What was slowed down when its caps were taken off as without effect.

    Attributes:
        key: the promise whose r, in ``r``, they did not change.
        allowed, start, ceiling: C before the decreases that had no effect, and what was known of it.
    """

    key: Key
    r: float
    managed: frozenset[str]
    victims: frozenset[Key]
    allowed: float
    start: float
    ceiling: float


@dataclass(slots=True)
class Effect:
    """Of the decreases of one backend's loop; see the module for the words."""

    settings: ControlSettings
    decreases: int = 0
    r_before: float = 0.0
    c_before: float = 0.0
    r_free: float = 0.0  # r that a burst has without caps, where C was set before it
    futile: int = 0  # attempts in a row that had no effect
    freed: Freed | None = None
    proofs: int = 0  # in a row
    proven_until_ns: int = 0
    useless: float = 0.0
    useless_r: float = 0.0

    def count(self, r: float, allowed: float, *, is_first: bool) -> None:
        """One decrease of C from ``allowed``, decided at ``r``; ``is_first``: nothing is slowed down yet."""
        if is_first or not self.decreases:
            self.r_before, self.r_free, self.c_before = max(r, self.r_free), 0.0, allowed
        self.decreases += 1

    def is_nil(self, r: float, allowed: float) -> bool:
        """Whether the decreases that are counted changed nothing: C is ``allowed`` now, clearly less."""
        least_change = 1 - self.settings.effective_ratio
        is_less = self.decreases > 0 and allowed <= least_change * self.c_before
        return is_less and r >= least_change * self.r_before

    def had_none(self, r: float, allowed: float) -> bool:
        """Whether enough decreases changed nothing, so that the volumes slowed down are not the cause."""
        if self.decreases < self.settings.effective_decreases:
            return False
        if self.is_nil(r, allowed):
            return True
        self.decreases = self.futile = 0  # it helped: measure the next ones from here
        self.r_before = r
        return False

    def others(self) -> None:
        """More volumes are slowed down: the effect is measured from here on."""
        self.decreases = 0

    def helped(self) -> None:
        """The promise is kept: no attempt, and no decrease, was in vain."""
        self.decreases = self.futile = self.proofs = 0
        self.useless = 0.0

    def resize(self, ratio: float, more: float) -> None:
        """The managed volumes are others, and C with them."""
        self.c_before = max(self.c_before * ratio + more, 0.0)
        self.useless = max(self.useless * ratio + more, 0.0) if self.useless else 0.0

    def reset(self) -> None:
        """C is given up; futile attempts and what was proven stay."""
        self.decreases, self.r_free, self.useless = 0, 0.0, 0.0

    # Caps without effect: a rest, or no further.

    def rest_s(self, rested_until_ns: int, now_ns: int) -> float:
        """Seconds for which volumes are left alone: each attempt costs them some, and the cause may stay."""
        s = self.settings
        if now_ns - rested_until_ns > s.backoff_max_s * 1e9:
            self.futile = 0
        wait_s = doubled(s.backoff_s, self.futile, s.backoff_max_s)
        self.futile += 1
        return wait_s

    def take_back(self, at_risk: Iterable[Victim], now_ns: int) -> Freed | None:
        """What is slowed down again, as r rose when it was free; asked in the rest after it was freed."""
        freed = self.freed
        if freed is None:
            return None
        if not any(v.key == freed.key and v.signal.r_step >= ROSE_RATIO * freed.r for v in at_risk):
            return None
        s = self.settings
        self.proven_until_ns = now_ns + round(doubled(s.backoff_s, self.proofs, s.backoff_max_s) * 1e9)
        self.proofs += 1
        self.useless, self.useless_r = freed.allowed, freed.r
        self.freed, self.decreases, self.futile = None, 0, 0
        return freed

    def stop_at(self, r: float, now_ns: int) -> float | None:
        """C to go back to, as lower ones had no effect, but caps have; None if that is not proven now."""
        if now_ns >= self.proven_until_ns:
            return None
        self.useless, self.useless_r, self.decreases = self.c_before, r, 0
        return self.useless

    def least(self, r: float, now_ns: int) -> float:
        """C below which decreases are known to have no effect; 0 if none is, or the trouble grew worse."""
        if now_ns >= self.proven_until_ns or r >= ROSE_RATIO * self.useless_r:
            self.useless = 0.0
        return self.useless
