"""``sla audit``: the log of changes, whether it is whole, and a copy of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from pmdaemon.runtime.command_group import Commands
from sla_server.audit_chain import ChainCheck
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, CliError
from sla_server.cli.formatting import OUTPUT, Column, build, console, pass_client, print_json
from sla_server.cli.moments import moment_us
from sla_server.cli.system_tables import at, plain
from sla_server.rows import Row

_COLUMNS: Final = (
    Column("WHEN", at("at_us")),
    Column("WHO", plain("who")),
    Column("ACTION", plain("action")),
    Column("OF", plain("subject")),
)
_HEAD: Final = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")


def _rows(client: Client) -> Iterator[Row]:
    """The log in the order of its chain, page by page."""
    after = "0"
    while True:
        page = client.ask("/audit/chain", after=after)
        yield from page["items"]
        if page["next"] is None:
            return
        after = page["next"]


@click.group(cls=Commands)
def audit() -> None:
    """The log of who changed what: list it, verify that it is whole, and export it."""


@audit.command("list")
@click.option("--about", metavar="TEXT", help="Those with this text in person, action or subject.")
@click.option(
    "--action", metavar="PATTERN", help="Of these actions; several with commas, * matches anything."
)
@click.option("--who", metavar="PATTERN", help="By these; several with commas, * matches anything.")
@click.option("--since", metavar="TIME", help="Only since then: 2h, 14:03, '2026-11-22 14:03'.")
@click.option("--sort", help="newest (default), oldest, who, action or subject.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many.")
@OUTPUT
@pass_client
def list_rows(
    client: Client,
    about: str | None,
    action: str | None,
    who: str | None,
    since: str | None,
    sort: str | None,
    limit: int,
    output: str,
) -> None:
    """List who changed what, the newest first."""
    query: Row = {"match": about, "action": action, "who": who, "sort": sort}
    query["from_us"] = None if since is None else moment_us(since, time.time_ns() // 1000, "--since")
    asked = {key: value for key, value in query.items() if value is not None}
    rows = client.get("/audit", limit=limit, **asked)["items"]
    if output == "json":
        print_json(rows)
    elif not rows:
        click.echo("No entry fits what is asked for." if asked else "Nothing was changed yet.")
    else:
        console().print(build(_COLUMNS, rows, time.time_ns() // 1000))


@audit.command()
@click.option(
    "--head", metavar="SEQ:DIGEST", help="Head of an earlier verification, which must still be there."
)
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="An exported file instead of the server's log.",
)
@pass_client
def verify(client: Client, head: str | None, path: Path | None) -> None:
    """Compute all digests of the log again, and say where it is not what was recorded.

    Prints the head of the chain. Note it elsewhere and give it as --head the next time: then nobody can have
    made the whole chain again meanwhile, nor cut off its end.
    """
    wanted: tuple[int, str] | None = None
    if head is not None:
        found = _HEAD.fullmatch(head)
        if found is None:
            raise BadUsage(f"--head {head}: give what verify printed, NUMBER:DIGEST")
        wanted = int(found[1]), found[2]
    check, digest = ChainCheck(), None
    for row in _rows(client) if path is None else _lines(path):
        try:
            check.add(row)
        except (KeyError, TypeError) as exc:
            raise BadUsage(f"{path or 'the answer'}: a row is no row of the audit log ({exc})") from exc
        if wanted is not None and row["seq"] == wanted[0]:
            digest = str(row["digest"])
    if problems := check.end(wanted, head_found=digest):
        raise CliError("\n  ".join(["the audit log is not what was recorded", *problems]))
    click.echo(f"{check.rows} rows, nothing changed\nhead {check.seq}:{check.digest}")


def _lines(path: Path) -> Iterator[Row]:
    try:
        with path.open() as stream:
            for line in stream:
                row: Row = json.loads(line)
                yield row
    except (OSError, ValueError) as exc:
        raise BadUsage(f"--file {path}: no export of the audit log ({exc})") from exc


@audit.command()
@click.option(
    "-f", "--file", "path", type=click.Path(path_type=Path), help="Into this new file, not the output."
)
@pass_client
def export(client: Client, path: Path | None) -> None:
    """Write the log as JSON lines, with places and digests, oldest first; verify --file checks it."""
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(client))
    if path is None:
        for line in rows:
            click.echo(line, nl=False)
        return
    try:
        with path.open("x") as stream:
            stream.writelines(rows)
    except OSError as exc:
        raise BadUsage(f"--file {path}: {exc.strerror}; name a new file") from exc
    click.echo(f"written to {path}")
