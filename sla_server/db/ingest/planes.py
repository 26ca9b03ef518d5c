"""Which data planes a gateway's cuts are of: the time that a plane is missing from them, and whose streams.

A gateway has several sources of statistics: data planes and its host. They usually share a cut; a plane that
is stopped is in none, and the cuts of the others must not prove its time. Header key ``dp`` of a cut names
the newest DP_CUT of each plane that went into this or an earlier one, so a plane is in a cut exactly if its
number has changed since the cut before (sequence number less one). Of the first cut after a start, and of one
that does not follow its predecessor, it is not known: all planes are taken to be in it.

``missing``: planes that are not in a cut. A slot is observed for a plane's streams as long as its cuts last,
less the time that the plane is missing from them.

``silent``: a plane that was stopped hands over one long cut when it goes on. Its counts are true, and prove
nothing of the time in between: it served no I/O, and clients that sent some meanwhile were not heard. So that
time is taken off again. Header key ``un`` says for how long before the cut's end the plane gave its link no
answer, since it was asked, or should have been by a link that was stopped, too (a paused machine); the
time in which cuts of other sources came without it says so, too, from ``SILENT_US`` on. (Of an agent that
does not send the key, where there is no other source, a stopped plane looks like a link that was away while
its planes went on serving: its time counts.)

Whose streams: header key ``of`` of a cut with the samples of several sources says it row by row, as a bitmap
for each plane (bit i, from the lowest of the first byte, is row i). An agent of before does not send it: the
rows of a cut with one plane are of that one, those of a cut with none are of the host, and of a stream that
was seen in cuts of several planes only nothing is known: it needs all of its gateway's planes. (So a volume
that two planes of such an agent export is taken for one of the plane that is left when the other one stops.)

``streams``: "" all planes of its gateway; HOST none; else names, joined by a space. A stream that appears at
a plane which it was not known to have leaves a plane that is missing then and stays so for ``SILENT_US``: the
volume has moved, or its client has. It leaves one that was not heard of for GONE_US. Of a plane that ``dp``
names no longer (it was removed, or has another name now) nothing is known any more: a stream that had no
other one needs all planes until it has I/O again.

State: of each gateway with a plane the newest marks, when each plane was in a cut, and what other cuts cover
since then; of its streams what was said of them. Values are replaced, never changed: ``copy`` is cheap.
Belongs to the writer thread; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.wire.cut import Cut
from pmdaemon.wire.plane_marks import marks_of, rows_by_plane

HOST: Final = "-"
GONE_US: Final = 86_400_000_000
SILENT_US: Final = 5_000_000
"""A plane that is late by less was busy: it may have served I/O meanwhile."""
Span = tuple[int, int]
"""From and to, corrected, us UTC."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    """``absent``: plane to the time that cuts without it cover since its own newest one.

    ``doubts``: plane that was missing when some streams appeared at another one, to those streams.
    """

    epoch: int
    seq: int
    marks: Mapping[str, int]
    seen_us: Mapping[str, int]
    absent: Mapping[str, Span]
    doubts: Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class CutPlanes:
    """What a cut says of planes.

    Attributes:
        missing: planes that are not in it.
        streams: stream_id to the planes that are proved to have it (none: the host), of its rows; None: that
            is not known any more.
        silent: planes that are in it to the time of it in which they gave no answer.
        idle: when all planes that are in it gave none; its counts are of the rest of it.
    """

    missing: tuple[str, ...] = ()
    streams: Mapping[int, frozenset[str] | None] = field(default_factory=dict)
    silent: Mapping[str, Span] = field(default_factory=dict)
    idle: Span | None = None


NOTHING: Final = CutPlanes()
_State = tuple[dict[str, _Gateway], dict[str, Mapping[int, frozenset[str]]]]


class PlaneMemory:
    """See the module."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._known: dict[str, Mapping[int, frozenset[str]]] = {}

    def restore(self, stored: Iterable[tuple[str, int, str]]) -> None:
        """What SQL says of (gateway, stream); before the first cut."""
        known: dict[str, dict[int, frozenset[str]]] = {}
        for gateway_id, stream_id, text in stored:
            if text:
                known.setdefault(gateway_id, {})[stream_id] = frozenset(text.split()) - {HOST}
        self._known = dict(known)

    def copy(self) -> _State:
        """All of the state, for ``go_back``."""
        return dict(self._gateways), dict(self._known)

    def go_back(self, state: _State) -> None:
        """What ``copy`` returned is the state again."""
        self._gateways, self._known = dict(state[0]), dict(state[1])

    def begin_again(self) -> None:
        """Cuts of before may come again: forget the newest ones."""
        self._gateways = {}

    def check(self, cut: Cut, end_us: int) -> CutPlanes:
        """What the next cut of its gateway says; notes it.

        Args:
            cut: in order of its gateway.
            end_us: its corrected end.
        """
        marks = marks_of(cut.extra.get("dp"))
        if not marks:
            return NOTHING
        before = self._gateways.get(cut.gateway_id)
        if before is not None and before.epoch == cut.epoch and cut.seq <= before.seq:
            return NOTHING  # read again from the queue
        follows = before is not None and before.epoch == cut.epoch and cut.seq == before.seq + 1
        old = before.marks if before is not None and follows else {}
        inside = frozenset(name for name, mark in marks.items() if old.get(name) != mark)
        known_us = before.seen_us if before is not None else {}
        seen_us = {name: end_us if name in inside else known_us.get(name, end_us) for name in marks}
        absent = before.absent if before is not None and follows else {}
        span = end_us - cut.duration_us, end_us
        silent = dict(_silent(cut, inside if follows else frozenset(marks), absent, span))
        absent = {name: left for name in marks if (left := _absence(absent.get(name), name in inside, span))}
        doubts = dict(before.doubts) if before is not None else {}
        streams: dict[int, frozenset[str] | None] = {}
        if before is None or before.marks.keys() != marks.keys():
            streams |= self._leave(cut.gateway_id, marks)
        if follows:
            streams |= self._learn(cut, inside, seen_us, end_us, doubts)
        self._gateways[cut.gateway_id] = _Gateway(cut.epoch, cut.seq, marks, seen_us, absent, doubts)
        if not follows:
            return CutPlanes(streams=streams, silent=silent) if silent or streams else NOTHING
        missing = tuple(name for name in marks if name not in inside)
        if not missing and not streams and not silent:
            return NOTHING
        idle = _common(silent[name] for name in inside) if inside and inside <= silent.keys() else None
        return CutPlanes(missing, streams, silent, idle)

    def _leave(self, gateway_id: str, marks: Iterable[str]) -> dict[int, frozenset[str] | None]:
        """Streams of planes that the gateway names no longer, to those that are left."""
        names, known = frozenset(marks), self._known.get(gateway_id, {})
        found: dict[int, frozenset[str] | None] = {
            stream_id: (planes & names) or None for stream_id, planes in known.items() if not planes <= names
        }
        if found:
            rest = {**known, **found}
            self._known[gateway_id] = {key: planes for key, planes in rest.items() if planes is not None}
        return found

    def _learn(
        self,
        cut: Cut,
        inside: frozenset[str],
        seen_us: Mapping[str, int],
        end_us: int,
        doubts: dict[str, frozenset[int]],
    ) -> dict[int, frozenset[str]]:
        """Streams of this cut to their planes, where these were not known; brings ``doubts`` up to date."""
        known_of = self._known.get(cut.gateway_id, {})
        away = frozenset(name for name in doubts if end_us - seen_us.get(name, 0) > SILENT_US)
        learned: dict[int, frozenset[str]] = {}
        for name in away:
            for stream_id in doubts[name]:
                left = learned.get(stream_id, known_of.get(stream_id, frozenset())) - {name}
                learned |= {stream_id: left} if left else {}
        for name in away | inside:
            doubts.pop(name, None)
        there = frozenset(name for name, us in seen_us.items() if end_us - us <= GONE_US)
        alive = frozenset(name for name in there if end_us - seen_us[name] <= SILENT_US)
        for stream_id, found in self._said(cut, inside, len(seen_us)):
            known = learned.get(stream_id, known_of.get(stream_id))
            if found and known:  # in a cut without any plane is nothing of a plane
                if not found <= known:
                    for name in (known & alive) - inside:
                        doubts[name] = doubts.get(name, frozenset()) | {stream_id}
                    known = known & alive
                found |= known & there
            if found != known_of.get(stream_id):
                learned[stream_id] = found
        if learned:
            self._known[cut.gateway_id] = {**known_of, **learned}
        return learned

    def _said(self, cut: Cut, inside: frozenset[str], planes: int) -> Iterable[tuple[int, frozenset[str]]]:
        """(stream, planes that are proved to have it) of the rows of a cut, but for the usual answer."""
        said = cut.extra.get("of")
        if not cut.rows or (not isinstance(said, dict) and (len(inside) > 1 or len(inside) == planes)):
            return  # nothing is proved, or there is but one plane and no cut without it
        ids, known_of = cut.column("stream_id").tolist(), self._known.get(cut.gateway_id, {})
        by_row = _by_row(said, len(ids)) if isinstance(said, dict) else [inside] * len(ids)
        for stream_id, found in zip(ids, by_row, strict=True):
            known = known_of.get(stream_id)
            is_host_s = found and known is not None and not known and not isinstance(said, dict)
            if known != found and not is_host_s:  # the host's, in a cut together with a plane
                yield stream_id, found


def _silent(
    cut: Cut, inside: Iterable[str], absent: Mapping[str, Span], span: Span
) -> Iterable[tuple[str, Span]]:
    """(plane, time within the cut in which it gave no answer) of planes that are in it."""
    said = cut.extra.get("un")
    from_us, to_us = span
    for name in inside:
        us = said.get(name) if isinstance(said, dict) else None
        asked = (max(from_us, to_us - us), to_us) if isinstance(us, int) and us > 0 else None
        known = absent.get(name, (0, 0))
        late = max(from_us, known[0]), min(to_us, known[1])
        if late[1] - late[0] < SILENT_US:
            late = asked or (0, 0)
        if late[1]:
            yield name, late if asked is None else (min(late[0], asked[0]), max(late[1], asked[1]))


def _absence(known: Span | None, is_inside: bool, span: Span) -> Span | None:
    """What cuts without a plane cover since its own newest one, behind a cut."""
    if not is_inside:
        return span if known is None else (min(known[0], span[0]), max(known[1], span[1]))
    # It may hand over an older cut first.
    return (max(known[0], span[1]), known[1]) if known is not None and known[1] > span[1] else None


def _common(spans: Iterable[Span]) -> Span | None:
    """What lies in all of them, at least one."""
    starts, ends = zip(*spans, strict=True)
    return (max(starts), min(ends)) if max(starts) < min(ends) else None


def _by_row(said: Mapping[Any, Any], rows: int) -> list[frozenset[str]]:
    found: list[set[str]] = [set() for _ in range(rows)]
    for name, mine in rows_by_plane(said, rows).items():
        for row in mine.tolist():
            found[row].add(name)
    return [frozenset(each) for each in found]


def planes_text(planes: Iterable[str] | None) -> str:
    """As in ``streams.planes``."""
    return "" if planes is None else " ".join(sorted(planes)) or HOST
