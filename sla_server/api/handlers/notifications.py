"""Handlers about who is notified of events: recipients, routes, silences, the inbox, a preview of routing.

Documents are applied as all others (POST /slas). The preview uses ``DocumentRouter``, which delivery uses,
too: what it says is what delivery would do now.
"""

from __future__ import annotations

from typing import Any, Final

from flask import Request, Response
from pydantic import ValidationError

from sla_server.agreements.selectors import nearest
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.filters import chosen, kind_or_pattern, known_kind
from sla_server.events import catalogue
from sla_server.events.delivery_state import read_delivery_state
from sla_server.events.documents import RecipientDocument, SilenceDocument, without_secrets
from sla_server.events.event import SEVERITIES, Event, EventUnreadable, from_row
from sla_server.events.routing import DocumentRouter, RoutingTable, stored_table
from sla_server.events.stages.fallback import DELIVERY_FAILED
from sla_server.events.stages.route import mismatch
from sla_server.events.stages.silence import SilenceInForce
from sla_server.rows import Row

AHEAD_US: Final = 5 * 366 * 86_400_000_000
"""How far ahead the next occurrence of a silence is looked for."""
RECORDED_WITHIN_US: Final = 60_000_000
"""An event is recorded some 50 ms after it was noticed, or when delivery is back."""
MOST_PAGES: Final = 20
"""Pages of SQL that are looked at for one of open events."""
MOST_ENDINGS: Final = 10_000
"""Of a page: what has ended more often since its oldest event may be shown as going on."""
SHOWN: Final = ("at_us", "kind", "severity", "subject", "text")
DEAD_LETTER: Final = "dead-letter"
MOST_REPORTS: Final = 20
"""Events about dead letters of one recipient within three minutes; there is one a minute, as a rule."""
MOST_DEAD_REPORTS: Final = 100
"""Events about dead letters, each of 20 at most, that are looked at."""
DEAD_LETTERS_BACK_US: Final = 30 * 86_400_000_000
MOST_ALIKE: Final = 5
"""Events named whose ids begin alike."""


def recipients(context: AppContext, _request: Request) -> Response:
    """Recipients in force, each with what delivery says of it (null: not known)."""
    known = read_delivery_state(context.metrics.folder)
    states = {row.get("name"): row for row in known[0]} if known is not None else {}
    rows = [
        {**without_secrets(row), "recipient_kind": _kind_of(row), "delivery": states.get(row["name"])}
        for row in context.source.documents("Recipient", True)
    ]
    return responses.as_list(rows)


def _kind_of(row: Row) -> str:
    try:
        return RecipientDocument.from_json(row["spec"]).spec.kind
    except ValidationError:
        return "unreadable"


def notification_routes(context: AppContext, _request: Request) -> Response:
    """Routes in force."""
    return responses.as_list(context.source.documents("Route", True))


def silences(context: AppContext, request: Request) -> Response:
    """Silences in force: running, planned and, if asked for, past; those that run come first."""
    now_us = context.clock.unix_us()
    rows = [_silence_row(row, now_us) for row in context.source.documents("Silence", True)]
    if not responses.flag(request, "past"):
        rows = [row for row in rows if row["state"] != "past"]
    return responses.as_list(sorted(rows, key=lambda row: (row["from_us"] or 1 << 62, row["name"])))


def _silence_row(row: Row, now_us: int) -> Row:
    try:
        document = SilenceDocument.from_json(row["spec"])
    except ValidationError:
        return {**row, "state": "unreadable", "from_us": None, "to_us": None}
    span = SilenceInForce(document, row["applied_us"]).next_span(now_us, AHEAD_US)
    state = "past" if span is None else "running" if span[0] <= now_us else "planned"
    spec = document.spec
    return {
        **row,
        "state": state,
        "from_us": span[0] if span else None,
        "to_us": span[1] if span else None,
        "match": spec.match.text(),
        "recipients": spec.recipients,
        "catch_up": spec.catch_up,
        "reason": spec.reason,
        "repeats": spec.rrule,
        "author": spec.author or row["applied_by"],
    }


def inbox(context: AppContext, request: Request) -> Response:
    """A page of events: when each has ended, who acknowledged it, which recipients have not confirmed it.

    Open is what no person has acknowledged, what has not ended, and ends nothing itself.
    """
    severities = chosen(request, "severity", SEVERITIES)
    limit = responses.limit(request)
    wanted: dict[str, Any] = {"kind": kind_or_pattern(request), "subject": request.args.get("subject", "")}
    wanted["elements"] = chosen(request, "element", catalogue.ELEMENTS)
    only_open = responses.flag(request, "open")
    found, before = list[Row](), responses.cursor(request)
    for _ in range(MOST_PAGES):
        page = context.source.inbox(limit, before, severities=severities, only_open=only_open, **wanted)
        rows = _with_ends(context, page)
        found += [row for row in rows if not (only_open and (row["ended_us"] or _ends(row["kind"])))]
        before = page[-1]["cursor"] if len(page) == limit else None
        if before is None or len(found) >= limit:
            break
    if len(found) > limit:
        found, before = found[:limit], found[limit - 1]["cursor"]
    return responses.as_list(_with_people(context, found), before)


def undelivered(context: AppContext, _request: Request) -> Response:
    """What not all recipients have confirmed, the oldest first.

    Dead letters are among it until a person acknowledges the event, or that it was not taken; ``unnamed``
    counts those that an event has no room to name.
    """
    found = read_delivery_state(context.metrics.folder)
    dead, unnamed = _dead_letters(context)
    listed = sorted(
        [*dead, *(found[1] if found is not None else [])], key=lambda row: row.get("since_us") or 0
    )
    ids = {str(row.get("event_id")) for row in listed}
    events = context.source.inbox(len(ids), event_ids=ids) if ids else []
    stored = {event["event_id"]: event for event in events}
    rows = [{**{key: stored.get(row.get("event_id"), {}).get(key) for key in SHOWN}, **row} for row in listed]
    waiting = sum(row.get("waiting") or 0 for row in found[0]) if found is not None else 0
    waiting = max(waiting, len(rows) - len(dead)) + len(dead)
    return responses.as_list(rows, is_known=found is not None, waiting=waiting, unnamed=unnamed)


def _dead_letters(context: AppContext) -> tuple[list[Row], int]:
    """What recipients did not take: the newest that events name, and how many more these count."""
    since_us = context.clock.unix_us() - DEAD_LETTERS_BACK_US
    reports = context.source.inbox(MOST_DEAD_REPORTS, kinds={DELIVERY_FAILED}, since_us=since_us)
    named: dict[str, list[str]] = {}
    reported: dict[str, str] = {}
    only_counted: dict[str, int] = {}
    for row in reports:
        ids, count = _named(row), row["details"].get("count")
        named.setdefault(row["subject"], []).extend(ids)
        reported.update((one, row["event_id"]) for one in ids)
        only_counted[row["event_id"]] = max(count - len(ids), 0) if isinstance(count, int) else 0
    dead = [row for name, ids in named.items() for row in context.source.dead_letters(name, ids)]
    said = {row["event_id"] for row in context.source.acknowledgements(
        [*(row["event_id"] for row in dead), *(row["event_id"] for row in reports)]
    )}  # fmt: skip
    rows = [
        {
            "event_id": row["event_id"],
            "recipient": row["recipient"],
            "state": DEAD_LETTER,
            "attempt": row["attempts"],
            "since_us": row["at_us"],
            "reason": row["answer"],
            "reported_by": reported.get(row["delivery_id"]),
        }
        for row in dead
        if said.isdisjoint((row["event_id"], reported.get(row["delivery_id"])))
    ]
    return rows, sum(count for event_id, count in only_counted.items() if event_id not in said)


def _named(report: Row) -> list[str]:
    """Dead letters that an event names; one of another server may have any details."""
    ids = report["details"].get("events")
    return [str(one) for one in ids] if isinstance(ids, list) else []


def event(context: AppContext, _request: Request, event_id: str) -> Response:
    """One event: who acknowledged it, what became of it at each recipient, who gets it now."""
    row = find_event(context, event_id)
    (found,) = _with_people(context, _with_ends(context, [row]))
    found |= {
        "action": catalogue.described(row["kind"]).action,
        "runbook": catalogue.runbook(row["kind"], context.runbook_url),
    }
    found["deliveries"] = [
        {**one, "reported_by": _reported_by(context, one)}
        for one in context.source.deliveries(row["event_id"])
    ]
    try:
        found["routing"] = _preview(context, from_row(row))
    except EventUnreadable as exc:
        found["routing"] = {"problem": str(exc)}
    found["unanswered"] = _unanswered(context, found)
    return responses.as_json(found)


def _reported_by(context: AppContext, delivery: Row) -> str | None:
    """Id of the event by which others were notified of a dead letter; null where none names it."""
    if delivery["state"] != DEAD_LETTER:
        return None
    since_us, until_us = (
        delivery["at_us"] + shift for shift in (-RECORDED_WITHIN_US, 2 * RECORDED_WITHIN_US)
    )
    subjects = {delivery["recipient"]}
    found = context.source.inbox(
        MOST_REPORTS, kinds={DELIVERY_FAILED}, subjects=subjects, since_us=since_us, until_us=until_us
    )
    return next((row["event_id"] for row in found if delivery["delivery_id"] in _named(row)), None)


def _unanswered(context: AppContext, found: Row) -> list[Row]:
    """Recipients that the event goes to and of which nothing is recorded: with what waits there."""
    recorded = {one["recipient"] for one in (*found["deliveries"], *(found["undelivered"] or ()))}
    state = read_delivery_state(context.metrics.folder)
    rows = state[0] if state is not None else ()
    waiting = {row.get("name"): _waiting(row, found["at_us"]) for row in rows}
    return [
        {"recipient": name, "waiting": waiting.get(name)}
        for one in found["routing"].get("recipients") or ()
        if (name := one["recipient"]) not in recorded
    ]


def _waiting(row: Row, at_us: int) -> int | None:
    """How many notices wait for a recipient that an event of this time can be among."""
    since_us = row.get("waiting_since_us") or 0
    return 0 if at_us + RECORDED_WITHIN_US < since_us else row.get("waiting")


def find_event(context: AppContext, event_id: str) -> Row:
    """An event, by its id or by a beginning that no other id has.

    Raises:
        NotFound: none has it.
        BadInput: several do; says which.
    """
    row = context.source.event(event_id)
    found = [row] if row is not None else context.source.events_of(event_id, MOST_ALIKE + 1)
    if not found:
        raise NotFound(f"no event {event_id[:80]!r} is stored", "'sla get events' lists the newest")
    if len(found) > 1:
        named = [f"{each['event_id']} ({each['kind']}, {each['subject']})" for each in found[:MOST_ALIKE]]
        more = " and more" if len(found) > MOST_ALIKE else ""
        problem = f"several ids begin with {event_id[:80]!r}: {', '.join(named)}{more}"
        raise BadInput("event", problem, "Give more characters of the id")
    return found[0]


def _ends(kind: str) -> bool:
    return bool(catalogue.described(kind).ends)


def _with_ends(context: AppContext, rows: list[Row]) -> list[Row]:
    """The rows with ``ended_us``: when the condition that each began has ended; null without an end."""
    kinds = {kind for row in rows for kind in catalogue.endings(row["kind"])}
    begun = [row for row in rows if catalogue.endings(row["kind"])]
    ends: dict[tuple[str, ...], list[int]] = {}
    if begun:
        subjects, since_us = {row["subject"] for row in begun}, min(row["at_us"] for row in begun)
        found = context.source.inbox(MOST_ENDINGS, kinds=kinds, subjects=subjects, since_us=since_us)
        for row in reversed(found):
            ends.setdefault(_condition(row), []).append(row["at_us"])
    for row in rows:
        row["ended_us"] = None
    for row in begun:
        after = (at_us for at_us in ends.get(_condition(row), ()) if at_us >= row["at_us"])
        row["ended_us"] = next(after, None)
    return rows


def _condition(row: Row) -> tuple[str, ...]:
    try:
        return catalogue.condition_key(from_row(row))
    except EventUnreadable:
        return ()


def _with_people(context: AppContext, rows: list[Row]) -> list[Row]:
    said: dict[str, list[Row]] = {}
    for one in context.source.acknowledgements([row["event_id"] for row in rows]):
        note = (one["after"] or {}).get("note", "")
        said.setdefault(one["event_id"], []).append({"at_us": one["at_us"], "who": one["who"], "note": note})
    state = read_delivery_state(context.metrics.folder)
    waiting: dict[str, list[Row]] = {}
    for one in state[1] if state is not None else ():
        waiting.setdefault(str(one.get("event_id")), []).append(one)
    return [
        {
            **row,
            "acknowledged": said.get(row["event_id"], []),
            "undelivered": waiting.get(row["event_id"], []) if state is not None else None,
        }
        for row in rows
    ]


def preview(context: AppContext, request: Request) -> Response:
    """Who would get an event now, and why; it is not delivered.

    What is left out or null is filled in; the severity is that with which the kind is usually raised.
    """
    given = {key: value for key, value in responses.json_body(request).items() if value is not None}
    kind = given.get("kind")
    usual = {"severity": catalogue.described(known_kind(kind)).severity} if isinstance(kind, str) else {}
    members = {"event_id": "preview", "at_us": context.clock.unix_us(), **usual, **given}
    try:
        wanted = from_row(members)
    except EventUnreadable as exc:
        raise BadInput("body", str(exc), "docs/formats/events.md shows an event") from exc
    return responses.as_json({**_preview(context, wanted), "notes": _notes(context, wanted)})


def _notes(context: AppContext, wanted: Event) -> list[str]:
    """What may be a mistake in an event that a person made up: names that nothing in force has."""
    agreement, objective = wanted.agreement, ""
    if wanted.element == "sla":
        objective = wanted.subject.partition("/")[2]
    if not agreement:
        return []
    specs = {
        row["name"]: (row.get("spec") or {}).get("spec") or {} for row in context.source.agreements(True)
    }
    if agreement not in specs:
        near = nearest(agreement, specs)
        return [f"no agreement {agreement!r} is in force" + (f"; did you mean {near}?" if near else "")]
    names = [str(one.get("name")) for one in specs[agreement].get("objectives") or ()]
    if not objective or objective in names:
        return []
    return [f"agreement {agreement} has no objective {objective!r}; it has {', '.join(names) or 'none'}"]


def _preview(context: AppContext, wanted: Event) -> Row:
    table = _table(context)
    router = DocumentRouter(table)
    now_us = context.clock.unix_us()
    found = []
    for routed in router.route(wanted):
        held = router.held(wanted, routed.recipient, now_us)
        found.append(
            {
                "recipient": routed.recipient,
                "reason": routed.reason,
                "group_key": routed.group_key,
                "remind_s": routed.remind_s,
                "escalate_s": routed.escalate_s,
                "escalate_to": list(routed.escalate_to),
                "held": held.reason if held is not None else None,
                "held_until_us": held.until_us if held is not None else None,
            }
        )
    missed = {each.name: why for each in table.routes if (why := mismatch(each.spec.match, wanted))}
    return {
        "recipients": found,
        "not_matching": [{"route": name, "reason": why} for name, why in missed.items()],
    }


def _table(context: AppContext) -> RoutingTable:
    return stored_table(context.source.documents(None, True), context.source.agreements(True))
