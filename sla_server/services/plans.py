"""Maintenance, calendars and documents about delivery in force, as one immutable value.

Versions count up for ever, as agreements' do. Those of maintenance and calendars that ended stay for
``KEPT_US``: how much of a period's maintenance an agreement has used is asked of them. ``attach`` gives each
agreement what concerns it, so that judging and control ask the agreement alone.

Rows are those of the table ``documents`` (docs/formats/sql.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from pydantic import ValidationError

from pmdaemon.runtime.config import describe
from sla_server.agreements import volume_labels
from sla_server.agreements.calendars import CalendarDocument, CalendarInForce
from sla_server.agreements.difference import bounded, differences
from sla_server.agreements.document import Agreement, AgreementSpec, never_in_service
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.fields import Document
from sla_server.agreements.load import KINDS, Loaded
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.periods import SECOND_US, begins_in_service, period_bounds, unannounced_spans
from sla_server.agreements.promise import InForce
from sla_server.agreements.volume_labels import VolumeLabelsDocument, VolumeLabelsInForce
from sla_server.events.routing import NOTIFICATION_KINDS, NotificationInForce
from sla_server.explanation.words import listed
from sla_server.rows import Row, Rows
from sla_server.services.rows import audit_row, event_row

KEPT_US: Final = 445 * 86_400 * SECOND_US  # the longest window and a tenth, as the judge looks back
AHEAD_US: Final = 5 * 366 * 86_400 * SECOND_US
"""How far ahead the next occurrence of a rule is looked for."""
_OF_USE_IN_FORCE: Final = (*NOTIFICATION_KINDS, volume_labels.KIND)
MOST_NAMED: Final = 5
"""Agreements that one kind of warning names; the others are counted."""
Held = AnnouncedWork | CalendarInForce | NotificationInForce | VolumeLabelsInForce
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Plans:
    """All that matters now.

    Attributes:
        works: Maintenance, in force and ended, by time of applying.
        calendars: versions of calendars, likewise.
        notifications: recipients, routes and silences in force; versions that ended are of no use here.
        labels: documents with labels of volumes, likewise.
        highest: (kind, name) to the highest version ever given.
    """

    works: tuple[AnnouncedWork, ...] = ()
    calendars: tuple[CalendarInForce, ...] = ()
    notifications: tuple[NotificationInForce, ...] = ()
    labels: tuple[VolumeLabelsInForce, ...] = ()
    highest: Mapping[Key, int] = field(default_factory=lambda: MappingProxyType({}))

    def get(self, kind: str, name: str) -> Held | None:
        """The version in force."""
        held: Iterable[Held]
        if kind in NOTIFICATION_KINDS:
            held = (item for item in self.notifications if item.document.kind == kind)
        elif kind == volume_labels.KIND:
            held = self.labels
        else:
            held = self.works if kind == "Maintenance" else self.calendars
        return next((item for item in held if item.name == name and item.ended_us is None), None)

    def names(self, kind: str) -> list[str]:
        """Recipients, routes or silences in force."""
        return sorted(item.name for item in self.notifications if item.document.kind == kind)

    def calendar_names(self) -> list[str]:
        """Calendars in force."""
        return sorted({item.name for item in self.calendars if item.ended_us is None})

    def begins_in_hours(self, spec: AgreementSpec, slice_s: int, now_us: int) -> bool:
        """Whether slices of this length begin in an agreement's service hours, by the calendar of now."""
        hours = spec.service_hours
        named = hours.calendar if hours is not None else ""
        calendar = [each for each in self.calendars if each.name == named and each.ended_us is None]
        return begins_in_service(hours, slice_s, now_us, spec.time_zone, calendar)

    def attach(self, item: InForce) -> InForce:
        """The agreement with the maintenance and the calendar that concern it."""
        work = tuple(work for work in self.works if work.covers(item.agreement, item.volumes))
        hours = item.agreement.spec.service_hours
        named = hours.calendar if hours is not None and hours.is_named else None
        calendar = tuple(version for version in self.calendars if version.name == named)
        if (work, calendar) == (item.work, item.calendar):
            return item
        return replace(item, work=work, calendar=calendar)

    def attach_all(self, items: tuple[InForce, ...]) -> tuple[InForce, ...]:
        """The same tuple if nothing changes."""
        if not (self.works or self.calendars):
            return items  # nearly always, and there may be tens of thousands
        attached = tuple(map(self.attach, items))
        is_same = all(new is old for new, old in zip(attached, items, strict=True))
        return items if is_same else attached


def from_rows(rows: Iterable[Row], now_us: int) -> tuple[Plans, Rows]:
    """What SQL knows, and a critical event for each document that this release cannot read."""
    plans, highest = Plans(), dict[Key, int]()
    events: Rows = []
    for row in sorted(rows, key=lambda row: row["version"]):
        kind, name = row["kind"], row["name"]
        highest[kind, name] = max(row["version"], highest.get((kind, name), 0))
        is_over = row["ended_us"] is not None
        if is_over and (row["ended_us"] < now_us - KEPT_US or kind in _OF_USE_IN_FORCE):
            continue
        try:
            held = held_of(row)
        except (ValidationError, KeyError) as exc:
            problem = describe(exc) if isinstance(exc, ValidationError) else f"unknown kind {exc}"
            text = f"{kind} {name} version {row['version']} was stored by another release and cannot be read"
            details = {"version": row["version"], "problem": problem}
            severity = "critical" if row["ended_us"] is None else "warning"
            events.append(
                event_row("document-unreadable", severity, kind.lower(), name, text, now_us, details)
            )
            continue
        if not (isinstance(held, AnnouncedWork) and held.is_past(now_us - KEPT_US)):
            plans = _with(plans, held)
    return replace(plans, highest=MappingProxyType(highest)), events


def held_of(row: Row) -> Held:
    """One row of ``documents``, read.

    Raises:
        pydantic.ValidationError: stored by an incompatible release.
        KeyError: a kind this release does not know.
    """
    document = KINDS[row["kind"]].from_json(row["spec"])
    return _held(document, row["version"], row["applied_us"], row["applied_by"], row["ended_us"])


def _held(document: Document, version: int, applied_us: int, who: str, ended_us: int | None = None) -> Held:
    if isinstance(document, MaintenanceDocument):
        return AnnouncedWork(document, version, applied_us, ended_us, document.spec.author or who)
    if isinstance(document, CalendarDocument):
        return CalendarInForce(document, version, applied_us, ended_us, who)
    if isinstance(document, VolumeLabelsDocument):
        return VolumeLabelsInForce(document, version, applied_us, ended_us, who)
    if document.kind in NOTIFICATION_KINDS:
        return NotificationInForce(document, version, applied_us, ended_us, who)
    raise KeyError(document.kind)


def _with(plans: Plans, held: Held) -> Plans:
    """Add a version, or replace the same version."""
    same = held.name, held.version
    if isinstance(held, NotificationInForce):
        key = held.document.kind, held.name
        others = [item for item in plans.notifications if (item.document.kind, item.name) != key]
        return replace(plans, notifications=(*others, *((held,) if held.ended_us is None else ())))
    if isinstance(held, VolumeLabelsInForce):
        rest = [item for item in plans.labels if item.name != held.name]
        return replace(plans, labels=(*rest, *((held,) if held.ended_us is None else ())))
    if isinstance(held, AnnouncedWork):
        works = [work for work in plans.works if (work.name, work.version) != same]
        return replace(plans, works=tuple(sorted([*works, held], key=lambda work: work.applied_us)))
    calendars = [item for item in plans.calendars if (item.name, item.version) != same]
    return replace(plans, calendars=tuple(sorted([*calendars, held], key=lambda item: item.applied_us)))


def apply(plans: Plans, loaded: Loaded, who: str, now_us: int) -> tuple[Plans, Rows, Row]:
    """Put one document in force, as ``catalog.apply`` does agreements; an equal one changes nothing.

    Returns:
        The plans after it, what to record, and what to answer.
    """
    document = loaded.document
    kind, name, rows = document.kind, document.name, Rows()
    old = plans.get(kind, name)
    applied = {"kind": kind, "name": name, "changed": False}
    if old is not None and old.document.spec_json() == document.spec_json():
        return plans, rows, {**applied, "version": old.version}
    version = plans.highest.get((kind, name), 0) + 1
    if old is not None:
        plans = _with(plans, replace(old, ended_us=now_us))
        rows.append(_ended_row(old, now_us))
    held = _held(document, version, now_us, who)
    plans = replace(_with(plans, held), highest=MappingProxyType({**plans.highest, (kind, name): version}))
    changes = bounded(differences(old.document.spec_json(), document.spec_json())) if old else []
    before = {"kind": kind, "version": old.version} if old else None
    after = {"kind": kind, "version": version, "changes": changes}
    event, words = f"{kind.lower()}-applied", f"{kind.lower()} {name} version {version} is in force"
    rows += [
        ("documents", _row(held, loaded.text, who)),
        audit_row(who, event, name, now_us, before=before, after=after),
        event_row(event, "info", kind.lower(), name, words, now_us, {"version": version}),
    ]
    return plans, rows, {**applied, "version": version, "changed": True}


def check_hours(given: Sequence[Loaded], items: Sequence[InForce], plans: Plans, now_us: int) -> None:
    """Refuse calendars in whose hours no slice of an agreement in force would begin.

    Args:
        given: documents that are being applied.
        items: agreements in force; those that are replaced are left out.
        plans: with these documents.
        now_us: wall clock.

    Raises:
        AgreementsRefused: names the first objective.
    """
    calendars = {each.document.name: each for each in given if isinstance(each.document, CalendarDocument)}
    replaced = {each.document.name for each in given if isinstance(each.document, Agreement)}
    for item in items if calendars else ():
        spec = item.agreement.spec
        loaded = calendars.get(spec.service_hours.calendar) if spec.service_hours is not None else None
        if loaded is None or item.name in replaced:
            continue
        for objective in spec.objectives:
            length_s = objective.budgeting.slice_s
            if not plans.begins_in_hours(spec, length_s, now_us):
                problem = f"{item.name}/{objective.name}: {never_in_service(length_s, 'in its hours')}"
                fix = "Apply that agreement with shorter slices in the same file, or give longer hours"
                name = loaded.document.name
                raise AgreementsRefused([DocumentProblem(loaded.line, "spec.hours", problem, fix, name)])


def _row(held: Held, text: str, who: str) -> Row:
    return {
        "kind": held.document.kind,
        "name": held.name,
        "version": held.version,
        "document": text,
        "spec": held.document.spec_json(),
        "applied_us": held.applied_us,
        "applied_by": who,
        "ended_us": None,
    }


def _ended_row(held: Held, now_us: int) -> tuple[str, Row]:
    return "documents", {
        "kind": held.document.kind,
        "name": held.name,
        "version": held.version,
        "ended_us": now_us,
    }


def end(plans: Plans, kind: str, name: str, who: str, now_us: int) -> tuple[Plans, Rows] | None:
    """End a document; None if none of this name is in force."""
    old = plans.get(kind, name)
    if old is None:
        return None
    event, before = f"{kind.lower()}-ended", {"kind": kind, "version": old.version}
    rows: Rows = [
        _ended_row(old, now_us),
        audit_row(who, event, name, now_us, before=before),
        event_row(event, "info", kind.lower(), name, f"{kind.lower()} {name} has ended", now_us, before),
    ]
    return _with(plans, replace(old, ended_us=now_us)), rows


def warnings(work: AnnouncedWork, items: Sequence[InForce], now_us: int) -> Iterator[str]:
    """What a Maintenance document just applied does to what was agreed.

    Args:
        work: as applied.
        items: agreements in force, with this work attached.
        now_us: wall clock.
    """
    name = work.name
    covered = [item for item in items if work.covers(item.agreement, item.volumes)]
    if not covered:
        scope = work.document.spec.scope.text()
        yield f"{name}: no agreement in force is in its scope ({scope}); check it with 'sla get slas'"
    span = work.next_span(now_us, AHEAD_US)
    if span is None:
        yield f"{name}: there is nothing of it after now, so it excuses nothing"
        return
    short = [item.name for item in covered if any(_unannounced(item, work, span))]
    if short:
        yield f"{name}: less notice than was agreed with {listed(short)}; what lies within it is not excused"
    beyond = [item.name for item in covered if _is_too_much(item, span)]
    if beyond:
        yield f"{name}: more maintenance in the period than {listed(beyond)} excuses; what is beyond counts"


def _unannounced(item: InForce, work: AnnouncedWork, span: tuple[int, int]) -> Iterator[object]:
    """What of this occurrence lies within the notice agreed."""
    found = unannounced_spans(item.agreement, item.work, *span)
    return (each for other, each in found if other is work)


def _is_too_much(item: InForce, span: tuple[int, int]) -> bool:
    spec = item.agreement.spec
    most_s = spec.maintenance.max_per_period
    if most_s is None:
        return False
    start_us, end_us = period_bounds(spec.window, span[1] - 1)
    return item.planned_us(start_us, max(end_us, span[1])) > most_s * SECOND_US
