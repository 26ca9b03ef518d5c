"""``sla get``: what the server knows, as tables or JSON; and what each of these tables shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from textwrap import fill, wrap
from typing import Any, Final
from urllib.parse import quote
from zoneinfo import ZoneInfo

import click
from rich.text import Text

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting, notifications
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, LiveValuesMissing
from sla_server.cli.formatting import (
    YAML_OUTPUT,
    Column,
    Row,
    TableKind,
    build,
    console,
    pass_client,
    print_json,
)
from sla_server.explanation.words import AGREED

LIMIT_DEFAULT = 20
ZONE: Final = "_zone"
"""Key of a row to be shown whose times are of another zone than this machine's."""
DOCUMENTS: Final = ("slas", "maintenance", "calendars", "recipients", "routes", "silences")
"""Kinds whose rows are documents."""


def _live(row: Row, key: str) -> Any:
    return (row.get("live") or {}).get(key)


def _spec(row: Row) -> Row:
    """``spec`` of the document in a row."""
    return (row.get("spec") or {}).get("spec") or {}


def _plain(key: str) -> Callable[[Row, int], str]:
    return lambda row, _now_us: str(row.get(key) if row.get(key) not in (None, "") else formatting.DASH)


def _at(key: str) -> Callable[[Row, int], str]:
    """The time under a key, in the row's zone."""
    return lambda row, _now_us: formatting.when(row.get(key), row.get(ZONE))


def _counted(key: str) -> Column:
    return Column(key.upper(), lambda row, _now_us: formatting.count(row.get(key)), number=True)


def _slices(state: str) -> Callable[[Row, int], str]:
    return lambda row, _now_us: formatting.count((row.get("slices") or {}).get(state))


def slice_state(row: Row) -> Text:
    """State of a judged slice, in words and colour."""
    text, style = formatting.SLICE_STATES.get(
        str(row.get("state")), (str(row.get("state") or formatting.DASH), "")
    )
    return Text(text, style)


def why_of(row: Row) -> str:
    """Why a slice is not good, and what else is to be known of its judgement."""
    notes = [str(row.get("reason") or ""), "inexact" if row.get("inexact") else ""]
    notes.append(f"revised {row['revision']}x" if row.get("revision") else "")
    return ", ".join(filter(None, notes)) or formatting.DASH


def lasted_of(row: Row, now_us: int) -> str:
    """How long an episode lasted, or that it goes on."""
    if not row.get("opened_us"):
        return formatting.DASH
    lasted = formatting.span(((row.get("closed_us") or now_us) - row["opened_us"]) / 1e6)
    return lasted if row.get("closed_us") else f"{lasted}, open"


def worst_of(row: Row) -> str:
    """The largest u of an episode: 1 is exactly the promise."""
    return formatting.DASH if row.get("worst_u") is None else f"{row['worst_u']:.1f}x"


def period_end(row: Row) -> str:
    """The last day of a period, or that it goes on."""
    if not row.get("to_us"):
        return formatting.DASH
    return formatting.day(row["to_us"] - 1, row.get(ZONE)) if row.get("is_over") else "now"


def now_of(row: Row) -> str:
    """What is measured now; an upper bound says so."""
    metric = row.get("metric") or "latency"
    value = row.get("latency_us") if metric == "latency" else row.get("measured")
    if metric == "availability" and value is None:
        value = row.get("stall_us")
    text = formatting.indicator(metric, value)
    return f"\u2264{text}" if row.get("inexact") and value is not None else text


def state_of(state: Any) -> Text:
    """State of an objective, in words and colour."""
    text, style = formatting.STATES.get(str(state), (str(state or "unknown"), ""))
    return Text(text, style)


def severity_of(row: Row) -> Text:
    """Severity of an event."""
    return Text(str(row.get("severity", "")), formatting.SEVERITIES.get(str(row.get("severity")), ""))


def rollups_of(row: Row) -> str:
    """How many rollups a policy was computed from."""
    return formatting.count((row.get("job") or {}).get("rollups"))


def what_of(row: Row) -> str:
    """Text of an event, with its subject before it where the text does not name it."""
    subject, text = str(row.get("subject") or ""), str(row.get("text") or "")
    if not text:
        return subject or formatting.DASH
    return text if not subject or subject in text else f"{subject}: {text}"


def gateway_state(row: Row) -> Text:
    """State of a gateway."""
    style = {
        "up": formatting.GOOD,
        "recovered": formatting.GOOD,
        "stalled": formatting.WARN,
        "detached": formatting.WARN,
    }.get(str(row.get("state")), formatting.BAD)
    return Text(str(row.get("state") or formatting.DASH), style)


def hold_of(row: Row) -> str:
    """How long a throttle held an I/O in the last cuts: the mean, and the longest."""
    worst_us = _live(row, "worst_hold_us")
    if not worst_us:
        return formatting.DASH
    mean = formatting.latency(_live(row, "mean_hold_us"))
    return f"{mean} \u2264{formatting.latency(worst_us)}"


def late_ios_of(row: Row) -> Text:
    """I/Os that a throttle held for longer than the gateway's ``max_hold_s``, and the longest delay."""
    longest_us = _live(row, "longest_hold_us")
    if not longest_us:
        return Text(formatting.DASH)
    return Text(
        f"{formatting.count(_live(row, 'late_ios'))} (\u2264 {formatting.latency(longest_us)})",
        formatting.WARN,
    )


def asked_by(row: Row) -> str:
    """Who or what set a throttle; a cap that an agreement has, no policy computed."""
    if row.get("reason") == AGREED:
        return "agreement"
    return str(row.get("who") or row.get("source") or formatting.DASH)


def clock_of(row: Row) -> str:
    """How far a gateway's clock is off; nothing before its first cut, when nothing is known."""
    return formatting.skew(row.get("clock_offset_us")) if row.get("last_cut_us") else formatting.DASH


def holidays_of(row: Row) -> str:
    """How many holidays a calendar has."""
    spec = _spec(row)
    return formatting.count(len(spec["holidays"]) if "holidays" in spec else None)


def reason_of(row: Row) -> str:
    """Why maintenance is done, and who announced it."""
    author = row.get("author") or row.get("applied_by")
    return str(row.get("reason") or formatting.DASH) + (f" ({author})" if author else "")


KINDS: Final = {
    "gateways": TableKind(
        "/gateways",
        (
            Column("NAME", _plain("name")),
            Column("STATE", lambda row, _now_us: gateway_state(row)),
            Column(
                "LAST CUT", lambda row, now_us: formatting.ago(row.get("last_cut_us"), now_us), number=True
            ),
            Column("CLOCK", lambda row, _now_us: clock_of(row), number=True),
            Column("STREAMS", lambda row, _now_us: formatting.count(_live(row, "streams")), number=True),
            Column("LOST CUTS", lambda row, _now_us: formatting.count(row.get("dropped_cuts")), number=True),
            Column("ADDRESS", _plain("address")),
        ),
        "No gateway has connected. Start an agent beside the storage: gateway-agent run --config FILE",
    ),
    "volumes": TableKind(
        "/volumes",
        (
            Column("VOLUME", _plain("volume")),
            Column("BACKEND", _plain("backend")),
            Column("IOPS", lambda row, _now_us: formatting.count(_live(row, "iops")), number=True),
            Column("P95", lambda row, _now_us: formatting.latency(_live(row, "p95_us")), number=True),
            Column("P99", lambda row, _now_us: formatting.latency(_live(row, "p99_us")), number=True),
            Column("CAP/s", lambda row, _now_us: formatting.count(_live(row, "cap_cost_per_s")), number=True),
            _counted("reads"),
            _counted("writes"),
        ),
        "No volume is known yet. Start an agent beside the storage: gateway-agent run --config FILE",
    ),
    "slas": TableKind(
        "/slas",
        (
            Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
            Column("STATE", lambda row, _now_us: state_of(row.get("state"))),
            Column("NOW", lambda row, _now_us: now_of(row), number=True),
            Column("PROMISED", lambda row, _now_us: promise(row), number=True),
            Column("KEPT", lambda row, _now_us: formatting.percent(row.get("compliance"), 2), number=True),
            Column("COVER", lambda row, _now_us: formatting.percent(row.get("coverage")), number=True),
            Column(
                "BUDGET", lambda row, _now_us: formatting.percent(row.get("budget_remaining"), 0), number=True
            ),
        ),
        "No agreement is in force. Write one and apply it: sla apply -f agreement.yaml",
    ),
    "maintenance": TableKind(
        "/maintenance",
        (
            Column("NAME", _plain("name")),
            Column("STATE", _plain("state")),
            Column("FROM", _at("from_us"), number=True),
            Column("TO", _at("to_us"), number=True),
            Column("SCOPE", _plain("scope")),
            Column("REASON", lambda row, _now_us: reason_of(row)),
        ),
        "No maintenance runs or is planned. To begin some: sla maintenance start --help",
    ),
    "calendars": TableKind(
        "/calendars",
        (
            Column("NAME", _plain("name")),
            Column("VERSION", _plain("version"), number=True),
            Column("ZONE", lambda row, _now_us: str(_spec(row).get("tz") or formatting.DASH)),
            Column("HOLIDAYS", lambda row, _now_us: holidays_of(row), number=True),
            Column("SINCE", _at("applied_us")),
            Column("BY", _plain("applied_by")),
        ),
        "No calendar is in force; always and business are built in. Apply one: sla apply -f calendar.yaml",
    ),
    **notifications.KINDS,
    "episodes": TableKind(
        "/episodes",
        (
            Column("OPENED", _at("opened_us")),
            Column("LASTED", lasted_of, number=True),
            Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
            Column("WORST", lambda row, _now_us: worst_of(row), number=True),
            Column("BAD SLICES", lambda row, _now_us: formatting.count(row.get("slices_bad")), number=True),
            Column("EPISODE", lambda row, _now_us: str(row.get("episode_id") or formatting.DASH)[:8]),
        ),
        "No promise was ever broken.",
    ),
    "slices": TableKind(
        "/slas/{name}/slices",
        (
            Column("START", _at("start_us")),
            Column("STATE", lambda row, _now_us: slice_state(row)),
            Column("I/Os", lambda row, _now_us: formatting.count(row.get("n")), number=True),
            Column("MISSED", lambda row, _now_us: formatting.count(row.get("missed")), number=True),
            Column("IOPS", lambda row, _now_us: formatting.count(row.get("offered_iops")), number=True),
            Column("LIMIT", lambda row, _now_us: formatting.latency(row.get("threshold_us")), number=True),
            Column("COVER", lambda row, _now_us: formatting.percent(row.get("coverage_ratio")), number=True),
            Column("WHY", lambda row, _now_us: why_of(row)),
        ),
        "No slice of it was judged in this time: sla get slas says how it is.",
        needs_name=True,
    ),
    "periods": TableKind(
        "/slas/{name}/periods",
        (
            Column("FROM", lambda row, _now_us: formatting.day(row.get("from_us"), row.get(ZONE))),
            Column("TO", lambda row, _now_us: period_end(row)),
            Column("KEPT", lambda row, _now_us: formatting.percent(row.get("compliance"), 2), number=True),
            Column("COVER", lambda row, _now_us: formatting.percent(row.get("coverage")), number=True),
            Column(
                "BUDGET", lambda row, _now_us: formatting.percent(row.get("budget_remaining"), 0), number=True
            ),
            Column("GOOD", _slices("good"), number=True),
            Column("BAD", _slices("bad"), number=True),
            Column("NO DATA", _slices("no_data"), number=True),
            Column("INEXACT", lambda row, _now_us: formatting.count(row.get("inexact")), number=True),
        ),
        "No period of it has begun.",
        needs_name=True,
    ),
    "throttles": TableKind(
        "/throttles",
        (
            Column("THROTTLED", lambda row, _now_us: formatting.throttled(row).replace("/", " /")),
            Column("AT MOST", lambda row, _now_us: formatting.cap(row)),
            Column("STATE", _plain("state")),
            Column("HELD", lambda row, _now_us: hold_of(row), optional=True),
            Column("TOO LATE", lambda row, _now_us: late_ios_of(row), number=True, optional=True),
            Column("BY", lambda row, _now_us: asked_by(row)),
            Column("SINCE", _at("requested_us")),
            Column("REASON", lambda row, _now_us: str(row.get("text") or row.get("reason") or "")),
        ),
        "No throttle was ever set.",
    ),
    "events": TableKind(
        "/events",
        (
            Column("TIME", _at("at_us")),
            Column("SEVERITY", lambda row, _now_us: severity_of(row)),
            Column("KIND", _plain("kind")),
            Column("WHAT", lambda row, _now_us: what_of(row)),
        ),
        "Nothing has happened yet.",
    ),
    "policies": TableKind(
        "/policies",
        (
            Column("VERSION", _plain("version"), number=True),
            Column("STATE", _plain("state")),
            Column("CREATED", _at("created_us")),
            Column("ROLLUPS", lambda row, _now_us: rollups_of(row), number=True),
            Column("BY", _plain("published_by")),
        ),
        "No policy was computed yet: sla policy run",
    ),
}


def objective_of(row: Row) -> str:
    """agreement/objective, or the agreement alone if it has none."""
    return "/".join(str(row[key]) for key in ("name", "objective") if row.get(key)) or formatting.DASH


_NAMES: Final = {"mean_latency": "mean", "availability": "stall"}


def promise(row: Row) -> str:
    """Percentile and threshold; of other indicators their value."""
    if row.get("promised") is not None:
        return f"\u2265 {formatting.indicator(row.get('metric'), row['promised'])}"
    if row.get("threshold_us") is None:
        return formatting.DASH
    name = _NAMES.get(str(row.get("metric"))) or f"p{row.get('percentile') or 0:g}"
    return f"{name} {formatting.latency(row['threshold_us'])}"


def by_objective(rows: Sequence[Row]) -> list[Row]:
    """Agreements as the API lists them -> one row an objective.

    An objective that services say nothing of yet, and an agreement without any, have a row that says so.
    """
    objectives: list[Row] = []
    for row in rows:
        plain = {key: value for key, value in row.items() if key not in ("live", "objectives")}
        live = row.get("live") or []
        known = {entry.get("objective") for entry in live}
        unknown = [one["name"] for one in row.get("objectives") or [] if one["name"] not in known]
        objectives += [{**plain, **entry} for entry in live]
        objectives += [{**plain, "objective": name, "state": None} for name in unknown]
        if not live and not unknown:
            objectives.append({**plain, "state": "no-objective" if row.get("objectives") == [] else None})
    return objectives


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("name", required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    help="At most so many [20 throttles, events, episodes, slices and policies; all of the others].",
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
@YAML_OUTPUT
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

    Of the past: episodes, slices and periods.

    Slices (judged pieces of time, the newest) and periods are those of one agreement: sla get slices
    AGREEMENT[/OBJECTIVE]. Episodes (a promise is broken, until it is kept again) are those of all, or of one.

    Counts of I/Os are exact (from the database); rates, latencies and states are those of the last seconds.
    """
    listed = KINDS[kind]
    if labels is not None and kind != "slas":
        raise BadUsage(f"{kind} have no labels; only slas are selected by label")
    if output == "yaml" and kind not in DOCUMENTS:
        raise BadUsage(f"{kind} are no documents; -o yaml is for {', '.join(DOCUMENTS)}")
    if undelivered:
        notifications.show_undelivered(client, kind, limit or LIMIT_DEFAULT, output)
        return
    if tz is not None:
        formatting.zone_of(tz)  # or say so before anything is asked
    path, query = _question(kind, name, objective, episode)
    if listed.needs_name:
        _get_judged(client, kind, path, query, limit, output, tz)
        return
    if kind in _PAGED:
        query["limit"] = limit or LIMIT_DEFAULT
    if kind == "slas":
        query |= ({"labels": labels} if labels else {}) | ({"documents": "1"} if output == "yaml" else {})
    answer = client.get(path, **query)
    rows = answer["items"]
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


_PAGED: Final = ("throttles", "events", "policies", "episodes")
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
    if not listed.needs_name and kind != "episodes":
        raise BadUsage(f"{kind} are listed without a name, not {name!r}: sla get {kind}")
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
