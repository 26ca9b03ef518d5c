"""``sla audit``: whether the log of changes is whole, and a copy of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from sla_server.audit_chain import ChainCheck
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, CliError
from sla_server.cli.formatting import pass_client
from sla_server.rows import Row

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


@click.group()
def audit() -> None:
    """The log of who changed what: verify that it is whole, and export it."""


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
