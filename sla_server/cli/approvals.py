"""``sla approvals``: changes that wait for a second person."""

from __future__ import annotations

import time
from typing import Final

import click

from pmdaemon.runtime.command_group import Commands
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import OUTPUT, Column, build, console, pass_client, print_json
from sla_server.cli.output import set_naming
from sla_server.rows import Row

COLUMNS: Final = (
    Column("APPROVAL", lambda row, _now_us: str(row["approval_id"])[:8]),
    Column("CHANGE", lambda row, _now_us: str(row["text"])),
    Column("BY", lambda row, _now_us: str(row["requested_by"])),
    Column("SINCE", lambda row, _now_us: formatting.when(row.get("requested_us"))),
    Column("ENDS", lambda row, _now_us: formatting.when(row.get("expires_us"))),
)
PAST_COLUMNS: Final = (
    *COLUMNS[:-1],
    Column("STATE", lambda row, _now_us: str(row["state"])),
    Column("DECIDED", lambda row, _now_us: str(row.get("decided_by") or formatting.DASH)),
)
NOTE: Final = click.option("--note", default="", help="Why; others will read it.")


@click.group(cls=Commands)
def approvals() -> None:
    """Changes that wait for a second person: list, approve, refuse."""


@approvals.command("list")
@click.option("--all", "all_", is_flag=True, help="Also those that wait no more, newest first.")
@OUTPUT
@pass_client
def list_(client: Client, all_: bool, output: str) -> None:
    """List the changes that wait, and who asked for them."""
    set_naming("", lambda row: str(row["approval_id"]))
    rows: list[Row] = client.ask("/approvals", **({"all": 1} if all_ else {}))["items"]
    if output == "json":
        print_json(rows)
    elif rows:
        console().print(build(PAST_COLUMNS if all_ else COLUMNS, rows, time.time_ns() // 1000))
    else:
        click.echo("No change waits for approval.")


@approvals.command("approve")
@click.argument("approval")
@NOTE
@pass_client
def approve(client: Client, approval: str, note: str) -> None:
    """Carry out the change APPROVAL, exactly as it was asked for; needs another account than asked."""
    row = _decide(client, approval, "approve", note)
    click.echo(f"approved: {row['text']}, asked for by {row['requested_by']}")


@approvals.command("refuse")
@click.argument("approval")
@NOTE
@pass_client
def refuse(client: Client, approval: str, note: str) -> None:
    """End the change APPROVAL, which is not carried out; also one's own."""
    row = _decide(client, approval, "refuse", note)
    click.echo(f"refused: {row['text']}, asked for by {row['requested_by']}")


def _decide(client: Client, approval: str, verb: str, note: str) -> Row:
    """Decide about what was seen: the digest says which change that was."""
    rows: list[Row] = client.ask("/approvals")["items"]
    found = [row for row in rows if str(row["approval_id"]).startswith(approval)]
    if len(found) != 1:
        problem = "several changes begin with" if found else "no change waits as"
        raise BadUsage(f"{problem} {approval!r}; 'sla approvals list' shows them")
    row = found[0]
    body = {"digest": row["digest"], "note": note}
    client.change("POST", f"/approvals/{row['approval_id']}/{verb}", json=body)
    return row
