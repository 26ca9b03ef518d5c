"""What commands of ``sla cluster`` share: this machine's node, and questions that it puts to the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from sla_server import config as configuration
from sla_server.cli.errors import BadUsage
from sla_server.cluster import membership
from sla_server.cluster.config import ClusterConfig

if TYPE_CHECKING:  # nats and asyncio's client, for the commands that ask nodes
    from sla_server.cluster.admin import Admin
    from sla_server.cluster.commands import Answers, NodeAnswer

Answer = TypeVar("Answer")


def resolved() -> tuple[configuration.ResolvedConfig, ClusterConfig, Path]:
    """The server's configuration, its table [cluster], and the node's directory.

    Raises:
        BadUsage: there is no such table.
    """
    path: Path | None = click.get_current_context().find_root().params.get("config")
    config = configuration.load(path)
    if config.cluster is None:
        raise BadUsage(
            f"{path or 'the configuration'} has no table [cluster]. Give the server's file with sla --config "
            "FILE; docs/operations/cluster.md has an example of the table"
        )
    return config, config.cluster, config.cluster.directory(config.data_dir)


def ask(question: Callable[[Admin], Awaitable[Answer]]) -> Answer:
    """Put a question to the cluster, as this machine's node."""
    from sla_server.cluster.admin import Admin

    _, config, directory = resolved()
    member = membership.load(config, directory)

    async def asked() -> Answer:
        async with Admin(config, member) as admin:
            return await question(admin)

    return asyncio.run(asked())


def print_answers(answers: Answers, text: Callable[[NodeAnswer], str]) -> None:
    """A line a node, and how many answered of how many."""
    for answer in answers.rows:
        click.echo(f"  {answer.node}: {answer.problem or text(answer)}")
    click.echo(f"{len(answers.rows)} of {answers.expected} nodes answered")


def copies(config: ClusterConfig) -> int:
    """Of a stream that this node makes: not more than there are nodes."""
    return min(config.replicas, len(config.peers) + 1)
