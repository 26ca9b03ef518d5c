"""``sla``: the command line of those who make agreements and keep an eye on them."""

from __future__ import annotations

from pathlib import Path

import click

from sla_server.cli.ca import ca
from sla_server.cli.change import apply, delete, login, mode, throttle
from sla_server.cli.client import Client
from sla_server.cli.gateways import gateways
from sla_server.cli.get import get
from sla_server.cli.mailbox import mailbox
from sla_server.cli.policy import policy
from sla_server.cli.queue import queue
from sla_server.cli.shared import Group, keep_logs_apart
from sla_server.cli.storage import storage
from sla_server.cli.top import top


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--server", envvar="SLA_SERVER", metavar="URL", help="The SLA server [http://127.0.0.1:8411].")
@click.option("--token-file", type=click.Path(path_type=Path), help="Token for changes [DATA_DIR/api.token].")
@click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's configuration: where its token and address are found.",
)
@click.version_option(package_name="storage-sla-server")
@click.pass_context
def cli(context: click.Context, server: str | None, token_file: Path | None, config: Path | None) -> None:
    """Keep latency promises on shared block storage.

    First steps: sla top (watch), sla apply -f agreement.yaml (promise), sla mode enforce (keep it).
    """
    keep_logs_apart()
    context.obj = context.obj or Client.find(server, token_file, config)


for command in (
    apply,
    get,
    delete,
    throttle,
    mode,
    gateways,
    policy,
    queue,
    storage,
    mailbox,
    ca,
    top,
    login,
):
    cli.add_command(command)

if __name__ == "__main__":
    cli()
