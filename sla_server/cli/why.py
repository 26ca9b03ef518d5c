"""``sla why``: why a volume is throttled, or an agreement at risk, now or then.

The server answers with facts and a text in UTC; the text shown here is made from the same facts in this
machine's time zone (``sla_server.explanation``), 80 columns wide.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import DATA_OUTPUT, WIDTH, duration_s, pass_client, print_json
from sla_server.explanation import Explanation, explain

TITLE: Final = 14
"""Columns of the titles."""
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?[smhd])(?: ago)?")
_TIME_OF_DAY: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")


def moment_us(text: str, now_us: int) -> int:
    """A time of this machine's zone, or of the zone it names, as microseconds UTC.

    Args:
        text: ``14:03`` or ``14:03:22`` (the last time it was that), ``2026-11-22 14:03``, ISO 8601, or
            ``10m`` (that long ago).
        now_us: the time now.

    Raises:
        BadUsage: anything else, or a time ahead of now.
    """
    text = text.strip()
    if ago := _AGO.fullmatch(text):
        try:
            return max(0, now_us - round(duration_s(ago[1]) * 1e6))
        except BadUsage as exc:
            raise BadUsage(f"--at: {exc}") from exc
    now = datetime.fromtimestamp(now_us / 1e6).astimezone()
    try:
        if _TIME_OF_DAY.fullmatch(text):
            at = datetime.fromisoformat(f"{now.date()} {text if text[2] == ':' else '0' + text}")
            at = at if at.astimezone() <= now else at - timedelta(days=1)
        else:
            at = datetime.fromisoformat(text)
        at_us = round(at.astimezone().timestamp() * 1e6)
    except (ValueError, OverflowError, OSError) as exc:
        raise BadUsage(
            f"--at: {text[:40]!r} is no time.\n"
            "  Write 14:03, '2026-11-22 14:03', 2026-11-22T14:03:00+01:00, or 10m (ago)"
        ) from exc
    if at_us > now_us:
        shown = now.isoformat(" ", "seconds")
        raise BadUsage(f"--at: {text[:40]!r} lies ahead of now, {shown}. Give a time that has passed")
    if at_us < 0:
        raise BadUsage(f"--at: {text[:40]!r} lies before 1970-01-01, where times begin. Give a later one")
    return at_us


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
@click.argument("name", metavar="VOLUME|AGREEMENT")
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
