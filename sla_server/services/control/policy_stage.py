"""Policies by stages: where their caps are only observed, where they are enforced, and what they would hold.

A backend has a stage of its own or that of all: ``observe`` (its policy caps actuate nothing) or ``enforce``.
Policy caps hold where the stage says enforce *and* the mode of the backend does; the stage says nothing of
other caps. It belongs to the backend, not to a version: one that is enforced enforces the next version, too,
which the back-test lets through.

Where they do not hold, the use of each capped volume is compared with its cap once a second: for how many
seconds it was above, and by how much in all. That is an upper bound of what the cap would have held back: a
volume that is held has less demand later. It begins again with each version.

Bounded for fleets with a cap on each of 64,000 volumes: so many are compared, and of the others only some are
looked at in a second.

State: stages, which volumes are compared, and sums a volume. No clock, no I/O. Changed only by the
controller's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from pmdaemon.wire.rates import Rates

MOST_WATCHED: Final = 2000
"""Volumes: some 5 us each, once a second."""
MOST_LOOKED: Final = 2000
"""Volumes that are asked a second whether their cap holds, beside those that are compared: of a large fleet
all within a minute."""
MOST_GAP_S: Final = 5.0  # a longer one was no second of use


@dataclass(slots=True)
class Above:
    """A volume's use above a cap that does not hold.

    Attributes:
        backend: it is on.
        cap, use: cost units a second, now.
        seconds: above the cap.
        cost: above the cap, cost units.
        watched_s: compared at all.
    """

    backend: str
    cap: float
    use: float = 0.0
    seconds: float = 0.0
    cost: float = 0.0
    watched_s: float = 0.0

    def row(self, volume: str) -> dict[str, Any]:
        """For the live view."""
        return {
            "volume": volume,
            "backend": self.backend,
            "cap_cost_per_s": round(self.cap, 1),
            "cost_per_s": round(self.use, 1),
            "above_s": round(self.seconds),
            "above_cost": round(self.cost),
            "watched_s": round(self.watched_s),
        }


@dataclass(slots=True)
class PolicyStage:
    """See the module. ``mode``: of backends without one of their own."""

    mode: str = "enforce"
    modes: dict[str, str] = field(default_factory=dict)
    _above: dict[str, Above] = field(default_factory=dict)
    _caps: Mapping[str, Rates] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _next: int = 0
    _watched: dict[str, None] = field(default_factory=dict)  # a set that keeps its order
    _version: int | None = None
    _at_ns: int = 0

    def mode_of(self, backend: str) -> str:
        """Observe or enforce."""
        return self.modes.get(backend) or self.mode

    def compare(
        self,
        version: int | None,
        caps: Mapping[str, Rates],
        holds: Callable[[str], bool],
        place_of: Callable[[str], tuple[str, float]],
        now_ns: int,
    ) -> None:
        """Compare uses with caps that do not hold.

        Args:
            version: of the policy; with another one all begins again.
            caps: of all volumes, the same object until others are wanted.
            holds: whether the cap of a volume does.
            place_of: backend and cost rate of a volume.
            now_ns: monotonic.
        """
        if version != self._version:
            self._above, self._version, self._at_ns = {}, version, now_ns
        seconds, self._at_ns = min((now_ns - self._at_ns) / 1e9, MOST_GAP_S), now_ns
        self._choose(caps, holds)
        for volume in self._watched:
            cap = caps[volume].cost_per_s or 0.0
            backend, use = place_of(volume)
            found = self._above.setdefault(volume, Above(backend, cap))
            found.backend, found.cap, found.use = backend, cap, use
            found.watched_s += seconds
            if use > cap:
                found.seconds += seconds
                found.cost += (use - cap) * seconds

    def _choose(self, caps: Mapping[str, Rates], holds: Callable[[str], bool]) -> None:
        """Choose those to compare: of those before, and of some others, the ones whose cap does not hold."""
        if caps is not self._caps or len(caps) != len(self._order):
            self._caps, self._order, self._next = caps, sorted(caps), 0
        looked = self._order[self._next : self._next + MOST_LOOKED]
        self._next = self._next + MOST_LOOKED if self._next + MOST_LOOKED < len(self._order) else 0
        asked = dict.fromkeys([*(volume for volume in self._watched if volume in caps), *looked])
        open_ones = (v for v in asked if caps[v].cost_per_s is not None and not holds(v))
        self._watched = dict.fromkeys(islice(open_ones, MOST_WATCHED))

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Volumes above their caps, those with most above it first."""
        ranked = sorted(self._above.items(), key=lambda item: (-item[1].cost, item[0]))
        return [found.row(volume) for volume, found in ranked[:most] if found.seconds]

    def view(self, most: int) -> Mapping[str, Any]:
        """For the live view."""
        return {"stage": self.mode, "stages": dict(self.modes), "would_hold": self.rows(most)}
