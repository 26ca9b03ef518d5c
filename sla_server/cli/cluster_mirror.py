"""``sla cluster mirror``: asynchronous copies of destinations beyond those that the engine keeps together."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from pmdaemon.runtime.clock import SystemClock
from pmdaemon.runtime.command_group import Commands
from sla_server.cli import formatting
from sla_server.cli.cluster_node import ask, copies, resolved
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import Column, build, console
from sla_server.cli.output import DATA_OUTPUT, print_json

if TYPE_CHECKING:  # nats and asyncio's client, for the commands that ask nodes
    from sla_server.cluster.admin import Admin
    from sla_server.cluster.messages.mirror_promotion import Promotion
    from sla_server.cluster.messages.mirrors import MirrorRow

MIRRORS: Final = (
    Column("MIRROR", lambda row, _now_us: str(row["name"])),
    Column("OF", lambda row, _now_us: str(row["primary"])),
    Column("NODE", lambda row, _now_us: str(row["node"])),
    Column("MESSAGES", lambda row, _now_us: f"{row['messages']:,}", number=True),
    Column("STORED", lambda row, _now_us: formatting.size(row["stored_bytes"]), number=True),
    Column("HOW FAR", lambda row, _now_us: str(row["text"])),
)


@click.group(cls=Commands)
def mirror() -> None:
    """Asynchronous copies: make, remove, list, promote.

    A mirror is behind its primary, and says how far. Nothing waits for it, and it counts nowhere as a backup.
    """


@mirror.command()
@click.argument("destination")
@click.option(
    "--node", default="", metavar="NODE", help="Which is to have it; no primary or backup is there."
)
@click.option("--site", default="", metavar="SITE", help="Any such node of this site.")
def add(destination: str, node: str, site: str) -> None:
    """Make a mirror of DESTINATION, and of all others of its domain.

    Without --node and --site: on a node of another site than the primary's, if there is one.
    """
    from sla_server.cluster import mirror_place
    from sla_server.cluster.messages import mirrors

    if node and site:
        raise BadUsage("give --node or --site, not both")
    _, own, _ = resolved()

    async def make(admin: Admin) -> tuple[str, str]:
        async with mirror_place.opened(admin, copies(own)) as (link, catalogue):
            chosen = node or await mirror_place.find(admin, catalogue, destination, site)
            return chosen, await mirrors.add(link, catalogue, destination, chosen, SystemClock())

    chosen, name = ask(make)
    click.echo(f"{name} is an asynchronous copy of {destination} on {chosen}; it is no backup")


@mirror.command()
@click.argument("destination")
@click.option("--node", required=True, metavar="NODE", help="That has it.")
def remove(destination: str, node: str) -> None:
    """Remove the mirror of DESTINATION's domain on a node, with all that it has."""
    from sla_server.cluster import mirror_place
    from sla_server.cluster.messages import mirrors

    _, own, _ = resolved()

    async def unmake(admin: Admin) -> str:
        async with mirror_place.opened(admin, copies(own)) as (link, catalogue):
            return await mirrors.remove(link, catalogue, destination, node)

    click.echo(f"{ask(unmake)} was removed")


@mirror.command("list")
@DATA_OUTPUT
def list_(output: str) -> None:
    """List mirrors, and how far each is behind its primary."""
    rows = [mirror_json(row) for row in ask(lambda admin: admin.mirrors())]
    if output == "json":
        print_json({"mirrors": rows})
    else:
        console().print(build(MIRRORS, rows, 0))


@mirror.command()
@click.argument("destination")
@click.option("--node", required=True, metavar="NODE", help="That has the mirror.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def promote(destination: str, node: str, yes: bool) -> None:
    """Make the mirror of DESTINATION on a node its primary, as that is lost for good.

    Says first what is known to be missing. What was interrupted goes on when it is called again.
    """
    from sla_server.cluster import mirror_place
    from sla_server.cluster.messages import mirror_promotion

    _, own, _ = resolved()  # before the question: here may be no node at all

    def say(promotion: Promotion) -> None:
        for line in promotion.lines(SystemClock().unix_us()):
            click.echo(line)

    async def planned(admin: Admin) -> Promotion:
        async with mirror_place.opened(admin, copies(own)) as (link, catalogue):
            return await mirror_promotion.plan(link, catalogue, destination, node)

    async def made(admin: Admin) -> dict[str, Any]:
        async with mirror_place.opened(admin, copies(own)) as (link, catalogue):
            found = await mirror_promotion.plan(link, catalogue, destination, node)
            if yes:
                say(found)
            return await mirror_promotion.promote(link, catalogue, found, click.echo)

    if not yes:  # planned again after the answer, which may take minutes; each time a lost primary takes 15 s
        say(ask(planned))
        click.confirm(
            f"Is the primary of {destination} lost for good? What only it has is discarded if it comes back",
            abort=True,
        )
    info = ask(made)
    leader = (info.get("cluster") or {}).get("leader") or "this node"
    click.echo(f"{destination} is served by {leader}, with {info['state']['messages']:,} messages")


def mirror_json(row: MirrorRow) -> dict[str, Any]:
    """For programs: figures, and the text that people are shown."""
    return {**asdict(row), "kind": "asynchronous copy", "text": row.text}
