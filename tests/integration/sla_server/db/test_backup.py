"""Backup and restore by the documented commands, on both databases; ingest goes on afterwards."""

from __future__ import annotations

import json
import shutil
from itertools import count

import pytest
from click.testing import CliRunner

from pmdaemon.diskqueue import format as disk_format
from sla_server.cli.client import Client
from sla_server.cli.main import cli
from sla_server.db import backup
from sla_server.db.archive.verify import verify
from sla_server.db.config import DatabaseConfig
from sla_server.db.errors import DbError, FileDamaged
from sla_server.db.ingest import queue as ingest_queue
from sla_server.db.ingest.queue import read_beside
from sla_server.db.process import directory_lock
from tests.support.archive import HOUR_US, FilesRig, archived, later
from tests.support.database import Rig
from tests.support.samples import MINUTE_US, T0, cuts_message, make_cut, streams_message

_NUMBER = count(1)


class Site:
    """A server's state, and the commands with its configuration."""

    def __init__(self, database, config_path):
        self.database = database
        self.path = config_path
        url = json.dumps(database.config.resolved_url(database.data_dir))
        config_path.write_text(
            f"data_dir = {json.dumps(str(database.data_dir))}\n[database]\nurl = {url}\n"
            f"queue_bytes = {16 << 20}\n"
        )

    def sla(self, *arguments):
        command = ["storage", *map(str, arguments), "--config", str(self.path)]
        return CliRunner().invoke(cli, command, obj=Client("http://127.0.0.1:1"), catch_exceptions=False)

    def do(self, *arguments):
        done = self.sla(*arguments)
        assert done.exit_code == 0, done.stderr
        return done.stdout


@pytest.fixture
def site(database, tmp_path, monkeypatch):
    monkeypatch.delenv("SLA_CONFIG", raising=False)
    return Site(database, tmp_path / "sla.toml")


@pytest.fixture
def empty_site(site, tmp_path, request):
    """Another machine: an empty database, an empty data directory."""
    data_dir = tmp_path / "elsewhere"
    data_dir.mkdir()
    url = ""
    if site.database.kind == "postgresql":
        url = request.getfixturevalue("postgres").create(f"restored{next(_NUMBER)}")
    config = DatabaseConfig(url=url, queue_bytes=16 << 20)
    return Site(type(site.database)(config, data_dir, site.database.kind), tmp_path / "elsewhere.toml")


def fill(site, hours=4):
    """Some hours of cuts in files of their own; rollups of the first have moved. Returns the cuts."""
    rig = FilesRig(site.database, clock=later(0), rollups_after_h=3)
    rig.feed(streams_message())
    items = []
    for n in range(hours):
        some = [make_cut(3 * n + k + 1, start_us=T0 + n * HOUR_US + k * 20 * MINUTE_US) for k in range(3)]
        rig.feed(cuts_message(some))
        rig.clock.advance(3600)
        rig.drain()
        items += some
    assert rig.step().hours_moved == 1
    rig.close()
    return items


def check(site, items):
    """SQL and files hold exactly these cuts."""
    rig = FilesRig(site.database, clock=later(5))
    report = verify(rig.reader._engine, rig.files)
    assert report.problems == []
    assert archived(rig) == [item.seq for item in items]
    totals = rig.reader.totals()
    assert totals["reads"] == sum(int(item.column("reads").sum()) for item in items)
    assert rig.reader.watermarks()[0][2] == items[-1].seq
    rig.close()


def test_a_restored_server_goes_on(site, empty_site, tmp_path):
    (site.database.data_dir / "api.token").write_text("secret\n")
    (site.database.data_dir / "api.token").chmod(0o600)
    items = fill(site)
    assert "6 files" in site.do("backup", tmp_path / "saved")
    told = empty_site.do("restore", tmp_path / "saved")
    assert "6 files restored" in told
    assert "6 files are whole" in empty_site.do("verify")
    token = empty_site.database.data_dir / "api.token"
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("secret\n", 0o600)
    check(empty_site, items)
    rig = Rig(empty_site.database.config, empty_site.database.data_dir, clock=later(5))
    more = [make_cut(13, start_us=T0 + 4 * HOUR_US), make_cut(14, start_us=T0 + 4 * HOUR_US)]
    rig.feed(cuts_message(more))
    rig.drain(final=True)
    rig.close()
    check(empty_site, items + more)
    check(site, items)


@pytest.mark.parametrize("is_running", [True, False])
def test_cuts_that_no_file_has_yet_are_in_the_backup(site, empty_site, tmp_path, is_running):
    """SQL counts them, the file under way is only in the queue: a backup is of one moment all the same."""
    items = fill(site)
    rig = Rig(site.database.config, site.database.data_dir, clock=later(4))
    more = [make_cut(13 + n, start_us=T0 + 4 * HOUR_US) for n in range(4)]
    for item in more:
        rig.feed(cuts_message([item]))
    rig.clock.advance(20)
    rig.drain()
    assert rig.writer.sql_seq > rig.writer.parquet_seq
    if not is_running:
        rig.die()
    assert "7 files" in site.do("backup", tmp_path / "saved")
    if is_running:
        rig.close()
    head = backup.read_head(tmp_path / "saved")
    sizes = [path.stat().st_size for path in (tmp_path / "saved" / "parquet").rglob("*.parquet")]
    assert (head.files, head.bytes) == (7, sum(sizes)), "the file of the backup's own counts"
    assert "7 files restored" in empty_site.do("restore", tmp_path / "saved")
    told = empty_site.do("verify")
    assert "7 files are whole" in told
    assert "note" not in told, told
    check(empty_site, items + more)


def test_a_restored_database_takes_nothing_twice_from_a_kept_queue(site, tmp_path, request):
    items = fill(site)
    rig = Rig(site.database.config, site.database.data_dir, clock=later(4))
    more = [make_cut(13 + n, start_us=T0 + 4 * HOUR_US) for n in range(6)]
    for number, item in enumerate(more):
        rig.feed(cuts_message([item]))
        rig.clock.advance(20)
        rig.drain()
        if number == 2:
            site.do("backup", tmp_path / "saved")
    rig.drain(final=True)
    rig.close()
    site = emptied(site, request)
    site.do("restore", tmp_path / "saved")
    told = site.do("verify")
    assert told.count("no part of the data, the server removes it at its next start") == 1
    rig = Rig(site.database.config, site.database.data_dir, clock=later(5))
    assert len(rig.swept) == 1
    rig.drain(final=True)
    rig.close()
    assert "note" not in site.do("verify")
    check(site, items + more)


def test_records_that_were_written_over_meanwhile_fail_the_backup(site, tmp_path):
    fill(site)
    rig = Rig(site.database.config, site.database.data_dir, clock=later(4))
    rig.feed(cuts_message([make_cut(13, start_us=T0 + 4 * HOUR_US)]))
    queue_dir = site.database.config.resolved_queue_dir(site.database.data_dir)
    newest = rig.queue.synced_seq
    held = read_beside(queue_dir, lambda _id: (newest - 1, newest))
    assert [record.queue_seq for record in held] == [newest]
    for _ in range(40):  # more than the ring holds
        rig.queue.append_many([bytes(100_000)])
        rig.queue.delete_through(rig.queue.synced_seq - 1)
    with pytest.raises(DbError, match=f"record {newest} of .* was written over"):
        read_beside(queue_dir, lambda _id: (newest - 1, newest))
    rig.close()


def test_a_record_that_is_written_over_while_it_is_copied_fails_the_backup(site, monkeypatch):
    fill(site)
    rig = Rig(site.database.config, site.database.data_dir, clock=later(4))
    rig.feed(cuts_message([make_cut(13, start_us=T0 + 4 * HOUR_US)]))
    queue_dir = site.database.config.resolved_queue_dir(site.database.data_dir)
    newest, plain = rig.queue.synced_seq, ingest_queue.scan

    def scanned(ring, seed):
        found = plain(ring, seed)
        for _ in range(40):  # more than the ring holds
            rig.queue.append_many([bytes(100_000)])
            rig.queue.delete_through(rig.queue.synced_seq - 1)
        return found

    monkeypatch.setattr(ingest_queue, "scan", scanned)
    with pytest.raises(DbError, match=f"record {newest} of .* was written over"):
        read_beside(queue_dir, lambda _id: (newest - 1, newest))
    rig.close()


def test_a_record_that_is_written_over_before_it_is_seen_fails_the_backup(site, monkeypatch):
    """While the scan is between it and the one before it, which was seen and is not wanted."""
    fill(site)
    rig = Rig(site.database.config, site.database.data_dir, clock=later(4))
    rig.queue.append_many([bytes(100_000), bytes(100_000)])
    queue_dir = site.database.config.resolved_queue_dir(site.database.data_dir)
    newest, plain = rig.queue.synced_seq, ingest_queue.scan
    pieces = []

    def scanned(ring, seed):
        (before,) = [row for row in plain(ring, seed).intact.tolist() if row[2] == newest - 1]

        def release():
            pieces.append(None)
            if len(pieces) == before[3] // disk_format.PIECE_BYTES + 1:
                for _ in range(40):  # more than the ring holds
                    rig.queue.append_many([bytes(100_000)])
                    rig.queue.delete_through(rig.queue.synced_seq - 1)

        monkeypatch.setattr(disk_format, "PIECE_BYTES", 4096)
        return plain(ring, seed, release)

    monkeypatch.setattr(ingest_queue, "scan", scanned)
    with pytest.raises(DbError, match=f"record {newest} of .* was written over"):
        read_beside(queue_dir, lambda _id: (newest - 1, newest))
    rig.close()


def emptied(site, request):
    """The same machine; its database is lost, its queue is not."""
    if site.database.kind == "sqlite":
        for path in site.database.data_dir.glob("sla.db*"):
            path.unlink()
        return site
    url = request.getfixturevalue("postgres").create(f"restored{next(_NUMBER)}")
    config = site.database.config.model_copy(update={"url": url})
    return Site(type(site.database)(config, site.database.data_dir, "postgresql"), site.path)


def test_what_the_queue_still_holds_is_applied_again(site, tmp_path, request):
    """Only the database was lost: the queue has what came after the backup."""
    items = fill(site)
    site.do("backup", tmp_path / "saved")
    rig = Rig(site.database.config, site.database.data_dir, clock=later(4))
    more = [make_cut(13, start_us=T0 + 4 * HOUR_US), make_cut(14, start_us=T0 + 4 * HOUR_US)]
    for item in more:
        rig.feed(cuts_message([item]))
    rig.drain(final=True)
    rig.close()
    site = emptied(site, request)
    site.do("restore", tmp_path / "saved")
    rig = Rig(site.database.config, site.database.data_dir, clock=later(5))
    assert len(rig.swept) == 1, "the file written after the backup has no row now"
    rig.drain(final=True)
    rig.close()
    check(site, items + more)


def test_the_server_may_run_and_write_meanwhile(site, empty_site, tmp_path, monkeypatch):
    """Files are merged and cuts come in while files are copied: the backup is of the moment it began."""
    items = fill(site)
    rig = FilesRig(site.database, clock=later(4))
    plain = backup.copy

    def beside(files, target, row):
        rig.step(at_once=True)
        rig.feed(cuts_message([make_cut(13 + next(_NUMBER), start_us=T0 + 4 * HOUR_US)]))
        plain(files, target, row)

    with monkeypatch.context() as patch:
        patch.setattr(backup, "copy", beside)
        site.do("backup", tmp_path / "saved")
    rig.close()
    empty_site.do("restore", tmp_path / "saved")
    check(empty_site, items)


def test_a_backup_is_whole_or_none(site, tmp_path):
    fill(site)
    rig = FilesRig(site.database)
    victim = rig.rows()[0]
    (rig.parquet_dir / victim.path).write_bytes(b"x" * victim.bytes)
    rig.close()
    with pytest.raises(FileDamaged, match="SHA-256"):
        backup.make(rig.engine, rig.files, site.database.data_dir, tmp_path, tmp_path / "saved", rig.clock)
    rig.engine.dispose()
    assert not (tmp_path / "saved" / "backup.json").exists()
    with pytest.raises(DbError, match="no complete backup"):
        backup.read_head(tmp_path / "saved")


@pytest.mark.parametrize("text", ["{", "[]", "7", "{}", '{"format": 1, "revision": "0001", "files": 3}'])
def test_a_head_that_is_none_is_told(tmp_path, text):
    (tmp_path / "backup.json").write_text(text)
    with pytest.raises(DbError, match="no complete backup"):
        backup.read_head(tmp_path)


@pytest.mark.parametrize("newer", [{"format": 3}, {"format": 1, "revision": "9999"}])
def test_a_backup_of_a_newer_release_is_told(tmp_path, newer):
    (tmp_path / "backup.json").write_text(json.dumps({"revision": "0001", "software": "9.0", **newer}))
    with pytest.raises(DbError, match=r"release 9\.0, which is newer"):
        backup.read_head(tmp_path)


def test_restoring_over_something_is_refused(site, tmp_path):
    items = fill(site)
    site.do("backup", tmp_path / "saved")
    done = site.sla("restore", tmp_path / "saved")
    assert done.exit_code == 1
    assert "not empty" in done.stderr
    done = site.sla("backup", tmp_path / "saved")
    assert done.exit_code == 1
    assert "is not empty" in done.stderr
    check(site, items)


def test_restoring_beside_a_running_server_is_refused(site, empty_site, tmp_path):
    fill(site)
    site.do("backup", tmp_path / "saved")
    with directory_lock(empty_site.database.data_dir):
        done = empty_site.sla("restore", tmp_path / "saved")
    assert done.exit_code == 1
    assert "another database manager" in done.stderr


def test_damaged_and_foreign_backups_are_refused(site, empty_site, tmp_path):
    fill(site)
    site.do("backup", tmp_path / "saved")
    for changed, words in (
        ({"revision": "9999"}, "newer"),
        ({"database": "oracle"}, "backup is of oracle"),
        ({"sql_sha256": "0"}, "missing or damaged"),
    ):
        spoiled = tmp_path / words.replace(" ", "-")
        shutil.copytree(tmp_path / "saved", spoiled)
        head = json.loads((spoiled / "backup.json").read_text())
        (spoiled / "backup.json").write_text(json.dumps({**head, **changed}))
        done = empty_site.sla("restore", spoiled)
        assert done.exit_code == 1
        assert words in done.stderr
    empty_site.do("restore", tmp_path / "saved")


def test_damaged_and_missing_files_of_a_backup_are_named_when_it_is_brought_back(site, empty_site, tmp_path):
    fill(site)
    site.do("backup", tmp_path / "saved")
    first, second = sorted((tmp_path / "saved" / "parquet").rglob("*.parquet"))[:2]
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    second.unlink()
    done = empty_site.sla("restore", tmp_path / "saved")
    assert done.exit_code == 1
    found = [line for line in done.stdout.splitlines() if line.startswith("damaged in the backup: ")]
    names = [path.relative_to(tmp_path / "saved" / "parquet").as_posix() for path in (first, second)]
    assert found == [f"damaged in the backup: {name}" for name in names]
    assert "restored as of" in done.stdout


def test_without_a_schema_there_is_nothing_to_back_up(empty_site, tmp_path):
    done = empty_site.sla("backup", tmp_path / "saved")
    assert done.exit_code in (1, 69, 75)
    assert not (tmp_path / "saved" / "backup.json").exists()


@pytest.mark.db
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_missing_program_is_named(site, tmp_path, monkeypatch):
    fill(site)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = site.sla("backup", tmp_path / "saved")
    assert done.exit_code == 1
    assert "apt-get install postgresql-client" in done.stderr


def test_a_forged_head_writes_nothing_outside(site, empty_site, tmp_path):
    fill(site)
    target = tmp_path / "backup"
    site.do("backup", target)
    head = json.loads((target / "backup.json").read_text())
    (target / "backup.json").write_text(json.dumps({**head, "state": ["../OWNED"]}))
    (target / "OWNED").write_text("bad")
    refused = empty_site.sla("restore", target)
    assert refused.exit_code != 0
    assert "'../OWNED' is not the name of a state file" in refused.stderr
    assert list(tmp_path.rglob("OWNED")) == [target / "OWNED"]


def test_a_state_file_that_is_a_link_is_not_followed(site, empty_site, tmp_path):
    fill(site)
    (site.database.data_dir / "api.token").write_text("t" * 43)
    target = tmp_path / "backup"
    site.do("backup", target)
    (target / "state" / "api.token").unlink()
    (target / "state" / "api.token").symlink_to("/etc/passwd")
    assert empty_site.sla("restore", target).exit_code != 0
    assert not (empty_site.database.data_dir / "api.token").exists()


def test_a_backup_is_closed_to_others(site, tmp_path):
    fill(site)
    target = tmp_path / "backup"
    target.mkdir(0o755)
    site.do("backup", target)
    assert target.stat().st_mode & 0o777 == 0o700
