"""Which streams each track judges, which tracks a gateway concerns, and which tracks are due.

A stream whose volume is not its gateway's own (``sla_server.ownership``) stays in scope: slices that were
judged before that was decided had it. Of later ones it is no part.

A volume that gets the labels an agreement asks for is part of it from the next slice on that is not judged
yet, and one that loses them until there: slices before stay as they are, also when late data judge them
again. A start knows only which volumes have the labels now.

Computed only when streams, claims, labels or agreements change: tracks that name volumes look them up, only
patterns are matched against every volume. Belongs to the SQL worker's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice

from sla_server.agreements.selectors import matches
from sla_server.ownership import APPROVED, Key, VolumeClaim
from sla_server.rows import Row
from sla_server.services.judging.track import NEVER_US, OPEN_US, JudgedStream, Track

Name = tuple[str, str, int]
"""Agreement, objective, version."""


class JudgeScopes:
    """See the module."""

    def __init__(self) -> None:
        self._by_volume: dict[str, list[tuple[str, JudgedStream]]] = {}
        self._of: dict[Name, tuple[JudgedStream, ...]] = {}
        self._at: dict[str, list[Name]] = {}
        self._gateways: list[str] = []
        self._disowned: dict[Key, VolumeClaim] = {}
        self._until_us: dict[tuple[Name, Key], int] = {}
        self._chosen: dict[Name, dict[str, tuple[int, int]]] = {}  # by labels: since when, until when
        self.streams = -1
        """How many streams were known at the last reading; -1 before the first."""

    def unread(self) -> JudgeScopes:
        """Another one, without streams and tracks; claims stay."""
        made = JudgeScopes()
        made._disowned = self._disowned
        return made

    def set_streams(self, rows: Sequence[Row], now_us: int) -> None:
        """All streams there are, as table ``streams`` has them; none can have come after now."""
        self._by_volume = {}
        for row in rows:
            first_us, volume = min(row["first_seen_us"], now_us), row["volume"]
            stream = JudgedStream(row["stream_id"], row["gateway_id"], first_us, volume)
            self._by_volume.setdefault(volume, []).append((row["client"], stream))
        self.streams = len(rows)

    def set_claims(self, claims: Iterable[VolumeClaim]) -> bool:
        """Claims that changed; whether that concerns what is judged: ``set_tracks`` follows then."""
        before = dict(self._disowned)
        for claim in claims:
            key = claim.volume, claim.gateway_id
            if claim.state != APPROVED:
                self._disowned[key] = claim
            else:
                self._disowned.pop(key, None)
        return self._disowned != before

    def disowned(self, name: Name) -> list[VolumeClaim]:
        """Claims that do not count, of streams in scope of a track; by volume and gateway."""
        if not self._disowned:
            return []
        keys = {(stream.volume, stream.gateway_id) for stream in self.of(name) if stream.until_us < NEVER_US}
        return [self._disowned[key] for key in sorted(keys & self._disowned.keys())]

    def _owned_until(self, name: Name, track: Track, stream: JudgedStream, *, is_read: bool) -> JudgedStream:
        """The stream, as far as it is its gateway's own: what was judged before that was decided stays."""
        key = stream.volume, stream.gateway_id
        claim = self._disowned.get(key)
        if claim is None:
            self._until_us.pop((name, key), None)
            return stream
        until_us = self._until_us.get((name, key), claim.changed_us)
        if is_read:
            until_us = self._until_us[name, key] = min(until_us, track.next_us)
        if stream.until_us <= until_us:
            return stream
        return replace(stream, until_us=until_us, has_left=False)

    def set_tracks(self, tracks: Mapping[Name, Track], unread: Collection[Name] = ()) -> None:
        """What is judged now; of ``unread`` it is not known what was judged before."""
        self._of, self._at = {}, {}
        self._chosen = {name: spans for name, spans in self._chosen.items() if name in tracks}
        for name, track in tracks.items():
            if track.item.chooses_by_labels:
                scope = tuple(self._chosen_streams(name, track))
            else:
                scope = tuple(self._streams_of(track.promise.volumes, track))
            if self._disowned:
                is_read = name not in unread
                scope = tuple(self._owned_until(name, track, each, is_read=is_read) for each in scope)
            self._of[name] = scope
            for gateway_id in {stream.gateway_id for stream in scope}:
                self._at.setdefault(gateway_id, []).append(name)
        self._gateways = sorted(self._at)

    def _streams_of(self, volumes: Iterable[str], track: Track) -> Iterator[JudgedStream]:
        for volume in self._volumes_of(volumes):
            for client, stream in self._by_volume[volume]:
                if matches(client, track.promise.clients):
                    yield stream

    def _chosen_streams(self, name: Name, track: Track) -> Iterator[JudgedStream]:
        """Streams of volumes that labels choose, or chose in slices that may still be judged again."""
        spans, chosen = self._chosen.get(name), set(track.promise.volumes)
        if spans is None:
            spans = dict.fromkeys(chosen, (0, NEVER_US))
        for volume, (since_us, until_us) in list(spans.items()):
            if volume not in chosen and until_us == NEVER_US:
                spans[volume] = since_us, track.next_us
            elif until_us < track.next_us - OPEN_US:
                del spans[volume]
        for volume in chosen:
            if spans.get(volume, (0, 0))[1] != NEVER_US:
                spans[volume] = track.next_us, NEVER_US
        self._chosen[name] = spans
        for stream in self._streams_of(sorted(spans), track):
            since_us, until_us = spans[stream.volume]
            first_us = max(stream.first_seen_us, since_us)
            has_left = until_us < NEVER_US
            yield replace(
                stream, first_seen_us=first_us, until_us=until_us, chosen_us=since_us, has_left=has_left
            )

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


# -- Tracks with something due
#
# A pass of the judge looks at these, not at all of 64,000. A track with nothing due is *deferred* until an
# instant, and under the gateways whose progress would make it due earlier. ``advance`` adds the tracks that
# the time or a gateway has reached; they are taken in their order, some in each pass. Adding one for nothing
# does no harm: it is deferred again.


class DueQueue:
    """Names of tracks: due, or deferred by instant (wall clock, us) and by gateway and progress (us).

    Plain state without a clock. Thread: the SQL worker's.
    """

    def __init__(self) -> None:
        self._due: dict[Name, None] = {}
        self._until: dict[Name, int] = {}
        self._by_time: dict[int, list[Name]] = {}
        self._by_gateway: dict[str, dict[int, list[Name]]] = {}

    def __len__(self) -> int:
        return len(self._due)

    def reset(self, names: Iterable[Name]) -> None:
        """Replace all names; each of them is due."""
        self._until, self._by_time, self._by_gateway = {}, {}, {}
        self._due = dict.fromkeys(names)

    def add(self, name: Name) -> None:
        """Make a track due, behind those that are."""
        self._until.pop(name, None)
        self._due.setdefault(name)

    def defer(self, name: Name, until_us: int, gateways: Mapping[str, int]) -> None:
        """Nothing is due before ``until_us``, unless a gateway's progress passes the instant given for it."""
        self._until[name] = until_us
        self._by_time.setdefault(until_us, []).append(name)
        for gateway_id, passed_us in gateways.items():
            self._by_gateway.setdefault(gateway_id, {}).setdefault(passed_us, []).append(name)

    def advance(self, progress: Mapping[str, int], now_us: int) -> None:
        """Add the tracks that the time or a gateway has reached."""
        for until_us in [us for us in self._by_time if us <= now_us]:
            for name in self._by_time.pop(until_us):
                if self._until.get(name) == until_us:  # else it became due, and perhaps was deferred again
                    self.add(name)
        for gateway_id, waiting in self._by_gateway.items():
            reached_us = progress.get(gateway_id, 0)
            for passed_us in [us for us in waiting if us <= reached_us]:
                for name in waiting.pop(passed_us):
                    if name in self._until:
                        self.add(name)

    def take(self, most: int) -> Iterator[Name]:
        """At most ``most`` tracks in order; each is no longer due once it is handed out."""
        for name in list(islice(self._due, most)):
            del self._due[name]
            yield name
