"""``sla queue``: look into a disk queue's files, beside a living owner or without one. It writes nothing.

    sla queue stat FILE                  sizes, numbers, what is in use
    sla queue dump FILE                  one line a live record; --data for their contents
    sla queue recover --dry-run FILE     what recovery would find: damage, records restored

These commands open no connection to the server. Beside a living owner they see a moment that may be torn:
a record just being written can show up as damage; look twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from pmdaemon.diskqueue.errors import QueueUnreadable
from pmdaemon.diskqueue.format import DATA_START, FileHeader, check, content
from pmdaemon.diskqueue.opening import identify
from pmdaemon.diskqueue.recovery import Recovered, recover
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import FileStorage, open_data
from sla_server.cli.errors import BadUsage


class Look(NamedTuple):
    """A queue's files as recovery would see them now."""

    file: FileHeader
    recovered: Recovered
    ring: memoryview


@contextmanager
def looked(path: Path, index: Path | None, parts: tuple[Path, ...] = ()) -> Iterator[Look]:
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
        yield Look(file, recover(data.view(), index_view, file), ring)
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
JSON = click.option("-o", "output", type=click.Choice(["table", "json"]), default="table", help="Form.")


@click.group()
def queue() -> None:
    """Look into a disk queue: its figures, its records, what recovery would do."""


def _figures(look: Look) -> dict[str, Any]:
    entries, header = look.recovered.entries, look.recovered.header
    used_bytes = sum(entry.end - entry.offset for entry in entries)
    return {
        "queue_id": look.file.queue_id.hex(),
        "records": len(entries),
        "capacity": header.capacity if header else 0,
        "ring_bytes": look.file.ring_bytes,
        "used_bytes": used_bytes,
        "oldest_seq": min((entry.seq for entry in entries), default=None),
        "newest_seq": max((entry.seq for entry in entries), default=None),
        "next_seq": look.recovered.next_seq,
        "destinations": len({entry.destination for entry in entries}),
        "retried": sum(1 for entry in entries if entry.work is not None),
        "index_synced": _date(header.synced_us) if header else None,
        "closed_cleanly": look.recovered.report.clean,
        "index": look.recovered.report.index_problem or "whole",
    }


def _date(us: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(us / 1e6))


def _show(figures: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(figures, indent=1))
        return
    for key, value in figures.items():
        click.echo(f"{key.replace('_', ' '):<18} {_words(value)}")


def _words(value: Any) -> str:
    """A figure as a person would say it; a dash where there is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)


@queue.command()
@FILE
@INDEX
@PART
@JSON
def stat(file: Path, index: Path | None, parts: tuple[Path, ...], output: str) -> None:
    """Show a queue's figures."""
    with looked(file, index, parts) as look:
        _show(_figures(look), output)


@queue.command()
@FILE
@INDEX
@PART
@JSON
@click.option("--data", "with_data", is_flag=True, help="Show the contents too, in hex.")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="Records shown.")
def dump(
    file: Path, index: Path | None, parts: tuple[Path, ...], output: str, with_data: bool, limit: int
) -> None:
    """List the live records, oldest first."""
    with looked(file, index, parts) as look:
        entries = sorted(look.recovered.entries, key=lambda entry: entry.seq)
        for entry in entries[:limit]:
            found = check(look.ring, look.file.seed, entry.offset)
            if found is None:  # overwritten meanwhile by the living owner
                continue
            destination, data = content(look.ring, found)
            row = {
                "seq": entry.seq,
                "offset": DATA_START + entry.offset,
                "bytes": entry.length,
                "date": _date(found[5]),
                "type": entry.kind,
                "destination": destination.decode(errors="backslashreplace"),
                "retries": entry.work.retries if entry.work else 0,
            }
            if with_data:
                row["data"] = data.hex()
            text = (
                json.dumps(row) if output == "json" else "  ".join(f"{k} {_words(v)}" for k, v in row.items())
            )
            click.echo(text)
        if len(entries) > limit:
            click.echo(f"{len(entries) - limit} more; raise --limit to see them", err=True)


@queue.command("recover")
@FILE
@INDEX
@PART
@JSON
@click.option("--dry-run", is_flag=True, help="Only say what would be done (required).")
def recover_command(
    file: Path, index: Path | None, parts: tuple[Path, ...], output: str, dry_run: bool
) -> None:
    """Say what recovery would find; exit status 1 if records are damaged."""
    if not dry_run:
        raise BadUsage("give --dry-run: recovery itself runs whenever the queue's owner opens it")
    with looked(file, index, parts) as look:
        report = asdict(look.recovered.report)
        extents = look.recovered.report.extents
        report["extents"] = [extent._asdict() for extent in extents]
        if output == "json":
            click.echo(json.dumps(report, indent=1))
        else:
            _show({key: value for key, value in report.items() if key != "extents"}, output)
            for extent in extents:
                click.echo(f"damage at byte {extent.offset}, {extent.size_bytes} bytes: {extent.reason}")
    if extents:
        raise SystemExit(1)
