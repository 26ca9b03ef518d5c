"""Which tracks a pass of the judge looks at: not all of 64,000, but those where something may be due.

A track with nothing due is *parked* until an instant, and under the gateways whose progress would make it due
earlier. ``rouse`` wakes whom the time or a gateway has reached; the awake are looked at in their order, some
in each pass. Waking one for nothing does no harm: it is parked again.

Plain state, no clock. Belongs to the looker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from sla_server.services.judging.scopes import Name


class DueQueue:
    """Names of tracks: awake, or parked by instant (wall clock, us) and by gateway and progress (us)."""

    def __init__(self) -> None:
        self._awake: dict[Name, None] = {}
        self._until: dict[Name, int] = {}
        self._by_time: dict[int, list[Name]] = {}
        self._by_gateway: dict[str, dict[int, list[Name]]] = {}

    @property
    def awake(self) -> int:
        """How many are to be looked at."""
        return len(self._awake)

    def reset(self, names: Iterable[Name]) -> None:
        """These are all there are, and all of them awake."""
        self._until, self._by_time, self._by_gateway = {}, {}, {}
        self._awake = dict.fromkeys(names)

    def wake(self, name: Name) -> None:
        """Look at it in one of the next passes, behind those who wait already."""
        self._until.pop(name, None)
        self._awake.setdefault(name)

    def park(self, name: Name, until_us: int, gateways: Mapping[str, int]) -> None:
        """Nothing is due before this instant, unless one of these gateways gets as far as said."""
        self._until[name] = until_us
        self._by_time.setdefault(until_us, []).append(name)
        for gateway_id, passed_us in gateways.items():
            self._by_gateway.setdefault(gateway_id, {}).setdefault(passed_us, []).append(name)

    def rouse(self, progress: Mapping[str, int], now_us: int) -> None:
        """Wake whom the time or a gateway has reached."""
        for until_us in [us for us in self._by_time if us <= now_us]:
            for name in self._by_time.pop(until_us):
                if self._until.get(name) == until_us:  # else it was woken, and perhaps parked anew, meanwhile
                    self.wake(name)
        for gateway_id, waiting in self._by_gateway.items():
            reached_us = progress.get(gateway_id, 0)
            for passed_us in [us for us in waiting if us <= reached_us]:
                for name in waiting.pop(passed_us):
                    if name in self._until:
                        self.wake(name)

    def take(self, most: int) -> Iterator[Name]:
        """Those whose turn it is, ``most`` at most; each is no longer awake once it is handed out."""
        for name in list(islice(self._awake, most)):
            del self._awake[name]
            yield name
