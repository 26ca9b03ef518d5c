"""Throttles in force by what they are about, and those whose proof is not complete.

A cut is about the caps of one gateway, and news of a volume about one volume: neither should look at all the
throttles of a fleet. The policy manager enters what begins and ends.

State: throttles by target and by volume, in the order in which they came; those to look after. No clock, no
I/O. Changed only by the policy manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from pmdaemon.wire.rates import Rates
from sla_server.services.control.targets import target_of
from sla_server.services.control.throttle import Throttle
from sla_server.services.control.usage import GatewayTable, KnownStream

MOST_SHOWN: Final = 512
"""Volumes of a whole client that its throttle's row names; those beyond are under its cap, too."""


class ThrottleIndex:
    """See the module.

    Attributes:
        looked_at: throttles handed out or looked after, in all; for tests of what a tick costs.
        renewed: targets that the newest ``totals`` was worked out for again.
    """

    def __init__(self) -> None:
        self.looked_at = 0
        self._targets: dict[str, list[Throttle]] = {}
        self._volumes: dict[str, list[Throttle]] = {}
        self._unproven: dict[int, Throttle] = {}
        self._stale: dict[str, None] = {}
        self._totals: dict[str, Rates] = {}
        self.renewed: list[str] = []

    def add(self, throttle: Throttle) -> None:
        """It is in force from now on."""
        self._targets.setdefault(throttle.target, []).append(throttle)
        for volume in throttle.volumes:
            self._volumes.setdefault(volume, []).append(throttle)
        self.changed((throttle.target,))

    def remove(self, throttle: Throttle) -> None:
        """It has ended."""
        self._unproven.pop(id(throttle), None)
        self.changed((throttle.target,))
        volumes = ((self._volumes, volume) for volume in throttle.volumes)
        for index, key in ((self._targets, throttle.target), *volumes):
            kept = [each for each in index[key] if each is not throttle]
            if kept:
                index[key] = kept
            else:
                del index[key]

    def join(self, table: GatewayTable, streams: Iterable[KnownStream]) -> Iterator[Throttle]:
        """Streams of a gateway are there now; gives whole clients' throttles that got a volume more by one.

        One that has very many gets no more, but for the first at a gateway, which finds the cap by it.
        """
        for stream in streams:
            for throttle in self._targets.get(target_of("", stream.client), ()):
                known = throttle.weights
                if stream.volume in known:
                    continue
                if len(known) < MOST_SHOWN or not any(map(table.carries, known)):
                    throttle.weights = {**throttle.weights, stream.volume: 1.0}
                    self._volumes.setdefault(stream.volume, []).append(throttle)
                    yield throttle

    def targets(self) -> list[str]:
        """Every target with a throttle."""
        return list(self._targets)

    def changed(self, targets: Iterable[str] | None = None) -> None:
        """What is in force of these targets, or of all, may be another now: a wish, a floor, their I/Os."""
        self._stale.update(dict.fromkeys(self._targets if targets is None else targets))

    def totals(self, effective: Callable[[str], Rates], changed: Iterable[Throttle]) -> dict[str, Rates]:
        """What is in force of each target that is not free.

        Args:
            effective: is asked for those that changed alone.
            changed: throttles whose rates may be others now.
        """
        self.changed(throttle.target for throttle in changed)
        for target in self._stale:
            rates = effective(target) if target in self._targets else Rates()
            if rates.is_open:
                self._totals.pop(target, None)
            else:
                self._totals[target] = rates
        self.renewed, self._stale = list(self._stale), {}
        return self._totals

    def about(self, targets: Iterable[str]) -> Iterator[Throttle]:
        """Throttles of these targets."""
        for target in targets:
            for throttle in self._targets.get(target, ()):
                self.looked_at += 1
                yield throttle

    def of_volumes(self, volumes: Iterable[str]) -> Iterator[Throttle]:
        """Throttles of these volumes, of their clients and of their groups, each once."""
        found = {id(each): each for volume in volumes for each in self._volumes.get(volume, ())}
        self.looked_at += len(found)
        return iter(found.values())

    def refresh(self, throttle: Throttle) -> None:
        """A gateway has still to confirm it, or measured more than it allows."""
        if throttle.is_unproven:
            self._unproven[id(throttle)] = throttle

    def unproven(self) -> list[Throttle]:
        """Those that may be not effective; what is proven now is left out from then on."""
        self.looked_at += len(self._unproven)
        self._unproven = {key: each for key, each in self._unproven.items() if each.is_unproven}
        return list(self._unproven.values())
