"""Whether all is there: manifest against files, files against their checksums and against SQL; overviews.

What ``verify`` compares, all as of one moment (one transaction; replaced files stay for their grace time):

    every row in use     the file is there; size, SHA-256, rows and cuts are those of the row
    every file           has a row; one without is no part of the data (swept at the start), so only a note
    cuts                 no (gateway, epoch, seq) is in two files, or twice in one
    files against SQL    reads, writes, bytes and cuts of each hour: raw cuts against ``rollup_hours`` and
                         ``coverage``, since ``cuts_complete_from_us``; rollups in SQL and in files together
                         against ``rollup_hours``, since the oldest that are left

While records wait in the ingest queue that one cursor has passed and the other has not, sums of raw cuts
may differ rightly: that is then a note, not a problem. Nothing is changed or repaired here.

``overview`` is what ``sla storage status`` shows: files by kind, what waits for deletion, the cursors. It
reads no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import BigInteger, Connection, Engine, Table, cast, func, select

from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.files import opened, tables_of
from sla_server.db.archive.manifest import CUTS, ROLLUPS, FileRow
from sla_server.db.archive.store import FileStore
from sla_server.db.engine import translated
from sla_server.db.engine import where as address_of
from sla_server.db.errors import FileDamaged
from sla_server.db.schema import HOUR_US

SUMMED: Final = ("reads", "writes", "read_bytes", "write_bytes")
_CUT_KEY: Final = ("gateway_id", "epoch", "seq")
Sums = dict[int, Counter[str]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something is wrong.

    Attributes:
        kind: missing, damaged, double, or sums.
        subject: path of a file, a cut, or an hour.
        text: what is wrong, with figures.
    """

    kind: str
    subject: str
    text: str


@dataclass(slots=True)
class VerifyReport:
    """What was found."""

    files: int = 0
    bytes: int = 0
    rows: int = 0
    cuts: int = 0
    hours: int = 0
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: str, subject: str, text: str) -> None:
        """One more problem."""
        self.problems.append(Finding(kind, subject, text))


@dataclass(slots=True)
class _Sql:
    """What SQL said, in one transaction. Sums by the start of the hour."""

    rows: list[FileRow] = field(default_factory=list)
    complete_from_us: int = 0
    waiting: int = 0
    hours: Sums = field(default_factory=dict)
    cuts: Sums = field(default_factory=dict)
    rollups: Sums = field(default_factory=dict)


def verify(engine: Engine, files: FileStore) -> VerifyReport:
    """Compare everything; reads every file.

    Raises:
        DatabaseUnavailable, FilesUnavailable: it could not be found out.
    """
    report = VerifyReport()
    there = files.listing()  # before the rows: a file that is published later may have no row yet
    sql = _read_sql(engine)
    found = _Found()
    for row in sql.rows:
        if row.replaced_us is None:
            _check_file(files, row, report, found)
    _compare_cuts(sql, found, report)
    _compare_rollups(sql, found, report)
    without_row = there.keys() - {row.path for row in sql.rows}
    if without_row:  # look again: its row may have been about to be committed
        with translated(engine), engine.connect() as connection:
            without_row -= {row.path for row in manifest.rows(connection)}
    for name in sorted(without_row):
        text = f"{there[name].bytes} bytes without a row in the manifest"
        report.notes.append(f"{name}: {text}: no part of the data, the server removes it at its next start")
    if sql.waiting:
        report.notes.append(f"{sql.waiting} queue records are in SQL or in files, not in both yet")
    return report


# -- SQL


def _read_sql(engine: Engine) -> _Sql:
    out = _Sql()
    with translated(engine), engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        out.rows = manifest.rows(connection)
        out.complete_from_us = manifest.boundary_us(connection, manifest.COMPLETE_FROM_KEY)
        table = schema.consumed
        seqs = {row.queue: row.queue_seq for row in connection.execute(select(table))}
        queues = _queues(seqs)
        out.waiting = sum(abs(seqs.get(f"{q}/sql", 0) - seqs.get(f"{q}/parquet", 0)) for q in queues)
        out.rollups = _by_hour(connection, schema.rollups, SUMMED, 0)
        # Hours are kept for a year: only those that something can be compared with.
        compared = [row.min_us for row in out.rows if row.kind in (CUTS, ROLLUPS)]
        oldest_us = min([*out.rollups, *compared], default=0) // HOUR_US * HOUR_US
        oldest_us = min(oldest_us, out.complete_from_us or oldest_us)
        out.hours = _by_hour(connection, schema.rollup_hours, SUMMED, oldest_us)
        out.cuts = _by_hour(connection, schema.coverage, ("cuts",), oldest_us)
    return out


def _by_hour(connection: Connection, table: Table, names: tuple[str, ...], from_us: int) -> Sums:
    time = table.primary_key.columns[0]
    hour = (time - time % HOUR_US).label("hour")
    sums = [cast(func.sum(table.c[name]), BigInteger).label(name) for name in names]
    rows = connection.execute(select(hour, *sums).where(time >= from_us).group_by(hour)).mappings()
    return {int(row["hour"]): Counter({name: int(row[name]) for name in names}) for row in rows}


# -- files


@dataclass(slots=True)
class _Found:
    """Sums over all good files, by the start of the hour, and which cuts were seen."""

    cuts: Sums = field(default_factory=dict)
    rollups: Sums = field(default_factory=dict)
    seen: dict[tuple[str, str], list[Any]] = field(default_factory=dict)


def _check_file(files: FileStore, row: FileRow, report: VerifyReport, found: _Found) -> None:
    try:
        with opened(files, row) as file:
            if row.kind == CUTS:
                columns = [*_CUT_KEY, "start", *SUMMED]
                table = pa.concat_tables(tables_of(file, columns))
                _take_cuts(row, table, report, found)
            elif row.kind == ROLLUPS:
                for table in tables_of(file, ["slot_us", *SUMMED]):
                    _add(found.rollups, table["slot_us"], {name: table[name] for name in SUMMED})
    except FileDamaged as exc:
        kind = "missing" if "is missing" in exc.problem else "damaged"
        report.add(kind, row.path, exc.problem)
        return
    report.files += 1
    report.bytes += row.bytes
    report.rows += row.rows


def _take_cuts(row: FileRow, table: pa.Table, report: VerifyReport, found: _Found) -> None:
    start_us = table["start"].cast(pa.int64())
    _add(found.cuts, start_us, {name: table[name] for name in SUMMED})
    keys = table.select(_CUT_KEY).append_column("start_us", start_us)
    cuts = keys.group_by(list(_CUT_KEY)).aggregate([("start_us", "min")])
    report.cuts += cuts.num_rows
    if cuts.num_rows != row.cuts:
        report.add("damaged", row.path, f"it has {cuts.num_rows} cuts, the manifest says {row.cuts}")
    _add(found.cuts, cuts["start_us_min"], {"cuts": pa.array(np.ones(cuts.num_rows, dtype=np.int64))})
    encoded = cuts.select(["gateway_id", "epoch"]).group_by(["gateway_id", "epoch"]).aggregate([])
    for gateway_id, epoch in zip(*(column.to_pylist() for column in encoded.columns), strict=True):
        in_epoch = pc.and_(pc.equal(cuts["gateway_id"], gateway_id), pc.equal(cuts["epoch"], epoch))
        seqs = cuts.filter(in_epoch)["seq"].to_numpy()
        for path, others in found.seen.get((gateway_id, epoch), ()):
            if len(both := np.intersect1d(seqs, others)):
                text = f"{len(both)} cuts of epoch {epoch} from {both[0]} on are in {path} and in {row.path}"
                report.add("double", gateway_id, text)
        found.seen.setdefault((gateway_id, epoch), []).append((row.path, seqs))


def _add(sums: Sums, time_us: Any, columns: dict[str, Any]) -> None:
    """Add columns to the sums of their hours; all of one length."""
    hour = pc.multiply(pc.divide(time_us, HOUR_US), HOUR_US)
    grouped = pa.table({"hour": hour, **columns}).group_by("hour").aggregate([(n, "sum") for n in columns])
    for entry in grouped.to_pylist():
        counter = sums.setdefault(entry["hour"], Counter())
        counter.update({name: entry[f"{name}_sum"] for name in columns})


# -- both


def _compare_cuts(sql: _Sql, found: _Found, report: VerifyReport) -> None:
    first_hour = -(-sql.complete_from_us // HOUR_US) * HOUR_US
    for hour_us in sorted(hour for hour in sql.hours.keys() | found.cuts.keys() if hour >= first_hour):
        report.hours += 1
        expected = Counter(sql.hours.get(hour_us, Counter()))
        names: tuple[str, ...] = SUMMED
        if hour_us in sql.cuts:  # coverage may be given up before its cuts are
            names = (*SUMMED, "cuts")
            expected.update(sql.cuts[hour_us])
        text = _difference("files of cuts", expected, found.cuts.get(hour_us, Counter()), names)
        if text and sql.waiting:
            report.notes.append(f"hour {hour_us}: {text}; records are under way")
        elif text:
            report.add("sums", f"hour {hour_us}", text)


def _compare_rollups(sql: _Sql, found: _Found, report: VerifyReport) -> None:
    files_from_us = min((row.min_us for row in sql.rows if row.kind == ROLLUPS), default=None)
    oldest_us = min([*sql.rollups, *([] if files_from_us is None else [files_from_us])], default=None)
    if oldest_us is None:
        return
    for hour_us in sorted(hour for hour in sql.hours if hour >= oldest_us):
        have = sql.rollups.get(hour_us, Counter()) + found.rollups.get(hour_us, Counter())
        if text := _difference("rollups in SQL and files", sql.hours[hour_us], have, SUMMED):
            report.add("sums", f"hour {hour_us}", text)


def _difference(what: str, expected: Counter[str], have: Counter[str], names: tuple[str, ...]) -> str:
    """Which sums differ; empty if none."""
    parts = [
        f"{name} {have[name]} instead of {expected[name]}" for name in names if have[name] != expected[name]
    ]
    return f"{what} sum up to other figures than SQL: " + ", ".join(parts) if parts else ""


def _queues(names: Iterable[str]) -> set[str]:
    """Ids of ingest queues, from the keys of ``consumed``."""
    return {name.removesuffix("/sql") for name in names if name.endswith("/sql")}


def owners(engine: Engine) -> list[str]:
    """Ids of the ingest queues whose records went into this database.

    Raises:
        DatabaseUnavailable: retryable; also while there is no schema yet.
    """
    with translated(engine), engine.connect() as connection:
        names = connection.execute(select(schema.consumed.c.queue)).scalars()
        return sorted(_queues(names))


def overview(engine: Engine, files: FileStore) -> dict[str, Any]:
    """Figures, and names of files that are missing or without a row.

    Raises:
        DatabaseUnavailable, FilesUnavailable: retryable.
    """
    there = files.listing()
    with translated(engine), engine.connect() as connection:
        rows = manifest.rows(connection)
        complete_from_us = manifest.boundary_us(connection, manifest.COMPLETE_FROM_KEY)
        moved_until_us = manifest.boundary_us(connection, manifest.MOVED_KEY)
        cursors = {row.queue: row.queue_seq for row in connection.execute(select(schema.consumed))}
    used = [row for row in rows if row.replaced_us is None]
    replaced = [row for row in rows if row.replaced_us is not None]
    kinds = []
    for kind in manifest.KINDS:
        of_kind = [row for row in used if row.kind == kind]
        if not of_kind and kind in (*manifest.BY_HOUR, *manifest.BY_DAY):
            continue  # the rollup job never ran here
        kinds.append(
            {
                "kind": kind,
                "files": len(of_kind),
                "bytes": sum(row.bytes for row in of_kind),
                "rows": sum(row.rows for row in of_kind),
                # Of hours the column says of how many rollups they were made (``db.rollups``).
                "cuts": sum(row.cuts for row in of_kind) if kind == CUTS else 0,
                "min_us": min((row.min_us for row in of_kind), default=None),
                "max_us": max((row.max_us for row in of_kind), default=None),
            }
        )
    known = {row.path for row in rows}
    return {
        "files_at": files.address,
        "database": address_of(engine),
        "kinds": kinds,
        "replaced": {"files": len(replaced), "bytes": sum(row.bytes for row in replaced)},
        "missing": sorted(row.path for row in used if row.path not in there),
        "orphans": sorted(name for name in there if name not in known),
        "cuts_complete_from_us": complete_from_us,
        "rollups_moved_until_us": moved_until_us,
        "cursors": cursors,
    }
