"""The whole way of the files at an fsspec URL: written, merged, moved, given up, verified, backed up."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from sla_server.db import backup
from sla_server.db.archive.store import UrlFiles
from sla_server.db.archive.verify import verify
from sla_server.db.config import FilesConfig
from sla_server.db.errors import ArchiveFailed, FilesUnavailable
from tests.support.archive import FilesRig, later
from tests.support.samples import MINUTE_US, T0, cuts_message, make_cut


@pytest.fixture
def rig(database):
    url = f"memory://{database.data_dir.name}-{database.kind}/parquet"
    config = database.config.model_copy(update={"files": FilesConfig(url=url)})
    site = SimpleNamespace(config=config, data_dir=database.data_dir)
    made = FilesRig(site, clock=later(0), rollups_after_h=3)
    yield made
    made.close()


def fill(rig):
    for n in range(15):
        rig.feed(cuts_message([make_cut(n + 1, start_us=T0 + n * 20 * MINUTE_US)]))
        rig.clock.advance(20 * 60)
        rig.drain()
    rig.drain(final=True)


def seqs(rig):
    found = []
    for row in rig.rows():
        if row.kind == "cuts":
            with rig.files.open(row.path) as file:
                found += sorted(set(pq.read_table(file, columns=["seq"])["seq"].to_pylist()))
    return found


def test_files_at_a_url(rig, tmp_path):
    fill(rig)
    assert isinstance(rig.files, UrlFiles)
    assert seqs(rig) == list(range(1, 16))
    rig.clock.advance(3600)
    assert rig.step(at_once=True).hours_moved == 3
    assert seqs(rig) == list(range(1, 16))
    assert len([row for row in rig.rows() if row.kind == "cuts"]) == 1
    rig.clock.advance(101)
    assert len(rig.step().deleted) == 15 + 6
    assert set(rig.files.listing()) == {row.path for row in rig.rows()}
    report = verify(rig.reader._engine, rig.files)
    assert report.problems == []
    assert report.cuts == 15
    made = backup.make(
        rig.engine, rig.files, tmp_path / "none", tmp_path / "none", tmp_path / "saved", rig.clock
    )
    assert made.files == len(rig.rows()) == 3
    assert rig.parquet_files() == [], "nothing lies in the local directory"


def test_a_store_that_is_away_holds_the_archive_back_and_nothing_else(rig, monkeypatch):
    def away(*_args):
        raise ConnectionError("no route to the object store")

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.files._fs), "put_file", away)
        fill(rig)
        assert rig.rows() == []
        assert rig.reader.totals()["reads"] > 0
        assert {row["kind"] for row in rig.reader.events()} == {"archive-failed"}
    rig.clock.advance(11)
    rig.drain(final=True)
    assert seqs(rig) == list(range(1, 16))


def test_a_store_that_is_away_while_merging_changes_nothing(rig, monkeypatch):
    fill(rig)
    before = rig.rows()
    for method in ("put_file", "cat_file"):
        with monkeypatch.context() as patch:

            def broken(*_args, **_options):
                raise RuntimeError("503 slow down")

            patch.setattr(type(rig.files._fs), method, broken)
            with pytest.raises((ArchiveFailed, FilesUnavailable), match="503 slow down"):
                rig.step(at_once=True)
        assert [row for row in rig.rows() if row.kind == "cuts"] == before
    rig.step(at_once=True)
    assert seqs(rig) == list(range(1, 16))
