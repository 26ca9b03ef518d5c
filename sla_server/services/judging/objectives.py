"""History of each objective in force: its judged slices, its state, its active alerts.

Status is computed again for objectives whose slices were judged in a pass, and for some of the others by
turns, since they change with the time alone. Which alerts were active before is computed from the slices in
SQL (``open``), so a restart neither repeats an alert nor swallows one.

A book has the slices of all versions, each under its own terms: an edit of the slice length or of the target
erases nothing that was judged before it.

State: a book and a standing an objective. Belongs to the SQL worker's thread; no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sla_server.agreements import periods
from sla_server.agreements.compliance import (
    SECOND_US,
    JudgedTime,
    ObjectiveStatus,
    Terms,
    burn_alerts,
    mark_of,
    standing,
    terms_for,
    terms_of,
)
from sla_server.agreements.slice_history import code_of
from sla_server.reports.words import duration, percent
from sla_server.rows import Row, Rows
from sla_server.services.judging.track import DAY_US, Track
from sla_server.services.rows import event_row, identity

MOST_STANDINGS: Final = 512
"""Standings of one pass beyond those whose slices were judged in it; none if those are as many."""
PERIOD_BACK_US: Final = 445 * DAY_US  # the longest window and a tenth; slices are kept 13 months
MOST_REVISED: Final = 20
"""Objectives of one pass that have an event each about revised slices."""
MOST_LISTED: Final = 20
Key = tuple[str, str]


@dataclass(slots=True)
class _Book:
    """What is known of one objective over all versions.

    Attributes:
        version: in force when it was opened, or when it was seen to reach back far enough for it
        from_us: since when it has every slice
        good_us, bad_us: time that was judged so since the book was opened, late revisions left out
    """

    slices: JudgedTime
    version: int
    from_us: int
    judged_to_us: int
    alerts: frozenset[str] = frozenset()
    newest: Row | None = None
    good_us: int = 0
    bad_us: int = 0

    def add_judged(self, terms: Terms, row: Row) -> None:
        """Enter a slice that was judged just now."""
        if int(row["start_us"]) >= self.judged_to_us:
            mark = mark_of(terms, code_of(row["state"], row["ours"]))
            self.good_us += terms.length_us if mark > 0 else 0
            self.bad_us += terms.length_us if mark < 0 else 0
        self.put(terms, row)

    def put(self, terms: Terms, row: Row) -> None:
        """Enter a row of table ``slices``."""
        start_us = int(row["start_us"])
        self.slices.put(terms, start_us, code_of(row["state"], row["ours"]))
        self.judged_to_us = max(self.judged_to_us, start_us + terms.length_us)
        if self.newest is None or start_us >= self.newest["start_us"]:
            self.newest = row


class ObjectiveHistory:
    """See the module. ``standings``: of every objective that was worked out so far."""

    def __init__(self) -> None:
        self.standings: dict[Key, ObjectiveStatus] = {}
        self._books: dict[Key, _Book] = {}
        self._tracks: dict[Key, Track] = {}
        self._ended: Rows = []
        self._turn = 0

    def set_tracks(self, tracks: Iterable[Track]) -> None:
        """What is in force now; books of all else are closed."""
        self._tracks = {track.key: track for track in tracks if track.item.ended_us is None}
        for key in self._books.keys() - self._tracks.keys():
            self._ended += ended_alerts(key, self._books[key].alerts, self._books[key].judged_to_us)
        self._books = {key: book for key, book in self._books.items() if key in self._tracks}
        self.standings = {key: found for key, found in self.standings.items() if key in self._tracks}

    def is_open(self, track: Track) -> bool:
        """Whether there is a book for this version."""
        book = self._books.get(track.key)
        return book is not None and book.version == track.item.version

    def take_over(self, track: Track, now_us: int) -> bool:
        """Go on with the book of an earlier version; False if there is none that reaches back far enough."""
        book = self._books.get(track.key)
        if book is None or book.from_us > self.first_us(track, now_us):
            return False
        book.version = track.item.version
        return True

    @staticmethod
    def first_us(track: Track, now_us: int) -> int:
        """From when on ``open`` wants to know what was judged."""
        start_us, end_us = periods.period_bounds(track.item.agreement.spec.window, now_us)
        return max(_oldest_us(start_us, end_us), now_us - PERIOD_BACK_US)

    def open(
        self, track: Track, rows: Sequence[Row] | None, versions: Mapping[int, Terms], now_us: int
    ) -> None:
        """Begin a book.

        Args:
            track: of the version in force.
            rows: slices of all versions since ``first_us``, oldest first; None if there can be none.
            versions: terms of the earlier versions.
            now_us: wall clock.
        """
        version, from_us = track.item.version, self.first_us(track, now_us)
        before = self._books.get(track.key)  # of an earlier version: what it has reported ends with an event
        if rows is None:
            alerts = before.alerts if before is not None else frozenset[str]()
            self._books[track.key] = _Book(JudgedTime(), version, 0, track.next_us, alerts)
            return
        book = _Book(JudgedTime(), version, from_us, from_us)
        known = {**versions, version: terms_of(track.objective)}
        for row in rows:
            if row["start_us"] + row["length_us"] <= now_us:
                book.put(terms_for(row, known, known[version]), row)
        book.alerts = _standing(track, book, now_us).alerts if before is None else before.alerts
        self._books[track.key] = book

    def add_slice(self, track: Track, row: Row) -> None:
        """A slice was judged; its row of table ``slices``. The track may be that of an earlier version."""
        book = self._books.get(track.key)
        if book is not None:
            book.add_judged(terms_of(track.objective), row)

    def refresh(self, judged: Collection[Key], now_us: int) -> tuple[set[Key], Rows]:
        """Standings of those judged in this pass and of some others: whose, and events of their alerts."""
        changed, rows = set[Key](), self._ended
        self._ended = []
        for key in self._some(judged):
            track, book = self._tracks[key], self._books[key]
            if not self.is_open(track):
                continue  # a new version, whose longer period is not read yet
            found = self.standings[key] = _standing(track, book, now_us)
            changed.add(key)
            if found.alerts != book.alerts:
                rows += alert_events(found, book.alerts, book.judged_to_us)
                book.alerts = found.alerts
            oldest_us = _oldest_us(found.period_start_us, found.period_end_us)
            book.slices.forget_before(oldest_us)
            book.from_us = max(book.from_us, oldest_us)
        return changed, rows

    def _some(self, judged: Collection[Key]) -> list[Key]:
        keys = list(self._books)
        first = self._turn if self._turn < len(keys) else 0
        # A pass that judged many has done its share.
        self._turn = first + (MOST_STANDINGS if len(judged) < MOST_STANDINGS else 0)
        in_turn = dict.fromkeys(keys[first : self._turn])
        return list(in_turn | dict.fromkeys(key for key in judged if key in self._books))


def _oldest_us(period_start_us: int, period_end_us: int) -> int:
    """Where a history begins: alerts look back a tenth of the period, perhaps into the one before."""
    return period_start_us - (period_end_us - period_start_us) // 10 - DAY_US


def _standing(track: Track, book: _Book, now_us: int) -> ObjectiveStatus:
    found = standing(track.item, track.objective, book.slices, book.judged_to_us, now_us)
    shown = None if track.promise.metric == "latency" else _shown(track, book.newest)
    return replace(found, judged_us=(book.good_us, book.bad_us), shown=shown)


_LIVE_STATES: Final = {"good": "ok", "bad": "violating", "no_data": "no-data", "not_applicable": "idle"}


def _shown(track: Track, newest: Row | None) -> Row:
    """An entry of ``slas`` in the live snapshot (messages.md), for an objective that control leaves alone."""
    promise, row = track.promise, newest or {}
    latency = promise.metric == "mean_latency"
    return {
        "name": promise.sla,
        "objective": promise.objective,
        "priority": promise.priority.label,
        "state": _LIVE_STATES.get(row.get("state", "no_data"), "excluded"),
        "latency_us": row.get("measured") if latency else None,
        "threshold_us": row.get("threshold_us") or (promise.curve[0].threshold_us if promise.curve else None),
        "percentile": None,
        "u": 0.0,
        "offered_iops": row.get("offered_iops"),
        "inexact": bool(row.get("inexact")),
        "excused_ratio": 0.0,
        "metric": promise.metric,
        "promised": promise.promised or None,
        "measured": row.get("measured"),
        "reason": row.get("reason", ""),
    }


def alert_events(found: ObjectiveStatus, before: frozenset[str], at_us: int) -> Rows:
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
            text = _burn_text(found, alert, began)
        details = {"alert": alert, "burn_1h": found.burn_1h, "budget_remaining": found.budget.remaining_ratio}
        event_id = identity("alert", kind, subject, alert, at_us)
        rows.append(event_row(kind, severity, "sla", subject, f"{subject}: {text}", at_us, details, event_id))
    return rows


def ended_alerts(key: Key, alerts: Iterable[str], at_us: int) -> Rows:
    """Events for the alerts of an objective that is promised no more."""
    kind, subject = "burn-rate-ended", "/".join(key)
    text = f"{subject}: it is promised no more"
    return [
        event_row(
            kind, "info", "sla", subject, text, at_us, {"alert": alert},
            identity("alert", kind, subject, alert, at_us),
        )
        for alert in sorted(alerts)
    ]  # fmt: skip


def _burn_text(found: ObjectiveStatus, alert: str, began: bool) -> str:
    """Over what time the error budget is spent too fast, how much is left, and for how long that lasts."""
    budget, period_us = found.budget, found.period_end_us - found.period_start_us
    long_us = next(each.long_us for each in burn_alerts(period_us, 0, found.target) if each.name == alert)
    over = duration(long_us / SECOND_US)
    ratio = budget.remaining_ratio
    left = "" if ratio is None else f"; {percent(max(ratio, 0.0), 0)} of it is left"
    if not began:
        return f"the error budget is no longer spent too fast, over {over}{left}"
    text = f"the error budget was spent too fast over the last {over}{left}"
    pace = found.burn_1h * (1.0 - found.target)  # bad time a time
    if found.burn_1h < 1 or pace <= 0 or budget.minutes_left <= 0:
        return text
    paced = f"at the pace of the last hour ({found.burn_1h:.1f} times what is allowed)"
    return f"{text}, which {paced} lasts {duration(budget.minutes_left / pace * 60)}"


def revision_events(revised: Mapping[Key, Sequence[tuple[int, str, str]]], now_us: int) -> Rows:
    """Events about slices that were judged again because data came late, and turned out otherwise.

    One an objective; but one for all if they are many, as after an outage.

    Args:
        revised: (start_us, state before, state now) of each slice.
        now_us: wall clock.
    """
    rows: Rows = []
    for (name, objective), slices in revised.items() if len(revised) <= MOST_REVISED else ():
        subject = f"{name}/{objective}"
        details = {"slices": [list(each) for each in slices[:MOST_LISTED]], "count": len(slices)}
        text = f"{subject}: late data changed {_counted(slices)}"
        rows.append(event_row("slices-revised", "info", "sla", subject, text, now_us, details))
    if len(revised) > MOST_REVISED:
        slices = [each for found in revised.values() for each in found]
        names = sorted({name for name, _ in revised})
        text = f"late data changed {_counted(slices)}, of {len(revised)} objectives"
        details = {"agreements": names[:MOST_LISTED], "objectives": len(revised), "count": len(slices)}
        rows.append(event_row("slices-revised", "info", "server", "judging", text, now_us, details))
    return rows


def _counted(slices: Sequence[tuple[int, str, str]]) -> str:
    changes = Counter((before, now) for _, before, now in slices)
    parts = [
        f"{count} from {before} to {now}".replace("_", " ")
        for (before, now), count in sorted(changes.items())
    ]
    return f"{len(slices)} judged slice{'s' * (len(slices) > 1)}: {', '.join(parts)}"
