"""Writing one file, reading what must be it, and rows of an older release."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest

from sla_server.db import schema
from sla_server.db.archive import files as parquet
from sla_server.db.archive.store import LocalFiles
from sla_server.db.archive.upkeep import merge_files
from sla_server.db.arrow import arrow_schema
from sla_server.db.errors import ArchiveFailed, FileDamaged
from sla_server.db.ingest.batch import IngestedCut
from tests.support.samples import T0, make_cut

NAME = "cuts/2027-01-15/abcd-1-1.parquet"


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


def table(*seqs):
    return parquet.cut_table([IngestedCut(make_cut(seq), 0, T0) for seq in seqs])


def put(files, name, rows, schema=parquet.CUT_SCHEMA, kind="cuts"):
    with parquet.FileWriter(files, name, schema) as writer:
        writer.write(rows)
        return writer.finish(kind, T0, T0, T0 + 1, cuts=1)


def test_what_was_written_is_read_back(files):
    row = put(files, NAME, table(1))
    with parquet.opened(files, row) as file:
        assert file.read().equals(table(1))
    assert (row.rows, row.path, row.kind) == (2, NAME, "cuts")


def test_lists_have_no_statistics_and_everything_else_has(files):
    """What readers look for; of lists they cannot use them, and they take time to make."""
    row = put(files, NAME, table(1, 2))
    with parquet.opened(files, row) as file:
        group = file.metadata.row_group(0)
        chunks = [group.column(index) for index in range(group.num_columns)]
    without = {chunk.path_in_schema.partition(".")[0] for chunk in chunks if not chunk.is_stats_set}
    assert without == {field.name for field in parquet.CUT_SCHEMA if pa.types.is_list(field.type)}


def test_a_file_that_is_not_finished_leaves_nothing(files, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1)
    with parquet.FileWriter(files, NAME, parquet.CUT_SCHEMA) as writer:
        writer.write(table(1))
        assert len(list(tmp_path.rglob("_*.parquet"))) == 1
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_disk_that_is_full_is_an_error_of_ours(files, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "publish", full)
    with pytest.raises(ArchiveFailed, match="No space left"):
        put(files, NAME, table(1))
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_row_group_that_could_not_be_written_is_told_by_the_next_call(files, tmp_path, monkeypatch):
    def full(*_args, **_how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1)
    with parquet.FileWriter(files, NAME, parquet.CUT_SCHEMA) as writer:
        writer.write(table(1))
        writer._wait()
        monkeypatch.setattr(writer._writer, "write_table", full)
        writer.write(table(2))
        with pytest.raises(ArchiveFailed, match="No space left"):
            writer.write(table(3))
    assert list(tmp_path.rglob("*.parquet")) == []


def fails_once(writer, error):
    """The encoder of a writer whose next row group ends with ``error``, and whose later ones are written."""
    true_write, errors = writer._writer.write_table, [error]

    def write_table(rows, **how):
        if errors:
            raise errors.pop()
        true_write(rows, **how)

    return write_table


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), ArchiveFailed), (KeyError("a defect"), KeyError)],
    ids=["memory", "defect"],
)
def test_a_row_group_that_is_lost_for_whatever_reason_is_an_error(files, tmp_path, monkeypatch, error, told):
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1)
    with parquet.FileWriter(files, NAME, parquet.CUT_SCHEMA) as writer:
        writer.write(table(1))
        writer._wait()
        monkeypatch.setattr(writer._writer, "write_table", fails_once(writer, error))
        writer.write(table(2))
        with pytest.raises(told):
            writer.write(table(3))
        with pytest.raises(told):
            writer.finish("cuts", T0, T0, T0 + 1)
    assert list(tmp_path.rglob("*.parquet")) == []


def threads_that_lose(monkeypatch, doomed):
    """Threads number ``doomed`` of those started under ``db-encode`` end before their target has begun."""
    true_start, count = parquet.ThreadGroup.start, iter(range(1, 1000))

    def start(group, name, target, limit_s=120.0):
        lost = name == "db-encode" and next(count) == doomed
        return true_start(group, name, (lambda: None) if lost else target, limit_s)

    monkeypatch.setattr(parquet.ThreadGroup, "start", start)


def test_a_file_that_lacks_a_row_group_is_not_published(files, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1)
    threads_that_lose(monkeypatch, 2)
    with parquet.FileWriter(files, NAME, parquet.CUT_SCHEMA) as writer:
        for number in (1, 2, 3):
            writer.write(table(number))
        with pytest.raises(ArchiveFailed, match="holds 4 rows of the 6"):
            writer.finish("cuts", T0, T0, T0 + 1)
    assert list(tmp_path.rglob("*.parquet")) == []


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_row_group_for_which_there_was_no_thread_is_a_file_that_failed(files, tmp_path, monkeypatch, error):
    """The writer writes it again from the queue; any other error would end dbmanager."""

    def start(*_given):
        raise error

    with parquet.FileWriter(files, NAME, parquet.CUT_SCHEMA) as writer:
        writer.write(table(1))
        monkeypatch.setattr(parquet.ThreadGroup, "start", start)
        with pytest.raises(ArchiveFailed, match="thread"):
            writer.finish("cuts", T0, T0, T0 + 1)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_merged_file_that_lacks_a_row_group_is_not_published(files, tmp_path, monkeypatch):
    parts = [put(files, NAME.replace("1-1", f"{number}-{number}"), table(number)) for number in (1, 2, 3)]
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1)
    threads_that_lose(monkeypatch, 2)
    before = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(ArchiveFailed, match="holds 4 rows of the 6"):
        merge_files(files, parts)
    assert sorted(tmp_path.rglob("*.parquet")) == before


def test_bytes_are_those_of_row_groups_that_are_written(files, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 4)
    with parquet.FileWriter(files, NAME, parquet.CUT_SCHEMA) as writer:
        writer.write(table(1))
        assert writer.bytes == 0
        writer.write(table(2))
        writer._wait()
        assert writer.bytes > 100
        row = writer.finish("cuts", T0, T0, T0 + 1)
    assert row.bytes > writer.bytes - 1
    assert row.rows == 4


@pytest.mark.parametrize(
    "change", [{"bytes": 1}, {"sha256": "0"}, {"rows": 9}, {"path": "cuts/x/no.parquet"}]
)
def test_a_file_that_is_not_what_its_row_says(files, change):
    row = dataclasses.replace(put(files, NAME, table(1)), **change)
    with pytest.raises(FileDamaged), parquet.opened(files, row):
        pass


def test_bytes_that_are_no_parquet(files, tmp_path):
    row = put(files, NAME, table(1))
    (tmp_path / NAME).write_bytes(b"PAR1 but not really PAR1")
    with (tmp_path / NAME).open("rb") as file:
        sha256 = parquet.digest_of(file)
    row = dataclasses.replace(row, bytes=(tmp_path / NAME).stat().st_size, sha256=sha256)
    with pytest.raises(FileDamaged), parquet.opened(files, row):
        pass


def test_rows_of_an_older_release_are_merged_with_nulls(files):
    old_schema = pa.schema(
        [field for field in parquet.CUT_SCHEMA if field.name not in ("gap", "hist_bucket")]
    )
    old = put(files, NAME, table(1).select(old_schema.names), old_schema)
    new = put(files, NAME.replace("1-1", "2-2"), table(2))
    row = merge_files(files, [old, new])
    with parquet.opened(files, row) as file:
        read = file.read()
    assert read.schema.equals(parquet.CUT_SCHEMA)
    assert read["gap"].to_pylist() == [None, None, 0, 0]
    assert read["hist_bucket"].to_pylist()[:2] == [None, None]
    assert read["seq"].to_pylist() == [1, 1, 2, 2]
    assert read.slice(2).equals(table(2))


@pytest.mark.parametrize("old_first", [True, False])
def test_rollups_of_an_older_release_are_merged_with_those_of_today(files, old_first):
    """In the hour of an upgrade there are both; which comes first decides nothing."""
    today = arrow_schema(schema.rollups)
    former = pa.schema([field for field in today if field.name not in schema.PLACED])
    names = [f"rollups/2027-01-15/abcd-{number}-{number}.parquet" for number in (1, 2)]
    made = []
    for number, (name, kind) in enumerate(zip(names, (former, today), strict=True), 1):
        row = {field.name: b"" if pa.types.is_binary(field.type) else number for field in kind}
        made.append(put(files, name, pa.Table.from_pylist([row], schema=kind), kind, "rollups"))
    row = merge_files(files, made if old_first else made[::-1])
    with parquet.opened(files, row) as file:
        read = file.read().sort_by("slot_us")
    assert read.schema.equals(today)
    assert read["sequential"].to_pylist() == [None, 2]
    assert read["arrived"].to_pylist() == [1, 2]
