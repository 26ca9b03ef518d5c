"""What a report is computed from, and how it is read: stored rows, as of one moment.

A slice has revisions, each with the time at which it was judged. So a report can be computed again as of the
time at which it was issued, whatever was judged since (``verify``). SQL picks the revision: however often
slices were judged again, one row of each is read, and at most ``MOST_SLICES`` of a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from sla_server.agreements.compliance import agreed_periods
from sla_server.agreements.document import Agreement, Window
from sla_server.agreements.periods import SECOND_US, RollingWindow, Span, period_bounds, to_local
from sla_server.agreements.promise import InForce
from sla_server.agreements.selectors import matches
from sla_server.agreements.volume_labels import LabelBook, label_book
from sla_server.reports.errors import NothingToReport, PeriodTooLong
from sla_server.reports.period import ReportPeriod, parse_period, period_at, usual_kind
from sla_server.rows import Row
from sla_server.services.plans import from_rows as plans_of

if TYPE_CHECKING:  # rows come in; who reads them is the caller's affair
    from sla_server.db.queries.reader import SqlReader

HOUR_US: Final = 3_600_000_000
MOST_EPISODES: Final = 2000
MOST_THROTTLES: Final = 10_000
MOST_DECISIONS: Final = 5000
BEFORE_US: Final = 600_000_000
"""Decisions so long before an episode may be about it: a loop starts when a promise is at risk."""
MOST_PERIODS: Final = 800
SHORTEST_US: Final = 23 * HOUR_US
"""A day on which clocks are put forward."""
MOST_SLICES: Final = 5_000_000
"""Of one report: some 4 GB of rows; a year of minutes of one objective is a tenth of it."""
LAST: Final = "last"
THIS: Final = "this"


@dataclass(frozen=True)
class ReportInputs:
    """Rows of one agreement and one period.

    Attributes:
        as_of_us: what was recorded later is left out.
        versions: readable versions, oldest first, each with the maintenance and the calendar that concern it.
        rows: rows of ``agreements``, those that cannot be read included.
        credited: periods of the agreement that end in the report's, or go on at its end; of a rolling
            window the one that ends with it.
        slices: objective to the newest revision of each slice, from the first credited period on, oldest
            first. A row has ``slices`` of them, of which each begins where the former one ends: those that
            are alike and neither bad nor excluded. ``to_verify`` each is a row of its own, whole.
        revised: slices with a revision after ``as_of_us``; counted only ``to_verify``.
        judged_us: until when any slice was judged; ``judged``: the same by objective. 0: none was.
        alive_us: when the server last noted that it was up, by its own clock; 0: never.
        held: volume to I/Os and delay of the hours in which it was throttled for this agreement.
    """

    name: str
    period: ReportPeriod
    as_of_us: int
    versions: Sequence[InForce]
    rows: Sequence[Row]
    credited: Sequence[Span] = ()
    slices: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    revised: int = 0
    judged_us: int = 0
    judged: Mapping[str, int] = field(default_factory=dict)
    alive_us: int = 0
    episodes: Sequence[Row] = ()
    decisions: Sequence[Row] = ()
    decisions_from_us: int | None = None
    throttles: Sequence[Row] = ()
    own_throttles: Sequence[Row] = ()
    held: Mapping[str, Row] = field(default_factory=dict)
    outages: Sequence[Row] = ()

    @property
    def end_us(self) -> int:
        """Until when there can be anything: the period's end, or now."""
        return min(self.period.to_us, self.as_of_us)

    @property
    def held_versions(self) -> list[InForce]:
        """Those that were in force in some of the period so far, oldest first."""
        return [
            item
            for item in self.versions
            if item.applied_us < self.end_us
            and (item.ended_us is None or item.ended_us > max(self.period.from_us, item.applied_us))
        ]


def versions_of(
    rows: Iterable[Row], documents: Iterable[Row], now_us: int, labels: LabelBook | None = None
) -> list[InForce]:
    """The readable versions of one agreement, as they were judged by: with maintenance and calendar.

    ``labels``: those that volumes have now, by which an agreement may choose them.
    """
    plans, _ = plans_of(documents, now_us)
    found: list[InForce] = []
    for row in rows:
        try:
            agreement = Agreement.from_spec(row["spec"])
        except ValidationError:
            continue
        item = InForce(agreement, row["version"], row["applied_us"], row["ended_us"])
        found.append(plans.attach(item.with_labels(labels or LabelBook())))
    return found


def find_period(versions: Sequence[InForce], text: str, now_us: int) -> ReportPeriod:
    """The period that a text names, in the zone of the version that held last in it.

    ``LAST`` is the agreement's own period that ended last, ``THIS`` the one that goes on.

    Raises:
        NoSuchPeriod: it names none.
    """
    if text in (LAST, THIS):
        return _own_period(versions[-1], text, now_us)
    period = parse_period(text, versions[-1].agreement.spec.time_zone)
    held = [item for item in versions if item.applied_us < period.to_us]
    zone = held[-1].agreement.spec.time_zone if held else period.tz
    return period if zone == period.tz else parse_period(text, zone)


def _own_period(item: InForce, text: str, now_us: int) -> ReportPeriod:
    spec = item.agreement.spec
    kind = usual_kind(spec.window)
    at_us = now_us if item.ended_us is None else min(now_us, item.ended_us - 1)
    running = period_at(kind, spec.time_zone, at_us)
    return running if text == THIS else period_at(kind, spec.time_zone, running.from_us - 1)


def credited_periods(versions: Sequence[InForce], period: ReportPeriod, end_us: int) -> list[Span]:
    """Periods of the agreement that end within the report's, and the one that goes on at its end."""
    held = [item for item in versions if item.applied_us < end_us]
    if not held:
        return []
    window = held[-1].agreement.spec.window
    if isinstance(window, RollingWindow):
        return [period_bounds(window, end_us)]
    windows: list[tuple[int, Window]] = [(item.applied_us, item.agreement.spec.window) for item in held]
    # As many as there may be: days are the shortest, and each new window may cut one short.
    most = (end_us - period.from_us) // SHORTEST_US + 2 + len(windows)
    spans = agreed_periods(windows, end_us - 1, min(most, MOST_PERIODS), 1)
    return [span for span in reversed(spans) if span[1] > period.from_us and span[0] < end_us]


def read_inputs(
    reader: SqlReader,
    name: str,
    period_text: str,
    as_of_us: int,
    most_slices: int = MOST_SLICES,
    *,
    to_verify: bool = False,
) -> ReportInputs:
    """Read all that a report says.

    Args:
        reader: of SQL.
        name: of the agreement.
        period_text: names the period.
        as_of_us: what was recorded later is left out.
        most_slices: of a report; more are not read.
        to_verify: also what is said of a report that was issued: every slice whole, and ``revised``.

    Raises:
        PeriodTooLong: there may be more than ``most_slices`` slices in it.
        NoSuchPeriod: the text names no period.
        NothingToReport: the agreement is not known, or not yet in force.
        DatabaseUnavailable: retryable.
    """
    rows = [row for row in reader.agreement_versions(name) if row["applied_us"] <= as_of_us]
    rows = [{**row, "ended_us": _ended_by(row["ended_us"], as_of_us)} for row in rows]
    if not rows:
        raise NothingToReport(f"no agreement {name!r} was ever applied: 'sla get slas' lists those in force")
    documents = reader.documents()
    versions = versions_of(
        rows, _documents_by(documents, as_of_us), as_of_us, _labels_by(reader, documents, as_of_us)
    )
    if not versions:
        raise NothingToReport(
            f"agreement {name!r} was stored by another release and cannot be read: apply its document again"
        )
    period = find_period(versions, period_text, as_of_us)
    return _read(reader, ReportInputs(name, period, as_of_us, versions, rows), most_slices, to_verify)


def _read(reader: SqlReader, found: ReportInputs, most_slices: int, to_verify: bool) -> ReportInputs:
    """All the rest, for a period and versions that are known."""
    name, period, as_of_us, end_us = found.name, found.period, found.as_of_us, found.end_us
    if period.from_us >= as_of_us:
        raise NothingToReport(f"{period.text} has not begun: there is nothing to report of it yet")
    if not found.held_versions:
        raise NothingToReport(_not_in_force(found))
    credited = credited_periods(found.versions, period, end_us)
    from_us = min([period.from_us, *(span[0] for span in credited)])
    expected = _expected_slices(found.held_versions, from_us, end_us)
    if expected > most_slices:
        raise PeriodTooLong(period.text, expected, most_slices)
    agreed = [objective.name for item in found.held_versions for objective in item.agreement.judged]
    names = dict.fromkeys([*agreed, *reader.reports.report_objectives(name, from_us, end_us)])
    slices: dict[str, list[Row]] = {}
    left = most_slices
    for objective in names:
        # More than expected: stored by a version with shorter slices that cannot be read any more.
        found_slices = reader.reports.slices_as_of(
            name, objective, from_us, end_us, as_of_us, left + 1, whole=to_verify
        )
        left -= sum(map(itemgetter("slices"), found_slices))
        if left < 0:
            raise PeriodTooLong(period.text, most_slices - left, most_slices)
        slices[objective] = found_slices
    victims = [f"{name}/{objective}" for objective in names]
    episodes = reader.reports.episodes_between(name, period.from_us, end_us, MOST_EPISODES)
    first_us = min([period.from_us, *(row["opened_us"] for row in episodes)]) - BEFORE_US
    throttles = reader.reports.throttles_between(period.from_us, end_us, MOST_THROTTLES, victims=victims)
    own = reader.reports.throttles_between(
        period.from_us, end_us, MOST_THROTTLES, volumes=_volumes(reader, found.held_versions)
    )
    return ReportInputs(
        name=name,
        period=period,
        as_of_us=as_of_us,
        versions=found.versions,
        rows=found.rows,
        credited=credited,
        slices=slices,
        revised=sum(
            reader.reports.revised_after(name, objective, from_us, end_us, as_of_us)
            for objective in (names if to_verify else ())
        ),
        judged_us=reader.reports.judged_until(as_of_us),
        judged={objective: reader.reports.judged_until(as_of_us, (name, objective)) for objective in names},
        alive_us=reader.reports.alive_until(),
        episodes=[_episode_by(row, as_of_us) for row in episodes],
        decisions=reader.decisions(
            victims=victims, from_us=first_us, until_us=end_us, newest_first=False, limit=MOST_DECISIONS
        )
        if episodes
        else [],
        decisions_from_us=reader.decisions_from_us(),
        throttles=throttles,
        own_throttles=own,
        held=_held(reader, throttles, period, end_us),
        outages=reader.outages(period.from_us, end_us),
    )


def _expected_slices(versions: Iterable[InForce], from_us: int, end_us: int) -> int:
    """How many there are at most."""
    shortest: dict[str, int] = {}
    for item in versions:
        for objective in item.agreement.judged:
            length_s = objective.budgeting.slice_s
            shortest[objective.name] = min(length_s, shortest.get(objective.name, length_s))
    return sum((end_us - from_us) // (length_s * SECOND_US) + 1 for length_s in shortest.values())


def throttled_spans(row: Row, from_us: int, to_us: int) -> Span | None:
    """When a throttle was in force within [from_us, to_us): from its first proof to its end."""
    begin_us = row["confirmed_us"] or row["seen_us"] or row["requested_us"]
    end_us = row["released_us"] or (row["expires_us"] if row["state"] == "expired" else None) or to_us
    begin_us, end_us = max(begin_us, from_us), min(end_us, to_us)
    return (begin_us, end_us) if begin_us < end_us else None


def throttled_name(row: Row) -> str:
    """What it slowed down: a volume, a group of them, or a whole client."""
    whole = f"group {row['group_name']}" if row["group_name"] else f"client {row.get('client')}"
    return str(row["volume"] or whole)


def _held(reader: SqlReader, throttles: Iterable[Row], period: ReportPeriod, end_us: int) -> dict[str, Row]:
    hours: dict[str, set[int]] = {}
    for row in throttles:
        span = throttled_spans(row, period.from_us, end_us)
        if span is not None and row["volume"]:
            first_us = span[0] // HOUR_US * HOUR_US
            hours.setdefault(row["volume"], set()).update(range(first_us, span[1], HOUR_US))
    found = {volume: reader.reports.held_back(volume, sorted(of)) for volume, of in sorted(hours.items())}
    return {volume: row for volume, row in found.items() if row is not None}


def _volumes(reader: SqlReader, versions: Iterable[InForce]) -> list[str]:
    """Volumes in scope: those named, and of patterns those that are known."""
    selectors = {selector for item in versions for selector in item.volumes}
    patterns = {selector for selector in selectors if any(character in selector for character in "*?[")}
    known = (
        [name for name in reader.reports.volume_names() if matches(name, tuple(patterns))] if patterns else []
    )
    return sorted({*(selectors - patterns), *known})


def _documents_by(rows: Iterable[Row], as_of_us: int) -> list[Row]:
    return [
        {**row, "ended_us": _ended_by(row["ended_us"], as_of_us)}
        for row in rows
        if row["kind"] in ("Maintenance", "Calendar") and row["applied_us"] <= as_of_us
    ]


def _labels_by(reader: SqlReader, rows: Iterable[Row], as_of_us: int) -> LabelBook:
    """Labels by the documents of then; of agents it is known what they announce now."""
    return label_book(reader.pages.label_rows()[0], rows, as_of_us)


def _ended_by(ended_us: int | None, as_of_us: int) -> int | None:
    return ended_us if ended_us is not None and ended_us <= as_of_us else None


def _episode_by(row: Row, as_of_us: int) -> Row:
    return {**row, "closed_us": _ended_by(row["closed_us"], as_of_us)}


def _not_in_force(found: ReportInputs) -> str:
    first = found.versions[0]
    if first.applied_us >= found.end_us:
        return (
            f"agreement {found.name!r} was not in force yet in {found.period.text}: "
            f"its first version is of {_day(first.applied_us, found)} ({found.period.tz}). "
            "Give a later period: --period this is the one that goes on"
        )
    ended = [item.ended_us for item in found.versions if item.ended_us is not None]
    last = f"; it ended on {_day(max(ended), found)}" if ended else ""
    return f"agreement {found.name!r} was not in force in {found.period.text}{last}"


def _day(at_us: int, found: ReportInputs) -> str:
    return to_local(at_us, found.period.tz).strftime("%Y-%m-%d %H:%M")
