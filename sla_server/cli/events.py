"""``sla events pair status``: the cooperating pair, as this server's event delivery sees it.

It reads the configuration and the figures of the server on this machine; it needs neither the REST API nor a
token, so it also answers while the application server is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.excerpt import printable_lines
from sla_server import config as configuration
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import CONFIG, DATA_OUTPUT, pass_client, print_json
from sla_server.events.delivery_state import read_pair_state

STATES: Final = {
    "connected": "connected",
    "partly connected": "one of the two connections is there",
    "silent": "not heard, and not lost yet",
    "lost": "LOST: its events are delivered here",
}


@click.group(cls=Commands)
def events() -> None:
    """Event delivery: the partner server."""


@events.group()
def pair() -> None:
    """The server that keeps this one's events, and whose events this one keeps."""


@pair.command()
@CONFIG
@DATA_OUTPUT
@pass_client
def status(client: Client, config: Path | None, output: str) -> None:
    """Show whether the partner is there, and what each of the two has of the other.

    Status 1 while it is not connected.
    """
    loaded = configuration.load(config or client.config)
    if not loaded.events.pair.enabled:
        raise BadUsage(
            "this server has no partner: [events.pair] enabled = true, in its file, makes it one of two"
        )
    found = read_pair_state(loaded.runtime_dir / "metrics")
    if found is None:
        raise BadUsage(
            "the state of the pair is not known: event delivery does not run, or its pair has failed "
            "(sla-server status; its log says why)"
        )
    if output == "json":
        print_json(found)
    else:
        click.echo(printable_lines("\n".join(lines(found))))
    if found["state"] != "connected":
        raise SystemExit(1)


def lines(state: Mapping[str, Any]) -> list[str]:
    """The answer, for people."""
    since = f"since {formatting.when(state['since_us'])}"
    shown = [
        f"partner      {state['partner']} (this is {state['name']})",
        f"state        {STATES.get(state['state'], state['state'])}, {since}",
        f"our events   {state['unconfirmed']} not confirmed by all recipients, {state['mirrored']} of them "
        f"mirrored{', and the partner has no room for more' if state['partner_full'] else ''}",
        f"its events   {state['kept']} kept here, room used {state['store_fullness']:.0%}",
    ]
    if state["replaying"] or state["taken_over"]:
        doing = "replaying" if state["replaying"] else "not replaying"
        shown.append(f"taken over   {state['taken_over']} of its events since it was lost, {doing}")
    if state["certificate_until_us"]:
        shown.append(f"certificate  good until {formatting.when(state['certificate_until_us'])}")
    if state["last_failure"]:
        shown.append(f"last failure {state['last_failure']}")
    return shown
