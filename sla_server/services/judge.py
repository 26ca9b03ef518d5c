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
from sla_server.services.rows import Row, Rows, event_row, identity
from sla_server.services.store import Store
from sla_server.services.track import DAY_US, JUDGE_BACK_US, SECOND_US, Stream, Track

BUCKET_US: Final = 3600 * SECOND_US  # due slices of one hour share one read
MAX_READS: Final = 6  # a pass; the rest waits for the next one
PERIOD_BACK_US: Final = 445 * DAY_US  # the longest window and a tenth; slices are kept 13 months
Key = tuple[str, str]


@dataclass(slots=True)
class Judgement:
    """What one pass found.

    Attributes:
        rows: slices and events to record, in order
        bad: (key, start_us, end_us) of slices that turned out bad for the first time
        standings: of every judged objective in force
        interrupted: the database went away before all that was due was judged
    """

    rows: Rows = field(default_factory=list)
    bad: list[tuple[Key, int, int]] = field(default_factory=list)
    standings: dict[Key, Standing] = field(default_factory=dict)
    interrupted: SlaError | None = None


@dataclass(frozen=True, slots=True)
class _Due:
    """A slice to judge."""

    track: Track
    start_us: int
    scope: list[Stream]

    @property
    def end_us(self) -> int:
        return self.start_us + self.track.length_us


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
        self._tracks: dict[tuple[str, str, int], Track] = {}
        self._books: dict[Key, _Book] = {}

    def set_agreements(self, items: Iterable[InForce], now_us: int) -> None:
        """What to judge by, ended versions included; reads what was judged before.

        Raises:
            SlaError: the database is away (retryable); nothing has changed then.
        """
        tracks: dict[tuple[str, str, int], Track] = {}
        books: dict[Key, _Book] = {}
        for item in items:
            for objective in item.agreement.judged:
                name = (item.name, objective.name, item.version)
                track = self._tracks.get(name)
                if track is None:
                    track = Track(item, objective)
                    track.restore(self._judged_rows(track, now_us - JUDGE_BACK_US, now_us), now_us)
                track.item = item  # the same version may have ended meanwhile
                tracks[name] = track
                if item.ended_us is None:
                    books[track.key] = self._book(track, now_us)
        self._tracks, self._books = tracks, books

    def _judged_rows(self, track: Track, from_us: int, now_us: int) -> list[Row]:
        return self._store.slices(*track.key, from_us, now_us + DAY_US)

    def _book(self, track: Track, now_us: int) -> _Book:
        old = self._books.get(track.key)
        if old is not None and old.history.length_us == track.length_us:
            return old
        start_us, end_us = windows.period_bounds(track.item.agreement.spec.window, now_us)
        # Alerts look back a tenth of the period, which may reach into the one before.
        start_us = max(start_us - (end_us - start_us) // 10 - DAY_US, now_us - PERIOD_BACK_US)
        book = _Book(SliceHistory(track.length_us, start_us), start_us)
        for row in self._judged_rows(track, start_us, now_us):
            if row["length_us"] == track.length_us:
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
        if self._tracks:
            self._judge_due(now_us, result)
        for track in self._tracks.values():
            book = self._books.get(track.key)
            if book is not None and track.item.ended_us is None:
                found = self._standing(track, book, now_us)
                result.standings[track.key] = found
                result.rows.extend(_alert_events(found, book.alerts, book.judged_to_us))
                book.alerts = found.alerts
        return result

    def _judge_due(self, now_us: int, result: Judgement) -> None:
        progress, streams = self._store.progress(), self._store.streams()
        buckets: dict[int, list[_Due]] = defaultdict(list)
        for track in self._tracks.values():
            scope = track.scope(streams)
            for start_us in track.due(scope, progress, now_us, self._late_us):
                buckets[start_us // BUCKET_US].append(_Due(track, start_us, scope))
        for bucket in sorted(buckets)[:MAX_READS]:
            try:
                inputs = self._read(buckets[bucket], progress, now_us)
            except SlaError as exc:
                if not exc.retryable:
                    raise
                # What was judged so far must be recorded; the rest is due again.
                result.interrupted = exc
                return
            for due in buckets[bucket]:
                self._judge_one(due, progress, inputs, now_us, result)

    def _read(self, dues: Sequence[_Due], progress: dict[str, int], now_us: int) -> Inputs:
        streams = {stream.stream_id: stream.gateway_id for due in dues for stream in due.scope}
        start_us = min(due.start_us for due in dues)
        end_us = max(due.end_us for due in dues)
        gateways = sorted(set(streams.values()))
        inputs = Inputs(self._store.slice_inputs(list(streams), gateways, start_us, end_us))
        behind = [
            name
            for name in gateways
            if progress.get(name, 0) >= end_us
            and any(_is_thin(inputs.covered_us(name, due.start_us, due.end_us), due) for due in dues)
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
