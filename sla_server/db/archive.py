"""Raw cuts to Parquet files: written aside, synced, renamed; a file counts only through its manifest row.

The name of a file under way begins with ``_``: readers of directories (Spark) ignore it. States a crash can
leave: an ``_`` file (swept at the next start), or a whole file without a manifest row (swept too: its cuts
are still in the ingest queue, because the cursor that frees them moves in the transaction that writes the
row).

Not thread-safe: belongs to the writer thread. After an OSError the file under way is given up; its cuts are
read from the queue again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from pmdaemon.runtime.clock import Clock
from sla_server.db import parquet
from sla_server.db.errors import ArchiveFailed
from sla_server.db.rollup import Ingested

log = structlog.get_logger("archive")
ROW_GROUP_ROWS: Final = 65_536  # a row group is the unit a reader loads; some 7 MB at 110 B a row
FOREIGN_ORPHAN_AGE_S: Final = 86_400  # files of another queue: its manager may be about to commit them


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file ready for the manifest; ``row`` is None when the records held no cut, and there is no file.

    Attributes:
        first_seq: queue_seq of the first record in it.
        last_seq: queue_seq of the last.
    """

    first_seq: int
    last_seq: int
    row: dict[str, Any] | None


class Archive:
    """The file under way.

    Args:
        directory: root; manifest paths are relative to it.
        queue_id: part of file names, so that several servers may share the directory.
        max_bytes: close a file at this size.
        max_s: close a file at this age.
        clock: for age and creation time.
        probe: called at "file-written", "renamed"; crash tests die there.
    """

    def __init__(
        self,
        directory: Path,
        queue_id: str,
        max_bytes: int,
        max_s: float,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._directory = directory
        self._queue_id = queue_id
        self._max_bytes = max_bytes
        self._max_ns = round(max_s * 1e9)
        self._clock = clock
        self._probe = probe
        self._reset()

    def _reset(self) -> None:
        self._first_seq = self._last_seq = 0
        self._opened_ns = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = self._rows = self._cuts = 0
        self._min_us = self._max_us = 0
        self._aside = self._directory
        self._file: BinaryIO | None = None
        self._writer: Any = None

    @property
    def last_seq(self) -> int:
        """queue_seq of the newest record in the file under way, 0 if there is none."""
        return self._last_seq

    @property
    def is_due(self) -> bool:
        """Whether the file under way has reached its size or its age."""
        if not self._first_seq:
            return False
        size_bytes = self._file.tell() if self._file is not None else 0
        return size_bytes >= self._max_bytes or self._clock.monotonic_ns() - self._opened_ns >= self._max_ns

    def add(self, first_seq: int, last_seq: int, items: Sequence[Ingested]) -> None:
        """Take the cuts of the records ``first_seq`` to ``last_seq``, which follow the former ones directly.

        Raises:
            ArchiveFailed: disk full or broken; the file under way was given up.
        """
        if not self._first_seq:
            self._first_seq, self._opened_ns = first_seq, self._clock.monotonic_ns()
        self._last_seq = last_seq
        if not items:
            return
        starts = [item.start_us for item in items]
        self._min_us = min(self._min_us, *starts) if self._cuts else min(starts)
        self._max_us = max(self._max_us, *(item.end_us for item in items))
        self._cuts += len(items)
        table = parquet.table_of(items)
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._rows += table.num_rows
        if self._pending_rows >= ROW_GROUP_ROWS:
            self._write_group()

    def finish(self) -> FinishedFile:
        """Close the file under way and give it its name.

        Durability: file and name are on disk on return; it counts once its row is committed.

        Raises:
            ArchiveFailed: the file was given up.
        """
        first_seq, last_seq = self._first_seq, self._last_seq
        if not self._cuts:
            self._reset()
            return FinishedFile(first_seq, last_seq, None)
        self._write_group()
        aside = self._aside
        try:
            self._writer.close()
            file = self._file
            if file is None:  # cannot happen: _write_group opened it
                raise AssertionError("no file under way")
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._probe("file-written")
            row = self._manifest_row(aside)
            final = self._directory / row["path"]
            aside.rename(final)
            _sync_directory(final.parent)
            _sync_directory(self._directory)
        except (OSError, pa.ArrowException) as exc:
            self.abort()
            raise ArchiveFailed(aside, str(exc)) from exc
        self._probe("renamed")
        self._reset()
        return FinishedFile(first_seq, last_seq, row)

    def abort(self) -> None:
        """Give up the file under way; nothing is lost, the queue has its cuts."""
        file, aside = self._file, self._aside
        self._reset()
        if file is not None:
            with contextlib.suppress(
                OSError
            ):  # a full disk: what is buffered cannot be written, and need not be
                file.close()
            aside.unlink(missing_ok=True)

    def discard(self, finished: FinishedFile) -> None:
        """Remove a finished file that will not be committed."""
        if finished.row is not None:
            (self._directory / finished.row["path"]).unlink(missing_ok=True)

    def sweep(self, kept: set[str], now_us: int) -> list[str]:
        """Remove what crashes left: files under way, and files without a manifest row. Returns their paths.

        Args:
            kept: relative paths in the manifest.
            now_us: wall clock; files of other queues are removed only when a day old.
        """
        removed = []
        for path in self._directory.glob("cuts/*/*.parquet"):
            relative = path.relative_to(self._directory).as_posix()
            age_s = now_us / 1e6 - path.stat().st_mtime
            if relative not in kept and (self._queue_id in path.name or age_s > FOREIGN_ORPHAN_AGE_S):
                path.unlink()
                removed.append(relative)
        if removed:
            log.info("orphans-swept", files=len(removed))
        return removed

    def _write_group(self) -> None:
        """Write what is pending as one row group."""
        try:
            if self._writer is None:
                # The day of writing; the cuts in it may be older (backlog): the manifest has their times.
                day = datetime.fromtimestamp(self._clock.unix_us() // 1_000_000, UTC).date().isoformat()
                name = f"_{self._queue_id}-{self._first_seq}.parquet"
                self._aside = self._directory / "cuts" / day / name
                self._aside.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._aside.open("wb")
                self._writer = pq.ParquetWriter(self._file, parquet.SCHEMA, compression="zstd")
            if self._pending:
                self._writer.write_table(pa.concat_tables(self._pending), row_group_size=ROW_GROUP_ROWS)
        except (OSError, pa.ArrowException) as exc:
            path = self._aside
            self.abort()
            raise ArchiveFailed(path, str(exc)) from exc
        self._pending, self._pending_rows = [], 0

    def _manifest_row(self, aside: Path) -> dict[str, Any]:
        digest = hashlib.sha256()
        with aside.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        name = f"{self._queue_id}-{self._first_seq}-{self._last_seq}.parquet"
        return {
            "path": (aside.parent / name).relative_to(self._directory).as_posix(),
            "kind": "cuts",
            "created_us": self._clock.unix_us(),
            "min_us": self._min_us,
            "max_us": self._max_us,
            "rows": self._rows,
            "cuts": self._cuts,
            "bytes": aside.stat().st_size,
            "sha256": digest.hexdigest(),
            "replaced_us": None,
        }


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
