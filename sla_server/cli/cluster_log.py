"""``sla cluster log``: records of all nodes, in the order of their times."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli.cluster_node import ask
from sla_server.cli.moments import moment_us
from sla_server.cli.output import DATA_OUTPUT

if TYPE_CHECKING:
    from sla_server.cluster.admin import Admin
    from sla_server.cluster.log_spool import LogRecord


def _now_us() -> int:
    return time.time_ns() // 1000


@click.command()
@click.option("--since", default="1h", show_default=True, metavar="TIME", help="As 10m (ago), or 14:03.")
@click.option("--node", default="", metavar="NODE", help="Only this one's records.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@DATA_OUTPUT
def log(since: str, node: str, follow: bool, output: str) -> None:
    """Show log records of all nodes, merged by time, then node.

    While following, a record is held back for two seconds, so that one of another node that was made before
    it and comes after it has its place; one that comes later still is marked "late:".
    """
    from sla_server.cluster import log_stream

    since_us = moment_us(since, _now_us(), "--since")

    async def show(admin: Admin) -> None:
        client = await admin.client()
        async for record, is_late in log_stream.read(
            client, since_us, node=node, follow=follow, now_us=_now_us
        ):
            _print(record, is_late=is_late, output=output)

    ask(show)


def _print(record: LogRecord, *, is_late: bool, output: str) -> None:
    if output == "json":  # an object a line, as they come
        click.echo(json.dumps({**asdict(record), "is_late": is_late}))
    else:
        line = printable_lines(f"node={record.node} {record.line}")
        click.echo(f"{'late: ' if is_late else ''}{line}")
