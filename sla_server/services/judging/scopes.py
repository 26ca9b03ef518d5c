"""Which streams each track judges, and which tracks a gateway concerns.

Worked out anew only when streams or agreements change: tracks that name volumes look them up, only patterns
are matched against every volume. Belongs to the looker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from sla_server.services.judging.track import JudgedStream, Track
from sla_server.services.store import Row

Name = tuple[str, str, int]
"""Agreement, objective, version."""


class JudgeScopes:
    """See the module."""

    def __init__(self) -> None:
        self._by_volume: dict[str, list[tuple[str, JudgedStream]]] = {}
        self._of: dict[Name, tuple[JudgedStream, ...]] = {}
        self._at: dict[str, list[Name]] = {}
        self._gateways: list[str] = []
        self.streams = -1
        """How many streams were known at the last reading; -1 before the first."""

    def set_streams(self, rows: Sequence[Row], now_us: int) -> None:
        """All streams there are, as table ``streams`` has them; none can have come after now."""
        self._by_volume = {}
        for row in rows:
            stream = JudgedStream(row["stream_id"], row["gateway_id"], min(row["first_seen_us"], now_us))
            self._by_volume.setdefault(row["volume"], []).append((row["client"], stream))
        self.streams = len(rows)

    def set_tracks(self, tracks: Mapping[Name, Track]) -> None:
        """What is judged now."""
        self._of, self._at = {}, {}
        for name, track in tracks.items():
            scope = tuple(self._streams_of(track))
            self._of[name] = scope
            for gateway_id in {stream.gateway_id for stream in scope}:
                self._at.setdefault(gateway_id, []).append(name)
        self._gateways = sorted(self._at)

    def _streams_of(self, track: Track) -> Iterable[JudgedStream]:
        promise = track.promise
        for volume in self._volumes_of(promise.volumes):
            for client, stream in self._by_volume[volume]:
                if promise.covers(volume, client):
                    yield stream

    def _volumes_of(self, selectors: Iterable[str]) -> Iterable[str]:
        found: dict[str, None] = {}
        for selector in selectors:
            if not any(character in selector for character in "*?["):
                found |= dict.fromkeys((selector,) if selector in self._by_volume else ())
                continue
            found |= dict.fromkeys(v for v in self._by_volume if fnmatchcase(v, selector))
        return found

    def of(self, name: Name) -> tuple[JudgedStream, ...]:
        """Streams in scope of a track."""
        return self._of.get(name, ())

    def at(self, gateway_id: str) -> Sequence[Name]:
        """Tracks with a stream at a gateway."""
        return self._at.get(gateway_id, ())

    def gateways(self) -> list[str]:
        """Gateways with a stream in some scope, sorted."""
        return self._gateways
