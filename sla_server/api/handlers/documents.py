"""Handlers about documents: versions and credits of agreements, maintenance, calendars, their schema.

All of them read SQL; documents are applied and ended in ``write``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from flask import Request, Response
from pydantic import ValidationError

from sla_server.agreements.admission import KnownCapacity, VolumeUse, admit
from sla_server.agreements.compliance import (
    PeriodSums,
    agreed_objectives,
    agreed_periods,
    sums_of_rows,
    terms_by_version,
    terms_of,
)
from sla_server.agreements.credits import PeriodCredit, period_credit
from sla_server.agreements.difference import bounded, differences
from sla_server.agreements.document import Agreement, Window
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import KINDS, load_documents
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.periods import Span
from sla_server.agreements.schema import document_schema
from sla_server.agreements.volume_labels import KIND
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound, ServiceRefused
from sla_server.api.routes import CREDITS_MAX
from sla_server.api.scope_volumes import ScopeVolumes, read_book
from sla_server.events.documents import without_secrets
from sla_server.rows import Row

PERIODS_DEFAULT: Final = 3
AHEAD_US: Final = 5 * 366 * 86_400_000_000
"""How far ahead the next occurrence of maintenance is looked for."""


def sla_versions(context: AppContext, _request: Request, name: str) -> Response:
    """Versions, newest first, each with what differs from the one before it."""
    return responses.as_list(_compared(_versions(context, name)))


def document_versions(context: AppContext, _request: Request, kind: str, name: str) -> Response:
    """The same of a document that is no agreement."""
    if kind not in KINDS or kind == "SLA":
        known = ", ".join(each for each in KINDS if each != "SLA")
        raise BadInput("kind", f"{kind[:40]!r} is none of a document", f"Use {known}")
    rows = [row for row in context.source.documents(kind) if row["name"] == name]
    if not rows:
        raise NotFound(f"no {kind} {name[:128]!r} was ever applied", "'sla get' lists what is in force")
    return responses.as_list(without_secrets(_compared(rows)))


def _compared(rows: list[Row]) -> list[Row]:
    """Versions newest first, each with what differs from the one before it; given oldest first."""
    listed: list[Row] = []
    before: Row | None = None
    for row in rows:
        changes = [] if before is None else bounded(differences(before["spec"], row["spec"]))
        plain = {key: value for key, value in row.items() if key not in ("spec", "document")}
        listed.append({**plain, "changes": changes})
        before = row
    return listed[::-1]


def sla_credits(context: AppContext, request: Request, name: str) -> Response:
    """Compliance and credit of the current period and of those before it that SQL still has.

    Of an agreement that has ended, of the period in which it did and of those before.
    """
    count = responses.number(request, "periods", PERIODS_DEFAULT, least=1, most=CREDITS_MAX)
    versions = _versions(context, name)
    now_us = context.clock.unix_us()
    newest = _read(versions[-1])
    found: list[PeriodCredit] = []
    last_us = last_agreed_us(versions[-1], now_us)
    for bounds in agreed_periods(windows_of(versions, newest), last_us, count):  # a rolling one ends then
        held = [row for row in versions if row["applied_us"] < min(bounds[1], now_us + 1)]
        if not held:
            break
        found.append(_credit(context, held, bounds, now_us))
    while len(found) > 1 and not found[-1].has_slices:
        found.pop()
    return responses.as_list(
        [item.as_dict() for item in found],
        tz=newest.spec.time_zone,
        credit_cap=newest.spec.credit_cap,
        penalties=[item.model_dump() for item in newest.spec.penalties],
    )


def _credit(context: AppContext, versions: list[Row], bounds: Span, now_us: int) -> PeriodCredit:
    """Of one period; ``versions``: all up to its end, oldest first."""
    agreement, newest = _read(versions[-1]), versions[-1]
    held = [row for row in versions if row["ended_us"] is None or row["ended_us"] > bounds[0]]
    names = dict.fromkeys(str(one.get("name")) for row in held for one in agreed_objectives(row))
    agreed = {objective.name: terms_of(objective) for objective in agreement.judged}
    sums: dict[str, PeriodSums] = {}
    former: dict[str, float] = {}
    for name in (*names, *(name for name in agreed if name not in names)):
        terms = terms_by_version(versions, name)
        last = agreed.get(name) or next(reversed(terms.values()), None)
        if last is not None:
            sums[name] = sums_of_rows(context.source.slice_sums(newest["name"], name, *bounds), terms, last)
            former[name] = last.target
    return period_credit(agreement, newest["version"], sums, bounds, now_us, former)


def last_agreed_us(row: Row, now_us: int) -> int:
    """The last instant at which an agreement was in force, by its newest version: now, if it still is."""
    ended_us: int | None = row.get("ended_us")
    return now_us if ended_us is None else min(now_us, ended_us - 1)


def windows_of(versions: list[Row], newest: Agreement) -> list[tuple[int, Window]]:
    """(from when in force, window) of the versions, oldest first; those of another release are left out."""
    found: list[tuple[int, Window]] = []
    before: Any = None
    for row in versions[:-1]:
        window = ((row.get("spec") or {}).get("spec") or {}).get("window")
        if window != before or not found:
            try:
                found.append((row["applied_us"], Agreement.from_spec(row["spec"]).spec.window))
            except ValidationError:
                continue
            before = window
    return [*found, (versions[-1]["applied_us"], newest.spec.window)]


def _read(row: Row) -> Agreement:
    try:
        return Agreement.from_spec(row["spec"])
    except ValidationError as exc:
        problem = f"version {row['version']} of {row['name']} was stored by another release"
        raise BadInput("name", f"{problem} and cannot be read", "Apply its document again") from exc


def _readable(rows: Iterable[Row]) -> Iterator[Agreement]:
    """Those of another release are left out: of what they promised nothing is known."""
    for row in rows:
        try:
            yield Agreement.from_spec(row["spec"])
        except ValidationError:
            continue


def _versions(context: AppContext, name: str) -> list[Row]:
    rows = context.source.agreement_versions(name)
    if not rows:
        raise NotFound(f"no agreement {name!r} was ever applied", "'sla get slas' lists those in force")
    return rows


def maintenance(context: AppContext, request: Request) -> Response:
    """Maintenance in force: running, planned and, if asked for, past; those that run come first."""
    now_us = context.clock.unix_us()
    wanted = request.args.get("agreement")
    meant = _read(_versions(context, wanted)[-1]) if wanted else None
    scopes = ScopeVolumes(lambda: read_book(context.source))
    promised = scopes.of({"spec": meant.spec_json()}) if meant is not None else ()
    rows = [
        _maintenance_row(row, now_us)
        for row in context.source.documents("Maintenance", True)
        if meant is None or _excuses(row, meant, promised)
    ]
    if not responses.flag(request, "past"):
        rows = [row for row in rows if row["state"] != "past"]
    return responses.as_list(sorted(rows, key=lambda row: (row["from_us"] or 1 << 62, row["name"])))


def _excuses(row: Row, agreement: Agreement, promised: Collection[str]) -> bool:
    try:
        return MaintenanceDocument.from_json(row["spec"]).spec.scope.covers(agreement, promised)
    except ValidationError:
        return False


def _maintenance_row(row: Row, now_us: int) -> Row:
    """The row with ``state`` and the occurrence under way or next."""
    try:
        document = MaintenanceDocument.from_json(row["spec"])
    except ValidationError:
        return {**row, "state": "unreadable", "from_us": None, "to_us": None}
    work = AnnouncedWork(document, row["version"], row["applied_us"], row["ended_us"])
    span = work.next_span(now_us, AHEAD_US)
    state = "past" if span is None else "running" if span[0] <= now_us else "planned"
    from_us, to_us = span or (None, None)
    spec = document.spec
    row = {**row, "scope": spec.scope.text(), "reason": spec.reason, "repeats": spec.rrule}
    author = spec.author or row["applied_by"]
    return {**row, "author": author, "state": state, "from_us": from_us, "to_us": to_us}


def calendars(context: AppContext, _request: Request) -> Response:
    """Calendars in force."""
    return responses.as_list(context.source.documents("Calendar", True))


def volume_labels(context: AppContext, _request: Request) -> Response:
    """Documents in force that give volumes labels."""
    return responses.as_list(context.source.documents(KIND, True))


def admission(context: AppContext, request: Request) -> Response:
    """Whether documents could be kept beside what is in force, from stored figures."""
    try:
        loaded = load_documents(responses.yaml_body(request), 1)
    except AgreementsRefused as exc:
        raise ServiceRefused(422, {"errors": [problem.as_dict() for problem in exc.problems]}) from exc
    wanted = [item.document for item in loaded if isinstance(item.document, Agreement)]
    if not wanted:
        raise BadInput("body", "holds no agreement", "Send documents of kind SLA")
    in_force = [_read(row) for row in context.source.agreements(True)]
    uses = [_use_of(row) for row in context.source.volumes()]
    newest = context.source.pages.policy_reports.newest()
    capacities = _capacities(newest.capacity() if newest else ())
    # What was promised when they were found: an agreement may have become stricter since, or have ended.
    studied = list(_readable(context.source.agreements_at(newest.created_us))) if newest else None
    found = admit(wanted, in_force, uses, capacities, read_book(context.source), studied)
    return responses.as_json({**found.as_dict(), "policy_version": newest.version if newest else None})


def _use_of(row: Row) -> VolumeUse:
    ios, size = row["reads"] + row["writes"], row["read_bytes"] + row["write_bytes"]
    return VolumeUse(row["volume"], row["backend"], size / ios if ios else None)


def _capacities(rows: Iterable[Row]) -> list[KnownCapacity]:
    return [
        KnownCapacity(row["backend"], row["sla"], row["objective"], row["cost_per_s"], row.get("reason", ""))
        for row in rows
    ]


def schema(_context: AppContext, _request: Request) -> Response:
    """JSON Schema of all kinds of documents."""
    return responses.as_json(document_schema())
