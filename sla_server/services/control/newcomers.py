"""Volumes whose clients come under one new name after another while they are slowed down.

A client may call itself anything. A cap of a name holds from the poll after the name was seen first; whoever
takes another name every few seconds is free for much of the time. So where that is seen, clients are taken
*together* (``inventory``): all that a glob of an agreement names are one target, ``VOLUME/GLOB``, and all
that none names are ``VOLUME/*``. Gateways apply its cap to a name they never saw before, from its first I/O
on. Within it connections have equal shares, so a true newcomer has its part at once, too.

That an agreement's glob names a client frees it of nothing: the glob may be another customer's, for all
volumes. Clients of the promise that is being helped are never slowed down for it, and so never come here.

    joined     clients of a glob came beside slowed ones: together if ``MOST_TURNS`` times in ``WITHIN_S``
    keep       while that cap is in force, and ``KEPT_S`` longer: they come again with the next burst

State: when clients joined last, by target; until when each target is one, None until ``keep`` was asked first
after a restart. Pure: no clock, no I/O. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

from pmdaemon.wire.messages.client_caps import OTHER_CLIENTS
from sla_server.services.control.targets import client_of, volume_of

MOST_TURNS: Final = 2
"""One new client beside a throttle is nothing; the second may be the same one again."""
WITHIN_S: Final = 60.0
"""A name a minute costs its neighbours the two seconds until its cap holds: 3 % of the time."""
KEPT_S: Final = 600.0
"""As long as episodes of violation are taken to be one trouble (``episode_calm_max_s``)."""


def together_text(targets: Iterable[str]) -> str:
    """Why the clients of these targets share one rate."""
    found = []
    for target in targets:
        who = "no agreement names" if client_of(target) == OTHER_CLIENTS else f"match {client_of(target)}"
        found.append(
            f"{volume_of(target)}: clients came under new names {MOST_TURNS} times within {WITHIN_S:.0f} s. "
            f"All that {who} share one rate from now on, whatever they are called"
        )
    return "; ".join(found)


class Newcomers:
    """See the module."""

    def __init__(self) -> None:
        self._joined_ns: dict[str, deque[int]] = {}
        self._until_ns: dict[str, int | None] = {}

    @property
    def together(self) -> Collection[str]:
        """Targets that are taken together."""
        return self._until_ns.keys()

    def restored(self, target: str) -> None:
        """A cap of its clients together was found in force."""
        self._until_ns[target] = None

    def joined(self, targets: Iterable[str], now_ns: int) -> list[str]:
        """Clients of these came; those to be taken together from now on."""
        found = []
        for target in targets:
            turns = self._joined_ns.setdefault(target, deque(maxlen=MOST_TURNS))
            turns.append(now_ns)
            if len(turns) == MOST_TURNS and now_ns - turns[0] <= WITHIN_S * 1e9:
                del self._joined_ns[target]
                self._until_ns[target] = now_ns + round(KEPT_S * 1e9)
                found.append(target)
        return found

    def keep(self, capped: Collection[str], now_ns: int) -> list[str]:
        """Follow the time; ``capped``: targets with a cap. Those that are taken together no longer."""
        ended = []
        for target, until_ns in list(self._until_ns.items()):
            if until_ns is None or target in capped:
                self._until_ns[target] = now_ns + round(KEPT_S * 1e9)
            elif now_ns >= until_ns:
                del self._until_ns[target]
                ended.append(target)
        return ended
