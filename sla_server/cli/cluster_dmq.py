"""``sla cluster dmq``: messages that were not delivered, with their origin and the reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.cluster_node import ask, resolved
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import Column, build, console
from sla_server.cli.output import DATA_OUTPUT, print_json

if TYPE_CHECKING:
    from sla_server.cluster.admin import Admin
    from sla_server.cluster.dead_messages import DeadMessage

MOST_LISTED: Final = 100
MESSAGES: Final = (
    Column("MESSAGE", lambda row, _now_us: str(row["sequence"]), number=True),
    Column("SINCE", lambda row, _now_us: str(row["at"])),
    Column("ORIGIN", lambda row, _now_us: str(row["origin"])),
    Column("SIZE", lambda row, _now_us: formatting.size(row["size_bytes"]), number=True),
    Column("REASON", lambda row, _now_us: str(row["reason"])),
)
ORIGIN = click.option("--origin", default="", metavar="DESTINATION", help="Those of this destination.")


@click.group(cls=Commands)
def dmq() -> None:
    """Dead messages: list, show, send to their origin again, drop."""


@dmq.command("list")
@ORIGIN
@click.option("--limit", default=MOST_LISTED, show_default=True, type=click.IntRange(1), help="At most.")
@click.option("--after", default=0, metavar="MESSAGE", help="Those behind this one.")
@DATA_OUTPUT
def list_(origin: str, limit: int, after: int, output: str) -> None:
    """List dead messages, the oldest first."""
    rows = [_row(message) for message in ask(lambda admin: _found(admin, origin, after, limit + 1))]
    if output == "json":
        print_json({"messages": rows[:limit], "has_more": len(rows) > limit})
        return
    console().print(build(MESSAGES, rows[:limit], 0))
    if len(rows) > limit:
        click.echo(f"there are more: --after {rows[limit - 1]['sequence']}")


@dmq.command()
@click.argument("message", type=click.IntRange(1))
@DATA_OUTPUT
def show(message: int, output: str) -> None:
    """Show MESSAGE whole: origin, reason, headers and content."""
    from sla_server.cluster import dead_messages

    async def get(admin: Admin) -> DeadMessage:
        return await dead_messages.get(await admin.client(), message)

    found = ask(get)
    text = found.data.decode(errors="backslashreplace")
    if output == "json":
        print_json(asdict(found) | {"data": text})
        return
    for name in ("sequence", "at", "origin", "reason", "identity"):
        click.echo(f"{name:9} {printable_lines(str(getattr(found, name)))}")
    for key, value in sorted(found.headers.items()):
        click.echo(f"header    {printable_lines(f'{key}: {value}')}")
    click.echo(f"\n{printable_lines(text)}")


@dmq.command()
@click.argument("messages", metavar="MESSAGE...", nargs=-1, type=click.IntRange(1))
@ORIGIN
def requeue(messages: tuple[int, ...], origin: str) -> None:
    """Send each MESSAGE, or all of an origin, to its origin again, and remove it here."""
    from sla_server.cluster import dead_messages

    async def send(admin: Admin) -> None:
        client = await admin.client()
        for sequence in await _meant(admin, messages, origin):
            message = await dead_messages.requeue(client, sequence)
            click.echo(f"message {sequence} was sent to {message.origin} again")

    ask(send)


@dmq.command()
@click.argument("messages", metavar="MESSAGE...", nargs=-1, type=click.IntRange(1))
@ORIGIN
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop(messages: tuple[int, ...], origin: str, yes: bool) -> None:
    """Remove each MESSAGE, or all of an origin, for good."""
    from sla_server.cluster import dead_messages

    resolved()  # before the question: here may be no node at all
    if not yes:
        click.confirm(
            f"Remove {', '.join(map(str, messages)) or f'all messages of {origin}'} for good?", abort=True
        )

    async def remove(admin: Admin) -> None:
        client = await admin.client()
        for sequence in await _meant(admin, messages, origin):
            await dead_messages.drop(client, sequence)
            click.echo(f"message {sequence} was removed")

    ask(remove)


async def _found(admin: Admin, origin: str, after: int, limit: int) -> list[DeadMessage]:
    from sla_server.cluster import dead_messages

    found = []
    async for message in dead_messages.find(await admin.client(), origin=origin, after=after):
        found.append(message)
        if len(found) >= limit:
            break
    return found


async def _meant(admin: Admin, messages: tuple[int, ...], origin: str) -> list[int]:
    """The messages named, or those of the origin that are there now."""
    from sla_server.cluster import dead_messages

    if bool(messages) == bool(origin):
        raise BadUsage("give either messages, or --origin DESTINATION for all of one")
    if messages:
        return list(messages)
    client = await admin.client()
    return [message.sequence async for message in dead_messages.find(client, origin=origin)]


def _row(message: DeadMessage) -> dict[str, Any]:
    return {
        "sequence": message.sequence,
        "at": message.at,
        "origin": message.origin,
        "reason": message.reason,
        "identity": message.identity,
        "size_bytes": len(message.data),
    }
