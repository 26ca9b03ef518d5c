"""Which days are rolled up, and what a worker writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pmdaemon.runtime.clock import SystemClock
from sla_server.db import histogram_codec, migrate, rollups
from sla_server.db.archive import manifest
from sla_server.db.archive.files import FileWriter, opened
from sla_server.db.archive.manifest import CUTS, HOURS, MISSED, ROLLUPS, FileRow
from sla_server.db.archive.store import LocalFiles
from sla_server.db.archive.verify import overview
from sla_server.db.config import DatabaseConfig, FilesConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import FileDamaged, FilesUnavailable
from sla_server.db.rollups import DueDay, FilesAt, RollupStore
from sla_server.db.schema import DAY_US
from sla_server.jobs import JobRun
from sla_server.policy_jobs import rollup_job
from sla_server.policy_jobs import rollups as jobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

D0 = 20_000 * DAY_US
FOREVER = 1 << 60


def file(kind: str, day: int, rows: int, cuts: int = 0) -> FileRow:
    at_us = D0 + day * DAY_US
    return FileRow(f"{kind}/{day}-{rows}", kind, at_us, at_us + 7, at_us + 9, rows, cuts, 1, "")


@pytest.mark.parametrize(
    ("rows", "due"),
    [
        ([], []),
        ([file(ROLLUPS, 0, 60), file(MISSED, 0, 40), file(ROLLUPS, 1, 5)], [(D0, 100), (D0 + DAY_US, 5)]),
        ([file(ROLLUPS, 0, 60), file(MISSED, 0, 40), file(HOURS, 0, 1, cuts=100)], []),
        # A late cut has made a further file; then all were merged.
        ([file(ROLLUPS, 0, 60), file(ROLLUPS, 0, 1), file(HOURS, 0, 1, cuts=60)], [(D0, 61)]),
        ([file(ROLLUPS, 0, 61), file(HOURS, 0, 1, cuts=61)], []),
        # Of several files of hours the first one has the number.
        ([file(ROLLUPS, 0, 61), file(HOURS, 0, 1, cuts=61), file(HOURS, 0, 2)], []),
        # Hours stay when their rollups were given up.
        ([file(HOURS, 0, 1, cuts=61)], []),
        # Nor are they made again of what is left, when only some were given up.
        ([file(ROLLUPS, 0, 20), file(HOURS, 0, 1, cuts=61)], []),
    ],
)
def test_a_day_is_due_when_its_files_have_more_rows(rows: list[FileRow], due: list[tuple[int, int]]) -> None:
    assert rollups.due_days(rows, FOREVER, 0) == due


def test_a_day_is_due_once_all_of_it_has_left_sql_and_while_nothing_of_it_was_given_up() -> None:
    rows = [file(ROLLUPS, day, 1) for day in range(3)]
    until_us = D0 + 2 * DAY_US
    assert rollups.due_days(rows, until_us, 0) == [(D0, 1), (D0 + DAY_US, 1)]
    assert rollups.due_days(rows, until_us - 1, 0) == [(D0, 1)]
    assert rollups.due_days(rows, until_us, D0 + 1) == [(D0 + DAY_US, 1)]


def test_a_file_has_one_histogram_a_row_and_counts_only_with_its_row(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    one, other = (np.array([[count] + [0] * 196 + [7]]) for count in (3, 4))
    blobs = [histogram_codec.encode_many(each)[0] for each in (one, other)]
    fields = rollups.file_schema(HOURS)
    columns = {name: pa.array([5, 6], pa.int64()) for name in fields.names}
    lists = pa.array([blobs, [b""]], pa.list_(pa.binary()))
    batch = pa.record_batch({**columns, "hist": lists})
    row = rollups.write(files, HOURS, D0, 99, [batch])
    assert row is not None
    assert (row.rows, row.kind, row.min_us, row.max_us) == (2, HOURS, D0, D0 + DAY_US - 1)
    assert row.owner == rollups.OWNER
    assert rollups.parse(rollups.encode(row)) == row
    with opened(files, row):
        table = pq.read_table(tmp_path / row.path, schema=fields)
    dense = histogram_codec.decode_many(table["hist"].to_pylist())
    assert (dense[0, 0], dense[0, 197], dense.sum()) == (7, 14, 21)
    assert table["hour_us"].to_pylist() == [5, 6]


def test_no_row_is_no_file(tmp_path: Path) -> None:
    assert rollups.write(LocalFiles(tmp_path), HOURS, D0, 99, []) is None
    assert list(tmp_path.rglob("*.parquet")) == []


def test_of_two_servers_that_roll_up_a_day_at_once_one_counts(tmp_path: Path) -> None:
    config = DatabaseConfig()
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    day_us = SystemClock().unix_us() // DAY_US * DAY_US - 20 * DAY_US
    with begin(engine) as connection:
        manifest.add(connection, FileRow("rollups/a", ROLLUPS, 1, day_us, day_us, 100, 0, 1, ""))
    stores = [RollupStore(engine, config, tmp_path, SystemClock()) for _ in range(2)]
    days = [store.due()[0] for store in stores]
    made = [FileRow(f"hours/{name}", HOURS, 2, day_us, day_us + DAY_US - 1, 5, 0, 1, "") for name in "ab"]
    assert stores[0].commit(days[0], made[:1])
    assert not stores[1].commit(days[1], made[1:])
    with begin(engine) as connection:
        rows = manifest.rows(connection, in_use=True)
    assert [row.path for row in rows if row.kind == HOURS] == ["hours/a"]
    assert stores[0].due() == []
    engine.dispose()


@pytest.mark.parametrize(("is_shared", "mode"), [(True, 0o640), (False, 0o600)])
def test_files_of_workers_are_as_readable_as_the_server_s(tmp_path: Path, is_shared: bool, mode: int) -> None:
    """The policy job may have a user of its own, and reads the hours."""
    config = DatabaseConfig(files=FilesConfig(group_readable=is_shared))
    engine = make_engine(config, tmp_path)
    files = RollupStore(engine, config, tmp_path, SystemClock()).files_at.open()
    columns = {name: pa.array([5], pa.int64()) for name in rollups.file_schema(HOURS).names}
    batch = pa.record_batch({**columns, "hist": pa.array([[b""]], pa.list_(pa.binary()))})
    before = os.umask(0o077)
    try:
        row = rollups.write(files, HOURS, D0, 99, [batch])
    finally:
        os.umask(before)
    assert row is not None
    path = config.resolved_parquet_dir(tmp_path) / row.path
    assert path.stat().st_mode & 0o777 == mode
    assert path.parent.stat().st_mode & 0o777 == (0o750 if is_shared else 0o700)
    engine.dispose()


def test_a_damaged_file_is_not_summed_up_and_no_day_waits_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DatabaseConfig()
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    store = RollupStore(engine, config, tmp_path, SystemClock())
    first_us = SystemClock().unix_us() // DAY_US * DAY_US - 20 * DAY_US
    files = LocalFiles(config.resolved_parquet_dir(tmp_path))
    for day_us in (first_us, first_us + DAY_US):
        with FileWriter(files, f"rollups/{day_us}/a.parquet", pa.schema([("slot_us", pa.int64())])) as writer:
            writer.write(pa.table({"slot_us": [day_us]}))
            row = writer.finish(ROLLUPS, 1, day_us, day_us)
        with begin(engine) as connection:
            manifest.add(connection, row)
    days = store.due()
    path = Path(days[0].slot_paths[0])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    rolled: list[DueDay] = []

    def rolled_up(_spark: object, day: DueDay, _store: object) -> list[FileRow]:
        rolled.append(day)
        return []

    monkeypatch.setattr(jobs, "rolled_up", rolled_up)
    notes: list[str] = []
    noted = JobRun(lambda text, rows=None: notes.append(text))
    with pytest.raises(FileDamaged, match="SHA-256"):
        rollup_job.roll_up(cast("SparkSession", None), store, days, noted)
    assert (rolled, notes) == (days[1:], ["1 of 2 days are rolled up"])
    engine.dispose()


def test_status_does_not_call_rollups_cuts(tmp_path: Path) -> None:
    engine = make_engine(DatabaseConfig(), tmp_path)
    migrate.upgrade(engine)
    with begin(engine) as connection:
        manifest.add(connection, file(HOURS, 0, 5, cuts=100))
        manifest.add(connection, file(CUTS, 0, 5, cuts=2))
    found = overview(engine, LocalFiles(tmp_path))["kinds"]
    assert {each["kind"]: each["cuts"] for each in found if each["files"]} == {CUTS: 2, HOURS: 0}
    engine.dispose()


def test_files_to_be_uploaded_wait_where_no_other_user_can_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = FilesAt("", f"file://{tmp_path}/files")
    path = files.open().aside("hours/d/a.parquet").parent
    assert (path.parent, path.stat().st_mode & 0o777) == (tmp_path, 0o700)
    path.chmod(0o777)
    with pytest.raises(FilesUnavailable, match="can be changed by others"):
        files.open()
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(FilesUnavailable, match="can be changed by others"):
        files.open()
