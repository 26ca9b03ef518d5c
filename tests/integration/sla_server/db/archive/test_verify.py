"""``sla storage``: status, compact and verify, on both databases; every kind of harm is named."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from sqlalchemy import text

from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.main import cli
from sla_server.db.archive import manifest
from sla_server.db.archive.files import digest_of
from sla_server.db.archive.verify import verify
from sla_server.db.engine import begin
from tests.integration.sla_server.db.conftest import copy_of, new_database
from tests.support.archive import HOUR_US, FilesRig, later
from tests.support.samples import MINUTE_US, T0, cuts_message, gateway, make_cut


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def original(request, tmp_path_factory):
    """Cuts of five hours of two gateways, a file an hour; three hours of rollups have moved to files."""
    database = new_database(request, request.param, tmp_path_factory.mktemp("original"))
    made = FilesRig(database, clock=later(0), rollups_after_h=3)
    for n in range(5):
        at_us = T0 + n * HOUR_US
        items = [make_cut(3 * n + k + 1, start_us=at_us + k * 20 * MINUTE_US) for k in range(3)]
        items.append(make_cut(n + 1, gw=gateway(2), start_us=at_us, streams=(1,)))
        items.append(make_cut(n + 1, gw=gateway(3), start_us=at_us, streams=()))
        made.feed(cuts_message(items))
        made.clock.advance(3600)
        made.drain()
    made.clock.advance(3600)
    assert made.step().hours_moved == 3
    made.close()
    return database


@pytest.fixture
def database(request, original, tmp_path):
    return copy_of(request, original, tmp_path)


@pytest.fixture
def rig(database):
    made = FilesRig(database, clock=later(6), rollups_after_h=3)
    yield made
    made.close()


@pytest.fixture
def sla(database, monkeypatch):
    """Runs ``sla storage ...`` with a configuration that names this database; returns status and output."""
    monkeypatch.delenv("SLA_CONFIG", raising=False)
    path = database.data_dir / "sla.toml"
    url = json.dumps(database.config.resolved_url(database.data_dir))
    # The commands live in the present, the data in a time that will be past some day.
    limits = "cuts_max_age_h = 1e7\nrollups_after_h = 1e7\nrollups_max_age_days = 1e6\n"
    data_dir = json.dumps(str(database.data_dir))
    path.write_text(f"data_dir = {data_dir}\n[database]\nurl = {url}\n[database.files]\n{limits}")

    def run(*arguments):
        command = ["storage", *arguments, "--config", str(path)]
        return CliRunner().invoke(cli, command, obj=Client("http://127.0.0.1:1"), catch_exceptions=False)

    return run


def checked(rig):
    return verify(rig.reader._engine, rig.files)


def kinds(report):
    return [(problem.kind, problem.subject) for problem in report.problems]


def of_kind(rig, kind="cuts"):
    return [row for row in rig.rows() if row.kind == kind]


def test_whole_files_are_whole(rig):
    report = checked(rig)
    assert report.problems == []
    assert report.notes == []
    assert (report.cuts, report.hours, report.files) == (25, 5, 5 + 6)
    assert report.rows == sum(row.rows for row in rig.rows())


def test_merging_and_moving_change_nothing(rig):
    rig.step(at_once=True)
    report = checked(rig)
    assert report.problems == []
    assert (report.cuts, report.files) == (25, 3)


def test_a_deleted_file(rig):
    victim = of_kind(rig)[1]
    rig.files.remove(victim.path)
    report = checked(rig)
    assert kinds(report) == [("missing", victim.path), ("sums", f"hour {T0 + HOUR_US}")]
    assert "reads 0 instead of" in report.problems[1].text
    assert "cuts 0 instead of 5" in report.problems[1].text


@pytest.mark.parametrize("kind", ["cuts", "rollups", "missed"])
def test_a_truncated_file(rig, kind):
    victim = of_kind(rig, kind)[0]
    os.truncate(rig.parquet_dir / victim.path, victim.bytes - 1)
    report = checked(rig)
    assert kinds(report)[0] == ("damaged", victim.path)
    assert f"{victim.bytes - 1} bytes, the manifest says {victim.bytes}" in report.problems[0].text


def test_a_flipped_byte_anywhere(rig):
    victim = of_kind(rig)[0]
    path = rig.parquet_dir / victim.path
    whole = path.read_bytes()
    for offset in range(0, len(whole), max(1, len(whole) // 7)):
        data = bytearray(whole)
        data[offset] ^= 0x10
        path.write_bytes(data)
        assert kinds(checked(rig))[0] == ("damaged", victim.path), offset
    path.write_bytes(whole)
    assert checked(rig).problems == []


def test_an_orphan(rig):
    name = of_kind(rig)[0].path.replace(".parquet", "7.parquet")
    (rig.parquet_dir / name).write_bytes(b"12345")
    report = checked(rig)
    assert kinds(report) == []
    assert report.notes[0].startswith(f"{name}: 5 bytes without a row")


def test_a_row_that_was_lost(rig):
    victim = of_kind(rig)[2]
    with begin(rig.engine) as connection:
        connection.execute(text("DELETE FROM manifest WHERE path = :path"), {"path": victim.path})
    report = checked(rig)
    assert sorted(kinds(report)) == [("sums", f"hour {T0 + 2 * HOUR_US}")]
    assert report.notes[0].startswith(victim.path)


def test_a_file_that_counts_twice(rig):
    victim = of_kind(rig)[0]
    copy = victim.path.replace(".parquet", "7.parquet")
    (rig.parquet_dir / copy).write_bytes((rig.parquet_dir / victim.path).read_bytes())
    with begin(rig.engine) as connection:
        manifest.add(connection, {**asdict(victim), "path": copy})
    found = kinds(checked(rig))
    assert [subject for kind, subject in found if kind == "double"] == [gateway(n) for n in (1, 2, 3)]
    assert ("sums", f"hour {T0}") in found


def test_a_file_with_other_contents_and_a_fitting_row(rig):
    """Somebody rewrote a file and its row: only SQL still knows better."""
    victim = of_kind(rig)[0]
    path = rig.parquet_dir / victim.path
    table = pq.read_table(path)
    changed = table.set_column(
        table.schema.get_field_index("reads"), "reads", pa.compute.add(table["reads"], 1)
    )
    pq.write_table(changed, path)
    with path.open("rb") as file:
        values = {"bytes": path.stat().st_size, "sha256": digest_of(file), "path": victim.path}
    with begin(rig.engine) as connection:
        connection.execute(
            text("UPDATE manifest SET bytes = :bytes, sha256 = :sha256 WHERE path = :path"), values
        )
    report = checked(rig)
    assert kinds(report) == [("sums", f"hour {T0}")]
    assert "reads" in report.problems[0].text


def test_lost_rollups(rig):
    with begin(rig.engine) as connection:
        connection.execute(text(f"DELETE FROM rollups WHERE slot_us = {T0 + 4 * HOUR_US}"))
    assert kinds(checked(rig)) == [("sums", f"hour {T0 + 4 * HOUR_US}")]


def test_what_was_given_up_is_not_missed(database, rig):
    rig.settings.cuts_max_age_h = 3.5
    assert len(rig.step().given_up) == 2
    report = checked(rig)
    assert report.problems == []
    assert (report.cuts, report.hours) == (15, 3)


def test_records_under_way_are_a_note(rig):
    rig.feed(cuts_message([make_cut(16, start_us=T0 + 4 * HOUR_US)]))
    report = checked(rig)
    assert report.problems == []
    assert any("under way" in note for note in report.notes)
    assert any("1 queue records" in note for note in report.notes)


# -- the commands


def test_commands_say_what_is_true(rig, sla):
    status = json.loads(sla("status", "-o", "json").stdout)
    assert [(kind["kind"], kind["files"]) for kind in status["kinds"]] == [
        ("cuts", 5),
        ("rollups", 3),
        ("missed", 3),
    ]
    assert (status["missing"], status["orphans"]) == ([], [])
    done = sla("verify")
    assert done.exit_code == 0
    assert "11 files are whole" in done.stdout
    done = sla("compact")
    assert done.exit_code == 0
    assert "5 files merged into cuts/" in done.stdout
    assert "files-merged" not in done.stdout  # a log line, which would break -o json
    assert "no files to merge" in sla("compact").stdout
    table = sla("status").stdout
    assert "replaced files" in table
    assert all(len(line) <= 80 for line in table.splitlines()[1:])
    assert json.loads(sla("verify", "-o", "json").stdout)["cuts"] == 25


def test_commands_name_what_is_wrong_and_fail(rig, sla):
    [first, second, *_] = of_kind(rig)
    rig.files.remove(first.path)
    os.truncate(rig.parquet_dir / second.path, 10)
    assert f"missing: {first.path}" in sla("status").stdout
    done = sla("verify")
    assert done.exit_code == 1
    assert f"missing: {first.path}" in done.stderr
    assert f"sums: hour from {formatting.when(T0)}: files of cuts" in done.stderr  # JSON has it in us
    assert f"damaged: {second.path}: it has 10 bytes" in done.stderr
    told = json.loads(sla("verify", "-o", "json").stdout)
    assert [problem["kind"] for problem in told["problems"]][:2] == ["missing", "damaged"]
    done = sla("compact")
    assert done.exit_code == 1
    assert f"damaged: {first.path}" in done.stderr


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("SLA_CONFIG", raising=False)
    path = tmp_path / "sla.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\n')
    for command in ("status", "compact", "verify"):
        done = CliRunner().invoke(
            cli, ["storage", command, "--config", str(path)], obj=Client("http://127.0.0.1:1")
        )
        assert done.exit_code == 69, command
        assert "no server has been started here yet" in done.stderr
    assert not (tmp_path / "data").exists()
