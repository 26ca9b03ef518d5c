"""The judge: slices from SQL rollups, exactly once, as their inputs were ingested exactly once.

It remembers nothing that is not in SQL: a pass reads progress, streams and the rollups of the slices that
are due (``track`` says which), judges them (``agreements.slices``) and returns rows to record, alerts and
standings. A row's key is (agreement, objective, start, revision), so a judgement repeated after a crash
replaces itself. Rows and the alert events they cause travel in one RECORD in this order; which alerts were
active before is computed from the slices in SQL, so a restart neither repeats an alert nor swallows one.

A gap is *ours* (policy ``bad_if_ours``) when the agent lived through it and counted, but we lost the cuts:
the first cut after the gap says how many the spool dropped (``coverage.gap_cuts``). A gateway host that was
gone drops nothing, so its gaps are not ours. While a gap lasts nobody knows; the slice is no_data, not
ours, and is revised when the gateway reports again.

Thread: the looker's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pmdaemon.errors import SlaError
from sla_server.agreements import windows
from sla_server.agreements.compile import InForce
from sla_server.agreements.history import SliceHistory, code_of
from sla_server.agreements.slices import MIN_COVERAGE_RATIO, Verdict, judge_slice
from sla_server.agreements.standing import Standing, standing
from sla_server.services.judge_inputs import Inputs
from sla_server.services.judge_scopes import JudgeScopes, Name
from sla_server.services.late_cuts import LateCuts
from sla_server.services.rows import Row, Rows, event_row, identity
from sla_server.services.store import Store
from sla_server.services.track import DAY_US, JUDGE_BACK_US, RECHECK_SLICES, SECOND_US, Stream, Track

BUCKET_US: Final = 3600 * SECOND_US  # due slices of one hour share one read
_MINUTE_US: Final = 60 * SECOND_US
MOST_SLOTS: Final = 2048
"""Streams times minutes of one read: some 10 MB of rows."""
MOST_DUES: Final = 2048
"""Slices of one pass: with a pass a second, 64,000 agreements are judged within half a minute."""
MOST_LOADS: Final = 512
"""Objectives whose slices are read from SQL in one pass after a start."""
MOST_STANDINGS: Final = 512
"""Standings of one pass beyond those whose slices were judged in it; they change with the time alone."""
MOST_OPEN: Final = 1_000_000
"""Slices of all objectives together that wait for late data: some 300 MB."""
PERIOD_BACK_US: Final = 445 * DAY_US  # the longest window and a tenth; slices are kept 13 months
STREAMS_WAIT_US: Final = 15 * SECOND_US
"""How long after reading new streams a number that goes on rising is waited for: slices are late by that."""
Key = tuple[str, str]


@dataclass(slots=True)
class Judgement:
    """What one pass found.

    Attributes:
        rows: slices and events to record, in order
        bad: (key, start_us, end_us) of slices that turned out bad for the first time
        standings: of every judged objective in force
        changed: those whose standing was worked out anew
        interrupted: the database went away before all that was due was judged
    """

    rows: Rows = field(default_factory=list)
    bad: list[tuple[Key, int, int]] = field(default_factory=list)
    standings: dict[Key, Standing] = field(default_factory=dict)
    changed: set[Key] = field(default_factory=set)
    interrupted: SlaError | None = None


@dataclass(frozen=True, slots=True)
class _Due:
    """A slice to judge."""

    track: Track
    start_us: int
    scope: Sequence[Stream]

    @property
    def end_us(self) -> int:
        return self.start_us + self.track.length_us

    @property
    def first_gateway(self) -> str:
        return min((stream.gateway_id for stream in self.scope), default="")


@dataclass(slots=True)
class _Book:
    """What is known of one objective over all versions."""

    history: SliceHistory
    judged_to_us: int
    alerts: frozenset[str] = frozenset()


class Judge:
    """See the module."""

    def __init__(self, store: Store, judge_late_s: float) -> None:
        self._store = store
        self._late_us = round(judge_late_s * SECOND_US)
        self._tracks: dict[Name, Track] = {}
        self._books: dict[Key, _Book] = {}
        self._unread: dict[Name, Track] = {}
        self._scopes = JudgeScopes()
        self._late_cuts = LateCuts(store)
        self._standings: dict[Key, Standing] = {}
        self._turn = self._standing_turn = 0
        self._streams_seen = -1
        self._streams_wait_us = 0

    def set_agreements(self, items: Iterable[InForce], now_us: int) -> None:
        """What to judge by, ended versions included; what was judged before is read, or will be soon.

        Raises:
            SlaError: the database is away (retryable); call it again.
        """
        old, tracks = {**self._tracks, **self._unread}, dict[Name, Track]()
        for item in items:
            for objective in item.agreement.judged:
                name = (item.name, objective.name, item.version)
                track = old.get(name)
                if track is None:
                    track = Track(item, objective)
                    self._unread[name] = track
                track.item = item  # the same version may have ended meanwhile
                tracks[name] = track
        for track in tracks.values():
            track.most_open = min(track.most_open, max(15, MOST_OPEN // len(tracks)))
        self._unread = {name: track for name, track in self._unread.items() if name in tracks}
        in_force = {track.key for track in tracks.values() if track.item.ended_us is None}
        self._books = {key: book for key, book in self._books.items() if key in in_force}
        self._standings = {key: found for key, found in self._standings.items() if key in in_force}
        self._tracks = tracks
        self._scopes.set_tracks(tracks)
        self._load(now_us)

    def _load(self, now_us: int) -> None:
        """Read what SQL has of some of the tracks that are new here; nobody judges the others yet."""
        reads = 0
        for name in list(self._unread):
            if reads >= MOST_LOADS:
                return
            track = self._unread[name]
            if stored := track.may_have_slices(now_us):
                reads += 1
                track.restore(self._judged_rows(track, now_us - JUDGE_BACK_US, now_us), now_us)
            if track.item.ended_us is None:
                self._books[track.key] = self._book(track, stored, now_us)
            del self._unread[name]

    def _judged_rows(self, track: Track, from_us: int, now_us: int) -> list[Row]:
        return self._store.slices(*track.key, from_us, now_us + DAY_US)

    def _book(self, track: Track, stored: bool, now_us: int) -> _Book:
        old = self._books.get(track.key)
        if old is not None and old.history.length_us == track.length_us:
            return old
        if not stored:
            return _Book(SliceHistory(track.length_us, track.next_us), track.next_us)
        start_us, end_us = windows.period_bounds(track.item.agreement.spec.window, now_us)
        start_us = max(_oldest_us(start_us, end_us), now_us - PERIOD_BACK_US)
        rows = self._judged_rows(track, start_us, now_us)
        rows = [row for row in rows if row["length_us"] == track.length_us]
        # A history is as long as what was judged, not as the period: most agreements are younger.
        oldest_us = min((row["start_us"] for row in rows), default=track.next_us)
        book = _Book(SliceHistory(track.length_us, min(oldest_us, track.next_us)), start_us)
        for row in rows:
            book.history.put(row["start_us"], code_of(row["state"], row["ours"]))
            book.judged_to_us = max(book.judged_to_us, row["start_us"] + track.length_us)
        book.alerts = self._standing(track, book, now_us).alerts
        return book

    def _standing(self, track: Track, book: _Book, now_us: int) -> Standing:
        return standing(track.item, track.objective, book.history, book.judged_to_us, now_us)

    def run(self, now_us: int) -> Judgement:
        """One pass.

        Raises:
            SlaError: the database is away (retryable); no state has changed then.
        """
        result = Judgement()
        if self._unread:
            self._load(now_us)
        if self._tracks:
            self._judge_due(now_us, result)
        for track in self._to_stand(result):
            book = self._books.get(track.key)
            if book is not None and track.item.ended_us is None:
                found = self._standing(track, book, now_us)
                self._standings[track.key] = found
                result.changed.add(track.key)
                result.rows.extend(_alert_events(found, book.alerts, book.judged_to_us))
                book.alerts = found.alerts
                book.history.forget_before(_oldest_us(found.period_start_us, found.period_end_us))
        result.standings = dict(self._standings)
        return result

    def _to_stand(self, result: Judgement) -> list[Track]:
        """Tracks whose slices were judged now, and some of the others by turns."""
        judged = {(row["name"], row["objective"]) for table, row in result.rows if table == "slices"}
        tracks = [track for name, track in self._tracks.items() if name not in self._unread]
        first = self._standing_turn if self._standing_turn < len(tracks) else 0
        self._standing_turn = first + MOST_STANDINGS
        return [
            track
            for index, track in enumerate(tracks)
            if first <= index < self._standing_turn or track.key in judged
        ]

    def _judge_due(self, now_us: int, result: Judgement) -> None:
        # Streams after progress: a gateway that has passed a slice's end has brought the streams in it.
        progress = self._store.progress()
        if not self._streams_are_read(now_us):
            return  # nobody may be judged without a stream that is in SQL
        parts: list[list[_Due]] = []
        try:
            self._note_late_cuts(now_us)
            parts = _parts(self._due(progress, now_us))
            while parts:
                inputs = self._read(parts[0], progress, now_us)
                for due in parts.pop(0):
                    self._judge_one(due, progress, inputs, now_us, result)
        except SlaError as exc:
            if not exc.retryable:
                raise
            # What was judged so far must be recorded; the rest is due again.
            result.interrupted = exc
            for due in itertools.chain(*parts):
                due.track.postpone(due.start_us)

    def _streams_are_read(self, now_us: int) -> bool:
        """Whether all streams of SQL are known; they are read when there are others, or when those settle.

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
        self._scopes.set_streams(self._store.streams())
        self._scopes.set_tracks(self._tracks)
        return True

    def _note_late_cuts(self, now_us: int) -> None:
        longest_us = max(track.length_us for track in self._tracks.values())
        span_us = (RECHECK_SLICES + 1) * longest_us
        for gateway_id, slot_us in self._late_cuts.look(self._scopes.gateways(), span_us, now_us):
            for name in self._scopes.at(gateway_id):
                self._tracks[name].note_late(slot_us)

    def _due(self, progress: dict[str, int], now_us: int) -> list[_Due]:
        """Slices to judge in this pass; tracks take turns when there are too many."""
        busy = [
            (name, track)
            for name, track in self._tracks.items()
            if not track.quiet(now_us) and name not in self._unread
        ]
        first = self._turn if self._turn < len(busy) else 0
        dues: list[_Due] = []
        self._turn = 0
        for index, (name, track) in enumerate((*busy[first:], *busy[:first])):
            if len(dues) >= MOST_DUES:
                self._turn = (first + index) % len(busy)
                break
            scope = self._scopes.of(name)
            starts = track.due(scope, progress, now_us, self._late_us)
            dues += [_Due(track, start_us, scope) for start_us in starts]
        return dues

    def _read(self, dues: Sequence[_Due], progress: dict[str, int], now_us: int) -> Inputs:
        streams = {stream.stream_id: stream.gateway_id for due in dues for stream in due.scope}
        start_us = min(due.start_us for due in dues)
        end_us = max(due.end_us for due in dues)
        gateways = sorted(set(streams.values()))
        found = self._store.slice_inputs(list(streams), gateways, start_us, end_us)
        self._late_cuts.note(found.coverage)
        inputs = Inputs(found)
        by_gateway: dict[str, list[_Due]] = defaultdict(list)
        for due in dues:
            for name in {stream.gateway_id for stream in due.scope}:
                by_gateway[name].append(due)
        behind = [
            name
            for name in gateways
            if progress.get(name, 0) >= end_us
            and any(
                _is_thin(inputs.covered_us(name, due.start_us, due.end_us), due)
                for due in by_gateway.get(name, ())
            )
        ]
        if behind:
            # The first cut after a gap tells what was dropped in it.
            after = self._store.slice_inputs([], behind, end_us, min(now_us, end_us + DAY_US))
            inputs.add_coverage(after.coverage)
        return inputs

    def _judge_one(
        self, due: _Due, progress: dict[str, int], inputs: Inputs, now_us: int, result: Judgement
    ) -> None:
        track, start_us, end_us = due.track, due.start_us, due.end_us
        gateways = track.gateways(due.scope, progress, start_us, end_us)
        covered_us = {name: inputs.covered_us(name, start_us, end_us) for name in gateways}
        verdict = judge_slice(
            track.promise,
            track.objective.applicability,
            inputs.slots(due.scope, start_us, end_us),
            covered_us,
            length_us=track.length_us,
            excluded=_is_excluded(due),
            slack_us=max((inputs.cut_us(name, start_us, end_us) for name in gateways), default=0.0),
        )
        thin = [name for name, us in covered_us.items() if _is_thin(us, due)]
        ours = verdict.state == "no_data" and any(inputs.is_ours(name, start_us, end_us) for name in thin)
        row = _slice_row(track, start_us, verdict, ours, now_us)
        if not track.settle(row, frozenset(name for name in gateways if progress.get(name, 0) < end_us)):
            return
        result.rows.append(("slices", row))
        if verdict.state == "bad" and row["revision"] == 0:
            result.bad.append((track.key, start_us, end_us))
        book = self._books.get(track.key)
        if book is not None and book.history.length_us == track.length_us:
            book.history.put(start_us, code_of(verdict.state, ours))
            book.judged_to_us = max(book.judged_to_us, end_us)


def _oldest_us(period_start_us: int, period_end_us: int) -> int:
    """Where a history begins: alerts look back a tenth of the period, perhaps into the one before."""
    return period_start_us - (period_end_us - period_start_us) // 10 - DAY_US


def _parts(dues: Iterable[_Due]) -> list[list[_Due]]:
    """Due slices by reads, the oldest hour first; those of one gateway side by side."""
    parts: list[list[_Due]] = []
    bucket, slots = -1, 0
    for due in sorted(dues, key=lambda due: (due.start_us // BUCKET_US, due.first_gateway, due.start_us)):
        weight = len(due.scope) * -(-due.track.length_us // _MINUTE_US)
        if due.start_us // BUCKET_US != bucket or slots + weight > MOST_SLOTS:
            bucket, slots = due.start_us // BUCKET_US, 0
            parts.append([])
        parts[-1].append(due)
        slots += weight
    return parts


def _is_thin(covered_us: int, due: _Due) -> bool:
    return covered_us < MIN_COVERAGE_RATIO * due.track.length_us


def _is_excluded(due: _Due) -> bool:
    spec = due.track.item.agreement.spec
    return windows.is_excluded(
        due.start_us,
        due.end_us,
        window=spec.window,
        hours=spec.service_hours,
        maintenance=spec.maintenance,
        default_tz=spec.time_zone,
    )


def _slice_row(track: Track, start_us: int, verdict: Verdict, ours: bool, now_us: int) -> Row:
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
        "ours": ours,
        "judged_us": now_us,
    }


def _alert_events(found: Standing, before: frozenset[str], at_us: int) -> Rows:
    """Events for the alerts that began or ended; identity: what, whose, which, and up to which slice."""
    subject = f"{found.name}/{found.objective}"
    rows: Rows = []
    for alert in sorted(found.alerts ^ before):
        began = alert in found.alerts
        kind = "burn-rate" if began else "burn-rate-ended"
        severity = "info" if not began else "warning" if alert == "slow" else "critical"
        if alert == "consecutive":
            text = f"{found.consecutive_bad} bad slices in a row" if began else "no longer bad in a row"
        else:
            text = (
                f"the error budget burns too fast ({alert} windows)" if began else f"{alert} burn has ended"
            )
        details = {"alert": alert, "burn_1h": found.burn_1h, "budget_remaining": found.budget.remaining_ratio}
        event_id = identity("alert", kind, subject, alert, at_us)
        rows.append(event_row(kind, severity, "sla", subject, f"{subject}: {text}", at_us, details, event_id))
    return rows
