"""The books of the judge: of each objective in force its judged slices, where it stands, active alerts.

Status is computed again for objectives whose slices were judged in a pass, and for some of the others by
turns, since they change with the time alone. Which alerts were active before is computed from the slices in
SQL (``open``), so a restart neither repeats an alert nor swallows one.

State: a book and a standing an objective. Belongs to the SQL worker's thread; no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sla_server.agreements import periods
from sla_server.agreements.compliance import ObjectiveStatus, SliceHistory, code_of, standing
from sla_server.services.judging.track import DAY_US, Track
from sla_server.services.rows import Row, Rows, event_row, identity

MOST_STANDINGS: Final = 512
"""Standings of one pass beyond those whose slices were judged in it; none if those are as many."""
PERIOD_BACK_US: Final = 445 * DAY_US  # the longest window and a tenth; slices are kept 13 months
MOST_REVISED: Final = 20
"""Objectives of one pass that have an event each about revised slices."""
MOST_LISTED: Final = 20
Key = tuple[str, str]


@dataclass(slots=True)
class _Book:
    """What is known of one objective over all versions."""

    history: SliceHistory
    judged_to_us: int
    alerts: frozenset[str] = frozenset()


class ObjectiveHistory:
    """See the module. ``standings``: of every objective that was worked out so far."""

    def __init__(self) -> None:
        self.standings: dict[Key, ObjectiveStatus] = {}
        self._books: dict[Key, _Book] = {}
        self._tracks: dict[Key, Track] = {}
        self._turn = 0

    def set_tracks(self, tracks: Iterable[Track]) -> None:
        """What is in force now; books of all else are closed."""
        self._tracks = {track.key: track for track in tracks if track.item.ended_us is None}
        self._books = {key: book for key, book in self._books.items() if key in self._tracks}
        self.standings = {key: found for key, found in self.standings.items() if key in self._tracks}

    def is_open(self, track: Track) -> bool:
        """Whether there is a book of slices of this length."""
        book = self._books.get(track.key)
        return book is not None and book.history.length_us == track.length_us

    @staticmethod
    def first_us(track: Track, now_us: int) -> int:
        """From when on ``open`` wants to know what was judged."""
        start_us, end_us = periods.period_bounds(track.item.agreement.spec.window, now_us)
        return max(_oldest_us(start_us, end_us), now_us - PERIOD_BACK_US)

    def open(self, track: Track, rows: Sequence[Row] | None, now_us: int) -> None:
        """Begin a book with the slices judged since ``first_us``, None if there can be none."""
        if rows is None:
            self._books[track.key] = _Book(SliceHistory(track.length_us, track.next_us), track.next_us)
            return
        length_us = track.length_us
        rows = [r for r in rows if r["length_us"] == length_us and r["start_us"] + length_us <= now_us]
        # A history is as long as what was judged, not as the period: most agreements are younger.
        oldest_us = min((row["start_us"] for row in rows), default=track.next_us)
        history = SliceHistory(track.length_us, min(oldest_us, track.next_us))
        book = _Book(history, self.first_us(track, now_us))
        for row in rows:
            book.history.put(row["start_us"], code_of(row["state"], row["ours"]))
            book.judged_to_us = max(book.judged_to_us, row["start_us"] + track.length_us)
        book.alerts = _standing(track, book, now_us).alerts
        self._books[track.key] = book

    def enter(self, track: Track, start_us: int, code: int) -> None:
        """A slice was judged."""
        book = self._books.get(track.key)
        if book is not None and book.history.length_us == track.length_us:
            book.history.put(start_us, code)
            book.judged_to_us = max(book.judged_to_us, start_us + track.length_us)

    def stand(self, judged: Collection[Key], now_us: int) -> tuple[set[Key], Rows]:
        """Standings of those judged in this pass and of some others: whose, and events of their alerts."""
        changed, rows = set[Key](), Rows()
        for key in self._some(judged):
            track, book = self._tracks[key], self._books[key]
            if not self.is_open(track):
                continue  # a new version with slices of another length, which are not read yet
            found = self.standings[key] = _standing(track, book, now_us)
            changed.add(key)
            if found.alerts != book.alerts:
                rows += _alert_events(found, book.alerts, book.judged_to_us)
                book.alerts = found.alerts
            book.history.forget_before(_oldest_us(found.period_start_us, found.period_end_us))
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
    return standing(track.item, track.objective, book.history, book.judged_to_us, now_us)


def _alert_events(found: ObjectiveStatus, before: frozenset[str], at_us: int) -> Rows:
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
