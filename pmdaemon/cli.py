"""``pmdaemon run``: the daemon in the foreground. ``pmdaemon pair`` is what it starts itself."""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import contextlib
import functools
import sys
from pathlib import Path
from typing import Final

import click
import structlog

from pmdaemon.poller import config as configuration
from pmdaemon.poller import pair as pair_process
from pmdaemon.poller.parent import Daemon
from pmdaemon.reserve import attach_reserves
from pmdaemon.runtime import logs
from pmdaemon.runtime.children import restarts_of_this_process
from pmdaemon.runtime.config import show
from pmdaemon.runtime.failures import failure_recorded, outermost, record_failure
from pmdaemon.runtime.open_files import raise_open_files
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.template import Template
from pmdaemon.runtime.threads import set_os_thread_name, watch

log = structlog.get_logger("pmdaemon")
IMPORTED: Final = ("pmdaemon.cli",)
"""By the template of the pairs: nothing that this process has not imported."""
_config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's TOML file; the daemon reads runtime_dir, data_dir and [pmdaemon].",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="storage-sla-server")
def cli() -> None:
    """Performance-monitor daemon: the one process that talks to gateway agents."""


@cli.command()
@_config_option
@click.option("--show-config", is_flag=True, help="Print the values in force as TOML and stop.")
@click.option("--check-config", is_flag=True, help="Check the file and stop.")
def run(path: Path | None, show_config: bool, check_config: bool) -> None:
    """Run the daemon until SIGTERM."""
    with outermost("pmdaemon"):
        config = configuration.load(path)
        if show_config:
            click.echo(show(config), nl=False)
            return
        if check_config:
            click.echo("configuration is valid")
            return
    template = Template(IMPORTED)
    template.fork(has_session=False)
    with outermost("pmdaemon"), contextlib.closing(template):
        logs.configure("pmdaemon")
        set_os_thread_name("pmdaemon")
        stop = Stop()
        stop.install_signals()
        stop.watch_parent()
        with failure_recorded(config.runtime_dir, "pmdaemon"):
            watch(stop, functools.partial(record_failure, config.runtime_dir, "pmdaemon"))
            attach_reserves("pmdaemon")
            raise_open_files(config.pmdaemon.open_files)
            status = Daemon(config, path, stop, template=template).run()
    sys.exit(status)


@cli.command(hidden=True)
@_config_option
@click.option("--index", type=click.IntRange(0, 255), required=True, help="Number of the pair.")
@click.option("--control-fd", type=int, required=True, help="Inherited end of the control socket.")
def pair(path: Path | None, index: int, control_fd: int) -> None:
    """Run one pair; started by ``pmdaemon run``."""
    with outermost(f"pmdaemon pair {index}"):
        config = configuration.load(path)
        logs.configure(f"pair-{index}")
        raise_open_files(config.pmdaemon.open_files)
        set_os_thread_name(f"pm-pair-{index}")
        stop = Stop()
        stop.install_signals()
        stop.watch_parent()
        watch(stop)
        status = pair_process.run(config, index, control_fd, stop, *restarts_of_this_process())
    sys.exit(status)
