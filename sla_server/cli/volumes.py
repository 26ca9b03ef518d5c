"""``sla volumes``: which gateway a volume belongs to, and which wait until a person has approved them.

What the server does with one that waits: ``sla_server.ownership``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

import click
from rich.text import Text

from pmdaemon.runtime.command_group import Commands
from pmdaemon.wire.labels import KEY_RULE, VALUE_RULE, is_label_key, is_label_value
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import OUTPUT, Column, build, console, pass_client, print_json
from sla_server.rows import Row

PAGE: Final = 5000
"""Rows of one call: the limit of the API (``api.routes.LONG_LIMIT_MAX``)."""
_STYLES: Final = {"approved": formatting.GOOD, "pending": formatting.WARN, "moved": formatting.WARN}


def _state(row: Row) -> Text:
    """Its state; ``moved``: it is shown on a backend that was not approved."""
    shown, state = row.get("shown_backend"), str(row.get("state"))
    if state == "approved" and row.get("backend") and shown not in ("", None, row.get("backend")):
        state = "moved"
    return Text(state, _STYLES.get(state, ""))


def _backend(row: Row) -> str:
    """Where it counts, and where it is shown if that is different."""
    backend, shown = str(row.get("backend") or ""), str(row.get("shown_backend") or "")
    if backend and shown and backend != shown:
        return f"{backend}, now {shown}"
    return backend or shown or formatting.DASH


def _others(row: Row) -> str:
    """The gateways it belongs to besides this one."""
    others = [name for name in row.get("owners") or () if name != row.get("name")]
    return ", ".join(others) or formatting.DASH


COLUMNS: Final = (
    Column("VOLUME", lambda row, _now_us: str(row["volume"])),
    Column("GATEWAY", lambda row, _now_us: str(row["name"])),
    Column("STATE", lambda row, _now_us: _state(row)),
    Column("BACKEND", lambda row, _now_us: _backend(row)),
    Column("BY", lambda row, _now_us: str(row.get("decided_by") or formatting.DASH)),
    Column("SINCE", lambda row, _now_us: formatting.when(row.get("changed_us"))),
)
PENDING_COLUMNS: Final = (
    Column("VOLUME", lambda row, _now_us: str(row["volume"])),
    Column("GATEWAY", lambda row, _now_us: str(row["name"])),
    Column("BACKEND", lambda row, _now_us: _backend(row)),
    Column("BELONGS TO", lambda row, _now_us: _others(row)),
    Column("SINCE", lambda row, _now_us: formatting.when(row.get("changed_us"))),
    Column("LEFT OUT", lambda row, _now_us: formatting.count(row.get("left_out")), number=True),
)


@click.group(cls=Commands)
def volumes() -> None:
    """Labels of volumes, and which gateway one belongs to: approve, revoke, label.

    A gateway's statistics of a volume count, and it is sent thresholds and caps for it, once the volume
    belongs to it: the first that shows it, or each that is approved (volume_ownership in the server's file).
    """


def _rows(client: Client, state: str | None) -> list[Row]:
    """All pages."""
    query: dict[str, Any] = {"limit": PAGE} if state is None else {"limit": PAGE, "state": state}
    page = client.get("/volume-owners", **query)
    rows: list[Row] = page["items"]
    while page["next"] is not None:
        page = client.get("/volume-owners", **query, after=page["next"])
        rows += page["items"]
    return rows


@volumes.command("list")
@OUTPUT
@pass_client
def list_(client: Client, output: str) -> None:
    """List volumes with the gateways that showed them, approved or not."""
    rows = _rows(client, None)
    if output == "json":
        print_json(rows)
    elif rows:
        console().print(build(COLUMNS, rows, time.time_ns() // 1000))
    else:
        click.echo("No gateway has shown a volume yet, or volume_ownership is open.")


@volumes.command()
@OUTPUT
@pass_client
def pending(client: Client, output: str) -> None:
    """List volumes that wait for approval.

    LEFT OUT counts the rows of statistics that were not taken.
    """
    rows = _rows(client, "pending")
    if output == "json":
        print_json(rows)
    elif rows:
        console().print(build(PENDING_COLUMNS, rows, time.time_ns() // 1000))
        click.echo("On purpose: sla volumes approve VOLUME --gateway GATEWAY; else: revoke")
    else:
        click.echo("No volume waits for approval.")


VOLUMES: Final = click.argument("names", metavar="VOLUME...", nargs=-1, required=True)


GATEWAYS: Final = click.option(
    "--gateway",
    "gateways",
    multiple=True,
    metavar="NAME",
    help="Of this gateway, by name or id; may be repeated.",
)


@volumes.command()
@VOLUMES
@GATEWAYS
@OUTPUT
@pass_client
def approve(client: Client, names: tuple[str, ...], gateways: tuple[str, ...], output: str) -> None:
    """Let VOLUME belong to a gateway that shows it, beside those it belongs to already.

    VOLUME may be a pattern ('vol-1*'). With several --gateway it belongs to all of them; one that is to show
    it later may be named, too.
    """
    _decide(client, "approve", names, gateways, output)


@volumes.command()
@VOLUMES
@GATEWAYS
@OUTPUT
@pass_client
def revoke(client: Client, names: tuple[str, ...], gateways: tuple[str, ...], output: str) -> None:
    """Let VOLUME belong to a gateway no more, or refuse one that waits.

    What was stored stays; from now on its statistics are left out. approve undoes it.
    """
    _decide(client, "revoke", names, gateways, output)


def _decide(
    client: Client, word: str, names: tuple[str, ...], gateways: tuple[str, ...], output: str
) -> None:
    body = {"volumes": list(names), "gateways": list(gateways)}
    answer = client.change("POST", f"/volume-owners/{word}", json=body)
    if output == "json":
        print_json(answer)
        return
    for row in answer.get(f"{word}d", []):
        owners = ", ".join(row.get("owners") or ())
        if word == "approve":
            where = f" on {row['backend']}" if row.get("backend") else ""
            click.echo(f"{row['volume']}: approved for {row['gateway']}{where}; it belongs to {owners}")
        else:
            left = f"it belongs to {owners}" if owners else "it belongs to no gateway now"
            click.echo(f"{row['volume']}: revoked for {row['gateway']}; {left}")


@volumes.command()
@click.argument("volume")
@click.argument("labels", nargs=-1, metavar="KEY=VALUE|KEY-...")
@click.option("--reset", is_flag=True, help="Take back what was said here: its agent's labels hold again.")
@OUTPUT
@pass_client
def label(client: Client, volume: str, labels: tuple[str, ...], reset: bool, output: str) -> None:
    """Give VOLUME labels by which agreements choose it; KEY- takes one away.

    What is said here holds in place of what its agent says. It is a document (sla get volumelabels VOLUME -o
    yaml); one that labels volumes by pattern is applied from a file. Without labels those it has are shown.
    """
    path, volume_path = (f"/{part}/{quote(volume, safe='')}" for part in ("volume-labels", "volumes"))
    client.get(volume_path)  # one that is not known is refused before its document is applied
    held = next((row for row in client.get("/volume-labels")["items"] if row["name"] == volume), None)
    if held is not None and held["spec"]["spec"]["volumes"] != [volume]:
        problem = f"the document VolumeLabels {volume} is about other volumes, too"
        raise BadUsage(f"{problem}; edit it: sla get volumelabels {volume} -o yaml")
    if reset and labels:
        raise BadUsage("--reset takes back all labels; give no others with it")
    if reset and held is not None:
        client.change("DELETE", path)
    elif labels:
        said = {**(held["spec"]["spec"]["labels"] if held is not None else {}), **_said(labels)}
        document = {
            "apiVersion": "storage-sla/v1",
            "kind": "VolumeLabels",
            "metadata": {"name": volume},
            "spec": {"volumes": [volume], "labels": said},
        }
        headers = {"Content-Type": "application/yaml"}
        client.change("POST", "/slas", content=json.dumps(document).encode(), headers=headers)
    shown = client.get(volume_path)["labels"]
    if output == "json":
        print_json({"volume": volume, "labels": shown})
        return
    text = ", ".join(f"{key}={value}" for key, value in sorted(shown.items()))
    click.echo(f"{volume}: {text or 'no labels'}")


def _said(given: Iterable[str]) -> dict[str, str | None]:
    """KEY=VALUE and KEY- as a document has them.

    Raises:
        BadUsage: another form.
    """
    said: dict[str, str | None] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if sign and is_label_key(key) and is_label_value(value):
            said[key] = value
        elif not sign and text.endswith("-") and is_label_key(text[:-1]):
            said[text[:-1]] = None
        else:
            rule = f"KEY is {KEY_RULE}; VALUE is {VALUE_RULE}"
            raise BadUsage(f"{text[:80]!r} is no label; write KEY=VALUE, or KEY- to take it away. {rule}")
    return said
