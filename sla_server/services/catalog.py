"""The agreements in force and the volumes they may be about, as one immutable value.

Maintenance and calendars (``plans``) belong to it: each agreement carries what of them concerns it. A change
makes a new catalog and the rows that record it; the caller puts the catalog in force once the rows are
durable. Versions of an agreement count up for ever, also over a deletion. A version that ended stays in
``ended`` until its last slice is judged, and in ``former`` for ``plans.KEPT_US`` if work was announced to it:
that counts against the ``max_per_period`` of the versions after it.
"""

from __future__ import annotations

import fnmatch
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from pydantic import ValidationError

from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.config import describe
from sla_server.agreements import promise as compiler
from sla_server.agreements import thresholds
from sla_server.agreements.calendars import BUILT_IN
from sla_server.agreements.difference import bounded, differences
from sla_server.agreements.document import USE_SHORTER_SLICE, Agreement, never_in_service
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.agreements.maintenance import AnnouncedWork
from sla_server.agreements.periods import Span
from sla_server.agreements.promise import InForce
from sla_server.agreements.volume_labels import LabelBook, Labels
from sla_server.rows import Row, Rows
from sla_server.services import notifications
from sla_server.services import plans as documents
from sla_server.services.cap_notes import other_caps, own_cap
from sla_server.services.plans import Plans
from sla_server.services.record_sender import RecordSender
from sla_server.services.rows import audit_row, event_row

JUDGE_BACK_US: Final = 7 * 86_400_000_000
"""How long an ended version is remembered for slices that are still to be judged or revised."""
_NOT_IN_FORCE: Final = "it is not in force. Apply its document again, or delete it"
_OVER: Final = "it has ended, and what arrives late for its time is not judged"
_UNCOUNTED: Final = "it has ended, and work announced in it does not count against max_per_period any more"
NOBODY: Final[Mapping[str, Collection[str]]] = MappingProxyType({})
NOBODY_HAS_LABELS: Final[Mapping[str, Labels]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Catalog:
    """All agreements that matter now.

    Attributes:
        items: in force, by name
        ended: versions that ended lately
        highest: highest version ever given to a name
        unreadable: name to versions that SQL has as in force and this release cannot read
        plans: maintenance and calendars; ``items`` and ``ended`` carry what of them concerns each
        former: name to ended versions to which work was announced, oldest first
        labels: of volumes; ``items`` carry the volumes that they choose by them
    """

    items: tuple[InForce, ...] = ()
    ended: tuple[InForce, ...] = ()
    highest: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unreadable: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    plans: Plans = field(default_factory=Plans)
    former: Mapping[str, tuple[InForce, ...]] = field(default_factory=lambda: MappingProxyType({}))
    labels: LabelBook = field(default_factory=LabelBook)

    @property
    def volumes(self) -> frozenset[str]:
        """Names known, for patterns."""
        return self.labels.volumes

    def with_labels(self, book: LabelBook) -> Catalog:
        """The same by other labels; agreements that choose the same volumes by them stay as they are."""
        items = tuple(self._chosen(item, book) for item in self.items)
        is_same = all(new is old for new, old in zip(items, self.items, strict=True))
        return replace(self, labels=book, items=self.items if is_same else items)

    def _chosen(self, item: InForce, book: LabelBook) -> InForce:
        after = item.with_labels(book)
        return item if after is item else self.plans.attach(after)

    def get(self, name: str) -> InForce | None:
        """The version in force."""
        return next((item for item in self.items if item.name == name), None)

    def with_ended(self, item: InForce) -> Catalog:
        """The same after this version has ended (its time says when), but for ``items``."""
        assert item.ended_us is not None  # cannot happen: all callers say when
        after = replace(self, ended=(*self.ended, item))
        if not _is_planned(item):
            return after
        oldest_us = item.ended_us - documents.KEPT_US
        kept = [one for one in self.former.get(item.name, ()) if (one.ended_us or 0) > oldest_us]
        former = {**self.former, item.name: (*kept, replace(item, former=()))}
        return replace(after, former=MappingProxyType(former))

    def without_unreadable(self, name: str, now_us: int) -> tuple[Catalog, Rows]:
        """The same without the unreadable versions of this name, and the rows that end them."""
        versions = self.unreadable.get(name)
        if not versions:
            return self, []
        rest = {other: kept for other, kept in self.unreadable.items() if other != name}
        rows: Rows = [
            ("agreements", {"name": name, "version": version, "ended_us": now_us}) for version in versions
        ]
        return replace(self, unreadable=MappingProxyType(rest)), rows

    def judged(self) -> tuple[InForce, ...]:
        """Everything slices may have to be judged by."""
        return self.ended + self.items


@dataclass(frozen=True, slots=True)
class Change:
    """A new catalog, what to record for it, and what to tell the one who asked."""

    catalog: Catalog
    rows: Rows
    applied: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def from_rows(
    agreements: Iterable[Row],
    volumes: Iterable[str],
    now_us: int,
    others: Iterable[Row] = (),
    announced: Mapping[str, Labels] = NOBODY_HAS_LABELS,
) -> tuple[Catalog, Rows]:
    """The catalog as SQL knows it, and a critical event for each document that this version cannot read.

    Args:
        agreements: rows of ``agreements``.
        volumes: names known.
        now_us: wall clock.
        others: rows of ``documents``.
        announced: volume to the labels that its agent gives it.
    """
    plans, unread = documents.from_rows(others, now_us)
    book = LabelBook(announced, plans.labels, frozenset(volumes))
    items: list[InForce] = []
    ended: list[InForce] = []
    former: dict[str, tuple[InForce, ...]] = {}
    highest: dict[str, int] = {}
    events: Rows = unread
    unreadable: dict[str, tuple[int, ...]] = {}
    known: Row = {}
    for row in agreements:
        highest[row["name"]] = max(row["version"], highest.get(row["name"], 0))
        is_judged = row["ended_us"] is None or row["ended_us"] > now_us - JUDGE_BACK_US
        if not is_judged and not _may_be_planned(row, plans, now_us):
            continue
        try:
            agreement = Agreement.from_spec(row["spec"], known)
        except ValidationError as exc:
            if row["ended_us"] is None:
                unreadable[row["name"]] = (*unreadable.get(row["name"], ()), row["version"])
            events.append(_unreadable(row, exc, now_us, is_judged))
            continue
        item = InForce(agreement, row["version"], row["applied_us"], ended_us=row["ended_us"])
        item = plans.attach(_after(item.with_labels(book), former.get(item.name, ())))
        if is_judged:
            (items if row["ended_us"] is None else ended).append(item)
        if row["ended_us"] is not None and _is_planned(item):
            former[item.name] = (*former.get(item.name, ()), replace(item, former=()))
    catalog = Catalog(
        items=tuple(sorted(items, key=lambda item: item.name)),
        ended=tuple(ended),
        highest=MappingProxyType(highest),
        unreadable=MappingProxyType(unreadable),
        plans=plans,
        former=MappingProxyType(former),
        labels=book,
    )
    return catalog, events


def _after(item: InForce, former: tuple[InForce, ...]) -> InForce:
    """A version with those before it whose announced work counts against what it allows."""
    is_limited = item.agreement.spec.maintenance.max_per_period is not None
    return replace(item, former=former) if is_limited and former else item


def _is_planned(item: InForce) -> bool:
    """Whether work was announced to a version that has ended, for the time it was in force."""
    return item.planned_us(item.applied_us, item.ended_us or item.applied_us) > 0


def _may_be_planned(row: Row, plans: Plans, now_us: int) -> bool:
    """The same of a row, before the effort of reading it: nearly always it is not."""
    applied_us, ended_us = row["applied_us"], row["ended_us"]
    if ended_us <= now_us - documents.KEPT_US:
        return False
    own = ((row["spec"].get("spec") or {}).get("maintenance") or {}).get("windows")
    return bool(own) or any(any(work.spans(applied_us, ended_us)) for work in plans.works)


def _unreadable(row: Row, error: ValidationError, now_us: int, is_judged: bool) -> tuple[str, Row]:
    is_over = row["ended_us"] is not None
    severity, so = ("warning", _OVER if is_judged else _UNCOUNTED) if is_over else ("critical", _NOT_IN_FORCE)
    what = f"agreement {row['name']} version {row['version']}"
    text = f"{what} was stored by another release and cannot be read; {so}"
    details = {"version": row["version"], "problem": describe(error)}
    return event_row("agreement-unreadable", severity, "sla", row["name"], text, now_us, details)


def apply(
    catalog: Catalog,
    documents_given: Sequence[Loaded],
    who: str,
    now_us: int,
    carried: Mapping[str, Collection[str]] = NOBODY,
) -> Change:
    """Put documents in force; those equal to what is in force change nothing.

    Args:
        catalog: what is in force.
        documents_given: read and valid each by itself; calendars and maintenance come before agreements.
        who: for the audit log.
        now_us: wall clock.
        carried: gateways connected, and the volumes of each.

    Raises:
        AgreementsRefused: together with the others in force they cannot be kept; nothing is applied.
    """
    agreed = [loaded for loaded in documents_given if isinstance(loaded.document, Agreement)]
    plans, rows, other_rows = catalog.plans, Rows(), list[Row]()
    for loaded in documents_given:
        if not isinstance(loaded.document, Agreement):
            plans, made, answer = documents.apply(plans, loaded, who, now_us)
            rows += made
            other_rows.append(answer)
    _check_calendars(agreed, plans, now_us)
    documents.check_hours(documents_given, catalog.items, plans, now_us)
    notifications.check(documents_given, plans)
    catalog = _with_plans(catalog, plans)
    applied: list[Row] = []
    by_name = {item.name: item for item in catalog.items}
    highest = dict(catalog.highest)
    new: list[InForce] = []
    for loaded in agreed:
        name, old = loaded.document.name, by_name.get(loaded.document.name)
        changed = old is None or old.agreement.spec_json() != loaded.document.spec_json()
        if changed:
            # The new version's first instant is the old one's last: a slice has exactly one judge.
            highest[name] = highest.get(name, 0) + 1
            catalog, unread = catalog.without_unreadable(name, now_us)
            rows += unread
            if old is not None:
                catalog = catalog.with_ended(replace(old, ended_us=now_us))
                rows.append(("agreements", {"name": name, "version": old.version, "ended_us": now_us}))
            item = InForce(loaded.agreement, highest[name], now_us).with_labels(catalog.labels)
            by_name[name] = plans.attach(_after(item, catalog.former.get(name, ())))
            new.append(by_name[name])
            rows += _applied_rows(by_name[name], loaded.text, old, who)
        applied.append({"name": name, "version": by_name[name].version, "changed": changed})
    items = tuple(by_name[name] for name in sorted(by_name)) if new else catalog.items
    warnings = [text for loaded in agreed for text in _warnings(loaded.agreement, now_us)]
    volumes = catalog.volumes.union(*carried.values())
    warnings += _unseen(agreed, volumes, catalog.labels)
    warnings += [text for each in agreed for text in own_cap(each.agreement, volumes, catalog.labels)]
    things: Mapping[str, Collection[str]] = {"agreements": by_name, "volumes": volumes}
    warnings += notifications.warnings(documents_given, plans, now_us, things)
    for answer in other_rows:
        work = plans.get(answer["kind"], answer["name"])
        if isinstance(work, AnnouncedWork):
            answer["agreements"] = sum(work in item.work for item in items)
            warnings += documents.warnings(work, items, now_us) if answer["changed"] else ()
    applied += other_rows
    if not new:
        return Change(catalog, rows, applied, warnings)
    problems = thresholds.check(compiler.promises(items), compiler.promises(new), catalog.volumes, carried)
    known = catalog.volumes.union(*carried.values())
    promised = [each for item in new for each in item.all_promises]
    by_labels = {item.name for item in new if item.chooses_by_labels}
    problems += thresholds.check_measurable(promised, known, by_labels)
    if problems:
        raise AgreementsRefused(problems)
    warnings += thresholds.warn_unmeasured(promised, known)
    warnings += other_caps(new, items, known)
    after = replace(catalog, items=items, highest=MappingProxyType(highest))
    return Change(after, rows, applied, warnings)


def _with_plans(catalog: Catalog, plans: Plans) -> Catalog:
    if plans is catalog.plans:
        return catalog
    items, ended = plans.attach_all(catalog.items), plans.attach_all(catalog.ended)
    after = replace(catalog, plans=plans, items=items, ended=ended)
    if plans.labels == catalog.labels.documents:
        return after
    return after.with_labels(replace(catalog.labels, documents=plans.labels))


def _check_calendars(agreed: Iterable[Loaded], plans: Plans, now_us: int) -> None:
    """Refuse agreements that name a calendar which is not there, or in whose hours no slice begins.

    Raises:
        AgreementsRefused: names those that are there.
    """
    known = plans.calendar_names()
    problems = []
    for loaded in agreed:
        spec = loaded.agreement.spec
        hours = spec.service_hours
        if hours is None or not hours.is_named:
            continue
        if hours.calendar not in known:
            problem = f"there is no calendar {hours.calendar!r}"
            fix = f"Use one of {', '.join([*BUILT_IN, *known])}, or apply a Calendar document first"
            field = "spec.service_hours.calendar"
            problems.append(DocumentProblem(loaded.line, field, problem, fix, loaded.document.name))
            continue
        for objective in spec.objectives:
            length_s = objective.budgeting.slice_s
            if not plans.begins_in_hours(spec, length_s, now_us):
                field = f"spec.objectives.{objective.name}.budgeting.slice"
                problem = never_in_service(length_s, f"in the hours of the calendar {hours.calendar!r}")
                name = loaded.document.name
                problems.append(DocumentProblem(loaded.line, field, problem, USE_SHORTER_SLICE, name))
    if problems:
        raise AgreementsRefused(problems)


def _applied_rows(item: InForce, text: str, old: InForce | None, who: str) -> Rows:
    row = {
        "name": item.name,
        "version": item.version,
        "document": text,
        "spec": item.agreement.spec_json(),
        "priority": item.agreement.spec.priority,
        "applied_us": item.applied_us,
        "applied_by": who,
        "ended_us": None,
    }
    before = {"version": old.version} if old else None
    after = {
        "version": item.version,
        "changes": changed_fields(old.agreement if old else None, item.agreement),
    }
    words = f"agreement {item.name} version {item.version} is in force"
    return [
        ("agreements", row),
        audit_row(who, "apply", item.name, item.applied_us, before=before, after=after),
        event_row(
            "agreement-applied", "info", "sla", item.name, words, item.applied_us, {"version": item.version}
        ),
    ]


def changed_fields(old: Agreement | None, new: Agreement) -> list[Row]:
    """What differs, for the audit log; nothing for a first version, whose document is stored beside it."""
    return [] if old is None else bounded(differences(old.spec_json(), new.spec_json()))


def delete(catalog: Catalog, name: str, who: str, now_us: int) -> Change | None:
    """End an agreement; None if none of this name is in force, nor stored as such and unreadable."""
    old = catalog.get(name)
    after, rows = catalog.without_unreadable(name, now_us)
    if old is not None:
        after = after.with_ended(replace(old, ended_us=now_us))
        after = replace(after, items=tuple(item for item in after.items if item.name != name))
        rows.append(("agreements", {"name": name, "version": old.version, "ended_us": now_us}))
    if not rows:
        return None
    before = {"version": max(row["version"] for _, row in rows)}
    rows += [
        audit_row(who, "delete", name, now_us, before=before),
        event_row("agreement-ended", "info", "sla", name, f"agreement {name} has ended", now_us, before),
    ]
    return Change(after, rows)


def end_document(catalog: Catalog, kind: str, name: str, who: str, now_us: int) -> Change | None:
    """End a document that is no agreement; None if none of this name is in force.

    Raises:
        AgreementsRefused: agreements use the calendar, or routes the recipient.
    """
    found = documents.end(catalog.plans, kind, name, who, now_us)
    if found is None:
        return None
    if kind == "Calendar":
        users = [item.name for item in catalog.items if any(each.name == name for each in item.calendar)]
        if users:
            shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
            problem = f"the calendar {name!r} is used by {shown}"
            raise AgreementsRefused([DocumentProblem(0, "", problem, "Apply these without it first")])
    if kind == "Recipient":
        notifications.check_unused(catalog.plans, name)
    plans, rows = found
    return Change(_with_plans(catalog, plans), rows)


def with_volumes(
    catalog: Catalog, names: Iterable[str], announced: Mapping[str, Labels] = NOBODY_HAS_LABELS
) -> Change:
    """Learn of volumes, and of other labels by their agents; patterns and selectors may now mean others.

    There is nothing to record: the inventory has them.
    """
    book = catalog.labels
    known = {**book.announced, **announced} if announced else book.announced
    known = {volume: labels for volume, labels in known.items() if labels} if announced else known
    after = replace(book, announced=known, volumes=book.volumes.union(names, announced))
    return Change(catalog.with_labels(after), [])


def _warnings(agreement: Agreement, now_us: int) -> Iterable[str]:
    notice_s = agreement.spec.maintenance.notice
    for window in agreement.spec.maintenance.windows:
        span = window.span(window.start, agreement.spec.time_zone)
        if notice_s is not None and _is_short(span, now_us, notice_s):
            when = window.start.isoformat(" ", "minutes")
            yield (
                f"{agreement.name}: maintenance at {when} has less notice than was agreed; it is excused "
                "nevertheless, as the agreement itself has it"
            )
    if agreement.spec.cap is not None and "*" not in agreement.spec.scope.clients:
        clients = ", ".join(agreement.spec.scope.clients[:5])
        yield (
            f"{agreement.name}: cap is for {clients} alone, each on each volume: a cap of clients needs "
            "agents with client-caps, and is not applied to volumes that others carry"
        )


def _unseen(agreed: Sequence[Loaded], volumes: Collection[str], book: LabelBook) -> Iterable[str]:
    """Selectors that no volume known fits: perhaps a typing error, perhaps one that is still to come.

    A server that knows no volume at all cannot tell.
    """
    if not volumes:
        return
    seen: dict[str, bool] = {}
    for loaded in agreed:
        scope = loaded.agreement.spec.scope
        if scope.volume_labels is not None:
            if not book.in_scope(scope):
                yield (
                    f"{loaded.agreement.name}: scope.volume_labels: no volume known has labels that fit "
                    f"{scope.volume_labels!r} yet; see theirs with 'sla get volumes -o wide'"
                )
            continue
        for selector in scope.volumes:
            if selector not in seen:
                pattern = re.compile(fnmatch.translate(selector))
                seen[selector] = selector in volumes or any(map(pattern.match, volumes))
            if not seen[selector]:
                yield (
                    f"{loaded.agreement.name}: scope.volumes: no gateway has shown a volume {selector!r} "
                    "yet; check its spelling (sla get volumes)"
                )


def _is_short(span: Span, now_us: int, notice_s: int) -> bool:
    """Work that has ended was announced in its time, as far as this document can tell."""
    return now_us < span[1] and span[0] < now_us + notice_s * 1_000_000


# -- Changes of the agreements, one after another, each in force only when it is durable
#
# Three things change the catalog: ``apply``, ``delete``, and volumes that appear (patterns then mean more).
# Each is made from the catalog as it is when its turn comes, recorded, and put in force when dbmanager has
# answered; so what gateways were sent is never undone by a crash, and two changes never build on the same
# version.
#
# Belongs to the main loop.


MAX_WAITING: Final = 64
Make = Callable[[Catalog, int], Change | None]
Done = Callable[[Change, str], None]


@dataclass(frozen=True, slots=True)
class AgreementChange:
    """One change.

    Attributes:
        make: builds it from the catalog and the time (us); None: there is nothing to do, and it has
            answered so
        done: called with the change and an error text, empty if it is in force
    """

    make: Make
    done: Done


class AgreementChanges:
    """See the module. ``catalog`` is the one in force."""

    def __init__(
        self,
        catalog: Catalog,
        record_sender: RecordSender,
        clock: Clock,
        on_change: Callable[[Catalog], None],
    ) -> None:
        self.catalog = catalog
        self._record_sender = record_sender
        self._clock = clock
        self._on_change = on_change
        self._waiting: deque[AgreementChange] = deque()
        self._busy = False

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is on its way."""
        return not self._busy and not self._waiting

    def submit(self, job: AgreementChange) -> bool:
        """Queue a change; False if too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(job)
        self._next()
        return True

    def _next(self) -> None:
        while self._waiting and not self._busy:
            job = self._waiting.popleft()
            change = job.make(self.catalog, self._clock.unix_us())
            if change is None:
                continue
            self._busy = True
            self._record_sender.append(change.rows, self._finisher(job, change))

    def _finisher(self, job: AgreementChange, change: Change) -> Callable[[bool, str], None]:
        def finish(ok: bool, error: str) -> None:
            self._busy = False
            if ok and change.catalog != self.catalog:
                self.catalog = change.catalog
                self._on_change(change.catalog)
            job.done(change, "" if ok else error)
            self._next()

        return finish
