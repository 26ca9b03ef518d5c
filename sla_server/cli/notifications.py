"""Tables and texts about delivery: recipients, routes, silences, what is undelivered, one event."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from textwrap import wrap
from typing import Any, Final

import click
from rich.text import Text

from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, LiveValuesMissing
from sla_server.cli.formatting import Column, TableKind, build, console, print_json
from sla_server.cli.system_tables import plain, spec_of
from sla_server.rows import Row

STATES: Final = {
    "ok": formatting.GOOD,
    "failing": formatting.BAD,
    "hanging": formatting.BAD,
    "held": formatting.WARN,
}
RUNNING: Final = {"running": formatting.WARN}


def _delivery(key: str) -> Any:
    return lambda row, _now_us: formatting.count((row.get("delivery") or {}).get(key))


def _waiting(row: Row) -> str:
    """How many events wait, or at most how many."""
    delivery = row.get("delivery") or {}
    return ("<= " if delivery.get("waiting_is_at_most") else "") + formatting.count(delivery.get("waiting"))


def _state(row: Row) -> Text:
    state = str((row.get("delivery") or {}).get("state") or "unknown")
    return Text(state, STATES.get(state, ""))


def _said(row: Row) -> str:
    return str((row.get("delivery") or {}).get("last_answer") or formatting.DASH)


def match_of(spec: Row) -> str:
    """What a route or silence matches."""
    parts = [f"{key} {', '.join(values)}" for key, values in (spec.get("match") or {}).items() if values]
    return "; ".join(parts) or "every event"


def _more(row: Row) -> str:
    """Reminders and escalation of a route."""
    spec = spec_of(row)
    escalate = spec.get("escalate") or {}
    parts = [f"remind {spec['remind']}"] if spec.get("remind") else []
    if escalate:
        parts.append(f"after {escalate.get('after')} {', '.join(escalate.get('recipients') or [])}")
    return "; ".join(parts) or formatting.DASH


def _why(row: Row) -> str:
    """Why a silence is, and who began it."""
    return f"{row.get('reason') or formatting.DASH}" + (f" ({row['author']})" if row.get("author") else "")


DEAD_LETTER: Final = "dead-letter"


def why_undelivered(row: Row) -> str:
    """Why a recipient has not confirmed an event yet."""
    if row.get("state") == DEAD_LETTER:
        return f"given up: {row.get('reason') or formatting.DASH}"
    words = {"held": "held back by a silence, or a reminder that is not due", "waiting": "on its way"}
    return str(row.get("reason") or words.get(str(row.get("state")), formatting.DASH))


KINDS: Final = {
    "recipients": TableKind(
        "/recipients",
        (
            Column("NAME", plain("name")),
            Column("KIND", plain("recipient_kind")),
            Column("STATE", lambda row, _now_us: _state(row)),
            Column("WAITING", lambda row, _now_us: _waiting(row), number=True),
            Column("DEAD", _delivery("dead_letters"), number=True),
            Column("LAST ANSWER", lambda row, _now_us: _said(row)),
        ),
        "No recipient is in force: no person is notified of events. Apply one: sla apply -f recipient.yaml",
    ),
    "routes": TableKind(
        "/routes",
        (
            Column("NAME", plain("name")),
            Column("MATCHES", lambda row, _now_us: match_of(spec_of(row)) if row else formatting.DASH),
            Column("RECIPIENTS", lambda row, _now_us: ", ".join(spec_of(row).get("recipients") or [])),
            Column("UNTIL ACKNOWLEDGED", lambda row, _now_us: _more(row)),
        ),
        "No route is in force: no event goes to a recipient. Apply one: sla apply -f route.yaml",
    ),
    "silences": TableKind(
        "/silences",
        (
            Column("NAME", plain("name")),
            Column(
                "STATE",
                lambda row, _now_us: Text(
                    str(row.get("state") or formatting.DASH), RUNNING.get(str(row.get("state")), "")
                ),
            ),
            Column("FROM", lambda row, _now_us: formatting.when(row.get("from_us"))),
            Column("TO", lambda row, _now_us: formatting.when(row.get("to_us"))),
            Column("HOLDS BACK", lambda row, _now_us: str(row.get("match") or formatting.DASH)),
            Column("REASON", lambda row, _now_us: _why(row)),
        ),
        "No silence runs or is planned. To begin one: sla silence start --help",
    ),
}
UNDELIVERED: Final = TableKind(
    "/undelivered",
    (
        Column("SINCE", lambda row, _now_us: formatting.when(row.get("since_us") or row.get("at_us"))),
        Column("EVENT", lambda row, _now_us: formatting.short_id(row.get("event_id"))),
        Column("KIND", plain("kind")),
        Column("RECIPIENT", plain("recipient")),
        Column("TRIES", lambda row, _now_us: formatting.count(row.get("attempt")), number=True),
        Column("WHY", lambda row, _now_us: why_undelivered(row)),
    ),
    "All recipients have confirmed all events.",
)


def show_undelivered(client: Client, kind: str, limit: int, output: str) -> None:
    """Print what not all recipients have confirmed, the oldest first.

    Raises:
        BadUsage: something else was to be listed.
        LiveValuesMissing: the delivery process says nothing.
    """
    if kind != "events":
        raise BadUsage(f"--undelivered has no use with {kind}. Use it with: sla get events")
    answer = client.get(UNDELIVERED.path)
    rows = answer["items"][:limit]
    if output == "json":
        print_json(rows)
    elif rows:
        console().print(build(UNDELIVERED.columns, rows, time.time_ns() // 1000))
        if left_out := len(answer["items"]) - len(rows):
            click.echo(f"and {left_out:,} more: give a higher --limit")
    elif answer["is_known"] and not answer["waiting"]:
        click.echo(UNDELIVERED.empty)
    if output != "json" and (unread := answer["waiting"] - len(answer["items"])) > 0:
        click.echo(f"{unread:,} more wait in queues to be looked at: sla get recipients")
    if output != "json" and (unnamed := answer.get("unnamed", 0)) > 0:
        click.echo(
            f"{unnamed:,} more were given up, and are only counted: sla get events --kind delivery-failed"
        )
    if not answer["is_known"]:
        raise LiveValuesMissing("The delivery process is silent; 'sla-server status' says more.")


def event_lines(row: Row) -> Iterator[str]:
    """One event with what became of it."""
    yield f"{row['event_id']}: {row['kind']}, {row['severity']}"
    yield f"at {formatting.when(row['at_us'])} about {row['element']} {row['subject']}"
    yield from wrap(str(row.get("text") or ""), 78, initial_indent="  ", subsequent_indent="  ")
    for key, value in (row.get("details") or {}).items():
        yield f"  {key}: {value}"
    if row.get("action"):
        action = f"to do: {row['action']} ({row['runbook']})"
        yield from wrap(action, 78, initial_indent="  ", subsequent_indent="  ")
    if row.get("ended_us"):
        yield f"ended {formatting.when(row['ended_us'])}"
    said = row.get("acknowledged") or []
    for one in said:
        yield f"acknowledged {formatting.when(one['at_us'])} by {one['who']}: {one['note']}"
    if said:
        yield "  no reminder and no escalation of it any more"
    else:
        yield f"not acknowledged: sla ack {row['event_id']} --note TEXT"
    for one in row.get("deliveries") or ():
        tries = f" after {one['attempts']} tries" if one["attempts"] > 1 else ""
        answer = f": {one['answer']}" if one["answer"] else ""
        yield f"delivery: {one['recipient']} {one['state']} {formatting.when(one['at_us'])}{tries}{answer}"
        if one["state"] == DEAD_LETTER:
            yield f"  to send it there again: sla notify again {row['event_id']} {one['recipient']}"
        if one.get("reported_by"):
            yield f"  who was notified of that: sla describe event {one['reported_by']}"
    waiting = row.get("undelivered")
    if waiting is None:
        yield "delivery: not known, the delivery process is silent (sla-server status)"
    elif not waiting and not row.get("unanswered"):
        yield "delivery: no recipient is behind with it"
    for one in row.get("unanswered") or ():
        count = one.get("waiting")
        there = f"; {count:,} {'event waits' if count == 1 else 'events wait'} there" if count else ""
        yield f"delivery: no answer of {one['recipient']} is recorded{there}"
    routing = row.get("routing") or {}
    silenced = {one["recipient"]: one.get("held") for one in routing.get("recipients") or ()}
    done = {one["recipient"] for one in row.get("deliveries") or () if one["state"] == "confirmed"}
    for one in waiting or ():
        tries = f", {one['attempt']} tries" if one.get("attempt") else ""
        by = silenced.get(one.get("recipient")) if one.get("state") == "held" else None
        why = why_undelivered(one)
        if by:
            why = f"held back by {by}"
            done.add(one["recipient"])  # it is said here
        yield f"delivery: {one.get('recipient')} has not confirmed it{tries}: {why}"
    yield from routing_lines(routing, done, is_acknowledged=bool(said))


def routing_lines(
    found: Row, confirmed: Collection[str] = (), *, is_acknowledged: bool = False
) -> Iterator[str]:
    """Who gets an event and why, and which routes do not match.

    Args:
        found: what the preview says.
        confirmed: recipients that have it already: no silence holds it back from them.
        is_acknowledged: reminders and escalation have ended.
    """
    if problem := found.get("problem"):
        yield f"routing: {problem}"
        return
    for one in found.get("recipients") or ():
        yield f"goes to {one['recipient']}: {one['reason']}"
        if one.get("held") and one["recipient"] not in confirmed:
            is_dropped = one.get("held_until_us") == 0
            yield f"  {'not delivered because of' if is_dropped else 'held back now by'} {one['held']}"
        if one.get("group_key"):
            yield f"  in one message with others of {one['group_key']}"
        if one.get("remind_s") and not is_acknowledged:
            yield f"  reminder every {formatting.span(one['remind_s'])} until it is acknowledged"
        if one.get("escalate_s") and not is_acknowledged:
            names = ", ".join(one["escalate_to"])
            yield f"  after {formatting.span(one['escalate_s'])} without acknowledgement also to {names}"
    if not found.get("recipients"):
        yield "goes to no recipient"
    for one in found.get("not_matching") or ():
        yield f"route {one['route']} does not match: {one['reason']}"
