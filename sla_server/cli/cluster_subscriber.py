"""``sla cluster subscriber``: who a topic keeps messages for, and the end of one that does not come back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from pmdaemon.runtime.command_group import Commands
from sla_server.cli.cluster_node import ask, copies, resolved
from sla_server.cli.formatting import Column, build, console
from sla_server.cli.output import DATA_OUTPUT, print_json
from sla_server.explanation.words import plural

if TYPE_CHECKING:  # nats and asyncio's client, for the commands that ask nodes
    from sla_server.cluster.admin import Admin
    from sla_server.cluster.messages.subscribers import SubscriberRow

SUBSCRIBERS: Final = (
    Column("SUBSCRIBER", lambda row, _now_us: str(row["name"])),
    Column("RECEIVES", lambda row, _now_us: "yes" if row["is_receiving"] else "no"),
    Column("WAITING", lambda row, _now_us: f"{row['waiting']:,}", number=True),
    Column("IN HAND", lambda row, _now_us: f"{row['held']:,}", number=True),
)


@click.group(cls=Commands)
def subscriber() -> None:
    """Subscribers of topics: list, end.

    A topic keeps a message until each subscriber has acknowledged it, and refuses more when it is full.
    """


@subscriber.command("list")
@click.argument("topic")
@DATA_OUTPUT
def list_(topic: str, output: str) -> None:
    """List the subscribers of TOPIC, and what waits for each."""
    from sla_server.cluster import mirror_place
    from sla_server.cluster.messages import subscribers

    _, own, _ = resolved()

    async def found(admin: Admin) -> tuple[SubscriberRow, ...]:
        async with mirror_place.opened(admin, copies(own)) as (link, catalogue):
            return await subscribers.rows(link, catalogue, topic)

    rows = [asdict(row) for row in ask(found)]
    if output == "json":
        print_json({"subscribers": rows})
    else:
        console().print(build(SUBSCRIBERS, rows, 0))


@subscriber.command()
@click.argument("topic")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def end(topic: str, name: str, yes: bool) -> None:
    """Have TOPIC keep nothing more for the subscriber NAME, which does not come back.

    What only this one has not acknowledged is removed.
    """
    from sla_server.cluster import mirror_place
    from sla_server.cluster.messages import subscribers

    _, own, _ = resolved()  # before the question: here may be no node at all
    if not yes:
        click.confirm(f"Remove what {topic} keeps for {name} alone?", abort=True)

    async def ended(admin: Admin) -> SubscriberRow:
        async with mirror_place.opened(admin, copies(own)) as (link, catalogue):
            return await subscribers.end(link, catalogue, topic, name)

    row = ask(ended)
    click.echo(
        f"{name} subscribes to {topic} no more; {plural(row.waiting + row.held, 'message')} waited for it"
    )
