"""Events as people read them in the inbox: filtered, and who acknowledged them.

An acknowledgement is a row of the audit log: action ``acknowledge``, the event's id as subject, the note in
``after``. So who did what to an event is in one place, and is kept as long as the audit log. Pure: statements
only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, exists, or_, select

from sla_server.db import schema

DEAD_LETTER: Final = "dead-letter"
ACKNOWLEDGE: Final = "acknowledge"


def filtered(
    statement: Select[Any],
    *,
    severities: Collection[str] = (),
    kind: str = "",
    elements: Collection[str] = (),
    subject: str = "",
    only_open: bool = False,
    event_ids: Collection[str] | None = None,
    kinds: Collection[str] | None = None,
    subjects: Collection[str] | None = None,
    since_us: int | None = None,
    until_us: int | None = None,
) -> Select[Any]:
    """Narrow a page of ``events``.

    Args:
        statement: the page.
        severities: any of them; none: all.
        kind: name, or a pattern with ``*`` for anything.
        elements: kinds of thing they are about, any of them; none: all.
        subject: the subject or the text contains it.
        only_open: those that no person has acknowledged.
        event_ids: these. None: all.
        kinds: any of them. None: all.
        subjects: about any of them. None: all.
        since_us: not before.
        until_us: not after.
    """
    table = schema.events
    conditions: list[ColumnElement[bool]] = []
    if severities:
        # What 0.1.0 stored as error is critical.
        stored = [*severities, *(["error"] if "critical" in severities else [])]
        conditions.append(table.c.severity.in_(stored))
    if kind:
        conditions.append(_like(table.c.kind, kind) if "*" in kind else table.c.kind == kind)
    if elements:
        conditions.append(table.c.element.in_(list(elements)))
    if subject:
        named = f"*{subject}*"
        conditions.append(or_(_like(table.c.subject, named), _like(table.c.text, named)))
    for column, values in ((table.c.event_id, event_ids), (table.c.kind, kinds), (table.c.subject, subjects)):
        if values is not None:
            conditions.append(column.in_(list(values)))
    if since_us is not None:
        conditions.append(table.c.at_us >= since_us)
    if until_us is not None:
        conditions.append(table.c.at_us <= until_us)
    if only_open:
        audit = schema.audit
        said = exists().where(audit.c.action == ACKNOWLEDGE, audit.c.subject == table.c.event_id)
        conditions.append(~said)
    return statement.where(*conditions)


def _like(column: Any, pattern: str) -> ColumnElement[bool]:
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_").replace("*", "%")
    found: ColumnElement[bool] = column.like(escaped, escape="\\")
    return found


def events_of(beginning: str, limit: int) -> Select[Any]:
    """Events whose ids begin so, newest first. For a person's command: it may read all ids."""
    table = schema.events
    wanted = table.c.event_id.startswith(beginning, autoescape=True)
    return select(table).where(wanted).order_by(table.c.at_us.desc(), table.c.event_id).limit(limit)


def deliveries(event_id: str) -> Select[Any]:
    """What became of an event at each recipient, reminders included; the newest last."""
    table = schema.deliveries
    return select(table).where(table.c.event_id == event_id).order_by(table.c.at_us, table.c.recipient)


def dead_letters(recipient: str, delivery_ids: Collection[str]) -> Select[Any]:
    """Those of these deliveries that a recipient did not take, and has not got since."""
    table = schema.deliveries
    wanted = table.c.recipient == recipient, table.c.delivery_id.in_(list(delivery_ids))
    return select(table).where(*wanted, table.c.state == DEAD_LETTER)


def acknowledgements(event_ids: Collection[str]) -> Select[Any]:
    """Who acknowledged these events, when and with which note; the first of each event first."""
    table = schema.audit
    columns = table.c.subject.label("event_id"), table.c.at_us, table.c.who, table.c.after
    wanted = table.c.action == ACKNOWLEDGE, table.c.subject.in_(list(event_ids))
    return select(*columns).where(*wanted).order_by(table.c.at_us, table.c.audit_id)
