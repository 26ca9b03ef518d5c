"""``sla why``: why a volume is throttled, or an agreement at risk, now or then.

The server answers with facts and a text in UTC; the text shown here is made from the same facts in this
machine's time zone (``sla_server.explanation``), 80 columns wide.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli.client import Client
from sla_server.cli.completion import volumes_and_agreements
from sla_server.cli.formatting import DATA_OUTPUT, WIDTH, pass_client, print_json
from sla_server.cli.moments import moment_us
from sla_server.cli.watch import watchable
from sla_server.explanation import Explanation, explain

TITLE: Final = 14
"""Columns of the titles."""


def lines_of(found: Explanation) -> list[str]:
    """The explanation as lines of at most 80 columns: headline, then titles on the left."""
    lines = textwrap.wrap(found.headline, WIDTH, break_on_hyphens=False)
    for section in found.sections:
        lines.append("")
        title = section.title
        for text in section.lines:
            lines += _wrapped(title, text)
            title = ""
    return lines


def _wrapped(title: str, text: str) -> Sequence[str]:
    hanging = " " * (TITLE + 2 * text.startswith("- "))
    # A name may be longer than a line: it is broken rather than running out of the screen.
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=title.ljust(TITLE),
        subsequent_indent=hanging,
        break_on_hyphens=False,
    )


@click.command()
@click.argument("name", metavar="VOLUME|AGREEMENT", shell_complete=volumes_and_agreements)
@click.option(
    "--at",
    "moment",
    metavar="TIME",
    help="When: 14:03, '2026-11-22 14:03', or 10m for ten minutes ago. Default: now.",
)
@click.option(
    "--kind", type=click.Choice(["volume", "sla"]), help="Needed if a volume and an agreement have the name."
)
@DATA_OUTPUT
@pass_client
@watchable
def why(client: Client, name: str, moment: str | None, kind: str | None, output: str) -> None:
    """Say why a volume is throttled or an agreement at risk, now or at a time.

    What was promised, what the windows said, who used what, what was decided and what gateways confirmed.
    AGREEMENT/OBJECTIVE asks about one objective.
    """
    name, _, objective = name.partition("/")
    asked = {
        "kind": kind,
        "objective": objective or None,
        "at_us": None if moment is None else moment_us(moment, time.time_ns() // 1000),
    }
    query = {key: value for key, value in asked.items() if value is not None}
    answer = client.get(f"/why/{quote(name, safe='')}", **query)
    if output == "json":
        print_json(answer)
        return
    for line in lines_of(explain(answer["facts"], None)):
        click.echo(printable_lines(line))
