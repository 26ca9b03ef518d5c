"""``sla queue`` on real files: figures, records, damage; nothing is written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.format import DATA_START
from sla_server.cli.main import cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    queue = DiskQueue(
        QueueSettings(data_path=tmp_path / "q", data_bytes=1 << 16, entries=64, reserve_entries=4),
        helper=False,
    )
    queue.put(b"first", destination=b"mail", kind=5)
    queue.put(b"second")
    queue.retry(queue.lock(1)[0].seq)
    queue.close()
    return tmp_path / "q"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["queue", *map(str, arguments)])


def test_stat(path: Path) -> None:
    figures = json.loads(run("stat", path, "-o", "json").stdout)
    assert (figures["records"], figures["oldest_seq"], figures["next_seq"], figures["retried"]) == (
        2,
        1,
        3,
        1,
    )
    assert figures["closed_cleanly"]
    shown = run("stat", path).stdout
    assert "records            2" in shown
    assert "closed cleanly     yes" in shown


def test_dump(path: Path) -> None:
    rows = [json.loads(line) for line in run("dump", path, "-o", "json", "--data").stdout.splitlines()]
    assert [bytes.fromhex(row["data"]) for row in rows] == [b"first", b"second"]
    assert (rows[0]["destination"], rows[0]["type"], rows[0]["retries"]) == ("mail", 5, 1)
    shown = run("dump", path, "--limit", 1)
    assert "seq 1" in shown.stdout
    assert "1 more" in shown.stderr
    assert "destination -  retries 0" in run("dump", path).stdout  # the second has none


def test_recover_names_damage_and_writes_nothing(path: Path) -> None:
    clean = run("recover", "--dry-run", path)
    assert clean.exit_code == 0, clean.output
    raw = bytearray(path.read_bytes())
    raw[DATA_START + 60] ^= 1
    path.write_bytes(raw)
    before = [hashlib.sha256(file.read_bytes()).digest() for file in sorted(path.parent.iterdir())]
    damaged = run("recover", "--dry-run", path)
    assert damaged.exit_code == 1
    assert f"damage at byte {DATA_START}, 256 bytes" in damaged.stdout
    assert [hashlib.sha256(file.read_bytes()).digest() for file in sorted(path.parent.iterdir())] == before


def test_recover_asks_for_the_dry_run(path: Path) -> None:
    assert run("recover", path).exit_code == 2


def test_beside_a_living_owner(tmp_path: Path) -> None:
    queue = DiskQueue(QueueSettings(data_path=tmp_path / "q", data_bytes=1 << 16, entries=64), helper=False)
    queue.put(b"alive")
    assert json.loads(run("stat", tmp_path / "q", "-o", "json").stdout)["records"] == 1
    queue.close()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello " * 4000)
    refused = run("stat", tmp_path / "text")
    assert refused.exit_code != 0
    assert "not a disk queue" in refused.output + str(refused.exception)


def test_a_queue_over_several_files_needs_all_of_them(tmp_path: Path) -> None:
    files = [tmp_path / "q0", tmp_path / "q1"]
    settings = QueueSettings(data_path=files[0], more_paths=(files[1],), data_bytes=1 << 16, entries=64)
    queue = DiskQueue(settings, helper=False)
    queue.put_many([bytes([number]) * 9000 for number in range(5)])
    queue.close()
    figures = json.loads(run("stat", files[0], "--part", files[1], "-o", "json").stdout)
    assert figures["records"] == 5
    assert run("recover", "--dry-run", files[0], "--part", files[1]).exit_code == 0
    alone = run("stat", files[0])
    assert alone.exit_code == 65
    assert "one of the 2 data files" in alone.output
