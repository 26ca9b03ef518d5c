"""``sla-server relay``: run a relay in the foreground; ``relay status`` says how it is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import click

from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import set_os_thread_name, watch
from sla_server.cli.main import CommandGroup
from sla_server.cli.output import DATA_OUTPUT, print_json

FRESH_S: Final = 15.0
CONFIG = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    envvar="SLA_RELAY_CONFIG",
    help="The relay's TOML file, or a folder with relay.toml and documents.",
)


class RelayCommands(CommandGroup):
    """Reports errors under the program's name."""

    program = "sla-server relay"


@click.group(cls=RelayCommands, invoke_without_command=True)
@CONFIG
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check file, documents and certificate, and exit.")
@click.pass_context
def relay(context: click.Context, path: Path | None, show_config: bool, check_config: bool) -> None:
    """Take a server's events at another site, keep them, and hand them on to many recipients.

    A webhook recipient of the server posts to it; docs/operations/relay.md.
    """
    context.obj = path
    if context.invoked_subcommand is not None:
        return
    from sla_server.relay import config as configuration
    from sla_server.relay.process import check, run

    config = configuration.load(_required(context, path))
    if show_config:
        click.echo(files.show(config), nl=False)
        return
    if check_config:
        check(config)
        click.echo("configuration is good")
        return
    logs.configure("relay")
    set_os_thread_name("sla-relay")
    stop = Stop()
    stop.install_signals()
    stop.watch_parent()
    watch(stop)
    raise SystemExit(run(config, stop))


@relay.command()
@CONFIG
@DATA_OUTPUT
@click.pass_context
def status(context: click.Context, path: Path | None, output: str) -> None:
    """Say whether the relay runs, what it was sent, and how its recipients are.

    Ends with status 0 if all is well, 1 if something is in trouble, 69 if no relay runs.
    """
    from sla_server import directories
    from sla_server.errors import RelayNotRunning
    from sla_server.relay import config as configuration

    config = configuration.load(_required(context, path or context.obj))
    pid = directories.running_pid(config.data_dir)
    if pid is None:
        raise RelayNotRunning(config.data_dir)
    metrics = config.runtime_dir / "metrics"
    found, delivery = _read(metrics / "relay.json"), _read(metrics / "delivery.json")
    if found is None or delivery is None:
        raise RelayNotRunning(config.data_dir, f"process {pid} has not said for {FRESH_S:g} s how it is")
    troubles = _troubles(found, delivery)
    if output == "json":
        print_json({"pid": pid, "is_well": not troubles, "troubles": troubles, **found, **delivery})
    else:
        _print(pid, found, delivery, troubles)
    if troubles:
        raise SystemExit(1)


def _required(context: click.Context, path: Path | None) -> Path:
    if path is None:
        raise click.UsageError("--config is missing: the relay's file, or its folder", context)
    return path


def _read(path: Path) -> dict[str, Any] | None:
    """A state file that was written just now; None without one."""
    try:
        if time.time() - path.stat().st_mtime > FRESH_S:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _troubles(found: dict[str, Any], delivery: dict[str, Any]) -> list[str]:
    lines = [
        f"recipient {row['name']} does not confirm: {row['last_answer']}"
        for row in delivery["recipients"]
        if row["state"] == "failing"
    ]
    if found["is_filling"]:
        lines.append("the queue of events is nearly full")
    if found["has_wrong_documents"]:
        lines.append("documents are wrong, those of before are in force: the log says which")
    return lines


def _print(pid: int, found: dict[str, Any], delivery: dict[str, Any], troubles: list[str]) -> None:
    from sla_server.cli import formatting
    from sla_server.cli.notifications import KINDS

    way = "TLS" if found["is_tls"] else "without TLS"
    lines = [f"running, pid {pid}, listening on {found['listen']} ({way}), confirms on {found['confirm']}"]
    for row in found["senders"]:
        newest = formatting.when(row["last_us"]) if row["last_us"] else "nothing since the start"
        counts = (
            f"{row['taken']:,} events, {row['repeated']:,} repeated, {row['confirmed']:,} posts confirmed"
        )
        lines.append(f"  from {row['name']}: {counts}; newest: {newest}")
    refused = {key: count for key, count in found["answers"].items() if key != "200"}
    if refused:
        lines.append(
            "  answers other than 200: " + ", ".join(f"{k}: {n:,}" for k, n in sorted(refused.items()))
        )
    lines.append(
        f"  queue {delivery['queue_fullness'].get('main', 0):.0%} full, {delivery['later']:,} for later"
    )
    lines += [f"  in trouble: {text}" for text in troubles]
    click.echo(printable_lines("\n".join(lines)))
    rows = [
        {"name": row["name"], "recipient_kind": row["kind"], "delivery": row}
        for row in delivery["recipients"]
    ]
    kind, now_us = KINDS["recipients"], round(time.time() * 1e6)
    if rows:
        formatting.console().print(formatting.build(kind.columns, rows, now_us))
