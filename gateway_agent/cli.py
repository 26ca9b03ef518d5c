"""``gateway-agent``: the command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gateway_agent import agent
from gateway_agent.config import AgentConfig
from gateway_agent.nbd.storage import Storage
from pmdaemon.errors import SlaError
from pmdaemon.runtime import config as configuration
from pmdaemon.runtime import logs


@click.group()
@click.version_option(package_name="storage-sla-server")
def cli() -> None:
    """Serve block volumes to applications and keep count of every I/O for the SLA server."""


@cli.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Say whether the configuration is valid and exit.")
def run(path: Path, show_config: bool, check_config: bool) -> None:
    """Run the agent in the foreground: its data planes and its link to the SLA server."""
    try:
        logs.configure("gateway-agent")
        config = configuration.load(AgentConfig, path, prefix=configuration.AGENT_ENV_PREFIX)
        if show_config:
            click.echo(configuration.show(config), nl=False)
        elif check_config:
            check_files(config)
            click.echo(f"{path}: valid; {len(config.plane)} data planes, {len(config.export)} volumes")
        else:
            agent.run(config)
    except SlaError as exc:
        click.echo(f"gateway-agent: {exc}", err=True)
        sys.exit(exc.exit_status)


def check_files(config: AgentConfig) -> None:
    """See that every file of file mode can be served as its export says. Opens and closes them, no more.

    Raises:
        BackingFileError: the first that cannot.
    """
    for export in config.export:
        if export.file is not None:
            Storage(export.volume, export.file, read_only=export.read_only).close()
