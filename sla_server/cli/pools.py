"""``sla describe pool``: how full a pool of storage is, how that came about, and what was done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from textwrap import wrap
from typing import Final
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.completion import names as names_in_shell
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import OUTPUT, pass_client, print_json
from sla_server.cli.tables import bar_of, pool_level
from sla_server.cli.watch import watchable
from sla_server.rows import Row

SHOWN_VOLUMES: Final = 20
SHOWN_ACTIONS: Final = 10
HISTORY_CELLS: Final = 60
_STEPS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@click.command("pool")
@click.argument("name", shell_complete=names_in_shell("pools"))
@click.option(
    "--days", type=click.IntRange(1, 400), default=90, show_default=True, help="History of so many days."
)
@OUTPUT
@pass_client
@watchable
def describe_pool(client: Client, name: str, days: int, output: str) -> None:
    """Show a pool's volumes, its history by day, when it will be full, and what was done about it.

    NAME is GATEWAY/POOL, as sla get pools shows it.
    """
    owner, _, pool = name.partition("/")
    if not pool:
        raise BadUsage(f"{name[:200]!r} is not GATEWAY/POOL; sla get pools lists them")
    row = client.get(f"/pools/{quote(owner, safe='')}/{quote(pool, safe='')}", days=days)
    if output == "json":
        print_json(row)
        return
    for line in pool_lines(row, time.time_ns() // 1000):
        for part in wrap(printable_lines(line), formatting.WIDTH, subsequent_indent="  ") or [""]:
            click.echo(part)


def pool_lines(row: Row, now_us: int) -> Iterator[str]:
    """Everything about a pool, a line each."""
    full = f"{formatting.size(row['used_bytes'])} of {formatting.size(row['size_bytes'])}"
    yield f"{row['name']} ({row['kind']}{', backend ' + row['backend'] if row['backend'] else ''})"
    yield f"level: {pool_level(row).plain}, read {formatting.ago(row['read_us'], now_us)} ago"
    yield f"used: {bar_of(row['used_ratio'])} {formatting.percent(row['used_ratio'])}, {full}"
    if row.get("other_ratio") is not None:
        what = "inodes" if row["kind"] in ("path", "loop") else "metadata"
        yield f"{what}: {bar_of(row['other_ratio'])} {formatting.percent(row['other_ratio'])}"
    if row["volume_count"]:
        ratio = row["provisioned_ratio"]
        times = f", {ratio:.2f} times the pool" if ratio is not None else ""
        yield f"promised to {row['volume_count']} volumes: {formatting.size(row['provisioned_bytes'])}{times}"
    yield from forecast_lines(row.get("forecast"))
    yield from _history_lines(row["days"])
    yield from _volume_lines(row["volumes"], row["volume_count"], now_us)
    for action in row["actions"][:SHOWN_ACTIONS]:
        yield f"{formatting.when(action['at_us'])} {action['action']}, {action['state']}: {action['text']}"


def forecast_lines(forecast: Row | None) -> Iterator[str]:
    """When the pool is expected to be full, or why no day is named."""
    if not forecast:
        yield "forecast: none yet, no day of its history has ended"
        return
    slope = forecast.get("slope_bytes_per_day")
    grows = f"grows by {formatting.size(slope)} a day" if slope and slope > 0 else "does not grow"
    if not forecast.get("full_us"):
        yield f"forecast: none, {forecast['reason']}"
        return
    earliest, latest = (
        formatting.day(forecast[key]) if forecast.get(key) else "later than that can be said"
        for key in ("earliest_us", "latest_us")
    )
    yield (
        f"forecast: {grows}; full on {formatting.day(forecast['full_us'])} (between {earliest} and {latest}, "
        f"by {forecast['days']} days)"
    )


def _history_lines(days: list[Row]) -> Iterator[str]:
    shown = days[-HISTORY_CELLS:]
    if not shown:
        return
    ratios = [row["used_bytes"] / row["size_bytes"] if row["size_bytes"] else 1.0 for row in shown]
    cells = "".join(_STEPS[min(int(ratio * len(_STEPS)), len(_STEPS) - 1)] for ratio in ratios)
    yield f"use by day, {formatting.day(shown[0]['day_us'])} to {formatting.day(shown[-1]['day_us'])}:"
    yield f"  {cells}"


def _volume_lines(volumes: list[Row], count: int, now_us: int) -> Iterator[str]:
    for row in volumes[:SHOWN_VOLUMES]:
        used = "" if row["used_bytes"] is None else f", {formatting.size(row['used_bytes'])} used"
        served = f", served as {row['volume']}" if row["volume"] else ""
        since_us = row.get("unused_since_us")
        unused = (
            "" if since_us is None else f", neither served nor open for {formatting.ago(since_us, now_us)}"
        )
        yield f"  {row['name']}: {formatting.size(row['size_bytes'])}{used}{served}{unused}"
    if count > len(volumes[:SHOWN_VOLUMES]):
        yield f"  and {count - len(volumes[:SHOWN_VOLUMES]):,} more, smaller ones"
