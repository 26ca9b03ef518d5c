"""``sla get``: what the server knows, as tables or JSON."""

from __future__ import annotations

import time

import click

from sla_server.cli.client import Client
from sla_server.cli.shared import OUTPUT, console, pass_client, print_json
from sla_server.cli.tables import KINDS, build, by_objective

LIMIT_DEFAULT = 20


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    help="At most so many [20 throttles, events and policies; all of the others].",
)
@OUTPUT
@pass_client
def get(client: Client, kind: str, limit: int | None, output: str) -> None:
    """List gateways, volumes, slas, throttles, events or policies.

    Counts of I/Os are exact (from the database); rates, latencies and states are those of the last seconds.
    """
    listed = KINDS[kind]
    query = {"limit": limit or LIMIT_DEFAULT} if kind in ("throttles", "events", "policies") else {}
    rows = client.get(listed.path, **query)["items"]
    left_out = 0 if limit is None else max(0, len(rows) - limit)
    rows = rows[: len(rows) - left_out]
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo(listed.empty)
        return
    shown = by_objective(rows) if kind == "slas" else rows
    console().print(build(listed.columns, shown, time.time_ns() // 1000))
    if left_out:
        click.echo(f"and {left_out:,} more: give a higher --limit, or none")
