"""``sla mailbox dump``: what stands in the mailbox segments of this machine's server.

Reads the shared memory itself, read-only and without the server's help, so it also works when a part hangs
or has died. It must run as the server's user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pmdaemon.mailbox import default_runtime_dir, describe
from sla_server.cli.errors import BadUsage
from sla_server.cli.shared import OUTPUT, console, print_json

_HEADINGS = ("name", "pid", "posts", "full", "takes", "insp/take", "resets", "ready", "taken", "free")


@click.group()
def mailbox() -> None:
    """Look into the mailboxes between the server's processes."""


@mailbox.command()
@click.argument("segments", nargs=-1, type=click.Path(path_type=Path))
@OUTPUT
def dump(segments: tuple[Path, ...], output: str) -> None:
    """Show lists, slots, who holds what, look-ahead and fullness; of all segments found unless named."""
    paths = segments or tuple(sorted(default_runtime_dir().glob("**/*.mbx")))
    if not paths:
        raise BadUsage(f"no segment under {default_runtime_dir()}; name one (RUNTIME_DIR/main.mbx)")
    found = [describe(path) for path in paths]
    if output == "json":
        print_json(found)
        return
    for entry in found:
        _show(entry)


def _show(entry: dict[str, Any]) -> None:
    """Two tables: the participants, and the routes that hold something."""
    owner = entry["owner"]
    running = "running" if owner["alive"] else "GONE"
    click.echo(
        f"{entry['path']}: form {entry['form']}, layout {entry['layout_version']}, "
        f"{entry['total_bytes'] / (1 << 20):.1f} MiB, made by process {owner['pid']} ({running})"
        f"{', REPAIR PENDING' if entry['repair_pending'] else ''}"
    )
    people = Table(*_HEADINGS)
    for person in entry["participants"]:
        slots, per_take = person["slots"], person["inspected_per_take"]
        pid = f"{person['pid']}{'' if person['attached'] else ' gone'}" if person["pid"] else "-"
        figures = (person["posts"], person["full"], person["takes"])
        people.add_row(
            person["name"],
            pid,
            *map(str, figures),
            "-" if per_take is None else f"{per_take:.2f}",
            *(str(value) for value in (person["resets"], slots["ready"], slots["taken"], slots["free"])),
        )
    console().print(people)
    routes = Table("from", "to", "waiting", "bytes", "full")
    for route in entry["routes"]:
        if route["messages"]:
            fill = f"{route['fill_ratio']:.0%}"
            routes.add_row(
                route["sender"], route["recipient"], str(route["messages"]), f"{route['bytes']:,}", fill
            )
    if routes.row_count:
        console().print(routes)
    moving = [lane["sender"] for lane in entry["lanes"] if lane["moving"]]
    if moving:
        click.echo(f"changing while it was read, or damaged: {', '.join(moving)}")
