"""One part of the server as a process: ``python -m sla_server.process services --config FILE``.

The supervisor starts the parts this way, forked from a process that has made their heavy imports; systemd can
run each alone the same way, and then it imports what it needs itself. Why a part ended by itself is noted
(``runtime.failures``).
"""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import contextlib
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Final

import click
import structlog

from pmdaemon.reserve import attach_reserves
from pmdaemon.runtime import config as files
from pmdaemon.runtime import exit_status, logs
from pmdaemon.runtime.clock import server_clock
from pmdaemon.runtime.entry import PRIVATE_UMASK
from pmdaemon.runtime.failures import failure_recorded, outermost, record_failure
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import set_os_thread_name, watch
from sla_server import config as configuration

MODULES: Final = {
    "delivery": "sla_server.events.delivery",
    "services": "sla_server.services.process",
    "dbmanager": "sla_server.db.process",
    "appserver": "sla_server.api.server",
    "cluster": "sla_server.cluster.process",
    "standby": "sla_server.standby.process",
}
log = structlog.get_logger("part")


def _show_config(path: Path | None, show: bool) -> None:
    with outermost("sla-server"):
        config = configuration.load(path)
    click.echo(files.show(config) if show else "configuration is good", nl=not show)


def _run(name: str, config: configuration.ResolvedConfig, stop: Stop) -> int:
    with failure_recorded(config.runtime_dir, name):
        if name != "delivery":  # which makes the directory first
            attach_reserves(name)
        with _log_copied(name, config):
            return int(importlib.import_module(MODULES[name]).run(config, stop=stop))


def _log_copied(name: str, config: configuration.ResolvedConfig) -> contextlib.AbstractContextManager[None]:
    """For ``_LOG`` of the cluster; the process of the node does it itself."""
    if config.cluster is None or name == "cluster":
        return contextlib.nullcontext()
    from sla_server.cluster.log_spool import copied

    return copied(config.cluster.directory(config.data_dir), server_clock())


@click.command()
@click.argument("name", type=click.Choice(sorted(MODULES)))
@click.option(
    "--config", "path", type=click.Path(path_type=Path), envvar="SLA_CONFIG", help="The server's TOML file."
)
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check the file and exit.")
def main(name: str, path: Path | None, show_config: bool, check_config: bool) -> None:
    """Run one part of the server in the foreground until SIGTERM."""
    if show_config or check_config:
        _show_config(path, show_config)
        return
    os.umask(PRIVATE_UMASK)
    logs.configure(name)
    set_os_thread_name(f"sla-{name}")
    stop = Stop()
    stop.install_signals()
    stop.watch_parent()
    try:
        with outermost(f"sla-{name}", lambda text: log.error("part-failed", error=text)):
            config = configuration.load(path)
            watch(stop, functools.partial(record_failure, config.runtime_dir, name))
            status = _run(name, config, stop)
    except SystemExit as exc:
        status = int(exc.code or 0)
    # Daemon threads of libraries must not delay the exit: everything of ours is stopped and synced by now.
    sys.stdout.flush()
    sys.stderr.flush()
    exit_status.report(status)
    os._exit(status)


if __name__ == "__main__":
    main()
