"""The judge: slices from SQL rollups, exactly once, as their inputs were ingested exactly once.

It remembers nothing that is not in SQL: a pass reads progress, streams and the rollups of the slices that
are due (``track`` says which), judges them (``agreements.slices``) and returns rows to record, alerts and
standings. A row's key is (agreement, objective, start, revision), so a judgement repeated after a crash
replaces itself. Rows and the alert events they cause travel in one RECORD in this order; which alerts were
active before is computed from the slices in SQL, so a restart neither repeats an alert nor swallows one.

A gap is *ours* (policy ``bad_if_ours``) when the agent lived through it and counted, but we lost the cuts:
the first cut after the gap says how many the spool dropped (``coverage.gap_cuts``), or its lifetime counters
have moved (``gap_ios``); or when the server was down in it (table ``outages``). A gateway host that was gone
drops and counts nothing, so its gaps are not ours. While a gap lasts it is not known; the slice is no_data,
not ours, and is revised when the gateway reports again.

Cuts may come after the slice was judged, from a data plane that was not waited for, or a gateway that had
left the scope: table ``late_cuts`` says of which slots (``db.ingest.accumulator``). It is read every
``EVERY_US``, and slices of 48 h are judged again, also those that a track does not remember: what they were
judged as is read from SQL first.

A volume that was a gateway's own and is not any more (``sla volumes revoke``): slices that were judged
before stay, also when they are judged again; of all others its streams are no part. A slice without any other
is no_data, ``not-owned``.

Time may go back: server time follows a step of the clock in the end, and a restart believes the clock.
Then everything is read again as at a start, progress beyond now is not believed, and what was judged beyond
now is judged again in its time (``track``).

Thread: the SQL worker's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import STEP_US
from sla_server.agreements.compliance import ObjectiveStatus, Terms, terms_by_version
from sla_server.agreements.promise import InForce
from sla_server.agreements.rules import thresholds_us
from sla_server.agreements.slices import SliceVerdict, verdicts_of
from sla_server.agreements.slot_table import Ints
from sla_server.agreements.verdicts import MIN_COVERAGE_RATIO, DueSlices, Verdicts, judge_slices
from sla_server.ownership import REVOKED, VolumeClaim, enumerated
from sla_server.rows import Row, Rows
from sla_server.services.exclusions import key_of
from sla_server.services.judging.inputs import SliceRows
from sla_server.services.judging.objectives import Key, ObjectiveHistory, revision_events
from sla_server.services.judging.scopes import DueQueue, JudgeScopes, Name
from sla_server.services.judging.track import (
    JUDGE_BACK_US,
    NEVER_US,
    OPEN_US,
    RETIRED_US,
    SECOND_US,
    JudgedStream,
    Track,
    lag_us,
)
from sla_server.services.rows import event_row, identity
from sla_server.services.store import SqlReads

BUCKET_US: Final = 3600 * SECOND_US  # due slices of one hour share one read
_MINUTE_US: Final = 60 * SECOND_US
MOST_SLOTS: Final = 4096
"""Streams times minutes of one read: some 10 MB of rows."""
MOST_DUES: Final = 4096
"""Slices of one pass; while there are more, the next one follows at once (``Judge.has_more``)."""
BREATH_DUES: Final = 128
"""Slices entered between two calls of ``breathe``, in which others may go first: some milliseconds."""
MOST_LOOKS: Final = 8192
"""Tracks that one pass looks at."""
PROGRESS_US: Final = 5 * SECOND_US
"""How long passes that follow at once make do with the same progress."""
MOST_LOADS: Final = 512
"""Objectives whose slices are read from SQL in one pass after a start."""
MOST_OPEN: Final = 1_000_000
"""Slices of all objectives together that wait for late data: some 300 MB."""
EVERY_US: Final = 10 * SECOND_US
LATE_SLACK_US: Final = 60 * SECOND_US
"""A slice judged so long after late cuts were noted has them: their transaction has ended."""
STREAMS_WAIT_US: Final = 15 * SECOND_US
"""How long after reading new streams a number that goes on rising is waited for: slices are late by that."""


@dataclass(slots=True)
class Judgement:
    """What one pass found.

    Attributes:
        rows: slices and events to record, in order
        revised: (start_us, state before, state now) of slices that late data changed, by key
        standings: of every judged objective in force
        changed: those whose status was computed again
        interrupted: the database went away before all that was due was judged
    """

    rows: Rows = field(default_factory=list)
    revised: dict[Key, list[tuple[int, str, str]]] = field(default_factory=dict)
    standings: dict[Key, ObjectiveStatus] = field(default_factory=dict)
    changed: set[Key] = field(default_factory=set)
    interrupted: SlaError | None = None


@dataclass(frozen=True, slots=True)
class _Due:
    """A slice to judge."""

    track: Track
    start_us: int
    scope: Sequence[JudgedStream]
    is_disowned: bool = False  # some stream was left out: its volume is not its gateway's own

    @property
    def end_us(self) -> int:
        return self.start_us + self.track.length_us

    @property
    def from_us(self) -> int:
        """From when on slots are read: with steps of a demand curve also those of the slice before."""
        return self.start_us - self.track.length_us * self.track.has_steps

    @property
    def first_gateway(self) -> str:
        return min((stream.gateway_id for stream in self.scope), default="")


class Judge:
    """See the module."""

    def __init__(
        self, store: SqlReads, judge_late_s: float, breathe: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._yield_to_main_loop = breathe
        self._late_us = round(judge_late_s * SECOND_US)
        self._tracks: dict[Name, Track] = {}
        self._books = ObjectiveHistory()
        self._queue = DueQueue()
        self._unread: dict[Name, Track] = {}
        self._scopes = JudgeScopes()
        self._late: dict[Name, dict[int, int]] = {}  # slots with late cuts, and when these were noted
        self._late_read_us = self._late_seen_us = 0
        self._progress: dict[str, int] = {}
        self._progress_us = 0
        self._has_more = False
        self._streams_seen = -1
        self._streams_wait_us = 0
        self._now_us = 0
        self._said: set[str] = set()

    @property
    def has_more(self) -> bool:
        """Whether the last pass left tracks that it should have looked at."""
        return self._has_more

    def set_claims(self, claims: Iterable[VolumeClaim]) -> None:
        """Claims that changed: what is judged from now on is without volumes that are not their gateway's."""
        if self._scopes.set_claims(claims):
            self._set_scopes()

    def set_agreements(self, items: Iterable[InForce], now_us: int) -> None:
        """What to judge by, ended versions included; what was judged before is read, or will be soon.

        Raises:
            SlaError: the database is away (retryable); call it again.
        """
        old, tracks = {**self._tracks, **self._unread}, dict[Name, Track]()
        before: dict[Key, Track] = {}
        for item in items:
            for objective in item.agreement.judged:
                name = (item.name, objective.name, item.version)
                track = old.get(name)
                if track is None:
                    earlier = before.get((item.name, objective.name))
                    track = Track(item, objective, _reach_of(earlier, item))
                    self._unread[name] = track
                track.follow(item)  # the same version may have ended meanwhile
                before[track.key] = track
                tracks[name] = track
        for track in tracks.values():
            track.most_open = min(track.most_open, max(15, MOST_OPEN // len(tracks)))
        self._unread = {name: track for name, track in self._unread.items() if name in tracks}
        self._tracks = tracks
        self._books.set_tracks(tracks.values())
        self._set_scopes()
        self._load(now_us)

    def _set_scopes(self) -> None:
        """Tracks or streams are others: look at all that are read."""
        self._scopes.set_tracks(self._tracks, self._unread.keys())
        self._has_more = False
        self._queue.reset(name for name in self._tracks if name not in self._unread)

    def _load(self, now_us: int) -> None:
        """Read what SQL has of some of the tracks that are new here; the others are not judged yet."""
        reads = 0
        for name in list(self._unread):
            if reads >= MOST_LOADS:
                return
            track = self._unread[name]
            if stored := track.may_have_slices(now_us):
                reads += 1
                track.restore(self._judged_rows(track, now_us - JUDGE_BACK_US), now_us)
            if track.item.ended_us is None and not self._books.take_over(track, now_us):
                from_us = self._books.first_us(track, now_us)
                rows = self._judged_rows(track, from_us) if stored else None
                self._books.open(track, rows, self._terms(track, rows or ()), now_us)
            del self._unread[name]
            self._queue.add(name)

    def _judged_rows(self, track: Track, from_us: int) -> list[Row]:
        return self._store.slices(*track.key, from_us, NEVER_US)

    def _terms(self, track: Track, rows: Iterable[Row]) -> dict[int, Terms]:
        """Terms of the earlier versions that judged some of these slices."""
        if all(row["version"] == track.item.version for row in rows):
            return {}
        return terms_by_version(self._store.agreement_versions(track.item.name), track.objective.name)

    def run(self, now_us: int, live_us: int = 0, start_until_us: int = 0) -> Judgement:
        """One pass; ``live_us``: see ``lag_us``; until ``start_until_us`` it is a start.

        Raises:
            SlaError: the database is away (retryable); no state has changed then.
        """
        result = Judgement()
        if now_us < self._now_us - STEP_US:
            self._begin_again()
        self._now_us = now_us
        if self._unread:
            self._load(now_us)
        if self._tracks:
            self._judge_due(now_us, min(live_us, now_us), start_until_us, result)
        judged = {(row["name"], row["objective"]): None for name, row in result.rows if name == "slices"}
        result.changed, events = self._books.refresh(judged, now_us)
        result.rows += events
        result.rows += revision_events(result.revised, now_us)
        result.standings = dict(self._books.standings)
        return result

    def _begin_again(self) -> None:
        """The clock has gone back: forget all that was read or noted in what is now the future."""
        self._tracks = {name: track.unread() for name, track in self._tracks.items()}
        self._unread = dict(self._tracks)
        self._books = ObjectiveHistory()
        self._books.set_tracks(self._tracks.values())
        self._scopes, self._streams_seen, self._streams_wait_us = self._scopes.unread(), -1, 0
        self._late, self._late_read_us, self._late_seen_us = {}, 0, 0
        self._set_scopes()

    def _judge_due(self, now_us: int, live_us: int, start_until_us: int, result: Judgement) -> None:
        if not self._read_progress(now_us):
            return
        progress = self._progress
        parts: list[list[_Due]] = []
        try:
            self._record_late_cuts(now_us)
            is_start = now_us < start_until_us
            late_us = self._late_us + lag_us(now_us if is_start else live_us, progress, is_start=is_start)
            parts = _parts(self._due(progress, now_us, late_us, start_until_us if is_start else NEVER_US))
            while parts:
                self._yield_to_main_loop()
                part = self._read(parts[0], progress, now_us)
                judged = zip(parts.pop(0), part.gateways, *part.judged(), strict=True)
                for count, (due, gateways, found, lost) in enumerate(judged):
                    if count % BREATH_DUES == 0 and count:
                        self._yield_to_main_loop()
                    lacking = frozenset([name for name in gateways if progress.get(name, 0) < due.end_us])
                    self._add_verdict(due, found, lost, lacking, now_us, result)
        except SlaError as exc:
            if not exc.retryable:
                raise
            # What was judged so far must be recorded; the rest is due again.
            result.interrupted, self._has_more = exc, False
            for due in itertools.chain(*parts):
                due.track.postpone(due.start_us)

    def _read_progress(self, now_us: int) -> bool:
        """Read progress; False if there are streams that are not known here.

        Passes that follow at once, to judge the rest of what was due, make do with the progress of the first.
        """
        if not self._has_more or not 0 <= now_us - self._progress_us < PROGRESS_US:
            # Streams after progress: a gateway that has passed a slice's end has brought the streams in it.
            self._has_more, self._progress = False, _believed(self._store.progress(), now_us)
            self._progress_us = now_us
            return self._streams_are_read(now_us)  # nothing may be judged without a stream that is in SQL
        return True

    def _streams_are_read(self, now_us: int) -> bool:
        """Whether all streams of SQL are known; they are read when there are others, or when those record.

        A fleet that registers brings new ones for many passes, and to read 64,000 takes a second.
        """
        count, before = self._store.stream_count(), self._streams_seen
        self._streams_seen = count
        if count == self._scopes.streams:
            return True
        if self._scopes.streams >= 0:
            if count != before and now_us < self._streams_wait_us:
                return False
            self._streams_wait_us = now_us + STREAMS_WAIT_US
        self._scopes.set_streams(self._store.streams(), now_us)
        self._set_scopes()
        return True

    def _record_late_cuts(self, now_us: int) -> None:
        """Make slices due again that late cuts belong to; those of some tracks in each pass."""
        if now_us - self._late_read_us >= EVERY_US:
            for row in self._store.late_cuts(self._late_seen_us, now_us - OPEN_US):
                self._late_seen_us = max(self._late_seen_us, int(row["noted_us"]))
                for name in self._scopes.at(row["gateway_id"]):
                    self._late.setdefault(name, {})[row["slot_us"]] = row["noted_us"]
            self._late_read_us = now_us
        reads = 0
        for name in [name for name in self._late if name not in self._unread]:
            if reads >= MOST_LOADS:
                return
            if (track := self._tracks.get(name)) is not None:
                reads += self._record_late(track, self._late[name])
                self._queue.add(name)
            del self._late[name]

    def _record_late(self, track: Track, slots: dict[int, int]) -> bool:
        """Note late cuts of one track; whether that took a read."""
        noted_us: dict[int, int] = {}
        for slot_us, at_us in slots.items():
            start_us = track.record_late(slot_us)
            if start_us is not None:
                noted_us[start_us] = max(at_us, noted_us.get(start_us, 0))
        if noted_us:
            for row in self._store.slices(*track.key, min(noted_us), max(noted_us) + 1):
                if row["judged_us"] <= noted_us.get(row["start_us"], -LATE_SLACK_US) + LATE_SLACK_US:
                    track.recall(row)
        return bool(noted_us)

    def _due(self, progress: dict[str, int], now_us: int, late_us: int, look_us: int) -> list[_Due]:
        """Slices to judge in this pass; too many tracks take turns, and none waits beyond ``look_us``."""
        self._queue.advance(progress, now_us)
        dues: list[_Due] = []
        again: list[Name] = []
        for name in self._queue.take(MOST_LOOKS):
            track, scope = self._tracks[name], self._scopes.of(name)
            starts = track.due(scope, progress, now_us, late_us)
            dues += [_due_of(track, start_us, scope) for start_us in starts]
            rest = None if starts else track.waits_for(scope, progress, late_us)
            if rest is None:
                again.append(name)
            else:
                self._queue.defer(name, min(rest[0], look_us), rest[1])
            if len(dues) >= MOST_DUES:
                break
        self._has_more = len(self._queue) > 0
        for name in again:
            self._queue.add(name)
        return dues

    def _read(self, dues: Sequence[_Due], progress: dict[str, int], now_us: int) -> _Part:
        streams = {stream.stream_id: stream.gateway_id for due in dues for stream in due.scope}
        start_us = min(due.from_us for due in dues)
        end_us = max(due.end_us for due in dues)
        gateways = sorted(set(streams.values()))
        found = self._store.slice_inputs(list(streams), gateways, start_us, end_us)
        part = _Part(dues, SliceRows(found, self._store.outages(start_us, end_us)), progress)
        behind = sorted(name for name in part.thin if progress.get(name, 0) >= end_us)
        # The first cut after a gap tells what was dropped in it; most gaps are short.
        from_us, step_us = end_us, BUCKET_US
        while behind and from_us < min(now_us, end_us + OPEN_US):
            to_us = min(now_us, from_us + step_us)
            after = self._store.slice_inputs([], behind, from_us, to_us).coverage
            part.inputs.add_coverage(after)
            behind = sorted(set(behind) - {row["gateway_id"] for row in after})
            from_us, step_us = to_us, 2 * step_us
        return part

    def _add_verdict(
        self,
        due: _Due,
        verdict: SliceVerdict,
        lost: str,
        lacking: frozenset[str],
        now_us: int,
        result: Judgement,
    ) -> None:
        track, start_us = due.track, due.start_us
        row = _slice_row(track, start_us, verdict, lost, now_us)
        before = track.state_of(start_us)
        if due.is_disowned:
            self._say_without(due, result)
        if not track.record(row, lacking):
            return
        result.rows.append(("slices", row))
        if before not in ("", verdict.state):
            result.revised.setdefault(track.key, []).append((start_us, before, verdict.state))
        self._books.add_slice(track, row)

    def _say_without(self, due: _Due, result: Judgement) -> None:
        """Note, once an agreement, which gateways it is judged without from this slice on."""
        taken: dict[tuple[str, int], list[VolumeClaim]] = {}
        for claim in self._scopes.disowned(_name_of(due.track)):
            if due.start_us <= claim.changed_us:  # later slices follow this one
                taken.setdefault((claim.gateway_id, claim.changed_us), []).append(claim)
        for claims in taken.values():
            event = _without_event(due.track.item.name, claims)
            if event[1]["event_id"] not in self._said:
                self._said.add(event[1]["event_id"])
                result.rows.append(event)


class _Part:
    """Due slices of one read, judged together.

    Attributes:
        gateways: whose data each slice needs.
        thin: gateways of which too little of some slice was observed.
    """

    def __init__(self, dues: Sequence[_Due], inputs: SliceRows, progress: dict[str, int]) -> None:
        self.inputs = inputs
        self._dues = dues
        self.gateways = [due.track.gateways(due.scope, progress, due.start_us, due.end_us) for due in dues]
        self._sources = [
            inputs.sources(due.scope, gateways, due.start_us, due.end_us)
            for due, gateways in zip(dues, self.gateways, strict=True)
        ]
        self.thin = {
            name
            for due, sources in zip(dues, self._sources, strict=True)
            for name, covered_us in sources
            if _is_thin(covered_us, due)
        }

    def judged(self) -> tuple[list[SliceVerdict], list[str]]:
        """Of each slice the verdict, and how we lost the data that are missing, if it was us."""
        dues = self._dues
        excuses = _excuses(dues)
        found = self._verdicts(np.array([excuse is not None for excuse in excuses]))
        verdicts = verdicts_of(found)
        lost = []
        for index, (due, excuse) in enumerate(zip(dues, excuses, strict=True)):
            if excuse is not None:
                verdicts[index] = replace(verdicts[index], reason=excuse)
            if due.is_disowned and not due.scope and verdicts[index].reason == "no-samples":
                verdicts[index] = replace(verdicts[index], reason="not-owned")
            lost.append(self._lost_by_us(due, index) if verdicts[index].reason == "no-samples" else "")
        return verdicts, lost

    def _verdicts(self, is_excluded: np.ndarray[Any, np.dtype[np.bool_]]) -> Verdicts:
        dues, inputs = self._dues, self.inputs
        scopes = [due.scope for due in dues]
        start_us = np.array([due.start_us for due in dues])
        length_us = np.array([due.track.length_us for due in dues])
        observed = [[covered_us for _, covered_us in sources] for sources in self._sources]
        pairs = inputs.pairs(scopes, start_us, start_us + length_us)
        before_us, before = self._before()
        return judge_slices(
            inputs.table,
            DueSlices(
                rules=[due.track.rule for due in dues],
                length_us=length_us,
                is_excluded=is_excluded,
                covered_us=np.array([min(each, default=0) for each in observed]),
                most_covered_us=np.array([max(each, default=0) for each in observed]),
                before_us=before_us,
                pair_slice=pairs[0],
                pair_row=pairs[1],
                pair_stream=pairs[2],
                before=before,
                pair_is_beside=inputs.is_beside(pairs[2], scopes),
            ),
        )

    def _before(self) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
        """The step in force in the slice before each, -1 if there is but one, or no such slice; its pairs."""
        steps = np.full(len(self._dues), -1, dtype=np.int64)
        pairs = (steps[:0], steps[:0], steps[:0])
        chosen = [
            index
            for index, due in enumerate(self._dues)
            if due.track.has_steps and due.from_us >= due.track.item.applied_us
        ]
        if chosen:
            dues = [self._dues[index] for index in chosen]
            start_us, end_us = (
                np.array(us) for us in zip(*((d.from_us, d.start_us) for d in dues), strict=True)
            )
            of, row, stream = self.inputs.pairs([due.scope for due in dues], start_us, end_us)
            rules = [due.track.rule for due in dues]
            steps[chosen] = thresholds_us(self.inputs.table, rules, end_us - start_us, of, row)
            pairs = np.array(chosen)[of], row, stream
        return steps, pairs

    def _lost_by_us(self, due: _Due, index: int) -> str:
        thin = [name for name, covered_us in self._sources[index] if _is_thin(covered_us, due)]
        found = (self.inputs.lost_by_us(name, due.start_us, due.end_us) for name in thin)
        return next(filter(None, found), "")


def _due_of(track: Track, start_us: int, scope: Sequence[JudgedStream]) -> _Due:
    end_us = start_us + track.length_us
    counting = [stream for stream in scope if stream.counts(end_us)]
    if len(counting) == len(scope):
        return _Due(track, start_us, scope)
    is_disowned = any(stream.until_us < end_us and not stream.has_left for stream in scope)
    return _Due(track, start_us, counting, is_disowned)


def _reach_of(earlier: Track | None, item: InForce) -> int:
    """Until when slices of the version before this one reach; 0 without one that ended before it."""
    ended_us = earlier.item.ended_us if earlier is not None else None
    if (
        earlier is None or ended_us is None or ended_us > item.applied_us
    ):  # applied under a clock that was off
        return 0
    return earlier.reaches_us


def _believed(progress: dict[str, int], now_us: int) -> dict[str, int]:
    """Progress without what lies beyond now: such a gateway is in scope, and how far it got is not known."""
    return {name: us if us <= now_us + STEP_US else now_us - RETIRED_US for name, us in progress.items()}


def _parts(dues: Iterable[_Due]) -> list[list[_Due]]:
    """Due slices by reads, the oldest hour first; those of one gateway side by side."""
    parts: list[list[_Due]] = []
    bucket, slots = -1, 0
    for due in sorted(dues, key=lambda due: (due.start_us // BUCKET_US, due.first_gateway, due.start_us)):
        weight = len(due.scope) * -(-(due.end_us - due.from_us) // _MINUTE_US)
        if due.start_us // BUCKET_US != bucket or slots + weight > MOST_SLOTS:
            bucket, slots = due.start_us // BUCKET_US, 0
            parts.append([])
        parts[-1].append(due)
        slots += weight
    return parts


def _excuses(dues: Sequence[_Due]) -> list[str | None]:
    """Why each slice is excluded, or None; asked once of all with the same hours and work."""
    answers: dict[tuple[object, ...], str | None] = {}
    keys = [(key_of(due.track.item), due.start_us, due.end_us) for due in dues]
    for key, due in zip(keys, dues, strict=True):
        if key not in answers:
            answers[key] = due.track.item.excluded(due.start_us, due.end_us)
    return [answers[key] for key in keys]


def _is_thin(covered_us: int, due: _Due) -> bool:
    return covered_us < MIN_COVERAGE_RATIO * due.track.length_us


def _name_of(track: Track) -> Name:
    return (*track.key, track.item.version)


def _without_event(sla: str, claims: Sequence[VolumeClaim]) -> tuple[str, Row]:
    """An agreement is judged without a gateway from now on; ``claims`` of that one, decided at once."""
    first, volumes = claims[0], [claim.volume for claim in claims]
    why = f"revoked by {first.decided_by}" if first.state == REVOKED else "waiting for approval"
    text = (
        f"{sla} is judged without gateway {first.name} from now on: {enumerated(volumes)} "
        f"{'is' if len(volumes) == 1 else 'are'} not its own ({why}). What was judged before stays"
    )
    event_id = identity("judged-without", sla, first.gateway_id, first.changed_us)
    details = {"gateway_id": first.gateway_id, "volumes": volumes[:100], "count": len(volumes)}
    return event_row("judged-without", "warning", "sla", sla, text, first.changed_us, details, event_id)


def _slice_row(track: Track, start_us: int, verdict: SliceVerdict, lost: str, now_us: int) -> Row:
    """A row of table ``slices``; ``lost``: how we lost the data that are missing, if it was us."""
    return {
        "name": track.item.name,
        "objective": track.objective.name,
        "start_us": start_us,
        "revision": 0,
        "version": track.item.version,
        "length_us": track.length_us,
        "state": verdict.state,
        "n": verdict.n,
        "missed": verdict.missed,
        "offered_iops": verdict.offered_iops,
        "threshold_us": verdict.threshold_us,
        "coverage_ratio": verdict.coverage_ratio,
        "inexact": verdict.inexact,
        "ours": bool(lost),
        "judged_us": now_us,
        "reason": lost or verdict.reason,
        "measured": verdict.measured,
        "failed": verdict.failed,
    }
