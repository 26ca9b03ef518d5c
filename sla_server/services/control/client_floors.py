"""Floors of divided volumes, shared between their clients.

A floor is promised to a volume, for the use of it by the clients that the agreement covers. If each of them
had all of it, the floors of a volume would add up to many times what was promised, and the loop would find
its neighbours at their floors at once. So a floor is shared as a cap is shared over gateways: most of it by
recent use, the rest equally among those that use the volume now. One that uses nothing has the part that a
newcomer would have.

Parts are kept until use has moved: a cap at its floor changes with it, and with each change the loop waits
for evidence under it.

State: the parts of each volume. No clock, no I/O. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sla_server.agreements.promise import VolumeClass
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Parts, split

ByClient = dict[str, float]


class ClientFloors:
    """See the module."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._parts: dict[str, dict[VolumeClass | None, ByClient]] = {}
        self._covers: dict[str, dict[str, tuple[bool, ...]]] = {}  # by volume and client, each of its classes

    def clear(self) -> None:
        """Other agreements are in force."""
        self._parts.clear()
        self._covers.clear()

    def knows(self, volume: str) -> bool:
        """Whether ``follow`` was called for a volume."""
        return volume in self._parts

    def of(self, volume: str, client: str, classes: Sequence[VolumeClass]) -> Parts:
        """What a client has of each floor that covers its use of a volume; of none before ``follow``: all."""
        kept = self._parts.get(volume)
        if kept is None:
            return {}
        covering: list[VolumeClass | None] = [each for each in classes if each.has_client(client)]
        return {each: self._part(kept.get(each, {}), client) for each in covering or [None]}

    def follow(self, volume: str, classes: Sequence[VolumeClass], use: Mapping[str, float]) -> bool:
        """Share the floors again if use has moved; whether a part is another now.

        Args:
            volume: a divided one.
            classes: of the agreements that cover it.
            use: client to its recent cost rate; those that use nothing may be left out.
        """
        using = {client: cost for client, cost in use.items() if cost > 0}
        covers = self._covers.setdefault(volume, {})
        for client in using.keys() - covers.keys():
            covers[client] = tuple(each.has_client(client) for each in classes)
        wanted: dict[VolumeClass | None, ByClient] = {
            None: {client: cost for client, cost in using.items() if not any(covers[client])}
        }
        for at, each in enumerate(classes):
            wanted[each] = {client: cost for client, cost in using.items() if covers[client][at]}
        ratio = self._settings.recent_share_ratio
        parts = {each: split(1.0, found, ratio) if found else {} for each, found in wanted.items()}
        kept = self._parts.get(volume)
        if kept is not None and not self._have_moved(kept, parts):
            return False
        self._parts[volume] = parts
        return True

    def _have_moved(
        self, kept: Mapping[VolumeClass | None, ByClient], parts: Mapping[VolumeClass | None, ByClient]
    ) -> bool:
        for each, found in parts.items():
            before = kept.get(each, {})
            for client in found.keys() | before.keys():
                moved = abs(self._part(found, client) - self._part(before, client))
                if moved > self._settings.resplit_ratio:
                    return True
        return False

    def _part(self, parts: Mapping[str, float], client: str) -> float:
        """Its part, or that of a newcomer."""
        found = parts.get(client)
        if found is not None:
            return found
        return (1.0 - self._settings.recent_share_ratio) / (len(parts) + 1) if parts else 1.0
