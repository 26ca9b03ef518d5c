"""``sla get``: what the server knows, as tables or JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from textwrap import fill, wrap
from typing import Any, Final
from urllib.parse import quote
from zoneinfo import ZoneInfo

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting, notifications
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, LiveValuesMissing, RequestRefused
from sla_server.cli.formatting import OUTPUT, TableKind, build, console, pass_client, print_json
from sla_server.cli.kinds import KindType, near, singular_of
from sla_server.cli.output import form, set_kind
from sla_server.cli.tables import KINDS, ZONE, by_objective, objective_of
from sla_server.rows import Row

LIMIT_DEFAULT = 20
DOCUMENTS: Final = ("slas", "maintenance", "calendars", "recipients", "routes", "silences")
"""Kinds whose rows are documents."""


@click.command()
@click.argument("kind", type=KindType(list(KINDS)), metavar="KIND")
@click.argument("name", required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    help="At most so many [20 throttles, events, episodes, slices, policies and jobs; all of the others].",
)
@click.option("-l", "--labels", help="slas: only those with these labels, as customer=acme,tier.")
@click.option("--objective", help="slices, periods, episodes: only of this objective [all].")
@click.option("--episode", help="slices: those that this episode touches (see sla get episodes).")
@click.option(
    "--tz",
    metavar="ZONE",
    help="Zone of the times: UTC, Europe/Berlin, local [slices, periods: that of the agreement; else local].",
)
@click.option("--undelivered", is_flag=True, help="events: those that not all recipients have confirmed.")
@OUTPUT
@pass_client
def get(
    client: Client,
    kind: str,
    name: str | None,
    limit: int | None,
    output: str,
    labels: str | None = None,
    objective: str | None = None,
    episode: str | None = None,
    tz: str | None = None,
    undelivered: bool = False,
) -> None:
    """List gateways, volumes, slas, maintenance, throttles, events and more.

    KIND is one of gateways, volumes, pools, slas, throttles, events, policies, jobs, maintenance,
    calendars,
    recipients, routes and silences; of the past episodes, slices and periods. The singular does, too. With
    NAME only the one of that name is listed.

    Slices (judged pieces of time, the newest) and periods are those of one agreement: sla get slices
    AGREEMENT[/OBJECTIVE]. Episodes (a promise is broken, until it is kept again) are those of all, or of one.

    Counts of I/Os are exact (from the database); rates, latencies and states are those of the last seconds.
    """
    listed = KINDS[kind]
    if labels is not None and kind != "slas":
        raise BadUsage(f"{kind} have no labels; only slas are selected by label")
    set_kind(singular_of(kind))
    if form() == "yaml" and kind in DOCUMENTS:
        output = "yaml"  # as they are applied
    if undelivered:
        notifications.show_undelivered(client, kind, limit or LIMIT_DEFAULT, output)
        return
    if tz is not None:
        formatting.zone_of(tz)  # or say so before anything is asked
    path, query = _question(kind, name, objective, episode)
    named = None if listed.needs_name or kind == "episodes" else name
    if listed.needs_name:
        _get_judged(client, kind, path, query, limit, output, tz)
        return
    if kind in _PAGED and path == listed.path:
        query["limit"] = _MOST_LISTED if named else limit or LIMIT_DEFAULT
    if kind == "slas":
        query |= ({"labels": labels} if labels else {}) | ({"documents": "1"} if output == "yaml" else {})
        query |= {"match": named} if named else {}
    answer = client.get(path, **query)
    rows = answer.get("items", [answer])  # of one event, itself
    if named is not None and kind != "events":
        rows = _of_name(kind, rows, named)
    silence = "" if output == "yaml" else formatting.silence_of(answer.get("server") or {})
    _show_rows(kind, rows, limit, output, labels, tz)
    if silence:
        raise LiveValuesMissing(silence)


def _show_rows(
    kind: str, rows: list[Row], limit: int | None, output: str, labels: str | None, tz: str | None
) -> None:
    listed, zone = KINDS[kind], formatting.zone_of(tz or formatting.LOCAL)
    left_out = 0 if limit is None else max(0, len(rows) - limit)
    rows = rows[: len(rows) - left_out]
    if output == "json":
        print_json(rows)
        return
    if not rows:
        words = f"No agreement in force has the labels {labels}." if labels else listed.empty
        click.echo(fill(words, formatting.WIDTH, break_on_hyphens=False))
        return
    if output == "yaml":
        from sla_server.cli.documents import join_documents  # it needs the YAML reader, which lists do not

        click.echo(join_documents(str(row["document"]) for row in rows), nl=False)
        return
    shown = by_objective(rows) if kind == "slas" else rows
    _show(listed, shown, zone)
    notes = {"slas": _reasons, "volumes": _shared}.get(kind)
    for line in notes(shown) if notes is not None else ():
        click.echo(line)
    if tz is not None:
        click.echo(f"Times are {_zone_words(tz)}.")
    if left_out:
        click.echo(f"and {left_out:,} more: give a higher --limit, or none")


_PAGED: Final = ("throttles", "events", "policies", "episodes", "jobs")
_MOST_LISTED: Final = 1000
_SLICES_MOST: Final = 5000
_PERIODS_MOST: Final = 60
MOST_REASONS: Final = 10


def _show(listed: TableKind, rows: Sequence[Row], zone: ZoneInfo | None) -> None:
    shown = [{**row, ZONE: zone} for row in rows]
    console().print(build(listed.columns, shown, time.time_ns() // 1000))


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why there is no data, or nothing is promised, of the first objectives of which that is known."""
    known = (row for row in rows if row.get("reason") and row.get("state") in ("excluded", "no-data"))
    found = [(objective_of(row), str(row["reason"])) for row in known]
    for name, reason in found[:MOST_REASONS]:
        yield from wrap(printable_lines(f"{name}: {reason}"), formatting.WIDTH, subsequent_indent="  ")
    if len(found) > MOST_REASONS:
        yield f"and {len(found) - MOST_REASONS:,} more with a reason: -o json has them"


def _shared(rows: Sequence[Row]) -> Iterator[str]:
    """Volumes that belong to several gateways, the first of them."""
    found = [(str(row.get("volume")), row["owners"]) for row in rows if len(row.get("owners") or ()) > 1]
    for volume, owners in found[:MOST_REASONS]:
        said = printable_lines(f"{volume} belongs to {len(owners)} gateways: {', '.join(owners)}")
        yield from wrap(said, formatting.WIDTH, subsequent_indent="  ")
    if len(found) > MOST_REASONS:
        yield f"and {len(found) - MOST_REASONS:,} more that belong to several: sla volumes list"


def _zone_words(tz: str) -> str:
    return "this machine's" if tz == formatting.LOCAL else f"of {tz}"


def _of_name(kind: str, rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of one thing: of a volume also the throttles of its clients and of its group.

    Raises:
        RequestRefused: there is none.
    """
    key = {"volumes": "volume", "throttles": "volume", "policies": "version", "jobs": "kind"}.get(
        kind, "name"
    )
    found = [
        row
        for row in rows
        if name in (str(row.get(key)), formatting.throttled(row), *(row.get("members") or ()))
    ]
    if not found:
        known = dict.fromkeys(str(row[key]) for row in rows if row.get(key))
        fix = near(name, known) or f"'sla get {kind}' lists what there is"
        raise RequestRefused(404, {"detail": f"no {singular_of(kind)} {name[:200]!r} is listed", "fix": fix})
    return found


def _question(
    kind: str, name: str | None, objective: str | None, episode: str | None
) -> tuple[str, dict[str, Any]]:
    """Path and query of what is asked for.

    Raises:
        BadUsage: a name is missing, or an option has no use here.
    """
    listed = KINDS[kind]
    if episode is not None and kind != "slices":
        raise BadUsage(f"--episode has no use with {kind}. Use it with: sla get slices AGREEMENT")
    if objective is not None and not (listed.needs_name or kind == "episodes"):
        raise BadUsage(f"--objective has no use with {kind}; it is for slices, periods and episodes")
    if name is None:
        if listed.needs_name:
            fix = f"sla get {kind} AGREEMENT, or AGREEMENT/OBJECTIVE; sla get slas lists them"
            raise BadUsage(f"{kind} are those of one agreement, and none is named: {fix}")
        return listed.path, {} if objective is None else {"objective": objective}
    if kind == "events":
        return f"/events/{quote(name, safe='')}", {}
    if not listed.needs_name and kind != "episodes":
        return listed.path, {}
    agreement, _, named = name.partition("/")
    if named and objective is not None and named != objective:
        raise BadUsage(f"{name} names an objective, --objective {objective} another one; give one of them")
    found = {"objective": named or objective, "episode": episode}
    if kind == "episodes":
        found["name"] = agreement
    query = {key: value for key, value in found.items() if value}
    return listed.path.replace("{name}", quote(agreement, safe="")), query


def _get_judged(
    client: Client,
    kind: str,
    path: str,
    query: dict[str, Any],
    limit: int | None,
    output: str,
    tz: str | None,
) -> None:
    """Slices or periods: those of one objective after those of the other, each in a table of its own."""
    agreement = client.get(path.rpartition("/")[0])
    spec = (agreement.get("spec") or {}).get("spec") or {}
    names = [str(one["name"]) for one in spec.get("objectives") or []]
    if "episode" in query:
        names = [""]  # that of the episode
    elif "objective" in query:
        names = [query["objective"]]
    agreed = (spec.get("window") or {}).get("tz") or "UTC"
    tz, zone = (tz, formatting.zone_of(tz)) if tz else (agreed, ZoneInfo(agreed))
    found: list[tuple[str, list[Row]]] = []
    for name in names:
        asked = {**query, "objective": name} if name else query
        rows = (
            _slices_of(client, path, asked, limit)
            if kind == "slices"
            else client.get(path, **asked, **({"limit": min(limit, _PERIODS_MOST)} if limit else {}))["items"]
        )
        found.append((name, [{"objective": name, **row} for row in rows]))
    if output == "json":
        print_json([row for _, rows in found for row in rows])
        return
    if not any(rows for _, rows in found):
        unjudged = f"{agreement['name']} has no objective: nothing of it is judged."
        click.echo(KINDS[kind].empty if names else printable_lines(unjudged))
        for line in _long_slices(spec, names) if kind == "slices" else ():
            click.echo(line)
        return
    for name, rows in found:
        if len(found) > 1:
            click.echo(printable_lines(f"{agreement['name']}/{name}" + ("" if rows else ": nothing judged")))
        if rows:
            _show(KINDS[kind], rows, zone)
        for line in _parts_of(rows, zone) if kind == "periods" else ():
            click.echo(line)
        if len(found) > 1:
            click.echo()
    click.echo(f"Times are {_zone_words(tz)}.")


def _long_slices(spec: Row, names: Sequence[str]) -> Iterator[str]:
    """Objectives with slices so long that the first one may not have ended."""
    for one in spec.get("objectives") or []:
        length = str((one.get("budgeting") or {}).get("slice"))
        if one.get("name") in names and length.endswith(("h", "d")):
            yield printable_lines(
                f"A slice of {one['name']} is {length} long, and is judged when it has ended."
            )


def _parts_of(rows: Sequence[Row], zone: ZoneInfo | None) -> Iterator[str]:
    """Of periods in which the slice length was edited: what their ratios rest on."""
    for row in rows:
        if len(row.get("slice_lengths_s") or []) > 1:
            yield f"{formatting.day(row['from_us'], zone)}: {formatting.due_of(row)}."


def _slices_of(client: Client, path: str, query: dict[str, Any], limit: int | None) -> list[Row]:
    """The newest slices of the last day, or all of an episode; newest first."""
    page = client.get(path, **query, limit=_SLICES_MOST)
    rows: list[Row] = page["items"]
    while page["next"] is not None:
        page = client.get(path, **{**query, "from_us": page["next"]}, limit=_SLICES_MOST)
        rows += page["items"]
    rows.reverse()
    return rows if limit is None and "episode" in query else rows[: limit or LIMIT_DEFAULT]
