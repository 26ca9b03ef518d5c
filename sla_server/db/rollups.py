"""Hourly and daily rollups in Parquet files, of the rollups that have left SQL.

Theory of operation. A day is rolled up once all of it has left SQL (``archive.export``), always whole: its
files of ``rollups`` and ``missed`` become files of ``hours``, ``hour_missed``, ``days`` and ``day_missed``,
which replace the former ones of the day in one transaction. Late cuts make further files of the day, so it is
due again when its files have more rows than it was made of. That number is in column ``cuts`` of the
manifest, in the first file of hours. Merges keep the number, so they make no day due.

A day of which files may have been given up (``files.rollups_max_age_days``) is left as it is.

The rollup job reads and writes these files in workers (``write``), which publish them; nothing counts
before ``RollupStore.commit``. What a crash leaves: files under way (``RollupStore.sweep``), and whole files
without a row in the manifest, which the database manager sweeps when they are a day old: their names begin
with ``OWNER``, which is the name of no ingest queue.

``hours`` and ``days`` have the columns of ``rollups`` (``hour_us``, ``day_us`` in the place of ``slot_us``):
sums, of what is a maximum the largest, and the histograms added up. Columns that an older release's rollups
lack are null.

Thread: one at a time.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from sqlalchemy import Connection, Engine

from pmdaemon.runtime.clock import Clock, SystemClock
from sla_server.db import histogram_codec, schema
from sla_server.db.archive import manifest
from sla_server.db.archive.files import FileWriter, opened
from sla_server.db.archive.manifest import DAY_MISSED, DAYS, HOUR_MISSED, HOURS, FileRow, ManifestChanged
from sla_server.db.archive.store import FileStore, LocalFiles, UrlFiles, open_files
from sla_server.db.arrow import arrow_schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import FilesUnavailable
from sla_server.db.fence import Fence, fenced
from sla_server.db.ingest.accumulator import ROLLUP_GAUGES, ROLLUP_SUMS
from sla_server.db.policies import PolicyStore
from sla_server.db.schema import DAY_US, LATE_SUMS
from sla_server.db.upsert import upsert

OWNER: Final = "rollup"
SETTLED_US: Final = 8 * DAY_US
"""No rollup stays in SQL for longer (``archive.export``); of a silent fleet nothing newer moves."""
SUMS: Final = ROLLUP_SUMS
GAUGES: Final = ROLLUP_GAUGES
MISSED_SUMS: Final = LATE_SUMS
MISSED_KEY: Final = ("stream_id", "io", "threshold_us")
_MADE: Final = (*manifest.BY_HOUR, *manifest.BY_DAY)
_TABLES: Final = {
    HOURS: (schema.rollups, "hour_us"),
    DAYS: (schema.rollups, "day_us"),
    HOUR_MISSED: (schema.rollup_missed, "hour_us"),
    DAY_MISSED: (schema.rollup_missed, "day_us"),
}


def time_column(kind: str) -> str:
    """The column of a file of this kind that says when."""
    return _TABLES[kind][1]


def file_schema(kind: str) -> pa.Schema:
    """The columns of files of this kind."""
    table, time = _TABLES[kind]
    return pa.schema(
        [pa.field(time, pa.int64()) if field.name == "slot_us" else field for field in arrow_schema(table)]
    )


@dataclass(frozen=True, slots=True)
class DueDay:
    """A day to be rolled up.

    Attributes:
        day_us: its begin, us UTC.
        rows: of ``slot_paths`` and ``missed_paths``.
        slot_paths, missed_paths: as Spark opens them.
        former: what is there of it.
        sources: rows of the files of both paths.
    """

    day_us: int
    rows: int
    slot_paths: tuple[str, ...]
    missed_paths: tuple[str, ...]
    former: tuple[FileRow, ...]
    sources: tuple[FileRow, ...] = ()

    @property
    def name(self) -> str:
        """2026-11-23."""
        return f"{datetime.fromtimestamp(self.day_us // 1_000_000, UTC):%Y-%m-%d}"


@dataclass(frozen=True, slots=True)
class FilesAt:
    """Where files lie, for workers: without any password but what is in the URL of the files.

    Attributes:
        url: as ``files.url``; empty: ``directory``.
        group_readable: as ``files.group_readable``.
    """

    directory: str
    url: str = ""
    group_readable: bool = False

    def _own_directory(self) -> Path:
        """For files under way: who can change it changes what is uploaded."""
        path = Path(tempfile.gettempdir()) / f"sla-rollups-{os.geteuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise FilesUnavailable(self.url, f"{path} can be changed by others: remove it")
        return path

    def open(self) -> FileStore:
        """The store, in whatever process.

        Raises:
            FilesUnavailable: the directory for files under way is not ours alone.
        """
        if self.url:
            return UrlFiles(self.url, self._own_directory())
        return LocalFiles(Path(self.directory), group_readable=self.group_readable)


def due_days(rows: Iterable[FileRow], moved_until_us: int, kept_from_us: int) -> list[tuple[int, int]]:
    """(begin, rows) of the days to be rolled up, oldest first.

    Rows of a day only ever grow. One that has fewer than it was made of has lost files to their age (under a
    clock that was ahead, or an age that was shorter for a time): what was made of all of them stays.

    Args:
        rows: files in use.
        moved_until_us: rollups of slots before it have left SQL, but for late ones.
        kept_from_us: no file of a slot after it was given up.
    """
    have: dict[int, int] = defaultdict(int)
    made: dict[int, int] = defaultdict(int)
    for row in rows:
        day_us = row.min_us // DAY_US * DAY_US
        if row.kind in (manifest.ROLLUPS, manifest.MISSED):
            have[day_us] += row.rows
        elif row.kind == HOURS:
            made[day_us] += row.cuts
    return [
        (day_us, count)
        for day_us, count in sorted(have.items())
        if count > made[day_us] and kept_from_us <= day_us <= moved_until_us - DAY_US
    ]


class RollupStore:
    """What the rollup job asks of SQL, and changes there.

    Attributes:
        jobs: notes of runs.
        files_at: for workers.
    """

    def __init__(self, engine: Engine, config: DatabaseConfig, data_dir: Path, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._max_age_us = round(config.files.rollups_max_age_days * DAY_US)
        self._files = open_files(config, data_dir)
        directory, settings = config.resolved_parquet_dir(data_dir), config.files
        self.files_at = FilesAt(str(directory), settings.url, settings.group_readable)
        self.jobs = PolicyStore(engine, clock)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def sweep(self) -> None:
        """Remove what a run that was killed left half-written. The caller holds the job's lock."""
        self._files.sweep_asides(f"_{OWNER}-")

    def due(self) -> list[DueDay]:
        """The days to be rolled up, oldest first, as of one moment.

        Raises:
            DatabaseUnavailable: retryable.
        """
        with begin(self._engine) as connection:
            moved_until_us = manifest.boundary_us(connection, manifest.MOVED_KEY)
            rows = manifest.rows(connection, in_use=True)
        by_day: dict[int, list[FileRow]] = defaultdict(list)
        for row in rows:
            by_day[row.min_us // DAY_US * DAY_US].append(row)

        def paths(day_us: int, kind: str) -> tuple[str, ...]:
            found = [row for row in by_day[day_us] if row.kind == kind]
            return tuple(self._files.path_for_readers(row.path) for row in found)

        now_us = self._clock.unix_us()
        moved_until_us = max(moved_until_us, now_us - SETTLED_US)
        kept_from_us = now_us - self._max_age_us
        return [
            DueDay(
                day_us,
                count,
                paths(day_us, manifest.ROLLUPS),
                paths(day_us, manifest.MISSED),
                tuple(row for row in by_day[day_us] if row.kind in _MADE),
                tuple(row for row in by_day[day_us] if row.kind in (manifest.ROLLUPS, manifest.MISSED)),
            )
            for day_us, count in due_days(rows, moved_until_us, kept_from_us)
        ]

    def check(self, day: DueDay) -> None:
        """See that the files of a day are those that were written: Spark would sum up what is in them.

        Raises:
            FileDamaged: one is not, or is missing.
            FilesUnavailable: the store does not answer.
        """
        for row in day.sources:
            with opened(self._files, row):
                pass  # it has compared the checksum

    def paths(self, made: Iterable[FileRow], kind: str) -> list[str]:
        """Files just written, as Spark opens them."""
        return [self._files.path_for_readers(row.path) for row in made if row.kind == kind]

    def commit(self, day: DueDay, made: Sequence[FileRow]) -> bool:
        """Put the files of a day in the place of the former ones, in one transaction.

        Returns:
            False: those were replaced meanwhile; nothing was changed, and ``made`` was removed.

        Raises:
            DatabaseUnavailable: nothing was changed; the day is due again.
        """
        hours = [row for row in made if row.kind == HOURS]
        counted = {hours[0].path: day.rows} if hours else {}
        try:
            with begin(self._engine) as connection:
                now_us = self._clock.unix_us()
                self._hold(connection, day, now_us)
                manifest.replace(connection, day.former, None, now_us)
                for row in made:
                    manifest.add(connection, replace(row, cuts=counted.get(row.path, 0)))
        except ManifestChanged:
            self.discard(made)
            return False
        return True

    def _hold(self, connection: Connection, day: DueDay, now_us: int) -> None:
        """One commit after the other, whichever server's run it is of; ``former`` is still all of the day.

        Raises:
            ManifestChanged: another run has made files of it.
        """
        row = {"key": manifest.ROLLED_KEY, "value": str(now_us)}
        upsert(connection, schema.meta, [row], set_=("value",))  # its lock is held until the commit
        until_us = day.day_us + DAY_US
        there = {
            row.path for kind in _MADE for row in manifest.snapshot(connection, kind, day.day_us, until_us)
        }
        former = {row.path for row in day.former}
        if there != former:
            raise ManifestChanged(len(former), len(former & there))

    def discard(self, made: Iterable[FileRow]) -> None:
        """Remove files that will not count."""
        for row in made:
            self._files.remove(row.path)


def open_rollups(config: DatabaseConfig, data_dir: Path, fence: Fence | None = None) -> RollupStore:
    """The rollup job's store: it changes the manifest, as the database manager does, so with ``url``."""
    return RollupStore(fenced(make_engine(config, data_dir), fence), config, data_dir, SystemClock())


# -- In workers


def write(
    files: FileStore, kind: str, day_us: int, now_us: int, batches: Iterable[pa.RecordBatch]
) -> FileRow | None:
    """Write and publish one file; returns its row, not committed; None without rows.

    Args:
        files: the store.
        kind: of ``manifest.BY_HOUR`` or ``BY_DAY``.
        day_us: the day of all rows.
        now_us: wall clock.
        batches: columns of ``file_schema``; ``hist`` as lists of blobs, which are added up.

    Raises:
        ArchiveFailed: the disk is full or broken; nothing was published.
    """
    day = datetime.fromtimestamp(day_us // 1_000_000, UTC)
    name = f"{kind}/{day:%Y-%m-%d}/{OWNER}-{day:%Y%m%d}-{uuid.uuid4().hex[:12]}.parquet"
    fields = file_schema(kind)
    with FileWriter(files, name, fields) as writer:
        for batch in batches:
            if batch.num_rows:
                writer.write(_with_one_histogram(pa.Table.from_batches([batch])).select(fields.names))
        if not writer.rows:
            return None
        return writer.finish(kind, now_us, day_us, day_us + DAY_US - 1)


def _with_one_histogram(table: pa.Table) -> pa.Table:
    """Blobs of each row, joined to one."""
    if "hist" not in table.schema.names:
        return table
    lists = table["hist"].combine_chunks()
    index, bucket, count = histogram_codec.entries_of(lists.flatten().to_pylist())
    row_of_blob = np.repeat(np.arange(table.num_rows), lists.value_lengths().to_numpy(zero_copy_only=False))
    dense = np.zeros((table.num_rows, histogram_codec.TOTAL_BUCKETS), dtype=np.int64)
    np.add.at(dense, (row_of_blob[index], bucket), count)
    blobs = pa.array(histogram_codec.encode_many(dense), pa.binary())
    return table.set_column(table.schema.get_field_index("hist"), "hist", blobs)


def encode(row: FileRow) -> str:
    """As text, from a worker to the driver."""
    return json.dumps(asdict(row))


def parse(text: str) -> FileRow:
    """What ``encode`` made."""
    return FileRow(**json.loads(text))
