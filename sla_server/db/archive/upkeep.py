"""Upkeep of the Parquet files: moves old rollups, gives files up, merges, deletes, and reports damage.

What to do is decided by three pure functions: rows of the manifest and the time in, rows out.

Merging. Files are closed by size or age, so a small server makes one a minute. When the hour in which they
were written has ended, the small ones of that hour become files of up to ``merge_to_bytes``; when the day has
ended, the same is done with what is still small of that day. So a row is written at most three times, and the
files left are one a day at least and 64 MB at most. A merged file keeps the creation time of its newest
part, which keeps it in its hour. The inputs' checksums are verified before a row is copied, so that a damaged
file is reported instead of multiplied.

Giving up. By age of the newest cut, then, oldest first, until all files of raw cuts fit their limit.

A pass (``step``) is idempotent; each of its steps is a file published and then one SQL transaction, or one
transaction and then files deleted. What a crash can leave:

    merged file under way                an ``_`` file: swept at the next start
    merged file published, no row        an orphan: swept; the next pass merges again
    after the swap                       both there; the parts are replaced and deleted after their grace time
    given up, not deleted                the row says so; deleted later
    deleted, row not                     the next pass deletes the row

Readers keep their list of files: a replaced file stays for ``grace_s``. Orphans are removed by
``store.sweep`` at the start; while running, a file without a row must have been seen twice an hour apart,
because the writer may be about to commit its row.

A damaged or missing file is reported once (events ``file-damaged``, ``file-missing``) and left alone.

Thread: one at a time, and one process at a time, which ``storage_lock`` sees to; ``run`` is the body of
``db-files``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Engine

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from sla_server.db.archive import manifest
from sla_server.db.archive.export import RollupExport
from sla_server.db.archive.manifest import (
    BY_DAY,
    BY_HOUR,
    CUTS,
    MISSED,
    ROLLUPS,
    FileRow,
    ManifestChanged,
)
from sla_server.db.archive.store import FileStore
from sla_server.db.config import FilesConfig
from sla_server.db.engine import begin
from sla_server.db.errors import DbError, FileDamaged, StorageBusy
from sla_server.db.ingest.records import add_events, event_row
from sla_server.db.schema import DAY_US, HOUR_US, rollup_missed, rollups

COMMIT_LAG_US: Final = (
    300_000_000  # a file of an hour is committed minutes after its end when the database was away
)
log = structlog.get_logger("files")
STEP_S: Final = 3600.0  # merges of a day of files, perhaps over a network
ORPHAN_PAUSE_NS: Final = 3_600_000_000_000


def merge_groups(
    rows: Iterable[FileRow], owner: str, now_us: int, config: FilesConfig, *, at_once: bool = False
) -> list[list[FileRow]]:
    """Groups of at least two files, each to become one.

    Args:
        rows: files in use.
        owner: only files of this queue id: every server merges its own.
        now_us: us UTC.
        config: sizes.
        at_once: do not wait until hour and day have ended.
    """
    by_place: dict[tuple[str, int], list[FileRow]] = {}
    for row in sorted(rows, key=lambda row: (row.created_us, row.path)):
        if row.owner != owner or row.bytes >= config.merge_below_bytes:
            continue
        day, hour = row.created_us // DAY_US, row.created_us // HOUR_US
        if at_once or now_us >= (day + 1) * DAY_US + COMMIT_LAG_US:
            place = -1
        elif now_us >= (hour + 1) * HOUR_US + COMMIT_LAG_US:
            place = hour
        else:
            continue
        by_place.setdefault((row.directory, place), []).append(row)
    return [group for rows in by_place.values() for group in _packed(rows, config.merge_to_bytes)]


def _packed(rows: Sequence[FileRow], limit_bytes: int) -> list[list[FileRow]]:
    """Consecutive rows whose sizes stay within the limit together; single ones are left out."""
    groups: list[list[FileRow]] = [[]]
    size_bytes = 0
    for row in rows:
        if groups[-1] and size_bytes + row.bytes > limit_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(row)
        size_bytes += row.bytes
    return [group for group in groups if len(group) > 1]


def files_to_give_up(rows: Iterable[FileRow], now_us: int, config: FilesConfig) -> list[FileRow]:
    """Files in use that are too old, or too many."""
    cuts_before_us = now_us - round(config.cuts_max_age_h * HOUR_US)
    other_before_us = now_us - round(config.rollups_max_age_days * DAY_US)
    before_us = {CUTS: cuts_before_us}
    before_us |= dict.fromkeys(BY_HOUR, now_us - round(config.hours_max_age_days * DAY_US))
    before_us |= dict.fromkeys(BY_DAY, now_us - round(config.days_max_age_days * DAY_US))
    out: list[FileRow] = []
    kept_cuts: list[FileRow] = []
    for row in rows:
        if row.max_us < before_us.get(row.kind, other_before_us):
            out.append(row)
        elif row.kind == CUTS:
            kept_cuts.append(row)
    excess_bytes = sum(row.bytes for row in kept_cuts) - config.cuts_max_bytes
    for row in sorted(kept_cuts, key=lambda row: (row.max_us, row.path)):
        if excess_bytes <= 0:
            break
        out.append(row)
        excess_bytes -= row.bytes
    return out


def files_to_delete(rows: Sequence[FileRow], now_us: int, config: FilesConfig) -> list[FileRow]:
    """Replaced files whose grace time has ended; sooner, oldest first, where raw cuts exceed their limit."""
    grace_us = round(config.grace_s * 1e6)
    replaced = [(row.replaced_us, row) for row in rows if row.replaced_us is not None]
    out = [row for at_us, row in replaced if now_us - at_us >= grace_us]
    excess_bytes = sum(row.bytes for row in rows if row.kind == CUTS) - config.cuts_max_bytes
    excess_bytes -= sum(row.bytes for row in out if row.kind == CUTS)
    waiting = [(at_us, row) for at_us, row in replaced if row.kind == CUTS and now_us - at_us < grace_us]
    for _at_us, row in sorted(waiting, key=lambda pair: (pair[0], pair[1].path)):
        if excess_bytes <= 0:
            break
        out.append(row)
        excess_bytes -= row.bytes
    return out


def merged_name(group: Sequence[FileRow]) -> str:
    """Name of the merged file: where the first part begins, where the last ends, and a digest of all names.

    No other file has it, and a repetition after a crash makes the same one.
    """
    digest = hashlib.blake2b("\0".join(row.path for row in group).encode(), digest_size=5).hexdigest()
    first, last = (row.name.removesuffix(".parquet").split("-") for row in (group[0], group[-1]))
    return f"{group[0].directory}/{first[0]}-{first[1]}-{last[2]}-m{digest}.parquet"


_TABLES: Final = {ROLLUPS: rollups, MISSED: rollup_missed}
"""Kinds of files that are merged, besides raw cuts, and the tables whose columns they have."""


def merge_files(files: FileStore, group: Sequence[FileRow]) -> FileRow:
    """Write and publish the merged file; returns its row, not committed.

    Raises:
        FileDamaged: an input is not what its row says; nothing was published.
        ArchiveFailed: the output cannot be written; nothing was published.
    """
    from sla_server.db.archive.files import CUT_SCHEMA, FileWriter, fitted, opened, tables_of
    from sla_server.db.arrow import arrow_schema

    kind = group[0].kind
    columns = CUT_SCHEMA if kind == CUTS else arrow_schema(_TABLES[kind])
    with FileWriter(files, merged_name(group), columns) as writer:
        for row in group:
            with opened(files, row) as file:
                for table in tables_of(file):
                    writer.write(fitted(table, columns))
        expected = sum(row.rows for row in group)
        if writer.rows != expected:  # cannot happen: `opened` has compared each
            raise FileDamaged(merged_name(group), f"merged {writer.rows} rows of {expected}")
        return writer.finish(
            kind,
            created_us=max(row.created_us for row in group),
            min_us=min(row.min_us for row in group),
            max_us=max(row.max_us for row in group),
            cuts=sum(row.cuts for row in group),
        )


@contextmanager
def storage_lock(directory: Path) -> Iterator[None]:
    """Hold ``directory/storage.lock``; the kernel drops it when the process dies.

    Args:
        directory: the store's ``lock_dir``.

    Raises:
        StorageBusy: held by another.
    """
    path = directory / "storage.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StorageBusy(path) from exc
        yield
    finally:
        os.close(fd)


@dataclass(slots=True)
class UpkeepReport:
    """What one pass did."""

    hours_moved: int = 0
    given_up: list[str] = field(default_factory=list)
    merged: dict[str, list[str]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


class ArchiveUpkeep:
    """See the module.

    Args:
        engine: a writing engine.
        files: the store.
        owner: id of this server's ingest queue.
        config: limits.
        clock: wall clock for ages, monotonic clock for pauses.
        probe: called at "merge-published", "merge-committed", "given-up", "file-deleted", "row-deleted";
            crash tests die there.
    """

    def __init__(
        self,
        engine: Engine,
        files: FileStore,
        owner: str,
        config: FilesConfig,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._engine = engine
        self._files = files
        self._owner = owner
        self._config = config
        self._clock = clock
        self._probe = probe
        self._export = RollupExport(engine, files, owner, clock, probe)
        self._finish = threading.Event()
        self._suspects: set[str] = set()
        self._compared_ns: int | None = None
        self._bad: set[str] = set()

    def run(self) -> None:
        """A pass each interval until ``finish``; what fails is tried again."""
        while not self._rested():
            watchdog.beat(STEP_S)
            try:
                self.step()
            except (DbError, OSError) as exc:
                log.warning("archive-upkeep-skipped", error=str(exc), retry_s=self._config.interval_s)

    def _rested(self) -> bool:
        watchdog.rest()
        return self._finish.wait(self._config.interval_s)

    def finish(self) -> None:
        """Let ``run`` return after the step it is in. Thread: any."""
        self._finish.set()

    def step(self, *, at_once: bool = False) -> UpkeepReport:
        """One pass.

        Args:
            at_once: merge what can be merged now, do not wait until hour and day have ended.

        Raises:
            StorageBusy, DatabaseUnavailable, ArchiveFailed, FilesUnavailable: come again.
        """
        report = UpkeepReport()
        with storage_lock(self._files.lock_dir):
            now_us = self._clock.unix_us()
            rollups_before_us = now_us - round(self._config.rollups_after_h * HOUR_US)
            report.hours_moved = self._export.move(rollups_before_us, self._finish.is_set)
            self._give_up(report, now_us)
            self._merge_all(report, now_us, at_once)
            self._delete(report, now_us)
            self._compare_with_directory(report)
        return report

    def _rows(self, *, in_use: bool = False) -> list[FileRow]:
        with begin(self._engine) as connection:
            return manifest.rows(connection, in_use=in_use)

    def _give_up(self, report: UpkeepReport, now_us: int) -> None:
        out = files_to_give_up(self._rows(in_use=True), now_us, self._config)
        if not out:
            return
        with begin(self._engine) as connection:
            manifest.replace(connection, out, None, now_us)
            until_us = max((row.max_us for row in out if row.kind == CUTS), default=0)
            if until_us:
                manifest.raise_boundary(connection, manifest.COMPLETE_FROM_KEY, until_us)
        self._probe("given-up")
        report.given_up = [row.path for row in out]
        log.info("files-given-up", files=len(out), bytes=sum(row.bytes for row in out))

    def _merge_all(self, report: UpkeepReport, now_us: int, at_once: bool) -> None:
        rows = [row for row in self._rows(in_use=True) if row.path not in self._bad]
        for group in merge_groups(rows, self._owner, now_us, self._config, at_once=at_once):
            if self._finish.is_set():
                return
            try:
                new = merge_files(self._files, group)
            except FileDamaged as exc:
                self._report_damage(report, exc.name, exc.problem)
                continue
            self._probe("merge-published")
            try:
                with begin(self._engine) as connection:
                    manifest.replace(connection, group, new, self._clock.unix_us())
            except ManifestChanged as exc:
                self._files.remove(new.path)
                log.info("merge-given-up", file=new.path, reason=str(exc))
                continue
            self._probe("merge-committed")
            report.merged[new.path] = [row.path for row in group]
            log.info("files-merged", into=new.path, files=len(group), bytes=new.bytes)

    def _delete(self, report: UpkeepReport, now_us: int) -> None:
        for row in files_to_delete(self._rows(), now_us, self._config):
            self._files.remove(row.path)
            self._probe("file-deleted")
            report.deleted.append(row.path)
        if report.deleted:
            with begin(self._engine) as connection:
                manifest.forget(connection, report.deleted)
            self._probe("row-deleted")

    def _compare_with_directory(self, report: UpkeepReport) -> None:
        """Compare directory and manifest once an hour."""
        now_ns = self._clock.monotonic_ns()
        if self._compared_ns is not None and now_ns - self._compared_ns < ORPHAN_PAUSE_NS:
            return
        self._compared_ns = now_ns
        there = self._files.listing()
        rows = self._rows()
        known = {row.path for row in rows}
        orphans = {name for name in there if name not in known and self._is_own_file(name)}
        for name in sorted(orphans & self._suspects):
            self._files.remove(name)
            report.orphans.append(name)
        self._suspects = orphans - set(report.orphans)
        if report.orphans:
            log.warning("orphans-removed", files=report.orphans)
        # A file deleted between the listing and the reading of the rows is replaced, not in use.
        for row in rows:
            if row.replaced_us is None and row.path not in there and row.path not in self._bad:
                self._bad.add(row.path)
                report.missing.append(row.path)
        self._report("file-missing", dict.fromkeys(report.missing, "the file of a manifest row is missing"))

    def _is_own_file(self, name: str) -> bool:
        return name.rpartition("/")[2].partition("-")[0] == self._owner

    def _report_damage(self, report: UpkeepReport, path: str, problem: str) -> None:
        """A damaged file is not tried again by this process; the event is stored once for ever."""
        log.error("file-damaged", file=path, problem=problem)
        self._bad.add(path)
        report.damaged[path] = problem
        self._report("file-damaged", {path: problem})

    def _report(self, kind: str, problems: dict[str, str]) -> None:
        now_us = self._clock.unix_us()
        events = [
            event_row(
                (path,),
                now_us,
                kind,
                "critical",
                element="dbmanager",
                subject="parquet",
                text=f"{path}: {text}",
            )
            for path, text in problems.items()
        ]
        with begin(self._engine) as connection:
            add_events(connection, events)
