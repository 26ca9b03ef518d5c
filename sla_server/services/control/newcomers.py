"""Volumes whose clients come under one new name after another while they are slowed down.

A client that no agreement names may call itself anything. A cap of a name holds from the poll after the name
was seen first; whoever takes another name every few seconds is free for much of the time. So a volume on
which that is seen is taken *together* (``inventory``): all its clients that no agreement names are one
target, ``VOLUME/*``, whose cap its gateways apply to a name they never saw before, from its first I/O on.
Within it connections have equal shares, so a true newcomer has its part at once, too.

    joined     clients came to volumes that are slowed down: together if ``MOST_TURNS`` times in ``WITHIN_S``
    keep       while that cap is in force, and ``KEPT_S`` longer: they come again with the next burst

State: when clients joined last, by volume; until when each volume is taken together, None until ``keep`` was
asked first after a restart. Pure: no clock, no I/O. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

MOST_TURNS: Final = 2
"""One new client beside a throttle is nothing; the second may be the same one again."""
WITHIN_S: Final = 60.0
"""A name a minute costs its neighbours the two seconds until its cap holds: 3 % of the time."""
KEPT_S: Final = 600.0
"""As long as episodes of violation are taken to be one trouble (``episode_calm_max_s``)."""
TOGETHER: Final = (
    f"clients came under new names {MOST_TURNS} times within {WITHIN_S:.0f} s. All that no agreement names "
    "share one rate from now on, whatever they are called"
)


class Newcomers:
    """See the module."""

    def __init__(self) -> None:
        self._joined_ns: dict[str, deque[int]] = {}
        self._until_ns: dict[str, int | None] = {}

    @property
    def together(self) -> Collection[str]:
        """Volumes that are taken together."""
        return self._until_ns.keys()

    def restored(self, volume: str) -> None:
        """A cap of its clients together was found in force."""
        self._until_ns[volume] = None

    def joined(self, volumes: Iterable[str], now_ns: int) -> list[str]:
        """Clients that no agreement names came to these volumes; those to be taken together from now on."""
        found = []
        for volume in volumes:
            turns = self._joined_ns.setdefault(volume, deque(maxlen=MOST_TURNS))
            turns.append(now_ns)
            if len(turns) == MOST_TURNS and now_ns - turns[0] <= WITHIN_S * 1e9:
                del self._joined_ns[volume]
                self._until_ns[volume] = now_ns + round(KEPT_S * 1e9)
                found.append(volume)
        return found

    def keep(self, capped: Collection[str], now_ns: int) -> list[str]:
        """Follow the time; ``capped``: volumes with such a cap. Those that are taken together no longer."""
        ended = []
        for volume, until_ns in list(self._until_ns.items()):
            if until_ns is None or volume in capped:
                self._until_ns[volume] = now_ns + round(KEPT_S * 1e9)
            elif now_ns >= until_ns:
                del self._until_ns[volume]
                ended.append(volume)
        return ended
