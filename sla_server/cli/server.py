"""``sla-server start | status | stop``: the server as an operator handles it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from pmdaemon.errors import ConfigError
from pmdaemon.pki.authority import Authority
from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.sockets import open_listener
from pmdaemon.runtime.stop import Stop
from sla_server import config as configuration
from sla_server import directories
from sla_server.api.config import split_address
from sla_server.cli import group
from sla_server.cli.status import another_at, connected, look, page_of
from sla_server.directories import leave_runtime_dir, prepare_runtime_dir
from sla_server.errors import ServerNotRunning, ServerRunning
from sla_server.supervisor import Supervisor
from sla_server.topology import app_layout, later_pairs, main_layout

CONFIG = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's TOML file (default: built-in values, data in ./sla-data).",
)
READY_LIMIT_S = 60.0
LOOK_S = 0.5  # each look makes a client of its own, which costs more than the question
EX_TEMPFAIL = 75
LEFTOVER_LIMIT_S = 5.0  # parts whose supervisor was killed end within this


class ServerCommands(group.CommandGroup):
    """Tells errors as this program's."""

    program = "sla-server"


@click.group(cls=ServerCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="storage-sla-server")
def cli() -> None:
    """The SLA server: keeps latency promises on shared block storage."""


@cli.command()
@CONFIG
@click.option(
    "--background", is_flag=True, help="Return when all parts are ready; log to DATA_DIR/server.log."
)
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check the file and exit.")
def start(path: Path | None, background: bool, show_config: bool, check_config: bool) -> None:
    """Start the server (in the foreground unless --background)."""
    config = configuration.load(path)
    if config.pmdaemon.tls.enabled and not show_config:
        Authority(config.ca_dir).fingerprint()  # or say how to make one
    if check_config:
        click.echo("configuration is good")
        return
    if show_config:
        click.echo(files.show(config), nl=False)
        click.echo(mailbox_sizes(config))
        return
    if (pid := directories.running_pid(config.data_dir)) is not None:
        raise ServerRunning(config.data_dir, pid)
    prepare_runtime_dir(config.runtime_dir)
    try:
        check_addresses(config)
        _check_room(config)
        directories.prepare_data_dir(config.data_dir)
        for note in config.runtime_dir.glob("*.failed"):  # of a former run
            note.unlink()
        if background:
            _start_in_background(config, path)
            return
        logs.configure("supervisor")
        stop = Stop()
        stop.install_signals()
        stop.watch_parent()
        status = Supervisor(config, path.absolute() if path else None, stop).run()
    finally:
        leave_runtime_dir(config.runtime_dir)
    raise SystemExit(status)


def mailbox_sizes(config: configuration.ResolvedConfig) -> str:
    """What the mailbox segments take, as a comment line."""
    pairs = config.pmdaemon.most_pairs
    layout, app_bytes = main_layout(pairs), app_layout().total_bytes
    now, most = layout.reserved_bytes(later_pairs(pairs)) + app_bytes, layout.total_bytes + app_bytes
    return (
        f"# mailbox segments: {now / (1 << 20):.0f} MiB of shared memory under {config.runtime_dir} with one "
        f"pair, {most / (1 << 20):.0f} MiB with {pairs}, the most; each is reserved when it is started"
    )


def check_addresses(config: configuration.ResolvedConfig) -> None:
    """See that the server's ports can be had, before parts are started that would only try again and again.

    The port files are removed by an orderly stop. Where one is left, the parts of a server that was killed
    may still be ending, so their ports are waited for.

    Raises:
        ConfigError: one is taken; names port and setting.
    """
    for setting, (host, port), left in (
        ("api.listen", split_address(config.api.listen), "api.port"),
        ("pmdaemon.listen", parse_address(config.pmdaemon.listen), "pmdaemon.port"),
    ):
        deadline = Deadline(LEFTOVER_LIMIT_S if (config.runtime_dir / left).exists() else 0)
        while True:
            try:
                open_listener(setting, host, port).close()
                break
            except ConfigError:
                if deadline.passed:
                    raise
            time.sleep(0.1)


def _check_room(config: configuration.ResolvedConfig) -> None:
    from sla_server.db.ingest.queue import check_room  # numpy and the queue, for this one look

    check_room(config.database.resolved_queue_dir(config.data_dir), config.database.queue_bytes)


def _start_in_background(config: configuration.ResolvedConfig, path: Path | None) -> None:
    """Start the server as a process of its own and wait until all of it is ready."""
    (config.runtime_dir / "api.port").unlink(missing_ok=True)
    command = [sys.executable, "-m", "sla_server", "start"]
    if path:
        command += ["--config", str(path.absolute())]
    log_path = config.data_dir / "server.log"
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, start_new_session=True
        )
    deadline = Deadline(READY_LIMIT_S)
    while True:
        with connected(config, path) as client:
            found = look(config, client, process.pid)
            page = page_of(client) if found.is_ready else ""
        if found.is_ready:
            break
        ended = process.poll()
        if ended is not None or deadline.passed:
            what = (
                "did not start"
                if ended is not None
                else f"is not ready after {READY_LIMIT_S:g} s and goes on trying (pid {process.pid}); "
                "'sla-server status' says more"
            )
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-5:])
            reasons = "".join(f"{line}\n" for line in found.troubles())
            said = printable_lines(f"{reasons}the end of {log_path}:\n{tail}")
            click.echo(f"sla-server: {what}\n{said}", err=True)
            raise SystemExit(EX_TEMPFAIL if ended is None else max(ended, 1))
        time.sleep(LOOK_S)
    click.echo(f"server started (pid {process.pid}), page: {page}")


@cli.command()
@CONFIG
@click.option(
    "-o", "output", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
def status(path: Path | None, output: str) -> None:
    """Say whether the server runs, its processes, its page, and what is in trouble.

    Ends with status 0 if all is well, 1 if something is in trouble, 69 if no server runs.
    """
    config = configuration.load(path)
    pid = directories.running_pid(config.data_dir)
    if pid is None:
        raise ServerNotRunning(config.data_dir, another_at(config.api.listen))
    with connected(config, path) as client:
        found, page = look(config, client, pid), page_of(client)
    if output == "json":
        click.echo(json.dumps({"pid": pid, "page": page, "is_well": found.is_well, **asdict(found)}))
    else:
        lines = "\n".join(found.lines())
        click.echo(f"running, pid {pid}, page {page}\n{printable_lines(lines)}")
    if not found.is_well:
        raise SystemExit(1)


@cli.command()
@CONFIG
@click.option("--limit", "limit_s", default=60.0, help="Seconds to wait for an orderly stop.")
def stop(path: Path | None, limit_s: float) -> None:
    """Stop the server in order and wait until it is gone."""
    config = configuration.load(path)
    pid = directories.running_pid(config.data_dir)
    if not pid:
        raise ServerNotRunning(config.data_dir)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # it has just ended by itself
        pass
    except PermissionError as exc:
        raise ConfigError(
            "data_dir", f"its server, process {pid}, belongs to another user", "Run this as that user"
        ) from exc
    if not directories.wait_stopped(config.data_dir, limit_s):
        click.echo(f"sla-server: still running after {limit_s:g} s; see its log, or kill {pid}", err=True)
        raise SystemExit(1)
    click.echo("server stopped")
