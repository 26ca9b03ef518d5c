"""``sla gateways``: the list of gateways that the PMDaemon dials, because their hosts may not dial out."""

from __future__ import annotations

import time
from urllib.parse import quote

import click
from rich.text import Text

from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.shared import OUTPUT, console, pass_client, print_json
from sla_server.cli.tables import Column, Row, build

_STYLES = {
    "connected": formatting.GOOD,
    "waiting": formatting.BAD,
    "not-dialled": formatting.BAD,
    "unknown": formatting.WARN,
}


def state_of(row: Row) -> Text:
    """Whether it is connected."""
    return Text(str(row["state"]), _STYLES.get(str(row["state"]), ""))


def remark_of(row: Row) -> str:
    """What is wrong, if anything is."""
    answers_as = row.get("answers_as")
    if answers_as and answers_as != row["name"]:
        return f"the gateway there calls itself {answers_as}"
    if row["source"] == "configuration" and not row["reason"]:
        return "listed in the server's file"
    return str(row["reason"])


COLUMNS = (
    Column("ADDRESS", lambda row, _now_us: str(row["address"])),
    Column("NAME", lambda row, _now_us: str(row["name"] or formatting.DASH)),
    Column("STATE", lambda row, _now_us: state_of(row)),
    Column("REMARK", lambda row, _now_us: remark_of(row)),
)


@click.group()
def gateways() -> None:
    """Gateways that the server dials, because their hosts may not dial out.

    A gateway that dials in by itself needs no entry: see 'sla get gateways'.
    """


@gateways.command()
@click.argument("address")
@click.option("--name", required=True, help="The gateway's name, as in its own file.")
@OUTPUT
@pass_client
def add(client: Client, address: str, name: str, output: str) -> None:
    """Dial the gateway whose agent listens at ADDRESS (IP:PORT, its `listen`)."""
    answer = client.change("PUT", f"/gateway-list/{quote(address, safe='')}", json={"name": name})
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{address}: dialled as {name} within some seconds; 'sla gateways list' shows how it goes")
    if not address.startswith(("127.", "[::1]", "localhost:")):
        click.echo(
            "note: another machine is dialled only if the server has enabled = true in [pmdaemon.tls]",
            err=True,
        )


@gateways.command()
@click.argument("address")
@OUTPUT
@pass_client
def remove(client: Client, address: str, output: str) -> None:
    """Dial ADDRESS no more; a session that was dialled ends."""
    answer = client.change("DELETE", f"/gateway-list/{quote(address, safe='')}")
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{address}: not dialled any more")


@gateways.command("list")
@OUTPUT
@pass_client
def list_gateways(client: Client, output: str) -> None:
    """List them with their state, and why one is not connected."""
    rows = client.get("/gateway-list")["items"]
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo(
            "No gateway is dialled. Agents dial in by themselves; where they may not: sla gateways add"
        )
        return
    console().print(build(COLUMNS, rows, time.time_ns() // 1000))
