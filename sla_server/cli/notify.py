"""``sla notify``, ``sla silence``, ``sla ack``: try who is notified, hold events back, take care of one."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, RequestRefused
from sla_server.cli.formatting import DATA_OUTPUT, OUTPUT, duration_s, pass_client, print_json
from sla_server.cli.notifications import DEAD_LETTER, routing_lines
from sla_server.rows import Row

MOST_S: Final = 400 * 86_400.0
"""The longest that a document may announce (``agreements.periods.MAX_WINDOW_S``); a test compares them."""
WAIT_S: Final = 60.0
INTERVAL_S: Final = 0.5
MOST_EVENT_BYTES: Final = 64 << 10


@click.group(cls=Commands)
def notify() -> None:
    """Try recipients and routes: who is notified of an event, and does it arrive."""


@notify.command("test")
@click.argument("recipient")
@click.option("--wait/--no-wait", default=True, help="Wait until it has confirmed, a minute at most [wait].")
@OUTPUT
@pass_client
def test(client: Client, recipient: str, wait: bool, output: str) -> None:
    """Send RECIPIENT a test event, whatever routes and silences say. Status 1 if it has not confirmed."""
    answer = client.change("POST", f"/recipients/{quote(recipient, safe='')}/test")
    _say_how_it_went(client, answer, recipient, output, wait=wait)


@notify.command("again")
@click.argument("event")
@click.argument("recipient")
@click.option("--wait/--no-wait", default=True, help="Wait until it has confirmed, a minute at most [wait].")
@OUTPUT
@pass_client
def again(client: Client, event: str, recipient: str, wait: bool, output: str) -> None:
    """Send EVENT to RECIPIENT again, whatever routes and silences say. Status 1 if it has not confirmed.

    For what a recipient did not take (sla get events --undelivered), when that is mended. It comes as an
    event of its own, which names the first one: no recipient drops it as known.
    """
    path = f"/recipients/{quote(recipient, safe='')}/events"
    answer = client.change("POST", path, json={"event_id": event})
    _say_how_it_went(client, answer, recipient, output, wait=wait)


def _say_how_it_went(client: Client, answer: Row, recipient: str, output: str, *, wait: bool) -> None:
    """What became of an event that the server has raised for a recipient.

    Raises:
        SystemExit: with status 1: it has not confirmed.
    """
    event_id = str(answer["event_id"])
    found = _wait(client, event_id, recipient) if wait else TrialResult("raised")
    if output == "json":
        print_json({**answer, "state": found.state, "answer": found.answer, "delivery": found.delivery})
    else:
        words = {
            "confirmed": "confirmed",
            "raised": f"event {event_id} was raised; sla describe event {event_id} says how it went",
            "unknown": "not known: the delivery process is silent (sla-server status)",
        }
        text = words.get(found.state, f"not confirmed: {found.answer or 'it has not answered yet'}")
        click.echo(printable_lines(f"{recipient}: {text}"))
        for line in _why_not(found, event_id) if found.state not in words else ():
            click.echo(f"  {printable_lines(line)}")
    if found.state not in ("confirmed", "raised"):
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What became of a test; ``delivery``: how delivery sees its recipient, None if that is not known."""

    state: str
    answer: str = ""
    delivery: Row | None = None


def _wait(client: Client, event_id: str, recipient: str) -> TrialResult:
    """When the test was confirmed, a try has failed, none will be made in time, or a minute has passed.

    A recipient that fails already is sent other events first: its next answer counts for the test, too.
    """
    end_s, end_us = time.monotonic() + WAIT_S, time.time() * 1e6 + WAIT_S * 1e6
    path = f"/events/{quote(event_id, safe='')}"
    first_attempt: int | None = None
    while True:
        try:
            row: Row = client.get(path)
        except RequestRefused as exc:
            if exc.status != 404:  # its row is on the way to SQL
                raise
            row = {"undelivered": []}
        delivery = _delivery_of(client, recipient)
        for one in row.get("deliveries") or ():
            if one["recipient"] == recipient:
                return TrialResult(str(one["state"]), str(one["answer"]), delivery)
        if row.get("undelivered") is None:
            return TrialResult("unknown")
        for one in row["undelivered"]:
            if one.get("recipient") == recipient and one.get("state") == "failing":
                return TrialResult("failing", str(one.get("reason") or ""), delivery)
        if delivery is not None and delivery.get("state") == "failing" and not delivery.get("is_trying"):
            attempt = int(delivery.get("attempt") or 0)
            next_us = delivery.get("next_try_us") or 0
            if first_attempt is None and 0 < next_us <= end_us:
                click.echo(f"{recipient} fails; its next try is at {formatting.when(next_us)}", err=True)
            first_attempt = attempt if first_attempt is None else first_attempt
            if attempt > first_attempt or next_us > end_us:
                return TrialResult("failing", str(delivery.get("last_answer") or ""), delivery)
        if time.monotonic() > end_s:
            said = delivery.get("last_answer") if delivery and delivery.get("state") == "failing" else ""
            return TrialResult("waiting", str(said or ""), delivery)
        time.sleep(INTERVAL_S)


def _delivery_of(client: Client, recipient: str) -> Row | None:
    """How delivery sees a recipient."""
    rows = client.get("/recipients")["items"]
    found: Row | None = next((row.get("delivery") for row in rows if row.get("name") == recipient), None)
    return found


def _why_not(found: TrialResult, event_id: str) -> Iterator[str]:
    """What is known of a recipient that has not confirmed its test, and what to do."""
    row = found.delivery or {}
    if row.get("state") == "failing":
        since = f" since {formatting.when(row['failing_since_us'])}" if row.get("failing_since_us") else ""
        tries = int(row.get("attempt") or 0)
        counted = f" ({tries:,} {'try' if tries == 1 else 'tries'})" if tries else ""
        again = (
            f"; the next try is at {formatting.when(row['next_try_us'])}" if row.get("next_try_us") else ""
        )
        yield f"It has failed{since}{counted}{again}."
    waiting = int(row.get("waiting") or 0)
    if waiting > 1:
        most = "At most " if row.get("waiting_is_at_most") else ""
        yield f"{most}{waiting:,} events wait for it, this among them; they are sent in their order."
    if found.state == DEAD_LETTER:
        yield "It refused it for good: it is not sent again. Mend what receives it, and try again."
    elif found.state == "failing":
        yield "Mend what receives it, or its document and files: what waits is sent then by itself."
    yield f"How it went: sla describe event {event_id}"


@notify.command("route")
@click.option("--event", "path", help="File with an event as JSON; - reads stdin.")
@click.option("--kind", help="Instead of a file: kind of the event.")
@click.option("--severity", type=click.Choice(["info", "warning", "critical"]), help="[that of the kind]")
@click.option("--element", default="sla", show_default=True, help="Kind of thing it is about.")
@click.option("--subject", default="", help="Name of that thing; of a violation AGREEMENT/OBJECTIVE.")
@DATA_OUTPUT
@pass_client
def route(
    client: Client,
    path: str | None,
    kind: str | None,
    severity: str | None,
    element: str,
    subject: str,
    output: str,
) -> None:
    """Say who would get an event now, and why. Nothing is delivered.

    The event of --event is a JSON object with kind, element and subject, or one of sla get events -o json.
    """
    if (path is None) == (kind is None):
        raise BadUsage("say which event: --event FILE, or --kind KIND with --severity, --element, --subject")
    event: Any = {"kind": kind, "severity": severity, "element": element, "subject": subject}
    if path is not None:
        event = _read_event(path)
    found = client.change("POST", "/preview", json=event)
    if output == "json":
        print_json(found)
        return
    for line in routing_lines(found):
        click.echo(printable_lines(line))
    for note in found.get("notes") or ():
        click.echo(f"note: {printable_lines(str(note))}", err=True)


def _read_event(path: str) -> Row:
    """The event of a file.

    Raises:
        BadUsage: it cannot be read, or is no JSON object.
    """
    where = "standard input" if path == "-" else path
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        if len(content) > MOST_EVENT_BYTES:
            raise BadUsage(f"{where} has {len(content)} bytes; an event has {MOST_EVENT_BYTES} at most")
        event = json.loads(content)
    except OSError as exc:
        raise BadUsage(
            f"{where} cannot be read: {exc.strerror}. Give --event a file, or - for stdin"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise BadUsage(f"{where} is not JSON ({exc}); 'sla get events -o json' shows events") from exc
    if isinstance(event, list) and len(event) == 1:
        event = event[0]  # as 'sla get events --limit 1 -o json' prints it
    if not isinstance(event, dict):
        expected = 'one JSON object was expected, such as {"kind": "gateway-lost", "element": "gateway"}'
        raise BadUsage(f"{where} holds no event: {expected}")
    return event


@click.group(cls=Commands)
def silence() -> None:
    """Hold events back for a time; list silences with sla get silences.

    What is held back is delivered when the silence ends. Silences that repeat (quiet hours) are applied
    as documents.
    """


@silence.command("start")
@click.option("--for", "lasting", required=True, help="How long: 90s, 10m, 2h.")
@click.option("--reason", required=True, help="Why; others will read it.")
@click.option("--severity", "severities", multiple=True, help="Only events of this severity; repeatable.")
@click.option("--kind", "kinds", multiple=True, help="Only of this kind, or pattern; repeatable.")
@click.option("--agreement", "agreements", multiple=True, help="Only about this agreement; repeatable.")
@click.option("--gateway", "gateways", multiple=True, help="Only about this gateway; repeatable.")
@click.option("--volume", "volumes", multiple=True, help="Only about this volume; repeatable.")
@click.option("--recipient", "recipients", multiple=True, help="Only from this recipient; repeatable.")
@click.option("--drop", is_flag=True, help="Do not deliver at the end what was held back.")
@click.option("--all", "is_all", is_flag=True, help="Hold back every event.")
@click.option("--name", help="Of the document [made from the time].")
@OUTPUT
@pass_client
def start(
    client: Client,
    /,
    lasting: str,
    reason: str,
    recipients: tuple[str, ...],
    drop: bool,
    is_all: bool,
    name: str | None,
    output: str,
    **match: tuple[str, ...],
) -> None:
    """Hold events back from now on; say which, or --all."""
    wanted = {key: list(values) for key, values in match.items() if values}
    if bool(wanted) == is_all:
        raise BadUsage("say which events: --severity, --kind, --agreement, --gateway, --volume; or --all")
    now_s = int(time.time())
    lasts_s = max(1, round(duration_s(lasting, "--for", MOST_S)))
    at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    document = {
        "apiVersion": "storage-sla/v1",
        "kind": "Silence",
        "metadata": {"name": name or f"silence-{at}-{secrets.token_hex(2)}"},
        "spec": {
            "match": wanted,
            "recipients": list(recipients),
            "catch_up": not drop,
            "start": datetime.fromtimestamp(now_s, UTC).replace(tzinfo=None).isoformat(),
            "duration": f"{lasts_s}s" if lasts_s < 1_000_000 else f"{-(-lasts_s // 3600)}h",
            "tz": "UTC",
            "reason": reason,
        },
    }
    content = json.dumps(document).encode()  # JSON is YAML
    answer = client.change("POST", "/slas", content=content, headers={"Content-Type": "application/yaml"})
    if output == "json":
        print_json(answer)
        return
    for item in answer.get("applied", []):
        click.echo(f"{item['name']}: until {formatting.when((now_s + lasts_s) * 1_000_000)}")
        click.echo(f"To end it early: sla silence end {item['name']}")
    for warning in answer.get("warnings", []):
        click.echo(f"note: {printable_lines(str(warning))}", err=True)


@silence.command("end")
@click.argument("name")
@OUTPUT
@pass_client
def end(client: Client, name: str, output: str) -> None:
    """End a silence now; of one that repeats, this and every occurrence to come."""
    answer = client.change("DELETE", f"/silences/{quote(name, safe='')}")
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{name}: ended")


@click.command()
@click.argument("event")
@click.option("--note", required=True, help="What is done about it; others will read it.")
@OUTPUT
@pass_client
def ack(client: Client, event: str, note: str, output: str) -> None:
    """Acknowledge an event: you take care of it, and reminders end.

    EVENT is its id, as sla get events shows it; a beginning does that no other id has.
    """
    answer = client.change("POST", f"/events/{quote(event, safe='')}/acknowledge", json={"note": note})
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{answer.get('event_id') or event}: acknowledged")
