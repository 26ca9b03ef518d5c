"""``sla get``: what the server knows, as tables or JSON; and what each of these tables shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from rich.text import Text

from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import YAML_OUTPUT, Column, Row, build, console, pass_client, print_json

LIMIT_DEFAULT = 20
DOCUMENTS: Final = ("slas", "maintenance", "calendars")
"""Kinds whose rows are documents."""


@dataclass(frozen=True, slots=True)
class TableKind:
    """One kind of thing that can be listed."""

    path: str
    columns: tuple[Column, ...]
    empty: str
    """What to do next when there is nothing to list."""


def _live(row: Row, key: str) -> Any:
    return (row.get("live") or {}).get(key)


def _spec(row: Row) -> Row:
    """``spec`` of the document in a row."""
    return (row.get("spec") or {}).get("spec") or {}


def _plain(key: str) -> Callable[[Row, int], str]:
    return lambda row, _now_us: str(row.get(key) if row.get(key) not in (None, "") else formatting.DASH)


def _counted(key: str) -> Column:
    return Column(key.upper(), lambda row, _now_us: formatting.count(row.get(key)), number=True)


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


def late_ios_of(row: Row) -> Text:
    """I/Os that a throttle held for longer than the gateway's ``max_hold_s``, and the longest delay."""
    longest_us = _live(row, "longest_hold_us")
    if not longest_us:
        return Text(formatting.DASH)
    return Text(
        f"{formatting.count(_live(row, 'late_ios'))} (\u2264 {formatting.latency(longest_us)})",
        formatting.WARN,
    )


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
            Column("NOW", lambda row, _now_us: formatting.latency(row.get("latency_us")), number=True),
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
            Column("FROM", lambda row, _now_us: formatting.when(row.get("from_us")), number=True),
            Column("TO", lambda row, _now_us: formatting.when(row.get("to_us")), number=True),
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
            Column("SINCE", lambda row, _now_us: formatting.when(row.get("applied_us"))),
            Column("BY", _plain("applied_by")),
        ),
        "No calendar is in force; always and business are built in. Apply one: sla apply -f calendar.yaml",
    ),
    "throttles": TableKind(
        "/throttles",
        (
            Column("VOLUME", _plain("volume")),
            Column("AT MOST", lambda row, _now_us: formatting.cap(row)),
            Column("STATE", _plain("state")),
            Column("TOO LATE", lambda row, _now_us: late_ios_of(row), number=True),
            Column("BY", lambda row, _now_us: str(row.get("who") or row.get("source") or formatting.DASH)),
            Column("SINCE", lambda row, _now_us: formatting.when(row.get("requested_us"))),
            Column("REASON", lambda row, _now_us: str(row.get("text") or row.get("reason") or "")),
        ),
        "No throttle was ever set.",
    ),
    "events": TableKind(
        "/events",
        (
            Column("TIME", lambda row, _now_us: formatting.when(row.get("at_us"))),
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
            Column("CREATED", lambda row, _now_us: formatting.when(row.get("created_us"))),
            Column("ROLLUPS", lambda row, _now_us: rollups_of(row), number=True),
            Column("BY", _plain("published_by")),
        ),
        "No policy was computed yet: sla policy run",
    ),
}


def objective_of(row: Row) -> str:
    """agreement/objective, or the agreement alone if it has none."""
    return "/".join(str(row[key]) for key in ("name", "objective") if row.get(key)) or formatting.DASH


def promise(row: Row) -> str:
    """Percentile and threshold."""
    if row.get("threshold_us") is None:
        return formatting.DASH
    return f"p{row.get('percentile', 0):g} {formatting.latency(row['threshold_us'])}"


def by_objective(rows: Sequence[Row]) -> list[Row]:
    """Agreements as the API lists them -> one row an objective.

    An objective that is not judged, and an agreement without any, have a row that says so.
    """
    objectives: list[Row] = []
    for row in rows:
        plain = {key: value for key, value in row.items() if key not in ("live", "objectives")}
        live = row.get("live") or []
        judged = {entry.get("objective") for entry in live}
        not_judged = [one for one in row.get("objectives") or [] if one["name"] not in judged]
        objectives += [{**plain, **entry} for entry in live]
        objectives += [
            {**plain, "objective": one["name"], "state": None if one["metric"] == "latency" else "not-judged"}
            for one in not_judged
        ]
        if not live and not not_judged:
            objectives.append({**plain, "state": "no-objective" if row.get("objectives") == [] else None})
    return objectives


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    help="At most so many [20 throttles, events and policies; all of the others].",
)
@click.option("-l", "--labels", help="slas: only those with these labels, as customer=acme,tier.")
@YAML_OUTPUT
@pass_client
def get(client: Client, kind: str, limit: int | None, output: str, labels: str | None = None) -> None:
    """List gateways, volumes, slas, maintenance, throttles, events and more.

    Counts of I/Os are exact (from the database); rates, latencies and states are those of the last seconds.
    """
    listed = KINDS[kind]
    query: Row = {"limit": limit or LIMIT_DEFAULT} if kind in ("throttles", "events", "policies") else {}
    if labels is not None and kind != "slas":
        raise BadUsage(f"{kind} have no labels; only slas are selected by label")
    if output == "yaml" and kind not in DOCUMENTS:
        raise BadUsage(f"{kind} are no documents; -o yaml is for {', '.join(DOCUMENTS)}")
    query |= ({"labels": labels} if labels else {}) | ({"documents": "1"} if output == "yaml" else {})
    query = query if kind in ("slas", "throttles", "events", "policies") else {}
    rows = client.get(listed.path, **query)["items"]
    left_out = 0 if limit is None else max(0, len(rows) - limit)
    rows = rows[: len(rows) - left_out]
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo(f"No agreement in force has the labels {labels}." if labels else listed.empty)
        return
    if output == "yaml":
        from sla_server.cli.documents import join_documents  # it needs the YAML reader, which lists do not

        click.echo(join_documents(str(row["document"]) for row in rows), nl=False)
        return
    shown = by_objective(rows) if kind == "slas" else rows
    console().print(build(listed.columns, shown, time.time_ns() // 1000))
    if left_out:
        click.echo(f"and {left_out:,} more: give a higher --limit, or none")
