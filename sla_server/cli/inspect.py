"""``sla queue`` and ``sla mailbox``: look into the files of a disk queue and into the mailbox segments.

    sla queue stat FILE                  sizes, numbers, what is in use
    sla queue dump FILE                  one line a live record; --data for their contents
    sla queue recover --dry-run FILE     what recovery would find: damage, records restored
    sla mailbox dump                     lists, slots and fullness of this machine's segments

These commands open no connection to the server and write nothing; they read files and shared memory
themselves, so they also work when a part hangs or has died. They must run as the server's user. Beside a
living owner they see a moment that may be torn: a record just being written can show up as damage; look
twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np

from pmdaemon.diskqueue.errors import QueueUnreadable
from pmdaemon.diskqueue.format import DATA_START, FileHeader, check, content
from pmdaemon.diskqueue.opening import identify
from pmdaemon.diskqueue.recovery import Recovered, recover
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import FileStorage, open_data
from pmdaemon.mailbox import default_runtime_dir, describe
from pmdaemon.runtime.command_group import Commands
from sla_server import config as configuration
from sla_server.cli import formatting
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import DATA_OUTPUT, Column, build, console, print_json
from sla_server.cli.output import print_record


class RecoveredQueue(NamedTuple):
    """A queue's files as recovery would see them now."""

    file: FileHeader
    recovered: Recovered
    ring: memoryview


@contextmanager
def recovered_queue(path: Path, index: Path | None, parts: tuple[Path, ...] = ()) -> Iterator[RecoveredQueue]:
    """Map both files for reading and let recovery judge them.

    Raises:
        QueueUnreadable: not a disk queue, or not there.
    """
    settings = QueueSettings(data_path=path, index_path=index, more_paths=parts)
    data = open_data(settings, read_only=True)
    entries = settings.resolved_index_path
    index_file = FileStorage(entries, read_only=True) if entries.exists() else None
    index_view = index_file.view() if index_file else memoryview(b"")
    try:
        file, _copies = identify(data.view(), index_view, str(path))
        if file is None:
            raise QueueUnreadable(str(path), "it was never finished and holds nothing", "It may be deleted")
        ring = data.view()[DATA_START : DATA_START + file.ring_bytes]
        yield RecoveredQueue(file, recover(data.view(), index_view, file, data.release), ring)
        ring.release()
    finally:
        data.close()
        if index_file is not None:
            index_file.close()


FILE = click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
INDEX = click.option("--index", type=click.Path(path_type=Path), help="Index file [FILE.index].")
PART = click.option(
    "--part", "parts", type=click.Path(path_type=Path, exists=True), multiple=True,
    help="Further data file of a queue that spans several, in order; repeat.",
)  # fmt: skip


@click.group(cls=Commands)
def queue() -> None:
    """Look into a disk queue: its figures, its records, what recovery would do."""


def _figures_of(found: RecoveredQueue) -> dict[str, Any]:
    live, header = found.recovered.live, found.recovered.header
    return {
        "queue_id": found.file.queue_id.hex(),
        "records": len(live),
        "capacity": header.capacity if header else 0,
        "ring_bytes": found.file.ring_bytes,
        "used_bytes": int(live["span"].sum()),
        "oldest_seq": int(live["seq"].min()) if len(live) else None,
        "newest_seq": int(live["seq"].max()) if len(live) else None,
        "next_seq": found.recovered.next_seq,
        "destinations": len(set(found.recovered.destinations.values()))
        + bool((live["destination"] == 0).any()),
        "retried": len(found.recovered.work),
        "index_synced": _date(header.synced_us) if header else None,
        "closed_cleanly": found.recovered.report.clean,
        "index": found.recovered.report.index_problem or "whole",
    }


def _date(us: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(us / 1e6))


def _show_figures(figures: dict[str, Any], output: str) -> None:
    if output == "json":
        print_json(figures)
        return
    for key, value in figures.items():
        click.echo(f"{key.replace('_', ' '):<18} {_as_text(value)}")


def _as_text(value: Any) -> str:
    """A figure as text; a dash where there is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)


@queue.command("stat")
@FILE
@INDEX
@PART
@DATA_OUTPUT
def queue_stat(file: Path, index: Path | None, parts: tuple[Path, ...], output: str) -> None:
    """Show a queue's figures."""
    with recovered_queue(file, index, parts) as found:
        _show_figures(_figures_of(found), output)


@queue.command("dump")
@FILE
@INDEX
@PART
@DATA_OUTPUT
@click.option("--data", "with_data", is_flag=True, help="Show the contents too, in hex.")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="Records shown.")
def queue_dump(
    file: Path, index: Path | None, parts: tuple[Path, ...], output: str, with_data: bool, limit: int
) -> None:
    """List the live records, oldest first."""
    with recovered_queue(file, index, parts) as found:
        live, work = found.recovered.live, found.recovered.work
        for entry in live[np.argsort(live["seq"])[:limit]]:
            seq, offset = int(entry["seq"]), int(entry["offset"])
            record = check(found.ring, found.file.seed, offset)
            if record is None:  # the living owner has overwritten it meanwhile
                continue
            destination, data = content(found.ring, record)
            row = {
                "seq": seq,
                "offset": DATA_START + offset,
                "bytes": int(entry["length"]),
                "date": _date(record[5]),
                "type": int(entry["kind"]),
                "destination": destination.decode(errors="backslashreplace"),
                "retries": work[seq].retries if seq in work else 0,
            }
            if with_data:
                row["data"] = data.hex()
            if output == "json":
                print_record(row)
            else:
                click.echo("  ".join(f"{k} {_as_text(v)}" for k, v in row.items()))
        if len(live) > limit:
            click.echo(f"{len(live) - limit} more; raise --limit to see them", err=True)


@queue.command("recover")
@FILE
@INDEX
@PART
@DATA_OUTPUT
@click.option("--dry-run", is_flag=True, help="Only say what would be done (required).")
def queue_recover(
    file: Path, index: Path | None, parts: tuple[Path, ...], output: str, dry_run: bool
) -> None:
    """Say what recovery would find; exit status 1 if records are damaged."""
    if not dry_run:
        raise BadUsage("give --dry-run: recovery itself runs whenever the queue's owner opens it")
    with recovered_queue(file, index, parts) as found:
        report = asdict(found.recovered.report)
        extents = found.recovered.report.extents
        report["extents"] = [extent._asdict() for extent in extents]
        if output == "json":
            print_json(report)
        else:
            _show_figures({key: value for key, value in report.items() if key != "extents"}, output)
            for extent in extents:
                click.echo(f"damage at byte {extent.offset}, {extent.size_bytes} bytes: {extent.reason}")
    if extents:
        raise SystemExit(1)


def _figure(title: str, key: str, *, of_slots: bool = False) -> Column:
    return Column(title, lambda row, _now_us: str((row["slots"] if of_slots else row)[key]), number=True)


PARTICIPANTS: Final = (
    Column("NAME", lambda row, _now_us: str(row["name"])),
    Column("PID", lambda row, _now_us: _pid(row)),
    _figure("POSTS", "posts"),
    _figure("FULL", "full"),
    _figure("TAKES", "takes"),
    Column("LOOKS", lambda row, _now_us: _scanned(row), number=True),  # slots inspected for one message taken
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


@click.group(cls=Commands)
def mailbox() -> None:
    """Look into the mailboxes between the server's processes."""


@mailbox.command("dump")
@click.argument("segments", nargs=-1, type=click.Path(path_type=Path))
@DATA_OUTPUT
def mailbox_dump(segments: tuple[Path, ...], output: str) -> None:
    """Show lists, slots, who holds what, look-ahead and fullness; of all segments found unless named."""
    described = [describe(path) for path in segments or _segments()]
    if output == "json":
        print_json(described)
        return
    for entry in described:
        _show_segment(entry)


def _segments() -> list[Path]:
    """Segments of the configured server; without a configuration also those of this user's other servers."""
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


def _pid(participant: dict[str, Any]) -> str:
    return (
        f"{participant['pid']}{'' if participant['attached'] else ' gone'}"
        if participant["pid"]
        else formatting.DASH
    )


def _scanned(participant: dict[str, Any]) -> str:
    inspected = participant["inspected_per_take"]
    return formatting.DASH if inspected is None else f"{inspected:.2f}"


def _show_segment(entry: dict[str, Any]) -> None:
    """Two tables: the participants, and the routes that hold something."""
    owner = entry["owner"]
    running = "running" if owner["alive"] else "ended since"  # the next server takes over the segment
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
