"""``sla storage``: the Parquet files, listed and maintained on the server's own machine.

These commands read the server's configuration and work on database and files directly, beside a living
server or without one; they do not use the REST API and need no token. ``compact``, ``backup`` and ``restore``
take the lock that the server's own housekeeping takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from pmdaemon.runtime.clock import SystemClock
from pmdaemon.runtime.command_group import Commands
from sla_server import config as configuration
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.formatting import CONFIG, DATA_OUTPUT, Column, build, console, pass_client, print_json

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from sla_server.db.archive.store import FileStore

KIND_COLUMNS: Final = (
    Column("KIND", lambda row, _now_us: str(row["kind"])),
    Column("FILES", lambda row, _now_us: formatting.count(row["files"]), number=True),
    Column("SIZE", lambda row, _now_us: size(row["bytes"]), number=True),
    Column("ROWS", lambda row, _now_us: formatting.count(row["rows"]), number=True),
    Column("CUTS", lambda row, _now_us: formatting.count(row["cuts"] or None), number=True),
    Column("OLDEST", lambda row, _now_us: formatting.when(row["min_us"])),
    Column("NEWEST", lambda row, _now_us: formatting.when(row["max_us"])),
)


class Stores(NamedTuple):
    """Configuration, database and files that a command works on."""

    config: configuration.ResolvedConfig
    engine: Engine
    files: FileStore


@contextmanager
def _opened(
    client: Client, path: Path | None, *, read_only: bool = True, is_fenced: bool = False
) -> Iterator[Stores]:
    """``is_fenced``: beside the server, so of several only where that one acts."""
    from sla_server.db.archive.store import open_files
    from sla_server.db.engine import check_made, make_engine
    from sla_server.db.fence import acting_fence, fenced

    config = configuration.load(path or client.config)
    if read_only:  # a restore makes the database
        check_made(config.database, config.data_dir)
    fence = acting_fence(config) if is_fenced else None
    engine = make_engine(config.database, config.data_dir, read_only=read_only)
    if is_fenced:
        fenced(engine, fence)
    try:
        yield Stores(config, engine, open_files(config.database, config.data_dir))
    finally:
        engine.dispose()


def size(value: int) -> str:
    """Bytes as a person would say them."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value} B"


def _counted(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _with_times(text: str) -> str:
    """``hour 1795255200000000``, as JSON has it, with a time that people read."""
    return re.sub(r"\bhour (\d+)", lambda found: f"hour from {formatting.when(int(found[1]))}", text)


@click.group(cls=Commands)
def storage() -> None:
    """Look after the Parquet files: what there is, merge now, is all of it there."""


@storage.command()
@CONFIG
@DATA_OUTPUT
@pass_client
def status(client: Client, config: Path | None, output: str) -> None:
    """Show how many files there are, and whether names and manifest agree; reads no file."""
    from sla_server.db.archive.verify import overview

    with _opened(client, config) as stores:
        summary = overview(stores.engine, stores.files)
    if output == "json":
        print_json(summary)
        return
    click.echo(f"files at {summary['files_at']}, manifest in {summary['database']}")
    console().print(build(KIND_COLUMNS, summary["kinds"], time.time_ns() // 1000))
    replaced = summary["replaced"]
    click.echo(f"{replaced['files']} replaced files ({size(replaced['bytes'])}) wait for their grace time")
    for word in ("missing", "orphans"):
        for name in summary[word]:
            click.echo(f"{word}: {name}")


@storage.command()
@CONFIG
@DATA_OUTPUT
@pass_client
def compact(client: Client, config: Path | None, output: str) -> None:
    """Merge small files now, and give up, move and delete what is due.

    The server does the same by itself when hour and day are over.
    """
    from sla_server.db.archive.upkeep import ArchiveUpkeep
    from sla_server.db.archive.verify import owners

    with _opened(client, config) as stores:
        found = owners(stores.engine)  # says so if there is no database, instead of making one
    done: list[dict[str, Any]] = []
    with _opened(client, config, read_only=False, is_fenced=True) as stores:
        settings = stores.config.database.files
        for owner in found:
            keeper = ArchiveUpkeep(stores.engine, stores.files, owner, settings, SystemClock())
            done.append(asdict(keeper.step(at_once=True)))
    if output == "json":
        print_json(done)
        return
    merged = {new: parts for one in done for new, parts in one["merged"].items()}
    for new, parts in merged.items():
        click.echo(f"{len(parts)} files merged into {new}")
    for word in ("given_up", "deleted"):
        names = [name for one in done for name in one[word]]
        if names:
            click.echo(f"{len(names)} files {word.replace('_', ' ')}")
    damaged = {name: problem for one in done for name, problem in one["damaged"].items()}
    for name, problem in damaged.items():
        click.echo(f"damaged: {name}: {problem}", err=True)
    if not merged:
        click.echo("no files to merge")
    if damaged:
        raise SystemExit(1)


@storage.command()
@CONFIG
@DATA_OUTPUT
@pass_client
def verify(client: Client, config: Path | None, output: str) -> None:
    """Read every file: checksums, manifest against files against SQL. Exit status 1 if something is wrong."""
    from sla_server.db.archive.verify import verify as verify_files

    with _opened(client, config) as stores:
        report = verify_files(stores.engine, stores.files)
    if output == "json":
        print_json(asdict(report))
    else:
        click.echo(
            f"{_counted(report.files, 'file is', 'files are')} whole: {size(report.bytes)}, "
            f"{report.rows:,} rows, {report.cuts:,} cuts; "
            f"{_counted(report.hours, 'hour', 'hours')} compared with SQL"
        )
        for note in report.notes:
            click.echo(f"note: {_with_times(note)}")
        for problem in report.problems:
            click.echo(f"{problem.kind}: {_with_times(problem.subject)}: {problem.text}", err=True)
    if report.problems:
        raise SystemExit(1)


@storage.command()
@CONFIG
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@pass_client
def backup(client: Client, config: Path | None, directory: Path) -> None:
    """Copy database, files and token to a new DIRECTORY; the server may run."""
    from sla_server.db.backup import make

    with _opened(client, config) as stores:
        config_of, data_dir = stores.config.database, stores.config.data_dir
        queue_dir = config_of.resolved_queue_dir(data_dir)
        made = make(stores.engine, stores.files, data_dir, queue_dir, directory, SystemClock())
    click.echo(
        f"backup of the {made.database} database and {made.files} files ({size(made.bytes)}) in {directory}"
    )


@storage.command()
@CONFIG
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@pass_client
def restore(client: Client, config: Path | None, directory: Path) -> None:
    """Bring a backup back from DIRECTORY into an empty database; the server must be stopped."""
    from sla_server.db.archive.upkeep import storage_lock
    from sla_server.db.backup import restore as bring_back
    from sla_server.db.process import directory_lock

    with _opened(client, config, read_only=False) as stores:
        data_dir = stores.config.data_dir
        with directory_lock(data_dir), storage_lock(stores.files.lock_dir):
            head, damaged = bring_back(stores.engine, stores.files, data_dir, directory)
    click.echo(
        f"{head.database} database and {head.files} files restored as of {formatting.when(head.made_us)}. "
        "Now: sla storage verify, then sla-server start"
    )
    for path in damaged:
        click.echo(f"damaged in the backup: {path}")
    if damaged:
        click.echo("Take them from another backup. Slices and rollups are in SQL, and do not depend on them")
        raise SystemExit(1)
