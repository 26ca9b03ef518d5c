"""``sla describe sla`` and ``sla describe event``: with what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.completion import names as names_in_shell
from sla_server.cli.errors import LiveValuesMissing
from sla_server.cli.formatting import OUTPUT, pass_client, print_json, with_year
from sla_server.cli.notifications import event_lines
from sla_server.cli.tables import now_of, promise
from sla_server.cli.watch import watchable
from sla_server.rows import Row


@click.command("sla")
@click.argument("name", shell_complete=names_in_shell("slas"))
@click.option("--version", type=click.IntRange(min=1), help="An older version instead of the newest.")
@click.option(
    "--periods",
    type=click.IntRange(1, 14),
    default=3,
    show_default=True,
    help="Periods with their compliance and credit.",
)
@OUTPUT
@pass_client
@watchable
def describe_sla(client: Client, name: str, version: int | None, periods: int, output: str) -> None:
    """Show an agreement's document, how it is kept, and what is credited.

    The output can be applied again (sla apply -f -): what is not the document is a comment.
    """
    path = f"/slas/{quote(name, safe='')}"
    row = client.get(path, **({"version": version} if version else {}))
    newest = client.get(path) if version else row
    is_newest = newest["version"] == row["version"]
    credits = client.get(f"{path}/credits", periods=periods) if is_newest else None
    is_live = is_newest and row.get("ended_us") is None
    silence = formatting.silence_of(row.get("server") or {}) if is_live else ""
    if output == "json":
        print_json({**row, "credits": credits})
        if silence:
            raise LiveValuesMissing(silence)
        return
    lines = [*_about(row, newest["version"])]
    if credits is not None:
        lines += ["now: not known, the services part is silent"] if silence else []
        lines += [line for one in row.get("live") or [] for line in _live_lines(one)]
        lines += [line for period in credits["items"] for line in _period_lines(period, credits)]
    for line in lines:
        click.echo(printable_lines(f"# {line}".rstrip()))
    click.echo(str(row["document"]).rstrip())
    if silence:
        raise LiveValuesMissing(silence)


@click.command("event")
@click.argument("event", shell_complete=names_in_shell("events"))
@OUTPUT
@pass_client
@watchable
def describe_event(client: Client, event: str, output: str) -> None:
    """Show an event: figures, who acknowledged it, who has not confirmed it, who gets it and why.

    EVENT is its id, as sla get events shows it; a beginning does that no other id has.
    """
    row = client.get(f"/events/{quote(event, safe='')}")
    if output == "json":
        print_json(row)
        return
    for line in event_lines(row):
        click.echo(printable_lines(line))


def _about(row: Row, newest: int) -> Iterator[str]:
    ended_us = row.get("ended_us")
    until = "in force" if ended_us is None else f"ended {with_year(ended_us)}"
    yield f"{row['name']} version {row['version']} of {newest}: {until}"
    yield f"applied {with_year(row['applied_us'])} by {row['applied_by']}"


def _live_lines(live: Row) -> Iterator[str]:
    state = formatting.STATES.get(str(live.get("state")), (str(live.get("state")), ""))[0]
    now, promised = now_of(live), f"{promise(live)} promised"
    measured = promised if now == formatting.DASH else f"{now} of {promised}"
    yield f"now: {live.get('objective')}: {state}, {measured}"


def _period_lines(period: Row, credits: Row) -> Iterator[str]:
    start, end = (_local(period[key], credits["tz"]) for key in ("start_us", "end_us"))
    so_far = ", so far" if period["so_far"] else ""
    yield f"period {start} to {end} ({credits['tz']}){so_far}{_credit(period, credits)}"
    for one in period["objectives"]:
        until = "" if one.get("is_agreed", True) else ", no longer agreed"
        promised = f"{formatting.percent(one['target'], 2)} promised"
        found = "nothing judged yet, " + promised
        if one["compliance"] is not None:
            found = f"kept {formatting.percent(one['compliance'], 2)} of {promised}, {formatting.due_of(one)}"
        line = f"{one['objective']}{until}: {found}"
        yield from wrap(line, 78, initial_indent="  ", subsequent_indent="    ")


def _credit(period: Row, credits: Row) -> str:
    if not period.get("has_penalties", credits["penalties"]):
        return ""
    capped = (
        f" ({formatting.percent(period['uncapped'])} without credit_cap)"
        if period["uncapped"] > period["credit"]
        else ""
    )
    return f": credit {formatting.percent(period['credit'])}{capped}"


def _local(at_us: int, tz: str) -> str:
    """In the agreement's zone, in which its periods begin at midnight."""
    from sla_server.agreements.periods import to_local  # with the models, which little else here needs

    return to_local(at_us, tz).strftime("%Y-%m-%d %H:%M").removesuffix(" 00:00")
