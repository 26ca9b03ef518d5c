"""Parquet files: the form of raw cuts, writing a file of any kind, reading one as its row says.

Raw cuts have one row a stream and cut, histograms sparse. A cut without rows (nothing had I/O) is one row
with a null ``stream_id``, so that every cut is there. Names of streams are stored in SQL; epochs are text,
because Spark reads an unsigned 64-bit integer as decimal. ``start`` is the corrected start; ``raw_start_us``
is by the agent's clock. ``hist_bucket`` and ``hist_count`` are lists of equal length, in the numbering of
``pmdaemon.wire.histogram`` (all four histograms); likewise the four ``missed_*`` lists. Files of one day lie
in one directory; readers take explicit paths from the manifest, never the directory.

``FileWriter`` writes aside, row group by row group, and publishes; nothing counts before the caller commits
the row that ``finish`` returns. It belongs to one thread, which starts one for each row group: encoding and
compression do not hold the interpreter lock, so that the owner goes on meanwhile. Between ``_flush`` and
``_wait`` the other thread alone uses ``_writer`` and ``_file``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.wire.cut import COL, COLUMNS
from sla_server.db.archive.manifest import FileRow
from sla_server.db.archive.store import FileStore
from sla_server.db.errors import ArchiveFailed, FileDamaged, FilesUnavailable
from sla_server.db.ingest.batch import CutColumns, IngestedCut, columns_of

_COUNTERS: Final = COLUMNS[1:]
_MISSED: Final = ("io", "threshold_us", "counted", "missed")
CUT_SCHEMA: Final = pa.schema(
    [
        ("gateway_id", pa.string()),
        ("epoch", pa.string()),
        ("seq", pa.int64()),
        ("start", pa.timestamp("us", tz="UTC")),
        ("raw_start_us", pa.int64()),
        ("offset_us", pa.int64()),
        ("duration_us", pa.int64()),
        ("gap", pa.int64()),
        ("throttle_gen", pa.int64()),
        ("threshold_version", pa.int64()),
        ("stream_id", pa.int64()),
        *((name, pa.int64()) for name in _COUNTERS),
        ("hist_bucket", pa.list_(pa.int16())),
        ("hist_count", pa.list_(pa.int64())),
        *((f"missed_{name}", pa.list_(pa.int64())) for name in _MISSED),
    ]
)
ROW_GROUP_ROWS: Final = 65_536  # a row group is the unit a reader loads; some 7 MB at 110 B a row
ENCODE_S: Final = 300.0  # a disk that does not take 10 MB in that time will not
_BLOCK_BYTES: Final = 1 << 20


def cut_table(items: Sequence[IngestedCut], columns: CutColumns | None = None) -> pa.Table:
    """A table of CUT_SCHEMA for these cuts, in order; ``columns`` are theirs, if they are joined already."""
    joined = columns or columns_of(items)
    lengths = np.maximum(joined.rows, 1)
    first_row = np.cumsum(lengths) - lengths
    counters = _padded(joined)
    per_cut: dict[str, list[Any]] = {
        "gateway_id": [item.cut.gateway_id for item in items],
        "epoch": [str(item.cut.epoch) for item in items],
        "seq": [item.cut.seq for item in items],
        "start": [item.start_us for item in items],
        "raw_start_us": [item.cut.start_unix_us for item in items],
        "offset_us": [item.offset_us for item in items],
        "duration_us": [item.cut.duration_us for item in items],
        "gap": [item.cut.gap for item in items],
        "throttle_gen": [item.cut.throttle_gen for item in items],
        "threshold_version": [item.cut.threshold_version for item in items],
    }
    repeat = pa.array(np.repeat(np.arange(len(items)), lengths))
    arrays = {
        name: pa.array(values, type=CUT_SCHEMA.field(name).type).take(repeat)
        for name, values in per_cut.items()
    }
    stream_id = counters[COL["stream_id"]]
    arrays["stream_id"] = pa.array(stream_id, mask=stream_id < 0)
    arrays |= {name: pa.array(counters[COL[name]]) for name in _COUNTERS}
    rows = int(lengths.sum())
    names = {"bucket": "hist_bucket", "count": "hist_count"}
    arrays |= _lists(joined.hist, np.repeat(first_row, joined.hist_entries), rows, names)
    names = {name: f"missed_{name}" for name in _MISSED}
    arrays |= _lists(joined.missed, np.repeat(first_row, joined.missed_entries), rows, names)
    return pa.table([arrays[name] for name in CUT_SCHEMA.names], schema=CUT_SCHEMA)


def _padded(columns: CutColumns) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counters; a cut without rows gets one row of zeros with stream_id -1 (stored as null)."""
    if columns.rows.all():
        return columns.counters
    place = np.cumsum(columns.rows)[columns.rows == 0]
    padding = np.zeros((len(COLUMNS), len(place)), dtype=np.int64)
    padding[COL["stream_id"]] = -1
    return np.insert(columns.counters, place, padding, axis=1)


def _lists(
    entries: np.ndarray[Any, Any], first_row: np.ndarray[Any, Any], rows: int, names: dict[str, str]
) -> dict[str, pa.Array]:
    """List columns from sparse entries; an entry's ``row`` counts from its cut's ``first_row``."""
    row = entries["row"] + first_row
    offsets = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=rows), out=offsets[1:])
    if (row[1:] < row[:-1]).any():  # agents send them in order
        entries = entries[np.argsort(row, kind="stable")]
    lists = {}
    for field, name in names.items():
        values = entries[field]
        kind = CUT_SCHEMA.field(name).type.value_type
        lists[name] = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(values.astype(kind.to_pandas_dtype()), type=kind)
        )
    return lists


def digest_of(file: BinaryIO) -> str:
    """SHA-256 of everything from the file's position on, in hex."""
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


class FileWriter:
    """One file under way; leaving the ``with`` block without ``finish`` removes it.

    Args:
        files: the store.
        name: relative name it will have.
        schema: of all tables written.
        probe: called at "file-written"; crash tests die there.

    Attributes:
        bytes: written so far; what is pending or being encoded is not counted.
        rows: given to it so far.
    """

    def __init__(
        self,
        files: FileStore,
        name: str,
        schema: pa.Schema,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._probe = probe
        self._files = files
        self._name = name
        self._schema = schema
        self._aside: Path | None = None
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._encoder = ThreadGroup()
        self._problem: BaseException | None = None
        self.bytes = 0
        self.rows = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._encoder.join(ENCODE_S)
        if self._file is not None:
            # A full disk: the rest need not be written; but the writer must not try again when collected.
            with contextlib.suppress(OSError, pa.ArrowException):
                self._writer.close()
            with contextlib.suppress(OSError):
                self._file.close()
        if self._aside is not None:
            self._aside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, FilesUnavailable, MemoryError) as exc:
            raise ArchiveFailed(self._aside or Path(self._name), str(exc) or "no memory is left") from exc

    def write(self, table: pa.Table) -> None:
        """Add rows; ArchiveFailed when the disk is full or broken, perhaps for rows added before."""
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        if self._pending_rows >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Begin to write what is pending as a row group; one at a time is under way."""
        self._wait()
        with self._translated():
            if self._file is None:
                self._aside = self._files.aside(self._name)
                self._file = self._aside.open("wb")
                # Of lists no reader can use them, and they cost as much as a fifth of encoding these.
                with_statistics = [field.name for field in self._schema if not pa.types.is_list(field.type)]
                self._writer = pq.ParquetWriter(
                    self._file, self._schema, compression="zstd", write_statistics=with_statistics
                )
        if self._pending:
            table = pa.concat_tables(self._pending)
            try:
                self._encoder.start("db-encode", lambda: self._encode(table), ENCODE_S)
            except (RuntimeError, MemoryError) as exc:
                problem = f"the thread db-encode cannot be started ({exc or 'no memory'})"
                raise ArchiveFailed(self._aside or Path(self._name), problem) from exc
        self._pending, self._pending_rows = [], 0

    def _encode(self, table: pa.Table) -> None:
        """Thread: ``db-encode``."""
        try:
            self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, ``_wait`` raises it
            self._problem = exc

    def _wait(self) -> None:
        """Until no row group is under way; raises what went wrong with it."""
        self._encoder.join(ENCODE_S)
        with self._translated():
            if self._problem is not None:
                raise self._problem
        if self._file is not None:
            self.bytes = self._file.tell()

    def finish(
        self, kind: str, created_us: int, min_us: int, max_us: int, cuts: int = 0, *, name: str = ""
    ) -> FileRow:
        """Publish the file and return the row that makes it count. Durability: the file's, not the row's.

        The row says what is on disk: a file that lacks a row that was added is not published.

        Args:
            kind: cuts, rollups or missed.
            created_us: wall clock.
            min_us: start of the oldest data.
            max_us: end of the newest.
            cuts: how many cuts the rows come from.
            name: in place of the one given first.

        Raises:
            ArchiveFailed: the disk is full or broken, no memory is left, or rows are missing.
        """
        name = name or self._name
        self._flush()
        self._wait()
        with self._translated():
            aside, file = self._aside, self._file
            if aside is None or file is None:  # cannot happen: _flush opened both
                raise AssertionError("no file under way")
            self._writer.close()
            file.close()
            written_rows = pq.read_metadata(aside).num_rows
            if written_rows != self.rows:
                raise ArchiveFailed(aside, f"it holds {written_rows} rows of the {self.rows} that were added")
            with aside.open("rb") as written:
                sha256 = digest_of(written)
            size_bytes = aside.stat().st_size
            self._probe("file-written")
            self._files.publish(aside, name)
            self._aside = self._file = None
        return FileRow(name, kind, created_us, min_us, max_us, self.rows, cuts, size_bytes, sha256)


@contextlib.contextmanager
def opened(files: FileStore, row: FileRow) -> Iterator[pq.ParquetFile]:
    """A file whose bytes are those that were written.

    Raises:
        FileDamaged: missing, or other size, checksum, form or number of rows.
        FilesUnavailable: the store does not answer.
    """
    try:
        source = files.open(row.path)
    except FileNotFoundError as exc:
        raise FileDamaged(row.path, "the file is missing") from exc
    except OSError as exc:
        raise FilesUnavailable(files.address, str(exc)) from exc
    with source:
        size_bytes = source.seek(0, 2)
        if size_bytes != row.bytes:
            raise FileDamaged(row.path, f"it has {size_bytes} bytes, the manifest says {row.bytes}")
        source.seek(0)
        if digest_of(source) != row.sha256:
            raise FileDamaged(row.path, "its SHA-256 is not that in the manifest")
        source.seek(0)
        try:
            file = pq.ParquetFile(source)
            if file.metadata.num_rows != row.rows:
                problem = f"it has {file.metadata.num_rows} rows, the manifest says {row.rows}"
                raise FileDamaged(row.path, problem)
            yield file
        except pa.ArrowException as exc:  # also what the caller meets while reading
            raise FileDamaged(row.path, str(exc)) from exc


def tables_of(file: pq.ParquetFile, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The file's row groups, one at a time."""
    for index in range(file.metadata.num_row_groups):
        yield file.read_row_group(index, columns=columns)


def fitted(table: pa.Table, kind: pa.Schema) -> pa.Table:
    """The table with these columns: those that an older release did not write are null."""
    if table.schema.equals(kind):
        return table
    arrays = [
        table[field.name].cast(field.type)
        if field.name in table.schema.names
        else pa.nulls(table.num_rows, field.type)
        for field in kind
    ]
    return pa.table(arrays, schema=kind)
