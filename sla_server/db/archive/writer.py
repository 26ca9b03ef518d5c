"""Raw cuts to Parquet files: written aside, synced, renamed; a file counts only through its manifest row.

The name of a file under way begins with ``_``: readers of directories (Spark) ignore it. States a crash can
leave: an ``_`` file (swept at the next start), or a whole file without a manifest row (swept too: its cuts
are still in the ingest queue, because the cursor that frees them moves in the transaction that writes the
row). Later the files are merged and given up by ``sla_server.db.archive.upkeep``.

Not thread-safe: belongs to the writer thread. After an OSError the file under way is given up; its cuts are
read from the queue again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime.clock import Clock
from sla_server.db.archive import cut_file
from sla_server.db.archive.file import FileWriter
from sla_server.db.archive.manifest import CUTS
from sla_server.db.archive.store import FileStore, LocalFiles
from sla_server.db.archive.upkeep import sweep
from sla_server.db.errors import ArchiveFailed
from sla_server.db.ingest.rollup import CutColumns, Ingested

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


class CutFileWriter:
    """The file under way.

    Args:
        directory: a store of files, or the path of a local one; manifest paths are relative to it.
        queue_id: part of file names, so that several servers may share the directory.
        max_bytes: close a file at this size.
        max_s: close a file at this age.
        clock: for age and creation time.
        probe: called at "file-written", "renamed"; crash tests die there.
    """

    def __init__(
        self,
        directory: Path | FileStore,
        queue_id: str,
        max_bytes: int,
        max_s: float,
        clock: Clock,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._files: FileStore = LocalFiles(directory) if isinstance(directory, Path) else directory
        self._queue_id = queue_id
        self._max_bytes = max_bytes
        self._max_ns = round(max_s * 1e9)
        self._clock = clock
        self._probe = probe
        self._reset()

    def _reset(self) -> None:
        self._first_seq = self._last_seq = 0
        self._opened_ns = 0
        self._cuts = 0
        self._min_us = self._max_us = 0
        self._day = ""
        self._stack = ExitStack()
        self._writer: FileWriter | None = None

    @property
    def last_seq(self) -> int:
        """queue_seq of the newest record in the file under way, 0 if there is none."""
        return self._last_seq

    @property
    def is_due(self) -> bool:
        """Whether the file under way has reached its size or its age."""
        if not self._first_seq:
            return False
        size_bytes = self._writer.bytes if self._writer is not None else 0
        return size_bytes >= self._max_bytes or self._clock.monotonic_ns() - self._opened_ns >= self._max_ns

    def add(
        self, first_seq: int, last_seq: int, items: Sequence[Ingested], columns: CutColumns | None = None
    ) -> None:
        """Take the cuts of the records ``first_seq`` to ``last_seq``, which follow the former ones directly.

        ``columns`` are those of the cuts, if somebody has joined them.

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
        try:
            self._under_way().write(cut_file.table_of(items, columns))
        except ArchiveFailed:
            self.abort()
            raise

    def finish(self) -> FinishedFile:
        """Close the file under way and give it its name.

        Durability: file and name are on disk on return; it counts once its row is committed.

        Raises:
            ArchiveFailed: the file was given up.
        """
        first_seq, last_seq, writer = self._first_seq, self._last_seq, self._writer
        if writer is None:
            self._reset()
            return FinishedFile(first_seq, last_seq, None)
        name = f"cuts/{self._day}/{self._queue_id}-{first_seq}-{last_seq}.parquet"
        try:
            now_us = self._clock.unix_us()
            row = writer.finish(CUTS, now_us, self._min_us, self._max_us, self._cuts, name=name)
        except ArchiveFailed:
            self.abort()
            raise
        self._probe("renamed")
        self._reset()
        return FinishedFile(first_seq, last_seq, asdict(row))

    def abort(self) -> None:
        """Give up the file under way; nothing is lost, the queue has its cuts."""
        self._stack.close()
        self._reset()

    def discard(self, finished: FinishedFile) -> None:
        """Remove a finished file that will not be committed."""
        if finished.row is not None:
            self._files.remove(finished.row["path"])

    def sweep(self, kept: set[str], now_us: int) -> Sequence[str]:
        """Remove what crashes left: files under way, and files without a manifest row. Returns their paths.

        Args:
            kept: relative paths in the manifest.
            now_us: wall clock; files of other queues are removed only when a day old.
        """
        return sweep(self._files, self._queue_id, kept, now_us / 1e6 - FOREIGN_ORPHAN_AGE_S)

    def _under_way(self) -> FileWriter:
        """The writer, opened at the first cut."""
        if self._writer is None:
            # The day of writing; the cuts in it may be older (backlog): the manifest has their times.
            self._day = datetime.fromtimestamp(self._clock.unix_us() // 1_000_000, UTC).date().isoformat()
            name = f"cuts/{self._day}/{self._queue_id}-{self._first_seq}.parquet"
            writer = FileWriter(self._files, name, cut_file.SCHEMA, self._probe)
            self._writer = self._stack.enter_context(writer)
        return self._writer
