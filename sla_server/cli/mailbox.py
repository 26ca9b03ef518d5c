"""``sla mailbox dump``: what stands in the mailbox segments of this machine's server.

Reads the shared memory itself, read-only and without the server's help, so it also works when a part hangs
or has died. It must run as the server's user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from pmdaemon.mailbox import default_runtime_dir, describe
from sla_server import config as configuration
from sla_server.cli import formatting
from sla_server.cli.errors import BadUsage
from sla_server.cli.shared import OUTPUT, console, print_json
from sla_server.cli.tables import Column, build


def _figure(title: str, key: str, *, of_slots: bool = False) -> Column:
    return Column(title, lambda row, _now_us: str((row["slots"] if of_slots else row)[key]), number=True)


PARTICIPANTS: Final = (
    Column("NAME", lambda row, _now_us: str(row["name"])),
    Column("PID", lambda row, _now_us: _pid(row)),
    _figure("POSTS", "posts"),
    _figure("FULL", "full"),
    _figure("TAKES", "takes"),
    Column("LOOKS", lambda row, _now_us: _looks(row), number=True),  # slots looked at for one message taken
    _figure("RESETS", "resets"),
    _figure("READY", "ready", of_slots=True),
    _figure("TAKEN", "taken", of_slots=True),
    _figure("FREE", "free", of_slots=True),
)
ROUTES: Final = (
    Column("FROM", lambda row, _now_us: str(row["sender"])),
    Column("TO", lambda row, _now_us: str(row["recipient"])),
    _figure("WAITING", "messages"),
    Column("BYTES", lambda row, _now_us: formatting.count(row["bytes"]), number=True),
    Column("FULL", lambda row, _now_us: f"{row['fill_ratio']:.0%}", number=True),
)


@click.group()
def mailbox() -> None:
    """Look into the mailboxes between the server's processes."""


@mailbox.command()
@click.argument("segments", nargs=-1, type=click.Path(path_type=Path))
@OUTPUT
def dump(segments: tuple[Path, ...], output: str) -> None:
    """Show lists, slots, who holds what, look-ahead and fullness; of all segments found unless named."""
    found = [describe(path) for path in segments or _segments()]
    if output == "json":
        print_json(found)
        return
    for entry in found:
        _show(entry)


def _segments() -> list[Path]:
    """Those of the server that is configured; without a configuration also those of others of this user."""
    path: Path | None = click.get_current_context().find_root().params.get("config")
    places = {configuration.load(path).runtime_dir}
    if path is None:
        places.add(default_runtime_dir())
    found = {segment for place in places for segment in place.glob("**/*.mbx")}
    if not found:
        where = ", ".join(sorted(str(place) for place in places))
        raise BadUsage(
            f"no segment under {where}: no server was started there. "
            "Give --config (SLA_CONFIG) with the server's configuration, or name one (RUNTIME_DIR/main.mbx)"
        )
    return sorted(found)


def _pid(person: dict[str, Any]) -> str:
    return f"{person['pid']}{'' if person['attached'] else ' gone'}" if person["pid"] else formatting.DASH


def _looks(person: dict[str, Any]) -> str:
    looked = person["inspected_per_take"]
    return formatting.DASH if looked is None else f"{looked:.2f}"


def _show(entry: dict[str, Any]) -> None:
    """Two tables: the participants, and the routes that hold something."""
    owner = entry["owner"]
    running = "running" if owner["alive"] else "ended since"  # the next server takes the segment over
    click.echo(
        f"{entry['path']}: form {entry['form']}, layout {entry['layout_version']}, "
        f"{entry['total_bytes'] / (1 << 20):.1f} MiB, made by process {owner['pid']} ({running})"
        f"{', REPAIR PENDING' if entry['repair_pending'] else ''}{', DAMAGED' if entry['damaged'] else ''}"
    )
    console().print(build(PARTICIPANTS, entry["participants"], 0))
    if waiting := [route for route in entry["routes"] if route["messages"]]:
        console().print(build(ROUTES, waiting, 0))
    moving = [lane["sender"] for lane in entry["lanes"] if lane["moving"]]
    if moving:
        click.echo(f"changing while it was read, or damaged: {', '.join(moving)}")
