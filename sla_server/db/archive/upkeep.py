"""Looks after the Parquet files: moves old rollups, gives files up, merges, deletes, and tells of damage.

A pass (``step``) is idempotent; each of its steps is a file published and then one SQL transaction, or one
transaction and then files deleted. What a crash can leave:

    merged file under way                an ``_`` file: swept at the next start
    merged file published, no row        an orphan: swept; the next pass merges again
    after the swap                       both there; the parts are replaced and deleted after their grace time
    given up, not deleted                the row says so; deleted later
    deleted, row not                     the next pass deletes the row

Readers keep their list of files: a replaced file stays for ``grace_s``. Orphans are removed by ``sweep`` at
the start; while running, a file without a row must have been seen twice an hour apart, because the writer may
be about to commit its row.

A damaged or missing file is told once (events ``file-damaged``, ``file-missing``) and left alone.

Thread: one at a time; ``run`` is the body of ``db-files``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
from sqlalchemy import Engine

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from sla_server.db import schema
from sla_server.db.archive import manifest, plan
from sla_server.db.archive.config import FilesConfig
from sla_server.db.archive.export import RollupExport
from sla_server.db.archive.lock import storage_lock
from sla_server.db.archive.manifest import CUTS, FileRow, ManifestChanged
from sla_server.db.archive.merge import merge
from sla_server.db.archive.store import FileStore
from sla_server.db.engine import begin
from sla_server.db.errors import DbError, FileDamaged
from sla_server.db.ingest.inventory import event_row
from sla_server.db.upserts import upsert

log = structlog.get_logger("files")
STEP_S: Final = 3600.0  # merges of a day of files, perhaps over a network
ORPHAN_PAUSE_NS: Final = 3_600_000_000_000
HOUR_US: Final = 3_600_000_000


@dataclass(slots=True)
class Done:
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
        self._looked_ns: int | None = None
        self._bad: set[str] = set()

    def run(self) -> None:
        """A pass each interval until told to finish; what fails is tried again."""
        while not self._rested():
            watchdog.beat(STEP_S)
            try:
                self.step()
            except (DbError, OSError) as exc:
                log.warning("files-not-looked-after", error=str(exc), retry_s=self._config.interval_s)

    def _rested(self) -> bool:
        watchdog.rest()
        return self._finish.wait(self._config.interval_s)

    def finish(self) -> None:
        """Let ``run`` return after the step it is in. Thread: any."""
        self._finish.set()

    def step(self, *, at_once: bool = False) -> Done:
        """One pass.

        Args:
            at_once: merge what can be merged now, do not wait until hour and day are over.

        Raises:
            StorageBusy, DatabaseUnavailable, ArchiveFailed, FilesUnavailable: come again.
        """
        done = Done()
        with storage_lock(self._files.lock_dir):
            now_us = self._clock.unix_us()
            rollups_before_us = now_us - round(self._config.rollups_after_h * HOUR_US)
            done.hours_moved = self._export.move(rollups_before_us, self._finish.is_set)
            self._give_up(done, now_us)
            self._merge_all(done, now_us, at_once)
            self._delete(done, now_us)
            self._look_around(done)
        return done

    def _rows(self, *, in_use: bool = False) -> list[FileRow]:
        with begin(self._engine) as connection:
            return manifest.rows(connection, in_use=in_use)

    def _give_up(self, done: Done, now_us: int) -> None:
        out = plan.given_up(self._rows(in_use=True), now_us, self._config)
        if not out:
            return
        with begin(self._engine) as connection:
            manifest.replace(connection, out, None, now_us)
            until_us = max((row.max_us for row in out if row.kind == CUTS), default=0)
            if until_us:
                manifest.raise_boundary(connection, manifest.COMPLETE_FROM_KEY, until_us)
        self._probe("given-up")
        done.given_up = [row.path for row in out]
        log.info("files-given-up", files=len(out), bytes=sum(row.bytes for row in out))

    def _merge_all(self, done: Done, now_us: int, at_once: bool) -> None:
        rows = [row for row in self._rows(in_use=True) if row.path not in self._bad]
        for group in plan.merges(rows, self._owner, now_us, self._config, at_once=at_once):
            if self._finish.is_set():
                return
            try:
                new = merge(self._files, group)
            except FileDamaged as exc:
                self._tell(done, exc.name, exc.problem)
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
            done.merged[new.path] = [row.path for row in group]
            log.info("files-merged", into=new.path, files=len(group), bytes=new.bytes)

    def _delete(self, done: Done, now_us: int) -> None:
        for row in plan.deletable(self._rows(), now_us, self._config):
            self._files.remove(row.path)
            self._probe("file-deleted")
            done.deleted.append(row.path)
        if done.deleted:
            with begin(self._engine) as connection:
                manifest.forget(connection, done.deleted)
            self._probe("row-deleted")

    def _look_around(self, done: Done) -> None:
        """Compare directory and manifest once an hour."""
        now_ns = self._clock.monotonic_ns()
        if self._looked_ns is not None and now_ns - self._looked_ns < ORPHAN_PAUSE_NS:
            return
        self._looked_ns = now_ns
        there = self._files.listing()
        rows = self._rows()
        known = {row.path for row in rows}
        mine = {name for name in there if name not in known and self._is_mine(name)}
        for name in sorted(mine & self._suspects):
            self._files.remove(name)
            done.orphans.append(name)
        self._suspects = mine - set(done.orphans)
        if done.orphans:
            log.warning("orphans-removed", files=done.orphans)
        # A file deleted between the listing and the reading of the rows is replaced, not in use.
        for row in rows:
            if row.replaced_us is None and row.path not in there and row.path not in self._bad:
                self._bad.add(row.path)
                done.missing.append(row.path)
        self._report("file-missing", dict.fromkeys(done.missing, "the file of a manifest row is missing"))

    def _is_mine(self, name: str) -> bool:
        return name.rpartition("/")[2].partition("-")[0] == self._owner

    def _tell(self, done: Done, path: str, problem: str) -> None:
        """A damaged file is not tried again by this process; the event is stored once for ever."""
        log.error("file-damaged", file=path, problem=problem)
        self._bad.add(path)
        done.damaged[path] = problem
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
            upsert(connection, schema.events, events)


def sweep(files: FileStore, owner: str, kept: set[str], old_before_s: float) -> Sequence[str]:
    """At the start, before any thread writes: remove half-written files and files without a row.

    Args:
        files: the store.
        owner: this server's queue id: its orphans go at once.
        kept: names in the manifest.
        old_before_s: orphans of others go when older than this (seconds since 1970): their server may be
            about to commit them.
    """
    removed = files.sweep_asides(owner)
    for name, found in files.listing().items():
        is_mine = name.rpartition("/")[2].partition("-")[0] == owner
        is_old = found.changed_s is not None and found.changed_s < old_before_s
        if name not in kept and (is_mine or is_old):
            files.remove(name)
            removed.append(name)
    if removed:
        log.info("orphans-swept", files=len(removed))
    return removed
